/* Pages whose whole content follows from one 64-bit key, so that a test can tell any wrong byte without a copy.
 * Key 0 is the page of zeros. The other keys give, in turn, pages that compress well, badly, and not at all. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define MIB (1UL << 20)

static inline uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

static inline uint64_t page_word(uint64_t key, unsigned i)
{
	if (!key)
		return 0;
	switch (mix(key) & 7) {
	case 0:
		return key;				/* same-filled */
	case 1:
		return mix(key + i);			/* random */
	case 2:
	case 3:
		return i < WORDS / 2 ? key + i : 0;	/* half counting, half zeros */
	case 4:
	case 5:
		return (mix(key) >> 40) + 16 * i;	/* like pointers */
	default:
		return mix(key ^ (i & ~7U)) & 0x0f1f0f1f0f1f0f1fULL;	/* like text */
	}
}

__attribute__((unused)) static void page_fill(void *page, uint64_t key)
{
	for (unsigned i = 0; i < WORDS; i++)
		((volatile uint64_t *)page)[i] = page_word(key, i);
}

/* The offset of the first wrong word, or -1. */
__attribute__((unused)) static long page_check(const void *page, uint64_t key)
{
	for (unsigned i = 0; i < WORDS; i++)
		if (((const volatile uint64_t *)page)[i] != page_word(key, i))
			return 8 * i;
	return -1;
}

/* Says what is wrong with a page, in one write, without the heap: a forked child may call it too. */
__attribute__((unused)) static void page_report(const void *page, uint64_t key, const char *who)
{
	char text[1024];
	long at = page_check(page, key);
	unsigned first = at < 0 ? 0 : at / 8;
	int n = snprintf(text, sizeof text, "MISMATCH %s pid %d page %p key %016llx first wrong byte %ld\n", who,
			 (int)getpid(), page, (unsigned long long)key, at);

	for (unsigned i = first; i < first + 8 && i < WORDS; i++)
		n += snprintf(text + n, sizeof text - n, "  +%04x expected %016llx actual %016llx\n", 8 * i,
			      (unsigned long long)page_word(key, i),
			      (unsigned long long)((const volatile uint64_t *)page)[i]);
	if (write(STDERR_FILENO, text, n) < 0)
		_exit(2);
}

/* An array of pages: page i holds the content of key base + i. */
__attribute__((unused)) static void pages_fill(char *memory, size_t pages, uint64_t base)
{
	for (size_t i = 0; i < pages; i++)
		page_fill(memory + i * PAGE, base + i);
}

__attribute__((unused)) static int pages_wrong(const char *memory, size_t pages, uint64_t base, const char *who)
{
	for (size_t i = 0; i < pages; i++)
		if (page_check(memory + i * PAGE, base + i) >= 0) {
			page_report(memory + i * PAGE, base + i, who);
			return 1;
		}
	return 0;
}

__attribute__((unused)) static void pages_expect(const char *memory, size_t pages, uint64_t base, const char *who)
{
	if (pages_wrong(memory, pages, base, who))
		_exit(1);
}

__attribute__((unused)) static void die(const char *what)
{
	perror(what);
	_exit(2);
}

/* Fresh memory at that address, in place of what is there. */
__attribute__((unused)) static char *map_at(char *address, size_t len)
{
	char *got = mmap(address, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (got != address)
		die("mmap");
	return got;
}

/* madvise by the instruction itself, which the agent does not see; the kernel's result, a negative errno if it is an error. */
__attribute__((unused)) static long madvise_raw(void *at, size_t len, int advice)
{
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_madvise), "D"(at), "S"(len), "d"((long)advice) : "rcx", "r11", "memory");
	return result;
}

__attribute__((unused)) static void pages_advise_raw(char *at, size_t pages, int advice)
{
	long result = madvise_raw(at, pages * PAGE, advice);

	if (result) {
		errno = -result;
		die("raw madvise");
	}
}

__attribute__((unused)) static void pages_advise(char *at, size_t pages, int advice)
{
	if (madvise(at, pages * PAGE, advice))
		die("madvise");
}

/* How many of these pages of the calling process are not there: moved out, discarded or never touched. Guards are there. */
__attribute__((unused)) static size_t pages_absent(const char *at, size_t pages)
{
	/* Opened each time: a forked child would go on looking at its parent. */
	int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	size_t absent = 0;

	for (size_t done = 0; done < pages;) {
		uint64_t words[512];
		size_t some = pages - done < 512 ? pages - done : 512;

		if (pread(pagemap, words, some * 8, ((uintptr_t)at / PAGE + done) * 8) != (ssize_t)some * 8)
			die("pagemap");
		for (size_t i = 0; i < some; i++)
			absent += !(words[i] >> 62);
		done += some;
	}
	close(pagemap);
	return absent;
}

/* Fails unless one of these pages at least is out: else the case that the test is about does not occur. */
__attribute__((unused)) static void pages_expect_out(const char *at, size_t pages, const char *when)
{
	if (!pages_absent(at, pages)) {
		fprintf(stderr, "of %zu pages none is out %s\n", pages, when);
		_exit(1);
	}
}

#define GUARD_INSTALL 102
#define GUARD_REMOVE 103

/* Whether the kernel has guards (Linux 6.13). `page` is discarded. */
__attribute__((unused)) static int has_guards(char *page)
{
	if (!madvise(page, PAGE, GUARD_INSTALL)) {
		pages_advise(page, 1, GUARD_REMOVE);
		return 1;
	}
	if (errno != EINVAL)
		die("MADV_GUARD_INSTALL");
	fprintf(stderr, "this kernel has no guards\n");
	return 0;
}

/* Where a thread goes on that touches what it may not, once catch_faults() was called. */
static __thread sigjmp_buf after_fault __attribute__((unused));

__attribute__((unused)) static void on_fault(int number)
{
	siglongjmp(after_fault, number);
}

__attribute__((unused)) static void catch_faults(void)
{
	if (signal(SIGSEGV, on_fault) == SIG_ERR)
		die("signal");
}

__attribute__((unused)) static int is_guarded(const char *page)
{
	if (sigsetjmp(after_fault, 1))
		return 1;
	(void)*(const volatile char *)page;
	return 0;
}

__attribute__((unused)) static uint64_t microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}

__attribute__((unused)) static unsigned long argument(int argc, char **argv, int index, unsigned long otherwise)
{
	return argc > index ? strtoul(argv[index], NULL, 0) : otherwise;
}

#endif

/* victim SEED SECONDS MIB SCRATCH [WITHOUT]: does to its memory whatever the system allows, at random by SEED, and checks every
 * page that it reads against a shadow.
 *
 * 1. Each thread has a region of its own, beside those of the others. A page's contents follow from its key.
 * 2. The keys lie in shared memory, which is not managed, so that they cannot go wrong with what they check. A forked child
 *    copies those of its thread's region.
 * 3. A wrong word ends everything with status 3, and is reported with seed, operation number and the page's history.
 * 4. An operation that the system refuses changes nothing and is counted. WITHOUT names operations to leave out (a,b,c).
 * 5. The program ends after SECONDS with status 0 and prints one line per operation: NAME DONE REFUSED. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define THREADS 3
#define DEPTH 3
#define HISTORY 6
#define LAST_ADDRESS 0x7ffffffff000UL

struct page {
	uint64_t key;			/* 0: zeros */
	uint32_t maybe;			/* after MADV_FREE: the key's contents, or zeros */
	uint32_t when[HISTORY];		/* operation numbers, the last first, */
	uint8_t what[HISTORY];		/* and operations, plus one */
};

struct region {
	char *memory;
	size_t pages;
	struct page *shadow;
	uint64_t random;
	uint32_t number;		/* of the operation */
	int op, thread, depth;
	char *alt;			/* a signal stack, in managed memory */
};

struct counts { uint64_t done, refused; };

static struct counts *counts;		/* shared by all processes */
static uint64_t seed, versions;
static double end;
static const char *scratch, *self;
static struct region regions[THREADS];

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

static uint64_t pick(struct region *r, uint64_t below)
{
	return mix(r->random++) % below;
}

/* In turn same-filled, random, half zeros, and what compresses well. */
static uint64_t word(uint64_t key, unsigned i)
{
	switch (key & 3) {
	case 0: return key;
	case 1: return mix(key + i);
	case 2: return i < WORDS / 2 ? key + i : 0;
	default: return (mix(key) >> 40) + 16 * i;
	}
}

static uint64_t expected(uint64_t key, unsigned i)
{
	return key ? word(key, i) : 0;
}

static void fill(void *page, uint64_t key)
{
	for (unsigned i = 0; i < WORDS; i++)
		((volatile uint64_t *)page)[i] = expected(key, i);
}

static long differs(const void *page, uint64_t key)
{
	for (unsigned i = 0; i < WORDS; i++)
		if (((const volatile uint64_t *)page)[i] != expected(key, i))
			return i;
	return -1;
}

static const char *op_name(int op);

static void fail(const char *what)
{
	fprintf(stderr, "victim: FAILED: %s: %s (seed %lu)\n", what, strerror(errno), seed);
	_exit(4);
}

static void mismatch(struct region *r, size_t p, const void *at, long i, const char *how)
{
	struct page *s = &r->shadow[p];
	char text[1024];
	int n = snprintf(text, sizeof text,
			 "victim: MISMATCH seed %lu thread %d depth %d operation %u (%s, %s) page %zu of %zu at %p word %ld: %lx"
			 " instead of %lx%s; history:", seed, r->thread, r->depth, r->number, op_name(r->op), how, p, r->pages,
			 r->memory + p * PAGE, i, ((const uint64_t *)at)[i], expected(s->key, i), s->maybe ? " or 0" : "");
	for (int h = 0; h < HISTORY && s->what[h]; h++)
		n += snprintf(text + n, sizeof text - n, " %u %s", s->when[h], op_name(s->what[h] - 1));
	text[n++] = '\n';
	if (write(2, text, n) < 0)
		_exit(5);
	_exit(3);
}

static void note(struct region *r, size_t p)
{
	struct page *s = &r->shadow[p];

	memmove(s->when + 1, s->when, sizeof s->when - sizeof *s->when);
	memmove(s->what + 1, s->what, sizeof s->what - sizeof *s->what);
	s->when[0] = r->number;
	s->what[0] = r->op + 1;
}

/* Checks bytes that are said to be those of page p. */
static void check_bytes(struct region *r, size_t p, const void *at, const char *how)
{
	struct page *s = &r->shadow[p];
	long i = differs(at, s->key);

	if (i >= 0 && s->maybe && differs(at, 0) < 0) {
		s->key = 0;
		i = -1;
	}
	if (i >= 0)
		mismatch(r, p, at, i, how);
}

static void check(struct region *r, size_t p)
{
	check_bytes(r, p, r->memory + p * PAGE, "read");
}

static void rewrite(struct region *r, size_t p)
{
	struct page *s = &r->shadow[p];

	s->key = mix(seed ^ __atomic_add_fetch(&versions, 1, __ATOMIC_RELAXED) ^ ((uint64_t)getpid() << 32)) | 4;
	s->maybe = 0;
	fill(r->memory + p * PAGE, s->key);
	note(r, p);
}

static void zeros(struct region *r, size_t first, size_t count)
{
	for (size_t p = first; p < first + count; p++) {
		r->shadow[p].key = r->shadow[p].maybe = 0;
		note(r, p);
	}
}

static void check_all(struct region *r)
{
	for (size_t p = 0; p < r->pages; p++)
		check(r, p);
}

static size_t run(struct region *r, size_t most, size_t *first)
{
	size_t count = 1 + pick(r, most < r->pages ? most : r->pages);

	*first = pick(r, r->pages - count + 1);
	return count;
}

static void *map(size_t pages, int protection)
{
	return mmap(NULL, pages * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static int wait_for(pid_t child)
{
	int status;

	while (waitpid(child, &status, __WALL) < 0)
		if (errno != EINTR)
			fail("waitpid");
	if (WIFEXITED(status) && WEXITSTATUS(status) >= 3)
		_exit(WEXITSTATUS(status));		/* it has reported */
	return status;
}

/* --- plain operations; each returns 0 if done, -1 if refused --------------------------------------------------- */

static int do_write(struct region *r)
{
	size_t first, count = run(r, 64, &first);

	for (size_t p = first; p < first + count; p++)
		rewrite(r, p);
	return 0;
}

static int do_read(struct region *r)
{
	size_t first, count = run(r, 256, &first);

	for (size_t p = first; p < first + count; p++)
		check(r, p);
	return 0;
}

static int do_read_scattered(struct region *r)
{
	for (int i = 0; i < 64; i++)
		check(r, pick(r, r->pages));
	return 0;
}

static int advise(struct region *r, int advice, size_t most)
{
	size_t first, count = run(r, most, &first);

	return madvise(r->memory + first * PAGE, count * PAGE, advice);
}

static int do_dontneed(struct region *r)
{
	size_t first, count = run(r, 64, &first);

	if (madvise(r->memory + first * PAGE, count * PAGE, MADV_DONTNEED))
		return -1;
	zeros(r, first, count);
	return 0;
}

/* Each page is written first, and so is this process's own. Of one that it shares, the kernel (Linux 6.18) may take the contents from the
 * other process, too: if a call that pins pages has read it there, its copy passes for unchanged (docs/decisions/0061). */
static int do_free(struct region *r)
{
	size_t first, count = run(r, 64, &first);

	for (size_t p = first; p < first + count; p++)
		rewrite(r, p);
	if (pick(r, 2))
		madvise(r->memory + first * PAGE, count * PAGE, 21);
	if (madvise(r->memory + first * PAGE, count * PAGE, MADV_FREE))
		return -1;
	for (size_t p = first; p < first + count; p++) {
		r->shadow[p].maybe = 1;
		note(r, p);
	}
	return 0;
}

static int do_willneed(struct region *r) { return advise(r, MADV_WILLNEED, 128); }
static int do_cold(struct region *r) { return advise(r, 20, 128); }
static int do_pageout(struct region *r) { return advise(r, 21, 256); }
static int do_hugepage(struct region *r) { return advise(r, MADV_HUGEPAGE, 1024); }
static int do_nohugepage(struct region *r) { return advise(r, MADV_NOHUGEPAGE, 1024); }
static int do_populate_read(struct region *r) { return advise(r, 22, 64); }
static int do_populate_write(struct region *r) { return advise(r, 23, 64); }
static int do_collapse(struct region *r) { return advise(r, 25, 1024); }
static int do_mergeable(struct region *r) { return advise(r, MADV_MERGEABLE, 64); }
static int do_unmergeable(struct region *r) { return advise(r, MADV_UNMERGEABLE, 1024); }

/* Whether a run that a child must not have inherited is mapped there as it was. Another mapping may lie in the hole: that of the
 * agent, which has guards around its areas and so never covers a run exactly. */
static int is_inherited(char *at, size_t count)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end, first = (unsigned long)at, last = first + count * PAGE, covered = 0;
	char line[512], rights[8];

	while (maps && fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx %7s", &start, &end, rights) == 3 && start >= first && end <= last && rights[3] == 'p' &&
		    rights[1] == 'w')
			covered += end - start;
	if (maps)
		fclose(maps);
	return covered == count * PAGE;
}

/* MADV_DONTFORK and back: a child forked meanwhile has no such pages, and must not look. */
static int do_dontfork(struct region *r)
{
	size_t first, count = run(r, 64, &first);
	char *at = r->memory + first * PAGE;
	unsigned char resident[64];
	pid_t child;

	if (madvise(at, count * PAGE, MADV_DONTFORK))
		return -1;
	child = fork();
	if (!child) {
		if (mincore(at, count * PAGE, resident) && errno == ENOMEM)
			_exit(0);
		if (!is_inherited(at, count))
			_exit(0);
		fprintf(stderr, "victim: MISMATCH seed %lu: a child has inherited %p, %zu pages\n", seed, at, count);
		_exit(3);
	}
	if (child > 0)
		wait_for(child);
	return madvise(at, count * PAGE, MADV_DOFORK);
}

static int do_wipeonfork(struct region *r)
{
	size_t first, count = run(r, 64, &first);
	char *at = r->memory + first * PAGE;
	pid_t child;

	if (syscall(SYS_madvise, at, count * PAGE, MADV_WIPEONFORK))
		return -1;
	child = fork();
	if (!child) {
		for (size_t p = 0; p < count; p++)
			if (differs(at + p * PAGE, 0) >= 0)
				mismatch(r, first + p, at + p * PAGE, differs(at + p * PAGE, 0), "wiped in the child");
		_exit(0);
	}
	if (child > 0)
		wait_for(child);
	return syscall(SYS_madvise, at, count * PAGE, MADV_KEEPONFORK);
}

static int do_guard(struct region *r)
{
	size_t first, count = run(r, 16, &first);
	char *at = r->memory + first * PAGE;

	if (madvise(at, count * PAGE, 102))
		return -1;
	zeros(r, first, count);
	return madvise(at, count * PAGE, 103);
}

/* Advice that changes nothing, or that private memory refuses. */
static int do_advices(struct region *r)
{
	static const int advices[] = { MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_DONTDUMP, MADV_DODUMP, MADV_REMOVE };

	return advise(r, advices[pick(r, sizeof advices / sizeof *advices)], 256);
}

/* MADV_DONTNEED_LOCKED: like MADV_DONTNEED, for locked pages, too. */
static int do_dontneed_locked(struct region *r)
{
	size_t first, count = run(r, 8, &first);
	char *at = r->memory + first * PAGE;
	int locked = !mlock(at, count * PAGE), refused = madvise(at, count * PAGE, 24);

	if (!refused)
		zeros(r, first, count);
	for (size_t p = first; p < first + count; p++)
		check(r, p);
	if (locked)
		munlock(at, count * PAGE);
	return refused;
}

/* The same advice from another process: the child gives it to its parent. */
static int do_process_madvise(struct region *r)
{
	static const int advices[] = { MADV_WILLNEED, 20, 21, 25 };
	size_t first, count = run(r, 128, &first);
	struct iovec range = { r->memory + first * PAGE, count * PAGE };
	int advice = advices[pick(r, 4)], file = syscall(SYS_pidfd_open, getpid(), 0), status;
	pid_t child;

	if (file < 0)
		return -1;
	child = fork();
	if (!child)
		_exit(syscall(SYS_process_madvise, file, &range, 1, advice, 0) < 0);
	close(file);
	if (child < 0)
		return -1;
	do_read_scattered(r);
	status = wait_for(child);
	for (size_t p = first; p < first + count; p++)
		check(r, p);
	return status ? -1 : 0;
}

/* --- the layout ---------------------------------------------------------------------------------------------------- */

/* Whether a range is one mapping. */
static int is_one_mapping(char *at, size_t length)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end, first = (unsigned long)at;
	char line[512];
	int found = 0;

	while (maps && !found && fgets(line, sizeof line, maps))
		found = sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= first && end >= first + length;
	if (maps)
		fclose(maps);
	return found;
}

/* Moves the whole region to another place. Of several mappings Linux since 6.17 moves the first ones and then refuses one that is
 * registered with a userfaultfd: so it is not asked to, and what has moved all the same is moved back. */
static int do_mremap_move(struct region *r)
{
	char *to, *moved;
	unsigned char resident;

	if (!is_one_mapping(r->memory, r->pages * PAGE))
		return -1;
	to = map(r->pages, PROT_NONE);
	if (to == MAP_FAILED)
		return -1;
	moved = mremap(r->memory, r->pages * PAGE, r->pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	if (moved == MAP_FAILED) {
		if (errno != EFAULT && errno != EINVAL && errno != ENOMEM)
			fail("mremap");
		for (size_t p = 0; p < r->pages; p++) {
			char *at = r->memory + p * PAGE;

			if (mincore(at, PAGE, &resident) && errno == ENOMEM &&
			    mremap(to + p * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at)
				fail("mremap back");
		}
		munmap(to, r->pages * PAGE);
		return -1;
	}
	r->memory = moved;
	return 0;
}

static int do_mremap_grow(struct region *r)
{
	size_t more = 1 + pick(r, 64);
	char *moved = mremap(r->memory, r->pages * PAGE, (r->pages + more) * PAGE, MREMAP_MAYMOVE);

	if (moved == MAP_FAILED)
		return -1;
	r->memory = moved;
	for (size_t p = r->pages; p < r->pages + more; p++)
		if (differs(moved + p * PAGE, 0) >= 0) {
			r->shadow[p].key = 0;
			mismatch(r, p, moved + p * PAGE, differs(moved + p * PAGE, 0), "new");
		}
	moved = mremap(r->memory, (r->pages + more) * PAGE, r->pages * PAGE, 0);
	if (moved != r->memory)
		munmap(r->memory + r->pages * PAGE, more * PAGE);
	return 0;
}

/* Gives the end of the region up, and has the page before it grow over the place at once: no contents come back. */
static int do_mremap_shrink(struct region *r)
{
	size_t count = 1 + pick(r, r->pages < 64 ? r->pages - 1 : 63), left = r->pages - count;
	char *last = r->memory + (left - 1) * PAGE, *copy;

	if (!is_one_mapping(last, (1 + count) * PAGE) || mremap(last, (1 + count) * PAGE, PAGE, 0) == MAP_FAILED)
		return -1;
	if (mremap(last, PAGE, (1 + count) * PAGE, 0) == MAP_FAILED) {
		/* Another thread has mapped something there. */
		copy = map(r->pages, PROT_READ | PROT_WRITE);
		if (copy == MAP_FAILED)
			fail("mmap");
		memcpy(copy, r->memory, left * PAGE);
		munmap(r->memory, left * PAGE);
		r->memory = copy;
	}
	zeros(r, left, count);
	return 0;
}

/* Moves a run away, leaving its range mapped, and back again. */
static int do_dontunmap(struct region *r)
{
	size_t first, count = run(r, 64, &first);
	char *at = r->memory + first * PAGE;
	char *away = mremap(at, count * PAGE, count * PAGE, MREMAP_MAYMOVE | 4, NULL);

	if (away == MAP_FAILED)
		return -1;
	for (size_t p = 0; p < count; p++) {
		check_bytes(r, first + p, away + p * PAGE, "moved away");
		if (differs(at + p * PAGE, 0) >= 0)
			mismatch(r, first + p, at + p * PAGE, differs(at + p * PAGE, 0), "left behind");
	}
	if (mremap(away, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at)
		fail("mremap back");
	return 0;
}

static int do_map_fixed(struct region *r)
{
	size_t first, count = run(r, 64, &first);
	char *at = r->memory + first * PAGE;

	if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
		return -1;
	zeros(r, first, count);
	return 0;
}

/* Memory of another kind lies over a run for a while: shared, or of a file. */
static int do_map_over(struct region *r)
{
	size_t first, count = run(r, 32, &first);
	char *at = r->memory + first * PAGE;
	int file = pick(r, 2) ? syscall(SYS_memfd_create, "over", 0) : -1;
	int flags = MAP_FIXED | (file < 0 || pick(r, 2) ? MAP_SHARED : MAP_PRIVATE) | (file < 0 ? MAP_ANONYMOUS : 0);

	if (file >= 0 && ftruncate(file, count * PAGE))
		fail("ftruncate");
	if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE, flags, file, 0) != at) {
		close(file);
		return -1;
	}
	for (size_t p = first; p < first + count; p++) {
		if (differs(at + (p - first) * PAGE, 0) >= 0)
			mismatch(r, p, at + (p - first) * PAGE, differs(at + (p - first) * PAGE, 0), "laid over");
		rewrite(r, p);
	}
	madvise(at, count * PAGE, 21);
	for (size_t p = first; p < first + count; p++)
		check(r, p);
	if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
		fail("mmap back");
	zeros(r, first, count);
	if (file >= 0)
		close(file);
	return 0;
}

static int do_munmap(struct region *r)
{
	size_t first, count = run(r, 64, &first);
	char *at = r->memory + first * PAGE;

	/* Held by PROT_NONE, so that no other thread's mapping can come between. */
	if (mmap(at, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
		return -1;
	if (mprotect(at, count * PAGE, PROT_READ | PROT_WRITE))
		fail("mprotect");
	zeros(r, first, count);
	return 0;
}

/* The kernel announces what lies from a page on up to the end of all addresses as unmapped, and then finds that there is less memory than
 * that. (It would do it under vm.overcommit_memory=1, and where libraries happen to lie close to the end.) */
static int do_refused(struct region *r)
{
	size_t first, count = run(r, 1, &first);
	char *at = r->memory + first * PAGE, mode = 0;
	int file = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
	struct sysinfo machine;

	(void)count;
	if (file < 0 || read(file, &mode, 1) != 1 || mode == '1') {
		close(file);
		return -1;
	}
	close(file);
	if (sysinfo(&machine) || LAST_ADDRESS - (uintptr_t)at <= 2 * (machine.totalram + machine.totalswap) * machine.mem_unit)
		return -1;
	if (mmap(at, LAST_ADDRESS - (uintptr_t)at, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED)
		fail("mmap of all that is there");
	return 0;
}

static int do_mprotect(struct region *r)
{
	size_t first, count = run(r, 64, &first);
	char *at = r->memory + first * PAGE;

	if (mprotect(at, count * PAGE, pick(r, 2) ? PROT_NONE : PROT_READ))
		return -1;
	usleep(pick(r, 2000));
	if (mprotect(at, count * PAGE, PROT_READ | PROT_WRITE))
		fail("mprotect");
	for (size_t p = first; p < first + count; p++)
		check(r, p);
	return 0;
}

/* All of it or a part comes to be executable, or no longer. */
static int do_executable(struct region *r)
{
	size_t first, count = run(r, 256, &first);

	if (pick(r, 4) == 0)
		first = 0, count = r->pages;
	return mprotect(r->memory + first * PAGE, count * PAGE, PROT_READ | PROT_WRITE | (pick(r, 2) ? PROT_EXEC : 0));
}

static int do_brk(struct region *r)
{
	size_t count = 1 + pick(r, 64);
	char *at;
	static char *limit;

	if (r->thread)
		return -1;			/* one thread's alone */
	at = (char *)(((uintptr_t)syscall(SYS_brk, 0) + PAGE - 1) & -PAGE);
	limit = (char *)syscall(SYS_brk, at + count * PAGE);
	if (limit != at + count * PAGE)
		return -1;
	for (size_t p = 0; p < count; p++)
		fill(at + p * PAGE, seed | 1);
	madvise(at, count * PAGE, 21);
	for (size_t p = 0; p < count; p++)
		if (differs(at + p * PAGE, seed | 1) >= 0)
			mismatch(r, 0, at + p * PAGE, differs(at + p * PAGE, seed | 1), "brk");
	syscall(SYS_brk, at);
	return 0;
}

static int do_mlock(struct region *r)
{
	size_t first, count = run(r, 8, &first);
	char *at = r->memory + first * PAGE;

	if (mlock(at, count * PAGE))
		return -1;
	for (size_t p = first; p < first + count; p++)
		check(r, p);
	return munlock(at, count * PAGE);
}

/* --- processes ----------------------------------------------------------------------------------------------------- */

static void some(struct region *r, int operations);

/* A copy of the keys for a child, made before it is forked: the parent changes its own at once. */
static struct page *copy_shadow(struct region *r)
{
	size_t size = (r->pages + 64) * sizeof *r->shadow;
	struct page *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (copy == MAP_FAILED)
		fail("mmap of a shadow");
	return memcpy(copy, r->shadow, size);
}

/* What a child does: it checks what it has inherited, changes its own, and checks again. */
static void child_work(struct region *r)
{
	r->depth++;
	r->random = mix(r->random ^ r->depth);
	do_read(r);
	some(r, 4);
	check_all(r);
	_exit(0);
}

static int finish_child(struct region *r, pid_t child)
{
	if (child < 0)
		return -1;
	do_write(r);
	do_read_scattered(r);
	wait_for(child);
	return 0;
}

static int do_fork(struct region *r)
{
	pid_t child;

	struct page *copy;

	if (r->depth >= DEPTH)
		return -1;
	copy = copy_shadow(r);
	child = fork();
	if (!child) {
		r->shadow = copy;
		child_work(r);
	}
	munmap(copy, (r->pages + 64) * sizeof *copy);
	return finish_child(r, child);
}

static int do_raw_clone(struct region *r)
{
	struct page *copy = copy_shadow(r);
	pid_t child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);

	if (!child) {
		r->shadow = copy;
		r->depth++;
		check_all(r);
		_exit(0);
	}
	munmap(copy, (r->pages + 64) * sizeof *copy);
	return finish_child(r, child);
}

static int do_namespaces(struct region *r, int flags)
{
	/* The innermost process outlives one between that is killed, and this one goes on then. */
	struct page *copy = copy_shadow(r);
	pid_t child = fork();

	if (!child) {
		pid_t inner;

		r->shadow = copy;
		if (unshare(flags))
			_exit(1);
		do_read(r);
		inner = fork();
		if (!inner) {
			check_all(r);
			_exit(0);
		}
		if (inner > 0)
			wait_for(inner);
		_exit(0);
	}
	munmap(copy, (r->pages + 64) * sizeof *copy);
	return child < 0 ? -1 : wait_for(child) ? -1 : 0;
}

static int do_pidns(struct region *r) { return do_namespaces(r, CLONE_NEWUSER | CLONE_NEWPID); }
static int do_netns(struct region *r) { return do_namespaces(r, CLONE_NEWUSER | CLONE_NEWNET); }
static int do_mntns(struct region *r) { return do_namespaces(r, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS); }
static int do_userns(struct region *r) { return do_namespaces(r, CLONE_NEWUSER); }

static int do_vfork(struct region *r)
{
	static char *const argv[] = { "true", NULL };
	pid_t child = vfork();

	if (!child) {
		execv("/bin/true", argv);
		_exit(1);
	}
	return finish_child(r, child);
}

static int do_spawn(struct region *r)
{
	static char *const argv[] = { "true", NULL };
	extern char **environ;
	pid_t child;

	return posix_spawn(&child, "/bin/true", NULL, NULL, argv, environ) ? -1 : finish_child(r, child);
}

/* The program executes itself, and that itself: each checks a little memory of its own (see main). */
static int do_exec(struct region *r)
{
	pid_t child = fork();

	if (!child) {
		execl(self, self, "chain", pick(r, 2) ? "1" : "3", NULL);
		_exit(1);
	}
	return finish_child(r, child);
}

static int do_core(struct region *r)
{
	pid_t child = fork();

	if (!child) {
		struct rlimit limit = { 1 << 20, 1 << 20 };

		setrlimit(RLIMIT_CORE, &limit);
		if (chdir(scratch))
			_exit(1);
		abort();
	}
	return finish_child(r, child);
}

static int do_rlimit(struct region *r)
{
	struct page *copy = copy_shadow(r);
	pid_t child = fork();

	if (!child) {
		struct rlimit limit = { 16, 16 };

		r->shadow = copy;
		r->depth++;
		setrlimit(pick(r, 2) ? RLIMIT_NOFILE : RLIMIT_FSIZE, &limit);
		check_all(r);
		_exit(0);
	}
	munmap(copy, (r->pages + 64) * sizeof *copy);
	return finish_child(r, child);
}

/* --- system calls on evicted buffers ------------------------------------------------------------------------------- */

static int other_process(struct region *r, int poke)
{
	size_t first, count = run(r, 8, &first);
	static __thread char copy[8 * PAGE];
	int status = 0, ready[2], refused = 0;
	pid_t child, parent = getpid();

	if (pipe(ready))
		return -1;
	child = fork();
	if (!child) {
		/* Ends with its parent, which may be killed at any moment, or is gone already. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			alarm(1);
		madvise(r->memory, r->pages * PAGE, 21);
		if (write(ready[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	close(ready[1]);
	if (child < 0 || read(ready[0], copy, 1) != 1) {
		refused = -1;
	} else if (poke) {
		refused = ptrace(PTRACE_SEIZE, child, 0, 0) || ptrace(PTRACE_INTERRUPT, child, 0, 0) ? -1 : 0;
		if (!refused && waitpid(child, &status, __WALL) == child && WIFSTOPPED(status))
			for (size_t p = first; p < first + count; p++) {
				uint64_t is, want = expected(r->shadow[p].key, 5);

				errno = 0;
				is = ptrace(PTRACE_PEEKDATA, child, r->memory + p * PAGE + 40, 0);
				if (errno)
					refused = -1;	/* EIO is allowed as long as it is known to be */
				else if (is != want && !(r->shadow[p].maybe && !is))
					mismatch(r, p, r->memory + p * PAGE, 5, "peek");
			}
	} else {
		struct iovec from = { r->memory + first * PAGE, count * PAGE }, to = { copy, count * PAGE };
		ssize_t got = process_vm_readv(child, &to, 1, &from, 1, 0);

		if (got != (ssize_t)(count * PAGE))
			refused = -1;
		for (ssize_t p = 0; p < got / (ssize_t)PAGE; p++)
			check_bytes(r, first + p, copy + p * PAGE, "process_vm_readv");
	}
	/* It may have been killed, and collected, instead of having stopped. */
	if (child > 0 && (!status || WIFSTOPPED(status))) {
		kill(child, SIGKILL);
		wait_for(child);
	}
	close(ready[0]);
	return refused;
}

static int do_vm_readv(struct region *r) { return other_process(r, 0); }
static int do_ptrace(struct region *r) { return other_process(r, 1); }

/* Reads a byte of some pages of all that is mapped, by a call: another thread may unmap it meanwhile. */
static int do_scan(struct region *r)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end;
	char line[512], rights[5];

	if (!maps)
		return -1;
	while (fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 || *rights != 'r')
			continue;
		for (unsigned long at = start + pick(r, 64) * PAGE; at < end; at += 64 * PAGE) {
			char byte;
			struct iovec to = { &byte, 1 }, from = { (void *)at, 1 };

			process_vm_readv(getpid(), &to, 1, &from, 1, 0);
		}
	}
	return fclose(maps);
}

/* Sends a run out of evicted memory, and receives it into other evicted memory, which then has its contents. */
static int through(struct region *r, int in, int out, size_t first, size_t to, size_t count)
{
	char *from_at = r->memory + first * PAGE, *to_at = r->memory + to * PAGE;
	ssize_t sent, got = 0;

	madvise(from_at, count * PAGE, 21);
	madvise(to_at, count * PAGE, 21);
	sent = write(out, from_at, count * PAGE);
	while (sent > 0 && got < sent) {
		ssize_t n = read(in, to_at + got, sent - got);

		if (n <= 0)
			fail("read back");
		got += n;
	}
	if (sent != (ssize_t)(count * PAGE))
		fail("write");
	for (size_t p = 0; p < count; p++) {
		r->shadow[to + p].key = r->shadow[first + p].key;
		r->shadow[to + p].maybe = r->shadow[first + p].maybe;
		note(r, to + p);
		check(r, to + p);
	}
	return 0;
}

/* Two runs of the same length that do not overlap, of pages that are no MADV_FREE's. */
static int two_runs(struct region *r, size_t most, size_t *first, size_t *to, size_t *count)
{
	*count = 1 + pick(r, most);
	if (r->pages < 4 * *count)
		return -1;
	*first = pick(r, r->pages / 2 - *count);
	*to = r->pages / 2 + pick(r, r->pages / 2 - *count);
	for (size_t p = 0; p < *count; p++)
		if (r->shadow[*first + p].maybe)
			rewrite(r, *first + p);
	return 0;
}

static int do_pipe(struct region *r)
{
	size_t first, to, count;
	int ends[2];

	if (two_runs(r, 15, &first, &to, &count) || pipe(ends))
		return -1;
	through(r, ends[0], ends[1], first, to, count);
	close(ends[0]);
	close(ends[1]);
	return 0;
}

static int do_socket(struct region *r)
{
	size_t first, to, count;
	int ends[2];

	if (two_runs(r, 15, &first, &to, &count) || socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
		return -1;
	through(r, ends[0], ends[1], first, to, count);
	close(ends[0]);
	close(ends[1]);
	return 0;
}

static int temporary(int flags)
{
	return open(scratch, O_TMPFILE | O_RDWR | flags, 0600);
}

static int do_direct(struct region *r)
{
	size_t first, to, count;
	int file;

	if (two_runs(r, 32, &first, &to, &count) || (file = temporary(O_DIRECT)) < 0)
		return -1;
	madvise(r->memory + first * PAGE, count * PAGE, 21);
	if (pwrite(file, r->memory + first * PAGE, count * PAGE, 0) != (ssize_t)(count * PAGE))
		fail("O_DIRECT write");
	madvise(r->memory + to * PAGE, count * PAGE, 21);
	if (pread(file, r->memory + to * PAGE, count * PAGE, 0) != (ssize_t)(count * PAGE))
		fail("O_DIRECT read");
	close(file);
	for (size_t p = 0; p < count; p++) {
		r->shadow[to + p].key = r->shadow[first + p].key;
		r->shadow[to + p].maybe = 0;
		note(r, to + p);
		check(r, to + p);
	}
	return 0;
}

/* vmsplice, tee and splice: the pages of a pipe are the program's own, so they are read before they are changed. */
static int do_splice(struct region *r)
{
	size_t first, to, count;
	int one[2], two[2], file;
	static __thread char copy[8 * PAGE];

	if (two_runs(r, 8, &first, &to, &count) || pipe(one) || pipe(two) || (file = temporary(0)) < 0)
		return -1;
	struct iovec out = { r->memory + first * PAGE, count * PAGE };

	madvise(out.iov_base, out.iov_len, 21);
	if (vmsplice(one[1], &out, 1, 0) != (ssize_t)out.iov_len)
		fail("vmsplice");
	madvise(out.iov_base, out.iov_len, 21);
	if (tee(one[0], two[1], out.iov_len, 0) != (ssize_t)out.iov_len)
		fail("tee");
	if (splice(one[0], NULL, file, NULL, out.iov_len, 0) <= 0)
		fail("splice");
	for (size_t got = 0; got < out.iov_len;) {
		ssize_t n = read(two[0], copy + got, out.iov_len - got);

		if (n <= 0)
			fail("read from a pipe");
		got += n;
	}
	for (size_t p = 0; p < count; p++)
		check_bytes(r, first + p, copy + p * PAGE, "tee");
	close(file);
	for (int i = 0; i < 2; i++) {
		close(one[i]);
		close(two[i]);
	}
	return 0;
}

/* A ring with a registered buffer: the kernel pins the pages, which then must not leave. Those that it reads into are written first: of pages
 * that MADV_FREE was called for, the kernel (Linux 6.18) may take what it has read there itself (docs/decisions/0061). */
static int do_uring(struct region *r)
{
	size_t first, to, count;
	struct io_uring_params params = { 0 };
	struct iovec buffers[2];
	int ring, file, refused = -1;
	char *rings = MAP_FAILED;
	struct io_uring_sqe *entry = MAP_FAILED;

	if (two_runs(r, 8, &first, &to, &count) || (file = temporary(0)) < 0)
		return -1;
	ring = syscall(SYS_io_uring_setup, 2, &params);
	if (ring >= 0) {
		rings = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
		entry = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	}
	for (size_t p = to; p < to + count; p++)
		if (r->shadow[p].maybe)
			rewrite(r, p);
	buffers[0] = (struct iovec){ r->memory + first * PAGE, count * PAGE };
	buffers[1] = (struct iovec){ r->memory + to * PAGE, count * PAGE };
	madvise(buffers[0].iov_base, buffers[0].iov_len, 21);
	if (ring >= 0 && rings != MAP_FAILED && entry != MAP_FAILED &&
	    !syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, buffers, 2)) {
		for (int i = 0; i < 2; i++) {
			unsigned *tail = (unsigned *)(rings + params.sq_off.tail);
			unsigned *array = (unsigned *)(rings + params.sq_off.array);
			unsigned *head = (unsigned *)(rings + params.cq_off.head);
			unsigned *completed = (unsigned *)(rings + params.cq_off.tail);
			struct io_uring_cqe *done = (struct io_uring_cqe *)(rings + params.cq_off.cqes);

			madvise(buffers[i].iov_base, buffers[i].iov_len, 21);
			memset(&entry[i], 0, sizeof *entry);
			entry[i].opcode = i ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
			entry[i].fd = file;
			entry[i].addr = (uintptr_t)buffers[i].iov_base;
			entry[i].len = buffers[i].iov_len;
			entry[i].buf_index = i;
			array[*tail & 1] = i;
			__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
			if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
				fail("io_uring_enter");
			/* A stop ends the wait before the request is done. */
			while (__atomic_load_n(completed, __ATOMIC_ACQUIRE) == *head)
				if (syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 && errno != EINTR)
					fail("io_uring_enter");
			if (done[*head & 3].res != (int)buffers[i].iov_len) {
				fprintf(stderr, "victim: io_uring: %s of %zu bytes came to %d\n", i ? "read" : "write",
					buffers[i].iov_len, done[*head & 3].res);
				errno = done[*head & 3].res < 0 ? -done[*head & 3].res : EIO;
				fail("io_uring");
			}
			__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
		}
		for (size_t p = 0; p < count; p++) {
			r->shadow[to + p].key = r->shadow[first + p].key;
			r->shadow[to + p].maybe = 0;
			note(r, to + p);
			check(r, to + p);
		}
		refused = 0;
	}
	if (rings != MAP_FAILED)
		munmap(rings, PAGE);
	if (entry != MAP_FAILED)
		munmap(entry, PAGE);
	if (ring >= 0)
		close(ring);
	close(file);
	return refused;
}

/* --- signals and locks --------------------------------------------------------------------------------------------- */

static __thread struct region *handled;

static void handler(int number)
{
	int saved = errno;

	(void)number;
	if (handled)
		check(handled, mix(now() * 1e9) % handled->pages);
	errno = saved;
}

/* Handlers run on an evicted stack and touch evicted memory. */
static int do_signals(struct region *r)
{
	stack_t stack = { .ss_sp = r->alt, .ss_size = 16 * PAGE }, off = { .ss_flags = SS_DISABLE };

	if (sigaltstack(&stack, NULL))
		return -1;
	handled = r;
	for (int i = 0; i < 8; i++) {
		madvise(r->alt, 16 * PAGE, 21);
		madvise(r->memory, r->pages * PAGE / 4, 21);
		pthread_kill(pthread_self(), SIGUSR1);
	}
	handled = NULL;
	sigaltstack(&off, NULL);
	return 0;
}

/* A signal every millisecond while evicted memory is read. */
static int do_signal_storm(struct region *r)
{
	stack_t stack = { .ss_sp = r->alt, .ss_size = 16 * PAGE }, off = { .ss_flags = SS_DISABLE };
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1 };
	struct itimerspec each = { { 0, 1000000 }, { 0, 1000000 } };
	timer_t timer;

	event._sigev_un._tid = syscall(SYS_gettid);
	if (sigaltstack(&stack, NULL) || timer_create(CLOCK_MONOTONIC, &event, &timer))
		return -1;
	handled = r;
	timer_settime(timer, 0, &each, NULL);
	for (int i = 0; i < 4; i++) {
		madvise(r->memory, r->pages * PAGE / 4, 21);
		do_read_scattered(r);
	}
	timer_delete(timer);
	handled = NULL;
	sigaltstack(&off, NULL);
	return 0;
}

static void *dies_with_it(void *lock)
{
	pthread_mutex_lock(lock);
	madvise((void *)((uintptr_t)lock & -PAGE), PAGE, 21);
	return NULL;
}

static int do_robust(struct region *r)
{
	pthread_mutexattr_t attributes;
	pthread_mutex_t *lock = (pthread_mutex_t *)r->alt;
	pthread_t thread;
	struct timespec until;

	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(lock, &attributes);
	if (pthread_create(&thread, NULL, dies_with_it, lock))
		return -1;
	pthread_join(thread, NULL);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 20;
	if (pthread_mutex_timedlock(lock, &until) != EOWNERDEAD) {
		errno = EOWNERDEAD;
		fail("a dead thread's robust mutex");
	}
	pthread_mutex_consistent(lock);
	pthread_mutex_unlock(lock);
	pthread_mutex_destroy(lock);
	return 0;
}

/* --- the plan ------------------------------------------------------------------------------------------------------- */

static const struct {
	const char *name;
	int (*function)(struct region *);
	int weight;
} operations[] = {
	{ "write", do_write, 60 }, { "read", do_read, 60 }, { "read-scattered", do_read_scattered, 40 },
	{ "dontneed", do_dontneed, 10 }, { "free", do_free, 8 }, { "willneed", do_willneed, 3 }, { "cold", do_cold, 5 },
	{ "pageout", do_pageout, 12 }, { "hugepage", do_hugepage, 2 }, { "nohugepage", do_nohugepage, 2 },
	{ "populate-read", do_populate_read, 3 }, { "populate-write", do_populate_write, 3 }, { "collapse", do_collapse, 3 },
	{ "mergeable", do_mergeable, 1 }, { "unmergeable", do_unmergeable, 1 }, { "dontfork", do_dontfork, 2 },
	{ "advices", do_advices, 2 }, { "dontneed-locked", do_dontneed_locked, 2 }, { "process-madvise", do_process_madvise, 2 },
	{ "map-over", do_map_over, 3 }, { "mntns", do_mntns, 1 }, { "signal-storm", do_signal_storm, 1 },
	{ "wipeonfork", do_wipeonfork, 3 }, { "guard", do_guard, 4 }, { "mremap-move", do_mremap_move, 3 },
	{ "mremap-grow", do_mremap_grow, 3 }, { "mremap-shrink", do_mremap_shrink, 3 },
	{ "dontunmap", do_dontunmap, 3 }, { "map-fixed", do_map_fixed, 4 },
	{ "munmap", do_munmap, 4 }, { "refused", do_refused, 2 }, { "mprotect", do_mprotect, 4 }, { "executable", do_executable, 3 }, { "brk", do_brk, 2 },
	{ "mlock", do_mlock, 2 },
	{ "fork", do_fork, 6 }, { "raw-clone", do_raw_clone, 3 }, { "userns", do_userns, 1 }, { "netns", do_netns, 1 },
	{ "pidns", do_pidns, 1 }, { "vfork", do_vfork, 2 }, { "spawn", do_spawn, 2 }, { "exec", do_exec, 2 },
	{ "core", do_core, 1 }, { "rlimit", do_rlimit, 1 }, { "vm-readv", do_vm_readv, 2 }, { "ptrace", do_ptrace, 2 },
	{ "scan", do_scan, 2 },
	{ "pipe", do_pipe, 4 }, { "socket", do_socket, 4 }, { "direct", do_direct, 3 }, { "splice", do_splice, 3 },
	{ "uring", do_uring, 3 }, { "signals", do_signals, 3 }, { "robust", do_robust, 2 },
};
#define OPERATIONS (sizeof operations / sizeof *operations)

static int weights[OPERATIONS], total;

static const char *op_name(int op)
{
	return operations[op].name;
}

static void one(struct region *r)
{
	int at = pick(r, total), op = 0;

	while (at >= weights[op])
		at -= weights[op++];
	r->number++;
	r->op = op;
	if (operations[op].function(r))
		__atomic_add_fetch(&counts[op].refused, 1, __ATOMIC_RELAXED);
	else
		__atomic_add_fetch(&counts[op].done, 1, __ATOMIC_RELAXED);
}

static void some(struct region *r, int how_many)
{
	while (how_many-- && now() < end)
		one(r);
}

static void *thread(void *region)
{
	while (now() < end)
		one(region);
	check_all(region);
	return NULL;
}

static int chain(int links)
{
	char *memory = map(256, PROT_READ | PROT_WRITE), left[2] = { '0' + links - 1, 0 };

	for (int p = 0; p < 256; p++)
		fill(memory + p * PAGE, p + 4);
	madvise(memory, 256 * PAGE, 21);
	for (int p = 0; p < 256; p++)
		if (differs(memory + p * PAGE, p + 4) >= 0) {
			fprintf(stderr, "victim: MISMATCH page %d of an executed program\n", p);
			_exit(3);
		}
	if (links <= 1)
		return 0;
	execl("/proc/self/exe", "victim", "chain", left, NULL);
	return 1;
}

static int is_without(const char *name, const char *without)
{
	size_t length = strlen(name);

	for (const char *at = without; at && (at = strstr(at, name)); at++)
		if ((at == without || at[-1] == ',') && (!at[length] || at[length] == ','))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_ONSTACK | SA_RESTART };
	pthread_t threads[THREADS];
	size_t pages, size;

	if (argc == 3 && !strcmp(argv[1], "chain"))
		return chain(atoi(argv[2]));
	if (argc < 5)
		return 2;
	self = argv[0];
	seed = strtoul(argv[1], NULL, 10);
	end = now() + atof(argv[2]);
	pages = strtoul(argv[3], NULL, 10) * 256 / THREADS;
	scratch = argv[4];
	for (size_t op = 0; op < OPERATIONS; op++)
		total += weights[op] = argc > 5 && is_without(op_name(op), argv[5]) ? 0 : operations[op].weight;
	sigaction(SIGUSR1, &action, NULL);
	counts = mmap(NULL, sizeof *counts * OPERATIONS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	size = (pages + 64) * sizeof(struct page);
	for (int t = 0; t < THREADS; t++) {
		struct region *r = &regions[t];

		r->thread = t;
		r->random = mix(seed * 64 + t);
		r->pages = pages;
		r->memory = map(pages, PROT_READ | PROT_WRITE);
		r->alt = map(16, PROT_READ | PROT_WRITE);
		r->shadow = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (r->memory == MAP_FAILED || r->alt == MAP_FAILED || r->shadow == MAP_FAILED)
			fail("mmap");
	}
	for (int t = 0; t < THREADS; t++)
		if (pthread_create(&threads[t], NULL, thread, &regions[t]))
			fail("pthread_create");
	for (int t = 0; t < THREADS; t++)
		pthread_join(threads[t], NULL);
	for (size_t op = 0; op < OPERATIONS; op++)
		if (counts[op].done + counts[op].refused)
			printf("%s %lu %lu\n", op_name(op), counts[op].done, counts[op].refused);
	return 0;
}

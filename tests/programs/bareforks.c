/* bareforks SECONDS [MIB]: children that are made by the instruction `syscall` itself, past libc, and so without a worker. Their parent's
 * memory is evicted. Each reads what it has inherited, a few pages at a time, and some fork again before. A page with other bytes
 * than those that were written is reported as MISMATCH. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

#define CHILDREN 4
/* Pages at once, and microseconds between. */
#define STEP 16
#define PAUSE 3000

static char *memory;
static size_t pages;

static long instruction(long number, long a, long b)
{
	register long r10 __asm__("r10") = 0;
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(0), "r"(r10) : "rcx", "r11", "memory");
	return result;
}

static long bare_fork(unsigned number)
{
	return number % 2 ? instruction(SYS_fork, 0, 0) : instruction(SYS_clone, SIGCHLD, 0);
}

static void verify(uint64_t base, size_t first)
{
	for (size_t i = 0; i < pages; i++) {
		size_t page = (first + i) % pages;

		if (page_check(memory + page * PAGE, base + page) >= 0) {
			page_report(memory + page * PAGE, base + page, "inherited past libc");
			_exit(1);
		}
		if (i % STEP == STEP - 1)
			usleep(PAUSE);
	}
}

static void child(uint64_t base, unsigned number)
{
	if (number % 4 == 3 && bare_fork(number) < 0)
		_exit(2);
	verify(base, (number * 977) % pages);
	_exit(0);
}

int main(int argc, char **argv)
{
	uint64_t end = microseconds() + 1000000 * argument(argc, argv, 1, 4);
	unsigned number = 0, bad = 0;

	pages = argument(argc, argv, 2, 24) * MIB / PAGE;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	pages_fill(memory, pages, 1);
	while (microseconds() < end) {
		int status;

		madvise(memory, pages * PAGE, MADV_PAGEOUT);
		for (int i = 0; i < CHILDREN; i++) {
			long pid = bare_fork(number);

			if (pid < 0)
				die("fork");
			if (!pid)
				child(1, number);
			number++;
		}
		while (wait(&status) > 0)
			bad += status != 0;
	}
	printf("%s\n", bad ? "some children failed" : "bareforks: verified");
	return bad != 0;
}

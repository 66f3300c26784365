/* hugefork: a mapping begins with a huge page, and the rest of it is paged out; a forked child finds all of it. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>
#include <sys/wait.h>

#define HUGE (2 * MIB)
#define PAGES (2 * HUGE / PAGE)

int main(void)
{
	char *room = mmap(NULL, 4 * HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *memory = (char *)(((uintptr_t)room + HUGE) & ~(HUGE - 1));
	int status;

	if (room == MAP_FAILED || mprotect(memory, 2 * HUGE, PROT_READ | PROT_WRITE))
		die("mmap");
	madvise(memory, 2 * HUGE, MADV_HUGEPAGE);
	pages_fill(memory, PAGES, 1);
	for (int round = 0; round < 10; round++) {
		usleep(100000);
		madvise(memory + HUGE, HUGE, MADV_PAGEOUT);
		pid_t child = fork();
		if (child < 0)
			die("fork");
		if (!child) {
			pages_expect(memory, PAGES, 1, "in the child");
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child || status)
			return 1;
	}
	pages_expect(memory, PAGES, 1, "in the parent");
	puts("every child had all of it");
	return 0;
}

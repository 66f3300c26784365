/* forkfull MIB SECONDS: forks while neither pool nor swap file has room for what is being moved out of an area that children do not inherit
 * (MADV_DONTFORK). No fork needs that room. It says when it begins to fork; the test looks at the manager's counters from then on. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>
#include <sys/wait.h>

int main(int argc, char **argv)
{
	size_t pages = argument(argc, argv, 1, 60) * MIB / PAGE, i = 0;
	uint64_t end = argument(argc, argv, 2, 5) * 1000000;
	char *area = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (area == MAP_FAILED || madvise(area, pages * PAGE, MADV_DONTFORK))
		die("area");
	for (size_t page = 0; page < pages; page++)
		for (unsigned word = 0; word < WORDS; word++)
			((uint64_t *)(area + page * PAGE))[word] = mix(page * WORDS + word);
	printf("forking\n");
	fflush(stdout);
	for (end += microseconds(); microseconds() < end; i++) {
		for (int reads = 0; reads < 20; reads++) {
			size_t page = mix(i * 20 + reads) % pages;
			if (*(volatile uint64_t *)(area + page * PAGE) != mix(page * WORDS)) {
				printf("page %zu is wrong\n", page);
				return 1;
			}
		}
		int status, child = fork();
		if (!child)
			_exit(0);
		if (child < 0 || waitpid(child, &status, 0) != child || status) {
			printf("fork %zu: status %x\n", i, status);
			return 1;
		}
	}
	printf("%zu forks\n", i);
	printf("every fork came to its end\n");
	return 0;
}

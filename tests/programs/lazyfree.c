/* lazyfree fork|read: memory is given to the kernel with MADV_FREE while all limits are far, and the kernel takes it when it is asked to, at
 * a limit of 96 MiB out of the staging area. It reads as it was or as zeros, and the program goes on, also through forks. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/wait.h>

#define PAGES 4096
#define MORE 30720
#define NEAR 17000

/* The kernel is to take what it may take, in all of this process but for what was given. */
static void press(char *given)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long start, end;

	while (maps && fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx rw-p 00000000 00:00 0", &start, &end) == 2
		    && (end <= (unsigned long)given || start >= (unsigned long)given + PAGES * PAGE))
			madvise_raw((char *)start, end - start, MADV_PAGEOUT);
	fclose(maps);
}

static size_t check_given(char *given, size_t from, size_t to)
{
	size_t zeros = 0;

	for (size_t i = from; i < to; i++)
		if (page_check(given + i * PAGE, 0) < 0)
			zeros++;
		else
			pages_expect(given + i * PAGE, 1, 1 + i, "that was given away");
	return zeros;
}

int main(int argc, char **argv)
{
	int forks = argc > 1 && !strcmp(argv[1], "fork");
	char *more = mmap(NULL, MORE * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *free = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t zeros = 0, next = 0;

	if (free == MAP_FAILED || more == MAP_FAILED)
		die("mmap");
	pages_fill(free, PAGES, 1);
	pages_advise_raw(free, PAGES, MADV_FREE);
	for (size_t i = 0; i < MORE; i++) {
		page_fill(more + i * PAGE, 1000000 + i);
		if (i < NEAR || next == PAGES || !pages_absent(free + next * PAGE, 1))
			continue;
		press(free);
		if (!forks) {
			zeros += check_given(free, next, next + 1);
			next++;
		} else {
			int status, child = fork();
			if (!child) {
				check_given(free, 0, PAGES);
				_exit(0);
			}
			if (child < 0 || waitpid(child, &status, 0) != child || status) {
				printf("a child ended with status %x\n", status);
				return 1;
			}
			zeros = check_given(free, 0, PAGES);
			next = PAGES;
		}
	}
	check_given(free, 0, PAGES);
	pages_expect(more, MORE, 1000000, "that was kept");
	if (!zeros) {
		printf("the kernel took nothing\n");
		return 1;
	}
	fprintf(stderr, "%zu of %d pages were taken\n", zeros, PAGES);
	printf("the kernel took only what it was given\n");
	return 0;
}

/* madvfree CALLS: prints what a call of MADV_FREE takes, the median of the first tenth and of the last of so many calls, each for
 * another range of memory that is managed. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>

#define PAGES 4

static int compare(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

static unsigned long median(uint64_t *times, size_t count)
{
	qsort(times, count, sizeof *times, compare);
	return times[count / 2];
}

int main(int argc, char **argv)
{
	size_t calls = argument(argc, argv, 1, 3000), len = calls * PAGES * PAGE;
	char *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *times = calloc(calls, sizeof *times);

	if (memory == MAP_FAILED || !times)
		die("memory");
	/* From here on it is managed. */
	memory[0] = 1;
	madvise(memory, len, MADV_PAGEOUT);
	for (size_t i = 0; i < calls; i++) {
		char *at = memory + i * PAGES * PAGE;
		memset(at, 1, PAGES * PAGE);
		uint64_t before = microseconds();
		if (madvise(at, PAGES * PAGE, MADV_FREE))
			die("madvise");
		times[i] = microseconds() - before;
	}
	unsigned long first = median(times, calls / 10), last = median(times + calls - calls / 10, calls / 10);
	printf("%lu %lu\n", first, last);
	return 0;
}

/* hugeback: huge pages are paged out and read back; soon they are huge again, and what they hold is right. Their number goes to stdout:
 * before, right after, and in the end. The times of a read of a word at random, in nanoseconds, go to stderr. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE (2 * MIB)
#define COUNT 32
#define PAGES (COUNT * HUGE / PAGE)
#define READS (1 << 22)

static char *memory;

/* Huge pages in `memory`. */
static int huge_pages(void)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	unsigned long start = 0, end = 0, kib = 0, sum = 0;
	char line[512];

	if (!smaps)
		die("/proc/self/smaps");
	while (fgets(line, sizeof line, smaps)) {
		sscanf(line, "%lx-%lx ", &start, &end);
		if (sscanf(line, "AnonHugePages: %lu", &kib) == 1 && (char *)start < memory + COUNT * HUGE && (char *)end > memory)
			sum += kib;
	}
	fclose(smaps);
	return sum / (HUGE >> 10);
}

static void time_reads(const char *when)
{
	struct timespec start, end;
	uint64_t state = 1;

	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int i = 0; i < READS; i++) {
		state = state * 6364136223846793005 + 1442695040888963407;
		/* Each address depends on what was read before. */
		state += *(volatile char *)(memory + (state >> 20) % (COUNT * HUGE));
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	fprintf(stderr, "%s: %.1f ns a read\n", when, ((end.tv_sec - start.tv_sec) * 1e9 + end.tv_nsec - start.tv_nsec) / READS);
}

int main(void)
{
	char *room = mmap(NULL, (COUNT + 1) * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int before, after, last;

	if (room == MAP_FAILED)
		die("mmap");
	memory = (char *)(((uintptr_t)room + HUGE - 1) & ~(HUGE - 1));
	madvise(memory, COUNT * HUGE, MADV_HUGEPAGE);
	pages_fill(memory, PAGES, 1);
	if (madvise(memory, COUNT * HUGE, MADV_COLLAPSE))
		die("MADV_COLLAPSE");
	before = huge_pages();
	time_reads("before");
	for (int tries = 0; tries < 10 && huge_pages() > 0; tries++) {
		madvise(memory, COUNT * HUGE, MADV_PAGEOUT);
		usleep(10000);
	}
	pages_expect(memory, PAGES, 1, "read back");
	after = last = huge_pages();
	time_reads("right after");
	for (int tries = 0; tries < 100 && last < before; tries++) {
		usleep(100000);
		last = huge_pages();
	}
	time_reads("in the end");
	pages_expect(memory, PAGES, 1, "in the end");
	printf("%d %d %d\n", before, after, last);
	return 0;
}

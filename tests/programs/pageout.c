/* pageout [BYTES]: pages half increasing bytes, half zeros; all of it MADV_PAGEOUT, then read back in order and
 * verified. The times go to stderr, in microseconds. Stands alone: `uzswap lab` carries a copy of this file. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static unsigned long long microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}

/* Resident bytes in range, as the kernel sees them. */
static size_t resident(char *memory, size_t size)
{
	static unsigned char present[1 << 16];
	size_t pages = 0;

	for (size_t at = 0; at < size; at += sizeof present * PAGE) {
		size_t part = size - at < sizeof present * PAGE ? size - at : sizeof present * PAGE;

		if (mincore(memory + at, part, present))
			return size;
		for (size_t i = 0; i < part / PAGE; i++)
			pages += present[i] & 1;
	}
	return pages * PAGE;
}

int main(int argc, char **argv)
{
	size_t size = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1ULL << 30) & ~(PAGE - 1);
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned char expected[PAGE] = { 0 };
	unsigned long long start, out, in;
	size_t left;

	if (memory == MAP_FAILED) {
		perror("mmap");
		return 2;
	}
	for (size_t i = 0; i < PAGE / 2; i++)
		expected[i] = i;
	for (size_t at = 0; at < size; at += PAGE) {
		memcpy(memory + at, expected, PAGE);
		*(size_t *)(memory + at) = at;
	}

	start = microseconds();
	if (madvise(memory, size, MADV_PAGEOUT))
		perror("madvise(MADV_PAGEOUT)");
	out = microseconds() - start;
	left = resident(memory, size);

	start = microseconds();
	for (size_t at = 0; at < size; at += PAGE) {
		*(size_t *)expected = at;
		if (memcmp(memory + at, expected, PAGE)) {
			fprintf(stderr, "MISMATCH in page %zu at %p\n", at / PAGE, (void *)(memory + at));
			return 1;
		}
	}
	in = microseconds() - start;

	fprintf(stderr, "pageout_us %llu\nresident_after_bytes %zu\nread_us %llu\n", out, left, in);
	printf("%zu bytes verified\n", size);
	return 0;
}

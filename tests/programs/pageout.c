/* pageout [BYTES [order|random [IMAGE]]]: pages half increasing bytes, half zeros, or those of the file IMAGE over and over; all of
 * it MADV_PAGEOUT until it is out, then each page read back once, in order or in random order, and verified. The times go to stderr, in
 * microseconds. Stands alone: `uzswap lab` carries a copy of this file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
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

static void *map(size_t size, int file)
{
	int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_POPULATE;
	void *memory = mmap(NULL, size, file < 0 ? PROT_READ | PROT_WRITE : PROT_READ, flags, file, 0);

	if (memory == MAP_FAILED) {
		perror("mmap");
		exit(2);
	}
	return memory;
}

/* The order in which pages are read. */
static uint32_t *order(size_t pages, int random)
{
	uint32_t *numbers = malloc(pages * sizeof *numbers);
	uint64_t state = 1;

	for (size_t i = 0; i < pages; i++)
		numbers[i] = i;
	for (size_t i = pages; random && i > 1; i--) {
		state = state * 6364136223846793005 + 1442695040888963407;
		size_t other = (state >> 33) % i;
		uint32_t number = numbers[i - 1];

		numbers[i - 1] = numbers[other];
		numbers[other] = number;
	}
	return numbers;
}

int main(int argc, char **argv)
{
	size_t size = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1ULL << 30) & ~(PAGE - 1);
	uint32_t *numbers = order(size / PAGE, argc > 2 && !strcmp(argv[2], "random"));
	int file = argc > 3 ? open(argv[3], O_RDONLY) : -1;
	size_t image_size = file < 0 ? PAGE : lseek(file, 0, SEEK_END) & ~(PAGE - 1);
	char *image = map(image_size, file);
	char *memory = map(size, -1);
	unsigned long long start, out = 0, in;
	size_t left = 0;

	for (size_t i = 0; file < 0 && i < PAGE / 2; i++)
		image[i] = i;
	for (size_t at = 0; at < size; at += PAGE) {
		memcpy(memory + at, image + at % image_size, PAGE);
		*(size_t *)(memory + at) = at;
	}

	start = microseconds();
	/* What is still being written stays for the next time. */
	for (int tries = 0; tries < 10; tries++) {
		if (madvise(memory, size, MADV_PAGEOUT))
			perror("madvise(MADV_PAGEOUT)");
		out = microseconds() - start;
		left = resident(memory, size);
		if (left <= size / 100)
			break;
		usleep(10000);
	}

	start = microseconds();
	for (size_t i = 0; i < size / PAGE; i++) {
		size_t at = numbers[i] * PAGE;

		if (*(size_t *)(memory + at) != at ||
		    memcmp(memory + at + sizeof at, image + at % image_size + sizeof at, PAGE - sizeof at)) {
			fprintf(stderr, "MISMATCH in page %zu at %p\n", at / PAGE, (void *)(memory + at));
			return 1;
		}
	}
	in = microseconds() - start;

	fprintf(stderr, "pageout_us %llu\nresident_after_bytes %zu\nread_us %llu\n", out, left, in);
	printf("%zu bytes verified\n", size);
	return 0;
}

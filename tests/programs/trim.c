/* trim MIB SECONDS: threads that get aligned blocks as memory managers do (map twice as much, unmap head and tail), so that
 * what one trims off is mapped by another at once. Every block is written, read again later, and unmapped. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define BLOCK ((size_t)256 << 10)
#define THREADS 4

static size_t blocks_each;
static time_t end;

static uint64_t *aligned_block(void)
{
	char *start = mmap(NULL, 2 * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (start == MAP_FAILED) {
		perror("mmap");
		exit(2);
	}
	char *block = (char *)(((uintptr_t)start + BLOCK - 1) & ~(BLOCK - 1));
	if (block > start)
		munmap(start, block - start);
	if (block + BLOCK < start + 2 * BLOCK)
		munmap(block + BLOCK, start + 2 * BLOCK - block - BLOCK);
	return (uint64_t *)block;
}

static uint64_t content(uint64_t seed, size_t i)
{
	return i % 7 ? seed + i : (seed + i) * 0x9e3779b97f4a7c15u;
}

static void verify(const uint64_t *block, uint64_t seed)
{
	for (size_t i = 0; i < BLOCK / 8; i++) {
		if (block[i] != content(seed, i)) {
			fprintf(stderr, "MISMATCH at %p: %llx instead of %llx\n", (void *)&block[i],
				(unsigned long long)block[i], (unsigned long long)content(seed, i));
			exit(1);
		}
	}
}

static void *work(void *argument)
{
	uint64_t next = (uint64_t)(uintptr_t)argument << 48;
	unsigned random = (unsigned)(uintptr_t)argument;
	uint64_t **blocks = calloc(blocks_each, sizeof *blocks), *seeds = calloc(blocks_each, sizeof *seeds);
	while (time(NULL) < end) {
		size_t at = (size_t)rand_r(&random) % blocks_each;
		if (blocks[at]) {
			verify(blocks[at], seeds[at]);
			munmap(blocks[at], BLOCK);
		}
		blocks[at] = aligned_block();
		seeds[at] = ++next;
		for (size_t i = 0; i < BLOCK / 8; i++)
			blocks[at][i] = content(seeds[at], i);
	}
	for (size_t at = 0; at < blocks_each; at++)
		if (blocks[at])
			verify(blocks[at], seeds[at]);
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "usage: trim MIB SECONDS\n");
		return 2;
	}
	blocks_each = ((size_t)atoi(argv[1]) << 20) / BLOCK / THREADS;
	end = time(NULL) + atoi(argv[2]);
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, work, (void *)(i + 1));
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	puts("trim: every block as written");
	return 0;
}

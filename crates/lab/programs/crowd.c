/* crowd PROCESSES BYTES: so many processes have BYTES together, page them out (MADV_PAGEOUT), and then, all at the same time, read
 * each page once, in random order, and check it. Says how many microseconds that took. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

struct shared {
	atomic_int ready, go;
	_Atomic uint64_t last_end;
};

static uint64_t microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}

static int member(struct shared *shared, uint64_t seed, size_t pages)
{
	uint64_t (*memory)[PAGE / 8] = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t *order = malloc(pages * sizeof *order);

	if (memory == MAP_FAILED || !order)
		return 2;
	for (size_t i = 0; i < pages; i++) {
		for (size_t word = 0; word < PAGE / 16; word++)
			memory[i][word] = seed * pages + i;
		order[i] = i;
	}
	for (size_t i = pages; i > 1; i--) {
		seed = seed * 6364136223846793005 + 1442695040888963407;
		size_t other = (seed >> 33) % i;
		uint32_t number = order[i - 1];

		order[i - 1] = order[other];
		order[other] = number;
	}
	seed = memory[0][0] / pages;
	if (madvise(memory, pages * PAGE, MADV_PAGEOUT))
		perror("madvise(MADV_PAGEOUT)");
	atomic_fetch_add(&shared->ready, 1);
	while (!atomic_load(&shared->go))
		usleep(1000);
	for (size_t i = 0; i < pages; i++)
		if (memory[order[i]][7] != seed * pages + order[i]) {
			fprintf(stderr, "MISMATCH in page %u\n", order[i]);
			return 1;
		}
	atomic_store(&shared->last_end, microseconds());
	return 0;
}

int main(int argc, char **argv)
{
	int processes = argc == 3 ? atoi(argv[1]) : 0, status, failed = 0;
	struct shared *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (processes < 1 || shared == MAP_FAILED) {
		fprintf(stderr, "crowd PROCESSES BYTES\n");
		return 2;
	}
	size_t pages = strtoull(argv[2], NULL, 0) / PAGE / processes;
	for (int i = 0; i < processes; i++)
		if (!fork())
			_exit(member(shared, i + 1, pages));
	while (atomic_load(&shared->ready) < processes)
		usleep(1000);
	uint64_t start = microseconds();
	atomic_store(&shared->go, 1);
	while (wait(&status) > 0)
		failed |= status;
	fprintf(stderr, "read_us %lu\n", shared->last_end - start);
	return failed != 0;
}

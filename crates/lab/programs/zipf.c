/* zipf IMAGE BYTES WARM SECONDS: fills BYTES with the pages of the file IMAGE over and over, then two threads read pages at random,
 * by Zipf's law with exponent 0.99 (the generator of Gray and others, "Quickly Generating Billion-Record Synthetic
 * Databases", 1994), the popular ones spread over all of the memory. Says how many reads of a page there were in SECONDS
 * after WARM seconds. Each page says which it is, and is checked. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096UL
#define THETA 0.99
#define THREADS 2

static char *memory;
static uint64_t pages;
static double zeta, eta;
static atomic_int phase; /* 0: before; 1: counts; 2: over */
static _Atomic uint64_t reads;

static double uniform(uint64_t *state)
{
	*state = *state * 6364136223846793005 + 1442695040888963407;
	return (double)(*state >> 11) / (double)(1ULL << 53);
}

/* The popularity of a page, 0 for the most popular. */
static uint64_t rank(uint64_t *state)
{
	double u = uniform(state), scaled = u * zeta;

	if (scaled < 1)
		return 0;
	if (scaled < 1 + pow(0.5, THETA))
		return 1;
	uint64_t drawn = (uint64_t)((double)pages * pow(eta * u - eta + 1, 1 / (1 - THETA)));
	return drawn < pages ? drawn : pages - 1;
}

static void *read_pages(void *number)
{
	uint64_t state = 1 + (uintptr_t)number, counted = 0;
	int now;

	while ((now = atomic_load_explicit(&phase, memory_order_relaxed)) < 2) {
		/* A prime step, so each page is that of one rank (unless the pages are a multiple of it). */
		uint64_t page = rank(&state) * 2654435761u % pages;
		volatile uint64_t *words = (uint64_t *)(memory + page * PAGE);

		if (words[0] != page) {
			fprintf(stderr, "MISMATCH in page %lu\n", page);
			exit(1);
		}
		(void)words[1 + (state >> 33) % (PAGE / sizeof *words - 1)];
		counted += now == 1;
	}
	atomic_fetch_add(&reads, counted);
	return NULL;
}

static void pause_for(double seconds)
{
	usleep((useconds_t)(seconds * 1e6));
}

int main(int argc, char **argv)
{
	int file = argc == 5 ? open(argv[1], O_RDONLY) : -1;
	pthread_t threads[THREADS];

	if (file < 0) {
		fprintf(stderr, "zipf IMAGE BYTES WARM SECONDS\n");
		return 2;
	}
	uint64_t image_pages = (uint64_t)lseek(file, 0, SEEK_END) / PAGE;
	pages = strtoull(argv[2], NULL, 0) / PAGE;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED) {
		perror("mmap");
		return 2;
	}
	for (uint64_t i = 0; i < pages; i++) {
		if (pread(file, memory + i * PAGE, PAGE, i % image_pages * PAGE) != (ssize_t)PAGE) {
			perror(argv[1]);
			return 2;
		}
		*(uint64_t *)(memory + i * PAGE) = i;
	}
	for (uint64_t i = 1; i <= pages; i++)
		zeta += 1 / pow(i, THETA);
	eta = (1 - pow(2.0 / pages, 1 - THETA)) / (1 - (1 + pow(0.5, THETA)) / zeta);
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, read_pages, (void *)i);
	pause_for(atof(argv[3]));
	atomic_store(&phase, 1);
	pause_for(atof(argv[4]));
	atomic_store(&phase, 2);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	fprintf(stderr, "reads %lu\n", reads);
	return 0;
}

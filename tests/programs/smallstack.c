/* smallstack [MIB]: threads with the smallest stack there is touch much memory, fork and map. */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "check.h"

#define THREADS 4

static size_t pages;

static void *thread(void *number)
{
	uint64_t base = 1 + (uintptr_t)number * 1000000;
	char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	for (int round = 0; round < 3; round++) {
		pages_fill(memory, pages, base + round);
		pages_expect(memory, pages, base + round, "small stack");
	}
	munmap(memory, pages * PAGE);
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	pthread_attr_t small;

	pages = argument(argc, argv, 1, 64) * MIB / PAGE / THREADS;
	pthread_attr_init(&small);
	if (pthread_attr_setstacksize(&small, PTHREAD_STACK_MIN))
		die("pthread_attr_setstacksize");
	for (uintptr_t i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], &small, thread, (void *)i))
			die("pthread_create");
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	puts("smallstack: verified");
	return 0;
}

/* mainexit [MIB]: the main thread ends, and another goes on with much memory. */
#include <pthread.h>
#include "check.h"

static size_t pages;

static void *thread(void *memory)
{
	for (int round = 0; round < 4; round++) {
		pages_expect(memory, pages, 1 + round, "without a main thread");
		pages_fill(memory, pages, 2 + round);
	}
	pages_expect(memory, pages, 5, "in the end");
	puts("mainexit: verified");
	exit(0);
}

int main(int argc, char **argv)
{
	pthread_t other;
	char *memory;

	pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	pages_fill(memory, pages, 1);
	if (pthread_create(&other, NULL, thread, memory))
		die("pthread_create");
	pthread_exit(NULL);
}

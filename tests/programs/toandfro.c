/* toandfro THREADS SECONDS: each thread moves memory to and fro between two places and pages it out now and then, while the main
 * thread forks. All of it is whole at the end, and the end comes. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define MOST 64
#define PAGES 32
#define LEN (PAGES * PAGE)

static atomic_int stop;
/* A move leaves a hole, which the stack of a thread that starts then would come to lie in. */
static pthread_barrier_t all_started;

static void *move(void *number)
{
	uint64_t base = 1 + (uintptr_t)number * PAGES;
	char *room = mmap(NULL, 4 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (room == MAP_FAILED)
		die("mmap");
	char *memory = map_at(room, LEN);

	pages_fill(memory, PAGES, base);
	pthread_barrier_wait(&all_started);
	for (unsigned moves = 0; !stop; moves++) {
		char *to = memory == room ? room + 2 * LEN : room;

		if (moves % 64 == 0) {
			pages_expect(memory, PAGES, base, "between moves");
			madvise(memory, LEN, MADV_PAGEOUT);
		}
		if (mremap(memory, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
			die("mremap");
		memory = to;
	}
	pages_expect(memory, PAGES, base, "at the end");
	return NULL;
}

int main(int argc, char **argv)
{
	uintptr_t asked = argument(argc, argv, 1, 8), count = asked < MOST ? asked : MOST;
	uint64_t end = microseconds() + argument(argc, argv, 2, 3) * 1000000;
	pthread_t threads[MOST];
	int status;

	pthread_barrier_init(&all_started, NULL, count);
	for (uintptr_t i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, move, (void *)i))
			die("pthread_create");
	while (microseconds() < end) {
		pid_t child = fork();
		if (child < 0)
			die("fork");
		if (!child)
			_exit(0);
		if (waitpid(child, &status, 0) != child)
			die("waitpid");
		if (status) {
			fprintf(stderr, "a child ended with the wait status %#x\n", status);
			return 1;
		}
	}
	stop = 1;
	for (uintptr_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	puts("all of it is whole");
	return 0;
}

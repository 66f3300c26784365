/* moveafterfork SECONDS: forks, and at once moves paged-out memory to where other paged-out memory was, in one step or two; the
 * child finds both where they were. Another thread discards all the time, so that the manager has always something left to
 * read. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGES 64
#define LEN (PAGES * PAGE)

static atomic_int stop;

static void move(char *from, char *to)
{
	if (mremap(from, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
		die("mremap");
}

static void *discard(void *memory)
{
	while (!stop) {
		memset(memory, 7, PAGE);
		madvise(memory, LEN, MADV_DONTNEED);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	uint64_t end = microseconds() + argument(argc, argv, 1, 5) * 1000000;
	char *room = mmap(NULL, 8 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (room == MAP_FAILED)
		die("mmap");
	char *source = map_at(room, LEN), *target = map_at(room + 2 * LEN, LEN);
	char *discarded = map_at(room + 4 * LEN, LEN), *between = room + 6 * LEN;
	pthread_t other;
	memset(discarded, 7, LEN);
	madvise(discarded, LEN, MADV_PAGEOUT);
	if (pthread_create(&other, NULL, discard, discarded))
		die("pthread_create");
	for (uint64_t round = 0; microseconds() < end; round++) {
		uint64_t base = 1 + 2 * PAGES * round;
		int status;

		pages_fill(source, PAGES, base);
		pages_fill(target, PAGES, base + PAGES);
		madvise(source, LEN, MADV_PAGEOUT);
		madvise(target, LEN, MADV_PAGEOUT);
		pid_t child = fork();
		if (child < 0)
			die("fork");
		if (!child) {
			pages_expect(source, PAGES, base, "in the child, of what its parent moves away");
			pages_expect(target, PAGES, base + PAGES, "in the child, of what its parent replaces");
			_exit(0);
		}
		if (round % 2) {
			move(source, target);
		} else {
			move(source, between);
			move(between, target);
		}
		if (waitpid(child, &status, 0) != child || status)
			return 1;
		pages_expect(target, PAGES, base, "after the move");
		map_at(source, LEN);
	}
	stop = 1;
	pthread_join(other, NULL);
	printf("every child had what was there at its fork\n");
	return 0;
}

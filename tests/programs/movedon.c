/* movedon HOW THREADS SECONDS [FORKS]: each thread changes a mapping, of which a part is evicted, several times without a pause between,
 * while the others do the same: so much is announced that has not been read, and the changes have to be put into their order. HOW is
 * - over: memory is moved over other memory, and on from there;
 * - grown: the end of a mapping is given up, the rest grows over the place, and all of it is moved;
 * - moved: the same, where it had been moved to;
 * - stays: it is not moved on from there;
 * - beside: what was moved is unmapped as a whole, and the mapping before it grows over the place;
 * - hole: a mapping grows by as much as there is no room for where it is, so that the kernel moves it to where another thread has just
 *   made some, and shrinks again.
 * Nothing may be where it was given up or overwritten, and all else has to be where it was moved to. With FORKS the main thread forks
 * meanwhile, children that check nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>

#include "check.h"

#define PAGES 16
#define LEN (PAGES * PAGE)
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

static const char *how;
static uint64_t end;

/* What remains stays mapped: nothing of another thread comes there. */
static void move(char *from, char *to)
{
	if (mremap(from, 2 * LEN, 2 * LEN, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != to)
		die("mremap");
}

static void grow_again(char *memory)
{
	if (mremap(memory, 2 * LEN, LEN, 0) != memory || mremap(memory, LEN, 2 * LEN, 0) != memory)
		die("mremap");
}

static void expect_zeros(const char *memory, size_t pages, const char *what)
{
	for (size_t i = 0; i < pages; i++)
		if (page_check(memory + i * PAGE, 0) >= 0) {
			page_report(memory + i * PAGE, 0, what);
			_exit(1);
		}
}

static char *fresh(size_t len, int protection)
{
	char *memory = mmap(NULL, len, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

static void *in_holes(void *number)
{
	uint64_t key = 1 + ((uint64_t)(uintptr_t)number << 40);
	unsigned random = key;
	char *memory = fresh(2 * LEN, PROT_READ | PROT_WRITE);

	for (; microseconds() < end; key += 4 * PAGES) {
		size_t more = 1 + rand_r(&random) % (2 * PAGES);

		pages_fill(memory, 2 * PAGES, key);
		madvise(memory, 2 * LEN, MADV_PAGEOUT);
		for (int i = 0; i < 3; i++) {
			memory = mremap(memory, 2 * LEN, 2 * LEN + more * PAGE, MREMAP_MAYMOVE);
			if (memory == MAP_FAILED || munmap(memory + 2 * LEN, more * PAGE))
				die("mremap");
		}
		pages_expect(memory, 2 * PAGES, key, "moved into a hole");
	}
	return NULL;
}

static void *change(void *number)
{
	char *places[3], *room = fresh(9 * LEN, PROT_NONE);
	uint64_t key = 1 + ((uint64_t)(uintptr_t)number << 40);

	for (int i = 0; i < 3; i++) {
		places[i] = map_at(room + 3 * i * LEN, 2 * LEN);
		memset(places[i], 1, 2 * LEN);
	}
	for (; microseconds() < end; key += 4 * PAGES) {
		pages_fill(places[0], 2 * PAGES, key);
		if (*how == 'o')
			pages_fill(places[1], 2 * PAGES, key + 2 * PAGES);
		for (int i = 0; i < 2; i++)
			madvise(places[i], 2 * LEN, MADV_PAGEOUT);
		if (*how == 'g')
			grow_again(places[0]);
		move(places[0], places[1]);
		if (*how == 'm' || *how == 's')
			grow_again(places[1]);
		if (*how == 's') {
			pages_expect(places[1], PAGES, key, "moved");
			expect_zeros(places[1] + LEN, PAGES, "grown");
			continue;
		}
		move(places[1], places[2]);
		pages_expect(places[2], *how == 'o' ? 2 * PAGES : PAGES, key, "moved");
		if (*how != 'o')
			expect_zeros(places[2] + LEN, PAGES, "grown");
		expect_zeros(places[0], 2 * PAGES, "left first");
		expect_zeros(places[1], 2 * PAGES, "left second");
	}
	return NULL;
}

static void *beside(void *number)
{
	char *room = fresh(6 * LEN, PROT_NONE), *from = map_at(room + 4 * LEN, LEN), *low = map_at(room, LEN), *to = low + LEN;
	uint64_t key = 1 + ((uint64_t)(uintptr_t)number << 40);

	for (; microseconds() < end; key += 4 * PAGES) {
		map_at(to, LEN);
		pages_fill(from, PAGES, key);
		pages_fill(low, PAGES, key + PAGES);
		madvise(from, LEN, MADV_PAGEOUT);
		madvise(low, LEN, MADV_PAGEOUT);
		if (mremap(from, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != to || munmap(to, LEN) ||
		    mremap(low, LEN, 2 * LEN, 0) != low)
			die("mremap");
		pages_expect(low, PAGES, key + PAGES, "what has grown");
		expect_zeros(to, PAGES, "grown");
		expect_zeros(from, PAGES, "left");
	}
	return NULL;
}

int main(int argc, char **argv)
{
	size_t count = argument(argc, argv, 2, 4);
	pthread_t *threads = calloc(count, sizeof *threads);
	int forks = argc > 4;

	how = argc > 1 ? argv[1] : "over";
	end = microseconds() + 1000000 * argument(argc, argv, 3, 5);
	for (size_t i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, *how == 'h' ? in_holes : *how == 'b' ? beside : change, (void *)i))
			die("pthread_create");
	while (forks && microseconds() < end) {
		pid_t child = fork();

		if (!child)
			_exit(0);
		if (child < 0 || waitpid(child, NULL, 0) != child)
			die("fork");
	}
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	puts("all is where it was moved to");
	return 0;
}

/* discards discard|move SECONDS: a thread fills an area and discards it, another fills and discards its last page or moves it away, and a third has
 * it all paged out meanwhile. What was discarded stays so. Pages have to be out in some rounds when they are discarded. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <sys/mman.h>

#define PAGES 512

static char *area, *last;
static volatile int over;

static void *discard_end(void *unused)
{
	while (!over) {
		*(volatile uint64_t *)last = 1;
		if (madvise(last, PAGE, MADV_DONTNEED))
			die("madvise");
		/* Without a pause there is one round in a second. */
		usleep(100);
	}
	return unused;
}

/* Moves the last page away and puts a fresh one in its place. */
static void *move_end(void *unused)
{
	while (!over) {
		*(volatile uint64_t *)last = 1;
		char *elsewhere = mremap(last, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
		if (elsewhere == MAP_FAILED)
			die("mremap");
		munmap(elsewhere, PAGE);
		usleep(500);
	}
	return unused;
}

static void *page_out(void *unused)
{
	while (!over)
		madvise(area, PAGES * PAGE, MADV_PAGEOUT);
	return unused;
}

/* How many rounds there were, in how many pages were out when they were discarded, and how many pages. */
static size_t rounds, rounds_out, pages_out;

static void *work(void *unused)
{
	for (uint64_t round = 1; !over; round++) {
		/* Where discards overlap, nothing is moved out for seconds after them, until it is mapped anew. */
		if (round % 4 == 0)
			map_at(area, PAGES * PAGE);
		for (size_t i = 0; i < PAGES - 1; i++)
			*(volatile uint64_t *)(area + i * PAGE) = round;
		size_t absent = pages_absent(area, PAGES - 1);
		rounds++;
		rounds_out += absent > 0;
		pages_out += absent;
		if (madvise(area, PAGES * PAGE, MADV_DONTNEED))
			die("madvise");
		for (size_t i = 0; i < PAGES - 1; i++)
			if (*(volatile uint64_t *)(area + i * PAGE)) {
				printf("page %zu of round %lu is back\n", i, round);
				exit(1);
			}
	}
	return unused;
}

int main(int argc, char **argv)
{
	int moves = argc > 1 && !strcmp(argv[1], "move");
	void *(*tasks[])(void *) = {work, moves ? move_end : discard_end, page_out};
	pthread_t threads[3];

	area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED)
		die("mmap");
	last = area + (PAGES - 1) * PAGE;
	for (int i = 0; i < 3; i++)
		if (pthread_create(&threads[i], NULL, tasks[i], NULL))
			die("thread");
	sleep(argument(argc, argv, 2, 5));
	over = 1;
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	fprintf(stderr, "in %zu of %zu rounds %zu pages were out\n", rounds_out, rounds, pages_out);
	if (!rounds_out) {
		printf("no page was out when it was discarded\n");
		return 1;
	}
	printf("what was discarded stayed so\n");
	return 0;
}

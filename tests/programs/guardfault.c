/* guardfault SECONDS EVICTED: one thread reads a page that is paged out, another installs guards over it and its neighbours at that moment, by
 * libc's function and by the instruction itself. The reader gets the page, zeros (the kernel discards the page before it installs the guard) or
 * SIGSEGV, and soon. What libc's function has installed is there afterwards. With EVICTED 1, the page has to be out in most rounds, and the
 * reader is to have got the page in some and the guard in others. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>

#define PAGES 64
#define AREA 4

static char *area;
static pthread_barrier_t barrier;
static volatile int over;
/* How often the reader got the page, zeros, and the guard. */
static size_t got[3];

enum { CONTENTS, ZEROS, GUARD };

/* What is found at a page, which is one of these. */
static int look_at(char *page, uint64_t key)
{
	if (sigsetjmp(after_fault, 1))
		return GUARD;
	if (page_check(page, 0) < 0)
		return ZEROS;
	pages_expect(page, 1, key, "read while guards are installed");
	return CONTENTS;
}

static void *reader(void *unused)
{
	for (uint64_t base = 1;; base += PAGES) {
		pthread_barrier_wait(&barrier);
		if (over)
			return unused;
		got[look_at(area, base)]++;
		pthread_barrier_wait(&barrier);
	}
}

int main(int argc, char **argv)
{
	uint64_t end = microseconds() + argument(argc, argv, 1, 5) * 1000000, rounds = 0, out = 0;
	int evicted = argument(argc, argv, 2, 0);
	pthread_t thread;

	area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED)
		die("area");
	catch_faults();
	area = (char *)(((uintptr_t)area + AREA * PAGE - 1) & ~(AREA * PAGE - 1));
	if (!has_guards(area)) {
		printf("guards stand against readers\n");
		return 0;
	}
	pthread_barrier_init(&barrier, NULL, 2);
	if (pthread_create(&thread, NULL, reader, NULL))
		die("thread");
	for (uint64_t base = 1; microseconds() < end; base += PAGES, rounds++) {
		size_t pages = rounds % 2 ? AREA : 1;
		int raw = rounds / 2 % 2;
		void (*advise)(char *, size_t, int) = raw ? pages_advise_raw : pages_advise;

		pages_fill(area, AREA, base);
		pages_advise(area, AREA, MADV_PAGEOUT);
		out += pages_absent(area, 1);
		pthread_barrier_wait(&barrier);
		for (uint64_t from = microseconds(), wait = mix(rounds) % 40; microseconds() < from + wait;)
			;
		advise(area, pages, GUARD_INSTALL);
		pthread_barrier_wait(&barrier);
		for (size_t i = 0; !raw && i < pages; i++)
			if (look_at(area + i * PAGE, base + i) != GUARD) {
				printf("guard %zu of %zu is gone\n", i, pages);
				return 1;
			}
		advise(area, pages, GUARD_REMOVE);
	}
	over = 1;
	pthread_barrier_wait(&barrier);
	pthread_join(thread, NULL);
	fprintf(stderr, "%lu rounds, in %lu the page was out; the reader got it %zu times, zeros %zu times, the guard %zu times\n", rounds, out,
		got[CONTENTS], got[ZEROS], got[GUARD]);
	if (evicted && (out < rounds / 2 || !got[CONTENTS] || !got[GUARD])) {
		printf("what is to be tested was not met\n");
		return 1;
	}
	printf("guards stand against readers\n");
	return 0;
}

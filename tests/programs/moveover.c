/* moveover SECONDS: moves paged-out memory over memory that another thread is just having paged out. What is moved there must
 * not be taken for what was seen there a moment ago. Memory is written anew, moved and checked in each round. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define PAGES 64
#define LEN (PAGES * PAGE)

static char *target;
static atomic_int stop;

static void *page_out_target(void *unused)
{
	while (!stop)
		madvise(target, LEN, MADV_PAGEOUT);
	return unused;
}

int main(int argc, char **argv)
{
	uint64_t end = microseconds() + argument(argc, argv, 1, 5) * 1000000;
	unsigned random = 20231107;
	char *room = mmap(NULL, 2 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (room == MAP_FAILED)
		die("mmap");
	char *source = map_at(room + LEN, LEN);
	target = map_at(room, LEN);
	pthread_t pager;
	if (pthread_create(&pager, NULL, page_out_target, NULL))
		die("pthread_create");
	for (uint64_t base = 1; microseconds() < end; base += PAGES) {
		pages_fill(source, PAGES, base);
		madvise(source, LEN, MADV_PAGEOUT);
		memset(target, 7, LEN);
		for (volatile int pause = rand_r(&random) % 20000; pause > 0; pause--)
			;
		if (mremap(source, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, target) != target)
			die("mremap");
		map_at(source, LEN);
		pages_expect(target, PAGES, base, "after the move");
	}
	stop = 1;
	pthread_join(pager, NULL);
	printf("every move kept its pages\n");
	return 0;
}

/* movedonto SECONDS: moves evicted memory onto memory that is being evicted (mremap), while another thread reads all that is mapped and
 * may be written, and so fills what is empty of it. The contents have to be those of what was moved. Says so only if a part of it was evicted
 * when it was moved. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>

#include "check.h"

#define PAGES 256

static atomic_int over;

static void visit_all(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end;
	char line[512], rights[5];

	if (!maps)
		die("/proc/self/maps");
	while (fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 || strncmp(rights, "rw", 2))
			continue;
		/* By a call: what is mapped there may be moved meanwhile. */
		for (unsigned long at = start; at < end; at += PAGE) {
			char byte;
			struct iovec to = { &byte, 1 }, from = { (void *)at, 1 };

			if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) < 0)
				break;
		}
	}
	fclose(maps);
}

static void *visitor(void *unused)
{
	(void)unused;
	while (!over) {
		visit_all();
		usleep(20000);
	}
	return NULL;
}

static void *evictor(void *onto)
{
	while (!over)
		madvise(onto, PAGES * PAGE, MADV_PAGEOUT);
	return NULL;
}

static size_t absent(char *memory)
{
	unsigned char present[PAGES];
	size_t count = 0;

	if (mincore(memory, PAGES * PAGE, present))
		die("mincore");
	for (int i = 0; i < PAGES; i++)
		count += !(present[i] & 1);
	return count;
}

int main(int argc, char **argv)
{
	uint64_t end = microseconds() + 1000000 * argument(argc, argv, 1, 5), key = 1;
	char *onto = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_t threads[2];
	size_t evicted = 0;

	if (onto == MAP_FAILED)
		die("mmap");
	if (pthread_create(&threads[0], NULL, visitor, NULL) || pthread_create(&threads[1], NULL, evictor, onto))
		die("pthread_create");
	while (microseconds() < end) {
		char *from = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (from == MAP_FAILED)
			die("mmap");
		pages_fill(from, PAGES, key);
		madvise(from, PAGES * PAGE, MADV_PAGEOUT);
		evicted += absent(from);
		pages_fill(onto, PAGES, key + PAGES);
		if (mremap(from, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, onto) != onto)
			die("mremap");
		usleep(500);
		pages_expect(onto, PAGES, key, "moved");
		key += 2 * PAGES;
	}
	over = 1;
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	puts(evicted > 10 * PAGES ? "what was moved is whole" : "hardly anything was evicted");
	return 0;
}

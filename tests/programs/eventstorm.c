/* eventstorm MODE THREADS SECONDS: threads that change memory as fast as they can, each its own: an event each time.
 *
 * discard  MADV_DONTNEED; what was discarded reads as zeros
 * remap    mremap to and fro; the contents go along
 * unmap    munmap, and a new mapping in its place
 *
 * With many threads an event is unread at almost any moment. Prints "eventstorm: verified" if no thread has read anything wrong.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include "check.h"

enum { SIZE = 256 << 10, BALLAST = 64 << 20 };

static double end;
static unsigned long changes;

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static char *map(void)
{
	char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

static void *discard(void *unused)
{
	char *memory = map();
	unsigned long count = 0;

	(void)unused;
	memset(memory, 1, SIZE);
	while (count % 64 || seconds() < end) {
		char *page = memory + count % (SIZE / PAGE) * PAGE;

		if (count % 1000 == 0)
			memset(memory, 1, SIZE);
		if (madvise(page, PAGE, MADV_DONTNEED))
			die("madvise");
		if (count % 16 == 0 && *page)
			die("MISMATCH: discarded memory is not empty");
		count++;
	}
	__atomic_add_fetch(&changes, count, __ATOMIC_RELAXED);
	return NULL;
}

static void *remap(void *number)
{
	char *at = map(), value = (long)number % 100 + 1;
	unsigned long count = 0;

	memset(at, value, SIZE);
	while (count % 64 || seconds() < end) {
		char *before = at;

		at = mremap(before, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
		if (at == MAP_FAILED)
			die("mremap");
		if (count % 16 == 0 && at[count % (SIZE / PAGE) * PAGE] != value)
			die("MISMATCH: remapped memory has other contents");
		munmap(before, SIZE);
		count++;
	}
	__atomic_add_fetch(&changes, count, __ATOMIC_RELAXED);
	return NULL;
}

static void *unmap(void *unused)
{
	char *memory = map();
	unsigned long count = 0;

	(void)unused;
	while (count % 64 || seconds() < end) {
		if (memory[count % (SIZE / PAGE) * PAGE])
			die("MISMATCH: new memory is not empty");
		memset(memory, 1, SIZE / 4);
		munmap(memory, SIZE);
		memory = map();
		count++;
	}
	__atomic_add_fetch(&changes, count, __ATOMIC_RELAXED);
	return NULL;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "discard";
	int threads = argc > 2 ? atoi(argv[2]) : 64;
	void *(*work)(void *) = !strcmp(mode, "remap") ? remap : !strcmp(mode, "unmap") ? unmap : discard;
	pthread_t ids[threads];

	/* More than the limit: everything is registered, and events are sent. */
	char *ballast = mmap(NULL, BALLAST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (ballast == MAP_FAILED)
		die("mmap");
	memset(ballast, 1, BALLAST);
	end = seconds() + (argc > 3 ? atof(argv[3]) : 5);
	for (long i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, work, (void *)i))
			die("pthread_create");
	for (int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	fprintf(stderr, "eventstorm: %lu changes\n", changes);
	puts("eventstorm: verified");
	return 0;
}

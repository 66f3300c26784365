/* unmanaged private|shared MIB SECONDS [PROCESSES [HEAP]]: touches memory of its own, or shared anonymous memory, and lives on. The
 * other processes are forked after that and touch shared memory, too. Then each touches a heap of its own of so many MiB. Built with
 * -static nothing can be preloaded into it. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>
#include <sys/wait.h>

static void touch_heap(size_t size)
{
	volatile char *heap = malloc(size + 1);

	if (!heap)
		die("malloc");
	for (size_t at = 0; at < size; at += PAGE)
		heap[at] = 1;
}

int main(int argc, char **argv)
{
	int kind = argc > 1 && !strcmp(argv[1], "shared") ? MAP_SHARED : MAP_PRIVATE;
	size_t size = argument(argc, argv, 2, 64) * MIB;
	unsigned seconds = argument(argc, argv, 3, 1);
	uint64_t processes = argument(argc, argv, 4, 1);
	size_t heap = argument(argc, argv, 5, 0) * MIB;
	volatile char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	for (size_t at = 0; at < size; at += PAGE)
		memory[at] = 1;
	while (processes-- > 1)
		if (!fork()) {
			uint64_t sum = 0;

			for (size_t at = 0; at < size; at += PAGE)
				sum += memory[at];
			touch_heap(heap);
			sleep(seconds);
			_exit(sum != size / PAGE);
		}
	touch_heap(heap);
	sleep(seconds);
	while (wait(NULL) > 0)
		;
	puts("done");
	return 0;
}

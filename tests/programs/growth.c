/* growth HOW MIB NUMBER: NUMBER threads or processes make memory grow as fast as they can, MIB in all, and check it in the end.
 * HOW is small or large (malloc), maps (many small mmaps), map (one large), forks (children), or stacks: of threads that are all started by
 * the last of NUMBER others, or by the main thread if NUMBER is 0. */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "check.h"

#define SMALL 200UL
#define LARGE (1UL << 20)
#define STACK_BYTES (256UL << 10)

static uint64_t base = 1;

static void *map(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

/* Grows by blocks, each of which begins with the address of the one before, and then finds all of them as they were. */
static void blocks(size_t bytes, size_t block, int by_malloc)
{
	size_t count = bytes / block;
	uint64_t *last = NULL;

	for (size_t i = 0; i < count; i++) {
		uint64_t *fresh = by_malloc ? malloc(block) : map(block);
		if (!fresh)
			die("malloc");
		for (size_t at = 0; at + 16 <= block; at += PAGE) {
			fresh[at / 8] = (uintptr_t)last;
			fresh[at / 8 + 1] = mix(i);
		}
		last = fresh;
	}
	for (size_t i = count; i-- > 0; last = (uint64_t *)(uintptr_t)last[0])
		for (size_t at = 0; at + 16 <= block; at += PAGE)
			if (last[at / 8] != last[0] || last[at / 8 + 1] != mix(i)) {
				printf("MISMATCH: block %zu at %zu\n", i, at);
				exit(1);
			}
}

struct part {
	const char *how;
	size_t bytes;
	uint64_t base;
};

static void *grow(void *argument)
{
	struct part *part = argument;

	if (!strcmp(part->how, "small"))
		blocks(part->bytes, SMALL, 1);
	else if (!strcmp(part->how, "large"))
		blocks(part->bytes, LARGE, 1);
	else if (!strcmp(part->how, "maps"))
		blocks(part->bytes, 16 * PAGE, 0);
	else {
		char *memory = map(part->bytes);
		pages_fill(memory, part->bytes / PAGE, part->base);
		pages_expect(memory, part->bytes / PAGE, part->base, part->how);
	}
	return NULL;
}

static pthread_barrier_t all_have_grown;

static void *on_stack(void *number)
{
	volatile char memory[STACK_BYTES];

	for (size_t at = 0; at < STACK_BYTES; at += PAGE)
		*(volatile uint64_t *)(memory + at) = mix((uintptr_t)number + at);
	pthread_barrier_wait(&all_have_grown);
	for (size_t at = 0; at < STACK_BYTES; at += PAGE)
		if (*(volatile uint64_t *)(memory + at) != mix((uintptr_t)number + at)) {
			printf("MISMATCH: stack %zu at %zu\n", (size_t)number, at);
			exit(1);
		}
	return NULL;
}

static void start(pthread_t *thread, const pthread_attr_t *attr, void *(*what)(void *), void *argument)
{
	if (pthread_create(thread, attr, what, argument))
		die("pthread_create");
}

static void *idle(void *nothing)
{
	pthread_barrier_wait(&all_have_grown);
	return nothing;
}

static void *stacks(void *bytes)
{
	size_t count = (size_t)bytes / STACK_BYTES;
	pthread_t *threads = calloc(count, sizeof *threads);
	pthread_attr_t attr;

	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, STACK_BYTES + (64 << 10));
	for (size_t i = 0; i < count; i++)
		start(&threads[i], &attr, on_stack, (void *)i);
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	return NULL;
}

static void stacks_by_last(size_t bytes, size_t number)
{
	pthread_t *threads = calloc(number + 1, sizeof *threads);

	pthread_barrier_init(&all_have_grown, NULL, bytes / STACK_BYTES + (number ? number - 1 : 0));
	for (size_t i = 0; i < number; i++)
		start(&threads[i], NULL, i + 1 < number ? idle : stacks, (void *)bytes);
	if (!number)
		stacks((void *)bytes);
	for (size_t i = 0; i < number; i++)
		pthread_join(threads[i], NULL);
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "map";
	size_t bytes = argument(argc, argv, 2, 256) * MIB, number = argument(argc, argv, 3, 2);
	struct part *parts = calloc(number, sizeof *parts);

	for (size_t i = 0; i < number; i++)
		parts[i] = (struct part){ how, bytes / number & -PAGE, base + i * 100000000 };
	if (!strcmp(how, "stacks")) {
		stacks_by_last(bytes, number);
	} else if (!strcmp(how, "forks")) {
		for (size_t i = 0; i < number; i++) {
			pid_t child = fork();
			if (child < 0)
				die("fork");
			if (!child) {
				grow(&parts[i]);
				_exit(0);
			}
		}
		for (size_t i = 0; i < number; i++) {
			int status;
			if (wait(&status) < 0 || status)
				return 1;
		}
	} else {
		pthread_t *threads = calloc(number, sizeof *threads);
		for (size_t i = 0; i < number; i++)
			start(&threads[i], NULL, grow, &parts[i]);
		for (size_t i = 0; i < number; i++)
			pthread_join(threads[i], NULL);
	}
	printf("%s: verified\n", how);
	return 0;
}

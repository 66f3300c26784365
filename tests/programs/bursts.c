/* bursts THREADS SECONDS SEED [FORKS]: each thread makes a few changes of its mappings, chosen at random, without touching any memory between
 * them, and then compares every page with what has to be there: what was announced of several changes is read at once, and has to be put
 * into its order. With FORKS the threads also fork between two changes, and the child compares what it has. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>

#include "check.h"

/* Changes are of whole units, so that each lies in one mapping. */
#define UNIT 4
#define UNIT_BYTES (UNIT * PAGE)
#define UNITS 16
#define NOT_MAPPED UINT64_MAX

/* The end of all addresses that a program has. */
#define LAST_ADDRESS 0x7ffffffff000UL

static uint64_t end, seed, too_much;
static int forks;

struct arena {
	char *memory;
	/* Of each unit, the key of its first page; 0 is zeros. */
	uint64_t keys[UNITS];
	/* Of each unit, whether something was moved there in this burst. If that is unmapped, the mapping before it grows over the place, and is
	 * moved on or divided there, nothing shows whether it was what was moved there: then the program is killed. */
	char was_target[UNITS];
	uint64_t random, next_key;
	char done[256];
};

static unsigned pick(struct arena *a, unsigned below)
{
	a->random = mix(a->random);
	return (a->random >> 20) % below;
}

static char *unit(struct arena *a, unsigned i)
{
	return a->memory + i * UNIT_BYTES;
}

__attribute__((format(printf, 2, 3))) static void note(struct arena *a, const char *what, ...)
{
	size_t length = strlen(a->done);
	va_list list;

	va_start(list, what);
	vsnprintf(a->done + length, sizeof a->done - length, what, list);
	va_end(list);
}

static void compare(struct arena *a, const char *process)
{
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned p = 0; a->keys[i] != NOT_MAPPED && p < UNIT; p++) {
			uint64_t key = a->keys[i] ? a->keys[i] + p : 0;

			if (page_check(unit(a, i) + p * PAGE, key) >= 0) {
				fprintf(stderr, "MISMATCH unit %u of%s:\n", i, a->done);
				page_report(unit(a, i) + p * PAGE, key, process);
				_exit(1);
			}
		}
}

static void fill(struct arena *a, unsigned i)
{
	a->keys[i] = a->next_key;
	a->next_key += 2 * UNIT;
	pages_fill(unit(a, i), UNIT, a->keys[i]);
}

/* Units from `first` on, as many as that. */
static void set(struct arena *a, unsigned first, unsigned count, uint64_t key)
{
	for (unsigned i = first; i < first + count; i++)
		a->keys[i] = key;
}

static void change(struct arena *a)
{
	unsigned first = pick(a, UNITS), count = 1 + pick(a, UNITS - first < 4 ? UNITS - first : 4), to = pick(a, UNITS);
	int flags = MREMAP_MAYMOVE | MREMAP_FIXED;

	switch (pick(a, 8)) {
	case 0:
		note(a, " munmap %u+%u", first, count);
		if (munmap(unit(a, first), count * UNIT_BYTES))
			die("munmap");
		set(a, first, count, NOT_MAPPED);
		break;
	case 1:
		note(a, " mmap %u+%u", first, count);
		map_at(unit(a, first), count * UNIT_BYTES);
		set(a, first, count, 0);
		break;
	case 2:
	case 3:
		if (a->keys[first] == NOT_MAPPED || first == to)
			break;
		if (pick(a, 2))
			flags |= MREMAP_DONTUNMAP;
		note(a, " move %u to %u%s", first, to, flags & MREMAP_DONTUNMAP ? " and leave it" : "");
		if (mremap(unit(a, first), UNIT_BYTES, UNIT_BYTES, flags, unit(a, to)) != unit(a, to))
			die("mremap");
		a->keys[to] = a->keys[first];
		a->was_target[to] = 1;
		a->keys[first] = flags & MREMAP_DONTUNMAP ? 0 : NOT_MAPPED;
		break;
	case 4:
		for (count = 1; first + count < UNITS && count < 4 && a->keys[first + count] == NOT_MAPPED && !a->was_target[first + count];)
			count++;
		if (a->keys[first] == NOT_MAPPED || count == 1)
			break;
		note(a, " grow %u by %u", first, count - 1);
		if (mremap(unit(a, first), UNIT_BYTES, count * UNIT_BYTES, 0) != unit(a, first))
			die("mremap");
		set(a, first + 1, count - 1, 0);
		break;
	case 5:
		if (a->keys[first] == NOT_MAPPED)
			break;
		note(a, " discard %u", first);
		if (madvise(unit(a, first), UNIT_BYTES, MADV_DONTNEED))
			die("madvise");
		a->keys[first] = 0;
		break;
	case 6:
		note(a, " page out %u+%u", first, count);
		madvise(unit(a, first), count * UNIT_BYTES, MADV_PAGEOUT);
		break;
	case 7:
		if (LAST_ADDRESS - (uintptr_t)unit(a, first) <= too_much)
			break;
		note(a, " refused from %u on", first);
		if (mmap(unit(a, first), LAST_ADDRESS - (uintptr_t)unit(a, first), PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED)
			die("a mapping of all that is there");
		break;
	}
}

static void *burst(void *number)
{
	struct arena a = { .random = mix(seed * 1000 + (uintptr_t)number), .next_key = 1 + ((uint64_t)(uintptr_t)number << 40) };
	/* Nothing else comes into what is unmapped: the hole is too small for it, or nothing else is mapped meanwhile. */
	char *room = mmap(NULL, (UNITS + 2) * UNIT_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (room == MAP_FAILED)
		die("mmap");
	a.memory = room + UNIT_BYTES;
	for (int round = 0; microseconds() < end; round++) {
		unsigned changes = 1 + pick(&a, 6), fork_at = forks && !pick(&a, 4) ? pick(&a, changes + 1) : changes + 1;
		pid_t child = -1;
		int status = 0;

		if (round % 32 == 0) {
			map_at(a.memory, UNITS * UNIT_BYTES);
			for (unsigned i = 0; i < UNITS; i++)
				fill(&a, i);
		}
		for (unsigned i = 0; i < UNITS; i++)
			if (a.keys[i] != NOT_MAPPED && !pick(&a, 3))
				fill(&a, i);
		for (unsigned i = 0; i < UNITS; i++)
			if (a.keys[i] != NOT_MAPPED && pick(&a, 4))
				madvise(unit(&a, i), UNIT_BYTES, MADV_PAGEOUT);
		a.done[0] = 0;
		memset(a.was_target, 0, sizeof a.was_target);
		for (unsigned i = 0; i <= changes; i++) {
			if (i == fork_at) {
				note(&a, " fork");
				child = fork();
				if (child < 0)
					die("fork");
				if (!child) {
					compare(&a, "child");
					_exit(0);
				}
			}
			if (i < changes)
				change(&a);
		}
		compare(&a, "parent");
		if (child > 0 && (waitpid(child, &status, 0) != child || status)) {
			fprintf(stderr, "a child ended with status %#x\n", status);
			_exit(1);
		}
	}
	return NULL;
}

/* Twice the machine's memory: a mapping that is longer is refused, after it was announced what it would unmap; but never by some settings. */
static uint64_t least_refused(void)
{
	FILE *file = fopen("/proc/sys/vm/overcommit_memory", "r");
	int mode = file ? fgetc(file) : '1';
	struct sysinfo machine;

	if (file)
		fclose(file);
	return mode == '1' || sysinfo(&machine) ? UINT64_MAX : 2 * (machine.totalram + machine.totalswap) * machine.mem_unit;
}

int main(int argc, char **argv)
{
	size_t count = argument(argc, argv, 1, 4);
	pthread_t *threads = calloc(count, sizeof *threads);

	end = microseconds() + 1000000 * argument(argc, argv, 2, 5);
	seed = argument(argc, argv, 3, 1);
	forks = argc > 4;
	too_much = least_refused();
	for (size_t i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, burst, (void *)i))
			die("pthread_create");
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	puts("all is where it belongs");
	return 0;
}

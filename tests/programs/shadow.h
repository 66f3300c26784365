/* What shadow.c knows of its memory: the regions, what each page must be, and how a page is checked against that. */
#ifndef SHADOW_H
#define SHADOW_H

#include <pthread.h>
#include <sys/mman.h>
#include "check.h"

#define REGIONS 64
#define MAX_THREADS 64
#define CHILD_REGIONS 3
#define GENERATIONS 2
#define HISTORY 8
#define FILE_PAGES 64
#define COUNTERS 16

enum op {
	NOTHING, WRITE, VERIFY, VERIFY_ALL, DONTNEED, FREE, PAGEOUT, COLD, HUGE_HINT, MAP_OVER, UNMAP, GROW, SHRINK, MOVE,
	MOVE_FIXED, MOVE_DONTUNMAP, PROTECT, LOCK, PIPE, DIRECT_READ, VM_READ, COUNT_MUTEX, WAIT_FUTEX, ALT_STACK, FORK,
	VFORK, SPAWN, THREAD, OPS
};

static const char *const names[OPS] = {
	"nothing", "write", "verify", "verify all", "dontneed", "free", "pageout", "cold", "huge hint", "map over", "unmap",
	"grow", "shrink", "move", "move fixed", "move dontunmap", "protect", "lock", "pipe", "direct read", "vm read",
	"count mutex", "wait futex", "alt stack", "fork", "vfork", "spawn", "thread"
};

/* How often each is chosen, per mille or so. */
static const unsigned weights[OPS] = {
	[WRITE] = 300, [VERIFY] = 250, [VERIFY_ALL] = 10, [DONTNEED] = 25, [FREE] = 25, [PAGEOUT] = 40, [COLD] = 20,
	[HUGE_HINT] = 10, [MAP_OVER] = 15, [UNMAP] = 5, [GROW] = 25, [SHRINK] = 10, [MOVE] = 15, [MOVE_FIXED] = 15,
	[MOVE_DONTUNMAP] = 15, [PROTECT] = 20, [LOCK] = 5, [PIPE] = 30, [DIRECT_READ] = 30, [VM_READ] = 30,
	[COUNT_MUTEX] = 30, [WAIT_FUTEX] = 5, [ALT_STACK] = 10, [FORK] = 20, [VFORK] = 2, [SPAWN] = 2, [THREAD] = 5
};

struct page {
	uint64_t key;
	uint8_t maybe;
	uint8_t events;			/* how many there were, modulo 256 */
	uint8_t history[HISTORY];	/* the operations that changed what is expected, in a ring */
};

/* What was done to a region as a whole, latest last. */
struct deed {
	uint8_t op;
	char *memory;			/* where the region was before */
	uint32_t pages;
};

#define DEEDS 16

struct region {
	struct deed deeds[DEEDS];
	unsigned done;
	char *memory;
	size_t pages;
	char *arena;			/* reserved addresses to move to: two places of max_pages each */
	int place;			/* where in the arena the region is, or -1 */
	struct page *shadow;
};

/* The regions that a child verifies, with shadows of its own. */
struct view {
	struct region regions[CHILD_REGIONS];
	int count;
};

/* One thread's own things; all of it in a shared mapping. */
struct worker {
	uint64_t random;
	unsigned long done[OPS];
	unsigned long refused;			/* moves of several mappings in one */
	pid_t child;
	struct view views[GENERATIONS];		/* of the child, and of the child's child */
	char *stack;				/* its signal stack, in managed memory */
	volatile unsigned signals;
	unsigned raised;
};

/* A mutex and a counter in managed memory. */
struct counter {
	pthread_mutex_t mutex;
	unsigned long value;
	uint32_t futex;
	char rest[PAGE - sizeof(pthread_mutex_t) - 16];
};

static size_t max_pages;
static struct region *regions;
static pthread_mutex_t locks[REGIONS];
static struct worker *workers;
static struct counter *counters;
static unsigned long thread_count;
static uint64_t deadline, seed;
static uint64_t next_key = 1;
static int direct_file = -1;
static __thread struct worker *self;
extern char **environ;

/* --- small things ------------------------------------------------------------------------------------------- */

static uint64_t pick(uint64_t below)
{
	self->random += 0x9e3779b97f4a7c15ULL;
	return mix(self->random) % below;
}

static uint64_t new_key(void)
{
	return __atomic_fetch_add(&next_key, 1, __ATOMIC_RELAXED);
}

static void *map_or_die(void *at, size_t pages, int protection, int flags)
{
	void *memory = mmap(at, pages * PAGE, protection, flags | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

static void *map_private(size_t pages)
{
	return map_or_die(NULL, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE);
}

static void *map_shared(size_t bytes)
{
	return map_or_die(NULL, (bytes + PAGE - 1) / PAGE, PROT_READ | PROT_WRITE, MAP_SHARED);
}

/* A random run of pages inside the region. */
static size_t pick_run(const struct region *region, size_t most, size_t *first)
{
	size_t count = 1 + pick(region->pages < most ? region->pages : most);

	*first = pick(region->pages - count + 1);
	return count;
}

/* --- the shadow --------------------------------------------------------------------------------------------- */

static void expect_from_now(struct region *region, size_t index, uint64_t key, enum op op)
{
	struct page *page = &region->shadow[index];

	page->key = key;
	page->maybe = 0;
	page->history[page->events++ % HISTORY] = op;
}

static void expect_zeros(struct region *region, size_t first, size_t count, enum op op)
{
	for (size_t i = first; i < first + count; i++)
		expect_from_now(region, i, 0, op);
}

static _Noreturn void mismatch(const struct region *region, size_t index, const char *who)
{
	const struct page *page = &region->shadow[index];
	char text[8192];
	int n;

	page_report(region->memory + index * PAGE, page->key, who);
	n = snprintf(text, sizeof text, "  region %p page %zu of %zu, %s, seed %llu, history (latest first):",
		     (void *)region->memory, index, region->pages, page->maybe ? "may be zeros" : "known",
		     (unsigned long long)seed);
	for (int back = 1; back <= HISTORY; back++)
		n += snprintf(text + n, sizeof text - n, " %s;", names[page->history[(page->events - back) & (HISTORY - 1)]]);
	n += snprintf(text + n, sizeof text - n, "\n  what was done to the region (latest first):");
	for (unsigned back = 1; back <= DEEDS && back <= region->done; back++) {
		const struct deed *deed = &region->deeds[(region->done - back) % DEEDS];

		n += snprintf(text + n, sizeof text - n, " %s at %p, %u pages;", names[deed->op], (void *)deed->memory, deed->pages);
	}
	n += snprintf(text + n, sizeof text - n, "\n  wrong pages:");
	for (size_t i = 0; i < region->pages && n < (int)sizeof text - 32; i++)
		if (!region->shadow[i].maybe && page_check(region->memory + i * PAGE, region->shadow[i].key) >= 0)
			n += snprintf(text + n, sizeof text - n, " %zu", i);
	n += snprintf(text + n, sizeof text - n, "\n");
	if (write(STDERR_FILENO, text, n) < 0)
		_exit(2);
	/* The whole process, not only the thread; a child's parent takes the status for a failure of its own. */
	_exit(1);
}

static void verify_page(struct region *region, size_t index, const char *who)
{
	struct page *page = &region->shadow[index];
	char *memory = region->memory + index * PAGE;

	if (page->maybe) {
		/* The kernel may take a freed page between two looks at it: then the second look must find zeros. */
		if (page_check(memory, page->key) < 0)
			return;
		expect_from_now(region, index, 0, FREE);
	}
	if (page_check(memory, page->key) >= 0)
		mismatch(region, index, who);
}

static void verify_run(struct region *region, size_t first, size_t count, const char *who)
{
	for (size_t i = first; i < first + count; i++)
		verify_page(region, i, who);
}

static void verify_region(struct region *region, const char *who)
{
	verify_run(region, 0, region->pages, who);
}

static void write_page(struct region *region, size_t index, enum op op)
{
	uint64_t key = pick(16) ? new_key() : 0;

	page_fill(region->memory + index * PAGE, key);
	expect_from_now(region, index, key, op);
}

static void write_run(struct region *region, size_t most)
{
	size_t first, count = pick_run(region, most, &first);

	for (size_t i = first; i < first + count; i++)
		write_page(region, i, WRITE);
}

#endif

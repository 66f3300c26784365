/* guards SECONDS: guard pages (MADV_GUARD_INSTALL), by libc's functions and by the instruction itself, over memory that is paged out and
 * next to memory that is walked through. What was under a guard is gone for good, and nothing takes a guard away but its removal. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/uio.h>

#define PAGES 512
#define LEN (PAGES * PAGE)
/* By process_madvise on this process itself. */
static void advise_self(char *at, size_t pages, int advice)
{
	struct iovec range = {at, pages * PAGE};
	int self = syscall(SYS_pidfd_open, getpid(), 0);

	if (self < 0 || process_madvise(self, &range, 1, advice, 0) != (ssize_t)range.iov_len)
		die("process_madvise");
	close(self);
}

static void expect_zeros(char *at, size_t pages, const char *when)
{
	for (size_t i = 0; i < pages; i++)
		if (*(volatile uint64_t *)(at + i * PAGE)) {
			printf("old contents %s\n", when);
			exit(1);
		}
}

/* Every 16th page of an area is a guard; all others are walked through. */
static void expect_guards(char *area, const char *when)
{
	for (size_t i = 7; i < PAGES; i += 16)
		if (!is_guarded(area + i * PAGE)) {
			printf("guard %zu is gone %s\n", i, when);
			exit(1);
		}
}

static void remove_at_once(char *area, uint64_t base, void advise_guards(char *, size_t, int))
{
	pages_fill(area, PAGES, base);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	advise_guards(area + 100 * PAGE, 100, GUARD_INSTALL);
	advise_guards(area + 100 * PAGE, 100, GUARD_REMOVE);
	expect_zeros(area + 100 * PAGE, 100, "by libc's functions");
	pages_expect(area, 100, base, "before the guards");
	pages_expect(area + 200 * PAGE, PAGES - 200, base + 200, "behind the guards");
}

/* Both advise 100 pages, of which one is not mapped. */
static void madvise_around_a_hole(char *at, int advice)
{
	if (!madvise(at, 100 * PAGE, advice) || errno != ENOMEM) {
		printf("madvise(%d) comes to no error, or to another\n", advice);
		exit(1);
	}
}

/* The hole is in the second range: the kernel counts the first only. */
static void process_madvise_around_a_hole(char *at, int advice)
{
	struct iovec ranges[2] = {{at, 50 * PAGE}, {at + 50 * PAGE, 50 * PAGE}};
	int self = syscall(SYS_pidfd_open, getpid(), 0);
	ssize_t done = process_madvise(self, ranges, 2, advice, 0);

	close(self);
	if (done != (ssize_t)(50 * PAGE)) {
		printf("process_madvise(%d) advises %zd bytes\n", advice, done);
		exit(1);
	}
}

/* The kernel installs guards on both sides of a hole, and then comes to an error. */
static void remove_around_a_hole(char *area, uint64_t base, void advise_guards(char *, int))
{
	char *guards = area + 100 * PAGE, *hole = area + 160 * PAGE;

	pages_fill(area, PAGES, base);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	if (munmap(hole, PAGE))
		die("munmap");
	advise_guards(guards, GUARD_INSTALL);
	/* In every second round they go at once. */
	for (char *page = guards; base / PAGES % 2 && page < guards + 100 * PAGE; page += PAGE)
		if (page != hole && !is_guarded(page)) {
			printf("no guard at page %zu around a hole\n", (page - area) / PAGE);
			exit(1);
		}
	advise_guards(guards, GUARD_REMOVE);
	expect_zeros(guards, 60, "before a hole");
	expect_zeros(hole + PAGE, 39, "behind a hole");
	pages_expect(area, 100, base, "before the guards around a hole");
	pages_expect(area + 200 * PAGE, PAGES - 200, base + 200, "behind the guards around a hole");
}

/* The guards lie there until something nearby is wanted. */
static void remove_later(char *area, uint64_t base)
{
	pages_fill(area, PAGES, base);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	pages_advise_raw(area + 100 * PAGE, 100, GUARD_INSTALL);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	pages_advise_raw(area + 100 * PAGE, 100, GUARD_REMOVE);
	expect_zeros(area + 100 * PAGE, 100, "by raw calls");
	pages_expect(area, 100, base, "before the raw guards");
	pages_expect(area + 200 * PAGE, PAGES - 200, base + 200, "behind the raw guards");
}

static void walk_fresh(char *area)
{
	area = map_at(area, LEN);
	for (size_t i = 7; i < PAGES; i += 16)
		pages_advise_raw(area + i * PAGE, 1, GUARD_INSTALL);
	for (size_t i = 0; i < PAGES; i++)
		if (i % 16 != 7)
			area[i * PAGE] = 1;
	expect_guards(area, "after a walk through fresh memory");
}

static void walk_stored(char *area, uint64_t base)
{
	area = map_at(area, LEN);
	pages_fill(area, PAGES, base);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	for (size_t i = 7; i < PAGES; i += 16)
		pages_advise_raw(area + i * PAGE, 1, GUARD_INSTALL);
	for (size_t i = 0; i < PAGES; i++)
		if (i % 16 != 7)
			pages_expect(area + i * PAGE, 1, base + i, "between guards");
	expect_guards(area, "after a walk through stored memory");
	for (size_t i = 7; i < PAGES; i += 16)
		pages_advise_raw(area + i * PAGE, 1, GUARD_REMOVE);
	for (size_t i = 7; i < PAGES; i += 16)
		expect_zeros(area + i * PAGE, 1, "between what was walked through");
}

int main(int argc, char **argv)
{
	uint64_t end = microseconds() + argument(argc, argv, 1, 5) * 1000000;
	char *room = mmap(NULL, 3 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (room == MAP_FAILED)
		die("mmap");
	catch_faults();
	char *area = map_at(room + LEN, LEN);
	if (!has_guards(area)) {
		printf("guards stay and what was under them is gone\n");
		return 0;
	}
	for (uint64_t base = 1; microseconds() < end; base += PAGES) {
		remove_at_once(map_at(area, LEN), base, pages_advise);
		remove_at_once(map_at(area, LEN), base, advise_self);
		remove_around_a_hole(map_at(area, LEN), base, madvise_around_a_hole);
		remove_around_a_hole(map_at(area, LEN), base, process_madvise_around_a_hole);
		remove_later(map_at(area, LEN), base);
		walk_fresh(area);
		walk_stored(area, base);
	}
	printf("guards stay and what was under them is gone\n");
	return 0;
}

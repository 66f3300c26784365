/* locksall lock|unlock|scan|populate: fills 4 MiB, does something to all memory that is mapped, fills 40 MiB more, and checks both.
 * lock: mlockall of what is there, which has to stay where it is; unlock: and munlockall; scan: reads a byte of each page that may be written; populate:
 * MADV_POPULATE_READ of each mapping. */
#define _GNU_SOURCE
#include "check.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static char *filled(size_t size, uint64_t key)
{
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	for (size_t at = 0; at < size; at += PAGE)
		page_fill(memory + at, key + at);
	return memory;
}

static int is_wrong(const char *memory, size_t size, uint64_t key)
{
	for (size_t at = 0; at < size; at += PAGE)
		if (page_check(memory + at, key + at) >= 0)
			return 1;
	return 0;
}

static int are_absent(char *memory, size_t size)
{
	static unsigned char present[4 * MIB / PAGE];

	if (mincore(memory, size, present))
		die("mincore");
	for (size_t i = 0; i < size / PAGE; i++)
		if (!(present[i] & 1))
			return 1;
	return 0;
}

static void visit_all(int populates)
{
	static char maps[1 << 16];
	FILE *file = fopen("/proc/self/maps", "r");
	size_t length;

	if (!file)
		die("/proc/self/maps");
	length = fread(maps, 1, sizeof maps - 1, file);
	maps[length] = 0;
	fclose(file);
	for (char *line = strtok(maps, "\n"); line; line = strtok(NULL, "\n")) {
		unsigned long start, end;
		char rights[5];

		if (sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 || strncmp(rights, "rw", 2))
			continue;
		if (populates)
			madvise((void *)start, end - start, MADV_POPULATE_READ);
		for (unsigned long at = start; !populates && at < end; at += PAGE)
			(void)*(volatile char *)at;
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	char *first = filled(4 * MIB, 1), *second;

	if (!strcmp(what, "scan") || !strcmp(what, "populate"))
		visit_all(!strcmp(what, "populate"));
	else if (mlockall(MCL_CURRENT))
		die("mlockall");
	if (!strcmp(what, "unlock") && munlockall())
		die("munlockall");
	second = filled(40 * MIB, 1UL << 40);
	if (!strcmp(what, "lock") && are_absent(first, 4 * MIB)) {
		puts("what is locked was evicted");
		return 1;
	}
	if (is_wrong(first, 4 * MIB, 1) || is_wrong(second, 40 * MIB, 1UL << 40)) {
		puts("wrong");
		return 1;
	}
	puts("right");
	return 0;
}

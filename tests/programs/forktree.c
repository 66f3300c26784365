/* forktree [MIB [CHILDREN]]: children and grandchildren verify what they inherited and change their own copy of it,
 * all at once with their parent. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include "check.h"

static char *memory;
static size_t pages;
static int children;

/* Verifies the memory under `base`, and has children do so under other bases. Each then holds another content. */
static int node(uint64_t base, int depth)
{
	int bad = 0, status;

	for (int i = 0; depth && i < children; i++) {
		pid_t child = fork();

		if (child < 0)
			die("fork");
		if (!child) {
			uint64_t own = base + 1000000 * (i + 1);
			size_t from = pages / children * i, count = pages / children;

			bad = pages_wrong(memory, pages, base, "inherited");
			pages_fill(memory + from * PAGE, count, own + from);
			bad |= pages_wrong(memory + from * PAGE, count, own + from, "own");
			pages_fill(memory + from * PAGE, count, base + from);
			_exit(bad | node(base, depth - 1));
		}
	}
	bad |= pages_wrong(memory, pages, base, "parent");
	while (wait(&status) > 0)
		bad |= status != 0;
	return bad;
}

int main(int argc, char **argv)
{
	int bad = 0;

	pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	children = argument(argc, argv, 2, 3);
	memory = aligned_alloc(PAGE, pages * PAGE);
	for (uint64_t round = 1; round < 4; round++) {
		pages_fill(memory, pages, round);
		bad |= node(round, 2);
	}
	puts(bad ? "forktree: wrong" : "forktree: verified");
	return bad;
}

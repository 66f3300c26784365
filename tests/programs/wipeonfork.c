/* wipeonfork ROUNDS: memory that a forked child is to find empty (MADV_WIPEONFORK by a raw system call), beside memory that it is to
 * inherit, both paged out. The parent keeps all of it. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define PAGES 256
#define LEN (PAGES * PAGE)
#define WIPEONFORK 18
#define KEEPONFORK 19

static void advise_raw(char *at, int advice)
{
	if (syscall(SYS_madvise, at, LEN, advice))
		die("madvise");
}

static void expect_inherited(char *secret, char *shared, uint64_t base)
{
	for (size_t i = 0; i < PAGES; i++)
		for (size_t word = 0; word < PAGE / 8; word += 64)
			if (((volatile uint64_t *)(secret + i * PAGE))[word]) {
				printf("a child reads what was to be wiped\n");
				fflush(stdout);
				_exit(1);
			}
	pages_expect(shared, PAGES, base + PAGES, "inherited by a child");
}

/* Forks a child that looks at what it has, and so does a child of its own if there is to be one; gives its status. */
static int look_in_child(char *secret, char *shared, uint64_t base, int has_child)
{
	int status = 0;
	pid_t child = fork();

	if (child == 0) {
		expect_inherited(secret, shared, base);
		if (has_child) {
			child = fork();
			if (child == 0) {
				expect_inherited(secret, shared, base);
				_exit(0);
			}
			if (child < 0 || waitpid(child, &status, 0) < 0)
				die("fork");
		}
		_exit(status ? 1 : 0);
	}
	if (child < 0 || waitpid(child, &status, 0) < 0)
		die("fork");
	return status;
}

int main(int argc, char **argv)
{
	unsigned long rounds = argument(argc, argv, 1, 20);
	char *room = mmap(NULL, 3 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (room == MAP_FAILED)
		die("mmap");
	char *secret = map_at(room, LEN), *shared = map_at(room + LEN, LEN);
	for (uint64_t round = 0, base = 1; round < rounds; round++, base += 2 * PAGES) {
		pages_fill(secret, PAGES, base);
		pages_fill(shared, PAGES, base + PAGES);
		advise_raw(secret, WIPEONFORK);
		if (round % 2)
			advise_raw(shared, WIPEONFORK), advise_raw(shared, KEEPONFORK);
		madvise(secret, 2 * LEN, MADV_PAGEOUT);
		if (look_in_child(secret, shared, base, round % 3 == 2))
			return 1;
		pages_expect(secret, PAGES, base, "the parent's own");
		pages_expect(shared, PAGES, base + PAGES, "what the parent shares");
	}
	printf("children found what they were to find\n");
	return 0;
}

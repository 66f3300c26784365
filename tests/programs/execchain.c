/* execchain [MIB [CHILDREN]]: a program with much memory starts many short children by vfork, posix_spawn and fork,
 * each of which execs itself several times, and finds its own memory as it was. */
#define _GNU_SOURCE
#include <spawn.h>
#include <sys/wait.h>
#include "check.h"

extern char **environ;

static void expect_success(pid_t child, const char *how)
{
	int status;

	if (child < 0)
		die(how);
	if (waitpid(child, &status, 0) != child || status) {
		fprintf(stderr, "MISMATCH child by %s: status %x\n", how, status);
		_exit(1);
	}
}

/* One link: fills and verifies a little memory, then execs the next. */
static int chain(char **argv, int depth)
{
	size_t pages = 512;
	char *memory = aligned_alloc(PAGE, pages * PAGE);
	char next[16];

	pages_fill(memory, pages, 1 + depth);
	pages_expect(memory, pages, 1 + depth, "chain");
	if (!depth)
		return 0;
	snprintf(next, sizeof next, "%d", depth - 1);
	execl("/proc/self/exe", argv[0], "chain", next, (char *)NULL);
	die("exec");
	return 2;
}

int main(int argc, char **argv)
{
	if (argc > 2 && !strcmp(argv[1], "chain"))
		return chain(argv, atoi(argv[2]));

	size_t pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	int children = argument(argc, argv, 2, 60);
	char *memory = aligned_alloc(PAGE, pages * PAGE);
	char *link[] = { argv[0], "chain", "3", NULL };
	pid_t child;

	pages_fill(memory, pages, 1);
	for (int i = 0; i < children; i++) {
		size_t at = mix(i) % (pages - 256);

		pages_expect(memory + at * PAGE, 256, 1 + at, "before");
		switch (i % 3) {
		case 0:
			child = vfork();
			if (!child) {
				execv("/proc/self/exe", link);
				_exit(2);
			}
			expect_success(child, "vfork");
			break;
		case 1:
			if (posix_spawn(&child, "/proc/self/exe", NULL, NULL, link, environ))
				die("posix_spawn");
			expect_success(child, "posix_spawn");
			break;
		default:
			child = fork();
			if (!child) {
				pages_expect(memory + at * PAGE, 256, 1 + at, "forked");
				execv("/proc/self/exe", link);
				_exit(2);
			}
			expect_success(child, "fork");
		}
	}
	pages_expect(memory, pages, 1, "after");
	printf("execchain: %d children\n", children);
	return 0;
}

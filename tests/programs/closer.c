/* closer [MIB]: a program that closes every descriptor but stdout and stderr, and then runs on, forks and execs. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include "check.h"

static void close_all(void)
{
	close(0);
	for (int fd = 3; fd < 1024; fd++)
		close(fd);
}

int main(int argc, char **argv)
{
	size_t pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	int again = argc > 2;
	char *memory = aligned_alloc(PAGE, pages * PAGE);
	int status;
	pid_t child;

	pages_fill(memory, pages / 2, 1);
	close_all();
	pages_fill(memory + pages / 2 * PAGE, pages - pages / 2, 1 + pages / 2);
	pages_expect(memory, pages, 1, "after closing");

	child = fork();
	if (child < 0)
		die("fork");
	if (!child) {
		close_all();
		_exit(pages_wrong(memory, pages, 1, "child"));
	}
	pages_expect(memory, pages, 1, "parent");
	if (waitpid(child, &status, 0) != child || status)
		return 1;
	printf("closer: verified%s\n", again ? " after exec" : "");
	fflush(stdout);
	if (!again)
		execl("/proc/self/exe", argv[0], argc > 1 ? argv[1] : "64", "again", (char *)NULL);
	return again ? 0 : 2;
}

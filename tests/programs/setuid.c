/* setuid [MIB]: a program of root becomes nobody, goes on with its memory, and execs as nobody. */
#define _GNU_SOURCE
#include <grp.h>
#include <sys/wait.h>
#include "check.h"

#define NOBODY 65534

int main(int argc, char **argv)
{
	size_t pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	int again = argc > 2;
	char *memory = aligned_alloc(PAGE, pages * PAGE);
	pid_t child;
	int status;

	pages_fill(memory, pages, 1);
	if (!again && !geteuid() &&
	    (setgroups(0, NULL) || setresgid(NOBODY, NOBODY, NOBODY) || setresuid(NOBODY, NOBODY, NOBODY)))
		die("setresuid");
	pages_expect(memory, pages, 1, "as nobody");
	pages_fill(memory, pages, 2);
	child = fork();
	if (child < 0)
		die("fork");
	if (!child)
		_exit(pages_wrong(memory, pages, 2, "child"));
	pages_expect(memory, pages, 2, "rewritten as nobody");
	if (waitpid(child, &status, 0) != child || status)
		return 1;
	printf("setuid: verified%s\n", again ? " after exec" : "");
	fflush(stdout);
	if (!again)
		execl("/proc/self/exe", argv[0], argc > 1 ? argv[1] : "64", "again", (char *)NULL);
	return again ? 0 : 2;
}

/* daemonize [MIB]: the program forks twice and its parent ends first; the daemon goes on with the memory and says so
 * on stdout when it is done. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include "check.h"

int main(int argc, char **argv)
{
	size_t pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	char *memory = aligned_alloc(PAGE, pages * PAGE);
	pid_t child;

	pages_fill(memory, pages, 1);
	child = fork();
	if (child < 0)
		die("fork");
	if (child)
		_exit(0);
	setsid();
	child = fork();
	if (child < 0)
		die("fork");
	if (child)
		_exit(0);
	usleep(200000);
	for (uint64_t round = 1; round < 4; round++) {
		pages_expect(memory, pages, round, "daemon");
		pages_fill(memory, pages, round + 1);
	}
	puts("daemonize: verified");
	return 0;
}

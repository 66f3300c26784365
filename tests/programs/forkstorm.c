/* forkstorm CHILDREN SECONDS: forks without a pause, from a process of which much is evicted; the children touch some of it and stay.
 *
 * Prints "forkstorm: verified" if each child has found what its parent had.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "check.h"

enum { SIZE = 80 << 20 };

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1000, wrong = 0;
	char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pid_t *children = calloc(count, sizeof(*children));

	if (memory == MAP_FAILED || !children)
		die("memory");
	memset(memory, 7, SIZE);
	for (int i = 0; i < count; i++) {
		children[i] = fork();
		if (children[i] < 0)
			die("fork");
		if (children[i] == 0) {
			for (int at = 0; at < SIZE; at += SIZE / 8)
				if (memory[at] != 7)
					_exit(3);
			pause();
			_exit(0);
		}
	}
	sleep(argc > 2 ? atoi(argv[2]) : 5);
	for (int i = 0; i < count; i++) {
		int status;

		kill(children[i], SIGTERM);
		waitpid(children[i], &status, 0);
		wrong += WIFEXITED(status);
	}
	if (wrong)
		die("MISMATCH: a child has found other contents");
	puts("forkstorm: verified");
	return 0;
}

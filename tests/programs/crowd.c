/* crowd COUNT KIB SECONDS [kept]: children that touch as much private memory each, all of it three times a second; what a fork is to wipe is
 * never moved out. */
#include <sys/wait.h>
#include "check.h"

int main(int argc, char **argv)
{
	int count = argument(argc, argv, 1, 40), seconds = argument(argc, argv, 3, 10);
	size_t size = argument(argc, argv, 2, 7680) * 1024ul;

	for (int i = 0; i < count; i++) {
		if (fork())
			continue;
		char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (argc > 4 && madvise(memory, size, MADV_WIPEONFORK))
			return 2;
		for (int round = 0; round < 3 * seconds; round++) {
			for (size_t at = 0; at < size; at += PAGE)
				memory[at] = mix(i + at) | 1;
			usleep(1000000 / 3);
		}
		_exit(0);
	}
	while (wait(NULL) > 0)
		;
	return 0;
}

/* crowd COUNT KIB SECONDS [exec]: children that touch as much private memory each, all of it three times a second; executable memory is
 * never moved out. */
#include <sys/wait.h>
#include "check.h"

int main(int argc, char **argv)
{
	int count = argument(argc, argv, 1, 40), seconds = argument(argc, argv, 3, 10);
	size_t size = argument(argc, argv, 2, 7680) * 1024ul;
	int protection = PROT_READ | PROT_WRITE | (argc > 4 ? PROT_EXEC : 0);

	for (int i = 0; i < count; i++) {
		if (fork())
			continue;
		char *memory = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

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

/* threadexec TIMES MIB: executes itself TIMES times, each time by a thread that is not the first one, while two others map and touch MIB in
 * all. That thread goes on under the id of the process, whatever its own was. A long list of arguments makes it slow. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include "check.h"

#define GROWERS 2
#define BLOCK (16 * PAGE)
#define ARGUMENTS 48
#define ARGUMENT_BYTES (32 << 10)

static void *grow(void *bytes)
{
	for (size_t at = 0; at < (size_t)bytes; at += BLOCK) {
		char *memory = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED)
			die("mmap");
		for (size_t page = 0; page < BLOCK; page += PAGE)
			memory[page] = 1;
	}
	return NULL;
}

static char *arguments[ARGUMENTS + 4];

static void *execute(void *bytes)
{
	grow(bytes);
	execv("/proc/self/exe", arguments);
	die("execv");
	return NULL;
}

int main(int argc, char **argv)
{
	uintptr_t times = argument(argc, argv, 1, 100), mib = argument(argc, argv, 2, 30);
	static char text[2][24], filler[ARGUMENT_BYTES];
	pthread_t threads[GROWERS + 1];

	if (!times) {
		puts("executed to the end");
		return 0;
	}
	snprintf(text[0], sizeof text[0], "%lu", times - 1);
	snprintf(text[1], sizeof text[1], "%lu", mib);
	memset(filler, 'x', sizeof filler - 1);
	arguments[0] = argv[0];
	arguments[1] = text[0];
	arguments[2] = text[1];
	for (int i = 0; i < ARGUMENTS; i++)
		arguments[3 + i] = filler;
	for (int i = 0; i <= GROWERS; i++)
		if (pthread_create(&threads[i], NULL, i < GROWERS ? grow : execute, (void *)(mib * MIB / (GROWERS + 1))))
			die("pthread_create");
	pthread_join(threads[GROWERS], NULL);
	return 1;
}

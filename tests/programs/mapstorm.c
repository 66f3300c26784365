/* mapstorm prot|flags COUNT SECONDS: COUNT mappings of one page each, half of which it writes to until it ends, and finds as they were.
 * prot: every other mapping is read-only. flags: all are writable; every other one is left out of core dumps.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	int flags = !strcmp(argv[1], "flags");
	long count = atol(argv[2]), seconds = atol(argv[3]);
	char *memory = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 1;
	memset(memory, 1, count * PAGE);
	for (long i = 0; i < count; i += 2)
		if (flags ? madvise(memory + i * PAGE, PAGE, MADV_DONTDUMP) : mprotect(memory + i * PAGE, PAGE, PROT_READ)) {
			perror("mapstorm");
			return 1;
		}
	puts("ready");
	fflush(stdout);
	time_t end = time(NULL) + seconds;
	for (unsigned char round = 1; time(NULL) < end; round++) {
		for (long i = 1; i < count; i += 2) {
			if (memory[i * PAGE] != (char)round) {
				fprintf(stderr, "MISMATCH page %ld\n", i);
				return 1;
			}
			memory[i * PAGE] = round + 1;
		}
		usleep(1000);
	}
	return 0;
}

/* advicestorm THREADS MIB SECONDS: each thread has MIB MiB paged out (MADV_PAGEOUT) and touches them, again and again; finds them as they were. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static long bytes;
static time_t end;

static void *storm(void *unused)
{
	(void)unused;
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		exit(1);
	for (int round = 0; time(NULL) < end; round++) {
		for (long at = 0; at < bytes; at += 4096) {
			if (memory[at] != (char)round) {
				fprintf(stderr, "MISMATCH at %ld\n", at);
				exit(1);
			}
			memory[at] = round + 1;
		}
		if (madvise(memory, bytes, MADV_PAGEOUT))
			perror("madvise");
	}
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	pthread_t threads[256];
	int count = atoi(argv[1]);
	bytes = atol(argv[2]) << 20;
	end = time(NULL) + atoi(argv[3]);
	for (int i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, storm, NULL))
			return 1;
	puts("ready");
	fflush(stdout);
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	return 0;
}

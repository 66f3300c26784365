/* turns work|relay PROCESSES BYTES SECONDS: so many processes, each with BYTES of memory, touch pages of it at random, check what
 * they find there and change it, all of them together for SECONDS. With "work" each for itself, while a part of each page is
 * read from a file and, in one of them, signals come; with "relay" one after the other: each goes on when the one before it has
 * touched some pages. Says how many pages the least busy of them has touched. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / sizeof(uint64_t))
/* Pages that are touched before the next one goes on. */
#define STINT 500

static void fail(const char *what)
{
	perror(what);
	_exit(1);
}

static void nothing(int signal)
{
	(void)signal;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* What the page holds when it was touched so many times: a quarter of it numbers that differ, the rest is the same. */
static void write_page(uint64_t *words, uint64_t page, uint64_t times)
{
	for (uint64_t i = 0; i < WORDS / 2; i++)
		words[i] = (page + 1) * 0x9e3779b97f4a7c15 * (i % 4 == 0 ? i + 1 : 1) + times;
}

static void check_page(const uint64_t *words, uint64_t page, uint64_t times)
{
	static uint64_t expected[WORDS];

	write_page(expected, page, times);
	if (memcmp(words, expected, PAGE / 2) != 0) {
		fprintf(stderr, "MISMATCH in page %lu\n", page);
		_exit(1);
	}
}

static uint64_t touch(int number, int relay, uint64_t bytes, double until, int from, int to)
{
	uint64_t pages = bytes / PAGE, state = 1 + (uint64_t)number, touched = 0;
	uint64_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t *times = calloc(pages, sizeof *times);
	int zeros = open("/dev/zero", O_RDONLY);
	char token = 0;

	if (memory == MAP_FAILED || times == NULL || zeros < 0)
		fail("turns");
	for (uint64_t page = 0; page < pages; page++)
		write_page(memory + page * WORDS, page, 0);
	if (!relay && number == 0) {
		struct itimerval often = {{0, 3000}, {0, 3000}};

		/* No SA_RESTART: a signal ends what waits. */
		sigaction(SIGALRM, &(struct sigaction){.sa_handler = nothing}, NULL);
		setitimer(ITIMER_REAL, &often, NULL);
	}
	do {
		if (relay && read(from, &token, 1) != 1)
			return touched;
		for (int i = 0; i < STINT; i++, touched++) {
			state = state * 6364136223846793005 + 1442695040888963407;
			uint64_t page = (state >> 33) % pages, *words = memory + page * WORDS;

			/* The kernel is the first to touch it. */
			if (!relay && i % 2 == 0)
				while (read(zeros, words + WORDS / 2, PAGE / 2) < 0)
					if (errno != EINTR)
						fail("read");
			check_page(words, page, times[page]);
			write_page(words, page, ++times[page]);
		}
		if (relay && write(to, &token, 1) != 1)
			return touched;
	} while (now() < until);
	return touched;
}

int main(int argc, char **argv)
{
	int relay = argc == 5 && strcmp(argv[1], "relay") == 0, processes = argc == 5 ? atoi(argv[2]) : 0, failed = 0;

	if (processes < 1 || processes > 1024) {
		fprintf(stderr, "turns work|relay PROCESSES BYTES SECONDS\n");
		return 2;
	}
	double until = now() + atof(argv[4]);
	int (*pipes)[2] = calloc(processes, sizeof *pipes);
	uint64_t *touched =
		mmap(NULL, processes * sizeof *touched, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < processes; i++)
		if (pipe(pipes[i]) != 0)
			fail("pipe");
	for (int i = 0; i < processes; i++) {
		pid_t child = fork();

		if (child < 0)
			fail("fork");
		if (child == 0) {
			int from = pipes[i][0], to = pipes[(i + 1) % processes][1];

			for (int j = 0; j < processes; j++) {
				if (pipes[j][0] != from)
					close(pipes[j][0]);
				if (pipes[j][1] != to)
					close(pipes[j][1]);
			}
			touched[i] = touch(i, relay, strtoull(argv[3], NULL, 0), until, from, to);
			_exit(0);
		}
	}
	if (relay && write(pipes[0][1], "", 1) != 1)
		fail("write");
	for (int j = 0; j < processes; j++) {
		close(pipes[j][0]);
		close(pipes[j][1]);
	}
	for (int i = 0, status; i < processes; i++)
		failed |= wait(&status) < 0 || status != 0;
	uint64_t least = touched[0];
	for (int i = 1; i < processes; i++)
		least = touched[i] < least ? touched[i] : least;
	printf("%lu\n", least);
	return failed;
}

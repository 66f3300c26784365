/* inspected MIB [wait|handler|child]: fills memory with a pattern and has it looked at.
 *
 * wait     prints its id, the address and the number of pages, and sleeps; SIGUSR1 makes it crash with a core dump.
 * handler  crashes; a handler on a stack of its own verifies all memory, and ends the program with status 0 if it is right.
 * child    has a forked child attach by ptrace, as crash reporters do, and read every page by PTRACE_PEEKDATA; the child waits
 *          up to 10 s for the first page that cannot be read. Prints how many milliseconds that took.
 *
 * Word 0 of page p holds p + 1 times the golden ratio, the other words hold p + 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GOLDEN 0x9E3779B97F4A7C15ull
#define WORDS 512

static uint64_t *data;
static size_t pages;

static uint64_t expected(size_t page, size_t word)
{
	return word ? page + 1 : (page + 1) * GOLDEN;
}

static double milliseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static void crash(int signal_number)
{
	(void)signal_number;
	signal(SIGSEGV, SIG_DFL);
	*(volatile int *)0 = 1;
}

static void verify(int signal_number)
{
	(void)signal_number;
	for (size_t page = 0; page < pages; page++)
		for (size_t word = 0; word < WORDS; word++)
			if (data[page * WORDS + word] != expected(page, word)) {
				static const char text[] = "MISMATCH in the handler\n";

				(void)!write(2, text, sizeof text - 1);
				_exit(1);
			}
	_exit(0);
}

/* The crash reporter. */
static int read_parent(void)
{
	pid_t parent = getppid();
	double start = milliseconds(), waited = 0;
	int status;

	if (ptrace(PTRACE_ATTACH, parent, 0, 0) || waitpid(parent, &status, __WALL) != parent) {
		perror("PTRACE_ATTACH");
		return 1;
	}
	start = milliseconds();
	for (size_t page = 0; page < pages; page++) {
		long word;

		for (;;) {
			errno = 0;
			word = ptrace(PTRACE_PEEKDATA, parent, &data[page * WORDS], 0);
			if (!errno)
				break;
			waited = milliseconds() - start;
			if (waited > 10000) {
				fprintf(stderr, "page %zu of %zu: %s\n", page, pages, strerror(errno));
				return 1;
			}
			usleep(1000);
		}
		if ((uint64_t)word != expected(page, 0)) {
			fprintf(stderr, "MISMATCH page %zu: %lx\n", page, word);
			return 1;
		}
	}
	printf("%.0f\n", waited);
	fflush(stdout);
	return ptrace(PTRACE_DETACH, parent, 0, 0) ? 1 : 0;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 2 ? argv[2] : "wait";
	size_t size = strtoul(argv[1], NULL, 10) << 20;
	int status;
	pid_t child;

	pages = size / 4096;
	data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (data == MAP_FAILED)
		return 2;
	for (size_t page = 0; page < pages; page++)
		for (size_t word = 0; word < WORDS; word++)
			data[page * WORDS + word] = expected(page, word);
	/* Reclaim has its time. */
	usleep(300000);
	if (!strcmp(mode, "handler")) {
		stack_t stack = { .ss_sp = malloc(65536), .ss_size = 65536 };
		struct sigaction action = { .sa_handler = verify, .sa_flags = SA_ONSTACK };

		sigaltstack(&stack, NULL);
		sigaction(SIGSEGV, &action, NULL);
		raise(SIGSEGV);
	}
	prctl(PR_SET_PTRACER, -1L, 0, 0, 0);
	if (!strcmp(mode, "child")) {
		child = fork();
		if (!child)
			_exit(read_parent());
		waitpid(child, &status, 0);
		return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
	}
	signal(SIGUSR1, crash);
	printf("%d %lu %zu\n", getpid(), (unsigned long)data, pages);
	fflush(stdout);
	for (;;)
		pause();
}

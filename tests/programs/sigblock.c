/* sigblock [MIB]: every signal blocked, in the program, a thread and a child. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include "check.h"

static size_t pages;
static char *memory;

static void *thread(void *unused)
{
	pages_expect(memory, pages, 1, "thread");
	pages_fill(memory, pages, 2);
	return unused;
}

int main(int argc, char **argv)
{
	sigset_t all;
	pthread_t other;
	pid_t child;
	int status;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	pages = argument(argc, argv, 1, 64) * MIB / PAGE;
	memory = aligned_alloc(PAGE, pages * PAGE);
	pages_fill(memory, pages, 1);
	pages_expect(memory, pages, 1, "main");
	if (pthread_create(&other, NULL, thread, NULL) || pthread_join(other, NULL))
		die("pthread");
	child = fork();
	if (child < 0)
		die("fork");
	if (!child)
		_exit(pages_wrong(memory, pages, 2, "child"));
	pages_expect(memory, pages, 2, "parent");
	if (waitpid(child, &status, 0) != child || status)
		return 1;
	puts("sigblock: verified");
	return 0;
}

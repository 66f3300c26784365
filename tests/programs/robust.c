/* robust ROUNDS: threads of a forked process hold process-shared robust mutexes, and their stacks, with libc's thread descriptors in
 * them, are paged out. Then the process is killed, exits, or executes another program. Each mutex must pass to the parent, with
 * EOWNERDEAD, within a second. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "check.h"

#define THREADS 8
#define STACK (512UL << 10)
#define TOUCHED (256UL << 10)

enum { KILL, EXIT, EXEC, WAYS };

static const char *const ways[] = {"killed", "exited", "executed another program"};

static struct shared {
	pthread_mutex_t mutexes[THREADS];
	_Atomic int held, out;
} *shared;

static char *stacks[THREADS];

static size_t resident(char *memory, size_t size)
{
	unsigned char present[STACK / PAGE];
	size_t pages = 0;

	if (mincore(memory, size, present))
		die("mincore");
	for (size_t i = 0; i < size / PAGE; i++)
		pages += present[i] & 1;
	return pages;
}

static void *holder(void *argument)
{
	volatile char touched[TOUCHED];

	for (size_t i = 0; i < TOUCHED; i += PAGE)
		touched[i] = 1;
	(void)touched[0];
	if (pthread_mutex_lock(&shared->mutexes[(long)argument]))
		_exit(2);
	shared->held++;
	for (;;)
		pause();
	return NULL;
}

/* Pages the stacks out, but for a few pages of each: a managed program may keep what the kernel needs at a thread's end. */
static void page_out(void)
{
	uint64_t start = microseconds();
	int out;

	do {
		out = 0;
		for (int i = 0; i < THREADS; i++) {
			madvise(stacks[i], STACK, MADV_PAGEOUT);
			out += resident(stacks[i], STACK) <= 4;
		}
		if (out < THREADS)
			usleep(20000);
	} while (out < THREADS && microseconds() - start < 5000000);
	shared->out = out;
}

static void own(int way)
{
	pthread_attr_t attr;
	pthread_t thread;

	pthread_attr_init(&attr);
	for (long i = 0; i < THREADS; i++) {
		stacks[i] = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (stacks[i] == MAP_FAILED || pthread_attr_setstack(&attr, stacks[i], STACK) ||
		    pthread_create(&thread, &attr, holder, (void *)i))
			die("thread");
	}
	while (shared->held < THREADS)
		usleep(1000);
	/* The threads are to be asleep. */
	usleep(20000);
	page_out();
	if (way == EXIT)
		_exit(0);
	if (way == EXEC)
		execl("/bin/true", "true", NULL);
	for (;;)
		pause();
}

/* Takes over the mutexes of a process that is gone; says how many did not come. */
static int stuck(void)
{
	int stuck = 0;

	for (int i = 0; i < THREADS; i++) {
		struct timespec until;

		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec++;
		stuck += pthread_mutex_timedlock(&shared->mutexes[i], &until) != EOWNERDEAD;
	}
	return stuck;
}

static int round_of(int way)
{
	pthread_mutexattr_t attr;
	pid_t pid;
	int lost;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		die("mmap");
	for (int i = 0; i < THREADS; i++)
		pthread_mutex_init(&shared->mutexes[i], &attr);
	if ((pid = fork()) < 0)
		die("fork");
	if (!pid)
		own(way);
	while (way == KILL && !shared->out)
		usleep(1000);
	if (way == KILL)
		kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	lost = stuck();
	if (lost)
		printf("%d of %d mutexes stayed locked when their process %s\n", lost, THREADS, ways[way]);
	if (shared->out < THREADS)
		printf("only %d of %d stacks were paged out\n", shared->out, THREADS);
	return lost || shared->out < THREADS;
}

int main(int argc, char **argv)
{
	unsigned long rounds = argument(argc, argv, 1, 3);
	int wrong = 0;

	for (unsigned long i = 0; i < rounds && !wrong; i++)
		for (int way = 0; way < WAYS; way++)
			wrong |= round_of(way);
	if (!wrong)
		puts("every mutex passed to the next owner");
	return wrong;
}

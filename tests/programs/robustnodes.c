/* robustnodes ROUNDS: threads hold robust mutexes in private memory that is paged out, and behind them in the kernel's list others in
 * shared memory. Threads end, or their process is killed. Each mutex must pass to the next owner, with EOWNERDEAD, within a second. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "check.h"

#define THREADS 24
/* A page for each mutex, and as many around it that are paged out with it. */
#define SPREAD (16 * PAGE)

static struct shared {
	pthread_mutex_t mutexes[THREADS];
	_Atomic int held, out;
} *shared;

static char *private;
static _Atomic int go;

static pthread_mutex_t *own(long number)
{
	return (pthread_mutex_t *)(private + number * SPREAD + 5 * PAGE);
}

static void make(pthread_mutex_t *mutex, int pshared)
{
	pthread_mutexattr_t attr;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, pshared);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	if (pthread_mutex_init(mutex, &attr))
		die("mutex");
}

static void *holder(void *argument)
{
	long number = (long)argument;

	/* The last one taken is the first in the list. */
	if (pthread_mutex_lock(&shared->mutexes[number]) || pthread_mutex_lock(own(number)))
		_exit(2);
	shared->held++;
	while (!go)
		usleep(500);
	return NULL;
}

static void prepare(pthread_t *threads)
{
	go = 0;
	for (size_t i = 0; i < THREADS * SPREAD / PAGE; i++)
		page_fill(private + i * PAGE, i);
	for (long i = 0; i < THREADS; i++)
		make(own(i), PTHREAD_PROCESS_PRIVATE);
	for (long i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, holder, (void *)i))
			die("thread");
	while (shared->held < THREADS)
		usleep(500);
	for (int i = 0; i < 3; i++)
		if (madvise(private, THREADS * SPREAD, MADV_PAGEOUT))
			die("MADV_PAGEOUT");
	shared->out = 1;
}

static int takes(pthread_mutex_t *mutex)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec++;
	return pthread_mutex_timedlock(mutex, &until) == EOWNERDEAD;
}

static int stuck(const char *how, int both)
{
	int ours = 0, others = 0;

	for (int i = 0; i < THREADS; i++) {
		others += !takes(&shared->mutexes[i]);
		ours += both && !takes(own(i));
		if (ours + others > 2)
			break;
	}
	if (ours + others)
		printf("%d private and %d shared mutexes stayed locked when %s\n", ours, others, how);
	return ours + others;
}

static int round_of(int kill_it)
{
	pthread_t threads[THREADS];
	pid_t pid;

	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	private = mmap(NULL, THREADS * SPREAD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED || private == MAP_FAILED)
		die("mmap");
	for (int i = 0; i < THREADS; i++)
		make(&shared->mutexes[i], PTHREAD_PROCESS_SHARED);
	if ((pid = fork()) < 0)
		die("fork");
	if (!pid) {
		prepare(threads);
		if (kill_it)
			for (;;)
				pause();
		go = 1;
		for (int i = 0; i < THREADS; i++)
			pthread_join(threads[i], NULL);
		_exit(stuck("threads ended", 1) != 0);
	}
	int status;

	while (kill_it && !shared->out)
		usleep(500);
	if (kill_it)
		kill(pid, SIGKILL);
	waitpid(pid, &status, 0);
	return kill_it ? stuck("their process was killed", 0) : status;
}

int main(int argc, char **argv)
{
	unsigned long rounds = argument(argc, argv, 1, 3);
	int wrong = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (unsigned long i = 0; i < rounds && !wrong; i++)
		for (int kill_it = 0; kill_it < 2; kill_it++)
			wrong |= round_of(kill_it);
	if (!wrong)
		puts("every mutex passed to the next owner");
	return wrong != 0;
}

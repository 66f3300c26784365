/* forkcrowd MIB THREADS SECONDS: threads that fork all the time, each child verifies the memory that it has inherited.
 *
 * Some children are made at the same moment, so that the manager hears of several at once. A child that dies of a signal is no
 * error: only wrong contents are. Prints "forkcrowd: verified".
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include "check.h"

static char *memory;
static size_t pages;
static int wrong;
static time_t end;

static void *forks(void *unused)
{
	(void)unused;
	while (time(NULL) < end && !wrong) {
		pid_t child = fork();
		int status;

		if (child < 0) {
			usleep(1000);
			continue;
		}
		if (!child)
			_exit(pages_wrong(memory, pages, 1, "inherited") ? 3 : 0);
		if (waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 3)
			wrong = 1;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int threads = argument(argc, argv, 2, 4);
	pthread_t ids[threads];

	pages = argument(argc, argv, 1, 24) * MIB / PAGE;
	end = time(NULL) + argument(argc, argv, 3, 5);
	memory = aligned_alloc(PAGE, pages * PAGE);
	pages_fill(memory, pages, 1);
	for (int i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, forks, NULL))
			die("pthread_create");
	for (int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	wrong |= pages_wrong(memory, pages, 1, "parent") != 0;
	puts(wrong ? "forkcrowd: wrong" : "forkcrowd: verified");
	return wrong;
}

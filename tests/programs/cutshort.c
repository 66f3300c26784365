/* cutshort [MIB] [ROUNDS]: threads wait in system calls while another grows over the limit, so that the process is held again and
 * again. No handler ever runs: a write to a pipe or a socket that may block writes all of it, and no wait ends with EINTR. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include "check.h"

#define BLOCK (256 * 1024UL)

static volatile int over;

static void *writes(void *end)
{
	static char block[BLOCK];

	while (!over) {
		ssize_t written = write((intptr_t)end, block, BLOCK);

		if (written != (ssize_t)BLOCK) {
			printf("cutshort: write of %lu bytes wrote %zd, errno %d\n", BLOCK, written, written < 0 ? errno : 0);
			_exit(1);
		}
	}
	close((intptr_t)end);
	return NULL;
}

static void *waits(void *unused)
{
	struct epoll_event event;
	int epoll = epoll_create1(0);

	while (!over)
		if (epoll_wait(epoll, &event, 1, 50)) {
			printf("cutshort: epoll_wait: errno %d\n", errno);
			_exit(1);
		}
	return unused;
}

/* Reads slowly, so that a write of a block takes many waits; the process that does it has no memory to speak of. */
static pid_t reader(int from, const int *others)
{
	static char piece[4096];
	pid_t pid = fork();

	if (pid)
		return pid;
	while (*others >= 0)
		close(*others++);
	while (read(from, piece, sizeof piece) > 0)
		usleep(50);
	_exit(0);
}

int main(int argc, char **argv)
{
	size_t pages = argument(argc, argv, 1, 64) * MIB / PAGE, rounds = argument(argc, argv, 2, 8);
	pthread_t threads[3];
	pid_t readers[2];
	int ends[2], sockets[2], status;
	char *memory;

	if (pipe(ends) || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
		die("pipe");
	readers[0] = reader(ends[0], (const int[]){ ends[1], sockets[0], sockets[1], -1 });
	readers[1] = reader(sockets[0], (const int[]){ sockets[1], ends[0], ends[1], -1 });
	close(ends[0]);
	close(sockets[0]);
	if (pthread_create(&threads[0], NULL, writes, (void *)(intptr_t)ends[1])
	    || pthread_create(&threads[1], NULL, writes, (void *)(intptr_t)sockets[1])
	    || pthread_create(&threads[2], NULL, waits, NULL))
		die("pthread_create");
	for (size_t round = 0; round < rounds; round++) {
		memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED)
			die("mmap");
		pages_fill(memory, pages, round * pages + 1);
		pages_expect(memory, pages, round * pages + 1, "main");
		munmap(memory, pages * PAGE);
	}
	over = 1;
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < 2; i++)
		if (waitpid(readers[i], &status, 0) != readers[i] || status)
			return 1;
	puts("cutshort: verified");
	return 0;
}

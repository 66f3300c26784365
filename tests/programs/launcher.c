/* launcher pin|wait|execwait|chain: what programs do that start others. pin: sets the processors of children that have just been forked, and
 * prints how many of 100 have lost them. wait: as a child subreaper, waits until it has no child. execwait: executes itself before.
 * chain: as a child subreaper, executes itself 60 times, and counts its children then. */
#define _GNU_SOURCE
#include "check.h"
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static int pins(void)
{
	int lost = 0;
	cpu_set_t own, one;

	if (sched_getaffinity(0, sizeof own, &own))
		die("sched_getaffinity");
	/* The second one, if there are two. */
	for (int processor = 0, found = 0; processor < CPU_SETSIZE && found < 2; processor++)
		if (CPU_ISSET(processor, &own)) {
			CPU_ZERO(&one);
			CPU_SET(processor, &one);
			found++;
		}
	for (unsigned i = 0; i < 100; i++) {
		int ends[2], status;
		char byte;
		pid_t child;

		if (pipe(ends) || (child = fork()) < 0)
			die("fork");
		if (!child) {
			cpu_set_t now;

			if (read(ends[0], &byte, 1) != 1 || sched_getaffinity(0, sizeof now, &now))
				_exit(2);
			_exit(!CPU_EQUAL(&now, &one));
		}
		usleep(i % 20 * 100);
		if (sched_setaffinity(child, sizeof one, &one) || write(ends[1], "", 1) != 1 || waitpid(child, &status, 0) != child)
			die("child");
		lost += status != 0;
		close(ends[0]);
		close(ends[1]);
	}
	printf("%d lost\n", lost);
	return lost != 0;
}

static int waits(void)
{
	char *memory = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pid_t children[3];
	int own = 0;

	if (memory == MAP_FAILED)
		die("mmap");
	memset(memory, 1, 4 * MIB);
	for (int i = 0; i < 3; i++)
		if (!(children[i] = fork()))
			_exit(0);
	for (pid_t ended; (ended = wait(NULL)) > 0;)
		for (int i = 0; i < 3; i++)
			own += children[i] == ended;
	printf("%d children\n", own);
	return own != 3;
}

static int chains(char **argv, int left)
{
	char number[12], path[64], text[4096];
	int children = 0;
	size_t length;
	FILE *file;

	if (left) {
		snprintf(number, sizeof number, "%d", left - 1);
		execl(argv[0], argv[0], "chain", number, NULL);
		die("exec");
	}
	usleep(300000);
	snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
	if (!(file = fopen(path, "r")))
		die(path);
	length = fread(text, 1, sizeof text - 1, file);
	text[length] = 0;
	for (char *child = strtok(text, " "); child; child = strtok(NULL, " "))
		children++;
	/* The worker, and those that had not ended yet when the last program began: a few on a loaded machine, of 60. */
	puts(children <= 8 ? "few children" : "many children");
	return children > 8;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	if (!strcmp(what, "pin"))
		return pins();
	if (prctl(PR_SET_CHILD_SUBREAPER, 1))
		die("prctl");
	if (!strcmp(what, "chain"))
		return chains(argv, (int)argument(argc, argv, 2, 60));
	if (!strcmp(what, "execwait")) {
		execl(argv[0], argv[0], "wait", NULL);
		die("exec");
	}
	return waits();
}

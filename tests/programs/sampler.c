/* sampler CMD...: runs CMD and adds up, every millisecond, the resident anonymous memory of all processes that descend from
 * it; of uzswap's manager among them, the pool. Says how often it looked, the longest
 * pause between two looks in microseconds, and the most that it saw, how much of that was the pool, and the most
 * of a single process, in bytes, on the standard error as "sampler: LOOKS PAUSE PEAK POOL SINGLE". Its exit status is CMD's. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include "check.h"

#define MOST 4096
#define RESCAN_EVERY 4

struct process {
	int pid, parent, statm;
	int seen;
	enum { PROGRAM, MANAGER, OURS } kind;	/* a worker of ours has the memory of its program */
};

static struct process processes[MOST];
static int count, self;

static int read_file(int pid, const char *name, char *text, size_t size)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return -1;
	size_t length = 0;
	for (ssize_t got; length < size - 1 && (got = read(file, text + length, size - 1 - length)) > 0;)
		length += got;
	close(file);
	text[length] = 0;
	return length ? 0 : -1;
}

static struct process *find(int pid)
{
	for (int i = 0; i < count; i++)
		if (processes[i].pid == pid)
			return &processes[i];
	return NULL;
}

/* Enters and forgets processes. */
static void rescan(void)
{
	DIR *proc = opendir("/proc");
	struct dirent *entry;

	for (int i = 0; i < count; i++)
		processes[i].seen = 0;
	while (proc && (entry = readdir(proc))) {
		char text[512], path[64];
		int pid = atoi(entry->d_name);
		struct process *process = find(pid);

		if (!isdigit(entry->d_name[0]) || pid == self || count == MOST || read_file(pid, "stat", text, sizeof text))
			continue;
		char *name = strchr(text, '('), *after = strrchr(text, ')');
		if (!process) {
			process = &processes[count++];
			snprintf(path, sizeof path, "/proc/%d/statm", pid);
			process->pid = pid;
			process->statm = open(path, O_RDONLY | O_CLOEXEC);
		}
		process->parent = atoi(after + 4);
		process->kind = strncmp(name, "(uzswap", 7) ? PROGRAM : strncmp(name, "(uzswap-m", 9) ? OURS : MANAGER;
		process->seen = 1;
	}
	if (proc)
		closedir(proc);
	for (int i = 0; i < count; i++)
		if (!processes[i].seen) {
			close(processes[i].statm);
			processes[i--] = processes[--count];
		}
}

static int descends(const struct process *process)
{
	for (int depth = 0; process && depth < 64; depth++) {
		if (process->parent == self)
			return 1;
		process = find(process->parent);
	}
	return 0;
}

/* The pool of a manager: what is resident of its largest mapping. */
static uint64_t pool_of(int pid)
{
	static char text[1 << 20];
	uint64_t most = 0, size = 0, resident = 0;

	if (read_file(pid, "smaps", text, sizeof text))
		return 0;
	for (char *line = text; line; line = strchr(line, '\n')) {
		unsigned long start, end;
		line += *line == '\n';
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			size = end - start;
		else if (sscanf(line, "Rss: %lu kB", &start) == 1 && size > most) {
			most = size;
			resident = start * 1024;
		}
	}
	return resident;
}

/* What a process has for its own, and its part of what it shares after a fork. */
static uint64_t part_of(int pid, uint64_t otherwise)
{
	char text[4096], *line;
	unsigned long kib;

	if (read_file(pid, "smaps_rollup", text, sizeof text) || !(line = strstr(text, "\nPss_Anon:")))
		return otherwise;
	return sscanf(line, "\nPss_Anon: %lu", &kib) == 1 ? kib * 1024 : otherwise;
}

static uint64_t ours, single;

static uint64_t look(void)
{
	uint64_t sum = 0;
	int programs = 0;

	ours = 0;
	for (int i = 0; i < count; i++)
		programs += processes[i].kind == PROGRAM && descends(&processes[i]);
	for (int i = 0; i < count; i++) {
		struct process *process = &processes[i];
		char text[128];
		unsigned long resident, shared;

		if (process->kind == OURS || !descends(process))
			continue;
		if (process->kind == MANAGER) {
			ours += pool_of(process->pid);
			continue;
		}
		ssize_t length = pread(process->statm, text, sizeof text - 1, 0);
		if (length <= 0)
			continue;
		text[length] = 0;
		if (sscanf(text, "%*u %lu %lu", &resident, &shared) != 2)
			continue;
		uint64_t anonymous = (resident - shared) * PAGE;
		sum += programs > 1 ? part_of(process->pid, anonymous) : anonymous;
		if (anonymous > single)
			single = anonymous;
	}
	return sum + ours;
}

int main(int argc, char **argv)
{
	struct sched_param prompt = { .sched_priority = 2 };
	uint64_t peak = 0, of_it = 0, pause = 0, looks = 0, last;
	int status;

	if (argc < 2)
		return 2;
	self = getpid();
	pid_t child = fork();
	if (!child) {
		execvp(argv[1], argv + 1);
		die(argv[1]);
	}
	/* So that a busy machine does not hide a peak; without the right to that, the pause tells. */
	sched_setscheduler(0, SCHED_FIFO, &prompt);
	last = microseconds();
	while (!waitpid(child, &status, WNOHANG)) {
		if (looks++ % RESCAN_EVERY == 0)
			rescan();
		uint64_t sum = look(), now = microseconds();
		if (sum > peak) {
			peak = sum;
			of_it = ours;
		}
		if (now - last > pause)
			pause = now - last;
		last = now;
		usleep(1000);
	}
	fprintf(stderr, "sampler: %lu %lu %lu %lu %lu\n", looks, pause, peak, of_it, single);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

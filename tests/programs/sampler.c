/* sampler CMD...: runs CMD and adds up, every millisecond, the resident anonymous memory of all processes that descend from
 * it; of uzswap's manager among them, the pool. A look has to be over before memory goes from a program to the pool, or that
 * would be counted twice: so it takes what the kernel counts for each process, which needs no lock, less what does not belong to
 * the sum: what a program shares with others after a fork, and what the manager has besides the pool. These change seldom, and are
 * measured in turn, between looks; the manager's more often, for it keeps books of every page. Says how often it looked, the
 * longest pause between two looks in microseconds, and the most that it saw, how much of that was the pool, and the most of a
 * single process, in bytes, on the standard error as "sampler: LOOKS PAUSE PEAK POOL SINGLE". Its exit status is CMD's. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include "check.h"

#define MOST 4096
#define RESCAN_EVERY 4
#define YOUNG 16
#define MANAGER_EVERY 4
#define STEADY (256 * 1024)
#define OLD_EVERY 64

struct process {
	int pid, parent, statm, pagemap;
	int seen, measured, known, twin;
	uint64_t arena, arena_end, apart;
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

static int share_memory(int one, int other)
{
	return syscall(SYS_kcmp, one, other, 1 /* KCMP_VM */, 0, 0) == 0;
}

/* Whether a process has the memory of another one, with which that is counted: a worker that has not got its name yet. */
static int is_twin(struct process *process)
{
	for (int i = 0; i < count && !process->known; i++)
		if (&processes[i] != process && processes[i].kind == PROGRAM && share_memory(process->pid, processes[i].pid))
			process->twin = processes[i].pid;
	return process->twin && share_memory(process->pid, process->twin);
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

		if (!isdigit(entry->d_name[0]) || pid == self || count == MOST)
			continue;
		/* Whoever has just begun may still execute another program. */
		if (process && process->known > YOUNG && process->known++ % OLD_EVERY) {
			process->seen = 1;
			continue;
		}
		if (read_file(pid, "stat", text, sizeof text))
			continue;
		char *name = strchr(text, '('), *after = strrchr(text, ')');
		if (!process) {
			process = &processes[count++];
			snprintf(path, sizeof path, "/proc/%d/statm", pid);
			process->pid = pid;
			process->arena_end = process->apart = process->measured = process->known = process->twin = 0;
			process->statm = open(path, O_RDONLY | O_CLOEXEC);
		}
		process->parent = atoi(after + 4);
		process->kind = !strncmp(name, "(uzswap-m", 9) ? MANAGER : !strncmp(name, "(uzswap", 7) || is_twin(process) ? OURS : PROGRAM;
		process->seen = 1;
		process->known++;
	}
	if (proc)
		closedir(proc);
	for (int i = 0; i < count; i++)
		if (!processes[i].seen) {
			close(processes[i].statm);
			if (processes[i].arena_end)
				close(processes[i].pagemap);
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

/* PAGEMAP_SCAN, from Linux 6.7 on; the headers may be older. */
struct page_region {
	uint64_t start, end, categories;
};

struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, returned;
};

#define SCAN _IOWR('f', 16, struct scan)
#define PRESENT 8

/* The pool of a manager: what is resident of its largest mapping. */
static uint64_t pool_of(struct process *process)
{
	static char text[1 << 20];
	static struct page_region regions[4096];
	uint64_t most = 0, resident = 0;

	if (!process->arena_end) {
		char path[64];
		if (read_file(process->pid, "maps", text, sizeof text))
			return 0;
		for (char *line = text; line; line = strchr(line, '\n')) {
			unsigned long start, end;
			line += *line == '\n';
			if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && end - start > most) {
				most = end - start;
				process->arena = start;
				process->arena_end = end;
			}
		}
		/* The first mappings of a program that has just begun are smaller. */
		if (most < 64 * MIB) {
			process->arena_end = process->apart = process->measured = process->known = 0;
			return 0;
		}
		snprintf(path, sizeof path, "/proc/%d/pagemap", process->pid);
		process->pagemap = open(path, O_RDONLY | O_CLOEXEC);
	}
	struct scan scan = { .size = sizeof scan, .start = process->arena, .end = process->arena_end, .vec = (uintptr_t)regions,
			     .vec_len = sizeof regions / sizeof *regions, .mask = PRESENT, .returned = PRESENT };
	while (scan.start < scan.end) {
		int found = ioctl(process->pagemap, SCAN, &scan);
		if (found < 0)
			return resident;
		for (int i = 0; i < found; i++)
			resident += regions[i].end - regions[i].start;
		scan.start = scan.walk_end;
	}
	return resident;
}

/* What of a process's memory is others' part, after a fork. Both figures are of one walk: memory comes and goes meanwhile. */
static uint64_t shared_by(int pid, uint64_t otherwise)
{
	char text[4096], *all, *part;
	unsigned long all_kib, part_kib;

	if (read_file(pid, "smaps_rollup", text, sizeof text) || !(all = strstr(text, "\nAnonymous:")) || !(part = strstr(text, "\nPss_Anon:")) ||
	    sscanf(all, "\nAnonymous: %lu", &all_kib) != 1 || sscanf(part, "\nPss_Anon: %lu", &part_kib) != 1)
		return otherwise;
	return all_kib > part_kib ? (all_kib - part_kib) * 1024 : 0;
}

/* What the kernel counts for a process: all that is resident, and what of it is anonymous; 0 if it is gone. */
static int counted(const struct process *process, uint64_t *all, uint64_t *anonymous)
{
	char text[128];
	unsigned long resident, shared;
	ssize_t length = pread(process->statm, text, sizeof text - 1, 0);

	text[length > 0 ? length : 0] = 0;
	if (sscanf(text, "%*u %lu %lu", &resident, &shared) != 2)
		return 0;
	*all = resident * PAGE;
	*anonymous = (resident - shared) * PAGE;
	return 1;
}

/* Brings up to date what of a process does not belong to the sum; of a manager not if that changes meanwhile. */
static void measure(struct process *process, int programs)
{
	uint64_t all, anonymous, all_after, part;

	if (process->kind != MANAGER) {
		process->apart = programs > 1 ? shared_by(process->pid, process->apart) : 0;
		process->measured = 1;
		return;
	}
	for (int tries = 0; tries < 3 && counted(process, &all, &anonymous); tries++) {
		part = pool_of(process);
		if (!counted(process, &all_after, &anonymous))
			return;
		uint64_t less = all < all_after ? all : all_after, more = all < all_after ? all_after : all;
		/* What has never been measured is taken as it is. */
		if (more - less < STEADY || !process->measured) {
			process->apart = less > part ? less - part : 0;
			process->measured = 1;
		}
		if (more - less < STEADY)
			return;
	}
}

static uint64_t ours, single;

static uint64_t look(void)
{
	static int turn;
	uint64_t sum = 0, all, anonymous;
	int programs = 0, known = 1;

	for (int i = 0; i < count; i++)
		programs += processes[i].kind == PROGRAM && descends(&processes[i]);
	for (int i = 0; i < count; i++) {
		struct process *process = &processes[i];
		if (process->kind != OURS && descends(process) &&
		    (!process->measured || i == turn % count || (process->kind == MANAGER && turn % MANAGER_EVERY == 0)))
			measure(process, programs);
		/* A manager that has no pool yet. */
		known &= process->kind != MANAGER || process->arena_end || !descends(process);
	}
	turn++;
	ours = 0;
	for (int i = 0; i < count && known; i++) {
		struct process *process = &processes[i];

		if (process->kind == OURS || !descends(process) || !counted(process, &all, &anonymous))
			continue;
		uint64_t bytes = process->kind == MANAGER ? all : anonymous;
		bytes -= bytes > process->apart ? process->apart : bytes;
		sum += bytes;
		if (process->kind == MANAGER)
			ours += bytes;
		else if (anonymous > single)
			single = anonymous;
	}
	return sum;
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

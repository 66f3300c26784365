/* firsttouch HOW MIB LIMIT: what the kernel's own tests of memory cgroups do, by files only (`--control-fs`): makes a group with
 * a limit of so many MiB, and has a child in it touch MIB at once. HOW says how the child comes to be there:
 *   enter    it writes itself into cgroup.procs, then touches
 *   moved    its parent moves it there while it waits, then it touches
 *   forked   its parent is there already, and forks it
 *   late     it touches first, then writes itself into cgroup.procs
 * Meanwhile the parent reads memory.current without a pause. Prints the bytes that it showed above the limit at worst (for `late`:
 * as soon as the write has returned), zswpout, and the child's exit status: "OVER ZSWPOUT STATUS". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"

#define GROUP "/sys/fs/cgroup/first"

static long long read_number(const char *name, const char *key)
{
	char path[128], text[8192];
	snprintf(path, sizeof path, GROUP "/%s", name);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
	if (length < 0) {
		perror(path);
		exit(2);
	}
	close(file);
	text[length] = 0;
	if (!key)
		return atoll(text);
	char *line = strstr(text, key);
	return line ? atoll(line + strlen(key)) : -1;
}

static void write_number(const char *name, long long number)
{
	char path[128], text[32];
	snprintf(path, sizeof path, GROUP "/%s", name);
	int length = snprintf(text, sizeof text, "%lld", number), file = open(path, O_WRONLY | O_CLOEXEC);
	if (file < 0 || write(file, text, length) != length) {
		perror(path);
		exit(2);
	}
	close(file);
}

static uint64_t *touch(size_t size)
{
	uint64_t *words = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (words == MAP_FAILED)
		exit(2);
	for (size_t page = 0; page < size / PAGE; page++)
		words[page * WORDS] = mix(page) | 1;
	return words;
}

static int child(const char *how, size_t size, int go, int ready)
{
	uint64_t *words = NULL;
	char byte;
	if (!strcmp(how, "late"))
		words = touch(size);
	if (!strcmp(how, "enter") || !strcmp(how, "late"))
		write_number("cgroup.procs", 0);
	if (!strcmp(how, "moved") && read(go, &byte, 1) != 1)
		return 2;
	long long entered = words ? read_number("memory.current", NULL) : 0;
	if (!words)
		words = touch(size);
	int wrong = 0;
	for (size_t page = 0; page < size / PAGE; page++)
		wrong |= words[page * WORDS] != (mix(page) | 1);
	if (write(ready, &entered, sizeof entered) != sizeof entered)
		return 2;
	return wrong;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	const char *how = argv[1];
	size_t size = strtoul(argv[2], NULL, 10) * MIB;
	long long limit = atoll(argv[3]) * MIB, most = 0, seen, entered = 0;
	int go[2], ready[2], status = 0;

	if (mkdir(GROUP, 0755) || pipe2(go, O_CLOEXEC) || pipe2(ready, O_CLOEXEC))
		return perror("firsttouch"), 2;
	write_number("memory.max", limit);
	if (!strcmp(how, "forked"))
		write_number("cgroup.procs", 0);
	int pid = fork();
	if (pid == 0)
		_exit(child(how, size, go[0], ready[1]));
	if (!strcmp(how, "moved")) {
		write_number("cgroup.procs", pid);
		if (write(go[1], "g", 1) != 1)
			return 2;
	}
	while (usleep(500), waitpid(pid, &status, WNOHANG) == 0)
		if ((seen = read_number("memory.current", NULL)) > most)
			most = seen;
	if (WIFEXITED(status) && WEXITSTATUS(status) < 2 && read(ready[0], &entered, sizeof entered) != sizeof entered)
		return 2;
	if (!strcmp(how, "late"))
		most = entered;
	printf("%lld %lld %d\n", most - limit, read_number("memory.stat", "zswpout "), status);
	return 0;
}

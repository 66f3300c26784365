/* longenv MIB: says that its environment is as much memory that it never touches; then sleeps.
 * No privilege is needed for that (prctl(2), PR_SET_MM_MAP). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/prctl.h>
#include <sys/prctl.h>
#include "check.h"

/* A field of /proc/self/stat, by its number in proc_pid_stat(5). */
static unsigned long field(const char *stat, int number)
{
	const char *at = strrchr(stat, ')') + 2;

	for (int n = 3; n < number; n++)
		at = strchr(at, ' ') + 1;
	return strtoul(at, NULL, 10);
}

int main(int argc, char **argv)
{
	char stat[1024] = "";
	size_t size;
	int file;
	struct prctl_mm_map map = { .exe_fd = -1 };
	char *environment;

	if (argc < 2)
		return 2;
	size = strtoul(argv[1], NULL, 10) * MIB;
	environment = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_NORESERVE | MAP_ANONYMOUS, -1, 0);
	if (environment == MAP_FAILED)
		die("mmap");
	file = open("/proc/self/stat", O_RDONLY);
	if (read(file, stat, sizeof stat - 1) <= 0)
		die("stat");
	map.start_code = field(stat, 26);
	map.end_code = field(stat, 27);
	map.start_data = field(stat, 45);
	map.end_data = field(stat, 46);
	map.start_brk = field(stat, 47);
	map.brk = (unsigned long)sbrk(0);
	map.start_stack = field(stat, 28);
	map.arg_start = field(stat, 48);
	map.arg_end = field(stat, 49);
	map.env_start = (unsigned long)environment;
	map.env_end = map.env_start + size;
	if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0))
		die("PR_SET_MM_MAP");
	puts("sleeps");
	fflush(stdout);
	for (;;)
		pause();
}

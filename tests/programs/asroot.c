/* asroot SOCKET UZSWAP: stands for sudo, where it is owned by root and has the setuid bit. It becomes root wholly, forgets the environment,
 * and some time later runs a job in a group of root's. */
#define _GNU_SOURCE
#include <grp.h>
#include <sys/wait.h>
#include "check.h"

int main(int argc, char **argv)
{
	char *environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", NULL };

	if (argc < 3)
		return 2;
	if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0))
		die("root");
	usleep(500000);
	if (!fork()) {
		execle(argv[2], "uzswap", "run", "--connect", "--socket", argv[1], "--cgroup", "roots", "--quiet", "--", "sleep", "20", (char *)NULL,
		       environment);
		die("exec");
	}
	wait(NULL);
	return 0;
}

/* execlater FILE CMD...: says "on", waits until FILE exists, and executes CMD. */
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	puts("on");
	fflush(stdout);
	while (access(argv[1], F_OK))
		usleep(10000);
	execvp(argv[2], argv + 2);
	perror(argv[2]);
	return 1;
}

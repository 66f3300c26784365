/* hello [SECONDS]: says hello and lives on for a while. Built with -static it is a program that nothing can be preloaded
 * into. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	puts("hello");
	fflush(stdout);
	sleep(argc > 1 ? atoi(argv[1]) : 0);
	return 0;
}

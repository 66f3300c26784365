/* hello: built with -static it is a program that nothing can be preloaded into. */
#include <stdio.h>

int main(void)
{
	puts("hello");
	return 0;
}

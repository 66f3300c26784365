/* Calls functions of libownnames, by name and from within it. */
#define _GNU_SOURCE
#include "check.h"

extern int watched;
double twice(double number);
const char *rest(const char *text);

int main(void)
{
	char *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED || madvise(memory, PAGE, MADV_DONTNEED) || madvise(memory, PAGE, MADV_NORMAL))
		die("memory");
	printf("%d %.1f %s\n", watched, twice(21), rest("-rest"));
	return 0;
}

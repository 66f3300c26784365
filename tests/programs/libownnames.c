/* A library with functions of its own that are named as some of libc's, as programs find them: one that watches the calls, and some that
 * have nothing to do with libc's. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/syscall.h>

extern long syscall(long number, ...);

int watched;

int madvise(void *address, size_t size, int advice)
{
	watched++;
	return (int)syscall(SYS_madvise, address, size, advice);
}

double clone(const double *number, double factor)
{
	return *number * factor;
}

const char *prctl(const char *text)
{
	return text + 1;
}

double twice(double number)
{
	return clone(&number, 2);
}

const char *rest(const char *text)
{
	return prctl(text);
}

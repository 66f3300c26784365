/* guardskept: installs guards by the instruction itself over memory that is paged out, says so, and looks at them when it is told to. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>

#define PAGES 2048
#define FIRST 512
#define GUARDS 64
#define GUARD_INSTALL 102

static sigjmp_buf back;

static void on_fault(int number)
{
	siglongjmp(back, number);
}

static int is_guarded(char *page)
{
	if (sigsetjmp(back, 1))
		return 1;
	(void)*(volatile char *)page;
	return 0;
}

int main(void)
{
	char *area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), line[16];
	long result;

	if (area == MAP_FAILED || signal(SIGSEGV, on_fault) == SIG_ERR)
		die("area");
	pages_fill(area, PAGES, 1);
	if (madvise(area, PAGES * PAGE, MADV_PAGEOUT))
		die("madvise");
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_madvise), "D"(area + FIRST * PAGE), "S"(GUARDS * PAGE), "d"(GUARD_INSTALL)
			 : "rcx", "r11", "memory");
	printf("ready\n");
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin))
		die("stdin");
	for (size_t i = FIRST; !result && i < FIRST + GUARDS; i++)
		if (!is_guarded(area + i * PAGE)) {
			printf("guard %zu is gone\n", i);
			return 1;
		}
	pages_expect(area, FIRST, 1, "before the guards");
	pages_expect(area + (FIRST + GUARDS) * PAGE, PAGES - FIRST - GUARDS, 1 + FIRST + GUARDS, "behind the guards");
	printf("they are all there\n");
	return 0;
}

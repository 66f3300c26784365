/* guardskept: installs guards by the instruction itself over memory that is paged out, says so, and looks at them when it is told to. */
#define _GNU_SOURCE
#include "check.h"

#define PAGES 2048
#define FIRST 512
#define GUARDS 64

int main(void)
{
	char *area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), line[16];
	long result;

	if (area == MAP_FAILED)
		die("area");
	catch_faults();
	pages_fill(area, PAGES, 1);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	result = madvise_raw(area + FIRST * PAGE, GUARDS * PAGE, GUARD_INSTALL);
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

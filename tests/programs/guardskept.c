/* guardskept: installs guards by the instruction itself over memory that is paged out, says so, and looks at them when it is told to. */
#define _GNU_SOURCE
#include "check.h"

#define PAGES 2048
#define FIRST 512
#define GUARDS 64

int main(void)
{
	char *area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), line[16];

	if (area == MAP_FAILED)
		die("area");
	catch_faults();
	/* Without guards there is nothing to keep: only the memory is looked at. */
	size_t guards = has_guards(area) ? GUARDS : 0;
	pages_fill(area, PAGES, 1);
	pages_advise(area, PAGES, MADV_PAGEOUT);
	pages_expect_out(area + FIRST * PAGE, GUARDS, "where guards come");
	if (guards)
		pages_advise_raw(area + FIRST * PAGE, guards, GUARD_INSTALL);
	printf("ready\n");
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin))
		die("stdin");
	for (size_t i = FIRST; i < FIRST + guards; i++)
		if (!is_guarded(area + i * PAGE)) {
			printf("guard %zu is gone\n", i);
			return 1;
		}
	pages_expect(area, FIRST, 1, "before the guards");
	pages_expect(area + (FIRST + guards) * PAGE, PAGES - FIRST - guards, 1 + FIRST + guards, "behind the guards");
	printf("they are all there\n");
	return 0;
}

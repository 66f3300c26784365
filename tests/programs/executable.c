/* executable THREADS SECONDS [forks]: threads keep memory of which stretches may be executed, as all of the heap of some Lisps may, and
 * others not. Each page begins with a function that returns the page's number and ends in data that follows from it. They are written anew,
 * called, read, given other rights for a while as a compiler at run time does, moved and given up, at random; with `forks` a child finds
 * all of it, too. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>

#include "check.h"

#define PAGES 2048UL
#define STRETCH 8UL			/* pages of the same rights */
#define RWX (PROT_READ | PROT_WRITE | PROT_EXEC)
#define RW (PROT_READ | PROT_WRITE)

static int seconds, forks;

struct part {
	unsigned char *memory;
	uint32_t numbers[PAGES];	/* 0: the page of zeros */
	uint64_t random;
	unsigned long calls;
};

static int may_execute(size_t page)
{
	/* A quarter of it is one long stretch. */
	return page < PAGES / 4 || page / STRETCH % 2;
}

static void write_page(struct part *part, size_t page, uint32_t number)
{
	unsigned char *at = part->memory + page * PAGE;

	at[0] = 0xb8;			/* mov eax, number */
	memcpy(at + 1, &number, sizeof number);
	at[5] = 0xc3;			/* ret */
	for (size_t i = 1; i < WORDS; i++)
		((uint64_t *)at)[i] = mix(number + i % 64);
	part->numbers[page] = number;
}

static void check_page(struct part *part, size_t page)
{
	unsigned char *at = part->memory + page * PAGE;
	uint32_t number = part->numbers[page];

	if (may_execute(page) && number) {
		part->calls++;
		if (((uint32_t (*)(void))(uintptr_t)at)() != number) {
			printf("MISMATCH page %zu returns another number\n", page);
			exit(1);
		}
	}
	for (size_t i = 1; i < WORDS; i++)
		if (((volatile uint64_t *)at)[i] != (number ? mix(number + i % 64) : 0)) {
			printf("MISMATCH page %zu word %zu\n", page, i);
			exit(1);
		}
}

static void check_all(struct part *part)
{
	for (size_t page = 0; page < PAGES; page++)
		check_page(part, page);
}

static void must(int done, const char *what)
{
	if (!done) {
		perror(what);
		exit(2);
	}
}

static void give_rights(struct part *part)
{
	for (size_t page = 0; page < PAGES; page += STRETCH)
		must(!mprotect(part->memory + page * PAGE, STRETCH * PAGE, may_execute(page) ? RWX : RW), "mprotect");
}

static void step(struct part *part)
{
	size_t page = (part->random = mix(part->random)) % PAGES, stretch = page / STRETCH * STRETCH;
	unsigned char *at = part->memory + stretch * PAGE, *moved;
	uint32_t number = part->random >> 32 | 1;
	pid_t child;
	int status;

	switch (part->random >> 20 & 255) {
	case 0:
		must(!madvise(at, STRETCH * PAGE, MADV_DONTNEED), "MADV_DONTNEED");
		memset(part->numbers + stretch, 0, STRETCH * sizeof *part->numbers);
		break;
	case 1:
		moved = mmap(NULL, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		must(moved != MAP_FAILED, "mmap");
		for (size_t one = 0; one < PAGES; one += STRETCH)
			must(mremap(part->memory + one * PAGE, STRETCH * PAGE, STRETCH * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
				    moved + one * PAGE) != MAP_FAILED, "mremap");
		part->memory = moved;
		break;
	case 2:
		madvise(part->memory, PAGES * PAGE, MADV_PAGEOUT);
		break;
	case 3:
		if (!forks)
			break;
		child = fork();
		must(child >= 0, "fork");
		if (!child) {
			check_all(part);
			_exit(0);
		}
		must(waitpid(child, &status, 0) == child, "waitpid");
		if (status) {
			printf("MISMATCH a child ended with %x\n", status);
			exit(1);
		}
		break;
	case 4 ... 31:
		must(!mprotect(at, STRETCH * PAGE, may_execute(page) ? PROT_READ | PROT_EXEC : PROT_READ), "mprotect");
		check_page(part, page);
		must(!mprotect(at, STRETCH * PAGE, may_execute(page) ? RWX : RW), "mprotect");
		break;
	case 32 ... 127:
		write_page(part, page, number);
		break;
	default:
		check_page(part, page);
	}
}

static void *run(void *of)
{
	struct part *part = of;
	time_t end = time(NULL) + seconds;

	for (size_t page = 0; page < PAGES; page++)
		write_page(part, page, page + 1);
	while (time(NULL) < end)
		step(part);
	check_all(part);
	return NULL;
}

int main(int argc, char **argv)
{
	int count = argc > 2 ? atoi(argv[1]) : 0;
	pthread_t threads[64];
	struct part *parts;
	unsigned long calls = 0;

	if (count < 1 || count > 64)
		return 2;
	seconds = atoi(argv[2]);
	forks = argc > 3;
	parts = calloc(count, sizeof *parts);
	for (int i = 0; i < count; i++) {
		parts[i].random = i + 1;
		parts[i].memory = mmap(NULL, PAGES * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		must(parts[i].memory != MAP_FAILED, "mmap");
		give_rights(&parts[i]);
		must(!pthread_create(&threads[i], NULL, run, &parts[i]), "pthread_create");
	}
	for (int i = 0; i < count; i++) {
		pthread_join(threads[i], NULL);
		calls += parts[i].calls;
	}
	fprintf(stderr, "%lu calls\n", calls);
	puts("every function returned its number");
	return 0;
}

/* pages KIND MIB [stay]: fills so many MiB and finds all of it as it was. KIND: byte (one byte in each page), text (compresses
 * to about a quarter), random (does not compress), leave (as byte; ends after 5 ms without a look). `stay`: says "ready" when it
 * is filled, and looks when SIGTERM has come. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>

#include "check.h"

static uint64_t word(const char *kind, size_t page, size_t i)
{
	switch (kind[0]) {
	case 't':
		return mix(page * WORDS + i % (WORDS / 4));
	case 'r':
		return mix(page * WORDS + i);
	default:
		return i ? 0 : 'a';
	}
}

int main(int argc, char **argv)
{
	const char *kind = argc > 1 ? argv[1] : "byte";
	size_t pages = (argc > 2 ? strtoul(argv[2], NULL, 10) : 32) * (MIB / PAGE);
	int sparse = kind[0] == 'b' || kind[0] == 'l';
	uint64_t *words = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	sigset_t end;
	int got;

	if (words == MAP_FAILED) {
		perror("mmap");
		return 2;
	}
	sigemptyset(&end);
	sigaddset(&end, SIGTERM);
	sigprocmask(SIG_BLOCK, &end, NULL);
	for (size_t page = 0; page < pages; page++)
		for (size_t i = 0; i < (sparse ? 1 : WORDS); i++)
			words[page * WORDS + i] = word(kind, page, i);
	if (kind[0] == 'l') {
		usleep(5000);
		return 0;
	}
	if (argc > 3) {
		puts("ready");
		fflush(stdout);
		sigwait(&end, &got);
	}
	for (size_t page = 0; page < pages; page++)
		for (size_t i = 0; i < WORDS; i++)
			if (words[page * WORDS + i] != word(kind, page, i)) {
				printf("MISMATCH page %zu word %zu\n", page, i);
				return 1;
			}
	puts("whole");
	return 0;
}

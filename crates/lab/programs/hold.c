/* hold FILE [BYTES]: takes the content of FILE into memory, over and over up to BYTES, and says "filled"; at a line on stdin pages
 * it out with MADV_PAGEOUT and says "out" and how many bytes are resident still; at the end of stdin compares all of it with
 * FILE again. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096UL

static void die(const char *what)
{
	perror(what);
	exit(2);
}

static size_t resident(char *memory, size_t size)
{
	size_t pages = 0;

	for (size_t at = 0; at < size; at += PAGE) {
		unsigned char present = 0;

		if (mincore(memory + at, PAGE, &present))
			die("mincore");
		pages += present & 1;
	}
	return pages * PAGE;
}

int main(int argc, char **argv)
{
	struct stat about;
	char line[16], page[PAGE];
	int file = argc > 1 ? open(argv[1], O_RDONLY) : -1;

	if (file < 0 || fstat(file, &about))
		die(argc > 1 ? argv[1] : "hold FILE");
	size_t image = about.st_size & ~(PAGE - 1);
	size_t size = argc > 2 ? strtoull(argv[2], NULL, 0) & ~(PAGE - 1) : image;
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	for (size_t at = 0; at < size; at += PAGE)
		if (pread(file, memory + at, PAGE, at % image) != PAGE)
			die("read");
	puts("filled");
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin))
		return 2;
	if (madvise(memory, size, MADV_PAGEOUT))
		die("madvise(MADV_PAGEOUT)");
	printf("out %zu\n", resident(memory, size));
	fflush(stdout);
	while (fgets(line, sizeof line, stdin))
		;
	for (size_t at = 0; at < size; at += PAGE)
		if (pread(file, page, PAGE, at % image) != PAGE || memcmp(memory + at, page, PAGE)) {
			fprintf(stderr, "MISMATCH in page %zu\n", at / PAGE);
			return 1;
		}
	return 0;
}

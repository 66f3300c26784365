/* refused: calls that the kernel refuses after it has announced what they would unmap. What was there is there as before, paged out or not.
 *
 * Also calls that it refuses at once although the agent looks at their arguments. With "heap" a brk that a sealed page stands in the way of:
 * after that the kernel lets no page of this process be filled, and it waits to be killed. With "heap-discard" the process
 * discards other memory in between: the kernel announces that, and never says that it is done. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define LEN ((size_t)8 << 20)
#define MORE ((size_t)1 << 44)
#ifndef SYS_mseal
#define SYS_mseal 462
#endif

static char *map(size_t len, int protection)
{
	char *memory = mmap(NULL, len, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

static void fill(char *memory)
{
	for (size_t i = 0; i < LEN; i += PAGE)
		*(uint64_t *)(memory + i) = i + 1;
	if (madvise(memory, LEN, MADV_PAGEOUT))
		die("madvise");
}

static void expect(char *memory, int refused, const char *what)
{
	if (!refused) {
		printf("not refused: %s\n", what);
		exit(1);
	}
	for (size_t i = 0; i < LEN; i += PAGE)
		if (*(volatile uint64_t *)(memory + i) != i + 1) {
			printf("page %zu differs after a refused %s\n", i / PAGE, what);
			exit(1);
		}
}

/* LEN bytes that are filled, and as many behind them whose last page is sealed. */
static char *sealed(void)
{
	char *memory = map(2 * LEN, PROT_READ | PROT_WRITE);

	fill(memory);
	if (syscall(SYS_mseal, memory + 2 * LEN - PAGE, (size_t)PAGE, 0ul))
		die("mseal");
	return memory;
}

static int maps_over(char *memory, size_t len)
{
	return mmap(memory, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory;
}

static void limited(int resource, rlim_t limit, const char *what)
{
	char *memory = map(4 * LEN, PROT_READ | PROT_WRITE);
	struct rlimit before, low;
	int done;

	fill(memory);
	munmap(memory + LEN, 3 * LEN);
	if (getrlimit(resource, &before))
		die("getrlimit");
	low = before;
	low.rlim_cur = limit;
	if (setrlimit(resource, &low))
		die("setrlimit");
	done = maps_over(memory, 4 * LEN);
	if (setrlimit(resource, &before))
		die("setrlimit");
	expect(memory, !done, what);
}

static void shrink_heap(char *discarded)
{
	char *heap = (char *)(((uintptr_t)sbrk(0) + PAGE - 1) & -(uintptr_t)PAGE);

	if (brk(heap + LEN))
		die("brk");
	fill(heap);
	if (syscall(SYS_mseal, heap + LEN - PAGE, (size_t)PAGE, 0ul))
		die("mseal");
	if ((char *)syscall(SYS_brk, heap + PAGE) != heap + LEN) {
		puts("not refused");
		exit(1);
	}
	if (discarded && madvise(discarded, LEN, MADV_DONTNEED))
		die("madvise");
	fprintf(stderr, "refused\n");
	expect(heap, 1, "brk");
}

int main(int argc, char **argv)
{
	char *memory, *other;
	struct rlimit size;

	if (argc > 1) {
		memory = map(LEN, PROT_READ | PROT_WRITE);
		fill(memory);
		shrink_heap(strcmp(argv[1], "heap-discard") ? NULL : memory);
		puts("what was refused left all as it was");
		return 0;
	}
	for (int round = 0; round < 4; round++) {
		memory = map(MORE, PROT_NONE);
		if (mprotect(memory, LEN, PROT_READ | PROT_WRITE))
			die("mprotect");
		fill(memory);
		expect(memory, !maps_over(memory, MORE), "mmap of more than the machine has");
		munmap(memory, MORE);

		limited(RLIMIT_DATA, 1, "mmap above RLIMIT_DATA");
		if (getrlimit(RLIMIT_AS, &size))
			die("getrlimit");
		limited(RLIMIT_AS, 1, "mmap above RLIMIT_AS");

		memory = sealed();
		expect(memory, munmap(memory, 2 * LEN) != 0, "munmap of a sealed page");
		expect(memory, !maps_over(memory, 2 * LEN), "mmap over a sealed page");
		expect(memory, mremap(memory, 2 * LEN, PAGE, 0) == MAP_FAILED, "mremap of a sealed page");
		fill(memory);
		other = map(2 * LEN, PROT_READ | PROT_WRITE);
		memset(other, 5, 2 * LEN);
		expect(memory, mremap(other, 2 * LEN, 2 * LEN, MREMAP_MAYMOVE | MREMAP_FIXED, memory) == MAP_FAILED, "mremap onto a sealed page");
		munmap(other, 2 * LEN);

		/* Done, not refused: nothing of it comes back. */
		memory = map(LEN, PROT_READ | PROT_WRITE);
		fill(memory);
		if (!maps_over(memory, LEN))
			die("mmap");
		for (size_t i = 0; i < LEN; i += PAGE)
			if (*(volatile uint64_t *)(memory + i)) {
				puts("old contents after mmap");
				return 1;
			}
		munmap(memory, LEN);
	}
	if (syscall(SYS_clone3, NULL, 0ul) != -1 || errno != EINVAL)
		die("clone3 without arguments");
	if (syscall(SYS_clone3, (void *)PAGE, 88ul) != -1 || errno != EFAULT)
		die("clone3 with a wrong address");
	if (clone(NULL, NULL, SIGCHLD, NULL) != -1 || errno != EINVAL)
		die("clone without a function");
	puts("what was refused left all as it was");
	return 0;
}

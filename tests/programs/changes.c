/* changes MODE [MIB SECONDS]: one call that changes mappings, page tables or contents, made again and again on memory of which most is
 * evicted; every byte is checked after it. The modes are the rows of docs/decisions/0010-changes-without-an-event.md that have no
 * program of their own. Calls are made by the instruction where libc's functions are interposed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "check.h"

/* Pages that each round is about. */
#define SOME 256
#define LEN (SOME * PAGE)

static char *memory;
static size_t pages;
static unsigned long rounds;

static long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}

/* Some kernels and machines do not have a call: then there is nothing that it could do. */
static void expect(long result, const char *what)
{
	if (result >= 0)
		return;
	errno = -result;
	if (errno != ENOSYS && errno != EINVAL && errno != EPERM && errno != ENOSPC)
		die(what);
}

static char *at(size_t page)
{
	return memory + page * PAGE;
}

static void refill(size_t first)
{
	pages_fill(at(first), SOME, first + 1);
}

static void check(size_t first, const char *what)
{
	pages_expect(at(first), SOME, first + 1, what);
}

static void zeros(char *start, const char *what)
{
	for (size_t i = 0; i < SOME; i++)
		if (page_check(start + i * PAGE, 0) >= 0) {
			page_report(start + i * PAGE, 0, what);
			exit(1);
		}
}

static void advise(size_t first, int advice)
{
	expect(raw(SYS_madvise, (long)at(first), LEN, advice, 0, 0, 0), "madvise");
}

static void by_advice(size_t first)
{
	/* NORMAL, RANDOM, SEQUENTIAL, WILLNEED, MERGEABLE, UNMERGEABLE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP, DOFORK, KEEPONFORK,
	 * COLD, PAGEOUT, POPULATE_READ, POPULATE_WRITE, COLLAPSE */
	static const int harmless[] = { 0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 11, 19, 20, 21, 22, 23, 25 };
	int advice = harmless[rounds % (sizeof harmless / sizeof *harmless)];
	long result = raw(SYS_madvise, (long)at(first), LEN, advice, 0, 0, 0);

	/* The kernel makes no huge page where it would have to fill holes. */
	if (result != -EAGAIN && result != -EBUSY && result != -ENOMEM)
		expect(result, "madvise");
}

static void discard(size_t first)
{
	/* DONTNEED, DONTNEED_LOCKED */
	advise(first, rounds % 2 ? 4 : 24);
	zeros(at(first), "discarded");
}

static void by_another(size_t first)
{
	struct iovec range = { at(first), LEN };
	int pidfd = syscall(SYS_pidfd_open, getpid(), 0);
	pid_t child;
	int status;

	if (pidfd < 0)
		die("pidfd_open");
	if (!(child = fork())) {
		static const int advice[] = { 20, 21, 3, 25 };

		for (unsigned i = 0; i < 4; i++)
			raw(SYS_process_madvise, pidfd, (long)&range, 1, advice[i], 0, 0);
		_exit(0);
	}
	close(pidfd);
	if (child < 0 || waitpid(child, &status, 0) < 0 || status)
		die("process_madvise");
}

static void write_by_another(size_t first)
{
	static char page[PAGE] __attribute__((aligned(4096)));
	pid_t parent = getpid(), child = fork();
	int status;

	if (!child) {
		for (size_t i = 0; i < SOME; i += 5) {
			struct iovec from = { page, PAGE }, to = { at(first + i), PAGE };

			page_fill(page, first + i + 1);
			if (process_vm_writev(parent, &from, 1, &to, 1, 0) != (ssize_t)PAGE)
				_exit(1);
		}
		_exit(0);
	}
	if (child < 0 || waitpid(child, &status, 0) < 0)
		die("process_vm_writev");
	if (status) {
		printf("process_vm_writev failed\n");
		exit(1);
	}
}

static void protect(size_t first)
{
	expect(raw(SYS_mprotect, (long)at(first), LEN, PROT_READ, 0, 0, 0), "mprotect");
	check(first, "read-only");
	expect(raw(SYS_mprotect, (long)at(first), LEN, PROT_NONE, 0, 0, 0), "mprotect");
	usleep(1000);
	expect(raw(SYS_mprotect, (long)at(first), LEN, PROT_READ | PROT_WRITE, 0, 0, 0), "mprotect");
}

static void key(size_t first)
{
	static long key = -1;

	if (key == -1)
		key = raw(SYS_pkey_alloc, 0, 0, 0, 0, 0, 0);
	/* Key 0 where the machine has none. */
	expect(raw(SYS_pkey_mprotect, (long)at(first), LEN, PROT_READ | PROT_WRITE, key < 0 ? -1 : key, 0, 0), "pkey_mprotect");
	check(first, "with a key");
	expect(raw(SYS_pkey_mprotect, (long)at(first), LEN, PROT_READ | PROT_WRITE, key < 0 ? -1 : 0, 0, 0), "pkey_mprotect");
}

static void seal(size_t first)
{
	/* Once for each part of the memory: a seal stays. */
	expect(raw(462, (long)at(first), LEN, 0, 0, 0, 0), "mseal");
}

static void policy(size_t first)
{
	unsigned long nodes = 1;

	/* MPOL_BIND, MPOL_PREFERRED, MPOL_INTERLEAVE, MPOL_DEFAULT, each with MPOL_MF_MOVE: it divides and joins mappings. */
	static const int policies[] = { 2, 1, 3, 0 };
	int policy = policies[rounds % 4];

	expect(raw(SYS_mbind, (long)at(first), LEN, policy, policy ? (long)&nodes : 0, policy ? 64 : 0, 2), "mbind");
}

static void migrate(size_t first)
{
	unsigned long nodes = 1;
	void *addresses[16];
	int status[16], node[16] = { 0 };

	for (int i = 0; i < 16; i++)
		addresses[i] = at(first + 16 * i);
	expect(raw(SYS_move_pages, 0, 16, (long)addresses, (long)node, (long)status, 2), "move_pages");
	expect(raw(SYS_migrate_pages, 0, 64, (long)&nodes, (long)&nodes, 0, 0), "migrate_pages");
}

static void brk_by_prctl(size_t first)
{
	unsigned long now = raw(SYS_brk, 0, 0, 0, 0, 0, 0);
	volatile char *end = sbrk(0);

	(void)end;
	(void)first;
	/* The end of the heap is a number: what is mapped stays. */
	expect(raw(SYS_prctl, PR_SET_MM, PR_SET_MM_BRK, now, 0, 0, 0), "PR_SET_MM_BRK");
	expect(raw(SYS_brk, now + 64 * PAGE, 0, 0, 0, 0, 0), "brk");
	expect(raw(SYS_brk, now, 0, 0, 0, 0, 0), "brk");
	prctl(PR_SET_THP_DISABLE, rounds % 2, 0, 0, 0);
}

static void remap_pages(size_t first)
{
	/* Refused for private memory. */
	if (raw(SYS_remap_file_pages, (long)at(first), LEN, 0, 1, 0, 0) >= 0) {
		printf("remap_file_pages took private memory\n");
		exit(1);
	}
}

static void droppable(size_t first)
{
	static char *area;
	const int map_droppable = 8;

	(void)first;
	if (area)
		munmap(area, LEN);
	area = mmap(NULL, LEN, PROT_READ | PROT_WRITE, map_droppable | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED) {
		area = NULL;
		return;
	}
	pages_fill(area, SOME, 77);
	usleep(5000);
	/* The kernel may drop a page; no page is anything else than itself or zeros. */
	for (size_t i = 0; i < SOME; i++)
		if (page_check(area + i * PAGE, 77 + i) >= 0 && page_check(area + i * PAGE, 0) >= 0)
			page_report(area + i * PAGE, 77 + i, "droppable"), exit(1);
}

/* The pipe has the pages themselves. */
static void splice_out(size_t first)
{
	static char read_back[16 * PAGE];
	int ends[2];
	struct iovec from = { at(first), sizeof read_back };
	size_t got = 0;

	if (pipe2(ends, O_CLOEXEC) || fcntl(ends[1], F_SETPIPE_SZ, sizeof read_back) < 0)
		die("pipe");
	if (vmsplice(ends[1], &from, 1, 0) != (ssize_t)sizeof read_back)
		die("vmsplice");
	madvise(at(first), LEN, MADV_PAGEOUT);
	while (got < sizeof read_back) {
		ssize_t count = read(ends[0], read_back + got, sizeof read_back - got);

		if (count <= 0)
			die("read");
		got += count;
	}
	close(ends[0]);
	close(ends[1]);
	pages_expect(read_back, 16, first + 1, "through vmsplice");
}

/* Older headers do not have it. */
struct move {
	uint64_t dst, src, len, mode;
	int64_t move;
};
#define MOVE_PAGES _IOWR(0xAA, 5, struct move)

/* A userfaultfd of the program's own: what it watches itself, and what it moves out of memory that is evicted. */
static void own_userfaultfd(size_t first)
{
	static int own = -1;
	static char *area;
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register watch = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_range all = { .start = (uintptr_t)memory, .len = pages * PAGE };

	if (own < 0) {
		own = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
		area = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		watch.range = (struct uffdio_range){ (uintptr_t)area, LEN };
		if (own < 0 || area == MAP_FAILED || ioctl(own, UFFDIO_API, &api) || ioctl(own, UFFDIO_REGISTER, &watch))
			die("userfaultfd");
	}
	/* Of memory that another watches it gets nothing. */
	watch.range = all;
	ioctl(own, UFFDIO_REGISTER, &watch);
	ioctl(own, UFFDIO_UNREGISTER, &all);
	for (size_t i = 0; i < SOME; i++) {
		struct move move = { (uintptr_t)area + i * PAGE, (uintptr_t)at(first + i), PAGE, 0, 0 };
		int tries = 0;

		while (ioctl(own, MOVE_PAGES, &move)) {
			/* A page that is away looks like a hole. To touch it brings it back. */
			if ((errno != ENOENT && errno != EAGAIN && errno != EBUSY) || ++tries > 1000)
				die("UFFDIO_MOVE");
			__atomic_fetch_add((char *)at(first + i), 0, __ATOMIC_RELAXED);
			move.move = 0;
		}
	}
	pages_expect(area, SOME, first + 1, "moved by the program");
	zeros(at(first), "after the program moved it away");
	madvise(area, LEN, MADV_DONTNEED);
}

/* Shared memory over private memory, gone again, and the mapping before it grows over the place at once. */
static void grow_over_remap(size_t first)
{
	char *room = mmap(NULL, 3 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *low, *high, *middle;
	int id = shmget(IPC_PRIVATE, LEN, IPC_CREAT | 0600);

	(void)first;
	if (room == MAP_FAILED || id < 0)
		die("mmap");
	low = map_at(room, LEN);
	high = map_at(room + LEN, LEN);
	pages_fill(low, SOME, 5);
	pages_fill(high, SOME, 5000);
	madvise(high, LEN, MADV_PAGEOUT);
	if (shmat(id, high, SHM_REMAP) != high || shmctl(id, IPC_RMID, NULL) || shmdt(high))
		die("shmat");
	if (mremap(low, LEN, 2 * LEN, 0) != low)
		die("mremap");
	zeros(high, "grown over what was replaced");
	pages_expect(low, SOME, 5, "before what was replaced");
	/* A hole into which the kernel puts a mapping so that it overlaps the place. */
	middle = room + LEN + LEN / 2;
	id = shmget(IPC_PRIVATE, LEN, IPC_CREAT | 0600);
	if (munmap(room, 3 * LEN) || shmat(id, middle + 1, SHM_REMAP | SHM_RND) != middle || shmctl(id, IPC_RMID, NULL))
		die("shmat into a hole");
	pages_fill(middle, SOME, 7);
	pages_expect(middle, SOME, 7, "shared, in a hole");
	if (shmdt(middle) || shmat(id, middle + 1, SHM_REMAP) != (void *)-1 || errno != EINVAL)
		die("shmdt");
}

/* The same with no descriptor left. */
static void grow_over_remap_without_descriptors(size_t first)
{
	struct rlimit usual, none;

	if (getrlimit(RLIMIT_NOFILE, &usual))
		die("getrlimit");
	none = usual;
	none.rlim_cur = 0;
	setrlimit(RLIMIT_NOFILE, &none);
	grow_over_remap(first);
	setrlimit(RLIMIT_NOFILE, &usual);
}

/* A mapping shrinks, its end being paged out, and grows in place at once; and over its neighbour, which is gone. */
static void shrink_and_grow(size_t first)
{
	char *room = mmap(NULL, 3 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *low, *high;

	(void)first;
	if (room == MAP_FAILED)
		die("mmap");
	low = map_at(room, 2 * LEN);
	high = low + LEN;
	munmap(high + LEN, LEN);
	for (int by_munmap = 0; by_munmap < 2; by_munmap++) {
		pages_fill(low, SOME, 5);
		pages_fill(high, SOME, 5000);
		madvise(high, LEN, MADV_PAGEOUT);
		if (by_munmap ? munmap(high, LEN) : mremap(low, 2 * LEN, LEN, 0) != low)
			die("munmap");
		if (mremap(low, LEN, 2 * LEN, 0) != low)
			die("mremap");
		zeros(high, "grown again");
		pages_expect(low, SOME, 5, "before what was unmapped");
	}
	munmap(room, 2 * LEN);
}

/* Guards come and go by libc's syscall() between two looks. */
static void guards_by_syscall(size_t first)
{
	refill(first);
	madvise(at(first), LEN, MADV_PAGEOUT);
	if (syscall(SYS_madvise, at(first), LEN, GUARD_INSTALL) && errno == EINVAL)
		return;
	if (syscall(SYS_madvise, at(first), LEN, GUARD_REMOVE))
		die("MADV_GUARD_REMOVE");
	zeros(at(first), "where guards came and went");
}

static const struct {
	const char *name;
	void (*function)(size_t first);
	/* What is there afterwards is zeros, or of no interest. */
	int clears;
} modes[] = {
	{ "advice", by_advice, 0 }, { "discard", discard, 1 }, { "process-madvise", by_another, 0 },
	{ "process-vm-writev", write_by_another, 0 }, { "mprotect", protect, 0 }, { "pkey", key, 0 }, { "mseal", seal, 0 },
	{ "mbind", policy, 0 }, { "migrate", migrate, 0 }, { "prctl", brk_by_prctl, 0 }, { "remap-file-pages", remap_pages, 0 },
	{ "droppable", droppable, 0 }, { "vmsplice", splice_out, 0 }, { "userfaultfd", own_userfaultfd, 1 },
	{ "shrink-and-grow", shrink_and_grow, 0 }, { "grow-over-remap", grow_over_remap, 0 },
	{ "grow-over-remap-without-descriptors", grow_over_remap_without_descriptors, 0 }, { "guards-by-syscall", guards_by_syscall, 1 },
};

int main(int argc, char **argv)
{
	size_t mode = 0;
	unsigned random = 20260312;

	if (argc < 2)
		return 2;
	while (mode < sizeof modes / sizeof *modes && strcmp(modes[mode].name, argv[1]))
		mode++;
	if (mode == sizeof modes / sizeof *modes)
		return 2;
	pages = argument(argc, argv, 2, 24) * MIB / PAGE;
	uint64_t end = microseconds() + argument(argc, argv, 3, 2) * 1000000;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	for (size_t first = 0; first < pages; first += SOME)
		refill(first);
	for (; microseconds() < end; rounds++) {
		size_t first = rand_r(&random) % (pages / SOME) * SOME, other = rand_r(&random) % (pages / SOME) * SOME;

		modes[mode].function(first);
		if (modes[mode].clears)
			refill(first);
		check(first, modes[mode].name);
		check(other, "elsewhere");
	}
	for (size_t first = 0; first < pages; first += SOME)
		check(first, "in the end");
	printf("nothing has changed\n");
	return 0;
}

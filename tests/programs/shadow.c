/* shadow [MIB [SECONDS [SEED [THREADS]]]]: threads do to their memory whatever the system allows, at random, and
 * verify every page against a shadow.
 *
 * 1. The memory is REGIONS regions. Whoever holds a region's lock may do anything to it.
 * 2. The shadow holds one 64-bit key per page (check.h makes the content out of it), and lies in a shared mapping:
 *    shared memory is not managed, so the shadow cannot go wrong with what it watches.
 * 3. A page is KNOWN, or after MADV_FREE it is MAYBE: what its key says, or zeros, and once zeros always zeros.
 * 4. A forked child verifies the regions that were locked during the fork, by a copy of their shadow, while the
 *    parent already changes them; then the child changes its own.
 *
 * A wrong byte is reported with the page's history, and ends the program with status 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include "shadow.h"

#ifndef MADV_COLD
#define MADV_COLD 20
#define MADV_PAGEOUT 21
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

/* --- operations on a region, its lock held ------------------------------------------------------------------ */

static void advise(struct region *region, int advice, size_t most)
{
	size_t first, count = pick_run(region, most, &first);

	/* Kernels without an advice, or a page that cannot be paged out, are no failure: nothing may change. */
	if (madvise(region->memory + first * PAGE, count * PAGE, advice) && errno != EINVAL && errno != EAGAIN)
		die("madvise");
}

static void do_dontneed(struct region *region)
{
	size_t first, count = pick_run(region, 128, &first);

	if (madvise(region->memory + first * PAGE, count * PAGE, MADV_DONTNEED))
		die("madvise(MADV_DONTNEED)");
	expect_zeros(region, first, count, DONTNEED);
}

static void do_free(struct region *region)
{
	size_t first, count = pick_run(region, 128, &first);

	if (madvise(region->memory + first * PAGE, count * PAGE, MADV_FREE))
		die("madvise(MADV_FREE)");
	for (size_t i = first; i < first + count; i++)
		if (region->shadow[i].key) {
			expect_from_now(region, i, region->shadow[i].key, FREE);
			region->shadow[i].maybe = 1;
		}
}

/* A fresh mapping over part of the region. */
static void do_map_over(struct region *region)
{
	size_t first, count = pick_run(region, 128, &first);
	char *at = region->memory + first * PAGE;

	if (pick(2))
		map_or_die(at, count, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED);
	map_or_die(at, count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED);
	expect_zeros(region, first, count, MAP_OVER);
}

/* The addresses a region leaves behind in its arena become reserved again, unless somebody was quicker. */
static void reserve_again(struct region *region, int place)
{
	char *at = region->arena + place * max_pages * PAGE;
	void *got = mmap(at, max_pages * PAGE, PROT_NONE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

	if (got == at)
		return;
	if (got != MAP_FAILED)
		munmap(got, max_pages * PAGE);
	region->arena = NULL;	/* what is reserved of it stays so, and is never used again */
}

/* The region has just left its old addresses, which are mapped no more. */
static void moved_to(struct region *region, char *memory, int place)
{
	int left = region->place;
	char *old = region->memory;

	region->memory = memory;
	region->place = place;
	if (left < 0 || old == memory)
		return;
	/* Behind the region the rest of its place is still reserved: give all of it back, then take all of it. */
	munmap(old + region->pages * PAGE, (max_pages - region->pages) * PAGE);
	reserve_again(region, left);
}

static void do_unmap(struct region *region)
{
	size_t old = region->pages;

	if (munmap(region->memory, old * PAGE))
		die("munmap");
	moved_to(region, NULL, -1);
	region->pages = max_pages / 2 + pick(max_pages / 2) + 1;
	region->memory = map_private(region->pages);
	expect_zeros(region, 0, max_pages, UNMAP);
}

/* mremap of a range that has become several mappings: refused. */
static int several_mappings(const char *what)
{
	if (errno != EFAULT && errno != EINVAL)
		die(what);
	self->refused++;
	return 1;
}

static void do_grow(struct region *region)
{
	size_t more = 1 + pick(256), old = region->pages;
	char *memory;

	if (old + more > max_pages || region->place >= 0)
		return;		/* in its arena a region could not grow without moving into the reserve behind it */
	memory = mremap(region->memory, old * PAGE, (old + more) * PAGE, MREMAP_MAYMOVE);
	if (memory == MAP_FAILED && several_mappings("mremap (grow)"))
		return;
	region->memory = memory;
	region->pages += more;
	expect_zeros(region, old, more, GROW);
}

static void do_shrink(struct region *region)
{
	size_t less = 1 + pick(128), pages = region->pages - less;

	/* A quarter can be 128 pages: one is left. */
	if (region->pages <= max_pages / 4 || region->place >= 0)
		return;
	if (pick(2)) {
		if (mremap(region->memory, region->pages * PAGE, pages * PAGE, 0) == MAP_FAILED &&
		    several_mappings("mremap (shrink)"))
			return;
	} else if (munmap(region->memory + pages * PAGE, less * PAGE)) {
		die("munmap (tail)");
	}
	region->pages = pages;
	expect_zeros(region, pages, less, SHRINK);
}

static int is_mapped(char *page)
{
	return !msync(page, PAGE, MS_ASYNC);
}

/* mremap to a given place; tells whether the region is there now. The kernel moves one mapping after the other, and may
 * give up after the first: what has gone comes back. */
static int move_to(struct region *region, char *target)
{
	size_t bytes = region->pages * PAGE, gone = 0;

	if (mremap(region->memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) != MAP_FAILED)
		return 1;
	several_mappings("mremap (move)");
	while (gone < region->pages && !is_mapped(region->memory + gone * PAGE))
		gone++;
	if (gone && (mmap(region->memory, gone * PAGE, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) != region->memory ||
		     mremap(target, gone * PAGE, gone * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, region->memory) == MAP_FAILED))
		die("mremap (back)");
	return 0;
}

/* To a place of the kernel's choice: copy nothing, leave a hole. */
static void do_move(struct region *region)
{
	char *target = map_or_die(NULL, region->pages, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE);

	if (move_to(region, target))
		moved_to(region, target, -1);
	/* If not, whether the target is still mapped depends on the kernel: leave it. */
}

/* Onto reserved addresses of the region's own. */
static void do_move_fixed(struct region *region)
{
	int place = region->place < 0 ? (int)pick(2) : !region->place;
	char *target;

	if (!region->arena)
		return;
	target = region->arena + place * max_pages * PAGE;
	if (move_to(region, target))
		moved_to(region, target, place);
	else
		region->arena = NULL;	/* for the same reason */
}

/* The pages move, and the old addresses stay mapped, empty. */
static void do_move_dontunmap(struct region *region)
{
	size_t bytes = region->pages * PAGE;
	char *old = region->memory;
	char *target = mremap(old, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);

	if (target == MAP_FAILED && several_mappings("mremap (dontunmap)"))
		return;
	for (int i = 0; i < 8; i++) {
		char *page = old + pick(region->pages) * PAGE;

		if (page_check(page, 0) >= 0) {
			page_report(page, 0, "left behind by dontunmap");
			_exit(1);
		}
		*page = 0;
	}
	if (munmap(old, bytes))
		die("munmap (left behind)");
	moved_to(region, target, -1);
}

static void do_protect(struct region *region)
{
	size_t first, count = pick_run(region, 128, &first);
	char *at = region->memory + first * PAGE;

	if (mprotect(at, count * PAGE, pick(2) ? PROT_NONE : PROT_READ))
		die("mprotect");
	if (pick(2))
		madvise(at, count * PAGE, MADV_PAGEOUT);
	if (mprotect(at, count * PAGE, PROT_READ))
		die("mprotect");
	verify_run(region, first, count, "while read-only");
	if (mprotect(at, count * PAGE, PROT_READ | PROT_WRITE))
		die("mprotect");
}

static void do_lock(struct region *region)
{
	size_t first, count = pick_run(region, 32, &first);
	char *at = region->memory + first * PAGE;

	if (mlock(at, count * PAGE))
		return;		/* the limit on locked memory */
	madvise(at, count * PAGE, MADV_PAGEOUT);
	verify_run(region, first, count, "while locked");
	munlock(at, count * PAGE);
	/* A freed page that has been locked is in memory for good: whatever it is now, it stays. Nothing to note. */
}

/* --- system calls on the memory ------------------------------------------------------------------------------ */

static void transfer(int to, int from, char *source, char *target)
{
	for (size_t done = 0; done < PAGE;) {
		ssize_t n = write(to, source + done, PAGE - done);

		if (n < 0 || read(from, target + done, n) != n)
			die("pipe");
		done += n;
	}
}

/* One page through a pipe into another page. */
static void do_pipe(struct region *region)
{
	size_t source = pick(region->pages), target = pick(region->pages);
	int ends[2];

	if (region->shadow[source].maybe || pipe2(ends, O_CLOEXEC))
		return;
	if (pick(2))
		madvise(region->memory + target * PAGE, PAGE, MADV_PAGEOUT);
	transfer(ends[1], ends[0], region->memory + source * PAGE, region->memory + target * PAGE);
	close(ends[0]);
	close(ends[1]);
	expect_from_now(region, target, region->shadow[source].key, PIPE);
	verify_page(region, target, "after pipe");
}

/* The key of a page of the file for O_DIRECT. */
static uint64_t file_key(size_t index)
{
	return (1ULL << 40) + index;
}

static void open_direct_file(void)
{
	const char *top = getenv("TMPDIR") ? getenv("TMPDIR") : ".";
	char *page = map_shared(PAGE);
	int file = open(top, O_TMPFILE | O_RDWR, 0600);
	char path[64];

	if (file < 0)
		die(top);
	for (size_t i = 0; i < FILE_PAGES; i++) {
		page_fill(page, file_key(i));
		if (pwrite(file, page, PAGE, i * PAGE) != PAGE)
			die("pwrite");
	}
	fsync(file);
	snprintf(path, sizeof path, "/proc/self/fd/%d", file);
	direct_file = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (direct_file < 0)
		direct_file = open(path, O_RDONLY | O_CLOEXEC);
	close(file);
	munmap(page, PAGE);
}

static void do_direct_read(struct region *region)
{
	size_t first, count = pick_run(region, FILE_PAGES / 2, &first), from = pick(FILE_PAGES / 2);

	if (pread(direct_file, region->memory + first * PAGE, count * PAGE, from * PAGE) != (ssize_t)(count * PAGE))
		die("pread (O_DIRECT)");
	for (size_t i = 0; i < count; i++)
		expect_from_now(region, first + i, file_key(from + i), DIRECT_READ);
	verify_run(region, first, count, "after O_DIRECT read");
}

static void do_vm_read(struct region *region)
{
	static __thread char page[PAGE] __attribute__((aligned(4096)));
	size_t index = pick(region->pages);
	struct iovec local = { page, PAGE }, remote = { region->memory + index * PAGE, PAGE };

	if (region->shadow[index].maybe)
		return;
	if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != (ssize_t)PAGE)
		return;		/* not allowed here */
	if (page_check(page, region->shadow[index].key) >= 0) {
		page_report(page, region->shadow[index].key, "copy by process_vm_readv of:");
		mismatch(region, index, "process_vm_readv");
	}
}

static void do_count_mutex(void)
{
	struct counter *counter = &counters[pick(COUNTERS)];

	if (!pick(4))
		madvise(counter, PAGE, MADV_PAGEOUT);
	pthread_mutex_lock(&counter->mutex);
	counter->value++;
	pthread_mutex_unlock(&counter->mutex);
}

static void do_wait_futex(void)
{
	struct counter *counter = &counters[pick(COUNTERS)];
	struct timespec soon = { 0, 1000000 };
	uint32_t value = __atomic_load_n(&counter->futex, __ATOMIC_SEQ_CST);

	if (!pick(2))
		madvise(counter, PAGE, MADV_PAGEOUT);
	if (pick(2)) {
		syscall(SYS_futex, &counter->futex, FUTEX_WAIT_PRIVATE, value, &soon, NULL, 0);
	} else {
		__atomic_fetch_add(&counter->futex, 1, __ATOMIC_SEQ_CST);
		syscall(SYS_futex, &counter->futex, FUTEX_WAKE_PRIVATE, 64, NULL, NULL, 0);
	}
}

#define STACK_PAGES 16

static void on_signal(int number)
{
	char pages[3 * PAGE];
	char *page = (char *)(((uintptr_t)pages + PAGE - 1) & ~(PAGE - 1));

	(void)number;
	page_fill(page, 7);
	madvise(page, PAGE, MADV_PAGEOUT);
	pages_expect(page, 1, 7, "signal stack");
	self->signals++;
}

static void do_alt_stack(void)
{
	stack_t stack = { .ss_sp = self->stack, .ss_size = STACK_PAGES * PAGE };

	if (sigaltstack(&stack, NULL))
		die("sigaltstack");
	madvise(self->stack, STACK_PAGES * PAGE, MADV_PAGEOUT);
	self->raised++;
	pthread_kill(pthread_self(), SIGUSR1);
	if (self->signals != self->raised) {
		fprintf(stderr, "MISMATCH signals: %u raised, %u handled\n", self->raised, self->signals);
		_exit(1);
	}
}

/* --- children ------------------------------------------------------------------------------------------------ */

static void verify_view(struct view *view, const char *who)
{
	for (int i = 0; i < view->count; i++)
		verify_region(&view->regions[i], who);
}

/* Takes over a region's shadow as it is now; nobody else may change either meanwhile. */
static void remember(struct view *view, const struct region *region)
{
	struct region *seen = &view->regions[view->count++];
	struct page *shadow = seen->shadow;

	*seen = *region;
	seen->shadow = shadow;
	memcpy(shadow, region->shadow, region->pages * sizeof *shadow);
}

/* In the child: all it sees must be as it was at the fork, and its changes are its own. */
static int child_main(int generation, int last)
{
	struct view *view = &self->views[generation];
	int status = 0;
	pid_t child;

	verify_view(view, "child");
	for (int i = 0; i < view->count; i++)
		for (int n = 0; n < 16; n++) {
			write_run(&view->regions[i], 32);
			do_dontneed(&view->regions[i]);
			advise(&view->regions[i], MADV_PAGEOUT, 256);
		}
	if (generation < last) {
		self->views[last].count = 0;
		for (int i = 0; i < view->count; i++)
			remember(&self->views[last], &view->regions[i]);
		child = fork();
		if (!child)
			_exit(child_main(last, last));
		verify_view(view, "child with a child");
		if (child < 0 || waitpid(child, &status, 0) != child)
			return 1;
		/* The parent is to learn that a process was killed, which is not what it learns of one that has read wrong bytes. */
		if (WIFSIGNALED(status))
			raise(WTERMSIG(status));
	}
	verify_view(view, "child at its end");
	return status != 0;
}

static void expect_success(int status, const char *what)
{
	if (!status)
		return;
	fprintf(stderr, "MISMATCH %s ended with status %x, seed %llu\n", what, status, (unsigned long long)seed);
	_exit(1);
}

static void reap(int flags)
{
	int status;

	if (self->child && waitpid(self->child, &status, flags) == self->child) {
		expect_success(status, "child");
		self->child = 0;
	}
}

static void do_fork(size_t locked)
{
	size_t held[CHILD_REGIONS] = { locked };
	int count = 1, last = pick(GENERATIONS);
	struct view *view = &self->views[0];
	pid_t child;

	reap(0);
	view->count = 0;
	remember(view, &regions[locked]);
	while (count < CHILD_REGIONS) {
		size_t other = pick(REGIONS);

		if (pthread_mutex_trylock(&locks[other]))
			break;
		held[count++] = other;
		remember(view, &regions[other]);
	}
	child = fork();
	if (child < 0)
		die("fork");
	if (!child)
		_exit(child_main(0, last));
	self->child = child;	/* not before: the child would write into the same shared mapping */
	for (int i = 1; i < count; i++)
		pthread_mutex_unlock(&locks[held[i]]);
}

static void do_vfork(void)
{
	pid_t child = vfork();
	int status;

	if (!child) {
		execl("/bin/true", "true", (char *)NULL);
		_exit(127);
	}
	if (child < 0 || waitpid(child, &status, 0) != child)
		die("vfork");
	expect_success(status, "vforked /bin/true");
}

static void do_spawn(void)
{
	char *const command[] = { "true", NULL };
	pid_t child;
	int status;

	if (posix_spawn(&child, "/bin/true", NULL, NULL, command, environ) || waitpid(child, &status, 0) != child)
		die("posix_spawn");
	expect_success(status, "spawned /bin/true");
}

static void *short_thread(void *argument)
{
	struct region *region = argument;
	char local[4 * PAGE];
	char *page = (char *)(((uintptr_t)local + PAGE - 1) & ~(PAGE - 1));

	page_fill(page, 9);
	verify_page(region, region->pages / 2, "short thread");
	pages_expect(page, 1, 9, "stack of a short thread");
	return NULL;
}

static void do_thread(struct region *region)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, short_thread, region) || pthread_join(thread, NULL))
		die("pthread_create");
}

/* --- the loop ------------------------------------------------------------------------------------------------ */

static void on_region(enum op op, size_t index)
{
	struct region *region = &regions[index];
	size_t first, count;

	if (op >= HUGE_HINT && op <= LOCK)
		region->deeds[region->done++ % DEEDS] = (struct deed){ op, region->memory, region->pages };
	switch (op) {
	case WRITE: write_run(region, 64); break;
	case VERIFY: count = pick_run(region, 64, &first); verify_run(region, first, count, "verify"); break;
	case VERIFY_ALL: verify_region(region, "verify all"); break;
	case DONTNEED: do_dontneed(region); break;
	case FREE: do_free(region); break;
	case PAGEOUT: advise(region, MADV_PAGEOUT, 512); break;
	case COLD: advise(region, MADV_COLD, 512); break;
	case HUGE_HINT:
		madvise(region->memory, region->pages * PAGE, pick(2) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
		break;
	case MAP_OVER: do_map_over(region); break;
	case UNMAP: do_unmap(region); break;
	case GROW: do_grow(region); break;
	case SHRINK: do_shrink(region); break;
	case MOVE: do_move(region); break;
	case MOVE_FIXED: do_move_fixed(region); break;
	case MOVE_DONTUNMAP: do_move_dontunmap(region); break;
	case PROTECT: do_protect(region); break;
	case LOCK: do_lock(region); break;
	case PIPE: do_pipe(region); break;
	case DIRECT_READ: do_direct_read(region); break;
	case VM_READ: do_vm_read(region); break;
	case FORK: do_fork(index); break;
	case THREAD: do_thread(region); break;
	default: break;
	}
}

static enum op pick_op(void)
{
	unsigned total = 0, at;
	int op;

	for (op = 0; op < OPS; op++)
		total += weights[op];
	at = pick(total);
	for (op = 0; at >= weights[op]; op++)
		at -= weights[op];
	return op;
}

static void *worker_main(void *argument)
{
	self = argument;
	while (microseconds() < deadline) {
		enum op op = pick_op();
		size_t index = pick(REGIONS);

		reap(WNOHANG);
		self->done[op]++;
		switch (op) {
		case COUNT_MUTEX: do_count_mutex(); break;
		case WAIT_FUTEX: do_wait_futex(); break;
		case ALT_STACK: do_alt_stack(); break;
		case VFORK: do_vfork(); break;
		case SPAWN: do_spawn(); break;
		default:
			pthread_mutex_lock(&locks[index]);
			on_region(op, index);
			pthread_mutex_unlock(&locks[index]);
		}
	}
	reap(0);
	return NULL;
}

static void set_up(size_t bytes)
{
	max_pages = bytes / PAGE / REGIONS;
	regions = map_shared(REGIONS * sizeof *regions);
	workers = map_shared(MAX_THREADS * sizeof *workers);
	counters = map_private(COUNTERS);
	open_direct_file();
	self = &workers[0];
	for (size_t i = 0; i < REGIONS; i++) {
		struct region *region = &regions[i];

		pthread_mutex_init(&locks[i], NULL);
		region->pages = max_pages - pick(max_pages / 4);
		region->shadow = map_shared(max_pages * sizeof(struct page));
		region->arena = map_or_die(NULL, 2 * max_pages, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE);
		region->place = -1;
		region->memory = map_private(region->pages);
		for (size_t page = 0; page < region->pages; page++)
			write_page(region, page, WRITE);
	}
	for (size_t i = 0; i < COUNTERS; i++)
		pthread_mutex_init(&counters[i].mutex, NULL);
	for (size_t i = 0; i < thread_count; i++) {
		workers[i].random = mix(seed + i);
		workers[i].stack = map_private(STACK_PAGES);
		for (int n = 0; n < GENERATIONS * CHILD_REGIONS; n++)
			workers[i].views[n / CHILD_REGIONS].regions[n % CHILD_REGIONS].shadow =
				map_shared(max_pages * sizeof(struct page));
	}
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART };
	size_t bytes = argument(argc, argv, 1, 512) * MIB;
	uint64_t seconds = argument(argc, argv, 2, 60);
	unsigned long counted = 0, expected = 0, done = 0, refused = 0;
	pthread_t threads[MAX_THREADS];

	seed = argument(argc, argv, 3, microseconds());
	thread_count = argument(argc, argv, 4, 8);
	if (thread_count > MAX_THREADS || bytes / PAGE / REGIONS < 512) {
		fprintf(stderr, "shadow: at most %d threads, at least 128 MiB\n", MAX_THREADS);
		return 2;
	}
	fprintf(stderr, "shadow: seed %llu\n", (unsigned long long)seed);
	sigaction(SIGUSR1, &action, NULL);
	set_up(bytes);
	deadline = microseconds() + 1000000 * seconds;
	for (size_t i = 0; i < thread_count; i++)
		if (pthread_create(&threads[i], NULL, worker_main, &workers[i]))
			die("pthread_create");
	for (size_t i = 0; i < thread_count; i++)
		pthread_join(threads[i], NULL);

	for (size_t i = 0; i < REGIONS; i++)
		verify_region(&regions[i], "at the end");
	for (size_t i = 0; i < COUNTERS; i++)
		counted += counters[i].value;
	for (size_t i = 0; i < thread_count; i++) {
		expected += workers[i].done[COUNT_MUTEX];
		refused += workers[i].refused;
	}
	if (counted != expected) {
		fprintf(stderr, "MISMATCH counters: %lu expected %lu\n", counted, expected);
		return 1;
	}
	for (int op = 0; op < OPS; op++) {
		unsigned long sum = 0;

		for (size_t i = 0; i < thread_count; i++)
			sum += workers[i].done[op];
		done += sum;
		if (sum)
			fprintf(stderr, "%12lu %s\n", sum, names[op]);
	}
	fprintf(stderr, "%12lu in all, %lu moves refused\n", done, refused);
	puts("shadow: every page as expected");
	return 0;
}

/* impostor CASE [PATH]: a process of a job that says to the manager that another's memory, or another's process, is its own.
 *
 * honest      says the truth, by the same code: it is taken under management (else the other cases would prove nothing)
 * mute        gives no token: it must not be handed the userfaultfd device
 * handed-on   a process connects, hands its connection to a helper, and executes the setuid program PATH: the helper
 *             introduces that as its own
 * memory      the userfaultfd is of another process than the one that connected
 * trash       the same of the userfaultfd for the trash area
 * program     the pidfd is that of another process
 * nonce       a forked child that names the number of its sibling
 *
 * Prints "accepted" if the manager said GO, "refused" if it closed the connection.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include "check.h"

enum { GREETING = 1, HELLO = 2, MAIN = 4, GO = 5, EXIT = 10, CALL = 17 };
enum { VERSION = PROTOCOL_VERSION, STAGING_PAGES = 4096, TRASH_PAGES = 512 };

struct areas {
	char *region;
	size_t len;
	char *beacon, *staging, *trash;
};

static struct areas map_areas(void)
{
	struct areas areas;

	areas.len = (STAGING_PAGES + TRASH_PAGES + 8) * PAGE;
	areas.region = mmap(NULL, areas.len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	areas.beacon = areas.region + PAGE;
	areas.staging = areas.beacon + 2 * PAGE;
	areas.trash = areas.staging + (STAGING_PAGES + 2) * PAGE;
	if (areas.region == MAP_FAILED || mprotect(areas.beacon, PAGE, PROT_READ | PROT_WRITE) ||
	    mprotect(areas.staging, (STAGING_PAGES + 1) * PAGE, PROT_READ | PROT_WRITE) ||
	    mprotect(areas.trash, (TRASH_PAGES + 1) * PAGE, PROT_READ | PROT_WRITE))
		die("mmap");
	return areas;
}

static int call_manager(uint64_t *token)
{
	const char *job = getenv("UZSWAP_JOB");
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int link = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (!job || strlen(job) != 32)
		die("UZSWAP_JOB");
	snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "uzswap-%.16s", job);
	if (link < 0 || connect(link, (void *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + 23))
		die("connect");
	*token = strtoull(job + 16, NULL, 16);
	return link;
}

/* Receives a message, with a descriptor if there is one; 0 if the connection was closed, -1 if nothing came in time. */
static int receive(int link, uint64_t *words, int max, int *descriptor)
{
	char control[CMSG_SPACE(4 * sizeof(int))];
	struct iovec buffer = { words, max * 8 };
	struct msghdr message = { .msg_iov = &buffer, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct pollfd poll_link = { link, POLLIN, 0 };
	ssize_t got;

	*descriptor = -1;
	if (poll(&poll_link, 1, 3000) <= 0)
		return -1;
	got = recvmsg(link, &message, 0);
	if (got > 0 && message.msg_controllen >= CMSG_LEN(sizeof(int)))
		memcpy(descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	return got <= 0 ? 0 : (int)got / 8;
}

static void transmit(int link, const uint64_t *words, int count, const int *descriptors, int number)
{
	char control[CMSG_SPACE(4 * sizeof(int))] = { 0 };
	struct iovec buffer = { (void *)words, count * 8 };
	struct msghdr message = { .msg_iov = &buffer, .msg_iovlen = 1 };

	if (number) {
		message.msg_control = control;
		message.msg_controllen = CMSG_SPACE(number * sizeof(int));
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);

		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(number * sizeof(int));
		memcpy(CMSG_DATA(header), descriptors, number * sizeof(int));
	}
	sendmsg(link, &message, MSG_NOSIGNAL);
}

/* Gives the token; returns the userfaultfd device. */
static int introduce(int link, uint64_t token)
{
	uint64_t words[32] = { CALL, VERSION, token };
	int device;

	transmit(link, words, 3, NULL, 0);
	if (receive(link, words, 32, &device) < 1 || words[0] != GREETING) {
		puts("refused");
		exit(0);
	}
	return device;
}

static int userfaultfd(int device)
{
	int fd = device >= 0 ? ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK)
			     : (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		die("userfaultfd");
	return fd;
}

static int handle_on(pid_t pid)
{
	int fd = syscall(SYS_pidfd_open, pid, 0);

	if (fd < 0)
		die("pidfd_open");
	return fd;
}

static void hello(int link, const struct areas *areas, int flags, const uint64_t *nonce, const int *descriptors)
{
	uint64_t words[] = { HELLO, flags, nonce ? nonce[0] : 0, nonce ? nonce[1] : 0, (uint64_t)areas->region, areas->len,
			     (uint64_t)areas->beacon, (uint64_t)areas->staging, (uint64_t)areas->trash };

	transmit(link, words, sizeof words / 8, descriptors, 3);
}

/* What becomes of it. A worker that is refused hears EXIT, or nothing any more. */
static void verdict(int link)
{
	uint64_t words[600];
	int descriptor, count;

	while ((count = receive(link, words, 600, &descriptor)) > 0) {
		if (words[0] == GO) {
			puts("accepted");
			return;
		}
		if (words[0] == EXIT)
			break;
	}
	puts(count < 0 ? "no answer" : "refused");
}

/* Another process with areas at the same addresses, whose userfaultfd this process gets. */
static int foreign_userfaultfd(int device)
{
	int pair[2], fd;
	uint64_t word = 0;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
		die("socketpair");
	if (!fork()) {
		/* Before the parent hears of the child, after which it may end at any time. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		fd = userfaultfd(device);
		transmit(pair[1], &word, 1, &fd, 1);
		for (;;)
			pause();
	}
	receive(pair[0], &word, 1, &fd);
	return fd;
}

/* Its own helper takes over the connection; it executes a setuid program. */
static void handed_on(int link, const char *path)
{
	int ready[2];
	char byte;

	if (pipe2(ready, O_CLOEXEC))
		die("pipe");
	pid_t self = getpid(), helper = fork();

	if (!helper) {
		uint64_t token = strtoull(getenv("UZSWAP_JOB") + 16, NULL, 16);
		struct areas areas = map_areas();

		close(ready[1]);
		/* The end of the pipe is that of the program that connected. */
		while (read(ready[0], &byte, 1) > 0)
			;
		usleep(300000);
		int device = introduce(link, token);
		int descriptors[3] = { userfaultfd(device), userfaultfd(device), handle_on(self) };

		hello(link, &areas, 0, NULL, descriptors);
		verdict(link);
		fflush(stdout);
		kill(self, SIGTERM);
		_exit(0);
	}
	close(ready[0]);
	execl(path, path, "100", (char *)NULL);
	die("execl");
}

/* A forked child names the number that its sibling was told at the beacon of both. */
static void stolen_nonce(void)
{
	uint64_t token;
	volatile uint64_t *beacon = NULL;
	char line[256];
	size_t size = 64 * MIB;
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	/* Make its beacon watched, and find it: the only page of this process that says that it is attached. */
	pages_fill(memory, size / PAGE, 1);
	madvise(memory, size, MADV_PAGEOUT);
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long from, to;
	char rights[5];

	while (fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx %4s", &from, &to, rights) == 3 && to - from == PAGE && !strcmp(rights, "rw-p") &&
		    !memcmp((void *)from, "attached", 8))
			beacon = (void *)from;
	if (!beacon)
		die("no beacon");
	/* The victim is made past libc, so that its number stays unused. */
	register long r10 __asm__("r10") = 0;
	long victim;

	__asm__ volatile("syscall" : "=a"(victim) : "a"(SYS_clone), "D"(SIGCHLD), "S"(0), "d"(0), "r"(r10)
			 : "rcx", "r11", "memory");
	if (!victim) {
		shared[1] = beacon[1];
		shared[2] = beacon[2];
		__atomic_store_n(&shared[0], beacon[0], __ATOMIC_RELEASE);
		for (;;)
			pause();
	}
	while (!__atomic_load_n(&shared[0], __ATOMIC_ACQUIRE))
		usleep(1000);
	if (memcmp(&shared[0], "inherits", 8))
		die("the child was told nothing");
	int link = call_manager(&token), device = introduce(link, token);
	int descriptors[3] = { userfaultfd(device), userfaultfd(device), handle_on(getpid()) };
	struct areas areas = map_areas();

	areas.beacon = (char *)beacon;
	hello(link, &areas, 3, shared + 1, descriptors);
	verdict(link);
	fflush(stdout);
	kill(victim, SIGKILL);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";
	uint64_t token, words[32];
	int device;

	if (!strcmp(name, "nonce")) {
		stolen_nonce();
		return 0;
	}
	struct areas areas = map_areas();
	int link = call_manager(&token);

	if (!strcmp(name, "mute")) {
		printf("%s\n", receive(link, words, 32, &device) > 0 ? "greeted" : "refused");
		return 0;
	}
	if (!strcmp(name, "handed-on")) {
		handed_on(link, argv[2]);
	}
	device = introduce(link, token);
	int descriptors[3] = { userfaultfd(device), userfaultfd(device), handle_on(getpid()) };

	if (!strcmp(name, "memory"))
		descriptors[0] = foreign_userfaultfd(device);
	else if (!strcmp(name, "trash"))
		descriptors[1] = foreign_userfaultfd(device);
	else if (!strcmp(name, "program"))
		descriptors[2] = handle_on(getppid());
	else if (strcmp(name, "honest"))
		die(name);
	hello(link, &areas, 0, NULL, descriptors);
	verdict(link);
	return 0;
}

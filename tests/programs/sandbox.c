/* sandbox MODE [MIB]: what sandboxes do to themselves before they fork, with evicted memory, and what their children read.
 *
 * pid-namespaces  several sandboxes at once, each the first process of a pid namespace, so that their threads have the same
 *                 numbers; each forks and its children verify
 * clone           a child made by the system call clone, past libc, which forks as libc does
 * clone-pid       the same, as the first process of a pid namespace
 * clone-bare      the same by an instruction, past libc's syscall()
 * clone-function  the same by libc's clone(), which calls a function on another stack
 * net             a new network namespace, then a fork
 * net-chroot      a new network namespace and an empty root, then a fork
 * seccomp         a filter that kills for whatever a forked child does not need, then a fork
 * seccomp-call    the same filter, installed by seccomp(2) through libc's syscall()
 * init            the first process of a pid namespace waits until it has no child any more
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include "check.h"

#define SANDBOXES 6
#define ROUNDS 12

static char *memory;
static size_t pages;

static void evict(void)
{
	madvise(memory, pages * PAGE, MADV_PAGEOUT);
}

static int ended_well(pid_t child)
{
	int status;

	if (child < 0)
		die("fork");
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			die("waitpid");
	if (status)
		fprintf(stderr, "a child ended with status %#x\n", status);
	return status == 0;
}

/* Forks as libc does; the child verifies what it has inherited. */
static int fork_and_verify(uint64_t base, const char *what)
{
	pid_t child = fork();

	if (!child)
		_exit(pages_wrong(memory, pages, base, what));
	return ended_well(child);
}

static int first_of_namespace(uint64_t base)
{
	int ok = 1;

	for (int round = 0; ok && round < ROUNDS / 3; round++) {
		pages_fill(memory, pages, base + round);
		evict();
		ok = fork_and_verify(base + round, "inherited in a pid namespace");
		ok &= !pages_wrong(memory, pages, base + round, "own in a pid namespace");
	}
	return ok;
}

static int pid_namespaces(void)
{
	pid_t sandbox[SANDBOXES];
	int ok = 1;

	for (int i = 0; i < SANDBOXES; i++) {
		if (unshare(CLONE_NEWPID))
			die("unshare");
		sandbox[i] = fork();
		if (!sandbox[i])
			_exit(!first_of_namespace(1 + 1000000ull * i));
		/* The next namespace is again one below that of this process. */
		int own = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);

		if (own < 0 || setns(own, CLONE_NEWPID))
			die("setns");
		close(own);
	}
	for (int i = 0; i < SANDBOXES; i++)
		ok &= ended_well(sandbox[i]);
	return ok;
}

static uint64_t cloned_base;

static int clone_child(void *unused)
{
	int ok = fork_and_verify(cloned_base, "inherited from a clone");

	(void)unused;
	ok &= !pages_wrong(memory, pages, cloned_base, "inherited by a clone");
	return !ok;
}

static pid_t by_syscall(int flags)
{
	return syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
}

static pid_t by_instruction(int flags)
{
	register long r10 __asm__("r10") = 0;
	long result;

	__asm__ volatile("syscall" : "=a"(result)
			 : "a"(SYS_clone), "D"((long)flags | SIGCHLD), "S"(0), "d"(0), "r"(r10) : "rcx", "r11", "memory");
	return result;
}

static pid_t by_function(int flags)
{
	static char stack[256 << 10] __attribute__((aligned(16)));

	return clone(clone_child, stack + sizeof stack, flags | SIGCHLD, NULL);
}

static int cloned(pid_t (*make)(int flags), int flags)
{
	int ok = 1;

	for (int round = 1; ok && round <= ROUNDS; round++) {
		pages_fill(memory, pages, round);
		evict();
		cloned_base = round;
		pid_t child = make(flags);

		if (!child)
			_exit(clone_child(NULL));
		ok = ended_well(child);
	}
	return ok;
}

static int forks(void)
{
	int ok = 1;

	for (int round = 1; ok && round <= ROUNDS; round++) {
		pages_fill(memory, pages, round);
		evict();
		ok = fork_and_verify(round, "inherited");
		ok &= !pages_wrong(memory, pages, round, "own");
	}
	return ok;
}

#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void filter(int by_call)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(read), ALLOW(write), ALLOW(exit), ALLOW(exit_group), ALLOW(clone), ALLOW(wait4), ALLOW(madvise),
		ALLOW(rt_sigprocmask), ALLOW(set_robust_list), ALLOW(rt_sigreturn), ALLOW(gettid), ALLOW(newfstatat),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		die("prctl");
	if (by_call ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)
		    : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		die("seccomp");
}

/* As init of a container does: starts a few, and waits for all that there are. */
static int init(void)
{
	pid_t child;
	int status;

	if (unshare(CLONE_NEWPID))
		die("unshare");
	child = fork();
	if (!child) {
		alarm(20);
		pages_fill(memory, pages, 1);
		evict();
		for (int i = 0; i < 4; i++)
			if (!fork())
				_exit(pages_wrong(memory, pages, 1, "inherited from init"));
		int bad = 0, seen = 0;

		/* Orphans may become its children, too; but there is an end. */
		while (wait(&status) > 0)
			bad |= status, seen++;
		if (errno != ECHILD)
			die("wait");
		_exit(bad || seen < 4 || pages_wrong(memory, pages, 1, "init"));
	}
	return ended_well(child);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	int ok = 0;

	/* Nothing is to be allocated under a filter. */
	static char output[BUFSIZ];

	setvbuf(stdout, output, _IOFBF, sizeof output);
	pages = argument(argc, argv, 2, 24) * MIB / PAGE;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	if (!strcmp(mode, "pid-namespaces")) {
		ok = pid_namespaces();
	} else if (!strcmp(mode, "clone")) {
		ok = cloned(by_syscall, 0);
	} else if (!strcmp(mode, "clone-pid")) {
		ok = cloned(by_syscall, CLONE_NEWPID);
	} else if (!strcmp(mode, "clone-bare")) {
		ok = cloned(by_instruction, 0);
	} else if (!strcmp(mode, "clone-function")) {
		ok = cloned(by_function, 0);
	} else if (!strcmp(mode, "net")) {
		if (unshare(CLONE_NEWNET))
			die("unshare");
		ok = forks();
	} else if (!strcmp(mode, "net-chroot")) {
		if (mkdir("empty-root", 0755) || chroot("empty-root") || chdir("/") || unshare(CLONE_NEWNET))
			die("chroot");
		ok = forks();
	} else if (!strcmp(mode, "seccomp") || !strcmp(mode, "seccomp-call")) {
		pages_fill(memory, pages, 1);
		evict();
		filter(!strcmp(mode, "seccomp-call"));
		ok = fork_and_verify(1, "inherited under a filter");
		ok &= !pages_wrong(memory, pages, 1, "own under a filter");
	} else if (!strcmp(mode, "init")) {
		ok = init();
	} else {
		fprintf(stderr, "sandbox: no such mode: %s\n", mode);
	}
	puts(ok ? "sandbox: verified" : "sandbox: wrong");
	return !ok;
}

"""Changes of a program's mappings of which the kernel sends no event."""
from __future__ import annotations

import re
import subprocess
import time

import harness
from behaviour import check, unless, wait_until
from control import Manager
from suite import PROGRAMS, Context, Result, complaint, test


def run_program(context: Context, test, name: str, said: str, *argv, limit="24M") -> Result:
    """Runs a C program of tests/programs at a tight limit; it says `said` if all was right."""
    outcome = context.run([context.program(name), *argv], "--memory-max", limit, "--quiet", timeout=test.seconds)
    right = (outcome.status, outcome.stdout) == (0, f"{said}\n")
    return Result(test.name, right, "" if right else complaint(outcome))


@test("shmremap", 60, needs_uzswap=False, beside=True)
def shared_memory_over_private(context: Context, test):
    """shmat(SHM_REMAP) unmaps watched memory without an event; nothing is moved out of what is mapped there next."""
    yield run_program(context, test, "shmremap", "nothing was lost", 48, context.size(6, 30))


@test("guards", 60, needs_uzswap=False, beside=True)
def guard_pages(context: Context, test):
    """Guard pages are put over memory that is paged out; what was there does not come back, and no guard is filled over."""
    yield run_program(context, test, "guards", "guards stay and what was under them is gone", context.size(5, 30))


@test("guards-and-faults", 60, needs_uzswap=False, beside=True)
def guards_over_wanted_pages(context: Context, test):
    """Guards are put over pages that a thread waits for just then: it gets the page or SIGSEGV, and the job goes on."""
    yield run_program(context, test, "guardfault", "guards stand against readers", context.size(5, 30), 1 if context.uzswap else 0, limit="16M")


@test("discards", 60, beside=True)
def discards_that_overlap(context: Context, test):
    """Threads discard overlapping ranges at once, or move the end of one away, while they are paged out: nothing comes back."""
    for how in ("discard", "move"):
        result = run_program(context, test, "discards", "what was discarded stayed so", how, context.size(3, 30), limit="4M")
        yield Result(f"discards: {how}", result.ok, result.detail)


@test("lone-child", 90, beside=True)
def children_without_a_worker(context: Context, test):
    """Forked children without a worker find guards, what was left out of the fork or wiped, and what a refused call leaves, as they are to."""
    for how in ("filter", "bare"):
        for what in ("dontfork", "guards", "removed", "refused", "wiped"):
            result = run_program(context, test, "lonechild", "children found what is right", how, what, limit="16M")
            yield Result(f"lone-child: {how} {what}", result.ok, result.detail)


@test("lazyfree", 60, beside=True)
def freed_lazily(context: Context, test):
    """The kernel takes memory that was given to it with MADV_FREE, after it was moved out: it reads as zeros, also in forked children."""
    for how in ("read", "fork"):
        result = run_program(context, test, "lazyfree", "the kernel took only what it was given", how, limit="96M")
        yield Result(f"lazyfree: {how}", result.ok, result.detail)


@test("fork-full", 60, beside=True)
def forks_without_room(context: Context, test):
    """Forks while neither pool nor swap file has room for what is being moved out of memory that children do not inherit."""
    manager, seconds = Manager(context), context.size(5, 30)
    # What is above memory.high is to go, always, and pool and swap file cannot take it: 60 MiB of random bytes.
    job = context.start([context.program("forkfull"), 60, seconds], "--memory-max", "96M", "--memory-high", "40M", "--max-pool", "8M",
                        "--swap-size", "8M", "--quiet", "--control", manager.socket)
    begun = wait_until(lambda: harness.read(job.files[0]) == b"forking\n", 20)
    # How often neither has had room: before each part of the time in which it forks, and after the last.
    refusals = []
    while begun and len(refusals) < 5 and (found := re.search(r"^fail (\d+)$", manager.get("cgroup/memory.swap.events"), re.M)):
        refusals.append(int(found[1]))
        time.sleep(seconds / 8)
    forks_still = harness.read(job.files[0]) == b"forking\n"
    outcome = job.end_within(test.seconds)
    said = re.fullmatch(r"forking\n(\d+) forks\nevery fork came to its end\n", outcome.stdout)
    full = len(refusals) == 5 and forks_still and all(before < after for before, after in zip(refusals, refusals[1:]))
    yield check("fork-full", unless(outcome.status == 0 and said, complaint(outcome)), unless(not said or int(said[1]) >= 10, f"too few forks: {outcome.stdout}"),
                unless(full or not said, f"there was room while it forked: fail of memory.swap.events was {refusals}"),
                unless(job.gone_within(5), "processes were left"))


@test("refused", 60, needs_uzswap=False, beside=True)
def refused_changes(context: Context, test):
    """munmap, mmap and mremap that the kernel refuses after it has announced them: what was there is not lost."""
    yield run_program(context, test, "refused", "what was refused left all as it was")


@test("wipeonfork", 60, needs_uzswap=False)
def wiped_on_fork(context: Context, test):
    """MADV_WIPEONFORK by a raw system call: the child finds it empty, the parent keeps it."""
    yield run_program(context, test, "wipeonfork", "children found what they were to find", context.size(30, 300))


@test("madvfree", 60)
def cost_of_madv_free(context: Context, test):
    """The three-thousandth call of MADV_FREE costs what the first does."""
    outcome = context.run([context.program("madvfree"), 3000], "--memory-max", "1G", "--quiet", timeout=test.seconds)
    figures = [int(word) for word in outcome.stdout.split()]
    right = outcome.status == 0 and len(figures) == 2 and figures[1] <= 4 * figures[0] + 20
    said = f"first calls {outcome.stdout.replace(' ', ' us, last ').strip()} us"
    yield Result("madvfree", right, said if len(figures) == 2 else complaint(outcome))


@test("robust", 60)
def robust_mutexes(context: Context, test):
    """Threads end with their stacks paged out; the robust mutexes they hold pass to another process."""
    yield run_program(context, test, "robust", "every mutex passed to the next owner", context.size(3, 30))


@test("robust-nodes", 60)
def robust_mutexes_in_private_memory(context: Context, test):
    """Threads end with the private robust mutexes that they hold paged out; those and the shared ones behind them pass on."""
    yield run_program(context, test, "robustnodes", "every mutex passed to the next owner", context.size(3, 30))


@test("whole-memory", 60, beside=True)
def whole_memory(context: Context, test):
    """A program that reads, populates or locks all that is mapped does not wait, and is evicted from afterwards."""
    for what in ("scan", "populate", "lock", "unlock"):
        result = run_program(context, test, "locksall", "right", what)
        yield Result(f"whole-memory: {what}", result.ok, result.detail)


@test("moved-onto", 90, beside=True)
def moved_onto(context: Context, test):
    """Evicted memory that is moved onto memory that is being evicted keeps its contents, also while a thread reads all that is mapped."""
    yield run_program(context, test, "movedonto", "what was moved is whole", context.size(6, 60))


MOVES = ("over", "grown", "moved", "stays", "beside", "hole")


@test("moved-on", 90)
def moved_on(context: Context, test):
    """Threads move memory, give some of it up and let the rest grow again, without a pause: nothing is lost, and nothing comes back."""
    for how in MOVES:
        for forks in ((), ("forks",)):
            argv = (how, 6, context.size(2, 30), *forks)
            result = run_program(context, test, "movedon", "all is where it was moved to", *argv, limit="4M")
            yield Result(f"moved-on: {' '.join((how, *forks))}", result.ok, result.detail)


@test("bursts", 120)
def bursts(context: Context, test):
    """Threads make a few changes of their mappings at random, without touching memory between them, fork among them, and find every byte right."""
    for seed in range(1, context.size(3, 30) + 1):
        for forks in ((), ("forks",)):
            argv = (6, context.size(4, 10), seed, *forks)
            result = run_program(context, test, "bursts", "all is where it belongs", *argv, limit="4M")
            yield Result(f"bursts: seed {' '.join((str(seed), *forks))}", result.ok, result.detail)


@test("executable", 60)
def executable(context: Context, test):
    """Memory that may be executed is evicted like other memory, between stretches that may not, and while rights change as in a compiler at run time."""
    for forks in ((), ("forks",)):
        result = run_program(context, test, "executable", "every function returned its number", 3, context.size(3, 30), *forks, limit="8M")
        yield Result(f"executable: {' '.join(('called', *forks))}", result.ok, result.detail)


@test("launcher", 60, beside=True)
def launchers(context: Context, test):
    """Programs that set the processors of their children, and child subreapers that wait until they have none, find what they do without uzswap."""
    for what, said in (("pin", "0 lost"), ("wait", "3 children"), ("execwait", "3 children"), ("chain", "few children")):
        result = run_program(context, test, "launcher", said, what, limit="16M")
        yield Result(f"launcher: {what}", result.ok, result.detail)


@test("own-names", 30, needs_uzswap=False, beside=True)
def own_names(context: Context, test):
    """Functions of a program's libraries that are named as libc's are called, and not the agent's."""
    library = context.program("libownnames", "-shared", "-fPIC", "-fno-builtin")
    program = context.directory() / "ownnames"
    subprocess.run(["gcc", "-O2", "-Wall", "-o", program, PROGRAMS / "ownnames.c", library], check=True, timeout=120)
    outcome = context.run([program], "--memory-max", "24M", "--quiet", timeout=test.seconds)
    right = (outcome.status, outcome.stdout) == (0, "2 42.0 rest\n")
    yield Result("own-names", right, "" if right else complaint(outcome))


CHANGES = ("advice", "discard", "process-madvise", "process-vm-writev", "mprotect", "pkey", "mseal", "mbind", "migrate", "prctl",
           "remap-file-pages", "droppable", "vmsplice", "userfaultfd", "shrink-and-grow", "grow-over-remap",
           "grow-over-remap-without-descriptors", "guards-by-syscall")


@test("changes", 60, beside=True)
def changes(context: Context, test):
    """Calls that change mappings or contents in silence, on memory of which half is evicted: every byte stays."""
    for mode in CHANGES:
        seconds = context.size(1, 20)
        outcome = context.run([context.program("changes"), mode, 24, seconds], "--memory-max", "12M", "--quiet", timeout=test.seconds)
        right = (outcome.status, outcome.stdout) == (0, "nothing has changed\n")
        yield Result(f"changes: {mode}", right, "" if right else complaint(outcome))

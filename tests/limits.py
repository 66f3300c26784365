"""The limit as a promise: programs that grow as fast as they can, and somebody outside who looks every millisecond."""
from __future__ import annotations

import json
import os
import subprocess

from behaviour import check, unless
from suite import MIB, Context, complaint, test


def allowed(limit: int) -> int:
    return 2 * MIB + limit // 100


def grow(context: Context, limit: int, argv, *options) -> tuple[str | None, dict]:
    """Runs `argv` under uzswap below a sampler; gives what is wrong, and what the sampler saw."""
    command = [context.program("sampler"), *context.command(argv, "--memory-max", limit, "--quiet", *options)]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    said = [line.split() for line in done.stderr.splitlines() if line.startswith("sampler: ")]
    seen = dict(zip(("looks", "pause", "peak", "pool", "single"), map(int, said[0][1:]))) if said else {}
    wrong = done.returncode or "MISMATCH" in done.stdout or not seen
    return (f"exit status {done.returncode}\n{done.stdout}{done.stderr}" if wrong else None), seen


def twice(context: Context, name: str, which: str, limit: int, *rest):
    """The better of two runs, should the first be past the limit: others may have had the machine."""
    wrong, seen = grow(context, *rest)
    if not wrong and seen[which] > limit + allowed(limit):
        again, second = grow(context, *rest)
        wrong, seen = again or wrong, min(seen, second or seen, key=lambda seen: seen[which])
    if wrong:
        return check(name, wrong)
    over, most = seen[which] - limit, allowed(limit)
    # Who grows far past the limit if it is let comes near it.
    return check(f"{name}: {over / MIB:+.1f} MiB at worst, {seen['looks']} looks",
                 unless(-limit // 2 < over <= most, f"{most / MIB:.1f} MiB are allowed; longest pause {seen['pause']} us"))


@test("limits", 240)
def limits(context: Context, test):
    """No way of growing gets past the limit by more than 2 MiB and 1 %."""
    limit, goal = 64 * MIB, 256
    for how, number in (("small", 2), ("large", 2), ("maps", 2), ("map", 2), ("stacks", 0), ("stacks", 32), ("forks", 2)):
        argv = [context.program("growth"), how, goal, number]
        yield twice(context, f"limits: {how}, {number}", "peak", limit, limit, argv)
    argv = [context.program("growth"), "forks", goal, 50]
    yield twice(context, "limits: 50 processes in a group", "peak", limit, limit, argv)


GROUPS = """
uzswap=$0 socket=$1 growth=$2
for i in $(seq 50); do
    "$uzswap" mkdir --socket "$socket" "g$i" && "$uzswap" set --socket "$socket" "cgroup/g$i/memory.max" 8M || exit
    sh -c '"$0" set --socket "$1" "cgroup/$2/cgroup.procs" $$ && exec "$3" map 32 1' "$uzswap" "$socket" "g$i" "$growth" &
done
wait
for i in $(seq 50); do "$uzswap" get --socket "$socket" "cgroup/g$i/memory.peak"; done
"""


@test("limits-groups", 120)
def limits_of_groups(context: Context, test):
    """50 groups of one process each."""
    limit, socket = 8 * MIB, context.directory() / "socket"
    argv = ["sh", "-c", GROUPS, context.uzswap, socket, context.program("growth")]
    yield twice(context, "limits-groups: 50 groups of a process", "single", limit, 4096 * MIB, argv, "--control", socket)


# More processes than are measured as long as the machine has hardly any page faults.
IDLE = 'for i in $(seq 40); do sleep 60 & done; sleep 0.5; start=$(date +%s%N); "$0" "$@"; status=$?; echo $((($(date +%s%N) - start) / 1000000)); kill $(jobs -p); exit $status'


@test("held-among-many", 120)
def held_among_many(context: Context, test):
    """A process that is held while all others are idle is let go in time: nothing else touches memory meanwhile."""
    for how in ("maps", "forks"):
        outcome = context.run(["bash", "-c", IDLE, context.program("growth"), how, 128, 1], "--quiet", "--memory-max", "24M", timeout=60)
        took = int(outcome.stdout.split()[-1]) / 1000 if outcome.stdout.strip() else 60
        yield check(f"held-among-many: {how} took {took:.1f} s", unless(outcome.status == 0, complaint(outcome)), unless(took < 4, "it was held up"))


@test("thread-executes", 120)
def thread_executes(context: Context, test):
    """A thread that is held while it executes a program goes on, under the id of the process."""
    argv = [context.program("threadexec"), context.size(100, 2000), 45]
    outcome = context.run(argv, "--quiet", "--memory-max", "32M", timeout=test.seconds)
    yield check("thread-executes", unless((outcome.status, outcome.stdout) == (0, "executed to the end\n"), complaint(outcome)))


@test("turns", 120)
def turns(context: Context, test):
    """More processes than processors that thrash take turns, find what they wrote, and none is forgotten; where they wait for each other
    nobody is held up for long."""
    processes, bytes_each, stats = 2 * len(os.sched_getaffinity(0)) + 2, 32 * MIB, context.directory() / "stats.json"
    for how, seconds, least in (("work", 8, 1000), ("relay", 4, 1000)):
        argv = [context.program("turns"), how, processes, bytes_each, seconds]
        outcome = context.run(argv, "--quiet", "--memory-max", processes * bytes_each * 2 // 5, "--stats", stats, timeout=seconds + 30)
        counted = json.loads(stats.read_text())
        touched, rested = int(outcome.stdout or 0), counted["rested"]
        yield check(f"turns: {how}, {touched} pages, {rested} times somebody rested", unless(outcome.status == 0, complaint(outcome)),
                    unless(touched >= least, f"one process has touched {touched} pages only in {seconds} s"),
                    unless(how == "relay" or rested > 0, f"nobody rested: {counted}"))

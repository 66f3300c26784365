"""Which process is which, and what holds when all of uzswap dies at once."""
from __future__ import annotations

import os
import random
import re
import signal
import time

import harness
from behaviour import check, unless, wait_until
from daemon import Daemon
from suite import Context, complaint, counter, need_root, test

TIGHT = ("--memory-max", "16M", "--quiet")

MODES = ("pid-namespaces", "clone", "clone-pid", "clone-bare", "clone-function", "net", "net-chroot", "seccomp", "seccomp-call", "init")


@test("sandbox", 60, beside=True)
def sandbox(context: Context, test):
    """Programs that change their namespaces, their root or their system calls, and fork with evicted memory."""
    need_root()
    for mode in MODES:
        for number in range(context.size(1, 100)):
            outcome = context.run([context.program("sandbox"), mode], *TIGHT, timeout=test.seconds)
            result = check(f"sandbox: {mode}", unless(outcome.status == 0, complaint(outcome)), outcome.hang,
                           unless("MISMATCH" not in outcome.stderr, outcome.stderr[:400]),
                           unless(outcome.stdout == "sandbox: verified\n", f"it wrote {outcome.stdout[:80]!r}"))
            if not result.ok:
                break
        yield result


@test("impostor", 30, beside=True)
def impostor(context: Context, test):
    """Processes of a job that claim another's memory, or another's process, as their own."""
    need_root()
    victim = context.directory() / "sleeper"
    victim.write_bytes(context.program("sleeper").read_bytes())
    victim.chmod(0o4755)
    program = context.program("impostor")
    program.chmod(0o755)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for case, prefix, extra, expected in (
            ("honest", [], [], "accepted"), ("honest", nobody, [], "accepted"), ("mute", [], [], "refused"),
            ("memory", [], [], "refused"), ("trash", [], [], "refused"), ("program", [], [], "refused"),
            ("nonce", [], [], "refused"), ("handed-on", nobody, [victim], "refused")):
        for number in range(context.size(2, 100)):
            outcome = context.run([*prefix, program, case, *extra], "--memory-max", "64M", "--quiet", timeout=test.seconds)
            result = check(f"impostor: {case}{' as nobody' if prefix else ''}", outcome.hang,
                           unless(outcome.stdout == expected + "\n", f"{outcome.stdout!r}: {complaint(outcome)}"))
            if not result.ok:
                break
        yield result


def parts(job: harness.Job) -> dict[str, list[int]]:
    """The processes of uzswap in a job: its front, its manager and its agents."""
    found = {"front": [job.process.pid], "manager": [], "agents": []}
    for pid in job.pids():
        name = harness.comm(pid)
        if name == "uzswap-manager":
            found["manager"].append(pid)
        elif name == "uzswap-agent":
            found["agents"].append(pid)
    return found


def without_reason(outcome: harness.Outcome) -> str:
    """Says so if a program got a signal for a page that is lost: it is to be killed, with a reason."""
    return unless(outcome.status != 128 + signal.SIGBUS, f"it got SIGBUS: {outcome.stderr[:400]}")


def wrong_bytes(outcome: harness.Outcome) -> str:
    """Says so if a program has read wrong bytes. A child that ended with status 9 has not: it was killed as its worker was gone, and its parent,
    whose worker was killed some microseconds later, had the time to say so. A child whose own child was killed ends in the same way."""
    killed = "its worker is gone" in outcome.stderr
    lines = [line for line in outcome.stderr.splitlines() if "MISMATCH" in line and not (killed and re.search(r" ended with status 9\b", line))]
    return unless(not lines, f"wrong bytes: {outcome.stderr[:400]}")


def misuse(outcome: harness.Outcome) -> str:
    """Says so if a program has not done what it is here for."""
    return unless(outcome.status != 2 and "Traceback" not in outcome.stderr, complaint(outcome))


@test("kill-subsets", 20, beside=True)
def kill_subsets(context: Context, test):
    """Whatever of uzswap is killed, at once: no program runs on with memory that is gone."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    # The first rounds are those of `pkill -9 uzswap`. Programs run for longer than it takes to kill, and end by themselves if they are spared.
    rounds, everything = context.size(16, 1000), context.size(6, 200)
    programs = [[context.program("shadow"), 128, 8, 1], [context.program("forktree"), 24, 3],
                [context.program("sandbox"), "clone", 32], ["python3", "-c", PYTHON]]
    failed, survived = [], 0
    for number in range(rounds):
        argv = programs[number % len(programs)]
        job = context.start(argv, *TIGHT)
        started = wait_until(lambda: job.manager() is not None or job.process.poll() is not None, 10)
        time.sleep(rng.uniform(0.05, 1.2))
        found = parts(job)
        chosen = [name for name in found if number < everything or rng.random() < 0.6]
        pids = [pid for name in chosen for pid in found[name]]
        rng.shuffle(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        # Without front or manager nothing may be left; without agents alone, programs may go on, and are right.
        fatal = {"front", "manager"} & set(chosen)
        gone = job.gone_within(5) if fatal else True
        outcome = job.wait(60)
        survived += not fatal
        problems = [unless(started, "the manager was not found"),
                    unless(gone, f"still there after 5 s:\n{job.outcome.hang}"),
                    wrong_bytes(outcome), without_reason(outcome), misuse(outcome), outcome.hang]
        problems = [problem for problem in problems if problem]
        if problems:
            failed.append(f"round {number}, {argv[0]}, killed {'+'.join(chosen) or 'nothing'}: {'; '.join(problems)}")
            if len(failed) > 3:
                break
    result = check("kill-subsets", *failed)
    result.detail = result.detail or f"{number + 1} rounds, {survived} without front and manager, seed {seed}"
    yield result


@test("unshare-pid", 30, beside=True)
def unshare_without_fork(context: Context, test):
    """A program whose first child is to be the first process of a pid namespace has that child, which is managed; it is not itself, and is named."""
    need_root()
    stats = context.directory() / "stats"
    argv = ["unshare", "--pid", "sh", "-c", f"sh -c 'echo $$; exec {context.program('grow')} 96 0'; echo done"]
    outcome = context.run(argv, "--memory-max", "32M", "--stats", stats, timeout=test.seconds)
    lines = outcome.stdout.splitlines()
    yield check("unshare-pid", unless(outcome.status == 0, complaint(outcome)),
                unless(len(lines) == 3 and lines[0] == "1" and lines[1].startswith("grow: ") and lines[2] == "done", f"it wrote {lines}"),
                unless(outcome.stderr.count("put into another pid namespace") == 1, outcome.stderr[:300]),
                unless((counter(harness.read(stats), "zswpout") or 0) > 0, "the child was not managed"))


@test("namespace-first", 30, beside=True)
def namespace_first(context: Context, test):
    """The first process of a pid namespace, which the kernel saves from signals of its worker inside, ends with front and manager, too."""
    need_root()
    for number in range(context.size(2, 100)):
        job = context.start(["unshare", "--pid", "--fork", context.program("shadow"), 128, 60, 1], *TIGHT)
        started = wait_until(lambda: job.manager() is not None and len(parts(job)["agents"]) >= 2, 10)
        time.sleep(0.5 + number / 50)
        found = parts(job)
        for pid in [*found["front"], *found["manager"]]:
            os.kill(pid, signal.SIGKILL)
        gone = job.gone_within(5)
        outcome = job.wait(30)
        result = check("namespace-first", unless(started, f"two programs with agents are wanted: {found}"),
                       unless(gone, f"still there after 5 s:\n{job.outcome.hang}"),
                       unless("MISMATCH" not in outcome.stderr, f"wrong bytes: {outcome.stderr[:400]}"))
        if not result.ok:
            break
    yield result


@test("kill-subsets-daemon", 20, beside=True)
def kill_subsets_of_daemon(context: Context, test):
    """The same with a daemon and a job that has joined it: its guard, its manager, the front and the agents."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    rounds, everything = context.size(10, 400), context.size(3, 80)
    programs = [[context.program("shadow"), 128, 8, 1], [context.program("forktree"), 24, 3], ["python3", "-c", PYTHON]]
    failed, survived = [], 0
    for number in range(rounds):
        argv = [str(part) for part in programs[number % len(programs)]]
        daemon = Daemon(context)
        job = daemon.start(argv, "--memory-max", "16M", "--quiet")
        started = wait_until(lambda: any(harness.comm(pid) == "uzswap-agent" for pid in job.pids()) or job.process.poll() is not None, 10)
        time.sleep(rng.uniform(0.05, 1.0))
        found = {"guard": [daemon.job.process.pid], "manager": [daemon.manager()], "front": [job.process.pid],
                 "agents": [pid for pid in job.pids() if harness.comm(pid) == "uzswap-agent"]}
        chosen = [name for name in found if number < everything or rng.random() < 0.5]
        pids = [pid for name in chosen for pid in found[name] if pid]
        rng.shuffle(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        fatal = {"guard", "manager", "front"} & set(chosen)
        gone = job.gone_within(5) if fatal else True
        outcome = job.wait(60)
        survived += not fatal
        if not {"guard", "manager"} & set(chosen):
            os.kill(daemon.job.process.pid, signal.SIGTERM)
        left = not daemon.job.gone_within(10)
        daemon.job.wait(20)
        problems = [unless(started, "no agent was found"), unless(gone, f"the job is still there after 5 s:\n{job.outcome.hang}"),
                    unless(not left, f"the daemon is still there after 10 s:\n{daemon.job.outcome.hang}"),
                    wrong_bytes(outcome), without_reason(outcome), misuse(outcome), outcome.hang]
        problems = [problem for problem in problems if problem]
        if problems:
            failed.append(f"round {number}, {argv[0]}, killed {'+'.join(chosen) or 'nothing'}: {'; '.join(problems)}")
            if len(failed) > 3:
                break
    result = check("kill-subsets-daemon", *failed)
    result.detail = result.detail or f"{number + 1} rounds, {survived} without guard, manager and front, seed {seed}"
    yield result


@test("bare-forks", 60, beside=True)
def bare_forks(context: Context, test):
    """Children made by the instruction itself, past libc, read right bytes; or none, when all of uzswap is killed at once."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    failed, held = [], 0
    # Mostly everything, now and then a subset.
    rounds = context.size(16, 400)
    for number in range(rounds):
        job = context.start([context.program("bareforks"), 4], *TIGHT)
        wait_until(lambda: job.manager() is not None or job.process.poll() is not None, 10)
        time.sleep(rng.uniform(0.2, 1.5))
        found = parts(job)
        chosen = [name for name in found if number % 4 or rng.random() < 0.6]
        pids = [pid for name in chosen for pid in found[name]]
        rng.shuffle(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        # Children that read on would read all within this time. Those that wait for a page wait for ever.
        if pids:
            time.sleep(2.5)
            # Without agents alone, the program goes on.
            held += len(job.survivors()) if {"front", "manager"} & set(chosen) else 0
            job.kill()
        outcome = job.wait(60)
        if "MISMATCH" in outcome.stderr:
            failed.append(f"round {number}: wrong bytes: {outcome.stderr[:400]}")
            if len(failed) > 3:
                break
    result = check("bare-forks", *failed)
    result.detail = result.detail or f"{number + 1} rounds, {held} processes held, seed {seed}"
    yield result


PYTHON = """
import random, time
rng = random.Random(1)
data = [bytes([i % 251]) * 997 for i in range(60000)]
end = time.monotonic() + 4
while time.monotonic() < end:
    i = rng.randrange(len(data))
    if data[i] != bytes([i % 251]) * 997:
        print("wrong", flush=True)
        raise SystemExit("MISMATCH")
"""

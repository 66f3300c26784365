"""Rounds of `uzswap lab torture`: one fixed seed, which every machine repeats, and one of the clock's, which is printed. And what a
daemon keeps of one job after another."""
from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import harness
from behaviour import check, unless, wait_until
from daemon import Daemon
from suite import MIB, Context, Result, need, test

VICTIM = Path(__file__).resolve().parent.parent / "crates/lab/programs/victim.c"

# Two minutes together.
MINUTES = 1
# What a round that does not end in time may take on top: the torture reports it itself.
REPORT = 150


@test("torture", 60 * MINUTES + REPORT)
def torture(context: Context, test):
    """Never a wrong byte, a hang, a panic or anything left, whatever programs do and whatever is killed. Both seeds at once: a busy
    machine finds more. But no other test: beside these two, one that takes 4 s took up to 29, and on a slow machine it passed for a hang."""
    need("cc")
    jobs = []
    for what, seed in (("fixed seed", 1), ("another seed", int(time.time()))):
        argv = [context.uzswap, "lab", "torture", "--minutes", MINUTES, "--seed", seed]
        jobs.append((what, seed, harness.Job(argv, context.directory(), uzswap=context.uzswap)))
        context.jobs.append(jobs[-1][2])
    for what, seed, job in jobs:
        outcome = job.wait(test.seconds)
        rounds = outcome.stdout.count("\nok ") + outcome.stdout.startswith("ok ")
        failed = outcome.status != 0 or rounds == 0 or outcome.hang
        words = f"{outcome.stdout[-400:]}\n{outcome.stderr}\n{outcome.hang}" if failed else f"{rounds} rounds"
        yield Result(f"torture: {what} {seed}", not failed, words)


def resident(pid: int) -> int:
    """Anonymous memory of a process without what it shares, in bytes."""
    lines = harness.read(f"/proc/{pid}/status").decode().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def on_disk(pid: int) -> int:
    """Bytes that the swap file of a manager takes."""
    names = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    return max((os.stat(name).st_blocks * 512 for name in names if ".swap" in harness.link(name)), default=0)


@test("leaks", 120, beside=True)
def leaks(context: Context, test):
    """Job after job, a daemon keeps no page, slot, descriptor or space on disk of those that have gone, and its memory stays as it is."""
    need("cc")
    victim = context.root / "victim"
    subprocess.run(["cc", "-O2", "-pthread", "-o", victim, VICTIM], check=True, timeout=120)
    daemon = Daemon(context, "--memory-max", "64M", "--max-pool", "8M")
    # Core dumps and namespaces take their time and keep nothing in the manager; robust mutexes have a test of their own.
    argv = [victim, "1", "1", "40", context.directory(), "robust,core"]
    figures, statuses = [], []
    most = lambda part, index: max(figure[index] for figure in part)

    def run(count: int) -> bool:
        """Runs so many jobs; tells whether the memory of the manager has grown from the first half of all to the second."""
        for _ in range(count):
            argv[1] = str(len(figures) + 1)
            statuses.append(daemon.run([str(part) for part in argv], "--quiet", "--memory-max", "16M").status)
            figure = lambda path: int(daemon.get(path))
            empty = wait_until(lambda: figure("debug/stored_pages") == figure("cgroup/memory.swap.current") == 0
                               and figure("debug/pool_total_size") < MIB and on_disk(daemon.manager()) < 4 * MIB, 10)
            pid = daemon.manager()
            # Sessions of processes that have ended are let go of with a moment's delay.
            wait_until(lambda: figures and harness.descriptors(pid) <= figures[-1][1], 3)
            figures.append((resident(pid), harness.descriptors(pid), empty))
        half = len(figures) // 2
        return most(figures[half:], 0) > most(figures[:half], 0) + 3 * MIB

    # Threads that have work for the first time touch memory that they keep: what still grows after twice as many jobs is a leak.
    rounds = context.size(8, 40)
    grows = run(rounds) and run(rounds)
    half = len(figures) // 2
    outcome = daemon.end()
    shown = [(rss // 1024, descriptors) for rss, descriptors, _ in figures]
    yield check(f"leaks: {len(figures)} jobs", unless(not any(statuses), f"statuses {statuses}"), unless(outcome.status == 0, outcome.stderr[-300:]))
    yield check("leaks: no page, slot, or space of pool and disk is kept", unless(all(empty for _, _, empty in figures), f"{figures}"))
    yield check("leaks: no descriptor is kept", unless(most(figures[half:], 1) <= most(figures[:half], 1), f"KiB and descriptors: {shown}"))
    yield check(f"leaks: memory stays ({shown[half - 1][0]} KiB after half of them, {shown[-1][0]} in the end)",
                unless(not grows, f"KiB and descriptors: {shown}"))

"""What uzswap does when something dies or runs out: never a wrong byte, never a hang, nothing left."""
from __future__ import annotations

import os
import random
import signal
import stat
import time
from pathlib import Path

import harness
from behaviour import check, unless, wait_until
from suite import MIB, Context, Result, complaint, need, need_root, test


# Little room, of which the pool may take a part only: whatever does not compress must go to the swap file.
TIGHT = ("--memory-max", "48M", "--max-pool", "16M", "--quiet")


def uzswap_files(job: harness.Job) -> list[tuple[str, os.stat_result]]:
    """The regular files on a disk that uzswap's own processes hold open, other than the test's output."""
    found = []
    for pid in job.pids():
        if not job.of_uzswap(pid):
            continue
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            path = f"/proc/{pid}/fd/{descriptor}"
            target = harness.link(path)
            if target.startswith("/") and not target.startswith(("/dev", "/proc", "/sys", "/memfd")) \
                    and target not in map(str, job.files):
                try:
                    info = os.stat(path)
                except OSError:
                    continue
                if stat.S_ISREG(info.st_mode):
                    found.append((target, info))
    return found


@test("swap-file", 60)
def swap_file(context: Context, test):
    """The swap file is nobody else's to read from the moment it exists, and gone afterwards."""
    directory = context.directory()
    named = directory / "the-swap"
    for what, options in (("default", ()), ("by path", ("--swap-file", named))):
        before = harness.leftovers()
        job = context.start([context.program("grow"), 200, 100, "random"], *TIGHT, *options)
        seen, open_to_others = 0, set()
        while job.process.poll() is None and time.monotonic() - job.started < test.seconds:
            for target, info in uzswap_files(job):
                # The agent, which is open as well, is for all to load, also while it is written (with a dot).
                name = Path(target).name
                if target.endswith(" (deleted)") or "swap" in name and not name.lstrip(".").startswith("uzswap-agent."):
                    seen = max(seen, info.st_blocks * 512)
                    if info.st_nlink and info.st_mode & 0o077:
                        open_to_others.add(f"{target} {info.st_mode & 0o777:o}")
            if named.exists() and named.stat().st_mode & 0o077:
                open_to_others.add(f"{named} {named.stat().st_mode & 0o777:o}")
            time.sleep(0.01)
        outcome = job.wait(test.seconds)
        yield check(f"swap-file: {what}", unless(outcome.status == 0, complaint(outcome)),
                    unless(seen > 8 * MIB, f"only {seen} bytes seen in a swap file"),
                    unless(not open_to_others, f"others may open {open_to_others}"),
                    unless(not named.exists(), "the swap file is still there"),
                    unless(harness.leftovers() <= before, f"left behind: {harness.leftovers() - before}"))


def killed_clearly(context: Context, name: str, outcome: harness.Outcome, before: set) -> Result:
    """The program could not go on: it was killed, with one line that says why, and wrote nothing wrong."""
    # That a swap file is kept in memory is another matter: a small one stands for a disk here.
    said = [line for line in outcome.stderr.splitlines() if "uzswap" in line and "kept in memory" not in line]
    return check(name, unless(outcome.status == 137, f"expected status 137: {complaint(outcome)}"),
                 unless(not outcome.stdout, f"it wrote {outcome.stdout[:80]!r}"),
                 unless("MISMATCH" not in outcome.stderr, "it read wrong bytes"),
                 unless(len(said) == 1, f"{len(said)} lines of uzswap: {outcome.stderr[:400]!r}"), outcome.hang,
                 unless(harness.leftovers() <= before, f"left behind: {harness.leftovers() - before}"))


@test("no-space", 60, beside=True)
def no_space(context: Context, test):
    """Data that fits neither the limit nor the swap: a clear end, never wrong bytes."""
    argv = [context.program("grow"), 256, 0, "random"]
    for what, options in (("--swap-size reached", ("--swap-size", "32M")), ("--no-swap", ("--no-swap",))):
        before = harness.leftovers()
        outcome = context.run(argv, *TIGHT, *options, timeout=test.seconds)
        yield killed_clearly(context, f"no-space: {what}", outcome, before)
    outcome = context.run([context.program("grow"), 64, 100], "--memory-max", "64M", "--quiet", "--no-swap", timeout=test.seconds)
    yield check("no-space: --no-swap, but it fits", unless(outcome.status == 0, complaint(outcome)))
    need("unshare")
    need_root()
    directory = context.directory()
    disk = directory / "disk"
    disk.mkdir()
    command = context.command(argv, *TIGHT, "--swap-file", disk / "swap")
    script = f'mount -t tmpfs -o size=24m,mode=755 none {disk} && exec "$@"'
    before = harness.leftovers()
    job = harness.Job(["unshare", "-m", "sh", "-c", script, "sh", *command], directory, uzswap=context.uzswap)
    outcome = job.wait(test.seconds)
    job.gone_within(5)
    yield killed_clearly(context, "no-space: the disk is full", outcome, before)


# --- sudden deaths -------------------------------------------------------------------------------

def victims(job: harness.Job, which: str) -> list[int]:
    """The manager, the process in front of it, or both, the manager last to be hit."""
    chosen = [job.process.pid] if which in ("front", "both") else []
    manager = job.manager()
    if which in ("manager", "both") and manager:
        chosen.append(manager)
    return chosen


def strike(context: Context, name: str, which: str, delay: float, argv, seconds: float) -> Result:
    """Kills part of uzswap at a moment under load: all of the job must die with it."""
    before = harness.leftovers()
    directory = context.directory()
    job = context.start(argv, "--memory-max", "48M", "--quiet", directory=directory)
    started = wait_until(lambda: job.manager() is not None or job.process.poll() is not None, 10)
    time.sleep(delay)
    running = len(job.survivors())
    pids = victims(job, which)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    gone = job.gone_within(seconds)
    outcome = job.finish()
    return check(f"{name} after {delay:.2f}s", unless(started and pids, "the manager was not found"),
                 unless(running >= 3, f"only {running} processes ran"),
                 unless(gone, f"still there after {seconds}s:\n{job.outcome.hang}"),
                 unless("MISMATCH" not in outcome.stderr, f"a program read wrong bytes: {outcome.stderr[:400]}"),
                 unless("every page as expected" not in outcome.stdout, "the program had ended before"),
                 unless(harness.leftovers() <= before, f"left behind: {harness.leftovers() - before}"),
                 unless(not any(directory.iterdir()), f"files left: {list(directory.iterdir())}"))


@test("kill-9", 10)
def kill_nine(context: Context, test):
    rng = random.Random(9)
    load = [context.program("shadow"), 128, 60, 1]
    for which, times in (("manager", context.size(4, 10)), ("front", context.size(3, 10)), ("both", context.size(3, 10))):
        for number in range(1, times + 1):
            yield strike(context, f"kill-9: {which} {number}", which, rng.uniform(0.2, 3), load, test.seconds)
    yield strike(context, "kill-9: manager of many", "manager", 1.0, [context.program("forktree"), 64, 3], test.seconds)

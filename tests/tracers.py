"""Sanitizers, tracers and debuggers in a job: exact results, and a job that ends when it is to end."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import harness
from behaviour import check, unless, wait_until
from suite import MIB, PROGRAMS, Context, complaint, counter, need, test

SANITIZERS = (("asan", ("-fsanitize=address",)), ("asan, linked statically", ("-fsanitize=address", "-static-libasan")),
              ("tsan", ("-fsanitize=thread",)))


@test("sanitizers", 120, beside=True)
def sanitizers(context: Context, test):
    """Programs with a sanitizer start, and are exact in half of their memory."""
    for what, flags in SANITIZERS:
        program = context.program("sanitized", "-g", *flags)
        native = harness.Job([program, 64, 1], context.directory())
        reference = native.wait(test.seconds)
        outcome = context.run([program, 64, 1], "--memory-max", "32M", "--quiet", timeout=test.seconds)
        yield check(f"sanitizers: {what}", unless(reference.status == 0, f"natively: {complaint(reference)}"),
                    unless(outcome.same_result(reference), complaint(outcome)),
                    unless("run unmanaged" not in outcome.stderr and "warning" not in outcome.stderr, outcome.stderr[:300]),
                    outcome.hang)


@test("sanitizers-end", 60)
def sanitizers_end(context: Context, test):
    """Programs with a sanitizer die with their guards within a second."""
    for what, flags in SANITIZERS:
        program = context.program("sanitized", "-g", *flags)
        for which in ("manager", "front") if context.full or what == "tsan" else ("manager",):
            job = context.start([program, 64, 1000], "--memory-max", "32M", "--quiet")
            managed = wait_until(lambda: job.manager() is not None, 10)
            time.sleep(2)
            running = len(job.survivors())
            os.kill(job.process.pid if which == "front" else job.manager(), signal.SIGKILL)
            gone = job.gone_within(1)
            outcome = job.finish()
            yield check(f"sanitizers-end: {what}, {which} killed", unless(managed and running >= 3, f"{running} processes ran"),
                        unless(gone, f"still there after a second:\n{job.outcome.hang}"),
                        unless("MISMATCH" not in outcome.stderr, outcome.stderr[:300]))


@test("strace-inside", 60)
def strace_inside(context: Context, test):
    """A tracer that follows forks leaves the workers alone, and the job either ends well or is killed with one message a process."""
    need("strace")
    directory = context.directory()
    argv = ["strace", "-f", "-o", directory / "trace", context.program("forktree"), 16, 2]
    reference = harness.Job(argv, directory).wait(test.seconds)
    outcome = context.run(argv, "--memory-max", "24M", "--quiet", timeout=test.seconds)
    killed = outcome.stderr.count("out of memory")
    yield check("strace-inside: at a tight limit", unless(outcome.same_result(reference), complaint(outcome)),
                unless(killed == 0, f"{killed} messages of being out of memory"), outcome.hang)


@test("second-sigterm", 30)
def second_sigterm(context: Context, test):
    """A job that does not heed SIGTERM is killed by the second one, be it traced, stopped or deaf."""
    need("strace")
    deaf = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"]
    for what, argv in (("a deaf program", deaf), ("a traced one", ["strace", "-f", "-o", "/dev/null", *deaf])):
        job = context.start(argv, "--memory-max", "64M", "--quiet")
        ready = wait_until(lambda: b"ready" in harness.read(job.files[0]), 10)
        os.kill(job.process.pid, signal.SIGTERM)
        time.sleep(1.2)
        lived = len(job.survivors())
        os.kill(job.process.pid, signal.SIGTERM)
        gone = job.gone_within(1)
        outcome = job.finish()
        yield check(f"second-sigterm: {what}", unless(ready and lived >= 3, f"{lived} processes lived after the first"),
                    unless(gone, f"still there after a second:\n{job.outcome.hang}"),
                    unless(outcome.status == 137, complaint(outcome)),
                    unless("second SIGTERM" in outcome.stderr, f"nothing was said: {outcome.stderr[:300]!r}"))


@test("unmanaged", 30, beside=True)
def unmanaged(context: Context, test):
    """What is in a job and not under its limit is told in bytes; --require refuses a program that runs without the agent."""
    static, dynamic = context.program("unmanaged", "-static"), context.program("unmanaged")
    commands = {"a static program": f"{static} private 64 3; exit 5", "shared memory": f"{dynamic} shared 64 3; exit 5",
                "a cleared environment": f"env -i {dynamic} private 64 3; exit 5",
                "memory of three processes": f"{dynamic} shared 64 4 3; exit 5",
                "shared memory beside heaps": f"{dynamic} shared 64 4 2 12; exit 5",
                "a static program that forks": f"{static} private 64 4 3; exit 5"}
    for what, line in commands.items():
        directory = context.directory()
        socket, stats = directory / "socket", directory / "stats"
        job = context.start(["sh", "-c", line], "--memory-max", "64M", "--control", socket, "--stats", stats)
        ask = lambda: json.loads(subprocess.run([context.uzswap, "stat", "--json", "--socket", socket], text=True,
                                                capture_output=True, check=False).stdout or "{}").get("memory.stat", {})
        # The figure is too high for a moment while processes come to share memory.
        told = wait_until(lambda: 63 * MIB <= ask().get("unmanaged_current", 0) <= 68 * MIB, 1.8)
        seen = ask()
        outcome = job.wait(test.seconds)
        text = stats.read_text()
        peak, current = counter(text, "unmanaged_peak") or 0, counter(text, "unmanaged_current")
        in_summary = re.search(r", ([0-9.]+) MiB unmanaged$", outcome.stderr.splitlines()[-1])
        warnings = [line for line in outcome.stderr.splitlines() if "runs unmanaged" in line]
        yield check(f"unmanaged: {what}", unless(outcome.status == 5 and outcome.stdout == "done\n", complaint(outcome)),
                    unless(told, f"stat: {seen}"),
                    unless(63 * MIB <= peak <= 68 * MIB and current == 0, f"stats: peak {peak}, current {current}"),
                    unless(in_summary and 63 <= float(in_summary[1]) <= 68, f"summary: {outcome.stderr!r}"),
                    unless(len(warnings) == (what in ("a static program", "a static program that forks", "a cleared environment")),
                           f"warnings: {outcome.stderr!r}"))
    for what, line, reason in (("a static program", f"{static} private 64 8; exit 5", "statically linked"),
                               ("a cleared environment", f"env -i {dynamic} private 64 8; exit 5", "without the agent")):
        outcome = context.run(["sh", "-c", line], "--memory-max", "64M", "--quiet", "--require", timeout=test.seconds)
        yield check(f"unmanaged: --require refuses {what}", unless(outcome.status == 137 and not outcome.stdout, complaint(outcome)),
                    unless(outcome.seconds < 3, f"it ran for {outcome.seconds:.1f} s"),
                    unless("unmanaged" in outcome.stderr and reason in outcome.stderr and "--require" in outcome.stderr
                           and len(outcome.stderr.splitlines()) == 1, f"stderr: {outcome.stderr!r}"))


@test("all-managed", 30, beside=True)
def all_managed(context: Context, test):
    """Programs that start, fork and end quickly are not taken for unmanaged."""
    busy = f"for i in $(seq {context.size(150, 300)}); do (true); /bin/true; python3 -c 'x = bytearray(8 << 20)' & [ $((i % 4)) = 0 ] && wait; done; wait; echo done"
    outcome = context.run(["sh", "-c", busy], "--memory-max", "64M", "--require", timeout=60)
    yield check("all-managed: short programs", unless((outcome.status, outcome.stdout) == (0, "done\n"), complaint(outcome)),
                unless("unmanaged" not in outcome.stderr, outcome.stderr[:300]), outcome.hang)

"""Processes of one user that hold the locks of their own address spaces: threads of the manager get stuck with them."""
from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import time

import harness
import attack
from behaviour import check, unless, wait_until
from daemon import open_daemon, whole
from hostile import VICTIM, as_user, delays_of, ends, touches
from suite import MIB, Context, complaint, need_root, test


class Mute:
    """A file system with a file that is never read to an end."""

    def __init__(self, context: Context):
        self.directory = context.directory() / "mute"
        self.directory.mkdir()
        for directory in (self.directory, *self.directory.parents[:2]):
            directory.chmod(0o755)
        self.server = subprocess.Popen([context.program("holder"), "serve", self.directory], stdout=subprocess.PIPE)
        self.serves = self.server.stdout.readline() == b"ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # What waits for an answer waits until the server is gone.
        self.server.kill()
        self.server.wait()
        subprocess.run(["umount", "-l", self.directory], check=False)


@test("hostile-holder", 240)
def holder(context: Context, test):
    """A user whose processes hold their own locks takes less than two seconds from a job of another, and nothing after that."""
    need_root()
    program = context.program("holder")
    program.chmod(0o755)
    for mode, mib in (("hold", 8), ("exec", 32)):
        yield from beside(context, mode, [program, mode], [context.size(12, 60), mib])


def beside(context: Context, mode: str, before: list, after: list):
    """A job of another user beside one that does this, with the directory of a mute file among its arguments."""
    name = f"hostile-holder: {mode}"
    with Mute(context) as mute:
        daemon = open_daemon(context)
        good = daemon.memory("--cgroup", "good", "--memory-max", "32M")
        # Later a look at the environment of all processes would wait for those that hold their locks.
        manager = daemon.manager()
        touched = touches(good, 64)
        start = time.monotonic()
        touched &= all([touches(good, 1) for _ in range(3)])
        usual = (time.monotonic() - start) / 3
        open_for_one = harness.descriptors(manager)
        hostile = daemon.start([*before, mute.directory, *after], "--memory-max", "24M", prefix=as_user(VICTIM))
        held = wait_until(lambda: harness.read(hostile.files[0]).count(b"holds\n") >= 1, 20)
        slowest, touches_made, end = 0.0, 0, time.monotonic() + context.size(6, 60)
        while touched and time.monotonic() < end:
            start = time.monotonic()
            touched = touches(good, 1)
            slowest = max(slowest, time.monotonic() - start)
            touches_made += touched
        current = daemon.get("cgroup/good/memory.current")
        holding = harness.read(hostile.files[0]).count(b"holds\n")
        yield check(f"{name}: {holding} processes, slowest of {touches_made} touches {slowest:.2f} s, before {usual:.2f} s",
                    unless(mute.serves and held, f"nothing is held: {harness.read(hostile.files[1])[:300]}"),
                    unless(touched, "the other job was held up"), unless(slowest < 2 * usual + 2, "slower by more than two seconds"),
                    unless(current.strip().isdigit() and int(current) < 34 * MIB, f"another job's limit does not hold: {current}"))
        start = time.monotonic()
        late = daemon.memory("--cgroup", "late", "--memory-max", "32M")
        joined = touches(late, 64)
        seconds = time.monotonic() - start
        delays = sorted(delays_of(daemon, VICTIM + 1, context.size(3, 30)))
        p99 = delays[len(delays) * 99 // 100] if delays else 99
        yield check(f"{name}: a job that joins then, {seconds:.1f} s; requests' p99 {p99 * 1000:.0f} ms",
                    unless(joined and seconds < 15, "it was held up"), whole(ends(late)), unless(p99 < 0.1, f"{len(delays)} requests"))
        threads = len(os.listdir(f"/proc/{manager}/task"))
        yield check(f"{name}: {threads} threads", unless(threads < 150, "one for each that holds"), unless(touches(good, 8), "held up"))
    # Now they go on.
    wait_until(lambda: touches(good, 1), 10)
    os.kill(hostile.process.pid, signal.SIGKILL)
    hostile.wait(30)
    yield check(f"{name}: the other job is whole", whole(ends(good)))
    ended = wait_until(lambda: len(os.listdir(f"/proc/{manager}/task")) < 40, 10)
    closed = wait_until(lambda: harness.descriptors(manager) <= open_for_one, 10)
    outcome = daemon.end()
    yield check(f"{name}: the daemon ends", unless(ended, "threads are left"), unless(closed, "descriptors are left"), unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


def names_as_failed(daemon, victim: int, count: int, done) -> None:
    """A worker says on so many connections that a process cannot be managed which is just leaving its memory."""
    intruder = attack.Intruder(daemon)
    links = [intruder.call()[0] for _ in range(count)]
    for link in links:
        socket.send_fds(link, [struct.pack("=3Q", attack.FAILED, 0, 1)], [os.pidfd_open(victim)])
    done.set()
    time.sleep(1000)


@test("hostile-switch", 120)
def switch(context: Context, test):
    """A process that the kernel can tell nothing of while it executes a program holds up no thread that lets others in."""
    need_root()
    program = context.program("holder")
    program.chmod(0o755)
    with Mute(context) as mute:
        daemon = open_daemon(context)
        good = daemon.memory("--cgroup", "good", "--memory-max", "32M")
        touched, manager = touches(good, 64), daemon.manager()
        switching = subprocess.Popen([program, "switch", mute.directory], stdout=subprocess.PIPE, start_new_session=True)
        pid = int(switching.stdout.readline().split()[0])
        # To look at it would wait, too.
        time.sleep(0.5)
        done = multiprocessing.get_context("fork").Event()
        client = attack.attack_process(names_as_failed, daemon, pid, 20, done)
        did = done.wait(20)
        time.sleep(0.5)
        start = time.monotonic()
        late = daemon.memory("--cgroup", "late", "--memory-max", "32M")
        joined = touches(late, 64)
        seconds = time.monotonic() - start
        threads = len(os.listdir(f"/proc/{manager}/task"))
        yield check(f"hostile-switch: a job that joins then, {seconds:.1f} s, {threads} threads",
                    unless(touched and did, "nothing is held"), unless(joined and seconds < 10, "it was held up"),
                    unless(threads < 60, "one for each connection"), unless(touches(good, 8), "the other job was held up"))
        managed = daemon.get("cgroup/late/cgroup.procs").strip() != ""
        os.kill(late.job.process.pid, signal.SIGKILL)
        killed = wait_until(lambda: daemon.get("cgroup/late/cgroup.procs").strip() == "", 5)
        # A program that has been executed has its own name.
        held = harness.comm(pid) == "holder"
        os.killpg(switching.pid, signal.SIGKILL)
        attack.end(client)
    switching.wait(10)
    late.job.wait(10)
    yield check("hostile-switch: a job whose front dies then", unless(held, "nothing was held"), unless(managed, "it was not managed"), unless(joined and killed, "it lives on"))
    yield check("hostile-switch: the other job is whole", whole(ends(good)))
    outcome = daemon.end()
    yield check("hostile-switch: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())

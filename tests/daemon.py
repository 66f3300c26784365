"""One manager for many jobs: how they join, what they share, whom they obey, and how it ends."""
from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import time

import harness
from behaviour import check, unless, wait_until
from control import JOIN, MAKE, MEMORY, READ, Manager, request, speak, touch
from debuggers import page_bytes
from suite import MIB, Context, complaint, need_root, test

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


class Daemon(Manager):
    """A daemon, and jobs that join it."""

    def __init__(self, context: Context, *options, prefix=(), **settings):
        super().__init__(context)
        argv = [*prefix, context.uzswap, "daemon", "--socket", self.socket, *options]
        self.job = harness.Job(argv, context.directory(), uzswap=context.uzswap, **settings)
        context.jobs.append(self.job)
        self.began = wait_until(lambda: os.path.exists(self.socket) and self.ask("ls").returncode == 0, 20)

    def groups(self) -> list[str]:
        return [name[:-1] for name in self.ask("ls", "cgroup").stdout.split() if name.endswith("/")]

    def start(self, argv, *options, prefix=(), **settings) -> harness.Job:
        """A job of this daemon's."""
        front = [*prefix, self.context.uzswap, "run", "--connect", "--socket", self.socket, *options, "--"]
        job = harness.Job([*front, *argv], self.context.directory(), uzswap=self.context.uzswap, **settings)
        self.context.jobs.append(job)
        return job

    def run(self, argv, *options, timeout: float = 60, **settings) -> harness.Outcome:
        return self.start(argv, *options, **settings).wait(timeout)

    def memory(self, *options, **settings) -> "Memory":
        return Memory(self, self.start(["python3", "-c", MEMORY], "--quiet", *options, stdin=subprocess.PIPE, **settings))

    def manager(self) -> int:
        return self.job.manager()

    def end(self) -> harness.Outcome:
        os.kill(self.job.process.pid, signal.SIGTERM)
        return self.job.end_within(60)

    def is_gone(self) -> list:
        """What it must not leave behind."""
        gone = wait_until(lambda: not self.job.survivors(), 10)
        return [unless(gone, "processes are left"), unless(not os.path.exists(self.socket), "the socket is left")]


def make_and_join(door: socket.socket, group: bytes, wishes: bytes) -> bytes:
    """Makes a group and joins it as a front does; gives the job: 16 digits of the daemon's name, 16 of the job's token."""
    speak(door, MAKE, group)
    return speak(door, JOIN, group, wishes)[14:46]


def open_daemon(context: Context, **settings) -> Daemon:
    """A daemon that every user may join."""
    daemon = Daemon(context, "--socket-mode", "0666", **settings)
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    return daemon


class Memory:
    """A job whose program touches as much as it is told, and checks all of it each time."""

    def __init__(self, daemon: Daemon, job: harness.Job):
        self.daemon, self.job = daemon, job

    def touch(self, mib: int, timeout: float = 60) -> bool:
        return touch(self.job, mib, timeout)

    def end(self) -> harness.Outcome:
        self.job.process.stdin.close()
        return self.job.end_within(60)


def whole(outcome: harness.Outcome):
    """Whether a Memory job has found all of its memory as it was."""
    right = outcome.status == 0 and outcome.stdout and set(outcome.stdout.split()) == {"True"}
    return unless(right, complaint(outcome))


@test("daemon", 120)
def daemon_jobs(context: Context, test):
    """Jobs join and leave: their status, their groups, their limits, their counters."""
    daemon = Daemon(context)
    mode = os.stat(daemon.socket).st_mode
    yield check("daemon: a socket of mode 0600", unless(stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600, oct(mode)))
    for status, argv in ((0, ["true"]), (3, ["sh", "-c", "exit 3"]), (128 + 15, ["sh", "-c", "kill $$"])):
        outcome = daemon.run(argv, "--memory-max", "64M", "--quiet")
        yield check(f"daemon: status {status}", unless((outcome.status, outcome.stderr) == (status, ""), complaint(outcome)))
    outcome = daemon.run(["/nowhere/program"], "--memory-max", "64M")
    yield check("daemon: not found", unless(outcome.status == 127 and outcome.stderr.count("\n") == 1, complaint(outcome)))
    yield check("daemon: groups of their own go with their jobs",
                unless(wait_until(lambda: not daemon.groups(), 5), f"left: {daemon.groups()}"))

    stats = context.directory() / "stats"
    outcome = daemon.run([context.program("grow"), 96, 0], "--memory-max", "32M", "--stats", stats)
    figures = json.loads(harness.read(stats) or b"{}")
    yield check("daemon: a limit of its own",
                unless(outcome.status == 0 and outcome.stdout.startswith("grow: "), complaint(outcome)),
                unless(outcome.stderr.startswith("uzswap: peak resident ") and outcome.stderr.count("\n") == 1, outcome.stderr),
                unless(figures.get("memory.max") == 32 * MIB and figures.get("zswpout", 0) > 1000, f"{figures}"),
                unless(figures.get("anon_peak", 0) <= 33 * MIB, f"{figures.get('anon_peak', 0) / MIB:.1f} MiB at the peak"))

    jobs = [daemon.memory("--cgroup", f"build/ci-{number}", "--memory-max", "32M") for number in (1, 2)]
    touched = [job.touch(64) for job in jobs]
    kept = [int(daemon.get(f"cgroup/build/ci-{number}/memory.current")) for number in (1, 2)]
    procs = [daemon.get(f"cgroup/build/ci-{number}/cgroup.procs").split() for number in (1, 2)]
    yield check("daemon: two jobs in named groups", unless(all(touched), f"{touched}"), unless(max(kept) < 33 * MIB, f"{kept}"),
                unless(all(len(pids) == 1 for pids in procs), f"{procs}"),
                unless(int(daemon.get("cgroup/build/memory.current")) <= sum(kept) + MIB, "more in the group above"))
    daemon.ask("set", "cgroup/build/ci-1/memory.max", "max")
    daemon.ask("set", "cgroup/build/ci-2/cgroup.kill", "1")
    killed = jobs[1].job.wait(20)
    outcome = jobs[0].end()
    yield check("daemon: one is killed, the other is not", unless(killed.status == 137, complaint(killed)), whole(outcome))
    yield check("daemon: named groups stay", unless(daemon.groups() == ["build"], f"{daemon.groups()}"),
                unless(wait_until(lambda: daemon.ask("rmdir", "build/ci-1").returncode == 0, 5), "ci-1 cannot be removed"))

    # A job in a job is no process of the one around it.
    inner = f"{context.uzswap} run --connect --socket {daemon.socket} --cgroup inner --quiet -- cat /proc/self/stat; exec 3<&0"
    outcome = daemon.run(["sh", "-c", inner], "--cgroup", "outer", "--quiet")
    yield check("daemon: a job in a job", unless(outcome.status == 0 and outcome.stdout, complaint(outcome)),
                unless(sorted(daemon.groups()) == ["build", "inner", "outer"], f"{daemon.groups()}"))
    outcome = daemon.end()
    yield check("daemon: ends", unless(outcome.status == 0 and not outcome.stdout, complaint(outcome)), *daemon.is_gone())


def protected_beside_loud(context: Context, memory_max: str) -> tuple[Daemon, "Memory", "Memory"]:
    """A daemon with a job whose 40 MiB `memory.low` protects, and another."""
    daemon = Daemon(context, "--memory-max", memory_max)
    daemon.ask("mkdir", "quiet")
    daemon.ask("set", "cgroup/quiet/memory.low", "64M")
    quiet, loud = daemon.memory("--cgroup", "quiet"), daemon.memory("--cgroup", "loud")
    quiet.touch(40)
    return daemon, quiet, loud


def taken_from(daemon: Daemon, group: str) -> str | None:
    """What was taken from a protected group, if something was."""
    stolen, low = daemon.count(f"cgroup/{group}/memory.stat", "pgsteal"), daemon.count(f"cgroup/{group}/memory.events", "low")
    return unless(stolen == 0 and low == 0, f"{stolen} pages taken, low {low}")


@test("daemon-neighbours", 120, beside=True)
def neighbours(context: Context, test):
    """A job that thrashes takes nothing from the protected memory of its neighbour."""
    daemon, quiet, loud = protected_beside_loud(context, "160M")
    end, rounds = time.monotonic() + context.size(8, 60), 0
    loud.touch(256)
    while time.monotonic() < end:
        rounds += loud.touch(1)
    taken, current, whole_job = taken_from(daemon, "quiet"), *(int(daemon.get(f"cgroup/{path}memory.current")) for path in ("quiet/", ""))
    yield check(f"daemon-neighbours: {rounds} rounds", taken,
                unless(current > 40 * MIB, f"{current / MIB:.1f} MiB left"), unless(whole_job < 164 * MIB, f"{whole_job / MIB:.1f} MiB"),
                unless(daemon.count("cgroup/loud/memory.stat", "pgsteal") > 10000, "the loud one was not reclaimed from"))

    # What it has in the pool is protected as well. Its own limit would write back, too.
    count = lambda key: daemon.count("cgroup/quiet/memory.stat", key)
    daemon.ask("set", "cgroup/quiet/memory.zswap.writeback", "0")
    daemon.ask("set", "cgroup/quiet/memory.max", "32M")
    wait_until(lambda: count("zswapped") > 4 * MIB, 10)
    daemon.ask("set", "cgroup/quiet/memory.max", "max")
    # What its own limit has begun may go on for a moment.
    wait_until(lambda: count("zswapped") == (time.sleep(0.3), count("zswapped"))[1], 10)
    daemon.ask("set", "cgroup/quiet/memory.zswap.writeback", "1")
    pooled, written = count("zswapped"), count("zswpwb")
    for _ in range(10):
        loud.touch(1)
    now = count("zswpwb")
    yield check("daemon-neighbours: its part of the pool", unless(pooled > 4 * MIB, f"{pooled} bytes in the pool"),
                unless(now == written, f"{now - written} pages written back"))

    # The cap of the whole pool is half of the limit.
    loud.touch(128)
    now, others = (daemon.count(f"cgroup/{group}/memory.stat", "zswpwb") for group in ("quiet", "loud"))
    low = daemon.count("cgroup/quiet/memory.events", "low")
    yield check("daemon-neighbours: its part of the pool at the cap", unless(others > 1000, f"the other wrote back {others} pages"),
                unless(now == written and low == 0, f"{now - written} pages written back, low {low}"))
    yield check("daemon-neighbours: both whole", *(whole(job.end()) for job in (quiet, loud)))
    yield check("daemon-neighbours: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("daemon-late-worker", 60)
def late_worker(context: Context, test):
    """Protected memory is not taken because the worker of another process is late."""
    daemon, quiet, loud = protected_beside_loud(context, "96M")
    loud.touch(64)
    worker = next(pid for pid in loud.job.pids() if harness.comm(pid) == "uzswap-agent")
    # Longer than the manager waits for an answer.
    script = f"while kill -STOP {worker}; do sleep 0.06; kill -CONT {worker}; sleep 0.1; done"
    with subprocess.Popen(["sh", "-c", script], stderr=subprocess.DEVNULL) as stops:
        try:
            end, rounds = time.monotonic() + context.size(4, 30), 0
            while time.monotonic() < end:
                rounds += loud.touch(64)
        finally:
            stops.kill()
    os.kill(worker, signal.SIGCONT)
    moved = daemon.count("cgroup/loud/memory.stat", "pgsteal")
    yield check(f"daemon-late-worker: {rounds} rounds, {moved} pages of the loud one", taken_from(daemon, "quiet"),
                unless(moved > 1000, "it was not reclaimed from"), whole(quiet.end()), whole(loud.end()))
    yield check("daemon-late-worker: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("daemon-starved", 60)
def starved(context: Context, test):
    """Protected memory is not taken because the manager has not come to register yet what another process has touched."""
    need_root()
    daemon, quiet, loud = protected_beside_loud(context, "96M")
    # Takes the processors from everything else for 7 to 22 ms at a time, as the host of a virtual machine may.
    thief = ("import os, random, sys, time\n"
             "os.sched_setaffinity(0, {int(sys.argv[1])})\n"
             "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(90))\n"
             "while True:\n"
             "    end = time.monotonic() + random.uniform(0.007, 0.022)\n"
             "    while time.monotonic() < end: pass\n"
             "    time.sleep(random.uniform(0.005, 0.015))\n")
    outcomes = []
    thieves = [subprocess.Popen(["python3", "-c", thief, str(cpu)]) for cpu in os.sched_getaffinity(0)]
    try:
        touched = loud.touch(64)
        # The first that each of them touches is not registered yet.
        for _ in range(4):
            other = daemon.memory("--cgroup", "loud")
            touched = touched and other.touch(64)
            outcomes.append(other.end())
        alive = all(thief.poll() is None for thief in thieves)
    finally:
        for thief in thieves:
            thief.kill()
            thief.wait()
    moved = daemon.count("cgroup/loud/memory.stat", "pgsteal")
    yield check("daemon-starved", taken_from(daemon, "quiet"), unless(touched, "the loud one did not answer"),
                unless(alive, "a thief has ended"), unless(moved > 1000, "it was not reclaimed from"),
                *map(whole, [*outcomes, quiet.end(), loud.end()]))
    yield check("daemon-starved: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("daemon-stop", 120, beside=True)
def stop(context: Context, test):
    """A daemon that ends brings back everything first, or refuses; its jobs run on."""
    daemon = Daemon(context)
    jobs = [daemon.memory("--memory-max", "32M") for _ in range(3)]
    for job in jobs:
        job.touch(64)
    stopped = jobs[2].job
    os.kill(stopped.process.pid, signal.SIGTSTP)
    away = int(daemon.get("cgroup/memory.swap.current"))
    outcome = daemon.end()
    yield check("daemon-stop: ends", unless(outcome.status == 0 and not outcome.stderr, complaint(outcome)), *daemon.is_gone(),
                unless(away > 64 * MIB, f"only {away} bytes were away"))
    os.kill(stopped.process.pid, signal.SIGCONT)
    touched = [job.touch(32) for job in jobs]
    outcomes = [job.end() for job in jobs]
    said = {outcome.stderr for outcome in outcomes}
    yield check("daemon-stop: jobs run on", unless(all(touched), f"{touched}"), *map(whole, outcomes),
                unless(said == {"uzswap: warning: the daemon has stopped; the job runs on without a limit\n"}, f"{said}"))

    # A static program does not join.
    for what, flags in (("managed", ()), ("unmanaged", ("-static",))):
        daemon, go = Daemon(context), context.directory() / "go"
        job = daemon.start([context.program("execlater", *flags), go, "sleep", "0"], "--quiet")
        begun = wait_until(lambda: harness.read(job.files[0]) == b"on\n", 10)
        ended = daemon.end().status == 0
        other = context.run(["true"], "--memory-max", "64M", "--quiet", timeout=20)
        go.touch()
        outcome = job.wait(20)
        yield check(f"daemon-stop: a job starts programs still, of {what} ones", unless(begun and ended and other.status == 0, "the daemon or the other job failed"),
                    unless(outcome.status == 0 and (flags or outcome.stderr.count("\n") <= 1) and "preload" not in outcome.stderr, complaint(outcome)))

    need_root()
    # A machine without free memory, as far as the daemon can see.
    meminfo = context.directory() / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n")
    daemon = Daemon(context, prefix=["unshare", "-m", "sh", "-c", f'mount --bind {meminfo} /proc/meminfo && exec "$0" "$@"'])
    job = daemon.memory("--memory-max", "32M")
    job.touch(64)
    os.kill(daemon.job.process.pid, signal.SIGTERM)
    said = lambda: harness.read(daemon.job.files[1]).decode()
    refused = wait_until(lambda: "not stopping: " in said(), 10)
    went_on = job.touch(16) and daemon.get("parameters/enabled") == "Y\n" and int(daemon.get("cgroup/memory.swap.current")) > MIB
    yield check("daemon-stop: refuses without memory", unless(refused, said()), unless(went_on, "it does not serve any more"))
    yield check("daemon-stop: the job is whole", whole(job.end()))
    wait_until(lambda: daemon.get("cgroup/memory.swap.current") == "0\n", 10)
    outcome = daemon.end()
    yield check("daemon-stop: ends when nothing is away", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("guards-kept", 60, beside=True)
def guards_kept(context: Context, test):
    """Guards over memory that is paged out are there still when a daemon has ended, which brings all of it back."""
    daemon = Daemon(context)
    source, sink = os.pipe()
    job = daemon.start([context.program("guardskept")], "--memory-max", "256M", "--quiet", stdin=source)
    os.close(source)
    ready = wait_until(lambda: harness.read(job.files[0]) == b"ready\n", 20)
    outcome = daemon.end()
    os.write(sink, b"\n")
    os.close(sink)
    result = job.wait(20)
    yield check("guards-kept", unless(ready and outcome.status == 0, complaint(outcome)),
                unless((result.status, result.stdout) == (0, "ready\nthey are all there\n"), complaint(result)))


@test("daemon-damage", 60, beside=True)
def damage(context: Context, test):
    """A damaged block of the swap file costs the pages in it and no others when a daemon that ends brings back everything."""
    need_root()
    daemon = Daemon(context, "--memory-max", "32M")
    daemon.ask("mkdir", "disk")
    daemon.ask("set", "cgroup/disk/memory.zswap.max", "0")
    job = daemon.start([context.program("inspected"), 64, "wait"], "--cgroup", "disk", "--quiet")
    written = lambda: daemon.count("cgroup/disk/memory.stat", "pswpout")
    begun = wait_until(lambda: harness.read(job.files[0]).endswith(b"\n") and written() > 4000, 30)
    pid, address, pages = map(int, harness.read(job.files[0]).split())
    manager = daemon.manager()
    path = next(path for path in (f"/proc/{manager}/fd/{number}" for number in os.listdir(f"/proc/{manager}/fd"))
                if "swap" in harness.link(path) and os.stat(path).st_size > 4 * MIB)
    with open(path, "r+b") as file:
        file.seek(2 * MIB)
        file.write(bytes(harness.PAGE))
    outcome = daemon.end()
    lost, wrong = 0, 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for page in range(pages):
            try:
                wrong += os.pread(memory.fileno(), harness.PAGE, address + page * harness.PAGE) != page_bytes(page)
            except OSError:
                lost += 1
    os.kill(pid, signal.SIGTERM)
    yield check(f"daemon-damage: {lost} pages are lost", unless(begun, "nothing was written"), unless(0 < lost <= 2, "not those of one block"),
                unless(wrong == 0, f"{wrong} pages are wrong"), unless(outcome.status == 0, complaint(outcome)),
                unless("is damaged" in outcome.stderr, complaint(outcome)), unless(job.wait(20).status == 143, "the program did not go on"))


@test("daemon-death", 120, beside=True)
def death(context: Context, test):
    """Whoever of the daemon is killed: its jobs die with it, or alone; no program ever sees wrong bytes."""
    for victim in ("manager", "guard", "both", "front"):
        daemon = Daemon(context)
        jobs = [daemon.memory("--memory-max", "32M") for _ in range(2)]
        for job in jobs:
            job.touch(64)
        # One of them is at work when it happens.
        jobs[0].job.process.stdin.write(b"64\n")
        jobs[0].job.process.stdin.flush()
        time.sleep(random.uniform(0, 0.5))
        guard, manager, front = daemon.job.process.pid, daemon.manager(), jobs[0].job.process.pid
        for pid in {"manager": [manager], "guard": [guard], "both": [manager, guard], "front": [front]}[victim]:
            os.kill(pid, signal.SIGKILL)
        outcomes = [job.job.wait(30) for job in (jobs[:1] if victim == "front" else jobs)]
        left = [pid for job in jobs[:len(outcomes)] for pid in job.job.survivors() if not wait_until(
            lambda: not os.path.exists(f"/proc/{pid}/environ") or not harness.read(f"/proc/{pid}/environ"), 10)]
        wrong = [outcome.stdout for outcome in outcomes if "False" in outcome.stdout]
        statuses = {outcome.status for outcome in outcomes}
        yield check(f"daemon-death: {victim}", unless(not left, f"left: {left}"), unless(not wrong, f"{wrong}"),
                    unless(statuses == ({137} if victim == "front" else {125}), f"{[complaint(outcome) for outcome in outcomes]}"))
        if victim == "front":
            yield check("daemon-death: the other job is whole", whole(jobs[1].end()))
            yield check("daemon-death: the daemon lives", unless(daemon.end().status == 0, "status"), *daemon.is_gone())
        else:
            daemon.job.wait(20)
            yield check(f"daemon-death: {victim}, nothing left", unless(wait_until(lambda: not daemon.job.survivors(), 10), "processes"))


@test("daemon-death-late", 60, beside=True)
def death_late(context: Context, test):
    """A guard that takes long to kill the jobs of its dead manager: their fronts say that it died, not that the program did."""
    daemon = Daemon(context)
    job = daemon.memory("--memory-max", "32M")
    job.touch(64)
    guard, front = daemon.job.process.pid, job.job.process.pid
    os.kill(guard, signal.SIGSTOP)
    for pid in (daemon.manager(), *(pid for pid in job.job.pids() if pid != front)):
        os.kill(pid, signal.SIGKILL)
    # Longer than a front waits for the last word of a daemon.
    time.sleep(2.5)
    os.kill(guard, signal.SIGCONT)
    outcomes = [job.job.end_within(15), daemon.job.end_within(15)]
    yield check("daemon-death-late: the front says so", *(unless(outcome.status == 125 and "died" in outcome.stderr, complaint(outcome)) for outcome in outcomes))
    yield check("daemon-death-late: nothing left", unless(wait_until(lambda: not daemon.job.survivors(), 10), "processes"))


@test("daemon-users", 60)
def users(context: Context, test):
    """Who is not root changes what is his, and nothing else; without the socket's leave nothing at all."""
    need_root()
    daemon = Daemon(context)
    refused = daemon.ask("get", "cgroup/memory.max", prefix=NOBODY)
    outcome = daemon.run(["true"], prefix=NOBODY)
    yield check("daemon-users: mode 0600", unless("belongs to another user" in refused.stderr, f"{refused}"),
                unless(outcome.status == 2 and "belongs to another user" in outcome.stderr, complaint(outcome)))
    daemon.end()

    daemon = Daemon(context, "--socket-mode", "666")
    as_nobody = lambda *arguments: daemon.ask(*arguments, prefix=NOBODY)
    daemon.ask("mkdir", "roots")
    theirs = [as_nobody("mkdir", "own"), as_nobody("mkdir", "own/below"), as_nobody("set", "cgroup/own/memory.max", "64M"),
              as_nobody("get", "cgroup/roots/memory.max"), as_nobody("get", "parameters/compressor")]
    not_theirs = [as_nobody("set", "cgroup/roots/memory.max", "1M"), as_nobody("set", "parameters/compressor", "zstd"),
                  as_nobody("set", "cgroup/memory.max", "1M"), as_nobody("rmdir", "roots"), as_nobody("mkdir", "roots/below"),
                  as_nobody("set", "cgroup/cgroup.kill", "1"), as_nobody("reclaim", "1M")]
    yield check("daemon-users: own groups", *(answer.stderr for answer in theirs))
    yield check("daemon-users: others' groups", *(unless(answer.returncode == 1 and "Permission denied" in answer.stderr, f"{answer}")
                                                  for answer in not_theirs))
    roots = daemon.memory("--cgroup", "roots")
    roots.touch(16)
    pid = daemon.get("cgroup/roots/cgroup.procs").strip()
    stolen = as_nobody("set", "cgroup/own/cgroup.procs", pid)
    outcome = daemon.run(["true"], "--cgroup", "roots", prefix=NOBODY)
    yield check("daemon-users: others' jobs", unless(stolen.returncode == 1 and "Permission denied" in stolen.stderr, f"{stolen}"),
                unless(outcome.status == 2 and "Permission denied" in outcome.stderr, complaint(outcome)))
    daemon.ask("mkdir", "own/roots")
    squatted = [daemon.run(["true"], "--cgroup", group) for group in ("own", "own/roots", "own/below/new")]
    yield check("daemon-users: root's job in others' groups", *(
        unless(outcome.status == 2 and "belongs to another user" in outcome.stderr, complaint(outcome)) for outcome in squatted))
    daemon.ask("rmdir", "own/roots")
    job = daemon.memory("--cgroup", "own/below", "--memory-max", "32M", prefix=NOBODY)
    job.touch(64)
    killed = as_nobody("set", "cgroup/own/cgroup.kill", "1")
    outcome = job.job.wait(20)
    yield check("daemon-users: own jobs", killed.stderr, unless(outcome.status == 137, complaint(outcome)),
                unless(outcome.stdout.startswith("True"), outcome.stdout))
    yield check("daemon-users: the other job is whole", whole(roots.end()))
    yield check("daemon-users: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("daemon-claims", 60)
def claims(context: Context, test):
    """No user but the daemon's own keeps memory from other users by the settings of a group."""
    need_root()
    claims = {"memory.min": ("max", "0"), "memory.low": ("1G", "0"), "memory.swap.max": ("0", "max"),
              "memory.zswap.writeback": ("0", "1"), "memory.zswap.shrinker.enabled": ("0", "1")}
    daemon = Daemon(context, "--socket-mode", "666", "--memory-max", "96M")
    as_nobody = lambda *arguments: daemon.ask(*arguments, prefix=NOBODY)
    made = [as_nobody("mkdir", "own"), as_nobody("mkdir", "own/below")]
    yield check("daemon-claims: groups", *(answer.stderr for answer in made))
    for group in ("own", "own/below"):
        for file, (takes, gives) in claims.items():
            answer = as_nobody("set", f"cgroup/{group}/{file}", takes)
            # What is protected below is a part of what the group above is granted.
            inner = group == "own/below" and file in ("memory.min", "memory.low")
            refused = answer.returncode == 1 and "Operation not permitted: it takes memory from groups of other users" in answer.stderr
            given = as_nobody("set", f"cgroup/{group}/{file}", gives)
            yield check(f"daemon-claims: {group}/{file}", unless(refused != inner, f"{answer}"), given.stderr)
    for group in ("own", "own/below"):
        for file, (takes, _) in claims.items():
            as_nobody("set", f"cgroup/{group}/{file}", takes)
    greedy = daemon.memory("--cgroup", "own/below", prefix=NOBODY)
    greedy.touch(80)
    other, took = daemon.memory("--cgroup", "other"), []
    for mib in [64] + 20 * [0]:
        began = time.monotonic()
        alive = other.touch(mib, 10)
        took.append(time.monotonic() - began)
        if not alive or took[-1] > 2:
            break
    yield check(f"daemon-claims: the other job, {max(took):.2f} s at most", unless(alive and max(took) <= 2, "it was held up"))
    yield check("daemon-claims: both are whole", whole(greedy.end()), whole(other.end()))
    yield check("daemon-claims: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("daemon-settings", 60)
def settings(context: Context, test):
    """SIGHUP: what has changed in the file takes effect; a bad file changes nothing. systemd's socket and notifications."""
    file = context.directory() / "daemon.toml"
    file.write_text('memory-max = "128M"\ncompressor = "zstd"\nquiet = true\n')
    outcome = harness.run([context.uzswap, "daemon", "--config", file], context.directory(), timeout=10)
    yield check("daemon-settings: no key of run's", unless(outcome.status == 2 and "'quiet'" in outcome.stderr, complaint(outcome)))
    file.write_text('memory-max = "128M"\ncompressor = "zstd"\n')
    daemon = Daemon(context, "--config", file)
    first = daemon.get("cgroup/memory.max"), daemon.get("parameters/compressor"), daemon.get("parameters/max_pool_percent")
    file.write_text('memory-max = "256M"\nmax-pool-percent = 30\nno-swap = true\n')
    os.kill(daemon.job.process.pid, signal.SIGHUP)
    changed = wait_until(lambda: daemon.get("parameters/max_pool_percent") == "30\n", 10)
    second = daemon.get("cgroup/memory.max"), daemon.get("parameters/compressor")
    said = harness.read(daemon.job.files[1]).decode()
    yield check("daemon-settings: read again", unless(first == (f"{128 * MIB}\n", "zstd\n", "20\n"), f"{first}"),
                unless(changed and second == (f"{256 * MIB}\n", "lz4\n"), f"{second}"),
                unless("another swap file takes effect when the daemon is started anew" in said, said))
    file.write_text("memory-max = [\n")
    os.kill(daemon.job.process.pid, signal.SIGHUP)
    told = wait_until(lambda: "is not TOML" in harness.read(daemon.job.files[1]).decode(), 10)
    yield check("daemon-settings: a bad file", unless(told, "no word of it"),
                unless(daemon.get("cgroup/memory.max") == f"{256 * MIB}\n", "it has changed something"))
    daemon.end()

    directory = context.directory()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        listener.bind(str(directory / "activated"))
        listener.listen()
        notifications.bind(str(directory / "notify"))
        notifications.settimeout(10)
        client = socket.socket(socket.AF_UNIX)      # before there is a daemon
        client.connect(str(directory / "activated"))
        client.settimeout(10)
        client.sendall(request(READ, b"parameters/enabled"))
        os.set_inheritable(listener.fileno(), True)
        argv = ["sh", "-c", f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" daemon', context.uzswap]
        job = harness.Job(argv, directory, uzswap=context.uzswap, env={"NOTIFY_SOCKET": str(directory / "notify")},
                          pass_fds=[listener.fileno()])
        context.jobs.append(job)
        notified = notifications.recv(100)
        answer = client.recv(100)
        os.kill(job.process.pid, signal.SIGTERM)
        outcome = job.wait(20)
    yield check("daemon-settings: systemd", unless(b"READY=1" in notified, f"{notified}"), unless(answer.endswith(b"Y\n"), f"{answer}"),
                unless(outcome.status == 0, complaint(outcome)), unless((directory / "activated").exists(), "its socket was removed"))


@test("daemon-errors", 60)
def errors(context: Context, test):
    """Bad input: one line that names the thing and the remedy, nothing started, nothing left."""
    daemon = Daemon(context)
    absent = str(context.directory() / "absent")
    plain = context.directory() / "plain"
    plain.write_text("")
    run = ["run", "--connect", "--socket", daemon.socket]
    cases = [
        ("no daemon", 2, "does not exist", ["run", "--connect", "--socket", absent, "--", "true"]),
        ("a group without a daemon", 2, "give --connect", ["run", "--cgroup", "a", "--memory-max", "64M", "--", "true"]),
        ("a setting of the daemon's", 2, "exclude each other", [*run, "--compressor", "zstd", "--", "true"]),
        ("a bad group", 2, "Not a directory", [*run, "--cgroup", "memory.max/a", "--", "true"]),
        ("no group", 2, "is empty", [*run, "--cgroup", "/", "--", "true"]),
        ("a long name", 2, "File name too long", [*run, "--cgroup", "n" * 300, "--", "true"]),
        ("too little", 2, "too little", [*run, "--memory-max", "1M", "--", "true"]),
        ("high above max", 2, "is above", [*run, "--memory-max", "64M", "--memory-high", "65M", "--", "true"]),
        ("a name that is taken", 2, "another manager listens there", ["daemon", "--socket", daemon.socket]),
        ("no socket's name", 2, "is no socket", ["daemon", "--socket", str(plain)]),
        ("a bad mode", 2, "octal", ["daemon", "--socket", absent, "--socket-mode", "888"]),
        ("two pools", 2, "exclude each other", ["daemon", "--socket", absent, "--max-pool", "1G", "--max-pool-percent", "3"]),
        ("nowhere to go", 2, "nowhere to go", ["daemon", "--socket", absent, "--enabled", "N", "--no-swap"]),
    ]
    for what, status, words, argv in cases:
        outcome = harness.run([context.uzswap, *argv], context.directory(), timeout=20)
        said = outcome.stderr
        yield check(f"daemon-errors: {what}", unless(outcome.status == status, complaint(outcome)), unless(words in said, said),
                    unless(said.count("\n") == 1 and said.startswith("uzswap: error: "), said))
    yield check("daemon-errors: nothing left", unless(not daemon.groups(), f"{daemon.groups()}"), unless(not os.path.exists(absent), "a socket"))
    own = context.start(["sleep", "20"], "--memory-max", "64M", "--quiet", "--control", absent)
    wait_until(lambda: os.path.exists(absent), 10)
    outcome = harness.run([context.uzswap, "run", "--connect", "--socket", absent, "--", "true"], context.directory(), timeout=20)
    yield check("daemon-errors: a job's own manager", unless(outcome.status == 2 and "of its own" in outcome.stderr, complaint(outcome)))
    own.kill()
    own.wait(10)
    yield check("daemon-errors: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("kill-before-start", 30, beside=True)
def kill_before_start(context: Context, test):
    """cgroup.kill kills the program of a job that has joined and has not started it yet; not one that starts after the kill is done."""
    daemon = Daemon(context)
    with daemon.connect() as client:
        job = make_and_join(client, b"cgroup/late", b"transient")
        marked = {**os.environ, "UZSWAP_JOB": job.decode()}
        kill = subprocess.Popen([context.uzswap, "set", "cgroup/late/cgroup.kill", "1", "--socket", daemon.socket])
        time.sleep(0.3)
        waits = kill.poll() is None
        program = subprocess.Popen(["sleep", "1000"], env=marked)
        killed = wait_until(lambda: program.poll() is not None, 10)
        ended = kill.wait(10)
        after = subprocess.Popen(["sleep", "1000"], env=marked)
        time.sleep(0.3)
        lives = after.poll() is None
        after.kill()
        after.wait()
        began = time.monotonic()
        idle = daemon.ask("set", "cgroup/late/cgroup.kill", "1")
        took = time.monotonic() - began
    program.kill()
    program.wait()
    yield check("kill-before-start", unless(waits, "the kill did not wait for the program"), unless(killed, "the program runs"),
                unless(ended == 0, f"status {ended}"), unless(lives, "what started later was killed, too"))
    yield check(f"kill-before-start: without a program {took:.1f} s", unless(idle.returncode == 0 and took < 8, f"{idle}"))
    yield check("kill-before-start: ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("daemon-hostile", 90)
def hostile(context: Context, test):
    """Those who join and misbehave, or only flood: no other job notices."""
    daemon = Daemon(context)
    manager = daemon.manager()
    job = daemon.memory("--cgroup", "good", "--memory-max", "32M")
    job.touch(64)
    before, numbers = harness.descriptors(manager), itertools.count()
    # Somebody who has nothing to do with any of it.
    bystander = subprocess.Popen(["sleep", "1000"])

    def join(client, wishes: bytes) -> bytes:
        return make_and_join(client, b"cgroup/bad-%d" % next(numbers), wishes)

    def leaves():
        with daemon.connect() as client:
            join(client, b"transient")

    def talks():
        with daemon.connect() as client:
            join(client, b"transient\nrequire")
            client.sendall(os.urandom(random.randrange(1, 4096)))

    def pretends():
        """Comes as a worker with the job's secret, and lies: names others' processes, who would be killed for it."""
        with daemon.connect() as client:
            joined = join(client, b"transient\nrequire")
            name, token = joined[:16], joined[16:]
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
                worker.settimeout(2)
                worker.connect(b"\0uzswap-" + name)
                worker.recv(4096)
                secret, victim = int(token, 16), random.choice([bystander.pid, job.job.process.pid])
                lies = [struct.pack("=10Q", 2, 4, secret, random.randrange(2), os.getpid(), *(random.getrandbits(47) & ~4095 for _ in range(5))),
                        struct.pack("=5Q", 13, secret, 1, 1, victim), struct.pack("=5Q", 11, secret, 1, 0, 1 << 46), os.urandom(80)]
                pidfd = os.pidfd_open(victim)
                try:
                    socket.send_fds(worker, [random.choice(lies)], [pidfd] * random.randrange(4))
                    # Now and then it does not wait to be asked who it is.
                    if random.randrange(2):
                        worker.recv(4096)
                finally:
                    os.close(pidfd)

    with daemon.besieged(leaves, talks, pretends, pretends):
        end, rounds = time.monotonic() + context.size(8, 60), 0
        while time.monotonic() < end:
            rounds += job.touch(1, 20)
    yield check("daemon-hostile: who has no part in it lives", unless(bystander.poll() is None, "the bystander was killed"))
    bystander.kill()
    bystander.wait()
    # Who was cut off between making a group and joining has left it behind, for whoever made it to remove.
    settled = wait_until(lambda: harness.descriptors(manager) <= before + 2 and len(daemon.groups()) <= 1 + 4, 20)
    removed = all(daemon.ask("rmdir", group).returncode == 0 for group in daemon.groups() if group != "good")
    settled = settled and removed and daemon.groups() == ["good"]
    yield check(f"daemon-hostile: {rounds} rounds", unless(rounds > 3, "the good job was held up"),
                unless(settled, f"{before} descriptors before, {harness.descriptors(manager)} after; groups {daemon.groups()[:9]}"))
    yield check("daemon-hostile: the good job is whole", whole(job.end()))
    outcome = daemon.end()
    yield check("daemon-hostile: ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("daemon-thaw", 60)
def thaw(context: Context, test):
    """A program that was frozen in a group that is not its job's own goes on with its front, however soon it is thawed."""
    daemon = Daemon(context, "--memory-max", "128M")
    daemon.ask("mkdir", "other")
    job = daemon.memory()
    job.touch(8)
    pid = next(int(line) for group in daemon.groups() for line in daemon.get(f"cgroup/{group}/cgroup.procs").split())
    home = next(group for group in daemon.groups() if str(pid) in daemon.get(f"cgroup/{group}/cgroup.procs").split())
    state = lambda: (harness.stat_fields(job.job.process.pid) or [b"?"])[0]
    problems = []
    for pause in (0, 0.01, 0.3, 0.3):
        move = daemon.ask("set", "cgroup/other/cgroup.procs", str(pid))
        daemon.ask("set", "cgroup/other/cgroup.freeze", "1")
        time.sleep(pause)
        daemon.ask("set", "cgroup/other/cgroup.freeze", "0")
        runs = job.touch(4, 5)
        problems.append(unless(move.returncode == 0 and runs and wait_until(lambda: state() != b"T", 2), f"after {pause} s: {runs}, the front is {state()!r}"))
    # Out of a frozen group.
    daemon.ask("set", "cgroup/other/cgroup.freeze", "1")
    time.sleep(0.3)
    daemon.ask("set", f"cgroup/{home}/cgroup.procs", str(pid))
    problems.append(unless(job.touch(4, 5) and wait_until(lambda: state() != b"T", 2), f"moved out of it: the front is {state()!r}"))
    outcome = job.end()
    yield check("daemon-thaw: programs and fronts go on", *problems, unless(outcome.status == 0, complaint(outcome)))
    daemon.end()

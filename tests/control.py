"""The control tree of a running job, through its socket: what it shows, what it changes, and the groups that are made in it."""
from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import harness
from behaviour import USUAL, check, one_line_and_nothing_left, unless, wait_until
from suite import MIB, Context, complaint, test


def ask(context: Context, *arguments, env=None, prefix=()) -> subprocess.CompletedProcess:
    return subprocess.run([*prefix, context.uzswap, *arguments], capture_output=True, text=True, timeout=30, env=env)


# Touches as many MiB as each line says, of pages that compress to a quarter; then finds all of it as it was.
MEMORY = """
import random, sys
blocks = []
for line in sys.stdin:
    for _ in range(int(line)):
        blocks.append(random.Random(len(blocks)).randbytes(1024) * 1024)
    print(all(block[:1024] * 1024 == block == random.Random(number).randbytes(1024) * 1024
              for number, block in enumerate(blocks)), flush=True)
"""


def besiege(attacks) -> None:
    """Does all of this for ever, each in a thread."""
    def repeat(attack):
        while True:
            try:
                attack()
            except OSError:     # the manager has had enough of it
                pass

    for attack in attacks:
        threading.Thread(target=repeat, args=[attack]).start()


class Manager:
    """A manager that listens at a socket."""

    def __init__(self, context: Context):
        self.context, self.socket = context, str(context.directory() / "socket")

    def ask(self, *arguments, prefix=()) -> subprocess.CompletedProcess:
        return ask(self.context, *arguments, "--socket", self.socket, prefix=prefix)

    def get(self, path: str) -> str:
        answer = self.ask("get", path)
        return answer.stdout if answer.returncode == 0 else f"error: {answer.stderr}"

    def procs(self, group: str = "cgroup") -> list[str]:
        """The processes of a group; none where the group or the manager is not there yet."""
        return self.ask("get", f"{group}/cgroup.procs").stdout.split()

    def count(self, path: str, key: str) -> int:
        lines = dict(line.split() for line in self.get(path).splitlines())
        return int(lines[key])

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(self.socket)
        return client

    @contextmanager
    def besieged(self, *attacks):
        """Has another process do this all the time, each in a thread."""
        besieger = multiprocessing.get_context("fork").Process(target=besiege, args=[attacks])
        besieger.start()
        try:
            yield
        finally:
            besieger.kill()
            besieger.join()


# Requests of the control protocol.
READ, WRITE, MAKE, JOIN = 1, 2, 4, 7


def request(verb: int, path: bytes, value: bytes = b"") -> bytes:
    """A request as the control protocol has it."""
    return b"uz\x01" + bytes([verb]) + struct.pack("=HH", len(path), len(value)) + path + value


def speak(door: socket.socket, verb: int, path: bytes, value: bytes = b"") -> bytes:
    """Makes a request; gives the answer."""
    door.sendall(request(verb, path, value))
    return door.recv(4096)


def touch(job: harness.Job, mib: int, timeout: float = 60) -> bool:
    """Has a program of MEMORY touch so much more. What it says is in its output; tells whether it said something."""
    said = lambda: harness.read(job.files[0]).count(b"\n")
    before = said()
    job.process.stdin.write(b"%d\n" % mib)
    job.process.stdin.flush()
    return wait_until(lambda: said() > before, timeout)


class Controlled(Manager):
    """A job whose manager listens, and whose program does as it is told."""

    def __init__(self, context: Context, *options):
        super().__init__(context)
        self.job = context.start(["python3", "-c", MEMORY], "--memory-max", "64M", "--quiet", "--control", self.socket, *options,
                                 stdin=subprocess.PIPE)
        # A program that is managed has begun.
        self.began = wait_until(lambda: os.path.exists(self.socket) and self.procs(), 20)

    def touch(self, mib: int) -> bool:
        return touch(self.job, mib)

    def end(self, timeout: float):
        self.job.process.stdin.close()
        return self.job.wait(timeout)


@test("control-freeze", 60, beside=True)
def control_freeze(context: Context, test):
    """Programs that are stopped with their group while they execute another go on with it."""
    manager = Manager(context)
    job = context.start([context.program("execchain"), 8, context.size(300, 1500)], "--memory-max", "12M", "--quiet",
                        "--control", manager.socket)
    began = wait_until(lambda: os.path.exists(manager.socket), 10)
    ended = lambda: job.process.poll() is not None
    end, cycles, refused = time.monotonic() + context.size(4, 20), 0, []
    while not ended() and time.monotonic() < end:
        answers = [manager.ask("set", "cgroup/cgroup.freeze", value) for value in "10"]
        refused += [answer.stderr for answer in answers if answer.returncode]
        # A job whose manager does not answer any more is about to end.
        if refused and wait_until(ended, 1):
            refused.clear()
        cycles += 1
    outcome = job.wait(30)
    yield check(f"control-freeze: {cycles} times", unless(began and cycles > 20, "it was not frozen"), unless(not refused, f"{refused}"),
                unless(outcome.status == 0 and "MISMATCH" not in outcome.stderr, complaint(outcome)), outcome.hang)


@test("control", 90)
def control(context: Context, test):
    """Everything in the tree of a running job can be listed and read; what is set takes effect."""
    job = Controlled(context)
    mode = os.stat(job.socket).st_mode
    yield check("control: a socket of mode 0600", unless(stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600, oct(mode)))
    wrong, files = [], []
    for directory in ("", "cgroup/", "parameters/", "debug/", "hugepages-64kB/", "hugepages-64kB/stats/"):
        listed = job.ask("ls", directory)
        files += [directory + name for name in listed.stdout.split() if not name.endswith("/")]
        wrong += [f"ls {directory}: {listed.stderr}"] * (listed.returncode != 0)
    for path in files:
        answer = job.ask("get", path)
        if answer.returncode and not (answer.returncode == 1 and answer.stderr.startswith(f"uzswap: error: {path}: ")):
            wrong.append(f"get {path}: {answer}")
    yield check("control: ls and get", *wrong, unless(len(files) == 25 + 7 + 12 + 1 + 6, f"{len(files)} files: {files}"))
    expected = {"cgroup/memory.max": f"{64 * MIB}\n", "cgroup/memory.high": "max\n", "cgroup/memory.low": "0\n",
                "parameters/compressor": "lz4\n", "parameters/max_pool_percent": "20\n", "parameters/enabled": "Y\n",
                "cgroup/cgroup.events": "populated 1\nfrozen 0\n", "debug/pool_limit_hit": "0\n"}
    yield check("control: values", *(unless(job.get(path) == text, f"{path} is {job.get(path)!r}") for path, text in expected.items()))

    # Off, pages go to disk; on again, into the pool, with the codec that was set meanwhile.
    problems = [f"set {path} {value}: {answer.stderr}" for path, value in
                (("parameters/enabled", "N"), ("parameters/compressor", "zstd"), ("parameters/shrinker_enabled", "N"))
                for answer in [job.ask("set", path, value)] if answer.returncode or answer.stdout]
    job.touch(96)
    off = job.count("cgroup/memory.stat", "zswpout"), job.count("cgroup/memory.stat", "pswpout")
    job.ask("set", "parameters/enabled", "1")
    job.touch(64)
    on = job.count("cgroup/memory.stat", "zswpout")
    figures = json.loads(job.ask("stat", "--json").stdout)
    yield check("control: what is set takes effect", *problems, unless(off[0] == 0 < off[1], f"off: {off}"), unless(on > 0, "on: nothing"),
                unless(job.get("parameters/compressor") == "zstd\n", "the codec"))
    people = job.ask("stat", "/").stdout
    yield check("control: stat", unless(figures["memory.max"] == 64 * MIB and figures["memory.stat"]["zswpout"] >= on, str(figures)),
                unless("64 MiB" in people and len(people.splitlines()) > 20, people))

    # A pool that may hold nothing gives all it has to the disk, and takes no more.
    full = int(job.get("debug/pool_total_size"))
    job.ask("set", "parameters/max_pool_percent", "0")
    empty = wait_until(lambda: int(job.get("debug/pool_total_size")) < MIB, 20)
    yield check("control: the pool shrinks with its cap", unless(full > 4 * MIB and empty, f"{full} before, {job.get('debug/pool_total_size')} after"))
    job.ask("set", "cgroup/memory.zswap.writeback", "0")
    yield check("control: writeback", unless(job.get("cgroup/memory.zswap.writeback") == "0\n", "not 0"))
    job.ask("set", "cgroup/memory.zswap.writeback", "1")
    outcome = job.end(test.seconds)
    yield check("control: the job is as it was", unless((outcome.status, outcome.stdout) == (0, "True\nTrue\n"), complaint(outcome)),
                unless(not os.path.exists(job.socket), "the socket is still there"))


@test("control-errors", 60)
def control_errors(context: Context, test):
    job = Controlled(context)
    cases = [
        (1, "cgroup/nothing: No such file or directory", "get", "cgroup/nothing"),
        (1, "/: Is a directory", "get", ""),
        (1, "cgroup/memory.max: Not a directory", "ls", "cgroup/memory.max"),
        (1, "cgroup/memory.current: Permission denied", "set", "cgroup/memory.current", "1"),
        (1, "cgroup/memory.reclaim: Permission denied", "get", "cgroup/memory.reclaim"),
        (1, "cgroup/memory.zswap.max: Invalid argument", "set", "cgroup/memory.zswap.max", "-1"),
        (1, "parameters/enabled: Invalid argument", "set", "parameters/enabled", "maybe"),
        (1, "parameters/max_pool_percent: Invalid argument", "set", "parameters/max_pool_percent", "101"),
        (1, "parameters/compressor: No such choice: there are lz4, lzo-rle, zstd, deflate", "set", "parameters/compressor", "lz5"),
        (1, "cgroup/memory.swap.max: Operation not supported", "set", "cgroup/memory.swap.max", "128M"),
        (1, "cgroup/memory.reclaim: Resource temporarily unavailable", "reclaim", "1G"),
        (1, "cgroup: Device or resource busy", "rmdir", ""),
        (1, "cgroup/a: No such file or directory", "rmdir", "a"),
        (1, "cgroup/a/b: No such file or directory", "mkdir", "a/b"),
        (1, "cgroup/memory.max: File exists", "mkdir", "memory.max"),
        (2, "GROUP", "mkdir"),
        (1, "cgroup/a/memory.reclaim: No such file or directory", "reclaim", "a", "1M"),
        (1, "cgroup/cgroup.procs: No such process", "set", "cgroup/cgroup.procs", "1"),
        (1, "cgroup/cgroup.procs: No such process", "set", "cgroup/cgroup.procs", "0"),     # we are outside of the job
        (1, "cgroup/cgroup.kill: Numerical result out of range", "set", "cgroup/cgroup.kill", "0"),
        (1, "cgroup/a/memory.current: No such file or directory", "stat", "a"),
        (2, "more than 4096 bytes", "get", "x" * 4097),
        (2, "not a size", "reclaim", "much"),
        (2, "PATH", "get"),
    ]
    for status, words, *arguments in cases:
        answer = job.ask(*arguments)
        yield check(f"control-errors: {' '.join(arguments)[:60]}", unless(answer.returncode == status, f"status {answer.returncode}"),
                    unless(words in answer.stderr and answer.stderr.count("\n") == 1 and not answer.stdout, f"{answer}"))
    without = {key: value for key, value in os.environ.items() if key != "UZSWAP_SOCKET"}
    cases = [("no socket named", ["get", "cgroup/memory.max"], without, "uzswap.sock: does not exist"),
             ("no such socket", ["get", "cgroup/memory.max", "--socket", "/nonexistent"], without, "does not exist"),
             ("the environment names none", ["ls"], {**without, "UZSWAP_SOCKET": "/nonexistent"}, "/nonexistent")]
    for what, arguments, env, words in cases:
        answer = ask(context, *arguments, env=env)
        yield check(f"control-errors: {what}", unless((answer.returncode, answer.stderr.count("\n")) == (2, 1), f"{answer}"),
                    unless(words in answer.stderr, answer.stderr))
    if os.geteuid() == 0 and shutil.which("setpriv"):
        answer = ask(context, "ls", "--socket", job.socket, prefix=["setpriv", "--reuid=65534", "--clear-groups"])
        yield check("control-errors: another user", unless(answer.returncode == 2 and "another user" in answer.stderr, f"{answer}"))
    killed = job.ask("set", "cgroup/cgroup.kill", "1")
    outcome = job.job.wait(test.seconds)
    yield check("control-errors: cgroup.kill ends the job", unless(outcome.status == 137, complaint(outcome)),
                unless(killed.returncode == 0, f"{killed}"), unless(not os.path.exists(job.socket), "the socket is still there"))


@test("control-inside", 60)
def control_inside(context: Context, test):
    """A program of the job finds its own manager; a job inside the job finds none, and takes nobody's name."""
    directory = context.directory()
    inner = f"{context.uzswap} run --memory-max 32M --quiet -- sh -c 'echo inner: $UZSWAP_SOCKET'"
    script = f"cd /; {context.uzswap} get parameters/zpool; {context.uzswap} set cgroup/cgroup.procs 0; env | grep -c UZSWAP_CONTROL; {inner}"
    outcome = context.run(["sh", "-c", script], *USUAL, directory=directory, timeout=test.seconds,
                          env={"UZSWAP_CONTROL": "socket", "UZSWAP_SOCKET": "/elsewhere"})
    yield check("control-inside", unless((outcome.status, outcome.stdout) == (0, "zsmalloc\n0\ninner:\n"), complaint(outcome)),
                unless(not outcome.stderr, outcome.stderr), unless(not (directory / "socket").exists(), "the socket is still there"))


@test("control-names", 60)
def control_names(context: Context, test):
    """What is in the way stays, what a dead manager left is replaced, and however a job ends, the name goes with it."""
    directory = context.directory()
    limit = ("--memory-max", "64M", "--quiet", "--control")
    (directory / "file").write_text("mine")
    job = Controlled(context)
    for what, path, wanted in (("a file", directory / "file", "no socket"), ("a live manager's socket", job.socket, "another manager"),
                               ("a missing directory", directory / "absent" / "socket", "absent"),
                               ("a name that is too long", directory / ("n" * 100), "at most")):
        yield one_line_and_nothing_left(context, f"control-names: {what}", [*limit, path], ["true"], wanted=(wanted, "control"))
    yield check("control-names: what was there stays", unless((directory / "file").read_text() == "mine", "the file is gone"),
                unless(job.get("parameters/zpool") == "zsmalloc\n", "the live manager is not"))
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(directory / "stale"))
    stale.close()
    outcome = context.run(["sh", "-c", f"{context.uzswap} get parameters/zpool"], *limit, directory / "stale", timeout=test.seconds)
    yield check("control-names: a dead one's is replaced", unless(outcome.stdout == "zsmalloc\n", complaint(outcome)))
    os.kill(job.job.manager(), signal.SIGKILL)
    outcome = job.job.wait(test.seconds)
    yield check("control-names: the manager is killed", unless(outcome.status == 125, complaint(outcome)),
                unless(not os.path.exists(job.socket), "the socket is still there"))
    job = Controlled(context)
    job.job.process.kill()
    job.job.wait(test.seconds)
    gone = job.job.gone_within(10) and not os.path.exists(job.socket)
    yield check("control-names: the front is killed", unless(gone, "something is left"))


# Starts a program in each group that it is given the name and the MiB of, which touches that much and says so, or spins; ends
# them all when it hears nothing more, but for those that spin.
GROUPS = """
import os, subprocess, sys
children = []
for line in sys.stdin:
    group, mib = line.split()
    program = "echo spins; while :; do :; done" if mib == "spin" else 'exec python3 -c "$PROGRAM"'
    script = os.environ['UZSWAP'] + f' set cgroup/{group}/cgroup.procs 0 && {program}'
    child = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdin.write(mib + chr(10))
    child.stdin.flush()
    print(group, child.pid, child.stdout.readline().strip(), flush=True)
    children.append(child)
for child in children:
    child.stdin.close()
    child.stdout.read()
    print(child.wait(), flush=True)
"""


class Grouped(Controlled):
    """A job of programs in groups."""

    def __init__(self, context: Context, *options):
        Manager.__init__(self, context)
        env = {"UZSWAP": context.uzswap, "PROGRAM": MEMORY}
        self.job = context.start(["python3", "-c", GROUPS], "--memory-max", "192M", "--quiet", "--control", self.socket, *options,
                                 stdin=subprocess.PIPE, env=env)
        self.began = wait_until(lambda: os.path.exists(self.socket) and self.procs(), 20)

    def start(self, group: str, mib: int | str) -> tuple[int, str]:
        """Starts a program in a group; gives its number and what it said."""
        before = harness.read(self.job.files[0]).count(b"\n")
        self.job.process.stdin.write(f"{group} {mib}\n".encode())
        self.job.process.stdin.flush()
        wait_until(lambda: harness.read(self.job.files[0]).count(b"\n") > before, 60)
        _, pid, *said = harness.read(self.job.files[0]).decode().splitlines()[before].split(" ", 2)
        return int(pid), " ".join(said)

    def figure(self, path: str) -> int:
        return int(self.get(f"cgroup/{path}"))


def state(pid: int) -> str:
    """What the kernel says that a process does: R, S, T, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def resident(pid: int) -> int:
    """Resident anonymous bytes, as the kernel counts them."""
    lines = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


@test("groups", 120)
def groups(context: Context, test):
    """Programs in groups are charged to them, limited, reclaimed from, protected and killed group by group."""
    job = Grouped(context)
    problems = [f"{arguments}: {answer.stderr}" for *arguments, in
                (["mkdir", "a"], ["mkdir", "a/inner"], ["mkdir", "b"], ["set", "cgroup/a/memory.max", "32M"])
                for answer in [job.ask(*arguments)] if answer.returncode]
    listed = job.ask("ls", "cgroup/a").stdout.split()
    yield check("groups: mkdir", *problems, unless("inner/" in listed and "memory.max" in listed, str(listed)))

    (inner, said), (beside, _) = job.start("a/inner", 64), job.start("b", 64)
    peak, end = 0, time.monotonic() + 2
    while time.monotonic() < end:
        peak = max(peak, resident(inner))
        time.sleep(0.002)
    pids = job.get("cgroup/a/inner/cgroup.procs"), job.get("cgroup/a/cgroup.procs"), job.get("cgroup/b/cgroup.procs")
    yield check("groups: processes", unless(said == "True", said), unless(pids == (f"{inner}\n", "", f"{beside}\n"), str(pids)))
    current = job.figure("a/memory.current"), job.figure("a/inner/memory.current"), job.figure("b/memory.current")
    yield check("groups: a limit holds for those below", unless(peak <= 34 * MIB, f"{peak >> 20} MiB resident"),
                unless(max(current[:2]) <= 34 * MIB and abs(current[0] - current[1]) < 8 * MIB, str(current)),
                unless(job.count("cgroup/a/inner/memory.stat", "zswpout") > 0, "nothing stored"))
    yield check("groups: nobody else pays", unless(current[2] >= 60 * MIB, str(current)),
                unless(job.count("cgroup/b/memory.stat", "zswpout") == 0, "a neighbour was reclaimed from"))

    busy = job.ask("rmdir", "a"), job.ask("rmdir", "b")
    yield check("groups: busy", *(unless("resource busy" in answer.stderr, answer.stderr) for answer in busy))
    before = resident(beside)
    answer = job.ask("reclaim", "b", "24M")
    yield check("groups: memory.reclaim", unless(answer.returncode == 0, answer.stderr),
                unless(before - resident(beside) >= 24 * MIB, f"{before >> 20} MiB before, {resident(beside) >> 20} after"))
    answer = job.ask("reclaim", "b", "1G")
    yield check("groups: memory.reclaim of more than there is", unless("temporarily unavailable" in answer.stderr, f"{answer}"))

    moved = job.ask("set", "cgroup/b/cgroup.procs", str(inner))
    wait_until(lambda: job.figure("a/memory.current") < 30 * MIB, 10)
    yield check("groups: a process moves, what is stored stays", unless(moved.returncode == 0, moved.stderr),
                unless(job.get("cgroup/b/cgroup.procs").split() == sorted(map(str, (inner, beside)), key=int), "not there"),
                unless(job.count("cgroup/a/memory.stat", "anon") == 0 < job.count("cgroup/a/memory.stat", "zswap"), job.get("cgroup/a/memory.stat")))
    removed = job.ask("rmdir", "a/inner")
    yield check("groups: rmdir hands what is stored to the parent", unless(removed.returncode == 0, removed.stderr),
                unless(job.count("cgroup/a/memory.stat", "zswap") > 0, "it is gone"))

    job.ask("set", "cgroup/b/cgroup.freeze", "1")
    stopped = wait_until(lambda: all(state(pid) == "T" for pid in (inner, beside)), 5)
    frozen = job.count("cgroup/b/cgroup.events", "frozen")
    job.ask("set", "cgroup/b/cgroup.freeze", "0")
    goes_on = wait_until(lambda: all(state(pid) != "T" for pid in (inner, beside)), 5)
    yield check("groups: cgroup.freeze", unless(stopped and frozen == 1 and goes_on, f"{stopped} {frozen} {goes_on}"))

    job.ask("mkdir", "c")
    killed, _ = job.start("c", 8)
    answer = job.ask("set", "cgroup/c/cgroup.kill", "1")
    gone = wait_until(lambda: job.get("cgroup/c/cgroup.procs") == "", 5)
    yield check("groups: cgroup.kill", unless(answer.returncode == 0 and gone, f"{answer}"),
                unless(job.ask("rmdir", "c").returncode == 0, "it is busy"), unless("c/" not in job.ask("ls", "cgroup").stdout, "it is there"))
    outcome = job.end(test.seconds)
    said = outcome.stdout.splitlines()[-3:]
    yield check("groups: all have computed what they should", unless((outcome.status, said) == (0, ["0", "0", "-9"]), complaint(outcome)))


@test("groups-rules", 120, beside=True)
def groups_rules(context: Context, test):
    """memory.zswap.max, memory.zswap.writeback, memory.low, memory.high and the end of memory, each in a group of its own."""
    job = Grouped(context, "--swap-size", "512M")
    for group, *rules in (("disk", "memory.zswap.max=0", "memory.max=16M"), ("pool", "memory.zswap.writeback=0", "memory.max=24M"),
                          ("few", "memory.zswap.max=1M", "memory.max=16M"), ("high", "memory.high=16M"), ("full", "memory.max=8M", "memory.zswap.writeback=0")):
        job.ask("mkdir", group)
        for rule in rules:
            name, value = rule.split("=")
            answer = job.ask("set", f"cgroup/{group}/{name}", value)
            yield check(f"groups-rules: {group} {rule}", unless(answer.returncode == 0, answer.stderr))
    count = lambda group, key: job.count(f"cgroup/{group}/memory.stat", key)
    for group in ("disk", "pool", "few", "high"):
        _, said = job.start(group, 40)
        yield check(f"groups-rules: {group} computes", unless(said == "True", said))
    yield check("groups-rules: memory.zswap.max=0 goes to disk", unless(count("disk", "zswpout") == 0 < count("disk", "pswpout"), job.get("cgroup/disk/memory.stat")))
    yield check("groups-rules: memory.zswap.writeback=0 stays in the pool",
                unless(count("pool", "pswpout") == count("pool", "zswpwb") == 0 < count("pool", "zswpout"), job.get("cgroup/pool/memory.stat")))
    yield check("groups-rules: a group at memory.zswap.max writes back its own pages",
                unless(count("few", "zswpwb") > 0 and job.figure("few/memory.zswap.current") <= MIB + 4 * 4096, job.get("cgroup/few/memory.stat")))
    yield check("groups-rules: memory.high", unless(wait_until(lambda: job.figure("high/memory.current") <= 18 * MIB, 20), job.get("cgroup/high/memory.current")),
                unless(job.count("cgroup/high/memory.events", "high") > 0 == job.count("cgroup/high/memory.events", "oom_kill"), job.get("cgroup/high/memory.events")))
    _, said = job.start("full", 60)
    events = job.get("cgroup/full/memory.events")
    yield check("groups-rules: out of memory in one group", unless(not said, said), unless("oom_kill 1" in events and "max 0" not in events, events),
                unless(job.count("cgroup/memory.events", "oom_kill") == 1, "not counted above"))
    outcome = job.end(test.seconds)
    said = outcome.stdout.splitlines()[-5:]
    yield check("groups-rules: nobody else is hurt", unless((outcome.status, said) == (0, ["0"] * 4 + ["-9"]), complaint(outcome)),
                unless(outcome.stderr.count("out of memory: killed process") == 1 and "group /full" in outcome.stderr, outcome.stderr))


def busy(pid: int, seconds: float) -> float:
    """The part of a processor that a process takes."""
    ticks = lambda: sum(map(int, harness.stat_fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")
    before, start = ticks(), time.monotonic()
    time.sleep(seconds)
    return (ticks() - before) / (time.monotonic() - start)


@test("groups-swap", 60)
def groups_swap(context: Context, test):
    """memory.swap.max is kept, with nothing lost; when nothing may go out and memory is too small, that group's program is killed."""
    job = Controlled(context)
    pid = job.get("cgroup/cgroup.procs").strip()
    job.ask("mkdir", "g")
    problems = [answer.stderr for path, value in (("memory.high", "16M"), ("memory.swap.max", "8M"), ("cgroup.procs", pid))
                for answer in [job.ask("set", f"cgroup/g/{path}", value)] if answer.returncode]
    seen = []
    for _ in range(4):
        job.touch(8)
        seen.append(int(job.get("cgroup/g/memory.swap.current")))
    peak, events = int(job.get("cgroup/g/memory.swap.peak")), job.get("cgroup/g/memory.swap.events")
    count = lambda group, key: job.count(f"cgroup/{group}memory.swap.events", key)
    yield check("groups-swap: memory.swap.max holds", *problems, unless(max(seen) <= peak <= 8 * MIB < 9 * peak // 8, f"{seen} seen, peak {peak}"),
                unless(0 < count("g/", "max") <= count("g/", "fail") and events.startswith("high 0\n"), events),
                unless(count("g/", "max") <= count("", "max"), "not counted above"), unless(job.get("cgroup/g/memory.swap.max") == f"{8 * MIB}\n", "another limit"))
    share = busy(job.job.manager(), 1)
    yield check(f"groups-swap: at the limit reclaim rests ({share * 100:.0f} % of a processor)", unless(share < 0.5, "too much"))
    job.ask("set", "cgroup/g/memory.swap.max", "4M")
    held, answer = int(job.get("cgroup/g/memory.swap.current")), job.ask("reclaim", "g", "1G")
    after = int(job.get("cgroup/g/memory.swap.current"))
    yield check("groups-swap: a lower limit brings nothing back and lets nothing out", unless(4 * MIB < after <= held, f"{held}, then {after}"),
                unless("temporarily unavailable" in answer.stderr, f"{answer}"))
    job.touch(0)
    job.ask("set", "cgroup/g/memory.swap.max", "max")
    answer = job.ask("reclaim", "g", "8M")
    yield check("groups-swap: without a limit reclaim goes on", unless(answer.returncode == 0, f"{answer}"),
                unless(int(job.get("cgroup/g/memory.swap.peak")) > 8 * MIB, job.get("cgroup/g/memory.swap.peak")))
    job.ask("set", "cgroup/g/memory.high", "max")
    job.touch(0)
    outcome = job.end(test.seconds)
    yield check("groups-swap: all of it is whole", unless((outcome.status, outcome.stdout) == (0, "True\n" * 6), complaint(outcome) + outcome.stdout))

    job = Grouped(context)
    job.ask("mkdir", "beside")
    job.ask("mkdir", "none")
    for name, value in (("memory.max", "16M"), ("memory.swap.max", "0"), ("memory.zswap.max", "0")):
        job.ask("set", f"cgroup/none/{name}", value)
    _, beside = job.start("beside", 24)
    _, said = job.start("none", 40)
    events, swap = job.get("cgroup/none/memory.events"), job.get("cgroup/none/memory.swap.events")
    yield check("groups-swap: nothing may go out: out of memory", unless(not said and beside == "True", f"{said} {beside}"), unless("oom_kill 1\n" in events, events),
                unless(job.get("cgroup/none/memory.swap.peak") == "0\n" and "max 0" not in swap, f"{job.get('cgroup/none/memory.swap.peak')} {swap}"))
    touched = job.count("cgroup/beside/memory.stat", "zswpout") + job.count("cgroup/beside/memory.events", "oom_kill")
    outcome = job.end(test.seconds)
    yield check("groups-swap: one line, and the neighbour is untouched", unless(not touched, "it was reclaimed from"),
                unless(outcome.stdout.splitlines()[-2:] == ["0", "-9"], complaint(outcome)),
                unless(outcome.stderr.count("\n") == 1 and "group /none" in outcome.stderr and "memory.swap.max" in outcome.stderr, outcome.stderr),
                unless(outcome.status == 0, f"status {outcome.status}"))


@test("groups-pressure", 60)
def groups_pressure(context: Context, test):
    """memory.pressure: a job that thrashes stalls, and so does the group above it; one far below its limit does not."""
    job = Grouped(context)
    for group in ("calm", "up", "up/small", "up/spins"):
        job.ask("mkdir", group)
    job.ask("set", "cgroup/up/small/memory.max", "16M")

    def pressure(group: str) -> dict:
        """By kind and key; times in seconds."""
        lines = (line.split() for line in job.get(f"cgroup/{group}memory.pressure").splitlines())
        figures = {kind: {key: float(value) for key, value in (field.split("=") for field in fields)} for kind, *fields in lines}
        for kind in figures:
            figures[kind]["total"] /= 1e6
        return figures

    _, calm = job.start("calm", 16)
    job.start("up/spins", "spin")
    started = time.monotonic()
    _, said = job.start("up/small", 160)
    took = time.monotonic() - started
    averaged = wait_until(lambda: pressure("")["some"]["avg10"] > 0, 5)
    small, above, root, quiet = (pressure(group) for group in ("up/small/", "up/", "", "calm/"))
    times = [figures["some"]["total"] for figures in (small, above, root)]
    yield check("groups-pressure: a job that thrashes stalls", unless(said == calm == "True", f"{said} {calm}"), unless(0.01 < times[0] < took, f"{small} in {took:.2f} s"))
    yield check("groups-pressure: the group above sees it", unless(averaged and abs(times[1] - times[0]) < 0.01 and times[2] >= times[1], f"{times}"))
    yield check("groups-pressure: one thread that stalls is all of them", unless(small["some"]["total"] / 2 < small["full"]["total"] <= small["some"]["total"], f"{small}"),
                unless(above["full"]["total"] < above["some"]["total"] / 4, f"a neighbour runs, but {above}"))
    yield check("groups-pressure: averages", *(unless(100 >= figures[kind]["avg10"] >= figures[kind]["avg60"] >= figures[kind]["avg300"] >= 0, f"{figures}")
                                               for figures in (small, above, root) for kind in figures), unless(small["some"]["avg10"] > 0, f"{small}"))
    yield check("groups-pressure: far below the limit nothing stalls", unless(set(quiet) == {"some", "full"} and not any(quiet["some"].values()) and not any(quiet["full"].values()), f"{quiet}"))
    job.ask("set", "cgroup/up/spins/cgroup.kill", "1")
    outcome = job.end(test.seconds)
    yield check("groups-pressure: the job is as it was", unless(outcome.status == 0 and outcome.stdout.splitlines()[-3:] == ["0", "-9", "0"], complaint(outcome)))


# Makes as many groups as it is told, goes into each, and leaves two processes there that sleep.
IDLE = """
import os, socket, struct, subprocess, sys, time
manager = socket.socket(socket.AF_UNIX)
manager.connect(os.environ["UZSWAP_SOCKET"])
def ask(verb, path, value=b""):
    manager.sendall(b"uz\\x01" + bytes([verb]) + struct.pack("=HH", len(path), len(value)) + path + value)
    assert manager.recv(4096)[4:8] == bytes(4), path
for number in range(int(sys.argv[1])):
    group = b"cgroup/g%d" % number
    ask(4, group)
    ask(2, group + b"/cgroup.procs", b"0")
    for _ in range(2):
        subprocess.Popen(["sleep", "1000"])
print("asleep", flush=True)
time.sleep(1000)
"""


@test("groups-idle", 90)
def groups_idle(context: Context, test):
    """200 groups of two processes each that sleep: the manager hardly does anything."""
    directory = context.directory()
    socket_path = directory / "socket"
    job = context.start(["python3", "-c", IDLE, 200], "--memory-max", "512M", "--quiet", "--control", socket_path)
    began = wait_until(lambda: harness.read(job.files[0]) == b"asleep\n", 60)
    time.sleep(2)
    # What else the machine does shows in it, and only ever adds to it.
    share = 1
    for _ in range(6):
        share = min(share, busy(job.manager(), 4))
        if share < 0.01:
            break
    members = lambda number: len(ask(context, "get", f"cgroup/g{number}/cgroup.procs", "--socket", str(socket_path)).stdout.split())
    yield check(f"groups-idle: {share * 100:.2f} % of a processor", unless(began, "not all have begun"), unless(share < 0.01, "1 is wanted"))
    counts = [members(number) for number in range(200)]
    yield check("groups-idle: each is in the group in which it was started", unless(counts == [2] * 199 + [3], f"{counts}"))
    ask(context, "set", "cgroup/cgroup.kill", "1", "--socket", str(socket_path))
    outcome = job.wait(test.seconds)
    yield check("groups-idle: all go", unless(outcome.status == 137 and job.gone_within(20), complaint(outcome)))


@test("groups-come-and-go", 90)
def groups_come_and_go(context: Context, test):
    """Groups that are made and removed under load leave nothing."""
    job = Grouped(context)
    job.ask("mkdir", "busy")
    job.ask("set", "cgroup/busy/memory.max", "24M")
    job.start("busy", 48)
    manager = job.job.manager()
    before = None
    for round in range(context.size(6, 60)):
        job.ask("mkdir", "one")
        job.ask("mkdir", "one/two")
        job.ask("set", "cgroup/one/memory.max", "16M")
        pid, said = job.start("one/two", 24)
        os.kill(pid, signal.SIGKILL)
        gone = wait_until(lambda: job.get("cgroup/one/two/cgroup.procs") == "", 10)
        removed = [job.ask("rmdir", group).returncode for group in ("one/two", "one")]
        yield check(f"groups-come-and-go: round {round}", unless(said == "True" and gone and removed == [0, 0], f"{said} {gone} {removed}"))
        descriptors = harness.descriptors(manager)
        before = before or descriptors
    settled = wait_until(lambda: harness.descriptors(manager) <= before, 10)
    yield check("groups-come-and-go: descriptors", unless(settled, f"{before} after the first round, {descriptors} after the last"),
                unless(wait_until(lambda: "one/" not in job.ask("ls", "cgroup").stdout, 1), "a group is left"))
    outcome = job.end(test.seconds)
    yield check("groups-come-and-go: the job is as it was", unless(outcome.status == 0 and "0" in outcome.stdout.splitlines(), complaint(outcome)))


@test("control-hostile", 90, beside=True)
def control_hostile(context: Context, test):
    """Garbage, half messages, floods, crowds and deaf readers harm neither the job nor whoever else asks."""
    job = Controlled(context)
    manager = job.job.manager()
    question = request(READ, b"cgroup/memory.stat")

    def garbage():
        with job.connect() as client:
            client.sendall(os.urandom(random.randrange(1, 20000)))

    def half():
        with job.connect() as client:
            client.sendall(question[:random.randrange(1, len(question))])
            client.recv(1)

    def flood():
        with job.connect() as client:
            for _ in range(1000):
                client.sendall(question)
                client.recv(100)

    def deaf():
        with job.connect() as client:
            while True:
                client.sendall(question * 50)

    def crowd():
        clients = [job.connect() for _ in range(100)]
        time.sleep(0.1)
        for client in clients:
            client.close()

    # From the first eviction on, a process has some more, and the manager hears of the host's pressure.
    job.touch(96)
    time.sleep(1)
    before = harness.descriptors(manager)
    with job.besieged(garbage, half, flood, deaf, crowd):
        slow, asked, answered, end = 0.0, 0, 0, time.monotonic() + context.size(8, 60)
        while time.monotonic() < end:
            if asked < 20:
                job.touch(8)
            start = time.monotonic()
            asked += 1
            answered += job.ask("get", "parameters/zpool").stdout == "zsmalloc\n"
            slow = max(slow, time.monotonic() - start)
    settled = wait_until(lambda: harness.descriptors(manager) <= before + 2, 10)
    yield check("control-hostile: descriptors", unless(settled, f"{before} before, {harness.descriptors(manager)} after"))
    yield check("control-hostile: still there", unless(job.get("parameters/zpool") == "zsmalloc\n", "no answer"),
                unless(answered == asked and slow < 5, f"{answered} answers of {asked}, the slowest after {slow:.1f} s"))
    outcome = job.end(test.seconds)
    right = outcome.status == 0 and set(outcome.stdout.split()) == {"True"}
    yield check("control-hostile: the job is as it was", unless(right, complaint(outcome)))

"""The control tree of a running job, through its socket: what it shows, what it changes, and the groups that are made in it."""
from __future__ import annotations

import json
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


class Controlled:
    """A job whose manager listens, and whose program does as it is told."""

    def __init__(self, context: Context, *options):
        self.context, self.socket = context, str(context.directory() / "socket")
        self.job = context.start(["python3", "-c", MEMORY], "--memory-max", "64M", "--quiet", "--control", self.socket, *options,
                                 stdin=subprocess.PIPE)
        # A program that is managed has begun.
        self.began = wait_until(lambda: os.path.exists(self.socket) and self.get("cgroup/cgroup.procs"), 20)

    def ask(self, *arguments) -> subprocess.CompletedProcess:
        return ask(self.context, *arguments, "--socket", self.socket)

    def get(self, path: str) -> str:
        answer = self.ask("get", path)
        return answer.stdout if answer.returncode == 0 else f"error: {answer.stderr}"

    def count(self, path: str, key: str) -> int:
        lines = dict(line.split() for line in self.get(path).splitlines())
        return int(lines[key])

    def touch(self, mib: int) -> None:
        """Has the program touch so much more. What it says is in its output."""
        said = harness.read(self.job.files[0]).count(b"\n")
        self.job.process.stdin.write(b"%d\n" % mib)
        self.job.process.stdin.flush()
        wait_until(lambda: harness.read(self.job.files[0]).count(b"\n") > said, 60)

    def end(self, timeout: float):
        self.job.process.stdin.close()
        return self.job.wait(timeout)


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
    yield check("control: ls and get", *wrong, unless(len(files) == 24 + 6 + 12 + 1 + 6, f"{len(files)} files: {files}"))
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
    cases = [("no socket named", ["get", "cgroup/memory.max"], without, "--socket"),
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


# Starts a program in each group that it is given the name and the MiB of, which touches that much and says so; ends them all
# when it hears nothing more.
GROUPS = """
import os, subprocess, sys
children = []
for line in sys.stdin:
    group, mib = line.split()
    script = os.environ['UZSWAP'] + f' set cgroup/{group}/cgroup.procs 0 && exec python3 -c "$PROGRAM"'
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
        self.context, self.socket = context, str(context.directory() / "socket")
        env = {"UZSWAP": context.uzswap, "PROGRAM": MEMORY}
        self.job = context.start(["python3", "-c", GROUPS], "--memory-max", "192M", "--quiet", "--control", self.socket, *options,
                                 stdin=subprocess.PIPE, env=env)
        self.began = wait_until(lambda: os.path.exists(self.socket) and self.get("cgroup/cgroup.procs"), 20)

    def start(self, group: str, mib: int) -> tuple[int, str]:
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


@test("groups-rules", 120)
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
        descriptors = len(os.listdir(f"/proc/{manager}/fd"))
        before = before or descriptors
    settled = wait_until(lambda: len(os.listdir(f"/proc/{manager}/fd")) <= before, 10)
    yield check("groups-come-and-go: descriptors", unless(settled, f"{before} after the first round, {descriptors} after the last"),
                unless(wait_until(lambda: "one/" not in job.ask("ls", "cgroup").stdout, 1), "a group is left"))
    outcome = job.end(test.seconds)
    yield check("groups-come-and-go: the job is as it was", unless(outcome.status == 0 and "0" in outcome.stdout.splitlines(), complaint(outcome)))


@test("control-hostile", 90)
def control_hostile(context: Context, test):
    """Garbage, half messages, floods, crowds and deaf readers harm neither the job nor whoever else asks."""
    job = Controlled(context)
    manager = job.job.manager()
    request = b"uz\x01\x01" + struct.pack("=HH", len(b"cgroup/memory.stat"), 0) + b"cgroup/memory.stat"
    stop = threading.Event()

    def connect() -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(job.socket)
        return client

    def repeat(attack):
        while not stop.is_set():
            try:
                attack()
            except OSError:     # the manager has had enough of it
                pass

    def garbage():
        with connect() as client:
            client.sendall(os.urandom(random.randrange(1, 20000)))

    def half():
        with connect() as client:
            client.sendall(request[:random.randrange(1, len(request))])
            client.recv(1)

    def flood():
        with connect() as client:
            for _ in range(1000):
                client.sendall(request)
                client.recv(100)

    def deaf():
        with connect() as client:
            while not stop.is_set():
                client.sendall(request * 50)

    def crowd():
        clients = [connect() for _ in range(100)]
        stop.wait(0.1)
        for client in clients:
            client.close()

    threads = [threading.Thread(target=repeat, args=[attack]) for attack in (garbage, half, flood, deaf, crowd)]
    before = len(os.listdir(f"/proc/{manager}/fd"))
    for thread in threads:
        thread.start()
    slow, asked, answered, end = 0.0, 0, 0, time.monotonic() + context.size(8, 60)
    while time.monotonic() < end:
        if asked < 20:
            job.touch(8)
        start = time.monotonic()
        asked += 1
        answered += job.ask("get", "parameters/zpool").stdout == "zsmalloc\n"
        slow = max(slow, time.monotonic() - start)
    stop.set()
    for thread in threads:
        thread.join()
    settled = wait_until(lambda: len(os.listdir(f"/proc/{manager}/fd")) <= before + 2, 10)
    yield check("control-hostile: descriptors", unless(settled, f"{before} before, {len(os.listdir(f'/proc/{manager}/fd'))} after"))
    yield check("control-hostile: still there", unless(job.get("parameters/zpool") == "zsmalloc\n", "no answer"),
                unless(answered == asked and slow < 5, f"{answered} answers of {asked}, the slowest after {slow:.1f} s"))
    outcome = job.end(test.seconds)
    right = outcome.status == 0 and set(outcome.stdout.split()) == {"True"}
    yield check("control-hostile: the job is as it was", unless(right, complaint(outcome)))

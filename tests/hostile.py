"""What a client, a full disk or a closed terminal may not do to the jobs of others."""
from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import platform
import random
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import harness
from behaviour import check, unless, wait_until
from control import MEMORY, READ, besiege, busy, request
from daemon import Daemon, make_and_join, open_daemon, whole
from suite import Context, MIB, PROTOCOL_VERSION, complaint, need_root, test

# A program that no agent can be loaded into: the manager writes a warning about it within five seconds.
UNMANAGED = "#include <unistd.h>\nint main(void) { alarm(6); pause(); }"


def broken_stderr(context: Context) -> dict[str, list[str]]:
    """Commands that start another with a standard error that takes nothing."""
    unread, full = context.directory() / "unread", context.directory() / "full"
    os.mkfifo(unread)
    os.mkfifo(full)
    shell = lambda redirection: ["bash", "-c", f'{redirection}; exec "$0" "$@"']
    return {
        "a full disk": shell("exec 2>/dev/full"),
        "closed": shell("exec 2>&-"),
        "a pipe without a reader": shell(f"exec 3<>{unread}; exec 2>{unread}; exec 3>&-"),
        "a full pipe": shell(f"exec 2<>{full}; timeout 0.5 cat /dev/zero >{full}"),
    }


def ends(job) -> harness.Outcome:
    """The outcome of a job that may have been killed."""
    try:
        return job.end()
    except OSError:
        return job.job.wait(60)


def touches(job, mib: int) -> bool:
    """Whether the program of a job that may have been killed touches memory and finds all of it as it was."""
    try:
        return job.touch(mib, 20)
    except OSError:
        return False


@test("hostile-stderr", 120, beside=True)
def stderr_takes_nothing(context: Context, test):
    """No message that cannot be written harms a job."""
    static = context.directory() / "static"
    subprocess.run(["gcc", "-static", "-x", "c", "-o", static, "-"], input=UNMANAGED, text=True, check=True, timeout=60)
    besides = ["sh", "-c", f"{static} & sleep 100"]
    cases = []
    for what, prefix in broken_stderr(context).items():
        own = harness.Job([*prefix, context.uzswap, "run", "--memory-max", "32M", "--", "sh", "-c",
                           f'{static} & python3 -c "$0"; status=$?; wait; exit $status', MEMORY],
                          context.directory(), uzswap=context.uzswap, stdin=subprocess.PIPE)
        context.jobs.append(own)
        own.process.stdin.write(b"64\n" * 3)
        own.process.stdin.close()
        daemon = Daemon(context, prefix=prefix)
        cases.append((what, own, daemon, daemon.memory("--memory-max", "32M"), daemon.start(besides, "--memory-max", "32M")))
    for what, own, daemon, good, lost in cases:
        touched = touches(good, 64)
        # The warning and the end of a job are written to the daemon's log.
        warned = wait_until(lambda: b"runs unmanaged" in harness.read(lost.files[1]), 10)
        lost.process.kill()
        ended = lost.wait(20)
        yield check(f"hostile-stderr: a daemon's, {what}", unless(touched, "nothing was touched"), unless(warned, "no warning"),
                    unless(ended.status == 137, complaint(ended)), unless(touches(good, 8), "the other job was held up"), whole(ends(good)))
        outcome = daemon.end()
        yield check(f"hostile-stderr: a daemon ends, {what}", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())
        outcome = own.wait(60)
        yield check(f"hostile-stderr: a job's, {what}", unless(outcome.status == 0, f"{complaint(outcome)} {outcome.hang}"),
                    unless(outcome.stdout == "True\n" * 3, outcome.stdout))


# A user that no other test runs as.
VICTIM = 64321


def as_user(uid: int) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


@test("hostile-agent-file", 60)
def agent_file(context: Context, test):
    """No other user can create a file under a name that processes have in LD_PRELOAD."""
    need_root()
    daemon = Daemon(context)
    survivor = daemon.start(["sh", "-c", "echo $LD_PRELOAD; read line; echo $line"], "--memory-max", "64M", stdin=subprocess.PIPE)
    wait_until(lambda: harness.read(survivor.files[0]).endswith(b"\n"), 10)
    agent = harness.read(survivor.files[0]).decode().strip()
    readable = subprocess.run([*as_user(VICTIM), "cat", agent], capture_output=True)
    outcome = daemon.end()
    yield check("hostile-agent-file: the daemon stops", unless(outcome.status == 0, complaint(outcome)),
                unless(readable.returncode == 0 and readable.stdout[:4] == b"\x7fELF", "a process that changes its user cannot load it"))
    for what in ("while a program lives on", "when it is gone"):
        harness.run([context.uzswap, "run", "--memory-max", "64M", "--quiet", "--", "true"], context.directory(), timeout=20)
        if "gone" in what and os.path.exists(agent):
            os.unlink(agent)
            Path(agent).with_suffix(".attach").unlink(missing_ok=True)
        planted = subprocess.run([*as_user(VICTIM), "sh", "-c", 'echo planted > "$0" || { rm -f "$0"; echo planted > "$0"; }', agent], capture_output=True)
        moved = subprocess.run([*as_user(VICTIM), "mv", os.path.dirname(agent), os.path.dirname(agent) + ".moved"], capture_output=True)
        yield check(f"hostile-agent-file: {what}", unless(planted.returncode and moved.returncode, f"{planted} {moved}"),
                    unless(harness.read(agent) != b"planted\n", "another user's file is there"))
    survivor.process.stdin.write(b"alive\n")
    survivor.process.stdin.close()
    outcome = survivor.wait(20)
    yield check("hostile-agent-file: the program ends well", unless(outcome.status == 0 and outcome.stdout.endswith("alive\n"), complaint(outcome)))


@test("hostile-agent-directory", 60)
def agent_directory(context: Context, test):
    """A directory or a link that another user has planted where the agent goes is not used."""
    need_root()
    places = [Path(top) / f"uzswap-{VICTIM}" for top in harness.SCRATCH]
    right = ["--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"]
    run = [*as_user(VICTIM), *right, context.uzswap, "run", "--memory-max", "64M", "--quiet", "--", "true"]
    env = {"XDG_RUNTIME_DIR": ""}
    target = context.directory()
    target.chmod(0o777)
    plants = {"a directory": lambda place: (place.mkdir(), place.chmod(0o777)), "a link": lambda place: place.symlink_to(target),
              "a file": lambda place: place.write_text("")}
    try:
        for what, plant in plants.items():
            for place in places:
                remove(place)
                plant(place)
            outcome = harness.run(run, target, timeout=20, env=env)
            refused = outcome.status == 2 and outcome.stderr.count("\n") == 1 and "remove it" in outcome.stderr and "/uzswap-" in outcome.stderr
            left = [name for place in [*places, target] if place.is_dir() for name in os.listdir(place) if "uzswap" in name]
            yield check(f"hostile-agent-directory: {what}", unless(refused, complaint(outcome)), unless(not left, f"{left}"))
            # With one place left it works, or says what else is missing.
            remove(places[-1])
            outcome = harness.run(run, target, timeout=20, env=env)
            yield check(f"hostile-agent-directory: {what}, another place is free", unless("remove it" not in outcome.stderr, complaint(outcome)))
    finally:
        for place in places:
            remove(place)


def remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


@test("hostile-flood", 60)
def flood(context: Context, test):
    """Floods of the control socket by one user delay no other user's requests."""
    need_root()
    daemon = open_daemon(context)

    def connects():
        with daemon.connect() as client:
            client.recv(1)

    def asks():
        with daemon.connect() as client:
            while True:
                client.sendall(QUESTION)
                client.recv(4096)

    def deaf():
        with daemon.connect() as client:
            while True:
                client.sendall(QUESTION)

    def as_another_user():
        become(VICTIM)
        besiege([connects] * 100 + [asks] * 4 + [deaf] * 8)

    besieger = multiprocessing.get_context("fork").Process(target=as_another_user)
    besieger.start()
    try:
        time.sleep(0.5)
        for what, uid in (("root", 0), ("another user", VICTIM + 1)):
            delays = delays_of(daemon, uid, context.size(4, 60))
            p99 = sorted(delays)[len(delays) * 99 // 100] if delays else 99
            yield check(f"hostile-flood: {what}: {len(delays)} requests, p99 {p99 * 1000:.1f} ms", unless(len(delays) > 20, f"{len(delays)} requests"),
                        unless(p99 < 0.1, f"the slowest took {max(delays, default=99):.2f} s"))
    finally:
        besieger.kill()
        besieger.join()
    outcome = daemon.end()
    yield check("hostile-flood: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


QUESTION = request(READ, b"cgroup/memory.max")


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def delays_of(daemon: Daemon, uid: int, seconds: float) -> list[float]:
    """How long requests of a user take, each with a connection of its own."""
    def ask(pipe):
        become(uid)
        delays, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                with daemon.connect() as client:
                    client.sendall(QUESTION)
                    answered = client.recv(100).endswith(b"\n")
            except OSError:
                answered = False
            delays.append(time.monotonic() - start if answered else 99)
            time.sleep(0.01)
        pipe.send(delays)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=ask, args=[theirs])
    process.start()
    delays = ours.recv() if ours.poll(seconds + 20) else []
    process.kill()
    process.join()
    return delays


# Forks again and again; each child and the parent check all of the memory.
FORKS = """
import os, random, sys
blocks = [random.Random(number).randbytes(1024) * 1024 for number in range(48)]
right = lambda: all(block == random.Random(number).randbytes(1024) * 1024 for number, block in enumerate(blocks))
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if right() else 1)
    print(os.waitpid(pid, 0)[1] == 0 and right(), flush=True)
"""


def attach_socket(manager: int) -> bytes:
    """The name of the abstract socket that processes connect to."""
    own = {os.readlink(f"/proc/{manager}/fd/{fd}") for fd in os.listdir(f"/proc/{manager}/fd")}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[6]}]" in own and fields[-1].startswith("@uzswap-"):
            return b"\0" + fields[-1][1:].encode()
    raise LookupError("the manager has no such socket")


def stays_mute(name: bytes, count: int, uid: int) -> None:
    """Keeps so many connections that say nothing: each that ends is replaced."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
    become(uid)
    connections, poll = {}, select.poll()
    while True:
        while len(connections) < count:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                client.connect(name)
            except OSError:         # the backlog is full
                client.close()
                break
            connections[client.fileno()] = client
            poll.register(client, select.POLLIN)
        for descriptor, _ in poll.poll(10):
            poll.unregister(descriptor)
            connections.pop(descriptor).close()


@test("hostile-mute", 120)
def mute(context: Context, test):
    """2000 connections of another user that say nothing take no descriptors from a job that forks."""
    need_root()
    daemon = Daemon(context, prefix=["prlimit", "--nofile=1024:1024"])
    job = daemon.start(["python3", "-c", FORKS], "--memory-max", "32M", "--require", "--cgroup", "good", stdin=subprocess.PIPE)

    def fork() -> bool:
        said = harness.read(job.files[0]).count(b"\n")
        job.process.stdin.write(b"\n")
        job.process.stdin.flush()
        return wait_until(lambda: harness.read(job.files[0]).count(b"\n") > said, 20)
    forked = fork()
    manager = daemon.manager()
    before = harness.descriptors(manager)
    mutes = multiprocessing.get_context("fork").Process(target=stays_mute, args=[attach_socket(manager), 2000, 65534])
    mutes.start()
    try:
        time.sleep(1)
        most, forks, end = 0, 0, time.monotonic() + context.size(6, 60)
        while forked and time.monotonic() < end:
            most = max(most, harness.descriptors(manager))
            try:
                forked = fork()
            except OSError:         # it was killed
                forked = False
            forks += forked
        os.kill(mutes.pid, signal.SIGSTOP)
        settled = wait_until(lambda: harness.descriptors(manager) <= before + 16, 5)
        left = harness.descriptors(manager)
    finally:
        mutes.kill()
        mutes.join()
    try:
        job.process.stdin.close()
    except OSError:
        pass
    yield check(f"hostile-mute: {forks} forks, {most} descriptors at most", unless(forked and forks > 2, "a fork was held up"), whole(job.wait(30)),
                unless(most <= before + 350, f"{before} before, {most} at most"))
    yield check("hostile-mute: silence has an end", unless(settled, f"{before} before, {left} while the connections are silent"))
    outcome = daemon.end()
    yield check("hostile-mute: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


class Client:
    """A connection that speaks the protocol of processes, as far as it likes."""

    def __init__(self, daemon: Daemon):
        self.door = daemon.connect()
        job = make_and_join(self.door, b"cgroup/bad-%d-%d" % (os.getpid(), time.monotonic_ns()), b"transient")
        self.name, self.token = job[:16], int(job[16:], 16)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(5)
        self.socket.connect(b"\0uzswap-" + self.name)
        self.socket.send(struct.pack("=3Q", 17, PROTOCOL_VERSION, self.token))
        assert self.socket.recv(4096), "the manager does not greet"

    def hello(self, descriptors: list[int], areas: int = 0) -> None:
        """Says hello with these descriptors, and with areas that begin at this address."""
        page = 4096
        words = [2, 0, 0, 0, areas, 8192 * page, areas, areas + page, areas + 6000 * page]
        socket.send_fds(self.socket, [struct.pack("=9Q", *words)], descriptors)


def userfaultfd(flags: int = 0) -> int:
    return ctypes.CDLL(None).syscall({"x86_64": 323, "aarch64": 282}[platform.machine()], flags)


def lingers() -> socket.socket:
    """A socket whose last close waits a minute for its peer to read."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    client.setblocking(False)
    try:
        while True:
            client.send(bytes(65536))
    except BlockingIOError:
        # The peer lives as long as the process.
        KEPT.extend((listener, listener.accept()[0]))
        return client


KEPT: list = []


def says_nothing_more(daemon: Daemon) -> None:
    """A session whose userfaultfd blocks when it is read, and which never answers."""
    memory = mmap.mmap(-1, 8192 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    client = Client(daemon)
    client.hello([userfaultfd(), userfaultfd(), os.pidfd_open(os.getpid())], address)
    KEPT.extend((client, memory, mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))


def makes_it_block_again(daemon: Daemon) -> None:
    """A session whose userfaultfd is made to block all the time: the kernel reports it as ready then, whether or not there is something to read."""
    memory = mmap.mmap(-1, 8192 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    client, fd = Client(daemon), userfaultfd(os.O_NONBLOCK)
    client.hello([fd, userfaultfd(), os.pidfd_open(os.getpid())], ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    while True:
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)


def hands_over_what_lingers(daemon: Daemon) -> None:
    for count in (1, 3, 20):
        client, sockets = Client(daemon), [lingers() for _ in range(count)]
        client.hello([socket.fileno() for socket in sockets])
        for end in sockets:
            end.close()
    # A message that is never read.
    client, end = Client(daemon), lingers()
    client.socket.send(b"nonsense")
    try:
        client.hello([end.fileno()])
    except OSError:         # the connection has ended
        pass
    end.close()


def hands_over_anything(daemon: Daemon) -> None:
    for _ in range(20):
        client = Client(daemon)
        kinds = [os.pipe()[0], userfaultfd(os.O_NONBLOCK), os.pidfd_open(os.getpid()), os.open("/dev/zero", os.O_RDONLY), os.memfd_create("")]
        for _ in range(3):
            try:
                client.hello(random.choices(kinds, k=random.choice((0, 1, 2, 3, 3, 3, 4, 5, 250))), random.getrandbits(47) & ~4095)
            except OSError:
                break
        for descriptor in kinds:
            os.close(descriptor)


# Not beside others: how long the other job is held up is measured.
@test("hostile-client", 120)
def hostile_client(context: Context, test):
    """A client with descriptors that block, or of the wrong kind, holds up no other job."""
    need_root()
    for attack in (says_nothing_more, makes_it_block_again, hands_over_what_lingers, hands_over_anything):
        what = attack.__name__.replace("_", " ")
        daemon = Daemon(context)
        before = daemon.memory("--memory-max", "32M")
        touched = touches(before, 64)

        def run():
            attack(daemon)
            time.sleep(1000)
        client = multiprocessing.get_context("fork").Process(target=run)
        client.start()
        time.sleep(0.5)
        share = busy(daemon.manager(), 0.5)
        start = time.monotonic()
        after = daemon.memory("--cgroup", "good", "--memory-max", "32M")
        held = touches(after, 64)
        current = daemon.get("cgroup/good/memory.current")
        seconds = time.monotonic() - start
        yield check(f"hostile-client: {what}", unless(touched and held, "another job was held up"), unless(seconds < 10, f"{seconds:.1f} s"),
                    unless(attack is not says_nothing_more or share < 0.5, f"the manager spins: {share * 100:.0f} % of a processor"),
                    unless(current.strip().isdigit() and int(current) < 34 * MIB, f"another job's limit does not hold: {current}"),
                    whole(ends(after)), unless(touches(before, 8), "the first job was held up"))
        client.kill()
        client.join()
        # Until then the client had a copy of the end of its input.
        yield check(f"hostile-client: {what}: the first job is whole", whole(ends(before)))
        outcome = daemon.end()
        yield check(f"hostile-client: {what}: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())

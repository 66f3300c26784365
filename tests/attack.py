"""Identity: what a user of a daemon can have the manager do to processes of another user.

Each attack runs as a user that may not signal the victim, and uses nothing but the two sockets of the daemon.
"""
from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import time

import harness
from behaviour import check, unless, wait_until
from control import WRITE, speak
from daemon import Daemon, make_and_join, open_daemon, whole
from hostile import become, touches
from suite import Context, PROTOCOL_VERSION, complaint, need_root, test

# A user that no other test runs as.
ATTACKER = 64331

PAGE = 4096
USERFAULTFD_NEW, UFFDIO_API = 0xAA00, 0xC018AA3F
CALL, HELLO, ADVISE, FAILED = 17, 2, 11, 13


class Intruder:
    """A process that speaks both protocols of a daemon, as far as it likes."""

    def __init__(self, daemon: Daemon, wishes: bytes = b"transient"):
        self.daemon, self.door = daemon, daemon.connect()
        self.group = b"cgroup/bad-%d-%d" % (os.getpid(), time.monotonic_ns())
        job = make_and_join(self.door, self.group, wishes)
        self.name, self.token = job[:16], int(job[16:], 16)

    def call(self) -> tuple[socket.socket, int]:
        """A connection that has been greeted, and the userfaultfd device."""
        link = self.link()
        link.send(struct.pack("=3Q", CALL, PROTOCOL_VERSION, self.token))
        _, descriptors, _, _ = socket.recv_fds(link, 4096, 4)
        return link, descriptors[0]

    def link(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(5)
        link.connect(b"\0uzswap-" + self.name)
        return link


def userfaultfd(device: int, used: bool) -> int:
    """A userfaultfd, perhaps one that has had its handshake, without the features that the manager wants."""
    uffd = fcntl.ioctl(device, USERFAULTFD_NEW, os.O_CLOEXEC | os.O_NONBLOCK)
    if used:
        fcntl.ioctl(uffd, UFFDIO_API, struct.pack("=3Q", 0xAA, 0, 0))
    return uffd


def areas() -> tuple[mmap.mmap, list[int]]:
    """Memory with the agent's areas in it, and what a HELLO says of them."""
    memory = mmap.mmap(-1, 8192 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, [start, 8192 * PAGE, start, start + PAGE, start + 6000 * PAGE]


def with_pid(pid: int, start) -> int | None:
    """Starts a process that has this number, if that is free; `start` runs in it."""
    clone3 = 435
    number = ctypes.c_int(pid)
    arguments = (ctypes.c_uint64 * 11)()
    arguments[4], arguments[8], arguments[9] = signal.SIGCHLD, ctypes.addressof(number), 1
    libc = ctypes.PyDLL(None, use_errno=True)
    child = libc.syscall(clone3, arguments, ctypes.sizeof(arguments))
    if child == 0:
        start()
        os._exit(1)
    return pid if child == pid else None


def sleeps() -> None:
    os.execvp("sleep", ["sleep", "100"])


def with_child() -> None:
    """A process with a child."""
    os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "100"])
    os.execvp("sleep", ["sleep", "100"])


def lives(pid: int) -> bool:
    found, _ = os.waitpid(pid, os.WNOHANG)
    return found == 0


def attack_process(function, *arguments) -> multiprocessing.Process:
    """Runs an attack as another user."""
    def run():
        become(ATTACKER)
        function(*arguments)
        time.sleep(1000)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def end(process: multiprocessing.Process) -> None:
    """Ends an attack, with all processes that it has made."""
    for pid in harness.processes():
        if f"Uid:\t{ATTACKER}\t".encode() in harness.read(f"/proc/{pid}/status"):
            os.kill(pid, signal.SIGKILL)
    process.join()


def named_by_handle(daemon: Daemon, victim: int, done) -> None:
    """A HELLO whose userfaultfds are of no use names a process of another's by its handle."""
    for used in ((True, False), (False, True), (True, True)):
        intruder = Intruder(daemon, b"require\ntransient")
        link, device = intruder.call()
        memory, words = areas()
        descriptors = [userfaultfd(device, one) for one in used] + [os.pidfd_open(victim)]
        socket.send_fds(link, [struct.pack("=9Q", HELLO, 0, 0, 0, *words)], descriptors)
        # To unmap what is registered waits for a reader of its events.
        KEPT.append(memory)
        # It is refused.
        try:
            while link.recv(4096):
                pass
        except OSError:
            pass
    done.set()


def named_as_failed(daemon: Daemon, victim: int, done) -> None:
    """A FAILED names a process of another's by its handle."""
    intruder = Intruder(daemon, b"require\ntransient")
    link, _ = intruder.call()
    socket.send_fds(link, [struct.pack("=3Q", FAILED, 1, 1)], [os.pidfd_open(victim)])
    done.set()


@test("attack-handle", 60, beside=True)
def handle(context: Context, test):
    """A client that names a process of another user by its handle does that process no harm."""
    need_root()
    daemon = open_daemon(context)
    for attack in (named_by_handle, named_as_failed):
        victim = os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "100"])
        done = multiprocessing.get_context("fork").Event()
        process = attack_process(attack, daemon, victim, done)
        did = done.wait(20)
        time.sleep(0.5)
        unharmed = lives(victim)
        end(process)
        yield check(f"attack-handle: {attack.__name__.replace('_', ' ')}", unless(did, "the attack did not take place"),
                    unless(unharmed, "another user's process was killed"))
        if unharmed:
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    outcome = daemon.end()
    yield check("attack-handle: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


def hand_on(use, pipe) -> None:
    """Opens a connection in a process that ends, and tells its number; another process has the connection then."""
    opened, ready = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        intruder = use()
        if os.fork() == 0:
            os.write(ready[1], b"x")
            # The end of the process that connected.
            os.close(opened[1])
            os.read(opened[0], 1)
            pipe.recv()
            intruder()
            pipe.send("done")
            time.sleep(1000)
        os.read(ready[0], 1)
        os._exit(0)
    os.close(opened[1])
    os.waitpid(pid, 0)
    pipe.send(pid)


def fails_later(daemon: Daemon):
    """Says FAILED on a connection whose process has ended."""
    intruder = Intruder(daemon, b"require\ntransient")
    link, _ = intruder.call()
    return lambda: link.send(struct.pack("=3Q", FAILED, 1, 1))


def stays_below_front(daemon: Daemon):
    """Has its job, whose front has ended, rather killed than have a process that is not managed."""
    KEPT.append(Intruder(daemon, b"require\ntransient"))
    return lambda: None


def kills_below_front(daemon: Daemon):
    """Moves a child of its front, which has ended, to a group of its own, and kills that."""
    intruder = Intruder(daemon)

    def kill():
        front = FRONT[0]
        child = open(f"/proc/{front}/task/{front}/children").read().split()[0]
        for file, value in (("cgroup.procs", child), ("cgroup.freeze", "1"), ("cgroup.kill", "1")):
            speak(daemon.connect(), WRITE, intruder.group + b"/" + file.encode(), value.encode())
    return kill


FRONT: list[int] = []
KEPT: list = []


@test("attack-number", 120, beside=True)
def number(context: Context, test):
    """The number of a process that has ended, used again by another user's process, gives no power over that."""
    need_root()
    daemon = open_daemon(context)
    good = daemon.memory("--memory-max", "32M")
    touched = touches(good, 64)
    for attack, start in ((fails_later, sleeps), (stays_below_front, with_child), (kills_below_front, with_child)):
        ours, theirs = multiprocessing.Pipe()

        def run(attack=attack, theirs=theirs):
            def use():
                FRONT.append(os.getpid())
                return attack(daemon)
            hand_on(use, theirs)
        process = attack_process(run)
        pid = ours.recv() if ours.poll(20) else 0
        victim = with_pid(pid, start) if pid else None
        children = f"/proc/{victim}/task/{victim}/children"
        below = int(open(children).read().split()[0]) if start is with_child and victim and wait_until(lambda: open(children).read(), 5) else 0
        ours.send("go")
        did = ours.poll(20) and ours.recv() == "done"
        # An unmanaged process is found after three seconds at most.
        time.sleep(4)
        unharmed = bool(victim) and lives(victim) and (not below or os.path.exists(f"/proc/{below}/exe"))
        stopped = below and open(f"/proc/{below}/stat").read().rpartition(") ")[2].startswith("T") if unharmed else 0
        end(process)
        for other in filter(None, (below, victim)):
            try:
                os.kill(other, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if victim and unharmed:
            os.waitpid(victim, 0)
        yield check(f"attack-number: {attack.__name__.replace('_', ' ')}", unless(pid and victim and did, f"the attack did not take place: {pid} {victim} {did}"),
                    unless(unharmed and not stopped, "another user's process was killed or stopped"))
    yield check("attack-number: another's job is whole", unless(touched and touches(good, 8), "it was held up"), whole(good.end()))
    outcome = daemon.end()
    yield check("attack-number: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())

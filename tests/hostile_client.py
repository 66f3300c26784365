"""hostile_client.py SOCKET SEED SECONDS: a user of a daemon that keeps to no protocol.

Each life is a process that does a few things at random: messages that are wrong, early, late, sent twice, sent by another process
than the one that connected, with wrong descriptors or none; answers to the manager's requests that are lies; requests at the control
socket that are wrong, partial or never read. A life that the manager kills is followed by the next.

Tells how often each thing was done. It does no harm but by these messages: it fills no disk and forks no crowd.
"""
from __future__ import annotations

import ast
import collections
import ctypes
import fcntl
import mmap
import os
import random
import re
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

PAGE = 4096
USERFAULTFD_NEW, UFFDIO_API, UFFDIO_REGISTER = 0xAA00, 0xC018AA3F, 0xC020AA00
STAGING, TRASH = 4096, 512
VERSION = int(re.search(r"^pub const VERSION: u64 = (\d+);",
                        (Path(__file__).resolve().parent.parent / "crates/proto/src/lib.rs").read_text(), re.MULTILINE)[1])
CALL, HELLO, EVICT, EVICTED, DISCARD, DISCARDED, COLLAPSE, COLLAPSED, ADVISE, FAILED, GO, EXIT = 17, 2, 6, 7, 8, 9, 15, 16, 11, 13, 5, 10
KINDS = range(0, 20)
READ, WRITE, LIST, MAKE, REMOVE, LOOK, JOIN, STATS = range(1, 9)
LIFE = 1.5


def aside(function) -> None:
    """Calls it in a child, which ends whatever comes of it."""
    if os.fork() == 0:
        try:
            function()
        finally:
            os._exit(0)


class Life:
    """One process of the client."""

    def __init__(self, path: str, rng: random.Random):
        self.path, self.rng, self.kept = path, rng, []
        self.name = self.token = None
        self.counts: collections.Counter = collections.Counter()

    # --- the control socket

    def door(self) -> socket.socket:
        door = socket.socket(socket.AF_UNIX)
        door.settimeout(1)
        door.connect(self.path)
        return door

    def ask(self, door: socket.socket, verb: int, path: bytes, value: bytes = b"") -> bytes:
        door.sendall(b"uz\x01" + bytes([verb]) + struct.pack("=HH", len(path), len(value)) + path + value)
        return door.recv(1 << 16)

    def join(self) -> None:
        door = self.door()
        self.group = b"cgroup/hostile-%d-%d" % (os.getpid(), self.rng.getrandbits(30))
        self.ask(door, MAKE, self.group)
        self.ask(door, WRITE, self.group + b"/memory.max", self.rng.choice((b"4M", b"8M", b"0", b"max")))
        joined = self.ask(door, JOIN, self.group, self.rng.choice((b"transient", b"transient\nrequire", b"")))
        self.name, self.token = joined[14:30], int(joined[30:46], 16)
        self.kept.append(door)

    def requests(self) -> None:
        """Requests of all kinds, on one connection."""
        rng, door = self.rng, self.door()
        groups = [b"cgroup", getattr(self, "group", b"cgroup/none"), b"cgroup/good", b"", b"/", b"cgroup/../cgroup"]
        files = [b"memory.max", b"cgroup.procs", b"memory.stat", b"memory.reclaim", b"cgroup.kill", b"cgroup.freeze", b"memory.zswap.max", b"", b"x" * 300]
        values = [b"0", b"1", b"-1", b"max", b"18446744073709551616", b"\xff\xfe", b"1" * 4096, b"%d" % os.getppid(), b"1", b"%d" % rng.getrandbits(15), b""]
        for _ in range(rng.randrange(1, 12)):
            try:
                self.ask(door, rng.randrange(0, 11), rng.choice(groups) + b"/" + rng.choice(files), rng.choice(values))
            except OSError:
                door = self.door()

    def noise(self) -> None:
        """Bytes that are no request, or a part of one."""
        door, rng = self.door(), self.rng
        door.sendall(rng.choice((rng.randbytes(rng.randrange(1, 5000)), b"uz\x01\x01", b"uz\x01\x01\xff\xff\xff\xff" + b"a" * rng.randrange(9000), b"uz\x02\x01\0\0\0\0")))
        if rng.random() < 0.5:
            self.kept.append(door)

    def deaf(self) -> None:
        """Requests whose answers are not taken."""
        door = self.door()
        door.setblocking(False)
        path = b"cgroup/memory.stat"
        try:
            for _ in range(5000):
                door.send(b"uz\x01\x01" + struct.pack("=HH", len(path), 0) + path)
        except OSError:
            pass
        self.kept.append(door)

    def descriptors_at_the_door(self) -> None:
        door = self.door()
        with open("/dev/null") as file:
            socket.send_fds(door, [b"uz\x01\x01\0\0\0\0"], [file.fileno()] * self.rng.randrange(1, 250))

    def deep_groups(self) -> None:
        door, path = self.door(), b"cgroup/deep-%d" % self.rng.getrandbits(20)
        for _ in range(self.rng.randrange(1, 30)):
            self.ask(door, MAKE, path)
            path += b"/d"
        while path.count(b"/") and self.rng.random() < 0.98:
            path = path.rpartition(b"/")[0]
            self.ask(door, REMOVE, path)

    # --- the socket for processes

    def link(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(1)
        link.connect(b"\0uzswap-" + self.name)
        return link

    def greeted(self) -> tuple[socket.socket, int]:
        link = self.link()
        link.send(struct.pack("=3Q", CALL, VERSION, self.token))
        _, descriptors, _, _ = socket.recv_fds(link, 4096, 4)
        self.kept.append(link)
        return link, descriptors[0]

    def words(self, *words: int) -> bytes:
        return struct.pack(f"={len(words)}Q", *words)

    def any_message(self) -> bytes:
        rng = self.rng
        number = lambda: rng.choice((0, 1, 4096, rng.getrandbits(12), rng.getrandbits(47) & ~4095, rng.getrandbits(64), (1 << 64) - 1, self.token or 0, VERSION))
        message = self.words(rng.choice(KINDS), *(number() for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 16, 40, 515, 600)))))
        return message[:rng.choice((len(message),) * 4 + (1, 7, 9))]

    def any_descriptors(self, device: int) -> list[int]:
        kinds = [os.pipe()[0], os.open("/dev/zero", os.O_RDONLY), os.open("/proc/self", os.O_PATH), os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid()),
                 os.pidfd_open(1), os.memfd_create(""), select.epoll().fileno(), socket.socket().detach(), *(self.userfaultfd(device) for _ in range(4))]
        return self.rng.choices(kinds, k=self.rng.choice((0, 1, 2, 3, 3, 3, 4, 5, 250)))

    def userfaultfd(self, device: int) -> int:
        rng = self.rng
        uffd = fcntl.ioctl(device, USERFAULTFD_NEW, rng.choice((os.O_CLOEXEC, os.O_CLOEXEC | os.O_NONBLOCK)))
        if rng.random() < 0.3:
            # The handshake is done already: with too few features, or with SIGBUS in the place of messages.
            fcntl.ioctl(uffd, UFFDIO_API, self.words(0xAA, rng.choice((0, 1 << 7, 1 << 1)), 0))
        return uffd

    def silent(self) -> None:
        self.kept.append(self.link())

    def nonsense(self) -> None:
        """Any message first, and more of them."""
        link = self.link()
        for _ in range(self.rng.randrange(1, 5)):
            link.send(self.any_message())

    def greeted_nonsense(self) -> None:
        """Any message, with any descriptors, after the greeting."""
        link, device = self.greeted()
        for _ in range(self.rng.randrange(1, 4)):
            socket.send_fds(link, [self.any_message()], self.any_descriptors(device))

    def called_twice(self) -> None:
        link, _ = self.greeted()
        link.send(struct.pack("=3Q", CALL, VERSION, self.token))

    def failed(self) -> None:
        link, device = self.greeted()
        socket.send_fds(link, [self.words(FAILED, self.rng.randrange(4), self.rng.getrandbits(32))], self.any_descriptors(device)[:3])

    def advises(self) -> None:
        """Hints about any range, whose answers are not waited for."""
        for _ in range(self.rng.randrange(1, 50)):
            link = self.link()
            link.send(self.words(ADVISE, VERSION, self.token, self.rng.randrange(4), self.rng.getrandbits(47) & ~4095, self.rng.getrandbits(self.rng.choice((14, 30, 64)))))
            self.kept.append(link)

    def areas(self) -> list[int]:
        memory = mmap.mmap(-1, 8192 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.kept.append(memory)
        words = [start, 8192 * PAGE, start, start + PAGE, start + 6000 * PAGE]
        if self.rng.random() < 0.3:
            words[self.rng.randrange(5)] = self.rng.choice((0, start + 1, start - PAGE, (1 << 47) - PAGE, (1 << 64) - PAGE, self.rng.getrandbits(47) & ~4095, id(self) & ~4095))
        return words

    def hello(self) -> tuple[socket.socket, int]:
        """An introduction that is mostly right."""
        rng, (link, device) = self.rng, self.greeted()
        descriptors = [self.userfaultfd(device), self.userfaultfd(device), os.pidfd_open(rng.choice((os.getpid(),) * 6 + (os.getppid(), 1)))]
        if rng.random() < 0.2:
            rng.shuffle(descriptors)
        flags = rng.choice((0, 0, 0, 1, 2, 3, 4))
        message = self.words(HELLO, flags, rng.getrandbits(64), rng.getrandbits(64), *self.areas())
        if rng.random() < 0.3:
            # By another process than the one that connected.
            def send_and_stay() -> None:
                socket.send_fds(link, [message], descriptors)
                time.sleep(rng.random() * 0.3)
            aside(send_and_stay)
        else:
            socket.send_fds(link, [message], descriptors)
        if rng.random() < 0.2:
            socket.send_fds(link, [message], descriptors)
        return link, descriptors[0]

    def lies(self) -> None:
        """A worker whose answers are wrong, early, late, doubled or missing."""
        rng, (link, uffd) = self.rng, self.hello()
        memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.kept.append(memory)
        # A thread that faults on what is lost would not come back.
        def touch() -> None:
            signal.alarm(2)
            for page in range(0, 16 << 20, PAGE):
                memory[page] = 1
        aside(touch)
        end = time.monotonic() + LIFE
        while time.monotonic() < end and select.select([link], [], [], 0.3)[0]:
            heard = link.recv(8192)
            if not heard:
                return
            kind = struct.unpack_from("=Q", heard)[0]
            self.counts[f"heard {kind}"] += 1
            runs = max(0, len(heard) - 24) // 8
            truth = {EVICT: self.words(EVICTED, runs, *[rng.choice((0, 0xFDFDFDFDFDFDFDFD, 0x0010001000100010, (1 << 64) - 1, rng.getrandbits(64)))] * 64),
                     DISCARD: self.words(DISCARDED, rng.choice((0, 1, 1 << 40, struct.unpack_from("=3Q", heard.ljust(24, b"\0"))[2]))),
                     COLLAPSE: self.words(COLLAPSED, rng.randrange(3))}.get(kind)
            choice = rng.random()
            if truth is None or choice < 0.1:
                truth = self.any_message() if choice < 0.1 else b""
            if choice < 0.2:
                time.sleep(rng.random())
            for _ in range(rng.choice((0, 1, 1, 1, 1, 2))):
                if truth:
                    link.send(truth)

    def hands_on(self) -> None:
        """A connection whose process ends, used by another."""
        link = self.link()
        link.send(struct.pack("=3Q", CALL, VERSION, self.token))
        def go_on() -> None:
            while os.getppid() != 1 and self.rng.random() < 0.999:
                time.sleep(0.001)
            link.send(self.rng.choice((self.any_message(), self.words(FAILED, 1, 1))))
        aside(go_on)

    def live(self, lies_first: bool) -> None:
        things = [self.requests, self.noise, self.deaf, self.descriptors_at_the_door, self.deep_groups, self.silent, self.nonsense, self.greeted_nonsense,
                  self.called_twice, self.failed, self.advises, self.hello, self.lies, self.lies, self.hands_on]
        self.join()
        for number in range(self.rng.randrange(1, 8)):
            thing = self.lies if lies_first and number == 0 else self.rng.choice(things)
            self.counts[thing.__name__] += 1
            try:
                thing()
            except OSError:         # the manager has had enough of it
                self.counts["refused"] += 1


def run(path: str, seed: int, seconds: float) -> dict[str, int]:
    """Lives so long; returns how often each thing was done."""
    end = time.monotonic() + seconds
    total: collections.Counter = collections.Counter()
    life = 0
    while time.monotonic() < end:
        life += 1
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            one = Life(path, random.Random(seed * 1_000_003 + life))
            try:
                one.live(lies_first=not total["lies"])
            except Exception as error:      # the counts tell it
                one.counts["lost" if isinstance(error, (OSError, ValueError)) else f"{error!r}"] += 1
            os.write(into, repr(dict(one.counts)).encode())
            # Memory that is watched is not unmapped before the end.
            os._exit(0)
        os.close(into)
        # Descendants hold the pipe, too: its end is not waited for.
        text = os.read(out, 65536) if select.select([out], [], [], 3 * LIFE)[0] else b""
        os.close(out)
        total.update(ast.literal_eval(text.decode()) if text else {"killed": 1})
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not os.waitpid(pid, os.WNOHANG)[0]:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
            time.sleep(0.001)
    total["lives"] = life
    return dict(sorted(total.items()))


if __name__ == "__main__":
    print(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

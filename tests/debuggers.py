"""What debuggers, tracers and crash handlers see of a program whose pages are evicted: the truth."""
from __future__ import annotations

import os
import re
import resource
import signal
import struct
import subprocess
import time
from pathlib import Path

import harness
from behaviour import check, unless, wait_until
from suite import MIB, Context, complaint, need, test

SIZE = 128
PAGES = SIZE * MIB // harness.PAGE
LIMIT = ("--memory-max", "32M", "--quiet")
GOLDEN = 0x9E3779B97F4A7C15

# Symbols of the C library take gdb seconds and are not needed.
GDB = ("gdb", "-nx", "-batch", "-iex", "set auto-solib-add off", "-iex", "set debuginfod enabled off")


def first_word(page: int) -> int:
    return (page + 1) * GOLDEN % 2**64


def page_bytes(page: int) -> bytes:
    return struct.pack("<512Q", first_word(page), *[page + 1] * 511)


class Inspected:
    """A job whose program waits to be looked at, with most of its memory evicted."""

    def __init__(self, context: Context, **settings):
        self.job = context.start([context.program("inspected"), SIZE, "wait"], *LIMIT, **settings)
        if not wait_until(lambda: harness.read(self.job.files[0]).endswith(b"\n"), 60):
            raise RuntimeError("the program has not begun")
        self.pid, self.address, _ = map(int, harness.read(self.job.files[0]).split())
        wait_until(lambda: self.resident() < 40 * MIB, 10)
        self.at_first = self.resident()

    def resident(self) -> int:
        return harness.anonymous_upper_bound(self.pid)

    def settles(self) -> bool:
        """Whether it comes back below its limit."""
        return wait_until(lambda: self.resident() <= 34 * MIB, 20)

    def end(self) -> harness.Outcome:
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        return self.job.wait(60)


@test("debugger-gdb", 120, quick=False)
def gdb(context: Context, test):
    """gdb attaches from outside and reads all memory; the limit holds again after it has left."""
    need("gdb")
    inspected = Inspected(context)
    looked_at = range(0, PAGES, 331)
    commands = [part for page in looked_at
                for part in ("-ex", f"x/2gx {inspected.address + page * harness.PAGE}")]
    result = subprocess.run([*GDB, "-p", str(inspected.pid), *commands, "-ex", "detach"],
                            capture_output=True, text=True, timeout=test.seconds, check=False)
    words = re.findall(r"^0x[0-9a-f]+:\t(0x[0-9a-f]+)\t(0x[0-9a-f]+)$", result.stdout, re.MULTILINE)
    expected = [(f"0x{first_word(page):016x}", f"0x{page + 1:016x}") for page in looked_at]
    wrong = sum(one != other for one, other in zip(words, expected))
    settled = inspected.settles()
    yield check("debugger-gdb", unless(inspected.at_first < 40 * MIB, f"nothing evicted: {inspected.at_first}"),
                unless(len(words) == len(expected), f"{len(words)} of {len(expected)} words read: {result.stderr[-300:]}"),
                unless(not wrong, f"{wrong} words wrong"),
                unless(settled, f"{inspected.resident() // MIB} MiB stay in memory after gdb has left"),
                unless(inspected.end().status == 143, "the program did not survive"))


@test("debugger-gcore", 120)
def gcore(context: Context, test):
    """A dump by gcore holds every byte."""
    need("gdb")
    inspected = Inspected(context)
    path = context.directory() / "core"
    result = subprocess.run([*GDB, "-p", str(inspected.pid), "-ex", f"gcore {path}", "-ex", "detach"],
                            capture_output=True, text=True, timeout=test.seconds, check=False)
    lacks = missing_pages(path, inspected.address) if path.exists() else PAGES
    yield check("debugger-gcore", unless(lacks == 0, f"{lacks} of {PAGES} pages missing: {result.stderr[-300:]}"),
                unless(inspected.settles(), "it does not come back below its limit"),
                unless(inspected.end().status == 143, "the program did not survive"))


def missing_pages(path: Path, address: int) -> int:
    """How many pages of the pattern a core file does not show as they were. A page that is neither right nor zeros is an error."""
    missing = 0
    with open(path, "rb") as core:
        header = core.read(64)
        offset, size, count = (*struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54))
        segments = []
        for number in range(count):
            core.seek(offset + number * size)
            kind, _, at, start, _, length = struct.unpack("<IIQQQQ", core.read(40))
            segments += [(start, at, length)] if kind == 1 else []
        for page in range(PAGES):
            wanted = address + page * harness.PAGE
            place = next((at + wanted - start for start, at, length in segments if start <= wanted < start + length), None)
            if place is None:
                missing += 1
                continue
            core.seek(place)
            data = core.read(harness.PAGE)
            if data != page_bytes(page):
                if data.strip(b"\0"):
                    raise ValueError(f"page {page} holds other bytes")
                missing += 1
    return missing


@test("debugger-child", 60)
def crash_reporter(context: Context, test):
    """A crash reporter that is a child of the program reads all of its memory by ptrace, within a second of attaching."""
    outcome = context.run([context.program("inspected"), SIZE, "child"], *LIMIT, timeout=test.seconds)
    waited = int(outcome.stdout or -1)
    yield check("debugger-child", unless(outcome.status == 0, complaint(outcome)),
                unless(0 <= waited < 3000, f"pages came after {waited} ms"))


@test("debugger-handler", 60)
def crash_handler(context: Context, test):
    """A handler on its own stack, and Python's faulthandler, read evicted memory like any code."""
    outcome = context.run([context.program("inspected"), SIZE, "handler"], *LIMIT, timeout=test.seconds)
    yield check("debugger-handler: C", unless(outcome.status == 0, complaint(outcome)))
    script = ("import faulthandler, ctypes, threading\n"
              "faulthandler.enable()\n"
              "def descend(n):\n"
              "    if n: return descend(n - 1)\n"
              "    data = [bytes([i % 251]) * 1000 for i in range(100_000)]\n"
              "    ctypes.string_at(0)\n"
              "thread = threading.Thread(target=descend, args=(50,))\n"
              "thread.start(); thread.join()\n")
    outcome = context.run(["python3", "-c", script], *LIMIT, timeout=test.seconds)
    frames = outcome.stderr.count(" in descend")
    yield check("debugger-handler: faulthandler", unless(outcome.status == 139, complaint(outcome)),
                unless(frames >= 51, f"{frames} frames shown"))


@test("core-dump", 60)
def core_dump(context: Context, test):
    """What a core dump lacks is told, and nothing else in it is wrong."""
    pattern = harness.read("/proc/sys/kernel/core_pattern").decode().strip()
    directory = context.directory()
    unlimited = lambda: resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    inspected = Inspected(context, directory=directory, preexec_fn=unlimited)
    os.kill(inspected.pid, signal.SIGUSR1)
    outcome = inspected.job.wait(test.seconds)
    lines = [line for line in outcome.stderr.splitlines() if "core dump of process" in line]
    if pattern.startswith(("|", "@", "/")):
        yield check("core-dump", unless(outcome.status == 139, complaint(outcome)))
        return
    cores = [path for path in directory.iterdir() if path.name.startswith(pattern.split("%")[0])]
    lacks = missing_pages(cores[0], inspected.address) if cores else PAGES
    told = float(re.search(r"lack ([0-9.]+) MiB", lines[0])[1]) if lines else 0
    short = lacks * harness.PAGE / MIB - told
    yield check("core-dump", unless(outcome.status == 139, complaint(outcome)),
                unless(cores, "no core file"),
                unless(not lacks or lines, f"{lacks} pages missing without a word: {outcome.stderr[-300:]!r}"),
                unless(short < 1, f"{told} MiB told, {short:.1f} MiB more missing"))

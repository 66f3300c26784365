"""What all tests share: the settings of a run, the list of tests, and how a result looks."""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator

import harness

PROGRAMS = Path(__file__).resolve().parent / "programs"

# Of the messages between workers and the manager: a client that has it wrong is refused before it does any harm.
PROTOCOL_VERSION = int(re.search(r"^pub const VERSION: u64 = (\d+);", (PROGRAMS.parent.parent / "crates/proto/src/lib.rs").read_text(), re.M)[1])
MIB = 1 << 20


class Skip(Exception):
    """The test cannot run here; the message says why."""


@dataclass
class Result:
    name: str
    ok: bool
    detail: str = ""                # why not, or what was measured
    columns: tuple = ()             # of the table of real programs
    raw: dict = field(default_factory=dict)


@dataclass
class Test:
    name: str
    seconds: float                  # time budget of each program that it runs
    function: Callable[["Context", "Test"], Iterator[Result]]
    needs_uzswap: bool = True
    quick: bool = True              # part of a run without --full
    beside: bool = False            # may run beside another: measures no time, and touches nothing that tests share


TESTS: list[Test] = []


def test(name: str, seconds: float, **options):
    """Registers a generator of results as a test."""
    def register(function):
        TESTS.append(Test(name, seconds, function, **options))
        return function
    return register


class Context:
    """One run of the suite: which uzswap, which sizes, and where temporary files go."""

    def __init__(self, uzswap: Path | None, full: bool):
        self.uzswap, self.full = uzswap, full
        # Under /var/tmp: on a disk, and readable for programs that change their user.
        self.root = Path(tempfile.mkdtemp(prefix="uz-tests-", dir="/var/tmp"))
        self.root.chmod(0o755)
        self.counter = 0
        self.jobs: list[harness.Job] = []

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def size(self, quick, full):
        return full if self.full else quick

    def directory(self) -> Path:
        """A fresh directory."""
        self.counter += 1
        path = self.root / f"d{self.counter}"
        path.mkdir(mode=0o755)
        return path

    def program(self, name: str, *flags: str) -> Path:
        """The C program of that name, built once."""
        built = self.root / "-".join([name, *(flag.strip("-") for flag in flags)])
        if not built.exists():
            subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-pthread", f"-DPROTOCOL_VERSION={PROTOCOL_VERSION}", *flags, "-o", built, PROGRAMS / f"{name}.c"],
                           check=True, timeout=120)
        return built

    def command(self, argv, *options) -> list[str]:
        """`argv` under uzswap with these options of `uzswap run`, or as it is when everything runs natively."""
        front = [self.uzswap, "run", *options, "--"] if self.uzswap else []
        return [str(part) for part in (*front, *argv)]

    def start(self, argv, *options, directory: Path | None = None, **settings) -> harness.Job:
        job = harness.Job(self.command(argv, *options), directory or self.directory(), uzswap=self.uzswap, **settings)
        self.jobs.append(job)
        return job

    def end_jobs(self) -> None:
        """Ends what a broken test has left running."""
        for job in self.jobs:
            if job.process.returncode is None:
                job.kill()
        self.jobs.clear()

    def run(self, argv, *options, timeout: float, sample: bool = False, **settings) -> harness.Outcome:
        """Runs `argv` under uzswap; afterwards nothing of the job may be left."""
        job = self.start(argv, *options, **settings)
        outcome = job.wait(timeout, sample)
        if not job.gone_within(5) and not outcome.hang:
            outcome.hang = "processes were left behind\n" + job.outcome.hang
        return outcome


def need(*commands: str) -> None:
    """Skips the test unless these programs are installed."""
    missing = [command for command in commands if not shutil.which(command)]
    if missing:
        raise Skip(f"not installed: {', '.join(missing)}")


def need_root() -> None:
    if os.geteuid():
        raise Skip("needs root")


def counter(stats: str | bytes, name: str) -> int | None:
    """A counter by its kernel name, wherever it stands in the JSON of --stats."""
    def find(node):
        if isinstance(node, dict):
            if isinstance(node.get(name), (int, float)):
                return node[name]
            node = list(node.values())
        for child in node if isinstance(node, list) else ():
            found = find(child)
            if found is not None:
                return found
        return None
    try:
        return find(json.loads(stats))
    except ValueError:
        return None


def complaint(outcome: harness.Outcome) -> str:
    """A program's status and last words, for the line of a failed test; and where its tasks sat when time was up."""
    lines = outcome.stderr.splitlines()
    # With what was expected and what was there.
    words = [line for before, line in zip(["", *lines], lines) if "MISMATCH" in line or "MISMATCH" in before] or lines[-3:]
    words = words or outcome.stdout[:400].splitlines()
    hang = f" HANG: {outcome.hang[:4000]}" if outcome.hang else ""
    return f"status {outcome.status}" + (f": {' | '.join(words)[:400]}" if words else "") + hang

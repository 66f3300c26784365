"""Running one job, watching it from outside, and ending all of it.

A job carries a marker of its own in its environment, so that every process of it can be found again,
whoever its parent has become.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import select
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
MARK = "UZ_TEST_JOB"
SAMPLE_SECONDS = 0.005
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}[platform.machine()]
_KCMP_VM = 1


# --- /proc ---------------------------------------------------------------------------------------

def read(path) -> bytes:
    """The file's bytes; nothing if the process is gone."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def link(path) -> str:
    """Where a symbolic link leads; empty if the process is gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descriptors(pid: int) -> int:
    """How many descriptors a manager has. Each of its threads may come to have an io_uring: those do not count."""
    links = [link(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    rings = links.count("anon_inode:[io_uring]")
    return len(links) - min(rings, len(os.listdir(f"/proc/{pid}/task")))


def stat_fields(pid: int | str) -> list[bytes]:
    """/proc/PID/stat, or that of a thread PID/task/TID, from the state on: [state, ppid, pgrp, ...]; empty if it is gone."""
    return read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()


def comm(pid: int) -> str:
    return read(f"/proc/{pid}/comm").decode(errors="replace").strip()


def same_memory(one: int, other: int) -> bool:
    """Whether two processes share one address space, as the helper task of a managed process does."""
    return _libc.syscall(_SYS_KCMP, one, other, _KCMP_VM, 0, 0) == 0


def anonymous_upper_bound(pid: int) -> int:
    """Resident anonymous bytes; pages shared after a fork count in every process that maps them."""
    fields = read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * PAGE if len(fields) > 2 else 0


def anonymous_exact(pid: int) -> int:
    """The same with shared pages counted by their share. Walks the page tables: slow."""
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def own_directories() -> list[str]:
    """The directories that keep the agents of managers, by user. They stay when the managers end."""
    shared = [f"{top}/{name}" for top in SCRATCH for name in os.listdir(top) if re.fullmatch(r"uzswap-[0-9]+", name)]
    return [path for path in ("/run/uzswap", "/var/lib/uzswap", *shared) if os.path.isdir(path)]


def leftovers() -> set[str]:
    """Files of uzswap in the places where temporary files go, but for the agents of jobs that still run."""
    def lives(name: str) -> bool:
        return name.startswith("uzswap-agent.") and os.path.exists(f"/proc/{name.split('.')[1]}")
    own = own_directories()
    found = {os.path.join(top, name) for top in SCRATCH for name in os.listdir(top) if "uzswap" in name}
    # The empty directory by way of which programs load the agent stays, too.
    found |= {os.path.join(top, name) for top in own for name in os.listdir(top) if name != "libasan.so"}
    return {path for path in found if path not in own and not lives(os.path.basename(path))}


# --- a job ---------------------------------------------------------------------------------------

@dataclass
class Outcome:
    status: int = -1              # as a shell gives it: 128+N after signal N
    seconds: float = 0.0
    cpu: float = 0.0
    digest: str = ""              # of the whole stdout
    stdout: str = ""              # its beginning
    stderr: str = ""
    peak: int = 0                 # bytes of anonymous memory
    peak_upper_bound: int = 0
    samples: list = field(default_factory=list)   # [milliseconds, bytes]
    hang: str = ""                # what every process was doing when time was up

    def same_result(self, other: "Outcome") -> bool:
        return (self.status, self.digest) == (other.status, other.digest)


class Job:
    """One program (and all that it starts), with its output in files."""

    def __init__(self, argv, directory: Path, *, uzswap=None, env=None, stdin=subprocess.DEVNULL, **popen):
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.uzswap = str(uzswap) if uzswap else None
        self.files = [directory / f".{self.mark[-12:]}.{name}" for name in ("out", "err")]
        # Pages are checked against a checksum whenever they come back; a test that measures speed passes "0".
        environment = {"UZSWAP_VERIFY": "1", **os.environ, "LC_ALL": "C", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2", **(env or {})}
        environment.update([self.mark.split("=")])
        self.started = time.monotonic()
        out, err = (open(path, "wb") for path in self.files)
        with out, err:
            self.process = subprocess.Popen(
                [str(part) for part in argv], cwd=directory, env=environment, stdin=stdin,
                stdout=out, stderr=err, start_new_session=True, **popen)
        self.members, self.strangers = {self.process.pid}, set()
        self.outcome = Outcome()
        self.exact_not_before = 0.0

    def pids(self) -> set[int]:
        """Every live process of the job: a descendant when first seen, or bearing its marker."""
        alive = set(processes())
        self.members &= alive
        self.strangers &= alive
        for pid in sorted(alive - self.members - self.strangers):
            fields = stat_fields(pid)
            if not fields:
                continue
            ours = int(fields[1]) in self.members or self.is_marked(pid)
            (self.members if ours else self.strangers).add(pid)
        return self.members

    def is_marked(self, pid: int) -> bool:
        return self.mark.encode() in read(f"/proc/{pid}/environ")

    def survivors(self) -> list[int]:
        """The processes that bear the marker and are not dead (a zombie has no environment)."""
        return [pid for pid in processes() if self.is_marked(pid)]

    def of_uzswap(self, pid: int) -> bool:
        return self.uzswap is not None and link(f"/proc/{pid}/exe") == self.uzswap

    def manager(self) -> int | None:
        return next((pid for pid in self.pids() if comm(pid) == "uzswap-manager"), None)

    def sample(self) -> None:
        """Adds up the anonymous memory of the job's programs, each address space once."""
        spaces, bound = [], 0
        for pid in self.pids():
            size = anonymous_upper_bound(pid)
            if size and not self.of_uzswap(pid) and not any(same_memory(pid, other) for other in spaces):
                spaces.append(pid)
                bound += size
        outcome, now, total = self.outcome, time.monotonic(), bound
        outcome.peak_upper_bound = max(outcome.peak_upper_bound, bound)
        if bound > outcome.peak and len(spaces) > 1:
            # Only forks make the bound differ. The exact figure takes at most a third of the time.
            if now < self.exact_not_before:
                return
            total = sum(map(anonymous_exact, spaces))
            taken = time.monotonic() - now
            self.exact_not_before = now + 3 * taken
        outcome.peak = max(outcome.peak, total)
        outcome.samples.append([round(1000 * (now - self.started)), total])

    def wait(self, timeout: float, sample: bool = False) -> Outcome:
        """Waits for the program that was started, and ends whatever is left when time is up."""
        if self.process.returncode is not None:
            return self.finish()
        deadline = self.started + timeout
        watch = os.pidfd_open(self.process.pid)
        try:
            while True:
                left = max(0, deadline - time.monotonic())
                if select.select([watch], [], [], min(left, SAMPLE_SECONDS) if sample else left)[0]:
                    break
                if not left:
                    self.outcome.hang = self.what_they_do()
                    break
                self.sample()
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(watch)
        if self.outcome.hang:
            self.kill()
        return self.finish()

    def end_within(self, seconds: float) -> Outcome:
        """As `wait`, counted from now."""
        return self.wait(time.monotonic() - self.started + seconds)

    def finish(self) -> Outcome:
        """Reaps the program and collects what it said."""
        outcome = self.outcome
        if self.process.returncode is None:
            _, status, usage = os.wait4(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(status)
            outcome.cpu = usage.ru_utime + usage.ru_stime
        outcome.seconds = time.monotonic() - self.started
        code = self.process.returncode
        outcome.status = code if code >= 0 else 128 - code
        return self.collect()

    def collect(self) -> Outcome:
        """Reads the output files and removes them."""
        outcome, (out, err) = self.outcome, self.files
        digest = hashlib.sha256()
        with open(out, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                outcome.stdout = outcome.stdout or block[:4096].decode(errors="replace")
                digest.update(block)
        outcome.digest = digest.hexdigest()
        outcome.stderr = read(err)[-65536:].decode(errors="replace")
        for path in self.files:
            path.unlink()
        return outcome

    def kill(self) -> None:
        """Kills every process of the job, until none is left."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            pids = {*self.survivors(), *(self.pids() if self.process.returncode is None else ())}
            pids = [pid for pid in pids if (stat_fields(pid) or [b"Z"])[0] not in (b"Z", b"X")]
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)

    def gone_within(self, seconds: float) -> bool:
        """Waits until no process bears the marker; kills what is left when time is up."""
        end = time.monotonic() + seconds
        while self.survivors():
            if time.monotonic() > end:
                self.outcome.hang = self.what_they_do()
                self.kill()
                return False
            time.sleep(0.02)
        return True

    def what_they_do(self) -> str:
        """Where each task of the job sits: the report on a hang."""
        lines = []
        for pid in sorted({*self.pids(), *self.survivors()}):
            lines.append(f"process {pid} {comm(pid)}: {read(f'/proc/{pid}/cmdline')[:200]!r}")
            wanted = (b"State", b"PPid", b"Threads", b"RssAnon", b"SigBlk", b"VmSwap")
            lines += [f"    {line.decode()}" for line in read(f"/proc/{pid}/status").splitlines()
                      if line.startswith(wanted)]
            for task in sorted(os.listdir(f"/proc/{pid}/task")) if os.path.isdir(f"/proc/{pid}/task") else ():
                at = f"/proc/{pid}/task/{task}"
                frames = b" < ".join(line.split()[-1] for line in read(f"{at}/stack").splitlines()[:8])
                lines.append(f"    task {task} {read(f'{at}/comm').decode().strip()}"
                             f" wchan {read(f'{at}/wchan').decode()} syscall {read(f'{at}/syscall').decode().strip()}"
                             f" stack {frames.decode()}")
        return "\n".join(lines)


def run(argv, directory: Path, *, timeout: float, sample: bool = False, **options) -> Outcome:
    """Runs one job to its end."""
    return Job(argv, directory, **options).wait(timeout, sample)

#!/usr/bin/env python3
"""Runs known stress programs and test suites natively, then at a quarter of their memory under uzswap, and prints a table.

Needs (Debian 12): apt-get install --no-install-recommends stress-ng bubblewrap redis-server redis-tools libpython3.11-testsuite
A row is `same` if exit status and the list of passed tests are those of the native run. "Never at its limit": the native peak is
below the smallest limit, so that the row shows start, fork and exec under uzswap, and no eviction. Not part of `make test`.
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import harness  # noqa: E402

MIB = 1 << 20
SMALLEST_LIMIT = 16 * MIB
PYTHON = "/usr/bin/python3.11"


@dataclass
class Suite:
    name: str
    package: str
    argv: list[str]
    what: str
    passed: str = ""            # a pattern of what says that one test has passed; without it the status alone counts
    seconds: float = 120


def stress(stressor: str, *options: str) -> Suite:
    argv = ["stress-ng", "--" + stressor, "2", "--verify", "--timeout", "4s", "--no-rand-seed", "--metrics-brief", *options]
    return Suite(f"stress-ng {stressor}", "stress-ng", argv, " ".join(argv[1:5] + list(options)))


def python(module: str) -> Suite:
    # Output of tests that run at the same time is not in order: the list is sorted.
    return Suite(f"CPython {module}", "libpython3.11-testsuite", [PYTHON, "-m", "test", "-v", module], module,
                 r"^(test_\w+ \([\w.]+\))[^\n]* \.\.\. ok$", 300)


REDIS = """
set -e
redis-server --port 0 --unixsocket $PWD/s --save '' --enable-debug-command yes --daemonize no >/dev/null & server=$!
for i in $(seq 100); do redis-cli -s $PWD/s ping >/dev/null 2>&1 && break; sleep 0.1; done
redis-cli -s $PWD/s debug populate 300000 key 120
redis-cli -s $PWD/s debug populate 2000 large 8192
redis-benchmark -s $PWD/s -q -n 20000 -c 8 -t get,lrange_100 >/dev/null
redis-cli -s $PWD/s debug digest
redis-cli -s $PWD/s config set dir $PWD
redis-cli -s $PWD/s bgsave >/dev/null
while redis-cli -s $PWD/s info persistence | grep -q bgsave_in_progress:1; do sleep 0.1; done
redis-cli -s $PWD/s debug reload
redis-cli -s $PWD/s debug digest
redis-cli -s $PWD/s shutdown nosave || true
wait $server
"""

BWRAP = ["bwrap", "--unshare-pid", "--unshare-net", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
         PYTHON, "-c", "d=[bytes([i%251])*997 for i in range(90000)]; import os; p=os.fork();"
         "ok=all(x==bytes([i%251])*997 for i,x in enumerate(d)); print(ok, flush=True);"
         "os._exit(not ok) if p==0 else os.waitpid(p,0)"]

# Left out are stressors that exhaust what a whole machine has (forkheavy, vforkmany, zombie, resources): other work on it fails.
SUITES = [
    stress("vm", "--vm-bytes", "96M", "--vm-method", "all"),
    stress("vm", "--vm-bytes", "96M", "--vm-populate", "--vm-method", "rowhammer"),
    stress("vm-addr"), stress("vm-rw", "--vm-rw-bytes", "32M"), stress("vm-segv"), stress("vm-splice"),
    stress("mmap", "--mmap-bytes", "64M"), stress("mmapfork"), stress("mmapmany"), stress("mmapfixed"),
    stress("mmaphuge"), stress("mremap", "--mremap-bytes", "32M"), stress("madvise"), stress("brk"), stress("malloc", "--malloc-bytes", "32M"), stress("stack"), stress("stackmmap"),
    stress("memthrash"), stress("memrate", "--memrate-bytes", "32M"), stress("mprotect"), stress("msync"), stress("mincore"),
    stress("mlock"), stress("munmap"), stress("pageswap"), stress("remap"), stress("fork"), stress("vfork"),
    stress("clone"), stress("exec"), stress("daemon"), stress("spawn"), stress("wait"),
    stress("bad-altstack"), stress("sigsegv"), stress("sigaltstack"), stress("userfaultfd"), stress("unshare"), stress("nanosleep"),
    stress("pthread"), stress("tlb-shootdown"), stress("ptrace"), stress("kcmp"), stress("futex"),
    stress("prctl"), stress("matrix-3d"), stress("judy"), stress("tree"), stress("qsort"), stress("context"),
    *map(python, ["test_mmap", "test_multiprocessing_fork", "test_subprocess", "test_threading", "test_gc", "test_fork1",
                  "test_faulthandler", "test_posix", "test_array", "test_dict", "test_wait4", "test_ctypes"]),
    Suite("redis data", "redis-server", ["sh", "-c", REDIS], "300,000 keys, benchmark, BGSAVE, reload, digests",
          r"^([0-9a-f]{40})$", 120),
    Suite("bubblewrap", "bubblewrap", BWRAP, "a forking Python in pid and net namespaces", r"^(True)$", 60),
]


def run(suite: Suite, uzswap: Path | None, limit: int) -> tuple[harness.Outcome, list[str]]:
    directory = Path(tempfile.mkdtemp(prefix="compat-", dir="/var/tmp"))
    argv = [str(uzswap), "run", "--memory-max", str(limit), "--quiet", "--", *suite.argv] if uzswap else suite.argv
    job = harness.Job(argv, directory, uzswap=uzswap)
    text = []
    collect = job.collect
    job.collect = lambda: (text.append("".join(harness.read(file).decode(errors="replace") for file in job.files)), collect())[1]
    try:
        outcome = job.wait(suite.seconds * (3 if uzswap else 1), sample=True)
        if not job.gone_within(5):
            outcome.hang = outcome.hang or "processes were left behind"
    finally:
        job.kill()
        shutil.rmtree(directory, ignore_errors=True)
    outcome.stdout = text[0]
    return outcome, sorted(re.findall(suite.passed, text[0], re.MULTILINE)) if suite.passed else []


def compare(suite: Suite, uzswap: Path) -> tuple[list[str], str]:
    """A row of the table, and what to look at if it is not `same`."""
    native, passed = run(suite, None, 0)
    limit = max(SMALLEST_LIMIT, native.peak // 4)
    ours, also = run(suite, uzswap, limit)
    if ours.hang:
        result = "HANG"
    elif native.status != ours.status:
        result = f"status {native.status} → {ours.status}"
    elif passed != also:
        result = f"{len(passed)} → {len(also)} passed"
    else:
        result = f"same ({len(passed)} passed)" if suite.passed else f"same (status {ours.status})"
        if native.peak <= limit:
            result += ", never at its limit"
    detail = ""
    if not result.startswith("same"):
        lost = sorted(set(passed) - set(also))[:20]
        detail = "\n".join([*lost, ours.hang[:1500], *ours.stdout.splitlines()[-15:]])
    return [suite.name, suite.what, f"{native.peak / MIB:.0f}", f"{limit / MIB:.0f}", result], detail


def version(package: str) -> str:
    found = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True, check=False)
    return found.stdout if found.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="WORD", help="run the suites whose names contain one of these")
    parser.add_argument("--uzswap", default="target/release/uzswap")
    options = parser.parse_args()
    uzswap = Path(options.uzswap).resolve()
    chosen = [suite for suite in SUITES if not options.only or any(word in suite.name for word in options.only)]
    versions = {suite.package: version(suite.package) for suite in chosen}
    missing = [package for package, found in versions.items() if not found]
    if missing:
        sys.exit(f"compatibility.py: not installed: {' '.join(missing)}")
    print("| suite | version | what was run | peak, MiB | limit, MiB | result |\n|---|---|---|---|---|---|", flush=True)
    different = 0
    for suite in chosen:
        row, detail = compare(suite, uzswap)
        print("| " + " | ".join([row[0], versions[suite.package], *row[1:]]) + " |", flush=True)
        if detail:
            different += 1
            print(f"--- {suite.name}\n{detail}\n---", file=sys.stderr, flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C")
    sys.exit(main())

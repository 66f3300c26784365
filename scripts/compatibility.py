#!/usr/bin/env python3
"""Runs stress programs, test suites, languages and servers natively, then at a quarter of their memory under uzswap, and prints a table.

Needs (Debian 12): apt-get install --no-install-recommends stress-ng bubblewrap redis-server redis-tools libpython3.11-testsuite, and the
packages of the languages and servers; the script names those that are missing. It needs root, to run Chromium as the user nobody and
PostgreSQL as the user postgres.

Suites that Debian has in source packages only, and the Linux Test Project, are run if --sources names a directory where
scripts/compatibility-sources.sh has built them.

A row is `same` if exit status and the list of passed tests, or the lines on standard output, are those of the native run. "Never at its limit": the native peak is
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
    source: str = ""            # the directory below --sources where it runs
    unit: str = "passed"        # what the pattern finds
    files: Path | None = None   # a directory whose files are copied to where it runs


def stress(stressor: str, *options: str) -> Suite:
    argv = ["stress-ng", "--" + stressor, "2", "--verify", "--timeout", "4s", "--no-rand-seed", "--metrics-brief", *options]
    return Suite(f"stress-ng {stressor}", "stress-ng", argv, " ".join(argv[1:5] + list(options)))


def python(module: str) -> Suite:
    # Output of tests that run at the same time is not in order: the list is sorted.
    return Suite(f"CPython {module}", "libpython3.11-testsuite", [PYTHON, "-m", "test", "-v", module], module,
                 r"^(test_\w+ \([\w.]+\))[^\n]* \.\.\. ok$", 300)


PROGRAMS = Path(__file__).resolve().parent / "runtimes"


def program(name: str, package: str, file: str, command: str, user: str = "") -> Suite:
    """A program of scripts/runtimes by a command of the shell, in which `@` stands for the file."""
    lines = (line.strip("/(*;%#-) ") for line in (PROGRAMS / file).read_text().splitlines())
    what = next(line for line in lines if line.endswith(".")).rstrip(".")
    if user:
        command = f"exec setpriv --reuid {user} --regid $(id -g {user}) --clear-groups {command}"
    return Suite(name, package, ["sh", "-c", command.replace("@", file)], what, r"^(?!uzswap: )(.+)$", 200, unit="lines", files=PROGRAMS)


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
         "ok=all(x==bytes([i%251])*997 for i,x in enumerate(d)); os.write(1, b'%r\\n' % ok);"
         "os._exit(not ok) if p==0 else os.waitpid(p,0)"]

REDIS_SUITE = ["tclsh", "tests/test_helper.tcl", "--clients", "2", "--tags", "-needs:debug -large-memory -slow",
               *(word for unit in ("unit/keyspace", "unit/dump", "unit/scan", "unit/sort", "unit/multi", "unit/bitops", "unit/type/list", "unit/type/set",
                                   "unit/type/zset", "unit/type/hash", "unit/type/stream", "unit/type/string", "unit/expire", "unit/hyperloglog",
                                   "unit/geo", "integration/rdb", "integration/aof") for word in ("--single", unit))]

SQLITE_FILES = """select1 select2 select3 select4 insert insert2 update delete delete2 where where2 where7 join join2 index index3 trans trans2 savepoint2
vacuum vacuum2 bigrow blob fts3aa fts3ab fts3rnd malloc malloc3 memdb memsubsys1 mmap1 mmap2 pager1 rollback speed1 sort sort2 sort4 temptable
thread1 thread2 trigger2 view wal wal2 walthread window1 with1 without_rowid1 json101 rtree corrupt corrupt2"""

SQLITE_SUITE = f"""
for t in {SQLITE_FILES.replace(chr(10), " ")}; do
    [ -e test/$t.test ] || continue
    ./testfixture test/$t.test 2>&1 | sed "s/^/$t:/"
done
"""

JEMALLOC_SUITE = """
for t in test/unit/* test/integration/*; do
    case $t in *.*) continue;; esac
    [ -x $t ] && [ -f $t ] || continue
    (export MALLOC_CONF=; [ -e $t.sh ] && . ./$t.sh 2>/dev/null; timeout 100 $t 2>&1 | sed "s|^|$t: |")
done
"""

# Left out are programs that exhaust or set what the whole machine has: mallocstress, mem02, min_free_kbytes, swapping01.
LTP = """mmap01 mmap02 mmap03 mmap04 mmap05 mmap06 mmap08 mmap09 mmap10 mmap12 mmap13 mmap14 mmap15 mmap16 mmap17 mmap18 mmap19 mmap20 munmap01 munmap03
mremap01 mremap02 mremap03 mremap04 mremap05 mremap06 mremap07 mprotect01 mprotect02 mprotect03 mprotect04 mprotect05 mincore01 mincore02 mincore03
mincore04 mlock01 mlock02 mlock03 mlock04 mlock05 madvise01 madvise02 madvise03 madvise05 madvise07 madvise08 madvise09 madvise10 madvise11 brk01
brk02 fork01 fork03 fork04 fork05 fork07 fork08 fork09 fork10 fork13 fork14 clone01 clone02 clone03 clone04 clone05 clone06 clone07 clone08 clone09
vfork01 vfork02 msync01 msync02 msync03 msync04 userfaultfd01 userfaultfd02 userfaultfd03 userfaultfd04 userfaultfd05 remap_file_pages01
remap_file_pages02 mmapstress01 mmapstress02 mmapstress03 mmapstress04 mmapstress05 mmapstress06 mmapstress07 mmapstress08 mmapstress09 mmapstress10
mmap1 mmap2 mmap3 mmap-corruption01 mtest01 page01 page02 data_space stack_space vma01 vma02 vma03 vma04 vma05_vdso thp01 thp02 thp03 thp04 ksm01
ksm03 ksm05 shmt02 shmt09"""

GLIBC_SUITE = """
for t in $(ls malloc/tst-*.out 2>/dev/null | sed 's/.out$//'); do
    [ -x $t ] || continue
    timeout 100 elf/ld-linux-x86-64.so.2 --library-path .:math:elf:dlfcn:nss:nis:rt:resolv:mathvec:support:crypt:nptl $t >/dev/null 2>&1; echo "$t $?"
done
"""

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
    Suite("Redis", "", REDIS_SUITE, "its own suite, 17 units", r"\[(?:\x1b\[[\d;]*m)?ok(?:\x1b\[[\d;]*m)?\]: (.*?)(?: \(\d+ ms\))?$", 600, "redis-src"),
    Suite("SQLite", "", ["sh", "-c", SQLITE_SUITE], f"{len(SQLITE_FILES.split())} files of its suite", r"^(\S+)\.\.\. Ok$", 600, "sqlite3-src"),
    Suite("jemalloc", "", ["sh", "-c", JEMALLOC_SUITE], "unit and integration tests", r"^(\S+: \S+ \([\w-]+\)): pass$", 400, "jemalloc-src"),
    Suite("glibc malloc", "", ["sh", "-c", GLIBC_SUITE], "malloc/tst-*", r"^(\S+ 0)$", 900, "glibc-build"),
    program("SBCL", "sbcl", "heap.lisp", "sbcl --dynamic-space-size 2GB --script @"),
    program("CLISP", "clisp", "heap.lisp", "clisp -q @"),
    program("Erlang", "erlang-base", "heap.erl", "erlc @ && erl -noshell -s heap main"),
    program("PHP", "php-cli", "heap.php", "php @"),
    program("Ruby", "ruby", "heap.rb", "ruby @"),
    program("LuaJIT", "luajit", "heap.lua", "luajit @"),
    program("OCaml", "ocaml-nox", "heap.ml", "ocamlopt @ -o heap && ./heap"),
    program("Guile", "guile-3.0", "heap.scm", "guile --no-auto-compile @"),
    program("Racket", "racket", "heap.rkt", "racket @"),
    program("PyPy", "pypy3", "heap.py", "pypy3 @"),
    program("CPython, jemalloc", "libjemalloc2", "heap.py",
            f"MALLOC_CONF=background_thread:true,dirty_decay_ms:10,thp:always LD_PRELOAD=libjemalloc.so.2:$LD_PRELOAD {PYTHON} @"),
    program("CPython, tcmalloc", "libtcmalloc-minimal4", "heap.py", f"LD_PRELOAD=libtcmalloc_minimal.so.4:$LD_PRELOAD {PYTHON} @"),
    program("R", "r-base-core", "heap.R", "Rscript --vanilla @"),
    program("Octave", "octave", "heap.m", "octave-cli --no-init-file @"),
    program("Go with cgo", "golang-go", "heap.go", "GOCACHE=$PWD/cache go build -o heap @ && ./heap"),
    program("GHC", "ghc", "heap.hs", "ghc -O1 -threaded -rtsopts @ -o heap >/dev/null; for o in -N2 '-N2 -xn' -c; do ./heap +RTS $o; done"),
    program("Mono", "mono-mcs", "heap.cs", "mcs -out:heap.exe @ && mono heap.exe"),
    program("SWI-Prolog", "swi-prolog-core", "heap.pl", "swipl @"),
    program("Emacs", "emacs-nox", "heap.el", "emacs --batch -l @"),
    program("TinyCC", "tcc", "heap.c", "tcc -run @"),
    program("PostgreSQL", "postgresql", "postgres.sh", "sh @", "postgres"),
    program("MariaDB", "mariadb-server", "mariadb.sh", "sh @"),
    program("LibreOffice", "libreoffice-calc-nogui", "office.sh", "sh @"),
    program("Chromium", "chromium", "chromium.sh", "sh @ file://$PWD/page.html", "nobody"),
    *(Suite(f"LTP {name}", "", ["timeout", "100", f"bin/{name}"], name, seconds=110, source="ltp-src") for name in LTP.split()),
]


def run(suite: Suite, sources: Path | None, uzswap: Path | None, limit: int) -> tuple[harness.Outcome, list[str]]:
    temporary = Path(tempfile.mkdtemp(prefix="compat-", dir="/var/tmp"))
    temporary.chmod(0o755)
    directory = sources / suite.source if sources and suite.source else temporary
    if suite.files:
        shutil.copytree(suite.files, temporary, dirs_exist_ok=True)
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
        shutil.rmtree(temporary, ignore_errors=True)
    outcome.stdout = text[0]
    return outcome, sorted(re.findall(suite.passed, text[0], re.MULTILINE)) if suite.passed else []


def compare(suite: Suite, sources: Path | None, uzswap: Path) -> tuple[list[str], str]:
    """A row of the table, and what to look at if it is not `same`."""
    native, passed = run(suite, sources, None, 0)
    limit = max(SMALLEST_LIMIT, native.peak // 4)
    ours, also = run(suite, sources, uzswap, limit)
    if ours.hang:
        result = "HANG"
    elif native.status != ours.status:
        result = f"status {native.status} → {ours.status}"
    elif passed != also:
        result = f"{len(passed)} → {len(also)} {suite.unit}"
    else:
        result = f"same ({len(passed)} {suite.unit})" if suite.passed else f"same (status {ours.status})"
        if native.peak <= limit:
            result += ", never at its limit"
    detail = ""
    if not result.startswith("same"):
        lost = sorted(set(passed) - set(also))[:20]
        detail = "\n".join([*lost, ours.hang[:1500], *ours.stdout.splitlines()[-15:]])
    return [suite.name, suite.what, f"{native.peak / MIB:.0f}", f"{limit / MIB:.0f}", result], detail


def version(suite: Suite, sources: Path | None) -> str:
    """What is installed, or was built from; empty if there is nothing."""
    if suite.source:
        built = sources / suite.source / "VERSION-BUILT" if sources else Path("/nonexistent")
        return built.read_text().strip() if built.exists() else ""
    package = suite.package
    found = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True, check=False)
    return found.stdout if found.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="WORD", help="run the suites whose names contain one of these")
    parser.add_argument("--uzswap", default="target/release/uzswap")
    parser.add_argument("--sources", type=Path, help="where scripts/compatibility-sources.sh has built")
    options = parser.parse_args()
    uzswap = Path(options.uzswap).resolve()
    chosen = [suite for suite in SUITES if not options.only or any(word in suite.name for word in options.only)]
    sources = options.sources and options.sources.resolve()
    chosen = [suite for suite in chosen if sources or not suite.source]
    versions = {suite.package or suite.source: version(suite, sources) for suite in chosen}
    missing = [package for package, found in versions.items() if not found]
    if missing:
        sys.exit(f"compatibility.py: not installed: {' '.join(missing)}")
    print("| suite | version | what was run | peak, MiB | limit, MiB | result |\n|---|---|---|---|---|---|", flush=True)
    different = 0
    for suite in chosen:
        row, detail = compare(suite, sources, uzswap)
        print("| " + " | ".join([row[0], versions[suite.package or suite.source], *row[1:]]) + " |", flush=True)
        if detail:
            different += 1
            print(f"--- {suite.name}\n{detail}\n---", file=sys.stderr, flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C")
    sys.exit(main())

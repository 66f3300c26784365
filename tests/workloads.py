"""Real programs inside a limit: each runs natively, then under uzswap at a part of its natural peak, and must say the
same. Natural and limited peaks are sampled from outside."""
from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import harness
from suite import MIB, PROGRAMS, Context, Result, Test, complaint, counter, need, TESTS

OVERSHOOT_ALLOWED = 0.10
SMALLEST_LIMIT = 16 * MIB
HEADER = ("program", "natural", "limit", "peak", "over", "native", "uzswap", "zswpout", "zswpin", "written")
TABLE = "{:<16}{:>9}{:>9}{:>9}{:>8}{:>9}{:>9}{:>10}{:>10}{:>10}  {}"


@dataclass
class Workload:
    name: str
    prepare: Callable[[Context, Path], list]     # fills a fresh directory and gives the command to run in it
    seconds: float = 120                         # time budget of one run; ten times as much with --full
    parts: tuple = (2, 4)                        # limits, as parts of the natural peak
    quick_parts: tuple | None = None             # the same with --quick, where a quarter of little is too little to tell
    needs: tuple = ()
    # Copying after a fork goes on at the speed of memory, unseen by a user-space manager until it looks: no ordinary pace.
    ordinary_pace: bool = True


def heap_python(context, directory):
    return ["python3", PROGRAMS / "heap.py", context.size(50, 500)]


def compile_sources(context, directory):
    units, instances = context.size((2, 1), (8, 8))
    rule = ("unit%.o: {source}\n\tg++ -std=c++20 -O2 -DUNIT=$* -DINSTANCES={instances} -c -o $@ $<\n"
            .format(source=PROGRAMS / "heavy.cpp", instances=instances))
    objects = " ".join(f"unit{number}.o" for number in range(1, units + 1))
    (directory / "Makefile").write_text(f"all: {objects}\n\tsha256sum {objects}\n{rule}")
    return ["make", "-s", "--no-print-directory", "-j4"]


def database(context, directory):
    # About 240 bytes a row with its two indexes.
    rows = context.size(60, 500) * MIB // 240
    (directory / "script.sql").write_text(f"""
        CREATE TABLE item(id INTEGER PRIMARY KEY, owner INTEGER, price REAL, name TEXT, note TEXT);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
            INSERT INTO item SELECT i, (i * 7919) % 5003, ((i * 104729) % 99991) / 7.0,
                printf('item %08x', (i * 2654435761) % 4294967296), printf('%.60c%d', 'n', i * i) FROM n;
        CREATE INDEX by_owner ON item(owner);
        CREATE INDEX by_name ON item(name);
        CREATE TABLE owner(id INTEGER PRIMARY KEY, region TEXT);
        INSERT INTO owner SELECT DISTINCT owner, 'region ' || (owner % 17) FROM item;
        SELECT count(*), total(price), max(name), sum(length(note)) FROM item;
        SELECT region, count(*), round(avg(price), 3), min(name) FROM item JOIN owner ON owner.id = item.owner
            GROUP BY region ORDER BY region;
        UPDATE item SET note = name || note WHERE owner % 10 = 3;
        DELETE FROM item WHERE owner % 10 = 4;
        SELECT owner, count(*) c, sum(id) FROM item GROUP BY owner ORDER BY c DESC, owner LIMIT 50;
        SELECT id, name FROM item ORDER BY name LIMIT 50 OFFSET {rows // 3};
        SELECT count(*) FROM item a JOIN item b ON b.name = a.name WHERE a.id % 100 = 1;
        PRAGMA integrity_check;
    """)
    return ["sqlite3", "-batch", ":memory:", ".read script.sql"]


def redis(context, directory):
    return ["python3", PROGRAMS / "redis_client.py", context.size(32, 500)]


def heap_node(context, directory):
    return ["node", "--max-old-space-size=4096", PROGRAMS / "heap.js", context.size(50, 400)]


def heap_java(context, directory):
    size = context.size(50, 400)
    build = context.root / "java"
    if not build.exists():
        subprocess.run(["javac", "-d", build, PROGRAMS / "Heap.java"], check=True, timeout=120)
    return ["java", f"-Xms{size // 2}m", f"-Xmx{size * 5 // 2}m", "-cp", build, "Heap", size]


def text_file(path: Path, size: int, seed: int) -> Path:
    """Lines of words behind a random key: sorts in no order, compresses like prose. Made once."""
    if not path.exists():
        rng = random.Random(seed)
        words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(800)]
        phrases = [" ".join(rng.choices(words, k=10)).encode() for _ in range(5000)]
        with open(path, "wb") as file:
            while file.tell() < size:
                file.writelines(b"%08x %s\n" % (rng.getrandbits(32), rng.choice(phrases)) for _ in range(10000))
    return path


def compress(context, directory):
    # It is the memory that matters: about eleven times the block for each thread, while time goes with the file.
    block = context.size(2, 24) * MIB
    file = text_file(context.root / "to-compress", 2 * block, 1)
    return ["sh", "-c", f"xz -9 -T2 --block-size={block} -c {file} > packed.xz && sha256sum packed.xz && "
                        f"xz -dc packed.xz | cmp - {file}"]


def sort_file(context, directory):
    file = text_file(context.root / "to-sort", context.size(40, 500) * MIB, 2)
    return ["sort", "-S", "2G", "--parallel=2", "-T", directory, file]


def shadow(context, directory):
    size, seconds = context.size((128, 6), (512, 60))
    return [context.program("shadow"), size, seconds, 20231107]


def program(name, quick, full, *arguments):
    """A C program by name whose first argument is how many MiB it takes."""
    return lambda context, directory: [context.program(name), context.size(quick, full), *arguments]


WORKLOADS = [
    Workload("python", heap_python, quick_parts=(2,)),
    Workload("compile", compile_sources, seconds=180, needs=("make", "g++")),
    Workload("sqlite", database, needs=("sqlite3",)),
    Workload("redis", redis, ordinary_pace=False, seconds=180, needs=("redis-server",)),
    Workload("node", heap_node, needs=("node",)),
    Workload("java", heap_java, quick_parts=(2,), needs=("java", "javac")),
    # At a quarter, nearly every step of the match finder's walk through its trees is a fault: it takes a hundred times as long.
    Workload("xz", compress, quick_parts=(2,), seconds=300, needs=("xz",)),
    Workload("sort", sort_file, quick_parts=(2,)),
    Workload("shadow", shadow, ordinary_pace=False),
    Workload("trim", program("trim", 256, 512, 60), quick_parts=()),
    Workload("grow", program("grow", 128, 1024, 100)),
    Workload("grow-random", program("grow", 96, 512, 100, "random"), parts=(2,)),
    Workload("closer", program("closer", 64, 256), parts=(2,), ordinary_pace=False),
    Workload("sigblock", program("sigblock", 64, 256), parts=(2,)),
    Workload("cutshort", program("cutshort", 64, 256), parts=(2,)),
    Workload("smallstack", program("smallstack", 64, 256), parts=(2,)),
    Workload("setuid", program("setuid", 64, 256), parts=(2,)),
    Workload("execchain", program("execchain", 64, 256), parts=(2,)),
    Workload("forktree", program("forktree", 32, 128), parts=(2,), ordinary_pace=False),
    Workload("daemonize", lambda context, directory: ["sh", "-c", f"{context.program('daemonize')} 64 | cat"], parts=(2,)),
]


def mebibytes(count) -> str:
    return f"{count / MIB:.1f}M"


def compare(context: Context, workload: Workload, seconds: float, native, part: int) -> Result:
    """One run under uzswap at the natural peak divided by `part`, beside the native run."""
    limit = max(native.peak // part, SMALLEST_LIMIT) & -4096
    directory = context.directory()
    stats = directory / "stats.json"
    argv = workload.prepare(context, directory)
    ours = context.run(argv, "--memory-max", limit, "--stats", stats, "--quiet", directory=directory, timeout=seconds,
                       sample=True)
    text = stats.read_bytes() if stats.exists() else b""
    counters = {name: counter(text, name) for name in ("zswpout", "zswpin", "zswpwb", "written_back_pages")}
    written = counters["zswpwb"] if counters["zswpwb"] is not None else counters["written_back_pages"]
    overshoot = ours.peak / limit - 1
    problems = []
    if ours.hang:
        problems.append(f"hangs or left something behind:\n{ours.hang}")
    if not ours.same_result(native):
        problems.append(f"not the native result: {complaint(ours)}; native: {complaint(native)}")
    if context.uzswap and workload.ordinary_pace and overshoot > OVERSHOOT_ALLOWED:
        problems.append(f"peak {overshoot:.0%} above the limit")
    if context.uzswap and counters["zswpout"] == 0:
        problems.append("nothing was swapped out")
    shown = ["-" if number is None else str(number) for number in (counters["zswpout"], counters["zswpin"], written)]
    columns = (f"{workload.name}/{part}", mebibytes(native.peak), mebibytes(limit), mebibytes(ours.peak),
               f"{overshoot:+.0%}" if context.uzswap else "-", f"{native.seconds:.2f}s", f"{ours.seconds:.2f}s", *shown)
    raw = {"natural_peak": native.peak, "limit": limit, "peak": ours.peak, "peak_upper_bound": ours.peak_upper_bound,
           "native_seconds": native.seconds, "seconds": ours.seconds, "counters": counters,
           "native_samples": native.samples, "samples": ours.samples}
    return Result(f"{workload.name}/{part}", not problems, "\n".join(problems), columns, raw)


def as_test(workload: Workload):
    def function(context: Context, test: Test):
        need(*workload.needs)
        seconds = workload.seconds * context.size(1, 10)
        directory = context.directory()
        native = harness.run(workload.prepare(context, directory), directory, timeout=seconds, sample=True)
        if native.hang or native.status:
            yield Result(workload.name, False, f"fails natively: {complaint(native)}\n{native.hang}")
            return
        quick_parts = workload.parts if workload.quick_parts is None else workload.quick_parts
        for part in context.size(quick_parts, workload.parts):
            yield compare(context, workload, seconds, native, part)
    return Test(workload.name, workload.seconds, function, needs_uzswap=False, quick=workload.quick_parts != ())


TESTS += [as_test(workload) for workload in WORKLOADS]

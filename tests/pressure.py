"""What leaves the pool without any limit: under pressure from outside, and on request. And whose pages those may be."""
from __future__ import annotations

import subprocess
import sys

from behaviour import MemoryCgroup, check, unless, wait_until
from control import Grouped
from suite import MIB, Context, complaint, need_root, test

# Reads a file again and again in a memory cgroup that is too small for it: the kernel reclaims and waits all the time.
THRASH = """
import os, sys
path, procs, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(procs, "w") as file:
    file.write(str(os.getpid()))
with open(path, "wb") as file:
    for _ in range(size >> 20):
        file.write(os.urandom(1 << 20))
    os.fsync(file.fileno())
while True:
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass
"""


def stored(job: Grouped, *groups: str) -> list[str]:
    """Starts a program in each group, and reclaims most of its memory; complaints, if not all is in the pool."""
    problems = []
    for group in groups:
        _, said = job.start(group, 24)
        answer = job.ask("reclaim", group, "16M")
        in_pool, written = (job.count(f"cgroup/{group}/memory.stat", key) for key in ("zswapped", "zswpwb"))
        problems.append(unless(said == "True" and answer.returncode == 0 and in_pool > 8 * MIB and written == 0,
                               f"{group}: {said}, {answer.stderr}, {in_pool} bytes in the pool, {written} pages written"))
    return problems


@test("pressure-shrinker", 120)
def pressure_shrinker(context: Context, test):
    """Pressure from outside writes back the cold pages of the groups that allow it, and of no other."""
    need_root()
    groups = {"cold": "", "low": "memory.low=64M", "min": "memory.min=64M", "kept": "memory.zswap.writeback=0",
              "own": "memory.zswap.shrinker.enabled=0", "own/below": ""}
    job = Grouped(context, "--swap-size", "512M")
    problems = []
    for group, rule in groups.items():
        job.ask("mkdir", group)
        if rule:
            name, value = rule.split("=")
            answer = job.ask("set", f"cgroup/{group}/{name}", value)
            problems.append(unless(answer.returncode == 0, answer.stderr))
    inside = [group for group in groups if group != "own"]
    yield check("pressure-shrinker: pages of each group are in the pool", *problems, *stored(job, *inside))
    written = lambda group: job.count(f"cgroup/{group}/memory.stat", "zswpwb")
    with MemoryCgroup(8 * MIB) as cgroup:
        argv = [sys.executable, "-c", THRASH, context.directory() / "data", f"{cgroup.path}/cgroup.procs", str(48 * MIB)]
        thrashes = subprocess.Popen([str(part) for part in argv])
        try:
            came = wait_until(lambda: written("cold") > 500, test.seconds / 2)
            # The kernel tells every two seconds: those that are spared are spared each time.
            wait_until(lambda: written("low"), 5)
        finally:
            thrashes.kill()
            thrashes.wait()
    pages = {group: written(group) for group in inside}
    yield check("pressure-shrinker: cold pages are written back", unless(came, f"{pages}"))
    for group in inside[1:]:
        yield check(f"pressure-shrinker: {group} ({groups[group] or 'below one that has opted out'}) is spared", unless(pages[group] == 0, f"{pages}"))
    answer = job.ask("set", "cgroup/own/below/memory.reclaim", "2M source=zswap")
    yield check("pressure-shrinker: without the shrinker, but not without writeback",
                unless(answer.returncode == 0 and written("own/below") > 0, f"{answer.stderr} {written('own/below')} pages"))
    outcome = job.end(test.seconds)
    yield check("pressure-shrinker: all of it is whole", unless(outcome.status == 0 and outcome.stdout.splitlines()[-len(inside):] == ["0"] * len(inside),
                                                                complaint(outcome)))


@test("reclaim-zswap", 60)
def reclaim_from_the_pool(context: Context, test):
    """memory.reclaim with source=zswap writes back what is compressed, and takes nothing else."""
    job = Grouped(context, "--swap-size", "512M")
    for group in ("a", "a/low", "a/free"):
        job.ask("mkdir", group)
    job.ask("set", "cgroup/a/low/memory.min", "64M")
    yield check("reclaim-zswap: pages are in the pool", *stored(job, "a/free", "a/low"))
    count = lambda group, key: job.count(f"cgroup/{group}/memory.stat", key)
    before = {key: count("a/free", key) for key in ("pgsteal", "zswap", "anon", "zswpwb")}
    answer = job.ask("set", "cgroup/a/memory.reclaim", "1M source=zswap")
    after = {key: count("a/free", key) for key in before}
    yield check("reclaim-zswap: of the pool alone", unless(answer.returncode == 0, answer.stderr),
                unless(after["zswpwb"] > 0 and after["zswap"] < before["zswap"] - MIB // 2, f"{before} {after}"),
                unless(after["pgsteal"] == before["pgsteal"] and after["anon"] >= before["anon"] - MIB, f"{before} {after}"),
                unless(count("a/low", "zswpwb") == 0, "a protected group was taken from"))
    answer = job.ask("set", "cgroup/a/memory.reclaim", "1G source=zswap")
    yield check("reclaim-zswap: more than there is", unless("temporarily unavailable" in answer.stderr, f"{answer}"),
                unless(count("a/low", "zswpwb") == 0, "a protected group was taken from"))
    for value in ("1M source=swap", "1M source=zswap swappiness=60", "source=zswap", "1M zswap"):
        answer = job.ask("set", "cgroup/a/memory.reclaim", value)
        yield check(f"reclaim-zswap: {value!r} is refused", unless("Invalid argument" in answer.stderr, f"{answer}"))
    outcome = job.end(test.seconds)
    yield check("reclaim-zswap: all of it is whole", unless(outcome.status == 0 and outcome.stdout.splitlines()[-2:] == ["0", "0"], complaint(outcome)))

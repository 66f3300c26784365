"""Limits of groups from the first touch on, and of memory that was there before a limit came near."""
from __future__ import annotations

import json

from behaviour import check, unless, wait_until
from control import Manager
from controlfs import need_fuse
from limits import allowed
from suite import MIB, Context, complaint, test


@test("first-touch", 60)
def first_touch(context: Context, test):
    """A process that comes to be in a small group of a large job is held to the group's limit from its first page on, and is within
    it when the write to cgroup.procs returns."""
    need_fuse()
    program, size, limit = context.program("firsttouch"), 32, 8
    for how in ("enter", "moved", "forked", "late"):
        best = None
        # The best of three runs: others may have had the machine.
        for _ in range(3):
            outcome = context.run([program, how, size, limit], "--memory-max", "3G", "--control-fs", "--quiet", timeout=test.seconds)
            words = outcome.stdout.split()
            if outcome.status or len(words) != 3:
                yield check(f"first-touch: {how}", complaint(outcome))
                return
            seen = tuple(map(int, words))
            best = min(best or seen, seen)
            if best[0] <= allowed(limit * MIB):
                break
        over, stored, status = best
        good = over <= allowed(limit * MIB) and stored * 4096 >= (size - 2 * limit) * MIB and status == 0
        yield check(f"first-touch: {how}: {over / MIB:+.1f} MiB at worst",
                    unless(good, f"{allowed(limit * MIB) / MIB:.1f} MiB are allowed; zswpout {stored}, status {status}"))


SPLINTERS = """
import mmap, os, sys, time
directory, pages = sys.argv[1], int(sys.argv[2]) * 256
memory = mmap.mmap(-1, pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
# Each second page has an advice of its own, so that each page is a mapping of its own.
for page in range(0, pages, 2):
    memory.madvise(mmap.MADV_RANDOM, page * 4096, 4096)
content = lambda page: page.to_bytes(8, "little") * 64
for page in range(pages):
    memory[page * 4096:page * 4096 + 512] = content(page)
open(directory + "/filled", "w").close()
while not os.path.exists(directory + "/go-on"):
    time.sleep(0.01)
print(sum(memory[page * 4096:page * 4096 + 512] != content(page) for page in range(pages)))
"""


@test("small-mappings", 60)
def small_mappings(context: Context, test):
    """What many small mappings had before the limit came near is evicted when it does."""
    size, limit = 12, 9
    job = Manager(context)
    directory = context.directory()
    job.job = context.start(["python3", "-c", SPLINTERS, directory, size], "--memory-max", "1G", "--quiet", "--control", job.socket)
    filled = wait_until((directory / "filled").exists, 20)

    def current() -> int:
        text = job.get("cgroup/memory.current")
        return int(text) if text.strip().isdigit() else 0       # the job has ended

    before = current()
    answer = job.ask("set", "cgroup/memory.max", f"{limit}M")
    held = wait_until(lambda: 0 < current() <= limit * MIB + allowed(limit * MIB), 10)
    after = current()
    (directory / "go-on").touch()
    outcome = job.job.wait(test.seconds)
    yield check(f"small-mappings: {before / MIB:.1f} MiB, then {after / MIB:.1f}", unless(filled, "it does not fill its memory"),
                unless(before > (limit + 3) * MIB, "the limit is above what it has"), unless(answer.returncode == 0, answer.stderr),
                unless(held, f"not within the limit of {limit} MiB"))
    yield check("small-mappings: all of it is whole", unless(outcome.status == 0 and outcome.stdout == "0\n", complaint(outcome)), outcome.hang)


@test("main-thread-ends", 60)
def main_thread_ends(context: Context, test):
    """A program whose main thread has ended is held to its limit all the same, and is whole."""
    size, limit, rounds = 64, 24, 4
    stats = context.directory() / "stats.json"
    outcome = context.run([context.program("mainexit"), size], "--memory-max", f"{limit}M", "--stats", stats, "--quiet", timeout=test.seconds)
    yield check("main-thread-ends: all of it is whole", unless(outcome.stdout == "mainexit: verified\n", complaint(outcome)), outcome.hang)
    stored = json.loads(stats.read_text())["zswpout"]
    # Each round goes through all of the memory, of which the limit has room for a part.
    least = rounds * (size - limit) * MIB // 4096 // 2
    yield check(f"main-thread-ends: {stored} pages stored", unless(stored >= least, f"{least} at least are wanted"))

"""What a fault brings back, and when a program is taken under management."""
from __future__ import annotations

import json

from behaviour import check, unless
from suite import MIB, Context, complaint, test

PAGES = 64 * MIB // 4096


def page_out(context: Context, test, *options) -> tuple:
    """The outcome of a program that reads in order what it has paged out, and the job's counters."""
    stats = context.directory() / "stats.json"
    outcome = context.run([context.program("pageout"), PAGES * 4096], "--quiet", "--memory-max", "1G", "--stats", stats, *options,
                          timeout=test.seconds)
    return outcome, json.loads(stats.read_text())


@test("swapin", 60)
def swapin(context: Context, test):
    """By each rule a program finds its pages; the faults that it takes for them are what the rule says."""
    for rule, least, most in (("never", PAGES * 99 // 100, PAGES), ("always", 1, PAGES // 100), ("adaptive", 1, PAGES // 100)):
        outcome, stats = page_out(context, test, "--swapin", rule)
        faults, ahead = stats["pgmajfault"], stats["readahead"]
        yield check(f"swapin: {rule}", unless(outcome.status == 0, complaint(outcome)),
                    unless(least <= faults <= most, f"{faults} faults for {PAGES} pages"),
                    unless(faults + ahead >= PAGES * 99 // 100, f"{faults} pages for faults, {ahead} ahead"))


@test("swapin-sizes", 60)
def sizes(context: Context, test):
    """No folio of a size that is disabled is brought; what is brought is counted by its size."""
    script = """
        for size in 32 64 128 256 512 1024 2048; do $0 set hugepages-${size}kB/swapin_enabled 0 || exit 3; done
        for size in 16 64; do $0 get hugepages-${size}kB/swapin_enabled; done
        $1 $2 || exit 4
        for size in 16 64; do $0 get hugepages-${size}kB/stats/zswpin; done
    """
    directory = context.directory()
    outcome = context.run(["sh", "-c", script, context.uzswap, context.program("pageout"), PAGES * 4096], "--quiet", "--memory-max",
                          "1G", "--control", directory / "socket", timeout=test.seconds)
    numbers = [int(word) for word in outcome.stdout.split() if word.isdigit()]
    problem = f"the numbers are {numbers}; {complaint(outcome)}"
    good = outcome.status == 0 and len(numbers) == 5 and numbers[:2] == [1, 0] and numbers[4] == 0
    yield check("swapin-sizes", unless(good and PAGES // 5 <= numbers[3] <= PAGES // 4, problem))


@test("huge-pages", 60)
def huge_pages(context: Context, test):
    """What was a huge page when it was paged out is one again soon after it has come back."""
    stats = context.directory() / "stats.json"
    outcome = context.run([context.program("hugeback")], "--quiet", "--memory-max", "1G", "--stats", stats, timeout=test.seconds)
    before, after, last = [int(word) for word in outcome.stdout.split()] or [0, 0, 0]
    made = json.loads(stats.read_text())["thp_collapse_alloc"]
    yield check("huge-pages", unless(outcome.status == 0, complaint(outcome)),
                unless(before == last == 32 > after, f"{before} before, {after} right after, {last} in the end"),
                unless(made >= before - after, f"{made} were made"))


@test("latecomers", 60)
def latecomers(context: Context, test):
    """Far from all limits a program begins before it is managed; it is soon, unless it has ended or executed another."""
    script = """
        sleep 2 & first=$!
        sh -c 'exec sh -c "exec sleep 2"' & second=$!
        sh -c 'sleep 2; true' & third=$!
        i=0; while [ $i -lt 50 ]; do /bin/true; i=$((i+1)); done
        sleep 0.5
        echo $first $second $third
        $0 get cgroup/cgroup.procs
        wait
    """
    socket = context.directory() / "socket"
    outcome = context.run(["sh", "-c", script, context.uzswap], "--quiet", "--memory-max", "8G", "--control", socket,
                          timeout=test.seconds)
    first, *rest = outcome.stdout.splitlines() or [""]
    wanted, found = first.split(), rest
    missing = [pid for pid in wanted if found.count(pid) != 1]
    # The shell, the three, what the third has forked, and who asks.
    yield check("latecomers", unless(outcome.status == 0, complaint(outcome)),
                unless(len(wanted) == 3 and not missing, f"not there once: {missing} of {found}"),
                unless(5 <= len(found) <= 6, f"{len(found)} processes"), unless(not outcome.stderr, outcome.stderr))

"""Limits of groups from the first touch on."""
from __future__ import annotations

from behaviour import check, unless
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

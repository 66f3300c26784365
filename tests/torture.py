"""Rounds of `uzswap lab torture`: one fixed seed, which every machine repeats, and one of the clock's, which is printed."""
from __future__ import annotations

import time

import harness
from suite import Context, Result, need, test

# Two minutes together.
MINUTES = 1
# What a round that does not end in time may take on top: the torture reports it itself.
REPORT = 150


@test("torture", 60 * MINUTES + REPORT, quick=False)
def torture(context: Context, test):
    """Never a wrong byte, a hang, a panic or anything left, whatever programs do and whatever is killed."""
    need("cc")
    for what, seed in (("fixed seed", 1), ("another seed", int(time.time()))):
        argv = [context.uzswap, "lab", "torture", "--minutes", MINUTES, "--seed", seed]
        job = harness.Job(argv, context.directory(), uzswap=context.uzswap)
        context.jobs.append(job)
        outcome = job.wait(test.seconds)
        rounds = outcome.stdout.count("\nok ") + outcome.stdout.startswith("ok ")
        failed = outcome.status != 0 or rounds == 0 or outcome.hang
        words = f"{outcome.stdout[-400:]}\n{outcome.stderr}\n{outcome.hang}" if failed else f"{rounds} rounds"
        yield Result(f"torture: {what} {seed}", not failed, words)

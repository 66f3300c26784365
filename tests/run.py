#!/usr/bin/env python3
"""End-to-end tests of uzswap: real programs inside a memory limit, and what uzswap does when things go wrong.

Each line is one check; the last line is `N passed, N failed`. The exit status is 0 if none failed.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
from pathlib import Path

import suite
import workloads
import behaviour        # noqa: F401 (registers its tests)
import control          # noqa: F401
import limits           # noqa: F401
import limits2          # noqa: F401
import controlfs        # noqa: F401
import daemon           # noqa: F401
import debuggers        # noqa: F401
import failures         # noqa: F401
import hostile          # noqa: F401
import attack           # noqa: F401
import clients          # noqa: F401
import folios           # noqa: F401
import holders          # noqa: F401
import pressure         # noqa: F401
import words            # noqa: F401
import trust            # noqa: F401
import users            # noqa: F401
import layout           # noqa: F401
import torture          # noqa: F401
import tracers          # noqa: F401
import containers       # noqa: F401


# Tests that run at the same time, of those that may: most of their time they wait.
AT_ONCE = 4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="NAME", help="tests to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the tests")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes: about six minutes (default)")
    sizes.add_argument("--full", action="store_true", help="sizes of 500 MB and more")
    parser.add_argument("--uzswap", metavar="PATH", default="target/release/uzswap",
                        help="the binary to test (default: %(default)s); none: run everything natively")
    parser.add_argument("--json", metavar="FILE", help="write results and raw samples there")
    options = parser.parse_args()
    unknown = set(options.tests) - {test.name for test in suite.TESTS}
    if unknown:
        parser.error(f"no such test: {', '.join(sorted(unknown))}")
    return options


def uzswap_binary(name: str) -> Path | None:
    if name == "none":
        return None
    path = Path(name).resolve()
    if not path.exists():
        sys.exit(f"run.py: {path} does not exist: build it, or pass --uzswap PATH")
    return path


def show(result: suite.Result, seconds: float) -> None:
    word = "ok" if result.ok else "FAIL"
    if result.columns:
        print(workloads.TABLE.format(*result.columns, word), flush=True)
        if result.detail:
            print(f"    {result.detail}", flush=True)
        return
    detail = f": {result.detail}" if result.detail else ""
    print(f"{word:<5}{result.name} ({seconds:.1f}s){detail}", flush=True)


def run_beside(context: suite.Context, selected) -> list[suite.Result]:
    """Runs tests a few at a time, those that may take longest first: this process and children of it take one after the other."""
    selected = sorted(selected, key=lambda test: -test.seconds)
    fork, taken = multiprocessing.get_context("fork"), multiprocessing.Value("i", 0)

    def untaken():
        while True:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(selected):
                return
            yield selected[number]

    def other(pipe):
        own = suite.Context(context.uzswap, context.full)
        try:
            pipe.send(run_tests(own, untaken()))
        finally:
            own.close()

    others = []
    for _ in range(min(AT_ONCE, len(selected)) - 1):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        others.append((fork.Process(target=other, args=[theirs]), ours))
        others[-1][0].start()
        theirs.close()
    try:
        results = run_tests(context, untaken())
        for _, pipe in others:
            try:
                results += pipe.recv()
            except EOFError:
                results.append(suite.Result("one of several at a time", False, "ended early"))
        for process, _ in others:       # it removes its temporary directory
            process.join(30)
        return results
    finally:
        for process, _ in others:
            process.terminate()
            process.join()


def run_tests(context: suite.Context, selected) -> list[suite.Result]:
    """Runs each test and prints its results as they come."""
    results, in_table = [], False
    for test in selected:
        if test.needs_uzswap and not context.uzswap:
            continue
        start = time.monotonic()
        try:
            for result in test.function(context, test):
                if result.columns and not in_table:
                    print(workloads.TABLE.format(*workloads.HEADER, ""))
                in_table = bool(result.columns)
                show(result, time.monotonic() - start)
                results.append(result)
                start = time.monotonic()
        except suite.Skip as reason:
            print(f"skip {test.name}: {reason}", flush=True)
        except Exception as error:      # a broken test fails, and the others still run
            results.append(suite.Result(test.name, False, f"{type(error).__name__}: {error}"))
            show(results[-1], time.monotonic() - start)
        finally:
            context.end_jobs()
    return results


def main() -> int:
    options = arguments()
    if options.list:
        print("\n".join(test.name for test in suite.TESTS))
        return 0
    selected = [test for test in suite.TESTS
                if test.name in options.tests or not options.tests and (options.full or test.quick)]
    # Ends like Ctrl-C: the running job is killed, and the temporary directory removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run.py: terminated"))
    # In the background of a script these are ignored, and so they would be by the programs that are to die of them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    context = suite.Context(uzswap_binary(options.uzswap), options.full)
    try:
        alone = [test for test in selected if not test.beside]
        results = run_beside(context, [test for test in selected if test.beside]) + run_tests(context, alone)
    finally:
        context.close()
    if options.json:
        Path(options.json).write_text(json.dumps([vars(result) for result in results], indent=1) + "\n")
    failed = sum(not result.ok for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What uzswap says: that it names the cause, that it cannot be made to say what is not so, and that nothing is ignored in silence."""
from __future__ import annotations

import os
import shutil

import harness
from behaviour import check, unless, wait_until
from control import Controlled
from suite import MIB, Context, complaint, counter, need_root, test

TIGHT = ("--memory-max", "24M", "--quiet")


@test("oom-causes", 120, beside=True)
def causes(context: Context, test):
    """The last line before the end names what stood in the way, and what to change."""
    grow = [context.program("grow"), 256, 0, "random"]
    cases = {"no swap file": (["--no-swap"], ("there is no swap file", "--no-swap", "--memory-max")),
             "full swap file": (["--swap-size", "16M"], ("the swap file is full", "raise --swap-size")),
             "full disk": ([], ("the swap file cannot be written: Input/output error", "--swap-file"))}
    for what, (options, wanted) in cases.items():
        # Every write fails, half of them for want of space.
        env = {"UZSWAP_SWAP_FAULTS": "1:0:1000"} if what == "full disk" else {}
        outcome = context.run(grow, *TIGHT, *options, timeout=test.seconds, env=env)
        said = [line for line in outcome.stderr.splitlines() if "out of memory" in line]
        if env:
            wanted = ("the swap file", "--swap-file") if "disk of the swap file is full" in outcome.stderr else wanted
        yield check(f"oom-causes: {what}", unless(outcome.status == 137 and len(said) == 1, complaint(outcome)),
                    unless(said and all(word in said[0] for word in wanted), f"{said}"))
    job = Controlled(context)
    pid = job.get("cgroup/cgroup.procs").strip()
    job.ask("mkdir", "g")
    for path, value in (("memory.zswap.writeback", "0"), ("memory.zswap.max", "1M"), ("memory.max", "16M"), ("cgroup.procs", pid)):
        job.ask("set", f"cgroup/g/{path}", value)
    try:
        job.job.process.stdin.write(b"40\n")
        job.job.process.stdin.flush()
    except OSError:
        pass
    outcome = job.job.wait(test.seconds)
    said = [line for line in outcome.stderr.splitlines() if "out of memory" in line]
    yield check("oom-causes: a group without writeback", unless(len(said) == 1, complaint(outcome)),
                unless(said and all(word in said[0] for word in ("memory.zswap.writeback of group /g is 0", "allow writeback", "memory.max of group /g")), f"{said}"))


@test("swap-faults", 120, beside=True)
def faults(context: Context, test):
    """A swap file whose reads fail gives SIGBUS, or an error of the system call; one whose writes fail is left alone; never other bytes."""
    shadow = [context.program("shadow"), 128, context.size(4, 20), 1]
    outcome = context.run(shadow, "--memory-max", "32M", "--quiet", "--max-pool", "2M", timeout=test.seconds, env={"UZSWAP_SWAP_FAULTS": "1:0:200"})
    yield check("swap-faults: every fifth write fails", unless(outcome.status == 0, complaint(outcome)),
                unless("fail on purpose (UZSWAP_SWAP_FAULTS)" in outcome.stderr, f"nothing was said: {outcome.stderr[:300]!r}"))
    # The kernel may be the one that wants the page, for a system call, which fails then: the next run is to end by SIGBUS.
    for seed in range(1, 5):
        outcome = context.run(shadow, "--memory-max", "32M", "--quiet", "--max-pool", "2M", timeout=test.seconds, env={"UZSWAP_SWAP_FAULTS": f"{seed}:20:0"})
        # Whichever process of it comes first: the program itself, or a child whose end it reports.
        wrong = [line for line in outcome.stderr.splitlines() if "MISMATCH" in line and "child ended with status 7" not in line]
        told = "could not be read from the swap file" in outcome.stderr
        if wrong or not told or outcome.status != 2 or ": Bad address" not in outcome.stderr:
            break
    yield check("swap-faults: a read fails", unless(not wrong, complaint(outcome)),
                unless(outcome.status == 135 or "child ended with status 7" in outcome.stderr, f"not the end of SIGBUS: {complaint(outcome)}"),
                unless(told, f"{outcome.stderr[:300]!r}"))
    outcome = context.run(["true"], "--memory-max", "32M", timeout=20, env={"UZSWAP_SWAP_FAULTS": "often"})
    yield check("swap-faults: bad words", unless(outcome.status == 2 and "UZSWAP_SWAP_FAULTS" in outcome.stderr and "SEED:READS:WRITES" in outcome.stderr,
                                                 complaint(outcome)))


@test("forged-lines", 60, beside=True)
def forged_lines(context: Context, test):
    """No name that a program or a user chooses makes a line of its own, or reaches the terminal as an escape sequence."""
    directory = context.directory()
    forged = "x\nuzswap: error: all is lost\x1b[31m\r"
    static = directory / f"static{forged}"
    shutil.copy(context.program("unmanaged", "-static"), static)
    script = directory / f"script{forged}"
    script.write_text(f"#!/nonexistent{forged}\n")
    script.chmod(0o755)
    grow = directory / f"grow{forged}"
    shutil.copy(context.program("grow"), grow)
    limit = ("--memory-max", "64M", "--quiet")
    cases = {"a static program": (limit, [static, "private", 8, 1]), "one that is refused": ((*limit, "--require"), [static, "private", 8, 1]),
             "a program that a program starts": (limit, ["sh", "-c", f'"$0" private 8 2; exit 0', static]),
             "one of these is refused": ((*limit, "--require"), ["sh", "-c", '"$0" private 8 4; exit 0', static]),
             "no such program": (limit, [f"/nonexistent{forged}"]), "a script without an interpreter": (limit, [script]),
             "out of memory": ((*TIGHT, "--no-swap"), [grow, 256, 0, "random"]),
             "a swap file that cannot be": ((*limit, "--swap-file", f"/nonexistent{forged}/s"), ["true"]),
             "a file of counters that cannot be": ((*limit, "--stats", f"/nonexistent{forged}/s"), ["true"]),
             "a control socket that cannot be": ((*limit, "--control", f"/nonexistent{forged}/s"), ["true"]),
             "a flag": ((f"--no-such{forged}",), ["true"])}
    for what, (options, argv) in cases.items():
        outcome = context.run(argv, *options, timeout=30)
        bad = [line for line in outcome.stderr.splitlines() if line.startswith("uzswap: error: all is lost")]
        yield check(f"forged-lines: {what}", unless(not bad and "\x1b" not in outcome.stderr, f"{outcome.stderr!r}"),
                    unless("uzswap: " in outcome.stderr and "all is lost" in outcome.stderr or what == "out of memory", f"it was not named: {outcome.stderr!r}"))
    group = f"g{forged}"
    job = Controlled(context)
    answers = [job.ask("mkdir", group), job.ask("get", f"cgroup/{group}/x"), job.ask("set", f"cgroup/{forged}", "1")]
    said = "".join(answer.stderr for answer in answers)
    job.end(30)
    yield check("forged-lines: names of groups", unless("\nuzswap: error: all is lost" not in said and "\x1b" not in said, f"{said!r}"))


@test("planted-link", 30, beside=True)
def planted_link(context: Context, test):
    """The file of counters is written anew beside its name: what another user has linked there is not followed."""
    need_root()
    directory = context.directory()
    directory.chmod(0o1777)
    precious = directory / "precious"
    precious.write_text("mine")
    stats = directory / "stats.json"
    os.symlink(precious, stats)
    os.lchown(stats, 65534, 65534)
    outcome = context.run([context.program("sleeper"), "2"], "--memory-max", "64M", "--quiet", "--stats", stats, timeout=test.seconds)
    yield check("planted-link: not followed", unless(precious.read_text() == "mine", "the link was followed"),
                unless(outcome.status == 2 or stats.is_file() and not stats.is_symlink() and counter(stats.read_text(), "memory.max") == 64 * MIB, complaint(outcome)))


@test("not-ignored", 60)
def not_ignored(context: Context, test):
    """Misspelt variables and flags are named with what was meant; a limit is refused for the same reason everywhere; so is what cannot help."""
    outcome = context.run(["true"], "--memory-max", "64M", "--quiet", timeout=20, env={"UZSWAP_MEMROY_HIGH": "32M"})
    yield check("not-ignored: a variable", unless(outcome.status == 0 and "UZSWAP_MEMROY_HIGH" in outcome.stderr and "UZSWAP_MEMORY_HIGH?" in outcome.stderr,
                                                  complaint(outcome)))
    outcome = context.run(["true"], "--memroy-max", "64M", timeout=20)
    lines = outcome.stderr.splitlines()
    yield check("not-ignored: a flag, with each tip on a line of its own",
                unless(outcome.status == 2 and lines[0] == "uzswap: error: unexpected argument '--memroy-max' found; see uzswap --help", f"{lines}"),
                unless("uzswap: tip: a similar argument exists: '--memory-max'" in lines and all(line.startswith("uzswap: tip: ") for line in lines[1:]), f"{lines}"))
    outcome = context.run(["true"], "--memory-max", "64M", "--quiet", "--swap-file", f"/dev/shm/uz-tests-{os.getpid()}.swap", timeout=20)
    yield check("not-ignored: a swap file in memory", unless(outcome.status == 0 and "/dev/shm, which is kept in memory" in outcome.stderr, complaint(outcome)))
    job = Controlled(context)
    job.ask("mkdir", "g")
    refused = [job.ask("set", f"cgroup/{path}", "1M") for path in ("memory.max", "memory.high", "g/memory.max", "g/memory.high")]
    kept = [job.get(f"cgroup/{path}") for path in ("memory.max", "g/memory.max")]
    taken = job.ask("set", "cgroup/g/memory.max", "4M")
    job.end(30)
    outcome = context.run(["true"], "--memory-max", "1M", timeout=20)
    yield check("not-ignored: one rule for the smallest limit", *(unless(answer.returncode == 1 and "the least is 4M" in answer.stderr, f"{answer}") for answer in refused),
                unless(kept == [f"{64 * MIB}\n", "max\n"], f"{kept}"), unless(taken.returncode == 0, taken.stderr),
                unless(outcome.status == 2 and "4 MiB" in outcome.stderr, complaint(outcome)))

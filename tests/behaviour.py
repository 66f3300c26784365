"""How a program under uzswap looks from outside: status, streams, signals, terminal, messages, overhead."""
from __future__ import annotations

import ctypes
import hashlib
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time

import harness
from suite import MIB, PROGRAMS, Context, Result, Skip, complaint, counter, need, need_root, test

USUAL = ("--memory-max", "64M", "--quiet")
CODECS = ("lz4", "lzo-rle", "zstd", "deflate")


def check(name: str, *problems) -> Result:
    """A result that is fine if no problem is left; each is a message or something false."""
    real = [problem for problem in problems if problem]
    return Result(name, not real, "; ".join(real))


def unless(condition, message: str):
    return None if condition else message


# --- status and streams --------------------------------------------------------------------------

@test("status", 20, needs_uzswap=False)
def exit_statuses(context: Context, test):
    cases = [(f"exit {status}", ["sh", "-c", f"exit {status}"], status) for status in (0, 1, 3, 255)]
    cases += [(f"killed by {number.name}", ["sh", "-c", f"kill -{number.value} $$"], 128 + number)
              for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT, signal.SIGPIPE)]
    for what, argv, status in cases:
        outcome = context.run(argv, *USUAL, timeout=test.seconds)
        yield check(f"status: {what}", unless(outcome.status == status, f"expected {status}, got {complaint(outcome)}"))


@test("not-found", 20)
def programs_that_do_not_start(context: Context, test):
    directory = context.directory()
    (directory / "plain").write_text("no program\n")
    for what, path, status in (("unknown program", "no-such-program-here", 127),
                               ("unknown path", directory / "absent", 127),
                               ("not executable", directory / "plain", 126), ("a directory", directory, 126)):
        yield one_line_and_nothing_left(context, f"not-found: {what}", ["--memory-max", "64M"], [path], status)


@test("streams", 20, needs_uzswap=False)
def streams(context: Context, test):
    """stdin reaches the program, and stdout and stderr are the program's alone when uzswap is quiet."""
    with open("/dev/urandom", "rb") as random:
        data = random.read(3 * MIB)
    directory = context.directory()
    (directory / "input").write_bytes(data)
    with open(directory / "input", "rb") as stdin:
        outcome = context.run(["sh", "-c", "cat; echo words >&2"], *USUAL, timeout=test.seconds, stdin=stdin)
    expected = hashlib.sha256(data).hexdigest()
    yield check("streams: stdin to stdout", unless(outcome.digest == expected, "stdout differs"), outcome.hang)
    yield check("streams: stderr", unless(outcome.stderr == "words\n", f"stderr is {outcome.stderr!r}"))
    outcome = context.run(["sh", "-c", "exec 3</dev/null; ls /proc/self/fd | tr '\\n' ' '; umask; pwd -P"], *USUAL,
                          timeout=test.seconds, directory=directory)
    native = harness.run(["sh", "-c", "exec 3</dev/null; ls /proc/self/fd | tr '\\n' ' '; umask; pwd -P"], directory,
                         timeout=test.seconds)
    yield check("streams: descriptors, umask, directory",
                unless(outcome.stdout == native.stdout, f"{outcome.stdout!r}, natively {native.stdout!r}"))


@test("summary", 60)
def summary(context: Context, test):
    """One short summary on stderr at the end, and the counters in the file of --stats."""
    stats = context.directory() / "stats.json"
    outcome = context.run([context.program("grow"), 96, 0], "--memory-max", "32M", "--stats", stats, timeout=test.seconds)
    text = harness.read(stats)
    missing = [name for name in ("zswpout", "zswpin") if not counter(text, name)]
    lines = outcome.stderr.splitlines()
    yield check("summary", unless(outcome.status == 0, complaint(outcome)), unless(not missing, f"no counter {missing}"),
                unless(outcome.stdout.startswith("grow: ") and outcome.stdout.count("\n") == 1, "stdout is not the program's"),
                unless(1 <= len(lines) <= 12 and "uzswap" in outcome.stderr, f"stderr: {outcome.stderr[:300]!r}"))


# --- containers ----------------------------------------------------------------------------------

class MemoryCgroup:
    """A memory cgroup of the kernel's with a limit, of whichever version there is."""

    def __init__(self, limit: int):
        mounts = [line.split() for line in harness.read("/proc/self/mounts").decode().splitlines()]
        first = next((fields[1] for fields in mounts if fields[2] == "cgroup" and "memory" in fields[3].split(",")), None)
        second = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
        if not first and "memory" not in harness.read(f"{second}/cgroup.subtree_control").decode().split():
            raise Skip("no memory cgroup can be made")
        self.top = first or second
        self.path = os.path.join(self.top, f"uz-tests-{os.getpid()}")
        self.file, self.events = ("memory.limit_in_bytes", "memory.oom_control") if first else ("memory.max", "memory.events")
        self.limit = limit

    def __enter__(self) -> "MemoryCgroup":
        os.mkdir(self.path)
        with open(f"{self.path}/{self.file}", "w") as file:
            file.write(str(self.limit))
        return self

    def __exit__(self, *_) -> None:
        wait_until(lambda: not harness.read(f"{self.path}/cgroup.procs"), 10)
        os.rmdir(self.path)

    def kills(self) -> int:
        lines = harness.read(f"{self.path}/{self.events}").decode().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@test("container", 90, beside=True)
def container(context: Context, test):
    """As in a container: a memory cgroup of its own, nothing of cgroups that can be written, other processes out of sight."""
    need_root()
    need("unshare")
    with MemoryCgroup(512 * MIB) as cgroup:
        directory = context.directory()
        report = directory / "report"
        # What a job finds out about its limit is what the manager says; then it works on more than the container may have.
        shown = f"{context.uzswap} get cgroup/memory.max; {context.uzswap} get parameters/max_pool_percent; cat /proc/mounts"
        grow = f"{context.program('grow')} 640 0"
        script = f"""
            mount --bind {cgroup.path} {cgroup.top} && mount -o remount,bind,ro {cgroup.top} || exit 90
            mount -t proc proc /proc || exit 91
            ! mkdir {cgroup.top}/of-my-own 2>/dev/null || exit 92
            {context.uzswap} run --memory-max 50% --quiet --control {directory}/s -- sh -c '{shown}' > {report} &&
            {context.uzswap} run --quiet --control {directory}/s -- sh -c '{shown}' >> {report} &&
            {context.uzswap} run --memory-max 50% --max-pool-percent 25 --quiet -- {grow}
        """
        argv = ["sh", "-c", f"echo $$ > {cgroup.path}/cgroup.procs && exec unshare --mount --cgroup --pid --fork sh -c \"$0\"", script]
        outcome = harness.run(argv, directory, uzswap=context.uzswap, timeout=test.seconds)
        said = harness.read(report).decode()
        limits = [int(line) for line in said.splitlines() if line.isdigit()]
        yield check("container: percentages are of the cgroup's limit",
                    unless(limits == [256 * MIB, 20, 448 * MIB, 20], f"{limits}; {complaint(outcome)}"))
        yield check("container: cgroups are read-only", unless(f" {cgroup.top} " in said and " ro," in said, "the mount"))
        yield check("container: 640 MiB in 512 MiB", unless(outcome.status == 0 and outcome.stdout.startswith("grow: "), complaint(outcome)),
                    unless(cgroup.kills() == 0, f"{cgroup.kills()} processes were killed for want of memory"))


# --- programs that cannot be entered -------------------------------------------------------------

@test("static", 30)
def static_program(context: Context, test):
    """It runs unmanaged with one warning; --require refuses it."""
    hello = context.program("hello", "-static")
    outcome = context.run([hello], "--memory-max", "64M", "--quiet", timeout=test.seconds)
    warnings = [line for line in outcome.stderr.splitlines() if "hello" in line]
    yield check("static: runs with one warning", unless((outcome.status, outcome.stdout) == (0, "hello\n"), complaint(outcome)),
                unless(len(warnings) == 1, f"stderr: {outcome.stderr!r}"))
    outcome = context.run([hello], "--memory-max", "64M", "--quiet", "--require", timeout=test.seconds)
    yield check("static: --require refuses", unless(outcome.status == 2, f"status {outcome.status}"),
                unless(not outcome.stdout, "it ran"), unless(len(outcome.stderr.splitlines()) == 1, f"stderr: {outcome.stderr!r}"))


@test("stranger", 30, beside=True)
def stranger(context: Context, test):
    """A program of the job that nothing can be preloaded into: one warning; with --require the job is killed."""
    argv = ["sh", "-c", f"{context.program('hello', '-static')} 6; exit 5"]
    outcome = context.run(argv, "--memory-max", "64M", "--quiet", timeout=test.seconds)
    warnings = [line for line in outcome.stderr.splitlines() if "statically linked" in line]
    yield check("stranger: one warning", unless((outcome.status, outcome.stdout) == (5, "hello\n"), complaint(outcome)),
                unless(len(warnings) == 1, f"stderr: {outcome.stderr!r}"))
    outcome = context.run(argv, "--memory-max", "64M", "--quiet", "--require", timeout=test.seconds)
    yield check("stranger: --require ends the job", unless(outcome.status == 137, f"status {outcome.status}"),
                unless(len(outcome.stderr.splitlines()) == 1, f"stderr: {outcome.stderr!r}"))


CHILDLESS = """
import os, signal, time
heard = []
signal.signal(signal.SIGCHLD, lambda number, frame: heard.append(number))
time.sleep(0.5)
try:
    print("a child", os.waitpid(-1, os.WNOHANG | 0x40000000))
except ChildProcessError:
    print("no child,", len(heard), "signals")
"""


@test("childless", 30)
def childless(context: Context, test):
    """A program has no children that it did not make, and hears of no end of any, whatever it was executed by."""
    for what, argv in (("executed", ["sh", "-c", 'exec python3 -c "$0"', CHILDLESS]),
                       ("forked and executed", ["sh", "-c", 'python3 -c "$0"; true', CHILDLESS])):
        outcome = context.run(argv, "--memory-max", "64M", "--quiet", timeout=test.seconds)
        yield check(f"childless: {what}", unless(outcome.stdout == "no child, 0 signals\n", complaint(outcome)))


# --- signals and the terminal --------------------------------------------------------------------

class Terminal:
    """A pseudo-terminal with one program as the leader of its session."""

    def __init__(self, argv, directory):
        ours, theirs = os.openpty()
        self.master, self.seen = ours, ""
        self.mark = f"{harness.MARK}={os.urandom(8).hex()}"
        environment = {**os.environ, "PS1": "prompt> ", "TERM": "dumb", "LC_ALL": "C"}
        environment.update([self.mark.split("=")])
        take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen([sys.executable, "-c", take, *map(str, argv)], stdin=theirs, stdout=theirs, stderr=theirs,
                                        cwd=directory, env=environment, start_new_session=True)
        os.close(theirs)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str, seconds: float = 10) -> bool:
        """Waits until the pattern has come out, and forgets everything up to it."""
        end = time.monotonic() + seconds
        while True:
            match = re.search(pattern, self.seen)
            if match:
                self.seen = self.seen[match.end():]
                return True
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.master], [], [], left)[0]:
                return False
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:     # the last program has closed the terminal
                return bool(re.search(pattern, self.seen))

    def pids(self, name: str) -> list[int]:
        """The job's processes whose command line holds the name, other than uzswap's own."""
        found = [pid for pid in harness.processes() if self.mark.encode() in harness.read(f"/proc/{pid}/environ")]
        found = [pid for pid in found if harness.read(f"/proc/{pid}/comm") != b"uzswap-agent\n"]
        return [pid for pid in found if harness.read(f"/proc/{pid}/cmdline").startswith(name.encode() + b"\0")]

    def state(self, name: str, wanted: str, seconds: float = 5) -> bool:
        """Whether the program comes to be in one of these states (S, T, R, ...)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            states = [harness.stat_fields(pid)[:1] for pid in self.pids(name)]
            if states and all(state and state[0].decode() in wanted for state in states):
                return True
            time.sleep(0.02)
        return False

    def status(self, seconds: float = 10) -> int:
        """The shell's status of the program, or -1000 if it does not end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -1000
        return code if code >= 0 else 128 - code

    def close(self) -> bool:
        """Ends everything; whether nothing was left to end."""
        left = [pid for pid in harness.processes() if self.mark.encode() in harness.read(f"/proc/{pid}/environ")]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        os.close(self.master)
        return not left


@test("ctrl-c", 30, needs_uzswap=False)
def control_c(context: Context, test):
    """Ctrl-C reaches the program as it would without uzswap: once, and its choice counts."""
    cases = (("dies of it", ["sh", "-c", "echo ready; exec sleep 60"], 130, ""),
             ("catches it", ["sh", "-c", "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.1; done"], 7, "caught"),
             ("ignores it", ["sh", "-c", "trap '' INT; echo ready; sleep 1; echo through"], 0, "through"))
    for what, argv, status, said in cases:
        terminal = Terminal(context.command(argv, *USUAL), context.directory())
        ready = terminal.expect("ready\r\n")
        time.sleep(0.2)
        terminal.send("\x03")
        heard = not said or terminal.expect(said)
        got = terminal.status()
        once = not said or said not in terminal.seen
        clean = terminal.close()
        yield check(f"ctrl-c: {what}", unless(ready, "did not start"), unless(heard and once, f"heard: {terminal.seen!r}"),
                    unless(got == status, f"status {got}, expected {status}"), unless(clean, "processes left"))


@test("terminate", 30)
def terminate(context: Context, test):
    """SIGTERM to uzswap ends the program, and lets it have its say."""
    argv = ["sh", "-c", "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.1; done"]
    for what, argv, status, said in (("caught", argv, 5, "ready\ncaught\n"),
                                     ("not caught", ["sh", "-c", "echo ready; exec sleep 60"], 143, "ready\n")):
        job = context.start(argv, *USUAL)
        wait_until(lambda: harness.read(job.files[0]).startswith(b"ready"), 10)
        time.sleep(0.1)
        os.kill(job.process.pid, signal.SIGTERM)
        outcome = job.wait(test.seconds)
        yield check(f"terminate: {what}", unless((outcome.status, outcome.stdout) == (status, said),
                                                 f"{complaint(outcome)}, stdout {outcome.stdout!r}"),
                    unless(job.gone_within(5), "processes left"))


@test("signals", 30)
def signals(context: Context, test):
    """What is sent to uzswap reaches the program with its value, and what the program sends to its group reaches it once."""
    job = context.start([context.program("signals")], *USUAL)
    wait_until(lambda: harness.read(job.files[0]).startswith(b"ready"), 10)
    queue = ctypes.CDLL(None).sigqueue
    queue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    sent = [(signal.SIGRTMIN, 11), (signal.SIGRTMIN, 12), (signal.SIGRTMAX, 13), (signal.SIGUSR2, 14)]
    sent += [(number, 0) for number in (signal.SIGPROF, signal.SIGVTALRM, signal.SIGIO, signal.SIGPWR, signal.SIGURG, signal.SIGABRT)]
    heard = ["ready", f"{int(signal.SIGUSR1)} 0"]
    for number, value in sent:
        if value:
            queue(job.process.pid, number, value)
        else:
            os.kill(job.process.pid, number)
        heard.append(f"{int(number)} {value}")
        wait_until(lambda: harness.read(job.files[0]).decode().splitlines() == heard, 5)
    os.kill(job.process.pid, signal.SIGTERM)
    outcome = job.wait(test.seconds)
    heard.append(f"{int(signal.SIGTERM)} 0")
    yield check("signals", unless(outcome.status == 0, complaint(outcome)),
                unless(outcome.stdout.splitlines() == heard, f"heard {outcome.stdout.split()}, expected {heard}"))


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@test("job-control", 60, needs_uzswap=False)
def job_control(context: Context, test):
    """Ctrl-Z, fg, bg and Ctrl-C in an interactive bash."""
    need("bash")
    command = " ".join(map(str, context.command(["sleep", "77"], *USUAL)))
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], context.directory())
    terminal.expect("prompt> ")
    problems = []

    def step(what: str, keys: str, pattern: str = "", state: str = "") -> None:
        terminal.send(keys)
        if pattern and not terminal.expect(pattern):
            problems.append(f"{what}: no {pattern!r} in {terminal.seen[-200:]!r}")
        if state and not terminal.state("sleep", state):
            problems.append(f"{what}: sleep is not in state {state}")

    step("start", command + "\n", state="SD")
    time.sleep(0.2)
    step("Ctrl-Z", "\x1a", "Stopped", "T")
    step("prompt", "echo back-$((40+2))\n", "back-42")
    step("fg", "fg\n", state="SD")
    step("Ctrl-Z again", "\x1a", "Stopped", "T")
    step("bg", "bg\n", state="SD")
    step("prompt", "echo back-$((40+3))\n", "back-43")
    step("fg", "fg\n", "sleep 77")
    time.sleep(0.2)
    step("Ctrl-C", "\x03")
    step("status", "echo status-$?\n", "status-130")
    terminal.send("exit\n")
    terminal.status()
    yield check("job-control", *problems, unless(terminal.close(), "processes left"))


# --- bad input -----------------------------------------------------------------------------------

def one_line_and_nothing_left(context: Context, name: str, options, argv, status: int = 2, wanted=()) -> Result:
    """uzswap must refuse with one line, but for tips of the parser, and leave neither files nor processes."""
    before = harness.leftovers()
    outcome = context.run(argv, *options, timeout=20)
    lines = outcome.stderr.splitlines()
    return check(name, unless(outcome.status == status, f"status {outcome.status}, expected {status}"),
                 unless(lines and all(line.startswith("uzswap: tip: ") for line in lines[1:]), f"{len(lines)} lines on stderr: {outcome.stderr[:300]!r}"),
                 unless(not outcome.stdout, "something on stdout"), outcome.hang,
                 unless(all(word in outcome.stderr for word in wanted), f"stderr lacks {wanted}: {outcome.stderr[:300]!r}"),
                 unless(harness.leftovers() <= before, f"left behind: {harness.leftovers() - before}"))


@test("bad-input", 20)
def bad_input(context: Context, test):
    directory = context.directory()
    (directory / "file").write_text("")
    limit = ("--memory-max", "64M")
    sizes = ("0", "-1", "1X", "", "M", "1.5.2G", "99999999T", "18446744073709551616")
    cases = [(f"--memory-max={size!r}", [f"--memory-max={size}"], ()) for size in sizes]
    cases += [(f"--swap-size={size!r}", [*limit, f"--swap-size={size}"], ()) for size in ("0", "-1", "1X", "99999999T")]
    cases += [(f"--max-pool-percent={size!r}", [*limit, f"--max-pool-percent={size}"], ()) for size in ("-1", "101", "x")]
    cases += [
        ("a limit below what can work", ["--memory-max", "4K"], ()),
        ("malformed --memory-high", [*limit, "--memory-high", "1X"], ()),
        ("unknown codec", [*limit, "--compressor", "snappy9"], CODECS),
        ("unknown allocator", [*limit, "--zpool", "z3fold"], ("zsmalloc", "zbud")),
        ("neither yes nor no", [*limit, "--shrinker-enabled", "maybe"], ("maybe",)),
        ("nowhere to go", [*limit, "--enabled", "N", "--no-swap"], ("--enabled", "--no-swap")),
        ("swap file in a missing directory", [*limit, "--swap-file", directory / "absent" / "swap"], ("absent",)),
        ("swap path is a directory", [*limit, "--swap-file", directory], (str(directory),)),
        ("swap path under a file", [*limit, "--swap-file", directory / "file" / "swap"], ()),
        ("swap on /proc", [*limit, "--swap-file", "/proc/uzswap-swap"], ()),
        ("stats in a missing directory", [*limit, "--stats", directory / "absent" / "stats"], ("absent",)),
        ("unknown option", [*limit, "--no-such-option"], ("--no-such-option",)),
    ]
    for what, options, wanted in cases:
        yield one_line_and_nothing_left(context, f"bad-input: {what}", options, ["true"], wanted=wanted)
    job = harness.run([context.uzswap, "run", *limit], directory, timeout=20)
    yield check("bad-input: no program", unless(job.status == 2 and len(job.stderr.splitlines()) == 1, complaint(job)))


# --- cost ----------------------------------------------------------------------------------------

@test("overhead", 300, quick=False)
def overhead(context: Context, test):
    """Far below the limit: paired runs with and without uzswap, in turn."""
    allowed = context.size(1.05, 1.01)
    pairs = context.size(5, 9)
    unit = [PROGRAMS / "heavy.cpp", "-DUNIT=1", f"-DINSTANCES={context.size(1, 4)}"]
    cases = {"compile": ["g++", "-std=c++20", context.size("-O1", "-O2"), "-c", "-o", "/dev/null", *unit],
             "python": ["python3", PROGRAMS / "heap.py", context.size(120, 500)]}
    for name, argv in cases.items():
        times: dict[str, list] = {"native": [], "uzswap": []}
        cpu: dict[str, list] = {"native": [], "uzswap": []}
        bad = []
        for turn in range(pairs + 1):           # the first pair warms the caches and does not count
            native = harness.run(argv, context.directory(), timeout=test.seconds)
            ours = context.run(argv, "--memory-max", "16G", "--quiet", timeout=test.seconds)
            if not ours.same_result(native):
                bad.append(complaint(ours))
            for side, outcome in (("native", native), ("uzswap", ours)):
                if turn:
                    times[side].append(outcome.seconds)
                    cpu[side].append(outcome.cpu)
        ratio = statistics.median(times["uzswap"]) / statistics.median(times["native"])
        cpu_ratio = statistics.median(cpu["uzswap"]) / statistics.median(cpu["native"])
        noise = max(times["native"]) / min(times["native"])
        detail = (f"time ×{ratio:.4f} (at most ×{allowed}), cpu ×{cpu_ratio:.4f}, native runs differ by ×{noise:.2f}, medians of {pairs}: "
                  f"{statistics.median(times['native']):.3f}s native, {statistics.median(times['uzswap']):.3f}s uzswap")
        yield Result(f"overhead: {name}", ratio <= allowed and not bad, "; ".join([detail, *bad]), raw={"seconds": times, "cpu": cpu})


@test("pageout", 120, needs_uzswap=False)
def pageout(context: Context, test):
    """Half compressible pages, paged out by MADV_PAGEOUT and read back in order."""
    size = context.size(256, 1024) * MIB
    outcome = context.run([context.program("pageout"), size], "--memory-max", "16G", timeout=test.seconds)
    figures = dict(re.findall(r"^(\w+) (\d+)$", outcome.stderr, re.MULTILINE))
    left = int(figures.get("resident_after_bytes", size))
    yield Result("pageout", outcome.status == 0 and outcome.stdout == f"{size} bytes verified\n" and len(figures) == 3
                 and (left <= size // 10 or not context.uzswap),
                 f"{figures}" if outcome.status == 0 else complaint(outcome), raw={"figures": figures})


@test("moveover", 60, needs_uzswap=False, beside=True)
def moveover(context: Context, test):
    """Paged-out memory is moved over memory that is just being paged out."""
    outcome = context.run([context.program("moveover"), context.size(5, 30)], "--memory-max", "1G", timeout=test.seconds)
    right = (outcome.status, outcome.stdout) == (0, "every move kept its pages\n")
    yield Result("moveover", right, "" if right else complaint(outcome))


@test("toandfro", 60, needs_uzswap=False, beside=True)
def moves_to_and_fro(context: Context, test):
    """Threads that do nothing but move memory do not keep the manager from anything."""
    argv = [context.program("toandfro"), context.size(16, 64), context.size(2, 20)]
    outcome = context.run(argv, "--memory-max", "1G", timeout=test.seconds)
    right = (outcome.status, outcome.stdout) == (0, "all of it is whole\n")
    yield Result("toandfro", right, "" if right else complaint(outcome))


@test("hugefork", 60, needs_uzswap=False)
def forks_with_huge_pages(context: Context, test):
    """A mapping that begins with a huge page is managed as any other, and forked children have all of it."""
    directory = context.directory()
    outcome = context.run([context.program("hugefork")], "--memory-max", "1G", "--stats", directory / "stats.json",
                          directory=directory, timeout=test.seconds)
    right = (outcome.status, outcome.stdout) == (0, "every child had all of it\n")
    yield Result("hugefork", right, "" if right else complaint(outcome))
    paged_out = counter((directory / "stats.json").read_bytes(), "zswpout")
    yield Result("hugefork: paged out", paged_out >= 512, f"{paged_out} pages, 512 at least are wanted")


@test("moveafterfork", 60, needs_uzswap=False, beside=True)
def moves_after_forks(context: Context, test):
    """A child has what was there at its fork, however soon its parent moves it to where something else was."""
    outcome = context.run([context.program("moveafterfork"), context.size(3, 30)], "--memory-max", "1G", timeout=test.seconds)
    right = (outcome.status, outcome.stdout) == (0, "every child had what was there at its fork\n")
    yield Result("moveafterfork", right, "" if right else complaint(outcome))


# What a program finds of the signals and descriptors that it was started with. Without a standard output it says so on the other.
FINDS = """
grep SigIgn /proc/self/status >&2
for i in 0 1; do [ -e /proc/$$/fd/$i ] || echo $i is closed >&2; done
exit 3
"""

# Asks what a filter of system calls could do, and installs none; then a child holds more than the limit for a while.
ASKS = """
import ctypes, os, time
action = ctypes.c_uint(0x80000000)
assert ctypes.CDLL(None).syscall(317, 2, 0, ctypes.byref(action)) == 0
child = os.fork()
if not child:
    memory = bytearray(os.urandom(48 << 20))
    time.sleep(4)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@test("inherited", 60, beside=True)
def inherited(context: Context, test):
    """A program finds the ignored signals and the closed descriptors that `uzswap run` was started with, which waits for its end all the same."""
    def start():
        for number in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        os.close(0)
        os.close(1)

    def finds(*prefix):
        argv = [*map(str, prefix), "sh", "-c", FINDS]
        done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=20, preexec_fn=start, restore_signals=False)
        return done.returncode, done.stderr
    expected, found = finds(), finds(context.uzswap, "run", "--memory-max", "64M", "--quiet", "--")
    yield check("inherited: signals and descriptors", unless(found == expected and "0 is closed" in found[1], f"{found}, not {expected}"))
    outcome = context.run(["python3", "-c", ASKS], "--memory-max", "32M", "--require", "--quiet", timeout=test.seconds)
    yield check("inherited: asking installs no filter", unless((outcome.status, outcome.stdout) == (0, "0\n"), complaint(outcome)))

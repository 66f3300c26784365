"""The control tree as a file system: what is known of cgroup v2 and of zswap holds for its files, tried with nothing but them."""
from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import harness
from behaviour import check, one_line_and_nothing_left, unless, wait_until
from suite import MIB, Context, Skip, complaint, need_root, test

PAGES_OF_MIB = MIB // 4096

# Seconds until a limit is watched, where none was: a program that lives a few milliseconds within them goes unseen.
SEEN = 0.3


def need_fuse() -> None:
    need_root()
    if not os.path.exists("/dev/fuse"):
        raise Skip("no /dev/fuse")


def mounts() -> list[str]:
    """The mount points of control trees, from first to last."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [fields[1] for fields in lines if fields[2].startswith("fuse.uzswap")]


def helpers(word: str) -> list[int]:
    """The living processes with these words in their command lines."""
    alive = (pid for pid in harness.processes() if (harness.stat_fields(pid) or [b"Z"])[0] not in (b"Z", b"X"))
    return [pid for pid in alive if word.encode() in harness.read(f"/proc/{pid}/cmdline").replace(b"\0", b" ")]


def end_helper(find, number: int) -> None:
    """Sends a signal to a process that is found within a moment."""
    if not wait_until(find, 5):
        raise AssertionError("a process that should be there is not")
    os.kill(find()[0], number)


class Mounted:
    """A job whose program is a shell that starts what it is told, and whose control tree is mounted."""

    def __init__(self, context: Context, *options, memory_max="128M"):
        self.context, directory = context, context.directory()
        self.socket, self.directory, self.counter = str(directory / "socket"), directory, 0
        self.top = directory / "tree"
        self.top.mkdir()
        self.pages = context.program("pages")
        shell = 'while read -r line; do eval "$line"; done; wait'
        self.job = context.start(["sh", "-c", shell], "--memory-max", memory_max, "--quiet", "--control", self.socket, *options,
                                 stdin=subprocess.PIPE)
        wait_until(lambda: os.path.exists(self.socket), 20)
        self.mounted = self.mount()
        # A shell that is managed has begun.
        wait_until(lambda: self.read("cgroup/cgroup.procs"), 20)

    def ask(self, *arguments) -> subprocess.CompletedProcess:
        return subprocess.run([self.context.uzswap, *arguments, "--socket", self.socket], capture_output=True, text=True, timeout=90)

    def mount(self) -> subprocess.CompletedProcess:
        return self.ask("mount", str(self.top))

    def read(self, path: str) -> str:
        return (self.top / path).read_text()

    def number(self, path: str) -> int:
        return int(self.read(path))

    def count(self, group: str, key: str) -> int:
        return int(dict(line.split() for line in self.read(f"cgroup/{group}/memory.stat").splitlines())[key])

    def write(self, path: str, value: str | bytes) -> int:
        """Writes in one piece, as a shell's `>` does; gives the error's number, 0 for none."""
        try:
            file = os.open(self.top / path, os.O_WRONLY | os.O_TRUNC)
        except OSError as error:
            return error.errno
        try:
            value = value if isinstance(value, bytes) else value.encode()
            return 0 if os.write(file, value) == len(value) else errno.EIO
        except OSError as error:
            return error.errno
        finally:
            os.close(file)

    def group(self, name: str, **values) -> str:
        """Makes a group; `zswap_max` stands for memory.zswap.max."""
        (self.top / "cgroup" / name).mkdir()
        for key, value in values.items():
            failed = self.write(f"cgroup/{name}/memory.{key.replace('_', '.')}", f"{value}\n")
            assert not failed, f"{name}: {key}: {os.strerror(failed)}"
        return name

    def start(self, group: str, *arguments) -> Path:
        """Starts a program in a group; gives the file that holds what it says, and `status N` at its end."""
        self.counter += 1
        said = self.directory / f"said{self.counter}"
        program = " ".join(map(str, (self.pages, *arguments)))
        line = f"(echo 0 >{self.top}/cgroup/{group}/cgroup.procs && {program}; echo status $?) >{said} 2>&1 &\n"
        self.job.process.stdin.write(line.encode())
        self.job.process.stdin.flush()
        return said

    def run(self, group: str, *arguments) -> str:
        """Runs a program in a group to its end; gives what it said."""
        said = self.start(group, *arguments)
        wait_until(lambda: b"status" in harness.read(said), 30)
        return harness.read(said).decode()

    def stay(self, group: str, kind: str, mib: int) -> Path:
        """Starts a program that fills memory and stays."""
        said = self.start(group, kind, mib, "stay")
        wait_until(lambda: b"ready" in harness.read(said) or b"status" in harness.read(said), 30)
        return said

    def leave(self, group: str, said: Path) -> str:
        """Ends what stays; gives what it found."""
        for pid in self.read(f"cgroup/{group}/cgroup.procs").split():
            if harness.comm(int(pid)) == "pages":
                os.kill(int(pid), signal.SIGTERM)
        wait_until(lambda: b"status" in harness.read(said), 30)
        return harness.read(said).decode().removeprefix("ready\n")

    def end(self, timeout: float) -> harness.Outcome:
        self.job.process.stdin.close()
        outcome = self.job.wait(timeout)
        if not wait_until(lambda: str(self.top) not in mounts(), 10):
            outcome.hang = "it is still mounted"
        return outcome


WHOLE = "whole\nstatus 0\n"


@test("controlfs", 60)
def controlfs(context: Context, test):
    """The tree looks as the kernel's does, and is read, written, made and removed by ordinary means."""
    need_fuse()
    tree = Mounted(context)
    yield check("controlfs: mount says nothing", unless((tree.mounted.returncode, tree.mounted.stdout, tree.mounted.stderr) == (0, "", ""), f"{tree.mounted}"))
    modes = {"cgroup": 0o40755, "cgroup/memory.stat": 0o100444, "cgroup/memory.max": 0o100644, "cgroup/memory.reclaim": 0o100200,
             "cgroup/cgroup.kill": 0o100200, "parameters/enabled": 0o100644, "debug/stored_pages": 0o100444}
    found = {path: os.stat(tree.top / path) for path in modes}
    yield check("controlfs: modes and owner", *(unless(found[path].st_mode == mode, f"{path}: {found[path].st_mode:o}") for path, mode in modes.items()),
                unless({(entry.st_uid, entry.st_gid) for entry in found.values()} == {(os.geteuid(), os.getegid())}, "another owner"))
    wrong = []
    for path, directories, files in os.walk(tree.top):
        at = os.path.relpath(path, tree.top).removeprefix(".")
        listed = tree.ask("ls", at).stdout.split()
        wrong += [f"{at}: {files}"] * (sorted(files + [f"{name}/" for name in directories]) != sorted(listed))
        for name in files:
            answer, text = tree.ask("get", f"{at}/{name}"), None
            try:
                text = Path(path, name).read_text()
            except OSError as error:
                wrong += [f"{at}/{name}: {error}"] * (os.strerror(error.errno) not in answer.stderr)
            moves = name.startswith(("memory.current", "memory.stat", "memory.numa"))
            wrong += [f"{at}/{name}: {text!r}"] * (text is not None and not moves and text != answer.stdout)
    yield check("controlfs: every file, as uzswap ls and get have it", *wrong)
    with open(tree.top / "cgroup/memory.stat", "rb", buffering=0) as file:
        first = file.read(7)
        tree.run("", "byte", 16)
        pieces = first + b"".join(iter(lambda: file.read(7), b""))
        file.seek(0)
        again = file.read(65536)
    keys = lambda text: [line.split()[0] for line in text.decode().splitlines()]
    yield check("controlfs: a text is whole, however it is read", unless(keys(pieces) == keys(again), f"{pieces!r}"), unless(pieces != again, "it is stale"))

    shell = "set -e; cd cgroup; mkdir a a/b; echo 32M > a/memory.max; cat a/memory.max; echo 0 > a/b/cgroup.procs; cat a/b/cgroup.procs"
    outside = subprocess.run(["sh", "-c", shell], cwd=tree.top, capture_output=True, text=True)
    yield check("controlfs: a shell outside of the job", unless(outside.stdout == f"{32 * MIB}\n", f"{outside}"),
                unless(os.strerror(errno.ESRCH) in outside.stderr or "I/O error" in outside.stderr, outside.stderr))
    said = tree.stay("a/b", "byte", 4)
    inside = [harness.comm(int(pid)) for pid in tree.read("cgroup/a/b/cgroup.procs").split()]
    busy = [code(lambda: os.rmdir(tree.top / "cgroup" / group)) for group in ("a", "a/b")]
    yield check("controlfs: 0 is the writer", unless("pages" in inside, f"{inside}"), unless(busy == [errno.EBUSY] * 2, f"{busy}"))
    text = tree.leave("a/b", said)
    wait_until(lambda: not tree.read("cgroup/a/b/cgroup.procs"), 10)
    gone = [code(lambda: os.rmdir(tree.top / "cgroup" / group)) for group in ("a/b", "a")]
    yield check("controlfs: rmdir", unless(text == WHOLE, text), unless(gone == [0, 0], f"{gone}"), unless(not (tree.top / "cgroup/a").exists(), "it is there"))

    shell = "mkdir x; cd x; rmdir ../x; ls; mkdir y; cat memory.max; mkdir ../x && cat ../x/memory.max; rmdir ../x"
    answer = subprocess.run(["sh", "-c", shell], cwd=tree.top / "cgroup", capture_output=True, text=True)
    yield check("controlfs: a group that is removed and made again", unless((answer.returncode, answer.stdout) == (0, "max\n"), f"{answer}"))

    # Who writes 1 here is killed by it, and does not hold the kill up.
    tree.group("doomed")
    doomed = tree.stay("doomed", "byte", 4)
    started = time.monotonic()
    tree.job.process.stdin.write(f"(echo 0 >{tree.top}/cgroup/doomed/cgroup.procs; echo 1 >{tree.top}/cgroup/doomed/cgroup.kill; sleep 9; touch {tree.directory}/alive) &\n".encode())
    tree.job.process.stdin.flush()
    empty = wait_until(lambda: b"status" in harness.read(doomed) or tree.read("cgroup/doomed/cgroup.procs") == "", 10)
    yield check("controlfs: cgroup.kill from inside", unless(empty, harness.read(doomed).decode()),
                unless(time.monotonic() - started < 3, f"{time.monotonic() - started:.1f} s"), unless(not (tree.directory / "alive").exists(), "it lives"))

    if shutil.which("setpriv"):
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c",
                     "cat cgroup/memory.max; echo 1 > cgroup/memory.max || echo 1 > cgroup/memory.reclaim || mkdir cgroup/mine || echo none"]
        for path in (tree.top.parent, context.root):
            path.chmod(0o755)
        answer = subprocess.run(as_nobody, cwd=tree.top, capture_output=True, text=True)
        yield check("controlfs: others read and do not write", unless(answer.stdout == f"{128 * MIB}\nnone\n", f"{answer}"))
    outcome = tree.end(test.seconds)
    yield check("controlfs: the job is as it was", unless(outcome.status == 0, complaint(outcome)), outcome.hang)


def code(function) -> int:
    """The number of the error that a function ends with."""
    try:
        function()
    except OSError as error:
        return error.errno
    return 0


@test("controlfs-errors", 60, beside=True)
def controlfs_errors(context: Context, test):
    """Bad input has the same errors as through uzswap set."""
    need_fuse()
    tree = Mounted(context)
    tree.group("a")
    cases = [(path, value) for path, values in {
        "cgroup/memory.max": ("", "x", "-1", "1M1", "1 M", "99999999999999999999", "max max"),
        "cgroup/a/memory.zswap.max": ("-1", "all"),
        "cgroup/memory.zswap.writeback": ("2", "yes", "-1"),
        "cgroup/memory.swap.max": ("128M",),
        "cgroup/memory.reclaim": ("1T", "x", "1M swappiness=0", "1M swappiness=201", "1M fast"),
        "cgroup/memory.current": ("1",),
        "cgroup/memory.stat": ("",),
        "cgroup/cgroup.procs": ("-1", "1", "x", "0"),
        "cgroup/cgroup.freeze": ("2", "x"),
        "cgroup/cgroup.kill": ("0", "2", "x"),
        "cgroup/cgroup.subtree_control": ("-memory", "+cpu", "memory"),
        "cgroup/nothing": ("1",),
        "cgroup": ("1",),
        "parameters/enabled": ("maybe",),
        "parameters/max_pool_percent": ("101", "-1", "x"),
        "parameters/zpool": ("z3fold",),
        "parameters/swapin": ("often",),
        "hugepages-64kB/swapin_enabled": ("2", "Y"),
    }.items() for value in values]
    for path, value in cases:
        # An empty write does not reach a file system; an empty line does.
        number, answer = tree.write(path, f"{value}\n"), tree.ask("set", path, value)
        words = "No such choice" if path in ("parameters/zpool", "parameters/swapin") else os.strerror(number)
        yield check(f"controlfs-errors: {value!r} to {path}", unless(number, "no error"), unless(answer.returncode == 1 and words in answer.stderr, f"{os.strerror(number)}, but {answer.stderr}"))
    top = tree.top / "cgroup"

    def at(offset):
        file = os.open(top / "memory.high", os.O_WRONLY)
        try:
            os.pwrite(file, b"1G", offset)
        finally:
            os.close(file)

    for what, number, function in [
        ("a file is made", errno.EPERM, lambda: os.close(os.open(top / "new", os.O_CREAT | os.O_WRONLY))),
        ("a file is removed", errno.EPERM, lambda: os.unlink(top / "memory.max")),
        ("a group is renamed", errno.EPERM, lambda: os.rename(top / "a", top / "b")),
        ("a mode is changed", errno.EPERM, lambda: os.chmod(top / "memory.max", 0o600)),
        ("a symbolic link is made", errno.EPERM, lambda: os.symlink("a", top / "link")),
        ("a name is taken", errno.EEXIST, lambda: os.mkdir(top / "a")),
        ("a file has the name", errno.EEXIST, lambda: os.mkdir(top / "memory.max")),
        ("a group outside of cgroup", errno.EPERM, lambda: os.mkdir(tree.top / "b")),
        ("the root is removed", errno.EBUSY, lambda: os.rmdir(top)),
        ("a directory of files is removed", errno.EPERM, lambda: os.rmdir(tree.top / "debug")),
        ("a name is too long", errno.ENAMETOOLONG, lambda: os.mkdir(top / ("n" * 256))),
        ("a name has a line break", errno.EINVAL, lambda: os.mkdir(top / "a\nb")),
        ("a file is for writing", errno.EACCES, lambda: (top / "memory.reclaim").read_text()),
        ("a write elsewhere than at the beginning", errno.EINVAL, lambda: at(1)),
    ]:
        found = code(function)
        yield check(f"controlfs-errors: {what}", unless(found == number, f"{os.strerror(found)}, not {os.strerror(number)}"))
    long = tree.write("cgroup/memory.max", b"1" * 4097), tree.write("cgroup/memory.max", b"1" * 100_000)
    yield check("controlfs-errors: a value is too long", unless(long == (errno.E2BIG, errno.E2BIG), f"{long}"))
    for path in ("cgroup/memory.max", "parameters/enabled", "cgroup/a/memory.low"):
        odd = tree.write(path, b"\xff\xfe"), tree.write(path, b"\0"), tree.write(path, b"1\0")
        yield check(f"controlfs-errors: bytes to {path}", unless(odd[0] == odd[1] == errno.EINVAL, f"{odd}"))

    # What serves it and the manager part, in all ways that there are.
    file = open(tree.top / "cgroup/memory.max")
    manager = tree.job.manager()
    os.kill(manager, signal.SIGSTOP)
    # Each thread goes on until it hears of it.
    threads = [f"{manager}/task/{thread}" for thread in os.listdir(f"/proc/{manager}/task")]
    stopped = wait_until(lambda: all(harness.stat_fields(thread)[0] == b"T" for thread in threads), 5)
    started = time.monotonic()
    stuck = code(lambda: os.stat(tree.top / "cgroup/memory.max"))
    took = time.monotonic() - started
    os.kill(manager, signal.SIGCONT)
    yield check("controlfs-errors: a manager that does not answer", unless(stopped, "it does not stop"), unless(stuck == errno.EIO and took < 15, f"{os.strerror(stuck)} after {took:.1f} s"),
                unless(wait_until(lambda: code(lambda: tree.read("cgroup/memory.max")) == 0, 5), "and it stays so"))
    os.kill(tree.job.manager(), signal.SIGKILL)
    outcome = tree.job.wait(test.seconds)
    gone = wait_until(lambda: str(tree.top) not in mounts() and not helpers(str(tree.top)), 10)
    last = code(file.read)
    yield check("controlfs-errors: the manager dies", unless(outcome.status == 125, complaint(outcome)), unless(gone, f"{mounts()} {helpers(str(tree.top))}"),
                unless(last in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO), os.strerror(last)))


@test("controlfs-mount", 60)
def controlfs_mount(context: Context, test):
    """However it ends, nothing is left mounted and no process is left."""
    need_fuse()
    tree = Mounted(context)
    top = str(tree.top)
    left = lambda: top in mounts() or helpers(top)
    (tree.directory / "file").touch()
    elsewhere = {key: value for key, value in os.environ.items() if key != "UZSWAP_SOCKET"}
    for what, status, words, *arguments in [
        ("mounted already", 1, "umount", top, "--socket", tree.socket),
        ("no directory", 1, "mkdir", tree.directory / "absent", "--socket", tree.socket),
        ("not a directory", 1, "not a directory", tree.directory / "file", "--socket", tree.socket),
        ("no such socket", 1, "does not exist", tree.directory, "--socket", tree.directory / "absent"),
        ("no socket of a manager", 1, "file", tree.directory, "--socket", tree.directory / "file"),
        ("no socket named", 1, "uzswap.sock: does not exist", tree.directory),
        ("no directory named", 2, "DIR", "--socket", tree.socket),
    ]:
        answer = subprocess.run([context.uzswap, "mount", *arguments], capture_output=True, text=True, timeout=30, env=elsewhere)
        yield check(f"controlfs-mount: {what}", unless((answer.returncode, answer.stderr.count("\n"), answer.stdout) == (status, 1, ""), f"{answer}"),
                    unless(words in answer.stderr, answer.stderr))
    if shutil.which("setpriv"):
        answer = subprocess.run(["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", context.uzswap, "mount", tree.directory, "--socket", tree.socket],
                                capture_output=True, text=True, timeout=30)
        yield check("controlfs-mount: without CAP_SYS_ADMIN", unless(answer.returncode == 1 and "CAP_SYS_ADMIN" in answer.stderr, f"{answer}"),
                    unless(str(tree.directory) not in mounts(), "it is mounted"))
    if shutil.which("unshare"):
        without = f"mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec {context.uzswap} mount {tree.directory} --socket {tree.socket}"
        answer = subprocess.run(["unshare", "--mount", "sh", "-c", without], capture_output=True, text=True, timeout=30)
        yield check("controlfs-mount: without /dev/fuse", unless((answer.returncode, answer.stderr.count("\n")) == (1, 1) and "modprobe fuse" in answer.stderr, f"{answer}"))
    server = lambda: [pid for pid in helpers(top) if harness.comm(pid) == "uzswap-mount"]
    guard = lambda: [pid for pid in helpers(top) if harness.comm(pid) == "uzswap-guard"]
    for what, end in [("umount", lambda: subprocess.run(["umount", top], check=True)),
                      ("umount -l, while somebody is in it", lambda: subprocess.run(["sh", "-c", f"cd {top}/cgroup && umount -l {top}"], check=True)),
                      ("SIGTERM", lambda: end_helper(server, signal.SIGTERM)), ("SIGINT", lambda: end_helper(server, signal.SIGINT)),
                      ("SIGKILL", lambda: end_helper(server, signal.SIGKILL)),
                      ("SIGKILL of the guard", lambda: (end_helper(guard, signal.SIGKILL), end_helper(server, signal.SIGTERM)))]:
        if not left():
            answer = tree.mount()
            yield check(f"controlfs-mount: again, before {what}", unless(answer.returncode == 0, f"{answer}"))
        end()
        yield check(f"controlfs-mount: {what}", unless(wait_until(lambda: not left(), 5), f"{mounts()} {helpers(top)}"))
    command = [context.uzswap, "mount", "--foreground", "--socket", tree.socket, top]
    foreground = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: top in mounts(), 5)

    # What takes long holds nobody up.
    tree.group("big")
    said = tree.stay("big", "random", 64)
    reclaim = [threading.Thread(target=tree.write, args=("cgroup/big/memory.reclaim", "60M")) for _ in range(4)]
    for thread in reclaim:
        thread.start()
    slowest, reads = 0.0, 0
    while any(thread.is_alive() for thread in reclaim) or reads < 50:
        started = time.monotonic()
        tree.read("cgroup/memory.max")
        slowest, reads = max(slowest, time.monotonic() - started), reads + 1
    for thread in reclaim:
        thread.join()
    yield check("controlfs-mount: reads beside memory.reclaim", unless(slowest < 0.5, f"{slowest:.2f} s"), unless(tree.leave("big", said) == WHOLE, "not whole"))
    manager, before = tree.job.manager(), 0
    for round in range(3):
        threads = [threading.Thread(target=lambda: [tree.read("cgroup/memory.stat") for _ in range(50)]) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        descriptors = harness.descriptors(manager)
        before = before or descriptors
    yield check("controlfs-mount: a crowd of readers keeps to a few connections", unless(descriptors <= before + 2, f"{before} descriptors, then {descriptors}"))
    outcome = tree.end(test.seconds)
    out, err = foreground.communicate(timeout=20)
    yield check("controlfs-mount: the job ends", unless(outcome.status == 0, complaint(outcome)), outcome.hang,
                unless((foreground.returncode, out, err.count("\n")) == (0, "", 1) and "has ended" in err, f"{foreground.returncode} {out!r} {err!r}"),
                unless(not left(), "something is left"))


@test("controlfs-zswap", 90)
def controlfs_zswap(context: Context, test):
    """What a kernel with zswap does under these files is done."""
    need_fuse()
    tree = Mounted(context, "--swap-size", "512M")
    tree.write("parameters/shrinker_enabled", "N\n")        # as in a kernel

    tree.group("brief", max="8M")
    time.sleep(SEEN)
    said = tree.run("brief", "leave", 24)
    yield check("controlfs-zswap: what does not fit is stored", unless(said == "status 0\n", said), unless(tree.count("brief", "zswpout") > 0, tree.read("cgroup/brief/memory.stat")))

    tree.group("disk", max="8M", zswap_max="0")
    said = tree.stay("disk", "text", 24)
    swapped = tree.number("cgroup/disk/memory.swap.current")
    yield check("controlfs-zswap: memory.zswap.max 0 leaves the disk", unless(tree.count("disk", "zswpout") == 0, tree.read("cgroup/disk/memory.stat")),
                unless(swapped > 12 * MIB and tree.number("cgroup/disk/memory.zswap.current") == 0, f"{swapped >> 20} MiB swapped"),
                unless(tree.leave("disk", said) == WHOLE, "not whole"))

    tree.group("back", max="8M")
    said = tree.run("back", "byte", 32)
    loaded = tree.count("back", "zswpin")
    yield check("controlfs-zswap: what was stored comes back", unless(said == WHOLE, said), unless(loaded >= 24 * PAGES_OF_MIB, f"{loaded} loads"))

    # A pool that may hold less and less sends to disk what it has; where that is forbidden, nothing.
    tree.group("written")
    tree.group("kept", zswap_writeback="0")
    tree.group("kept/below")
    for group, writes in (("written", True), ("kept", False), ("kept/below", False)):
        said = tree.stay(group, "text", 16)
        first = tree.write(f"cgroup/{group}/memory.reclaim", "8M\n")
        stored = tree.number(f"cgroup/{group}/memory.zswap.current")
        untouched = tree.count(group, "zswpwb")
        tree.write(f"cgroup/{group}/memory.zswap.max", f"{stored // 2}\n")
        second = tree.write(f"cgroup/{group}/memory.reclaim", "4M\n")
        wrote, swapped = tree.count(group, "zswpwb"), tree.count(group, "pswpout")
        text = tree.read(f"cgroup/{group}/memory.stat")
        yield check(f"controlfs-zswap: {group}: memory.reclaim stores", unless(first == 0 and stored > MIB and untouched == 0, f"{os.strerror(first)} {stored} {untouched}"))
        if writes:
            yield check(f"controlfs-zswap: {group}: over memory.zswap.max it is written back", unless(second == 0 and wrote > 0, f"{os.strerror(second)} {text}"))
        else:
            yield check(f"controlfs-zswap: {group}: nothing is written, and memory.reclaim says so", unless(second == errno.EAGAIN, os.strerror(second)),
                        unless(wrote == swapped == 0, text))
        tree.write(f"cgroup/{group}/memory.zswap.max", "max\n")
        yield check(f"controlfs-zswap: {group}: all of it is whole", unless(tree.leave(group, said) == WHOLE, "not whole"))

    tree.group("over", max="8M", zswap_max="1M")
    tree.group("beside")
    beside = tree.stay("beside", "text", 24)
    tree.write("cgroup/beside/memory.reclaim", "12M\n")
    over = tree.stay("over", "text", 24)
    yield check("controlfs-zswap: a group writes back its own", unless(tree.count("over", "zswpwb") > 0, tree.read("cgroup/over/memory.stat")),
                unless(tree.count("beside", "zswpwb") == 0 < tree.count("beside", "zswpout"), tree.read("cgroup/beside/memory.stat")),
                unless(tree.number("cgroup/over/memory.zswap.current") <= MIB + 16384, tree.read("cgroup/over/memory.zswap.current")))
    texts = tree.leave("beside", beside), tree.leave("over", over)
    yield check("controlfs-zswap: both are whole", unless(texts == (WHOLE, WHOLE), f"{texts}"))

    tree.group("parent")
    tree.group("parent/child")
    said = tree.stay("parent/child", "text", 16)
    before = [tree.number(f"cgroup/{group}/memory.current") for group in ("parent/child", "parent")]
    failed = tree.write("cgroup/parent/child/memory.reclaim", "12M\n")
    stored = [tree.number(f"cgroup/{group}/memory.zswap.current") for group in ("parent/child", "parent")]
    after = [tree.number(f"cgroup/{group}/memory.current") for group in ("parent/child", "parent")]
    anon = [tree.count(group, "anon") for group in ("parent/child", "parent")]
    charged = all(abs(total - resident - pool) < MIB for total, resident, pool in zip(after, anon, stored))
    yield check("controlfs-zswap: what is stored is charged to its group and the parent", unless(not failed and stored[0] == stored[1] > 2 * MIB, f"{stored}"),
                unless(charged and after[0] < before[0] and after[1] < before[1], f"{before} before, {after} after, {anon} resident, {stored} stored"),
                unless(tree.leave("parent/child", said) == WHOLE, "not whole"))

    tree.group("random")
    said = tree.stay("random", "random", 16)
    none = tree.count("random", "zswap_incomp")
    failed = tree.write("cgroup/random/memory.reclaim", "8M\n")
    incompressible = tree.count("random", "zswap_incomp")
    yield check("controlfs-zswap: zswap_incomp", unless(not failed and none == 0 < incompressible, f"{os.strerror(failed)} {tree.read('cgroup/random/memory.stat')}"),
                unless(tree.leave("random", said) == WHOLE, "not whole"))
    outcome = tree.end(test.seconds)
    yield check("controlfs-zswap: the job ends", unless(outcome.status == 0, complaint(outcome)), outcome.hang)


@test("controlfs-inside", 60)
def controlfs_inside(context: Context, test):
    """--control-fs: the job finds its files where the kernel has its own, and nobody else does."""
    need_fuse()
    if not os.path.isdir("/sys/fs/cgroup"):
        raise Skip("no /sys/fs/cgroup")
    limit, pages = ("--memory-max", "64M", "--quiet", "--control-fs"), context.program("pages")
    outside = sorted(os.listdir("/sys/fs/cgroup"))
    parameters = "cat /sys/module/zswap/parameters/compressor" if os.path.isdir("/sys/module/zswap/parameters") else "echo zstd"
    script = (f"set -e; cd /sys/fs/cgroup; cat memory.max; mkdir g; echo 8M > g/memory.max; sleep {SEEN}; echo 0 > g/cgroup.procs; "
              f"{pages} byte 32; grep -c '^zswpout [1-9]' g/memory.stat; {parameters}; [ -e cgroup ] || echo no more")
    outcome = context.run(["sh", "-c", script], *limit, "--compressor", "zstd", timeout=test.seconds)
    yield check("controlfs-inside: the files are the job's", unless((outcome.status, outcome.stdout) == (0, f"{64 * MIB}\nwhole\n1\nzstd\nno more\n"), complaint(outcome) + outcome.stdout), outcome.hang)
    warns = not os.path.isdir("/sys/module/zswap/parameters")
    yield check("controlfs-inside: it says nothing else", unless(outcome.stderr.count("\n") == warns, outcome.stderr))

    for what, end, status in [("by itself", lambda job: job.process.stdin.close(), 0), ("its manager is killed", lambda job: os.kill(job.manager(), signal.SIGKILL), 125),
                              ("the front is killed", lambda job: job.process.kill(), 137), ("its server is killed", lambda job: end_helper(server, signal.SIGKILL), 0)]:
        job = context.start(["sh", "-c", "cat /sys/fs/cgroup/cgroup.events; cat; cat /sys/fs/cgroup/memory.max || true"], *limit, stdin=subprocess.PIPE)
        began = wait_until(lambda: b"populated 1" in harness.read(job.files[0]), 20)
        seen = sorted(os.listdir("/sys/fs/cgroup")) == outside and not mounts()
        server = lambda: helpers(f"uzswap-agent.{job.process.pid}.")
        serves = len(server()) == 1
        yield check(f"controlfs-inside: outside nothing is seen, before the end: {what}", unless(began and seen and serves, f"{began} {seen} {serves}"))
        end(job)
        if "server" in what:
            job.process.stdin.close()
        outcome = job.wait(test.seconds)
        yield check(f"controlfs-inside: the end: {what}", unless(outcome.status == status, complaint(outcome)), unless(job.gone_within(10), "a process is left"),
                    unless(wait_until(lambda: not helpers(f"uzswap-agent.{job.process.pid}."), 5), "the server is left"),
                    unless(not [name for name in harness.leftovers() if f".{job.process.pid}." in name], "a file is left"))

    if shutil.which("setpriv"):
        command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", str(context.uzswap), "run", *limit, "--", "echo", "started"]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = run.communicate(timeout=30)
        yield check("controlfs-inside: without CAP_SYS_ADMIN", unless((run.returncode, out, err.count("\n")) == (1, "", 1) and "CAP_SYS_ADMIN" in err, f"{run.returncode} {out} {err}"),
                    unless(wait_until(lambda: not helpers(f"uzswap-agent.{run.pid}."), 5), "its server is left"),
                    unless(not [name for name in harness.leftovers() if f".{run.pid}." in name], "a file is left"))
    inner = f"{context.uzswap} run --memory-max 32M --quiet --control-fs -- cat /sys/fs/cgroup/memory.max; cat /sys/fs/cgroup/memory.max"
    outcome = context.run(["sh", "-c", inner], *limit, timeout=test.seconds)
    yield check("controlfs-inside: a job in the job", unless((outcome.status, outcome.stdout) == (0, f"{32 * MIB}\n{64 * MIB}\n"), complaint(outcome)), outcome.hang)
    if shutil.which("unshare"):
        without = f"mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec {context.uzswap} run {' '.join(limit)} -- echo started"
        answer = subprocess.run(["unshare", "--mount", "sh", "-c", without], capture_output=True, text=True, timeout=30)
        yield check("controlfs-inside: without /dev/fuse", unless((answer.returncode, answer.stdout, answer.stderr.count("\n")) == (1, "", 1), f"{answer}"),
                    unless("modprobe fuse" in answer.stderr, answer.stderr))
    outcome = context.run(["cat", "/sys/fs/cgroup/memory.max"], "--memory-max", "64M", "--quiet", env={"UZSWAP_CONTROL_FS": "yes"}, timeout=test.seconds)
    yield check("controlfs-inside: the variable", unless((outcome.status, outcome.stdout) == (0, f"{64 * MIB}\n"), complaint(outcome)))

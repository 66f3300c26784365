"""A hostile client beside the jobs of another user: wrong bytes, delays, and what the manager keeps."""
from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import harness
from behaviour import check, unless, wait_until
from control import WRITE, request, speak
from daemon import NOBODY, Daemon, open_daemon, whole
import hostile_client
from attack import ADVISE, CALL, HELLO, PAGE, Intruder, areas, userfaultfd
from hostile_client import EVICT, EVICTED, GO
from hostile import VICTIM, become, delays_of, touches
from suite import Context, MIB, PROTOCOL_VERSION, complaint, need_root, test

# A user that no other test runs as.
HOSTILE = 64341
LIMIT = 0.1


def resident(pid: int) -> int:
    fields = harness.read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * harness.PAGE if len(fields) > 1 else 0


def end_user(uid: int) -> None:
    """Kills all processes of a user."""
    for _ in range(100):
        pids = [pid for pid in harness.processes() if f"Uid:\t{uid}\t".encode() in harness.read(f"/proc/{pid}/status")
                and (harness.stat_fields(pid) or [b"Z"])[0] not in (b"Z", b"X")]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not pids:
            return
        time.sleep(0.02)


def start_clients(daemon: Daemon, seed: int, seconds: float, count: int) -> list:
    """Starts so many clients; gives their processes, and where they tell what they did."""
    def run(seed: int, pipe):
        become(HOSTILE)
        # Nothing is measured of what the machine's processors are spent on.
        os.nice(10)
        pipe.send(hostile_client.run(daemon.socket, seed, seconds))

    clients = []
    for number in range(count):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=run, args=[seed + number, theirs])
        process.start()
        theirs.close()
        clients.append((process, ours))
    return clients


def told(client) -> dict:
    """What a client did."""
    process, pipe = client
    try:
        return pipe.recv() if pipe.poll(60) else {}
    except EOFError:
        process.join()
        return {"ended": process.exitcode}


@test("hostile-random", 240)
def random_clients(context: Context, test):
    """Clients that send anything, at random: another user's job keeps its bytes and its pace, and nothing is left when they end."""
    need_root()
    seed, seconds = random.randrange(1 << 30), context.size(10, 120)
    daemon = open_daemon(context)
    manager = daemon.manager()
    good = daemon.memory("--cgroup", "good", "--memory-max", "32M")
    first = touches(good, 64)
    before, size = harness.descriptors(manager), resident(manager)
    clients = start_clients(daemon, seed, seconds, 2)
    rounds, delays, slowest, end = 0, [], 0.0, time.monotonic() + seconds
    while time.monotonic() < end - 2:
        start = time.monotonic()
        if not touches(good, 1):
            break
        slowest = max(slowest, time.monotonic() - start)
        rounds += 1
        delays += delays_of(daemon, VICTIM + 2, 1.5)
    joined = daemon.run(["true"], "--memory-max", "32M", "--quiet", "--require")
    did = [told(client) for client in clients]
    end_user(HOSTILE)
    for process, _ in clients:
        process.join()
    # What lingers is closed within some seconds.
    settled = wait_until(lambda: harness.descriptors(manager) <= before + 8, 15)
    left, grown = harness.descriptors(manager), (resident(manager) - size) // MIB
    p99 = sorted(delays)[len(delays) * 99 // 100] if delays else 99
    yield check(f"hostile-random: seed {seed}: {rounds} rounds, {len(delays)} requests, p99 {p99 * 1000:.1f} ms",
                unless(first and rounds > 1, f"the job was held up after {rounds} rounds"), unless(slowest < 5, f"one round took {slowest:.1f} s"),
                unless(p99 < LIMIT, f"the slowest took {max(delays, default=99):.2f} s"), unless(joined.status == 0, f"another job: {complaint(joined)}"))
    yield check("hostile-random: the clients did what they could", unless(all(one.get("lies") for one in did), f"{did}"))
    yield check("hostile-random: nothing is left", unless(settled, f"{before} descriptors before, {left} after"), unless(grown < 64, f"the manager has grown by {grown} MiB"))
    yield check("hostile-random: the job is whole", whole(good.end()))
    outcome = daemon.end()
    yield check("hostile-random: the daemon ends", unless(outcome.status == 0, complaint(outcome)), unless("panicked" not in outcome.stderr, outcome.stderr[-300:]),
                *daemon.is_gone())
    if context.full:
        print(*did, sep="\n")


def seconds_to_touch(job) -> float:
    """The time that a job takes to touch 2 MiB more and to read all that it has touched: the mean of three, for ever if it fails."""
    start = time.monotonic()
    return (time.monotonic() - start) / 3 if all([touches(job, 2) for _ in range(3)]) else math.inf


@test("event-storm", 120)
def event_storm(context: Context, test):
    """Threads of one user that change mappings without a pause cost a job of another user at most two seconds more than the same threads unmanaged."""
    need_root()
    daemon = open_daemon(context)
    good = daemon.memory("--memory-max", "32M")
    first = touches(good, 64)
    seconds = context.size(12, 60)
    modes = ("discard", "discard", "discard", "discard", "remap", "unmap")
    program = lambda mode: ["nice", "-n", "10", context.program("eventstorm"), mode, "50", str(seconds)]
    # Each runs in a session of its own, as the managed ones do: the kernel may divide the processors among sessions.
    bare = [subprocess.Popen([*NOBODY, *program(mode)], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for mode in modes]
    time.sleep(1)
    unmanaged = seconds_to_touch(good)
    for storm in bare:
        storm.kill()
        storm.wait()
    storms = [daemon.start(program(mode), "--cgroup", f"storm-{number}", "--memory-max", "16M", "--quiet", prefix=NOBODY)
              for number, mode in enumerate(modes)]
    # All of their memory is watched by then. Reclaim of theirs has no part in this.
    time.sleep(2)
    for number in range(len(modes)):
        daemon.ask("set", f"cgroup/storm-{number}/memory.max", "max")
    managed = seconds_to_touch(good)
    storming = sum(storm.process.poll() is None for storm in storms)
    outcomes = [storm.wait(seconds + 30) for storm in storms]
    yield check(f"event-storm: to read 70 MiB takes {managed:.1f} s, {unmanaged:.1f} s beside the same threads unmanaged", unless(storming >= 5, f"{storming} storms are left"),
                unless(first and unmanaged < math.inf and managed < min(4, unmanaged + 2), "another job was held up"), whole(good.end()))
    # One that never stands still is killed rather than wrong.
    yield check("event-storm: the storms are right", *(unless(outcome.status in (0, 137) and "MISMATCH" not in outcome.stderr and not outcome.hang, complaint(outcome))
                                                       for outcome in outcomes))
    outcome = daemon.end()
    yield check("event-storm: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("mapping-storm", 120)
def mapping_storm(context: Context, test):
    """Programs of one user with tens of thousands of mappings each hold up no job of another user."""
    need_root()
    daemon = open_daemon(context)
    good = daemon.memory("--memory-max", "32M")
    touched = touches(good, 64)
    program = context.program("mapstorm")
    storms = [daemon.start([program, mode, "60000", "6"], "--cgroup", f"storm-{number}", "--memory-max", "48M", "--quiet", prefix=NOBODY)
              for number, mode in enumerate(("prot", "flags") * 2)]
    ready = wait_until(lambda: all(harness.read(storm.files[0]) == b"ready\n" for storm in storms), 10)
    start = time.monotonic()
    touched = all([touches(good, 1) for _ in range(4)]) and touched
    took = time.monotonic() - start
    yield check(f"mapping-storm: to read 66 MiB four times took {took:.1f} s", unless(ready, "the storms do not begin"),
                unless(touched and took < 8, "another job was held up"), whole(good.end()))
    outcomes = [storm.wait(60) for storm in storms]
    yield check("mapping-storm: the storms are right", *(unless(outcome.status == 0, complaint(outcome)) for outcome in outcomes))
    outcome = daemon.end()
    yield check("mapping-storm: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


# Moves each process whose number it reads to the user's other group; prints how many could be.
MOVES = """
import socket, struct, sys
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
path, moved = b"cgroup/own/cgroup.procs", 0
for pid in sys.stdin.read().split():
    door.sendall(b"uz\\x01\\x02" + struct.pack("=HH", len(path), len(pid)) + path + pid.encode())
    moved += door.recv(4096)[4:8] == bytes(4)
print(moved)
"""


@test("moved-crowd", 60)
def moved_crowd(context: Context, test):
    """A user that moves hundreds of unmanaged processes leaves descriptors to the jobs of others."""
    need_root()
    daemon = open_daemon(context, prefix=["prlimit", "--nofile=800"])
    daemon.ask("mkdir", "own", prefix=NOBODY)
    # The shell is managed: it lets its children execute their program before it forks more of them than there is room for.
    shell = f"for i in $(seq 900); do {context.program('hello', '-static')} 20 >/dev/null & [ $((i % 10)) != 0 ] || sleep 0.05; done; wait"
    crowd = daemon.start(["sh", "-c", shell], "--memory-max", "64M", "--quiet", prefix=NOBODY)
    sleepers = lambda: [pid for pid in crowd.survivors() if harness.comm(pid).startswith("hello")]
    wait_until(lambda: len(sleepers()) == 900, 20)
    pids = " ".join(map(str, sleepers()))
    moves = subprocess.run([*NOBODY, "python3", "-c", MOVES, daemon.socket], input=pids, capture_output=True, text=True, timeout=30)
    inside = len(daemon.get("cgroup/own/cgroup.procs").split())
    good = daemon.memory("--memory-max", "32M")
    touched = touches(good, 64)
    yield check("moved-crowd: all are moved", unless(moves.stdout == "900\n", f"{moves}"), unless(inside == 900, f"{inside} are in the group"))
    yield check("moved-crowd: another job joins and is under its limit", unless(touched, "nothing was touched"), whole(good.end()))
    crowd.kill()
    left = wait_until(lambda: not daemon.get("cgroup/own/cgroup.procs").split(), 10)
    yield check("moved-crowd: none of them is left", unless(left, "they are still in the group"), unless(daemon.ask("rmdir", "own").returncode == 0, "it cannot be removed"))
    outcome = daemon.end()
    yield check("moved-crowd: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("moved-numbers", 60)
def moved_numbers(context: Context, test):
    """Processes that a user has moved end, and others of another user's job get their numbers: they are in their own group."""
    need_root()
    daemon = open_daemon(context)
    daemon.ask("mkdir", "own", prefix=NOBODY)
    sleeper = context.program("hello", "-static")
    crowd = daemon.start(["sh", "-c", f"for i in $(seq 40); do {sleeper} 30 >/dev/null & done; wait"], "--memory-max", "64M", "--quiet", prefix=NOBODY)
    sleepers = lambda: [pid for pid in crowd.survivors() if harness.comm(pid).startswith("hello")]
    begun = wait_until(lambda: len(sleepers()) == 40, 20)
    victims = sleepers()
    moves = subprocess.run([*NOBODY, "python3", "-c", MOVES, daemon.socket], input=" ".join(map(str, victims)), capture_output=True, text=True, timeout=30)
    source, sink = os.pipe()
    good = daemon.start(["sh", "-c", "while read line; do sleep 5 & done; wait"], "--cgroup", "good", "--memory-max", "64M", "--quiet", stdin=source)
    os.close(source)
    wait_until(lambda: daemon.get("cgroup/good/cgroup.procs").split(), 10)
    hits, intruders, strays = [], [], []
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{victim}"), 5)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(victim - 1))
        os.write(sink, b"\n")
        if wait_until(lambda: harness.comm(victim) == "sleep", 0.5):
            hits.append(victim)
            time.sleep(0.02)
            intruders += [pid for pid in daemon.get("cgroup/own/cgroup.procs").split() if int(pid) in hits]
            strays += [victim] if str(victim) not in daemon.get("cgroup/good/cgroup.procs").split() else []
    os.close(sink)
    crowd.kill()
    outcome = good.wait(20)
    yield check(f"moved-numbers: {len(hits)} numbers were used again", unless(begun and moves.stdout == "40\n", f"{moves}"), unless(len(hits) > 5, "too few"),
                unless(not intruders, f"{len(intruders)} are in the other user's group"),
                unless(not strays, f"{len(strays)} are not in their own"), unless(outcome.status == 0, complaint(outcome)))
    outcome = daemon.end()
    yield check("moved-numbers: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


# Has a part of its memory wiped on fork each time that it reads a line, by libc's madvise, which waits for the manager.
WIPES = """
import ctypes, mmap, sys, time
memory = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start, libc = ctypes.addressof(ctypes.c_char.from_buffer(memory)), ctypes.CDLL(None)
time.sleep(1)       # until it is under management
for _ in range(8):
    begun = time.monotonic()
    assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(1 << 20), 18) == 0
    print(time.monotonic() - begun, flush=True)
"""


@test("advice-storm", 120)
def advice_storm(context: Context, test):
    """Hints of one user's threads, however much each is to page out, keep no other user's program waiting for the answer to its own."""
    need_root()
    daemon = open_daemon(context)
    storm = daemon.start([context.program("advicestorm"), "16", "64", "6"], "--cgroup", "storm", "--memory-max", "2G", "--quiet", prefix=NOBODY)
    ready = wait_until(lambda: harness.read(storm.files[0]) == b"ready\n", 10)
    time.sleep(1)
    outcome = daemon.run(["python3", "-c", WIPES], "--memory-max", "32M", "--quiet")
    over, stormed = storm.process.poll() is not None, storm.wait(60)
    waits = sorted(float(line) for line in outcome.stdout.split())
    median = waits[len(waits) // 2] if waits else 60
    yield check(f"advice-storm: a hint takes {median * 1000:.0f} ms", unless(ready and not over, "there was no storm"),
                unless(outcome.status == 0 and len(waits) == 8, complaint(outcome)), unless(median < 0.15, "another user's program was held up"))
    yield check("advice-storm: the storm is right", unless(stormed.status == 0, complaint(stormed)))
    outcome = daemon.end()
    yield check("advice-storm: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("fork-storm", 120)
def fork_storm(context: Context, test):
    """A user whose program forks hundreds of children holds up no job of another user, and leaves it descriptors to fork with."""
    need_root()
    forks = ["python3", "-c", FORKS]
    # With few descriptors, and with many.
    for limit, count in ((3000, 300), (20000, 600)):
        daemon = open_daemon(context, prefix=["prlimit", f"--nofile={limit}"])
        good = daemon.memory("--memory-max", "32M")
        first = touches(good, 64)
        storm = daemon.start([context.program("forkstorm"), str(count), "2"], "--cgroup", "storm", "--memory-max", "48M", "--quiet", prefix=NOBODY)
        time.sleep(1)
        slowest = 0
        for _ in range(3):
            start = time.monotonic()
            first = touches(good, 1) and first
            slowest = max(slowest, time.monotonic() - start)
        forked = daemon.run(forks, "--memory-max", "16M", "--quiet")
        bounded = b"its user has as many processes as the manager can serve" in harness.read(storm.files[1])
        if bounded:
            # Its program was killed, and the children wait for ever.
            daemon.ask("set", "cgroup/storm/cgroup.kill", "1")
        outcome = storm.end_within(60)
        name = f"fork-storm: {count} children, {limit} descriptors"
        yield check(f"{name}: to read 65 MiB took {slowest:.1f} s", unless(first and slowest < 4, "another job was held up"), whole(good.end()))
        yield check(f"{name}: another job forks", unless((forked.status, forked.stdout) == (0, "0\n" * 20), complaint(forked)))
        yield check(f"{name}: the storm {'is bounded' if bounded else 'is right'}",
                    unless(bounded and outcome.status == 137 or limit > 10000 and outcome.status == 0 and "verified" in outcome.stdout, complaint(outcome)),
                    unless(outcome.stderr.count("its user has") <= 1, "it is told more than once"))
        outcome = daemon.end()
        yield check(f"{name}: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


FORKS = """
import os
memory = b"a" * 40000000
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(not all(byte == 97 for byte in memory[::4096]))
    print(os.waitpid(child, 0)[1], flush=True)
"""


def floods(daemon: Daemon, how: str, count: int) -> None:
    """Keeps so many connections of a job: greeted ones that say no more, or hints whose answers are not waited for."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * count + 100, 2 * count + 100))
    become(HOSTILE)
    intruder, kept = Intruder(daemon), []
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if len(kept) == count:
            time.sleep(0.1)
            continue
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            link.connect(b"\0uzswap-" + intruder.name)
            link.send(struct.pack("=3Q", CALL, PROTOCOL_VERSION, intruder.token) if how == "greeted" else
                      struct.pack("=6Q", ADVISE, PROTOCOL_VERSION, intruder.token, 0, 0, 1 << 40))
            kept.append(link)
        except OSError:
            link.close()
            time.sleep(0.001)


@test("hostile-connections", 120)
def connections(context: Context, test):
    """However many connections of a job are greeted and say no more, other users' jobs begin and fork."""
    need_root()
    daemon = open_daemon(context, prefix=["prlimit", "--nofile=1024:1024"])
    manager, before = daemon.manager(), harness.descriptors(daemon.manager())
    client = multiprocessing.get_context("fork").Process(target=floods, args=[daemon, "greeted", 2000])
    client.start()
    time.sleep(3)
    most = harness.descriptors(manager)
    outcome = daemon.run(["sh", "-c", "true; true & wait"], "--memory-max", "32M", "--quiet", "--require", timeout=20)
    end_user(HOSTILE)
    client.join()
    yield check(f"hostile-connections: {before} descriptors before, {most} at most", unless(outcome.status == 0, f"another job: {complaint(outcome)}"),
                unless(most < before + 512, f"{most} descriptors"))
    settled = wait_until(lambda: harness.descriptors(manager) <= before + 8, 10)
    yield check("hostile-connections: nothing is left", unless(settled, f"{harness.descriptors(manager)} descriptors"))
    outcome = daemon.end()
    yield check("hostile-connections: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("no-descriptors", 60, beside=True)
def no_descriptors(context: Context, test):
    """A manager without descriptors for the memory of forked children: no child runs on with zeros in the place of what it has inherited."""
    for number in range(context.size(4, 40)):
        job = context.start([context.program("forkcrowd"), "24", "8", "6"], "--memory-max", "16M", "--quiet")
        found = wait_until(lambda: job.manager() is not None, 10)
        time.sleep(0.3)
        if found and (manager := job.manager()):
            used = max((int(fd) for fd in os.listdir(f"/proc/{manager}/fd")), default=0)
            subprocess.run(["prlimit", f"--pid={manager}", f"--nofile={used + 1 + number % 4}"], check=False)
        outcome = job.wait(test.seconds)
        result = check("no-descriptors", unless(found, "no manager"), outcome.hang, unless("MISMATCH" not in outcome.stderr, f"wrong bytes: {outcome.stderr[:300]}"),
                       unless(job.gone_within(5), "processes were left"))
        if not result.ok:
            break
    yield result


def never_answers(daemon: Daemon) -> None:
    """A session in a small group whose worker obeys no request, and whose program wants more than it may have."""
    intruder = Intruder(daemon)
    speak(daemon.connect(), WRITE, intruder.group + b"/memory.max", b"4M")
    link, device = intruder.call()
    memory, words = areas()
    descriptors = [userfaultfd(device, False), userfaultfd(device, False), os.pidfd_open(os.getpid())]
    socket.send_fds(link, [struct.pack("=9Q", HELLO, 0, 0, 0, *words)], descriptors)
    link.recv(4096)
    more = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, 32 << 20, 4096):
        more[page] = 1
    time.sleep(100)


def crowd_that_never_answers(daemon: Daemon, seconds: float) -> None:
    """Many such sessions; each ends after a second or two, and another takes its place."""
    become(HOSTILE)
    os.nice(10)
    children: dict[int, float] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while len(children) < 40:
            pid = os.fork()
            if pid == 0:
                try:
                    never_answers(daemon)
                finally:
                    os._exit(0)
            children[pid] = time.monotonic() + random.uniform(1, 2)
        for pid, due in list(children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[pid]
            elif time.monotonic() > due:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@test("silent-workers", 120)
def silent_workers(context: Context, test):
    """Workers that never answer do not keep reclaim from other users' jobs."""
    need_root()
    daemon = open_daemon(context)
    good = daemon.memory("--memory-max", "32M")
    first = touches(good, 64)
    seconds = context.size(10, 60)
    client = multiprocessing.get_context("fork").Process(target=crowd_that_never_answers, args=[daemon, seconds])
    client.start()
    time.sleep(3)
    start = time.monotonic()
    touched = touches(good, 8)
    took = time.monotonic() - start
    client.join(seconds)
    end_user(HOSTILE)
    client.join()
    yield check(f"silent-workers: 8 MiB took {took:.1f} s", unless(first and touched and took < 10, "another job was held up"), whole(good.end()))
    outcome = daemon.end()
    yield check("silent-workers: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


def forks_what_it_never_moved(daemon: Daemon, shared: mmap.mmap) -> None:
    """A session whose worker says that it has moved pages, without having done so, and whose program forks then."""
    become(HOSTILE)
    intruder, door = Intruder(daemon), daemon.connect()
    link, device = intruder.call()
    memory, words = areas()
    more = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, 32 << 20, PAGE):
        more[page] = 1
    descriptors = [userfaultfd(device, False), userfaultfd(device, False), os.pidfd_open(os.getpid())]
    socket.send_fds(link, [struct.pack("=9Q", HELLO, 0, 0, 0, *words)], descriptors)
    while True:
        kind = struct.unpack_from("=Q", link.recv(8192))[0]
        if kind == GO:
            door.sendall(request(WRITE, intruder.group + b"/memory.reclaim", b"16M"))
        if kind == EVICT:
            shared[0] = 1
            link.send(struct.pack("=66Q", EVICTED, 512, *[0] * 64))
            if os.fork() == 0:
                os._exit(0)


@test("missing-staged", 120)
def missing_staged(context: Context, test):
    """A page of the staging area that is not there holds no thread of the manager after the death of its process."""
    need_root()
    daemon = open_daemon(context)
    manager = daemon.manager()
    before = harness.descriptors(manager)
    heard = [mmap.mmap(-1, PAGE) for _ in range(8)]
    clients = [multiprocessing.get_context("fork").Process(target=forks_what_it_never_moved, args=[daemon, one]) for one in heard]
    for client in clients:
        client.start()
    time.sleep(3)
    end_user(HOSTILE)
    for client in clients:
        client.join()
    settled = wait_until(lambda: harness.descriptors(manager) <= before + 8, 15)
    left = harness.descriptors(manager)
    yield check("missing-staged", unless(any(one[0] for one in heard), "no client was asked to evict"),
                unless(settled, f"{before} descriptors before, {left} after"))
    outcome = daemon.end()
    yield check("missing-staged: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


def hangs_up(daemon: Daemon) -> None:
    """Joins and is gone, a hundred times a second: as the daemon's user, which may do so without a limit."""
    os.nice(10)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            Intruder(daemon, b"require\ntransient")
        except (OSError, ValueError):       # the manager has had enough of it
            pass
        time.sleep(0.01)


@test("hostile-hangups", 60)
def hangups(context: Context, test):
    """Jobs that lose their fronts at once, in a loop: to kill them takes the manager a part of one processor."""
    need_root()
    daemon = open_daemon(context)
    manager, ticks = daemon.manager(), os.sysconf("SC_CLK_TCK")
    good = daemon.memory("--cgroup", "good", "--memory-max", "32M")
    spent = lambda: sum(int(field) for field in harness.stat_fields(manager)[11:13]) / ticks
    clients = [multiprocessing.get_context("fork").Process(target=hangs_up, args=[daemon]) for _ in range(2)]
    for client in clients:
        client.start()
    time.sleep(2)
    before, seconds = spent(), context.size(5, 30)
    time.sleep(seconds)
    share = (spent() - before) / seconds
    start = time.monotonic()
    victim = daemon.start(["sleep", "100"], "--memory-max", "32M", "--quiet")
    found = wait_until(lambda: any(harness.read(f"/proc/{pid}/cmdline") == b"sleep\x00100\x00" for pid in victim.survivors()), 10)
    victim.process.kill()
    gone = found and victim.gone_within(2)
    for client in clients:
        client.kill()
        client.join()
    yield check(f"hostile-hangups: {share * 100:.0f} % of a processor", unless(share < 0.25, "it takes too much"),
                unless(gone, f"a job outlived its front (found: {found}, after {time.monotonic() - start:.1f} s)"))
    yield check("hostile-hangups: a job is whole", unless(touches(good, 64), "it was held up"), whole(good.end()))
    outcome = daemon.end()
    yield check("hostile-hangups: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())

"""What one user of a daemon can do to the others by means that every user has: many processes, memory that cannot be moved out, a name, an odd
environment, a setuid program."""
from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import time

import harness
from behaviour import check, unless, wait_until
from control import WRITE, besiege, request
from daemon import NOBODY, Daemon, open_daemon, whole
from holders import Mute
from hostile import KEPT, Client, attach_socket, become, delays_of
from suite import MIB, Context, complaint, need_root, test

# Reads 20 MiB of its own again and again for so many seconds, all of which must be right; says how long the slowest pass took.
VICTIM = """
import mmap, sys, time
size, end, slowest = 20 << 20, time.monotonic() + float(sys.argv[1]), 0
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    memory[at:at + 8] = at.to_bytes(8, "little")
print("ready", flush=True)
while time.monotonic() < end:
    start = time.monotonic()
    right = all(memory[at:at + 8] == at.to_bytes(8, "little") for at in range(0, size, 4096))
    slowest = max(slowest, time.monotonic() - start)
    assert right
    time.sleep(0.05)
print(slowest)
"""


def peak_resident(pid: int) -> int:
    status = harness.read(f"/proc/{pid}/status").decode().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


# Not beside others: these look for their processes in /proc, which takes them long meanwhile.
@test("hostile-environment", 60)
def environment(context: Context, test):
    """Processes whose environment is gigabytes, or that hold the lock of their memory, hold up no kill and cost the manager no memory."""
    need_root()
    longenv, holder = (context.program(name) for name in ("longenv", "holder"))
    for program in (longenv, holder):
        program.chmod(0o755)
    daemon = open_daemon(context)
    manager = daemon.manager()
    with Mute(context) as mute:
        commands = [*4 * [(longenv, "1024")], (holder, "hold", mute.directory, "6", "1")]
        hostile = [subprocess.Popen([*NOBODY, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/") for command in commands]
        try:
            begun = all(process.stdout.readline() in (b"sleeps\n", *(b"%d holds\n" % number for number in range(6))) for process in hostile)
            # Until a thread waits for the lock that another holds.
            time.sleep(0.5)
            took = []
            for number in range(2):
                job = daemon.start(["sleep", "60"], "--cgroup", f"job{number}", "--quiet")
                wait_until(lambda: daemon.procs(f"cgroup/job{number}"), 10)
                start = time.monotonic()
                killed = daemon.ask("set", f"cgroup/job{number}/cgroup.kill", "1")
                outcome = job.end_within(20)
                took.append(time.monotonic() - start)
                yield check(f"hostile-environment: a kill takes {took[-1]:.2f} s", unless(begun and mute.serves, "the others have not begun"),
                            killed.stderr, unless(outcome.status == 137, complaint(outcome)), unless(took[-1] < 2, "it was held up"))
            peak = peak_resident(manager)
            yield check(f"hostile-environment: the manager had {peak / MIB:.0f} MiB", unless(peak < 64 * MIB, "it reads too much"))
        finally:
            for process in hostile:
                process.kill()
    yield check("hostile-environment: the daemon ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


def has_ended(job: harness.Job, seconds: float) -> bool:
    """Waits, without a look at any environment."""
    try:
        job.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@test("hostile-environment-end", 90)
def environment_end(context: Context, test):
    """While processes hold the locks of their memory, so that a look at their environment waits, a killed manager's jobs end all the same, and a
    daemon ends that is told to."""
    need_root()
    program = context.program("holder")
    program.chmod(0o755)
    for what in ("a daemon's manager is killed", "a daemon is told to end", "a job's manager is killed"):
        daemon = None if what.startswith("a job") else open_daemon(context)
        job = daemon.start(["sleep", "60"], "--quiet") if daemon else context.start(["sleep", "60"], "--memory-max", "64M")
        owner = daemon.job if daemon else job
        begun = wait_until(lambda: owner.manager() and any(harness.comm(pid) == "sleep" for pid in job.pids()), 10)
        # Later the harness, too, would wait for an environment.
        victim, number = (owner.process.pid, signal.SIGTERM) if what.endswith("end") else (owner.manager(), signal.SIGKILL)
        with Mute(context) as mute:
            hostile = subprocess.Popen([*NOBODY, program, "hold", mute.directory, "6", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/")
            held = hostile.stdout.readline().endswith(b"holds\n")
            # Until a thread waits for the lock that another holds.
            time.sleep(0.5)
            start = time.monotonic()
            os.kill(victim, number)
            expected = {owner: 0} if number == signal.SIGTERM else {owner: 125, job: 125}
            late = [one for one in expected if not has_ended(one, 10)]
            took = time.monotonic() - start
            hostile.kill()
        yield check(f"hostile-environment-end: {what}: {took:.1f} s", unless(begun and held and mute.serves, "nothing was held"),
                    unless(not late and took < 5, "it was held up"),
                    *(unless(one.end_within(10).status == status, complaint(one.outcome)) for one, status in expected.items()))
        if job not in expected:
            job.kill()
        if daemon:
            yield check(f"hostile-environment-end: {what}, nothing left", *daemon.is_gone())


# Touches all of 48 MiB without a pause.
TOUCHES = """
import os
memory = bytearray(os.urandom(48 << 20))
print("ready", flush=True)
while True:
    memory[::4096] = bytes(len(memory) // 4096)
"""


@test("hostile-reclaim", 90)
def reclaim(context: Context, test):
    """A user that has more reclaimed from its own group than there will ever be holds up neither the requests of others nor the daemon's end."""
    need_root()
    daemon = open_daemon(context)
    job = daemon.start(["python3", "-c", TOUCHES], "--cgroup", "theirs", "--quiet", prefix=NOBODY)
    began = wait_until(lambda: harness.read(job.files[0]), 20)

    def asks():
        with daemon.connect() as door:
            door.sendall(request(WRITE, b"cgroup/theirs/memory.reclaim", b"7E"))
            answers.value += len(door.recv(4096)) > 0

    def as_its_user():
        become(65534)
        besiege([asks] * 4)

    answers = multiprocessing.get_context("fork").Value("i", 0)
    user = multiprocessing.get_context("fork").Process(target=as_its_user)
    user.start()
    try:
        delays = delays_of(daemon, 0, context.size(4, 60))
        p99 = sorted(delays)[len(delays) * 99 // 100] if delays else 99
        taken = daemon.count("cgroup/theirs/memory.stat", "pgsteal") * 4096 // MIB
        yield check(f"hostile-reclaim: {len(delays)} requests of root, p99 {p99 * 1000:.1f} ms, beside {taken} MiB taken", unless(began and taken > 24, "nothing was taken"),
                    unless(len(delays) > 20 and p99 < 0.1, f"the slowest took {max(delays, default=99):.2f} s"))
        yield check(f"hostile-reclaim: {answers.value} answers", unless(wait_until(lambda: answers.value >= 4, 20), "a request has no end"))
        start = time.monotonic()
        os.kill(daemon.job.process.pid, signal.SIGTERM)
        ended = has_ended(daemon.job, 30)
        took = time.monotonic() - start
    finally:
        user.kill()
        user.join()
    yield check(f"hostile-reclaim: the daemon ends in {took:.1f} s", unless(ended and took < 10, "it was held up"),
                unless(daemon.job.end_within(1).status == 0, complaint(daemon.job.outcome)), *daemon.is_gone())
    job.kill()


# Starts so many programs, one after the other.
STARTS = "number=0; while [ $number -lt %d ]; do /bin/true || exit 1; number=$((number + 1)); done; echo done"


def hands_over(send) -> int:
    """Hands over a hundred sockets whose last close waits ten minutes for a peer that does not read, as long as this process lives; tells how many
    were taken."""
    count, listener = 100, socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    listener.listen(count)
    # The sockets are a child's, because the kernel does not linger when a process ends. Where the manager closes its
    # copies first, the last close is on this side, and would hold up a process that goes on.
    child = os.fork()
    if child == 0:
        try:
            sockets = [socket.socket() for _ in range(count)]
            for one in sockets:
                one.connect(listener.getsockname())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
                one.setblocking(False)
                try:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                    while True:
                        one.send(bytes(65536))
                except BlockingIOError:
                    pass
            send([one.fileno() for one in sockets])
            os._exit(0)
        finally:
            os._exit(1)
    KEPT.extend(listener.accept()[0] for _ in range(count))
    return count if os.waitpid(child, 0)[1] == 0 else 0


def hands_over_without_token(daemon: Daemon, name: bytes) -> int:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(name)
    KEPT.append(link)
    return hands_over(lambda descriptors: socket.send_fds(link, [bytes(24)], descriptors))


def hands_over_with_token(daemon: Daemon, name: bytes) -> int:
    try:
        client = Client(daemon)
    except (OSError, AssertionError):       # it is not greeted any more
        return 0
    KEPT.append(client)
    return hands_over(client.hello)


def besieges(daemon: Daemon, name: bytes, hand_over, pipe) -> None:
    """Hands over what lingers, again and again, and connects in a loop."""
    become(65534)
    pipe.send(sum(hand_over(daemon, name) for _ in range(3)))

    def connects():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(name)
            link.send(bytes(24))
            link.recv(1)

    besiege([connects] * 4)
    while True:
        hand_over(daemon, name)
        time.sleep(0.1)


# Not beside others: how long the programs of the other job take is measured.
@test("hostile-linger", 90)
def linger(context: Context, test):
    """A user whose descriptors cannot be closed has the descriptors of no other user wait, and a bounded number of the manager's."""
    need_root()
    for hand_over in (hands_over_without_token, hands_over_with_token):
        what = hand_over.__name__.replace("_", " ")
        daemon = open_daemon(context)
        starts = lambda number: daemon.start(["sh", "-c", STARTS % number], "--memory-max", "16M", "--require", "--quiet")
        alone = starts(100).end_within(60)
        manager = daemon.manager()
        before = harness.descriptors(manager)
        ours, theirs = multiprocessing.Pipe()
        hostile = multiprocessing.get_context("fork").Process(target=besieges, args=[daemon, attach_socket(manager), hand_over, theirs])
        hostile.start()
        try:
            taken = ours.recv() if ours.poll(20) else -1
            most, slowest, end = 0, 0, time.monotonic() + context.size(6, 60)
            outcomes = []
            while time.monotonic() < end and (not outcomes or outcomes[-1].status == 0):
                job = starts(100)
                while not has_ended(job, 0.02) and time.monotonic() < end + 30:
                    most = max(most, harness.descriptors(manager))
                outcomes.append(job.end_within(1))
                slowest = max(slowest, outcomes[-1].seconds)
        finally:
            hostile.kill()
            hostile.join()
        settled = wait_until(lambda: harness.descriptors(manager) <= before + 16, 15)
        yield check(f"hostile-linger: {what}: {taken} taken, {100 * len(outcomes)} programs, {slowest / alone.seconds:.1f} times as slow, "
                    f"{before} descriptors before, {most} at most", unless(taken >= (100 if hand_over is hands_over_with_token else 0), "the attack did not take place"),
                    *(unless(outcome.status == 0 and outcome.stdout == "done\n", complaint(outcome)) for outcome in outcomes[-1:]),
                    unless(most <= before + 1024, "it has ever more descriptors"), unless(slowest < 10 * alone.seconds + 2, "it was held up"))
        yield check(f"hostile-linger: {what}: what lingered is closed", unless(settled, f"{before} before, {harness.descriptors(manager)} after"))
        outcome = daemon.end()
        yield check(f"hostile-linger: {what}: the daemon ends", unless(outcome.status == 0, complaint(outcome)), *daemon.is_gone())


@test("hostile-crowd", 90)
def crowd(context: Context, test):
    """Many small processes of a user, whose memory can be moved out or cannot, take from another user's job no more than seconds."""
    need_root()
    program = context.program("crowd")
    program.chmod(0o755)
    # Reclaim tries for two seconds before it kills.
    for what, arguments, slowest_allowed in (("moved out", ["40", "7680"], 2), ("kept", ["180", "512"], 4)):
        daemon = Daemon(context, "--socket-mode", "666", "--memory-max", "96M")
        os.chmod(os.path.dirname(daemon.socket), 0o755)
        seconds = context.size(6, 30)
        victim = daemon.start(["python3", "-c", VICTIM, str(seconds)], "--cgroup", "victim", "--quiet")
        wait_until(lambda: harness.read(victim.files[0]), 10)
        others = daemon.start([program, *arguments, str(seconds), *(["kept"] if what == "kept" else [])], "--cgroup", "others", "--quiet", prefix=NOBODY)
        outcome = victim.end_within(60)
        lines = outcome.stdout.split()
        slowest = float(lines[1]) if len(lines) == 2 else 60
        kills = daemon.count("cgroup/victim/memory.events", "oom_kill")
        taken = daemon.count("cgroup/others/memory.stat", "pgsteal") + daemon.count("cgroup/others/memory.events", "oom_kill")
        yield check(f"hostile-crowd: {what}: the slowest pass took {slowest:.2f} s", unless(outcome.status == 0 and kills == 0, complaint(outcome)),
                    unless(slowest < slowest_allowed, "it was held up"), unless(taken > 0, "the others were not pressed"))
        others.kill()
        yield check(f"hostile-crowd: {what}: the daemon ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


@test("foreign-family", 30, beside=True)
def family(context: Context, test):
    """A job that root starts by way of a setuid program in a user's session is root's, and in the group that root names."""
    need_root()
    program = context.program("asroot")
    daemon = open_daemon(context)
    daemon.ask("mkdir", "roots")
    program.chmod(0o4755)
    try:
        line = f"sleep 0.5; exec {program} {daemon.socket} {context.uzswap}"
        theirs = daemon.start(["setsid", "-w", "sh", "-c", line], "--cgroup", "theirs", "--quiet", prefix=NOBODY)
        roots = lambda: daemon.procs("cgroup/roots")
        in_roots = wait_until(roots, 10)
        process = next(iter(roots()), None)
        daemon.ask("set", "cgroup/theirs/cgroup.kill", "1", prefix=NOBODY)
        time.sleep(0.3)
        lives = process is not None and roots() == [process]
        yield check("foreign-family: in root's group", unless(in_roots, f"in theirs: {daemon.get('cgroup/theirs/cgroup.procs').split()}"),
                    unless(lives, "it died with the user's job"))
    finally:
        program.chmod(0o755)
    daemon.ask("set", "cgroup/roots/cgroup.kill", "1")
    theirs.kill()
    yield check("foreign-family: the daemon ends", unless(daemon.end().status == 0, "status"), *daemon.is_gone())


# Forks once for each line that it reads; the child lives until it has long been attached.
FORKS = """
import os, sys, time
for line in sys.stdin:
    child = os.fork()
    if not child:
        time.sleep(2)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# Listens at an abstract name, in the manager's place, and prints how many bytes the first that connects says.
LISTENS = """
import socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.bind(b"\\0uzswap-" + sys.argv[1].encode())
door.listen(16)
print("listening", flush=True)
door.settimeout(20)
connection = door.accept()[0]
connection.settimeout(5)
print(len(connection.recv(8192)), flush=True)
"""


def lies_in_wait(forker: harness.Job, into=()) -> tuple[str, str, str]:
    """What another user hears who listens at the name of the manager of `forker`, whose program then forks; and what the program says."""
    # While a process executes a program it has that name already, and no environment yet.
    names = lambda: {pid: secret[:16].decode() for pid in forker.pids() if harness.comm(pid).startswith("python3")
                     for secret in harness.read(f"/proc/{pid}/environ").split(b"UZSWAP_JOB=")[1:]}
    found = {}
    wait_until(lambda: found.update(names()) or found, 10)
    python, name = min(found.items())
    enter = [part.format(python) for part in into]
    liar = subprocess.Popen([*enter, *NOBODY, "python3", "-c", LISTENS, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = liar.stdout.readline()
        forker.process.stdin.write(b"\n")
        forker.process.stdin.flush()
        heard, complained = liar.communicate(timeout=30)
        said = lambda: harness.read(forker.files[0]).decode()
        wait_until(said, 10)
        return ready + heard, complained, said()
    finally:
        liar.kill()


@test("false-manager", 90)
def false_manager(context: Context, test):
    """Another user who listens at the manager's name hears nothing: after a daemon was stopped, and in another network namespace."""
    need_root()
    program = ["python3", "-c", FORKS]
    # A child of a job is attached at once if a limit is near.
    daemon = Daemon(context, "--socket-mode", "0666", "--memory-max", "64M")
    job = daemon.start(program, "--memory-max", "32M", "--quiet", stdin=subprocess.PIPE)
    wait_until(daemon.procs, 10)
    stopped = daemon.end()
    heard = lies_in_wait(job)
    job.process.stdin.close()
    outcome = job.wait(20)
    yield check("false-manager: of a daemon that was stopped", unless(stopped.status == 0, complaint(stopped)),
                unless(heard == ("listening\n0\n", "", "7\n"), f"{heard}"), unless(outcome.status == 0, complaint(outcome)))

    job = context.start(["unshare", "-n", *program], "--memory-max", "32M", "--quiet", stdin=subprocess.PIPE)
    heard = lies_in_wait(job, ["nsenter", "--net=/proc/{}/ns/net"])
    job.process.stdin.close()
    outcome = job.wait(20)
    yield check("false-manager: in a network namespace", unless(heard == ("listening\n0\n", "", "7\n"), f"{heard}"),
                unless(outcome.status == 0, complaint(outcome)))


@test("refused-heap", 150, beside=True)
def refused_heap(context: Context, test):
    """The kernel lets no page be filled after it has refused to shrink a heap: such a program is killed, and holds up the end of no daemon."""
    need_root()
    for what in ("heap", "heap-discard"):
        program = [context.program("refused"), what]
        daemon = open_daemon(context)
        stuck = daemon.start(program, "--memory-max", "16M", "--quiet", prefix=NOBODY)
        refused = wait_until(lambda: b"refused" in harness.read(stuck.files[1]), 10)
        stuck.kill()
        start = time.monotonic()
        outcome = daemon.end()
        seconds = time.monotonic() - start
        yield check(f"refused-{what}: the daemon ends", unless(refused, "the heap was shrunk"), unless(outcome.status == 0, complaint(outcome)),
                    unless(seconds < 10, f"after {seconds:.1f} s"), *daemon.is_gone())
        outcome = context.run(program, "--memory-max", "16M", timeout=60)
        yield check(f"refused-{what}: the program is killed", unless(outcome.status == 137 and "does not settle" in outcome.stderr, complaint(outcome)))

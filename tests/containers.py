"""uzswap under the rights and limits of containers: what `doctor` says and what `run` does are the same."""
from __future__ import annotations

import harness
from behaviour import check, unless
from suite import MIB, Context, complaint, need, need_root, test

# What Docker leaves of root's capabilities, with SYS_PTRACE added as the README says.
DOCKER = ("chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod,audit_write,"
          "setfcap,sys_ptrace")


def in_container(argv, memlock: int | str = 8 * MIB) -> list[str]:
    """`argv` with Docker's capabilities and a limit on locked memory."""
    bounds = "-all," + ",".join(f"+{name}" for name in DOCKER.split(","))
    return ["prlimit", f"--memlock={memlock}:{memlock}", "setpriv", f"--bounding-set={bounds}", "--inh-caps=-all",
            *map(str, argv)]


@test("container-memlock", 60, beside=True)
def container_memlock(context: Context, test):
    """Root without CAP_IPC_LOCK under a small limit on locked memory: jobs run, and doctor says what is not locked."""
    need("prlimit", "setpriv")
    need_root()
    directory = context.directory()
    for limit in (64 << 10, 8 * MIB):
        doctor = harness.Job(in_container([context.uzswap, "doctor"], limit), directory).wait(test.seconds)
        argv = context.command([context.program("grow"), 96, 50], "--memory-max", "48M", "--quiet")
        outcome = harness.Job(in_container(argv, limit), directory, uzswap=context.uzswap).wait(test.seconds)
        yield check(f"container-memlock: {limit >> 10} KiB", unless(doctor.status == 0, f"doctor: {complaint(doctor)}"),
                    unless("does not lock its memory" in doctor.stdout, "doctor does not say that nothing is locked"),
                    unless(outcome.status == 0, complaint(outcome)), outcome.hang)


@test("file-size-limit", 60, beside=True)
def file_size_limit(context: Context, test):
    """A limit on the size of files is a full disk to the swap file: the job ends clearly or fits, and nothing kills the manager."""
    need("prlimit")
    argv = context.command([context.program("grow"), 128, 0, "random"], "--memory-max", "48M", "--max-pool", "16M", "--quiet")
    outcome = harness.Job(["prlimit", f"--fsize={16 * MIB}", *argv], context.directory(), uzswap=context.uzswap).wait(test.seconds)
    yield check("file-size-limit: 16 MiB", unless(outcome.status == 137, f"expected status 137: {complaint(outcome)}"),
                unless("out of memory" in outcome.stderr, f"no clear message: {outcome.stderr[:300]!r}"),
                unless("manager died" not in outcome.stderr and "panicked" not in outcome.stderr, outcome.stderr[:300]),
                outcome.hang)

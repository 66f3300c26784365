//! Raw Linux system calls, x86-64.
//!
//! # Safety
//! A system call is as safe as its arguments; the wrappers here take care of the number and the registers only.
//! Results are as the kernel gives them: a negative errno for failure.

use core::arch::asm;
use core::ffi::CStr;

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("the agent knows the system calls of x86-64 Linux only");

pub const SYS_READ: usize = 0;
pub const SYS_LSEEK: usize = 8;
pub const SYS_PREAD64: usize = 17;
pub const SYS_POLL: usize = 7;
pub const SYS_MMAP: usize = 9;
pub const SYS_MPROTECT: usize = 10;
pub const SYS_MUNMAP: usize = 11;
pub const SYS_RT_SIGPROCMASK: usize = 14;
pub const SYS_IOCTL: usize = 16;
pub const SYS_MADVISE: usize = 28;
pub const SYS_SHMAT: usize = 30;
pub const SYS_SHMCTL: usize = 31;
pub const SYS_SHMDT: usize = 67;
pub const SYS_MREMAP: usize = 25;
pub const SYS_GETPID: usize = 39;
pub const SYS_SOCKET: usize = 41;
pub const SYS_CONNECT: usize = 42;
pub const SYS_SENDMSG: usize = 46;
pub const SYS_RECVMSG: usize = 47;
pub const SYS_GETSOCKOPT: usize = 55;
pub const SYS_CLONE: usize = 56;
pub const SYS_WAIT4: usize = 61;
pub const SYS_CHDIR: usize = 80;
pub const SYS_UNLINK: usize = 87;
pub const SYS_GETPPID: usize = 110;
pub const SYS_SETSID: usize = 112;
pub const SYS_PRCTL: usize = 157;
pub const SYS_FUTEX: usize = 202;
pub const SYS_EXIT_GROUP: usize = 231;
pub const SYS_PROCESS_VM_READV: usize = 310;
pub const SYS_KCMP: usize = 312;
pub const SYS_CLOSE: usize = 3;
pub const SYS_WRITE: usize = 1;
pub const SYS_USERFAULTFD: usize = 323;
pub const SYS_PIDFD_SEND_SIGNAL: usize = 424;
pub const SYS_FSTAT: usize = 5;
pub const SYS_PIDFD_OPEN: usize = 434;
pub const SYS_CLOSE_RANGE: usize = 436;
pub const SYS_CLONE3: usize = 435;
pub const SYS_PROCESS_MADVISE: usize = 440;
pub const SYS_IO_SETUP: usize = 206;
pub const SYS_IO_SUBMIT: usize = 209;
pub const SYS_IO_URING_SETUP: usize = 425;
pub const SYS_IO_URING_REGISTER: usize = 427;
pub const SYS_MSEAL: usize = 462;
pub const SYS_MUNLOCK: usize = 150;
pub const SYS_WAITID: usize = 247;
pub const SYS_GETSID: usize = 124;
pub const SYS_KILL: usize = 62;
pub const SYS_READLINK: usize = 89;
pub const SYS_FLOCK: usize = 73;
pub const SYS_GETDENTS64: usize = 217;
pub const SYS_OPENAT: usize = 257;

pub const ESRCH: isize = 3;
pub const EAGAIN: isize = 11;
pub const EACCES: isize = 13;
pub const ENFILE: isize = 23;
pub const EMFILE: isize = 24;
pub const EBUSY: isize = 16;
pub const EFAULT: isize = 14;
pub const EEXIST: isize = 17;
pub const EINVAL: isize = 22;
pub const ENOENT: isize = 2;
pub const EINTR: isize = 4;

/// Any system call.
///
/// # Safety
/// As the system call demands of its arguments.
#[inline]
pub unsafe fn syscall(number: usize, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel clobbers rcx and r11 only; what else happens is the caller's promise.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") args[0], in("rsi") args[1],
            in("rdx") args[2], in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// A system call of up to six arguments; those not given are 0.
macro_rules! call {
    ($number:expr $(, $arg:expr)* $(,)?) => {{
        let mut args = [0usize; 6];
        let given = [$($arg as usize),*];
        args[..given.len()].copy_from_slice(&given);
        $crate::sys::syscall($number, args)
    }};
}
pub(crate) use call;

/// Whether the result of a system call, which may be an address, is an error.
pub fn is_error(result: isize) -> bool {
    (-4095..0).contains(&result)
}

/// Kills this process.
pub fn die() -> ! {
    const SIGKILL: usize = 9;
    // SAFETY: no pointers. A filter of system calls that does not let it through ends the process as well.
    unsafe {
        call!(SYS_KILL, call!(SYS_GETPID), SIGKILL);
    }
    exit(137)
}

/// Kills a process that `clone_memory` made, and which was not collected.
pub fn kill(pid: isize) {
    const SIGKILL: usize = 9;
    // SAFETY: no pointers.
    unsafe { call!(SYS_KILL, pid, SIGKILL) };
}

/// Opens a file to read it, below `directory` if the path is relative. Gives a negative errno if that fails.
pub fn open(directory: isize, path: &CStr) -> isize {
    // SAFETY: a C string; no mode is wanted.
    unsafe { call!(SYS_OPENAT, directory, path.as_ptr(), 0, 0) }
}

/// Kills the process that a pidfd, or a directory `/proc/PID`, stands for.
pub fn kill_by(handle: isize) {
    const SIGKILL: usize = 9;
    signal_by(handle, SIGKILL);
}

/// Has a stopped process go on.
pub fn continue_by(handle: isize) {
    const SIGCONT: usize = 18;
    signal_by(handle, SIGCONT);
}

fn signal_by(handle: isize, signal: usize) {
    // SAFETY: no signal information.
    unsafe { call!(SYS_PIDFD_SEND_SIGNAL, handle, signal, 0, 0) };
}

/// Has the kernel kill the calling process when the thread that made it ends, or no longer.
pub fn die_with_parent(dies: bool) {
    const PR_SET_PDEATHSIG: usize = 1;
    const SIGKILL: usize = 9;
    // SAFETY: no pointers.
    unsafe { call!(SYS_PRCTL, PR_SET_PDEATHSIG, if dies { SIGKILL } else { 0 }) };
}

/// Ends this process.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: no pointers.
        unsafe { call!(SYS_EXIT_GROUP, status) };
    }
}

/// Share the descriptor table, too.
pub const CLONE_FILES: usize = 0x400;
/// Wait until the new process has ended.
pub const CLONE_VFORK: usize = 0x4000;

/// Clones the caller into a process of its own that shares its memory, and has it call `entry(argument)` on the stack
/// that ends at `stack_top`. Returns the new process's id or a negative errno.
///
/// No exit signal: the new process is invisible to a plain `wait`. Nor does a tracer that follows forks get it (`strace -f`): it
/// would stop the worker, and may itself wait for a page that only the worker can make room for.
///
/// # Safety
/// `stack_top` ends a writable stack large enough for `entry`, 16-byte aligned, that nobody else uses and that stays
/// mapped while the new process lives. All signals are blocked by the caller (their handlers belong to the program).
pub unsafe fn clone_memory<T>(
    flags: usize,
    stack_top: *mut u8,
    entry: extern "C" fn(*const T) -> !,
    argument: *const T,
) -> isize {
    const CLONE_VM: usize = 0x100;
    const CLONE_UNTRACED: usize = 0x80_0000;
    let result: isize;
    // SAFETY: the parent side is an ordinary system call. The child side has all registers but rax and rsp as they
    // were, starts on its own stack, and never returns into this frame.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") SYS_CLONE as isize => result,
            in("rdi") CLONE_VM | CLONE_UNTRACED | flags, in("rsi") stack_top, in("rdx") 0, in("r10") 0, in("r8") 0,
            in("r12") argument, in("r13") entry,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Collects a process that `clone_memory` made and that has ended.
pub fn collect(pid: isize) {
    const WCLONE: usize = 0x8000_0000;
    // SAFETY: no status is asked for.
    unsafe { call!(SYS_WAIT4, pid, 0, WCLONE, 0) };
}

/// Whether a process that `clone_memory` made has ended; it is collected then.
pub fn has_ended(pid: isize) -> bool {
    const WNOHANG_WCLONE: usize = 0x8000_0001;
    // SAFETY: no status is asked for.
    unsafe { call!(SYS_WAIT4, pid, 0, WNOHANG_WCLONE, 0) == pid }
}

/// Collects children that `clone_memory` made, have left the caller's session and have exited with status 0, as far as no other one lies
/// before them. A process that has executed another program does not know their numbers any more.
pub fn collect_exited() {
    const P_ALL: usize = 0;
    // WEXITED, WNOHANG, __WCLONE; and WNOWAIT.
    const ENDED: usize = 0x8000_0005;
    const LOOK: usize = 0x0100_0000;
    const CLD_EXITED: i32 = 1;
    loop {
        let mut info = [0i32; 32];
        // SAFETY: the structure is as long as the kernel's `siginfo_t`.
        let looked = unsafe { call!(SYS_WAITID, P_ALL, 0, &raw mut info, ENDED | LOOK, 0) };
        let (code, pid, status) = (info[2], info[4] as isize, info[6]);
        // SAFETY: no pointers.
        if looked < 0 || (code, status) != (CLD_EXITED, 0) || unsafe { call!(SYS_GETSID, pid) } != pid {
            return;
        }
        collect(pid);
    }
}

/// Whether `pid` is, in this process's pid namespace, the process whose pidfds have the inode number `inode`: no other has, in any
/// namespace (Linux 6.9). None where that cannot be told.
pub fn is_process(pid: i32, inode: u64) -> Option<bool> {
    // SAFETY: no pointers; the descriptor is our own.
    unsafe {
        let process = call!(SYS_PIDFD_OPEN, pid, 0);
        if process < 0 {
            return (process == -ESRCH).then_some(false);
        }
        let found = inode_of(process as i32);
        call!(SYS_CLOSE, process);
        found.map(|found| found == inode)
    }
}

/// Whether a pidfd is that of this process, or stands for whoever uses it (Linux 6.14). True also where that cannot be told.
pub fn is_own(process: i32) -> bool {
    const PIDFD_SELF_THREAD: i32 = -10000;
    const PIDFD_SELF_PROCESS: i32 = -20000;
    // SAFETY: no pointers.
    let own = || unsafe { call!(SYS_GETPID) as i32 };
    let is_given = |inode| is_process(own(), inode).unwrap_or(true);
    matches!(process, PIDFD_SELF_THREAD | PIDFD_SELF_PROCESS) || inode_of(process).is_none_or(is_given)
}

/// The inode number of this process's pid namespace, or with `forked` of the one that what it forks is put into. None where the kernel does
/// not tell (before Linux 6.11).
pub fn pid_namespace(forked: bool) -> Option<u64> {
    const PIDFD_GET_PID_NAMESPACE: usize = 0xff05;
    const PIDFD_GET_PID_FOR_CHILDREN_NAMESPACE: usize = 0xff06;
    let which = if forked { PIDFD_GET_PID_FOR_CHILDREN_NAMESPACE } else { PIDFD_GET_PID_NAMESPACE };
    // SAFETY: no pointers; the descriptors are our own.
    unsafe {
        let own = call!(SYS_PIDFD_OPEN, call!(SYS_GETPID), 0);
        let namespace = call!(SYS_IOCTL, own, which, 0);
        call!(SYS_CLOSE, own);
        if namespace < 0 {
            return None;
        }
        let inode = inode_of(namespace as i32);
        call!(SYS_CLOSE, namespace);
        inode
    }
}

/// The inode number of an open file.
pub fn inode_of(descriptor: i32) -> Option<u64> {
    // `st_ino` is the second word of `struct stat`.
    let mut stat = [0u64; 18];
    // SAFETY: a buffer of the size of `struct stat`.
    let result = unsafe { call!(SYS_FSTAT, descriptor, stat.as_mut_ptr()) };
    (result >= 0).then_some(stat[1])
}

/// Whether this process is in the namespace whose inode number is `inode`, of the kind that `kind`, as `pid`, and its `link` in /proc
/// name. False where that cannot be told. The kernel makes three files of /proc for the answer: it takes 15 microseconds.
pub fn is_in_namespace(link: &CStr, kind: &str, inode: u64) -> bool {
    let mut text = [0u8; 32];
    // SAFETY: a C string, and a buffer of the size that is said.
    let len = unsafe { call!(SYS_READLINK, link.as_ptr(), text.as_mut_ptr(), text.len()) };
    let Some(digits) = text
        .get(..len.max(0) as usize)
        .and_then(|text| text.strip_prefix(kind.as_bytes()))
        .and_then(|text| text.strip_prefix(b":["))
    else {
        return false;
    };
    let digits = digits.iter().take_while(|digit| digit.is_ascii_digit());
    digits.fold(0u64, |number, digit| number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'))) == inode
}

/// The first words of a structure of the program's, `len` bytes at `address`; `None` if it is shorter, or if the kernel says that it cannot
/// be read. `asks`: the kernel may be asked.
pub fn words_at<const N: usize>(address: usize, len: usize, asks: bool) -> Option<[usize; N]> {
    let mut words = [0; N];
    let size = size_of_val(&words);
    if address == 0 || len < size {
        return None;
    }
    let (to, from) = ([words.as_mut_ptr() as usize, size], [address, size]);
    // SAFETY: the kernel writes to `words`, as many bytes as it has, and reads what can be read.
    let ask = || unsafe { call!(SYS_PROCESS_VM_READV, call!(SYS_GETPID), &raw const to, 1, &raw const from, 1, 0) };
    let result = if asks { ask() } else { -EACCES };
    match result {
        result if result == size as isize => Some(words),
        result if result >= 0 || result == -EFAULT => None,
        // SAFETY: where the kernel does not tell, the program is believed, which has the kernel read it next.
        _ => Some(unsafe { (address as *const [usize; N]).read_unaligned() }),
    }
}

/// Whether orphans among this process's descendants become its children.
pub fn is_subreaper() -> bool {
    const PR_GET_CHILD_SUBREAPER: usize = 37;
    let mut is_set = 0i32;
    // SAFETY: the kernel writes one int.
    unsafe { call!(SYS_PRCTL, PR_GET_CHILD_SUBREAPER, &raw mut is_set) };
    is_set != 0
}

/// Blocks every signal; returns the mask as it was.
pub fn block_signals() -> u64 {
    let (all, mut old) = (u64::MAX, 0u64);
    // SAFETY: both masks live on this stack; 8 is the kernel's mask size.
    unsafe { call!(SYS_RT_SIGPROCMASK, 2, &raw const all, &raw mut old, 8) };
    old
}

/// Sets the signal mask.
pub fn restore_signals(mask: u64) {
    // SAFETY: the mask lives on this stack.
    unsafe { call!(SYS_RT_SIGPROCMASK, 2, &raw const mask, 0, 8) };
}

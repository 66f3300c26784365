//! System calls that a program makes past the functions that libc has for them: what is done in `prctl`, `syscall` and `clone`
//! (`interposed`).
//!
//! 1. **Filters of system calls.** A filter may kill for a call that the program does not make itself, such as those of the fork
//!    handler. Whether there is one cannot be asked without a call. So the agent notes when one is installed. A filter that was
//!    there when the program was executed is not noticed: a program whose filter kills for these calls has ended in the constructor.
//! 2. **Forks.** A child that is made by the bare system call, as sandboxes do, runs no fork handler of libc's. It gets the
//!    agent's here.
//! 3. **Hints.** `madvise`, `process_madvise` and `shmat` by way of `syscall` are handled as the functions are (`hints`).
//!
//! # Safety
//! Each function makes the system call that it was asked for, and sets libc's errno as libc does.

use core::arch::{global_asm, naked_asm};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::attach::{before_fork, in_forked_child, weak};
use crate::hints::{self, finish};
use crate::sys::{self, call};

/// Whether this process, or one that it was forked from since it executed its program, has installed a filter.
pub static FILTERED: AtomicBool = AtomicBool::new(false);

/// The second of the two operations of seccomp that install a filter.
const SECCOMP_SET_MODE_FILTER: u32 = 1;

/// Whether the program has installed a filter.
pub fn is_filtered() -> bool {
    FILTERED.load(Relaxed)
}

/// As the libc's, which takes as many arguments as the option wants.
///
/// # Safety
/// As the libc's.
pub unsafe extern "C" fn own_prctl(option: i32, a: usize, b: usize, c: usize, d: usize) -> i32 {
    const PR_SET_SECCOMP: i32 = 22;
    // SAFETY: the program's own request.
    let result = unsafe { call!(sys::SYS_PRCTL, option, a, b, c, d) };
    if option == PR_SET_SECCOMP && result >= 0 {
        FILTERED.store(true, Relaxed);
    }
    // SAFETY: called by the program, in place of libc's.
    unsafe { finish(result) as i32 }
}

/// `madvise` through `syscall`: what `hints` does for the function is done for the call, too.
unsafe extern "C" fn madvise_call(address: usize, len: usize, advice: usize) -> isize {
    // SAFETY: the program's own request, with the arguments that it has given.
    unsafe { hints::own_madvise(address, len, advice as i32) as isize }
}

/// `shmat` through `syscall`, likewise.
unsafe extern "C" fn shmat_call(id: usize, address: usize, flags: usize) -> isize {
    // SAFETY: the program's own request, with the arguments that it has given.
    unsafe { hints::own_shmat(id as i32, address, flags as i32) }
}

/// `process_madvise` through `syscall`, likewise.
unsafe extern "C" fn process_madvise_call(
    process: usize,
    ranges: usize,
    count: usize,
    advice: usize,
    flags: usize,
) -> isize {
    // SAFETY: the program's own request, with the arguments that it has given.
    unsafe { hints::own_process_madvise(process as i32, ranges as _, count, advice as i32, flags as u32) }
}

extern "C" fn note_seccomp(result: isize, operation: u32) -> isize {
    // Others only ask.
    if result >= 0 && operation <= SECCOMP_SET_MODE_FILTER {
        FILTERED.store(true, Relaxed);
    }
    // SAFETY: called by `syscall`, for the program.
    unsafe { finish(result) }
}

/// Makes a system call of which a forked child may come back, with the fork handlers around it.
///
/// The kernel gives the child a copy of this stack, so it returns from here as the parent does.
unsafe extern "C" fn fork_call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) -> isize {
    // CLONE_VM: there is no other memory. CLONE_FILES: a part of its parent, as the manager is of its front.
    const NO_FORK: usize = 0x100 | 0x400;
    let (flags, stack) = match number {
        sys::SYS_CLONE => (a, b),
        // Flags are the first word of `struct clone_args`, the stack the sixth. One that the kernel refuses makes no child.
        sys::SYS_CLONE3 => {
            sys::words_at(a, b, !is_filtered()).map_or((NO_FORK, 0), |words: [usize; 8]| (words[0], words[5]))
        }
        _ => (0, 0),
    };
    let forks = flags & NO_FORK == 0 && stack == 0;
    if forks {
        before_fork();
    }
    // SAFETY: the program's own request.
    let result = unsafe { call!(number, a, b, c, d, e) };
    if forks && result == 0 {
        in_forked_child();
    }
    // SAFETY: called by `syscall`, for the program.
    unsafe { finish(result) }
}

/// What the child of [`own_clone`] is to do.
#[repr(C)]
struct Errand {
    function: extern "C" fn(*mut u8) -> i32,
    argument: *mut u8,
}

extern "C" fn run_errand(errand: *mut u8) -> i32 {
    in_forked_child();
    // SAFETY: the parent's stack, where this was written, is a part of the child's memory.
    let Errand { function, argument } = unsafe { errand.cast::<Errand>().read() };
    function(argument)
}

// Weak, as in `attach`. libc's own name for `clone`.
global_asm!(".weak __clone");

/// As the libc's, which takes as many of the last three arguments as the flags want.
///
/// # Safety
/// As the libc's.
pub unsafe extern "C" fn own_clone(
    function: Option<extern "C" fn(*mut u8) -> i32>,
    stack: *mut u8,
    flags: i32,
    argument: *mut u8,
    parent_tid: *mut i32,
    tls: *mut u8,
    child_tid: *mut i32,
) -> i32 {
    const NO_FORK: i32 = 0x100 | 0x400;
    type Function = extern "C" fn(*mut u8) -> i32;
    type Clone = unsafe extern "C" fn(Option<Function>, *mut u8, i32, *mut u8, *mut i32, *mut u8, *mut i32) -> i32;
    let real = weak!("__clone");
    if real == 0 {
        // SAFETY: called by the program, in place of libc's. A libc that does not have it has no `clone` either.
        return unsafe { finish(-38) as i32 };
    }
    // SAFETY: libc's function under its other name; without CLONE_VM the child has a copy of this stack.
    unsafe {
        let real: Clone = core::mem::transmute(real);
        // Without a function or a stack it is an error.
        let Some(wanted) = function.filter(|_| flags & NO_FORK == 0 && !stack.is_null()) else {
            return real(function, stack, flags, argument, parent_tid, tls, child_tid);
        };
        before_fork();
        let mut errand = Errand { function: wanted, argument };
        real(Some(run_errand), stack, flags, (&raw mut errand).cast(), parent_tid, tls, child_tid)
    }
}

/// As the libc's: the number and up to six arguments, moved to where the kernel wants them. Nothing is pushed, because a call may
/// return twice, on the same stack.
///
/// # Safety
/// As the libc's.
#[unsafe(naked)]
pub unsafe extern "C" fn own_syscall() {
    naked_asm!(
        "cmp rdi, 317", // seccomp, which has three arguments
        "je 2f",
        "cmp rdi, 28", // madvise
        "je 3f",
        "cmp rdi, 30", // shmat
        "je 4f",
        "cmp rdi, 56", // clone
        "je {fork}",
        "cmp rdi, 57", // fork
        "je {fork}",
        "cmp rdi, 435", // clone3
        "je {fork}",
        "cmp rdi, 440", // process_madvise
        "je 5f",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "mov rdi, rax",
        "cmp rax, -4095",
        "jae {finish}",
        "ret",
        "2:",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "syscall",
        "mov rsi, rdi",
        "mov rdi, rax",
        "jmp {seccomp}",
        "3:",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "jmp {madvise}",
        "4:",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "jmp {shmat}",
        "5:",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov rcx, r8",
        "mov r8, r9",
        "jmp {process_madvise}",
        fork = sym fork_call,
        seccomp = sym note_seccomp,
        madvise = sym madvise_call,
        shmat = sym shmat_call,
        process_madvise = sym process_madvise_call,
        finish = sym finish,
    )
}

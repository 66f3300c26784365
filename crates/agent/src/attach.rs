//! Getting into a program: the constructor, and the child side of fork.
//!
//! Both run in a thread of the program and make one worker for its memory. A fork that bypasses libc, and a child that
//! shares its parent's memory (vfork, posix_spawn), are not noticed here and need not be: the first goes on under the
//! userfaultfd it inherited, only without being reclaimed from; the second has its parent's worker.
//!
//! # Safety
//! Reads the environment and two weak symbols as libc defines them; clones as [`sys::clone_worker`] demands.

use core::arch::global_asm;
use core::mem::size_of;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};

use uzswap_proto::{ENV_JOB, Job, PAGE_SIZE};

use crate::area::Region;
use crate::sys::{self, call};
use crate::worker::{self, Control, Program};

/// See [`uzswap_proto::BOARD`]. A page of the file that is mapped here, and that nobody here writes to: it stays the file's.
#[repr(C, align(4096))]
struct BoardPage {
    title: [u8; uzswap_proto::BOARD.len()],
    limits_are_far: AtomicU8,
}

#[used]
#[unsafe(link_section = ".data.board")]
static BOARD: BoardPage = BoardPage { title: uzswap_proto::BOARD, limits_are_far: AtomicU8::new(0) };

const _: () = assert!(size_of::<BoardPage>() == PAGE_SIZE && size_of::<uzswap_proto::Board>() == 1);

/// The job, as found in the environment by the constructor. Written once, before the program has threads.
static JOB_NAME: AtomicU64 = AtomicU64::new(0);
static JOB_TOKEN: AtomicU64 = AtomicU64::new(0);
/// The beacon of this process and its descendants by fork, in all of which it lies at the same place; 0 before there is
/// one.
static BEACON: AtomicUsize = AtomicUsize::new(0);
/// The control block of this process's worker; 0 if it has none.
static CONTROL: AtomicUsize = AtomicUsize::new(0);
/// Whether pages had been evicted from this process when it last forked.
static EVICTED: AtomicBool = AtomicBool::new(false);

/// The job this program belongs to, if any.
pub fn job() -> Option<Job> {
    let name = JOB_NAME.load(Relaxed);
    (name != 0).then(|| Job { name, token: JOB_TOKEN.load(Relaxed) })
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn constructor() {
        let Some(job) = job_from_environment() else { return };
        JOB_NAME.store(job.name, Relaxed);
        JOB_TOKEN.store(job.token, Relaxed);
        register_fork_handler();
        attach(job, false);
    }
    constructor
};

extern "C" fn before_fork() {
    let control = CONTROL.load(Relaxed) as *const Control;
    // SAFETY: the control block stays mapped and, but for its atomics, unchanged as long as the process lives.
    EVICTED.store(!control.is_null() && unsafe { (*control).evicts.load(Relaxed) }, Relaxed);
}

extern "C" fn in_forked_child() {
    if let Some(job) = job() {
        attach(job, true);
    }
}

/// Makes a worker for this process. If that fails the program runs unmanaged, with a warning.
fn attach(job: Job, forked: bool) {
    let inherited = BEACON.load(Relaxed);
    let inherits = forked && EVICTED.load(Relaxed);
    // Far from all limits a program begins at once, and need not have been seen if it ends as soon.
    let may_wait = !inherits && BOARD.limits_are_far.load(Relaxed) == 1;
    CONTROL.store(0, Relaxed);
    let processors = sys::stay_here();
    let made = Region::map().and_then(|region| {
        let control = region.control() as *mut Control;
        // SAFETY: the control block is fresh, zeroed, page-aligned memory of ours, larger than a Control.
        unsafe {
            let beacon = if inherited != 0 { inherited } else { region.beacon() };
            BEACON.store(beacon, Relaxed);
            let id = call!(sys::SYS_GETPID) as i32;
            let program = Program { job, id, forked, inherits, may_wait, processors };
            control.write(Control::new(program, beacon, region));
        }
        let mask = sys::block_signals();
        // SAFETY: the usher's stack is a part of the shared mapping that nobody else uses; it lives as long as the
        // address space; signals are blocked. The usher has ended when the call returns.
        let made = unsafe {
            let usher =
                sys::clone_memory(sys::CLONE_VFORK, region.usher_stack_top() as *mut u8, worker::usher, control);
            if usher > 0 {
                sys::collect(usher);
                (*control).worker.load(Relaxed)
            } else {
                usher
            }
        };
        sys::restore_signals(mask);
        if made < 0 {
            region.unmap();
            BEACON.store(inherited, Relaxed);
            return Err(made);
        }
        CONTROL.store(control as usize, Relaxed);
        Ok(())
    });
    processors.iter().for_each(sys::run_on);
    if made.is_err() {
        let text = b"uzswap: warning: a process runs unmanaged: no memory or process left for its worker\n";
        // SAFETY: writes a constant.
        unsafe { call!(sys::SYS_WRITE, 2, text.as_ptr(), text.len()) };
    }
}

// Weak, so that the library loads where one of them is missing (no libc is linked).
global_asm!(".weak __environ", ".weak __register_atfork", ".weak pthread_atfork");

/// The address of a weak symbol, 0 if nobody defines it.
macro_rules! weak {
    ($symbol:literal) => {{
        let address: usize;
        // SAFETY: loads a pointer from the global offset table.
        unsafe {
            core::arch::asm!(concat!("mov {}, qword ptr [rip + ", $symbol, "@GOTPCREL]"), out(reg) address,
                options(nostack, pure, readonly));
        }
        address
    }};
}
pub(crate) use weak;

fn job_from_environment() -> Option<Job> {
    let environ = weak!("__environ") as *const *const *const u8;
    if environ.is_null() {
        return None;
    }
    // SAFETY: `__environ` is libc's pointer to a null-terminated array of C strings, complete before constructors run.
    unsafe {
        let mut entry = *environ;
        while !entry.is_null() && !(*entry).is_null() {
            if let Some(job) = job_from_entry(*entry) {
                return Some(job);
            }
            entry = entry.add(1);
        }
    }
    None
}

/// # Safety
/// `entry` is a C string.
unsafe fn job_from_entry(entry: *const u8) -> Option<Job> {
    let mut text = entry;
    for expected in ENV_JOB.bytes().chain(*b"=") {
        // SAFETY: every byte so far was equal to a byte that is not 0, so the string goes on.
        unsafe {
            if *text != expected {
                return None;
            }
            text = text.add(1);
        }
    }
    let mut len = 0;
    // SAFETY: stops at the end of the string.
    while len <= uzswap_proto::JOB_TEXT && unsafe { *text.add(len) } != 0 {
        len += 1;
    }
    // SAFETY: `len` bytes were just read.
    Job::from_text(unsafe { core::slice::from_raw_parts(text, len) })
}

fn register_fork_handler() {
    type Handler = Option<extern "C" fn()>;
    let glibc = weak!("__register_atfork");
    let posix = weak!("pthread_atfork");
    if glibc != 0 {
        // SAFETY: glibc's own signature; no object handle: the handler is never unregistered.
        let register: extern "C" fn(Handler, Handler, Handler, *const u8) -> i32 =
            unsafe { core::mem::transmute(glibc) };
        register(Some(before_fork), None, Some(in_forked_child), core::ptr::null());
    } else if posix != 0 {
        // SAFETY: the signature of POSIX.
        let register: extern "C" fn(Handler, Handler, Handler) -> i32 = unsafe { core::mem::transmute(posix) };
        register(Some(before_fork), None, Some(in_forked_child));
    }
}

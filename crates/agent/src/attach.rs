//! Getting into a program: the constructor, and the child side of fork.
//!
//! Both run in a thread of the program and make one worker for its memory. A fork that bypasses libc, and a child that
//! shares its parent's memory (vfork, posix_spawn), are not noticed here and need not be: the first goes on under the
//! userfaultfd it inherited, only without being reclaimed from, and has its parent's heirloom (`tether.rs`); the second has its
//! parent's worker.
//!
//! The first word of the beacon page tells which memory this is: the kernel empties that page in each child. Whatever the
//! statics say of a worker is of the process that wrote them, and holds only where the beacon says that it is this one.
//!
//! A program that has installed a filter of system calls may be killed for a call that it would not make itself. Its children
//! get no worker; what they have inherited is served all the same.
//!
//! # Safety
//! Reads the environment and two weak symbols as libc defines them; clones as [`sys::clone_worker`] demands.

use core::arch::global_asm;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};

use uzswap_proto::{
    BOARD, BOARD_LANDMARK, BOARD_OWNER, BOARD_PID_NAMESPACE, BOARD_SOCKET_PATH, BOARD_USER_NAMESPACE, ENV_JOB, Job,
    Nonce, PAGE_SIZE, SOCKET_PATH, beacon,
};

use crate::area::Region;
use crate::calls;
use crate::interposed;
use crate::sys::{self, call};
use crate::tether;
use crate::worker::{self, Control, Program};

/// See [`uzswap_proto::BOARD`]. A page of the file that is mapped here, and that nothing here writes to: it stays the file's.
#[repr(C, align(4096))]
struct BoardPage {
    title: [u8; BOARD.len()],
    limits_are_far: AtomicU8,
    /// The inode number of the manager's pid namespace.
    pid_namespace: AtomicU64,
    landmark: Landmark,
    /// The manager's user.
    owner: AtomicU64,
    /// The inode number of the manager's user namespace.
    user_namespace: AtomicU64,
    socket_path: [u8; SOCKET_PATH],
}

/// A process of the manager's pid namespace.
#[repr(C)]
struct Landmark {
    pid: AtomicU64,
    /// Of its pidfds; 0 if that tells nothing.
    inode: AtomicU64,
}

impl BoardPage {
    /// Tells whether this process is in the manager's pid namespace. False where that cannot be told.
    fn is_in_managers_pid_namespace(&self) -> bool {
        let is_there = match self.landmark.inode.load(Relaxed) {
            0 => None,
            inode => sys::is_process(self.landmark.pid.load(Relaxed) as i32, inode),
        };
        is_there.unwrap_or_else(|| sys::is_in_namespace(c"/proc/self/ns/pid", "pid", self.pid_namespace.load(Relaxed)))
    }

    /// Whether what this process forks is put into another pid namespace than it is itself, as after `unshare(CLONE_NEWPID)`. False where that
    /// cannot be told.
    fn forks_into_other_namespace(&self) -> bool {
        let forked = sys::pid_namespace(true);
        forked != Some(self.pid_namespace.load(Relaxed)) && forked != sys::pid_namespace(false)
    }
}

#[used]
#[unsafe(link_section = ".data.board")]
static BOARD_PAGE: BoardPage = BoardPage {
    title: BOARD,
    limits_are_far: AtomicU8::new(0),
    pid_namespace: AtomicU64::new(0),
    landmark: Landmark { pid: AtomicU64::new(0), inode: AtomicU64::new(0) },
    owner: AtomicU64::new(0),
    user_namespace: AtomicU64::new(0),
    socket_path: [0; SOCKET_PATH],
};

const _: () = assert!(size_of::<BoardPage>() == PAGE_SIZE && size_of::<uzswap_proto::Board>() == 1);
const _: () = assert!(offset_of!(BoardPage, pid_namespace) == BOARD.len() + BOARD_PID_NAMESPACE);
const _: () = assert!(offset_of!(BoardPage, landmark) == BOARD.len() + BOARD_LANDMARK);
const _: () = assert!(offset_of!(BoardPage, owner) == BOARD.len() + BOARD_OWNER);
const _: () = assert!(offset_of!(BoardPage, user_namespace) == BOARD.len() + BOARD_USER_NAMESPACE);
const _: () = assert!(offset_of!(BoardPage, socket_path) == BOARD.len() + BOARD_SOCKET_PATH);

/// The job, as found in the environment by the constructor. Written once, before the program has threads.
static JOB_NAME: AtomicU64 = AtomicU64::new(0);
static JOB_TOKEN: AtomicU64 = AtomicU64::new(0);
/// The beacon of this process and its descendants by fork, in all of which it lies at the same place; 0 before there is
/// one.
static BEACON: AtomicUsize = AtomicUsize::new(0);
/// The heirloom of this process (`tether.rs`) when it last forked, or 0.
static HEIRLOOM: AtomicUsize = AtomicUsize::new(0);
/// The control block of this process's worker; 0 if it has none.
static CONTROL: AtomicUsize = AtomicUsize::new(0);
/// Whether this process had evicted pages, or inherited some, when it last forked.
static INHERITABLE: AtomicBool = AtomicBool::new(false);

/// The path of the manager's socket, as the manager wrote it into the file.
pub fn socket_path() -> [u8; SOCKET_PATH] {
    // SAFETY: a static; the compiler is not to take it for what it was when the library was built.
    unsafe { (&raw const BOARD_PAGE.socket_path).read_volatile() }
}

/// The inode number of pidfds for the process that has opened the manager's sockets; 0 where that tells nothing.
pub fn landmark_inode() -> u64 {
    BOARD_PAGE.landmark.inode.load(Relaxed)
}

/// The user that the manager runs as.
pub fn owner() -> u32 {
    BOARD_PAGE.owner.load(Relaxed) as u32
}

/// Whether this process is in the manager's user namespace. False where that cannot be told.
pub fn is_in_managers_user_namespace() -> bool {
    sys::is_in_namespace(c"/proc/self/ns/user", "user", BOARD_PAGE.user_namespace.load(Relaxed))
}

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
        interposed::find_next();
        if BOARD_PAGE.forks_into_other_namespace() {
            // The worker would be the first process there, in place of the first child.
            warn(b"uzswap: warning: a process runs unmanaged: what it forks is put into another pid namespace (unshare without --fork)\n");
        } else {
            attach(job, None);
        }
    }
    constructor
};

/// The control block of this process's worker, if it has one.
fn control() -> Option<&'static Control> {
    let control = CONTROL.load(Relaxed) as *const Control;
    let is_own = look_at_beacon()[0] == beacon::ATTACHED;
    // SAFETY: the beacon says that this memory is the one that the worker was made for: there the control block stays mapped and,
    // but for its atomics, unchanged.
    if is_own { unsafe { control.as_ref() } } else { None }
}

/// Whether pages of this process have been evicted; true also of a forked child without a worker, which may have inherited such.
pub fn evicts() -> bool {
    control().map_or_else(|| BEACON.load(Relaxed) != 0, |control| control.evicts.load(Relaxed))
}

/// To be called before a fork, in the thread that forks.
pub extern "C" fn before_fork() {
    let first = look_at_beacon()[0];
    if first != beacon::ATTACHED {
        // This process was cloned past libc: it has no worker, and the control block is not mapped here.
        CONTROL.store(0, Relaxed);
    }
    let control = control();
    INHERITABLE.store(first == beacon::INHERITED || control.is_some_and(|own| own.evicts.load(Relaxed)), Relaxed);
    if let Some(heirloom @ 1..) = control.map(|own| own.heirloom.load(Relaxed)) {
        HEIRLOOM.store(heirloom, Relaxed);
    }
}

/// To be called in a forked child before anything else.
pub extern "C" fn in_forked_child() {
    let Some(job) = job() else { return };
    let (inherits, is_filtered) = (INHERITABLE.load(Relaxed), calls::is_filtered());
    if is_filtered {
        // The manager is to find out which process this is: no worker will tell it.
        write_to_beacon();
    }
    // A thread that touches the beacon waits if the manager is gone and the memory keeps its userfaultfd open. So where there will be a
    // worker, the worker does it, which can be ended.
    let nonce = match if inherits && !is_filtered { [0; 3] } else { look_at_beacon() } {
        [beacon::INHERITED, low, high] => Some([low, high]),
        _ => None,
    };
    if is_filtered {
        if inherits && nonce.is_none() {
            // No manager has answered: it is gone, and with it what this process has inherited.
            sys::die();
        }
        CONTROL.store(0, Relaxed);
        return;
    }
    attach(job, Some(Inheritance { nonce, inherits }));
}

/// The first words of the beacon page. In a forked child of a process whose memory is watched, that is a fault that the manager
/// answers; if the manager is gone the page reads as zeros.
fn look_at_beacon() -> [u64; 3] {
    let page = BEACON.load(Relaxed) as *const [u64; 3];
    // SAFETY: the beacon is mapped in all descendants by fork of the process that has set this.
    if page.is_null() { [0; 3] } else { unsafe { page.read_volatile() } }
}

/// Writes to the beacon page of a process that has no worker; not where words are.
fn write_to_beacon() {
    let page = BEACON.load(Relaxed) as *mut u64;
    if !page.is_null() {
        // SAFETY: as above; nothing else is in this word.
        unsafe { page.add(PAGE_SIZE / size_of::<u64>() - 1).write_volatile(0) };
    }
}

/// What a forked child has of its parent.
struct Inheritance {
    /// What the manager wrote into its beacon, if it did; of a child that inherits its worker finds it out.
    nonce: Option<Nonce>,
    /// Whether it may have inherited evicted pages.
    inherits: bool,
}

/// Makes a worker for this process. If that fails the program runs unmanaged, with a warning.
fn attach(job: Job, inheritance: Option<Inheritance>) {
    let inherited = BEACON.load(Relaxed);
    let forked = inheritance.is_some();
    let Inheritance { nonce, inherits } = inheritance.unwrap_or(Inheritance { nonce: None, inherits: false });
    // Far from all limits a program begins at once, and need not have been seen if it ends as soon.
    let may_wait = !inherits && BOARD_PAGE.limits_are_far.load(Relaxed) == 1;
    CONTROL.store(0, Relaxed);
    let made = Region::map().and_then(|region| {
        let control = region.control() as *mut Control;
        // SAFETY: the control block is fresh, zeroed, page-aligned memory of ours, larger than a Control.
        unsafe {
            let beacon = if inherited != 0 { inherited } else { region.beacon() };
            BEACON.store(beacon, Relaxed);
            let id = call!(sys::SYS_GETPID) as i32;
            let program = Program { job, id, forked, inherits, nonce, may_wait };
            control.write(Control::new(program, beacon, region));
        }
        let mask = sys::block_signals();
        let made = start_worker(region, control);
        sys::restore_signals(mask);
        if made < 0 {
            region.unmap();
            BEACON.store(inherited, Relaxed);
            return Err(made);
        }
        CONTROL.store(control as usize, Relaxed);
        // SAFETY: as above.
        let own = unsafe { (*control).heirloom.load(Relaxed) };
        let inherited = HEIRLOOM.load(Relaxed);
        if forked && inherited != 0 && own != 0 {
            tether::give_up(inherited);
            HEIRLOOM.store(own, Relaxed);
        }
        // SAFETY: the beacon is the agent's own page, private and writable.
        unsafe { (BEACON.load(Relaxed) as *mut u64).write_volatile(beacon::ATTACHED) };
        Ok(())
    });
    if made.is_err() {
        if inherits && look_at_beacon()[0] != beacon::INHERITED {
            sys::die();
        }
        warn(b"uzswap: warning: a process runs unmanaged: no memory or process left for its worker\n");
    }
}

fn warn(text: &[u8]) {
    // SAFETY: `write` reads the text.
    unsafe { call!(sys::SYS_WRITE, 2, text.as_ptr(), text.len()) };
}

/// Clones the worker, and waits until the program may run; gives its process id, 0 if none is wanted, or a negative errno.
/// All signals are blocked.
fn start_worker(region: Region, control: *const Control) -> isize {
    // SAFETY: the stacks are parts of the shared mapping that no other thread uses; they live as long as the address space. The
    // usher has ended when its call returns. The worker only ever changes the control block's atomics.
    unsafe {
        if BOARD_PAGE.is_in_managers_pid_namespace() && !sys::is_subreaper() {
            let usher =
                sys::clone_memory(sys::CLONE_VFORK, region.usher_stack_top() as *mut u8, worker::usher, control);
            if usher > 0 {
                sys::collect(usher);
                (*control).worker.load(Relaxed)
            } else {
                usher
            }
        } else {
            // Those of programs that this process has executed before.
            sys::collect_exited();
            let worker = sys::clone_memory(0, region.stack_top() as *mut u8, worker::alone, control);
            if worker > 0 && !(*control).may_wait() && !(*control).wait_until_settled(worker) {
                sys::die();
            }
            worker
        }
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

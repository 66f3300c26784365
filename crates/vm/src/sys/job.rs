//! What the front process of a job needs: the manager's process, signals, children, and what it has inherited to hand on to the program.
//!
//! # Safety
//! Cloning happens in a process with one thread. Signal functions get structures of their own.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::mem::zeroed;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::time::Duration;

use super::memory;

/// Clones this process into one that has its own memory but the same descriptor table: what one opens the other has,
/// and it stays open until both are gone. Gives the child's id, or 0 in the child.
///
/// To be called while the process has one thread.
pub fn clone_sharing_descriptors() -> io::Result<i32> {
    memory::make_room_for_descriptors();
    // SAFETY: without a new stack and without CLONE_VM this is fork, with a shared descriptor table. With one thread no
    // lock can be left held in the child.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) };
    super::check(pid as libc::c_int)
}

/// Ends this process at once; no destructor runs, so no descriptor that is shared gets closed.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: no pointers.
    unsafe { libc::_exit(status) }
}

/// Takes this process out of its mount namespace, into a copy.
pub fn leave_mount_namespace() -> io::Result<()> {
    // SAFETY: no pointers; descriptors stay what they are.
    super::check(unsafe { libc::unshare(libc::CLONE_NEWNS) }).map(drop)
}

/// Adopts orphaned descendants, so that none escapes.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: no pointers.
    super::check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) }).map(drop)
}

/// Names this process in `ps`; leaves the session and process group, so that signals of the terminal pass by. A write past the
/// limit on the size of files (RLIMIT_FSIZE) becomes an error, as on a full disk, and no signal.
pub fn become_background(name: &str) {
    let name = CString::new(name).expect("a name without zero bytes");
    // SAFETY: ignoring a signal calls no code of ours. The name is a C string. setsid fails only for a group leader, which a fresh child is not.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        libc::setsid();
    }
}

/// Sets the niceness, −20 to 19, of the session of this process as a whole, where the kernel divides the processors among sessions
/// first (`autogroup`). It takes a right to go below 0.
pub fn set_session_niceness(niceness: i32) -> io::Result<()> {
    std::fs::write("/proc/self/autogroup", niceness.to_string())
}

/// Sends a signal to a process; an error if it is gone.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    super::check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// What this process was started with, as the run-time system of Rust changes it before `main`: whether SIGPIPE was ignored, and which of the
/// first three descriptors were closed, a bit for each.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Called by the dynamic linker.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = look_at_inherited;

extern "C" fn look_at_inherited() {
    PIPE_WAS_IGNORED.store(is_ignored(libc::SIGPIPE), Relaxed);
    // SAFETY: no pointers.
    let is_closed = |descriptor: &i32| unsafe { libc::fcntl(*descriptor, libc::F_GETFD) } < 0;
    CLOSED.store((0..3).filter(is_closed).map(|descriptor| 1 << descriptor).sum(), Relaxed);
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: all zeros is a valid structure, which the kernel fills.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

/// Signals that are waited for instead of delivered.
#[derive(Debug)]
pub struct Signals {
    waited_for: libc::sigset_t,
    before: libc::sigset_t,
    /// Whether this process began with SIGCHLD ignored. `block` ends that, because the kernel would not tell how
    /// children end; `restore_in` passes it on to the program.
    child_was_ignored: bool,
}

/// A signal that came.
#[derive(Clone, Copy)]
pub struct Signal(libc::siginfo_t);

impl Signal {
    /// Its number.
    pub fn number(&self) -> i32 {
        self.0.si_signo
    }

    /// The process that sent it; 0 if that is in another pid namespace. None if the kernel or the terminal did.
    pub fn sender(&self) -> Option<i32> {
        let is_sent = [libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL].contains(&self.0.si_code);
        // SAFETY: the kernel fills this in for signals that were sent.
        is_sent.then(|| unsafe { self.0.si_pid() })
    }

    /// Sends it to a process, with the value that it came with (`sigqueue`); an error if the process is gone.
    pub fn pass_on(&self, pid: i32) -> io::Result<()> {
        if self.0.si_code != libc::SI_QUEUE {
            return kill(pid, self.number());
        }
        // SAFETY: the kernel reads a structure that it has filled in.
        let sent = unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, pid, self.number(), &raw const self.0) };
        super::check(sent as libc::c_int).map(drop)
    }
}

impl Signals {
    /// Blocks `numbers` in this thread (and those it starts), to be waited for. SIGCHLD is ignored no longer.
    pub fn block(numbers: &[i32]) -> Signals {
        // SAFETY: the set is initialised by sigemptyset.
        unsafe {
            let (mut waited_for, mut before) = (zeroed(), zeroed());
            libc::sigemptyset(&raw mut waited_for);
            for &number in numbers {
                libc::sigaddset(&raw mut waited_for, number);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const waited_for, &raw mut before);
            let child_was_ignored = is_ignored(libc::SIGCHLD);
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            Signals { waited_for, before, child_was_ignored }
        }
    }

    /// Has `command` start with the signals blocked and ignored, and the first descriptors closed, that this process was started with.
    pub fn restore_in(&self, command: &mut Command) {
        let (before, ignores_child) = (self.before, self.child_was_ignored);
        let restore = move || {
            // SAFETY: the set is a copy; the calls are safe between fork and exec. What is closed is `/dev/null`, in the place of nothing.
            unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
                if ignores_child {
                    libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                }
                if PIPE_WAS_IGNORED.load(Relaxed) {
                    libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                }
                for descriptor in (0..3).filter(|descriptor| CLOSED.load(Relaxed) & 1 << descriptor != 0) {
                    libc::close(descriptor);
                }
            }
            Ok(())
        };
        // SAFETY: the closure makes system calls and nothing else.
        unsafe { command.pre_exec(restore) };
    }

    /// Waits for one of them.
    pub fn wait(&self, patience: Duration) -> Option<Signal> {
        let timeout = libc::timespec {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(patience.subsec_nanos() as i32),
        };
        // SAFETY: all structures are on this stack.
        unsafe {
            let mut info: libc::siginfo_t = zeroed();
            let number = libc::sigtimedwait(&raw const self.waited_for, &raw mut info, &raw const timeout);
            (number > 0).then_some(Signal(info))
        }
    }
}

/// Something that happened to a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Child {
    /// It exited with this status, or 128 + the signal that killed it.
    Ended(i32),
    /// It was stopped.
    Stopped,
    /// It was continued.
    Continued,
}

/// Collects one child's news, if there is some.
pub fn collect_child() -> Option<(i32, Child)> {
    const NEWS: i32 = libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED | libc::__WALL;
    let mut status = 0;
    // SAFETY: the status lives on this stack.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, NEWS) };
    if pid <= 0 {
        return None;
    }
    let news = if libc::WIFSTOPPED(status) {
        Child::Stopped
    } else if libc::WIFCONTINUED(status) {
        Child::Continued
    } else if libc::WIFSIGNALED(status) {
        Child::Ended(128 + libc::WTERMSIG(status))
    } else {
        Child::Ended(libc::WEXITSTATUS(status))
    };
    Some((pid, news))
}

/// Collects the child `pid`, if it is one and has ended.
pub fn collect_dead_child(pid: i32) {
    // SAFETY: no pointers: the status is not wanted.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) };
}

/// A random number from the kernel.
pub fn random() -> io::Result<u64> {
    let mut number = [0];
    fill_random(&mut number)?;
    Ok(number[0])
}

/// Fills `words`, at most 32, with random numbers from the kernel.
pub fn fill_random(words: &mut [u64]) -> io::Result<()> {
    // SAFETY: the buffer is as long as said.
    let got = unsafe { libc::getrandom(words.as_mut_ptr().cast(), size_of_val(words), 0) };
    if got == size_of_val(words) as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
}

//! Holding the threads of other processes, unseen by them and by their parents.
//!
//! By PTRACE_SEIZE and PTRACE_INTERRUPT: no signal is sent, nobody waits for the threads, and the kernel lets all go if the
//! thread that holds them ends. A thread that sleeps in a system call is left alone, for it might notice (`epoll_wait`
//! ends with EINTR); it is not the one that makes memory grow.
//!
//! # Safety
//! No call reads or writes memory of this process but the status that it is given.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::HashSet;
use std::io;
use std::marker::PhantomData;

use super::threads::Threads;

/// How often to look for threads that were started meanwhile.
const PASSES: usize = 3;

/// Threads of one process that do not run. Only the thread that holds them can let them go, or its end.
#[derive(Debug, Default)]
pub struct Held {
    threads: HashSet<i32>,
    of_one_thread: PhantomData<*const ()>,
}

impl Held {
    /// Holds those of the threads that run: none does anything more in the program, though they may still have
    /// to leave the kernel. Those that may not be traced, or are already, run on.
    pub fn hold(threads: &Threads) -> Held {
        let mut held = Held::default();
        held.hold_more(threads);
        held
    }

    /// Holds those that run now, too.
    pub fn hold_more(&mut self, threads: &Threads) {
        let mut seen = 0;
        for _ in 0..PASSES {
            let count = threads.count();
            if seen == count || self.threads.len() == count {
                break;
            }
            threads.look_through(seen, |id| {
                if !self.threads.contains(&id) && threads.runs(id) && seize(id) {
                    self.threads.insert(id);
                }
            });
            seen = count;
        }
    }

    /// Whether nobody is held.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Lets go whoever has stopped; the others have to be let go later.
    pub fn let_go(&mut self) {
        self.threads.retain(|&id| match stopped(id) {
            Ok(None) => true,
            Ok(Some(signal)) => {
                // An error is that of a thread that was killed just now.
                let _ = ptrace(libc::PTRACE_DETACH, id, signal);
                false
            }
            Err(_) => false,
        });
    }
}

/// The signal that a held thread is about to take, 0 if none; `None` if it has not stopped yet; an error if it has ended.
fn stopped(id: i32) -> io::Result<Option<i32>> {
    let mut status = 0;
    // SAFETY: the status is ours.
    let result = unsafe { libc::waitpid(id, &raw mut status, libc::__WALL | libc::WNOHANG) };
    if super::check(result)? == 0 {
        return Ok(None);
    }
    if !libc::WIFSTOPPED(status) {
        return Err(io::ErrorKind::NotFound.into());
    }
    let interrupted = status >> 16 == libc::PTRACE_EVENT_STOP;
    Ok(Some(if interrupted { 0 } else { libc::WSTOPSIG(status) }))
}

thread_local! {
    /// The thread is in [`seize`].
    static SEIZES: Cell<bool> = const { Cell::new(false) };
}

fn seize(id: i32) -> bool {
    SEIZES.set(true);
    // A thread that was seized but not interrupted has ended.
    let seized = ptrace(libc::PTRACE_SEIZE, id, 0).and_then(|()| ptrace(libc::PTRACE_INTERRUPT, id, 0)).is_ok();
    SEIZES.set(false);
    seized
}

/// Prepares the calling thread for [`end_if_seizing`].
pub fn allow_ending() {
    // SAFETY: all zeros are valid structures; the handler only reads a thread-local flag, and may end its thread.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = end_this_thread as extern "C" fn(libc::c_int) as usize;
        // These fail only for numbers that are no signals.
        libc::sigaction(ENDS, &raw const action, std::ptr::null_mut());
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut signals, ENDS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, std::ptr::null_mut());
    }
}

/// Ends a thread of this process at once, if it is stuck in seizing another: the kernel waits there for as long as the other's
/// process executes a program. All threads that it holds go on. Nothing that the thread owns is freed.
pub fn end_if_seizing(thread: i32) {
    // SAFETY: no pointers. A thread that has ended is an error, which means nothing here.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, ENDS) };
}

const ENDS: libc::c_int = libc::SIGUSR2;

extern "C" fn end_this_thread(_: libc::c_int) {
    if SEIZES.get() {
        // SAFETY: this thread holds no lock while it seizes, and no other thread has references into its stack.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

fn ptrace(request: libc::c_uint, id: i32, signal: i32) -> io::Result<()> {
    // SAFETY: none of the requests made here has an address.
    let result = unsafe { libc::ptrace(request, id, std::ptr::null_mut::<u8>(), signal as usize) };
    super::check(result as libc::c_int).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    /// A shell that is gone when the test is over, however that ends.
    struct Shell(Child);

    impl Shell {
        fn new(script: &str) -> Shell {
            let shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("a shell");
            std::thread::sleep(Duration::from_millis(100));
            Shell(shell)
        }

        fn pid(&self) -> i32 {
            self.0.id() as i32
        }

        /// A field of its `stat`, counted from the one after its name.
        fn field(&self, number: usize) -> String {
            let text = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("it lives");
            let (_, rest) = text.rsplit_once(')').expect("a name");
            rest.split_ascii_whitespace().nth(number).expect("a field").to_owned()
        }

        /// The ticks that it has had in the program.
        fn ticks(&self) -> String {
            self.field(11)
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            // It may be gone, and collected, already.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn hold(shell: &Shell) -> Held {
        Held::hold(&Threads::open(shell.pid()).expect("it lives"))
    }

    fn let_go(mut held: Held) {
        while !held.is_empty() {
            held.let_go();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_held_thread_does_not_run_and_then_runs_on() {
        let mut shell = Shell::new("trap 'echo heard; exit 7' USR1; while :; do :; done");
        let held = hold(&shell);
        assert!(!held.is_empty(), "it ran");
        while shell.field(0) != "t" {
            std::thread::sleep(Duration::from_millis(1));
        }
        let before = shell.ticks();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(shell.ticks(), before, "it runs although it is held");
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::kill(shell.pid(), libc::SIGUSR1) }, 0);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(shell.ticks(), before, "a signal lets it go");
        let_go(held);
        assert_eq!(shell.0.wait().expect("our child").code(), Some(7));
        let said = std::io::read_to_string(shell.0.stdout.take().expect("a pipe")).expect("text");
        assert_eq!(said, "heard\n");
    }

    #[test]
    fn who_sleeps_is_left_alone_and_who_dies_is_forgotten() {
        let sleeper = Shell::new("exec sleep 100");
        assert!(hold(&sleeper).is_empty());
        let mut shell = Shell::new("while :; do :; done");
        let threads = Threads::open(shell.pid()).expect("it lives");
        let held = Held::hold(&threads);
        shell.0.kill().expect("our child");
        let_go(held);
        // It is the child of the process that traces it: it has been collected.
        assert!(shell.0.wait().is_err());
        assert!(!std::path::Path::new(&format!("/proc/{}", shell.pid())).exists());
        assert!(Held::hold(&threads).is_empty());
    }
}

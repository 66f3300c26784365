//! Holding the threads of other processes, unseen by them and by their parents.
//!
//! By PTRACE_SEIZE and PTRACE_INTERRUPT: no signal is sent, nobody waits for the threads, and the kernel lets all go if the
//! thread that holds them ends. A thread that sleeps in a system call is left alone, for it might notice (`epoll_wait`
//! ends with EINTR); it is not the one that makes memory grow. A thread that runs may be in a system call as well, and begin
//! to wait there when it is interrupted: what that has cut short is repaired when it goes on (`cut_short.rs`).
//!
//! The kernel keeps the thread that seizes for as long as the other's process executes a program. It can be told to give that up
//! ([`give_up_seizing`]): then it goes on, and frees what it has.
//!
//! # Safety
//! No call reads or writes memory of this process but the status that it is given. The handler of a signal changes two registers of the
//! thread that it interrupts, at one system call.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use super::cut_short::{self, Next, Write};
use super::threads::Threads;

/// For how long to wait for threads in the middle of a write when nobody holds them any longer.
const PATIENCE: Duration = Duration::from_millis(100);

/// Threads of one process that do not run. Only the thread that holds them can let them go, or its end.
#[derive(Debug, Default)]
pub struct Held {
    /// The process.
    pid: i32,
    /// Each with the write that it has to finish before it can be let go.
    threads: HashMap<i32, Option<Write>>,
    of_one_thread: PhantomData<*const ()>,
}

impl Held {
    /// Holds those of the threads that run: none does anything more in the program, though they may still have
    /// to leave the kernel. Those that may not be traced, or are already, run on. Those of `often` are looked at again and again.
    pub fn hold(threads: &Threads, often: &[i32]) -> Held {
        let mut held = Held::default();
        held.pid = threads.pid();
        held.hold_more(threads, often);
        held
    }

    /// Holds those that run now, too.
    pub fn hold_more(&mut self, threads: &Threads, often: &[i32]) {
        threads.look_through(often, |id| {
            if !self.threads.contains_key(&id) && threads.runs(id) && seize(id) {
                self.threads.insert(id, None);
            }
        });
    }

    /// The threads that are held.
    pub fn ids(&self) -> impl Iterator<Item = i32> {
        self.threads.keys().copied()
    }

    /// Whether nobody is held.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Lets go the threads that have stopped; the others have to be let go later.
    pub fn let_go(&mut self) {
        let count = self.threads.len();
        self.threads.retain(|&id, write| is_held_on(id, write, false));
        // A thread that executes a program goes on under the id of the process, held as it was. It would stay stopped, and once it is killed
        // its parent would wait for it in vain.
        let some_are_gone = self.threads.len() < count && !self.threads.contains_key(&self.pid);
        if some_are_gone && ptrace(libc::PTRACE_INTERRUPT, self.pid, 0).is_ok() {
            self.threads.insert(self.pid, None);
        }
    }
}

impl Drop for Held {
    /// Ends the writes that are being finished: the kernel would let the threads go with the count of the last part only.
    fn drop(&mut self) {
        self.threads.retain(|_, write| write.is_some());
        for &id in self.threads.keys() {
            let _ = ptrace(libc::PTRACE_INTERRUPT, id, 0);
        }
        let start = Instant::now();
        while !self.threads.is_empty() && start.elapsed() < PATIENCE {
            self.threads.retain(|&id, write| is_held_on(id, write, true));
            std::thread::yield_now();
        }
    }
}

/// Lets a thread go if it has stopped and has no write to finish, or with `at_once`; whether it is still held.
fn is_held_on(id: i32, write: &mut Option<Write>, at_once: bool) -> bool {
    let status = match stopped(id) {
        Ok(Some(status)) => status,
        Ok(None) => return true,
        Err(_) => return false,
    };
    let next = match write {
        // The thread has executed a program. A write that is not over was that of another thread, whose id this one has now.
        _ if status >> 16 == libc::PTRACE_EVENT_EXEC => Next::Detach(0),
        Some(write) => write.go_on(id, status, at_once),
        None if status >> 16 != libc::PTRACE_EVENT_STOP => Next::Detach(libc::WSTOPSIG(status)),
        // Stopped by a signal: to let it run would end that.
        None if libc::WSTOPSIG(status) != libc::SIGTRAP => Next::Detach(0),
        None => {
            *write = cut_short::repair(id);
            if write.is_some() { Next::ToCall(0) } else { Next::Detach(0) }
        }
    };
    // An error is that of a thread that was killed just now.
    match next {
        Next::Detach(signal) => {
            let _ = ptrace(libc::PTRACE_DETACH, id, signal);
            false
        }
        Next::ToCall(signal) => ptrace(libc::PTRACE_SYSCALL, id, signal).is_ok(),
    }
}

/// The status with which a held thread has stopped; `None` if it has not yet; an error if it has ended.
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
    Ok(Some(status))
}

thread_local! {
    /// The thread seizes no other any more.
    static GIVES_UP: Cell<bool> = const { Cell::new(false) };
}

fn seize(id: i32) -> bool {
    if GIVES_UP.get() {
        return false;
    }
    let seized = ptrace(libc::PTRACE_SEIZE, id, libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC).is_ok();
    if seized {
        // An error is that of a thread that has just ended, or executed a program: `let_go` finds out.
        let _ = ptrace(libc::PTRACE_INTERRUPT, id, 0);
    }
    seized
}

/// Prepares the calling thread for [`give_up_seizing`].
pub fn allow_giving_up() {
    // SAFETY: all zeros are valid structures; the handler only changes the context that it is given, and a thread-local flag.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = give_up as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // These fail only for numbers that are no signals.
        libc::sigaction(GIVE_UP, &raw const action, std::ptr::null_mut());
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut signals, GIVE_UP);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, std::ptr::null_mut());
    }
}

/// Has a thread of this process seize no other any more: the kernel may keep it in that call for as long as the other's process executes a
/// program. To be called again until the thread has left the call: one that is about to make it is not reached.
pub fn give_up_seizing(thread: i32) {
    // SAFETY: no pointers. A thread that has ended is an error, which means nothing here.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, GIVE_UP) };
}

const GIVE_UP: libc::c_int = libc::SIGUSR2;

/// The kernel makes the call again after any handler. So the handler has the thread go on behind it, as if it had failed with EINTR.
extern "C" fn give_up(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    GIVES_UP.set(true);
    // SAFETY: the kernel's context of the thread that was interrupted, which is on the stack of its handler only. Instructions can be read.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let of = |register: libc::c_int| register as usize;
        let instruction = registers[of(libc::REG_RIP)] as *const [u8; 2];
        let call = [registers[of(libc::REG_RAX)], registers[of(libc::REG_RDI)]];
        let is_seizing = call == [libc::SYS_ptrace, i64::from(libc::PTRACE_SEIZE)];
        if is_seizing && instruction.read_unaligned() == SYSCALL {
            registers[of(libc::REG_RIP)] += SYSCALL.len() as i64;
            registers[of(libc::REG_RAX)] = -i64::from(libc::EINTR);
        }
    }
}

fn ptrace(request: libc::c_uint, id: i32, data: i32) -> io::Result<()> {
    // SAFETY: none of the requests made here has an address.
    let result = unsafe { libc::ptrace(request, id, std::ptr::null_mut::<u8>(), data as usize) };
    super::check(result as libc::c_int).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

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
        Held::hold(&Threads::open(shell.pid()).expect("it lives"), &[])
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

    /// Interrupts a Python program that waits in its system call, a few times, and gives the status with which it ends.
    fn interrupted(script: &str, mut meanwhile: impl FnMut(&mut Child)) -> Option<i32> {
        let mut child =
            Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().map(Shell).expect("python3");
        let mut held = Held::default();
        let poll = |held: &mut Held, times: u32| {
            for _ in 0..times {
                held.let_go();
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for _ in 0..3 {
            // On a busy machine Python takes long to start.
            let start = Instant::now();
            poll(&mut held, 300);
            while child.field(0) != "S" && start.elapsed() < Duration::from_secs(10) {
                poll(&mut held, 100);
            }
            assert_eq!(child.field(0), "S", "it waits in its call");
            if held.is_empty() {
                assert!(seize(child.pid()));
                held.threads.insert(child.pid(), None);
            }
            poll(&mut held, 20);
            meanwhile(&mut child.0);
        }
        // A write that a signal is to end goes on first if there is room by then.
        let start = Instant::now();
        while child.field(0) != "Z" && start.elapsed() < Duration::from_secs(1) {
            poll(&mut held, 1);
        }
        let mut pipe = child.0.stdout.take().expect("a pipe");
        let reader = std::thread::spawn(move || std::io::copy(&mut pipe, &mut std::io::sink()));
        while !reader.is_finished() {
            poll(&mut held, 1);
        }
        child.0.wait().ok().and_then(|status| status.code())
    }

    #[test]
    fn a_write_to_a_pipe_is_not_cut_short() {
        let script = "import os; os._exit(0 if os.write(1, b'a' * 4194304) == 4194304 else 3)";
        assert_eq!(interrupted(script, |_| ()), Some(0));
        let read = |child: &mut Child| {
            let mut some = [0; 10000];
            let pipe = child.stdout.as_mut().expect("a pipe");
            std::io::Read::read_exact(pipe, &mut some).expect("what it writes");
        };
        assert_eq!(interrupted(script, read), Some(0));
    }

    #[test]
    fn a_signal_with_a_handler_ends_a_write_with_what_was_written() {
        let script = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: None); \
            signal.signal(signal.SIGCHLD, signal.SIG_IGN); \
            n = os.write(1, b'a' * 4194304); os._exit(0 if n == 65536 else 3)";
        let mut sent = 0;
        let status = interrupted(script, |child| {
            sent += 1;
            let signal = if sent < 3 { libc::SIGCHLD } else { libc::SIGUSR1 };
            // SAFETY: our own child.
            assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        });
        assert_eq!(status, Some(0));
    }

    #[test]
    fn a_wait_for_events_goes_on() {
        // Not by Python, which begins such a call again itself.
        let script = "import ctypes, os; libc = ctypes.CDLL(None); p = libc.epoll_create1(0); \
            os._exit(0 if libc.epoll_wait(p, ctypes.create_string_buffer(64), 1, 1200) == 0 else 3)";
        assert_eq!(interrupted(script, |_| ()), Some(0));
    }

    #[test]
    fn who_sleeps_is_left_alone_and_who_dies_is_forgotten() {
        let sleeper = Shell::new("exec sleep 100");
        assert!(hold(&sleeper).is_empty());
        let mut shell = Shell::new("while :; do :; done");
        let threads = Threads::open(shell.pid()).expect("it lives");
        let held = Held::hold(&threads, &[]);
        shell.0.kill().expect("our child");
        let_go(held);
        // It is the child of the process that traces it: it has been collected.
        assert!(shell.0.wait().is_err());
        assert!(!std::path::Path::new(&format!("/proc/{}", shell.pid())).exists());
        assert!(Held::hold(&threads, &[]).is_empty());
    }
}

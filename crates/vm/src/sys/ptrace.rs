//! Holding the threads of other processes, unseen by them and by their parents.
//!
//! By PTRACE_SEIZE and PTRACE_INTERRUPT: no signal is sent, nobody waits for the threads, and the kernel lets all go if the
//! thread that holds them ends. A thread that sleeps in a system call is left alone, for it might notice (`epoll_wait`
//! ends with EINTR); it is not the one that makes memory grow.
//!
//! # Safety
//! No call reads or writes memory of this process but the status that it is given.

#![allow(unsafe_code)]

use std::cmp::Reverse;
use std::collections::HashSet;
use std::io;
use std::marker::PhantomData;

/// How often to look for threads that were started meanwhile.
const PASSES: usize = 3;

/// Threads of one process that do not run. Only the thread that holds them can let them go, or its end.
#[derive(Debug, Default)]
pub struct Held {
    threads: HashSet<i32>,
    of_one_thread: PhantomData<*const ()>,
}

impl Held {
    /// Holds the threads of process `pid` that run: none does anything more in the program, though they may still have
    /// to leave the kernel. Those that may not be traced, or are already, run on.
    pub fn hold(pid: i32) -> Held {
        let mut held = Held::default();
        held.hold_more(pid);
        held
    }

    /// Holds those that run now, too.
    pub fn hold_more(&mut self, pid: i32) {
        for _ in 0..PASSES {
            let before = self.threads.len();
            if self.seize_runners(pid).is_err() || self.threads.len() == before {
                break;
            }
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

    /// Seizes the threads that run and are not held: first the one that the program began with, then the youngest.
    fn seize_runners(&mut self, pid: i32) -> io::Result<()> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))?;
        let mut ids: Vec<i32> = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok()).collect();
        ids.sort_unstable_by_key(|&id| (id != pid, Reverse(id)));
        for id in ids {
            if !self.threads.contains(&id) && runs(pid, id) && seize(id) {
                self.threads.insert(id);
            }
        }
        Ok(())
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

fn seize(id: i32) -> bool {
    // A thread that was seized but not interrupted has ended.
    ptrace(libc::PTRACE_SEIZE, id, 0).and_then(|()| ptrace(libc::PTRACE_INTERRUPT, id, 0)).is_ok()
}

fn ptrace(request: libc::c_uint, id: i32, signal: i32) -> io::Result<()> {
    // SAFETY: none of the requests made here has an address.
    let result = unsafe { libc::ptrace(request, id, std::ptr::null_mut::<u8>(), signal as usize) };
    super::check(result as libc::c_int).map(drop)
}

/// Whether a thread runs, or will as soon as a lock of the kernel is free.
fn runs(pid: i32, id: i32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{id}/stat")).unwrap_or_default();
    text.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['R', 'D']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    /// The ticks that a process has had.
    fn ticks(pid: i32) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
        let (_, rest) = text.rsplit_once(')').expect("a name");
        rest.split_ascii_whitespace().nth(11).and_then(|field| field.parse().ok()).expect("a number")
    }

    fn let_go(mut held: Held) {
        while !held.is_empty() {
            held.let_go();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_held_thread_does_not_run_and_then_runs_on() {
        let child = Command::new("sh")
            .args(["-c", "trap 'echo heard; exit 7' USR1; while :; do :; done"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let pid = child.id() as i32;
        std::thread::sleep(Duration::from_millis(100));
        let held = Held::hold(pid);
        assert!(!held.is_empty(), "it ran");
        let before = ticks(pid);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(ticks(pid), before, "it runs although it is held");
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGUSR1) }, 0);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(ticks(pid), before, "a signal lets it go");
        let_go(held);
        let output = child.wait_with_output().expect("our child");
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(7), b"heard\n".as_slice()));
    }

    #[test]
    fn who_sleeps_is_left_alone_and_who_dies_is_forgotten() {
        let mut child = Command::new("sleep").arg("100").spawn().expect("sleep");
        std::thread::sleep(Duration::from_millis(50));
        assert!(Held::hold(child.id() as i32).is_empty());
        child.kill().and_then(|()| child.wait()).expect("our child");
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell");
        std::thread::sleep(Duration::from_millis(50));
        let held = Held::hold(child.id() as i32);
        child.kill().expect("our child");
        let_go(held);
        // It is the child of the process that traces it: it has been collected.
        assert!(child.wait().is_err());
        assert!(!std::path::Path::new(&format!("/proc/{}", child.id())).exists());
        assert!(Held::hold(child.id() as i32).is_empty());
    }
}

//! How soon a thread of the manager gets a processor, and which; and the end of a system call in which it waits.
//!
//! # Safety
//! Structures of this file's own are passed, with their true sizes. The signal handler does nothing.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Duration;

/// `struct sched_attr` of linux/sched/types.h, in its first published size.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Lets the calling thread run at once whenever it has something to do, before all ordinary threads: it must not have much.
/// Where that is not permitted, asks for the shortest time slices. What the thread starts is ordinary again.
pub fn ask_for_promptness() -> io::Result<()> {
    const RESET_ON_FORK: u64 = 1;
    let size = size_of::<SchedAttr>() as u32;
    let policy = libc::SCHED_FIFO as u32;
    let attr = SchedAttr { size, policy, flags: RESET_ON_FORK, priority: 1, ..SchedAttr::default() };
    // SAFETY: the structure lives on this stack and says how long it is; thread 0 is the caller.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    super::check(result as libc::c_int).map(drop).or_else(|_| ask_for_short_slices())
}

/// Has the calling thread give way to the other threads of the manager: it gets a tenth of what one of them gets while both want to run.
pub fn give_way() {
    const NICENESS: libc::c_int = 10;
    // SAFETY: no pointers; thread 0 is the caller. To be nicer is always permitted.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
}

/// What the calling thread has had of the processors.
pub fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours. This clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What all threads of a process have had of the processors; `None` if it is gone.
pub fn processor_time_of(process: i32) -> Option<Duration> {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: both are ours.
    unsafe {
        if libc::clock_getcpuclockid(process, &raw mut clock) != 0 {
            return None;
        }
        super::check(libc::clock_gettime(clock, &raw mut time)).ok()?;
    }
    Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Prepares the calling thread for [`interrupt`].
pub fn allow_interruption() {
    // SAFETY: all zeros are valid structures; the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = be_interrupted as extern "C" fn(libc::c_int) as usize;
        // These fail only for numbers that are no signals.
        libc::sigaction(INTERRUPT, &raw const action, std::ptr::null_mut());
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut signals, INTERRUPT);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, std::ptr::null_mut());
    }
}

/// Ends a system call in which a thread of this process waits, as far as signals end it (EINTR). The thread has to be prepared for it. To be
/// called again until it has gone on: a call that is about to be made is not reached.
pub fn interrupt(thread: i32) {
    // SAFETY: no pointers. A thread that has ended is an error, which means nothing here.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, INTERRUPT) };
}

const INTERRUPT: libc::c_int = libc::SIGUSR1;

extern "C" fn be_interrupted(_: libc::c_int) {}

/// The calling thread and another process on one processor, as long as this lives.
///
/// Two that wait for each other in turn gain nothing by a second processor. It would be idle whenever it is to go on, and to
/// wake it takes longer than to switch, on a virtual machine by far: some 30 µs instead of 2.
#[derive(Debug)]
pub struct OneProcessor {
    /// It is the outermost of the thread: the thread goes its own ways when it is dropped.
    is_outermost: bool,
}

/// Where a process was put by [`OneProcessor::with`]. No harm is done if it is elsewhere by now.
#[derive(Debug)]
pub struct Processor(AtomicI32);

impl Default for Processor {
    fn default() -> Processor {
        Processor(AtomicI32::new(-1))
    }
}

thread_local! {
    /// Where the thread may run, while it is kept on one processor.
    static ALLOWED: Cell<Option<libc::cpu_set_t>> = const { Cell::new(None) };
}

impl OneProcessor {
    /// Has `process` go on where the caller runs; None if that cannot be. A caller that is kept on a processor stays there. `lives` tells
    /// whether the number is still that process's: another that got it meanwhile is put back where it was.
    pub fn with(process: i32, put: &Processor, lives: impl Fn() -> bool) -> Option<OneProcessor> {
        let (number, here) = here()?;
        if put.0.load(Relaxed) != number {
            let before = affinity(process)?;
            if !lives() {
                return None;
            }
            set_affinity(process, &here)?;
            if !lives() {
                let _ = set_affinity(process, &before);
                return None;
            }
            put.0.store(number, Relaxed);
        }
        let is_outermost = ALLOWED.get().is_none();
        if is_outermost {
            let allowed = affinity(0)?;
            set_affinity(0, &here)?;
            ALLOWED.set(Some(allowed));
        }
        Some(OneProcessor { is_outermost })
    }
}

impl Drop for OneProcessor {
    fn drop(&mut self) {
        if let Some(allowed) = ALLOWED.get().filter(|_| self.is_outermost) {
            // It was allowed before.
            let _ = set_affinity(0, &allowed);
            ALLOWED.set(None);
        }
    }
}

/// A time in which a thread that is kept on one processor goes its own ways, as long as this lives: it has much to do alone.
#[derive(Debug)]
pub struct Apart(());

impl Apart {
    /// Lets the calling thread run wherever it may.
    pub fn begin() -> Apart {
        if let Some(allowed) = ALLOWED.get() {
            let _ = set_affinity(0, &allowed);
        }
        Apart(())
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        if ALLOWED.get().is_some()
            && let Some((_, here)) = here()
        {
            let _ = set_affinity(0, &here);
        }
    }
}

/// Returns the number of the processor that the caller runs on, and the set of it alone.
fn here() -> Option<(i32, libc::cpu_set_t)> {
    // SAFETY: all zeros is an empty set; the number is within it.
    unsafe {
        let number = Some(libc::sched_getcpu()).filter(|number| (0..libc::CPU_SETSIZE).contains(number))?;
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(number as usize, &mut set);
        Some((number, set))
    }
}

/// Returns where a process may run; 0 is the calling thread.
fn affinity(process: i32) -> Option<libc::cpu_set_t> {
    // SAFETY: all zeros is an empty set; it lives on this stack and its size is said.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        super::check(libc::sched_getaffinity(process, size_of::<libc::cpu_set_t>(), &raw mut set)).ok()?;
        Some(set)
    }
}

/// Sets where a process may run; 0 is the calling thread.
fn set_affinity(process: i32, set: &libc::cpu_set_t) -> Option<()> {
    // SAFETY: the set is ours and its size is said.
    super::check(unsafe { libc::sched_setaffinity(process, size_of::<libc::cpu_set_t>(), set) }).ok().map(drop)
}

/// Asks for time slices of 0.1 ms for the calling thread. The scheduler (EEVDF, from Linux 6.12 on) runs a thread with shorter
/// slices the sooner after it wakes, and not the more: the thread's share of the processors stays what it was.
pub fn ask_for_short_slices() -> io::Result<()> {
    let mut attr = SchedAttr { size: size_of::<SchedAttr>() as u32, ..SchedAttr::default() };
    // SAFETY: the structure lives on this stack and says how long it is; thread 0 is the caller.
    let result = unsafe {
        let size = size_of::<SchedAttr>() as libc::c_uint;
        super::check(libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) as libc::c_int)?;
        attr.runtime = 100_000;
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0)
    };
    super::check(result as libc::c_int).map(drop)
}

/// The id of the calling thread.
pub fn own_id() -> i32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::gettid() }
}

/// Whether a thread of this process runs, or is ready to. False if it has ended.
pub fn is_running(id: i32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")).unwrap_or_default();
    // The name before may hold anything.
    text.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('R'))
}

/// Whether a thread is one of this process: the brake holds threads by ptrace, as a debugger does.
pub fn is_own(id: i32) -> bool {
    std::path::Path::new("/proc/self/task").join(id.to_string()).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_kept_on_one_processor_may_run_elsewhere_afterwards_and_meanwhile() {
        let process = std::process::Command::new("sleep").arg("60").spawn().map(|mut child| {
            let (pid, put) = (child.id() as i32, Processor::default());
            let count = || {
                // SAFETY: a set as the kernel gives it.
                affinity(0).map(|set| unsafe { libc::CPU_COUNT(&set) })
            };
            let before = count();
            let outer = OneProcessor::with(pid, &put, || true).expect("both are ours");
            assert_eq!(count(), Some(1));
            let inner = OneProcessor::with(pid, &put, || true).expect("both are ours");
            let apart = Apart::begin();
            assert_eq!(count(), before);
            drop(apart);
            assert_eq!(count(), Some(1));
            drop(inner);
            assert_eq!(count(), Some(1), "the outermost counts");
            drop(outer);
            assert_eq!(count(), before);
            drop(Apart::begin());
            assert_eq!(count(), before, "it was not kept anywhere");
            child.kill().and_then(|()| child.wait())
        });
        process.expect("sleep is there").expect("it ends");
    }

    #[test]
    fn own_threads_are_told_from_others() {
        assert!(is_own(std::process::id() as i32));
        assert!(!is_own(1));
    }
}

//! How soon a thread of the manager gets a processor, and which.
//!
//! # Safety
//! One structure of this file's own is passed, with its true size.

#![allow(unsafe_code)]

use std::io;
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

/// The calling thread and another process on one processor, as long as this lives.
///
/// Two that wait for each other in turn gain nothing by a second processor. It would be idle whenever it is to go on, and to
/// wake it takes longer than to switch, on a virtual machine by far: some 30 µs instead of 2.
#[derive(Debug)]
pub struct OneProcessor {
    before: libc::cpu_set_t,
}

impl OneProcessor {
    /// Has `process` go on where the caller runs; None if that cannot be.
    pub fn with(process: i32) -> Option<OneProcessor> {
        // SAFETY: all zeros is an empty set; the sets live on this stack and their sizes are said.
        unsafe {
            let (mut before, mut here): (libc::cpu_set_t, libc::cpu_set_t) = std::mem::zeroed();
            let size = size_of::<libc::cpu_set_t>();
            let processor = usize::try_from(libc::sched_getcpu()).ok()?;
            if processor >= libc::CPU_SETSIZE as usize {
                return None;
            }
            libc::CPU_SET(processor, &mut here);
            super::check(libc::sched_getaffinity(0, size, &raw mut before)).ok()?;
            super::check(libc::sched_setaffinity(process, size, &raw const here)).ok()?;
            super::check(libc::sched_setaffinity(0, size, &raw const here)).ok()?;
            Some(OneProcessor { before })
        }
    }
}

impl Drop for OneProcessor {
    fn drop(&mut self) {
        // SAFETY: as above. It was allowed before.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const self.before) };
    }
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
    fn own_threads_are_told_from_others() {
        assert!(is_own(std::process::id() as i32));
        assert!(!is_own(1));
    }
}

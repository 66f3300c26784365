//! How soon a thread of the manager gets a processor.
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

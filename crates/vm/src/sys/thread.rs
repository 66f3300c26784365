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

/// Asks for time slices of this length for the calling thread, from 0.1 ms to 100 ms. The scheduler (EEVDF, from Linux
/// 6.12 on) runs a thread with shorter slices the sooner after it wakes, and not the more: the thread's share of the
/// processors stays what it was.
pub fn ask_for_slices_of(slice: Duration) -> io::Result<()> {
    let mut attr = SchedAttr { size: size_of::<SchedAttr>() as u32, ..SchedAttr::default() };
    // SAFETY: the structure lives on this stack and says how long it is; thread 0 is the caller.
    let result = unsafe {
        let size = size_of::<SchedAttr>() as libc::c_uint;
        super::check(libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) as libc::c_int)?;
        attr.runtime = slice.as_nanos() as u64;
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0)
    };
    super::check(result as libc::c_int).map(drop)
}

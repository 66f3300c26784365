//! The thin seam to the kernel: each function one system call, with its conditions.
//!
//! # Safety
//! The place where unsafe is normal. No function here reads or writes memory of this process other than through the
//! references it was given.

pub mod arena;
mod cut_short;
pub mod epoll;
pub mod faults;
pub mod file;
pub mod job;
pub mod limits;
pub mod link;
pub mod memory;
pub mod pagemap;
pub mod pressure;
pub mod process;
pub mod ptrace;
pub mod robust;
pub mod smaps;
pub mod tether;
pub mod thread;
pub mod threads;
pub mod uffd;
pub mod uring;

use std::io;

/// Turns the result of a libc call into an error with its errno.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

//! Tying a program's memory to the life of its manager, by the kernel alone.
//!
//! When the last copy of a userfaultfd closes, evicted pages read as zeros. All processes of uzswap can be killed at once, so
//! none of them may be needed. Two facts hold the program even then:
//!
//! 1. The userfaultfds stay open as long as the memory of the program exists: they are registered files of an io_uring that
//!    nothing refers to but a mapping in that memory. Threads that touch an evicted page wait.
//! 2. The same io_uring holds one end of a socket pair. The manager has the other end, in the descriptor table that it shares
//!    with the front, and has set the first end to send SIGKILL to the program (`F_SETSIG`, `F_SETOWN`, `O_ASYNC`). When
//!    the last of manager and front is gone, the kernel closes the other end, and kills the program.
//!
//! Where io_uring is forbidden, requests of asynchronous input and output that never complete (`IOCB_CMD_POLL`) hold the
//! files: their context belongs to the memory, too. The end of such a process takes some milliseconds longer.
//!
//! # Safety
//! Maps the io_uring over a page of the agent's own region.

use crate::area::Region;
use crate::sys::{self, call};
use uzswap_proto::PAGE_SIZE;

/// Ties `files` to the memory that `region` is a part of. Closes none of them. Gives 0 or a negative errno.
pub fn tie(region: Region, files: &[i32; 3]) -> isize {
    match tie_to_ring(region, files) {
        0 => 0,
        _ => tie_to_requests(files),
    }
}

/// `struct io_uring_params`: of interest here are only sizes that the kernel fills in.
#[repr(C)]
struct RingParameters {
    words: [u32; 30],
}

fn tie_to_ring(region: Region, files: &[i32; 3]) -> isize {
    const REGISTER_FILES: usize = 2;
    const MADV_DONTFORK: usize = 10;
    const PROT_READ: usize = 1;
    const SHARED_FIXED: usize = 0x11;
    let mut parameters = RingParameters { words: [0; 30] };
    // SAFETY: the structure has the kernel's size, 120 bytes. The mapping replaces a guard page of the agent's region. Nothing
    // is ever submitted. A ring that cannot be mapped or filled is closed, and goes.
    unsafe {
        let ring = call!(sys::SYS_IO_URING_SETUP, 1, &raw mut parameters);
        if ring < 0 {
            return ring;
        }
        let mut result = call!(sys::SYS_IO_URING_REGISTER, ring, REGISTER_FILES, files.as_ptr(), files.len());
        if result >= 0 {
            result = call!(sys::SYS_MMAP, region.tether(), PAGE_SIZE, PROT_READ, SHARED_FIXED, ring, 0);
        }
        if result >= 0 {
            result = call!(sys::SYS_MADVISE, region.tether(), PAGE_SIZE, MADV_DONTFORK);
        }
        if result >= 0 {
            // A program that unmaps what it does not know cannot undo this. Kernels before 6.10 do not have the call.
            call!(sys::SYS_MSEAL, region.tether(), PAGE_SIZE, 0);
        }
        call!(sys::SYS_CLOSE, ring);
        result.min(0)
    }
}

/// `struct iocb`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    data: u64,
    key: u32,
    flags: u32,
    opcode: u16,
    priority: u16,
    descriptor: u32,
    events: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    more_flags: u32,
    event: u32,
}

fn tie_to_requests(files: &[i32; 3]) -> isize {
    const POLL: u16 = 5;
    /// An event that neither a userfaultfd nor a socket without urgent data ever has.
    const POLLPRI: u64 = 2;
    let mut context = 0usize;
    let request = |descriptor: i32| Request {
        data: 0,
        key: 0,
        flags: 0,
        opcode: POLL,
        priority: 0,
        descriptor: descriptor as u32,
        events: POLLPRI,
        len: 0,
        offset: 0,
        reserved: 0,
        more_flags: 0,
        event: 0,
    };
    let mut requests = [request(files[0]), request(files[1]), request(files[2])];
    let [first, second, third] = &mut requests;
    let list = [&raw mut *first, &raw mut *second, &raw mut *third];
    // SAFETY: the requests live on this stack until they have been submitted; the kernel copies them.
    unsafe {
        let made = call!(sys::SYS_IO_SETUP, list.len(), &raw mut context);
        if made < 0 {
            return made;
        }
        match call!(sys::SYS_IO_SUBMIT, context, list.len(), list.as_ptr()) {
            submitted if submitted == list.len() as isize => 0,
            error => error.min(-1),
        }
    }
}

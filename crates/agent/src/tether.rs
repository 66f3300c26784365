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
//! A forked child has other userfaultfds. Its own worker ties those before it runs. A child that is made by the instruction `syscall`
//! itself, past libc, has no worker. It inherits a second mapping of its parent's io_uring, the *heirloom*; and through the socket
//! in there the manager sends the child's userfaultfd as soon as it knows it, to nobody: a descriptor in a message that nobody
//! receives stays open as long as the socket does (`vm/src/heirs.rs`). There the manager has the far end of a socket pair for that child,
//! too. A child with a worker of its own gives the heirloom up.
//!
//! Where io_uring is forbidden, requests of asynchronous input and output that never complete (`IOCB_CMD_POLL`) hold the
//! files: their context belongs to the memory, too. The end of such a process takes some milliseconds longer.
//!
//! # Safety
//! Maps io_urings where the kernel finds room, and unmaps only what the kernel says is no ordinary memory.

use crate::sys::{self, call};
use uzswap_proto::PAGE_SIZE;

/// How a program was tied.
pub enum Tie {
    /// By an io_uring, which is also mapped at this address, for children to inherit; 0 if that failed.
    Ring(usize),
    /// By requests that never complete.
    Requests,
    /// Not at all.
    Failed,
}

/// Ties `files` to the memory of the caller. Closes none of them.
pub fn tie(files: &[i32; 3]) -> Tie {
    match tie_to_ring(files) {
        Some(heirloom) => Tie::Ring(heirloom),
        None if tie_to_requests(files) == 0 => Tie::Requests,
        None => Tie::Failed,
    }
}

/// Unmaps an inherited heirloom. The program may have unmapped it and have something else there: only what the kernel takes for no
/// ordinary memory is unmapped, which it tells by refusing MADV_DOFORK.
pub fn give_up(heirloom: usize) {
    const MADV_DOFORK: usize = 11;
    // SAFETY: the page was mapped by the agent of an ancestor, and no program of ours uses it.
    unsafe {
        if call!(sys::SYS_MADVISE, heirloom, PAGE_SIZE, MADV_DOFORK) == -sys::EINVAL {
            call!(sys::SYS_MUNMAP, heirloom, PAGE_SIZE);
        }
    }
}

/// `struct io_uring_params`: of interest here are only sizes that the kernel fills in.
#[repr(C)]
struct RingParameters {
    words: [u32; 30],
}

/// Gives the address of the mapping that children inherit.
fn tie_to_ring(files: &[i32; 3]) -> Option<usize> {
    const REGISTER_FILES: usize = 2;
    const MADV_DONTFORK: usize = 10;
    const PROT_READ: usize = 1;
    const SHARED: usize = 1;
    let mut parameters = RingParameters { words: [0; 30] };
    // SAFETY: the structure has the kernel's size, 120 bytes. The kernel chooses where to map: it refuses to map an io_uring anywhere
    // else. Nothing is ever submitted. A ring that cannot be mapped or filled is closed, and goes.
    unsafe {
        let ring = call!(sys::SYS_IO_URING_SETUP, 1, &raw mut parameters);
        if ring < 0 {
            return None;
        }
        let map = || call!(sys::SYS_MMAP, 0, PAGE_SIZE, PROT_READ, SHARED, ring, 0);
        let mut tether = call!(sys::SYS_IO_URING_REGISTER, ring, REGISTER_FILES, files.as_ptr(), files.len());
        if tether >= 0 {
            tether = map();
        }
        let mut heirloom = 0;
        if tether >= 0 {
            call!(sys::SYS_MADVISE, tether, PAGE_SIZE, MADV_DONTFORK);
            // A program that unmaps what it does not know cannot undo this. Kernels before 6.10 do not have the call.
            call!(sys::SYS_MSEAL, tether, PAGE_SIZE, 0);
            heirloom = map().max(0);
        }
        call!(sys::SYS_CLOSE, ring);
        (tether >= 0).then_some(heirloom as usize)
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

//! Denying pages to a program that its worker cannot kill.
//!
//! The kernel ignores a SIGKILL to the first process of a pid namespace that comes from inside the namespace. The worker of such a program is
//! inside. Without a manager the program's threads would wait for evicted pages for ever. A worker that has killed its program in vain reads
//! the faults of these threads and has each end in SIGBUS, which the kernel does force on the first process of a namespace.
//!
//! # Safety
//! Poisons pages of the program that are missing. No manager is left to bring them back.

use crate::sys::{self, call};

const PAGE: u64 = uzswap_proto::PAGE_SIZE as u64;

/// How long a program that was killed may take to end, and how often its threads are woken.
const PATIENCE_MS: usize = 500;

/// Returns when the program behind the pidfd `program` has ended. What its threads miss meanwhile is denied, if it has not ended soon.
pub fn until_end(program: i32, uffd: i32) {
    // Negative: not waited for.
    let mut watched = -1;
    loop {
        match wait(program, watched) {
            Event::End => return,
            Event::Fault => deny(uffd),
            Event::Nothing => {
                watched = uffd;
                // The manager may have stopped it, and have ended before it could kill it.
                sys::continue_by(program as isize);
                wake_all(uffd);
            }
        }
    }
}

enum Event {
    End,
    /// Or a change of the layout.
    Fault,
    Nothing,
}

fn wait(program: i32, uffd: i32) -> Event {
    const POLLIN: u64 = 1;
    let watched = |descriptor: i32| u64::from(descriptor as u32) | POLLIN << 32;
    let is_ready = |poll: u64| poll >> 48 & POLLIN != 0;
    let mut polls = [watched(program), watched(uffd)];
    // SAFETY: `polls` is an array of two `struct pollfd`.
    unsafe { call!(sys::SYS_POLL, polls.as_mut_ptr(), polls.len(), PATIENCE_MS) };
    match polls.map(is_ready) {
        [true, _] => Event::End,
        [_, true] => Event::Fault,
        _ => Event::Nothing,
    }
}

/// Reads a message, and has the thread that it is of end in SIGBUS. The descriptor of a forked child stays open: the child waits, and ends with
/// its namespace.
fn deny(uffd: i32) {
    const PAGEFAULT: u64 = 0x12;
    const UFFDIO_POISON: usize = 0xc020_aa08;
    const MESSAGE: usize = 32;
    let mut message = [0u64; MESSAGE / size_of::<u64>()];
    // SAFETY: the buffer is as long as said. The request has the kernel's layout; the kernel changes nothing but a page that is missing.
    unsafe {
        let len = call!(sys::SYS_READ, uffd, message.as_mut_ptr(), MESSAGE);
        if len == MESSAGE as isize && message[0] & 0xff == PAGEFAULT {
            let page = message[2] & !(PAGE - 1);
            let mut request = [page, PAGE, 0, 0];
            call!(sys::SYS_IOCTL, uffd, UFFDIO_POISON, request.as_mut_ptr());
            wake(uffd, page, PAGE);
        }
    }
}

/// Wakes all threads that wait for a page. One whose fault the manager has read faults anew.
fn wake_all(uffd: i32) {
    const START: u64 = 1 << 16;
    const END: u64 = (1 << 47) - PAGE;
    wake(uffd, START, END - START);
}

fn wake(uffd: i32, start: u64, len: u64) {
    const UFFDIO_WAKE: usize = 0x8010_aa02;
    let request = [start, len];
    // SAFETY: the request has the kernel's layout.
    unsafe { call!(sys::SYS_IOCTL, uffd, UFFDIO_WAKE, request.as_ptr()) };
}

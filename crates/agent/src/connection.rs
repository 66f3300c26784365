//! Connecting to the manager, and to nobody else.
//!
//! Any user can take the name of an abstract socket once it is free, as after a daemon was stopped whose programs run on, or in a network
//! namespace of his own; and the name is known to all. Who answers is given the userfaultfds of the program, and is obeyed. So before
//! anything is said the kernel is asked who listens.
//!
//! 1. The name is the front's: the process at the other end is compared with the landmark on the board, which only the manager's user can
//!    write to. Each process has a pidfd with an inode number of its own (Linux 6.9).
//! 2. Where the kernel has none, and by the path, whose directory only the manager's user can write to, it must be a process of that
//!    user. A user that has no number in this user namespace is shown as [`OVERFLOW_UID`], and passes: the manager's often has none there.
//!
//! # Safety
//! The structures have the kernel's layout and live on this stack.

use core::mem::size_of;

use uzswap_proto::{Job, SOCKET_NAME, SOCKET_PATH};

use crate::attach::{landmark_inode, owner, socket_path};
use crate::sys::{self, EACCES, EINTR, call};

/// `struct sockaddr_un`.
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; SOCKET_PATH],
}

/// `struct ucred`.
#[repr(C)]
#[derive(Default)]
struct Credentials {
    pid: i32,
    uid: u32,
    gid: u32,
}

const AF_UNIX: u16 = 1;
const OVERFLOW_UID: u32 = 65534;

/// Connects to the job's manager: by the name of its abstract socket, or where that is not to be reached, by the path of another.
///
/// # Errors
/// The errno; EACCES if somebody else listens.
pub fn connect(job: Job) -> Result<i32, isize> {
    let mut name = Address { family: AF_UNIX, path: [0; SOCKET_PATH] };
    name.path[1..=SOCKET_NAME].copy_from_slice(&job.socket_name());
    connect_to(&name, size_of::<u16>() + 1 + SOCKET_NAME, is_landmark).or_else(|error| {
        let file = Address { family: AF_UNIX, path: socket_path() };
        if file.path[0] == 0 { Err(error) } else { connect_to(&file, size_of::<Address>(), is_of_owner) }
    })
}

fn connect_to(address: &Address, len: usize, is_managers: fn(i32) -> bool) -> Result<i32, isize> {
    const SEQPACKET_CLOEXEC: usize = 5 | 0o2_000_000;
    // SAFETY: no pointers.
    let socket = unsafe { call!(sys::SYS_SOCKET, AF_UNIX, SEQPACKET_CLOEXEC, 0) };
    if socket < 0 {
        return Err(socket);
    }
    loop {
        // SAFETY: the address is a structure of the kernel's layout, `len` bytes of which are given.
        let mut result = unsafe { call!(sys::SYS_CONNECT, socket, &raw const *address, len) };
        if result >= 0 {
            if is_managers(socket as i32) {
                return Ok(socket as i32);
            }
            result = -EACCES;
        }
        if result != -EINTR {
            // SAFETY: our own descriptor.
            unsafe { call!(sys::SYS_CLOSE, socket) };
            return Err(result);
        }
    }
}

/// Whether the process that listens at the other end is the one on the board.
fn is_landmark(socket: i32) -> bool {
    const SO_PEERPIDFD: i32 = 77;
    let inode = landmark_inode();
    let mut process = -1;
    if inode == 0 || !ask(socket, SO_PEERPIDFD, &mut process) {
        // No descriptor may be free.
        return is_of_owner(socket);
    }
    let found = sys::inode_of(process);
    // SAFETY: our own descriptor.
    unsafe { call!(sys::SYS_CLOSE, process) };
    found == Some(inode)
}

/// Whether a process of the manager's user listens at the other end, or one whose user is not to be told.
fn is_of_owner(socket: i32) -> bool {
    const SO_PEERCRED: i32 = 17;
    let mut peer = Credentials::default();
    ask(socket, SO_PEERCRED, &mut peer) && (peer.uid == owner() || peer.uid == OVERFLOW_UID)
}

/// Fills `answer` with what the kernel says of `socket`; false if it says nothing.
fn ask<T>(socket: i32, what: i32, answer: &mut T) -> bool {
    const SOL_SOCKET: i32 = 1;
    let mut len = size_of::<T>() as u32;
    // SAFETY: the kernel writes no more than `len` bytes.
    unsafe { call!(sys::SYS_GETSOCKOPT, socket, SOL_SOCKET, what, &raw mut *answer, &raw mut len) == 0 }
}

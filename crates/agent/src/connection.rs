//! The agent's connection to the manager: no other user gets it by listening in the manager's place.
//!
//! Any user can take the name of an abstract socket that is free, as it is after an operator has stopped a daemon whose programs run on, or in
//! a network namespace of that user's own. All users can read the name. Whoever answers the agent gets the userfaultfds of the program, and
//! the worker obeys. So the agent asks the kernel who listens before it says anything.
//!
//! 1. The front has opened both sockets. The agent compares the process at the other end with the landmark on the board, which only the
//!    manager's user can write to: each process has a pidfd with an inode number of its own (Linux 6.9).
//! 2. Where the kernel has none, or the program no descriptor free, it must be a process of the manager's user. In another user namespace
//!    the kernel shows other numbers for users, and the agent believes whoever answers.
//!
//! # Safety
//! The structures have the kernel's layout and live on this stack.

use core::mem::size_of;

use uzswap_proto::{Job, SOCKET_NAME, SOCKET_PATH};

use crate::attach::{is_in_managers_user_namespace, landmark_inode, owner, socket_path};
use crate::sys::{self, EACCES, EINTR, EMFILE, ENFILE, call};

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

/// Connects to the job's manager: by the name of its abstract socket, or where the agent does not reach that, by the path of another.
///
/// # Errors
/// The kernel's errno; EACCES if another process listens.
pub fn connect(job: Job) -> Result<i32, isize> {
    let mut name = Address { family: AF_UNIX, path: [0; SOCKET_PATH] };
    name.path[1..=SOCKET_NAME].copy_from_slice(&job.socket_name());
    connect_to(&name, size_of::<u16>() + 1 + SOCKET_NAME).or_else(|error| {
        let file = Address { family: AF_UNIX, path: socket_path() };
        if file.path[0] == 0 { Err(error) } else { connect_to(&file, size_of::<Address>()) }
    })
}

fn connect_to(address: &Address, len: usize) -> Result<i32, isize> {
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

/// Whether the front listens at the other end.
fn is_managers(socket: i32) -> bool {
    const SO_PEERPIDFD: i32 = 77;
    let inode = landmark_inode();
    let mut process = -1;
    let asked = if inode == 0 { -EMFILE } else { ask(socket, SO_PEERPIDFD, &mut process) };
    match asked {
        0 => {
            let found = sys::inode_of(process);
            // SAFETY: our own descriptor.
            unsafe { call!(sys::SYS_CLOSE, process) };
            found == Some(inode)
        }
        error if error == -EMFILE || error == -ENFILE => is_of_owner(socket),
        // The front lives as long as it is to be reached.
        _ => false,
    }
}

/// Whether a process of the manager's user listens at the other end, or one whose user cannot be told.
fn is_of_owner(socket: i32) -> bool {
    const SO_PEERCRED: i32 = 17;
    let mut peer = Credentials::default();
    ask(socket, SO_PEERCRED, &mut peer) == 0 && (peer.uid == owner() || !is_in_managers_user_namespace())
}

/// Fills `answer` with what the kernel says of `socket`; gives 0 or a negative errno.
fn ask<T>(socket: i32, what: i32, answer: &mut T) -> isize {
    const SOL_SOCKET: i32 = 1;
    let mut len = size_of::<T>() as u32;
    // SAFETY: the kernel writes no more than `len` bytes.
    unsafe { call!(sys::SYS_GETSOCKOPT, socket, SOL_SOCKET, what, &raw mut *answer, &raw mut len) }
}

//! Waiting for many descriptors at once.
//!
//! # Safety
//! The kernel writes as many events as the array has room for.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An epoll instance. Each descriptor has a number that is given back when it becomes ready.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// A descriptor that is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Its number.
    pub number: u64,
    /// Whether its file reports an error. The kernel reports this again after each [`Epoll::rearm`], whether or not there is something
    /// to read.
    pub has_error: bool,
}

impl Epoll {
    /// A new instance.
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: no pointers; the descriptor is fresh.
        unsafe { Ok(Epoll(OwnedFd::from_raw_fd(super::check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?))) }
    }

    /// Adds a descriptor. When there is something to read it is reported once, to one of those who wait; then not
    /// again until [`Epoll::rearm`].
    pub fn add(&self, fd: RawFd, number: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, number)
    }

    /// Has a descriptor reported again, at once if there is something to read.
    pub fn rearm(&self, fd: RawFd, number: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, number)
    }

    fn control(&self, operation: libc::c_int, fd: RawFd, number: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLONESHOT) as u32, u64: number };
        // SAFETY: one event.
        super::check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd, &raw mut event) }).map(drop)
    }

    /// Takes a descriptor out.
    pub fn remove(&self, fd: RawFd) {
        // SAFETY: no event is needed. It fails only if the descriptor is not in.
        unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// Whether something is ready that no thread has been told of.
    pub fn is_ready(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
    }

    /// Waits until something is ready, for `milliseconds` at most (-1: for ever); gives what is ready.
    pub fn wait(&self, milliseconds: i32) -> io::Result<Vec<Ready>> {
        const AT_ONCE: usize = 4;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        // SAFETY: as many events as said.
        let count =
            unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), AT_ONCE as libc::c_int, milliseconds) };
        match super::check(count) {
            Ok(count) => Ok(events[..count as usize].iter().map(Ready::from).collect()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

impl From<&libc::epoll_event> for Ready {
    fn from(event: &libc::epoll_event) -> Ready {
        Ready { number: event.u64, has_error: event.events & libc::EPOLLERR as u32 != 0 }
    }
}

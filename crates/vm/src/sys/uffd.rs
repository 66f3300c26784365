//! A userfaultfd of another process, as handed over by its worker.
//!
//! # Safety
//! Structures have the layout of `linux/userfaultfd.h`. The kernel writes only into the address space that the
//! userfaultfd belongs to, and into the structures passed.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::PAGE;
use crate::change::Change;
use crate::closing::{Handed, User};
use crate::range::Range;

/// Messages that are read at once.
pub const AT_ONCE: usize = 16;

const UFFD_API: u64 = 0xaa;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
const UFFDIO_POISON: libc::c_ulong = 0xc020_aa08;

/// The mode of a fill that wakes nobody.
const DONTWAKE: u64 = 1;

/// Announcing forks.
pub const EVENT_FORK: u64 = 1 << 1;

/// Moving pages.
pub const MOVE: u64 = 1 << 16;

/// Features that the main userfaultfd of a process needs, with their names: events of every kind, the thread of each
/// fault, poison for pages that cannot be brought back, moves.
pub const FEATURES: [(u64, &str); 7] = [
    (EVENT_FORK, "EVENT_FORK"),
    (1 << 2, "EVENT_REMAP"),
    (1 << 3, "EVENT_REMOVE"),
    (1 << 6, "EVENT_UNMAP"),
    (1 << 8, "THREAD_ID"),
    (1 << 14, "POISON"),
    (MOVE, "MOVE"),
];

/// All of [`FEATURES`], for the handshake.
pub const MAIN_FEATURES: u64 = {
    let (mut all, mut i) = (0, 0);
    while i < FEATURES.len() {
        all |= FEATURES[i].0;
        i += 1;
    }
    all
};

/// What a userfaultfd says.
#[derive(Debug)]
pub enum Message {
    /// A thread waits for a page.
    Fault {
        /// The page.
        address: u64,
        /// Whether it wants to write.
        write: bool,
        /// Its id, in its own pid namespace.
        tid: u32,
    },
    /// The process forked; this is the child's userfaultfd.
    Fork(Uffd),
    /// The layout changed.
    Change(Change),
}

impl Message {
    /// Returns the userfaultfd of a forked child, if this is of a fork.
    pub fn into_child(self) -> Option<Uffd> {
        if let Message::Fork(child) = self { Some(child) } else { None }
    }
}

/// Why a page could not be filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FillError {
    /// A page is there already (EEXIST).
    Exists,
    /// The layout is changing: read the event first (EAGAIN).
    Changing,
    /// No mapping there that is registered with this userfaultfd (ENOENT), or not all the way (EINVAL).
    NotMapped,
    /// The address space is gone (ESRCH).
    Gone,
    /// The kernel has no memory (ENOMEM).
    NoMemory,
    /// Any other errno: the program has mapped something there that the kernel does not fill.
    Refused(i32),
}

/// What [`Uffd::probe`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// The address is in a mapping registered with this userfaultfd.
    Registered,
    /// It is not.
    NotRegistered,
    /// Cannot tell: the layout is changing.
    Changing,
    /// The address space is gone.
    Gone,
}

/// A userfaultfd. Closed by `closing`: the kernel waits for the lock of its address space first.
#[derive(Debug)]
pub struct Uffd(Arc<Handed>);

/// A userfaultfd that may have been closed since.
#[derive(Debug)]
pub struct WeakUffd(Weak<Handed>);

impl Uffd {
    /// Returns the user for whom it is closed. A forked child's userfaultfd has the user of its parent's.
    pub fn user(&self) -> User {
        self.0.user()
    }

    /// Returns what does not keep it open.
    pub fn downgrade(&self) -> WeakUffd {
        WeakUffd(Arc::downgrade(&self.0))
    }
}

impl WeakUffd {
    /// Returns the userfaultfd, if it is open still.
    pub fn upgrade(&self) -> Option<Uffd> {
        self.0.upgrade().map(Uffd)
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl From<Handed> for Uffd {
    fn from(descriptor: Handed) -> Uffd {
        Uffd(Arc::new(descriptor))
    }
}

impl Uffd {
    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: `argument` has the layout that `request` demands (only this module calls, with its own structures).
        super::check(unsafe { libc::ioctl(self.as_raw_fd(), request, std::ptr::from_mut(argument)) }).map(drop)
    }

    /// The handshake that a userfaultfd needs before its first use.
    pub fn handshake(&self, features: u64) -> io::Result<()> {
        self.ioctl(UFFDIO_API, &mut [UFFD_API, features, 0])
    }

    /// Watches a range for missing pages.
    pub fn register(&self, range: Range) -> io::Result<()> {
        const MODE_MISSING: u64 = 1;
        self.ioctl(UFFDIO_REGISTER, &mut [range.start, range.len(), MODE_MISSING, 0])
    }

    /// Lets pages be moved into a range and filled there. Threads find zeros where it is empty: they do not wait.
    pub fn register_quietly(&self, range: Range) -> io::Result<()> {
        const MODE_WRITE_PROTECTED: u64 = 2;
        self.ioctl(UFFDIO_REGISTER, &mut [range.start, range.len(), MODE_WRITE_PROTECTED, 0])
    }

    /// Watches a range no longer. Threads that wait for a page of it go on.
    pub fn unregister(&self, range: Range) {
        // It fails for what is not watched.
        let _ = self.ioctl(UFFDIO_UNREGISTER, &mut [range.start, range.len()]);
    }

    /// Wakes whoever waits for a page of the range.
    pub fn wake(&self, range: Range) {
        // It fails only for a range that is not one, or an address space that is gone.
        let _ = self.ioctl(UFFDIO_WAKE, &mut [range.start, range.len()]);
    }

    /// Fills pages from `to` on with `data` and wakes whoever waits for them. Gives the bytes filled before the error.
    /// Of pages that lie in several mappings, only the first is filled.
    pub fn copy(&self, to: u64, data: &[u8]) -> (u64, Option<FillError>) {
        self.copy_in_mode(to, data, 0)
    }

    /// As [`copy`](Self::copy), but wakes nobody.
    pub fn copy_quietly(&self, to: u64, data: &[u8]) -> (u64, Option<FillError>) {
        self.copy_in_mode(to, data, DONTWAKE)
    }

    fn copy_in_mode(&self, to: u64, data: &[u8], mode: u64) -> (u64, Option<FillError>) {
        let mut len = data.len() as u64;
        let mut filled = 0;
        loop {
            let mut request = [to + filled, data.as_ptr() as u64 + filled, len - filled, mode, 0];
            let result = self.ioctl(UFFDIO_COPY, &mut request);
            match step(result, request[4] as i64) {
                Ok(bytes) => filled += bytes,
                Err(FillError::NotMapped) if filled == 0 && len > PAGE => {
                    len = PAGE;
                    continue;
                }
                Err(error) => return (filled, Some(error)),
            }
            if filled == len {
                return (filled, None);
            }
        }
    }

    /// Fills one page with zeros, at no cost in memory until it is written; wakes nobody.
    pub fn zero_quietly(&self, page: u64) -> Result<(), FillError> {
        let mut request = [page, PAGE, DONTWAKE, 0];
        let result = self.ioctl(UFFDIO_ZEROPAGE, &mut request);
        step(result, request[3] as i64).map(drop)
    }

    /// Makes a page deliver SIGBUS to whoever touches it.
    pub fn poison(&self, page: u64) -> Result<(), FillError> {
        let mut request = [page, PAGE, 0, 0];
        let result = self.ioctl(UFFDIO_POISON, &mut request);
        step(result, request[3] as i64).map(drop)
    }

    /// Asks about an address without changing anything: a copy from an address that is never mapped gets as far as
    /// reading its source (EFAULT), or finding a huge page (EEXIST), only where the destination is good. That it is not registered was so after all
    /// changes that have been read.
    pub fn probe(&self, page: u64) -> Probe {
        let mut request = [page, PAGE, PAGE, 0, 0];
        match self.ioctl(UFFDIO_COPY, &mut request) {
            // Page 1 is not mapped in the manager: only what is no userfaultfd says so.
            Ok(()) => Probe::NotRegistered,
            Err(error) => match error.raw_os_error() {
                Some(libc::EFAULT | libc::EEXIST) => Probe::Registered,
                // Without memory for a page table there is nothing to be told either.
                Some(libc::EAGAIN | libc::ENOMEM) => Probe::Changing,
                Some(libc::ESRCH) => Probe::Gone,
                _ => self.not_registered(),
            },
        }
    }

    /// Asks whether an address lies in a mapping that is registered with a userfaultfd, at a fifth of the cost of
    /// [`probe`](Self::probe): UFFDIO_CONTINUE is refused because the destination is not registered (ENOENT) before it
    /// is refused because the memory is private (EINVAL). That it is not was so after all changes that have been read.
    pub fn is_watched(&self, page: u64) -> Probe {
        match self.refusal(page, PAGE) {
            Some(libc::EINVAL) => Probe::Registered,
            Some(libc::EAGAIN) => Probe::Changing,
            Some(libc::ESRCH) => Probe::Gone,
            _ => self.not_registered(),
        }
    }

    /// The kernel looks whether a change is under way before it looks for the mapping: one may have begun in between.
    fn not_registered(&self) -> Probe {
        if self.is_changing() { Probe::Changing } else { Probe::NotRegistered }
    }

    /// Asks whether a change of the layout is under way, and nothing else: the kernel refuses that before it finds that
    /// nothing is asked about (EINVAL), and has then not looked at the memory yet.
    pub fn is_changing(&self) -> bool {
        self.refusal(PAGE, 0) == Some(libc::EAGAIN)
    }

    /// Why the kernel refuses UFFDIO_CONTINUE, which private memory never gets.
    fn refusal(&self, start: u64, len: u64) -> Option<i32> {
        const UFFDIO_CONTINUE: libc::c_ulong = 0xc020_aa07;
        self.ioctl(UFFDIO_CONTINUE, &mut [start, len, 0, 0]).err().and_then(|error| error.raw_os_error())
    }

    /// Returns whether the address space is gone, even if a change of its layout has never come to an end. It waits for changes that are
    /// under way: to be asked of a process that has ended.
    pub fn has_no_memory(&self) -> bool {
        // Nothing can be mapped at page 1 that is watched: EINVAL where there is memory.
        let error = self.ioctl(UFFDIO_UNREGISTER, &mut [PAGE, PAGE]).err();
        error.and_then(|error| error.raw_os_error()) == Some(libc::ENOMEM)
    }

    /// Sets `O_NONBLOCK`: without it the kernel reports the userfaultfd as ready (`POLLERR`) whether or not there is something to read. A
    /// process can create its userfaultfd without it, and then so are those of its forked children.
    pub fn make_nonblocking(&self) {
        // SAFETY: no pointers. It fails for no userfaultfd.
        unsafe { libc::fcntl(self.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    }

    /// Reads what is there to read, without waiting; tells whether that was all. The kernel hands out faults before
    /// events.
    pub fn read(&self, messages: &mut Vec<Message>) -> io::Result<bool> {
        let mut raw = [[0u64; 4]; AT_ONCE];
        let buffer = libc::iovec { iov_base: raw.as_mut_ptr().cast(), iov_len: size_of_val(&raw) };
        // Its process has the same open file, and can clear `O_NONBLOCK` there at any time.
        // SAFETY: the buffer is as long as said; a message is 32 bytes.
        let count = unsafe { libc::preadv2(self.as_raw_fd(), &raw const buffer, 1, -1, libc::RWF_NOWAIT) };
        if count < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            return self.read_if_readable(messages);
        }
        self.take(&raw, count, messages)
    }

    /// As [`read`](Self::read), where the kernel cannot be told not to wait: before Linux 6.10, and for the userfaultfd of a forked child.
    fn read_if_readable(&self, messages: &mut Vec<Message>) -> io::Result<bool> {
        if self.is_readable() { self.read_waiting(messages) } else { Ok(true) }
    }

    /// As [`read`](Self::read), but if nothing is there and the process has cleared `O_NONBLOCK` it waits, until the thread is interrupted
    /// ([`interrupt`](super::thread::interrupt)). Nothing else ends the wait, not even the death of the process.
    fn read_waiting(&self, messages: &mut Vec<Message>) -> io::Result<bool> {
        let mut raw = [[0u64; 4]; AT_ONCE];
        // SAFETY: the buffer is as long as said; a message is 32 bytes.
        let count = unsafe { libc::read(self.as_raw_fd(), raw.as_mut_ptr().cast(), size_of_val(&raw)) };
        self.take(&raw, count, messages)
    }

    /// Adds the messages that a read has given; tells whether those were all.
    fn take(&self, raw: &[[u64; 4]; AT_ONCE], count: isize, messages: &mut Vec<Message>) -> io::Result<bool> {
        if count < 0 {
            let error = io::Error::last_os_error();
            let is_empty = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            return if is_empty { Ok(true) } else { Err(error) };
        }
        let count = count as usize / 32;
        messages.extend(raw[..count].iter().filter_map(|raw| decode(raw, self.user())));
        Ok(count < AT_ONCE)
    }

    /// Waits for a moment, awake, until there is something to read; tells whether there is.
    ///
    /// A program whose faults come in quick succession is back sooner than this thread could fall asleep and be woken. Whoever
    /// else is to run on this processor does, though: that may be the one who was just woken, and is to come back.
    pub fn spin(&self) -> bool {
        const MOMENT: Duration = Duration::from_micros(20);
        let start = Instant::now();
        while start.elapsed() < MOMENT {
            if self.is_readable() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    /// Whether there is something to read.
    pub fn is_readable(&self) -> bool {
        self.wait(0)
    }

    /// Waits until there is something to read, for `milliseconds` at most; tells whether there is.
    pub fn wait(&self, milliseconds: i32) -> bool {
        let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        let changed = unsafe { libc::poll(&raw mut poll, 1, milliseconds) > 0 };
        // One that would block says POLLERR, and nothing else.
        changed && poll.revents & libc::POLLIN != 0
    }
}

/// What an operation that fills pages came to: the bytes filled, or why none.
fn step(result: io::Result<()>, filled: i64) -> Result<u64, FillError> {
    if filled > 0 {
        return Ok(filled as u64);
    }
    let Err(error) = result else { return Ok(0) };
    Err(match error.raw_os_error() {
        Some(libc::EEXIST) => FillError::Exists,
        Some(libc::EAGAIN) => FillError::Changing,
        Some(libc::ESRCH) => FillError::Gone,
        Some(libc::ENOMEM) => FillError::NoMemory,
        Some(libc::ENOENT | libc::EINVAL) => FillError::NotMapped,
        errno => FillError::Refused(errno.unwrap_or(0)),
    })
}

/// Reads a message as the kernel has written it, of a userfaultfd of `user`. A fork's descriptor is to be read once only.
pub(super) fn decode(raw: &[u64; 4], user: User) -> Option<Message> {
    const PAGEFAULT: u8 = 0x12;
    const FORK: u8 = 0x13;
    const REMAP: u8 = 0x14;
    const REMOVE: u8 = 0x15;
    const UNMAP: u8 = 0x16;
    const FLAG_WRITE: u64 = 1;
    let [head, a, b, c] = *raw;
    Some(match head as u8 {
        PAGEFAULT => Message::Fault { address: b & !(PAGE - 1), write: a & FLAG_WRITE != 0, tid: c as u32 },
        FORK => {
            // SAFETY: the kernel has just put this descriptor into our table, and nobody else knows of it.
            let child = unsafe { OwnedFd::from_raw_fd(a as u32 as RawFd) };
            Message::Fork(Handed::new(user, child).into())
        }
        REMAP => Message::Change(Change::Remap { from: a, to: b, len: c }),
        REMOVE => Message::Change(Change::Remove(Range::new(a, b))),
        UNMAP => Message::Change(Change::Unmap(Range::new(a, b))),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::thread;

    #[test]
    fn a_userfaultfd_without_nonblock_holds_no_thread_that_reads_it() {
        // SAFETY: no pointers; the descriptor is fresh.
        let fd = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as libc::c_int;
            OwnedFd::from_raw_fd(crate::sys::check(fd).expect("the tests run as root"))
        };
        assert!(crate::sys::link::is_userfaultfd(&fd));
        let uffd = Uffd::from(Handed::new(User::Own, fd));
        uffd.handshake(MAIN_FEATURES).unwrap();
        let mut messages = Vec::new();
        assert!(uffd.read(&mut messages).unwrap() && messages.is_empty());
        assert!(uffd.read_if_readable(&mut messages).unwrap() && messages.is_empty());
        // As if another thread had read what was there.
        let (said, heard) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            thread::allow_interruption();
            said.send(thread::own_id()).unwrap();
            assert!(uffd.read_waiting(&mut messages).unwrap() && messages.is_empty());
        });
        let id = heard.recv().unwrap();
        let start = Instant::now();
        while !reader.is_finished() {
            assert!(start.elapsed() < Duration::from_secs(20), "no signal ends the read");
            thread::interrupt(id);
            std::thread::sleep(Duration::from_millis(1));
        }
        reader.join().unwrap();
    }
}

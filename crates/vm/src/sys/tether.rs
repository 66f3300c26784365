//! The manager's end of what ties a program to the manager's life.
//!
//! The kernel kills the program when the descriptor table that the manager shares with the front is gone: then the near end of a
//! socket pair is closed, and the far end, which the program's memory holds open, signals that to the program.
//!
//! A second socket pair, whose far end lies in a message to the first one, holds the userfaultfds of children ([`Hold`]).
//!
//! A child's userfaultfd comes into being when the fork is read. If the thread that reads were killed before it had sent the
//! descriptor, nothing would hold it. So it reads and sends in one system call ([`Hold::read`]).
//!
//! # Safety
//! Structures and buffers are passed with their true sizes; received descriptors are owned at once.

#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use io_uring::{opcode, types};

use super::process::PidFd;
use super::uffd::{Message, Uffd, decode};
use super::uring;
use crate::closing::{Handed, User};

/// A socket pair by whose end the kernel kills a process: when this process and all that share its descriptors are gone, if [`Line::far`] is
/// still open somewhere then.
#[derive(Debug)]
pub struct Line {
    near: OwnedFd,
    far: UnixStream,
}

impl Line {
    /// Makes a line to a process, whose number is `pid`. It is not armed yet.
    ///
    /// # Errors
    /// The process has ended, or there is no descriptor left.
    pub fn new(process: &PidFd, pid: i32) -> io::Result<Line> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            pid: libc::pid_t,
        }
        const F_SETSIG: libc::c_int = 10;
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_PID: libc::c_int = 1;
        let (near, far) = UnixStream::pair()?;
        let owner = Owner { kind: F_OWNER_PID, pid };
        // SAFETY: the structure has the kernel's layout; the other is a number.
        unsafe {
            super::check(libc::fcntl(far.as_raw_fd(), F_SETOWN_EX, &raw const owner))?;
            super::check(libc::fcntl(far.as_raw_fd(), F_SETSIG, libc::SIGKILL))?;
        }
        // The number may have been another process's by then.
        if process.has_ended() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(Line { near: near.into(), far })
    }

    /// Arms the line: from now on any event at the far end kills the process, the end of the connection included.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: a number.
        unsafe { super::check(libc::fcntl(self.far.as_raw_fd(), libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK))? };
        Ok(())
    }

    /// The end to be held by the memory of the process.
    pub fn far(&self) -> RawFd {
        self.far.as_raw_fd()
    }
}

/// Disarms the line: the process needs no manager any more.
impl Drop for Line {
    fn drop(&mut self) {
        // SAFETY: a number. From here on the end of the connection signals nothing.
        unsafe { libc::fcntl(self.far.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    }
}

/// A tie, as long as this lives; and beyond, unless it is undone.
#[derive(Debug)]
pub struct Tether {
    line: Line,
    hold: Arc<Hold>,
}

impl Tether {
    /// Has a process, whose number is `pid`, killed when this process and all that share its descriptors are gone, if [`Tether::far`] is
    /// still open somewhere then. What it holds comes to be closed for `user`.
    ///
    /// # Errors
    /// The process has ended, or there is no descriptor left.
    pub fn new(process: &PidFd, pid: i32, user: User) -> io::Result<Tether> {
        let (line, hold) = (Line::new(process, pid)?, Hold::new(user)?);
        // Before anything that comes there is signalled.
        send_descriptors(line.near.as_raw_fd(), &[hold.far()])?;
        line.arm()?;
        Ok(Tether { line, hold: Arc::new(hold) })
    }

    /// The end to be held by the memory of the program.
    pub fn far(&self) -> RawFd {
        self.line.far()
    }

    /// What holds the userfaultfds of children.
    pub fn hold(&self) -> &Arc<Hold> {
        &self.hold
    }
}

/// Descriptors that stay open as long as the memory that holds the far end of a [`Tether`], or a child's that has inherited it.
///
/// They lie in messages that nobody receives. Only the oldest ones can be taken back.
#[derive(Debug)]
pub struct Hold {
    near: Handed,
    /// The last to close it closes what it holds.
    far: Handed,
}

/// The most descriptors of a message. The kernel allows 253.
const MOST_AT_ONCE: usize = 128;

impl Hold {
    fn new(user: User) -> io::Result<Hold> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let [near, far] = [near, far].map(|end| Handed::new(user, end.into()));
        Ok(Hold { near, far })
    }

    /// Has descriptors held; gives how many messages that took.
    pub fn keep(&self, descriptors: &[RawFd]) -> io::Result<usize> {
        let mut messages = 0;
        for part in descriptors.chunks(MOST_AT_ONCE) {
            send_descriptors(self.near.as_raw_fd(), part)?;
            messages += 1;
        }
        Ok(messages)
    }

    /// Reads one message of a userfaultfd, without waiting; tells whether a message was sent: with a fork's descriptor, which is held by
    /// now, and never with another. `None` if there is nothing to read.
    ///
    /// # Errors
    /// The kernel does not permit it to be done in this way (without io_uring), or the userfaultfd cannot be read.
    pub fn read(&self, uffd: &Uffd) -> io::Result<Option<(Option<Message>, bool)>> {
        match self.read_with(uffd, libc::RWF_NOWAIT) {
            // That of a forked child, and any before Linux 6.10. See `Uffd::read`.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                if uffd.is_readable() {
                    self.read_with(uffd, 0)
                } else {
                    Ok(None)
                }
            }
            result => result,
        }
    }

    /// The parts of the message are read into the control message that is sent next: the descriptor to where a descriptor has to be, and
    /// what is zero in a fork to where zeros have to be. In any other message that is an address, in the length, which the kernel
    /// refuses; or, at address 0, a thread's id or the length of what is moved there, in level and kind, so that nothing is sent along.
    /// The process must not get another descriptor of ours.
    fn read_with(&self, uffd: &Uffd, flags: libc::c_int) -> io::Result<Option<(Option<Message>, bool)>> {
        /// `struct cmsghdr` with one descriptor.
        #[repr(C)]
        struct Rights {
            len: [u8; 8],
            level: [u8; 4],
            kind: [u8; 4],
            descriptor: [u8; 4],
            unused: [u8; 4],
        }
        const _: () = assert!(cfg!(target_endian = "little"), "the low byte of the length comes first");
        let (mut head, mut middle, mut high, mut last, byte) = ([0u8; 8], [0u8; 5], [0u8; 1], [0u8; 1], [0u8]);
        // SAFETY: a number.
        let len = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as u64;
        let (level, kind) = (libc::SOL_SOCKET.to_le_bytes(), libc::SCM_RIGHTS.to_le_bytes());
        let mut rights = Rights { len: len.to_le_bytes(), level, kind, descriptor: [0xff; 4], unused: [0; 4] };
        let part = |part: &mut [u8]| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() };
        let parts = [
            part(&mut head),
            part(&mut rights.descriptor),
            part(&mut middle),
            part(&mut rights.len[1..7]),
            part(&mut high),
            part(&mut rights.level[1..]),
            part(&mut rights.kind[1..]),
            part(&mut rights.len[7..]),
            part(&mut last),
        ];
        let mut buffer = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
        // SAFETY: all zeros is a header without anything.
        let mut header: libc::msghdr = unsafe { zeroed() };
        (header.msg_iov, header.msg_iovlen) = (&raw mut buffer, 1);
        (header.msg_control, header.msg_controllen) = ((&raw mut rights).cast(), size_of::<Rights>());
        let read =
            opcode::Readv::new(types::Fd(uffd.as_raw_fd()), parts.as_ptr(), parts.len() as u32).rw_flags(flags).build();
        let near = types::Fd(self.near.as_raw_fd());
        let no_wait = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as u32;
        let send = opcode::SendMsg::new(near, &raw const header).flags(no_wait).build();
        // SAFETY: all of it lives until the call returns.
        let results = unsafe { uring::in_one(read, send) };
        let [read, sent] = results.ok_or(io::ErrorKind::Unsupported)?;
        if matches!(-read, libc::EAGAIN | libc::ECANCELED | libc::EINTR) {
            return Ok(None);
        }
        if read != 32 {
            return Err(io::Error::from_raw_os_error(-read));
        }
        let mut raw = [0; 32];
        let Rights { len, level, kind, descriptor, .. } = &rights;
        let parts = [&head[..], descriptor, &middle, &len[1..7], &high, &level[1..], &kind[1..], &len[7..], &last];
        parts.into_iter().flatten().zip(&mut raw).for_each(|(from, to)| *to = *from);
        let words = std::array::from_fn(|word| u64::from_le_bytes(std::array::from_fn(|byte| raw[8 * word + byte])));
        Ok(Some((decode(&words, uffd.user()), sent == 1)))
    }

    fn far(&self) -> RawFd {
        self.far.as_raw_fd()
    }

    /// Takes back what the oldest messages hold, so many of them.
    pub fn let_go(&self, messages: usize) {
        let user = self.far.user();
        (0..messages).for_each(|_| {
            receive_descriptors(self.far()).into_iter().for_each(|held| drop(Handed::new(user, held)));
        });
    }
}

/// Room for a control message of [`MOST_AT_ONCE`] descriptors, with its alignment.
type Control = [u64; 2 + MOST_AT_ONCE / 2];

/// Sends a byte with descriptors, without waiting.
fn send_descriptors(socket: RawFd, descriptors: &[RawFd]) -> io::Result<()> {
    let mut control: Control = [0; 2 + MOST_AT_ONCE / 2];
    assert!(descriptors.len() <= MOST_AT_ONCE);
    let (byte, len) = ([0u8], size_of_val(descriptors) as u32);
    let mut buffer = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    // SAFETY: the header points to the buffer and the control space, which outlive the call; the control message is laid out by
    // libc's own macros within the space given.
    let sent = unsafe {
        let mut header: libc::msghdr = zeroed();
        header.msg_iov = &raw mut buffer;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = libc::CMSG_SPACE(len) as usize;
        let rights = libc::CMSG_FIRSTHDR(&raw const header);
        (*rights).cmsg_level = libc::SOL_SOCKET;
        (*rights).cmsg_type = libc::SCM_RIGHTS;
        (*rights).cmsg_len = libc::CMSG_LEN(len) as usize;
        for (number, descriptor) in descriptors.iter().enumerate() {
            libc::CMSG_DATA(rights).cast::<RawFd>().add(number).write_unaligned(*descriptor);
        }
        libc::sendmsg(socket, &raw const header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives what [`send_descriptors`] has sent. Nothing if there is no message.
fn receive_descriptors(socket: RawFd) -> Vec<OwnedFd> {
    let mut control: Control = [0; 2 + MOST_AT_ONCE / 2];
    let mut byte = [0u8];
    let mut buffer = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut received = Vec::new();
    // SAFETY: as above. The descriptors of a control message are fresh, and nobody else knows of them.
    unsafe {
        let mut header: libc::msghdr = zeroed();
        header.msg_iov = &raw mut buffer;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control);
        if libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) < 0 {
            return received;
        }
        let rights = libc::CMSG_FIRSTHDR(&raw const header);
        if !rights.is_null() && ((*rights).cmsg_level, (*rights).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let count = ((*rights).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
            for number in 0..count {
                let descriptor = libc::CMSG_DATA(rights).cast::<RawFd>().add(number).read_unaligned();
                received.push(OwnedFd::from_raw_fd(descriptor));
            }
        }
    }
    received
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    fn process_of(child: &Child) -> PidFd {
        PidFd::open(child.id() as i32).unwrap()
    }

    fn far_end_alone(line: Line) -> UnixStream {
        // As when the process dies: nothing is undone, and the near end closes.
        let far = line.far.try_clone().unwrap();
        let line = std::mem::ManuallyDrop::new(line);
        // SAFETY: the near end is not used again.
        unsafe { libc::close(line.near.as_raw_fd()) };
        far
    }

    #[test]
    fn the_end_of_the_near_side_kills() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let far = far_end_alone(Tether::new(&process_of(&child), child.id() as i32, User::Own).unwrap().line);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        drop(far);
    }

    #[test]
    fn a_line_that_is_not_armed_kills_nobody() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let far = far_end_alone(Line::new(&process_of(&child), child.id() as i32).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none(), "it was killed");
        drop(far);
        child.kill().and_then(|()| child.wait()).unwrap();
    }

    #[test]
    fn there_is_no_line_to_whatever_has_the_number_of_a_process_that_has_ended() {
        let (mut dead, mut other) =
            (Command::new("true").spawn().unwrap(), Command::new("sleep").arg("100").spawn().unwrap());
        let process = process_of(&dead);
        dead.wait().unwrap();
        let refused = Line::new(&process, other.id() as i32).map(drop).expect_err("it has ended");
        assert_eq!(refused.raw_os_error(), Some(libc::ESRCH));
        other.kill().and_then(|()| other.wait()).unwrap();
    }

    #[test]
    fn what_is_held_stays_open_until_it_is_let_go() {
        let hold = Hold::new(User::Own).unwrap();
        let pairs: Vec<_> = (0..300).map(|_| UnixStream::pair().unwrap()).collect();
        let held: Vec<RawFd> = pairs.iter().map(|(held, _)| held.as_raw_fd()).collect();
        assert_eq!(hold.keep(&held[..1]).unwrap(), 1);
        assert_eq!(hold.keep(&held[1..]).unwrap(), 3);
        let others: Vec<UnixStream> = pairs.into_iter().map(|(_, other)| other).collect();
        let ended = || {
            let is_over = |stream: &UnixStream| {
                let mut poll = libc::pollfd { fd: stream.as_raw_fd(), events: 0, revents: 0 };
                // SAFETY: one pollfd.
                unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
            };
            others.iter().filter(|stream| is_over(stream)).count()
        };
        let reaches = |count| {
            (0..2000).any(|_| {
                ended() == count || {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    false
                }
            })
        };
        assert!(ended() == 0);
        hold.let_go(1);
        assert!(reaches(1));
        hold.let_go(1);
        assert!(reaches(1 + MOST_AT_ONCE));
        drop(hold);
        assert!(reaches(300));
    }

    #[test]
    fn a_fork_is_held_when_it_has_been_read_and_a_fault_is_not() {
        let page = crate::PAGE as usize;
        // SAFETY: fresh memory; a fresh descriptor; the child of a process with other threads makes one call.
        let (memory, uffd) = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let memory = libc::mmap(std::ptr::null_mut(), page, rights, flags, -1, 0) as u64;
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) as libc::c_int;
            (memory, OwnedFd::from_raw_fd(super::super::check(fd).expect("the tests run as root")))
        };
        let uffd = Uffd::from(Handed::new(User::Own, uffd));
        uffd.handshake(crate::sys::uffd::MAIN_FEATURES).unwrap();
        uffd.register(crate::range::Range::page(memory)).unwrap();
        let hold = Hold::new(User::Own).unwrap();
        assert!(hold.read(&uffd).unwrap().is_none());
        let next = |uffd: &Uffd| loop {
            if let Some(read) = hold.read(uffd).unwrap() {
                break read;
            }
            std::thread::yield_now();
        };

        // SAFETY: the page is mapped.
        let reader = std::thread::spawn(move || unsafe { (memory as *const u8).read_volatile() });
        let (fault, is_held) = next(&uffd);
        assert!(matches!(fault, Some(Message::Fault { address, write: false, .. }) if address == memory), "{fault:?}");
        assert!(!is_held && receive_descriptors(hold.far()).is_empty());
        assert!(uffd.copy(memory, &[7; crate::PAGE as usize]).1.is_none());
        assert_eq!(reader.join().unwrap(), 7);

        // SAFETY: nothing else is mapped there; the call reads a byte of it into another.
        let at_zero = unsafe {
            let (rights, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
            assert_eq!(libc::mmap(std::ptr::null_mut(), page, rights, flags, -1, 0), std::ptr::null_mut());
            uffd.register(crate::range::Range::page(0)).unwrap();
            std::thread::spawn(|| {
                let mut byte = 1u8;
                let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
                let from = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
                (libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0), byte)
            })
        };
        assert!(matches!(next(&uffd).0, Some(Message::Fault { address: 0, .. })));
        assert!(receive_descriptors(hold.far()).is_empty(), "the number of a descriptor was read from a fault");
        assert!(uffd.zero_quietly(0).is_ok());
        uffd.wake(crate::range::Range::page(0));
        assert_eq!(at_zero.join().unwrap(), (1, 0));
        // No event of the unmapping is to be read.
        uffd.unregister(crate::range::Range::page(0));
        // SAFETY: the mapping was made above, and the thread that read there has ended.
        unsafe { libc::munmap(std::ptr::null_mut(), page) };

        // SAFETY: as above.
        let forker = std::thread::spawn(|| unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::fork();
                libc::_exit(0);
            }
            libc::waitpid(child, std::ptr::null_mut(), 0) == child
        });
        let (Some(Message::Fork(child)), true) = next(&uffd) else { panic!("the fork is not held") };
        assert_eq!(receive_descriptors(hold.far()).len(), 1);
        // The kernel cannot be told not to wait when the userfaultfd of a forked child is read.
        let (Some(Message::Fork(_)), true) = next(&child) else { panic!("the child's fork is not held") };
        assert_eq!(receive_descriptors(hold.far()).len(), 1);
        assert!(forker.join().unwrap());
    }

    #[test]
    fn what_is_dismissed_lives_on() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let tether = Tether::new(&process_of(&child), child.id() as i32, User::Own).unwrap();
        let far = tether.line.far.try_clone().unwrap();
        drop(tether);
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none(), "it was killed");
        drop(far);
        child.kill().and_then(|()| child.wait()).unwrap();
    }
}

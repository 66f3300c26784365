//! The manager's end of connections to workers and programs: messages of words, with descriptors beside them.
//!
//! # Safety
//! Buffers are passed with their true sizes; received descriptors are owned at once.

#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use uzswap_proto::{Job, MAX_WORDS};

/// The socket that a job's processes connect to.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// One connection.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Listener {
    /// Listens on the abstract socket of the jobs of that name.
    pub fn bind_name(name: u64) -> io::Result<Listener> {
        let name = Job { name, token: 0 }.socket_name();
        // SAFETY: no pointers; the descriptor is fresh.
        let socket = unsafe {
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            OwnedFd::from_raw_fd(super::check(libc::socket(libc::AF_UNIX, kind, 0))?)
        };
        // SAFETY: all zeros is a valid address structure.
        let mut address: libc::sockaddr_un = unsafe { zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path[1..].iter_mut().zip(name) {
            *to = from as libc::c_char;
        }
        let len = (size_of::<libc::sa_family_t>() + 1 + name.len()) as libc::socklen_t;
        // SAFETY: the address is `len` bytes long at least.
        unsafe {
            super::check(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len))?;
            super::check(libc::listen(socket.as_raw_fd(), 4096))?;
        }
        Ok(Listener(socket))
    }

    /// Takes the next connection, if one is waiting.
    pub fn accept(&self) -> io::Result<Option<Link>> {
        // SAFETY: no address wanted.
        let fd =
            unsafe { libc::accept4(self.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC) };
        match super::check(fd) {
            // SAFETY: the descriptor is fresh.
            Ok(fd) => Ok(Some(Link(unsafe { OwnedFd::from_raw_fd(fd) }))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The socket under a descriptor that this process was started with, if it is one that listens for streams by a name.
pub fn inherited_listener(descriptor: RawFd) -> io::Result<UnixListener> {
    // SAFETY: no pointers; the copy is fresh.
    let copy = unsafe { OwnedFd::from_raw_fd(super::check(libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3))?) };
    let is = |option, wanted| {
        let mut found: libc::c_int = 0;
        let mut len = size_of_val(&found) as libc::socklen_t;
        let to = (&raw mut found).cast();
        // SAFETY: the kernel fills a number, as far as `len` allows.
        let got = unsafe { libc::getsockopt(copy.as_raw_fd(), libc::SOL_SOCKET, option, to, &raw mut len) };
        got == 0 && found == wanted
    };
    let kind = [(libc::SO_DOMAIN, libc::AF_UNIX), (libc::SO_TYPE, libc::SOCK_STREAM), (libc::SO_ACCEPTCONN, 1)];
    if !kind.into_iter().all(|(option, wanted)| is(option, wanted)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a unix socket that listens for streams"));
    }
    Ok(UnixListener::from(copy))
}

/// Who connected to a unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The process; 0 if it cannot be seen from here.
    pub pid: i32,
    /// Its effective user when it connected.
    pub uid: u32,
}

/// Who is at the other end of a connection.
pub fn peer(connection: &impl AsRawFd) -> io::Result<Peer> {
    // SAFETY: all zeros is a valid structure; the kernel fills it as far as `len` allows.
    unsafe {
        let mut credentials: libc::ucred = zeroed();
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let to = (&raw mut credentials).cast();
        super::check(libc::getsockopt(connection.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len))?;
        Ok(Peer { pid: credentials.pid, uid: credentials.uid })
    }
}

/// A message received.
#[derive(Debug, Default)]
pub struct Received {
    /// Its words.
    pub words: Vec<u64>,
    /// The descriptors that came with it.
    pub descriptors: Vec<OwnedFd>,
}

const MAX_DESCRIPTORS: usize = 4;

/// Room for the control message, with its alignment.
type Control = [u64; 8];

impl Link {
    /// The process at the other end.
    pub fn peer(&self) -> io::Result<i32> {
        peer(self).map(|peer| peer.pid)
    }

    /// Sends a message, with at most one descriptor. Never blocks for long: the other end reads whatever it is sent.
    pub fn send(&self, words: &[u64], descriptor: Option<RawFd>) -> io::Result<()> {
        let mut control: Control = [0; 8];
        let mut buffer = libc::iovec { iov_base: words.as_ptr().cast_mut().cast(), iov_len: size_of_val(words) };
        // SAFETY: the header points to the buffer and the control space, which outlive the call; the control message
        // is laid out by libc's own macros within the space given.
        let sent = unsafe {
            let mut header: libc::msghdr = zeroed();
            header.msg_iov = &raw mut buffer;
            header.msg_iovlen = 1;
            if let Some(descriptor) = descriptor {
                header.msg_control = control.as_mut_ptr().cast();
                header.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
                let rights = libc::CMSG_FIRSTHDR(&raw const header);
                (*rights).cmsg_level = libc::SOL_SOCKET;
                (*rights).cmsg_type = libc::SCM_RIGHTS;
                (*rights).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
                libc::CMSG_DATA(rights).cast::<RawFd>().write_unaligned(descriptor);
            }
            libc::sendmsg(self.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives a message if one is there, or comes within `patience`. An end of file is an `UnexpectedEof` error.
    pub fn receive(&self, patience: Duration) -> io::Result<Option<Received>> {
        let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        if super::check(unsafe { libc::poll(&raw mut poll, 1, patience.as_millis() as i32) })? == 0 {
            return Ok(None);
        }
        let mut words = [0u64; MAX_WORDS];
        let mut control: Control = [0; 8];
        const { assert!(size_of::<Control>() >= 16 + MAX_DESCRIPTORS * size_of::<RawFd>()) };
        let mut buffer = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: size_of_val(&words) };
        let mut received = Received::default();
        // SAFETY: the header points to the buffer and the control space, which outlive the call; control messages are
        // walked by libc's own macros; each descriptor in one is ours from here on and is owned at once.
        let bytes = unsafe {
            let mut header: libc::msghdr = zeroed();
            header.msg_iov = &raw mut buffer;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of::<Control>();
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            let bytes = libc::recvmsg(self.as_raw_fd(), &raw mut header, flags);
            if bytes >= 0 {
                let mut rights = libc::CMSG_FIRSTHDR(&raw const header);
                while !rights.is_null() {
                    if ((*rights).cmsg_level, (*rights).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                        let data = libc::CMSG_DATA(rights).cast::<RawFd>();
                        let count = ((*rights).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                        let owned = (0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                        received.descriptors.extend(owned);
                    }
                    rights = libc::CMSG_NXTHDR(&raw const header, rights);
                }
            }
            bytes
        };
        match bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => {
                received.words = words[..bytes as usize / size_of::<u64>()].to_vec();
                Ok(Some(received))
            }
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error => Err(error),
            },
        }
    }
}

//! The manager's end of connections to workers and programs: messages of words, with descriptors beside them.
//!
//! What a client sends is not trusted, and nothing here waits for it:
//!
//! 1. The kernel refuses messages with descriptors to a connection until they are let pass ([`Link::let_descriptors_pass`]), from Linux 6.16 on.
//! 2. A message is received only if all of its descriptors are userfaultfds or pidfds. A pipe, a socket or a file of a FUSE server
//!    would block a later poll, read or close. Any other message ends the connection.
//! 3. Connections and descriptors are closed by `closing`, for the user at the other end of the connection. A connection that descriptors
//!    could never come by is closed at once.
//!
//! # Safety
//! Buffers are passed with their true sizes; received descriptors are owned at once.

#![allow(unsafe_code)]

use std::fs::{self, Permissions};
use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use uzswap_proto::{Job, MAX_WORDS, SOCKET_PATH};

use super::process::PidFd;

use crate::closing::{Handed, User};

/// The socket that a job's processes connect to.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Whether the kernel refuses descriptors.
    refuses: bool,
}

/// One connection. Its end is seen at once by its peer when it is dropped.
#[derive(Debug)]
pub struct Link {
    socket: Handed,
    /// Whether unread messages may have descriptors.
    passes: AtomicBool,
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: no pointers. It fails only if the peer has gone.
        unsafe { libc::shutdown(self.as_raw_fd(), libc::SHUT_RDWR) };
        if !self.passes.load(Relaxed) {
            self.socket.close_at_once();
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Listener {
    /// Listens on the abstract socket of the jobs of that name.
    pub fn bind_name(name: u64) -> io::Result<Listener> {
        let name = Job { name, token: 0 }.socket_name();
        let mut path = [0; SOCKET_PATH];
        path[1..=name.len()].copy_from_slice(&name);
        Listener::bind(path, 1 + name.len())
    }

    /// Listens on a socket at `path`, for processes in other network namespaces.
    pub fn bind_path(path: &Path) -> io::Result<Listener> {
        let bytes = path.as_os_str().as_bytes();
        let mut text = [0; SOCKET_PATH];
        if bytes.len() >= text.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path is too long for a socket"));
        }
        text[..bytes.len()].copy_from_slice(bytes);
        let listener = Listener::bind(text, bytes.len() + 1)?;
        // Processes of a job can become any user.
        fs::set_permissions(path, Permissions::from_mode(0o666))?;
        Ok(listener)
    }

    fn bind(path: [u8; SOCKET_PATH], len: usize) -> io::Result<Listener> {
        // SAFETY: no pointers; the descriptor is fresh.
        let socket = unsafe {
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            OwnedFd::from_raw_fd(super::check(libc::socket(libc::AF_UNIX, kind, 0))?)
        };
        let sun_path = path.map(|byte| byte as libc::c_char);
        let address = libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path };
        let len = (size_of::<libc::sa_family_t>() + len) as libc::socklen_t;
        // Before there can be a connection: each has what the listener has when it begins.
        let refuses = refuse_descriptors(&socket);
        // SAFETY: the address is `len` bytes long at least.
        unsafe {
            super::check(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len))?;
            super::check(libc::listen(socket.as_raw_fd(), 4096))?;
        }
        Ok(Listener { socket, refuses })
    }

    /// Takes the next connection, if one is waiting.
    pub fn accept(&self) -> io::Result<Option<Link>> {
        // SAFETY: no address wanted.
        let fd =
            unsafe { libc::accept4(self.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC) };
        match super::check(fd) {
            Ok(fd) => {
                // SAFETY: the descriptor is fresh.
                let socket = unsafe { OwnedFd::from_raw_fd(fd) };
                // It never fails for a connection.
                let user = peer(&socket).map_or(User::Own, |peer| User::Of(peer.uid));
                Ok(Some(Link { socket: Handed::new(user, socket), passes: AtomicBool::new(!self.refuses) }))
            }
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

/// A handle on the process at the other end of a connection, as the kernel gives it: the process that connected, whatever has
/// its number by now. From Linux 6.5 on.
pub fn peer_handle(connection: &impl AsRawFd) -> io::Result<PidFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = size_of_val(&fd) as libc::socklen_t;
    // SAFETY: the kernel fills a number, as far as `len` allows; the descriptor is fresh.
    unsafe {
        let to = (&raw mut fd).cast();
        super::check(libc::getsockopt(connection.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, to, &raw mut len))?;
        Ok(PidFd::from(OwnedFd::from_raw_fd(fd)))
    }
}

/// Two connections that are each other's end.
#[cfg(any(test, feature = "fuzzing"))]
pub fn pair() -> io::Result<(Link, Link)> {
    let (kind, mut ends) = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, [0; 2]);
    // SAFETY: room for two descriptors, which are fresh.
    let [one, other] = unsafe {
        super::check(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()))?;
        ends.map(|end| Handed::new(User::Own, OwnedFd::from_raw_fd(end)))
            .map(|socket| Link { socket, passes: AtomicBool::new(true) })
    };
    Ok((one, other))
}

/// A message received.
#[derive(Debug, Default)]
pub struct Received {
    /// Its words.
    pub words: Vec<u64>,
    /// The descriptors that came with it: userfaultfds and pidfds, no others.
    pub descriptors: Vec<Handed>,
}

/// The most descriptors that a message of a client may have.
const MAX_DESCRIPTORS: usize = 4;

/// The most descriptors that the kernel passes with a message.
const KERNEL_MAX_DESCRIPTORS: usize = 253;

/// Room for a control message of one descriptor, with its alignment.
type Control = [u64; 8];

/// Room for the largest control message: what has no room is closed by the kernel in the thread that receives.
type LargestControl = [u64; 2 + KERNEL_MAX_DESCRIPTORS.div_ceil(2)];

/// Has the kernel refuse messages with descriptors to the connections of a listener, from now on. Kernels before Linux 6.16 cannot: tells
/// whether it does.
pub fn refuse_descriptors(listener: &impl AsRawFd) -> bool {
    let_pass(listener, false)
}

fn let_pass(socket: &impl AsRawFd, passes: bool) -> bool {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let passes = libc::c_int::from(passes);
    let (from, len) = ((&raw const passes).cast(), size_of_val(&passes) as libc::socklen_t);
    // SAFETY: the number is as long as said.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, from, len) == 0 }
}

/// Whether a descriptor is a userfaultfd, told by the kernel's name for it, which no file or socket can have.
pub fn is_userfaultfd(descriptor: &impl AsRawFd) -> bool {
    names(descriptor, |name| name == "anon_inode:[userfaultfd]")
}

/// Whether a descriptor is a pidfd.
pub fn is_pidfd(descriptor: &impl AsRawFd) -> bool {
    // The second is that of the file system that pidfds have since Linux 6.9.
    names(descriptor, |name| name == "anon_inode:[pidfd]" || name.starts_with("pidfd:["))
}

fn names(descriptor: &impl AsRawFd, is: impl Fn(&str) -> bool) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    name.is_ok_and(|name| name.to_str().is_some_and(is))
}

impl Link {
    /// The user at the other end, for whom it is closed.
    pub fn user(&self) -> User {
        self.socket.user()
    }

    /// Has what comes by it closed for another user.
    pub fn hand_to(&mut self, user: User) {
        self.socket.hand_to(user);
    }

    /// Has the kernel let messages with descriptors pass, or refuse them again. Those that were sent in between come all the same.
    pub fn let_descriptors_pass(&self, passes: bool) {
        if passes {
            self.passes.store(true, Relaxed);
        }
        let_pass(self, passes);
    }

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

    /// Receives a message if one is there, or comes within `patience`. An end of file is an `UnexpectedEof` error; a message with
    /// descriptors that a client has no reason to send is an `InvalidData` error.
    pub fn receive(&self, patience: Duration) -> io::Result<Option<Received>> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd.
            match super::check(unsafe { libc::poll(&raw mut poll, 1, left.as_millis() as i32) }) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                // The watchdog interrupts threads that stood still a moment ago.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let mut words = [0u64; MAX_WORDS];
        let mut control: LargestControl = [0; 2 + KERNEL_MAX_DESCRIPTORS.div_ceil(2)];
        const { assert!(size_of::<LargestControl>() >= 16 + KERNEL_MAX_DESCRIPTORS * size_of::<RawFd>()) };
        let mut buffer = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: size_of_val(&words) };
        let mut received = Received::default();
        // SAFETY: the header points to the buffer and the control space, which outlive the call; control messages are
        // walked by libc's own macros; each descriptor in one is ours from here on and is owned at once.
        let bytes = unsafe {
            let mut header: libc::msghdr = zeroed();
            header.msg_iov = &raw mut buffer;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of::<LargestControl>();
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            let bytes = libc::recvmsg(self.as_raw_fd(), &raw mut header, flags);
            if bytes >= 0 {
                let mut rights = libc::CMSG_FIRSTHDR(&raw const header);
                while !rights.is_null() {
                    if ((*rights).cmsg_level, (*rights).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                        let data = libc::CMSG_DATA(rights).cast::<RawFd>();
                        let count = ((*rights).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                        let owned = (0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                        received.descriptors.extend(owned.map(|owned| Handed::new(self.user(), owned)));
                    }
                    rights = libc::CMSG_NXTHDR(&raw const header, rights);
                }
            }
            bytes
        };
        match bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => {
                let descriptors = &received.descriptors;
                let wanted = descriptors.iter().all(|descriptor| is_userfaultfd(descriptor) || is_pidfd(descriptor));
                if !wanted || descriptors.len() > MAX_DESCRIPTORS {
                    return Err(io::ErrorKind::InvalidData.into());
                }
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    fn pair() -> (Link, Link) {
        super::pair().unwrap()
    }

    /// A connection whose last close waits 20 seconds for a peer that does not read, and that peer.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 20 };
        let (from, len) = ((&raw const linger).cast(), size_of_val(&linger) as libc::socklen_t);
        // SAFETY: the structure is as long as said.
        unsafe {
            let set = libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, from, len);
            crate::sys::check(set).unwrap();
        }
        stream.set_nonblocking(true).unwrap();
        while (&stream).write(&[0; 65536]).is_ok() {}
        (stream, peer)
    }

    #[test]
    fn a_socket_that_lingers_is_refused_and_holds_no_thread_that_receives() {
        let (manager, client) = pair();
        let (stream, _peer) = lingering();
        client.send(&[1], Some(stream.as_raw_fd())).unwrap();
        drop(stream);
        let started = Instant::now();
        let refused = manager.receive(Duration::from_secs(1)).expect_err("no descriptor of a client's");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }

    #[test]
    fn an_unread_message_holds_no_thread_that_drops_its_connection() {
        let (manager, client) = pair();
        let (stream, _peer) = lingering();
        client.send(&[1], Some(stream.as_raw_fd())).unwrap();
        drop(stream);
        let started = Instant::now();
        drop(manager);
        assert!(client.receive(Duration::from_secs(5)).is_err(), "the peer sees the end");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    }

    #[test]
    fn descriptors_are_refused_until_they_are_let_pass() {
        let name = crate::sys::job::random().unwrap();
        let listener = Listener::bind_name(name).unwrap();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
        let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
        assert_eq!(listener.refuses, version >= (6, 16), "Linux {release}");
        if !listener.refuses {
            println!("not tested: Linux {release} cannot refuse descriptors");
            return;
        }
        let bytes = Job { name, token: 0 }.socket_name();
        let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
        address.sun_path[1..].iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte as libc::c_char);
        let len = (size_of::<libc::sa_family_t>() + 1 + bytes.len()) as libc::socklen_t;
        // SAFETY: the descriptor is fresh; the address is `len` bytes long at least.
        let client = unsafe {
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            let socket = OwnedFd::from_raw_fd(crate::sys::check(libc::socket(libc::AF_UNIX, kind, 0)).unwrap());
            crate::sys::check(libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len)).unwrap();
            Link { socket: Handed::new(User::Own, socket), passes: AtomicBool::new(false) }
        };
        let refuses = || {
            let sent = client.send(&[1], Some(client.as_raw_fd()));
            sent.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM))
        };
        assert!(refuses(), "before it is accepted");
        let accepted = listener.accept().unwrap().expect("it has connected");
        assert!(refuses() && client.send(&[2], None).is_ok());
        assert_eq!(accepted.receive(Duration::ZERO).unwrap().expect("a message").words, [2]);
        accepted.let_descriptors_pass(true);
        let own = PidFd::open(std::process::id() as i32).unwrap();
        client.send(&[3], Some(own.as_raw_fd())).unwrap();
        accepted.let_descriptors_pass(false);
        assert!(refuses());
        assert_eq!(accepted.receive(Duration::ZERO).unwrap().expect("what was let pass").descriptors.len(), 1);
        assert_eq!(accepted.user(), User::Of(rustix::process::geteuid().as_raw()));
    }

    #[test]
    fn a_process_handle_is_received() {
        let (manager, client) = pair();
        let own = crate::sys::process::PidFd::open(std::process::id() as i32).unwrap();
        client.send(&[1, 2], Some(own.as_raw_fd())).unwrap();
        let received = manager.receive(Duration::from_secs(1)).unwrap().unwrap();
        assert_eq!((&received.words[..], received.descriptors.len()), (&[1, 2][..], 1));
        assert!(is_pidfd(&received.descriptors[0]) && !is_userfaultfd(&received.descriptors[0]));
    }
}

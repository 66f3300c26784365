//! The system calls behind the checks.
//!
//! # Safety
//!
//! 1. Every mapping and every child that a probe makes is its own and ends with it: [`Mapping`] and [`Child`] see to that.
//! 2. A probe's userfaultfd is registered only with a [`Mapping`] that nothing else uses, and a page that has been moved
//!    away is not touched again: nobody would serve the fault.
//! 3. A forked child runs between fork and `_exit` only system calls that are safe in a copy of a threaded process.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use crate::range::Range;
use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::{EVENT_FORK, MOVE};

const PAGE: usize = 4096;

const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_MOVE: libc::c_ulong = 0xc028_aa05;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const UFFD_EVENT_FORK: u8 = 0x13;

/// How long the doctor waits for a child, which on a busy machine may not get a processor for more than a second.
const PATIENCE: Duration = Duration::from_secs(10);

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Move {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

/// A message read from a userfaultfd; the payload of a fork event begins with the new descriptor.
#[repr(C)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    payload: [u64; 3],
}

const _: () = assert!(size_of::<Api>() == 24 && size_of::<Register>() == 32 && size_of::<Move>() == 40);
const _: () = assert!(size_of::<Message>() == 32);

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn ioctl<T>(fd: RawFd, request: libc::c_ulong, argument: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: each request above is paired by its caller with the structure whose size it encodes.
    check(unsafe { libc::ioctl(fd, request as _, ptr::from_mut(argument)) }.into())
}

/// Private anonymous memory of our own.
struct Mapping {
    address: *mut u8,
    len: usize,
}

impl Mapping {
    fn new(pages: usize) -> io::Result<Mapping> {
        let len = pages * PAGE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { address: address.cast(), len })
    }

    /// No child shares its pages: one that another thread forks meanwhile would keep them from being moved (`EBUSY`).
    fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: the advice is about a mapping that is ours, and changes nothing in this process.
        check(unsafe { libc::madvise(self.address.cast(), self.len, libc::MADV_DONTFORK) }.into()).map(|_| ())
    }

    fn fill(&mut self, page: usize, byte: u8) {
        assert!((page + 1) * PAGE <= self.len);
        // SAFETY: the page is inside the mapping, which is ours and writable.
        unsafe { self.address.add(page * PAGE).write_bytes(byte, PAGE) };
    }

    fn is_filled(&self, page: usize, byte: u8) -> bool {
        assert!((page + 1) * PAGE <= self.len);
        // SAFETY: the page is inside the mapping, and its caller has just seen it filled, so no fault waits.
        let bytes = unsafe { std::slice::from_raw_parts(self.address.add(page * PAGE), PAGE) };
        bytes.iter().all(|&found| found == byte)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

/// A userfaultfd.
pub(super) struct UserFault(OwnedFd);

impl UserFault {
    /// By whichever way is granted.
    pub(super) fn open() -> io::Result<UserFault> {
        UserFault::from_device().or_else(|_| UserFault::from_call(false))
    }

    pub(super) fn from_device() -> io::Result<UserFault> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?;
        // SAFETY: this request takes flags instead of a pointer.
        let fd = check(
            unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, libc::O_CLOEXEC | libc::O_NONBLOCK) }
                .into(),
        )?;
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(UserFault(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    pub(super) fn from_call(user_mode_only: bool) -> io::Result<UserFault> {
        let mode = if user_mode_only { UFFD_USER_MODE_ONLY } else { 0 };
        // SAFETY: the call takes flags only.
        let fd = check(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | mode) })?;
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(UserFault(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    fn enable(&self, features: u64) -> io::Result<u64> {
        let mut api = Api { api: UFFD_API, features, ioctls: 0 };
        ioctl(self.0.as_raw_fd(), UFFDIO_API, &mut api)?;
        Ok(api.features)
    }

    /// What the kernel has, whether or not this process may use it.
    pub(super) fn supported_features(&self) -> io::Result<u64> {
        self.enable(0)
    }

    fn register(&self, mapping: &Mapping) -> io::Result<()> {
        let (start, len) = (mapping.address as u64, mapping.len as u64);
        let mut register = Register { start, len, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
        ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &mut register).map(drop)
    }

    /// Moves a page between two registered ranges and looks at it there.
    pub(super) fn try_move(&self) -> io::Result<()> {
        self.enable(MOVE)?;
        let (mut from, to) = (Mapping::new(1)?, Mapping::new(1)?);
        from.keep_from_children()?;
        from.fill(0, 0x5a);
        self.register(&from)?;
        self.register(&to)?;
        let (dst, src) = (to.address as u64, from.address as u64);
        let mut order = Move { dst, src, len: PAGE as u64, mode: 0, moved: 0 };
        ioctl(self.0.as_raw_fd(), UFFDIO_MOVE, &mut order)?;
        if order.moved != PAGE as i64 || !to.is_filled(0, 0x5a) {
            return Err(io::Error::other("the page did not arrive"));
        }
        Ok(())
    }
}

/// Has a child fork a registered range and expects to be told.
///
/// A fork does not return before its event is read, so it happens in a child that can be killed; the userfaultfd belongs to
/// that child and is read here, as in a real job. No fork of this process ever waits.
pub(super) fn try_fork_event() -> io::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(PATIENCE))?;
    let child = Child::fork(|| fork_under_watch(&theirs))?;
    drop(theirs);
    let fault = receive(&ours)?;
    let event = read_fork_event(&fault);
    drop(child);
    event
}

/// In the child: registers a page, hands the userfaultfd over and forks. Allocates nothing.
fn fork_under_watch(socket: &UnixStream) {
    let watched = || -> io::Result<(UserFault, Mapping)> {
        let (fault, mapping) = (UserFault::open()?, Mapping::new(1)?);
        fault.enable(EVENT_FORK)?;
        fault.register(&mapping)?;
        Ok((fault, mapping))
    };
    match watched() {
        Ok((fault, _mapping)) => {
            send(socket, 0, Some(fault.0.as_raw_fd()));
            // SAFETY: the grandchild ends at once, and the child waits to be killed.
            if unsafe { libc::fork() } == 0 {
                // SAFETY: a plain system call that does not return.
                unsafe { libc::_exit(0) };
            }
        }
        Err(error) => send(socket, error.raw_os_error().unwrap_or(libc::EIO), None),
    }
}

fn read_fork_event(fault: &UserFault) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: fault.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd, as the count says.
    uninterrupted(|| unsafe { libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32) }.into())?;
    // SAFETY: a message is plain integers, for which zeros are valid.
    let mut message: Message = unsafe { zeroed() };
    // SAFETY: the buffer is one message long.
    let read = unsafe { libc::read(fault.0.as_raw_fd(), ptr::from_mut(&mut message).cast(), size_of::<Message>()) };
    if read != size_of::<Message>() as isize || message.event != UFFD_EVENT_FORK {
        return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
    }
    // SAFETY: a fork event carries a descriptor that the kernel has just made for us.
    drop(unsafe { OwnedFd::from_raw_fd(message.payload[0] as u32 as RawFd) });
    Ok(())
}

/// Room for one descriptor in a control message, aligned as its header wants.
#[repr(C, align(8))]
struct Control([u8; 32]);

/// Calls `then` with a message of one integer and room for one descriptor.
fn with_message<R>(word: &mut i32, control: &mut Control, then: impl FnOnce(&mut libc::msghdr) -> R) -> R {
    let mut part = libc::iovec { iov_base: ptr::from_mut(word).cast(), iov_len: size_of::<i32>() };
    // SAFETY: a msghdr is integers and pointers, for which zeros are valid.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    then(&mut message)
}

fn send(socket: &UnixStream, mut code: i32, fd: Option<RawFd>) {
    let mut control = Control([0; 32]);
    with_message(&mut code, &mut control, |message| {
        let len = size_of::<RawFd>() as u32;
        match fd {
            // SAFETY: the control buffer holds a header and one descriptor, and is aligned for both.
            Some(fd) => unsafe {
                message.msg_controllen = libc::CMSG_SPACE(len) as _;
                let header = libc::CMSG_FIRSTHDR(message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(len) as _;
                libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
            },
            None => message.msg_controllen = 0,
        }
        // SAFETY: the message points at live buffers of the lengths it says.
        unsafe { libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_NOSIGNAL) }
    });
}

/// Makes a system call again until no signal interrupts it. A call with a time limit is not restarted by the kernel.
fn uninterrupted(mut call: impl FnMut() -> libc::c_long) -> io::Result<libc::c_long> {
    loop {
        match check(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn receive(socket: &UnixStream) -> io::Result<UserFault> {
    let (mut code, mut control) = (0, Control([0; 32]));
    let fd = with_message(&mut code, &mut control, |message| {
        uninterrupted(|| {
            // SAFETY: the message points at live, writable buffers of the lengths it says.
            unsafe { libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC) as libc::c_long }
        })?;
        // SAFETY: the kernel has filled the control buffer; the header, if any, lies in it with its data.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            io::Result::Ok((!header.is_null()).then(|| libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
        }
    })?;
    match (code, fd) {
        // SAFETY: the descriptor has just been received and belongs to us.
        (0, Some(fd)) => Ok(UserFault(unsafe { OwnedFd::from_raw_fd(fd) })),
        (0, None) => Err(io::Error::other("no userfaultfd came")),
        (code, _) => Err(io::Error::from_raw_os_error(code)),
    }
}

/// A child that is killed when this goes.
struct Child(libc::pid_t);

impl Child {
    /// `first` runs in the child, which then waits; it must keep to what is safe in a copy of a threaded process.
    fn fork(first: impl FnOnce()) -> io::Result<Child> {
        // SAFETY: the child runs only `first` and plain system calls, and never returns.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: a plain system call; it ends the child with its parent.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                first();
                wait_to_be_killed()
            }
            pid if pid > 0 => Ok(Child(pid)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The end of a child; the time limit is for one whose parent died before it could say that it wants to die with it.
fn wait_to_be_killed() -> ! {
    // SAFETY: plain system calls.
    unsafe {
        libc::sleep(2 * PATIENCE.as_secs() as u32);
        libc::_exit(0)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the process is our child and not yet waited for, so its number is still its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

/// Asks which of four pages are present: the first two.
pub(super) fn try_pagemap_scan() -> io::Result<()> {
    let mut mapping = Mapping::new(4)?;
    mapping.fill(0, 1);
    mapping.fill(1, 1);
    let start = mapping.address as u64;
    let found = Pagemap::open(std::process::id() as i32)?.present(Range::sized(start, mapping.len as u64), 4)?;
    // A huge page would make all four present; what counts is that the scan sees ours.
    match found.runs.first() {
        Some(first) if first.start == start && first.end >= start + 2 * PAGE as u64 => Ok(()),
        _ => Err(io::Error::other("it does not report a page that is there")),
    }
}

/// Reads a page of a child.
pub(super) fn try_remote_read() -> io::Result<()> {
    let (mut theirs, mut ours) = (Mapping::new(1)?, Mapping::new(1)?);
    theirs.fill(0, 0x5a);
    let child = Child::fork(|| ())?;
    theirs.fill(0, 0);
    ours.fill(0, 0);
    let local = libc::iovec { iov_base: ours.address.cast(), iov_len: PAGE };
    let remote = libc::iovec { iov_base: theirs.address.cast(), iov_len: PAGE };
    // SAFETY: the local vector is a writable page of ours; the remote one is only an address to the kernel.
    check(unsafe { libc::process_vm_readv(child.0, &local, 1, &remote, 1, 0) } as libc::c_long)?;
    if ours.is_filled(0, 0x5a) { Ok(()) } else { Err(io::Error::other("the bytes are not the child's")) }
}

pub(super) fn try_pidfd() -> io::Result<()> {
    // SAFETY: the call takes two integers.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    drop(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
    Ok(())
}

/// A file in `directory` that has no name, or that loses it at once where the file system knows no nameless files.
fn nameless(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o700);
    match options.clone().custom_flags(libc::O_TMPFILE).open(directory) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = directory.join(format!(".uzswap-doctor-{}", std::process::id()));
            let file = options.create_new(true).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        result => result,
    }
}

/// Writes a byte to a file in `directory`.
pub(super) fn try_file(directory: &Path) -> io::Result<()> {
    nameless(directory)?.write_all(&[0])
}

/// Maps a file in `directory` as code, as the dynamic linker would.
pub(super) fn try_executable_file(directory: &Path) -> io::Result<()> {
    let mut file = nameless(directory)?;
    file.write_all(&[0; PAGE])?;
    // SAFETY: a new mapping at an address of the kernel's choice; it is not executed.
    let address = unsafe {
        libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    drop(Mapping { address: address.cast(), len: PAGE });
    Ok(())
}

/// What a directory's file system is.
pub(super) struct FileSystem {
    pub(super) kind: String,
    pub(super) free: u64,
    pub(super) in_memory: bool,
}

const KINDS: [(u32, &str); 10] = [
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xf2f5_2010, "f2fs"),
    (0x794c_7630, "overlay"),
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
];

pub(super) fn file_system(directory: &Path) -> io::Result<FileSystem> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    // SAFETY: a statfs is plain integers, for which zeros are valid.
    let mut found: libc::statfs = unsafe { zeroed() };
    // SAFETY: the path ends with a zero byte, and the kernel writes one statfs.
    check(unsafe { libc::statfs(path.as_ptr(), &mut found) }.into())?;
    let magic = found.f_type as u32;
    let kind = KINDS.iter().find(|&&(known, _)| known == magic).map(|&(_, kind)| kind);
    Ok(FileSystem {
        kind: kind.map_or_else(|| format!("file system {magic:#x}"), str::to_owned),
        free: found.f_bavail.saturating_mul(found.f_bsize as u64),
        in_memory: matches!(kind, Some("tmpfs" | "ramfs")),
    })
}

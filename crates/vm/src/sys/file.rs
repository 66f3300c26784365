//! Files as the manager needs them.
//!
//! # Safety
//! Structures are on the stack; paths are C strings.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A counter that can be waited for.
pub fn event() -> io::Result<File> {
    // SAFETY: no pointers; the descriptor is fresh.
    unsafe {
        let fd = super::check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd).into())
    }
}

/// Gives the blocks of a part of a file back to the file system; the file keeps its length.
pub fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers.
    super::check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) }).map(drop)
}

/// What is known of the file system that a path is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystem {
    /// It keeps its files in memory (tmpfs, ramfs).
    pub in_memory: bool,
    /// Programs and libraries on it cannot be executed.
    pub no_exec: bool,
    /// Bytes that may still be written.
    pub available: u64,
}

/// Asks about the file system of an existing path.
pub fn file_system(path: &Path) -> io::Result<FileSystem> {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string; both structures are on the stack.
    unsafe {
        let (mut kind, mut space): (libc::statfs, libc::statvfs) = (zeroed(), zeroed());
        super::check(libc::statfs(path.as_ptr(), &raw mut kind))?;
        super::check(libc::statvfs(path.as_ptr(), &raw mut space))?;
        Ok(FileSystem {
            in_memory: [TMPFS, RAMFS].contains(&{ kind.f_type }),
            no_exec: space.f_flag & libc::ST_NOEXEC != 0,
            available: space.f_bavail * space.f_frsize,
        })
    }
}

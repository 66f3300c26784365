//! The family of a program: the processes that were forked from it, or it from them, and have executed nothing since.
//!
//! A child that was just forked has no worker of its own yet. It may touch an evicted page before it gets one, in the code of libc's `fork`
//! itself, and where its memory keeps the userfaultfd open (`tether.rs`) it would wait there for ever if the manager ends. So a worker that
//! has outlived the manager kills the whole family. Their common parent may be dead by then: the kernel kills programs by their tethers.
//!
//! A relative has the manager's library mapped, whose path no other manager uses, and its stack begins at the same address, which the kernel
//! chooses at random for each program that is executed. Both are read from `/proc` without touching a page of the relative.
//!
//! # Safety
//! The kernel writes into buffers of this stack, of the sizes that it is told.

use core::ffi::CStr;

use crate::sys::{self, call};
use crate::worker::NAME;

/// The parent of a process, and where its stack begins, in the text of `/proc/PID/stat`: so many fields after the name.
const PARENT: usize = 2;
const START_STACK: usize = 26;

/// Where the name of an entry begins in a `struct linux_dirent64`, and where its length is told.
const DIRENT_NAME: usize = 19;
const DIRENT_LEN: usize = 16;

/// Kills the family of the program whose memory this process, its worker, shares. `library` is the path of the manager's library.
///
/// Workers go last, since they are about to do the same: two that killed each other first would leave the rest alive. A worker whose parent is
/// still there as one of the family stays: that may be a program which cannot be killed, and which only its own worker can end (`denial.rs`).
pub fn kill(library: &[u8]) {
    let directory = sys::open(-1, c"/proc");
    let own = sys::open(directory, c"self");
    if let Some(own) = Identity::of(own) {
        for workers in [false, true] {
            // SAFETY: our own descriptor, if it is one; no pointers.
            unsafe { call!(sys::SYS_LSEEK, directory, 0, 0) };
            processes(directory, |process| {
                let is_relative = |other: &Identity| other.stack == own.stack && other.pid != own.pid;
                let other = Identity::of(process).filter(|other| is_relative(other) && other.is_worker == workers);
                let Some(other) = other.filter(|_| has_mapped(process, library)) else { return };
                let parent = || Identity::of_process(directory, other.parent);
                if !workers || !parent().is_some_and(|parent| is_relative(&parent) && !parent.is_worker) {
                    sys::kill_by(process);
                }
            });
        }
    }
    close(own);
    close(directory);
}

/// What `/proc/PID/stat` tells of a process.
struct Identity {
    pid: u64,
    parent: u64,
    is_worker: bool,
    /// Where its stack begins.
    stack: u64,
}

impl Identity {
    /// Reads it in the directory `/proc/PID`; `None` if the process is gone, or is not to be known.
    fn of(process: isize) -> Option<Identity> {
        let mut text = [0; 1024];
        let file = sys::open(process, c"stat");
        let len = read(file, &mut text);
        close(file);
        let text = &text[..len];
        // The name may be anything: it ends at the last bracket.
        let name_start = text.iter().position(|&byte| byte == b'(')? + 1;
        let name_end = text.iter().rposition(|&byte| byte == b')')?;
        let field = |index| text[name_end..].split(|&byte| byte == b' ').nth(index);
        let (parent, stack) = (number(field(PARENT)?)?, field(START_STACK)?);
        let is_worker = text.get(name_start..name_end)? == NAME.to_bytes();
        // The kernel tells 0 to a process that may not know it.
        Some(Identity { pid: number(text)?, parent, is_worker, stack: number(stack).filter(|&stack| stack != 0)? })
    }

    /// Reads it of the process with this number. `directory` is that of all processes.
    fn of_process(directory: isize, pid: u64) -> Option<Identity> {
        // One more for the end of the C string.
        let mut digits = [0; 21];
        let mut rest = pid;
        for digit in digits[..20].iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        let start = digits.iter().position(|&digit| digit != b'0')?;
        let process = sys::open(directory, CStr::from_bytes_with_nul(&digits[start..]).ok()?);
        let identity = Identity::of(process);
        close(process);
        identity
    }
}

/// Calls `each` with an open directory `/proc/PID` of every process.
fn processes(directory: isize, mut each: impl FnMut(isize)) {
    let mut entries = [0u8; 2048];
    loop {
        // SAFETY: the buffer is as long as said.
        let len = unsafe { call!(sys::SYS_GETDENTS64, directory, entries.as_mut_ptr(), entries.len()) };
        let mut rest = &entries[..len.clamp(0, entries.len() as isize) as usize];
        if rest.is_empty() {
            return;
        }
        while let Some(name) = rest.get(DIRENT_NAME..) {
            if let (Some(_), Ok(name)) = (number(name), CStr::from_bytes_until_nul(name)) {
                let process = sys::open(directory, name);
                each(process);
                close(process);
            }
            let len = usize::from(rest[DIRENT_LEN]) | usize::from(rest[DIRENT_LEN + 1]) << 8;
            rest = rest.get(len.max(1)..).unwrap_or(&[]);
        }
    }
}

/// Whether a process has mapped a file.
fn has_mapped(process: isize, path: &[u8]) -> bool {
    let file = sys::open(process, c"maps");
    let (mut text, mut kept) = ([0u8; 4096], 0);
    let found = loop {
        let len = kept + read(file, &mut text[kept..]);
        if text[..len].windows(path.len().max(1)).any(|window| window == path) {
            break true;
        }
        if len == kept {
            break false;
        }
        // The path may lie across the end of this part.
        kept = len.min(path.len());
        text.copy_within(len - kept..len, 0);
    };
    close(file);
    found
}

/// Reads a part of a file; 0 if that fails.
fn read(file: isize, text: &mut [u8]) -> usize {
    // SAFETY: the buffer is as long as said.
    unsafe { call!(sys::SYS_READ, file, text.as_mut_ptr(), text.len()) }.max(0) as usize
}

fn close(file: isize) {
    if file >= 0 {
        // SAFETY: our own descriptor.
        unsafe { call!(sys::SYS_CLOSE, file) };
    }
}

/// The decimal number with which a text begins.
fn number(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    text.first()?
        .is_ascii_digit()
        .then(|| digits.fold(0u64, |number, digit| number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'))))
}

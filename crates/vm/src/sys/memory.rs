//! The manager's own memory.
//!
//! # Safety
//! Maps fresh memory and locks it; nobody else's.

#![allow(unsafe_code)]

use std::io;

/// Locks all memory of the manager, present and future, as it gets touched: the manager never pages itself.
///
/// Refused where the limit on locked memory is finite and binding: once over it, every allocation would fail.
pub fn lock_all() -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one structure. geteuid has no arguments.
    let bound = unsafe {
        super::check(libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit))?;
        limit.rlim_cur != libc::RLIM_INFINITY && libc::geteuid() != 0
    };
    if bound {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // SAFETY: no pointers.
    super::check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) }).map(drop)
}

/// Raises the limit on open descriptors as far as it goes: the manager holds several for each process. Gives the one before.
pub fn raise_descriptor_limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one structure, filled by the first call.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return None;
        }
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised);
    }
    Some(limit)
}

/// Makes the table of descriptors as large as it may be needed. The kernel does so in its own time when a table is full that
/// several processes or threads have, and whoever opens something meanwhile waits for it: ten milliseconds.
pub fn make_room_for_descriptors() {
    const ENOUGH: libc::c_int = 1 << 14;
    // Programs that are started from here keep the limit that they would have had.
    let Some(before) = raise_descriptor_limit() else { return };
    let last = ENOUGH.min(before.rlim_max.try_into().unwrap_or(ENOUGH)) - 1;
    // SAFETY: a descriptor of our own, closed at once; a structure on this stack.
    unsafe {
        let copy = libc::fcntl(2, libc::F_DUPFD_CLOEXEC, last);
        if copy >= 0 {
            libc::close(copy);
        }
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before);
    }
}

/// Bytes that programs could have without anything being reclaimed from them.
pub fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? << 10)
}

//! The manager's own memory.
//!
//! # Safety
//! Maps fresh memory and locks it; nobody else's.

#![allow(unsafe_code)]

use std::io;

use uzswap_engine::PAGE_SIZE;

/// Locks all memory of the manager, present and future, as it gets touched: the manager never pages itself.
///
/// Refused where the limit on locked memory is finite and binding: once over it, every allocation would fail. The kernel exempts
/// CAP_IPC_LOCK from the limit, not a user: root in a container has the one without the other.
pub fn lock_all() -> io::Result<()> {
    if let Some(limit) = lock_limit()? {
        let text = format!("at most {} KiB can be locked, and CAP_IPC_LOCK is missing", limit >> 10);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let unlimited = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // With the capability but a finite limit this may be refused, and need not succeed.
    // SAFETY: one structure; the other call has no pointers.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const unlimited) };
    // SAFETY: no pointers.
    super::check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) }).map(drop)
}

/// Returns how many bytes this process can lock; `None` if there is no limit for it.
///
/// A capability that `/proc` shows may count in a user namespace only, where the limit binds all the same. So more than the limit
/// is locked on trial, without touching it.
pub fn lock_limit() -> io::Result<Option<u64>> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one structure.
    super::check(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) })?;
    // The limit in effect may be raised to the other, which `lock_all` does.
    if limit.rlim_max == libc::RLIM_INFINITY {
        return Ok(None);
    }
    let (len, flags) =
        (limit.rlim_max as usize + PAGE_SIZE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a fresh mapping, which is gone again before the call returns; it has no contents.
    unsafe {
        let mapping = libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0);
        if mapping == libc::MAP_FAILED {
            return Ok(Some(limit.rlim_max));
        }
        let locked = libc::mlock2(mapping, len, libc::MLOCK_ONFAULT as _) == 0;
        libc::munmap(mapping, len);
        Ok((!locked).then_some(limit.rlim_max))
    }
}

/// Raises the limit on open descriptors as far as it goes, but for `rest`: the manager holds several for each process. Gives the one before.
pub fn raise_descriptor_limit(rest: u64) -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one structure, filled by the first call.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return None;
        }
        let raised = libc::rlimit { rlim_cur: limit.rlim_max.saturating_sub(rest).max(limit.rlim_max / 2), ..limit };
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised);
    }
    Some(limit)
}

/// Makes the table of descriptors as large as it may be needed. The kernel does so in its own time when a table is full that
/// several processes or threads have, and whoever opens something meanwhile waits for it: ten milliseconds.
pub fn make_room_for_descriptors() {
    const ENOUGH: libc::c_int = 1 << 14;
    // Programs that are started from here keep the limit that they would have had.
    let Some(before) = raise_descriptor_limit(0) else { return };
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

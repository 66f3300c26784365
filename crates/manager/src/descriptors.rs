//! The descriptors that the manager keeps free: a process that joins needs several, and so does a fork.
//!
//! The kernel gives a new descriptor the lowest free number. So a descriptor with a high number proves that few are left.

use std::os::fd::RawFd;

use rustix::process::{Resource, getrlimit};

/// Connections are accepted only while so many descriptors are left.
const RESERVE: u64 = 256;

/// Descriptors that the manager leaves free in the table that it shares with the front, or with the guard of a daemon:
/// if the manager dies, that process opens handles of the jobs' processes to kill them.
pub const OF_GUARD: u64 = 32;

/// Returns how many descriptors the manager can have.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns how many processes the manager can serve.
pub fn processes() -> usize {
    // Address space, session and tether of one have ten of them, and some are on their way.
    const OF_PROCESS: u64 = 12;
    usize::try_from(limit() / OF_PROCESS).unwrap_or(usize::MAX)
}

/// Whether fewer than the reserve are left, told by the descriptor that was opened last. A limit that is hardly more than the
/// reserve is shared equally.
pub fn are_short(last: RawFd, limit: u64) -> bool {
    last as u64 >= limit.saturating_sub(RESERVE.min(limit / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_is_kept() {
        assert!(!are_short(1024 - 257, 1024));
        assert!(are_short(1024 - 256, 1024));
        assert!(!are_short(31, 64), "a small limit leaves room for some connections");
        assert!(are_short(32, 64));
        assert!(!are_short(RawFd::MAX, u64::MAX));
    }
}

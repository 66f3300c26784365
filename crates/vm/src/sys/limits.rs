//! Why the kernel may refuse a program memory, as far as that can be asked from outside.
//!
//! # Safety
//! The kernel fills structures that are on this stack.

#![allow(unsafe_code)]

use std::mem::zeroed;

use super::process;
use crate::PAGE;

/// Tells whether `len` bytes more may be too many for process `pid`, by its RLIMIT_AS or RLIMIT_DATA.
pub fn may_refuse(pid: i32, len: u64) -> bool {
    let [space, data] = [libc::RLIMIT_AS, libc::RLIMIT_DATA].map(|resource| limit(pid, resource));
    if space.is_none() && data.is_none() {
        return false;
    }
    // Pages: all that is mapped is the first number, data and stack the sixth.
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = |field| text.split_ascii_whitespace().nth(field)?.parse::<u64>().ok();
    let is_near = |limit: Option<u64>, field| {
        let now = pages(field).map_or(u64::MAX, |pages| pages.saturating_mul(PAGE));
        limit.is_some_and(|limit| now.saturating_add(len) > limit)
    };
    is_near(space, 0) || is_near(data, 5)
}

/// The soft limit of process `pid`; None if it has none.
fn limit(pid: i32, resource: libc::__rlimit_resource_t) -> Option<u64> {
    // SAFETY: a structure of numbers.
    let mut limit: libc::rlimit = unsafe { zeroed() };
    // SAFETY: no new limit is set, and the kernel writes to `limit`.
    let result = unsafe { libc::prlimit(pid, resource, std::ptr::null(), &raw mut limit) };
    // Where the kernel does not tell, the worst is assumed. It tells nothing of another user's process without CAP_SYS_RESOURCE.
    let soft = if result == 0 { limit.rlim_cur } else { 0 };
    (soft != libc::RLIM_INFINITY).then_some(soft)
}

/// Tells whether one mapping of `len` bytes may be more than the machine promises (`vm.overcommit_memory`).
pub fn is_beyond_machine(len: u64) -> bool {
    const ALWAYS: &str = "1";
    const NEVER: &str = "2";
    let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    match mode.trim() {
        ALWAYS => false,
        NEVER => is_beyond_promises(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default(), len),
        _ => len > memory_and_swap(),
    }
}

/// Tells whether `len` bytes more may be too many where the kernel promises no more than it has. `meminfo` is the text of `/proc/meminfo`.
fn is_beyond_promises(meminfo: &str, len: u64) -> bool {
    /// What the kernel keeps back at most, unless `vm.user_reserve_kbytes` or `vm.admin_reserve_kbytes` was raised, and as much again for what it
    /// has not counted yet.
    const RESERVES: u64 = 272 << 20;
    let bytes = |name| Some(process::field(meminfo, name)?.parse::<u64>().ok()? << 10);
    match (bytes("Committed_AS:"), bytes("CommitLimit:")) {
        (Some(promised), Some(limit)) => promised.saturating_add(len).saturating_add(RESERVES) > limit,
        _ => true,
    }
}

fn memory_and_swap() -> u64 {
    // SAFETY: a structure of numbers, which the kernel fills.
    let machine = unsafe {
        let mut machine: libc::sysinfo = zeroed();
        libc::sysinfo(&raw mut machine);
        machine
    };
    machine.totalram.saturating_add(machine.totalswap).saturating_mul(u64::from(machine.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_does_not_have_may_be_refused() {
        let own = std::process::id() as i32;
        assert!(!may_refuse(own, PAGE), "the tests run without such limits");
        assert!(memory_and_swap() > 1 << 20);
        let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
        assert_eq!(is_beyond_machine(1 << 46), mode.trim() != "1");
    }

    #[test]
    fn promises_are_counted() {
        let meminfo = "MemTotal: 9 kB\nCommitLimit:     2097152 kB\nCommitted_AS:    1048576 kB\n";
        assert!(!is_beyond_promises(meminfo, 512 << 20));
        assert!(is_beyond_promises(meminfo, 1 << 30));
        assert!(is_beyond_promises("", PAGE), "where the kernel does not tell");
    }
}

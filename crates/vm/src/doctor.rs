//! What paging needs of a machine, and whether this machine grants it.
//!
//! 1. Each check tries the thing itself, on memory and children of its own, and leaves nothing behind.
//! 2. A check fails exactly if a job cannot be paged without it; whatever costs only comfort is a warning.
//! 3. Remedies are looked up by what is missing and by where the process runs; a check carries them for every
//!    surrounding, and [`surroundings`] says which apply here.
//!
//! [`blocking_problems`] runs only what can fail, in a few milliseconds, so that every job can begin with it.

mod probe;
mod remedy;

pub use remedy::{Place, Remedy, surroundings};

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::sys::uffd::FEATURES;
use crate::sys::{memory, uring};
use probe::UserFault;
use remedy::Missing;

/// The oldest kernel that has everything: UFFDIO_MOVE came with it.
const KERNEL: (u32, u32) = (6, 8);
/// Below this much free space a swap file is soon full.
const SWAP_SPACE: u64 = 1 << 30;
/// Where a swap file goes unless the user names another place.
const SWAP_DIRECTORY: &str = "/var/tmp";

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Short and fixed: other programs may look for it.
    pub name: &'static str,
    /// How it went.
    pub state: State,
    /// One line: what was found.
    pub finding: String,
    /// What to do, for each surrounding; empty if all is well.
    pub remedies: Vec<Remedy>,
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As it should be.
    Ok,
    /// Jobs run, but not as well as they could.
    Warn,
    /// Jobs cannot run.
    Fail,
}

/// Every check, in the order in which to read them.
pub fn checks() -> Vec<Check> {
    let mut checks = vec![kernel()];
    checks.extend(required());
    let failed = checks.iter().any(|check| check.state == State::Fail);
    checks.extend([
        seccomp(failed),
        no_new_privileges(),
        locked_memory(),
        pressure(),
        io_uring(),
        swap_space(Path::new(SWAP_DIRECTORY)),
    ]);
    checks
}

/// The checks that failed: with any of them a job cannot run. Takes a few milliseconds.
pub fn blocking_problems() -> Vec<Check> {
    required().into_iter().filter(|check| check.state == State::Fail).collect()
}

fn required() -> Vec<Check> {
    vec![
        full_mode(),
        features(),
        moving(),
        fork_event(),
        pagemap_scan(),
        remote_read(),
        process_descriptor(),
        preload(),
    ]
}

impl Check {
    fn ok(name: &'static str, finding: impl Into<String>) -> Check {
        Check { name, state: State::Ok, finding: finding.into(), remedies: Vec::new() }
    }

    fn warn(name: &'static str, finding: impl Into<String>, missing: Missing) -> Check {
        Check { name, state: State::Warn, finding: finding.into(), remedies: missing.remedies() }
    }

    fn fail(name: &'static str, finding: impl Into<String>, missing: Missing) -> Check {
        Check { name, state: State::Fail, finding: finding.into(), remedies: missing.remedies() }
    }
}

/// The words of an error and, where it has one, its symbol: a reader compares it with manuals.
fn words(error: &io::Error) -> String {
    let symbol = match error.raw_os_error() {
        Some(libc::EPERM) => "EPERM",
        Some(libc::EACCES) => "EACCES",
        Some(libc::ENOSYS) => "ENOSYS",
        Some(libc::EINVAL) => "EINVAL",
        Some(libc::ENOENT) => "ENOENT",
        Some(libc::ENOTTY) => "ENOTTY",
        Some(libc::ENXIO) => "ENXIO",
        Some(libc::ENODEV) => "ENODEV",
        Some(libc::EROFS) => "EROFS",
        Some(libc::ENOMEM) => "ENOMEM",
        Some(libc::EOPNOTSUPP) => "EOPNOTSUPP",
        _ => return error.to_string(),
    };
    let text = error.to_string();
    format!("{} ({symbol})", text.split(" (os error").next().unwrap_or(&text))
}

fn is(error: &io::Error, code: i32) -> bool {
    error.raw_os_error() == Some(code)
}

/// A line of `/proc/self/status`.
fn status(key: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(|value| value.trim().to_owned())
}

fn has_capability(bit: u32) -> bool {
    status("CapEff").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).is_some_and(|mask| mask >> bit & 1 == 1)
}

const CAP_SYS_PTRACE: u32 = 19;

fn filtered() -> bool {
    status("Seccomp").is_some_and(|mode| mode != "0")
}

fn kernel() -> Check {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    match version(release) {
        Some(version) if version >= KERNEL => Check::ok("kernel", format!("Linux {release}")),
        _ => Check::warn(
            "kernel",
            format!("Linux {release}; {}.{} and later have all that is needed", KERNEL.0, KERNEL.1),
            Missing::Kernel,
        ),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn full_mode() -> Check {
    let name = "userfaultfd";
    let device = match UserFault::from_device() {
        Ok(_) => return Check::ok(name, "full mode, through /dev/userfaultfd"),
        Err(error) => error,
    };
    let call = match UserFault::from_call(false) {
        Ok(_) => return Check::ok(name, "full mode, through the system call"),
        Err(error) => error,
    };
    let finding = format!("no full mode: /dev/userfaultfd: {}; system call: {}", words(&device), words(&call));
    // The user-mode-only variant needs no privilege at all: if even that is refused, it is not for a missing one.
    match UserFault::from_call(true) {
        Err(error) if is(&error, libc::ENOSYS) && !filtered() => {
            Check::fail(name, format!("{finding}; the kernel is built without it"), Missing::Kernel)
        }
        Err(_) if filtered() => {
            Check::fail(name, format!("{finding}; a seccomp filter forbids the call"), Missing::FilteredFullMode)
        }
        _ => Check::fail(name, finding, Missing::FullMode),
    }
}

fn features() -> Check {
    let name = "uffd-features";
    let supported = match UserFault::open().and_then(|fault| fault.supported_features()) {
        Ok(features) => features,
        Err(error) => return Check::fail(name, no_userfault(&error), Missing::AnotherCheck),
    };
    let absent: Vec<_> = FEATURES.iter().filter(|(bit, _)| supported & bit == 0).map(|&(_, feature)| feature).collect();
    if absent.is_empty() {
        Check::ok(name, FEATURES.map(|(_, feature)| feature).join(", "))
    } else {
        Check::fail(name, format!("the kernel lacks {}", absent.join(", ")), Missing::Kernel)
    }
}

/// How a finding begins that only repeats what the first check said.
const UNTRIED: &str = "cannot be tried without userfaultfd";

fn no_userfault(error: &io::Error) -> String {
    format!("{UNTRIED}: {}", words(error))
}

fn moving() -> Check {
    let name = "uffd-move";
    match UserFault::open().map(|fault| fault.try_move()) {
        Ok(Ok(())) => Check::ok(name, "a page was moved between two ranges, contents intact"),
        Ok(Err(error)) => Check::fail(name, format!("UFFDIO_MOVE failed: {}", words(&error)), Missing::Kernel),
        Err(error) => Check::fail(name, no_userfault(&error), Missing::AnotherCheck),
    }
}

fn fork_event() -> Check {
    let name = "uffd-event-fork";
    if let Err(error) = UserFault::open() {
        return Check::fail(name, no_userfault(&error), Missing::AnotherCheck);
    }
    match probe::try_fork_event() {
        Ok(()) => Check::ok(name, "a child was announced with a userfaultfd of its own"),
        Err(error) if is(&error, libc::EPERM) && !has_capability(CAP_SYS_PTRACE) => Check::fail(
            name,
            "fork events need CAP_SYS_PTRACE, which this process lacks, even where userfaultfd itself is granted",
            Missing::Ptrace,
        ),
        Err(error) if is(&error, libc::EPERM) => Check::fail(
            name,
            "fork events need CAP_SYS_PTRACE on the host; here it counts only inside a user namespace",
            Missing::HostPtrace,
        ),
        Err(error) => Check::fail(name, format!("no fork event came: {}", words(&error)), Missing::Kernel),
    }
}

fn pagemap_scan() -> Check {
    let name = "pagemap-scan";
    match probe::try_pagemap_scan() {
        Ok(()) => Check::ok(name, "PAGEMAP_SCAN finds resident pages"),
        Err(error) => {
            let missing = if is(&error, libc::EPERM) { Missing::Filter("ioctl") } else { Missing::Kernel };
            Check::fail(name, format!("PAGEMAP_SCAN on /proc/self/pagemap failed: {}", words(&error)), missing)
        }
    }
}

fn remote_read() -> Check {
    let name = "process-vm-readv";
    match probe::try_remote_read() {
        Ok(()) => Check::ok(name, "a child's memory can be read"),
        Err(error) => {
            let missing = if filtered() { Missing::Filter("process_vm_readv") } else { Missing::Ptrace };
            Check::fail(name, format!("a child's memory cannot be read: {}", words(&error)), missing)
        }
    }
}

fn process_descriptor() -> Check {
    let name = "pidfd";
    match probe::try_pidfd() {
        Ok(()) => Check::ok(name, "pidfd_open works"),
        Err(error) => {
            let missing = if filtered() { Missing::Filter("pidfd_open") } else { Missing::Kernel };
            Check::fail(name, format!("pidfd_open failed: {}", words(&error)), missing)
        }
    }
}

fn preload() -> Check {
    let name = "preload-directory";
    let directory = std::env::temp_dir();
    let shown = directory.display();
    match probe::try_executable_file(&directory) {
        Ok(()) => Check::ok(name, format!("libraries can be loaded from {shown}")),
        Err(error) => {
            let finding = format!("no library can be loaded from {shown} (written there, noexec?): {}", words(&error));
            Check::fail(name, finding, Missing::ExecutableTemp(directory))
        }
    }
}

fn seccomp(something_failed: bool) -> Check {
    let name = "seccomp";
    match status("Seccomp").as_deref() {
        None | Some("0") => Check::ok(name, "no filter"),
        Some(_) if something_failed => {
            Check::warn(name, "a filter is on and may be what refuses the above", Missing::Filter("userfaultfd"))
        }
        Some(_) => Check::ok(name, "a filter is on and lets all that is needed through"),
    }
}

fn no_new_privileges() -> Check {
    let finding = match status("NoNewPrivs").as_deref() {
        Some("1") => "on: setuid programs start without privilege, so they are managed like others",
        _ => "off: setuid programs start with privilege and run unmanaged",
    };
    Check::ok("no-new-privileges", finding)
}

/// Asks what the manager asks before it locks its memory.
fn locked_memory() -> Check {
    let name = "memlock";
    match memory::lock_limit() {
        Ok(None) => Check::ok(name, "the manager can lock its memory"),
        Ok(Some(limit)) => Check::warn(
            name,
            format!(
                "the manager does not lock its memory: without CAP_IPC_LOCK the limit of {} KiB would make it fail later",
                limit >> 10
            ),
            Missing::LockedMemory,
        ),
        Err(error) => {
            let finding = format!("the limit on locked memory cannot be read: {}", words(&error));
            Check::warn(name, finding, Missing::LockedMemory)
        }
    }
}

fn pressure() -> Check {
    let name = "psi";
    match fs::read_to_string("/proc/pressure/memory") {
        Ok(text) if text.starts_with("some ") => Check::ok(name, "/proc/pressure/memory is there"),
        Ok(_) => Check::warn(name, "/proc/pressure/memory is empty", Missing::Pressure),
        Err(error) => Check::warn(
            name,
            format!("no /proc/pressure/memory, the host's own pressure stays unseen: {}", words(&error)),
            Missing::Pressure,
        ),
    }
}

fn io_uring() -> Check {
    let name = "io-uring";
    match uring::probe() {
        Ok(()) => Check::ok(name, "io_uring_setup works"),
        Err(error) => {
            let missing = match filtered() {
                true => Missing::Filter("io_uring_setup, io_uring_enter and io_uring_register"),
                false => Missing::IoUring,
            };
            let finding = format!("pages are read from the swap file one after another: {}", words(&error));
            Check::warn(name, finding, missing)
        }
    }
}

fn swap_space(directory: &Path) -> Check {
    let name = "swap-space";
    let shown = directory.display();
    let missing = || Missing::SwapSpace(PathBuf::from(directory));
    let space = match probe::file_system(directory) {
        Ok(space) => space,
        Err(error) => {
            return Check::warn(name, format!("no default swap file in {shown}: {}", words(&error)), missing());
        }
    };
    let finding = format!("{shown}: {}, {:.1} GiB free", space.kind, space.free as f64 / (1u64 << 30) as f64);
    if let Err(error) = probe::try_file(directory) {
        Check::warn(name, format!("{finding}, but no file can be created: {}", words(&error)), missing())
    } else if space.in_memory {
        Check::warn(name, format!("{finding}; it lives in memory, so writing back frees none"), missing())
    } else if space.free < SWAP_SPACE {
        Check::warn(name, format!("{finding}; a swap file is soon full"), missing())
    } else {
        Check::ok(name, finding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(version("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(version("5.15"), Some((5, 15)));
        assert!(version("6.18.1") > Some(KERNEL) && version("6.7.9") < Some(KERNEL));
        assert_eq!(version("unknown"), None);
    }

    #[test]
    fn checks_have_unique_names_and_remedies_when_needed() {
        let checks = checks();
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len());
        for check in &checks {
            let told = check.state != State::Ok && !check.finding.starts_with(UNTRIED);
            assert_eq!(told, !check.remedies.is_empty(), "{check:?}");
            assert!(!check.finding.is_empty() && !check.finding.contains('\n'), "{check:?}");
        }
    }

    #[test]
    fn blocking_problems_are_the_failed_checks() {
        let failed: Vec<_> = checks().into_iter().filter(|check| check.state == State::Fail).collect();
        assert_eq!(blocking_problems(), failed);
    }

    #[test]
    fn swap_directories_are_judged() {
        let nowhere = swap_space(Path::new("/nonexistent"));
        assert_eq!(nowhere.state, State::Warn);
        assert!(nowhere.finding.contains("ENOENT"), "{nowhere:?}");
        let memory = swap_space(Path::new("/proc"));
        assert_eq!(memory.state, State::Warn, "{memory:?}");
    }

    #[test]
    fn probing_leaks_no_descriptor_and_no_child() {
        let descriptors = || fs::read_dir("/proc/self/fd").expect("fd").count();
        let children = || fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
        blocking_problems();
        let before = (descriptors(), children());
        for _ in 0..5 {
            blocking_problems();
        }
        // Other tests run beside this one and hold a few descriptors for a moment; five rounds of leaks would be 40.
        assert!(descriptors() < before.0 + 20);
        assert_eq!(children(), before.1);
    }
}

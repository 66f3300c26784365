//! Memory pressure from outside the job: of the enclosing cgroup, or of the whole host.
//!
//! The kernel tells when tasks wait for memory (PSI). Then the pool, which is memory like any other, gives away what the
//! shrinker has on offer of the groups that are not protected (`memory.low`, `memory.min`); if the pressure lasts, it tells again.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use uzswap_vm::sys::pressure::Trigger;

use crate::groups::Groups;
use crate::shrink::ShrinkWorker;

/// How long tasks have waited for memory, of two seconds, when it is pressure.
const STALL: Duration = Duration::from_millis(100);

/// How often to look whether the job is over, or has a pool.
const PATIENCE: Duration = Duration::from_millis(500);

/// The nearest trigger that may be had; none where the kernel keeps no pressure information.
fn trigger() -> Option<Trigger> {
    let host = PathBuf::from("/proc/pressure/memory");
    cgroup().into_iter().chain([host]).find_map(|file| Trigger::open(&file, STALL).ok())
}

/// The pressure file of our cgroup (version 2).
fn cgroup() -> Option<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(PathBuf::from("/sys/fs/cgroup").join(path).join("memory.pressure"))
}

/// Tells the shrink worker of pressure until told to stop.
pub fn listen(groups: &Groups, worker: &ShrinkWorker, stop: &AtomicBool) {
    // Whoever has a trigger waits ten milliseconds for the kernel at the end: not a job that never has a pool.
    while worker.engine.pool_bytes() == 0 {
        std::thread::sleep(PATIENCE);
        if stop.load(Relaxed) {
            return;
        }
    }
    let Some(trigger) = trigger() else { return };
    while !stop.load(Relaxed) {
        match trigger.wait(PATIENCE) {
            Ok(true) => groups.exposed().iter().for_each(|charge| worker.press(charge.group, 1.0, None)),
            Ok(false) => {}
            // The cgroup is gone, and its pressure with it.
            Err(_) => return,
        }
    }
}

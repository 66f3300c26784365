//! Finding processes of a job that run unmanaged without having said so: programs that the agent cannot enter, and
//! programs that were started without it.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use uzswap_vm::sys::process::{children, share_memory};

use crate::{executioner, program};

/// How often to look. What is seen twice is not just being started.
const INTERVAL: Duration = Duration::from_secs(2);

/// The part of time that may be spent on it: one in so many.
const SHARE: u32 = 2000;

/// The search for unmanaged processes.
#[derive(Debug)]
pub struct Strangers {
    /// Processes of ours.
    spared: Vec<i32>,
    seen: HashSet<i32>,
    next_look: Instant,
}

impl Strangers {
    /// Nothing seen yet; `spared` are no part of the job.
    pub fn new(spared: Vec<i32>) -> Strangers {
        Strangers { spared, seen: HashSet::new(), next_look: Instant::now() + INTERVAL }
    }

    /// Looks, if it is time, at the descendants of `front`; gives one that is not managed, and why.
    pub fn look(&mut self, front: i32, is_managed: impl Fn(i32) -> bool) -> Option<(i32, String)> {
        if Instant::now() < self.next_look {
            return None;
        }
        let start = Instant::now();
        let strange: HashSet<i32> =
            descendants(front, &self.spared).filter(|&pid| !is_managed(pid) && program_of(pid).is_some()).collect();
        let stayed = strange.iter().find(|pid| self.seen.contains(pid)).copied();
        self.seen = strange;
        self.next_look = Instant::now() + INTERVAL.max(start.elapsed() * SHARE);
        stayed.map(|pid| (pid, reason(pid)))
    }
}

/// The processes that run a program of their own below `root`, without `spared` and what is below those.
fn descendants(root: i32, spared: &[i32]) -> impl Iterator<Item = i32> {
    let mut open = vec![root];
    std::iter::from_fn(move || {
        let pid = open.pop()?;
        // The child of a vfork has its parent's memory.
        open.extend(
            children(pid)
                .into_iter()
                .filter(|child| !spared.contains(child))
                .filter(|&child| !share_memory(pid, child).unwrap_or(true)),
        );
        Some(pid)
    })
    .skip(1)
}

/// The program that a process runs; `None` if it is dead, or a worker.
fn program_of(pid: i32) -> Option<PathBuf> {
    if executioner::is_called_worker(pid) {
        return None;
    }
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

fn reason(pid: i32) -> String {
    let name = program_of(pid).map_or_else(|| "its program".to_owned(), |path| path.display().to_string());
    match program::obstacle(Path::new(&format!("/proc/{pid}/exe"))) {
        Some(obstacle) => format!("{name} is {obstacle}"),
        None => format!("{name} was started without the agent (LD_PRELOAD)"),
    }
}

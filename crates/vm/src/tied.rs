//! Children that the manager ties to its life from outside: the kernel kills them when manager and front are gone.
//!
//! A forked child has a userfaultfd of its own, and no worker yet, or never. The manager knows the userfaultfd, but not which process has
//! it. It need not know: each child of a tied process gets a [`Line`] unless it has one, or has a tether of its own.
//!
//! 1. A process number can be used again. So the manager opens a pidfd, makes the line by number, lists the children once more, and arms the
//!    line only if the number is still that of a child, and the processes of the pidfds, the child's and its parent's, live.
//! 2. A line is kept for some time after the child's worker has been told to tie it: manager and worker may be killed before the worker has
//!    obeyed.
//! 3. A child that has executed another program has lost the memory that it inherited, and with it its line.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use crate::sys::process::{self, PidFd, Program};
use crate::sys::tether::Line;
use crate::sys::threads::Threads;

/// The most lines of one program. Each takes three descriptors.
const MOST: usize = 64;

/// How long a line is kept after the worker has been told.
const KEPT: Duration = Duration::from_secs(2);

/// The tied children of a program, and theirs.
#[derive(Debug)]
pub(crate) struct Tied {
    program: Program,
    /// Descendants by process id. `None` stands for a process that needs no line.
    known: HashMap<i32, Option<TiedChild>>,
}

#[derive(Debug)]
struct TiedChild {
    process: PidFd,
    line: Line,
    /// When the child's own worker was told to tie it.
    worker_told: Option<Instant>,
}

impl TiedChild {
    /// Makes a line to a child that is a copy of its parent. `None` for a process that shares the parent's memory, as a worker does, and for
    /// one that has executed another program. The line is not armed yet.
    fn new(pid: i32, parent: i32) -> Option<TiedChild> {
        if process::share_memory(pid, parent).unwrap_or(true) || process::has_executed(pid) {
            return None;
        }
        let process = PidFd::open(pid).ok()?;
        let line = Line::new(&process, pid).ok()?;
        Some(TiedChild { process, line, worker_told: None })
    }

    /// Returns whether the child needs its line no longer.
    fn is_over(&self, pid: i32) -> bool {
        self.worker_told.is_some_and(|at| at.elapsed() > KEPT) || process::has_executed(pid)
    }
}

impl Tied {
    /// Starts without children.
    pub fn new(program: Program) -> Tied {
        Tied { program, known: HashMap::new() }
    }

    /// Returns whether it takes little time to tie others: few children are listed, and their parents have few threads, each with a list of its own.
    pub fn are_few(&self) -> bool {
        const FEW: usize = 16;
        const FEW_THREADS: usize = 64;
        let threads = |pid| Threads::open(pid).map_or(0, |threads| threads.count());
        self.known.len() < FEW && self.parents().into_iter().map(threads).sum::<usize>() < FEW_THREADS
    }

    /// Lists the processes whose children are to be tied.
    fn parents(&self) -> Vec<i32> {
        let tied = self.known.iter().filter(|(_, child)| child.is_some()).map(|(pid, _)| *pid);
        tied.chain([self.program.pid]).collect()
    }

    /// Whether one of the parents lives: else its number may be another process's.
    fn lives(&self, parent: i32) -> bool {
        let process = match self.known.get(&parent) {
            Some(child) => child.as_ref().map(|child| &child.process),
            None => Some(&*self.program.process),
        };
        process.is_some_and(|process| !process.has_ended())
    }

    /// Ties all children that are not tied yet; returns the far ends of their lines, which the children's memory is to hold.
    pub fn tie_children(&mut self) -> Vec<RawFd> {
        let parents = self.parents();
        let listed = children_of(&parents);
        // The children of a dead parent are listed no longer.
        self.known
            .retain(|pid, child| child.as_ref().map_or(listed.contains_key(pid), |child| !child.process.has_ended()));
        self.drop_spare();
        let room = MOST.saturating_sub(self.known.values().flatten().count());
        let strangers = listed.into_iter().filter(|(pid, _)| !self.known.contains_key(pid));
        let new: Vec<(i32, Option<TiedChild>)> =
            strangers.take(room).map(|(pid, parent)| (pid, TiedChild::new(pid, parent))).collect();
        let listed = if new.iter().any(|(_, child)| child.is_some()) { children_of(&parents) } else { HashMap::new() };
        let mut far_ends = Vec::new();
        for (pid, child) in new {
            let is_child = |child: &TiedChild| {
                listed.get(&pid).is_some_and(|parent| self.lives(*parent)) && !child.process.has_ended()
            };
            let child = child.filter(|child| is_child(child) && child.line.arm().is_ok());
            far_ends.extend(child.as_ref().map(|child| child.line.far()));
            self.known.insert(pid, child);
        }
        far_ends
    }

    /// Notes that the worker of process `pid` has been told to tie it.
    pub fn worker_told(&mut self, pid: i32) {
        if let Some(child) = self.known.entry(pid).or_default() {
            child.worker_told = Some(Instant::now());
        }
    }

    /// Drops the lines that are needed no longer; returns the far ends of the others.
    pub fn far_ends(&mut self) -> Vec<RawFd> {
        self.drop_spare();
        self.known.values().flatten().map(|child| child.line.far()).collect()
    }

    fn drop_spare(&mut self) {
        self.known.iter_mut().for_each(|(pid, child)| drop(child.take_if(|child| child.is_over(*pid))));
    }
}

/// Lists the children of some processes, each with its parent.
fn children_of(parents: &[i32]) -> HashMap<i32, i32> {
    let pairs = |&parent: &i32| process::children(parent).into_iter().map(move |child| (child, parent));
    parents.iter().flat_map(pairs).collect()
}

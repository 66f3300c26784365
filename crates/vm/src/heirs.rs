//! Forked children whose userfaultfds are held by the memory that they inherit.
//!
//! When all copies of a child's userfaultfd close, its evicted pages read as zeros. A child that libc forks does not run before its own
//! worker has tied it. A child made by the instruction `syscall` itself has no worker, so nothing but manager and front would
//! have a copy; they can be killed at once.
//!
//! 1. The memory of a tied program holds the far end of a socket pair, and its children inherit that (`agent/src/tether.rs`). As soon as the
//!    manager has read of a fork, before it does anything else, it sends the child's userfaultfd there ([`Hold`]). The child's memory
//!    then holds its own userfaultfd: without a manager the threads that touch an evicted page wait, until they are killed.
//! 2. The kernel lets a forking thread go on when the fork has been read, and that thread has the child still to complete. So the
//!    child runs later than that by some tens of microseconds, and the message is sent within a few.
//! 3. Before the first fault of such a child is answered, the kernel is told to kill it when manager and front are gone, as it kills the
//!    program: by a [`Line`], whose far end is sent after the userfaultfd. Which process has this userfaultfd need not be known: all
//!    children that are not tied yet are tied then.
//! 4. What is sent stays until it is taken back, oldest first. Once in a while what is still needed is sent once more, and then
//!    everything older is taken back. Children that are gone or tied by now need nothing.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::space::Space;
use crate::sys::process::{self, PidFd};
use crate::sys::tether::{Hold, Line};
use crate::sys::uffd::Uffd;

/// How many messages are sent before any is taken back.
const FEW: usize = 64;

/// How many processes are tied here at once: each takes three descriptors.
const MOST_TIED: usize = 64;

/// The children of a program and of its children, as far as they are not tied.
#[derive(Debug)]
pub(crate) struct Heirs {
    hold: Arc<Hold>,
    /// The process id of the program.
    program: i32,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    children: Vec<Weak<Space>>,
    /// Messages sent and not taken back.
    messages: usize,
    /// With how many messages some are taken back.
    due: usize,
    /// Processes that were forked from the program, or from one of these; `None` for one that needs no tie, or none any more.
    known: HashMap<i32, Option<Tie>>,
}

/// A process that is tied without its worker.
#[derive(Debug)]
struct Tie {
    process: PidFd,
    line: Line,
    /// Since when its worker has been told to tie it.
    spare: Option<Instant>,
}

impl Tie {
    /// To a child that is a copy of its parent: not to one that shares its memory, as its worker does, nor to one that has executed
    /// something else. Not armed yet.
    fn of_child(pid: i32, parent: i32) -> Option<Tie> {
        if process::share_memory(pid, parent).unwrap_or(true) || process::has_executed(pid) {
            return None;
        }
        Some(Tie { process: PidFd::open(pid).ok()?, line: Line::new(pid).ok()?, spare: None })
    }

    /// Whether `pid`, its process, has executed something else, or its worker has certainly done its part.
    fn is_over(&self, pid: i32) -> bool {
        const SOON: Duration = Duration::from_secs(2);
        self.spare.is_some_and(|since| since.elapsed() > SOON) || process::has_executed(pid)
    }
}

impl List {
    /// Undoes ties that are not needed any longer.
    fn untie(&mut self) {
        self.known.iter_mut().for_each(|(pid, tie)| drop(tie.take_if(|tie| tie.is_over(*pid))));
    }
}

/// The children of some processes, each with its parent.
fn children_of(parents: &[i32]) -> HashMap<i32, i32> {
    let pairs = |&parent: &i32| process::children(parent).into_iter().map(move |child| (child, parent));
    parents.iter().flat_map(pairs).collect()
}

impl Heirs {
    /// None yet. `hold` is that of the tether of the program, which is process `program`.
    pub fn new(hold: Arc<Hold>, program: i32) -> Heirs {
        Heirs { hold, program, list: Mutex::new(List { due: FEW, ..List::default() }) }
    }

    /// Has the userfaultfd of a child held that was just forked.
    pub fn keep(&self, child: &Uffd) {
        let mut list = self.list.lock();
        // Fails where too many descriptors are on their way. Then manager and front have the only copies.
        list.messages += self.hold.keep(&[child.as_raw_fd()]).unwrap_or(0);
    }

    /// Takes note of a child that was kept.
    pub fn note(&self, child: &Arc<Space>) {
        self.list.lock().children.push(Arc::downgrade(child));
    }

    /// Ties the children of the program, and theirs, that are not tied yet. To be called when one of them has been seen to run.
    pub fn tie(&self) {
        let list = &mut *self.list.lock();
        let tied = list.known.iter().filter(|(_, tie)| tie.is_some()).map(|(pid, _)| *pid);
        let parents: Vec<i32> = tied.chain([self.program]).collect();
        let listed = children_of(&parents);
        list.known.retain(|pid, tie| tie.as_ref().map_or(listed.contains_key(pid), |tie| !tie.process.has_ended()));
        list.untie();
        let room = MOST_TIED.saturating_sub(list.known.values().flatten().count());
        let strangers = listed.iter().filter(|(pid, _)| !list.known.contains_key(pid));
        let new: Vec<(i32, Option<Tie>)> =
            strangers.take(room).map(|(&pid, &parent)| (pid, Tie::of_child(pid, parent))).collect();
        if new.iter().all(|(_, tie)| tie.is_none()) {
            list.known.extend(new);
            return;
        }
        // What has the number of a child now, and has not ended, has been one since its number was asked for.
        let listed = children_of(&parents);
        for (pid, tie) in new {
            let is_child = |tie: &Tie| listed.contains_key(&pid) && !tie.process.has_ended();
            let tie = tie.filter(|tie| is_child(tie) && tie.line.arm().is_ok());
            if let Some(tie) = &tie {
                list.messages += self.hold.keep(&[tie.line.far()]).unwrap_or(0);
            }
            list.known.insert(pid, tie);
        }
    }

    /// The worker of process `pid`, if that is one of these, has been told to tie it.
    pub fn let_go(&self, pid: i32) {
        let mut list = self.list.lock();
        if let Some(tie) = list.known.entry(pid).or_default() {
            tie.spare = Some(Instant::now());
        }
    }

    /// Takes back what need not be held any longer, once in a while. To be called when all children that were kept have been noted.
    pub fn tidy(&self) {
        let list = &mut *self.list.lock();
        if list.messages < list.due {
            return;
        }
        let untied = |child: &Arc<Space>| !child.is_tied();
        let living: Vec<Arc<Space>> = list.children.iter().filter_map(Weak::upgrade).filter(untied).collect();
        list.children = living.iter().map(Arc::downgrade).collect();
        list.untie();
        let ties = list.known.values().flatten().map(|tie| tie.line.far());
        let held: Vec<RawFd> = living.iter().map(|child| child.as_raw_fd()).chain(ties).collect();
        if let Ok(messages) = self.hold.keep(&held) {
            self.hold.let_go(std::mem::replace(&mut list.messages, messages));
        }
        list.due = list.messages + held.len() + FEW;
    }
}

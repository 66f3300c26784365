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
//! 3. What is sent stays until it is taken back, oldest first. Once in a while what is still needed is sent once more, and then
//!    everything older is taken back. Children that are gone or tied by now need nothing.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::space::Space;
use crate::sys::tether::Hold;
use crate::sys::uffd::Uffd;

/// How many messages are sent before any is taken back.
const FEW: usize = 64;

/// The children of a program and of its children, as far as they are not tied.
#[derive(Debug)]
pub(crate) struct Heirs {
    hold: Arc<Hold>,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    children: Vec<Weak<Space>>,
    /// Messages sent and not taken back.
    messages: usize,
    /// With how many messages some are taken back.
    due: usize,
}

impl Heirs {
    /// None yet. `hold` is that of the program's tether.
    pub fn new(hold: Arc<Hold>) -> Heirs {
        Heirs { hold, list: Mutex::new(List { due: FEW, ..List::default() }) }
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

    /// Takes back what need not be held any longer, once in a while. To be called when all children that were kept have been noted.
    pub fn tidy(&self) {
        let list = &mut *self.list.lock();
        if list.messages < list.due {
            return;
        }
        let untied = |child: &Arc<Space>| !child.is_tied();
        let living: Vec<Arc<Space>> = list.children.iter().filter_map(Weak::upgrade).filter(untied).collect();
        list.children = living.iter().map(Arc::downgrade).collect();
        let held: Vec<RawFd> = living.iter().map(|child| child.as_raw_fd()).collect();
        if let Ok(messages) = self.hold.keep(&held) {
            self.hold.let_go(std::mem::replace(&mut list.messages, messages));
        }
        list.due = list.messages + living.len() + FEW;
    }
}

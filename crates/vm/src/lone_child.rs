//! Which process a forked child is that has no worker: one whose program has installed a filter of system calls, or that was made by the
//! instruction `syscall` itself. Its faults are served all the same, but guards, refused changes and what its own children find empty are
//! learned from `/proc` (`guard.rs`, `events.rs`).
//!
//! 1. A child that libc forks writes to its beacon if it will have no worker. The manager looks at other children when
//!    one of their threads first faults on a stored page.
//! 2. The fault names a thread, by its number in the pid namespace of its process: a claim. It is proven by a number in the beacon that only
//!    this child has: what was written there through its userfaultfd is found in the memory of that thread.
//! 3. A child in another pid namespace than the manager's gives a number that names a different thread to the manager,
//!    or none. The proof fails, and the child stays unknown
//!    (docs/decisions/0010-changes-without-an-event.md, "What remains").

use std::sync::Arc;

use uzswap_proto::{Nonce, beacon};

use crate::pager::Pager;
use crate::range::Range;
use crate::space::{Space, State};
use crate::sys::pagemap::Pagemap;
use crate::sys::process::{Memory, nonce, page_of, process_of};

/// How often a child is looked at.
const TRIES: u32 = 3;

/// The process of a forked child without a worker.
#[derive(Debug)]
pub(crate) struct LoneChild {
    number: i32,
    /// What is in its beacon, and where that is.
    nonce: Nonce,
    beacon: u64,
    /// Its page tables.
    pub pagemap: Arc<Pagemap>,
}

impl LoneChild {
    /// The process of `thread`, if this number is in its beacon. `None` also if it cannot be looked at.
    fn of(thread: i32, beacon: u64, nonce: Nonce) -> Option<LoneChild> {
        let number = process_of(thread)?;
        // Opened before the proof: if the process ends or executes a program in between, the proof fails. In the other
        // order these could be the page tables of that program, or of a later process with this number.
        let pagemap = Arc::new(Pagemap::open(number).ok()?);
        let child = LoneChild { number, nonce, beacon, pagemap };
        child.pid().map(|_| child)
    }

    /// Its process id, if a process of this number has its memory now: it may have ended, or have executed another program.
    pub fn pid(&self) -> Option<i32> {
        let memory = Memory::open(self.number, self.beacon).ok()?;
        memory.has(self.nonce, self.beacon + size_of::<u64>() as u64).then_some(self.number)
    }
}

impl Pager {
    /// Finds out which process the child is, if it has no worker. `thread` has come for a page.
    pub(crate) fn identify(&self, space: &Space, state: &mut State, thread: u32) {
        if state.worker.is_some() || state.lone_child.is_some() || state.looks_for_process >= TRIES {
            return;
        }
        state.looks_for_process += 1;
        let Some(page) = state.beacon else { return };
        let number = match state.nonce {
            Some(number) => number,
            None => {
                let Ok(number) = nonce() else { return };
                if space.fill(page, &page_of(&beacon::words(number))).1.is_some() {
                    return;
                }
                self.name_child(space, state, number);
                space.uffd.wake(Range::page(page));
                number
            }
        };
        state.lone_child = LoneChild::of(thread as i32, page, number);
    }
}

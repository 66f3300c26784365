//! Forked children whose userfaultfds are held by the memory that they inherit.
//!
//! When all copies of a child's userfaultfd close, its evicted pages read as zeros. A child that libc forks does not run before its own
//! worker has tied it. A child made by the instruction `syscall` itself has no worker, so nothing but manager and front would
//! have a copy; they can be killed at once.
//!
//! 1. The memory of a tied program holds the far end of a socket pair, and its children inherit that (`agent/src/tether.rs`). The
//!    manager reads a fork and sends the child's userfaultfd there in one system call ([`Hold::read`]). The child's memory
//!    then holds its own userfaultfd: without a manager the threads that touch an evicted page wait, until they are killed.
//! 2. That a fork is to be read is told by the kernel: nothing can be filled meanwhile (EAGAIN). A fork takes a while. So a thread that
//!    has read within [`MOMENT`], and has filled since what it was to fill, need not ask: it would make each fault two percent slower.
//!    Nor is it done in an address space that is noisy (`noisy.rs`). A fork that is read without the question all the same is sent by a
//!    second call, at once. So it is where there is no io_uring.
//! 3. Without a line to the manager such a child would wait for ever if manager and front ended. So the manager ties all children that are
//!    there and not tied yet ([`Tied`]) when it has read a fork, before work that takes milliseconds, and sends the far ends the same
//!    way. It does so only if that takes little time, and a child may not be there yet: so the manager looks once more before it
//!    answers the child's first fault. Where that takes long, a thread of its own does it ([`Pager::tie_new_children`]), once for all
//!    children that ask for it meanwhile, and users take turns: thousands of children of one program would keep the threads that serve faults.
//! 4. What is sent stays until it is taken back, oldest first. Once in a while what is still needed is sent once more, and then
//!    everything older is taken back. Children that are gone or tied by now need nothing.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::owner::Owner;
use crate::pager::Pager;
use crate::space::{Space, Worker};
use crate::sys::tether::Hold;
use crate::sys::uffd::{AT_ONCE, Message, Uffd, WeakUffd};
use crate::tied::Tied;
use crate::visit;

/// A fork of a process that was evicted from takes longer: 60 us and more.
pub(crate) const MOMENT: Duration = Duration::from_micros(40);

/// How many messages are sent before any is taken back.
const FEW: usize = 64;

/// The children of a program and of its children, as far as they are not tied.
#[derive(Debug)]
pub(crate) struct Heirs {
    hold: Arc<Hold>,
    /// Before `list` in the lock order. Held while `/proc` is read: a fork that finds it locked goes on without.
    tied: Mutex<Tied>,
    list: Mutex<List>,
    /// How often it was asked that the children be tied, and how many of these requests have been met.
    asked: AtomicU64,
    met: AtomicU64,
}

/// The request of a child that is to be tied.
#[derive(Debug)]
pub(crate) struct Tie {
    heirs: Arc<Heirs>,
    number: u64,
    child: Arc<Space>,
}

#[derive(Debug, Default)]
struct List {
    /// Children that are kept and that no address space has yet. Forks of several processes of the family are read at once.
    new: Vec<WeakUffd>,
    children: Vec<Weak<Space>>,
    /// Messages sent and not taken back.
    messages: usize,
    /// With how many messages some are taken back.
    due: usize,
}

/// Reads what there is to read, without waiting; tells whether that was all. Children that were forked are held. `may_fork`: there may
/// be a fork to read.
pub(crate) fn read(
    uffd: &Uffd,
    heirs: Option<&Heirs>,
    messages: &mut Vec<Message>,
    may_fork: bool,
) -> io::Result<bool> {
    match heirs {
        Some(heirs) => heirs.read(uffd, messages, may_fork),
        None => uffd.read(messages),
    }
}

impl Heirs {
    /// None yet. `hold` is that of the tether of `worker`'s program.
    pub fn new(hold: Arc<Hold>, worker: &Worker) -> Heirs {
        let list = Mutex::new(List { due: FEW, ..List::default() });
        let (asked, met) = Default::default();
        Heirs { hold, tied: Mutex::new(Tied::new(worker.program())), list, asked, met }
    }

    /// Reads what there is to read from the userfaultfd of the program or of a child of its family, as [`Uffd::read`], and has the
    /// userfaultfds of children held that were just forked. `may_fork`: there may be a fork to read.
    pub fn read(&self, uffd: &Uffd, messages: &mut Vec<Message>, may_fork: bool) -> io::Result<bool> {
        let mut one_by_one = 0;
        // From before a fork until it is read. One message at a time takes longer.
        while may_fork && uffd.is_changing() {
            if one_by_one == AT_ONCE {
                return Ok(false);
            }
            one_by_one += 1;
            let mut list = self.list.lock();
            let (message, was_sent) = match self.hold.read(uffd) {
                Ok(Some(read)) => read,
                Ok(None) => return Ok(true),
                Err(_) => break,
            };
            list.messages += usize::from(was_sent);
            match &message {
                Some(Message::Fork(child)) if was_sent => list.new.push(child.downgrade()),
                Some(Message::Fork(child)) => self.keep(&mut list, child),
                _ => {}
            }
            messages.extend(message);
        }
        let known = messages.len();
        let result = uffd.read(messages);
        for message in &messages[known..] {
            if let Message::Fork(child) = message {
                self.keep(&mut self.list.lock(), child);
            }
        }
        result
    }

    /// Has the userfaultfd of a child held.
    fn keep(&self, list: &mut List, child: &Uffd) {
        // Fails where too many descriptors are on their way. Then manager and front have the only copies, until there is room.
        list.messages += self.hold.keep(&[child.as_raw_fd()]).unwrap_or(0);
        list.new.push(child.downgrade());
    }

    /// Takes note of the address space of a child that was kept.
    pub fn note(&self, child: &Arc<Space>) {
        let mut list = self.list.lock();
        list.new.retain(|new| new.upgrade().is_some_and(|new| new.as_raw_fd() != child.as_raw_fd()));
        list.children.push(Arc::downgrade(child));
    }

    /// Ties the children of the program, and theirs, that are not tied yet: at once if they are few, else in turn. To be called when
    /// `child` is seen to run.
    pub fn tie_children(self: &Arc<Heirs>, pager: &Pager, child: &Space) {
        let number = self.asked.fetch_add(1, AcqRel) + 1;
        if let Some(mut tied) = self.lock_if_few() {
            self.tie(&mut tied);
        } else if let Some(child) = pager.space(child.id) {
            child.awaits_tie.store(true, Release);
            pager.ties.add(Owner::user_of(&child.owner), Tie { heirs: self.clone(), number, child });
        }
    }

    /// Ties the children that `/proc` lists by now, if that takes little time and no other thread does it.
    pub fn tie_if_few(&self) {
        if let Some(mut tied) = self.lock_if_few() {
            self.tie(&mut tied);
        }
    }

    fn lock_if_few(&self) -> Option<MutexGuard<'_, Tied>> {
        self.tied.try_lock().filter(|tied| tied.are_few())
    }

    /// Meets all requests that have been made so far.
    fn tie(&self, tied: &mut Tied) {
        let asked = self.asked.load(Acquire);
        let far_ends = tied.tie_children();
        let mut list = self.list.lock();
        // As above. Then the manager's own copies are the only ones.
        list.messages += self.hold.keep(&far_ends).unwrap_or(0);
        self.met.store(asked, Release);
    }

    /// Notes that the worker of process `pid` has been told to tie it.
    pub fn worker_told(&self, pid: i32) {
        self.tied.lock().worker_told(pid);
    }

    /// Takes back what need not be held any longer, once in a while.
    pub fn tidy(&self) {
        // Children are being tied: the next fork tidies.
        let Some(mut tied) = self.tied.try_lock() else { return };
        let list = &mut *self.list.lock();
        if list.messages < list.due {
            return;
        }
        let untied = |child: &Arc<Space>| !child.is_tied();
        let living: Vec<Arc<Space>> = list.children.iter().filter_map(Weak::upgrade).filter(untied).collect();
        list.children = living.iter().map(Arc::downgrade).collect();
        let new: Vec<Uffd> = list.new.iter().filter_map(WeakUffd::upgrade).collect();
        let children = living.iter().map(|child| child.as_raw_fd()).chain(new.iter().map(Uffd::as_raw_fd));
        let held: Vec<RawFd> = children.chain(tied.far_ends()).collect();
        if let Ok(messages) = self.hold.keep(&held) {
            self.hold.let_go(std::mem::replace(&mut list.messages, messages));
        }
        list.due = list.messages + held.len() + FEW;
    }
}

impl Pager {
    /// Ties children that cannot be tied at once, and has their faults answered then, until the calling thread is replaced.
    pub fn tie_new_children(&self) {
        while !visit::is_surplus() {
            let Some(Tie { heirs, number, child }) = self.ties.try_take() else {
                self.ties.wait();
                continue;
            };
            let _visit = child.visit();
            let mut tied = heirs.tied.lock();
            if heirs.met.load(Acquire) < number {
                heirs.tie(&mut tied);
            }
            drop(tied);
            child.awaits_tie.store(false, Release);
            // Else it is served as soon as it may be visited ([`Pager::reopen`]).
            if !child.is_shunned() {
                self.service_in_turn(&child);
            }
        }
    }
}

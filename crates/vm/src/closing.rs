//! Closing what clients have handed over, in threads that no other thread waits for.
//!
//! The last `close` of a descriptor can take as long as its former owner likes: a socket lingers (`SO_LINGER`), a file of a FUSE
//! server is flushed, a userfaultfd waits for the lock of an address space that its process holds, and a connection lets go of
//! the descriptors in its unread messages.
//!
//! 1. Each [`User`] has a queue, in which its descriptors wait. Threads take from the queues in turns, and end after `REST` without work.
//! 2. `MOST_THREADS` threads at most close for one user. A descriptor that finds no idle thread gets a new one. So what one user holds up
//!    is that user's alone.
//! 3. Connections can end faster than these threads get a processor. A user whose queue is long is *behind*: its connections wait until the
//!    queue is shorter.
//! 4. A user whose queue is long, and of which nothing was closed for `STANDSTILL`, is *stuck*: its new connections end at once, nothing more is
//!    received from it, and its processes may not fork. So it has a bounded number of descriptors here: `LONG`, those of two messages
//!    (each of the reception's threads may be receiving one), and those that its connections and processes had before.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::sys::thread;

/// Threads that close at once for one user. Each can be held by one descriptor.
const MOST_THREADS: usize = 8;

/// Threads of all user ids together, from which on each user id gets one only: one person can have many user ids.
const MOST_OF_ALL: usize = 512;

/// How long a thread stays without work.
const REST: Duration = Duration::from_secs(5);

/// A queue that is longer than this is long.
const LONG: usize = 64;

/// A queue stands still if nothing in it was closed for so long.
const STANDSTILL: Duration = Duration::from_secs(2);

/// Why a process of a user that is stuck may not fork.
pub(crate) const IS_STUCK: &str = "many descriptors that processes of its user have handed over cannot be closed";

static QUEUES: Mutex<Queues> = Mutex::new(Queues::new());
static MORE: Condvar = Condvar::new();

/// Whose descriptors they are: those of the user at the other end of the connection by which they came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// The manager's own.
    Own,
    /// Those of the user with this number.
    Of(u32),
}

/// How the closing of a user's descriptors gets on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Few wait.
    Prompt,
    /// Many wait, and will be closed soon.
    Behind,
    /// Many wait, and for long.
    Stuck,
}

impl User {
    /// Returns how the closing of this user's descriptors gets on.
    pub fn state(self) -> State {
        QUEUES.lock().state(self, Instant::now())
    }

    /// Closes a descriptor of this user's. Returns at once.
    fn close(self, descriptor: OwnedFd) {
        let mut queues = QUEUES.lock();
        queues.add(self, descriptor, Instant::now());
        if queues.idle + queues.new >= queues.startable() {
            MORE.notify_one();
        } else if queues.may_have_thread(self) {
            // Without a new thread the descriptor waits for one of those that are there, or for the next call.
            let spawned = std::thread::Builder::new().name("close".to_owned()).spawn(work);
            queues.threads += usize::from(spawned.is_ok());
            queues.new += usize::from(spawned.is_ok());
        }
    }
}

/// A descriptor that a client has handed over, or that can take as long to close. To drop it returns at once.
#[derive(Debug)]
pub struct Handed {
    user: User,
    /// `None` only while it is dropped.
    descriptor: Option<OwnedFd>,
}

impl Handed {
    /// A descriptor of `user`'s.
    pub fn new(user: User, descriptor: OwnedFd) -> Handed {
        Handed { user, descriptor: Some(descriptor) }
    }

    /// Returns the user for whom it is closed.
    pub fn user(&self) -> User {
        self.user
    }

    /// Has it closed for another user.
    pub(crate) fn hand_to(&mut self, user: User) {
        self.user = user;
    }

    /// Gives the descriptor, which is one that can be closed at once.
    pub fn into_prompt(mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }

    /// Closes it, as it can be at once.
    pub(crate) fn close_at_once(&mut self) {
        drop(self.descriptor.take());
    }
}

impl AsRawFd for Handed {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        self.descriptor.take().into_iter().for_each(|descriptor| self.user.close(descriptor));
    }
}

struct Queues {
    /// Those with something to close.
    users: BTreeMap<User, Queue>,
    /// The user that a thread has taken from last.
    last: User,
    /// Threads that wait for work.
    idle: usize,
    /// Threads that have not begun.
    new: usize,
    threads: usize,
}

#[derive(Default)]
struct Queue {
    /// Each with when it came.
    waiting: VecDeque<(Instant, OwnedFd)>,
    /// Threads that close one.
    busy: usize,
    /// When one was last closed.
    closed: Option<Instant>,
}

impl Queue {
    /// How many could be begun with.
    fn startable(&self) -> usize {
        self.waiting.len().min(MOST_THREADS.saturating_sub(self.busy))
    }
}

impl Queues {
    const fn new() -> Queues {
        Queues { users: BTreeMap::new(), last: User::Own, idle: 0, new: 0, threads: 0 }
    }

    fn add(&mut self, user: User, descriptor: OwnedFd, now: Instant) {
        self.users.entry(user).or_default().waiting.push_back((now, descriptor));
    }

    fn state(&self, user: User, now: Instant) -> State {
        let Some(queue) = self.users.get(&user).filter(|queue| queue.waiting.len() > LONG) else {
            return State::Prompt;
        };
        let since = queue.waiting.front().map(|(since, _)| *since).max(queue.closed);
        let is_stuck = since.is_some_and(|since| now.saturating_duration_since(since) > STANDSTILL);
        if is_stuck { State::Stuck } else { State::Behind }
    }

    fn startable(&self) -> usize {
        self.users.values().map(Queue::startable).sum()
    }

    /// Whether another thread may close for a user.
    fn may_have_thread(&self, user: User) -> bool {
        let busy = self.users.get(&user).map_or(0, |queue| queue.busy);
        busy == 0 || busy < MOST_THREADS && self.threads < MOST_OF_ALL
    }

    /// Takes a descriptor of the next user that has one and may have one more thread.
    fn take(&mut self) -> Option<(User, OwnedFd)> {
        let after = self.users.range((Bound::Excluded(self.last), Bound::Unbounded));
        let mut users = after.chain(self.users.range(..=self.last));
        let user = users.find(|(_, queue)| queue.startable() > 0).map(|(user, _)| *user)?;
        self.last = user;
        let queue = self.users.get_mut(&user)?;
        queue.busy += 1;
        queue.waiting.pop_front().map(|(_, descriptor)| (user, descriptor))
    }

    /// Notes that a thread has closed what it took from a user's queue.
    fn note_closed(&mut self, user: User, now: Instant) {
        let Some(queue) = self.users.get_mut(&user) else { return };
        queue.busy -= 1;
        queue.closed = Some(now);
        if queue.busy == 0 && queue.waiting.is_empty() {
            self.users.remove(&user);
        }
    }
}

fn work() {
    // Descriptors are handed over by threads that run before ordinary ones: they must not pile up here.
    let _ = thread::ask_for_short_slices();
    let mut queues = QUEUES.lock();
    queues.new -= 1;
    loop {
        if let Some((user, descriptor)) = queues.take() {
            drop(queues);
            drop(descriptor);
            queues = QUEUES.lock();
            queues.note_closed(user, Instant::now());
            continue;
        }
        queues.idle += 1;
        let timed_out = MORE.wait_for(&mut queues, REST).timed_out();
        queues.idle -= 1;
        if timed_out && queues.startable() == 0 {
            queues.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn descriptor() -> OwnedFd {
        File::open("/dev/null").expect("a device").into()
    }

    #[test]
    fn a_user_has_so_many_threads_and_others_have_theirs() {
        let (mut queues, now) = (Queues::new(), Instant::now());
        let [one, two] = [1, 2].map(User::Of);
        (0..20).for_each(|_| queues.add(one, descriptor(), now));
        queues.add(two, descriptor(), now);
        queues.add(User::Own, descriptor(), now);
        assert_eq!(queues.startable(), MOST_THREADS + 2);
        let taken: Vec<User> = std::iter::from_fn(|| queues.take().map(|(user, _)| user)).collect();
        assert_eq!(taken[..4], [one, two, User::Own, one], "in turns");
        assert_eq!((taken.len(), queues.startable()), (MOST_THREADS + 2, 0));
        assert!(!queues.may_have_thread(one) && queues.may_have_thread(two) && queues.may_have_thread(User::Of(3)));
        queues.threads = MOST_OF_ALL;
        assert!(!queues.may_have_thread(two) && queues.may_have_thread(User::Of(3)));
        queues.note_closed(two, now);
        queues.note_closed(one, now);
        assert_eq!(queues.take().map(|(user, _)| user), Some(one));
        assert!(queues.users.len() == 2 && !queues.users.contains_key(&two), "nothing is left behind");
    }

    #[test]
    fn a_long_queue_is_behind_and_one_that_stands_still_is_stuck() {
        let (mut queues, now) = (Queues::new(), Instant::now());
        let user = User::Of(1);
        (0..LONG).for_each(|_| queues.add(user, descriptor(), now));
        assert_eq!(queues.state(user, now + 2 * STANDSTILL), State::Prompt);
        queues.add(user, descriptor(), now + STANDSTILL);
        assert_eq!(queues.state(user, now + STANDSTILL), State::Behind);
        assert_eq!(queues.state(user, now + 2 * STANDSTILL), State::Stuck);
        assert_eq!(queues.state(User::Of(2), now + 2 * STANDSTILL), State::Prompt);
        queues.add(user, descriptor(), now + STANDSTILL);
        drop(queues.take());
        queues.note_closed(user, now + 2 * STANDSTILL);
        assert_eq!(queues.state(user, now + 2 * STANDSTILL), State::Behind, "it goes on");
        drop(queues.take());
        assert_eq!(queues.state(user, now + 4 * STANDSTILL), State::Prompt);
    }
}

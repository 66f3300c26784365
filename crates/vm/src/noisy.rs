//! Noisy address spaces: their threads change the layout almost without a pause.
//!
//! Before a fault there can be answered, the thread that serves it has to find a moment in which no change is under way. With many threads
//! that change mappings at once this takes milliseconds, and each answer lets the next changes begin. A few such address spaces would keep
//! all threads that serve faults. So one thread serves all that are noisy ([`Pager::serve_noisy`](crate::pager::Pager::serve_noisy)), and
//! the others serve the rest:
//!
//! 1. An address space becomes noisy when its layout was unsettled for much more than a tenth of the time, and is so for
//!    [`NOISY_FOR`]. Where there is more to run than processors, an address space is unsettled for a moment now and then: that is not noise.
//! 2. Users take turns, and the address spaces of a user do so within its turns.
//! 3. The address spaces of a trusted owner are not noisy: there is no other that they could hold up.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::owner::Owner;
use crate::pager::Pager;
use crate::space::Space;
use crate::sys::thread;
use crate::visit;

/// How long an address space stays noisy.
const NOISY_FOR: Duration = Duration::from_secs(1);

/// A layout that settles within this time counts as settled.
pub(crate) const SETTLES_WITHIN: Duration = Duration::from_millis(1);

/// For how long a layout may be unsettled at once; and the part of the time for which it may be, one in so many.
const BURST: Duration = Duration::from_millis(10);
const SHARE: u32 = 10;

/// Whether one address space is noisy.
#[derive(Debug, Default)]
pub(crate) struct Noise {
    /// Until when, in milliseconds of the clock of [`now`]; 0 for one that has never been.
    until: AtomicU64,
    /// For how long the layout was unsettled beyond its share, and when that was last counted.
    unsettled: Mutex<Option<(Duration, Instant)>>,
    /// Whether the address space waits for its turn.
    queued: AtomicBool,
}

impl Noise {
    /// Notes at `at` that the layout was unsettled for `time` until then.
    pub fn note(&self, time: Duration, at: Instant) {
        let mut unsettled = self.unsettled.lock();
        let (before, last) = unsettled.unwrap_or((Duration::ZERO, at));
        let sum = before.saturating_sub(at.duration_since(last) / SHARE) + time;
        *unsettled = Some((sum.min(BURST), at));
        if sum > BURST {
            self.until.store(now() + NOISY_FOR.as_millis() as u64, Relaxed);
        }
    }

    /// Returns whether the address space is noisy.
    pub fn is_noisy(&self) -> bool {
        let until = self.until.load(Relaxed);
        until != 0 && now() < until
    }
}

/// Milliseconds since the first call.
fn now() -> u64 {
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_millis() as u64
}

/// What waits for its turn: users take turns, and what a user has waiting does so within them.
pub(crate) struct Turns<T> {
    users: Mutex<VecDeque<(Arc<Owner>, VecDeque<T>)>>,
    more: Condvar,
}

impl<T> Default for Turns<T> {
    fn default() -> Turns<T> {
        Turns { users: Mutex::default(), more: Condvar::new() }
    }
}

impl<T> Turns<T> {
    /// Adds what `user` has waiting.
    fn add(&self, user: Arc<Owner>, item: T) {
        let mut users = self.users.lock();
        match users.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &user)) {
            Some((_, items)) => items.push_back(item),
            None => users.push_back((user, VecDeque::from([item]))),
        }
        self.more.notify_one();
    }

    /// Takes the item whose turn it is, if one waits.
    fn try_take(&self) -> Option<T> {
        let mut users = self.users.lock();
        let (user, mut items) = users.pop_front()?;
        let item = items.pop_front();
        if !items.is_empty() {
            users.push_back((user, items));
        }
        item
    }

    /// Waits until there is an item.
    fn wait(&self) {
        let mut users = self.users.lock();
        if users.is_empty() {
            self.more.wait(&mut users);
        }
    }

    /// Returns whether an item waits.
    fn is_waiting(&self) -> bool {
        !self.users.lock().is_empty()
    }
}

impl Pager {
    /// Has a noisy address space served in its turn.
    pub(crate) fn serve_in_turn(&self, space: Arc<Space>) {
        if !space.noise.queued.swap(true, Relaxed) {
            self.noisy.add(Owner::user_of(&space.owner), space);
        }
    }

    /// Serves faults and events of noisy address spaces until the calling thread is replaced.
    pub fn serve_noisy(&self) {
        // What it is given to do has no end, and takes from the time of the others.
        thread::ask_for_little();
        while !visit::is_surplus() {
            let Some(space) = self.noisy.try_take() else {
                self.noisy.wait();
                continue;
            };
            // Before the visit: what comes after it has begun may be left by it, and is reported again.
            space.noise.queued.store(false, Relaxed);
            // Reported again by `reopen` if it is not to be visited.
            if !space.is_shunned() {
                self.service_while(&space, || false, || visit::is_surplus() || self.noisy.is_waiting());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_space_is_noisy_that_is_unsettled_for_much_of_the_time() {
        let (quiet, noisy, begin) = (Noise::default(), Noise::default(), Instant::now());
        let millisecond = Duration::from_millis(1);
        for number in 0..100 {
            quiet.note(millisecond, begin + 10 * number * millisecond);
            assert!(!quiet.is_noisy());
        }
        (0..=10).for_each(|number| noisy.note(millisecond, begin + number * millisecond));
        assert!(!noisy.is_noisy(), "a burst");
        noisy.note(2 * millisecond, begin + 13 * millisecond);
        assert!(noisy.is_noisy());
    }

    #[test]
    fn users_take_turns() {
        let (turns, one, other) = (Turns::default(), Arc::new(Owner::user()), Arc::new(Owner::user()));
        (1..=3).for_each(|item| turns.add(one.clone(), item));
        turns.add(other, 10);
        let order: Vec<i32> = std::iter::from_fn(|| turns.try_take()).collect();
        assert_eq!(order, [1, 10, 2, 3]);
        assert!(!turns.is_waiting());
    }
}

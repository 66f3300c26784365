//! Noisy address spaces: their threads change the layout almost without a pause, or it has thousands of mappings.
//!
//! Before a fault there can be answered, the thread that serves it has to find a moment in which no change is under way. With many threads
//! that change mappings at once this takes milliseconds, and each answer lets the next changes begin. A few such address spaces would keep
//! all threads that serve faults. So one thread serves all that are noisy ([`Pager::serve_noisy`](crate::pager::Pager::serve_noisy)), and
//! the others serve the rest:
//!
//! 1. An address space becomes noisy when more than [`CHANGES`] changes a second are read while its layout does not settle, and stays so
//!    for [`NOISY_FOR`] after the last such time. Where there is more to run than processors, a few changes may take long to settle because
//!    their threads wait for one. That is not noise.
//! 2. An address space is noisy, too, as long as it has more than [a few](crate::layout::FEW) mappings. Its lock is held while
//!    they are registered, for which a thread that serves a fault there would wait. So are the children that it forks, from the start.
//! 3. Users take turns, and the address spaces of a user do so within its turns.
//! 4. While an address space is noisy, its threads keep the processors busy. Where the kernel divides these among sessions first, all threads
//!    of the manager have no more than the threads of one such program. So the session of the manager gets as much as some nine others, and
//!    within it the thread that serves noisy ones gives way to those that serve the rest. It is not so at other times: threads that get a
//!    processor for each fault at once serve them one by one, and a crowd of processes gets half as much done.
//! 5. Where there are other users, the thread that serves noisy ones pauses after each visit to one whose threads change the layout, for as
//!    long as the visit had a processor, or until a noisy one of another user waits. Else it would take a processor from the others for
//!    itself, and give one to each thread whose change it reads. Meanwhile more changes gather, which it reads at once:
//!    many threads get as many done as without the pause.
//! 6. The address spaces of a trusted owner are not noisy: no other owner's could be held up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::pager::Pager;
use crate::space::Space;
use crate::sys::{job, thread};
use crate::visit;

/// How long an address space stays noisy.
const NOISY_FOR: Duration = Duration::from_secs(1);

/// A layout that settles within this time counts as settled.
pub(crate) const SETTLES_WITHIN: Duration = Duration::from_millis(1);

/// How many changes the pager may read from an unsettled address space in a second, and how many at once. Where the processors are
/// busy it reads no more than 2,000 a second of 50 threads that change mappings without a pause: each wait for them takes some 26 ms.
const CHANGES: f64 = 500.0;
const BURST: f64 = 200.0;

/// Instead of a time, for an address space with many mappings.
const FOR_NOW: u64 = u64::MAX;

/// Tells whether one address space is noisy.
#[derive(Debug, Default)]
pub(crate) struct Noise {
    /// Until when, in milliseconds of the clock of [`now`], or [`FOR_NOW`]; 0 for one that has never been.
    until: AtomicU64,
    /// The changes that were read beyond what may be, and when they were last counted.
    changes: Mutex<Option<(f64, Instant)>>,
    /// Whether the address space waits for its turn.
    queued: AtomicBool,
    /// Whether it has its turn.
    served: AtomicBool,
}

impl Noise {
    /// Notes that until `at` so many changes were read while the layout did not settle. One of many that are noisy has a small part of
    /// the time for its turns: so whatever is noted there counts as too much.
    pub fn note(&self, count: usize, at: Instant) {
        let mut changes = self.changes.lock();
        let (before, last) = changes.unwrap_or((0.0, at));
        let sum = (before - at.duration_since(last).as_secs_f64() * CHANGES).max(0.0) + count as f64;
        *changes = Some((sum.min(BURST), at));
        if sum > BURST || self.served.load(Relaxed) {
            let until = now() + NOISY_FOR.as_millis() as u64;
            let _ = self.until.fetch_update(Relaxed, Relaxed, |before| (before != FOR_NOW).then_some(until));
        }
    }

    /// Notes whether there are many mappings.
    pub fn note_mappings(&self, many: bool) {
        if many {
            self.until.store(FOR_NOW, Relaxed);
        } else {
            let _ = self.until.compare_exchange(FOR_NOW, 0, Relaxed, Relaxed);
        }
    }

    /// Notes that there are as many mappings as in the address space of the parent.
    pub fn inherit(&self, parent: &Noise) {
        if parent.until.load(Relaxed) == FOR_NOW {
            self.until.store(FOR_NOW, Relaxed);
        }
    }

    /// Returns whether its threads change the layout, or did so a moment ago, almost without a pause.
    fn changes_much(&self) -> bool {
        let until = self.until.load(Relaxed);
        until != FOR_NOW && now() < until
    }

    /// Returns whether the address space is noisy.
    pub fn is_noisy(&self) -> bool {
        let until = self.until.load(Relaxed);
        until != 0 && (now() < until || self.queued.load(Relaxed))
    }
}

/// Returns the milliseconds since the first call.
fn now() -> u64 {
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_millis() as u64
}

impl Pager {
    /// Serves an address space, or has a noisy one served in its turn.
    pub fn service_in_turn(&self, space: &Arc<Space>) {
        if space.noise.is_noisy() {
            self.queue(space.clone());
        } else {
            self.service(space);
        }
    }

    /// Has a noisy address space served in its turn.
    pub(crate) fn queue(&self, space: Arc<Space>) {
        if !space.noise.queued.swap(true, Relaxed) {
            self.noisy.add(space.user(), space);
        }
    }

    /// Returns whether there is to be a pause after a visit.
    fn is_to_pause(&self, space: &Space) -> bool {
        space.noise.changes_much() && self.has_others(&space.owner)
    }

    /// Pauses after a visit to `space`, unless one of another user waits.
    fn pause(&self, space: &Space, time: Duration) {
        const STEP: Duration = Duration::from_millis(1);
        let (user, end) = (space.user(), Instant::now() + time);
        while !self.noisy.has_others(&user) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(STEP));
        }
    }

    /// Serves faults and events of noisy address spaces until the calling thread is replaced.
    pub fn serve_noisy(&self) {
        thread::give_way();
        let mut part = Part::usual();
        while !visit::is_surplus() {
            let Some(space) = self.noisy.try_take() else {
                match part.larger_since {
                    None => self.noisy.wait(),
                    Some(_) => {
                        self.noisy.wait_for(NOISY_FOR);
                        if !self.noisy.is_waiting() {
                            part = Part::usual();
                        }
                    }
                }
                continue;
            };
            part.be_larger();
            let (is_to_pause, begun) = (self.is_to_pause(&space), thread::processor_time());
            space.noise.served.store(true, Relaxed);
            // Before the visit: a message that comes while the visit ends may be left unread, and is reported again.
            space.noise.queued.store(false, Relaxed);
            // Reported again by `reopen` if it is not to be visited.
            if !space.is_shunned() {
                self.service_while(&space, || false, || is_to_pause || visit::is_surplus() || self.noisy.is_waiting());
            }
            space.noise.served.store(false, Relaxed);
            if is_to_pause {
                self.pause(&space, thread::processor_time() - begun);
            }
        }
    }
}

/// The part of the processors that the session of the manager has. Where sessions have none, or for want of the right, it stays the usual.
struct Part {
    larger_since: Option<Instant>,
}

impl Part {
    /// As much as any other session has.
    fn usual() -> Part {
        let _ = job::set_session_niceness(0);
        Part { larger_since: None }
    }

    /// As much as some nine other sessions. It is asked for again now and then: a thread that was replaced may have taken it back.
    fn be_larger(&mut self) {
        if self.larger_since.is_none_or(|since| since.elapsed() > NOISY_FOR) {
            let _ = job::set_session_niceness(-10);
            self.larger_since = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_space_is_noisy_that_changes_much_without_settling() {
        let (quiet, noisy, begin) = (Noise::default(), Noise::default(), Instant::now());
        let millisecond = Duration::from_millis(1);
        for number in 0..1000 {
            quiet.note(4, begin + number * 10 * millisecond);
            assert!(!quiet.is_noisy());
        }
        (0..3).for_each(|number| noisy.note(60, begin + number * millisecond));
        assert!(!noisy.is_noisy(), "a burst");
        noisy.note(60, begin + 3 * millisecond);
        assert!(noisy.is_noisy() && noisy.changes_much());
    }

    #[test]
    fn an_address_space_is_noisy_while_it_has_many_mappings() {
        let (noise, child) = (Noise::default(), Noise::default());
        child.inherit(&noise);
        assert!(!noise.is_noisy() && !child.is_noisy());
        noise.note_mappings(true);
        child.inherit(&noise);
        noise.note(1000, Instant::now());
        assert!(noise.is_noisy() && child.is_noisy());
        assert!(!noise.changes_much(), "it does not cost more than it gets done");
        child.note_mappings(false);
        assert!(!child.is_noisy());
    }

    #[test]
    fn an_address_space_stays_noisy_while_its_turns_are_rare() {
        let (noise, begin) = (Noise::default(), Instant::now());
        // The clock begins with the first look at it.
        now();
        noise.until.store(1, Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        assert!(!noise.is_noisy());
        noise.queued.store(true, Relaxed);
        assert!(noise.is_noisy(), "it waits for a turn");
        noise.queued.store(false, Relaxed);
        noise.note(1, begin);
        assert!(!noise.is_noisy());
        noise.served.store(true, Relaxed);
        noise.note(1, begin);
        assert!(noise.is_noisy(), "it has changed in its turn");
    }
}

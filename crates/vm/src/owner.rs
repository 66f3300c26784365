//! The user that address spaces belong to, as far as one user's processes may cost another's.
//!
//! 1. *Blocked.* While too many address spaces of an owner are blocked (see [`visit`](crate::visit)), its others are not visited
//!    either: each visit could take one more thread out of service.
//! 2. *Slow.* A thread that talks to a worker waits for its answer, but an owner's workers together may make threads wait
//!    for a small part of the time only. Beyond that an answer is heard when it comes.
//!
//! The owner of a manager that serves one user's job is *trusted*: there is no other whom it could hold up.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How many address spaces of one owner may be blocked before the others are left alone.
const MOST_BLOCKED: usize = 4;

/// The longest wait for a worker.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// The wait for a worker of an owner that has used up its allowance.
const SHORTEST_WAIT: Duration = Duration::from_millis(2);

/// An answer within this time is not slow.
const PROMPT: Duration = Duration::from_millis(5);

/// The part of the time that an owner's workers may make threads wait: one in so many.
const SLOW_SHARE: u32 = 20;

/// An owner of address spaces.
#[derive(Debug)]
pub struct Owner {
    trusted: bool,
    /// How many of its address spaces are blocked, and how many of its processes block a thread before they have one.
    blocked: AtomicUsize,
    allowance: Mutex<Allowance>,
}

/// How long the owner's workers may make threads wait.
#[derive(Debug)]
struct Allowance {
    left: Duration,
    at: Instant,
}

impl Owner {
    /// An owner whose processes have cost nobody anything yet.
    pub fn new(trusted: bool) -> Owner {
        let allowance = Mutex::new(Allowance { left: LONGEST_WAIT, at: Instant::now() });
        Owner { trusted, blocked: AtomicUsize::new(0), allowance }
    }

    /// Counts one more that is blocked.
    pub fn begin_block(&self) {
        self.blocked.fetch_add(1, Relaxed);
    }

    /// One that was counted is blocked no longer.
    pub fn end_block(&self) {
        self.blocked.fetch_sub(1, Relaxed);
    }

    /// Whether none of its address spaces is to be visited.
    pub fn is_shunned(&self) -> bool {
        !self.trusted && self.blocked.load(Relaxed) >= MOST_BLOCKED
    }

    /// How long to wait for the answer of a worker.
    pub(crate) fn patience(&self) -> Duration {
        if self.trusted { LONGEST_WAIT } else { self.allowance.lock().left(Instant::now()).max(SHORTEST_WAIT) }
    }

    /// A worker has made a thread wait for so long.
    pub(crate) fn waited(&self, time: Duration) {
        if !self.trusted && time > PROMPT {
            let mut allowance = self.allowance.lock();
            allowance.left = allowance.left(Instant::now()).saturating_sub(time);
        }
    }
}

impl Allowance {
    /// What is left at this moment.
    fn left(&mut self, now: Instant) -> Duration {
        let earned = now.duration_since(self.at) / SLOW_SHARE;
        (self.left, self.at) = ((self.left + earned).min(LONGEST_WAIT), now);
        self.left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_workers_use_up_an_allowance_that_comes_back() {
        let owner = Owner::new(false);
        assert!(owner.patience() > LONGEST_WAIT / 2);
        (0..3).for_each(|_| owner.waited(LONGEST_WAIT));
        assert!(owner.patience() < Duration::from_millis(20));
        (0..1000).for_each(|_| owner.waited(PROMPT));
        let mut allowance = Allowance { left: Duration::ZERO, at: Instant::now() };
        let later = allowance.at + Duration::from_secs(2);
        assert_eq!(allowance.left(later), Duration::from_millis(100));
        assert_eq!(allowance.left(later + Duration::from_secs(100)), LONGEST_WAIT);
        let trusted = Owner::new(true);
        (0..3).for_each(|_| trusted.waited(LONGEST_WAIT));
        assert_eq!(trusted.patience(), LONGEST_WAIT);
    }

    #[test]
    fn an_owner_of_several_blocked_is_shunned() {
        let (owner, trusted) = (Owner::new(false), Owner::new(true));
        for owner in [&owner, &trusted] {
            (0..MOST_BLOCKED - 1).for_each(|_| owner.begin_block());
            assert!(!owner.is_shunned());
            owner.begin_block();
        }
        assert!(owner.is_shunned() && !trusted.is_shunned());
        owner.end_block();
        assert!(!owner.is_shunned());
    }
}

//! The job that address spaces belong to, and its user, as far as their processes may cost those of others.
//!
//! 1. *Blocked.* While too many address spaces of a job are blocked (see [`visit`](crate::visit)), its others are not visited
//!    either: each visit could take one more thread out of service. The same holds for all jobs of a user.
//! 2. *Slow.* A thread that talks to a worker waits for its answer, but a user's workers together may make threads wait
//!    for a small part of the time only. Beyond that an answer is heard when it comes.
//! 3. *Resisting.* While a process executes a program, ptrace cannot stop it: the watch thread that tries waits until the watchdog replaces
//!    it, and does not see memory grow meanwhile. So for some time the watch thread stops neither that process nor another of its user.
//! 4. *Many.* A user has at most as many address spaces as there could still be of others: each takes descriptors of the manager.
//!
//! The owner of a manager that serves one user's job is *trusted*: there is no other whom it could hold up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How many address spaces of one job, and of one user, may be blocked before the others are left alone.
const MOST_OF_JOB: usize = 4;
const MOST_OF_USER: usize = 16;

/// The longest wait for a worker.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// The wait for a worker of an owner that has used up its allowance.
const SHORTEST_WAIT: Duration = Duration::from_millis(2);

/// An answer within this time is not slow.
const PROMPT: Duration = Duration::from_millis(5);

/// The part of the time that an owner's workers may make threads wait: one in so many.
const SLOW_SHARE: u32 = 20;

/// A job as the owner of address spaces, or a user as the owner of jobs.
#[derive(Debug)]
pub struct Owner {
    trusted: bool,
    user: Option<Arc<Owner>>,
    /// How many address spaces a user has; not counted by job.
    spaces: AtomicUsize,
    /// How many of its address spaces are blocked, and how many of its processes block a thread before they have one.
    blocked: AtomicUsize,
    /// When the watch thread was last stuck in stopping one of the processes.
    resisted: Mutex<Option<Instant>>,
    allowance: Mutex<Allowance>,
}

/// For how long the watch thread does not stop a process that it was stuck with, nor others of its user. The time that it lost is a twentieth
/// of this.
pub(crate) const LEFT_ALONE: Duration = Duration::from_secs(3);

/// How long the owner's workers may make threads wait.
#[derive(Debug)]
struct Allowance {
    left: Duration,
    at: Instant,
}

impl Owner {
    fn new(trusted: bool, user: Option<Arc<Owner>>) -> Owner {
        let allowance = Mutex::new(Allowance { left: LONGEST_WAIT, at: Instant::now() });
        let (spaces, blocked, resisted) = Default::default();
        Owner { trusted, user, spaces, blocked, resisted, allowance }
    }

    /// The only job of a manager.
    pub fn trusted() -> Owner {
        Owner::new(true, None)
    }

    /// A user whose processes have cost others nothing yet.
    pub fn user() -> Owner {
        Owner::new(false, None)
    }

    /// A job of `user`.
    pub fn job_of(user: Arc<Owner>) -> Owner {
        Owner::new(false, Some(user))
    }

    /// Returns the user of a job; a trusted owner is its own.
    pub(crate) fn user_of(owner: &Arc<Owner>) -> Arc<Owner> {
        owner.user.clone().unwrap_or_else(|| owner.clone())
    }

    /// Returns whether the manager serves no other user's job.
    pub(crate) fn is_trusted(&self) -> bool {
        self.trusted
    }

    /// Returns whether the user may have one more address space, of `all` that there are, where there may be `most`. A user may have as many
    /// as are left for the others: so one that comes later finds room, too.
    pub(crate) fn has_room(&self, all: usize, most: usize) -> bool {
        let user = self.user.as_deref().unwrap_or(self);
        self.trusted || user.spaces.load(Relaxed) < most.saturating_sub(all)
    }

    /// Returns whether the user has all address spaces, of which there are `all`.
    pub(crate) fn has_all(&self, all: usize) -> bool {
        self.user.as_deref().unwrap_or(self).spaces.load(Relaxed) >= all
    }

    /// Counts one more that is blocked.
    pub fn begin_block(&self) {
        self.blocked.fetch_add(1, Relaxed);
        self.user.iter().for_each(|user| user.begin_block());
    }

    /// One that was counted is blocked no longer.
    pub fn end_block(&self) {
        self.blocked.fetch_sub(1, Relaxed);
        self.user.iter().for_each(|user| user.end_block());
    }

    /// Whether none of its address spaces is to be visited.
    pub fn is_shunned(&self) -> bool {
        let most = if self.user.is_some() { MOST_OF_JOB } else { MOST_OF_USER };
        !self.trusted && self.blocked.load(Relaxed) >= most || self.user.as_ref().is_some_and(|user| user.is_shunned())
    }

    /// Notes that the watch thread was stuck in stopping one of the processes.
    pub(crate) fn note_resistance(&self) {
        match &self.user {
            Some(user) => user.note_resistance(),
            None if self.trusted => {}
            None => *self.resisted.lock() = Some(Instant::now()),
        }
    }

    /// Returns whether the watch thread is not to stop any of the processes at this moment.
    pub(crate) fn resists(&self) -> bool {
        match &self.user {
            Some(user) => user.resists(),
            None => self.resisted.lock().is_some_and(|at| at.elapsed() < LEFT_ALONE),
        }
    }

    /// How long to wait for the answer of a worker.
    pub(crate) fn patience(&self) -> Duration {
        match &self.user {
            Some(user) => user.patience(),
            None if self.trusted => LONGEST_WAIT,
            None => self.allowance.lock().left(Instant::now()).max(SHORTEST_WAIT),
        }
    }

    /// A worker has made a thread wait for so long.
    pub(crate) fn waited(&self, time: Duration) {
        if let Some(user) = &self.user {
            user.waited(time);
        } else if !self.trusted && time > PROMPT {
            let mut allowance = self.allowance.lock();
            allowance.left = allowance.left(Instant::now()).saturating_sub(time);
        }
    }
}

/// One address space of a user, as long as this lives.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Owner>);

impl Counted {
    /// Counts one more of `owner`'s user.
    pub fn new(owner: &Arc<Owner>) -> Counted {
        let user = Owner::user_of(owner);
        user.spaces.fetch_add(1, Relaxed);
        Counted(user)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.spaces.fetch_sub(1, Relaxed);
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
    fn a_user_leaves_room_for_others() {
        let (user, other) = (Arc::new(Owner::user()), Owner::job_of(Arc::new(Owner::user())));
        let (one, two) = (Arc::new(Owner::job_of(user.clone())), Owner::job_of(user));
        let mut spaces = Vec::new();
        while one.has_room(spaces.len(), 100) {
            spaces.push(Counted::new(&one));
        }
        assert_eq!(spaces.len(), 50);
        assert!(!two.has_room(50, 100) && other.has_room(50, 100) && Owner::trusted().has_room(100, 100));
        spaces.pop();
        assert!(two.has_room(49, 100));
        assert!(two.has_all(49) && !two.has_all(50) && !other.has_all(49));
    }

    #[test]
    fn slow_workers_use_up_an_allowance_that_comes_back() {
        let job = Owner::job_of(Arc::new(Owner::user()));
        assert!(job.patience() > LONGEST_WAIT / 2);
        (0..3).for_each(|_| job.waited(LONGEST_WAIT));
        assert!(job.patience() < Duration::from_millis(20));
        (0..1000).for_each(|_| job.waited(PROMPT));
        let mut allowance = Allowance { left: Duration::ZERO, at: Instant::now() };
        let later = allowance.at + Duration::from_secs(2);
        assert_eq!(allowance.left(later), Duration::from_millis(100));
        assert_eq!(allowance.left(later + Duration::from_secs(100)), LONGEST_WAIT);
        let trusted = Owner::trusted();
        (0..3).for_each(|_| trusted.waited(LONGEST_WAIT));
        assert_eq!(trusted.patience(), LONGEST_WAIT);
    }

    #[test]
    fn all_of_a_user_are_left_alone_when_one_resists() {
        let (user, trusted) = (Arc::new(Owner::user()), Owner::trusted());
        let (one, other) = (Owner::job_of(user.clone()), Owner::job_of(user));
        assert!(!other.resists());
        one.note_resistance();
        assert!(other.resists() && !Owner::job_of(Arc::new(Owner::user())).resists());
        trusted.note_resistance();
        assert!(!trusted.resists());
    }

    #[test]
    fn a_job_with_several_blocked_is_shunned_and_so_is_a_user_with_many() {
        let (user, trusted) = (Arc::new(Owner::user()), Owner::trusted());
        let jobs: Vec<Owner> = (0..5).map(|_| Owner::job_of(user.clone())).collect();
        (0..100).for_each(|_| trusted.begin_block());
        assert!(!trusted.is_shunned());
        (0..MOST_OF_JOB).for_each(|_| jobs[0].begin_block());
        assert!(jobs[0].is_shunned() && !jobs[1].is_shunned());
        jobs[0].end_block();
        assert!(!jobs[0].is_shunned());
        jobs[..4].iter().for_each(|job| (0..MOST_OF_JOB - 1).for_each(|_| job.begin_block()));
        assert!(!jobs[4].is_shunned());
        jobs[3].begin_block();
        assert!(jobs[4].is_shunned(), "its user has as many as it may have");
    }
}

//! What a job is charged for, and who may have more.
//!
//! A job is charged for its resident anonymous pages and for its compressed bytes. The charge is measured by
//! [`Charge::measured`]; between two measurements every fill is deducted from what is left, so that no number of threads
//! can fill past the limit.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use uzswap_engine::PAGE_SIZE;

const PAGE: i64 = PAGE_SIZE as i64;

/// The account of one job. Sizes are in bytes.
#[derive(Debug)]
pub struct Charge {
    /// `memory.max`.
    pub max: u64,
    /// Reclaim keeps the charge below this: `memory.high`, or a margin below `memory.max`.
    pub soft: u64,
    /// From here on mappings are watched; below, a job costs nothing.
    watch_from: u64,
    left: AtomicI64,
    /// Resident anonymous memory, last measured.
    pub anon: AtomicU64,
    /// The most it ever was.
    pub anon_peak: AtomicU64,
    /// Anonymous memory and pool, last measured.
    pub current: AtomicU64,
    /// The most it ever was.
    pub peak: AtomicU64,
    wanted: Mutex<bool>,
    bell: Condvar,
}

impl Charge {
    /// An account with these limits; `None` is no limit.
    pub fn new(max: Option<u64>, high: Option<u64>) -> Charge {
        let max = max.unwrap_or(u64::MAX >> 1);
        let margin = margin(max);
        let soft = high.unwrap_or(u64::MAX).min(max - margin);
        Charge {
            max,
            soft,
            watch_from: max - watched_room(max),
            left: AtomicI64::new(max as i64),
            anon: AtomicU64::new(0),
            anon_peak: AtomicU64::new(0),
            current: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            wanted: Mutex::new(false),
            bell: Condvar::new(),
        }
    }

    /// Enters a measurement.
    pub fn measured(&self, anon: u64, pool: u64) {
        let current = anon + pool;
        self.anon.store(anon, Relaxed);
        self.anon_peak.fetch_max(anon, Relaxed);
        self.current.store(current, Relaxed);
        self.peak.fetch_max(current, Relaxed);
        self.left.store(self.max as i64 - current as i64, Relaxed);
    }

    /// Takes memory for `pages` pages if there is so much left. Wakes reclaim when little is.
    pub fn take(&self, pages: u64) -> bool {
        let wanted = pages as i64 * PAGE;
        let left = self.left.fetch_sub(wanted, Relaxed) - wanted;
        if left < (self.max - self.soft) as i64 {
            self.wake_reclaim();
        }
        if left < 0 {
            self.left.fetch_add(wanted, Relaxed);
        }
        left >= 0
    }

    /// Bytes by which the charge should fall; 0 or less if it is low enough.
    pub fn excess(&self) -> i64 {
        (self.max as i64 - self.left.load(Relaxed)) - self.soft as i64
    }

    /// Whether the limit is so near that mappings are watched.
    pub fn is_near(&self) -> bool {
        self.current.load(Relaxed) > self.watch_from
    }

    /// How long nothing can happen that must be seen: memory is not touched faster than this.
    pub fn pause(&self) -> Duration {
        const BYTES_PER_MILLISECOND: u64 = 4 << 20;
        const NEAR: u64 = 2;
        let room = self.watch_from.saturating_sub(self.current.load(Relaxed));
        Duration::from_millis((room / BYTES_PER_MILLISECOND).clamp(NEAR, 100))
    }

    /// Wakes whoever waits for work.
    pub fn wake_reclaim(&self) {
        let mut wanted = self.wanted.lock();
        if !*wanted {
            *wanted = true;
            self.bell.notify_one();
        }
    }

    /// Waits until memory is wanted, `patience` at most.
    pub fn wait_for_want(&self, patience: Duration) {
        let mut wanted = self.wanted.lock();
        if !*wanted {
            self.bell.wait_for(&mut wanted, patience);
        }
        *wanted = false;
    }
}

/// How far below the limit reclaim keeps the charge: room for what is touched while it works.
pub fn margin(max: u64) -> u64 {
    (max / 16).clamp(2 << 20, 64 << 20)
}

/// How far below the limit mappings begin to be watched: what memory may grow by until the manager has seen that it
/// grows. Two processors dirty some 4 MiB in a millisecond.
fn watched_room(max: u64) -> u64 {
    (max / 10 * 3).max(24 << 20).min(max / 4 * 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_given_than_is_left() {
        let charge = Charge::new(Some(16 << 20), None);
        charge.measured(15 << 20, (1 << 20) - 2 * PAGE as u64);
        assert!(charge.take(1));
        assert!(!charge.take(2));
        assert!(charge.take(1));
        assert!(!charge.take(1));
        assert_eq!(charge.excess(), 2 << 20);
        charge.measured(8 << 20, 0);
        assert!(charge.excess() < 0);
        assert_eq!((charge.peak.load(Relaxed), charge.anon_peak.load(Relaxed)), ((16 << 20) - 8192, 15 << 20));
    }

    #[test]
    fn high_is_where_reclaim_begins() {
        assert_eq!(Charge::new(Some(64 << 20), Some(32 << 20)).soft, 32 << 20);
        assert_eq!(Charge::new(Some(64 << 20), None).soft, 60 << 20);
        assert!(Charge::new(None, None).soft > 1 << 60);
    }

    #[test]
    fn small_limits_are_watched_from_further_below() {
        let watched = |max: u64| (max - Charge::new(Some(max), None).watch_from) >> 20;
        assert_eq!((watched(16 << 20), watched(64 << 20), watched(1000 << 20)), (12, 24, 300));
    }
}

//! How many bytes of an address space were brought and taken, for the account of what is resident there.
//!
//! The kernel is asked for the resident pages of one process after another, and the answers are entered together, which may be milliseconds
//! later. What was filled since an answer is added to it, and what was discarded is subtracted. The sum may be too large, never too small, or
//! faults would be given memory that is not there:
//!
//! 1. A fill is counted after the kernel has done it.
//! 2. A worker discards some time before its answer is read, so a discard that had begun when the kernel was asked is not subtracted.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What was filled and discarded in an address space.
#[derive(Debug, Default)]
pub struct Traffic {
    filled: AtomicU64,
    discarded: AtomicU64,
    /// With what the worker was asked to discard.
    discarding: AtomicU64,
}

/// The same at some time.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    filled: u64,
    discarding: u64,
}

impl Traffic {
    /// Takes note of so many bytes that were filled.
    pub(crate) fn fill(&self, bytes: u64) {
        self.filled.fetch_add(bytes, Relaxed);
    }

    /// Takes note that the worker is about to be asked to discard so many bytes. The caller has locked the state, here and in
    /// [`end_discard`](Self::end_discard).
    pub(crate) fn begin_discard(&self, bytes: u64) {
        self.discarding.store(self.discarded.load(Relaxed) + bytes, Relaxed);
    }

    /// Takes note that it has discarded so many.
    pub(crate) fn end_discard(&self, bytes: u64) {
        let discarded = self.discarded.load(Relaxed) + bytes;
        self.discarded.store(discarded, Relaxed);
        self.discarding.store(discarded, Relaxed);
    }

    /// Returns by how many bytes more the memory has grown through us than shrunk. By what it has changed besides is the program's doing.
    pub fn brought(&self) -> i64 {
        self.filled.load(Relaxed) as i64 - self.discarded.load(Relaxed) as i64
    }

    /// Returns what [`since`](Self::since) counts from. To be called right before the kernel is asked.
    pub fn moved(&self) -> Moved {
        Moved { filled: self.filled.load(Relaxed), discarding: self.discarding.load(Relaxed) }
    }

    /// Returns by how many bytes the memory has grown through us since `before`.
    pub fn since(&self, before: Moved) -> i64 {
        let discarded = self.discarded.load(Relaxed).saturating_sub(before.discarding);
        self.filled.load(Relaxed) as i64 - before.filled as i64 - discarded as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discard_that_had_begun_is_not_subtracted() {
        let traffic = Traffic::default();
        traffic.fill(100);
        traffic.begin_discard(30);
        let before = traffic.moved();
        traffic.end_discard(20);
        traffic.fill(7);
        assert_eq!(traffic.since(before), 7, "the kernel may have been asked after the discard");
        let between = traffic.moved();
        traffic.begin_discard(30);
        traffic.end_discard(30);
        assert_eq!((traffic.since(between), traffic.since(before)), (-30, 7 - 20));
        assert_eq!(traffic.brought(), 100 + 7 - 20 - 30);
    }
}

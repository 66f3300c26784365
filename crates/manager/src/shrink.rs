//! The shrink worker: writes back the coldest entries, before the pool is so full that stores are refused, and when
//! reclaim finds that the pool has too large a part of the job's memory.
//!
//! A thread of its own, because it decompresses and waits for the disk, which nobody else may.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use uzswap_engine::Zswap;

/// Percent of the cap that the pool is kept below.
const KEEP_PERCENT: u64 = 95;

/// What is freed at once, so that a new wish is soon heard.
const STEP_BYTES: u64 = 1 << 20;

/// The worker and what it is asked.
pub struct ShrinkWorker {
    /// What it shrinks.
    pub engine: Arc<Zswap>,
    cap: u64,
    wish: Mutex<u64>,
    bell: Condvar,
    freed: AtomicU64,
    peak: Mutex<PoolPeak>,
}

/// The pool when it was largest.
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolPeak {
    /// Bytes of memory.
    pub bytes: u64,
    /// Bytes of pages kept in it, for each byte of memory.
    pub ratio: f64,
}

impl ShrinkWorker {
    /// Keeps the pool of `engine` below `cap` bytes.
    pub fn new(engine: Arc<Zswap>, cap: u64) -> ShrinkWorker {
        let (wish, bell, freed, peak) = Default::default();
        ShrinkWorker { engine, cap, wish, bell, freed, peak }
    }

    /// Asks for at least `bytes` of the pool's memory. Asked again before it is done, the larger wish counts.
    pub fn ask(&self, bytes: u64) {
        let mut wish = self.wish.lock();
        *wish = bytes.max(*wish);
        self.bell.notify_one();
    }

    /// Bytes of the pool's memory given back since the start.
    pub fn freed(&self) -> u64 {
        self.freed.load(Relaxed)
    }

    /// The pool when it was largest.
    pub fn peak(&self) -> PoolPeak {
        *self.peak.lock()
    }

    /// Works until told to stop.
    pub fn run(&self, stop: &AtomicBool) {
        while !stop.load(Relaxed) {
            let size = self.engine.pool_bytes();
            self.observe(size);
            let needed = self.engine.shrink_needed().unwrap_or(0);
            let surplus = needed.max(size.saturating_sub(self.cap / 100 * KEEP_PERCENT)).max(*self.wish.lock());
            let freed = if surplus > 0 { self.engine.shrink(surplus.min(STEP_BYTES)) } else { 0 };
            self.freed.fetch_add(freed, Relaxed);
            let mut wish = self.wish.lock();
            if freed > 0 {
                *wish = wish.saturating_sub(freed);
            } else {
                // Nothing can be written back just now: whoever wished will wish again.
                *wish = 0;
                // A pool that is far from its cap takes a while to come near it.
                let pause = Duration::from_millis(if size < self.cap / 2 { 20 } else { 2 });
                self.bell.wait_for(&mut wish, pause);
            }
        }
    }

    fn observe(&self, size: u64) {
        let mut peak = self.peak.lock();
        if size > peak.bytes {
            *peak = PoolPeak { bytes: size, ratio: self.engine.counters().root.zswapped as f64 / size as f64 };
        }
    }
}

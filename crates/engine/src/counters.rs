//! What is counted, under the kernel's names.

use crate::sync::{AtomicU64, Ordering};
use serde::Serialize;

/// A snapshot of everything that is counted. Events are counted from the start on; gauges say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Stores that found the pool at its cap, or still above the accept threshold after having been at it.
    pub pool_limit_hit: u64,
    /// Entries whose writeback failed: they are in the pool as before.
    pub reject_reclaim_fail: u64,
    /// Stores for which the page source had no memory.
    pub reject_alloc_fail: u64,
    /// Stores for which there was no memory for metadata, or no slot.
    pub reject_kmemcache_fail: u64,
    /// Stores whose codec failed.
    pub reject_compress_fail: u64,
    /// Stores refused because the page does not compress; kept as it is instead where its group may write back.
    pub reject_compress_poor: u64,
    /// Loads and writebacks whose data was damaged.
    pub decompress_fail: u64,
    /// Pages written back from the pool: `zswpwb` under its other name.
    pub written_back_pages: u64,
    /// Gauge: bytes of all pools, in whole pages.
    pub pool_total_size: u64,
    /// Gauge: pages stored, same-filled ones included.
    pub stored_pages: u64,
    /// Gauge: pages kept uncompressed in the pool.
    pub stored_incompressible_pages: u64,
    /// Gauge: pages that are a fill value alone, zeros included.
    pub same_filled_pages: u64,
    /// What the root group is charged for, and so everything.
    #[serde(flatten)]
    pub root: GroupCounters,
    /// Gauge: bytes in use on disk, those being written included.
    pub swap_current: u64,
    /// Gauge: pages on disk.
    pub swapped_pages: u64,
}

/// What is counted for a group and everything below it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GroupCounters {
    /// Gauge: compressed bytes in the pool.
    pub zswap: u64,
    /// Gauge: bytes that the stored pages were before compression.
    pub zswapped: u64,
    /// Gauge: bytes of pages kept uncompressed in the pool.
    pub zswap_incomp: u64,
    /// Gauge: bytes that the pages on disk were before compression. `swapped_pages` tells as much.
    #[serde(skip)]
    pub swapped: u64,
    /// Pages loaded from the pool, or from a fill value other than zero.
    pub zswpin: u64,
    /// Pages stored in the pool, or as a fill value other than zero.
    pub zswpout: u64,
    /// Pages written back from the pool.
    pub zswpwb: u64,
    /// Pages read from the swap file.
    pub pswpin: u64,
    /// Pages written to the swap file.
    pub pswpout: u64,
    /// Pages of zeros loaded.
    pub swpin_zero: u64,
    /// Pages of zeros swapped out.
    pub swpout_zero: u64,
    /// Stores refused because this group was at its `zswap_max`. Charged to this group alone.
    pub zswap_max_hit: u64,
    /// Swap-outs refused because this group, or one below it, was at its `swap_max`.
    #[serde(skip)]
    pub swap_max: u64,
    /// Swap-outs refused for that, or for want of space anywhere.
    #[serde(skip)]
    pub swap_fail: u64,
}

impl GroupCounters {
    /// Bytes of the pages that are swapped out, wherever they are: `memory.swap.current`.
    pub fn swap(&self) -> u64 {
        self.zswapped + self.swapped
    }
}

impl std::iter::Sum for GroupCounters {
    fn sum<I: Iterator<Item = GroupCounters>>(counters: I) -> GroupCounters {
        counters.fold(GroupCounters::default(), |a, b| GroupCounters {
            zswap: a.zswap + b.zswap,
            zswapped: a.zswapped + b.zswapped,
            zswap_incomp: a.zswap_incomp + b.zswap_incomp,
            swapped: a.swapped + b.swapped,
            zswpin: a.zswpin + b.zswpin,
            zswpout: a.zswpout + b.zswpout,
            zswpwb: a.zswpwb + b.zswpwb,
            pswpin: a.pswpin + b.pswpin,
            pswpout: a.pswpout + b.pswpout,
            swpin_zero: a.swpin_zero + b.swpin_zero,
            swpout_zero: a.swpout_zero + b.swpout_zero,
            zswap_max_hit: a.zswap_max_hit + b.zswap_max_hit,
            swap_max: a.swap_max + b.swap_max,
            swap_fail: a.swap_fail + b.swap_fail,
        })
    }
}

/// One event, counted by many threads.
#[derive(Default)]
pub(crate) struct Event(AtomicU64);

impl Event {
    pub fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The events of [`Counters`] that no group is charged for; the others are the root group's.
#[derive(Default)]
pub(crate) struct Events {
    pub pool_limit_hit: Event,
    pub reject_reclaim_fail: Event,
    pub reject_alloc_fail: Event,
    pub reject_kmemcache_fail: Event,
    pub reject_compress_fail: Event,
    pub reject_compress_poor: Event,
    pub decompress_fail: Event,
}

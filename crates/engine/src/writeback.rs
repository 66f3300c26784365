//! From the pool to the swap file: the coldest entries, up to a cluster of them in one sequential write.
//!
//! 1. isolate: entries are taken off the LRU and become Writing, each under a fresh nonce; neighbouring blocks are taken.
//! 2. fill: each entry is decompressed and sealed, into its place in the cluster. Pages are written as they were, not
//!    compressed: a block is a page then, so a load reads one block and a freed block fits any other page.
//! 3. write: the cluster goes to the file, with no lock held but the cluster's own.
//! 4. record: an entry that is still Writing under its nonce, and that nobody has loaded, is now on Disk and its object is
//!    freed. The others stay as they have become, and their blocks are freed.
//!
//! In steps 2 and 3 an entry is still in the pool: a load reads it there, an invalidation frees it. If
//! the write fails, the entries go back to the cold end in their old order, and the next attempt is half as large.

use crate::compress::with_scratch;
use crate::seal::{Nonce, Tag};
use crate::slots::{Location, Sealed, Slot};
use crate::swapfile::{self, CLUSTER, Run};
use crate::zswap::{Swap, Zswap};
use crate::{PAGE_SIZE, Page};

/// Failed writes after which a shrink gives up.
const MAX_FAILURES: u32 = 16;
/// Fewer pages than this are not worth a write of their own.
const MIN_WRITE: u64 = 16;
/// Entries that are recorded without letting others at the lock.
const BATCH: usize = 32;

/// What is being written. There is one, kept from one shrink to the next.
#[derive(Default)]
pub(crate) struct Cluster {
    victims: Vec<Victim>,
    /// The victims' pages, sealed, in the same order.
    pages: Vec<Page>,
}

struct Victim {
    slot: Slot,
    nonce: Nonce,
    tag: Tag,
}

/// How much work is left to one shrink.
struct Budget {
    /// Bytes still to be freed.
    bytes: u64,
    /// Entries still to be looked at: enough for a second chance of all that were there, so that a shrink ends.
    scans: u64,
    /// Most pages to write at once.
    pages: usize,
}

impl Zswap {
    /// Writes back the coldest entries until `bytes` of the pool's memory were freed or no more can be; returns the
    /// bytes freed, whole zspages, so perhaps more than asked for. Without a swap file that is 0. Waits for another
    /// `shrink` to end; loads and stores do not wait for this one.
    pub fn shrink(&self, bytes: u64) -> u64 {
        let Some(swap) = &self.swap else { return 0 };
        let cluster = &mut *self.cluster.lock();
        let mut freed = 0;
        let mut failures = 0;
        let mut budget = Budget { bytes, scans: 2 * self.state.lock().lru.len() as u64, pages: CLUSTER };
        while freed < bytes && failures < MAX_FAILURES {
            budget.bytes = bytes - freed;
            let Some(run) = self.isolate(swap, cluster, &mut budget) else { break };
            self.fill(swap, cluster, run);
            let pages = cluster.victims.len();
            let write = swap.file.write_at(swapfile::offset(run.start), cluster.pages[..pages].as_flattened());
            freed += match write {
                Ok(()) => self.record(cluster, run),
                Err(_) => {
                    failures += 1;
                    budget.pages = (pages / 2).max(1);
                    budget.scans += pages as u64;
                    self.put_back(cluster, run);
                    0
                }
            };
            // What was written was scattered over the zspages: only moving the rest together frees whole ones.
            if freed < bytes {
                freed += self.compact();
            }
        }
        freed
    }

    /// Step 1: takes victims, and blocks for them; there may be fewer victims than blocks. None if there is nothing
    /// to write, or no space to write it to.
    fn isolate(&self, swap: &Swap, cluster: &mut Cluster, budget: &mut Budget) -> Option<Run> {
        let state = &mut *self.state.lock();
        let entries = (state.lru.len() as u64).min(budget.scans);
        if entries == 0 {
            return None;
        }
        let mean = (state.pool.bytes() / state.pool.objects() as u64).max(1);
        let want = budget.bytes.div_ceil(mean).max(MIN_WRITE).min(entries).min(budget.pages as u64);
        let run = state.space.allocate(want as usize)?;
        cluster.victims.clear();
        while cluster.victims.len() < run.len as usize && budget.scans > 0 {
            budget.scans -= 1;
            match state.lru.scan(&mut state.slots) {
                None => break,
                Some(None) => {}
                Some(Some((slot, object))) => {
                    let nonce = swap.sealer.nonce();
                    state.slots.get_mut(slot).location = Location::Writing { object, nonce, referenced: false };
                    cluster.victims.push(Victim { slot, nonce, tag: [0; 16] });
                }
            }
        }
        // The lock is dropped here, and from now on anybody may load, share or invalidate a victim. That is safe:
        // - It is off the LRU, and only one shrink runs at a time: nobody else writes it.
        // - Its object is freed by whoever drops its last reference, at once. We touch it only under the lock, and only
        //   after having found the slot still Writing under our nonce. If the slot has been given to another page since,
        //   that page has another location or, taken by a later isolate, another nonce.
        // - So what `record` finds still ours was neither freed nor changed, and what we wrote is its content.
        Some(run)
    }

    /// Step 2: fills the cluster with the victims' pages, sealed; drops the victims that are gone.
    fn fill(&self, swap: &Swap, cluster: &mut Cluster, run: Run) {
        let Cluster { victims, pages } = cluster;
        pages.resize(CLUSTER, [0; PAGE_SIZE]);
        let mut filled = 0;
        victims.retain_mut(|victim| {
            let page = &mut pages[filled];
            let present = self.copy_victim(victim, page);
            if present {
                victim.tag = swap.sealer.seal(victim.nonce, run.start + filled as u32, page);
                filled += 1;
            }
            present
        });
    }

    /// Decompresses a victim's page; false if it is gone, or damaged: then nothing is left to do about it but to keep it
    /// away from the cold end.
    fn copy_victim(&self, &Victim { slot, nonce, .. }: &Victim, page: &mut Page) -> bool {
        with_scratch(|scratch| {
            let (object, length) = {
                let state = self.state.lock();
                let Some((object, _)) = state.slots.writing(slot, nonce) else { return false };
                let data = state.pool.get(object.handle);
                scratch.buffer[..data.len()].copy_from_slice(data);
                (object, data.len())
            };
            let intact = scratch.decompress(object.compressor, length, page).is_ok();
            if !intact {
                self.events.decompress_fail.count();
                self.events.reject_reclaim_fail.count();
                let state = &mut *self.state.lock();
                if let Some((object, _)) = state.slots.writing(slot, nonce) {
                    state.lru.add(&mut state.slots, slot, object);
                }
            }
            intact
        })
    }

    /// Step 4, after the write: returns the bytes of pool memory that went back to the system.
    fn record(&self, cluster: &mut Cluster, run: Run) -> u64 {
        let mut pages = 0;
        let mut block = run.start;
        let mut unused = Vec::new();
        for batch in cluster.victims.chunks(BATCH) {
            let state = &mut *self.state.lock();
            for &Victim { slot, nonce, tag } in batch {
                match state.slots.writing(slot, nonce) {
                    Some((object, false)) => {
                        pages += state.free_object(object);
                        state.slots.get_mut(slot).location = Location::Disk(Sealed { block, nonce, tag });
                        self.events.zswpwb.count();
                        self.events.pswpout.count();
                    }
                    Some((object, true)) => {
                        state.lru.add(&mut state.slots, slot, object);
                        unused.push(block);
                    }
                    None => unused.push(block),
                }
                block += 1;
            }
        }
        self.free_blocks(unused.into_iter().chain(block..run.start + run.len));
        pages * PAGE_SIZE as u64
    }

    /// Step 4, after a failed write: all entries go back.
    fn put_back(&self, cluster: &mut Cluster, run: Run) {
        for batch in cluster.victims.rchunks(BATCH) {
            let state = &mut *self.state.lock();
            for &Victim { slot, nonce, .. } in batch.iter().rev() {
                match state.slots.writing(slot, nonce) {
                    Some((object, false)) => state.lru.put_back(&mut state.slots, slot, object),
                    Some((object, true)) => state.lru.add(&mut state.slots, slot, object),
                    None => continue,
                }
                self.events.reject_reclaim_fail.count();
            }
        }
        self.free_blocks(run.start..run.start + run.len);
    }
}

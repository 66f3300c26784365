//! From the pools to the swap file: the coldest entries, up to a cluster of them in one sequential write.
//!
//! 1. isolate: the lists in scope are visited in turn, and a few of the coldest entries of each are taken off and become
//!    Writing, each under a fresh nonce; neighbouring blocks are taken.
//! 2. fill: each entry is decompressed and sealed, into its place in the cluster. Pages are written as they were, not
//!    compressed: a block is a page then, so a load reads one block and a freed block fits any other page.
//! 3. write: the cluster goes to the file, with no lock held but the cluster's own.
//! 4. record: an entry that is still Writing under its nonce, and that nobody has loaded, is now on Disk and its object is
//!    freed. The others stay as they have become, and their blocks are freed.
//!
//! In steps 2 and 3 an entry is still in the pool: a load reads it there, an invalidation frees it. If
//! the write fails, the entries go back to the cold end in their old order, and the next attempt is half as large.
//!
//! The shrink worker stops exactly at the accept threshold: what is written in excess of that goes back as well. It
//! remembers the list where it stopped, for the next run.

use crate::compress::with_scratch;
use crate::groups::{Cursor, Scope};
use crate::lru::{Cause, Met};
use crate::seal::{Nonce, Tag};
use crate::slots::{Location, Sealed, Slot};
use crate::state::State;
use crate::swapfile::{self, CLUSTER, Run};
use crate::zswap::{Swap, Zswap};
use crate::{PAGE_SIZE, Page};

/// Failed writes after which a run gives up.
const MAX_FAILURES: u32 = 16;
/// Fewer pages than this are not worth a write of their own.
const MIN_WRITE: u64 = 16;
/// Most entries that one list gives before it is the next one's turn.
const VISIT: usize = 8;
/// Entries that are recorded without letting others at the lock.
const BATCH: usize = 32;

/// What is being written. There is one, kept from one write to the next.
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

/// When a run is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// So many bytes of pool memory have gone back to the system.
    Freed(u64),
    /// Stores are accepted again.
    Accepting,
    /// One cluster at most, by which a group comes below its limit.
    BelowLimit(u16),
    /// So many entries were looked at.
    Scanned(u64),
}

/// One run.
struct Shrink {
    scope: Scope,
    goal: Goal,
    cause: Cause,
    cursor: Cursor,
    /// Entries still to be looked at: enough for a second chance of all that were there, so that a run ends.
    scans: u64,
    /// Most pages to write at once.
    pages: usize,
    /// The scan has met an entry in flight.
    stopped: bool,
    /// Bytes of pool memory that have gone back to the system.
    freed: u64,
    written: u64,
}

impl Shrink {
    /// Bytes of pool memory, or of objects, still to be freed.
    fn missing(&self, state: &State) -> u64 {
        match self.goal {
            Goal::Freed(bytes) => bytes.saturating_sub(self.freed),
            Goal::Accepting if self.written >= state.config.policy.pages_per_run() => 0,
            Goal::Accepting => state.shrink_needed(),
            Goal::BelowLimit(_) if self.written > 0 => 0,
            Goal::BelowLimit(group) => state.groups.above_limit(group),
            Goal::Scanned(_) => self.scans.saturating_mul(PAGE_SIZE as u64),
        }
    }
}

impl Zswap {
    /// Writes back the coldest entries of all groups in turn until `bytes` of the pools' memory were freed or no more can
    /// be; returns the bytes freed, whole zspages, so perhaps more than asked for. Without a swap file that is 0. Loads and
    /// stores do not wait for this.
    pub fn shrink(&self, bytes: u64) -> u64 {
        self.run(Scope::All, Goal::Freed(bytes), Cause::Limit).freed
    }

    /// The shrink worker's run: compacts, then writes back, until the pools are at or under the accept threshold, and stops
    /// exactly there. Does nothing unless stores are refused. Returns the bytes of pool memory freed.
    pub fn shrink_until_accepting(&self) -> u64 {
        self.state.lock().mark_full();
        let compacted = self.compact_while(|state| state.shrink_needed() > 0);
        compacted + self.run(Scope::All, Goal::Accepting, Cause::Limit).freed
    }

    /// Writes back entries of a group at its limit, and of those below it: up to a cluster.
    pub(crate) fn shrink_group(&self, group: u16) {
        self.run(Scope::Below(group), Goal::BelowLimit(group), Cause::Limit);
    }

    /// Looks at `entries` entries of one list and writes back those without a second chance; returns how many.
    pub(crate) fn scan_list(&self, group: u16, node: u8, entries: u64) -> u64 {
        self.run(Scope::One(group, node), Goal::Scanned(entries), Cause::Pressure).written
    }

    fn run(&self, scope: Scope, goal: Goal, cause: Cause) -> Shrink {
        let mut shrink = {
            let state = self.state.lock();
            let entries = state.groups.entries(scope);
            let scans = if let Goal::Scanned(entries) = goal { entries } else { 2 * entries };
            let pages = state.config.policy.pages_per_run().min(CLUSTER as u64) as usize;
            let cursor = Cursor::default();
            Shrink { scope, goal, cause, cursor, scans, pages, stopped: false, freed: 0, written: 0 }
        };
        let mut failures = 0;
        while let Some(swap) = self.swap.as_ref().filter(|_| failures < MAX_FAILURES && !shrink.stopped) {
            // Taken anew for each cluster, so that nobody waits for a whole run.
            let cluster = &mut *self.cluster.lock();
            let Some(run) = self.isolate(swap, cluster, &mut shrink) else { break };
            self.fill(swap, cluster, run);
            let pages = cluster.victims.len();
            let write = swap.file.write_at(swapfile::offset(run.start), cluster.pages[..pages].as_flattened());
            match write {
                Ok(()) => self.record(cluster, run, &mut shrink),
                Err(_) => {
                    failures += 1;
                    shrink.pages = (pages / 2).max(1);
                    if !matches!(goal, Goal::Scanned(_)) {
                        shrink.scans += pages as u64;
                    }
                    self.put_back(&cluster.victims, true);
                    self.free_blocks(run.start..run.start + run.len);
                }
            }
            // What was written was scattered over the zspages: only moving the rest together frees whole ones.
            if matches!(goal, Goal::Freed(bytes) if shrink.freed < bytes) {
                shrink.freed += self.compact();
            }
        }
        shrink
    }

    /// Step 1: takes victims, and blocks for them; there may be fewer victims than blocks. None if there is nothing
    /// to write, or no space to write it to.
    fn isolate(&self, swap: &Swap, cluster: &mut Cluster, shrink: &mut Shrink) -> Option<Run> {
        let state = &mut *self.state.lock();
        let entries = state.groups.entries(shrink.scope).min(shrink.scans);
        let missing = shrink.missing(state);
        if entries == 0 || missing == 0 {
            return None;
        }
        let mean = (state.pools.bytes() / state.pools.objects()).max(1);
        let want = missing.div_ceil(mean).max(MIN_WRITE).min(entries).min(shrink.pages as u64);
        let run = state.space.allocate(want as usize)?;
        cluster.victims.clear();
        let mut cursor = if shrink.scope == Scope::All { state.groups.cursor } else { shrink.cursor };
        while cluster.victims.len() < run.len as usize && shrink.scans > 0 && !shrink.stopped {
            let Some(list) = state.groups.next_list(shrink.scope, &mut cursor) else { break };
            let room = (run.len as usize - cluster.victims.len()).min(VISIT);
            visit(swap, state, list, room, &mut cluster.victims, shrink);
        }
        if shrink.scope == Scope::All {
            state.groups.cursor = cursor;
        } else {
            shrink.cursor = cursor;
        }
        // The lock is dropped here, and from now on anybody may load, share or invalidate a victim. That is safe:
        // - It is on no list, and only one cluster is written at a time: nobody else writes it.
        // - Its object is freed by whoever drops its last reference, at once. We touch it only under the lock, and only
        //   after having found the slot still Writing under our nonce. If the slot has been given to another page since,
        //   that page has another location or, taken by a later isolate, another nonce.
        // - So what `record` finds still ours was neither freed nor changed, and what we wrote is its content.
        // - Its group may be removed meanwhile. The entry still names it, so it goes back to the list of the heir.
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
                let data = state.pools.get(object);
                scratch.buffer[..data.len()].copy_from_slice(data);
                (object, data.len())
            };
            let intact = scratch.decompress(object.pool.compressor(), length, page).is_ok();
            if !intact {
                self.events.decompress_fail.count();
                self.events.reject_reclaim_fail.count();
                let state = &mut *self.state.lock();
                if let Some((object, _)) = state.slots.writing(slot, nonce) {
                    state.list_hot(slot, object);
                }
            }
            intact
        })
    }

    /// Step 4, after the write.
    fn record(&self, cluster: &mut Cluster, run: Run, shrink: &mut Shrink) {
        let exact = shrink.goal == Goal::Accepting;
        let mut unused = Vec::new();
        let mut recorded = 0;
        'batches: for batch in cluster.victims.chunks(BATCH) {
            let state = &mut *self.state.lock();
            for &Victim { slot, nonce, tag } in batch {
                if exact && shrink.missing(state) == 0 {
                    break 'batches;
                }
                let block = run.start + recorded as u32;
                recorded += 1;
                match state.slots.writing(slot, nonce) {
                    Some((object, false)) => {
                        let group = state.group_of(slot);
                        let length = state.pools.length(object);
                        let mut pages = state.free_object(group, object);
                        if exact && shrink.missing(state) > 0 {
                            pages += state.pools.settle(object.pool, length);
                        }
                        shrink.freed += pages * PAGE_SIZE as u64;
                        shrink.written += 1;
                        state.slots.get_mut(slot).location = Location::Disk(Sealed { block, nonce, tag });
                        state.groups.charge(group, |counters| {
                            counters.zswpwb += 1;
                            counters.pswpout += 1;
                        });
                    }
                    Some((object, true)) => {
                        state.list_hot(slot, object);
                        unused.push(block);
                    }
                    None => unused.push(block),
                }
            }
        }
        self.put_back(&cluster.victims[recorded..], false);
        self.free_blocks(unused.into_iter().chain(run.start + recorded as u32..run.start + run.len));
    }

    /// Step 4 for entries that stay: they go back where they were, and are counted if their write has failed.
    fn put_back(&self, victims: &[Victim], failed: bool) {
        for batch in victims.rchunks(BATCH) {
            let state = &mut *self.state.lock();
            for &Victim { slot, nonce, .. } in batch.iter().rev() {
                match state.slots.writing(slot, nonce) {
                    Some((object, false)) => state.list_cold(slot, object),
                    Some((object, true)) => state.list_hot(slot, object),
                    None => continue,
                }
                if failed {
                    self.events.reject_reclaim_fail.count();
                }
            }
        }
    }
}

/// Takes up to `room` victims from the cold end of a list.
fn visit(
    swap: &Swap,
    state: &mut State,
    (group, node): (u16, u8),
    room: usize,
    victims: &mut Vec<Victim>,
    shrink: &mut Shrink,
) {
    for _ in 0..room {
        if shrink.scans == 0 {
            return;
        }
        shrink.scans -= 1;
        if state.config.policy.mixes_groups() {
            let coldest = state.groups.lru_mut(group, node).coldest();
            let owner = coldest.map(|slot| state.group_of(slot));
            if owner.is_some_and(|owner| !state.groups.may_write_back(owner)) {
                state.groups.lru_mut(group, node).rotate(&mut state.slots);
                continue;
            }
        }
        match state.groups.lru_mut(group, node).scan(&mut state.slots, shrink.cause) {
            Met::Nothing => return,
            Met::SecondChance => {}
            Met::InFlight => {
                shrink.stopped = true;
                return;
            }
            Met::Victim(slot, object) => {
                let nonce = swap.sealer.nonce();
                state.slots.get_mut(slot).location = Location::Writing { object, nonce, loaded: false };
                victims.push(Victim { slot, nonce, tag: [0; 16] });
            }
        }
    }
}

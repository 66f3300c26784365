//! From the pools to the swap file: the coldest entries, up to a cluster of them in one sequential write.
//!
//! 1. isolate: a run of disk space is taken. The lists in scope are visited in turn, and a few of the coldest entries of each
//!    are taken off and become Writing, each under a fresh nonce, until the run is full.
//! 2. fill: each entry is copied out of the pool and sealed, one after another (see `disk`).
//! 3. write: all of them go to the file at once, with no lock held but the cluster's own.
//! 4. record: an entry that is still Writing under its nonce, and that nobody has loaded, is now on Disk and its object is
//!    freed. The others stay as they have become, and their space is freed, and what is left of the run.
//!
//! In steps 2 and 3 an entry is still in the pool: a load reads it there, an invalidation frees it. If
//! the write fails, the entries go back to the cold end in their old order, and the next attempt is half as large.
//!
//! The shrink worker stops exactly at the accept threshold: what is written in excess of that goes back as well. It
//! remembers the list where it stopped, for the next run.

use crate::PAGE_SIZE;
use crate::compress::with_scratch;
use crate::disk::{Batch, Swap, Writeback};
use crate::groups::{Cursor, Group, Scope};
use crate::lru::{Cause, Met};
use crate::seal::Nonce;
use crate::shards::All;
use crate::slots::{Object, Slot};
use crate::state::State;
use crate::sums;
use crate::swapfile::{CLUSTER, PAGE, Run, units};
use crate::zswap::Zswap;

/// Failed writes after which a run gives up.
const MAX_FAILURES: u32 = 16;
/// Fewer entries than this are not worth a write of their own.
const MIN_WRITE: u64 = 16;
/// Most entries to write at once: as many whole pages as a write takes.
const MAX_WRITE: u64 = (CLUSTER / PAGE) as u64;
/// Most entries that one list gives before it is the next one's turn.
const VISIT: usize = 8;

/// What is being written. There is one, kept from one write to the next.
#[derive(Default)]
pub(crate) struct Cluster {
    victims: Vec<Victim>,
    /// Where the shrink worker stopped.
    cursor: Cursor,
    /// The victims as they go to disk, in the same order.
    batch: Batch,
}

#[derive(Clone, Copy)]
struct Victim {
    slot: Slot,
    nonce: Nonce,
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
    /// Most entries to write at once.
    most: u64,
    /// The scan has met an entry in flight.
    stopped: bool,
    /// Bytes of pool memory that have gone back to the system.
    freed: u64,
    written: u64,
}

impl Shrink {
    /// Bytes of pool memory, or of objects, still to be freed.
    fn missing(&self, all: &mut All<'_>) -> u64 {
        match self.goal {
            Goal::Freed(bytes) => bytes.saturating_sub(self.freed),
            Goal::Accepting => self.missing_to_accept(all.one()),
            Goal::BelowLimit(_) if self.written > 0 => 0,
            Goal::BelowLimit(group) => all.above_limit(group),
            Goal::Scanned(_) => self.scans.saturating_mul(PAGE_SIZE as u64),
        }
    }

    /// Bytes of pool memory still to be freed until stores are accepted; any shard knows.
    fn missing_to_accept(&self, state: &State) -> u64 {
        if self.written >= state.config.policy.pages_per_run() { 0 } else { state.shrink_needed() }
    }
}

impl Zswap {
    /// Writes back the coldest entries of all groups in turn until `bytes` of the pools' memory were freed or no more can
    /// be; returns the bytes freed, whole pages, so perhaps more than asked for. Without a swap file that is 0. Loads and
    /// stores do not wait for this.
    pub fn shrink(&self, bytes: u64) -> u64 {
        self.run(Scope::All, Goal::Freed(bytes), Cause::Limit).freed
    }

    /// The shrink worker's run: compacts, then writes back, until the pools are at or under the accept threshold, and stops
    /// exactly there. Does nothing unless stores are refused. Returns the bytes of pool memory freed.
    pub fn shrink_until_accepting(&self) -> u64 {
        self.shards.any().mark_full();
        let compacted = self.compact_while(|state| state.shrink_needed() > 0);
        compacted + self.run(Scope::All, Goal::Accepting, Cause::Limit).freed
    }

    /// As [`shrink`](Self::shrink), of a group and all below it only; of a group that was removed, nothing.
    pub fn shrink_below(&self, group: Group, bytes: u64) -> u64 {
        let number = self.shards.any().groups.find(group);
        number.map_or(0, |number| self.run(Scope::Below(number), Goal::Freed(bytes), Cause::Limit).freed)
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
            let all = &mut self.shards.all();
            let twice = 2 * all.entries(scope);
            let scans = if let Goal::Scanned(entries) = goal { entries.min(twice) } else { twice };
            let most = all.one().config.policy.pages_per_run().min(MAX_WRITE);
            let cursor = Cursor::default();
            Shrink { scope, goal, cause, cursor, scans, most, stopped: false, freed: 0, written: 0 }
        };
        let mut failures = 0;
        while let Some(swap) = self.swap.as_ref().filter(|_| failures < MAX_FAILURES && !shrink.stopped) {
            // Taken anew for each cluster, so that nobody waits for a whole run.
            let cluster = &mut *self.cluster.lock();
            let Some(run) = self.isolate(swap, cluster, &mut shrink) else { break };
            if cluster.victims.is_empty() {
                self.free_space([run]);
                break;
            }
            self.fill(swap, cluster, run);
            match cluster.batch.write(&*swap.file) {
                Ok(()) => self.record(cluster, &mut shrink),
                Err(_) => {
                    failures += 1;
                    let entries = cluster.victims.len() as u64;
                    shrink.most = (entries / 2).max(1);
                    if !matches!(goal, Goal::Scanned(_)) {
                        shrink.scans += entries;
                    }
                    self.put_back(&cluster.victims, true);
                    self.free_space([run]);
                }
            }
            // What was written was scattered over the zspages: only moving the rest together frees whole ones.
            if matches!(goal, Goal::Freed(bytes) if shrink.freed < bytes) {
                shrink.freed += self.compact();
            }
        }
        shrink
    }

    /// Step 1: takes space, and victims for it. None if there is nothing to write, or no space; no victims if all
    /// that were met have a second chance, or the coldest is longer than any space there is.
    fn isolate(&self, swap: &Swap, cluster: &mut Cluster, shrink: &mut Shrink) -> Option<Run> {
        let all = &mut self.shards.all();
        let entries = all.entries(shrink.scope).min(shrink.scans);
        let missing = shrink.missing(all);
        if entries == 0 || missing == 0 {
            return None;
        }
        let count = |state: &State| (state.pools.bytes(), state.pools.objects());
        let (bytes, objects) = all.iter().map(count).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let mean = (bytes / objects).max(1);
        let want = missing.div_ceil(mean).max(MIN_WRITE).min(entries).min(shrink.most);
        // Room for the longest entries; what they leave is given back.
        let run = self.space.lock().allocate(want as u32 * PAGE)?;
        let mut room = Room { entries: want as usize, units: run.len };
        cluster.victims.clear();
        let mut cursor = if shrink.scope == Scope::All { cluster.cursor } else { shrink.cursor };
        while room.entries > 0 && shrink.scans > 0 && !shrink.stopped {
            let Some(list) = all.next_list(shrink.scope, &mut cursor) else { break };
            visit(swap, all, list, &mut room, &mut cluster.victims, shrink);
        }
        if shrink.scope == Scope::All {
            cluster.cursor = cursor;
        } else {
            shrink.cursor = cursor;
        }
        // The locks are dropped here, and from now on anybody may load, share or invalidate a victim. That is safe:
        // - It is on no list, and only one cluster is written at a time: nobody else writes it.
        // - Its object is freed by whoever drops its last reference, at once. We touch it only under its shard's lock, and only
        //   after having found the slot still Writing under our nonce. If the slot has been given to another page since,
        //   that page has another location or, taken by a later isolate, another nonce.
        // - So what `record` finds still ours was neither freed nor changed, and what we wrote is its content.
        // - Its group may be removed meanwhile. The entry still names it, so it goes back to the list of the heir.
        Some(run)
    }

    /// Step 2: packs the victims; drops those that are gone.
    fn fill(&self, swap: &Swap, cluster: &mut Cluster, run: Run) {
        let Cluster { victims, batch, .. } = cluster;
        batch.begin(run);
        victims.retain(|victim| self.pack(swap, *victim, batch));
    }

    /// Packs one victim; false if it is gone, or damaged where its page is wanted.
    fn pack(&self, swap: &Swap, Victim { slot, nonce }: Victim, batch: &mut Batch) -> bool {
        with_scratch(|scratch| {
            let (object, length, sum) = {
                let state = self.shards.of(slot);
                let Some((object, _)) = state.slots.writing(slot, nonce) else { return false };
                let data = state.pools.get(object);
                scratch.buffer[..data.len()].copy_from_slice(data);
                state.pools.check_owner(object, slot);
                (object, data.len(), state.slots.sum(slot))
            };
            let compressor = object.pool.compressor();
            let mut page;
            let data = match (swap.form, sum) {
                (Writeback::Compressed, None) => &scratch.buffer[..length],
                (form, sum) => {
                    page = [0; PAGE_SIZE];
                    let decompressed = scratch.decompress(compressor, 0..length, &mut page);
                    if decompressed.is_err() || sum.is_some_and(|sum| sum != sums::of(&page)) {
                        self.pass_over(slot, nonce);
                        return false;
                    }
                    if form == Writeback::Pages { page.as_slice() } else { &scratch.buffer[..length] }
                }
            };
            assert!(batch.push(&swap.sealer, nonce, compressor, data), "there was room when it was taken");
            true
        })
    }

    /// Nothing is left to do about a damaged victim but to keep it away from the cold end.
    fn pass_over(&self, slot: Slot, nonce: Nonce) {
        self.events.decompress_fail.count();
        self.events.reject_reclaim_fail.count();
        let state = &mut *self.shards.of(slot);
        if let Some((object, _)) = state.slots.writing(slot, nonce) {
            state.list_hot(slot, object);
        }
    }

    /// Step 4, after the write.
    fn record(&self, Cluster { victims, batch, .. }: &Cluster, shrink: &mut Shrink) {
        let exact = shrink.goal == Goal::Accepting;
        let mut unused = Vec::new();
        let mut recorded = 0;
        for (&Victim { slot, nonce }, &sealed) in victims.iter().zip(&batch.entries) {
            let state = &mut *self.shards.of(slot);
            if exact && shrink.missing_to_accept(state) == 0 {
                break;
            }
            recorded += 1;
            match state.slots.writing(slot, nonce) {
                Some((object, false)) => {
                    let group = state.group_of(slot);
                    let mut pages = state.free_object(group, object);
                    if exact && shrink.missing_to_accept(state) > 0 {
                        pages += state.pools.settle(&mut state.slots, object);
                    }
                    shrink.freed += pages * PAGE_SIZE as u64;
                    shrink.written += 1;
                    state.slots.set_disk(slot, sealed);
                    state.groups.charge(group, |counters| {
                        counters.swapped += PAGE_SIZE as u64;
                        counters.zswpwb += 1;
                        counters.pswpout += 1;
                    });
                }
                Some((object, true)) => {
                    state.list_hot(slot, object);
                    unused.push(sealed.run());
                }
                None => unused.push(sealed.run()),
            }
        }
        self.put_back(&victims[recorded..], false);
        self.free_space(unused.into_iter().chain([batch.left(recorded)]));
    }

    /// Step 4 for entries that stay: they go back where they were, and are counted if their write has failed.
    fn put_back(&self, victims: &[Victim], failed: bool) {
        for &Victim { slot, nonce } in victims.iter().rev() {
            let state = &mut *self.shards.of(slot);
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

/// What an isolation may still take.
struct Room {
    entries: usize,
    units: u32,
}

/// Takes a few victims from the cold end of a list.
fn visit(
    swap: &Swap,
    all: &mut All<'_>,
    (group, node): (u16, u8),
    room: &mut Room,
    victims: &mut Vec<Victim>,
    shrink: &mut Shrink,
) {
    for _ in 0..room.entries.min(VISIT) {
        if shrink.scans == 0 {
            return;
        }
        shrink.scans -= 1;
        let Some(state) = all.coldest((group, node)) else { return };
        if state.config.policy.mixes_groups() {
            let coldest = state.groups.coldest(&state.slots, group, node);
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
                let units = units_on_disk(swap, object);
                if units > room.units {
                    state.list_cold(slot, object);
                    room.entries = 0;
                    return;
                }
                room.units -= units;
                room.entries -= 1;
                let nonce = swap.sealer.nonce();
                if !state.slots.set_writing(slot, object, nonce) {
                    state.list_cold(slot, object);
                    shrink.stopped = true;
                    return;
                }
                victims.push(Victim { slot, nonce });
            }
        }
    }
}

fn units_on_disk(swap: &Swap, object: Object) -> u32 {
    match swap.form {
        Writeback::Compressed => units(object.length as usize),
        Writeback::Pages => PAGE,
    }
}

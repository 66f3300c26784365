//! The shards: everything in memory, in up to four parts, so that threads seldom wait for each other.
//!
//! 1. A slot names its shard. All that belongs to an entry is there: what is known of it, its object, its place on an LRU,
//!    its charge. What is done to it takes that shard's lock and no other.
//! 2. A thread stores into the shard that it stored into last, and moves on to the next when it finds that locked. So a
//!    thread alone fills one shard, and only one has zspages that are not full; threads that store at once soon have one each.
//! 3. Settings and the tree of groups are the same in every shard: they are changed with all of them locked. What is
//!    counted is the sum over the shards: it is taken with all of them locked.
//! 4. Shared without a lock are the number of pages that all pools hold, whether they have been at their cap, and the time
//!    that tells which entry of two shards is older. All are hints to a store that has not begun: it adds a page at most, so the
//!    cap is exceeded by a page at most for each store under way.
//! 5. A limited group (`zswap_max`, `swap_max`) has a lease in each shard: a part of what it may still store, which stores into
//!    that shard take from without a look at the others. Where a lease has run out all shards are locked, what is left is counted, and
//!    it is shared out anew. So a group stays within its `swap_max` however many threads store at once, and exceeds its `zswap_max` by
//!    a page at most for each store under way; near a limit there is nothing to share, and each store locks all shards.
//! 6. Locks are taken in the order of their numbers.

use crate::PAGE_SIZE;
use crate::counters::GroupCounters;
use crate::groups::{Cursor, Group, GroupError, Groups, Lease, Scope};
use crate::pools::Memory;
use crate::slots::Slot;
use crate::state::State;
use crate::swapfile::Run;
use crate::sync::Ordering::Relaxed;
use crate::sync::{AtomicBool, AtomicU8, AtomicU64, Mutex, MutexGuard};
use crate::zswap::{Config, Refusal};
use std::cell::Cell;
use std::sync::Arc;

/// Most shards ([`Config::shards`]). A power of two, as their number is, so that to find a slot's takes no division.
pub const MAX_SHARDS: usize = 4;

const _: () = assert!(MAX_SHARDS.is_power_of_two());

/// On cache lines of its own: what one thread writes must not slow down another that has to do with a neighbour.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// What the shards share without a lock.
pub(crate) struct Shared {
    /// Pages of each shard's pools. Who writes has the shard's lock, so that no atomic addition is needed: it would wait for
    /// all that was just copied into the pool to reach memory.
    pages: Box<[Apart<AtomicU64>]>,
    /// The cap was hit, and the pools have not been at or under the accept threshold since.
    pub full: AtomicBool,
    /// Passes as entries are put at the hot ends of their lists.
    pub time: AtomicU8,
}

impl Shared {
    pub fn new(shards: usize) -> Shared {
        let pages = std::iter::repeat_with(Apart::default).take(shards).collect();
        Shared { pages, full: AtomicBool::new(false), time: AtomicU8::new(0) }
    }

    /// Pages of all pools.
    pub fn pages(&self) -> u64 {
        self.pages.iter().map(|pages| pages.0.load(Relaxed)).sum()
    }

    /// Tells how many pages a shard's pools have.
    pub fn set_pages(&self, shard: usize, pages: u64) {
        self.pages[shard].0.store(pages, Relaxed);
    }
}

pub(crate) struct Shards {
    each: Box<[Apart<Mutex<State>>]>,
    shared: Arc<Shared>,
}

/// All shards, locked.
pub(crate) struct All<'a>([Option<MutexGuard<'a, State>>; MAX_SHARDS]);

crate::sync::thread_local! {
    /// The shard that this thread stored into last.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

impl Shards {
    pub fn new(config: &Config, memory: Arc<dyn Memory>) -> Shards {
        assert!(config.shards.is_power_of_two() && config.shards <= MAX_SHARDS, "{} shards", config.shards);
        let shared = Arc::new(Shared::new(config.shards));
        let state = |number| State::new(number, config.clone(), memory.clone(), shared.clone());
        let each = (0..config.shards).map(|number| Apart(Mutex::new(state(number)))).collect();
        Shards { each, shared }
    }

    /// Pages of all pools. Takes no lock.
    pub fn pages(&self) -> u64 {
        self.shared.pages()
    }

    /// The shard of a slot.
    pub fn of(&self, slot: Slot) -> MutexGuard<'_, State> {
        self.shard(slot.shard())
    }

    /// A shard that this thread has to itself, if there is one: to store into, or to ask what is the same in all.
    pub fn any(&self) -> MutexGuard<'_, State> {
        let (last, mask) = (LAST.with(Cell::get), self.each.len() - 1);
        for number in (last..=last + mask).map(|number| number & mask) {
            if let Some(state) = self.try_shard(number) {
                LAST.with(|last| last.set(number));
                return state;
            }
        }
        self.shard(last & mask)
    }

    /// A shard by its number.
    pub fn shard(&self, number: usize) -> MutexGuard<'_, State> {
        self.each[number].0.lock()
    }

    /// A shard by its number, if nobody is in it.
    pub fn try_shard(&self, number: usize) -> Option<MutexGuard<'_, State>> {
        self.each[number].0.try_lock()
    }

    pub fn numbers(&self) -> std::ops::Range<usize> {
        0..self.each.len()
    }

    /// Each shard, locked when it is its turn.
    pub fn each(&self) -> impl Iterator<Item = MutexGuard<'_, State>> {
        self.numbers().map(move |number| self.shard(number))
    }

    pub fn all(&self) -> All<'_> {
        All(std::array::from_fn(|number| (number < self.each.len()).then(|| self.shard(number))))
    }
}

impl All<'_> {
    pub fn iter(&self) -> impl Iterator<Item = &State> {
        self.0.iter().filter_map(Option::as_deref)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut State> {
        self.0.iter_mut().filter_map(Option::as_deref_mut)
    }

    /// One of them, to ask what is the same in all.
    pub fn one(&mut self) -> &mut State {
        self.0[0].as_deref_mut().expect("at least one shard")
    }

    fn first(&self) -> &State {
        self.0[0].as_deref().expect("at least one shard")
    }

    fn tree(&self) -> &Groups {
        &self.first().groups
    }

    pub fn create_group(&mut self, parent: Group) -> Result<Group, GroupError> {
        let parent = self.tree().find(parent).ok_or(GroupError::Gone)?;
        let next = self.tree().numbers();
        let number = (0..next).find(|number| self.is_vacant(*number)).unwrap_or(next);
        let number = u16::try_from(number).map_err(|_| GroupError::TooMany)?;
        let created = self.iter_mut().map(|state| state.groups.create(parent, number)).last();
        Ok(created.expect("at least one shard"))
    }

    fn is_vacant(&self, number: usize) -> bool {
        self.iter().all(|state| state.groups.is_vacant(number as u16))
    }

    /// How many groups can be created.
    pub fn free_groups(&self) -> usize {
        let numbers = self.tree().numbers();
        let vacant = (0..numbers).filter(|number| self.is_vacant(*number)).count();
        usize::from(u16::MAX) + 1 - numbers + vacant
    }

    pub fn remove_group(&mut self, group: Group) -> Result<(), GroupError> {
        self.iter_mut().try_for_each(|state| state.groups.remove(&mut state.slots, group))
    }

    /// What is counted for a group.
    pub fn counters(&self, number: u16) -> GroupCounters {
        self.iter().map(|state| *state.groups.counters(number)).sum()
    }

    fn zswap(&self, number: u16) -> u64 {
        self.iter().map(|state| state.groups.counters(number).zswap).sum()
    }

    /// Bytes by which a group is not below its limit.
    pub fn above_limit(&self, number: u16) -> u64 {
        self.tree().zswap_max(number).map_or(0, |max| (self.zswap(number) + 1).saturating_sub(max))
    }

    /// The first group on the path that has reached its limit, and that limit.
    pub fn at_limit(&self, number: u16) -> Option<(u16, u64)> {
        self.tree().path(number).find_map(|number| {
            let max = self.tree().zswap_max(number)?;
            (self.zswap(number) >= max).then_some((number, max))
        })
    }

    /// How many pages a group may still swap out, and the first group on the path that allows the fewest.
    fn swap_room(&self, number: u16) -> (u64, u16) {
        let room = |number: u16| {
            let used: u64 = self.iter().map(|state| state.groups.counters(number).swap()).sum();
            let max = self.tree().swap_max(number)?;
            Some((max.saturating_sub(used) / PAGE_SIZE as u64, number))
        };
        self.tree().path(number).filter_map(room).min_by_key(|(pages, _)| *pages).unwrap_or((u64::MAX, number))
    }

    /// Gives each shard an equal part of what a group, and each above it, may still store.
    pub fn share_out(&mut self, number: u16) {
        let shards = self.iter().count() as u64;
        let path: Vec<u16> = self.tree().path(number).collect();
        for number in path {
            let (zswap_max, swap_max) = (self.tree().zswap_max(number), self.tree().swap_max(number));
            if zswap_max.is_none() && swap_max.is_none() {
                continue;
            }
            let swap: u64 = self.iter().map(|state| state.groups.counters(number).swap()).sum();
            let part =
                |max: Option<u64>, used: u64| max.map_or(0, |max| max.saturating_sub(used) / PAGE_SIZE as u64 / shards);
            let lease = Lease { zswap: part(zswap_max, self.zswap(number)), swap: part(swap_max, swap) };
            self.iter_mut().for_each(|state| state.groups.set_lease(number, lease));
        }
    }

    /// Whether a group may swap out so many pages more. If not, that is counted.
    pub fn admit_swap(&mut self, number: u16, pages: usize) -> Result<(), Refusal> {
        let (room, limited) = self.swap_room(number);
        if room >= pages as u64 {
            return Ok(());
        }
        self.count_swap_max(number, limited);
        Err(Refusal::SwapMax)
    }

    /// How many of so many pages a group may swap out. None at all is a refusal, and counted.
    pub fn grant_swap(&mut self, number: u16, pages: u64) -> u64 {
        let (room, limited) = self.swap_room(number);
        if room == 0 && pages > 0 {
            self.count_swap_max(number, limited);
        }
        room.min(pages)
    }

    fn count_swap_max(&mut self, number: u16, limited: u16) {
        let groups = &mut self.one().groups;
        groups.charge(limited, |counters| counters.swap_max += 1);
        groups.charge(number, |counters| counters.swap_fail += 1);
    }

    /// Entries on the lists of a group and node.
    pub fn listed(&self, number: u16, node: u8) -> u32 {
        self.iter().map(|state| state.groups.listed(number, node)).sum()
    }

    /// Entries that a scan can meet.
    pub fn entries(&self, scope: Scope) -> u64 {
        self.iter().map(|state| state.groups.entries(scope)).sum()
    }

    /// Moves the cursor on to the next group and node that a scan may take from, after at most a whole round; None if
    /// there is none.
    pub fn next_list(&self, scope: Scope, cursor: &mut Cursor) -> Option<(u16, u8)> {
        if let Scope::One(number, node) = scope {
            return (self.entries(scope) > 0).then_some((number, node));
        }
        let groups = self.tree().numbers();
        let start = (cursor.group as usize).min(groups - 1);
        // The group that the cursor stands in comes twice: the nodes after the cursor first, the others last.
        for step in 0..=groups {
            let number = ((start + step) % groups) as u16;
            let nodes = self.iter().map(|state| state.groups.nodes(number)).max().unwrap_or(0);
            let from = if step == 0 { cursor.node as usize + 1 } else { 0 };
            let node = (from..nodes).map(|node| node as u8).find(|node| self.listed(number, *node) > 0);
            if let Some(node) = node.filter(|_| self.tree().eligible(scope, number)) {
                *cursor = Cursor { group: number, node };
                return Some((number, node));
            }
        }
        None
    }

    /// The shard that has the coldest entry of a group and node.
    pub fn coldest(&mut self, (number, node): (u16, u8)) -> Option<&mut State> {
        let oldest = |state: &mut State| {
            let slot = state.groups.coldest(&state.slots, number, node)?;
            Some(state.slots.age(slot))
        };
        let ages = self.iter_mut().enumerate().filter_map(|(shard, state)| Some((oldest(state)?, shard)));
        // Of two that are equally old the one in the shard of the lower number.
        let (_, shard) = ages.min_by_key(|(age, shard)| (u8::MAX - age, *shard))?;
        self.0[shard].as_deref_mut()
    }

    /// Walks everything and panics at the first inconsistency; returns the space in use on disk.
    pub fn check_valid(&mut self) -> Vec<Run> {
        let mut on_disk = Vec::new();
        let pages = self.iter_mut().map(|state| state.check_valid(&mut on_disk)).sum::<u64>();
        assert_eq!(pages, self.one().pages(), "pages of all pools");
        let (tree, config) = (self.tree(), &self.first().config);
        assert!(self.iter().all(|state| state.groups.is_same_tree(tree)), "two shards have different trees");
        assert!(self.iter().all(|state| state.config == *config), "two shards have different settings");
        on_disk
    }
}

#[cfg(test)]
#[path = "shards_tests.rs"]
mod tests;

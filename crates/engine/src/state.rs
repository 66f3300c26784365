//! One shard of everything in memory, and what may be done to it without letting go of the lock around it.

use crate::compress::Streak;
use crate::counters::Events;
use crate::groups::{Group, Groups};
use crate::lru::Lru;
use crate::pools::{Memory, PoolId, Pools};
use crate::shards::Shared;
use crate::slots::{Heat, Location, Object, Sealed, Slot, Slots, Writing};
use crate::swapfile::Run;
use crate::sync::Ordering::Relaxed;
use crate::zpool::{AllocError, copy};
use crate::zswap::{Config, Refusal};
use crate::{PAGE_SIZE, Page};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub(crate) struct State {
    pub config: Config,
    pub slots: Slots,
    pub groups: Groups,
    pub pools: Pools,
    pub same_filled: u64,
    /// Of the pages that were stored last.
    pub streak: Streak,
    shared: Arc<Shared>,
}

/// What a store needs to know before it compresses.
#[derive(Clone, Copy)]
pub(crate) struct Admission {
    pub pool: PoolId,
    /// A page that takes more bytes than this is incompressible.
    pub limit: usize,
    /// Whether such pages are kept.
    pub keeps_incompressible: bool,
    /// Whether the pages before this one were.
    pub streak: Streak,
}

/// What a load has to work on after the lock is dropped.
pub(crate) enum Found {
    Filled([u8; 8]),
    /// The page as it is.
    Page,
    /// In the buffer.
    Pool {
        pool: PoolId,
        length: usize,
    },
    Disk(Sealed),
}

impl State {
    pub fn new(shard: usize, config: Config, memory: Arc<dyn Memory>, shared: Arc<Shared>) -> State {
        State {
            slots: Slots::new(shard, shared.clone(), config.verify),
            groups: Groups::new(),
            pools: Pools::new(shard, memory, PoolId::new(config.compressor, config.zpool), shared.clone()),
            same_filled: 0,
            streak: Streak::default(),
            shared,
            config,
        }
    }

    /// Pages of the pools of all shards.
    pub fn pages(&self) -> u64 {
        self.shared.pages()
    }

    /// Bytes of the pools of all shards.
    pub fn pool_bytes(&self) -> u64 {
        self.pages() * PAGE_SIZE as u64
    }

    /// The most the pools may hold for stores to be accepted again after the cap was hit.
    fn accept_bytes(&self) -> u64 {
        let Config { max_pool_bytes, accept_threshold_percent, .. } = self.config;
        let threshold = max_pool_bytes as u128 * accept_threshold_percent as u128 / 100;
        // A store needs a pool below its cap, whatever the threshold.
        (threshold as u64).min(max_pool_bytes.saturating_sub(1))
    }

    /// Whether a store may be accepted; remembers that the cap was hit.
    pub fn has_room(&self) -> bool {
        let (pool, was_full) = (self.pool_bytes(), self.shared.full.load(Relaxed));
        let full = pool >= self.config.max_pool_bytes || (was_full && pool > self.accept_bytes());
        // Written only if it changes: a line that all shards read.
        if full != was_full {
            self.shared.full.store(full, Relaxed);
        }
        !full
    }

    /// How far the pools are above the accept threshold, if that keeps stores from being accepted; else 0.
    pub fn shrink_needed(&self) -> u64 {
        let (pool, accept) = (self.pool_bytes(), self.accept_bytes());
        let refusing = self.shared.full.load(Relaxed) || pool >= self.config.max_pool_bytes;
        if refusing { pool.saturating_sub(accept) } else { 0 }
    }

    /// Lets a store in, or not, for a reason that is counted here.
    pub fn admit(&self, group: u16, events: &Events) -> Result<Admission, Refusal> {
        if !self.config.enabled {
            return Err(Refusal::Pool);
        }
        if !self.has_room() {
            events.pool_limit_hit.count();
            return Err(Refusal::Pool);
        }
        let keeps_incompressible = self.groups.may_write_back(group);
        let (pool, limit) = (self.pools.current(), self.pools.largest_below_page());
        Ok(Admission { pool, limit, keeps_incompressible, streak: self.streak })
    }

    /// The number of a group that a caller names.
    pub fn group(&self, group: Group) -> Result<u16, Refusal> {
        self.groups.find(group).ok_or(Refusal::NoGroup)
    }

    /// The group that is charged for a slot in use, and the node that its page lived on.
    fn home_of(&mut self, slot: Slot) -> (u16, u8) {
        let (named, node) = self.slots.home(slot);
        let living = self.groups.resolve(named);
        if living != named {
            self.slots.set_group(slot, living);
            self.groups.name(living);
            self.groups.unname(named);
        }
        (living, node)
    }

    /// The group that is charged for a slot in use.
    pub fn group_of(&mut self, slot: Slot) -> u16 {
        self.home_of(slot).0
    }

    /// The list of entries from a living group and a node in a pool.
    fn lru(&mut self, (group, node): (u16, u8), pool: PoolId) -> (&mut Lru, &mut Slots) {
        let (group, node) = self.config.policy.list(group, node, pool);
        (self.groups.lru_mut(group, node), &mut self.slots)
    }

    /// A slot with one reference that the group is charged for by name; its bytes are charged by the caller.
    pub fn insert(&mut self, group: u16, node: u8, location: Location) -> Option<Slot> {
        let slot = self.slots.insert(group, node, location)?;
        self.groups.name(group);
        Some(slot)
    }

    /// Keeps the eight bytes that a page consists of.
    pub fn store_filled(&mut self, value: [u8; 8], group: u16, node: u8) -> Option<Slot> {
        let slot = self.insert(group, node, Location::Filled { value })?;
        self.same_filled += 1;
        self.groups.charge(group, |counters| counters.zswapped += PAGE_SIZE as u64);
        Some(slot)
    }

    /// A page that was written to disk without having been in a pool.
    pub fn store_sealed(&mut self, sealed: Sealed, group: u16, node: u8) -> Option<Slot> {
        let slot = self.insert(group, node, Location::Disk(sealed))?;
        self.groups.charge(group, |counters| counters.swapped += PAGE_SIZE as u64);
        Some(slot)
    }

    /// Puts a compressed page, or a page as it is, into a pool and at the hot end of its list.
    pub fn store(&mut self, pool: PoolId, data: &[u8], group: u16, node: u8) -> Result<Slot, AllocError> {
        let owner = self.slots.next().ok_or(AllocError::Metadata)?;
        let object = self.pools.malloc(pool, data, owner)?;
        let slot = self.insert(group, node, Location::Pooled { object, heat: Heat::Fresh });
        assert_eq!(slot, Some(owner), "the slot that was next");
        self.groups.charge_object(group, data.len(), true);
        let (lru, slots) = self.lru((group, node), pool);
        lru.add(slots, owner, object);
        Ok(owner)
    }

    /// Puts an entry that is on no list at the hot end of its own.
    pub fn list_hot(&mut self, slot: Slot, object: Object) {
        let home = self.home_of(slot);
        let (lru, slots) = self.lru(home, object.pool);
        lru.add(slots, slot, object);
    }

    /// Puts an entry that is on no list back at the cold end of its own.
    pub fn list_cold(&mut self, slot: Slot, object: Object) {
        let home = self.home_of(slot);
        let (lru, slots) = self.lru(home, object.pool);
        lru.put_back(slots, slot, object);
    }

    /// Finds a page. One in the pool is marked as loaded, and copied: into `page` if it is stored as it is, else into `buffer`.
    pub fn find(&mut self, slot: Slot, buffer: &mut [u8], page: &mut Page) -> Found {
        let (object, listed) = match self.slots.location(slot) {
            Location::Filled { value } => {
                self.count_load(slot, None, value == [0; 8]);
                return Found::Filled(value);
            }
            Location::Disk(sealed) => return Found::Disk(sealed),
            Location::Pooled { object, .. } => (object, true),
            Location::Writing(Writing { object, .. }) => (object, false),
        };
        // This reads memory that the copy does not need and the invalidation will: all is on the way from there together.
        if listed {
            let home = self.home_of(slot);
            let (lru, slots) = self.lru(home, object.pool);
            lru.check_member(slots, slot);
        }
        self.pools.check_owner(object, slot);
        let data = self.pools.get(object);
        let length = data.len();
        let whole = length == PAGE_SIZE;
        copy(if whole { page.as_mut_slice() } else { &mut buffer[..length] }, data);
        self.slots.mark_loaded(slot);
        self.count_load(slot, Some(object.pool), false);
        if whole { Found::Page } else { Found::Pool { pool: object.pool, length } }
    }

    fn count_load(&mut self, slot: Slot, pool: Option<PoolId>, zero: bool) {
        let home = self.home_of(slot);
        self.groups.charge(home.0, |counters| *if zero { &mut counters.swpin_zero } else { &mut counters.zswpin } += 1);
        if let Some(pool) = pool {
            self.lru(home, pool).0.protect();
        }
    }

    /// A page came from the pool, and was damaged: it does not count as loaded.
    pub fn uncount_load(&mut self, slot: Slot) {
        let group = self.group_of(slot);
        self.groups.charge(group, |counters| counters.zswpin -= 1);
    }

    /// A page was read from the swap file.
    pub fn count_read(&mut self, slot: Slot) {
        let home = self.home_of(slot);
        self.groups.charge(home.0, |counters| counters.pswpin += 1);
        let current = self.pools.current();
        self.lru(home, current).0.protect();
    }

    /// Drops a reference, and the entry with the last one; returns space on disk that is then to be freed.
    pub fn invalidate(&mut self, slot: Slot) -> Option<Run> {
        if !self.slots.unshare(slot) {
            return None;
        }
        let location = self.slots.location(slot);
        let (group, node) = self.home_of(slot);
        match location {
            Location::Filled { .. } => {
                self.same_filled -= 1;
                self.groups.charge(group, |counters| counters.zswapped -= PAGE_SIZE as u64);
            }
            Location::Pooled { object, .. } => {
                let (lru, slots) = self.lru((group, node), object.pool);
                lru.remove(slots, slot);
                self.free_object(group, object);
            }
            Location::Writing(Writing { object, .. }) => drop(self.free_object(group, object)),
            Location::Disk(_) => self.groups.charge(group, |counters| counters.swapped -= PAGE_SIZE as u64),
        }
        self.slots.remove(slot);
        self.groups.unname(group);
        if let Location::Disk(sealed) = location { Some(sealed.run()) } else { None }
    }

    /// Frees an object that a group is charged for; returns the pages that went back to the system.
    pub fn free_object(&mut self, group: u16, object: Object) -> u64 {
        self.groups.charge_object(group, object.length as usize, false);
        self.pools.free(object)
    }

    /// One step of compaction; returns the pages given back, None if there is nothing to gain.
    pub fn compact_step(&mut self, pool: PoolId, class: usize) -> Option<u64> {
        self.pools.compact_step(&mut self.slots, pool, class)
    }

    /// Marks the pools full if they are at the cap: a run of the worker then goes down to the accept threshold.
    pub fn mark_full(&self) {
        self.has_room();
    }

    /// Panics if anything contradicts anything; adds the space in use on disk to `on_disk`, and returns the pages of the pools.
    pub fn check_valid(&mut self, on_disk: &mut Vec<Run>) -> u64 {
        self.slots.check_valid();
        let named: Vec<u16> = self.slots.iter().map(|(_, group)| group).collect();
        let lists = self.groups.check_valid(&mut self.slots, named.into_iter());
        let listed: HashMap<Slot, (u16, u8)> =
            lists.into_iter().flat_map(|(list, slots)| slots.into_iter().map(move |slot| (slot, list))).collect();
        let slots: Vec<Slot> = self.slots.iter().map(|(slot, _)| slot).collect();
        let (mut objects, mut same_filled, mut bytes) = (HashSet::new(), 0, 0);
        let mut groups: HashMap<u16, (u64, u64, u64, u64)> = HashMap::new();
        for slot in slots {
            let mut charged = (0, 0, 0, 0);
            match self.slots.location(slot) {
                Location::Filled { .. } => {
                    same_filled += 1;
                    charged.1 = PAGE_SIZE as u64;
                }
                Location::Pooled { object, .. } => {
                    let (group, node) = self.home_of(slot);
                    let list = self.config.policy.list(group, node, object.pool);
                    assert_eq!(listed.get(&slot), Some(&list), "{slot:?} is in the pool but not on its list");
                    assert!(objects.insert(object), "{slot:?} shares its object");
                    self.pools.check_owner(object, slot);
                    let length = self.pools.get(object).len() as u64;
                    bytes += length;
                    charged = (length, PAGE_SIZE as u64, if length == PAGE_SIZE as u64 { length } else { 0 }, 0);
                }
                Location::Writing(_) => panic!("{slot:?} is being written, and nobody writes"),
                Location::Disk(sealed) => {
                    charged.3 = PAGE_SIZE as u64;
                    on_disk.push(sealed.run());
                }
            }
            let group = self.group_of(slot);
            for number in self.groups.path(group) {
                let sum = groups.entry(number).or_default();
                *sum = (sum.0 + charged.0, sum.1 + charged.1, sum.2 + charged.2, sum.3 + charged.3);
            }
        }
        assert_eq!(listed.len(), objects.len(), "entries on LRU lists against entries in the pools");
        assert_eq!(self.pools.objects() as usize, objects.len(), "objects in the pools against entries");
        assert_eq!(self.pools.bytes(), bytes, "bytes in the pools against entries");
        assert_eq!(self.same_filled, same_filled, "same-filled");
        for number in self.groups.living() {
            let counters = self.groups.counters(number);
            let gauges = (counters.zswap, counters.zswapped, counters.zswap_incomp, counters.swapped);
            assert_eq!(gauges, groups.get(&number).copied().unwrap_or_default(), "charges of group {number}");
        }
        self.pools.check_valid()
    }
}

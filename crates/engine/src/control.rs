//! Parameters, groups, counters, upkeep: what an operator sees of the engine.

use crate::PAGE_SIZE;
use crate::compress::Compressor;
use crate::counters::{Counters, GroupCounters};
use crate::groups::{Group, GroupError};
use crate::pools::PoolId;
use crate::state::State;
use crate::zpool::Zpool;
use crate::zswap::Zswap;

impl Zswap {
    /// How many bytes have to be freed before stores are accepted again; None if they are accepted.
    pub fn shrink_needed(&self) -> Option<u64> {
        Some(self.shards.any().shrink_needed()).filter(|bytes| *bytes > 0)
    }

    /// Switches stores on or off. Switched off, what is stored stays where it is.
    pub fn set_enabled(&self, enabled: bool) {
        self.configure(|state| state.config.enabled = enabled);
    }

    /// Switches the pressure-driven shrinker on or off.
    pub fn set_shrinker_enabled(&self, enabled: bool) {
        self.configure(|state| state.config.shrinker_enabled = enabled);
    }

    /// Sets the codec of new stores. What is stored stays as it is, and readable, in a pool that lives until it is empty.
    pub fn set_compressor(&self, compressor: Compressor) {
        self.configure(|state| {
            state.config.compressor = compressor;
            state.pools.choose(PoolId::new(compressor, state.config.zpool));
        });
    }

    /// Sets the allocator of new stores, as [`set_compressor`](Self::set_compressor) the codec.
    pub fn set_zpool(&self, zpool: Zpool) {
        self.configure(|state| {
            state.config.zpool = zpool;
            state.pools.choose(PoolId::new(state.config.compressor, zpool));
        });
    }

    /// The pools there are: that of new stores, then those that are not empty yet.
    pub fn pools(&self) -> Vec<(Compressor, Zpool)> {
        let mut ids: Vec<PoolId> = self.shards.all().iter().flat_map(|state| state.pools.ids()).collect();
        // The current one is the first of each shard.
        ids[1..].sort_unstable_by_key(|id| id.number());
        let current = ids[0];
        ids.dedup();
        let retired = ids.into_iter().skip(1).filter(|id| *id != current);
        std::iter::once(current).chain(retired).map(|id| (id.compressor(), id.zpool())).collect()
    }

    /// Sets the cap on all pools, in bytes. Pools above the cap shrink only as the shrink worker is run.
    pub fn set_max_pool_bytes(&self, bytes: u64) {
        self.configure(|state| state.config.max_pool_bytes = bytes);
    }

    /// Sets the accept threshold in percent of the cap. Panics above 100.
    pub fn set_accept_threshold(&self, percent: u8) {
        assert!(percent <= 100, "an accept threshold above 100 percent");
        self.configure(|state| state.config.accept_threshold_percent = percent);
    }

    /// Bytes of memory that the pools hold, in whole pages; metadata is not in it.
    pub fn pool_bytes(&self) -> u64 {
        self.shards.pages() * PAGE_SIZE as u64
    }

    /// Bytes of memory for metadata: what has to be known of every page. Grows with the most pages there ever were.
    pub fn metadata_bytes(&self) -> u64 {
        let entries: usize = self.shards.each().map(|state| state.slots.memory() + state.pools.metadata()).sum();
        (entries + self.space.lock().memory()) as u64
    }

    /// Moves objects together until no further page can be given back; returns the bytes given back. The
    /// lock is dropped after each page.
    pub fn compact(&self) -> u64 {
        self.compact_while(|_| true)
    }

    /// Compacts as long as `wanted` says so.
    pub(crate) fn compact_while(&self, wanted: impl Fn(&State) -> bool) -> u64 {
        let pages: u64 = self.shards.numbers().map(|shard| self.compact_shard(shard, &wanted)).sum();
        pages * PAGE_SIZE as u64
    }

    fn compact_shard(&self, shard: usize, wanted: &impl Fn(&State) -> bool) -> u64 {
        let classes = self.shards.shard(shard).pools.classes();
        let step = |pool, class| {
            let mut state = self.shards.shard(shard);
            if wanted(&state) { state.compact_step(pool, class) } else { None }
        };
        classes.map(|(pool, class)| std::iter::from_fn(|| step(pool, class)).sum::<u64>()).sum()
    }

    /// A snapshot of all counters.
    pub fn counters(&self) -> Counters {
        let all = &mut self.shards.all();
        let events = &self.events;
        let root = all.counters(crate::groups::ROOT);
        Counters {
            pool_limit_hit: events.pool_limit_hit.get(),
            reject_reclaim_fail: events.reject_reclaim_fail.get(),
            reject_alloc_fail: events.reject_alloc_fail.get(),
            reject_kmemcache_fail: events.reject_kmemcache_fail.get(),
            reject_compress_fail: events.reject_compress_fail.get(),
            reject_compress_poor: events.reject_compress_poor.get(),
            decompress_fail: events.decompress_fail.get(),
            written_back_pages: root.zswpwb,
            pool_total_size: all.one().pool_bytes(),
            stored_pages: root.zswapped / PAGE_SIZE as u64,
            stored_incompressible_pages: root.zswap_incomp / PAGE_SIZE as u64,
            same_filled_pages: all.iter().map(|state| state.same_filled).sum(),
            root,
            swap_current: self.space.lock().used_bytes(),
            swapped_pages: root.swapped / PAGE_SIZE as u64,
        }
    }

    /// Walks everything and panics at the first inconsistency. For tests: it waits for a write to end, takes time in
    /// proportion to what is stored, and nobody may be in `swap_out` or `invalidate` meanwhile.
    pub fn check_valid(&self) {
        let _cluster = self.cluster.lock();
        let mut all = self.shards.all();
        self.space.lock().check_valid(all.check_valid().into_iter());
        self.references.check_valid();
    }
}

/// Groups.
impl Zswap {
    /// A new group below `parent`: without limits, online.
    ///
    /// # Errors
    /// `Gone` if the parent was removed, `TooMany`.
    pub fn create_group(&self, parent: Group) -> Result<Group, GroupError> {
        self.shards.all().create_group(parent)
    }

    /// Removes a group; its entries go to its parent. Takes time in proportion to the number of nodes, not of entries.
    ///
    /// # Errors
    /// `HasChildren`, `Root`, or `Gone` if it was removed before.
    pub fn remove_group(&self, group: Group) -> Result<(), GroupError> {
        self.shards.all().remove_group(group)
    }

    /// Returns those of `removed`, groups that were removed, that still count against the number of groups, because entries name them.
    pub fn remembered_groups(&self, removed: &[Group]) -> Vec<Group> {
        let all = self.shards.all();
        let is_remembered = |group: &Group| all.iter().any(|state| state.groups.is_remembered(*group));
        removed.iter().copied().filter(is_remembered).collect()
    }

    /// Returns how many groups can still be created.
    pub fn free_groups(&self) -> usize {
        self.shards.all().free_groups()
    }

    /// Marks a group as about to be removed: the shrink worker passes it by from now on.
    ///
    /// # Errors
    /// `Gone` if it was removed, `Root`.
    pub fn take_group_offline(&self, group: Group) -> Result<(), GroupError> {
        if group == Group::ROOT {
            return Err(GroupError::Root);
        }
        self.change_group(group, |state, number| state.groups.set_offline(number))
    }

    /// Sets `memory.zswap.max`: the most compressed bytes of a group and all below it. None: no limit; 0: never store.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn set_zswap_max(&self, group: Group, bytes: Option<u64>) -> Result<(), GroupError> {
        self.change_group(group, |state, number| state.groups.set_zswap_max(number, bytes))
    }

    /// Sets `memory.swap.max`: the most bytes of pages, of a group and all below it, that are swapped out, in the pool or on
    /// disk. Nothing is brought back for it. None: no limit.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn set_swap_max(&self, group: Group, bytes: Option<u64>) -> Result<(), GroupError> {
        self.change_group(group, |state, number| state.groups.set_swap_max(number, bytes))
    }

    /// Sets `memory.zswap.writeback`: whether pages of a group and of all below it may go to disk. Waits for
    /// the writes under way: after a `false` no page of theirs is written.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn set_writeback(&self, group: Group, allowed: bool) -> Result<(), GroupError> {
        let (_cluster, _through) = (self.cluster.lock(), self.through.write());
        self.change_group(group, |state, number| state.groups.set_writeback(number, allowed))
    }

    /// Sets whether the pressure-driven shrinker may take from a group and from all below it. At limits they are written back
    /// all the same.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn set_group_shrinker(&self, group: Group, enabled: bool) -> Result<(), GroupError> {
        self.change_group(group, |state, number| state.groups.set_shrinker(number, enabled))
    }

    /// What is counted for a group and everything below it.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn group_counters(&self, group: Group) -> Result<GroupCounters, GroupError> {
        let all = &mut self.shards.all();
        let number = all.one().groups.find(group).ok_or(GroupError::Gone)?;
        Ok(all.counters(number))
    }

    /// The compressed bytes of each of these groups and of everything below it: says the shard, the place in `groups` and the
    /// bytes that the group has in that shard, 0 if it was removed. Waits for nobody: a shard that somebody is in is left out.
    pub fn zswap_of(&self, groups: &[Group], mut say: impl FnMut(usize, usize, u64)) {
        for number in self.shards.numbers() {
            let Some(state) = self.shards.try_shard(number) else { continue };
            for (place, &group) in groups.iter().enumerate() {
                say(number, place, state.groups.find(group).map_or(0, |group| state.groups.counters(group).zswap));
            }
        }
    }

    /// `memory.swap.current` of each of these groups, 0 if it was removed.
    pub fn swap_of(&self, groups: &[Group]) -> Vec<u64> {
        let all = &mut self.shards.all();
        let numbers: Vec<_> = groups.iter().map(|group| all.one().groups.find(*group)).collect();
        numbers.into_iter().map(|number| number.map_or(0, |number| all.counters(number).swap())).collect()
    }

    fn change_group(&self, group: Group, change: impl Fn(&mut State, u16)) -> Result<(), GroupError> {
        let all = &mut self.shards.all();
        let number = all.one().groups.find(group).ok_or(GroupError::Gone)?;
        all.iter_mut().for_each(|state| change(state, number));
        Ok(())
    }

    fn configure(&self, change: impl Fn(&mut State)) {
        self.shards.all().iter_mut().for_each(change);
    }
}

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
        Some(self.state.lock().shrink_needed()).filter(|bytes| *bytes > 0)
    }

    /// Switches stores on or off. Switched off, what is stored stays where it is.
    pub fn set_enabled(&self, enabled: bool) {
        self.state.lock().config.enabled = enabled;
    }

    /// Switches the pressure-driven shrinker on or off.
    pub fn set_shrinker_enabled(&self, enabled: bool) {
        self.state.lock().config.shrinker_enabled = enabled;
    }

    /// Sets the codec of new stores. What is stored stays as it is, and readable, in a pool that lives until it is empty.
    pub fn set_compressor(&self, compressor: Compressor) {
        let state = &mut *self.state.lock();
        state.config.compressor = compressor;
        state.pools.choose(PoolId::new(compressor, state.config.zpool));
    }

    /// Sets the allocator of new stores, as [`set_compressor`](Self::set_compressor) the codec.
    pub fn set_zpool(&self, zpool: Zpool) {
        let state = &mut *self.state.lock();
        state.config.zpool = zpool;
        state.pools.choose(PoolId::new(state.config.compressor, zpool));
    }

    /// The pools there are: that of new stores, then those that are not empty yet.
    pub fn pools(&self) -> Vec<(Compressor, Zpool)> {
        self.state.lock().pools.ids().into_iter().map(|id| (id.compressor(), id.zpool())).collect()
    }

    /// Sets the cap on all pools, in bytes. Pools above the cap shrink only as the shrink worker is run.
    pub fn set_max_pool_bytes(&self, bytes: u64) {
        self.state.lock().config.max_pool_bytes = bytes;
    }

    /// Sets the accept threshold in percent of the cap. Panics above 100.
    pub fn set_accept_threshold(&self, percent: u8) {
        assert!(percent <= 100, "an accept threshold above 100 percent");
        self.state.lock().config.accept_threshold_percent = percent;
    }

    /// Bytes of memory that the pools hold, in whole pages; metadata is not in it.
    pub fn pool_bytes(&self) -> u64 {
        self.state.lock().pool_bytes()
    }

    /// Bytes of memory for metadata: what has to be known of every page. Grows with the most pages there ever were.
    pub fn metadata_bytes(&self) -> u64 {
        let state = self.state.lock();
        (state.slots.table.memory() + state.pools.metadata() + state.space.memory()) as u64
    }

    /// Moves objects together until no further page can be given back; returns the bytes given back. The
    /// lock is dropped after each zspage.
    pub fn compact(&self) -> u64 {
        self.compact_while(|_| true)
    }

    /// Compacts as long as `wanted` says so.
    pub(crate) fn compact_while(&self, wanted: impl Fn(&State) -> bool) -> u64 {
        let classes = self.state.lock().pools.classes();
        let step = |pool, class| {
            let mut state = self.state.lock();
            if wanted(&state) { state.pools.compact_step(pool, class) } else { None }
        };
        let pages: u64 = classes.map(|(pool, class)| std::iter::from_fn(|| step(pool, class)).sum::<u64>()).sum();
        pages * PAGE_SIZE as u64
    }

    /// A snapshot of all counters.
    pub fn counters(&self) -> Counters {
        let state = self.state.lock();
        let events = &self.events;
        let root = *state.groups.counters(crate::groups::ROOT);
        Counters {
            pool_limit_hit: events.pool_limit_hit.get(),
            reject_reclaim_fail: events.reject_reclaim_fail.get(),
            reject_alloc_fail: events.reject_alloc_fail.get(),
            reject_kmemcache_fail: events.reject_kmemcache_fail.get(),
            reject_compress_fail: events.reject_compress_fail.get(),
            reject_compress_poor: events.reject_compress_poor.get(),
            decompress_fail: events.decompress_fail.get(),
            written_back_pages: root.zswpwb,
            pool_total_size: state.pool_bytes(),
            stored_pages: root.zswapped / PAGE_SIZE as u64,
            stored_incompressible_pages: root.zswap_incomp / PAGE_SIZE as u64,
            same_filled_pages: state.same_filled,
            root,
            swap_current: state.space.used_bytes(),
            swapped_pages: state.swapped,
        }
    }

    /// Walks everything and panics at the first inconsistency. For tests: it waits for a write to end, takes time in
    /// proportion to what is stored, and nobody may be in `swap_out` or `invalidate` meanwhile.
    pub fn check_valid(&self) {
        let _cluster = self.cluster.lock();
        self.state.lock().check_valid();
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
        self.state.lock().groups.create(parent)
    }

    /// Removes a group; its entries go to its parent. Takes time in proportion to the number of nodes, not of entries.
    ///
    /// # Errors
    /// `HasChildren`, `Root`, or `Gone` if it was removed before.
    pub fn remove_group(&self, group: Group) -> Result<(), GroupError> {
        let state = &mut *self.state.lock();
        state.groups.remove(&mut state.slots, group)
    }

    /// Marks a group as about to be removed: the shrink worker passes it by from now on.
    ///
    /// # Errors
    /// `Gone` if it was removed, `Root`.
    pub fn take_group_offline(&self, group: Group) -> Result<(), GroupError> {
        if group == Group::ROOT {
            return Err(GroupError::Root);
        }
        self.with_group(group, |state, number| state.groups.set_offline(number))
    }

    /// Sets `memory.zswap.max`: the most compressed bytes of a group and all below it. None: no limit; 0: never store.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn set_zswap_max(&self, group: Group, bytes: Option<u64>) -> Result<(), GroupError> {
        self.with_group(group, |state, number| state.groups.set_zswap_max(number, bytes))
    }

    /// Sets `memory.zswap.writeback`: whether pages of a group and of all below it may go to disk. Waits for
    /// the writes under way: after a `false` no page of theirs is written.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn set_writeback(&self, group: Group, allowed: bool) -> Result<(), GroupError> {
        let (_cluster, _through) = (self.cluster.lock(), self.through.write());
        self.with_group(group, |state, number| state.groups.set_writeback(number, allowed))
    }

    /// What is counted for a group and everything below it.
    ///
    /// # Errors
    /// `Gone` if it was removed.
    pub fn group_counters(&self, group: Group) -> Result<GroupCounters, GroupError> {
        self.with_group(group, |state, number| *state.groups.counters(number))
    }

    fn with_group<R>(&self, group: Group, work: impl FnOnce(&mut State, u16) -> R) -> Result<R, GroupError> {
        let state = &mut *self.state.lock();
        let number = state.groups.find(group).ok_or(GroupError::Gone)?;
        Ok(work(state, number))
    }
}

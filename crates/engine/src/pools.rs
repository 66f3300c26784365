//! Pools: a codec and an allocator each. New stores go to the current one; the others live until they are empty.
//!
//! 1. A pool *is* its codec and its allocator, so there are at most eight, each with a number of its own. To choose a
//!    codec that is still in use revives its pool; there is never a second one of the kind.
//! 2. What keeps a retired pool alive is its entries, and their count is the allocator's own, under the lock that is taken
//!    for every store and load anyway. There is no reference to contend for.
//! 3. A compression under way holds nothing: the insertion after it names the pool by number, and makes it
//!    again if it has gone meanwhile.

use crate::compress::Compressor;
use crate::shards::Shared;
use crate::slots::{Object, Slot, Slots};
use crate::zbud::Zbud;
use crate::zpool::{AllocError, Allocator, PageSource, Zpool};
use crate::zsmalloc::Zsmalloc;
use std::sync::Arc;

pub(crate) const POOLS: usize = Compressor::ALL.len() * Zpool::ALL.len();
const _: () = assert!(POOLS <= 8);

/// The number of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PoolId(u8);

impl PoolId {
    pub fn new(compressor: Compressor, zpool: Zpool) -> PoolId {
        PoolId(compressor as u8 * Zpool::ALL.len() as u8 + zpool as u8)
    }

    pub fn compressor(self) -> Compressor {
        Compressor::ALL[self.0 as usize / Zpool::ALL.len()]
    }

    pub fn zpool(self) -> Zpool {
        Zpool::ALL[self.0 as usize % Zpool::ALL.len()]
    }

    /// The number, below eight.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The pool of that number.
    pub fn from_number(number: u8) -> PoolId {
        PoolId(number)
    }
}

/// Where pools have their memory from. An allocator is made for one kind of page source, and only it needs to know which.
pub(crate) trait Memory: Send + Sync {
    /// An allocator of that kind, with memory from here.
    fn allocator(self: Arc<Self>, zpool: Zpool) -> Box<dyn Allocator>;
}

impl<M: PageSource> Memory for M {
    fn allocator(self: Arc<M>, zpool: Zpool) -> Box<dyn Allocator> {
        match zpool {
            Zpool::Zsmalloc => Box::new(Zsmalloc::new(self)),
            Zpool::Zbud => Box::new(Zbud::new(self)),
        }
    }
}

/// The current pool, and the retired ones that are not empty yet.
pub(crate) struct Pools {
    memory: Arc<dyn Memory>,
    live: [Option<Box<dyn Allocator>>; POOLS],
    current: PoolId,
    /// Pages of these pools: all shards are told.
    pages: u64,
    shard: usize,
    shared: Arc<Shared>,
}

impl Pools {
    pub fn new(shard: usize, memory: Arc<dyn Memory>, current: PoolId, shared: Arc<Shared>) -> Pools {
        let mut pools = Pools { memory, live: Default::default(), current, pages: 0, shard, shared };
        pools.choose(current);
        pools
    }

    /// The pool of new stores.
    pub fn current(&self) -> PoolId {
        self.current
    }

    /// Makes `id` the pool of new stores, and frees the one before it if that is empty.
    pub fn choose(&mut self, id: PoolId) {
        let before = std::mem::replace(&mut self.current, id);
        self.open(id);
        self.drop_if_done(before);
    }

    /// Every living pool, the current one first.
    pub fn ids(&self) -> Vec<PoolId> {
        let others = (0..POOLS as u8).map(PoolId).filter(|id| *id != self.current && self.live[id.index()].is_some());
        std::iter::once(self.current).chain(others).collect()
    }

    /// Objects in all pools.
    pub fn objects(&self) -> u64 {
        self.iter().map(|pool| pool.objects() as u64).sum()
    }

    /// Bytes of all objects, as stored.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|pool| pool.bytes()).sum()
    }

    /// Memory of everything but the pages, in bytes.
    pub fn metadata(&self) -> usize {
        self.iter().map(|pool| pool.metadata()).sum()
    }

    /// The longest object that takes less than a whole page of the current pool.
    pub fn largest_below_page(&self) -> usize {
        self.pool(self.current).largest_below_page()
    }

    /// Stores a copy of `data` for the entry of `owner` in a pool that was current not long ago.
    pub fn malloc(&mut self, id: PoolId, data: &[u8], owner: Slot) -> Result<Object, AllocError> {
        let pool = self.open(id);
        let before = pool.pages();
        let place = pool.malloc(data, owner.index());
        let taken = pool.pages() - before;
        self.have_pages(self.pages + taken);
        if place.is_err() {
            self.drop_if_done(id);
        }
        Ok(Object { pool: id, place: place?, length: data.len() as u16 })
    }

    /// The object's bytes.
    pub fn get(&self, object: Object) -> &[u8] {
        self.pool(object.pool).get(object.place, object.length as usize)
    }

    /// Frees the object, and a retired pool with its last one; returns the pages that went back to the system.
    pub fn free(&mut self, object: Object) -> u64 {
        let pages = self.pool_mut(object.pool).free(object.place, object.length as usize);
        self.have_pages(self.pages - pages);
        self.drop_if_done(object.pool);
        pages
    }

    /// Panics unless the object is there, and the slot's.
    pub fn check_owner(&self, object: Object, owner: Slot) {
        self.pool(object.pool).check_owner(object.place, owner.index());
    }

    /// Where [`compact_step`](Self::compact_step) has to go to compact everything.
    pub fn classes(&self) -> impl Iterator<Item = (PoolId, usize)> + use<> {
        let classes = |id: PoolId| (0..self.pool(id).classes()).map(move |class| (id, class));
        self.ids().into_iter().flat_map(classes).collect::<Vec<_>>().into_iter()
    }

    /// One step of compaction; returns the pages given back, None if there is nothing to gain.
    pub fn compact_step(&mut self, slots: &mut Slots, id: PoolId, class: usize) -> Option<u64> {
        let pool = self.live[id.index()].as_mut()?;
        let pages = pool.compact_step(class, &mut |owner, place| slots.move_object(owner, place))?;
        self.have_pages(self.pages - pages);
        Some(pages)
    }

    fn have_pages(&mut self, pages: u64) {
        if pages != self.pages {
            self.pages = pages;
            self.shared.set_pages(self.shard, pages);
        }
    }

    /// Gives back what can be had among the objects that are about as long as one that was freed; returns the pages.
    pub fn settle(&mut self, slots: &mut Slots, freed: Object) -> u64 {
        let Some(pool) = &self.live[freed.pool.index()] else { return 0 };
        let class = pool.class_of(freed.length as usize);
        std::iter::from_fn(|| self.compact_step(slots, freed.pool, class)).sum()
    }

    fn iter(&self) -> impl Iterator<Item = &dyn Allocator> {
        self.live.iter().flatten().map(|pool| &**pool)
    }

    fn pool(&self, id: PoolId) -> &dyn Allocator {
        self.live[id.index()].as_deref().expect("a pool lives as long as its entries")
    }

    fn pool_mut(&mut self, id: PoolId) -> &mut dyn Allocator {
        self.live[id.index()].as_deref_mut().expect("a pool lives as long as its entries")
    }

    fn open(&mut self, id: PoolId) -> &mut dyn Allocator {
        let memory = &self.memory;
        let pool = self.live[id.index()].get_or_insert_with(|| memory.clone().allocator(id.zpool()));
        &mut **pool
    }

    #[inline]
    fn drop_if_done(&mut self, id: PoolId) {
        if id != self.current && self.live[id.index()].as_ref().is_some_and(|pool| pool.objects() == 0) {
            self.live[id.index()] = None;
        }
    }

    /// Panics if anything contradicts anything; returns the pages held.
    pub fn check_valid(&mut self) -> u64 {
        let mut pages = 0;
        for (number, pool) in self.live.iter_mut().enumerate() {
            let Some(pool) = pool else { continue };
            pool.check_valid();
            pages += pool.pages();
            assert!(pool.objects() > 0 || number == self.current.index(), "pool {number} is retired and empty");
        }
        assert!(self.live[self.current.index()].is_some(), "the current pool is not there");
        assert_eq!(pages, self.pages, "pages of the pools");
        pages
    }
}

impl PoolId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

//! Store, load, invalidate.
//!
//! 1. `swap_out` stores a page in the pool; a page refused there goes to the swap file; a page refused there too stays
//!    with the caller. Nothing is left behind by a refusal: a slot is new with each store, so there is no stale entry.
//! 2. `load` copies a page out and changes nothing. The caller, once the page is in place, gives its reference up with
//!    `invalidate`: together they are the exclusive load.
//! 3. The last reference to go frees the entry, wherever it is at that moment.
//!
//! Locks, in the order they are taken:
//! 1. `cluster`: held while one cluster is written back, I/O included. Who changes what may be written waits for it, and
//!    a store of a group that is at its limit.
//! 2. `through`: shared by those who write a page that the pool has refused, I/O included. Who changes what may be written
//!    waits for them, too.
//! 3. `shards`: everything in memory, one or all of them, in the order of their numbers. Held for lookups and for copies of
//!    at most a page, never over (de)compression or I/O. What is behind them cannot reach `Zswap`.
//! 4. `space` and `folios`: which of the disk is in use, and what is counted for folios. Held for a few instructions; nothing
//!    is locked after them.

use crate::compress::{Compressor, GATHERED, with_scratch};
use crate::counters::{Events, GroupCounters};
use crate::disk::{Swap, Writeback};
use crate::folio::{FolioCounters, MAX_FOLIO_ORDER};
use crate::groups::{Group, Home};
use crate::policy::{Policy, PoolReferences};
use crate::seal::Sealer;
use crate::shards::{MAX_SHARDS, Shards};
use crate::slots::{Sealed, Slot};
use crate::state::{Admission, Found, State};
use crate::sums;
use crate::swapfile::{DiskSpace, SwapFile};
use crate::sync::{Mutex, RwLock};
use crate::writeback::Cluster;
use crate::zpool::{AllocError, PageSource, Zpool};
use crate::{PAGE_SIZE, Page};
use std::io;
use std::sync::Arc;

/// What can be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Whether new stores are accepted in the pool; what is stored stays where it is.
    pub enabled: bool,
    /// Cap on the memory of all pools, in bytes. At or above it stores are refused.
    pub max_pool_bytes: u64,
    /// Percent of the cap (0 to 100) that the pool has to fall to before stores are accepted again; 100: just below it.
    pub accept_threshold_percent: u8,
    /// Codec of new stores.
    pub compressor: Compressor,
    /// Allocator of new stores.
    pub zpool: Zpool,
    /// Whether memory pressure writes back before any limit is hit.
    pub shrinker_enabled: bool,
    /// Most bytes to use on disk, rounded down to pages; None: as many as there are, up to 512 GiB.
    pub swap_limit_bytes: Option<u64>,
    /// In what form pages are written there.
    pub writeback: Writeback,
    /// Which entries are written back first, for comparison with the past.
    pub policy: Policy,
    /// In how many parts the books are kept: 1, 2 or 4. The more there are, the less threads that store at once wait for each
    /// other, and the more pages of the pool are partly filled.
    pub shards: usize,
    /// Whether a checksum of each page is kept, and checked whenever the page is read back. It takes 4 bytes a page.
    pub verify: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            enabled: true,
            max_pool_bytes: u64::MAX,
            accept_threshold_percent: 90,
            compressor: Compressor::default(),
            zpool: Zpool::default(),
            shrinker_enabled: true,
            swap_limit_bytes: None,
            writeback: Writeback::default(),
            policy: Policy::default(),
            shards: MAX_SHARDS,
            verify: false,
        }
    }
}

/// Why a page could not be swapped out. The caller still has it.
#[derive(Debug, thiserror::Error)]
pub enum SwapOutError {
    /// The pool has refused the page, and the swap file is full or there is none.
    #[error("no space: the pool has refused the page, and the swap file is full or there is none")]
    NoSpace,
    /// The pool has refused the page, and its group, or one above it, forbids writing it to the swap file.
    #[error("the pool has refused the page, and its group forbids writeback")]
    WritebackForbidden,
    /// The page's group, or one above it, has swapped out as much as it may.
    #[error("the group of the page has swapped out as much as its limit allows")]
    SwapMax,
    /// The page's group was removed.
    #[error("the group of the page was removed")]
    NoGroup,
    /// The pool has refused the page, and writing it to the swap file failed.
    #[error("writing to the swap file failed: {0}")]
    Io(#[source] io::Error),
}

/// Why a page could not be loaded. The reference is as it was.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The page is lost: its stored data is not what was stored.
    #[error("the stored page is damaged")]
    Corrupt,
    /// Reading the swap file failed; another try may succeed.
    #[error("reading the swap file failed: {0}")]
    Io(#[source] io::Error),
}

/// Why the pool has not taken a page; the reason has been counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It may go to the swap file.
    Pool,
    /// It may go nowhere.
    SwapMax,
    NoGroup,
}

/// What a refusal comes to where there is no other place to go.
impl From<Refusal> for SwapOutError {
    fn from(refusal: Refusal) -> SwapOutError {
        match refusal {
            Refusal::Pool => SwapOutError::NoSpace,
            Refusal::SwapMax => SwapOutError::SwapMax,
            Refusal::NoGroup => SwapOutError::NoGroup,
        }
    }
}

/// Where a page was loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// From a fill value.
    SameFilled,
    /// From the pool.
    Pool,
    /// From the swap file.
    Disk,
}

/// The pool, the swap file behind it, and the slots that name their pages.
pub struct Zswap {
    pub(crate) shards: Shards,
    pub(crate) cluster: Mutex<Cluster>,
    pub(crate) through: RwLock<()>,
    pub(crate) space: Mutex<DiskSpace>,
    /// By order.
    pub(crate) folios: Mutex<[FolioCounters; MAX_FOLIO_ORDER + 1]>,
    pub(crate) swap: Option<Swap>,
    pub(crate) references: PoolReferences,
    pub(crate) events: Events,
    verify: bool,
}

impl Zswap {
    /// An empty pool in pages from `memory`, with the swap file `swap` behind it if there is one. Panics if the accept
    /// threshold is above 100 percent, if there are to be neither 1, 2 nor 4 shards, or if the system has no random bytes for
    /// the swap file's key.
    pub fn new(config: Config, swap: Option<Box<dyn SwapFile>>, memory: impl PageSource) -> Zswap {
        assert!(config.accept_threshold_percent <= 100, "an accept threshold above 100 percent");
        Zswap {
            shards: Shards::new(&config, Arc::new(memory)),
            cluster: Mutex::default(),
            through: RwLock::default(),
            space: Mutex::new(DiskSpace::new(config.swap_limit_bytes)),
            folios: Mutex::default(),
            swap: swap.map(|file| Swap { file, sealer: Sealer::new(), form: config.writeback }),
            references: PoolReferences::new(config.policy),
            events: Events::default(),
            verify: config.verify,
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Store
    // -----------------------------------------------------------------------------------------------------------------

    /// Swaps a page out: into the pool or, refused there, straight to the swap file. The slot has one reference.
    ///
    /// # Errors
    /// See [`SwapOutError`]; the page stays with the caller.
    pub fn swap_out(&self, page: &Page, home: Home) -> Result<Slot, SwapOutError> {
        let fill = same_filled(page);
        let stored = match fill {
            // Zeros need neither pool nor disk, so that no limit applies to them but that of what is swapped out.
            Some(value) if value == [0; 8] => self.store_zeros(home).map_err(SwapOutError::from),
            _ => {
                let admission = self.admit(home, 1);
                let store = |mut admission| self.store(page, fill, home, &mut admission, counting_zswpout);
                let stored = admission.and_then(store);
                stored.or_else(|refusal| match refusal {
                    Refusal::Pool => self.write_refused(page, home),
                    refusal => Err(refusal.into()),
                })
            }
        };
        stored.inspect_err(|error| self.count_failure(error, home))
    }

    /// Counts that there was no space.
    pub(crate) fn count_failure(&self, error: &SwapOutError, home: Home) {
        if let SwapOutError::NoSpace = error {
            let mut state = self.shards.any();
            if let Some(group) = state.groups.find(home.group) {
                state.groups.charge(group, |counters| counters.swap_fail += 1);
            }
        }
    }

    /// How many of so many pages a group may swap out, within its limit and those above it. None at all is a refusal, and
    /// counted as one; 0, too, if the group was removed.
    pub fn swap_room(&self, group: Group, pages: u64) -> u64 {
        let state = self.shards.any();
        let Some(number) = state.groups.find(group) else { return 0 };
        if !state.groups.is_swap_limited(number) {
            return pages;
        }
        drop(state);
        let mut all = self.shards.all();
        let number = all.one().groups.find(group);
        number.map_or(0, |number| all.grant_swap(number, pages))
    }

    /// Whether `pages` more from `home` may be swapped out, and the pool takes them now. A group on the path that has reached
    /// its limit there is shrunk, once.
    pub(crate) fn admit(&self, home: Home, pages: usize) -> Result<Admission, Refusal> {
        for may_shrink in [true, false] {
            let mut state = self.shards.any();
            let group = state.group(home.group)?;
            if !state.groups.is_limited(group) || state.groups.take_lease(group, pages as u64) {
                return state.admit(group, &self.events);
            }
            drop(state);
            // What a group has is the sum over the shards. It may have been removed meanwhile.
            let mut all = self.shards.all();
            let group = all.one().group(home.group)?;
            all.admit_swap(group, pages)?;
            let enabled = all.one().config.enabled;
            let Some((top, max)) = all.at_limit(group).filter(|_| enabled) else {
                all.share_out(group);
                return all.one().admit(group, &self.events);
            };
            if max == 0 || !may_shrink {
                all.one().groups.counters_mut(top).zswap_max_hit += 1;
                return Err(Refusal::Pool);
            }
            drop(all);
            self.shrink_group(top);
        }
        unreachable!("the second time does not shrink")
    }

    /// Stores a page in the pool that `admit` has named, and counts it as `count` says.
    pub(crate) fn store(
        &self,
        page: &Page,
        fill: Option<[u8; 8]>,
        home: Home,
        admission: &mut Admission,
        count: fn(&mut GroupCounters),
    ) -> Result<Slot, Refusal> {
        if let Some(value) = fill {
            return self.store_filled(value, home, count);
        }
        with_scratch(|scratch| {
            let Admission { pool, limit, keeps_incompressible, streak } = admission;
            let (pool, compressor) = (*pool, pool.compressor());
            let _held = self.references.hold(pool);
            let hopeless = streak.asks_for_sample() && matches!(scratch.compresses_sample(compressor, page), Ok(false));
            let Ok(length) = (if hopeless { Ok(None) } else { scratch.compress(compressor, page, *limit) }) else {
                self.events.reject_compress_fail.count();
                return Err(Refusal::Pool);
            };
            streak.count(length.is_some());
            if length.is_none() && !*keeps_incompressible {
                self.events.reject_compress_poor.count();
                return Err(Refusal::Pool);
            }
            let data = length.map_or(page.as_slice(), |length| &scratch.buffer[..length]);
            // The group and the pool may have gone since: both are looked up again.
            self.insert(home, self.sum(page), |state, group| match state.store(pool, data, group, home.node) {
                Ok(slot) => {
                    state.groups.charge(group, count);
                    state.streak = *streak;
                    Ok(slot)
                }
                Err(error) => {
                    match error {
                        AllocError::Pages => self.events.reject_alloc_fail.count(),
                        AllocError::Metadata => self.events.reject_kmemcache_fail.count(),
                    }
                    Err(Refusal::Pool)
                }
            })
        })
    }

    /// Returns the checksum to keep of a page that is about to be stored, if checksums are kept.
    pub(crate) fn sum(&self, page: &Page) -> Option<u32> {
        self.verify.then(|| sums::of(page))
    }

    /// Puts a page of `home`, with the checksum to keep of it, into a shard, unless that exceeds what may be swapped out.
    pub(crate) fn insert(
        &self,
        home: Home,
        sum: Option<u32>,
        insert: impl FnOnce(&mut State, u16) -> Result<Slot, Refusal>,
    ) -> Result<Slot, Refusal> {
        let insert = |state: &mut State, group| {
            let slot = insert(state, group)?;
            if let Some(sum) = sum {
                state.slots.set_sum(slot, sum);
            }
            Ok(slot)
        };
        let mut state = self.shards.any();
        let group = state.group(home.group)?;
        if !state.groups.is_swap_limited(group) || state.groups.take_swap_lease(group) {
            return insert(&mut state, group);
        }
        drop(state);
        // Others may have stored since this page was admitted. Nobody does between this look and the charge.
        let mut all = self.shards.all();
        let group = all.one().group(home.group)?;
        all.admit_swap(group, 1)?;
        let inserted = insert(all.one(), group);
        // The leases are of what was left before.
        all.share_out(group);
        inserted
    }

    pub(crate) fn store_zeros(&self, home: Home) -> Result<Slot, Refusal> {
        self.store_filled([0; 8], home, |counters| counters.swpout_zero += 1)
    }

    pub(crate) fn store_filled(
        &self,
        value: [u8; 8],
        home: Home,
        count: fn(&mut GroupCounters),
    ) -> Result<Slot, Refusal> {
        self.insert(home, None, |state, group| {
            let Some(slot) = state.store_filled(value, group, home.node) else {
                self.events.reject_kmemcache_fail.count();
                return Err(Refusal::Pool);
            };
            state.groups.charge(group, count);
            Ok(slot)
        })
    }

    fn write_refused(&self, page: &Page, home: Home) -> Result<Slot, SwapOutError> {
        let sealed = self.write_through(&[page], home)?[0];
        self.record_written(sealed, self.sum(page), home).inspect_err(|_| self.free_space([sealed.run()]))
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Load
    // -----------------------------------------------------------------------------------------------------------------

    /// Copies the page of a slot into `page` and says where it was. Does not give up the reference: that is for
    /// [`invalidate`](Self::invalidate), once the page is in place. Panics if the slot is not in use.
    ///
    /// # Errors
    /// See [`LoadError`]; the content of `page` is then undefined.
    pub fn load(&self, slot: Slot, page: &mut Page) -> Result<Origin, LoadError> {
        let mut found = Ok(Origin::Pool);
        self.load_or_locate(&[slot], std::slice::from_mut(page), |_, origin| found = origin)?;
        found.or_else(|sealed| {
            self.read(&sealed, page)?;
            self.check_sum(slot, page)?;
            self.shards.of(slot).count_read(slot);
            Ok(Origin::Disk)
        })
    }

    /// Loads those of several pages that are in memory; says, in their order, where each was, or where on disk it is.
    ///
    /// What is together in a shard is copied out of it together: so the memory it takes is waited for once, and not for each.
    pub(crate) fn load_or_locate(
        &self,
        slots: &[Slot],
        pages: &mut [Page],
        mut tell: impl FnMut(usize, Result<Origin, Sealed>),
    ) -> Result<(), LoadError> {
        let in_one_shard = slots.chunk_by(|slot, next| slot.shard() == next.shard());
        let mut first = 0;
        for slots in in_one_shard.flat_map(|slots| slots.chunks(GATHERED)) {
            let pages = &mut pages[first..];
            with_scratch(|scratch| {
                let mut found = [const { None }; GATHERED];
                let mut shard = self.shards.of(slots[0]);
                let rooms = scratch.buffer.chunks_exact_mut(PAGE_SIZE);
                for (((found, room), &slot), page) in found.iter_mut().zip(rooms).zip(slots).zip(pages.iter_mut()) {
                    *found = Some(shard.find(slot, room, page));
                }
                drop(shard);
                for (index, (page, origin)) in pages.iter_mut().zip(found.iter().flatten()).enumerate() {
                    let origin = match *origin {
                        Found::Filled(value) => {
                            page.as_chunks_mut().0.fill(value);
                            Ok(Origin::SameFilled)
                        }
                        Found::Page => Ok(Origin::Pool),
                        Found::Pool { pool, length } => {
                            let _held = self.references.hold(pool);
                            let start = index * PAGE_SIZE;
                            scratch.decompress(pool.compressor(), start..start + length, page).map_err(|_| {
                                self.uncount_loads(&slots[index..], &found[index..]);
                                self.corrupt()
                            })?;
                            Ok(Origin::Pool)
                        }
                        Found::Disk(sealed) => Err(sealed),
                    };
                    if let Ok(Origin::Pool) = origin {
                        self.check_sum(slots[index], page)
                            .inspect_err(|_| self.uncount_loads(&slots[index..], &found[index..]))?;
                    }
                    tell(first + index, origin);
                }
                Ok(())
            })?;
            first += slots.len();
        }
        Ok(())
    }

    /// The first of these pages is damaged: none of them counts as loaded.
    fn uncount_loads(&self, slots: &[Slot], found: &[Option<Found>]) {
        let loaded = |found: &Option<Found>| matches!(found, Some(Found::Page | Found::Pool { .. }));
        for (slot, _) in slots.iter().zip(found).filter(|(_, found)| loaded(found)) {
            self.shards.of(*slot).uncount_load(*slot);
        }
    }

    /// Compares a page that was loaded, and is not same-filled, with the checksum kept of it. The caller's reference keeps the slot
    /// from being given to another page meanwhile.
    pub(crate) fn check_sum(&self, slot: Slot, page: &Page) -> Result<(), LoadError> {
        if !self.verify {
            return Ok(());
        }
        let kept = self.shards.of(slot).slots.sum(slot);
        if kept == Some(sums::of(page)) { Ok(()) } else { Err(self.corrupt()) }
    }

    pub(crate) fn corrupt(&self) -> LoadError {
        self.events.decompress_fail.count();
        LoadError::Corrupt
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Invalidate
    // -----------------------------------------------------------------------------------------------------------------

    /// Adds a reference to a slot: another owner, after a fork. Panics if the slot is not in use.
    pub fn dup(&self, slot: Slot) {
        self.shards.of(slot).slots.share(slot);
    }

    /// Gives up a reference to a slot. The last one frees what is stored, in the pool or on disk; the slot may then be
    /// given to another page. Panics if the slot is not in use.
    pub fn invalidate(&self, slot: Slot) {
        self.invalidate_all(&[slot]);
    }

    /// Gives up a reference to each of several slots, as [`invalidate`](Self::invalidate).
    pub fn invalidate_all(&self, slots: &[Slot]) {
        for slots in slots.chunk_by(|slot, next| slot.shard() == next.shard()).flat_map(|slots| slots.chunks(GATHERED))
        {
            let mut space = [const { None }; GATHERED];
            let mut shard = self.shards.of(slots[0]);
            space.iter_mut().zip(slots).for_each(|(space, slot)| *space = shard.invalidate(*slot));
            drop(shard);
            self.free_space(space.into_iter().flatten());
        }
    }
}

fn counting_zswpout(counters: &mut GroupCounters) {
    counters.zswpout += 1;
}

/// The eight bytes that the page consists of, if it does.
pub(crate) fn same_filled(page: &Page) -> Option<[u8; 8]> {
    let (words, _) = page.as_chunks::<8>();
    let value = words[0];
    // Most pages differ at the end already.
    (words[words.len() - 1] == value && words.iter().all(|word| *word == value)).then_some(value)
}

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
//! 2. `state`: everything in memory. Held for lookups and for copies of at most a page, never over (de)compression or
//!    I/O. What is behind it cannot reach `Zswap`, so nothing can be locked after it.

use crate::Page;
use crate::compress::{Compressor, with_scratch};
use crate::counters::{Events, GroupCounters};
use crate::groups::Home;
use crate::policy::Policy;
use crate::seal::Sealer;
use crate::slots::{Location, Sealed, Slot};
use crate::state::{Admission, Found, State};
use crate::swapfile::{self, SwapFile};
use crate::writeback::Cluster;
use crate::zpool::{AllocError, PageSource, Zpool};
use parking_lot::Mutex;
use std::io;

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
    /// Most bytes to use on disk, rounded down to pages; None: as many as there are.
    pub swap_limit_bytes: Option<u64>,
    /// Which entries are written back first, for comparison with the past.
    pub policy: Policy,
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
            policy: Policy::default(),
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
    NoGroup,
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
    pub(crate) state: Mutex<State>,
    pub(crate) cluster: Mutex<Cluster>,
    pub(crate) swap: Option<Swap>,
    pub(crate) events: Events,
}

pub(crate) struct Swap {
    pub file: Box<dyn SwapFile>,
    pub sealer: Sealer,
}

impl Zswap {
    /// An empty pool in pages from `memory`, with the swap file `swap` behind it if there is one. Panics if the accept
    /// threshold is above 100 percent, or if the system has no random bytes for the swap file's key.
    pub fn new(config: Config, swap: Option<Box<dyn SwapFile>>, memory: Box<dyn PageSource>) -> Zswap {
        assert!(config.accept_threshold_percent <= 100, "an accept threshold above 100 percent");
        let state = State::new(config, memory);
        let swap = swap.map(|file| Swap { file, sealer: Sealer::new() });
        Zswap { state: Mutex::new(state), cluster: Mutex::default(), swap, events: Events::default() }
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
            // Zeros need neither pool nor disk, so that no limit applies to them.
            Some(value) if value == [0; 8] => return self.store_zeros(home),
            _ => self.admit(home).and_then(|admission| self.store(page, fill, home, admission, counting_zswpout)),
        };
        stored.or_else(|refusal| match refusal {
            Refusal::Pool => self.write_through(page, home),
            Refusal::NoGroup => Err(SwapOutError::NoGroup),
        })
    }

    /// Whether the pool takes a page from `home` now. A group on the path that has reached its limit is shrunk, once.
    pub(crate) fn admit(&self, home: Home) -> Result<Admission, Refusal> {
        for may_shrink in [true, false] {
            let mut state = self.state.lock();
            let group = state.group(home.group)?;
            if !state.config.enabled {
                return Err(Refusal::Pool);
            }
            let Some((top, max)) = state.groups.at_limit(group) else { return state.admit(group, &self.events) };
            if max == 0 || !may_shrink {
                state.groups.counters_mut(top).zswap_max_hit += 1;
                return Err(Refusal::Pool);
            }
            drop(state);
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
        admission: Admission,
        count: fn(&mut GroupCounters),
    ) -> Result<Slot, Refusal> {
        if let Some(value) = fill {
            return self.store_filled(value, home, count);
        }
        with_scratch(|scratch| {
            let Admission { pool, limit, keeps_incompressible } = admission;
            let Ok(length) = scratch.compress(pool.compressor(), page, limit) else {
                self.events.reject_compress_fail.count();
                return Err(Refusal::Pool);
            };
            if length.is_none() && !keeps_incompressible {
                self.events.reject_compress_poor.count();
                return Err(Refusal::Pool);
            }
            let data = length.map_or(page.as_slice(), |length| &scratch.buffer[..length]);
            // The group and the pool may have gone since: both are looked up again.
            let mut state = self.state.lock();
            let group = state.group(home.group)?;
            match state.store(pool, data, group, home.node) {
                Ok(slot) => {
                    state.groups.charge(group, count);
                    Ok(slot)
                }
                Err(error) => {
                    match error {
                        AllocError::Pages => self.events.reject_alloc_fail.count(),
                        AllocError::Metadata => self.events.reject_kmemcache_fail.count(),
                    }
                    Err(Refusal::Pool)
                }
            }
        })
    }

    fn store_zeros(&self, home: Home) -> Result<Slot, SwapOutError> {
        self.store_filled([0; 8], home, |counters| counters.swpout_zero += 1).map_err(|refusal| match refusal {
            Refusal::Pool => SwapOutError::NoSpace,
            Refusal::NoGroup => SwapOutError::NoGroup,
        })
    }

    pub(crate) fn store_filled(
        &self,
        value: [u8; 8],
        home: Home,
        count: fn(&mut GroupCounters),
    ) -> Result<Slot, Refusal> {
        let mut state = self.state.lock();
        let group = state.group(home.group)?;
        let Some(slot) = state.store_filled(value, group, home.node) else {
            self.events.reject_kmemcache_fail.count();
            return Err(Refusal::Pool);
        };
        state.groups.charge(group, count);
        Ok(slot)
    }

    /// Writes a page that the pool has refused to the swap file.
    fn write_through(&self, page: &Page, home: Home) -> Result<Slot, SwapOutError> {
        let (swap, run) = self.space_for(1, home)?;
        let block = run.start;
        let nonce = swap.sealer.nonce();
        let written = with_scratch(|scratch| {
            scratch.buffer.copy_from_slice(page);
            let tag = swap.sealer.seal(nonce, block, scratch.buffer.as_mut_slice());
            swap.file.write_at(swapfile::offset(block), scratch.buffer.as_slice()).map(|()| tag)
        });
        let recorded = match written {
            Ok(tag) => self.record_written(Sealed { block, nonce, tag }, home),
            Err(error) => Err(SwapOutError::of_write(error)),
        };
        recorded.inspect_err(|_| self.free_blocks([block]))
    }

    /// Up to `pages` neighbouring blocks for pages from `home`, and the swap file they are in.
    pub(crate) fn space_for(&self, pages: usize, home: Home) -> Result<(&Swap, swapfile::Run), SwapOutError> {
        let mut state = self.state.lock();
        let group = state.groups.find(home.group).ok_or(SwapOutError::NoGroup)?;
        if !state.groups.may_write_back(group) {
            return Err(SwapOutError::WritebackForbidden);
        }
        let swap = self.swap.as_ref().ok_or(SwapOutError::NoSpace)?;
        let run = state.space.allocate(pages).ok_or(SwapOutError::NoSpace)?;
        Ok((swap, run))
    }

    /// A slot for a page that was written to the swap file.
    pub(crate) fn record_written(&self, sealed: Sealed, home: Home) -> Result<Slot, SwapOutError> {
        let mut state = self.state.lock();
        let group = state.groups.find(home.group).ok_or(SwapOutError::NoGroup)?;
        state.groups.charge(group, |counters| counters.pswpout += 1);
        let slot = state.insert(group, home.node, Location::Disk(sealed));
        slot.ok_or_else(|| {
            self.events.reject_kmemcache_fail.count();
            SwapOutError::NoSpace
        })
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
        match self.load_or_locate(slot, page)? {
            Ok(origin) => Ok(origin),
            Err(sealed) => {
                self.read_run(sealed.block, [&sealed], std::slice::from_mut(page))?;
                self.state.lock().count_read(slot);
                Ok(Origin::Disk)
            }
        }
    }

    /// Loads a page that is in memory; says where it is on disk if it is there.
    pub(crate) fn load_or_locate(&self, slot: Slot, page: &mut Page) -> Result<Result<Origin, Sealed>, LoadError> {
        with_scratch(|scratch| {
            let found = self.state.lock().find(slot, &mut scratch.buffer);
            match found {
                Found::Filled(value) => {
                    page.as_chunks_mut().0.fill(value);
                    Ok(Ok(Origin::SameFilled))
                }
                Found::Pool { pool, length } => match scratch.decompress(pool.compressor(), length, page) {
                    Ok(()) => Ok(Ok(Origin::Pool)),
                    Err(_) => {
                        self.state.lock().uncount_load(slot);
                        Err(self.corrupt())
                    }
                },
                Found::Disk(sealed) => Ok(Err(sealed)),
            }
        })
    }

    /// Reads neighbouring blocks of the swap file, from `start` on. The caller's references keep them from being given to
    /// other pages.
    pub(crate) fn read_run<'a>(
        &self,
        start: u32,
        sealed: impl IntoIterator<Item = &'a Sealed>,
        pages: &mut [Page],
    ) -> Result<(), LoadError> {
        let swap = self.swap.as_ref().expect("what is on disk was written to a swap file");
        swap.file.read_at(swapfile::offset(start), pages.as_flattened_mut()).map_err(LoadError::Io)?;
        for (Sealed { block, nonce, tag }, page) in sealed.into_iter().zip(pages) {
            swap.sealer.open(*nonce, *block, tag, page).map_err(|_| self.corrupt())?;
        }
        Ok(())
    }

    fn corrupt(&self) -> LoadError {
        self.events.decompress_fail.count();
        LoadError::Corrupt
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Invalidate
    // -----------------------------------------------------------------------------------------------------------------

    /// Adds a reference to a slot: another owner, after a fork. Panics if the slot is not in use.
    pub fn dup(&self, slot: Slot) {
        let mut state = self.state.lock();
        let references = &mut state.slots.get_mut(slot).references;
        *references = references.checked_add(1).expect("fewer than 2^32 owners of a page");
    }

    /// Gives up a reference to a slot. The last one frees what is stored, in the pool or on disk; the slot may then be
    /// given to another page. Panics if the slot is not in use.
    pub fn invalidate(&self, slot: Slot) {
        let block = self.state.lock().invalidate(slot);
        self.free_blocks(block);
    }

    /// Frees blocks on disk, and discards in the file the clusters that this has emptied.
    pub(crate) fn free_blocks(&self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            let emptied = self.state.lock().space.free(block);
            if let (Some(emptied), Some(swap)) = (emptied, &self.swap) {
                // Until `discarded` nobody is given a block of this cluster, so the hole cannot hit new data.
                let (offset, len) = emptied.range();
                swap.file.discard(offset, len);
                self.state.lock().space.discarded(emptied);
            }
        }
    }
}

impl SwapOutError {
    /// What a failed write means.
    pub(crate) fn of_write(error: io::Error) -> SwapOutError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => SwapOutError::NoSpace,
            _ => SwapOutError::Io(error),
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

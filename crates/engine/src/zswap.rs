//! Store, load, invalidate.
//!
//! 1. `swap_out` stores a page in the pool; a page refused there goes to the swap file; a page refused there too stays
//!    with the caller. Nothing is left behind by a refusal.
//! 2. `load` copies a page out and changes nothing. The caller, once the page is in place, gives its reference up with
//!    `invalidate`: together they are the exclusive load.
//! 3. The last reference to go frees the entry, wherever it is at that moment.
//!
//! Locks, in the order they are taken:
//! 1. `cluster`: held through a writeback, I/O included. Only `shrink` takes it.
//! 2. `state`: everything in memory. Held for lookups and for copies of at most a page, never over (de)compression or
//!    I/O. What is behind it cannot reach `Zswap`, so nothing can be locked after it.

use crate::compress::{Compressor, with_scratch};
use crate::counters::{Counters, Events};
use crate::lru::Lru;
use crate::seal::Sealer;
use crate::slots::{Location, Object, Sealed, Slot, Slots};
use crate::swapfile::{self, DiskSpace, SwapFile};
use crate::table::Links;
use crate::writeback::Cluster;
use crate::zsmalloc::{AllocError, PageSource, Zsmalloc};
use crate::{PAGE_SIZE, Page};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::io;

/// What can be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Cap on the pool's memory, in bytes. At or above it stores are refused.
    pub max_pool_bytes: u64,
    /// Percent of the cap (0 to 100) that the pool has to fall to before stores are accepted again; 100: just below it.
    pub accept_threshold_percent: u8,
    /// Codec of new stores.
    pub compressor: Compressor,
    /// Most bytes to use on disk, rounded down to pages; None: as many as there are.
    pub swap_limit_bytes: Option<u64>,
}

/// Why a page could not be swapped out. The caller still has it.
#[derive(Debug, thiserror::Error)]
pub enum SwapOutError {
    /// The pool has refused the page, and the swap file is full or there is none.
    #[error("no space: the pool has refused the page, and the swap file is full or there is none")]
    NoSpace,
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

/// Everything in memory.
pub(crate) struct State {
    config: Config,
    pub slots: Slots,
    pub lru: Lru,
    pub pool: Zsmalloc,
    pub space: DiskSpace,
    /// The cap was hit, and the pool has not been at or under the accept threshold since.
    full: bool,
    same_filled: u64,
    incompressible: u64,
}

impl Zswap {
    /// An empty pool in pages from `memory`, with the swap file `swap` behind it if there is one. Panics if the accept
    /// threshold is above 100 percent, or if the system has no random bytes for the swap file's key.
    pub fn new(config: Config, swap: Option<Box<dyn SwapFile>>, memory: Box<dyn PageSource>) -> Zswap {
        assert!(config.accept_threshold_percent <= 100, "an accept threshold above 100 percent");
        let state = State {
            slots: Slots::new(),
            lru: Lru::default(),
            pool: Zsmalloc::new(memory),
            space: DiskSpace::new(config.swap_limit_bytes),
            full: false,
            same_filled: 0,
            incompressible: 0,
            config,
        };
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
    pub fn swap_out(&self, page: &Page) -> Result<Slot, SwapOutError> {
        let fill = same_filled(page);
        if fill == Some([0; 8]) {
            // Zeros need neither pool nor disk, so that no limit applies to them.
            let slot = self.store_filled([0; 8]).ok_or(SwapOutError::NoSpace)?;
            self.events.swpout_zero.count();
            return Ok(slot);
        }
        match self.store(page, fill) {
            Some(slot) => {
                self.events.zswpout.count();
                Ok(slot)
            }
            None => self.write_through(page),
        }
    }

    /// Stores a page in the pool; None if refused, for a reason that has been counted.
    fn store(&self, page: &Page, fill: Option<[u8; 8]>) -> Option<Slot> {
        let (compressor, limit) = {
            let mut state = self.state.lock();
            if !state.has_room() {
                self.events.pool_limit_hit.count();
                return None;
            }
            (state.config.compressor, state.pool.largest_below_page())
        };
        if let Some(fill) = fill {
            return self.store_filled(fill);
        }
        with_scratch(|scratch| {
            let Ok(length) = scratch.compress(compressor, page, limit) else {
                self.events.reject_compress_fail.count();
                return None;
            };
            let data = length.map_or(page.as_slice(), |length| &scratch.buffer[..length]);
            let stored = self.state.lock().store(compressor, data);
            let stored = stored.inspect_err(|error| match error {
                AllocError::Pages => self.events.reject_alloc_fail.count(),
                AllocError::Metadata => self.events.reject_kmemcache_fail.count(),
            });
            stored.ok()
        })
    }

    fn store_filled(&self, value: [u8; 8]) -> Option<Slot> {
        let mut state = self.state.lock();
        let slot = state.slots.insert(Location::Filled { value });
        match slot {
            Some(_) => state.same_filled += 1,
            None => self.events.reject_kmemcache_fail.count(),
        }
        slot
    }

    /// Writes a page that the pool has refused to the swap file.
    fn write_through(&self, page: &Page) -> Result<Slot, SwapOutError> {
        let swap = self.swap.as_ref().ok_or(SwapOutError::NoSpace)?;
        let block = self.state.lock().space.allocate(1).ok_or(SwapOutError::NoSpace)?.start;
        let nonce = swap.sealer.nonce();
        let written = with_scratch(|scratch| {
            scratch.buffer.copy_from_slice(page);
            let tag = swap.sealer.seal(nonce, block, scratch.buffer.as_mut_slice());
            swap.file.write_at(swapfile::offset(block), scratch.buffer.as_slice()).map(|()| tag)
        });
        let error = match written {
            Ok(tag) => {
                self.events.pswpout.count();
                let slot = self.state.lock().slots.insert(Location::Disk(Sealed { block, nonce, tag }));
                if let Some(slot) = slot {
                    return Ok(slot);
                }
                self.events.reject_kmemcache_fail.count();
                SwapOutError::NoSpace
            }
            Err(error) if is_full(&error) => SwapOutError::NoSpace,
            Err(error) => SwapOutError::Io(error),
        };
        self.free_blocks([block]);
        Err(error)
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
        with_scratch(|scratch| {
            let found = self.state.lock().find(slot, &mut scratch.buffer);
            match found {
                Found::Filled(value) => {
                    page.as_chunks_mut().0.fill(value);
                    if value == [0; 8] {
                        self.events.swpin_zero.count()
                    } else {
                        self.events.zswpin.count()
                    }
                    Ok(Origin::SameFilled)
                }
                Found::Pool { compressor, length } => {
                    let decompressed = scratch.decompress(compressor, length, page);
                    decompressed.map_err(|_| self.corrupt())?;
                    self.events.zswpin.count();
                    Ok(Origin::Pool)
                }
                Found::Disk(sealed) => {
                    self.read(sealed, page)?;
                    self.events.pswpin.count();
                    Ok(Origin::Disk)
                }
            }
        })
    }

    /// Reads a page from the swap file. The caller's reference keeps its block from being given to another page.
    fn read(&self, Sealed { block, nonce, tag }: Sealed, page: &mut Page) -> Result<(), LoadError> {
        let swap = self.swap.as_ref().expect("what is on disk was written to a swap file");
        swap.file.read_at(swapfile::offset(block), page).map_err(LoadError::Io)?;
        swap.sealer.open(nonce, block, &tag, page).map_err(|_| self.corrupt())
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

    // -----------------------------------------------------------------------------------------------------------------
    // Limits, counters, upkeep
    // -----------------------------------------------------------------------------------------------------------------

    /// How many bytes [`shrink`](Self::shrink) has to free before stores are accepted again; None if they are accepted.
    pub fn shrink_needed(&self) -> Option<u64> {
        let state = self.state.lock();
        let (pool, accept) = (state.pool_bytes(), state.accept_bytes());
        let refusing = state.full || pool >= state.config.max_pool_bytes;
        (refusing && pool > accept).then(|| pool - accept)
    }

    /// Sets the codec of new stores. What is stored stays as it is, and readable.
    pub fn set_compressor(&self, compressor: Compressor) {
        self.state.lock().config.compressor = compressor;
    }

    /// Sets the cap on the pool, in bytes. A pool above the cap shrinks only as `shrink` is called.
    pub fn set_max_pool_bytes(&self, bytes: u64) {
        self.state.lock().config.max_pool_bytes = bytes;
    }

    /// Sets the accept threshold in percent of the cap. Panics above 100.
    pub fn set_accept_threshold(&self, percent: u8) {
        assert!(percent <= 100, "an accept threshold above 100 percent");
        self.state.lock().config.accept_threshold_percent = percent;
    }

    /// Bytes of memory that the pool holds, in whole pages; metadata is not in it.
    pub fn pool_bytes(&self) -> u64 {
        self.state.lock().pool_bytes()
    }

    /// Bytes of memory for metadata: what has to be known of every page. Grows with the most pages there ever were.
    pub fn metadata_bytes(&self) -> u64 {
        let state = self.state.lock();
        (state.slots.table.memory() + state.pool.metadata() + state.space.memory()) as u64
    }

    /// Moves objects together until no further page can be given back; returns the bytes given back. The
    /// lock is dropped after each zspage.
    pub fn compact(&self) -> u64 {
        let classes = self.state.lock().pool.classes();
        let mut pages = 0;
        for class in 0..classes {
            while let Some(freed) = self.state.lock().pool.compact_step(class) {
                pages += freed;
            }
        }
        pages * PAGE_SIZE as u64
    }

    /// A snapshot of all counters.
    pub fn counters(&self) -> Counters {
        let state = self.state.lock();
        let events = &self.events;
        let stored_pages = state.stored_pages();
        Counters {
            pool_limit_hit: events.pool_limit_hit.get(),
            reject_reclaim_fail: events.reject_reclaim_fail.get(),
            reject_alloc_fail: events.reject_alloc_fail.get(),
            reject_kmemcache_fail: events.reject_kmemcache_fail.get(),
            reject_compress_fail: events.reject_compress_fail.get(),
            reject_compress_poor: 0,
            decompress_fail: events.decompress_fail.get(),
            written_back_pages: events.zswpwb.get(),
            pool_total_size: state.pool_bytes(),
            stored_pages,
            stored_incompressible_pages: state.incompressible,
            same_filled_pages: state.same_filled,
            zswpin: events.zswpin.get(),
            zswpout: events.zswpout.get(),
            zswpwb: events.zswpwb.get(),
            pswpin: events.pswpin.get(),
            pswpout: events.pswpout.get(),
            swpin_zero: events.swpin_zero.get(),
            swpout_zero: events.swpout_zero.get(),
            zswap: state.pool.bytes(),
            zswapped: stored_pages * PAGE_SIZE as u64,
            swap_current: state.space.used() as u64 * PAGE_SIZE as u64,
        }
    }

    /// Walks everything and panics at the first inconsistency. For tests: it waits for a writeback to end, takes time in
    /// proportion to what is stored, and nobody may be in `swap_out` or `invalidate` meanwhile.
    pub fn check_valid(&self) {
        let _cluster = self.cluster.lock();
        self.state.lock().check_valid();
    }
}

/// What a load has to work on after the lock is dropped.
enum Found {
    Filled([u8; 8]),
    /// In the buffer.
    Pool {
        compressor: Compressor,
        length: usize,
    },
    Disk(Sealed),
}

impl State {
    fn pool_bytes(&self) -> u64 {
        self.pool.pages() * PAGE_SIZE as u64
    }

    /// The most the pool may hold for stores to be accepted again after the cap was hit.
    fn accept_bytes(&self) -> u64 {
        let Config { max_pool_bytes, accept_threshold_percent, .. } = self.config;
        let threshold = max_pool_bytes as u128 * accept_threshold_percent as u128 / 100;
        // A store needs a pool below its cap, whatever the threshold.
        (threshold as u64).min(max_pool_bytes.saturating_sub(1))
    }

    /// Whether a store may be accepted; remembers that the cap was hit.
    fn has_room(&mut self) -> bool {
        let pool = self.pool_bytes();
        self.full = pool >= self.config.max_pool_bytes || (self.full && pool > self.accept_bytes());
        !self.full
    }

    fn stored_pages(&self) -> u64 {
        self.same_filled + self.pool.objects() as u64
    }

    /// Puts a compressed page, or a page as it is, into the pool and at the hot end of the LRU.
    fn store(&mut self, compressor: Compressor, data: &[u8]) -> Result<Slot, AllocError> {
        let handle = self.pool.malloc(data)?;
        let object = Object { handle, compressor };
        let pooled = Location::Pooled { object, links: Links::default(), referenced: false };
        let Some(slot) = self.slots.insert(pooled) else {
            self.pool.free(handle);
            return Err(AllocError::Metadata);
        };
        self.lru.add(&mut self.slots, slot, object);
        self.incompressible += (data.len() == PAGE_SIZE) as u64;
        Ok(slot)
    }

    /// Finds a page; one in the pool is copied into `buffer` as it is stored, and marked as referenced.
    fn find(&mut self, slot: Slot, buffer: &mut Page) -> Found {
        match &mut self.slots.get_mut(slot).location {
            Location::Vacant { .. } => unreachable!("a slot in use is not vacant"),
            Location::Filled { value } => Found::Filled(*value),
            Location::Disk(sealed) => Found::Disk(*sealed),
            Location::Pooled { object, referenced, .. } | Location::Writing { object, referenced, .. } => {
                *referenced = true;
                let Object { handle, compressor } = *object;
                let data = self.pool.get(handle);
                buffer[..data.len()].copy_from_slice(data);
                Found::Pool { compressor, length: data.len() }
            }
        }
    }

    /// Drops a reference, and the entry with the last one; returns a block on disk that is then to be freed.
    fn invalidate(&mut self, slot: Slot) -> Option<u32> {
        let entry = self.slots.get_mut(slot);
        entry.references -= 1;
        if entry.references > 0 {
            return None;
        }
        let location = entry.location;
        match location {
            Location::Vacant { .. } => unreachable!("a slot in use is not vacant"),
            Location::Filled { .. } => self.same_filled -= 1,
            Location::Pooled { object, .. } => {
                self.lru.remove(&mut self.slots, slot);
                self.free_object(object);
            }
            Location::Writing { object, .. } => drop(self.free_object(object)),
            Location::Disk(_) => {}
        }
        self.slots.remove(slot);
        if let Location::Disk(Sealed { block, .. }) = location { Some(block) } else { None }
    }

    /// Frees an object; returns the pages that went back to the system.
    pub fn free_object(&mut self, object: Object) -> u64 {
        self.incompressible -= (self.pool.length(object.handle) == PAGE_SIZE) as u64;
        self.pool.free(object.handle)
    }

    fn check_valid(&mut self) {
        self.slots.table.check_valid();
        let listed: HashSet<u32> = self.lru.check_valid(&mut self.slots).into_iter().collect();
        let (mut handles, mut blocks, mut same_filled, mut incompressible) = (HashSet::new(), Vec::new(), 0, 0);
        for (slot, entry) in self.slots.iter() {
            assert!(entry.references > 0, "{slot:?} has no owner");
            match entry.location {
                Location::Vacant { .. } => unreachable!("the table skips vacant cells"),
                Location::Filled { .. } => same_filled += 1,
                Location::Pooled { object, .. } => {
                    assert!(listed.contains(&slot.raw()), "{slot:?} is in the pool but not on the LRU list");
                    assert!(handles.insert(object.handle), "{slot:?} shares its object");
                    incompressible += (self.pool.get(object.handle).len() == PAGE_SIZE) as u64;
                }
                Location::Writing { .. } => panic!("{slot:?} is being written, and nobody writes"),
                Location::Disk(Sealed { block, .. }) => blocks.push(block),
            }
        }
        assert_eq!(listed.len(), handles.len(), "entries on the LRU list against entries in the pool");
        assert_eq!(self.pool.objects() as usize, handles.len(), "objects in the pool against entries");
        assert_eq!(
            (self.same_filled, self.incompressible),
            (same_filled, incompressible),
            "same-filled, incompressible"
        );
        self.pool.check_valid();
        self.space.check_valid(blocks.into_iter());
    }
}

/// The eight bytes that the page consists of, if it does.
fn same_filled(page: &Page) -> Option<[u8; 8]> {
    let (words, _) = page.as_chunks::<8>();
    let value = words[0];
    // Most pages differ at the end already.
    (words[words.len() - 1] == value && words.iter().all(|word| *word == value)).then_some(value)
}

/// Whether a write failed for lack of space.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

//! zswap itself, in user space: pages go in, are compressed into a pool, the coldest are written back to a swap file,
//! and all come out again as they were.
//!
//! Where to find what:
//! - [`zswap`]: store, load, invalidate: start here; [`folio`]: the same for many pages at once
//! - [`state`]: what all of them change, under a lock; [`shards`]: four of them, so that threads seldom wait
//! - [`writeback`]: from the pools to the swap file, when a limit is hit; [`shrinker`]: when memory is short
//! - [`groups`]: who is charged, and what is written back when; [`policy`]: how that was done in the past
//! - [`slots`]: the name of a page, and the states it goes through; [`entry`]: what is known of it; [`lru`]: which is the
//!   coldest
//! - [`pools`]: a codec and an allocator each; [`zpool`], [`zsmalloc`], [`zbud`]: the allocators; [`compress`], [`lzo`]: the
//!   codecs
//! - [`disk`]: to disk and back; [`swapfile`]: space there; [`seal`]: what is there can be neither read nor forged; [`sums`]:
//!   checksums of pages, where they are checked
//! - [`control`]: parameters and groups from outside; [`counters`]: the kernel's counters; [`table`]: tables and lists that
//!   everything else is made of; [`sync`]: locks and atomics, the system's or a model checker's
//!
//! Invariants:
//! - No unsafe code, no threads and, but for one random key, no system calls: memory and swap file are traits.
//! - A page swapped out has one reference for each owner; as long as there is one, [`Zswap::load`] returns the page or an
//!   error, never other bytes.
//! - No lock is held while a page is compressed, decompressed, sealed, read or written.
//! - Cost of an operation does not depend on the number of pages; it grows with the depth of the group in its tree.
// The links lead a reader of the source; the public documentation shows them as plain names.
#![allow(rustdoc::private_intra_doc_links)]

mod compress;
mod control;
mod counters;
mod disk;
mod entry;
mod folio;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod groups;
mod lru;
mod lzo;
mod names;
mod policy;
mod pools;
mod seal;
mod shards;
mod shrinker;
mod slots;
mod state;
mod sums;
mod swapfile;
mod sync;
mod table;
mod writeback;
mod zbud;
mod zpool;
mod zsmalloc;
mod zswap;

pub use compress::Compressor;
pub use counters::{Counters, GroupCounters};
pub use disk::Writeback;
pub use folio::{FolioCounters, MAX_FOLIO_ORDER};
pub use groups::{Group, GroupError, Home};
pub use names::{UnknownName, named};
pub use policy::Policy;
pub use shards::MAX_SHARDS;
pub use slots::Slot;
pub use swapfile::{HeapSwapFile, ReadAt, SwapFile};
pub use zpool::{HeapSource, MAX_ZSPAGE_PAGES, PageRun, PageSource, Zpool};
pub use zswap::{Config, LoadError, Origin, SwapOutError, Zswap};

/// Bytes in a page.
pub const PAGE_SIZE: usize = 4096;

/// The content of a page.
pub type Page = [u8; PAGE_SIZE];

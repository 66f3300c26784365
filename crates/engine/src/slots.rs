//! Slots: the names of swapped-out pages, and where each page is.
//!
//! ```text
//!            swap_out                            shrink                    written
//!   Vacant ───────────▶ Filled
//!          ───────────▶ Pooled (on the LRU) ◀──────────────▶ Writing ───────────────▶ Disk
//!          ────────────────────────────────────────────────────────────────────────▶
//! ```
//! 1. A slot has one reference for each owner; the last `invalidate` makes it vacant, from any state.
//! 2. Pooled entries, and only they, are on an LRU list: that of their group and node.
//! 3. A Writing entry still has its object in the pool: loads take that, an invalidation frees it at once.
//!    Its nonce, never used twice, tells the writer whether the entry it finds is still the one it took.

use crate::compress::Compressor;
use crate::pools::PoolId;
use crate::seal::{Nonce, Tag};
use crate::swapfile::{Run, units};
use crate::table::{Cell, Links, Nodes, Table};
use crate::zpool::Handle;

/// The highest slot: 30 bits, which leaves the two upper bits of a word to its holder.
const MAX_SLOT: u32 = (1 << 30) - 1;

/// The name of one swapped-out page. Only as good as the reference behind it: after the last
/// [`invalidate`](crate::Zswap::invalidate) the same slot is given to another page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    /// The slot as a number from 1 to 2^30 - 1.
    pub fn raw(self) -> u32 {
        self.0
    }

    /// The slot of that number; None if no slot can have it. Does not tell whether the slot is in use.
    pub fn from_raw(raw: u32) -> Option<Slot> {
        (1..=MAX_SLOT).contains(&raw).then_some(Slot(raw))
    }
}

/// Where a page is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Location {
    Vacant {
        next: u32,
    },
    /// Eight bytes, over and over.
    Filled {
        value: [u8; 8],
    },
    Pooled {
        object: Object,
        links: Links,
        heat: Heat,
    },
    Writing {
        object: Object,
        nonce: Nonce,
        loaded: bool,
    },
    Disk(Sealed),
}

/// What a scan of the LRU wants to know of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heat {
    /// A scan has passed it.
    Cold,
    /// No scan has met it yet.
    Fresh,
    /// It was loaded since the last scan, and is still there.
    Loaded,
}

/// A page in a pool. An object as long as a page is the page itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Object {
    pub handle: Handle,
    pub pool: PoolId,
}

/// An entry on disk. One as long as a page is the page itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sealed {
    /// The unit it begins at.
    pub place: u32,
    /// In bytes.
    pub length: u16,
    pub compressor: Compressor,
    pub nonce: Nonce,
    pub tag: Tag,
}

impl Sealed {
    /// The space it takes.
    pub fn run(&self) -> Run {
        Run { start: self.place, len: units(self.length as usize) }
    }
}

pub(crate) struct Entry {
    pub references: u32,
    /// The number of the group that is charged for it, or of one that forwards to that.
    pub group: u16,
    /// The node the page lived on.
    pub node: u8,
    pub location: Location,
}

const _: () = assert!(size_of::<Entry>() <= 40, "every stored page pays for this");

impl Cell for Entry {
    fn vacant(next: u32) -> Self {
        Entry { references: 0, group: 0, node: 0, location: Location::Vacant { next } }
    }
    fn next_vacant(&self) -> Option<u32> {
        match self.location {
            Location::Vacant { next } => Some(next),
            _ => None,
        }
    }
}

/// Every slot there is.
pub(crate) struct Slots {
    pub table: Table<Entry>,
}

impl Slots {
    pub fn new() -> Slots {
        Slots { table: Table::new() }
    }

    /// A slot with one reference; None if there is no memory for it or all 2^30 - 1 are in use.
    pub fn insert(&mut self, group: u16, node: u8, location: Location) -> Option<Slot> {
        self.table.insert(Entry { references: 1, group, node, location }, MAX_SLOT).map(Slot)
    }

    /// Frees a slot.
    pub fn remove(&mut self, slot: Slot) {
        self.table.remove(slot.0);
    }

    /// The entry of a slot in use. Panics on any other: its caller holds no reference.
    pub fn get_mut(&mut self, slot: Slot) -> &mut Entry {
        let entry = self.table.get_mut(slot.0);
        assert!(entry.references > 0, "slot {} is not in use", slot.0);
        entry
    }

    /// The entry's object and whether it was loaded since, if `slot` is still being written under `nonce`; else the
    /// writer has lost it.
    pub fn writing(&self, slot: Slot, nonce: Nonce) -> Option<(Object, bool)> {
        match self.table.get(slot.0).location {
            Location::Writing { object, nonce: current, loaded } if current == nonce => Some((object, loaded)),
            _ => None,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (Slot, &Entry)> {
        self.table.iter().map(|(index, entry)| (Slot(index), entry))
    }
}

impl Nodes for Slots {
    fn links(&mut self, index: u32) -> &mut Links {
        match &mut self.table.get_mut(index).location {
            Location::Pooled { links, .. } => links,
            location => panic!("slot {index} is on an LRU list and is {location:?}"),
        }
    }
}

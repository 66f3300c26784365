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
//! 4. Entries are small (see `entry`). What only a Writing or Disk entry needs is in a record, and each record is one
//!    entry's; of an entry with more owners than it can count, the rest is counted beside it.

use crate::compress::Compressor;
use crate::entry::{Content, Entry, MAX_REFERENCES};
pub(crate) use crate::entry::{Heat, Object};
use crate::seal::{Nonce, Tag};
use crate::shards::{MAX_SHARDS, Shared};
use crate::sums::Sums;
use crate::swapfile::{Run, units};
use crate::sync::Ordering::Relaxed;
use crate::table::{CellOf, Links, Nodes, Table};
use crate::zpool::Place;
use std::collections::HashMap;
use std::sync::Arc;

/// The highest slot: 30 bits, which leaves the two upper bits of a word to its holder.
const MAX_SLOT: u32 = (1 << 30) - 1;
/// The highest index in a shard's table.
const MAX_INDEX: u32 = MAX_SLOT / MAX_SHARDS as u32;

/// The name of one swapped-out page. Only as good as the reference behind it: after the last
/// [`invalidate`](crate::Zswap::invalidate) the same slot is given to another page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    /// The slot as a number from 1 to 2^30 - 1.
    pub fn raw(self) -> u32 {
        self.0
    }

    /// The number of its shard.
    pub(crate) fn shard(self) -> usize {
        self.0 as usize % MAX_SHARDS
    }

    /// Its index in the shard's table.
    pub(crate) fn index(self) -> u32 {
        self.0 / MAX_SHARDS as u32
    }

    /// The slot of that number; None if no slot can have it. Does not tell whether the slot is in use.
    pub fn from_raw(raw: u32) -> Option<Slot> {
        (1..=MAX_SLOT).contains(&raw).then_some(Slot(raw))
    }
}

/// Where a page is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Location {
    /// Eight bytes, over and over.
    Filled {
        value: [u8; 8],
    },
    Pooled {
        object: Object,
        heat: Heat,
    },
    Writing(Writing),
    Disk(Sealed),
}

/// A page on its way to disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writing {
    pub object: Object,
    pub nonce: Nonce,
    /// Loaded since it was taken.
    pub loaded: bool,
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

#[derive(Debug, Clone, Copy)]
enum Record {
    Writing(Writing),
    Disk(Sealed),
}

const _: () = assert!(size_of::<CellOf<Record>>() <= 32, "every page on disk pays for this");

/// Every slot of a shard.
pub(crate) struct Slots {
    shard: usize,
    shared: Arc<Shared>,
    /// Entries stamped since this shard let time pass.
    stamped: u32,
    table: Table<Entry>,
    records: Table<CellOf<Record>>,
    /// References beyond those that the entry counts.
    more_references: HashMap<Slot, u64>,
    /// Checksums of the pages, where they are checked.
    sums: Option<Sums>,
}

impl Slots {
    pub fn new(shard: usize, shared: Arc<Shared>, verify: bool) -> Slots {
        let (table, records, more_references) = (Table::new(), Table::new(), HashMap::new());
        Slots { shard, shared, stamped: 0, table, records, more_references, sums: verify.then(Sums::new) }
    }

    /// The slot of an index.
    pub fn slot(&self, index: u32) -> Slot {
        Slot(index * MAX_SHARDS as u32 + self.shard as u32)
    }

    /// Notes on an entry that it was put at the hot end of its list now. Time passes as entries are put there: a step with
    /// each sixty-fourth of all there are, if all shards have as many. It wraps around, after four times as many as there are:
    /// of two entries in different shards that both were left alone for that long, either may then be taken for the older.
    pub fn stamp(&mut self, slot: Slot) {
        self.stamped += 1;
        if self.stamped >= (self.table.used() * MAX_SHARDS as u32 / 64).max(64) {
            self.stamped = 0;
            self.shared.time.fetch_add(1, Relaxed);
        }
        self.entry(slot).age = self.shared.time.load(Relaxed);
    }

    /// How long ago an entry was stamped.
    pub fn age(&mut self, slot: Slot) -> u8 {
        self.shared.time.load(Relaxed).wrapping_sub(self.entry(slot).age)
    }

    /// Memory of all entries, records and checksums, in bytes.
    pub fn memory(&self) -> usize {
        self.table.memory() + self.records.memory() + self.sums.as_ref().map_or(0, Sums::memory)
    }

    /// The slot that the next insertion will have; None if there is no memory for it or all of this shard are in use.
    pub fn next(&mut self) -> Option<Slot> {
        let index = self.table.next(MAX_INDEX)?;
        if let Some(sums) = &mut self.sums {
            sums.reserve(index)?;
        }
        Some(self.slot(index))
    }

    /// Keeps the checksum of the page of a slot in use. Panics unless checksums are kept.
    pub fn set_sum(&mut self, slot: Slot, sum: u32) {
        self.sums.as_mut().expect("checksums are kept").set(slot.index(), sum);
    }

    /// Returns the checksum of the page of a slot in use, if checksums are kept. A same-filled page has no meaningful one.
    pub fn sum(&self, slot: Slot) -> Option<u32> {
        self.sums.as_ref().map(|sums| sums.get(slot.index()))
    }

    /// A slot with one reference; None as for [`next`](Self::next), or if there is no memory for its record.
    pub fn insert(&mut self, group: u16, node: u8, location: Location) -> Option<Slot> {
        self.next()?;
        let content = match location {
            Location::Filled { value } => Content::Filled { value },
            Location::Pooled { object, heat } => Content::Pooled { object, heat },
            Location::Writing(writing) => Content::Recorded { record: self.record(Record::Writing(writing))? },
            Location::Disk(sealed) => Content::Recorded { record: self.record(Record::Disk(sealed))? },
        };
        self.table.insert(Entry::new(group, node, content), MAX_INDEX).map(|index| self.slot(index))
    }

    /// Frees a slot that has one reference.
    pub fn remove(&mut self, slot: Slot) {
        if let Content::Recorded { record } = self.table.remove(slot.index()).content() {
            self.records.remove(record);
        }
    }

    fn record(&mut self, record: Record) -> Option<u32> {
        self.records.insert(CellOf::Used(record), u32::MAX - 1)
    }

    /// The entry of a slot in use. Panics on any other: its caller holds no reference.
    fn entry(&mut self, slot: Slot) -> &mut Entry {
        let entry = self.table.get_mut(slot.index());
        assert!(entry.references() > 0, "slot {} is not in use", slot.0);
        entry
    }

    /// The group that a slot in use names, and the node that its page lived on.
    pub fn home(&mut self, slot: Slot) -> (u16, u8) {
        let entry = self.entry(slot);
        (entry.group, entry.node())
    }

    /// Makes a slot in use name another group.
    pub fn set_group(&mut self, slot: Slot, group: u16) {
        self.entry(slot).group = group;
    }

    /// Adds an owner.
    pub fn share(&mut self, slot: Slot) {
        let entry = self.entry(slot);
        match entry.references() {
            MAX_REFERENCES => *self.more_references.entry(slot).or_insert(0) += 1,
            references => entry.set_references(references + 1),
        }
    }

    /// Takes an owner away, unless it is the last: then it says so.
    pub fn unshare(&mut self, slot: Slot) -> bool {
        let references = self.entry(slot).references();
        if references == MAX_REFERENCES
            && let Some(more) = self.more_references.get_mut(&slot)
        {
            *more -= 1;
            if *more == 0 {
                self.more_references.remove(&slot);
            }
            return false;
        }
        let last = references == 1;
        if !last {
            self.entry(slot).set_references(references - 1);
        }
        last
    }

    /// Where the page of a slot in use is.
    pub fn location(&mut self, slot: Slot) -> Location {
        match self.entry(slot).content() {
            Content::Vacant { .. } => unreachable!("a slot in use is not vacant"),
            Content::Filled { value } => Location::Filled { value },
            Content::Pooled { object, heat } => Location::Pooled { object, heat },
            Content::Recorded { record } => match *self.records.get(record).used() {
                Record::Writing(writing) => Location::Writing(writing),
                Record::Disk(sealed) => Location::Disk(sealed),
            },
        }
    }

    /// Makes a page in the pool Pooled, or leaves it so; it is on no list, or stays where it is.
    pub fn set_pooled(&mut self, slot: Slot, object: Object, heat: Heat) {
        let entry = self.entry(slot);
        let before = entry.content();
        entry.set(Content::Pooled { object, heat });
        if let Content::Recorded { record } = before {
            self.records.remove(record);
        }
    }

    /// Makes a page in the pool, which is on no list, Writing; false if there is no memory for that.
    #[must_use]
    pub fn set_writing(&mut self, slot: Slot, object: Object, nonce: Nonce) -> bool {
        let record = self.record(Record::Writing(Writing { object, nonce, loaded: false }));
        if let Some(record) = record {
            self.entry(slot).set(Content::Recorded { record });
        }
        record.is_some()
    }

    /// Puts a page that was being written on disk; its object is the caller's to free.
    pub fn set_disk(&mut self, slot: Slot, sealed: Sealed) {
        match self.entry(slot).content() {
            Content::Recorded { record } => *self.records.get_mut(record).used_mut() = Record::Disk(sealed),
            content => panic!("{slot:?} was not being written, but {content:?}"),
        }
    }

    /// A page in the pool was loaded.
    pub fn mark_loaded(&mut self, slot: Slot) {
        let entry = self.entry(slot);
        match entry.content() {
            Content::Pooled { object, .. } => entry.set(Content::Pooled { object, heat: Heat::Loaded }),
            Content::Recorded { record } => {
                if let Record::Writing(writing) = self.records.get_mut(record).used_mut() {
                    writing.loaded = true;
                }
            }
            Content::Vacant { .. } | Content::Filled { .. } => {}
        }
    }

    /// An object was moved; tells its owner, the entry of that index.
    pub fn move_object(&mut self, owner: u32, to: Place) {
        let entry = self.table.get_mut(owner);
        match entry.content() {
            Content::Pooled { object, heat } => {
                entry.set(Content::Pooled { object: Object { place: to, ..object }, heat })
            }
            Content::Recorded { record } => match self.records.get_mut(record).used_mut() {
                Record::Writing(writing) => writing.object.place = to,
                Record::Disk(_) => panic!("slot {owner} is on disk and owns an object"),
            },
            content => panic!("slot {owner} owns an object and is {content:?}"),
        }
    }

    /// The entry's object and whether it was loaded since, if `slot` is still being written under `nonce`; else the
    /// writer has lost it.
    pub fn writing(&self, slot: Slot, nonce: Nonce) -> Option<(Object, bool)> {
        let Content::Recorded { record } = self.table.get(slot.index()).content() else { return None };
        match *self.records.get(record).used() {
            Record::Writing(writing) if writing.nonce == nonce => Some((writing.object, writing.loaded)),
            _ => None,
        }
    }

    /// Every slot in use, and the group that it names.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, u16)> {
        self.table.iter().map(move |(index, entry)| (self.slot(index), entry.group))
    }

    /// Panics if the tables contradict themselves or each other.
    pub fn check_valid(&self) {
        self.table.check_valid();
        self.records.check_valid();
        let mut recorded = std::collections::HashSet::new();
        for (index, entry) in self.table.iter() {
            assert!(entry.references() > 0, "slot {index} has no owner");
            if let Content::Recorded { record } = entry.content() {
                self.records.get(record).used();
                assert!(recorded.insert(record), "slot {index} shares its record");
            }
        }
        assert_eq!(recorded.len(), self.records.used() as usize, "records against their entries");
        for (slot, more) in &self.more_references {
            let counted = self.table.get(slot.index()).references();
            assert!(*more > 0 && counted == MAX_REFERENCES, "{slot:?} has {more} references besides {counted}");
        }
    }
}

impl Nodes for Slots {
    fn links(&mut self, index: u32) -> &mut Links {
        self.table
            .get_mut(index)
            .links()
            .unwrap_or_else(|| panic!("slot {index} is on an LRU list and not in the pool"))
    }
}

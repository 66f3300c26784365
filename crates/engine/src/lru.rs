//! The order in which entries are written back: least recently used first, with a second chance.
//!
//! 1. Stores add at the hot end. A load that leaves the entry (its fault is under way, or another owner has it) marks it
//!    loaded.
//! 2. A scan takes from the cold end; a loaded entry goes to the hot end once more, as a cold one.
//! 3. For a scan under a limit, store order is age, and a fresh entry is as good as a cold one. A scan under pressure lets
//!    each fresh entry pass once, and ends at a loaded one: from there on the list is warm.
//! 4. Each shard has a list of its own for the same group and node. A scan takes from the one whose coldest entry is oldest.

use crate::slots::{Heat, Location, Object, Slot, Slots};
use crate::table::List;

#[derive(Default)]
pub(crate) struct Lru {
    /// Coldest at the head.
    list: List,
    /// How many entries the shrinker is to leave alone: see `shrinker`.
    pub protected: u32,
}

/// Why a list is scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Limit,
    Pressure,
}

/// What a step of the scan has met.
pub(crate) enum Met {
    Nothing,
    /// An entry that keeps its place in the pool for another round.
    SecondChance,
    /// An entry that was loaded since the last scan, and is still there.
    InFlight,
    /// An entry that is now off the list, and still Pooled: the caller changes that.
    Victim(Slot, Object),
}

impl Lru {
    /// Entries on the list.
    pub fn len(&self) -> u32 {
        self.list.len()
    }

    /// A page of this list was loaded: evidence that what is near its age is still in use.
    pub fn protect(&mut self) {
        self.protected = (self.protected + 1).min(self.list.len());
    }

    /// Adds an entry at the hot end. A list that grows needs less protection: all the same a quarter is left to it.
    pub fn add(&mut self, slots: &mut Slots, slot: Slot, object: Object) {
        if self.protected > self.list.len() / 4 {
            self.protected /= 2;
        }
        slots.set_pooled(slot, object, Heat::Fresh);
        self.push_hot(slots, slot);
    }

    fn push_hot(&mut self, slots: &mut Slots, slot: Slot) {
        slots.stamp(slot);
        self.list.push_back(slots, slot.index());
    }

    /// Puts an entry that was taken to be written back at the cold end.
    pub fn put_back(&mut self, slots: &mut Slots, slot: Slot, object: Object) {
        slots.set_pooled(slot, object, Heat::Cold);
        self.list.push_front(slots, slot.index());
    }

    /// Panics if an entry is not where it should be. What is read for that will be wanted when the entry is taken off.
    pub fn check_member(&self, slots: &mut Slots, slot: Slot) {
        self.list.check_member(slots, slot.index());
    }

    /// Takes an entry off the list.
    pub fn remove(&mut self, slots: &mut Slots, slot: Slot) {
        self.list.unlink(slots, slot.index());
    }

    /// Puts all entries of another list before the coldest of this one.
    pub fn inherit(&mut self, slots: &mut Slots, other: Lru) {
        self.list.prepend(slots, other.list);
        self.protected = self.protected.saturating_add(other.protected);
    }

    /// The coldest entry.
    pub fn coldest(&self, slots: &Slots) -> Option<Slot> {
        self.list.head().map(|index| slots.slot(index))
    }

    /// One step of the scan.
    pub fn scan(&mut self, slots: &mut Slots, cause: Cause) -> Met {
        let Some(slot) = self.coldest(slots) else { return Met::Nothing };
        let Location::Pooled { object, heat } = slots.location(slot) else {
            panic!("{slot:?} is on an LRU list and not in the pool");
        };
        slots.set_pooled(slot, object, Heat::Cold);
        if cause == Cause::Pressure {
            self.protected = self.protected.saturating_sub(1);
        }
        let met = match (heat, cause) {
            (Heat::Cold, _) | (Heat::Fresh, Cause::Limit) => Met::Victim(slot, object),
            (Heat::Fresh, Cause::Pressure) | (Heat::Loaded, Cause::Limit) => Met::SecondChance,
            (Heat::Loaded, Cause::Pressure) => Met::InFlight,
        };
        self.list.unlink(slots, slot.index());
        if !matches!(met, Met::Victim(..)) {
            self.push_hot(slots, slot);
        }
        met
    }

    /// Sends the coldest entry to the hot end, as it is.
    pub fn rotate(&mut self, slots: &mut Slots) {
        if let Some(slot) = self.coldest(slots) {
            self.list.unlink(slots, slot.index());
            self.push_hot(slots, slot);
        }
    }

    /// Panics if the list is inconsistent; returns the slots on it, coldest first.
    pub fn check_valid(&self, slots: &mut Slots) -> Vec<Slot> {
        self.list.check_valid(slots).into_iter().map(|index| slots.slot(index)).collect()
    }
}

//! The order in which entries are written back: least recently used first, with a second chance.
//!
//! 1. Stores add at the hot end. A load that leaves the entry (another owner still has it) sets its referenced bit.
//! 2. The scan takes from the cold end; a referenced entry loses the bit and goes to the hot end once more.
//! 3. A page that was loaded by its only owner is gone, so store order is age: fresh entries need no bit.

use crate::slots::{Location, Object, Slot, Slots};
use crate::table::{Links, List};

#[derive(Default)]
pub(crate) struct Lru {
    /// Coldest at the head.
    list: List,
}

impl Lru {
    /// Entries on the list.
    pub fn len(&self) -> u32 {
        self.list.len()
    }

    /// Adds an entry at the hot end.
    pub fn add(&mut self, slots: &mut Slots, slot: Slot, object: Object) {
        slots.get_mut(slot).location = pooled(object);
        self.list.push_back(slots, slot.raw());
    }

    /// Puts an entry that was taken to be written back at the cold end.
    pub fn put_back(&mut self, slots: &mut Slots, slot: Slot, object: Object) {
        slots.get_mut(slot).location = pooled(object);
        self.list.push_front(slots, slot.raw());
    }

    /// Takes an entry off the list.
    pub fn remove(&mut self, slots: &mut Slots, slot: Slot) {
        self.list.unlink(slots, slot.raw());
    }

    /// One step of the scan: `Some(None)` if the coldest entry got its second chance, `Some(Some(..))` if it was taken,
    /// None if the list is empty. The taken entry is off the list and still Pooled: the caller changes that.
    pub fn scan(&mut self, slots: &mut Slots) -> Option<Option<(Slot, Object)>> {
        let index = self.list.head()?;
        let slot = Slot::from_raw(index).expect("the list holds slots");
        self.list.unlink(slots, index);
        match &mut slots.get_mut(slot).location {
            Location::Pooled { referenced, .. } if *referenced => {
                *referenced = false;
                self.list.push_back(slots, index);
                Some(None)
            }
            Location::Pooled { object, .. } => Some(Some((slot, *object))),
            location => panic!("slot {index} is on the LRU list and is {location:?}"),
        }
    }

    /// Panics if the list is inconsistent; returns the slots on it, coldest first.
    pub fn check_valid(&self, slots: &mut Slots) -> Vec<u32> {
        self.list.check_valid(slots)
    }
}

fn pooled(object: Object) -> Location {
    Location::Pooled { object, links: Links::default(), referenced: false }
}

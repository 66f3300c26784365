//! What is known of a page, in twenty bytes: every page in the pool pays for them.
//!
//! 1. What an entry is decides what its fields mean; only this file reads them.
//! 2. `links` are the neighbours on the LRU while the page is in the pool, the value of a same-filled page, and the
//!    next vacant entry of a vacant one.
//! 3. `place` is the object's while the page is in the pool, and the number of the record of a page that is being written or
//!    on disk: few pages are, or they take no memory in the pool, so they can afford one (see `slots`).
//! 4. `place` has the node in its upper eight bits, whatever else it is.
//! 5. `age` says when the entry was last put at the hot end of its list (see `slots`).

use crate::PAGE_SIZE;
use crate::pools::PoolId;
use crate::table::{Cell, Links};
use crate::zpool::{MAX_PLACES, MAX_ZSPAGES, Place};

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
    pub pool: PoolId,
    /// Changes when the pool is compacted.
    pub place: Place,
    pub length: u16,
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    Vacant {
        next: u32,
    },
    /// Eight bytes, over and over.
    Filled {
        value: [u8; 8],
    },
    Pooled {
        object: Object,
        heat: Heat,
    },
    /// Being written, or on disk: the record knows.
    Recorded {
        record: u32,
    },
}

#[derive(Clone, Copy)]
pub(crate) struct Entry {
    links: Links,
    place: [u8; 8],
    /// The number of the group that is charged for it, or of one that forwards to that.
    pub group: u16,
    pub age: u8,
    /// What it is, above the number of its references.
    kind: u8,
}

const _: () = assert!(size_of::<Entry>() == 20, "every stored page pays for this");

const VACANT: u8 = 0;
const FILLED: u8 = 1;
const COLD: u8 = 2;
const FRESH: u8 = 3;
const LOADED: u8 = 4;
const RECORDED: u8 = 5;

/// Bits of `kind` for references, and of `place` below each of its parts.
const REFERENCE_BITS: u32 = 5;
const INDEX_SHIFT: u32 = 28;
const LENGTH_SHIFT: u32 = 41;
const POOL_SHIFT: u32 = 53;
const NODE_SHIFT: u32 = 56;

/// Most references that an entry can count.
pub(crate) const MAX_REFERENCES: u8 = (1 << REFERENCE_BITS) - 1;

const _: () = assert!(MAX_ZSPAGES < 1 << INDEX_SHIFT);
const _: () = assert!(MAX_PLACES <= 1 << (LENGTH_SHIFT - INDEX_SHIFT));
const _: () = assert!(PAGE_SIZE <= 1 << (POOL_SHIFT - LENGTH_SHIFT), "lengths are kept less one");

impl Object {
    fn packed(self) -> u64 {
        let Place { zspage, index } = self.place;
        zspage as u64
            | (index as u64) << INDEX_SHIFT
            | (self.length as u64 - 1) << LENGTH_SHIFT
            | (self.pool.number() as u64) << POOL_SHIFT
    }

    fn unpacked(word: u64) -> Object {
        let bits = |shift: u32, end: u32| word >> shift & ((1 << (end - shift)) - 1);
        Object {
            pool: PoolId::from_number(bits(POOL_SHIFT, NODE_SHIFT) as u8),
            place: Place { zspage: bits(0, INDEX_SHIFT) as u32, index: bits(INDEX_SHIFT, LENGTH_SHIFT) as u16 },
            length: bits(LENGTH_SHIFT, POOL_SHIFT) as u16 + 1,
        }
    }
}

impl Entry {
    /// An entry with one reference.
    pub fn new(group: u16, node: u8, content: Content) -> Entry {
        let mut entry = Entry { links: Links::default(), place: [0; 8], group, age: 0, kind: 1 };
        entry.place[7] = node;
        entry.set(content);
        entry
    }

    /// The node the page lived on.
    pub fn node(&self) -> u8 {
        self.place[7]
    }

    pub fn references(&self) -> u8 {
        self.kind & MAX_REFERENCES
    }

    pub fn set_references(&mut self, references: u8) {
        self.kind = self.kind & !MAX_REFERENCES | references;
    }

    pub fn content(&self) -> Content {
        let word = u64::from_le_bytes(self.place);
        let pooled = |heat| Content::Pooled { object: Object::unpacked(word), heat };
        match self.kind >> REFERENCE_BITS {
            VACANT => Content::Vacant { next: self.links.next },
            FILLED => Content::Filled { value: self.value() },
            COLD => pooled(Heat::Cold),
            FRESH => pooled(Heat::Fresh),
            LOADED => pooled(Heat::Loaded),
            _ => Content::Recorded { record: word as u32 },
        }
    }

    /// Changes what the entry is; the links of one that stays in the pool are left alone.
    pub fn set(&mut self, content: Content) {
        let (kind, word) = match content {
            Content::Vacant { next } => {
                self.links = Links { prev: 0, next };
                (VACANT, 0)
            }
            Content::Filled { value } => {
                let (prev, next) = value.split_at(4);
                let half = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                self.links = Links { prev: half(prev), next: half(next) };
                (FILLED, 0)
            }
            Content::Pooled { object, heat: Heat::Cold } => (COLD, object.packed()),
            Content::Pooled { object, heat: Heat::Fresh } => (FRESH, object.packed()),
            Content::Pooled { object, heat: Heat::Loaded } => (LOADED, object.packed()),
            Content::Recorded { record } => (RECORDED, record as u64),
        };
        self.kind = kind << REFERENCE_BITS | self.references();
        self.place = (word | (self.node() as u64) << NODE_SHIFT).to_le_bytes();
    }

    fn value(&self) -> [u8; 8] {
        let Links { prev, next } = self.links;
        (prev as u64 | (next as u64) << 32).to_le_bytes()
    }

    /// The neighbours on the LRU of an entry in the pool; None of any other.
    pub fn links(&mut self) -> Option<&mut Links> {
        matches!(self.kind >> REFERENCE_BITS, COLD | FRESH | LOADED).then_some(&mut self.links)
    }
}

impl Cell for Entry {
    fn vacant(next: u32) -> Self {
        let mut entry = Entry::new(0, 0, Content::Vacant { next });
        entry.set_references(0);
        entry
    }

    fn next_vacant(&self) -> Option<u32> {
        (self.kind >> REFERENCE_BITS == VACANT).then_some(self.links.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::Compressor;
    use crate::zpool::Zpool;
    use proptest::prelude::*;

    fn content() -> impl Strategy<Value = Content> {
        let heat = prop::sample::select(&[Heat::Cold, Heat::Fresh, Heat::Loaded][..]);
        let compressor = prop::sample::select(&Compressor::ALL[..]);
        let pool = (compressor, prop::sample::select(&Zpool::ALL[..])).prop_map(|(c, z)| PoolId::new(c, z));
        let place = (0..=MAX_ZSPAGES, 0..MAX_PLACES as u16).prop_map(|(zspage, index)| Place { zspage, index });
        let object =
            (pool, place, 1..=PAGE_SIZE as u16).prop_map(|(pool, place, length)| Object { pool, place, length });
        prop_oneof![
            any::<u32>().prop_map(|next| Content::Vacant { next }),
            any::<[u8; 8]>().prop_map(|value| Content::Filled { value }),
            (object, heat).prop_map(|(object, heat)| Content::Pooled { object, heat }),
            any::<u32>().prop_map(|record| Content::Recorded { record }),
        ]
    }

    proptest! {
        #[test]
        fn an_entry_returns_what_it_was_given(
            contents in prop::collection::vec(content(), 1..5),
            group in any::<u16>(),
            node in any::<u8>(),
            references in 1..=MAX_REFERENCES,
        ) {
            let mut entry = Entry::new(group, node, contents[0]);
            prop_assert_eq!(entry.references(), 1);
            entry.set_references(references);
            for content in contents {
                entry.set(content);
                prop_assert_eq!(entry.content(), content);
                prop_assert_eq!((entry.group, entry.node(), entry.references()), (group, node, references));
            }
        }
    }
}

//! Where each evicted page of an address space is.
//!
//! One word a page, in chunks of 2 MiB of address space, so that no operation on a page depends on how many there are.
//! A page that is not in the table is resident, or was never touched: either way the kernel's answer is right, and a
//! fault on it is answered with zeros. See ARCHITECTURE.md for the state machine.

use std::collections::BTreeMap;

use uzswap_engine::Slot;

use crate::PAGE;
use crate::range::Range;

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// In the program, or never touched.
    Resident,
    /// In the staging area, under this sequence number.
    Staged(u32),
    /// In the engine.
    Stored(Slot),
    /// In the engine, and a thread is bringing it back.
    Loading(Slot),
}

/// Sequence numbers and slots are this wide.
pub const STATE_BITS: u32 = 30;
const STATE_MASK: u32 = (1 << STATE_BITS) - 1;

/// What is known of pages is kept in chunks of so many: 2 MiB of address space.
pub(crate) const CHUNK_PAGES: usize = 512;
pub(crate) const CHUNK: u64 = CHUNK_PAGES as u64 * PAGE;

#[derive(Clone)]
struct Chunk {
    words: [u32; CHUNK_PAGES],
    /// Words that are not 0.
    used: u16,
}

/// The states of all pages that are not resident.
#[derive(Default)]
pub struct PageTable {
    chunks: BTreeMap<u64, Box<Chunk>>,
}

impl PageTable {
    /// Where the page at `address` is.
    pub fn get(&self, address: u64) -> PageState {
        self.chunks.get(&(address / CHUNK)).map_or(PageState::Resident, |chunk| unpack(chunk.words[index(address)]))
    }

    /// Whether any page of the 2 MiB that `address` lies in is not resident.
    pub fn holds_any_of(&self, address: u64) -> bool {
        self.chunks.contains_key(&(address / CHUNK))
    }

    /// The page at `address` and its slot, if it is stored.
    pub fn stored(&self, address: u64) -> Option<(u64, Slot)> {
        match self.get(address) {
            PageState::Stored(slot) => Some((address, slot)),
            _ => None,
        }
    }

    /// The pages from `address` on, up to the first that is not stored, at most so many.
    pub fn stored_run(&self, address: u64, pages: usize) -> Vec<(u64, Slot)> {
        let mut run = Vec::new();
        let mut at = address;
        while let Some(chunk) = self.chunks.get(&(at / CHUNK)) {
            for word in &chunk.words[index(at)..] {
                match unpack(*word) {
                    PageState::Stored(slot) if run.len() < pages => run.push((at, slot)),
                    _ => return run,
                }
                at += PAGE;
            }
        }
        run
    }

    /// How many of the pages, from the first on, are loading from their slots.
    pub fn loading(&self, pages: &[(u64, Slot)]) -> usize {
        let mut loading = 0;
        for pages in pages.chunk_by(in_one_chunk) {
            let Some(chunk) = self.chunks.get(&(pages[0].0 / CHUNK)) else { break };
            let is_loading = |(page, slot): &&(u64, Slot)| chunk.words[index(*page)] == pack(PageState::Loading(*slot));
            let count = pages.iter().take_while(is_loading).count();
            loading += count;
            if count < pages.len() {
                break;
            }
        }
        loading
    }

    /// Has each of the pages that is not resident become what `to` says, if anything: of its index, its slot, and where it is.
    pub fn change(&mut self, pages: &[(u64, Slot)], mut to: impl FnMut(usize, Slot, PageState) -> Option<PageState>) {
        let mut first = 0;
        for pages in pages.chunk_by(in_one_chunk) {
            let number = pages[0].0 / CHUNK;
            if let Some(chunk) = self.chunks.get_mut(&number) {
                for (i, &(page, slot)) in pages.iter().enumerate() {
                    let word = &mut chunk.words[index(page)];
                    if *word != 0
                        && let Some(state) = to(first + i, slot, unpack(*word))
                    {
                        *word = pack(state);
                        chunk.used -= u16::from(*word == 0);
                    }
                }
                if chunk.used == 0 {
                    self.chunks.remove(&number);
                }
            }
            first += pages.len();
        }
    }

    /// Records where the page at `address` is; gives where it was.
    pub fn set(&mut self, address: u64, state: PageState) -> PageState {
        let (number, word) = (address / CHUNK, pack(state));
        if word == 0 && !self.chunks.contains_key(&number) {
            return PageState::Resident;
        }
        let chunk = self.chunks.entry(number).or_insert_with(|| Box::new(Chunk { words: [0; CHUNK_PAGES], used: 0 }));
        let old = std::mem::replace(&mut chunk.words[index(address)], word);
        chunk.used = chunk.used + u16::from(word != 0) - u16::from(old != 0);
        if chunk.used == 0 {
            self.chunks.remove(&number);
        }
        unpack(old)
    }

    /// Takes every page of `range` out of the table; gives those that were in it.
    pub fn take(&mut self, range: Range) -> Vec<(u64, PageState)> {
        let taken = self.list(range);
        for &(address, _) in &taken {
            self.set(address, PageState::Resident);
        }
        taken
    }

    /// How many pages are not resident.
    pub fn away(&self) -> usize {
        self.chunks.values().map(|chunk| usize::from(chunk.used)).sum()
    }

    /// The pages of `range` that are not resident, in order.
    pub fn list(&self, range: Range) -> Vec<(u64, PageState)> {
        self.within(range).collect()
    }

    /// The first page of `range` that is not resident.
    pub fn first_away(&self, range: Range) -> Option<u64> {
        self.within(range).next().map(|(page, _)| page)
    }

    fn within(&self, range: Range) -> impl Iterator<Item = (u64, PageState)> + '_ {
        let chunks = (!range.is_empty()).then(|| self.chunks.range(range.start / CHUNK..=(range.end - 1) / CHUNK));
        (chunks.into_iter().flatten())
            .flat_map(|(number, chunk)| {
                let first = number * CHUNK;
                let words = chunk.words.iter().enumerate().filter(|(_, word)| **word != 0);
                words.map(move |(i, word)| (first + i as u64 * PAGE, unpack(*word)))
            })
            .filter(move |(address, _)| range.contains(*address))
    }

    /// How many pages of `range`, which lies in a naturally aligned folio of at most 2 MiB, are not resident.
    pub fn absent(&self, range: Range) -> usize {
        let first = index(range.start);
        self.chunks.get(&(range.start / CHUNK)).map_or(0, |chunk| {
            let words = &chunk.words[first..first + (range.len() / PAGE) as usize];
            words.iter().filter(|word| **word != 0).count()
        })
    }

    /// Every page that is not resident, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, PageState)> + '_ {
        self.chunks.iter().flat_map(|(number, chunk)| {
            let words = chunk.words.iter().enumerate().filter(|(_, word)| **word != 0);
            words.map(move |(i, word)| (number * CHUNK + i as u64 * PAGE, unpack(*word)))
        })
    }
}

fn in_one_chunk(one: &(u64, Slot), other: &(u64, Slot)) -> bool {
    one.0 / CHUNK == other.0 / CHUNK
}

/// The place of a page in its chunk.
pub(crate) fn index(address: u64) -> usize {
    (address / PAGE) as usize % CHUNK_PAGES
}

fn pack(state: PageState) -> u32 {
    let (tag, value) = match state {
        PageState::Resident => return 0,
        PageState::Staged(sequence) => (1, sequence),
        PageState::Stored(slot) => (2, slot.raw()),
        PageState::Loading(slot) => (3, slot.raw()),
    };
    assert!(value <= STATE_MASK, "slot or sequence number out of range");
    tag << STATE_BITS | value
}

fn unpack(word: u32) -> PageState {
    let slot = || Slot::from_raw(word & STATE_MASK).expect("a slot was packed");
    match word >> STATE_BITS {
        0 => PageState::Resident,
        1 => PageState::Staged(word & STATE_MASK),
        2 => PageState::Stored(slot()),
        _ => PageState::Loading(slot()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> impl Strategy<Value = PageState> {
        let slot = || (1..=STATE_MASK).prop_map(|raw| Slot::from_raw(raw).unwrap());
        prop_oneof![
            Just(PageState::Resident),
            (0..=STATE_MASK).prop_map(PageState::Staged),
            slot().prop_map(PageState::Stored),
            slot().prop_map(PageState::Loading),
        ]
    }

    proptest! {
        /// The table behaves as a map from address to state in which resident pages are absent.
        #[test]
        fn behaves_as_a_map(steps in prop::collection::vec((0u64..2000, state()), 1..200),
                            cut in (0u64..2000, 0u64..1500)) {
            let mut table = PageTable::default();
            let mut model = BTreeMap::new();
            for (page, state) in steps {
                let old = table.set(page * PAGE, state);
                let model_old = match state {
                    PageState::Resident => model.remove(&(page * PAGE)),
                    _ => model.insert(page * PAGE, state),
                };
                prop_assert_eq!(old, model_old.unwrap_or(PageState::Resident));
                prop_assert_eq!(table.get(page * PAGE + 17), state);
            }
            prop_assert_eq!(table.iter().collect::<Vec<_>>(), model.clone().into_iter().collect::<Vec<_>>());
            for page in 0..2000 / 64 {
                let folio = Range::sized(page * 64 * PAGE, 64 * PAGE);
                prop_assert_eq!(table.absent(folio), model.range(folio.start..folio.end).count());
            }
            let stored = |page: u64| match model.get(&(page * PAGE)) {
                Some(PageState::Stored(slot)) => Some((page * PAGE, *slot)),
                _ => None,
            };
            for page in (0..2000).step_by(7) {
                prop_assert_eq!(table.stored_run(page * PAGE, 5), (page..page + 5).map_while(stored).collect::<Vec<_>>());
            }
            // What is stored is loaded; every third page of it comes back.
            let all: Vec<_> = (0..2000).filter_map(stored).collect();
            table.change(&all, |_, slot, _| Some(PageState::Loading(slot)));
            prop_assert_eq!(table.loading(&all), all.len());
            let mut changed = Vec::new();
            table.change(&all, |i, slot, now| {
                assert_eq!(now, PageState::Loading(slot));
                changed.push((all[i].0, slot));
                (i % 3 == 0).then_some(PageState::Resident)
            });
            prop_assert_eq!(&changed, &all);
            prop_assert_eq!(table.loading(&all), 0);
            prop_assert_eq!(table.loading(&all[1.min(all.len())..]), 2.min(all.len().saturating_sub(1)));
            for (i, (page, slot)) in all.iter().enumerate() {
                prop_assert_eq!(table.get(*page), if i % 3 == 0 { PageState::Resident } else { PageState::Loading(*slot) });
                table.set(*page, PageState::Stored(*slot));
            }
            let cut = Range::sized(cut.0 * PAGE, cut.1 * PAGE);
            let (inside, rest): (Vec<_>, Vec<_>) = model.into_iter().partition(|(address, _)| cut.contains(*address));
            prop_assert_eq!(table.take(cut), inside);
            prop_assert_eq!(table.iter().collect::<Vec<_>>(), rest.clone());
            for (address, _) in rest {
                table.set(address, PageState::Resident);
            }
            prop_assert!(table.chunks.is_empty());
        }
    }
}

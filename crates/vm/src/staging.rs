//! The staging area: which page waits at which of its places, and where none may be moved to.

use std::collections::{BTreeSet, VecDeque};

use uzswap_proto::STAGING_PAGES;

use crate::table::STATE_BITS;

/// An entry of the staging area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// No page was moved there.
    Empty,
    /// This page waits there.
    Holds(u64),
    /// The page that waited there is stored, or there no longer; its copy takes memory still.
    Left,
}

/// The staging area as a ring: entry `head + i` names the page that waits there.
///
/// A place is *littered* if a thread of the program has looked there while it was empty, and was given a page by the manager, or by the
/// kernel before the area was watched. Nothing is moved there: the kernel would say that it is occupied (EEXIST), as it does at times of
/// what it has moved itself, and not whether the page to be moved was there at all. The entry is passed over, and the place is emptied
/// with others.
#[derive(Default)]
pub(crate) struct Staging {
    head: u32,
    entries: VecDeque<Entry>,
    /// Entries that name a page.
    live: usize,
    /// Places of the area, numbered from 0.
    littered: BTreeSet<usize>,
}

impl Staging {
    /// The sequence number of the entry `index` places after the oldest.
    pub fn sequence(&self, index: usize) -> u32 {
        (self.head + index as u32) & ((1 << STATE_BITS) - 1)
    }

    fn index(&self, sequence: u32) -> usize {
        (sequence.wrapping_sub(self.head) & ((1 << STATE_BITS) - 1)) as usize
    }

    /// Reserves room for up to `pages` pages in one run of the area; gives the first sequence number and how many.
    pub fn reserve(&mut self, pages: usize) -> (u32, usize) {
        while self.entries.len() < STAGING_PAGES && self.littered.contains(&self.next_place()) {
            self.entries.push_back(Entry::Empty);
        }
        let (first, place) = (self.sequence(self.entries.len()), self.next_place());
        let free = STAGING_PAGES - self.entries.len();
        let end = self.littered.range(place..).next().copied().unwrap_or(STAGING_PAGES);
        let count = pages.min(free).min(end - place);
        self.entries.extend(std::iter::repeat_n(Entry::Empty, count));
        (first, count)
    }

    /// The place in the area of the next entry.
    fn next_place(&self) -> usize {
        self.sequence(self.entries.len()) as usize % STAGING_PAGES
    }

    /// Notes that a thread that has looked there is given a page at a place of the area.
    pub fn litter(&mut self, place: usize) {
        self.littered.insert(place);
    }

    /// Names the page of an entry.
    pub fn fill(&mut self, sequence: u32, page: u64) {
        let index = self.index(sequence);
        assert!(self.entries[index] == Entry::Empty, "staging entry filled twice");
        self.entries[index] = Entry::Holds(page);
        self.live += 1;
    }

    /// The page left the staging area.
    pub fn clear(&mut self, sequence: u32) {
        let index = self.index(sequence);
        assert!(matches!(self.entries[index], Entry::Holds(_)), "staging entry cleared twice");
        self.entries[index] = Entry::Left;
        self.live -= 1;
    }

    /// The page has another address now.
    pub fn rename(&mut self, sequence: u32, page: u64) {
        let index = self.index(sequence);
        assert!(matches!(self.entries[index], Entry::Holds(_)), "staging entry renamed while empty");
        self.entries[index] = Entry::Holds(page);
    }

    /// The page an entry names.
    pub fn get(&self, sequence: u32) -> Option<u64> {
        match self.entries.get(self.index(sequence)) {
            Some(Entry::Holds(page)) => Some(*page),
            _ => None,
        }
    }

    /// How many of the oldest entries, up to `pages`, lie in one run of the area.
    pub fn oldest_run(&self, pages: usize) -> usize {
        let until_wrap = STAGING_PAGES - self.head as usize % STAGING_PAGES;
        pages.min(self.entries.len()).min(until_wrap)
    }

    /// The memory of the oldest entries is about to be freed. A thread that looks there from now on may litter it again.
    pub fn begin_discard(&mut self, pages: usize) {
        if !self.littered.is_empty() {
            (0..pages).for_each(|index| _ = self.littered.remove(&(self.sequence(index) as usize % STAGING_PAGES)));
        }
    }

    /// The memory of the oldest entries is free; returns of how many pages that was.
    pub fn discard(&mut self, pages: usize) -> usize {
        let mut freed = 0;
        for entry in self.entries.drain(..pages) {
            assert!(!matches!(entry, Entry::Holds(_)), "a staged page was discarded");
            freed += usize::from(entry == Entry::Left);
        }
        self.head = self.sequence(pages);
        freed
    }

    /// Every entry that names a page.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let holds = |(i, entry): (usize, &Entry)| match entry {
            Entry::Holds(page) => Some((self.sequence(i), *page)),
            Entry::Empty | Entry::Left => None,
        };
        self.entries.iter().enumerate().filter_map(holds)
    }

    /// Entries that name a page.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Entries, those that name no page included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_never_gives_a_run_that_wraps() {
        let mut staging = Staging::default();
        assert_eq!(staging.reserve(STAGING_PAGES - 10), (0, STAGING_PAGES - 10));
        assert_eq!(staging.discard(100), 0, "nothing was moved there");
        assert_eq!(staging.reserve(64).1, 10, "up to the end of the area");
        assert_eq!(staging.reserve(64), (STAGING_PAGES as u32, 64));
        assert_eq!(staging.reserve(STAGING_PAGES), (STAGING_PAGES as u32 + 64, 36), "as much as is free");
        assert_eq!(staging.reserve(1).1, 0);
        assert_eq!(staging.oldest_run(usize::MAX), STAGING_PAGES - 100);
    }

    #[test]
    fn only_what_was_moved_there_is_freed() {
        let mut staging = Staging::default();
        let (first, _) = staging.reserve(10);
        (0..4).for_each(|i| staging.fill(first + i, u64::from(i) << 12));
        (0..4).for_each(|i| staging.clear(first + i));
        assert_eq!((staging.get(first), staging.live(), staging.discard(3), staging.discard(7)), (None, 0, 3, 1));
    }

    #[test]
    fn no_page_is_moved_to_a_littered_place() {
        let mut staging = Staging::default();
        [0, 1, 5].into_iter().for_each(|place| staging.litter(place));
        assert_eq!(staging.reserve(8), (2, 3), "up to the next littered place");
        assert_eq!(staging.reserve(8), (6, 8));
        staging.begin_discard(14);
        // It may have been emptied by now.
        staging.litter(1);
        staging.discard(14);
        assert_eq!(staging.reserve(STAGING_PAGES), (14, STAGING_PAGES - 14));
        assert_eq!(staging.reserve(3), (STAGING_PAGES as u32, 1));
        assert_eq!(staging.reserve(3), (STAGING_PAGES as u32 + 2, 3));
        (0..STAGING_PAGES).for_each(|place| staging.litter(place));
        assert_eq!(staging.reserve(3).1, 0);
        assert_eq!(staging.len(), STAGING_PAGES);
    }
}

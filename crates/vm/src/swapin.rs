//! How many pages a fault should bring: [`Swapin`] says by what rule, [`Folios`] how many at most.
//!
//! By [`Swapin::Adaptive`] it is judged by what came before it:
//!
//! 1. A fault where an earlier one left off is part of a sequential walk: its window doubles, up to [`MAX_WINDOW`]. A few walks
//!    are followed at once. Where others have to go for what comes, the window is an eighth of the way behind, and 64 pages at
//!    most: when the walk ends, little was brought in vain.
//! 2. Where there is memory to spare, so that nothing has to go for what comes, a fault brings the folio around it: of 16 KiB,
//!    and the larger ones (each four times the one before) as long as an eighth of each is there already: to load eight pages costs
//!    about as much as a fault. So a folio of 2 MiB that is touched everywhere, in any order, takes a handful of faults, and one
//!    that is touched here and there gets four pages for each of them.
//! 3. Any other fault brings its own page only: under thrash what is not asked for drives out what is.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering::Relaxed};

use uzswap_engine::{MAX_FOLIO_ORDER, UnknownName, named};

use crate::PAGE;
use crate::range::Range;
use crate::table::CHUNK;

/// The most pages that one fault brings: a large folio, and the next ahead of the reader.
pub const MAX_WINDOW: usize = 2 << MAX_FOLIO_ORDER;

/// By what rule a fault brings more than its own page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Swapin {
    /// `never`: it does not. For comparison.
    Never,
    /// `always`: the largest folio around it that is swapped out whole. For comparison.
    Always,
    /// `adaptive`: as many as the faults before it make likely to be wanted.
    #[default]
    Adaptive,
}

impl Swapin {
    /// Every rule.
    pub const ALL: [Swapin; 3] = [Swapin::Never, Swapin::Always, Swapin::Adaptive];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Swapin::Never => "never",
            Swapin::Always => "always",
            Swapin::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for Swapin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Swapin {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        named("swapin", &Swapin::ALL, Swapin::name, name)
    }
}

/// The rule, and the sizes of folio that may be brought: all of them, until one is disabled.
#[derive(Debug)]
pub struct Folios {
    rule: AtomicU8,
    /// A bit for each order.
    enabled: AtomicU16,
}

impl Folios {
    pub(crate) fn new(rule: Swapin) -> Folios {
        Folios { rule: AtomicU8::new(rule as u8), enabled: AtomicU16::new(u16::MAX) }
    }

    /// The rule.
    pub fn rule(&self) -> Swapin {
        let number = self.rule.load(Relaxed);
        *Swapin::ALL.iter().find(|rule| **rule as u8 == number).expect("a rule that was set")
    }

    /// Sets the rule.
    pub fn set_rule(&self, rule: Swapin) {
        self.rule.store(rule as u8, Relaxed);
    }

    /// Whether folios of 2^order pages may be brought.
    pub fn is_enabled(&self, order: usize) -> bool {
        self.enabled.load(Relaxed) & 1 << order != 0
    }

    /// Sets that.
    pub fn enable(&self, order: usize, enabled: bool) {
        let bit = 1 << order;
        if enabled {
            self.enabled.fetch_or(bit, Relaxed)
        } else {
            self.enabled.fetch_and(!bit, Relaxed)
        };
    }

    /// The largest enabled folio of at most so many pages, in pages.
    pub(crate) fn largest(&self, pages: usize) -> usize {
        let orders = (1..=pages.ilog2() as usize).rev();
        orders
            .filter(|order| self.is_enabled((*order).min(MAX_FOLIO_ORDER)))
            .map(|order| 1 << order)
            .next()
            .unwrap_or(1)
    }
}

/// The orders of the folios that a fault brings around itself: each is four times as large as the one before, where that fits.
const AROUND: [usize; 5] = [2, 4, 6, 8, MAX_FOLIO_ORDER];

impl Folios {
    /// The folio to bring for a fault at `page` when there is memory for `spare` pages besides; `absent` tells how many pages
    /// of a folio are not there.
    pub(crate) fn around(&self, page: u64, spare: usize, absent: impl Fn(Range) -> usize) -> Range {
        let mut folio = Range::page(page);
        for order in AROUND {
            let pages = 1 << order;
            let wider = Range::sized(page - page % (pages as u64 * PAGE), pages as u64 * PAGE);
            if pages > spare || (order > AROUND[0] && absent(wider) > pages / 8 * 7) {
                break;
            }
            if self.is_enabled(order) {
                folio = wider;
            }
        }
        folio
    }
}

const WALKS: usize = 8;

/// How far a long walk is followed ahead of its reader, in bytes: each thread that loads is to have a folio of its own.
const AHEAD: u64 = 4 * CHUNK;

/// The largest window where others have to go for what comes.
const CAREFUL_WINDOW: usize = 64;

#[derive(Debug, Clone, Copy, Default)]
struct Walk {
    next: u64,
    window: usize,
    /// Pages that it has gone.
    gone: usize,
    /// When it was last gone on with.
    time: u64,
}

/// The walks through one address space.
#[derive(Debug, Default)]
pub struct Readahead {
    walks: [Walk; WALKS],
    /// Faults so far.
    time: u64,
}

impl Readahead {
    /// How many pages to bring for a fault at `page`: as many as `most` leaves of the window of its walk, if `careful` of the
    /// careful one.
    pub fn window(&mut self, page: u64, careful: bool, most: impl FnOnce(usize) -> usize) -> usize {
        self.time += 1;
        let goes_on = |walk: &Walk| walk.window > 0 && walk.next == page;
        // A new walk takes the place of that which was left for the longest time.
        let walk = self.walks.iter_mut().min_by_key(|walk| (!goes_on(walk), walk.time)).expect("several");
        if !goes_on(walk) {
            *walk = Walk::default();
        }
        walk.time = self.time;
        walk.window = (walk.window * 2).clamp(1, MAX_WINDOW);
        let window = if careful { walk.window.min(walk.gone / 8).clamp(1, CAREFUL_WINDOW) } else { walk.window };
        let pages = most(window);
        walk.gone += pages;
        walk.next = page + pages as u64 * PAGE;
        pages
    }

    /// Somebody has come for `page`, which is on its way. If it is in one of the last folios of a long walk, he will come for the next one
    /// soon: where that begins, and how many pages to bring of it, as many as `most` leaves of it.
    pub fn ahead(&mut self, page: u64, most: impl FnOnce(usize) -> usize) -> Option<(u64, usize)> {
        let left = |walk: &Walk| walk.next.wrapping_sub(page);
        let is_near = |walk: &&mut Walk| walk.window == MAX_WINDOW && (PAGE..=AHEAD).contains(&left(walk));
        let walk = self.walks.iter_mut().find(is_near)?;
        // Up to where a folio ends: one is filled beside the other, each by one thread.
        let start = walk.next;
        let pages = most(((CHUNK - start % CHUNK) / PAGE) as usize);
        walk.time = self.time;
        walk.gone += pages;
        walk.next = start + pages as u64 * PAGE;
        Some((start, pages))
    }

    /// The fault brought other than so many pages: the walk will go on at `next`.
    pub fn brought(&mut self, page: u64, pages: usize, next: u64) {
        let expected = page + pages as u64 * PAGE;
        if let Some(walk) = self.walks.iter_mut().find(|walk| walk.window > 0 && walk.next == expected) {
            walk.next = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_have_names() {
        for rule in Swapin::ALL {
            assert_eq!(rule.to_string().parse(), Ok(rule));
            assert_eq!(Folios::new(rule).rule(), rule);
        }
    }

    #[test]
    fn what_is_not_enabled_is_not_brought() {
        let folios = Folios::new(Swapin::Adaptive);
        assert_eq!([1, 2, 64, 512].map(|pages| folios.largest(pages)), [1, 2, 64, 512]);
        (5..=9).for_each(|order| folios.enable(order, false));
        assert_eq!([1, 2, 64, 512].map(|pages| folios.largest(pages)), [1, 2, 16, 16]);
        folios.enable(6, true);
        assert_eq!([32, 64, 512].map(|pages| folios.largest(pages)), [16, 64, 64]);
        (0..=9).for_each(|order| folios.enable(order, false));
        assert_eq!(folios.largest(512), 1, "a page is always brought");
    }

    #[test]
    fn a_folio_that_is_touched_everywhere_takes_few_faults() {
        let folios = Folios::new(Swapin::Adaptive);
        let mut absent = [true; 512];
        let count = |absent: &[bool; 512], folio: Range| {
            (0..512u64).filter(|page| folio.contains(page * PAGE) && absent[*page as usize]).count()
        };
        let mut brought = Vec::new();
        // An order in which no two neighbours follow each other.
        for page in (0..512u64).map(|i| i * 211 % 512) {
            if absent[page as usize] {
                let folio = folios.around(page * PAGE, 512, |folio| count(&absent, folio));
                assert!(folio.contains(page * PAGE));
                brought.push(folio.len() / PAGE);
                (0..512).filter(|page| folio.contains(page * PAGE)).for_each(|page| absent[page as usize] = false);
            }
        }
        assert!(brought.len() < 40 && brought[0] == 4 && brought.contains(&512), "{brought:?}");
    }

    #[test]
    fn a_folio_comes_whole_only_where_there_is_memory_and_evidence() {
        let folios = Folios::new(Swapin::Adaptive);
        let page = 0x7f00_0020_5000;
        let pages = |folio: Range| folio.len() / PAGE;
        assert_eq!(pages(folios.around(page, 3, |_| 0)), 1, "no memory");
        assert_eq!(pages(folios.around(page, 512, |folio| pages(folio) as usize)), 4, "no evidence");
        assert_eq!(folios.around(page, 512, |_| 1), Range::sized(0x7f00_0020_0000, 2 << 20));
        assert_eq!(pages(folios.around(page, 100, |_| 1)), 64);
        folios.enable(MAX_FOLIO_ORDER, false);
        assert_eq!(pages(folios.around(page, 512, |_| 1)), 256);
    }

    #[test]
    fn a_walk_doubles_its_window_and_strangers_do_not_disturb_it() {
        let mut readahead = Readahead::default();
        let mut page = 1 << 30;
        let mut windows = Vec::new();
        for stranger in 0..11u64 {
            let window = readahead.window(page, false, |window| window);
            windows.push(window);
            page += window as u64 * PAGE;
            assert_eq!(readahead.window((1 << 40) + stranger * 10 * PAGE, false, |window| window), 1);
        }
        assert_eq!(windows, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    }

    #[test]
    fn a_walk_goes_on_where_it_was_cut_short() {
        let mut readahead = Readahead::default();
        let whole = |window| window;
        assert_eq!((readahead.window(0x1000, false, whole), readahead.window(0x2000, false, whole)), (1, 2));
        readahead.brought(0x2000, 2, 0x3000);
        assert_eq!(readahead.window(0x3000, false, whole), 4);
        // Its window grows behind what limits it.
        assert_eq!(
            (readahead.window(0x7000, false, |window| window.min(2)), readahead.window(0x9000, false, whole)),
            (2, 16)
        );
    }

    #[test]
    fn a_long_walk_is_followed_ahead_of_its_faults() {
        let (mut readahead, mut page, whole) = (Readahead::default(), 1 << 30, |window| window);
        for _ in 0..10 {
            assert_eq!(readahead.ahead(page, whole), None, "too short");
            page += readahead.window(page, false, whole) as u64 * PAGE;
        }
        page += readahead.window(page, false, whole) as u64 * PAGE;
        assert_eq!(readahead.ahead(page - AHEAD - PAGE, whole), None, "it is far");
        assert_eq!(readahead.ahead(page, whole), None, "behind the walk");
        // It began 1 page behind the beginning of a folio, and ends there, too.
        assert_eq!(page % CHUNK, CHUNK - PAGE);
        assert_eq!(readahead.ahead(page - CHUNK, whole), Some((page, 1)));
        page += PAGE;
        for _ in 0..3 {
            assert_eq!(readahead.ahead(page - CHUNK, whole), Some((page, 512)));
            page += CHUNK;
        }
        assert_eq!(readahead.ahead(page - CHUNK, |folio| folio / 2), Some((page, 256)));
        readahead.brought(page, 256, page);
        assert_eq!(readahead.window(page, false, whole), MAX_WINDOW);
    }

    #[test]
    fn a_careful_walk_brings_little_in_vain() {
        let (mut readahead, mut page, mut windows) = (Readahead::default(), 1 << 30, Vec::new());
        for _ in 0..60 {
            windows.push(readahead.window(page, true, |window| window));
            page += *windows.last().unwrap() as u64 * PAGE;
        }
        assert!(windows[..16].iter().all(|window| *window == 1), "{windows:?}");
        let gone = |number: usize| windows[..number].iter().sum::<usize>();
        assert!((16..60).all(|number| windows[number] <= gone(number) / 8), "{windows:?}");
        assert_eq!(windows[59], CAREFUL_WINDOW);
        assert_eq!(readahead.window(page, false, |window| window), MAX_WINDOW, "there is memory to spare again");
    }
}

//! How much pages are wanted, as far as user space can see it: by how long they stay away.
//!
//! No reference bit shows whether a page that is there is used. But a page that was taken and is wanted again says how long
//! that took, and of accesses at random that time is a sample of the time between any two. So:
//!
//! 1. Time is measured in rounds of reclaim's hand through the address space ([`Heat::advance`]).
//! 2. A page that comes back within half a round is wanted often: its level rises, and it is passed over once, twice, four
//!    times before it is taken again. One that was away for more than a round falls two levels.
//! 3. The level outlives the page's being away, so that a hot page costs one fault in many rounds, and a scan of what is cold
//!    drives nothing hot out.
//! 4. What is said of accesses at random is not true of a burst: of a page that is used much for a while, and then not for long.
//!    Bursts show in that many pages are touched just after they were taken, in the staging area. While one in five is, a
//!    page on the lowest level is passed over once, too, else not at all.
//!
//! It is the clock algorithm with weights (GCLOCK: Smith, "Sequentiality and Prefetching in Database Systems", 1978), of which the
//! weights are learned. Where a page was taken, each of the 2 MiB around it costs three bytes.

use std::collections::BTreeMap;

use crate::range::Range;
use crate::table::{CHUNK, CHUNK_PAGES, index};

/// The highest level.
const HOT: u8 = 3;
/// Ticks of a round.
const ROUND: u8 = 8;

/// So many pages taken say something.
const ENOUGH: usize = 256;

/// Time, in ticks. It wraps: what was away for 32 rounds may be taken for what was not, once.
type Tick = u8;

/// One page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    level: u8,
    /// How often the hand will pass it over.
    passes: u8,
    /// When it was taken.
    taken: Tick,
}

/// What is known of the pages of an address space.
#[derive(Default)]
pub(crate) struct Heat {
    chunks: BTreeMap<u64, Box<[Page; CHUNK_PAGES]>>,
    /// Rounds that are over.
    rounds: u8,
    /// Pages that the hand has come by in this round, and did in the last.
    seen: usize,
    seen_last: usize,
    /// Pages that were taken, and of those the ones that were touched in the staging area. Those of a round ago count half.
    all_taken: usize,
    all_rescued: usize,
}

impl Heat {
    /// The hand has come by so many pages, and perhaps begun another round.
    pub fn advance(&mut self, pages: usize, went_round: bool) {
        self.seen += pages;
        if went_round {
            self.rounds = self.rounds.wrapping_add(1);
            self.seen_last = std::mem::take(&mut self.seen);
            self.all_taken /= 2;
            self.all_rescued /= 2;
        }
    }

    /// Whether pages are used in bursts, or too few were taken to tell.
    fn sees_bursts(&self) -> bool {
        self.all_taken < ENOUGH || self.all_rescued * 5 > self.all_taken
    }

    fn now(&self) -> Tick {
        // How long the first round will be is not known: it is all one tick.
        let whole = self.seen_last.max(self.seen + 1);
        let part = if self.seen_last == 0 { 0 } else { self.seen * usize::from(ROUND) / whole };
        self.rounds.wrapping_mul(ROUND).wrapping_add(part as Tick)
    }

    /// Whether the hand, which has come to a page, is to pass it over.
    pub fn passes(&mut self, page: u64) -> bool {
        let Some(page) = self.chunks.get_mut(&(page / CHUNK)).map(|chunk| &mut chunk[index(page)]) else {
            return false;
        };
        let passes = page.passes > 0;
        page.passes = page.passes.saturating_sub(1);
        passes
    }

    /// A page is taken.
    pub fn taken(&mut self, page: u64) {
        let now = self.now();
        self.all_taken += 1;
        self.page(page).taken = now;
    }

    /// A page that was taken is wanted again; perhaps while it was in the staging area still. Tells whether that is soon.
    pub fn wanted(&mut self, page: u64, rescued: bool) -> bool {
        self.all_rescued += usize::from(rescued);
        let (now, least) = (self.now(), u8::from(self.sees_bursts()));
        let page = self.page(page);
        let away = now.wrapping_sub(page.taken);
        let soon = away <= ROUND / 2;
        if soon {
            page.level = (page.level + 1).min(HOT);
        } else if away > ROUND {
            page.level = page.level.saturating_sub(2);
        }
        page.passes = ((1 << page.level) >> 1).max(least);
        soon
    }

    /// The pages of `range`, and perhaps some of the same 2 MiB around it, are like any that were never taken.
    pub fn forget(&mut self, range: Range) {
        let (first, last) = (range.start / CHUNK, range.end.div_ceil(CHUNK));
        let chunks: Vec<u64> = self.chunks.range(first..last.max(first)).map(|(number, _)| *number).collect();
        for number in chunks {
            self.chunks.remove(&number);
        }
    }

    fn page(&mut self, page: u64) -> &mut Page {
        let chunk = self.chunks.entry(page / CHUNK).or_insert_with(|| Box::new([Page::default(); CHUNK_PAGES]));
        &mut chunk[index(page)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;

    /// How often the hand passes a page over.
    fn passes(heat: &mut Heat, page: u64) -> usize {
        (0..100).take_while(|_| heat.passes(page)).count()
    }

    /// A whole round in steps of an eighth, after one that tells how long it is.
    fn rounds(heat: &mut Heat, eighths: usize) {
        for _ in 0..eighths {
            let ends = heat.seen + 100 == 800;
            heat.advance(100, ends);
        }
    }

    /// One that has seen pages taken, and none of them rescued.
    fn calm() -> Heat {
        Heat { all_taken: 1 << 20, ..Heat::default() }
    }

    #[test]
    fn what_comes_back_soon_is_passed_over_more_often_each_time() {
        let (mut heat, page) = (calm(), 0x7000_0000_3000);
        rounds(&mut heat, 8);
        let mut away_for = |eighths| {
            heat.taken(page);
            rounds(&mut heat, eighths);
            heat.wanted(page, false);
            assert_eq!(passes(&mut heat, page + PAGE), 0, "its neighbour");
            passes(&mut heat, page)
        };
        assert_eq!([3, 3, 3, 3, 3].map(&mut away_for), [1, 2, 4, 4, 4]);
        assert_eq!([7, 9, 9].map(&mut away_for), [4, 1, 0]);
    }

    #[test]
    fn where_pages_are_rescued_every_page_is_passed_over_once() {
        let passes_of_cold = |heat: &mut Heat| {
            heat.page(0x1000).level = 0;
            heat.taken(0x1000);
            rounds(heat, 6);
            heat.wanted(0x1000, false);
            passes(heat, 0x1000)
        };
        let mut heat = calm();
        rounds(&mut heat, 8);
        heat.all_rescued = heat.all_taken / 6;
        assert_eq!(passes_of_cold(&mut heat), 0);
        heat.all_rescued = heat.all_taken / 4;
        assert_eq!(passes_of_cold(&mut heat), 1);
        heat.all_rescued = 0;
        rounds(&mut heat, 8 * 30);
        assert_eq!(passes_of_cold(&mut heat), 1, "what was taken was taken long ago");
    }

    /// Loads for each access, with this heat and with none, of `accesses` of 8192 pages when 3072 of them may be there.
    fn loads(accesses: impl Fn(&mut dyn FnMut() -> f64) -> u64) -> (f64, f64) {
        const PAGES: usize = 8192;
        let simulate = |heated: bool| {
            let (mut heat, mut there, mut resident, mut hand) = (Heat::default(), vec![false; PAGES], 0, 0);
            let (mut seed, mut loads, mut counted) = (1u64, 0, 0);
            let mut random = move || {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 11) as f64 / (1u64 << 53) as f64
            };
            for time in 0..600_000 {
                let page = accesses(&mut random);
                counted += usize::from(time >= 200_000);
                if std::mem::replace(&mut there[page as usize], true) {
                    continue;
                }
                loads += usize::from(time >= 200_000);
                heat.wanted(page * PAGE, false);
                resident += 1;
                while resident > 3072 {
                    hand = (hand + 1) % PAGES;
                    if there[hand] {
                        let passes = heat.passes(hand as u64 * PAGE);
                        if !(heated && passes) {
                            there[hand] = false;
                            resident -= 1;
                            heat.taken(hand as u64 * PAGE);
                        }
                        heat.advance(1, false);
                    }
                    heat.advance(0, hand == 0);
                }
            }
            loads as f64 / counted as f64
        };
        (simulate(true), simulate(false))
    }

    #[test]
    fn what_is_popular_stays() {
        // As Zipf's law with exponent 1 has it, nearly.
        let (heated, plain) = loads(|random| (8192f64.powf(random()) - 1.0) as u64 * 2654435761 % 8192);
        assert!(heated < plain * 0.9, "{heated} of the accesses are loads, without {plain}");
    }

    #[test]
    fn a_scan_drives_nothing_hot_out() {
        let next = std::cell::Cell::new(0);
        let (heated, plain) = loads(|random| {
            if random() < 0.9 {
                return (random() * 2048.0) as u64;
            }
            next.set((next.get() + 1) % 6144);
            2048 + next.get()
        });
        // A tenth has to be loaded: the scan itself.
        assert!(heated < 0.11 && plain > 0.13, "{heated} of the accesses are loads, without {plain}");
    }

    #[test]
    fn time_goes_on_over_the_end_of_a_round() {
        let mut heat = Heat::default();
        let mut ticks = Vec::new();
        for _ in 0..32 {
            ticks.push(heat.now());
            rounds(&mut heat, 1);
        }
        assert_eq!(ticks[..8], [0; 8], "the first round");
        assert!(ticks[8..].iter().zip(8..).all(|(tick, expected)| *tick == expected), "{ticks:?}");
        // A round that is longer than the last.
        heat.advance(10_000, false);
        assert_eq!(heat.now(), 32 + 7);
    }

    #[test]
    fn what_is_unmapped_is_forgotten() {
        let mut heat = Heat::default();
        heat.wanted(0x4000_0000, false);
        heat.wanted(0x4060_0000, false);
        heat.forget(Range::new(0x4000_1000, 0x4000_2000));
        assert_eq!((passes(&mut heat, 0x4000_0000), passes(&mut heat, 0x4060_0000)), (0, 1));
        heat.forget(Range::new(0, u64::MAX));
        assert!(heat.chunks.is_empty());
    }
}

//! Ranges whose contents a thread of the program is about to discard, or has.
//!
//! The event comes before the deed. A page moved out in between would escape it and come back with its old contents, so
//! nothing is evicted from the range until the deed is done. That is seen by the sentinel, the last page of the range
//! that was present when the event was read: the kernel discards in ascending order, and once absent the page comes
//! back only through this process, which looks first. (A page that was absent then, and is touched before the deed is done, was
//! written while it was being discarded: either outcome is right.)
//!
//! `MADV_FREE` announces itself like `MADV_DONTNEED` but takes no page away. A program may call it a thousand times a
//! second. So only the last few removals are looked at one by one. An older one that is not done goes into a set of ranges
//! without sentinels, and the set is let go after [`PATIENCE`] at least: no cost depends on how many there are.

use std::time::{Duration, Instant};

use crate::range::{Range, RangeSet};

/// By this time a thread that was let run has long finished.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many removals are looked at one by one.
const MOST_RECENT: usize = 16;

struct Removal {
    range: Range,
    /// `None` if no page can tell: the range waits for time alone.
    sentinel: Option<u64>,
    epoch: u64,
}

/// The removals of an address space.
#[derive(Default)]
pub(crate) struct Removals {
    /// In the order in which they were announced. More than [`MOST_RECENT`] only while one epoch announces more.
    recent: Vec<Removal>,
    /// When this set of older removals was begun; and the set that it replaced.
    begun: Option<Instant>,
    older: RangeSet,
    oldest: RangeSet,
}

impl Removals {
    /// Whether nothing is being discarded.
    pub fn is_empty(&self) -> bool {
        self.recent.is_empty() && self.older.is_empty() && self.oldest.is_empty()
    }

    /// Whether `page` may be about to be discarded.
    pub fn cover(&self, page: u64) -> bool {
        self.recent.iter().any(|removal| removal.range.contains(page))
            || self.older.contains(page)
            || self.oldest.contains(page)
    }

    /// Adds a removal that was just announced. One that may be discarded at the same time as another gets no sentinel, and no other keeps one
    /// there: what one discards would be taken for the end of the other.
    pub fn begin(&mut self, range: Range, sentinel: Option<u64>, epoch: u64, is_absent: impl Fn(u64) -> bool) {
        let shared = self.recent.iter().any(|removal| removal.range.overlaps(range))
            || self.older.overlaps(range)
            || self.oldest.overlaps(range);
        self.take_sentinels(range);
        self.recent.push(Removal { range, sentinel: sentinel.filter(|_| !shared), epoch });
        // What was announced in this epoch has to be told from what it replaces.
        while self.recent.len() > MOST_RECENT && self.recent[0].epoch != epoch {
            let removal = self.recent.remove(0);
            if !removal.sentinel.is_some_and(&is_absent) {
                self.begin_set();
                self.older.insert(removal.range);
            }
        }
    }

    /// Drops the removals that overlap `range` and are done, and those that have waited long enough.
    pub fn settle(&mut self, range: Range, is_absent: impl Fn(u64) -> bool) {
        let done = |removal: &Removal| removal.range.overlaps(range) && removal.sentinel.is_some_and(&is_absent);
        self.recent.retain(|removal| !done(removal));
        self.expire();
    }

    /// The range is no longer mapped, or not as it was. What was announced in epoch `now` may be of what has come there since.
    pub fn forget(&mut self, range: Range, now: u64) {
        self.recent.retain(|removal| removal.epoch == now || removal.range.intersect(range) != removal.range);
        self.take_sentinels(range);
        self.older.remove(range);
        self.oldest.remove(range);
    }

    /// Drops the sentinels in `range`: its pages go absent for another reason (a remap, an unmap, a later discard),
    /// which would pass for the end of a removal that was announced before.
    pub fn take_sentinels(&mut self, range: Range) {
        for removal in &mut self.recent {
            removal.sentinel.take_if(|sentinel| range.contains(*sentinel));
        }
    }

    fn begin_set(&mut self) {
        self.expire();
        self.begun.get_or_insert_with(Instant::now);
    }

    /// Lets go of the sets that have waited long enough. What waits one by one joins the next set, so that it ends too.
    fn expire(&mut self) {
        if self.is_empty() {
            self.begun = None;
            return;
        }
        let begun = *self.begun.get_or_insert_with(Instant::now);
        if begun.elapsed() > PATIENCE {
            self.oldest = std::mem::take(&mut self.older);
            self.recent.drain(..).for_each(|removal| self.older.insert(removal.range));
            self.begun = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;

    fn range(number: u64) -> Range {
        Range::sized(number * 16 * PAGE, 8 * PAGE)
    }

    #[test]
    fn a_thousand_that_are_never_done_are_looked_at_no_more_often_than_one() {
        let mut removals = Removals::default();
        for number in 0..1000 {
            let looks = std::cell::Cell::new(0);
            removals.settle(range(number), |_| panic!("none overlaps it"));
            removals.begin(range(number), Some(range(number).start), number, |_| {
                looks.set(looks.get() + 1);
                false
            });
            assert!(looks.get() <= 1, "{} looks", looks.get());
        }
        assert!((0..1000).all(|number| removals.cover(range(number).start)));
        assert!(!removals.cover(range(0).end));
    }

    #[test]
    fn what_is_done_or_unmapped_is_let_go() {
        let mut removals = Removals::default();
        (0..100).for_each(|number| removals.begin(range(number), Some(range(number).start), number, |_| true));
        assert!(!removals.cover(range(0).start), "done when it made room");
        removals.settle(range(99), |_| true);
        assert!(!removals.cover(range(99).start));
        removals.begin(range(5), Some(range(5).start), 200, |_| false);
        removals.forget(range(5), 200);
        assert!(removals.cover(range(5).start), "of this epoch");
        removals.forget(range(5), 201);
        assert!(!removals.cover(range(5).start));
    }

    #[test]
    fn two_of_one_range_have_no_sentinel() {
        let mut removals = Removals::default();
        removals.begin(range(1), Some(range(1).start), 1, |_| true);
        removals.begin(range(1), Some(range(1).start), 2, |_| true);
        removals.settle(range(1), |_| true);
        assert!(removals.cover(range(1).start), "the first is done, of the second nothing is known");
    }

    #[test]
    fn the_deed_of_one_is_not_taken_for_that_of_an_older_one() {
        let sentinel = range(1).end - PAGE;
        let end = Range::page(sentinel);
        let mut removals = Removals::default();
        removals.begin(range(1), Some(sentinel), 1, |_| true);
        removals.begin(end, Some(sentinel), 2, |_| true);
        removals.settle(range(1), |_| true);
        assert!(removals.cover(range(1).start), "the sentinel was discarded by the second");

        let mut removals = Removals::default();
        removals.begin(range(1), Some(sentinel), 1, |_| true);
        removals.forget(end, 2);
        removals.settle(range(1), |_| true);
        assert!(removals.cover(range(1).start), "the sentinel was unmapped");
        removals.forget(range(1), 3);
        assert!(!removals.cover(range(1).start));
    }
}

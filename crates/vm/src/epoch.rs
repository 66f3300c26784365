//! Putting events into the order in which they happened.
//!
//! The kernel queues an event after it has done the deed and let the address space go, so events of threads that run at
//! the same time can be read in the wrong order. What is certain:
//! - the thread that caused an event goes on only when the event has been read, so deeds that the program itself puts in
//!   order are read in order;
//! - from before the deed until its event has been read, operations on the userfaultfd fail with EAGAIN. Once one does
//!   not, everything that was done has been read.
//!
//! In doubt is only a remap. The kernel never moves a mapping onto another: where something is registered at the target
//! as far as we know, its unmap or remap is still to come and belongs before. (A mapping that grew in its place is
//! registered without our knowledge; its unmap, too, may belong before.) So a remap waits until all has been read, and
//! then that order is taken after which just that is registered which is.

use std::collections::BTreeMap;

use crate::range::{Range, RangeSet};

/// A change of the layout of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The mapping at `from` went to `to`, `len` bytes.
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// The contents are about to be discarded; the mapping stays.
    Remove(Range),
    /// The mapping is gone.
    Unmap(Range),
}

impl Change {
    /// What the change takes away.
    fn vacates(self) -> Option<Range> {
        match self {
            Change::Remap { from, len, .. } => Some(Range::sized(from, len)),
            Change::Unmap(range) => Some(range),
            Change::Remove(_) => None,
        }
    }
}

/// What is registered within `window` after `changes`, if `registered` was before them.
fn known(registered: &RangeSet, changes: &[Change], window: Range) -> RangeSet {
    let mut set = RangeSet::default();
    let Some((last, before)) = changes.split_last() else {
        registered.within(window).into_iter().for_each(|part| set.insert(part));
        return set;
    };
    set = known(registered, before, window);
    match *last {
        Change::Remove(_) => {}
        Change::Unmap(range) => set.remove(range),
        Change::Remap { from, to, len } => {
            set.remove(Range::sized(from, len));
            let brought = Range::sized(to, len).intersect(window);
            if brought.is_empty() {
                return set;
            }
            set.remove(brought);
            for part in known(registered, before, Range::sized(brought.start - to + from, brought.len())).iter() {
                set.insert(Range::sized(part.start - from + to, part.len()));
            }
        }
    }
    set
}

/// Whether more is to be read, if there is more, before `changes` can be put in order.
pub fn in_doubt(changes: &[Change]) -> bool {
    changes.iter().any(|change| matches!(change, Change::Remap { .. }))
}

/// Orders changes that were read. `registered` is what was registered before; `is_registered` tells whether an address
/// lies in a registered mapping now, and is asked only where several orders are possible.
pub fn order(registered: &RangeSet, read: Vec<Change>, is_registered: impl FnMut(u64) -> bool) -> Vec<Change> {
    let mut search = Search { registered, is_registered, answers: BTreeMap::new(), tries: 0, best: None };
    if (0..read.len()).all(|i| search.choices(&read[..i], &read[i..]) == [0]) {
        return read;
    }
    search.arrange(&mut Vec::new(), &read);
    search.best.map_or(read, |(_, ordered)| ordered)
}

/// Goes through the orders that are possible, the likely ones first.
struct Search<'a, F> {
    registered: &'a RangeSet,
    is_registered: F,
    /// What was asked already.
    answers: BTreeMap<u64, bool>,
    tries: usize,
    /// The best order so far, and how many ranges it gets wrong.
    best: Option<(usize, Vec<Change>)>,
}

impl<F: FnMut(u64) -> bool> Search<'_, F> {
    /// Which of `rest` may have happened first after `done`, as indexes.
    fn choices(&self, done: &[Change], rest: &[Change]) -> Vec<usize> {
        let Some(&Change::Remap { to, len, .. }) = rest.first() else { return vec![0] };
        let target = Range::sized(to, len);
        let obstacle = known(self.registered, done, target);
        let later = || rest.iter().enumerate().skip(1);
        if obstacle.is_empty() {
            let unmaps = |change: &Change| matches!(*change, Change::Unmap(range) if range.overlaps(target));
            return std::iter::once(0).chain(later().filter(|(_, c)| unmaps(c)).map(|(i, _)| i)).collect();
        }
        let makes_room = |change: &Change| change.vacates().is_some_and(|range| !obstacle.within(range).is_empty());
        let first: Vec<usize> = later().filter(|(_, c)| makes_room(c)).map(|(i, _)| i).collect();
        if first.is_empty() { vec![0] } else { first }
    }

    /// Extends `done` by `rest`, in each possible order.
    fn arrange(&mut self, done: &mut Vec<Change>, rest: &[Change]) {
        const ENOUGH: usize = 1000;
        self.tries += 1;
        if self.tries > ENOUGH || self.best.as_ref().is_some_and(|(wrong, _)| *wrong == 0) {
            return;
        }
        if rest.is_empty() {
            return self.weigh(done);
        }
        for first in self.choices(done, rest) {
            let mut others = rest.to_vec();
            let chosen = others.remove(first);
            if first == 0 {
                done.push(chosen);
                self.arrange(done, &others);
                done.pop();
            } else {
                // It may itself have to wait for another.
                others.insert(0, chosen);
                self.arrange(done, &others);
            }
        }
    }

    /// Compares what would be registered after `done` with what is.
    fn weigh(&mut self, done: &[Change]) {
        let mut bounds: Vec<u64> = Vec::new();
        let mut targets = RangeSet::default();
        for change in done {
            if let Change::Remap { to, len, .. } = *change {
                targets.insert(Range::sized(to, len));
                bounds.extend([to, to + len]);
            }
            bounds.extend(change.vacates().into_iter().flat_map(|range| [range.start, range.end]));
        }
        bounds.sort_unstable();
        bounds.dedup();
        let wrong = (bounds.windows(2).map(|pair| Range::new(pair[0], pair[1])))
            .filter(|part| targets.contains(part.start))
            .filter(|&part| {
                let is = *self.answers.entry(part.start).or_insert_with_key(|&at| (self.is_registered)(at));
                known(self.registered, done, part).contains(part.start) != is
            })
            .count();
        if self.best.as_ref().is_none_or(|(fewest, _)| wrong < *fewest) {
            self.best = Some((wrong, done.to_vec()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0x10000;
    const B: u64 = 0x20000;
    const C: u64 = 0x30000;
    const LEN: u64 = 0x4000;

    fn remap(from: u64, to: u64) -> Change {
        Change::Remap { from, to, len: LEN }
    }

    fn unmap(start: u64, len: u64) -> Change {
        Change::Unmap(Range::sized(start, len))
    }

    fn registered(ranges: &[(u64, u64)]) -> RangeSet {
        let mut set = RangeSet::default();
        ranges.iter().for_each(|&(start, len)| set.insert(Range::sized(start, len)));
        set
    }

    fn nobody_asks(_: u64) -> bool {
        panic!("nothing to ask")
    }

    /// The order of `read`, where `now` is registered in the end.
    fn ordered(before: &RangeSet, read: &[Change], now: &RangeSet) -> Vec<Change> {
        order(before, read.to_vec(), |address| now.contains(address))
    }

    #[test]
    fn order_stands_where_nothing_is_in_doubt() {
        let before = registered(&[(A, LEN)]);
        let read = [remap(A, B), unmap(A, LEN), Change::Remove(Range::sized(B, 0x1000)), remap(C, A)];
        assert_eq!(order(&before, read.to_vec(), nobody_asks), read);
        // What made room was read in time.
        let before = registered(&[(A, LEN), (B, LEN)]);
        let read = [unmap(B, LEN), remap(A, B)];
        assert_eq!(order(&before, read.to_vec(), nobody_asks), read);
    }

    /// `MREMAP_DONTUNMAP` leaves its source registered: asking the kernel does not tell which came first.
    #[test]
    fn a_remap_away_from_where_nothing_was_came_later() {
        let before = registered(&[(A, LEN)]);
        let read = [remap(A, B), remap(B, C)];
        assert_eq!(order(&before, read.to_vec(), nobody_asks), read);
    }

    #[test]
    fn what_made_room_comes_first() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        let late = unmap(B, LEN);
        assert_eq!(ordered(&before, &[remap(A, B), late], &registered(&[(B, LEN)])), [late, remap(A, B)]);
        let late = remap(B, C);
        let now = registered(&[(B, LEN), (C, LEN)]);
        assert_eq!(ordered(&before, &[remap(A, B), late], &now), [late, remap(A, B)]);
        // One after the other, each makes room for the one before it.
        let before = registered(&[(A, LEN), (B, LEN), (C, LEN)]);
        let read = [remap(A, B), remap(B, C), unmap(C, LEN)];
        assert_eq!(ordered(&before, &read, &now), [read[2], read[1], read[0]]);
    }

    /// Part of the target was in use. Its owner unmapped it, was slow to say so, and meanwhile the new owner has
    /// unmapped some or all of what it brought there.
    #[test]
    fn what_is_registered_now_decides_between_several() {
        let before = registered(&[(A, LEN), (B, 0x2000)]);
        let (part, all) = (unmap(B, 0x2000), unmap(B, LEN));
        assert_eq!(ordered(&before, &[remap(A, B), all, part], &registered(&[])), [part, remap(A, B), all]);
        // The other way about: all of it made room, and then part of what came went.
        let now = registered(&[(B + 0x2000, 0x2000)]);
        assert_eq!(ordered(&before, &[remap(A, B), part, all], &now), [all, remap(A, B), part]);
        let little = unmap(B + 0x1000, 0x1000);
        let now = registered(&[(B, 0x1000), (B + 0x2000, 0x2000)]);
        assert_eq!(ordered(&before, &[remap(A, B), little, part], &now), [part, remap(A, B), little]);
    }

    /// A mapping that has grown in its place has made room, of which we did not know.
    #[test]
    fn an_unmap_of_what_was_not_known_comes_first_if_something_is_there_now() {
        let before = registered(&[(A, LEN)]);
        let grown = unmap(B - LEN, 2 * LEN);
        assert_eq!(ordered(&before, &[remap(A, B), grown], &registered(&[(B, LEN)])), [grown, remap(A, B)]);
        assert_eq!(ordered(&before, &[remap(A, B), grown], &registered(&[])), [remap(A, B), grown]);
    }

    #[test]
    fn a_remap_whose_room_nobody_made_stands() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(ordered(&before, &[remap(A, B)], &registered(&[(B, LEN)])), [remap(A, B)]);
    }
}

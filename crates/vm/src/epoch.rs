//! Putting events into the order in which they happened.
//!
//! The kernel queues an event after it has done the deed and let the address space go, so events of threads that run at
//! the same time can be read in the wrong order. What is certain:
//! - the thread that caused an event goes on only when the event has been read, so deeds that the program itself puts in
//!   order are read in order;
//! - from before the deed until its event has been read, operations on the userfaultfd fail with EAGAIN. Once one does
//!   not, everything that was done has been read.
//!
//! So events are gathered until nothing is unread: an **epoch**. In doubt, within one, is
//! - a remap: the kernel never moves a mapping onto another. Where something is registered at the target as far as we
//!   know, its unmap or remap belongs before. (A mapping that grew in its place is registered without our knowledge; its
//!   unmap, too, may belong before.) That order is taken after which just that is registered which is;
//! - a fork: the child, which has hardly run yet, shows which changes it has inherited. Of a discard it shows nothing, and of a
//!   remap to where something else had been nothing certain; there the order of reading stands.

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

    /// The ranges it has to do with.
    fn ranges(self) -> impl Iterator<Item = Range> {
        let other = match self {
            Change::Remap { to, len, .. } => Some(Range::sized(to, len)),
            Change::Remove(range) => Some(range),
            Change::Unmap(_) => None,
        };
        self.vacates().into_iter().chain(other)
    }

    /// Whether it has to do with some of `range`.
    pub fn touches(self, range: Range) -> bool {
        self.ranges().any(|own| own.overlaps(range))
    }

    /// Whether both have to do with the same addresses.
    fn entangles(self, other: Change) -> bool {
        other.ranges().any(|range| self.touches(range))
    }
}

/// A change as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What changed.
    pub change: Change,
    /// How many forks of the same epoch were read before it.
    pub forks_read: usize,
}

/// What is registered within `window` after `changes`, if `registered` was before them.
fn known(registered: &RangeSet, changes: &[Event], window: Range) -> RangeSet {
    let mut set = RangeSet::default();
    let Some((last, before)) = changes.split_last() else {
        registered.within(window).into_iter().for_each(|part| set.insert(part));
        return set;
    };
    set = known(registered, before, window);
    match last.change {
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

/// Orders what was read in an epoch; `None` if more is to be read before that can be done.
///
/// `registered` is what was registered before; `is_registered` tells whether an address lies in a registered mapping now,
/// if that can be told, and is asked only where several orders are possible.
pub fn order(
    registered: &RangeSet,
    read: &[Event],
    mut is_registered: impl FnMut(u64) -> Option<bool>,
) -> Option<Vec<Event>> {
    let is_remap = |event: &Event| matches!(event.change, Change::Remap { .. });
    if !read.iter().any(is_remap) {
        return Some(read.to_vec());
    }
    let mut ordered = Vec::with_capacity(read.len());
    let mut doubted = false;
    for set in entangled(read) {
        let mut search =
            Search { registered, is_registered: &mut is_registered, answers: BTreeMap::new(), tries: 0, best: None };
        if (0..set.len()).all(|i| search.choices(&set[..i], &set[i..]) == [0]) {
            ordered.extend(set);
            continue;
        }
        doubted = true;
        search.arrange(&mut Vec::new(), &set);
        let all_answered = search.answers.values().all(Option::is_some);
        ordered.extend(search.best.filter(|_| all_answered)?.1);
    }
    Some(if doubted { ordered } else { read.to_vec() })
}

/// Divides events into sets that have nothing to do with each other, so that only the order within a set matters. Each
/// set is in the order of reading.
fn entangled(read: &[Event]) -> Vec<Vec<Event>> {
    let mut sets: Vec<Vec<usize>> = Vec::new();
    for (index, event) in read.iter().enumerate() {
        let touches = |set: &Vec<usize>| set.iter().any(|&other| read[other].change.entangles(event.change));
        let mut joined: Vec<usize> = sets.extract_if(.., |set| touches(set)).flatten().collect();
        joined.push(index);
        joined.sort_unstable();
        sets.push(joined);
    }
    sets.into_iter().map(|set| set.into_iter().map(|index| read[index]).collect()).collect()
}

/// Splits `ordered` into what happened before the fork that was read as number `fork` of the epoch, and what happened
/// after it. `in_child` tells whether an address lies in a mapping that the child has inherited registered, if that can
/// be told.
pub fn split(
    registered: &RangeSet,
    ordered: Vec<Event>,
    fork: usize,
    mut in_child: impl FnMut(u64) -> Option<bool>,
) -> (Vec<Event>, Vec<Event>) {
    let mut inherited: Vec<bool> = Vec::with_capacity(ordered.len());
    for (i, event) in ordered.iter().enumerate() {
        let before = &ordered[..i];
        let first_known = |range: Range| known(registered, before, range).iter().next().map(|part| part.start);
        let read_before = event.forks_read <= fork;
        inherited.push(match event.change {
            Change::Remove(_) => read_before,
            Change::Unmap(range) => first_known(range).and_then(&mut in_child).map_or(read_before, |is| !is),
            Change::Remap { from, to, len } => {
                let source = first_known(Range::sized(from, len));
                match source.and_then(|at| Some((at, in_child(at)?))) {
                    Some((_, false)) => true,
                    // Its source is there: not yet moved, or moved by MREMAP_DONTUNMAP. If the target is there, too, that may be
                    // what had been there before, which the child still has, whether we knew of it or not. Nothing tells; there
                    // the order of reading stands.
                    Some((at, true)) => {
                        let target = Range::page(at - from + to);
                        let held = !known(registered, before, target).is_empty();
                        let vacates =
                            |event: &Event| event.change.vacates().is_some_and(|range| range.overlaps(target));
                        let only_moved = read_before || !before.iter().any(vacates);
                        !held && in_child(target.start) == Some(true) && only_moved
                    }
                    None => read_before,
                }
            }
        });
    }
    // What an inherited change built upon was inherited with it.
    for i in (0..ordered.len()).rev() {
        inherited[i] |=
            (i + 1..ordered.len()).any(|later| inherited[later] && ordered[i].change.entangles(ordered[later].change));
    }
    let (before, after): (Vec<_>, Vec<_>) = ordered.into_iter().zip(inherited).partition(|(_, inherited)| *inherited);
    let events = |list: Vec<(Event, bool)>| list.into_iter().map(|(event, _)| event).collect();
    (events(before), events(after))
}

/// Goes through the orders that are possible, the likely ones first.
struct Search<'a, F> {
    registered: &'a RangeSet,
    is_registered: F,
    /// What was asked already.
    answers: BTreeMap<u64, Option<bool>>,
    tries: usize,
    /// The best order so far, and how many ranges it gets wrong.
    best: Option<(usize, Vec<Event>)>,
}

impl<F: FnMut(u64) -> Option<bool>> Search<'_, F> {
    /// Which of `rest` may have happened first after `done`, as indexes.
    fn choices(&self, done: &[Event], rest: &[Event]) -> Vec<usize> {
        let Some(&Event { change: Change::Remap { to, len, .. }, .. }) = rest.first() else { return vec![0] };
        let target = Range::sized(to, len);
        let obstacle = known(self.registered, done, target);
        let later = || rest.iter().enumerate().skip(1);
        if obstacle.is_empty() {
            let unmaps = |event: &Event| matches!(event.change, Change::Unmap(range) if range.overlaps(target));
            return std::iter::once(0).chain(later().filter(|(_, c)| unmaps(c)).map(|(i, _)| i)).collect();
        }
        let makes_room = |event: &Event| event.change.vacates().is_some_and(|range| !obstacle.within(range).is_empty());
        let first: Vec<usize> = later().filter(|(_, c)| makes_room(c)).map(|(i, _)| i).collect();
        if first.is_empty() { vec![0] } else { first }
    }

    /// Extends `done` by `rest`, in each possible order.
    fn arrange(&mut self, done: &mut Vec<Event>, rest: &[Event]) {
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
    fn weigh(&mut self, done: &[Event]) {
        let mut bounds: Vec<u64> = Vec::new();
        let mut targets = RangeSet::default();
        for Event { change, .. } in done {
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
                is.is_some_and(|is| known(self.registered, done, part).contains(part.start) != is)
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

    fn events(changes: &[Change]) -> Vec<Event> {
        changes.iter().map(|&change| Event { change, forks_read: 0 }).collect()
    }

    fn changes(events: Vec<Event>) -> Vec<Change> {
        events.into_iter().map(|event| event.change).collect()
    }

    fn ordered_without_asking(before: &RangeSet, read: &[Change]) -> Vec<Change> {
        changes(order(before, &events(read), |_| panic!("nothing to ask")).expect("nothing is missing"))
    }

    /// The order of `read`, where `now` is registered in the end.
    fn ordered(before: &RangeSet, read: &[Change], now: &RangeSet) -> Vec<Change> {
        changes(order(before, &events(read), |address| Some(now.contains(address))).expect("nothing is missing"))
    }

    /// How many of `ordered` happened before a fork that was read after all of them, and by which a child came to be in
    /// which `inherited` is registered.
    fn before_fork(before: &RangeSet, ordered: &[Change], inherited: &RangeSet) -> Vec<Change> {
        changes(split(before, events(ordered), 0, |address| Some(inherited.contains(address))).0)
    }

    #[test]
    fn what_the_child_has_at_the_target_may_be_what_was_there_before() {
        // One thread forks and then moves A to where another has just unmapped B. The child has both as they were.
        let both = registered(&[(A, LEN), (B, LEN)]);
        let read = |forks_read| -> Vec<Event> {
            [unmap(B, LEN), remap(A, B)].map(|change| Event { change, forks_read }).into()
        };
        let inherited = |forks_read| split(&both, read(forks_read), 0, |address| Some(both.contains(address))).0;
        assert_eq!(inherited(1), []);
        // The same before the fork, with MREMAP_DONTUNMAP: the child has A, empty, and in the place of B what was A.
        assert_eq!(inherited(0), read(0));
        // Where nothing was before, the move is certain, whenever it was read.
        let read = vec![Event { change: remap(A, C), forks_read: 1 }];
        let in_child = registered(&[(A, LEN), (C, LEN)]);
        let before = registered(&[(A, LEN)]);
        assert_eq!(split(&before, read.clone(), 0, |address| Some(in_child.contains(address))).0, read);
    }

    #[test]
    fn order_stands_where_nothing_is_in_doubt() {
        let before = registered(&[(A, LEN)]);
        let read = [remap(A, B), unmap(A, LEN), Change::Remove(Range::sized(B, 0x1000)), remap(C, A)];
        assert_eq!(ordered_without_asking(&before, &read), read);
        // What made room was read in time.
        let before = registered(&[(A, LEN), (B, LEN)]);
        let read = [unmap(B, LEN), remap(A, B)];
        assert_eq!(ordered_without_asking(&before, &read), read);
    }

    #[test]
    fn what_has_nothing_to_do_with_each_other_is_ordered_apart() {
        let read =
            events(&[unmap(A, LEN), unmap(B, LEN), remap(A, C), unmap(C, 0x1000), Change::Remove(Range::sized(B, 8))]);
        let sets = entangled(&read);
        assert_eq!(sets, [vec![read[0], read[2], read[3]], vec![read[1], read[4]]]);
        // Two sets become one by what touches both.
        let read = events(&[unmap(A, LEN), unmap(B, LEN), unmap(A, 0x1000), remap(A, B)]);
        assert_eq!(entangled(&read), [read]);
    }

    #[test]
    fn without_an_answer_there_is_no_order() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(order(&before, &events(&[remap(B, C), remap(A, B), unmap(B, LEN)]), |_| None), None);
    }

    /// `MREMAP_DONTUNMAP` leaves its source registered: asking the kernel does not tell which came first.
    #[test]
    fn a_remap_away_from_where_nothing_was_came_later() {
        let before = registered(&[(A, LEN)]);
        let read = [remap(A, B), remap(B, C)];
        assert_eq!(ordered_without_asking(&before, &read), read);
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

    /// MREMAP_DONTUNMAP had left the target mapped; that was unmapped before the second remap.
    #[test]
    fn what_a_remap_left_behind_may_have_been_unmapped_late() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        let read = [remap(B, C), remap(A, B), unmap(B, LEN)];
        let now = registered(&[(B, LEN), (C, LEN)]);
        assert_eq!(ordered(&before, &read, &now), [read[0], read[2], read[1]]);
        assert_eq!(ordered(&before, &read, &registered(&[(C, LEN)])), read);
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
    fn a_child_shows_what_it_has_inherited() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        let read = [unmap(B, LEN), remap(A, C)];
        assert_eq!(before_fork(&before, &read, &before), []);
        assert_eq!(before_fork(&before, &read, &registered(&[(A, LEN)])), [unmap(B, LEN)]);
        assert_eq!(before_fork(&before, &read, &registered(&[(B, LEN), (C, LEN)])), [remap(A, C)]);
        assert_eq!(before_fork(&before, &read, &registered(&[(C, LEN)])), read);
        // MREMAP_DONTUNMAP.
        assert_eq!(before_fork(&before, &read, &registered(&[(A, LEN), (B, LEN), (C, LEN)])), [remap(A, C)]);
        // What was unmapped is there again, by something else.
        let read = [unmap(B, LEN), remap(A, B)];
        assert_eq!(before_fork(&before, &read, &registered(&[(B, LEN)])), read);
    }

    /// The kernel had the target registered, and we had not heard of it yet.
    #[test]
    fn what_was_at_the_target_need_not_have_been_known() {
        let (known, both) = (registered(&[(A, LEN)]), registered(&[(A, LEN), (B, LEN)]));
        let read = |forks_read| [unmap(B, LEN), remap(A, B)].map(|change| Event { change, forks_read }).to_vec();
        let inherited = |forks_read| split(&known, read(forks_read), 0, |address| Some(both.contains(address))).0;
        assert_eq!(changes(inherited(1)), []);
        assert_eq!(changes(inherited(0)), [unmap(B, LEN), remap(A, B)]);
    }

    #[test]
    fn where_a_child_shows_nothing_the_order_of_reading_stands() {
        let before = registered(&[(A, LEN)]);
        let read = vec![
            Event { change: unmap(A, LEN), forks_read: 0 },
            Event { change: unmap(B, LEN), forks_read: 1 },
            Event { change: unmap(C, LEN), forks_read: 0 },
        ];
        let (first, second) = split(&before, read, 0, |_| None);
        assert_eq!((changes(first), changes(second)), (vec![unmap(A, LEN), unmap(C, LEN)], vec![unmap(B, LEN)]));
    }

    #[test]
    fn a_remap_whose_room_nobody_made_stands() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(ordered(&before, &[remap(A, B)], &registered(&[(B, LEN)])), [remap(A, B)]);
    }
}

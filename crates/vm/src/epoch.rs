//! Putting events into the order in which they happened.
//!
//! The kernel queues an event after it has done the deed and let the address space go, so events of threads that run at
//! the same time can be read in the wrong order. What is certain:
//! - the thread that caused an event goes on only when the event has been read, so deeds that the program itself puts in
//!   order are read in order;
//! - from before the deed until its event has been read, operations on the userfaultfd fail with EAGAIN. Once one does
//!   not, everything that was done has been read.
//!
//! So events are gathered until nothing is unread: an **epoch**. In doubt, within one, is the place of
//! - a remap: the kernel never moves a mapping onto another. Where something is registered at the target as far as we
//!   know, its unmap or remap belongs before. (A mapping that grew in its place is registered without our knowledge; its
//!   unmap, too, may belong before.) That order is taken after which just that is registered which is;
//! - a fork (`inherited`).

use std::collections::{BTreeMap, HashSet};

use crate::change::{Change, Event, Fate, MOST_PARTS, Source, entangled, fate, known, of, parts};
use crate::range::{Range, RangeSet};

/// What the order of an epoch's events is.
#[derive(Debug, PartialEq, Eq)]
pub enum Order {
    /// This.
    Found(Vec<Event>),
    /// More is to be read before it can be told.
    Later,
    /// It will not be told: too many changes depend on each other. Time and memory grow with the square of their number.
    TooMany,
    /// Several are possible, or none, as far as is known, and what is where depends on it.
    Unclear,
}

/// The longest set of changes that depend on each other and of which several orders are possible; and the longest of which only one is.
const MOST_IN_DOUBT: usize = 1024;
const MOST: usize = 4096;

/// Returns whether `read`, of one epoch with forks or without, is more than [`order`] and [`split`] are to be asked about.
pub fn is_too_much(read: &[Event], has_forks: bool) -> bool {
    let most_entangled = || entangled(read).iter().map(Vec::len).max().unwrap_or(0);
    read.len() > MOST && (has_remaps(read) || has_forks && most_entangled() > MOST)
}

fn has_remaps(read: &[Event]) -> bool {
    read.iter().any(|event| matches!(event.change, Change::Remap { .. }))
}

/// Orders what was read in an epoch, unless that [`is_too_much`].
///
/// `registered` is what was registered before; `is_registered` tells whether an address lies in a registered mapping now,
/// if that can be told, and is asked only where several orders are possible.
pub fn order(registered: &RangeSet, read: &[Event], mut is_registered: impl FnMut(u64) -> Option<bool>) -> Order {
    if !has_remaps(read) {
        return Order::Found(read.to_vec());
    }
    let mut ordered = Vec::with_capacity(read.len());
    let mut doubted = false;
    for set in entangled(read) {
        let set = of(read, &set);
        let mut search = Search {
            registered,
            is_registered: &mut is_registered,
            targets: Vec::new(),
            answers: BTreeMap::new(),
            steps: 0,
            has_more: false,
            best: None,
        };
        if (0..set.len()).all(|i| search.choices(&set[..i], &set[i..], 0) == [0]) {
            ordered.extend(set);
            continue;
        }
        if set.len() > MOST_IN_DOUBT {
            return Order::TooMany;
        }
        doubted = true;
        search.targets = targets(registered, &set);
        if search.targets.len() >= MOST_PARTS {
            return Order::TooMany;
        }
        search.run(&set);
        let all_answered = search.answers.values().all(Option::is_some);
        match search.best {
            Some((_, best)) if all_answered => ordered.extend(best),
            Some(_) => return Order::Later,
            None => return Order::Unclear,
        }
    }
    Order::Found(if doubted { ordered } else { read.to_vec() })
}

/// The first address of each part of where `events` move something to.
fn targets(registered: &RangeSet, events: &[Event]) -> Vec<u64> {
    let mut targets = RangeSet::default();
    for event in events {
        if let Change::Remap { to, len, .. } = event.change {
            targets.insert(Range::sized(to, len));
        }
    }
    parts(registered, events).filter(|at| targets.contains(*at)).collect()
}

/// Goes through the orders that are possible, the likely ones first: those in which the fewest choices are other than the first that is
/// possible, wherever among the events these are (a limited discrepancy search, Harvey and Ginsberg 1995).
struct Search<'a, F> {
    registered: &'a RangeSet,
    is_registered: F,
    /// The first address of each part of where something was moved to.
    targets: Vec<u64>,
    /// What was asked already.
    answers: BTreeMap<u64, Option<bool>>,
    /// Steps that were taken.
    steps: usize,
    /// Whether there are orders with more other choices than were looked at.
    has_more: bool,
    /// The best order so far, and how many ranges it gets wrong.
    best: Option<(usize, Vec<Event>)>,
}

impl<F: FnMut(u64) -> Option<bool>> Search<'_, F> {
    /// Which of `rest` may have happened first after `done`, as indexes. So many after the first of `rest` wait for that: it does not wait for them.
    fn choices(&self, done: &[Event], rest: &[Event], waiting: usize) -> Vec<usize> {
        let Some(&Event { change: Change::Remap { to, len, .. }, .. }) = rest.first() else { return vec![0] };
        let target = Range::sized(to, len);
        let obstacle = known(self.registered, done, target);
        let later = || rest.iter().enumerate().skip(1);
        if obstacle.is_empty() {
            let mut seen = HashSet::new();
            let mut may_be_late = |event: &Event| match event.change {
                // The first of several that are alike stands for all.
                Change::Unmap(range) => {
                    range.overlaps(target) && !event.stands && seen.insert((range.start, range.end))
                }
                Change::Remap { .. } | Change::Remove(_) => false,
            };
            let late = later().skip(waiting).filter_map(|(i, event)| may_be_late(event).then_some(i));
            return std::iter::once(0).chain(late).collect();
        }
        let makes_room = |event: &Event| event.change.vacates().is_some_and(|range| !obstacle.within(range).is_empty());
        let first: Vec<usize> = later().filter(|(_, c)| makes_room(c)).map(|(i, _)| i).collect();
        // Room that only those make which wait for it is not to be had.
        if first.is_empty() { vec![0] } else { first.into_iter().filter(|i| *i > waiting).collect() }
    }

    /// Looks for an order of `set` that gets nothing wrong, or as little as can be.
    fn run(&mut self, set: &[Event]) {
        for others in 0.. {
            self.has_more = false;
            self.arrange(&mut Vec::new(), set, 0, others);
            if !self.has_more || self.is_over(set.len()) {
                return;
            }
        }
    }

    /// Tells whether to look no further: a step takes the longer the more events there are. The first order is always looked at, for which each
    /// change takes two steps at most, one of them to come before another.
    fn is_over(&self, events: usize) -> bool {
        const ENOUGH: usize = 1000;
        const MOST_LOOKS: usize = 2_000_000;
        let most = 2 * MOST_IN_DOUBT + ENOUGH.max(MOST_LOOKS / events);
        self.steps > most || self.best.as_ref().is_some_and(|(wrong, _)| *wrong == 0)
    }

    /// Extends `done` by `rest`, in each possible order with so many `others`: choices that are not the first. `waiting` is as in
    /// [`choices`](Self::choices): each event comes before others once, so that the depth is twice the number of events at most.
    /// Tells whether it came to no order at all.
    fn arrange(&mut self, done: &mut Vec<Event>, rest: &[Event], waiting: usize, others: usize) -> bool {
        self.steps += 1;
        if self.is_over(done.len() + rest.len()) {
            return false;
        }
        if rest.is_empty() {
            // With fewer it was looked at before.
            if others == 0 {
                self.weigh(done);
            }
            return false;
        }
        let mut is_dead_end = true;
        for first in self.choices(done, rest, waiting) {
            let Some(others) = others.checked_sub(usize::from(!is_dead_end)) else {
                self.has_more = true;
                return false;
            };
            let mut left = rest.to_vec();
            let chosen = left.remove(first);
            if first == 0 {
                done.push(chosen);
                is_dead_end &= self.arrange(done, &left, waiting.saturating_sub(1), others);
                done.pop();
            } else {
                // It may itself have to wait for another.
                left.insert(0, chosen);
                is_dead_end &= self.arrange(done, &left, waiting + 1, others);
            }
        }
        is_dead_end
    }

    /// Compares what would be registered after `done` with what is.
    fn weigh(&mut self, done: &[Event]) {
        self.steps += self.targets.len() / done.len();
        let is_wrong = |&at: &u64| {
            let is = *self.answers.entry(at).or_insert_with_key(|&at| (self.is_registered)(at));
            is.is_some_and(|is| match fate(self.registered, done, at, Source::Unmapped) {
                Fate::Holds => !is,
                Fate::Nothing => is,
                Fate::Other => false,
            })
        };
        let wrong = self.targets.iter().copied().filter(is_wrong).count();
        if self.best.as_ref().is_none_or(|(fewest, _)| wrong < *fewest) {
            self.best = Some((wrong, done.to_vec()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;
    use crate::change::tests::{A, B, C, LEN, changes, events, registered, remap, unmap};
    use crate::inherited::split;

    fn found(order: Order) -> Vec<Event> {
        let Order::Found(ordered) = order else { panic!("{order:?}") };
        ordered
    }

    fn ordered_without_asking(before: &RangeSet, read: &[Change]) -> Vec<Change> {
        changes(found(order(before, &events(read), |_| panic!("nothing to ask"))))
    }

    /// The order of `read`, where `now` is registered in the end.
    fn ordered(before: &RangeSet, read: &[Change], now: &RangeSet) -> Vec<Change> {
        changes(found(order(before, &events(read), |address| Some(now.contains(address)))))
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
    fn without_an_answer_there_is_no_order() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(order(&before, &events(&[remap(B, C), remap(A, B), unmap(B, LEN)]), |_| None), Order::Later);
    }

    /// `MREMAP_DONTUNMAP` leaves its source registered: asking the kernel does not tell which came first.
    #[test]
    fn a_remap_away_from_where_nothing_was_came_later() {
        let before = registered(&[(A, LEN)]);
        let read = [remap(A, B), remap(B, C)];
        assert_eq!(ordered_without_asking(&before, &read), read);
    }

    /// What is known to have been read in time is not put before a remap, whatever is registered in its place by now.
    #[test]
    fn what_stands_is_left_in_its_place() {
        let before = registered(&[(A, LEN)]);
        let now = registered(&[(C, LEN)]);
        for given_up in [unmap(B, LEN), unmap(B + 0x2000, 0x2000)] {
            let mut read = events(&[remap(A, B), given_up, remap(B, C)]);
            let order_of = |read: &[Event]| changes(found(order(&before, read, |address| Some(now.contains(address)))));
            assert_eq!(order_of(&read)[0], given_up, "it is taken for what made room");
            read[1].stands = true;
            assert_eq!(order_of(&read), [remap(A, B), given_up, remap(B, C)]);
        }
    }

    #[test]
    fn two_that_each_make_room_for_the_other_have_no_order() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(order(&before, &events(&[remap(A, B), remap(B, A)]), |_| Some(true)), Order::Unclear);
    }

    /// Each makes room for the other, and what remains in doubt is registered either way (`MREMAP_DONTUNMAP`).
    #[test]
    fn what_waits_for_another_does_not_come_before_it() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        let now = registered(&[(A, LEN), (B, LEN)]);
        let late = unmap(B, LEN);
        let expected = [late, remap(A, B), remap(B, A)];
        for read in [[remap(A, B), late, remap(B, A)], [remap(A, B), remap(B, A), late]] {
            assert_eq!(ordered(&before, &read, &now), expected);
        }
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
    fn a_remap_whose_room_nobody_made_stands() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(ordered(&before, &[remap(A, B)], &registered(&[(B, LEN)])), [remap(A, B)]);
    }

    /// What costs twice as much with each change would never end.
    #[test]
    fn a_region_may_go_to_and_fro_a_thousand_times() {
        let before = registered(&[(A, LEN)]);
        let read = events(&[[remap(A, B), remap(B, A)]; 500].concat());
        assert_eq!(found(order(&before, &read, |_| Some(true))), read);
        assert_eq!(split(&before, read.clone(), 0, |address| Some(before.contains(address)), |_| Some(false)).0, read);
    }

    /// A search that never came to its first order would be begun anew for ever.
    #[test]
    fn an_order_is_found_or_given_up() {
        let before = registered(&[(A, LEN)]);
        let to_and_fro = [[remap(A, B), remap(B, A)]; MOST_IN_DOUBT / 2].concat();
        for swapped in [1, 2, MOST_IN_DOUBT] {
            let mut read = to_and_fro.clone();
            read[..swapped].reverse();
            found(order(&before, &events(&read), |address| Some(before.contains(address))));
        }
        let reversed: Vec<Change> = [to_and_fro.clone(), to_and_fro.clone()].concat().into_iter().rev().collect();
        assert_eq!(order(&before, &events(&reversed), |_| Some(true)), Order::TooMany);
        assert!(
            is_too_much(&events(&to_and_fro.repeat(5)), false) && !is_too_much(&events(&to_and_fro.repeat(4)), false)
        );
    }

    /// What is wrong near the beginning of a long epoch is found, though there are many places after it where the order may be another.
    #[test]
    fn the_first_of_many_doubts_is_looked_at_as_soon_as_the_last() {
        const D: u64 = 0x40000;
        let before = registered(&[(A, LEN)]);
        let now = registered(&[(B, LEN)]);
        // An unmapping of what had grown is read late; then what was moved is moved to and fro.
        let late = unmap(B - LEN, 2 * LEN);
        let to_and_fro = [remap(B, D), remap(D, B), unmap(D, LEN)];
        for times in [1, 10, 20] {
            let read = [vec![remap(A, B), late], to_and_fro.repeat(times)].concat();
            let expected = [vec![late, remap(A, B)], to_and_fro.repeat(times)].concat();
            assert!(ordered(&before, &read, &now) == expected, "{times} times");
        }
    }

    /// Threads that change mappings without a pause while another forks.
    #[test]
    fn very_many_changes_are_split() {
        let before = registered(&[(A, LEN)]);
        let page = |i: usize| Range::page(A + i as u64 % 4 * PAGE);
        let forked = |i: usize, change| Event::new(change, i / (2 * MOST));
        let discards: Vec<Event> = (0..4 * MOST).map(|i| forked(i, Change::Remove(page(i)))).collect();
        let unmaps: Vec<Event> = (0..4 * MOST).map(|i| forked(i, Change::Unmap(page(i)))).collect();
        for read in [discards, unmaps] {
            assert!(!is_too_much(&read, true));
            let (inherited, rest) = split(&before, read.clone(), 0, |_| None, |_| None);
            assert_eq!((inherited.as_slice(), rest.as_slice()), read.split_at(2 * MOST));
        }
        let of_one_place = vec![Event::new(Change::Unmap(page(0)), 0); MOST + 1];
        assert!(is_too_much(&of_one_place, true) && !is_too_much(&of_one_place, false));
    }
}

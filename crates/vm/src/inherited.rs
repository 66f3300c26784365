//! What of an epoch a forked child has inherited.
//!
//! A fork lies somewhere between two changes of those that have to do with each other (`epoch`). The child, which has hardly run yet, shows
//! where: what is registered in it is what was registered then. Of a discard it shows nothing, and of a remap to where something else had
//! been, or of an unmap of a place that a mapping may have grown over since, nothing certain; there the order of reading stands.

use crate::PAGE;
use crate::change::{Event, Fate, Source, entangled, fate, of, parts};
use crate::range::{Range, RangeSet};

/// Of so many parts a child is asked.
const ENOUGH_PARTS: usize = 1000;

/// Splits `ordered` into what happened before the fork that was read as number `fork` of the epoch, and what happened
/// after it. `in_child` tells whether an address lies in a mapping that the child has inherited registered, and `in_parent` whether it lies
/// in one now, if that can be told.
pub fn split(
    registered: &RangeSet,
    ordered: Vec<Event>,
    fork: usize,
    mut in_child: impl FnMut(u64) -> Option<bool>,
    mut in_parent: impl FnMut(u64) -> Option<bool>,
) -> (Vec<Event>, Vec<Event>) {
    let mut inherited: Vec<bool> = ordered.iter().map(|event| event.forks_read <= fork).collect();
    let mut steps = 0;
    for places in entangled(&ordered) {
        let events = of(&ordered, &places);
        if events.iter().all(|event| event.change.vacates().is_none()) {
            // What is only discarded shows nothing.
            continue;
        }
        let mut may_be_in_parent = |at| {
            let changes = events.iter().filter(|event| event.change.touches(Range::page(at)));
            changes.count() > 1 || in_parent(at) != Some(false)
        };
        // Of very many parts the first are enough.
        let evidence = parts(registered, &events).take(ENOUGH_PARTS).filter_map(|at| {
            let is_there = in_child(at)?;
            // A mapping grows upwards, and what it has grown from may have gone since.
            let before = at.saturating_sub(PAGE);
            let is_touched = || events.iter().any(|event| event.change.touches(Range::page(before)));
            let may_have_grown = is_there && may_be_in_parent(at) && (in_child(before) == Some(true) || is_touched());
            Some(Evidence { at, is_there, may_have_grown })
        });
        let evidence = evidence.collect();
        let mut past = Past { registered, events, fork, evidence, tries: 0, steps, best: None };
        past.search();
        steps = past.steps;
        let (_, found) = past.best.expect("that nothing was inherited is always possible");
        places.into_iter().zip(found).for_each(|(place, is)| inherited[place] = is);
    }
    let (before, after): (Vec<_>, Vec<_>) = ordered.into_iter().zip(inherited).partition(|(_, inherited)| *inherited);
    let events = |list: Vec<(Event, bool)>| list.into_iter().map(|(event, _)| event).collect();
    (events(before), events(after))
}

/// What the child says of an address.
struct Evidence {
    at: u64,
    /// It is registered there.
    is_there: bool,
    /// A mapping may have grown over it before the fork.
    may_have_grown: bool,
}

/// Looks for which of a set of entangled events a fork came after.
struct Past<'a> {
    registered: &'a RangeSet,
    /// In order.
    events: Vec<Event>,
    fork: usize,
    evidence: Vec<Evidence>,
    tries: usize,
    /// Comparisons of events, in all sets so far.
    steps: usize,
    /// What speaks least against, and how much does.
    best: Option<(Objections, Vec<bool>)>,
}

/// What speaks against that a child has inherited just these changes, the strongest first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Objections {
    /// Parts that it would have to have, and has not.
    missing: usize,
    /// Parts that it has, and that could not be there.
    unknown: usize,
    /// Changes read before the fork and not inherited, or the other way about.
    misread: usize,
}

impl Past<'_> {
    /// Tries in each possible way which events came before the fork, the likely way first: what builds upon a later change is later. Not by
    /// recursion: thousands of events may depend on each other.
    fn search(&mut self) {
        const ENOUGH: usize = 2000;
        const ENOUGH_STEPS: usize = 20_000_000;
        // Of the first events, whether they came before the fork, and whether the opposite is still to be tried.
        let (mut inherited, mut has_opposite): (Vec<bool>, Vec<bool>) = Default::default();
        loop {
            self.tries += 1;
            self.steps += inherited.len();
            let best = self.best.as_ref().map(|(objections, _)| *objections);
            let is_enough = self.tries > ENOUGH || self.steps > ENOUGH_STEPS;
            if best == Some(Objections::default()) || best.is_some() && is_enough {
                return;
            }
            if let Some(event) = self.events.get(inherited.len()) {
                let mut before = self.events.iter().zip(&inherited);
                let is_later = before.any(|(other, &is)| !is && other.change.entangles(event.change));
                inherited.push(self.read_before(event) && !is_later);
                has_opposite.push(!is_later);
                continue;
            }
            self.steps += self.evidence.len() * inherited.len();
            let objections = self.weigh(&inherited);
            if best.is_none_or(|best| objections < best) {
                self.best = Some((objections, inherited.clone()));
            }
            let Some(last) = has_opposite.iter().rposition(|&has| has) else { return };
            inherited.truncate(last + 1);
            has_opposite.truncate(last + 1);
            inherited[last] = !inherited[last];
            has_opposite[last] = false;
        }
    }

    fn read_before(&self, event: &Event) -> bool {
        event.forks_read <= self.fork
    }

    fn weigh(&self, inherited: &[bool]) -> Objections {
        let (before, after): (Vec<usize>, Vec<usize>) = (0..inherited.len()).partition(|&place| inherited[place]);
        let (before, after) = (of(&self.events, &before), of(&self.events, &after));
        // What is vacated was there, heard of or not.
        let is_vacated = |at| {
            let next = after.iter().find(|event| event.change.touches(Range::page(at)));
            next.and_then(|event| event.change.vacates()).is_some_and(|range| range.contains(at))
        };
        let mut objections = Objections::default();
        for &Evidence { at, is_there, may_have_grown } in &self.evidence {
            if !is_there && fate(self.registered, &before, at, Source::Unmapped) == Fate::Holds {
                objections.missing += 1;
            }
            let is_gone = || fate(self.registered, &before, at, Source::Left) == Fate::Nothing;
            if is_there && !may_have_grown && is_gone() && !is_vacated(at) {
                objections.unknown += 1;
            }
        }
        let misread = self.events.iter().zip(inherited).filter(|&(event, &is)| is != self.read_before(event));
        objections.misread = misread.count();
        objections
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::change::Change;
    use crate::change::tests::{A, B, C, LEN, changes, events, registered, remap, unmap};

    /// How many of `ordered` happened before a fork that was read after all of them, and by which a child came to be in
    /// which `inherited` is registered.
    fn before_fork(before: &RangeSet, ordered: &[Change], inherited: &RangeSet) -> Vec<Change> {
        changes(split(before, events(ordered), 0, |address| Some(inherited.contains(address)), |_| Some(false)).0)
    }

    #[test]
    fn what_the_child_has_at_the_target_may_be_what_was_there_before() {
        // One thread forks and then moves A to where another has just unmapped B. The child has both as they were.
        let both = registered(&[(A, LEN), (B, LEN)]);
        let read = |forks_read| -> Vec<Event> {
            [unmap(B, LEN), remap(A, B)].map(|change| Event::new(change, forks_read)).into()
        };
        let inherited =
            |forks_read| split(&both, read(forks_read), 0, |address| Some(both.contains(address)), |_| Some(false)).0;
        assert_eq!(inherited(1), []);
        // The same before the fork, with MREMAP_DONTUNMAP: the child has A, empty, and in the place of B what was A.
        assert_eq!(inherited(0), read(0));
        // Where nothing was before, the move is certain, whenever it was read.
        let read = vec![Event::new(remap(A, C), 1)];
        let in_child = registered(&[(A, LEN), (C, LEN)]);
        let before = registered(&[(A, LEN)]);
        assert_eq!(
            split(&before, read.clone(), 0, |address| Some(in_child.contains(address)), |_| Some(false)).0,
            read
        );
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

    /// A thread forks and then moves a region twice, or moves it and unmaps some of it. The child has never had it where the
    /// second change found it.
    #[test]
    fn what_a_child_never_had_was_not_taken_from_it() {
        let before = registered(&[(A, LEN)]);
        let inherited = |forks_read, last| {
            let read = [remap(A, B), last].map(|change| Event::new(change, forks_read)).to_vec();
            changes(split(&before, read, 0, |address| Some(before.contains(address)), |_| Some(false)).0)
        };
        for last in [remap(B, C), unmap(B + 0x2000, 0x2000)] {
            assert_eq!((inherited(0, last), inherited(1, last)), (vec![], vec![]));
        }
        // Read before the fork this may be MREMAP_DONTUNMAP.
        assert_eq!(
            (inherited(0, unmap(B, LEN)), inherited(1, unmap(B, LEN))),
            (vec![remap(A, B), unmap(B, LEN)], vec![])
        );
        // It has gone where the child has it, and from there on.
        let read = events(&[remap(A, B), remap(B, C)]);
        let in_child = registered(&[(B, LEN)]);
        assert_eq!(
            changes(split(&before, read, 0, |address| Some(in_child.contains(address)), |_| Some(false)).0),
            [remap(A, B)]
        );
    }

    /// The kernel had the target registered, and we had not heard of it yet.
    #[test]
    fn what_was_at_the_target_need_not_have_been_known() {
        let (known, both) = (registered(&[(A, LEN)]), registered(&[(A, LEN), (B, LEN)]));
        let read = |forks_read| [unmap(B, LEN), remap(A, B)].map(|change| Event::new(change, forks_read)).to_vec();
        let inherited =
            |forks_read| split(&known, read(forks_read), 0, |address| Some(both.contains(address)), |_| Some(false)).0;
        assert_eq!(changes(inherited(1)), []);
        assert_eq!(changes(inherited(0)), [unmap(B, LEN), remap(A, B)]);
    }

    /// The end of a mapping is unmapped, the rest grows over it, and the program forks: the child finds it registered, and empty.
    #[test]
    fn a_child_has_nothing_where_a_mapping_has_grown_again() {
        let before = registered(&[(A, 2 * LEN)]);
        let read = |forks_read| vec![Event::new(unmap(A + LEN, LEN), forks_read)];
        let inherited = |forks_read, in_parent: bool| {
            let in_child = |address| Some(before.contains(address));
            split(&before, read(forks_read), 0, in_child, |_| Some(in_parent)).0
        };
        assert_eq!((inherited(0, true), inherited(1, true)), (read(0), vec![]));
        // Nothing has grown there: the fork was read too late.
        assert_eq!(inherited(0, false), []);
        let apart = registered(&[(A + LEN, LEN)]);
        assert_eq!(split(&apart, read(0), 0, |address| Some(apart.contains(address)), |_| Some(true)).0, []);
    }

    /// What is moved has grown unheard of. That it was moved shows that it was there.
    #[test]
    fn a_child_has_what_was_moved_from_where_nothing_was_known() {
        let before = registered(&[(B, LEN)]);
        let read = events(&[unmap(B, LEN), remap(A, B), unmap(A, LEN)]);
        let in_child = |address| Some(before.contains(address));
        assert_eq!(split(&before, read.clone(), 0, in_child, |_| Some(false)).0, read);
    }

    /// A mapping grows over what was unmapped, and something else is mapped where it began: the child has the rest of it.
    #[test]
    fn a_child_has_the_end_of_what_had_grown() {
        let before = registered(&[(C, LEN), (B + LEN, LEN)]);
        let read = events(&[unmap(B, 2 * LEN), remap(C, B), unmap(B, LEN)]);
        let rest = registered(&[(B + LEN, LEN)]);
        let in_child = |address| Some(rest.contains(address));
        assert_eq!(split(&before, read.clone(), 0, in_child, |_| Some(true)).0, read);
    }

    #[test]
    fn where_a_child_shows_nothing_the_order_of_reading_stands() {
        let before = registered(&[(A, LEN)]);
        let read = vec![Event::new(unmap(A, LEN), 0), Event::new(unmap(B, LEN), 1), Event::new(unmap(C, LEN), 0)];
        let (first, second) = split(&before, read, 0, |_| None, |_| None);
        assert_eq!((changes(first), changes(second)), (vec![unmap(A, LEN), unmap(C, LEN)], vec![unmap(B, LEN)]));
    }

    const PLACES: usize = 6;

    /// What is where, by number: moved as a program moves it.
    type Contents = [Option<u8>; PLACES];

    fn address(place: usize) -> u64 {
        A + place as u64 * LEN
    }

    fn apply(contents: &mut Contents, change: Change) {
        let place = |address: u64| ((address - A) / LEN) as usize;
        match change {
            Change::Unmap(range) => contents[place(range.start)] = None,
            Change::Remap { from, to, .. } => contents[place(to)] = contents[place(from)].take(),
            Change::Remove(_) => {}
        }
    }

    proptest! {
        /// A program unmaps and moves, and forks somewhere in between; the fork is read at that point, or at another.
        #[test]
        fn a_child_gets_what_it_has(there in 0u8..1 << PLACES, steps in prop::collection::vec((any::<bool>(), 0..PLACES, 0..PLACES), 0..8),
                                    fork in 0usize..9, read in 0usize..9) {
            let before: Contents = std::array::from_fn(|place| (there >> place & 1 == 1).then_some(place as u8));
            let (mut now, mut all, mut in_child) = (before, Vec::new(), before);
            for (step, (moves, from, to)) in steps.into_iter().enumerate() {
                let mut changes = Vec::new();
                if now[from].is_some() {
                    let vacated = if moves { to } else { from };
                    if now[vacated].is_some() && !(moves && from == to) {
                        changes.push(unmap(address(vacated), LEN));
                    }
                    if moves && from != to {
                        changes.push(remap(address(from), address(to)));
                    }
                }
                changes.iter().for_each(|&change| apply(&mut now, change));
                all.extend(changes.into_iter().map(|change| Event::new(change, usize::from(step >= read))));
                if fork > step {
                    in_child = now;
                }
            }
            let mut known = RangeSet::default();
            (0..PLACES).filter(|&place| before[place].is_some()).for_each(|place| known.insert(Range::sized(address(place), LEN)));
            let asked = |at: u64| Some(at >= A && in_child[((at - A) / LEN) as usize].is_some());
            let (inherited, _) = split(&known, all, 0, asked, |_| Some(false));
            let mut found = before;
            inherited.into_iter().for_each(|event| apply(&mut found, event.change));
            for place in 0..PLACES {
                prop_assert!(found[place].is_none() || in_child[place].is_some(), "{place}: {found:?}, {in_child:?}");
            }
            if fork == read {
                prop_assert_eq!(found, in_child);
            }
        }
    }
}

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
//! - a fork: it lies somewhere between two changes of those that have to do with each other. The child, which has hardly run
//!   yet, shows where: what is registered in it is what was registered then. Of a discard it shows nothing, and of a remap to where
//!   something else had been, or of an unmap of a place that a mapping may have grown over since, nothing certain; there the order of
//!   reading stands.

use std::collections::{BTreeMap, BTreeSet};

use crate::PAGE;
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
    pub fn ranges(self) -> impl Iterator<Item = Range> {
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
    /// It was read in its place: what lies where it unmapped something has come later (`refused`), by a mapping that has grown in silence.
    pub stands: bool,
}

impl Event {
    pub fn new(change: Change, forks_read: usize) -> Event {
        Event { change, forks_read, stands: false }
    }
}

/// Where what lies at `range` is brought by the remaps of `changes`, as far as none brings something else over it.
pub(crate) fn brought_to(changes: &[Event], range: Range) -> Vec<Range> {
    let mut parts = vec![range];
    for event in changes {
        let Change::Remap { from, to, len } = event.change else { continue };
        if !parts.iter().any(|part| event.change.touches(*part)) {
            continue;
        }
        let source = Range::sized(from, len);
        let move_on = |part: Range| {
            let moved = part.intersect(source);
            let moved = Range::sized(moved.start.wrapping_sub(from).wrapping_add(to), moved.len());
            let stays = part.without(source).into_iter().flat_map(|part| part.without(Range::sized(to, len)));
            stays.chain([moved]).filter(|part| !part.is_empty()).collect::<Vec<_>>()
        };
        parts = parts.into_iter().flat_map(move_on).collect();
    }
    parts
}

/// Where what lies within `window` after `changes` was before them, and how far it has moved since.
fn origins(changes: &[Event], window: Range) -> Vec<(Range, u64)> {
    let mut open = vec![(window, 0u64)];
    for event in changes.iter().rev() {
        if !open.iter().any(|(part, _)| event.change.touches(*part)) {
            continue;
        }
        let vacated = event.change.vacates().unwrap_or(Range::new(0, 0));
        let before = |(part, moved): (Range, u64)| {
            let (brought, rest) = match event.change {
                Change::Remap { from, to, len } => {
                    let target = Range::sized(to, len);
                    let brought = part.intersect(target);
                    let source = Range::sized(brought.start.wrapping_sub(to).wrapping_add(from), brought.len());
                    let since = moved.wrapping_add(to).wrapping_sub(from);
                    ((!brought.is_empty()).then_some((source, since)), part.without(target))
                }
                Change::Remove(_) | Change::Unmap(_) => (None, [part, Range::new(0, 0)]),
            };
            let stayed = rest.into_iter().flat_map(move |part| part.without(vacated)).map(move |part| (part, moved));
            brought.into_iter().chain(stayed).filter(|(part, _)| !part.is_empty())
        };
        open = open.into_iter().flat_map(before).collect();
    }
    open
}

/// What of `registered`, which was before `changes`, lies within `window` after them: where it was before.
pub(crate) fn origins_of(registered: &RangeSet, changes: &[Event], window: Range) -> Vec<Range> {
    origins(changes, window).into_iter().flat_map(|(part, _)| registered.within(part)).collect()
}

/// What is registered within `window` after `changes`, if `registered` was before them.
fn known(registered: &RangeSet, changes: &[Event], window: Range) -> RangeSet {
    let mut set = RangeSet::default();
    for (part, moved) in origins(changes, window) {
        let now = |part: Range| Range::sized(part.start.wrapping_add(moved), part.len());
        registered.within(part).into_iter().for_each(|part| set.insert(now(part)));
    }
    set
}

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
            tries: 0,
            best: None,
        };
        if (0..set.len()).all(|i| search.choices(&set[..i], &set[i..]) == [0]) {
            ordered.extend(set);
            continue;
        }
        if set.len() > MOST_IN_DOUBT {
            return Order::TooMany;
        }
        doubted = true;
        search.targets = targets(registered, &set);
        search.arrange(&mut Vec::new(), &set);
        let all_answered = search.answers.values().all(Option::is_some);
        match search.best {
            Some((_, best)) if all_answered => ordered.extend(best),
            Some(_) => return Order::Later,
            None => return Order::Unclear,
        }
    }
    Order::Found(if doubted { ordered } else { read.to_vec() })
}

/// Divides events into sets that have nothing to do with each other, so that only the order within a set matters. Each
/// set is the places of its events, in order.
fn entangled(read: &[Event]) -> Vec<Vec<usize>> {
    let changes = read.iter().map(|event| event.change).enumerate();
    let mut ranges: Vec<(Range, usize)> =
        changes.flat_map(|(place, change)| change.ranges().map(move |range| (range, place))).collect();
    ranges.sort_unstable_by_key(|(range, place)| (range.start, *place));
    // Of each event an earlier one of its set, or itself.
    let mut earlier: Vec<usize> = (0..read.len()).collect();
    let first = |earlier: &mut [usize], mut place: usize| {
        while earlier[place] != place {
            earlier[place] = earlier[earlier[place]];
            place = earlier[place];
        }
        place
    };
    // How far the ranges go that hang together with the last one, and an event of theirs.
    let mut reach = (0, 0);
    for (range, place) in ranges {
        if range.start < reach.0 {
            let both = [first(&mut earlier, place), first(&mut earlier, reach.1)];
            earlier[both[0].max(both[1])] = both[0].min(both[1]);
        }
        reach = if range.end > reach.0 { (range.end, place) } else { reach };
    }
    let mut sets: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    (0..read.len()).for_each(|place| sets.entry(first(&mut earlier, place)).or_default().push(place));
    sets.into_values().collect()
}

fn of(events: &[Event], places: &[usize]) -> Vec<Event> {
    places.iter().map(|&place| events[place]).collect()
}

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

/// The first address of each part of what `events` change that, as far as is known, is registered as a whole or not at all.
fn parts(registered: &RangeSet, events: &[Event]) -> impl Iterator<Item = u64> {
    let changes = || events.iter().map(|event| event.change).filter(|change| change.vacates().is_some());
    let mut bounds = BTreeSet::new();
    for range in changes().flat_map(Change::ranges) {
        bounds.extend([range.start, range.end]);
        bounds.extend(registered.within(range).into_iter().flat_map(|part| [part.start, part.end]));
    }
    let remaps: Vec<_> = changes()
        .filter_map(|change| if let Change::Remap { from, to, len } = change { Some((from, to, len)) } else { None })
        .collect();
    // What moves keeps its bounds, whichever way one looks.
    let there = remaps.iter().copied();
    let back = remaps.iter().rev().map(|&(from, to, len)| (to, from, len));
    for (from, to, len) in there.chain(back) {
        let moved: Vec<u64> = bounds.range(from..from + len).map(|bound| bound - from + to).collect();
        bounds.extend(moved);
    }
    bounds.into_iter().filter(move |&at| changes().any(|change| change.touches(Range::page(at))))
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

/// What a remap leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Unmapped,
    /// Still mapped (`MREMAP_DONTUNMAP`).
    Left,
}

/// What is at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// What was registered before.
    Holds,
    Nothing,
    /// Something may be registered that was not known: a mapping has grown.
    Other,
}

/// Tells what is at an address after `changes`, if `registered` was before them.
fn fate(registered: &RangeSet, changes: &[Event], address: u64, source: Source) -> Fate {
    // With a mapping left behind, a remap shows that something was registered where it came from, known or not.
    let (mut at, mut was_moved) = (address, false);
    for event in changes.iter().rev() {
        match event.change {
            Change::Unmap(range) if range.contains(at) => {
                return if event.stands || was_moved { Fate::Other } else { Fate::Nothing };
            }
            Change::Remap { from, to, len } if Range::sized(to, len).contains(at) => {
                at = at - to + from;
                was_moved = source == Source::Left;
            }
            Change::Remap { from, len, .. } if Range::sized(from, len).contains(at) => match source {
                Source::Unmapped => return Fate::Nothing,
                Source::Left => was_moved = true,
            },
            _ => {}
        }
    }
    match registered.contains(at) {
        true => Fate::Holds,
        false if was_moved => Fate::Other,
        false => Fate::Nothing,
    }
}

/// Goes through the orders that are possible, the likely ones first.
struct Search<'a, F> {
    registered: &'a RangeSet,
    is_registered: F,
    /// The first address of each part of where something was moved to.
    targets: Vec<u64>,
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
            let unmaps =
                |event: &Event| matches!(event.change, Change::Unmap(range) if range.overlaps(target)) && !event.stands;
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
        // The first order is always looked at: each change takes two steps at most, one of them to come before another.
        let enough = if self.best.is_some() { ENOUGH } else { 2 * MOST_IN_DOUBT };
        if self.tries > enough || self.best.as_ref().is_some_and(|(wrong, _)| *wrong == 0) {
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
    use proptest::prelude::*;

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
        changes.iter().map(|&change| Event::new(change, 0)).collect()
    }

    fn changes(events: Vec<Event>) -> Vec<Change> {
        events.into_iter().map(|event| event.change).collect()
    }

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
        assert_eq!(entangled(&read), [vec![0, 2, 3], vec![1, 4]]);
        // Two sets become one by what touches both.
        let read = events(&[unmap(A, LEN), unmap(B, LEN), unmap(A, 0x1000), remap(A, B)]);
        assert_eq!(entangled(&read), [[0, 1, 2, 3]]);
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

    #[test]
    fn a_remap_whose_room_nobody_made_stands() {
        let before = registered(&[(A, LEN), (B, LEN)]);
        assert_eq!(ordered(&before, &[remap(A, B)], &registered(&[(B, LEN)])), [remap(A, B)]);
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

    proptest! {
        #[test]
        fn what_is_entangled_is_found_as_by_comparing_all(
            changes in proptest::collection::vec((0u64..60, 1u64..4, 0u64..60, any::<bool>()), 0..30),
        ) {
            let changes: Vec<Change> = changes.into_iter().map(|(from, pages, to, is_remap)| match is_remap {
                true => Change::Remap { from: from * PAGE, to: to * PAGE, len: pages * PAGE },
                false => Change::Unmap(Range::sized(from * PAGE, pages * PAGE)),
            }).collect();
            let mut sets: Vec<Vec<usize>> = Vec::new();
            for (place, change) in changes.iter().enumerate() {
                let touches = |set: &mut Vec<usize>| set.iter().any(|&other| changes[other].entangles(*change));
                let mut joined: Vec<usize> = sets.extract_if(.., touches).flatten().collect();
                joined.push(place);
                joined.sort_unstable();
                sets.push(joined);
            }
            sets.sort_unstable();
            prop_assert_eq!(entangled(&events(&changes)), sets);
        }
    }
}

//! Changes of the layout of an address space, and what they do to what lies there.
//!
//! The order in which an epoch's changes happened (`epoch`), which of them a forked child has inherited (`inherited`), and which the kernel
//! only announced (`refused`) are told by what becomes of an address.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

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
    pub fn vacates(self) -> Option<Range> {
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
    pub fn entangles(self, other: Change) -> bool {
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

/// Moves whose end has not been read.
///
/// `mremap` moves a mapping and unmaps what it leaves behind in one step, and announces the second after the first has been read. By then another
/// thread may have moved something else to the place, and may have been read: taken for a change of its own, the announcement would take that
/// away. So it is left out where it is read. (After a move with `MREMAP_DONTUNMAP` there is none. What is moved to its place then makes room there
/// first, which is read in between.)
#[derive(Debug, Default)]
pub(crate) struct OpenMoves(VecDeque<OpenMove>);

#[derive(Debug)]
struct OpenMove {
    source: Range,
    /// Something was moved to some of the source since: what is unmapped there in part is of that, and the end is still to come.
    is_filled: bool,
}

impl OpenMoves {
    /// One for each thread that is in `mremap`, as a rule.
    const MOST: usize = 64;

    /// Takes note of a change that was just read; tells whether it is the end of a move that was read before.
    pub fn ends(&mut self, change: Change) -> bool {
        match change {
            Change::Remap { from, to, len } => {
                let target = Range::sized(to, len);
                self.0.iter_mut().for_each(|open| open.is_filled |= open.source.overlaps(target));
                if self.0.len() == Self::MOST {
                    self.0.pop_front();
                }
                self.0.push_back(OpenMove { source: Range::sized(from, len), is_filled: false });
            }
            Change::Unmap(range) => {
                if let Some(place) = self.0.iter().rposition(|open| open.source == range) {
                    self.0.remove(place);
                    return true;
                }
                self.0.retain(|open| open.is_filled || !open.source.overlaps(range));
            }
            Change::Remove(_) => {}
        }
        false
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
pub(crate) fn known(registered: &RangeSet, changes: &[Event], window: Range) -> RangeSet {
    let mut set = RangeSet::default();
    for (part, moved) in origins(changes, window) {
        let now = |part: Range| Range::sized(part.start.wrapping_add(moved), part.len());
        registered.within(part).into_iter().for_each(|part| set.insert(now(part)));
    }
    set
}

/// What a remap leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Unmapped,
    /// Still mapped (`MREMAP_DONTUNMAP`).
    Left,
}

/// What is at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// What was registered before.
    Holds,
    Nothing,
    /// Something may be registered that was not known: a mapping has grown.
    Other,
}

/// Tells what is at an address after `changes`, if `registered` was before them.
pub(crate) fn fate(registered: &RangeSet, changes: &[Event], address: u64, source: Source) -> Fate {
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

/// Divides events into sets that have nothing to do with each other, so that only the order within a set matters. Each
/// set is the places of its events, in order.
pub(crate) fn entangled(read: &[Event]) -> Vec<Vec<usize>> {
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

pub(crate) fn of(events: &[Event], places: &[usize]) -> Vec<Event> {
    places.iter().map(|&place| events[place]).collect()
}

/// Parts that are told apart at most: a mapping that is moved next to itself again and again has twice as many each time.
pub(crate) const MOST_PARTS: usize = 1 << 16;

/// The first address of each part of what `events` change that, as far as is known, is registered as a whole or not at all.
pub(crate) fn parts(registered: &RangeSet, events: &[Event]) -> impl Iterator<Item = u64> {
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
        if bounds.len() >= MOST_PARTS {
            break;
        }
        let moved: Vec<u64> = bounds.range(from..from + len).map(|bound| bound - from + to).collect();
        bounds.extend(moved);
    }
    bounds.into_iter().filter(move |&at| changes().any(|change| change.touches(Range::page(at))))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::PAGE;

    pub const A: u64 = 0x10000;
    pub const B: u64 = 0x20000;
    pub const C: u64 = 0x30000;
    pub const LEN: u64 = 0x4000;

    pub fn remap(from: u64, to: u64) -> Change {
        Change::Remap { from, to, len: LEN }
    }

    pub fn unmap(start: u64, len: u64) -> Change {
        Change::Unmap(Range::sized(start, len))
    }

    #[test]
    fn only_what_a_move_leaves_behind_is_its_end() {
        let end_of = |changes: &[Change]| {
            let mut moves = OpenMoves::default();
            changes.iter().map(|change| moves.ends(*change)).collect::<Vec<bool>>()
        };
        assert_eq!(end_of(&[remap(A, B), remap(C, A), unmap(A, LEN), unmap(C, LEN)]), [false, false, true, true]);
        assert_eq!(end_of(&[remap(A, B), unmap(A, LEN), remap(C, A), unmap(A, LEN)]), [false, true, false, false]);
        assert_eq!(end_of(&[remap(A, B), unmap(A, LEN / 2), unmap(A + LEN, LEN)]), [false; 3]);
        // What was moved to the place is unmapped in part before the end is read.
        let part = unmap(A, LEN / 2);
        assert_eq!(end_of(&[remap(A, B), remap(C, A), part, unmap(A, LEN), part]), [false, false, false, true, false]);
        // Left mapped, it was unmapped to make room for more.
        assert_eq!(end_of(&[remap(A, B), unmap(A, 2 * LEN), remap(C, A), unmap(A, LEN)]), [false; 4]);
    }

    pub fn registered(ranges: &[(u64, u64)]) -> RangeSet {
        let mut set = RangeSet::default();
        ranges.iter().for_each(|&(start, len)| set.insert(Range::sized(start, len)));
        set
    }

    pub fn events(changes: &[Change]) -> Vec<Event> {
        changes.iter().map(|&change| Event::new(change, 0)).collect()
    }

    pub fn changes(events: Vec<Event>) -> Vec<Change> {
        events.into_iter().map(|event| event.change).collect()
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

//! What the kernel announces and then does not do.
//!
//! `munmap`, `mmap(MAP_FIXED)`, `mremap` and `brk` announce what they are about to unmap, and may fail after that: for want of memory or of
//! address space (RLIMIT_AS, RLIMIT_DATA, overcommit), or because a part is sealed. The event comes all the same, and the mapping stays with
//! all that was in it. A pager that believes the event leaves zeros in place of what was moved out.
//!
//! Each of these calls does all or nothing. So the pager asks the kernel about one page of each part of what is said to be unmapped that may
//! have contents moved out, and that no other change of the epoch divides:
//! 1. A part that a remap of the epoch has brought a mapping to, and that is registered: that was not unmapped, but what lay there before may
//!    have been, to make room for it. The part becomes an event of its own, and what is registered tells where its place is (`epoch`).
//! 2. A part that is not registered, and that a remap of the epoch has moved away, was there until then, if no remap has brought anything
//!    there. What remains in its place is nothing of ours.
//! 3. Another part that is registered was not unmapped. Or it was, and a mapping beside it has grown over the place since, in silence: `mremap` does
//!    that, as in `realloc`. This is told by [`was_refused`].
//! 4. Every other part was unmapped.
//!
//! If the epoch has a fork, too, the child may lie between an unmap and a remap of the same part, and has nothing there: then the pager believes
//! the event, as of everything that a remap has to do with.

use std::collections::BTreeSet;

use crate::PAGE;
use crate::epoch::{Change, Event};
use crate::range::{Range, RangeSet};
use crate::space::State;
use crate::sys::uffd::Probe;

/// What the kernel tells of the program at this moment.
pub(crate) trait Kernel {
    /// Tells whether a page is registered.
    fn ask(&self, page: u64) -> Probe;

    /// Tells whether a page of `range` is present.
    fn has_page(&self, range: Range) -> bool;

    /// Tells whether there is a reason to refuse to unmap `range`, or to map something of this length.
    fn may_refuse(&self, range: Range) -> bool;
}

/// Takes out of `events`, from number `asked` on, what was announced and not done, and counts `asked` on. Returns false where the layout is
/// changing, and more is to be read before that can be told.
pub(crate) fn take_out(
    state: &State,
    events: &mut Vec<Event>,
    asked: &mut usize,
    has_forks: bool,
    kernel: &impl Kernel,
) -> bool {
    let mut index = None;
    while let Some(&event) = events.get(*asked) {
        let Change::Unmap(range) = event.change else {
            *asked += 1;
            continue;
        };
        let index = index.get_or_insert_with(|| Index::of(events));
        let (mut stays, mut apart, mut in_doubt) = (Vec::new(), Vec::new(), Vec::new());
        for Part { range, moved_away, brought } in doubtful_parts(state, index, range) {
            if has_forks && (moved_away || brought) {
                continue;
            }
            match kernel.ask(state.table.first_away(range).unwrap_or(range.start)) {
                Probe::Registered if brought => apart.push(range),
                Probe::Registered => in_doubt.push(range),
                Probe::NotRegistered | Probe::Gone if moved_away && !brought => stays.push(range),
                Probe::NotRegistered | Probe::Gone => {}
                Probe::Changing => return false,
            }
        }
        if !in_doubt.is_empty() {
            match was_refused(state, index, range, kernel) {
                Some(true) => stays.append(&mut in_doubt),
                Some(false) => {}
                None => return false,
            }
        }
        let mut holes = [stays.as_slice(), &apart].concat();
        holes.sort_unstable_by_key(|range| range.start);
        let mut gone: Vec<Range> = without(range, &holes).chain(apart).collect();
        gone.sort_unstable_by_key(|range| range.start);
        if gone != [range] {
            index.replace(range, &gone);
            events.splice(*asked..=*asked, gone.iter().map(|&range| Event { change: Change::Unmap(range), ..event }));
        }
        *asked += gone.len();
    }
    true
}

/// The ranges that the events of an epoch have to do with, so that a question about one takes no look at all others: threads that change
/// mappings without a pause make epochs of tens of thousands of events.
struct Index {
    /// Sorted.
    starts: Vec<u64>,
    ends: Vec<u64>,
    /// From where to where mappings were moved.
    remaps: Vec<(Range, Range)>,
}

impl Index {
    fn of(events: &[Event]) -> Index {
        let ranges = || events.iter().flat_map(|event| event.change.ranges()).filter(|range| !range.is_empty());
        let remaps = events.iter().filter_map(|event| match event.change {
            Change::Remap { from, to, len } => Some((Range::sized(from, len), Range::sized(to, len))),
            Change::Remove(_) | Change::Unmap(_) => None,
        });
        let mut starts: Vec<u64> = ranges().map(|range| range.start).collect();
        let mut ends: Vec<u64> = ranges().map(|range| range.end).collect();
        starts.sort_unstable();
        ends.sort_unstable();
        Index { starts, ends, remaps: remaps.collect() }
    }

    /// Returns how many of the ranges overlap `range`.
    fn overlapping(&self, range: Range) -> usize {
        let begun = self.starts.partition_point(|start| *start < range.end);
        begun - self.ends.partition_point(|end| *end <= range.start)
    }

    /// Returns where a range begins or ends inside `part`.
    fn inside(&self, part: Range) -> BTreeSet<u64> {
        let inside = |bounds: &'_ [u64]| {
            let first = bounds.partition_point(|bound| *bound <= part.start);
            first..bounds.partition_point(|bound| *bound < part.end).max(first)
        };
        let (starts, ends) = (&self.starts[inside(&self.starts)], &self.ends[inside(&self.ends)]);
        starts.iter().chain(ends).copied().collect()
    }

    /// Puts `parts` in the place of one of the ranges.
    fn replace(&mut self, range: Range, parts: &[Range]) {
        let _ = self.starts.binary_search(&range.start).map(|place| self.starts.remove(place));
        let _ = self.ends.binary_search(&range.end).map(|place| self.ends.remove(place));
        for part in parts {
            self.starts.insert(self.starts.partition_point(|start| *start < part.start), part.start);
            self.ends.insert(self.ends.partition_point(|end| *end < part.end), part.end);
        }
    }
}

/// Tells whether the event that `range` would be unmapped was announced in vain, if a part of it is registered; None where the layout is changing.
///
/// 1. If the end of what was registered there is not, the call was done: it does all or nothing.
/// 2. If no registered mapping lies right before it, nor did in this epoch, none can have grown over the place: the call was refused.
/// 3. A page that is present was not unmapped: none comes into registered memory but by the pager, which fills nothing meanwhile.
/// 4. Else the call was refused if there is a reason for that now.
fn was_refused(state: &State, index: &Index, range: Range, kernel: &impl Kernel) -> Option<bool> {
    let is_untouched = |part: &Range| index.overlapping(*part) == usize::from(range.overlaps(*part));
    let is_registered = |page| match kernel.ask(page) {
        Probe::Registered => Some(true),
        Probe::NotRegistered | Probe::Gone => Some(false),
        Probe::Changing => None,
    };
    let known: Vec<Range> = state.registered.within(range).into_iter().filter(is_untouched).collect();
    if let Some(last) = known.last()
        && !is_registered(last.end - PAGE)?
    {
        return Some(false);
    }
    let before = Range::page(range.start.saturating_sub(PAGE));
    let cannot_have_grown = is_untouched(&before) && !is_registered(before.start)?;
    if cannot_have_grown || known.iter().any(|part| kernel.has_page(*part)) {
        return Some(true);
    }
    Some(kernel.may_refuse(range))
}

/// A part of what was announced, of which each change of the epoch has to do with all or nothing.
struct Part {
    range: Range,
    /// A remap has moved it to another place.
    moved_away: bool,
    /// A remap has brought a mapping there.
    brought: bool,
}

/// The parts of `range`, in order, that may have contents moved out.
fn doubtful_parts(state: &State, index: &Index, range: Range) -> Vec<Part> {
    let mut doubtful = RangeSet::default();
    let with_contents = state.registered.within(range).into_iter();
    with_contents.filter(|part| state.table.first_away(*part).is_some()).for_each(|part| doubtful.insert(part));
    let brought = index.remaps.iter().map(|(_, to)| to.intersect(range)).filter(|part| !part.is_empty());
    brought.for_each(|part| doubtful.insert(part));
    let divide = |part: Range| {
        let ends: Vec<u64> = [part.start].into_iter().chain(index.inside(part)).chain([part.end]).collect();
        ends.windows(2).map(|pair| Range::new(pair[0], pair[1])).collect::<Vec<_>>()
    };
    let part = |range: Range| Part {
        range,
        moved_away: index.remaps.iter().any(|(from, _)| from.overlaps(range)),
        brought: index.remaps.iter().any(|(_, to)| to.overlaps(range)),
    };
    doubtful.iter().flat_map(divide).map(part).collect()
}

/// What is left of `range` without `holes`, which are in order.
fn without(range: Range, holes: &[Range]) -> impl Iterator<Item = Range> {
    let starts = [range.start].into_iter().chain(holes.iter().map(|hole| hole.end));
    let ends = holes.iter().map(|hole| hole.start).chain([range.end]);
    let left: Vec<Range> = starts.zip(ends).map(|(start, end)| Range::new(start, end)).collect();
    left.into_iter().filter(|range| !range.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::epoch::{self, Order};
    use crate::table::PageState;

    const A: Range = Range { start: 0x10000, end: 0x14000 };
    const B: Range = Range { start: 0x20000, end: 0x24000 };
    const ALL: Range = Range { start: 0x8000, end: 0x40000 };

    fn remap(from: Range, to: Range) -> Change {
        Change::Remap { from: from.start, to: to.start, len: from.len() }
    }

    /// What the kernel says: what is registered in the end, what is present, and whether it may refuse.
    #[derive(Default)]
    struct Says<'a>(&'a [Range], &'a [Range], bool);

    impl Kernel for Says<'_> {
        fn ask(&self, page: u64) -> Probe {
            let is_there = self.0.iter().any(|range| range.contains(page));
            if is_there { Probe::Registered } else { Probe::NotRegistered }
        }

        fn has_page(&self, range: Range) -> bool {
            self.1.iter().any(|present| present.overlaps(range))
        }

        fn may_refuse(&self, _: Range) -> bool {
            self.2
        }
    }

    /// What is left of `changes`, if `away` has contents moved out.
    fn left_if(away: &[Range], changes: &[Change], has_forks: bool, kernel: &impl Kernel) -> Vec<Change> {
        let mut state = State::default();
        for &range in away {
            state.registered.insert(range);
            state.table.set(range.start + PAGE, PageState::Staged(1));
        }
        let mut events: Vec<Event> = changes.iter().map(|&change| Event::new(change, 0)).collect();
        let mut asked = 0;
        assert!(take_out(&state, &mut events, &mut asked, has_forks, kernel));
        assert_eq!(asked, events.len());
        events.into_iter().map(|event| event.change).collect()
    }

    /// The same where there is a reason to refuse.
    fn left(away: &[Range], changes: &[Change], has_forks: bool, registered: &[Range]) -> Vec<Change> {
        left_if(away, changes, has_forks, &Says(registered, &[], true))
    }

    #[test]
    fn what_stays_is_taken_out_of_what_is_unmapped() {
        assert_eq!(left(&[A], &[Change::Unmap(A)], false, &[A]), []);
        assert_eq!(left(&[A], &[Change::Unmap(A)], false, &[]), [Change::Unmap(A)]);
        let around = [(ALL.start, A.start), (A.end, ALL.end)].map(|(start, end)| Change::Unmap(Range::new(start, end)));
        assert_eq!(left(&[A], &[Change::Unmap(ALL)], false, &[A]), around);
        // It would have unmapped all or nothing.
        assert_eq!(left(&[A, B], &[Change::Unmap(ALL)], false, &[A]), [Change::Unmap(ALL)]);
        // The second has unmapped what the first had only announced.
        let changes = [Change::Unmap(ALL), Change::Unmap(B)];
        assert_eq!(left(&[A, B], &changes, false, &[A]), [around.as_slice(), &[Change::Unmap(B)]].concat());
    }

    #[test]
    fn what_has_grown_over_the_place_is_not_taken_for_what_was_there() {
        let (unmap, grown) = ([Change::Unmap(A)], Range::new(A.start - PAGE, A.end));
        assert_eq!(left_if(&[A], &unmap, false, &Says(&[grown], &[], false)), unmap);
        // There is a reason to refuse; nothing can have grown; a page that is present was not unmapped.
        assert_eq!(left_if(&[A], &unmap, false, &Says(&[grown], &[], true)), []);
        assert_eq!(left_if(&[A], &unmap, false, &Says(&[A], &[], false)), []);
        assert_eq!(left_if(&[A], &unmap, false, &Says(&[grown], &[Range::page(A.end - PAGE)], false)), []);
        // A page that is not registered was unmapped, and the others with it.
        let shorter = Range::new(grown.start, A.end - PAGE);
        assert_eq!(left_if(&[A], &unmap, false, &Says(&[shorter], &[A], true)), unmap);
    }

    #[test]
    fn what_a_remap_moves_is_not_lost_to_an_unmap_that_was_refused() {
        let pieces = |ends: &[(u64, u64)]| -> Vec<Change> {
            ends.iter().map(|&(start, end)| Change::Unmap(Range::new(start, end))).collect()
        };
        let rest = pieces(&[(ALL.start, A.start), (A.end, B.start), (B.end, ALL.end)]);
        for at in 0..2 {
            let mut changes = vec![remap(A, B)];
            changes.insert(at, Change::Unmap(ALL));
            // What was to be unmapped where something was brought stands alone: its place is before that.
            let mut expected = [&rest[..2], &[Change::Unmap(B)], &rest[2..]].concat();
            expected.insert(if at == 0 { expected.len() } else { 0 }, remap(A, B));
            assert_eq!(left(&[A], &changes, false, &[B]), expected);
        }
        // Unmapped after it was brought there.
        assert_eq!(left(&[A], &[remap(A, B), Change::Unmap(B)], false, &[]), [remap(A, B), Change::Unmap(B)]);
        // A child may have nothing there.
        let changes = [Change::Unmap(B), remap(A, B)];
        assert_eq!(left(&[A, B], &changes, true, &[B]), changes);
        assert_eq!(left(&[A, B], &changes, false, &[B]), changes);
    }

    /// A thread moves memory over other memory, and moves what lies there on, before the manager has read all that is to be read.
    #[test]
    fn what_made_room_for_a_remap_is_not_looked_for_among_what_came_later() {
        let c = Range::new(0x30000, 0x34000);
        let ordered = |changes: &[Change], registered: &[Range]| {
            let (mut state, mut asked) = (State::default(), 0);
            for range in [A, B] {
                state.registered.insert(range);
                state.table.set(range.start, PageState::Staged(1));
            }
            let mut events: Vec<Event> = changes.iter().map(|&change| Event::new(change, 0)).collect();
            let kernel = Says(registered, &[], false);
            assert!(take_out(&state, &mut events, &mut asked, false, &kernel));
            epoch::order(&state.registered, &events, |address| Some(kernel.ask(address) == Probe::Registered))
        };
        let all = |changes: &[Change]| Order::Found(changes.iter().map(|&change| Event::new(change, 0)).collect());
        // Left mapped where it lay (MREMAP_DONTUNMAP).
        let changes = [Change::Unmap(B), remap(A, B), remap(B, c)];
        assert_eq!(ordered(&changes, &[B, c]), all(&changes));
        // A part of it goes where the whole came from, which the kernel has unmapped there.
        let [part, back] = [B, A].map(|range| Range::new(range.start + PAGE, range.end - PAGE));
        let read = [Change::Unmap(B), remap(A, B), Change::Unmap(A), remap(part, back)];
        let pieces = [(B.start, part.start), (part.start, part.end), (part.end, B.end)];
        let pieces = pieces.map(|(start, end)| Change::Unmap(Range::new(start, end)));
        let rest = [remap(A, B), Change::Unmap(back), remap(part, back)];
        assert_eq!(ordered(&read, &[B, back]), all(&[pieces, rest].concat()));
    }

    #[test]
    fn nothing_is_told_while_the_layout_changes() {
        struct Changing;
        impl Kernel for Changing {
            fn ask(&self, _: u64) -> Probe {
                Probe::Changing
            }

            fn has_page(&self, _: Range) -> bool {
                unreachable!("nothing is known yet")
            }

            fn may_refuse(&self, _: Range) -> bool {
                unreachable!("nothing is known yet")
            }
        }
        let mut state = State::default();
        state.registered.insert(A);
        state.table.set(A.start, PageState::Staged(1));
        let (mut events, mut asked) = (vec![Event::new(Change::Unmap(A), 0)], 0);
        assert!(!take_out(&state, &mut events, &mut asked, false, &Changing));
        assert_eq!((events.len(), asked), (1, 0));
    }

    proptest! {
        #[test]
        fn the_index_answers_as_a_look_at_all_events(
            pairs in proptest::collection::vec((1u64..30, 1u64..8, any::<bool>()), 0..20),
            (at, pages) in (0u64..40, 1u64..10),
        ) {
            let range = |start: u64, pages: u64| Range::sized(start * PAGE, pages * PAGE);
            let changes = pairs.iter().map(|&(start, pages, is_remap)| match is_remap {
                true => remap(range(start, pages), range(start + 40, pages)),
                false => Change::Unmap(range(start, pages)),
            });
            let mut events: Vec<Event> = changes.map(|change| Event::new(change, 0)).collect();
            let part = range(at, pages);
            let mut index = Index::of(&events);
            for _ in 0..2 {
                let ranges: Vec<Range> = events.iter().flat_map(|event| event.change.ranges()).collect();
                prop_assert_eq!(index.overlapping(part), ranges.iter().filter(|range| range.overlaps(part)).count());
                let bounds = ranges.iter().flat_map(|range| [range.start, range.end]);
                let inside: BTreeSet<u64> = bounds.filter(|at| part.start < *at && *at < part.end).collect();
                prop_assert_eq!(index.inside(part), inside);
                // Something of the first that is unmapped stays.
                let Some(first) = events.iter().position(|event| matches!(event.change, Change::Unmap(_))) else { break };
                let whole = events[first].change.ranges().next().unwrap();
                let left: Vec<Range> = without(whole, &[Range::page(whole.start)]).collect();
                index.replace(whole, &left);
                events.splice(first..=first, left.iter().map(|&left| Event::new(Change::Unmap(left), 0)));
            }
        }
    }
}

//! What the kernel announces and then does not do.
//!
//! `munmap`, `mmap(MAP_FIXED)`, `mremap` and `brk` announce what they are about to unmap, and may fail after that: for want of memory or of
//! address space (RLIMIT_AS, RLIMIT_DATA, overcommit), or because a part is sealed. The event comes all the same, and the mapping stays with
//! all that was in it. Whoever believes the event leaves zeros in place of what was moved out.
//!
//! Each of these calls does all or nothing. So the pager asks the kernel about one page of each part of what is said to be unmapped that may
//! have contents moved out, and that no other change of the epoch divides:
//! 1. A part that is still registered with the userfaultfd was not unmapped, or a remap of the epoch has brought a mapping there since. That
//!    remap itself takes away what was there before.
//! 2. A part that is not, and that a remap of the epoch has moved away, was there until then, if no remap has brought anything there. What
//!    remains in its place is nothing of ours.
//! 3. Every other part was unmapped.
//!
//! If the epoch has a fork, too, the child may lie between an unmap and a remap of the same part, and has nothing there: then the pager believes
//! the event, as of everything that a remap has to do with.

use std::collections::BTreeSet;

use crate::epoch::{Change, Event};
use crate::range::{Range, RangeSet};
use crate::space::State;
use crate::sys::uffd::Probe;

/// Takes out of `events`, from number `asked` on, what was announced and not done, and counts `asked` on. `ask` has the kernel tell whether
/// a page is registered. Returns false where the layout is changing, and more is to be read before that can be told.
pub(crate) fn take_out(
    state: &State,
    events: &mut Vec<Event>,
    asked: &mut usize,
    has_forks: bool,
    mut ask: impl FnMut(u64) -> Probe,
) -> bool {
    while let Some(&Event { change, forks_read }) = events.get(*asked) {
        let Change::Unmap(range) = change else {
            *asked += 1;
            continue;
        };
        let mut stays = Vec::new();
        for Part { range, moved_away, brought } in doubtful_parts(state, events, range) {
            if has_forks && (moved_away || brought) {
                continue;
            }
            match ask(state.table.first_away(range).unwrap_or(range.start)) {
                Probe::Registered => stays.push(range),
                Probe::NotRegistered | Probe::Gone if moved_away && !brought => stays.push(range),
                Probe::NotRegistered | Probe::Gone => {}
                Probe::Changing => return false,
            }
        }
        let gone: Vec<Event> =
            without(range, &stays).map(|range| Event { change: Change::Unmap(range), forks_read }).collect();
        let count = gone.len();
        if !stays.is_empty() {
            events.splice(*asked..=*asked, gone);
        }
        *asked += count;
    }
    true
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
fn doubtful_parts(state: &State, events: &[Event], range: Range) -> Vec<Part> {
    let others = || events.iter().map(|event| event.change).filter(|change| change.touches(range));
    let remaps: Vec<(Range, Range)> = others()
        .filter_map(|change| match change {
            Change::Remap { from, to, len } => Some((Range::sized(from, len), Range::sized(to, len))),
            Change::Remove(_) | Change::Unmap(_) => None,
        })
        .collect();
    let mut doubtful = RangeSet::default();
    let with_contents = state.registered.within(range).into_iter();
    with_contents.filter(|part| state.table.first_away(*part).is_some()).for_each(|part| doubtful.insert(part));
    let brought = remaps.iter().map(|(_, to)| to.intersect(range)).filter(|part| !part.is_empty());
    brought.for_each(|part| doubtful.insert(part));
    if doubtful.is_empty() {
        return Vec::new();
    }
    let unmapped = others().filter_map(|change| if let Change::Unmap(range) = change { Some(range) } else { None });
    let changed = unmapped.chain(remaps.iter().flat_map(|&(from, to)| [from, to]));
    let bounds: BTreeSet<u64> = changed.flat_map(|range| [range.start, range.end]).collect();
    let divide = |part: Range| {
        let inside = bounds.range(part.start + 1..part.end).copied();
        let ends: Vec<u64> = [part.start].into_iter().chain(inside).chain([part.end]).collect();
        ends.windows(2).map(|pair| Range::new(pair[0], pair[1])).collect::<Vec<_>>()
    };
    let part = |range: Range| Part {
        range,
        moved_away: remaps.iter().any(|(from, _)| from.overlaps(range)),
        brought: remaps.iter().any(|(_, to)| to.overlaps(range)),
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
    use super::*;
    use crate::PAGE;
    use crate::table::PageState;

    const A: Range = Range { start: 0x10000, end: 0x14000 };
    const B: Range = Range { start: 0x20000, end: 0x24000 };
    const ALL: Range = Range { start: 0x8000, end: 0x40000 };

    fn remap(from: Range, to: Range) -> Change {
        Change::Remap { from: from.start, to: to.start, len: from.len() }
    }

    /// What is left of `changes`, if `away` has contents moved out, and `registered` is registered in the end.
    fn left(away: &[Range], changes: &[Change], has_forks: bool, registered: &[Range]) -> Vec<Change> {
        let mut state = State::default();
        for &range in away {
            state.registered.insert(range);
            state.table.set(range.start + PAGE, PageState::Staged(1));
        }
        let mut events: Vec<Event> = changes.iter().map(|&change| Event { change, forks_read: 0 }).collect();
        let mut asked = 0;
        let is_there = |page: u64| registered.iter().any(|range| range.contains(page));
        let ask = |page: u64| if is_there(page) { Probe::Registered } else { Probe::NotRegistered };
        assert!(take_out(&state, &mut events, &mut asked, has_forks, ask));
        assert_eq!(asked, events.len());
        events.into_iter().map(|event| event.change).collect()
    }

    #[test]
    fn what_stays_is_taken_out_of_what_is_unmapped() {
        assert_eq!(left(&[A], &[Change::Unmap(A)], false, &[A]), []);
        assert_eq!(left(&[A], &[Change::Unmap(A)], false, &[]), [Change::Unmap(A)]);
        let around = [(ALL.start, A.start), (A.end, ALL.end)].map(|(start, end)| Change::Unmap(Range::new(start, end)));
        assert_eq!(left(&[A, B], &[Change::Unmap(ALL)], false, &[A]), around);
        // The second has unmapped what the first had only announced.
        let changes = [Change::Unmap(ALL), Change::Unmap(B)];
        assert_eq!(left(&[A, B], &changes, false, &[A]), [around.as_slice(), &[Change::Unmap(B)]].concat());
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
            let mut expected = rest.clone();
            expected.insert(if at == 0 { rest.len() } else { 0 }, remap(A, B));
            assert_eq!(left(&[A], &changes, false, &[B]), expected);
        }
        // Unmapped after it was brought there.
        assert_eq!(left(&[A], &[remap(A, B), Change::Unmap(B)], false, &[]), [remap(A, B), Change::Unmap(B)]);
        // A child may have nothing there.
        let changes = [Change::Unmap(B), remap(A, B)];
        assert_eq!(left(&[A, B], &changes, true, &[B]), changes);
        assert_eq!(left(&[A, B], &changes, false, &[B]), [remap(A, B)]);
    }

    #[test]
    fn nothing_is_told_while_the_layout_changes() {
        let mut state = State::default();
        state.registered.insert(A);
        state.table.set(A.start, PageState::Staged(1));
        let (mut events, mut asked) = (vec![Event { change: Change::Unmap(A), forks_read: 0 }], 0);
        assert!(!take_out(&state, &mut events, &mut asked, false, |_| Probe::Changing));
        assert_eq!((events.len(), asked), (1, 0));
    }
}

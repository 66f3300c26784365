//! What the kernel announces and then does not do.
//!
//! `munmap`, `mmap(MAP_FIXED)`, `mremap` and `brk` announce what they are about to unmap, and may fail after that: for want of memory or of
//! address space (RLIMIT_AS, RLIMIT_DATA, overcommit), or because a part is sealed. The event comes all the same, and the mapping stays with
//! all that was in it. To believe the event would leave zeros in place of what was moved out.
//!
//! Each of these calls does all or nothing. So of each part of what is said to be unmapped that has contents moved out, and that no other
//! change of the epoch divides, one page is asked for: a mapping that is still registered with the userfaultfd was not unmapped. What a remap
//! of the epoch has to do with is believed: where it was moved from or to is known to have been mapped and unmapped.

use std::collections::BTreeSet;

use crate::epoch::{Change, Event};
use crate::range::Range;
use crate::space::{Space, State};
use crate::sys::uffd::Probe;

/// Takes out of `events`, from number `asked` on, what was announced and not done, and counts `asked` on. False where the layout is
/// changing, and more is to be read before that can be told.
pub(crate) fn take_out(space: &Space, state: &State, events: &mut Vec<Event>, asked: &mut usize) -> bool {
    while let Some(&Event { change, forks_read }) = events.get(*asked) {
        let Change::Unmap(range) = change else {
            *asked += 1;
            continue;
        };
        let mut stays = Vec::new();
        for part in doubtful_parts(state, events, range) {
            let Some(page) = state.table.first_away(part) else { continue };
            match space.uffd.is_watched(page) {
                Probe::Registered => stays.push(part),
                Probe::NotRegistered | Probe::Gone => {}
                Probe::Changing => return false,
            }
        }
        if stays.is_empty() {
            *asked += 1;
        } else {
            let gone =
                without(range, &stays).into_iter().map(|range| Event { change: Change::Unmap(range), forks_read });
            let gone: Vec<Event> = gone.collect();
            let count = gone.len();
            events.splice(*asked..=*asked, gone);
            *asked += count;
        }
    }
    true
}

/// The parts of `range`, in order, that are registered as far as is known, have contents moved out, and were unmapped as a whole or not at
/// all.
fn doubtful_parts(state: &State, events: &[Event], range: Range) -> Vec<Range> {
    let mut parts = state.registered.within(range);
    parts.retain(|part| state.table.first_away(*part).is_some());
    let others = || events.iter().map(|event| event.change).filter(|change| change.touches(range));
    if parts.is_empty() || others().any(|change| matches!(change, Change::Remap { .. })) {
        return Vec::new();
    }
    let unmapped = others().filter_map(|change| if let Change::Unmap(range) = change { Some(range) } else { None });
    let bounds: BTreeSet<u64> = unmapped.flat_map(|range| [range.start, range.end]).collect();
    let divide = |part: Range| {
        let inside = bounds.range(part.start + 1..part.end).copied();
        let ends: Vec<u64> = [part.start].into_iter().chain(inside).chain([part.end]).collect();
        ends.windows(2).map(|pair| Range::new(pair[0], pair[1])).collect::<Vec<_>>()
    };
    parts.into_iter().flat_map(divide).collect()
}

/// What is left of `range` without `holes`, which are in order.
fn without(range: Range, holes: &[Range]) -> Vec<Range> {
    let mut rest = range;
    let mut left = Vec::new();
    for hole in holes {
        let [before, after] = rest.without(*hole);
        left.push(before);
        rest = after;
    }
    left.push(rest);
    left.retain(|range| !range.is_empty());
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_is_taken_out_of_what_is_unmapped() {
        let range = Range::new(0x1000, 0x9000);
        assert_eq!(without(range, &[range]), []);
        assert_eq!(without(range, &[]), [range]);
        let holes = [Range::new(0x1000, 0x2000), Range::new(0x4000, 0x5000)];
        assert_eq!(without(range, &holes), [Range::new(0x2000, 0x4000), Range::new(0x5000, 0x9000)]);
    }
}

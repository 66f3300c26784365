//! What the kernel announces and then does not do.
//!
//! `munmap`, `mmap(MAP_FIXED)`, `mremap` and `brk` announce what they are about to unmap, and may fail after that: for want of memory or of
//! address space (RLIMIT_AS, RLIMIT_DATA, overcommit), or because a part is sealed. The event comes all the same, and the mapping stays with
//! all that was in it. A pager that believes the event leaves zeros in place of what was moved out.
//!
//! Each of these calls does all or nothing. So the pager asks the kernel about one page of each part of what is said to be unmapped that may
//! have contents moved out, and that no other change of the epoch divides: where it lies, or where remaps that were read later have brought it.
//! 1. A part that is registered was not unmapped, and all of the event is left out. Or it was, and a mapping before it has grown over the place
//!    since, in silence: `mremap` does that, as in `realloc`. This is told by `Epoch::was_refused`.
//! 2. What a remap had brought there was unmapped after that; or the call was refused; or what lay there before was unmapped, to make room for the
//!    remap, and this was read late. This is told by `Epoch::made_room`. If it came after, it **stands**: whatever is registered there now,
//!    `epoch` leaves it in its place.
//! 3. What was moved away before, and where nothing was brought since, is nothing of ours, and is left out of the event.
//!
//! A part that a remap brings something to becomes an event of its own: its place among the others is not that of the rest.
//! If the epoch has a fork, too, the child may lie between two changes of the same part: then what is nothing of ours stays in the event.

use std::collections::BTreeSet;

use crate::PAGE;
use crate::change::{self, Change, Event};
use crate::range::{Range, RangeSet};
use crate::space::State;
use crate::sys::uffd::Probe;

/// What the kernel tells of the program at this moment.
pub(crate) trait Kernel {
    /// Tells whether a page is registered.
    fn ask(&self, page: u64) -> Probe;

    /// Tells whether the layout is changing.
    fn is_changing(&self) -> bool;

    /// Tells whether a page of `range` is present.
    fn has_page(&self, range: Range) -> bool;

    /// Tells whether a mapping begins at this address.
    fn begins_mapping(&self, at: u64) -> bool;

    /// Tells whether there is a reason to refuse to unmap `range`, or to map something of this length.
    fn may_refuse(&self, range: Range) -> bool;
}

/// Why it cannot be told what was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unclear {
    /// The layout is changing: more is to be read before.
    Changing,
    /// Nothing that the kernel tells shows whether a mapping has lost its contents or not.
    Ambiguous,
}

/// Takes out of `events`, from number `asked` on, what was announced and not done, and counts `asked` on.
pub(crate) fn take_out(
    state: &State,
    events: &mut Vec<Event>,
    asked: &mut usize,
    has_forks: bool,
    kernel: &impl Kernel,
) -> Result<(), Unclear> {
    let mut index = None;
    while let Some(&event) = events.get(*asked) {
        let Change::Unmap(range) = event.change else {
            *asked += 1;
            continue;
        };
        let index = index.get_or_insert_with(|| Index::of(events));
        let parts = doubtful_parts(state, index, range);
        if parts.is_empty() {
            *asked += 1;
            continue;
        }
        let epoch = Epoch { state, index, before: &events[..*asked], after: &events[*asked + 1..], kernel };
        let pieces = epoch.divide(range, parts, has_forks);
        // What was asked about has to be the layout after all that was read.
        if kernel.is_changing() {
            return Err(Unclear::Changing);
        }
        let pieces = pieces?;
        if pieces != [(range, false)] {
            index.replace(range, &pieces.iter().map(|&(piece, _)| piece).collect::<Vec<_>>());
            let unmap = |&(piece, stands): &(Range, bool)| Event { change: Change::Unmap(piece), stands, ..event };
            events.splice(*asked..=*asked, pieces.iter().map(unmap));
        }
        *asked += pieces.len();
    }
    Ok(())
}

/// Of so many parts it is asked whether they were unmapped: of all, or of none.
const MOST_ASKED: usize = 64;

/// An epoch, seen from one of its events.
struct Epoch<'a, K> {
    state: &'a State,
    index: &'a Index,
    /// The events that were read before it, and after it.
    before: &'a [Event],
    after: &'a [Event],
    kernel: &'a K,
}

impl<K: Kernel> Epoch<'_, K> {
    /// Divides what the event says is unmapped, of which `parts` are in doubt, into what was, or may have been, and leaves out what stays.
    /// Tells of each piece whether it stands.
    fn divide(&self, range: Range, parts: Vec<Part>, has_forks: bool) -> Result<Vec<(Range, bool)>, Unclear> {
        let (mut stays, mut apart, mut doubts) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            if self.had_contents(&part) {
                doubts.push(self.doubt(part)?);
            } else if !has_forks {
                match part.brought {
                    false => stays.push(part.range),
                    true if self.is_registered(part.range.start)? => apart.push((part.range, false)),
                    true => {}
                }
            }
        }
        let (brought, own): (Vec<Doubt>, Vec<Doubt>) = doubts.into_iter().partition(|doubt| doubt.brought_by.is_some());
        let there = |doubts: &[Doubt]| doubts.iter().flat_map(Doubt::there).collect::<Vec<Range>>();
        let (own_there, brought_there) = (there(&own), there(&brought));
        let was_refused = match (own_there.as_slice(), brought_there.as_slice()) {
            // A child may have what the program has unmapped since.
            ([], []) => has_forks && own.iter().any(|doubt| self.unmaps_later(doubt)) && self.kernel.may_refuse(range),
            ([], there) | (there, _) => self.was_refused(range, there)?,
        };
        // What was brought may be there because it came after what was done.
        let is_told = !own_there.is_empty() || brought_there.is_empty();
        if was_refused && is_told {
            return Ok(Vec::new());
        }
        for Doubt { part, is_registered, .. } in own {
            match part.brought {
                true => apart.push((part.range, false)),
                false if part.moved_away && is_registered => apart.push((part.range, true)),
                false => {}
            }
        }
        for doubt in brought {
            let is_kept = doubt.is_registered && (was_refused || self.has_page(&doubt.now));
            let stands = !is_kept && !self.made_room(range, &doubt)?;
            apart.push((doubt.part.range, stands));
        }
        let mut holes: Vec<Range> = apart.iter().map(|&(part, _)| part).chain(stays).collect();
        holes.sort_unstable_by_key(|range| range.start);
        let mut pieces: Vec<(Range, bool)> = without(range, &holes).map(|piece| (piece, false)).chain(apart).collect();
        pieces.sort_unstable_by_key(|(piece, _)| piece.start);
        Ok(pieces)
    }

    /// Follows a part to where it lies now. Most are not moved: of those no look at all events is taken.
    fn doubt(&self, part: Part) -> Result<Doubt, Unclear> {
        if !part.is_moved() {
            let is_registered =
                self.is_registered(self.state.table.first_away(part.range).unwrap_or(part.range.start))?;
            return Ok(Doubt { brought_by: None, now: vec![part.range], is_registered, part });
        }
        let now = change::brought_to(self.after, part.range);
        let registered: Result<Vec<bool>, Unclear> = now.iter().map(|now| self.is_registered(now.start)).collect();
        Ok(Doubt { brought_by: self.brought_by(part.range), is_registered: registered?.contains(&true), now, part })
    }

    fn unmaps_later(&self, doubt: &Doubt) -> bool {
        let unmaps = |event: &Event| matches!(event.change, Change::Unmap(range) if range.overlaps(doubt.part.range));
        self.after.iter().any(unmaps)
    }

    fn has_page(&self, ranges: &[Range]) -> bool {
        ranges.iter().any(|range| self.kernel.has_page(*range))
    }

    /// Where what is known to lie at `part` after the first `number` events was before the epoch.
    fn origins(&self, number: usize, part: Range) -> Vec<Range> {
        change::origins_of(&self.state.registered, &self.before[..number], part)
    }

    /// Tells whether something of ours lay there when the event was read.
    fn had_contents(&self, part: &Part) -> bool {
        !part.is_moved() || !self.origins(self.before.len(), part.range).is_empty()
    }

    fn is_registered(&self, page: u64) -> Result<bool, Unclear> {
        match self.kernel.ask(page) {
            Probe::Registered => Ok(true),
            Probe::NotRegistered | Probe::Gone => Ok(false),
            Probe::Changing => Err(Unclear::Changing),
        }
    }

    /// Tells whether the event that `range` would be unmapped was announced in vain, if parts of it, which lie at `now` now, are registered.
    ///
    /// 1. If the end of a part that was registered there is not, the call was done: it does all or nothing.
    /// 2. If no registered mapping lies right before it, nor did in this epoch, and none was brought there, none can have grown over the
    ///    place: the call was refused.
    /// 3. A page that is present was not unmapped: none comes into registered memory but by the pager, which fills nothing meanwhile.
    /// 4. Else the call was refused if there is a reason for that now.
    fn was_refused(&self, range: Range, now: &[Range]) -> Result<bool, Unclear> {
        let is_untouched = |part: &Range| self.index.overlapping(*part) == usize::from(range.overlaps(*part));
        let known = self.state.registered.within(range).into_iter().flat_map(|part| self.index.divide(part));
        let known: Vec<Range> = known.filter(is_untouched).take(MOST_ASKED).collect();
        for part in &known {
            if !self.is_registered(part.end - PAGE)? {
                return Ok(false);
            }
        }
        let before = Range::page(range.start.saturating_sub(PAGE));
        let may_have_grown =
            !is_untouched(&before) || self.index.is_brought(range) || self.is_registered(before.start)?;
        if !may_have_grown || self.has_page(&known) || self.has_page(now) {
            return Ok(true);
        }
        Ok(self.kernel.may_refuse(range))
    }

    /// Returns the remap that has brought what lay at `part` when the event was read.
    fn brought_by(&self, part: Range) -> Option<Move> {
        let of = |(number, event): (usize, &Event)| match event.change {
            Change::Remap { from, to, len } => {
                Some(Move { number, source: Range::sized(from, len), target: Range::sized(to, len) })
            }
            Change::Remove(_) | Change::Unmap(_) => None,
        };
        self.before.iter().enumerate().filter_map(of).rfind(|remap| remap.target.overlaps(part))
    }

    /// Tells whether the event, which unmapped `doubt` of `range`, made room for the remap that brought something there, though it was read
    /// after that. What lay there before need not have been known: a mapping may have grown over it.
    fn made_room(&self, range: Range, doubt: &Doubt) -> Result<bool, Unclear> {
        let Some(Move { number, source, target }) = doubt.brought_by else { return Ok(false) };
        let part = doubt.part.range;
        if !self.origins(number, part).is_empty() {
            return Ok(true);
        }
        // It would have unmapped what was moved.
        if !doubt.is_registered || range.overlaps(source) {
            return Ok(false);
        }
        // What has grown would have left some of what was moved between itself and the place, if it is not the rest of a mapping that
        // `mremap` has made shorter and moved away: that is announced after the move.
        let is_shortened =
            |event: &Event| matches!(event.change, Change::Remap { from, len, .. } if from + len == range.start);
        let may_be_rest = self.before.iter().any(is_shortened);
        if target.start < range.start && !may_be_rest {
            return Ok(false);
        }
        let moved_out = |origin: &Range| self.state.table.first_away(*origin).is_some();
        if !self.origins(self.before.len(), part).iter().any(moved_out) {
            return Ok(false);
        }
        if target.start < range.start {
            return Err(Unclear::Ambiguous);
        }
        let now = change::brought_to(self.after, Range::page(target.start));
        let begins = now.first().is_some_and(|now| self.kernel.begins_mapping(now.start));
        let before = Range::page(target.start.saturating_sub(PAGE));
        let is_touched = self.after.iter().any(|event| event.change.touches(before));
        match now.as_slice() {
            // What has grown is one mapping with what lies before it.
            [now] if !begins && now.start == target.start => Ok(false),
            [now] if begins && now.start == target.start && !is_touched => Ok(true),
            _ => Err(Unclear::Ambiguous),
        }
    }
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

    /// Divides a range so that each change has to do with all or nothing of a part.
    fn divide(&self, range: Range) -> Vec<Range> {
        let ends: Vec<u64> = [range.start].into_iter().chain(self.inside(range)).chain([range.end]).collect();
        ends.windows(2).map(|pair| Range::new(pair[0], pair[1])).collect()
    }

    /// Tells whether a remap has brought a mapping to some of `range`.
    fn is_brought(&self, range: Range) -> bool {
        self.remaps.iter().any(|(_, to)| to.overlaps(range))
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

/// A part of what was announced, of which each change of the epoch has to do with all or nothing.
struct Part {
    range: Range,
    /// A remap has moved it to another place.
    moved_away: bool,
    /// A remap has brought a mapping there.
    brought: bool,
}

impl Part {
    fn is_moved(&self) -> bool {
        self.moved_away || self.brought
    }
}

/// A remap: its number among the events, from where, and to where.
struct Move {
    number: usize,
    source: Range,
    target: Range,
}

/// A part that had contents when the event was read.
struct Doubt {
    part: Part,
    /// What has brought them there.
    brought_by: Option<Move>,
    /// Where they lie now, if the event was announced in vain.
    now: Vec<Range>,
    /// Something is registered there.
    is_registered: bool,
}

impl Doubt {
    fn there(&self) -> impl Iterator<Item = Range> {
        self.now.iter().copied().filter(|_| self.is_registered)
    }
}

/// The parts of `range`, in order, that may have contents moved out.
fn doubtful_parts(state: &State, index: &Index, range: Range) -> Vec<Part> {
    let mut doubtful = RangeSet::default();
    let with_contents = state.registered.within(range).into_iter();
    with_contents.filter(|part| state.table.first_away(*part).is_some()).for_each(|part| doubtful.insert(part));
    let brought = index.remaps.iter().map(|(_, to)| to.intersect(range)).filter(|part| !part.is_empty());
    brought.for_each(|part| doubtful.insert(part));
    let part = |range: Range| Part {
        range,
        moved_away: index.remaps.iter().any(|(from, _)| from.overlaps(range)),
        brought: index.is_brought(range),
    };
    doubtful.iter().flat_map(|range| index.divide(range)).map(part).collect()
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
    use crate::change::OpenMoves;
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

        fn is_changing(&self) -> bool {
            false
        }

        fn has_page(&self, range: Range) -> bool {
            self.1.iter().any(|present| present.overlaps(range))
        }

        fn begins_mapping(&self, at: u64) -> bool {
            self.0.iter().any(|range| range.start == at)
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
        assert_eq!(take_out(&state, &mut events, &mut asked, has_forks, kernel), Ok(()));
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
        assert_eq!(left(&[A], &[Change::Unmap(ALL)], false, &[A]), []);
        // It would have unmapped all or nothing.
        assert_eq!(left(&[A, B], &[Change::Unmap(ALL)], false, &[A]), [Change::Unmap(ALL)]);
        // The second has unmapped what the first had only announced.
        let changes = [Change::Unmap(ALL), Change::Unmap(B)];
        assert_eq!(left(&[A, B], &changes, false, &[A]), [Change::Unmap(B)]);
        // A child has what the first left, if there was a reason to refuse it and nothing else tells.
        let changes = [Change::Unmap(ALL), Change::Unmap(A)];
        assert_eq!(left(&[A], &changes, true, &[]), [Change::Unmap(A)]);
        assert_eq!(left_if(&[A], &changes, true, &Says(&[], &[], false)), changes);
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
        assert_eq!(left(&[A], &[Change::Unmap(ALL), remap(A, B)], false, &[B]), [remap(A, B)]);
        // Read after it, it may have made room, too: what it unmapped there is put into its place apart.
        let pieces = [(ALL.start, A.start), (A.end, B.start), (B.start, B.end), (B.end, ALL.end)];
        let pieces = pieces.map(|(start, end)| Change::Unmap(Range::new(start, end)));
        let expected = [&[remap(A, B)], pieces.as_slice()].concat();
        assert_eq!(left(&[A], &[remap(A, B), Change::Unmap(ALL)], false, &[B]), expected);
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
            assert_eq!(take_out(&state, &mut events, &mut asked, false, &kernel), Ok(()));
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

    /// A thread moves memory away. Before the manager has read that the kernel has unmapped it there, another thread moves something else to
    /// the place, which begins or ends elsewhere. No page of it is present.
    #[test]
    fn what_was_moved_to_the_place_of_what_was_moved_away_stays() {
        let (c, d) = (Range::new(0x30000, 0x34000), Range::new(0x40000, 0x48000));
        for low in [A.start - PAGE, A.start, A.start + PAGE] {
            for len in [A.len(), A.len() + PAGE] {
                let there = Range::sized(low, len);
                let from = Range::sized(d.start, len);
                let (mut state, mut asked) = (State::default(), 0);
                for range in [A, from] {
                    state.registered.insert(range);
                    for page in (range.start..range.end).step_by(PAGE as usize) {
                        state.table.set(page, PageState::Staged(1));
                    }
                }
                let changes = [remap(A, c), remap(from, there), Change::Unmap(A), Change::Unmap(from)];
                let mut moves = OpenMoves::default();
                let read = changes.iter().filter(|change| !moves.ends(**change));
                let mut events: Vec<Event> = read.map(|&change| Event::new(change, 0)).collect();
                let kernel = Says(&[c, there], &[], false);
                assert_eq!(take_out(&state, &mut events, &mut asked, false, &kernel), Ok(()));
                let is_registered = |address| Some(kernel.ask(address) == Probe::Registered);
                let Order::Found(ordered) = epoch::order(&state.registered, &events, is_registered) else {
                    panic!("no order of {events:x?}");
                };
                let brought = ordered.iter().position(|event| event.change == changes[1]).expect("it was done");
                let lost = |event: &Event| matches!(event.change, Change::Unmap(range) if range.overlaps(there));
                assert!(!ordered[brought..].iter().any(lost), "{ordered:x?}");
            }
        }
    }

    /// What becomes of `unmapped` after A has been moved to B and, `on`, further, where all of A had contents: whether it stands.
    fn stands_after_move(unmapped: Range, on: &[Change], kernel: &impl Kernel) -> Result<Vec<(Range, bool)>, Unclear> {
        let mut state = State::default();
        state.registered.insert(A);
        for page in (A.start..A.end).step_by(PAGE as usize) {
            state.table.set(page, PageState::Staged(1));
        }
        let changes = [&[remap(A, B), Change::Unmap(A), Change::Unmap(unmapped)], on].concat();
        let mut events: Vec<Event> = changes.into_iter().map(|change| Event::new(change, 0)).collect();
        take_out(&state, &mut events, &mut 0, false, kernel)?;
        let unmaps = events.iter().filter_map(|event| match event.change {
            Change::Unmap(range) if range.overlaps(B) => Some((range, event.stands)),
            _ => None,
        });
        Ok(unmaps.collect())
    }

    #[test]
    fn what_was_given_up_where_it_had_been_moved_to_does_not_come_back() {
        let c = Range::new(0x30000, 0x34000);
        let end = Range::new(B.start + PAGE, B.end);
        // The rest of it has grown over the place, and all of it was moved on, or not.
        assert_eq!(stands_after_move(end, &[], &Says(&[B], &[], false)), Ok(vec![(end, true)]));
        assert_eq!(stands_after_move(end, &[remap(B, c)], &Says(&[c], &[], false)), Ok(vec![(end, true)]));
        // It was refused, or came first and was of what lay there before.
        for refused in [Says(&[B], &[], true), Says(&[B], &[Range::page(end.start)], false)] {
            assert_eq!(stands_after_move(end, &[], &refused), Ok(vec![(end, false)]));
        }
        let moved_page = [Range::page(c.end - PAGE)];
        assert_eq!(stands_after_move(end, &[remap(B, c)], &Says(&[c], &moved_page, false)), Ok(vec![(end, false)]));
        // Nothing is there any more.
        assert_eq!(stands_after_move(end, &[], &Says(&[], &[], false)), Ok(vec![(end, true)]));
    }

    #[test]
    fn all_of_what_was_moved_is_given_up_or_was_never_there() {
        let (c, low) = (Range::new(0x30000, 0x34000), Range::new(B.start - PAGE, B.end));
        // What lay before it has grown over it; or it begins where it was moved to.
        assert_eq!(stands_after_move(B, &[], &Says(&[low], &[], false)), Ok(vec![(B, true)]));
        assert_eq!(stands_after_move(B, &[], &Says(&[B], &[], true)), Ok(vec![(B, false)]));
        let begins = Says(&[Range::new(low.start, B.start), B], &[], false);
        assert_eq!(stands_after_move(B, &[], &begins), Ok(vec![(B, false)]));
        // Moved on, or parted from what lies before it, it begins there in either case.
        assert_eq!(stands_after_move(B, &[remap(B, c)], &Says(&[c], &[], false)), Err(Unclear::Ambiguous));
        let parted = [Change::Unmap(Range::page(low.start))];
        assert_eq!(stands_after_move(B, &parted, &begins), Err(Unclear::Ambiguous));
        // It would have unmapped what was moved.
        let both = Range::new(A.start, B.end);
        assert_eq!(
            stands_after_move(both, &[remap(B, c)], &Says(&[c], &[], false)).map(|pieces| pieces.last().copied()),
            Ok(Some((B, true)))
        );
    }

    /// A mapping that has grown in silence is made shorter and moved away. Before the manager has read that its rest was unmapped, another thread
    /// moves something over both. Or that thread has unmapped the end of what it moved, and the rest of it has grown over the place.
    #[test]
    fn the_rest_of_what_was_made_shorter_is_not_taken_for_what_came_there() {
        let (kept, c) = (Range::new(B.start, B.start + PAGE), Range::new(0x30000, 0x31000));
        let rest = Range::new(kept.end, B.end);
        let left_after = |first: [Change; 2], kernel: &Says<'_>| {
            let mut state = State::default();
            for range in [A, kept] {
                state.registered.insert(range);
                for page in (range.start..range.end).step_by(PAGE as usize) {
                    state.table.set(page, PageState::Staged(1));
                }
            }
            let changes = [first[0], first[1], Change::Unmap(rest)];
            let mut events: Vec<Event> = changes.into_iter().map(|change| Event::new(change, 0)).collect();
            take_out(&state, &mut events, &mut 0, false, kernel).map(|()| events[2].stands)
        };
        let left = |kernel: &Says<'_>| left_after([remap(kept, c), remap(A, B)], kernel);
        assert_eq!(left(&Says(&[B, c], &[], false)), Err(Unclear::Ambiguous));
        let read_late = [remap(A, B), remap(kept, c)];
        assert_eq!(left_after(read_late, &Says(&[B, c], &[], false)), Err(Unclear::Ambiguous));
        // A page that is present was not unmapped there; what is not registered was.
        assert_eq!(left(&Says(&[B, c], &[Range::page(rest.start)], false)), Ok(false));
        assert_eq!(left(&Says(&[kept, c], &[], false)), Ok(true));
    }

    #[test]
    fn nothing_is_told_while_the_layout_changes() {
        struct Changing;
        impl Kernel for Changing {
            fn ask(&self, _: u64) -> Probe {
                Probe::Changing
            }

            fn is_changing(&self) -> bool {
                true
            }

            fn has_page(&self, _: Range) -> bool {
                unreachable!("nothing is known yet")
            }

            fn begins_mapping(&self, _: u64) -> bool {
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
        assert_eq!(take_out(&state, &mut events, &mut asked, false, &Changing), Err(Unclear::Changing));
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

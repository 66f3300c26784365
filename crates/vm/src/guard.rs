//! Guard pages, and mappings that a forked child finds empty: neither is announced, both are found by asking.
//!
//! 1. Nothing is filled ahead over a guard page (`MADV_GUARD_INSTALL`): a window is looked at before it is loaded, and in a program that
//!    has guards once more right before it is filled. What is stored
//!    under a guard page was discarded with it, and is dropped by whatever finds the guard first: a fault nearby, a page-out of the
//!    range, or the look at everything that is taken every second or less. Guards that libc's `madvise` installs are announced: the
//!    agent calls `MADV_FREE` for their range, which the kernel announces; or, if the call came to an error, and only some of the pages may be
//!    guards, has the manager look for them.
//! 2. A forked child inherits nothing of a mapping with `MADV_WIPEONFORK`, and not the mapping with `MADV_DONTFORK`. The mappings' flags tell,
//!    whichever call has set them; of the latter the child's own memory, too.

use std::time::{Duration, Instant};

use uzswap_engine::Slot;

use crate::PAGE;
use crate::pager::Pager;
use crate::range::{Range, RangeSet};
use crate::space::{Space, State, Worker};
use crate::sys::pagemap::Pagemap;
use crate::sys::smaps::{self, NotInherited};
use crate::table::PageState;

/// How often all memory is searched for guard pages, at most; and how many times as long as a search there is none.
const INTERVAL: Duration = Duration::from_secs(1);
const REST: u32 = 100;

impl Pager {
    /// The first guard page of a range. One page alone is looked at only where there have been guards.
    pub(crate) fn first_guard(&self, state: &State, range: Range) -> Option<u64> {
        let pagemap = state.pagemap().filter(|_| range.len() > PAGE || state.has_guards)?;
        pagemap.guards(range).0.first().map(|guard| guard.start)
    }

    /// Returns how many of `pages`, neighbours that are about to be filled, lie before the first guard. They were searched before they
    /// were loaded; only where there have been guards it is done once more.
    pub(crate) fn before_guard(&self, state: &State, pages: &[(u64, Slot)]) -> usize {
        if !state.has_guards {
            return pages.len();
        }
        let (Some((first, last)), Some(pagemap)) = (bounds(pages), state.pagemap()) else { return pages.len() };
        let (found, _) = pagemap.guards(Range::new(first, last + PAGE));
        found.first().map_or(pages.len(), |guard| pages.partition_point(|(page, _)| *page < guard.start))
    }

    /// Takes those of `pages` out that a guard lies over now, and drops what is stored under it. That may be the first, although the kernel
    /// has let a thread pass that wants it: the guard came later. One page alone is looked at only where there have been guards, or if it
    /// `is_unwanted`, as the manager brings it of its own accord.
    pub(crate) fn pass_over_guards(
        &self,
        space: &Space,
        state: &mut State,
        pages: &mut Vec<(u64, Slot)>,
        is_unwanted: bool,
    ) {
        if pages.len() < 2 && !state.has_guards && !is_unwanted {
            return;
        }
        let (Some((first, last)), Some(pagemap)) = (bounds(pages), state.pagemap()) else { return };
        match self.drop_guarded(space, state, &pagemap, Range::new(first, last + PAGE)) {
            Some(false) => {}
            Some(true) => pages.retain(|(page, slot)| state.table.get(*page) == PageState::Stored(*slot)),
            None => pages.truncate(1),
        }
    }

    /// Drops what is kept under the guards of `range`, before the manager fills in what no thread waits for: it would replace the guards. False
    /// if the layout is changing, and it is to be called again.
    pub(crate) fn drop_under_guards(&self, space: &Space, state: &mut State, range: Range) -> bool {
        state.pagemap().is_none_or(|pagemap| self.drop_guarded(space, state, &pagemap, range).is_some())
    }

    /// Drops what is kept under the guards of `range`; tells whether there were guards. `None` if the layout is changing: then
    /// the guards may lie where other contents were when the last event was read, and nothing is dropped.
    pub(crate) fn drop_guarded(
        &self,
        space: &Space,
        state: &mut State,
        pagemap: &Pagemap,
        range: Range,
    ) -> Option<bool> {
        let (mut at, mut any) = (range.start, false);
        while at < range.end {
            let (found, end) = pagemap.guards(Range::new(at, range.end));
            if !found.is_empty() && space.uffd.is_changing() {
                return None;
            }
            any |= !found.is_empty();
            state.has_guards |= any;
            found.into_iter().for_each(|guard| state.empty(&self.engine, guard));
            if end <= at {
                break;
            }
            at = end;
        }
        Some(any)
    }

    /// Drops what is kept under the guards of `range`, where a program may have installed some. Tells whether that is done; if not, as the
    /// layout is changing, it is to be called again.
    pub fn find_guards(&self, space: &Space, range: Range) -> bool {
        let _visit = space.visit();
        let mut state = space.lock();
        let Some(pagemap) = state.pagemap() else { return true };
        self.drain(space, &mut state);
        let parts = state.registered.within(range);
        let is_done = parts.into_iter().all(|part| self.drop_guarded(space, &mut state, &pagemap, part).is_some());
        drop(state);
        self.service(space);
        is_done
    }

    /// Searches the memory of a process for guards that lie over contents, if that was not done a moment ago. To be called in
    /// conversation with the worker, without the lock.
    pub(crate) fn search_guards(&self, space: &Space, worker: &Worker, ranges: &[Range]) {
        let started = Instant::now();
        if space.lock().search_guards_at.is_some_and(|at| started < at) {
            return;
        }
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let (found, end) = worker.pagemap.guards(Range::new(at, range.end));
                if !found.is_empty() {
                    // They may be gone again, or lie elsewhere: so each is looked at again when nothing changes.
                    let mut state = space.lock();
                    self.drain(space, &mut state);
                    for guard in found {
                        // Where the layout is changing, the next search finds them again.
                        self.drop_guarded(space, &mut state, &worker.pagemap, guard);
                    }
                    drop(state);
                    // What was read besides the changes: the eviction that follows may come to nothing.
                    self.service(space);
                }
                if end <= at {
                    break;
                }
                at = end;
            }
        }
        let rest = INTERVAL.max(started.elapsed() * REST);
        space.lock().search_guards_at = Some(Instant::now() + rest);
    }

    /// What a child that was just forked finds empty, and what it does not find. Asked only if something is stored that the child could find
    /// there. `was_inherited` tells whether the child has inherited an address.
    pub(crate) fn not_inherited(
        &self,
        state: &State,
        mut was_inherited: impl FnMut(u64) -> Option<bool>,
    ) -> NotInherited {
        if state.table.iter().next().is_none() {
            return NotInherited::default();
        }
        let read = state.processes().find_map(|pid| smaps::not_inherited(pid).ok());
        let NotInherited { wiped, left_out } = read.unwrap_or_default();
        // The parent goes on meanwhile, and may have changed this since the fork. So each page is asked about that something is stored for.
        let stored = left_out.iter().flat_map(|range| state.table.list(range)).map(|(page, _)| page);
        let mut missing = RangeSet::default();
        stored.filter(|page| was_inherited(*page) == Some(false)).for_each(|page| missing.insert(Range::page(page)));
        NotInherited { wiped, left_out: missing }
    }
}

fn bounds(pages: &[(u64, Slot)]) -> Option<(u64, u64)> {
    let addresses = || pages.iter().map(|(page, _)| *page);
    Some((addresses().min()?, addresses().max()?))
}

//! The way back of everything: bringing back what was evicted from a range, or from all programs before management ends.
//!
//! When nothing is evicted from anybody and nobody may evict, the userfaultfds can be closed: whatever is missing from then on has
//! never been touched, or was discarded, and reads as zeros by rights.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::{Duration, Instant};

use uzswap_engine::Slot;
use uzswap_proto::kind;

use crate::PAGE;
use crate::fault::{Load, part};
use crate::layout;
use crate::pager::Pager;
use crate::range::Range;
use crate::space::{Fault, Request, Space};
use crate::table::PageState;

/// How many pages are on their way back at once.
const BATCH: usize = 4096;

/// Every address.
const ALL: Range = Range { start: 0, end: u64::MAX };

/// How long to wait for workers and programs that are late.
const PAUSE: Duration = Duration::from_millis(1);

impl Pager {
    /// Whether pages may be evicted. When this returns, none is about to be that must not be, but in conversations under way.
    pub fn set_evicting(&self, allowed: bool) {
        self.evicting.store(allowed, Relaxed);
        if !allowed {
            self.open_spaces().iter().for_each(|space| self.rest(space, false));
        }
    }

    /// Evicts nothing from `space` until told otherwise; eviction that is under way may still be recorded. What comes back is not charged,
    /// until then.
    pub fn hold_in(&self, space: &Arc<Space>, held: bool) {
        space.held_in.store(held, Relaxed);
        space.uncharged.store(0, Relaxed);
        if held {
            self.rest(space, false);
        }
    }

    /// Brings back what was evicted from `space`, which is held in; gives how many pages are still away. If not 0, a worker or the
    /// program is late, or a page cannot be loaded: call it again.
    pub fn bring_back_space(&self, space: &Space) -> usize {
        let _visit = space.visit();
        self.bring_back(space, ALL);
        self.pages_away(space)
    }

    /// Pages of `space` that are staged, stored or on their way back.
    pub fn pages_away(&self, space: &Space) -> usize {
        let _visit = space.visit();
        let state = space.lock();
        if state.gone { 0 } else { state.table.away() }
    }

    /// Brings back what was evicted from all programs. False if that is not done in time. Nothing may be evicted meanwhile.
    pub fn bring_back_all(&self, until: Instant) -> bool {
        loop {
            // Forks add to them.
            let is_whole =
                |space: &Space| !space.is_shunned() && self.bring_back(space, ALL) && self.pages_away(space) == 0;
            if self.spaces().iter().filter(|space| !is_whole(space)).count() == 0 {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Brings back what was evicted from `range`. Tells whether that is done; if not, as a worker or the program is late, it is
    /// to be called again.
    pub(crate) fn bring_back(&self, space: &Space, range: Range) -> bool {
        let _visit = space.visit();
        // Fails only when the program is gone.
        let _ = self.store_staged(space, 0);
        let stored: Vec<(u64, Slot)> = {
            let state = space.lock();
            let stored = |(page, state)| if let PageState::Stored(slot) = state { Some((page, slot)) } else { None };
            state.table.list(range).into_iter().filter_map(stored).collect()
        };
        for batch in stored.chunks(BATCH) {
            // With their neighbours, which is fast; then each by itself that could not be loaded so, as one of them is damaged or in the way.
            if !(self.load_back(space, batch, false) && self.load_back(space, batch, true)) {
                return space.lock().gone;
            }
        }
        {
            // What has come back is not waited for, whoever rests.
            let state = &mut *space.lock();
            let back = state.resting.extract_if(.., |fault| range.contains(fault.page));
            state.waiting.extend(back.map(|fault| Fault { insists: true, ..fault }));
        }
        self.service(space);
        let state = space.lock();
        // What could not be loaded stays where it is.
        let away = |(_, state): &(u64, PageState)| matches!(state, PageState::Staged(_) | PageState::Loading(_));
        let waiting = state.waiting.iter().chain(&state.starved).any(|fault| range.contains(fault.page));
        state.gone || !waiting && !state.table.list(range).iter().any(away)
    }

    /// Loads those of `batch` that are still stored and fills them in, each by itself or neighbours together. False if the worker has not
    /// answered yet which pages it has moved out, or the layout is changing and guards may have come: nothing may be filled in meanwhile.
    fn load_back(&self, space: &Space, batch: &[(u64, Slot)], is_alone: bool) -> bool {
        let pages: Vec<(u64, Slot)> = {
            let mut state = space.lock();
            if matches!(state.request, Some(Request::Evict { .. })) {
                return false;
            }
            if let (Some((first, _)), Some((last, _))) = (batch.first(), batch.last())
                && !self.drop_under_guards(space, &mut state, Range::new(*first, *last + PAGE))
            {
                return false;
            }
            let is_stored = |(page, slot): &&(u64, Slot)| state.table.get(*page) == PageState::Stored(*slot);
            let pages: Vec<_> = batch.iter().filter(is_stored).copied().collect();
            state.begin_loading(&pages);
            pages
        };
        let since = Instant::now();
        let mut rest = pages.as_slice();
        while let Some(&(page, _)) = rest.first() {
            let (pages, after) = rest.split_at(if is_alone { 1 } else { part(rest) });
            let fault = Fault { page, write: false, tid: 0, since, stalls: false, insists: false };
            self.finish_load(space, Load::new(is_alone.then_some(fault), pages.to_vec(), space.account()));
            rest = after;
        }
        true
    }

    /// Lets all programs go on without this manager: nothing is evicted from them any more.
    ///
    /// Their memory is watched no longer. That the userfaultfds close does not do this by itself: a tether may hold them open.
    pub fn release(&self) {
        for space in self.spaces() {
            let _visit = space.visit();
            space.untie();
            let _conversation = space.conversation.lock();
            let (worker, watched) = {
                let mut state = space.lock();
                let beacon = state.beacon.map(Range::page);
                let mut watched: Vec<Range> = state.registered.iter().chain(beacon).collect();
                // What has grown unheard of is registered, too. Fails only for a program that is going away.
                watched.extend(state.processes().find_map(|pid| layout::all(pid).ok()).unwrap_or_default());
                (state.worker.take(), watched)
            };
            watched.into_iter().for_each(|range| space.uffd.unregister(range));
            if let Some(worker) = worker {
                // As above.
                let _ = worker.link.send(&[kind::RELEASE], None);
            }
        }
        self.left_alone.fetch_add(1, Release);
    }
}

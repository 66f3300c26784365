//! The way back of everything: bringing back what was evicted from a range, or from all programs before management ends.
//!
//! When nothing is evicted from anybody and nobody may evict, the userfaultfds can be closed: whatever is missing from then on has
//! never been touched, or was discarded, and reads as zeros by rights.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use uzswap_engine::Slot;
use uzswap_proto::kind;

use crate::fault::Load;
use crate::pager::Pager;
use crate::range::Range;
use crate::space::{Fault, Request, Space};
use crate::table::PageState;

/// How many pages are on their way back at once.
const BATCH: usize = 4096;

/// How long to wait for workers and programs that are late.
const PAUSE: Duration = Duration::from_millis(1);

impl Pager {
    /// Whether pages may be evicted. When this returns, none is about to be that must not be, but in conversations under way.
    pub fn set_evicting(&self, allowed: bool) {
        self.evicting.store(allowed, Relaxed);
        if !allowed {
            self.spaces().iter().for_each(|space| self.rest(space, false));
        }
    }

    /// Brings back what was evicted from all programs. False if that is not done in time. Nothing may be evicted meanwhile.
    pub fn bring_back_all(&self, until: Instant) -> bool {
        let all = Range::new(0, u64::MAX);
        loop {
            // Forks add to them.
            let is_whole = |space: &Space| {
                self.bring_back(space, all) && {
                    let state = space.lock();
                    state.gone || state.table.list(all).iter().all(|(_, state)| *state == PageState::Resident)
                }
            };
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
        // Fails only when the program is gone.
        let _ = self.store_staged(space, 0);
        let stored: Vec<(u64, Slot)> = {
            let state = space.lock();
            let stored = |(page, state)| if let PageState::Stored(slot) = state { Some((page, slot)) } else { None };
            state.table.list(range).into_iter().filter_map(stored).collect()
        };
        for batch in stored.chunks(BATCH) {
            let mut pages = Vec::with_capacity(BATCH);
            {
                let mut state = space.lock();
                if matches!(state.request, Some(Request::Evict { .. })) {
                    return state.gone;
                }
                for &(page, slot) in batch {
                    if state.table.get(page) == PageState::Stored(slot) {
                        state.table.set(page, PageState::Loading(slot));
                        pages.push((page, slot));
                    }
                }
            }
            let started = Instant::now();
            for page in pages {
                let fault = Fault { page: page.0, write: false, tid: 0, since: started, stalls: false, insists: false };
                self.finish_load(space, Load::new(Some(fault), vec![page], space.account()));
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

    /// Lets all programs go on without us: nothing is evicted from them any more.
    pub fn release(&self) {
        for space in self.spaces() {
            let _conversation = space.conversation.lock();
            if let Some(worker) = space.lock().worker.take() {
                // Fails only for a program that is going away.
                let _ = worker.link.send(&[kind::RELEASE], None);
            }
        }
    }
}

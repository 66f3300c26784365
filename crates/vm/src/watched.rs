//! What is registered is checked, not believed.
//!
//! Every change of a registered mapping is an event, but for a few: the system call `shmat(SHM_REMAP)` replaces a mapping in silence
//! (docs/decisions/0010-changes-without-an-event.md). So `State::registered` is what the events tell, and the kernel's own word is asked
//! where it matters:
//!
//! 1. The worker asks before and after each move ([`evicted::UNWATCHED`](uzswap_proto::evicted::UNWATCHED),
//!    [`evicted::UNSURE`](uzswap_proto::evicted::UNSURE)). Its doubts are settled here before anything else is done.
//! 2. A page that was moved out of memory that is not registered, and whose place may still be in use, is lost: the
//!    program is killed. Else the contents are dropped, as the program has dropped them.
//! 3. Once a second or less often, everything that passes for registered is asked about, so that contents of a mapping that is gone are
//!    dropped though none of its pages is present.

use std::time::{Duration, Instant};

use crate::layout;
use crate::pager::Pager;
use crate::range::{Range, RangeSet};
use crate::space::{Space, State};
use crate::sys::uffd::Probe;
use crate::{events::wait_for_program, visit};

/// How often everything that passes for registered is asked about, at most; and how many times as long as that takes it is not.
const INTERVAL: Duration = Duration::from_secs(1);
const REST: u32 = 20;

impl Pager {
    /// Asks about everything that passes for registered, if that was not done a moment ago.
    pub(crate) fn look_over(&self, space: &Space, state: &mut State, pid: i32) {
        let started = Instant::now();
        if state.look_over_at.is_none_or(|at| started >= at) {
            self.forget_unwatched(space, state, pid, &[]);
            state.look_over_at = Some(Instant::now() + INTERVAL.max(started.elapsed() * REST));
        }
    }

    /// Takes out of `registered` what the kernel does not watch any more, and drops its contents. The staged pages in
    /// `moved` have come from memory that may not have been watched.
    ///
    /// A mapping can change while it is asked about: a range is let go only if the layout is settled and none of its
    /// pages that have contents is watched.
    pub(crate) fn forget_unwatched(&self, space: &Space, state: &mut State, pid: i32, moved: &[u32]) {
        const TRIES: u32 = 200;
        let mut tries = 0;
        while !state.gone {
            self.drain(space, state);
            // The program is going away.
            let Ok(mappings) = layout::all(pid) else { return };
            if let Some(lost) = unwatched(space, state, &mappings) {
                self.kill_if_lost(space, state, pid, moved, &lost);
                lost.iter().for_each(|range| state.forget(&self.engine, range));
                return;
            }
            if tries > TRIES && moved.is_empty() {
                return;
            }
            wait_for_program(&space.uffd, &mut tries);
        }
    }

    /// Kills the program if one of the pages in `moved` may have been in use where it was moved from.
    ///
    /// Either it was moved before its mapping was replaced: then its contents are dropped by rights. Or it was moved out
    /// of memory that had come there without an event. Where there is no private memory now, that is gone again too.
    fn kill_if_lost(&self, space: &Space, state: &mut State, pid: i32, moved: &[u32], lost: &RangeSet) {
        if lost.is_empty() || moved.is_empty() {
            return;
        }
        // Where that cannot be told, the worst is assumed.
        let private = layout::manageable(pid).ok();
        let is_in_use =
            |page| private.as_ref().is_none_or(|private| private.iter().any(|mapping| mapping.contains(page)));
        let mut pages = moved.iter().filter_map(|&sequence| state.staging.get(sequence));
        if pages.any(|page| lost.contains(page) && is_in_use(page)) {
            self.host.kill(space.id, "memory was mapped anew without an event while it was moved out");
            state.gone = true;
        }
    }
}

/// What passes for registered and is not; `None` if that cannot be told at this moment.
pub(crate) fn unwatched(space: &Space, state: &State, mappings: &[Range]) -> Option<RangeSet> {
    let mut lost = state.registered.clone();
    for mapping in mappings.iter().filter(|mapping| state.registered.overlaps(**mapping)) {
        visit::step();
        match space.uffd.is_watched(mapping.start) {
            Probe::Registered => lost.remove(*mapping),
            Probe::NotRegistered => {}
            Probe::Changing => return None,
            Probe::Gone => return Some(RangeSet::default()),
        }
    }
    let evicted = lost.iter().flat_map(|range| state.table.list(range)).map(|(page, _)| page).collect::<Vec<_>>();
    let settled = evicted.into_iter().all(|page| space.uffd.is_watched(page) == Probe::NotRegistered);
    (settled && !space.uffd.is_changing()).then_some(lost)
}

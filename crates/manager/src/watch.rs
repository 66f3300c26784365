//! Seeing memory grow.
//!
//! What programs touch is seen page by page where their mappings are registered, and only there. So they are, when the
//! limit is near; far from it a job costs nothing, and its processes are measured from time to time. A thread looks at
//! them that does nothing else: whatever is mapped grows unseen until the next look.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::PAGE_SIZE;
use uzswap_vm::pager::Pager;
use uzswap_vm::sys::thread;

use crate::charge::Charge;
use crate::groups::Groups;
use crate::sessions::{Session, Sessions};

/// The part of time that may be spent on measuring the memory of forked processes page by page: one in so many.
const PROPORTION_SHARE: u32 = 20;

/// The part of time that may be spent on looking: one in so many.
const LOOKING_SHARE: u32 = 8;

/// Measures the processes of all groups.
pub struct Watch {
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    groups: Arc<Groups>,
    known: Mutex<Known>,
}

/// What the last looks have shown of each session.
#[derive(Default)]
struct Known {
    /// What part of a forked process's pages is its own, and when to look again.
    proportions: HashMap<u64, (f64, Instant)>,
    /// Its anonymous bytes when its mappings were last registered.
    registered: HashMap<u64, (u64, Instant)>,
}

impl Watch {
    /// Enters what it measures into the accounts of `groups`.
    pub fn new(pager: Arc<Pager>, sessions: Arc<Sessions>, groups: Arc<Groups>) -> Watch {
        Watch { pager, sessions, groups, known: Mutex::default() }
    }

    /// Looks until told to stop.
    pub fn run(&self, stop: &AtomicBool) {
        // Otherwise a look may come many milliseconds late, where there is more to run than processors. The threads that do
        // the work are ordinary ones: they would only take the processors from the programs that wait for them.
        let _ = thread::ask_for_promptness();
        while !stop.load(Relaxed) {
            let start = Instant::now();
            self.look();
            let charges = self.groups.all();
            if charges.iter().any(|charge| charge.excess() > 0) {
                self.groups.bell.ring();
            }
            std::thread::sleep(self.groups.pause().max(start.elapsed() * (LOOKING_SHARE - 1)));
        }
    }

    /// Measures every process, and registers what those have mapped that are near a limit. Gives the processes with
    /// their resident anonymous bytes, largest first.
    pub fn look(&self) -> Vec<(Arc<Session>, u64)> {
        let mut known = self.known.lock();
        let sessions = self.sessions.all();
        let families = sessions.iter().any(|session| session.forked);
        let mut measured = Vec::with_capacity(sessions.len());
        let mut sized: Vec<(Arc<Session>, u64)> = Vec::with_capacity(sessions.len());
        for session in sessions {
            let bytes = session.anon_pages() * PAGE_SIZE as u64;
            // Pages that a fork left shared are resident once, however many processes map them.
            let own = if families { (bytes as f64 * known.proportion(&session)) as u64 } else { bytes };
            measured.push((session.charge().id, own));
            sized.push((session, bytes));
        }
        self.groups.measured(measured.into_iter());
        sized.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        for (session, bytes) in &sized {
            if session.charge().path().any(Charge::is_near) && known.register(session, *bytes) {
                // Fails only for a process that is going away.
                let _ = self.pager.refresh(&session.space);
            }
        }
        known.forget_but(&sized);
        sized
    }
}

impl Known {
    /// What part of the pages of a process is its own.
    fn proportion(&mut self, session: &Session) -> f64 {
        if let Some((proportion, due)) = self.proportions.get(&session.id)
            && Instant::now() < *due
        {
            return *proportion;
        }
        let start = Instant::now();
        let all = session.anon_pages().max(1);
        let own = session.proportional_pages().unwrap_or(all);
        let proportion = (own as f64 / all as f64).min(1.0);
        let due = Instant::now() + start.elapsed() * PROPORTION_SHARE;
        self.proportions.insert(session.id, (proportion, due));
        proportion
    }

    /// Whether the mappings of a process are to be registered: it has changed by much, or time has passed.
    fn register(&mut self, session: &Session, bytes: u64) -> bool {
        const GROWN: u64 = 256 << 10;
        const STALE: Duration = Duration::from_millis(50);
        let last = self.registered.get(&session.id);
        let due = last.is_none_or(|(then, at)| bytes.abs_diff(*then) >= GROWN || at.elapsed() >= STALE);
        if due {
            self.registered.insert(session.id, (bytes, Instant::now()));
        }
        due
    }

    fn forget_but(&mut self, sessions: &[(Arc<Session>, u64)]) {
        let live = |id: &u64| sessions.iter().any(|(session, _)| session.id == *id);
        self.proportions.retain(|id, _| live(id));
        self.registered.retain(|id, _| live(id));
    }
}

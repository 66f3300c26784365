//! Seeing memory grow.
//!
//! What programs touch is seen page by page where their mappings are registered, and only there. So they are, when the
//! limit is near; far from it a job costs nothing, and its processes are measured from time to time. Whatever is mapped
//! anew grows unseen until the next look and its registration. So one thread looks, puts on the brake if need be, and
//! waits for nobody; another registers, which takes the locks of address spaces.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::PAGE_SIZE;
use uzswap_vm::pager::Pager;
use uzswap_vm::sys::thread;

use crate::brake::Brake;
use crate::charge::{Bell, Charge};
use crate::groups::Groups;
use crate::sessions::{Session, Sessions};

/// The part of time that may be spent on measuring the memory of forked processes page by page: one in so many.
const SHARED_SHARE: u32 = 20;

/// How soon a process is measured page by page.
const FIRST_MEASURED: Duration = Duration::from_millis(20);

/// The part of a processor that may be spent on looking, and where a limit is very near: one in so many.
const LOOKING_SHARE: u32 = 8;
const LOOKING_SHARE_AT_BRINK: u32 = 4;

/// Processes with their resident anonymous bytes, largest first.
pub type Sizes = Vec<(Arc<Session>, u64)>;

/// Measures the processes of all groups.
pub struct Watch {
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    groups: Arc<Groups>,
    /// How many bytes of a forked process are others' share, and when to look again. Never held while that is measured.
    shared: Mutex<HashMap<u64, (u64, Instant)>>,
    /// Whose mappings are to be registered.
    due: Mutex<Vec<Arc<Session>>>,
    bell: Bell,
}

/// The anonymous bytes of each session when its mappings were last to be registered.
#[derive(Default)]
struct Registered(HashMap<u64, (u64, Instant)>);

impl Watch {
    /// Enters what it measures into the accounts of `groups`.
    pub fn new(pager: Arc<Pager>, sessions: Arc<Sessions>, groups: Arc<Groups>) -> Watch {
        Watch { pager, sessions, groups, shared: Mutex::default(), due: Mutex::default(), bell: Bell::default() }
    }

    /// Looks until told to stop.
    pub fn run(&self, stop: &AtomicBool) {
        // Otherwise a look may come many milliseconds late, where there is more to run than processors. The threads that do
        // the work are ordinary ones: they would only take the processors from the programs that wait for them.
        let _ = thread::ask_for_promptness();
        let (mut registered, mut brake) = (Registered::default(), Brake::default());
        while !stop.load(Relaxed) {
            let start = thread::processor_time();
            let sessions = self.measure();
            let looked = thread::processor_time();
            brake.adjust(&sessions);
            let braked = thread::processor_time();
            for (session, bytes) in &sessions {
                let near = session.charge().path().any(Charge::is_near);
                if near && registered.is_due(session, *bytes) && self.have_registered(session) {
                    registered.note(session, *bytes);
                }
            }
            registered.forget_but(&sessions);
            let charges = self.groups.all();
            if charges.iter().any(|charge| charge.excess() > 0) {
                self.groups.bell.ring();
            }
            let at_brink = charges.iter().any(|charge| charge.is_at_brink());
            let share = if at_brink { LOOKING_SHARE_AT_BRINK } else { LOOKING_SHARE };
            let looking = looked - start + (thread::processor_time() - braked);
            self.groups.watch_bell.wait(self.groups.pause().max(looking * (share - 1)).max((braked - looked) / 2));
        }
    }

    /// Has the mappings of a process registered, unless one would have to wait to say so.
    fn have_registered(&self, session: &Arc<Session>) -> bool {
        let Some(mut due) = self.due.try_lock() else { return false };
        if due.iter().all(|other| other.id != session.id) {
            due.push(session.clone());
        }
        drop(due);
        self.bell.ring();
        true
    }

    /// Registers what those have mapped who are near a limit, until told to stop.
    pub fn register(&self, stop: &AtomicBool) {
        let _ = thread::ask_for_short_slices();
        while !stop.load(Relaxed) {
            let due = std::mem::take(&mut *self.due.lock());
            for session in &due {
                // Fails only for a process that is going away.
                let _ = self.pager.refresh(&session.space);
            }
            if due.is_empty() {
                self.bell.wait(Duration::from_millis(100));
            }
        }
    }

    /// Measures every process, and enters it into the accounts.
    pub fn measure(&self) -> Sizes {
        let sessions = self.sessions.all();
        let (processes, families) = (sessions.len(), sessions.iter().any(|session| session.forked));
        let mut measured = Vec::with_capacity(processes);
        let mut sized: Sizes = Vec::with_capacity(processes);
        for session in sessions {
            let bytes = session.anon_pages() * PAGE_SIZE as u64;
            // Pages that a fork left shared are resident once, however many processes map them.
            let own = if families { bytes.saturating_sub(self.shared(&session, processes)) } else { bytes };
            measured.push((session.charge(), own));
            sized.push((session, bytes));
        }
        self.groups.measured(measured.into_iter());
        if families {
            let live: HashSet<u64> = sized.iter().map(|(session, _)| session.id).collect();
            self.shared.lock().retain(|id, _| live.contains(id));
        }
        sized.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        sized
    }

    /// How many bytes of a process, one of so many, are the share of others who have them, too. What it has come to have since
    /// that was measured is its own.
    fn shared(&self, session: &Session, processes: usize) -> u64 {
        let now = Instant::now();
        let known = self.shared.lock().get(&session.id).copied();
        match known {
            Some((shared, due)) if now < due => return shared,
            // At first all is its parent's.
            None => {
                let first = session.inherited();
                self.shared.lock().insert(session.id, (first, now + FIRST_MEASURED));
                return first;
            }
            _ => {}
        }
        let own = session.proportional_pages();
        let shared = own.map_or(0, |own| session.anon_pages().saturating_sub(own)) * PAGE_SIZE as u64;
        let due = now + now.elapsed() * SHARED_SHARE * processes as u32;
        self.shared.lock().insert(session.id, (shared, due));
        shared
    }
}

impl Registered {
    /// Whether the mappings of a process are to be registered: it has changed by much, or time has passed.
    fn is_due(&self, session: &Session, bytes: u64) -> bool {
        const GROWN: u64 = 256 << 10;
        const STALE: Duration = Duration::from_millis(50);
        let last = self.0.get(&session.id);
        last.is_none_or(|(then, at)| bytes.abs_diff(*then) >= GROWN || at.elapsed() >= STALE)
    }

    fn note(&mut self, session: &Session, bytes: u64) {
        self.0.insert(session.id, (bytes, Instant::now()));
    }

    fn forget_but(&mut self, sessions: &Sizes) {
        let live: HashSet<u64> = sessions.iter().map(|(session, _)| session.id).collect();
        self.0.retain(|id, _| live.contains(id));
    }
}

//! Seeing memory grow.
//!
//! What programs touch is seen page by page where their mappings are registered, and only there. So they are, when the
//! limit is near; far from it a job costs nothing, and its processes are measured from time to time. Whatever is mapped
//! anew grows unseen until the next look and its registration. So one thread looks, puts on the brake if need be, and
//! waits for no lock of an address space; another registers, which takes these locks, and a third does so for those that are noisy
//! ([`Space::is_noisy`](uzswap_vm::space::Space::is_noisy)). Users take turns at both.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::PAGE_SIZE;
use uzswap_vm::pager::Pager;
use uzswap_vm::sys::faults::FaultMeter;
use uzswap_vm::sys::{ptrace, thread};
use uzswap_vm::user_queue::UserQueue;
use uzswap_vm::visit;

use crate::agent_file::Board;
use crate::bell::Bell;
use crate::brake::Brake;
use crate::charge::Charge;
use crate::groups::Groups;
use crate::sessions::{Session, Sessions};

/// The part of time that may be spent on measuring the memory of a forked process page by page: one in so many.
const MEASURING: u32 = 20;

/// The part of time that the thread which registers may spend on that while mappings wait for it: one in so many.
const MEASURING_MEANWHILE: u32 = 10;

/// The part of a processor that may be spent on looking, and where a limit is very near: one in so many.
const LOOKING_SHARE: u32 = 8;
const LOOKING_SHARE_AT_BRINK: u32 = 4;

/// So many processes take longer to measure than the machine's faults take to count.
const MANY: usize = 32;

/// What can be touched before that many are measured again, in bytes, and how long it may take.
const FEW_BYTES: u64 = 512 << 10;
const STALE: Duration = Duration::from_secs(5);

/// A look that comes within this time is not late: what is touched till then is what the margin below a limit is for.
const IN_TIME: Duration = Duration::from_micros(500);

/// How soon to look again at threads that are about to be let go.
const LETTING_GO: Duration = Duration::from_millis(2);

/// How late the thread that looks expects to be at least, and at most, and for how long it expects to be as late again as it was.
const DELAY: Duration = Duration::from_millis(3);
const MOST_DELAY: Duration = Duration::from_millis(8);
const DELAY_RECURS: Duration = Duration::from_secs(1);

/// Processes with their resident anonymous bytes, largest first.
pub type Sizes = Vec<(Arc<Session>, u64)>;

/// Measures the processes of all groups.
pub struct Watch {
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    groups: Arc<Groups>,
    /// Measurements begun, and the latest of those entered.
    begun: AtomicU64,
    entered: AtomicU64,
    /// The processes whose mappings are to be registered, and those of them whose address space is noisy: this takes long.
    due: UserQueue<Arc<Session>>,
    due_noisy: UserQueue<Arc<Session>>,
    /// The processes whose share of the memory that forks left shared is to be measured.
    shares: Mutex<VecDeque<Arc<Session>>>,
    bell: Bell,
    noisy_bell: Bell,
    /// Where programs that start read how far the limits are. It can be missing.
    board: Mutex<Option<Board>>,
}

/// The anonymous bytes of each session that it had by its own doing when its mappings were last to be registered.
#[derive(Default)]
struct Registered(HashMap<u64, (i64, Instant)>);

/// How late the thread that looks has run, however prompt it has asked to be: others were in the kernel, or the host of this virtual machine
/// had another one run.
#[derive(Debug)]
struct Delays {
    /// The longest of this window, and of the one before.
    longest: [Duration; 2],
    since: Instant,
}

impl Delays {
    fn new(now: Instant) -> Delays {
        Delays { longest: [Duration::ZERO; 2], since: now }
    }

    fn note(&mut self, delay: Duration, now: Instant) {
        let age = now.duration_since(self.since);
        if age >= DELAY_RECURS {
            let before = if age < DELAY_RECURS * 2 { self.longest[0] } else { Duration::ZERO };
            (self.longest, self.since) = ([Duration::ZERO, before], now);
        }
        self.longest[0] = self.longest[0].max(delay);
    }

    /// Returns how long the next one may be.
    fn expected(&self) -> Duration {
        self.longest[0].max(self.longest[1]).clamp(DELAY, MOST_DELAY)
    }
}

impl Watch {
    /// Enters what it measures into the accounts of `groups`.
    pub fn new(pager: Arc<Pager>, sessions: Arc<Sessions>, groups: Arc<Groups>, agent: &Path) -> Watch {
        let (begun, entered) = Default::default();
        let (due, due_noisy, shares, bell, noisy_bell) = Default::default();
        let board = Mutex::new(Board::open(agent).ok());
        Watch { pager, sessions, groups, begun, entered, due, due_noisy, shares, bell, noisy_bell, board }
    }

    /// Looks until told to stop.
    pub fn run(&self, stop: &AtomicBool) {
        // Otherwise a look may come many milliseconds late, where there is more to run than processors. The threads that do
        // the work are ordinary ones: they would only take the processors from the programs that wait for them.
        let _ = thread::ask_for_promptness();
        ptrace::allow_giving_up();
        let (mut registered, mut brake) = (Registered::default(), Brake::default());
        let (mut meter, mut touched) = (FaultMeter::open().ok(), None);
        let (mut processes, mut rung, mut last) = (0, true, Instant::now());
        // While nothing is touched, the charges stay as they were measured.
        let mut idle_pause = None;
        let (mut late, mut delays) = (Duration::ZERO, Delays::new(Instant::now()));
        while !stop.load(Relaxed) && !visit::is_surplus() {
            let start = thread::processor_time();
            if let Some(pause) = idle_pause.filter(|_| !rung && !brake.holds() && last.elapsed() < STALE) {
                // That many are not measured if hardly anything was touched, in any program of the machine. A process that is held
                // touches nothing, and waits for the next look.
                let now = meter.as_mut().and_then(FaultMeter::touched);
                if now.zip(touched).is_some_and(|(now, before): (u64, u64)| now.wrapping_sub(before) < FEW_BYTES) {
                    rung = self.groups.watch_bell.wait(pause);
                    continue;
                }
            }
            // Counting takes longer than to measure a few.
            touched = if processes < MANY { None } else { meter.as_mut().and_then(FaultMeter::touched) };
            last = Instant::now();
            let sessions = self.measure();
            processes = sessions.len();
            let looked = thread::processor_time();
            delays.note(last.elapsed().saturating_sub(looked - start), Instant::now());
            let lead = brake.adjust(&sessions, delays.expected() + late);
            let braked = thread::processor_time();
            for (session, bytes) in &sessions {
                let near = session.charge().path().any(Charge::is_near);
                let asked = !session.is_refreshed(session.refreshes_asked());
                let own = *bytes as i64 - session.space.traffic.brought();
                let is_due = near && registered.is_due(session, own) || asked;
                if is_due && session.may_be_refreshed() && self.have_registered(session) {
                    registered.note(session, own);
                }
            }
            registered.forget_but(&sessions);
            let charges = self.groups.all();
            self.post_distance();
            if charges.iter().any(|charge| charge.excess() > 0 && !charge.is_exhausted()) {
                self.groups.bell.ring();
            }
            let at_brink = charges.iter().any(|charge| charge.is_at_brink(lead));
            let share = if at_brink { LOOKING_SHARE_AT_BRINK } else { LOOKING_SHARE };
            let looking = looked - start + (thread::processor_time() - braked);
            let rest = (looking * (share - 1)).max((braked - looked) / 2);
            late = (rest + looking).saturating_sub(IN_TIME);
            let is_quiet = || charges.iter().all(|charge| charge.excess() <= 0);
            idle_pause = (processes >= MANY && is_quiet()).then(|| self.groups.pause(0));
            // Otherwise the descriptors of a process that ends stay open for as long as this thread waits.
            drop(sessions);
            let pause = self.groups.pause(lead).max(rest);
            let pause = if brake.lets_go() { pause.min(LETTING_GO.max(rest)) } else { pause };
            let asleep = Instant::now();
            rung = self.groups.watch_bell.wait(pause);
            if !rung {
                delays.note(asleep.elapsed().saturating_sub(pause), Instant::now());
            }
        }
    }

    /// Tells programs that start from now on whether all limits are far. To be called before the answer to a request that moves a
    /// limit: a program that starts after the answer is managed from its first page on.
    pub fn post_distance(&self) {
        if let Some(board) = &mut *self.board.lock() {
            // Read under the lock: the last thread to write has seen the latest limits.
            board.say(self.groups.all().iter().all(|charge| charge.is_far()));
        }
    }

    /// Has the mappings of a process registered, unless the calling thread would have to wait to say so.
    fn have_registered(&self, session: &Arc<Session>) -> bool {
        if session.awaits_registration.swap(true, Relaxed) {
            return true;
        }
        let (due, bell) = match session.space.is_noisy() {
            true => (&self.due_noisy, &self.noisy_bell),
            false => (&self.due, &self.bell),
        };
        let added = due.try_add(session.space.user(), session.clone());
        if added {
            bell.ring();
        } else {
            session.awaits_registration.store(false, Relaxed);
        }
        added
    }

    /// Has a share measured, likewise.
    fn have_share_measured(&self, session: &Arc<Session>) {
        match self.shares.try_lock() {
            Some(mut shares) => shares.push_back(session.clone()),
            None => session.share.put_off(),
        }
        self.bell.ring();
    }

    /// Registers what processes near a limit have mapped, users in turns, and measures shares, until told to stop.
    pub fn register(&self, stop: &AtomicBool) {
        let _ = thread::ask_for_short_slices();
        let mut measure_from = Instant::now();
        while !stop.load(Relaxed) && !visit::is_surplus() {
            let due = self.due.try_take();
            if let Some(session) = &due {
                session.awaits_registration.store(false, Relaxed);
                if session.space.is_noisy() {
                    // It has become so while it waited.
                    self.have_registered(session);
                } else {
                    self.refresh(session);
                }
            }
            // One at a time: processes whose mappings are to be registered may be held.
            let may_measure = due.is_none() || measure_from <= Instant::now();
            let share = if may_measure { self.shares.lock().pop_front() } else { None };
            if let Some(session) = share {
                let start = Instant::now();
                if !session.space.is_shunned() {
                    session.measure_share(MEASURING * self.sessions.count() as u32);
                }
                measure_from = Instant::now() + start.elapsed() * MEASURING_MEANWHILE;
            } else if due.is_none() {
                self.bell.wait(Duration::from_secs(1));
            }
        }
    }

    /// Registers what noisy address spaces have mapped, users in turns, until told to stop.
    pub fn register_noisy(&self, stop: &AtomicBool) {
        let _ = thread::ask_for_short_slices();
        while !stop.load(Relaxed) && !visit::is_surplus() {
            let Some(session) = self.due_noisy.try_take() else {
                self.noisy_bell.wait(Duration::from_secs(1));
                continue;
            };
            session.awaits_registration.store(false, Relaxed);
            self.refresh(&session);
        }
    }

    /// Registers what a process has mapped.
    fn refresh(&self, session: &Session) {
        if !session.space.is_shunned() {
            // An error is that of a process that is going away.
            let _ = session.refresh(&self.pager);
        }
    }

    /// Measures every process, and enters it into the accounts, unless a later measurement has been entered meanwhile, by a thread that did not
    /// have to wait for a processor. What was brought and taken since a process was measured is added: this thread may lose its processor for
    /// milliseconds.
    pub fn measure(&self) -> Sizes {
        let number = self.begun.fetch_add(1, Relaxed);
        let sessions = self.sessions.all();
        let families = sessions.iter().any(|session| session.forked);
        let mut measured = Vec::with_capacity(sessions.len());
        let mut sized: Sizes = Vec::with_capacity(sessions.len());
        for session in sessions {
            let moved = session.space.traffic.moved();
            let resident = session.anon_pages() * PAGE_SIZE as u64;
            let bytes = resident.saturating_sub(session.space.uncharged());
            // The parent shares, too.
            if families && session.share.is_due() {
                self.have_share_measured(&session);
            }
            let own = if families { bytes.saturating_sub(session.share.bytes()) } else { bytes };
            measured.push((session.clone(), own, moved));
            sized.push((session, bytes));
        }
        if self.entered.fetch_max(number, Relaxed) <= number {
            self.groups.measured(measured.into_iter().map(|(session, own, moved)| {
                (session.charge(), own.saturating_add_signed(session.space.traffic.since(moved)))
            }));
        }
        sized.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        sized
    }
}

impl Registered {
    /// Whether the mappings of a process are to be registered: it has changed by much, other than by what was brought and taken, or
    /// time has passed.
    fn is_due(&self, session: &Session, own: i64) -> bool {
        const GROWN: u64 = 256 << 10;
        const SOON: Duration = Duration::from_millis(50);
        let last = self.0.get(&session.id);
        last.is_none_or(|(then, at)| own.abs_diff(*then) >= GROWN || at.elapsed() >= SOON)
    }

    fn note(&mut self, session: &Session, own: i64) {
        self.0.insert(session.id, (own, Instant::now()));
    }

    fn forget_but(&mut self, sessions: &Sizes) {
        let live: HashSet<u64> = sessions.iter().map(|(session, _)| session.id).collect();
        self.0.retain(|id, _| live.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_expected_again_for_a_while() {
        let start = Instant::now();
        let at = |tenths: u32| start + DELAY_RECURS * tenths / 10;
        let mut delays = Delays::new(start);
        assert_eq!(delays.expected(), DELAY);
        delays.note(Duration::from_millis(5), at(5));
        for tenths in [6, 11, 19] {
            delays.note(Duration::ZERO, at(tenths));
            assert_eq!(delays.expected(), Duration::from_millis(5));
        }
        delays.note(Duration::ZERO, at(21));
        assert_eq!(delays.expected(), DELAY);
        delays.note(Duration::from_secs(1), at(22));
        assert_eq!(delays.expected(), MOST_DELAY);
        delays.note(Duration::ZERO, at(60));
        assert_eq!(delays.expected(), DELAY);
    }
}

//! Keeping a job within its limit.
//!
//! Each round: measure; if the charge is near the limit, watch what is mapped; while it is above the soft limit, evict
//! from the largest processes and store what has waited long enough, and shrink the pool when they have little to give;
//! let waiting faults try again. When nothing can be reclaimed any more and the limit is still in the way, the largest process is killed, as the kernel would.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use uzswap_engine::{PAGE_SIZE, Zswap};
use uzswap_vm::pager::Pager;

use crate::charge::{Charge, margin};
use crate::sessions::{Session, Sessions};

/// Percent of the limit from which on mappings are watched; below, a job costs nothing.
const WATCH_PERCENT: u64 = 70;

/// Pages that one step evicts from a process, at least and at most.
const STEP_PAGES: RangeInclusive<usize> = 256..=1024;

/// What the pool is shrunk by at least, when it is.
const SHRINK_BYTES: u64 = 256 << 10;

/// How long to let be what could not be reclaimed.
const FRUITLESS_PAUSE: Duration = Duration::from_millis(5);

/// How often to look when the limit is near.
const NEAR_PAUSE: Duration = Duration::from_millis(2);

/// How long reclaim may come to nothing, with somebody waiting, before a process is killed.
const OOM_PATIENCE: Duration = Duration::from_secs(2);

/// The part of time that may be spent on measuring the memory of forked processes page by page: one in so many.
const PROPORTION_SHARE: u32 = 20;

/// The reclaimer of one job.
pub struct Reclaimer {
    pub engine: Arc<Zswap>,
    pub pager: Arc<Pager>,
    pub sessions: Arc<Sessions>,
    pub charge: Arc<Charge>,
    /// Processes killed for want of memory.
    pub oom_kills: Arc<AtomicU64>,
    /// Set when the job is over.
    pub stop: Arc<AtomicBool>,
    /// What part of a forked process's pages is its own, and when to look again.
    proportions: HashMap<u64, (f64, Instant)>,
    /// What each session's memory was when its mappings were last looked at.
    seen: HashMap<u64, (u64, Instant)>,
    fruitless_since: Option<Instant>,
}

impl Reclaimer {
    /// A reclaimer at rest.
    pub fn new(
        engine: Arc<Zswap>,
        pager: Arc<Pager>,
        sessions: Arc<Sessions>,
        charge: Arc<Charge>,
        oom_kills: Arc<AtomicU64>,
        stop: Arc<AtomicBool>,
    ) -> Reclaimer {
        let (proportions, seen) = (HashMap::new(), HashMap::new());
        Reclaimer { engine, pager, sessions, charge, oom_kills, stop, proportions, seen, fruitless_since: None }
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        while !self.stop.load(Relaxed) {
            let sessions = self.measure();
            let near = self.charge.current.load(Relaxed) > self.charge.max / 100 * WATCH_PERCENT;
            if near {
                self.watch(&sessions);
                self.reclaim(sessions);
            }
            // Memory may have become free without reclaim.
            self.let_waiting_try();
            self.pager.hear_late_answers();
            self.pager.reap();
            self.charge.wait_for_want(if near { NEAR_PAUSE } else { self.far_pause() });
        }
    }

    /// How long nothing can happen: memory is not touched faster than this.
    fn far_pause(&self) -> Duration {
        const BYTES_PER_MILLISECOND: u64 = 4 << 20;
        let room = (self.charge.max / 100 * WATCH_PERCENT).saturating_sub(self.charge.current.load(Relaxed));
        Duration::from_millis((room / BYTES_PER_MILLISECOND).clamp(2, 100))
    }

    /// Measures every process; gives them with their anonymous bytes, largest first.
    fn measure(&mut self) -> Vec<(Arc<Session>, u64)> {
        let sessions = self.sessions.all();
        let families = sessions.iter().any(|session| session.forked);
        let mut total = 0;
        let mut sized: Vec<(Arc<Session>, u64)> = Vec::with_capacity(sessions.len());
        for session in sessions {
            let bytes = session.anon_pages() * PAGE_SIZE as u64;
            // Pages that a fork left shared are resident once, however many processes map them.
            total += if families { (bytes as f64 * self.proportion(&session)) as u64 } else { bytes };
            sized.push((session, bytes));
        }
        self.charge.measured(total, self.engine.pool_bytes());
        sized.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        sized
    }

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

    /// Watches what processes have mapped since they were last looked at.
    fn watch(&mut self, sessions: &[(Arc<Session>, u64)]) {
        const GROWN: u64 = 256 << 10;
        const STALE: Duration = Duration::from_millis(50);
        for (session, bytes) in sessions {
            let due = self
                .seen
                .get(&session.id)
                .is_none_or(|(then, at)| bytes.abs_diff(*then) >= GROWN || at.elapsed() >= STALE);
            if due {
                // Fails only for a process that is going away.
                let _ = self.pager.refresh(&session.space);
                self.seen.insert(session.id, (*bytes, Instant::now()));
            }
        }
        let live = |id: &u64| sessions.iter().any(|(session, _)| session.id == *id);
        self.seen.retain(|id, _| live(id));
        self.proportions.retain(|id, _| live(id));
    }

    /// Evicts until the charge is below the soft limit, or nothing goes any more.
    fn reclaim(&mut self, mut sessions: Vec<(Arc<Session>, u64)>) {
        let mut freed_any = false;
        let mut rounds = 0;
        while self.charge.excess() > 0 && rounds < 64 && !self.stop.load(Relaxed) {
            rounds += 1;
            let wanted = self.charge.excess().max(0) as u64;
            let mut freed = self.step(&sessions) as u64 * PAGE_SIZE as u64;
            if freed < wanted / 2 {
                // Programs hold on to what they have: then the pool has too large a part.
                freed += self.engine.shrink((wanted - freed).max(SHRINK_BYTES));
            }
            freed_any |= freed > 0;
            sessions = self.measure();
            self.let_waiting_try();
            if freed == 0 {
                std::thread::sleep(FRUITLESS_PAUSE);
                break;
            }
        }
        self.let_waiting_try();
        let in_need = self.charge.excess() > margin(self.charge.max) as i64 || self.anybody_waits();
        if freed_any || !in_need {
            self.fruitless_since = None;
        } else if self.fruitless_since.get_or_insert_with(Instant::now).elapsed() > OOM_PATIENCE {
            self.fruitless_since = None;
            self.kill_largest(&sessions);
        }
    }

    /// Takes one step at each of the larger processes; gives the pages whose memory was freed.
    fn step(&self, sessions: &[(Arc<Session>, u64)]) -> usize {
        let mut freed = 0;
        let largest = sessions.first().map_or(0, |(_, bytes)| *bytes);
        let want = (self.charge.excess().max(0) as usize / PAGE_SIZE).clamp(*STEP_PAGES.start(), *STEP_PAGES.end());
        for (session, bytes) in sessions {
            if *bytes < largest / 2 && freed > 0 {
                break;
            }
            // An error is that of a process that is going away.
            let _ = self.pager.evict(&session.space, want);
            let keep = if self.anybody_waits() { 0 } else { self.staging_pages() };
            freed += self.pager.store_staged(&session.space, keep).map_or(0, |progress| progress.stored);
        }
        freed
    }

    /// Pages that may wait in the staging area, for their second chance. The more, the better is known what is cold; but
    /// they are resident all the same.
    fn staging_pages(&self) -> usize {
        (self.charge.max / 8 / PAGE_SIZE as u64).clamp(64, 3072) as usize
    }

    fn anybody_waits(&self) -> bool {
        self.pager.spaces().iter().any(|space| space.has_waiting())
    }

    fn let_waiting_try(&self) {
        for space in self.pager.spaces() {
            if space.has_waiting() {
                self.pager.service(&space);
            }
        }
    }

    fn kill_largest(&self, sessions: &[(Arc<Session>, u64)]) {
        let Some((session, bytes)) = sessions.first() else { return };
        let counters = self.engine.counters();
        if session.pidfd.kill(libc::SIGKILL).is_ok() {
            self.oom_kills.fetch_add(1, Relaxed);
            let mib = |bytes: u64| bytes >> 20;
            eprintln!(
                "uzswap: error: out of memory: killed process {}, {} MiB resident; the job has {} of {} MiB, pool {} MiB, \
                 swap file {} MiB and no room for more; raise --memory-max, --max-pool or --swap-size",
                session.pid,
                mib(*bytes),
                mib(self.charge.current.load(Relaxed)),
                mib(self.charge.max),
                mib(counters.pool_total_size),
                mib(counters.swap_current),
            );
        }
    }
}

//! Keeping a job within its limit.
//!
//! Each round: measure; if the charge is above the soft limit, evict a little from the largest processes, store what has
//! waited long enough, and have the pool shrunk when they have little to give; let waiting faults try again. When nothing
//! can be reclaimed any more and the limit is still in the way, the largest process is killed, as the kernel would.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use uzswap_engine::PAGE_SIZE;
use uzswap_vm::pager::Pager;

use crate::charge::{Charge, margin};
use crate::sessions::Session;
use crate::shrink::ShrinkWorker;
use crate::watch::Watch;

/// Pages that one step evicts from a process, at least and at most.
const STEP_PAGES: RangeInclusive<usize> = 256..=1024;

/// What the pool is shrunk by at least, when it is.
const SHRINK_BYTES: u64 = 256 << 10;

/// How long reclaim may come to nothing, with somebody waiting, before a process is killed.
const OOM_PATIENCE: Duration = Duration::from_secs(2);

/// The reclaimer of one job.
pub struct Reclaimer {
    pub shrink_worker: Arc<ShrinkWorker>,
    pub pager: Arc<Pager>,
    pub watch: Arc<Watch>,
    pub charge: Arc<Charge>,
    /// Processes killed for want of memory.
    pub oom_kills: Arc<AtomicU64>,
    /// Set when the job is over.
    pub stop: Arc<AtomicBool>,
    fruitless_since: Option<Instant>,
    /// What the shrink worker had freed when it was last looked at.
    shrunk: u64,
    /// Pages that had been looked at then.
    scanned: u64,
}

impl Reclaimer {
    /// A reclaimer at rest.
    pub fn new(
        shrink_worker: Arc<ShrinkWorker>,
        pager: Arc<Pager>,
        watch: Arc<Watch>,
        charge: Arc<Charge>,
        oom_kills: Arc<AtomicU64>,
        stop: Arc<AtomicBool>,
    ) -> Reclaimer {
        Reclaimer { shrink_worker, pager, watch, charge, oom_kills, stop, fruitless_since: None, shrunk: 0, scanned: 0 }
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        while !self.stop.load(Relaxed) {
            let sessions = self.watch.look();
            let more = self.charge.is_near() && self.reclaim(&sessions);
            // Memory may have become free without reclaim.
            self.let_waiting_try();
            self.pager.hear_late_answers();
            if !more {
                self.charge.wait_for_want(self.charge.pause());
            }
        }
    }

    /// Brings the charge nearer to the soft limit; tells whether there is more to do at once.
    fn reclaim(&mut self, sessions: &[(Arc<Session>, u64)]) -> bool {
        let wanted = self.charge.excess().max(0) as u64;
        let freed = if wanted > 0 { self.step(sessions) as u64 * PAGE_SIZE as u64 } else { 0 };
        self.press_pool();
        if freed < wanted / 2 {
            // Programs hold on to what they have: then the pool has too large a part.
            self.shrink_worker.ask((wanted - freed).max(SHRINK_BYTES));
        }
        let shrunk = self.shrink_worker.freed();
        let progress = freed > 0 || shrunk > std::mem::replace(&mut self.shrunk, shrunk);
        let in_need = self.charge.excess() > margin(self.charge.max) as i64 || self.anybody_waits();
        if progress || !in_need {
            self.fruitless_since = None;
        } else if self.fruitless_since.get_or_insert_with(Instant::now).elapsed() > OOM_PATIENCE {
            self.fruitless_since = None;
            self.kill_largest(sessions);
        }
        freed > 0
    }

    /// Has the pool shrunk in proportion: by as large a part as was looked at of the programs' memory.
    fn press_pool(&mut self) {
        let scanned = self.pager.counters.pgscan.load(Relaxed);
        let pages = scanned - std::mem::replace(&mut self.scanned, scanned);
        let resident = (self.charge.anon.load(Relaxed) / PAGE_SIZE as u64).max(1);
        if pages > 0 {
            self.shrink_worker.press(pages as f64 / resident as f64);
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
        let counters = self.shrink_worker.engine.counters();
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

//! The control tree's view of a manager: its groups, their processes, the parameters of its pool.
//!
//! What this manager cannot do is refused, with words, and what it does not count is not shown.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::{Counters, FolioCounters, PAGE_SIZE, Zswap};
use uzswap_proto::Job;
use uzswap_vm::pager::{self, Pager};
use uzswap_vm::sys::process::memory_nodes;

use crate::charge::{Charge, Events};
use crate::control::{Error, Figures, GroupId, Limit, Machine, Parameter, Parameters};
use crate::executioner::{self, Manner};
use crate::groups::Groups;
use crate::reclaim::Taker;
use crate::sessions::{Session, Sessions};
use crate::shrink::ShrinkWorker;
use crate::watch::Watch;
use crate::{JobConfig, SwapConfig, pool_cap};

/// How often reclaim that was asked for may come to nothing.
const MOST_FAILURES: u32 = 16;

/// How long killed processes may take to go.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// A job as a machine.
pub struct JobMachine {
    pub config: JobConfig,
    pub job: Job,
    pub front_pid: i32,
    pub engine: Arc<Zswap>,
    pub pager: Arc<Pager>,
    pub sessions: Arc<Sessions>,
    pub groups: Arc<Groups>,
    pub watch: Arc<Watch>,
    pub taker: Taker,
    pub shrink_worker: Arc<ShrinkWorker>,
    /// As they are now. The engine is told while this is locked, so that both agree on who was last.
    pub parameters: Mutex<Parameters>,
}

impl JobMachine {
    /// The parameters of a job that has just started.
    pub fn first_parameters(config: &JobConfig) -> Mutex<Parameters> {
        Mutex::new(Parameters {
            enabled: config.enabled,
            compressor: config.compressor,
            zpool: config.zpool,
            max_pool_percent: percent(config.max_pool, config.ram),
            accept_threshold_percent: config.accept_threshold_percent,
            shrinker_enabled: config.shrinker_enabled,
        })
    }

    fn charge(&self, group: GroupId) -> Result<Arc<Charge>, Error> {
        self.groups.get(group).ok_or(Error::Gone)
    }

    /// The living processes of a group and of those below it.
    fn below(&self, group: GroupId) -> Vec<Arc<Session>> {
        let below = |session: &Arc<Session>| session.charge().is_below(group) && !session.pidfd.has_ended();
        self.sessions.all().into_iter().filter(below).collect()
    }

    /// Sets the cap on the pool, within what a job of this size may have.
    fn set_max_pool(&self, percent: u8) {
        let max_pool = (u128::from(self.config.ram) * u128::from(percent) / 100) as u64;
        let config = JobConfig { max_pool, ..self.config.clone() };
        self.engine.set_max_pool_bytes(pool_cap(&config, self.config.swap != SwapConfig::None));
        self.shrink_worker.set_cap(pool_cap(&config, true));
    }
}

/// What part of `whole` a part is, to the nearest percent.
fn percent(part: u64, whole: u64) -> u8 {
    let whole = u128::from(whole.max(1));
    ((u128::from(part) * 100 + whole / 2) / whole).min(100) as u8
}

impl Machine for JobMachine {
    fn find(&self, parent: GroupId, name: &str) -> Option<GroupId> {
        self.groups.child(parent, name)
    }

    fn children(&self, group: GroupId) -> Result<Vec<String>, Error> {
        self.groups.children(group).ok_or(Error::Gone)
    }

    fn create(&self, parent: GroupId, name: &str) -> Result<GroupId, Error> {
        self.groups.create(parent, name)
    }

    fn remove(&self, group: GroupId) -> Result<(), Error> {
        let charge = self.charge(group)?;
        // A process that has ended is no process of the group, though its memory may take a moment to go.
        if !self.processes(group)?.is_empty() {
            return Err(Error::Busy);
        }
        let spaces = self.pager.spaces();
        let parent = charge.parent.clone().ok_or(Error::Busy)?;
        for space in spaces.into_iter().filter(|space| space.account().group() == charge.group) {
            space.charge_to(parent.clone());
        }
        self.groups.remove(group)?;
        self.shrink_worker.forget(charge.group);
        Ok(())
    }

    fn limit(&self, group: GroupId, limit: Limit) -> Result<Option<u64>, Error> {
        let charge = self.charge(group)?;
        Ok(match (&self.config.swap, limit) {
            (SwapConfig::None, Limit::SwapMax) => Some(0),
            (SwapConfig::File { size, .. }, Limit::SwapMax) if group == GroupId::ROOT => *size,
            _ => charge.limit(limit),
        })
    }

    fn set_limit(&self, group: GroupId, limit: Limit, bytes: Option<u64>) -> Result<(), Error> {
        let charge = self.charge(group)?;
        match limit {
            Limit::SwapMax => return Err(Error::NotSupported("the swap file is limited as a whole, by --swap-size")),
            Limit::ZswapMax => self.engine.set_zswap_max(charge.group, bytes).map_err(|_| Error::Gone)?,
            _ => {}
        }
        charge.set_limit(limit, bytes);
        self.groups.watch_bell.ring();
        Ok(())
    }

    fn writeback(&self, group: GroupId) -> Result<bool, Error> {
        Ok(self.charge(group)?.writeback.load(Relaxed))
    }

    fn set_writeback(&self, group: GroupId, allowed: bool) -> Result<(), Error> {
        let charge = self.charge(group)?;
        self.engine.set_writeback(charge.group, allowed).map_err(|_| Error::Gone)?;
        charge.writeback.store(allowed, Relaxed);
        Ok(())
    }

    fn processes(&self, group: GroupId) -> Result<Vec<i32>, Error> {
        self.charge(group)?;
        let own = self.below(group).into_iter().filter(|session| session.charge().id == group);
        let mut pids: Vec<i32> = own.map(|session| session.pid).chain(self.sessions.moved_to(group)).collect();
        pids.sort_unstable();
        Ok(pids)
    }

    fn move_process(&self, pid: i32, group: GroupId) -> Result<(), Error> {
        let charge = self.charge(group)?;
        if self.sessions.move_process(pid, self.front_pid, &charge) { Ok(()) } else { Err(Error::NoProcess) }
    }

    fn frozen(&self, group: GroupId) -> Result<bool, Error> {
        Ok(self.charge(group)?.frozen.load(Relaxed))
    }

    fn set_frozen(&self, group: GroupId, frozen: bool) -> Result<(), Error> {
        let charge = self.charge(group)?;
        charge.frozen.store(frozen, Relaxed);
        self.below(group).iter().for_each(|session| session.stop_or_go_on());
        if !frozen {
            // If the program itself was stopped, so has the front, as a shell expects of it.
            let _ = executioner::go_on(self.front_pid);
        }
        Ok(())
    }

    fn kill(&self, group: GroupId) -> Result<(), Error> {
        self.charge(group)?;
        if group == GroupId::ROOT {
            let known: Vec<i32> = self.below(group).iter().map(|session| session.pid).collect();
            executioner::kill_job(Manner::AtOnce, self.job, None, &known, &[std::process::id() as i32]);
            return Ok(());
        }
        let started = Instant::now();
        loop {
            let living = self.below(group);
            if living.is_empty() || started.elapsed() > KILL_PATIENCE {
                return Ok(());
            }
            for session in living {
                // It may have ended just now.
                let _ = session.pidfd.kill(libc::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn reclaim(&self, group: GroupId, bytes: u64) -> Result<bool, Error> {
        let charge = self.charge(group)?;
        let (mut reclaimed, mut failures) = (0, 0);
        while reclaimed < bytes && failures < MOST_FAILURES {
            // Its number may be another's by now.
            if !self.groups.get(group).is_some_and(|now| Arc::ptr_eq(&now, &charge)) {
                return Err(Error::Gone);
            }
            let sessions = self.watch.measure();
            for (session, _) in sessions.iter().filter(|(session, _)| session.charge().is_below(group)) {
                // An error is that of a process that is going away.
                let _ = self.pager.refresh(&session.space);
            }
            let pages = (bytes - reclaimed).div_ceil(PAGE_SIZE as u64) as usize;
            let mut freed = self.taker.step(&charge, &sessions, pages, true) as u64 * PAGE_SIZE as u64;
            if freed == 0 {
                freed = self.engine.shrink_below(charge.group, bytes - reclaimed);
            }
            failures = if freed == 0 { failures + 1 } else { 0 };
            reclaimed += freed;
        }
        self.watch.measure();
        Ok(reclaimed >= bytes)
    }

    fn figures(&self, group: GroupId) -> Result<Figures, Error> {
        let charge = self.charge(group)?;
        self.watch.measure();
        let engine = self.engine.group_counters(charge.group).map_err(|_| Error::Gone)?;
        let counted = |counter: fn(&pager::Counters) -> &AtomicU64| self.groups.counted(group, counter);
        let event = |event: fn(&Events) -> &AtomicU64| Some(event(&charge.events).load(Relaxed));
        let anon = charge.anon.load(Relaxed);
        let major = counted(|counters| &counters.pgmajfault);
        let minor = counted(|counters| &counters.rescued) + counted(|counters| &counters.zero_filled);
        Ok(Figures {
            current: charge.current.load(Relaxed),
            peak: charge.peak.load(Relaxed),
            swap_current: engine.zswapped + engine.swapped,
            low: event(|events| &events.low),
            high: event(|events| &events.high),
            max: event(|events| &events.max),
            oom: event(|events| &events.oom),
            oom_kill: event(|events| &events.oom_kill),
            engine,
            anon,
            anon_by_node: (memory_nodes() == 1).then(|| vec![anon]),
            pgfault: Some(major + minor),
            pgmajfault: Some(major),
            pgscan: Some(counted(|counters| &counters.pgscan)),
            pgsteal: Some(counted(|counters| &counters.pgsteal)),
            ..Figures::default()
        })
    }

    fn parameters(&self) -> Parameters {
        *self.parameters.lock()
    }

    fn set_parameter(&self, parameter: Parameter) -> Result<(), Error> {
        let parameters = &mut *self.parameters.lock();
        match parameter {
            Parameter::Enabled(enabled) => {
                self.engine.set_enabled(enabled);
                parameters.enabled = enabled;
            }
            Parameter::Compressor(compressor) => {
                self.engine.set_compressor(compressor);
                parameters.compressor = compressor;
            }
            Parameter::Zpool(zpool) => {
                self.engine.set_zpool(zpool);
                parameters.zpool = zpool;
            }
            Parameter::MaxPoolPercent(percent) => {
                self.set_max_pool(percent);
                parameters.max_pool_percent = percent;
            }
            Parameter::AcceptThresholdPercent(percent) => {
                self.engine.set_accept_threshold(percent);
                parameters.accept_threshold_percent = percent;
            }
            Parameter::ShrinkerEnabled(enabled) => {
                self.engine.set_shrinker_enabled(enabled);
                parameters.shrinker_enabled = enabled;
            }
        }
        Ok(())
    }

    fn counters(&self) -> Counters {
        self.engine.counters()
    }

    fn folio_counters(&self, order: usize) -> FolioCounters {
        self.engine.folio_counters(order)
    }

    fn folio_swapin(&self, _order: usize) -> bool {
        false
    }

    fn set_folio_swapin(&self, _order: usize, enabled: bool) -> Result<(), Error> {
        if enabled { Err(Error::NotSupported("this manager swaps in page by page")) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_reads_back_as_it_was_given() {
        for ram in [1 << 30, (1 << 30) + 12345, 7_777_777_777] {
            for given in 0..=100u8 {
                assert_eq!(percent((u128::from(ram) * u128::from(given) / 100) as u64, ram), given);
            }
        }
        assert_eq!((percent(2, 1), percent(1, 0)), (100, 100));
    }
}

//! The control tree's view of a manager: its groups, their processes, the parameters of its pool.
//!
//! What this manager cannot do is refused, with words, and what it does not count is not shown.
//!
//! What takes long (reclaim, a kill, a move below a limit) has an end: programs can touch their memory as fast as it is taken away, so a request
//! takes no more than there was when it was made. All of it breaks off when the manager is about to end ([`JobMachine::ends`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::{Counters, FolioCounters, PAGE_SIZE, Zswap};
use uzswap_vm::pager;
use uzswap_vm::sys::process::memory_nodes;

use crate::agent_file::PREFIX as AGENT_PREFIX;
use crate::charge::{Charge, EXHAUSTED_PAUSE, Events};
use crate::control::{Error, Figures, GroupId, Limit, Machine, MayLeave, Parameter, Parameters};
use crate::executioner::{self, Manner};
use crate::jobs::{Jobs, Tenant};
use crate::kill_queue;
use crate::quota::Quota;
use crate::reclaim::Taker;
use crate::sessions::{Session, Sessions};
use crate::shrink::ShrinkWorker;
use crate::stats::Stats;
use crate::watch::Watch;
use crate::{JobConfig, MEMORY_MAX_LEAST, SwapConfig, Swapin, pool_cap};

/// How often reclaim that was asked for may come to nothing.
const MOST_FAILURES: u32 = 16;

/// How long an agent may take to attach: one that has failed to never does.
const ATTACH_PATIENCE: Duration = Duration::from_secs(2);

/// How long a job may take to start its first process, which a kill of its group waits for; and the first pause between two looks.
const START_PATIENCE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Bytes of the pool that are written back between two looks whether the manager ends.
const POOL_STEP: u64 = 16 << 20;

/// How long killed processes may take to go.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// A manager as a machine.
pub struct JobMachine {
    pub config: JobConfig,
    pub jobs: Arc<Jobs>,
    pub engine: Arc<Zswap>,
    pub sessions: Arc<Sessions>,
    pub watch: Arc<Watch>,
    pub taker: Taker,
    pub shrink_worker: Arc<ShrinkWorker>,
    /// As they are now. The engine is told while this is locked, so that both agree on who was last.
    pub parameters: Mutex<Parameters>,
    /// The threads that look at fronts after a thaw.
    pub thaws: Arc<Quota>,
    /// The manager is about to end: requests that take long break off.
    pub ends: AtomicBool,
}

/// How many threads look at fronts of one user after a thaw.
pub const MOST_THAWS: usize = 8;

impl JobMachine {
    /// The parameters of a job that has just started.
    pub fn first_parameters(config: &JobConfig) -> Mutex<Parameters> {
        Mutex::new(Parameters {
            enabled: config.enabled,
            compressor: config.compressor,
            zpool: config.zpool,
            max_pool_percent: config.max_pool_percent(),
            accept_threshold_percent: config.accept_threshold_percent,
            shrinker_enabled: config.shrinker_enabled,
        })
    }

    fn charge(&self, group: GroupId) -> Result<Arc<Charge>, Error> {
        self.taker.groups.get(group).ok_or(Error::Gone)
    }

    /// The living processes of a group and of those below it.
    fn below(&self, group: GroupId) -> Vec<Arc<Session>> {
        let below = |session: &Arc<Session>| session.charge().is_below(group) && !session.pidfd.has_ended();
        self.sessions.all().into_iter().filter(below).collect()
    }

    fn ends(&self) -> bool {
        self.ends.load(Relaxed)
    }

    /// Kills all processes of `jobs`. A job that has just begun has no process yet, and its front, which stays, is about to start one: such
    /// jobs remain in the list.
    fn kill_whole(&self, jobs: &mut Vec<Arc<Tenant>>) {
        let own = std::process::id() as i32;
        let orders = jobs.iter().map(|tenant| self.sessions.kill_order(Manner::AtOnce, tenant, &[own]));
        let mut killed = kill_queue::kill(orders.collect(), || self.ends()).into_iter();
        jobs.retain(|tenant| {
            killed.next() == Some(0) && self.jobs.get(tenant.job.token).is_some() && tenant.has_front()
        });
    }

    /// Registers the mappings of process `pid`, which has just entered the group, and reclaims until no group on its
    /// path is above its limit, or the pages that were too many at first are freed (programs touch more meanwhile), or
    /// nothing can be freed. Returns at once where all limits are far.
    fn bring_below_limits(&self, pid: i32, charge: &Charge) {
        if charge.path().all(Charge::is_far) {
            return;
        }
        if let Some(session) = self.wait_for_session(pid).filter(|session| !session.space.is_shunned()) {
            // An error is that of a process that is going away.
            let _ = session.refresh_at_once(&self.taker.pager);
        }
        let (mut failures, mut freed) = (0, 0);
        let mut most = None;
        while failures < MOST_FAILURES && !self.ends() {
            let sessions = self.watch.measure();
            let Some(above) = charge.path().find(|charge| charge.is_above_max()) else { return };
            let pages_above = |charge: &Charge| (charge.need().max(0) as usize).div_ceil(PAGE_SIZE);
            if freed >= *most.get_or_insert_with(|| charge.path().map(pages_above).sum()) {
                return;
            }
            let step = self.taker.step(above, &sessions, pages_above(above), true);
            freed += step;
            if step == 0 {
                failures += 1;
                // The reclaimer may be at it, and has the worker.
                std::thread::sleep(EXHAUSTED_PAUSE);
            }
        }
    }

    /// Waits for the agent of a process that began while all limits were far: it attaches some milliseconds later. None if
    /// the process has no agent.
    fn wait_for_session(&self, pid: i32) -> Option<Arc<Session>> {
        let started = Instant::now();
        loop {
            let session = self.sessions.of_pid(pid);
            if session.is_some() || started.elapsed() > ATTACH_PATIENCE || self.ends() || !has_agent(pid) {
                return session;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets the fronts of these jobs go on after programs of theirs in the group of `charge` have been continued.
    ///
    /// A front stops when its program is stopped, as a shell expects of it. It may hear of that late, and stop when its program runs
    /// again: so it is looked at for a second, unless the group is frozen again.
    fn let_fronts_go_on(&self, charge: &Arc<Charge>, tenants: Vec<Arc<Tenant>>) {
        const LOOKS: u32 = 50;
        let stopped: Vec<Arc<Tenant>> = tenants.into_iter().filter(|tenant| tenant.let_front_go_on().is_ok()).collect();
        // Without a thread, they have gone on once.
        let Some(place) = stopped.first().and_then(|tenant| self.thaws.take(tenant.uid)) else { return };
        let (charge, jobs) = (charge.clone(), self.jobs.clone());
        let look = move || {
            let _place = place;
            for _ in 0..LOOKS {
                std::thread::sleep(Duration::from_millis(20));
                for tenant in stopped.iter().filter(|tenant| jobs.get(tenant.job.token).is_some()) {
                    if charge.is_frozen() {
                        return;
                    }
                    if executioner::is_stopped(tenant.front_pid) {
                        // It may have ended just now.
                        let _ = tenant.let_front_go_on();
                    }
                }
            }
        };
        let _ = std::thread::Builder::new().name("thaw".to_owned()).spawn(look);
    }

    /// Writes back so many bytes of a group's pool, but for what is protected below it; gives how many.
    fn shrink_pool(&self, charge: &Charge, bytes: u64) -> u64 {
        let mut freed = 0;
        for target in self.taker.groups.unprotected(charge) {
            while freed < bytes && !self.ends() {
                let wanted = (bytes - freed).min(POOL_STEP);
                let step = self.engine.shrink_below(target.group, wanted);
                freed += step;
                if step < wanted {
                    break;
                }
            }
        }
        freed
    }

    /// Sets the cap on the pool, within what a job of this size may have.
    fn set_max_pool(&self, percent: u8) {
        let max_pool = (u128::from(self.config.ram) * u128::from(percent) / 100) as u64;
        let config = JobConfig { max_pool, ..self.config.clone() };
        self.engine.set_max_pool_bytes(pool_cap(&config, self.config.swap != SwapConfig::None));
        self.shrink_worker.set_cap(pool_cap(&config, true));
    }
}

/// Whether a process has the agent in its memory. False once it is gone.
fn has_agent(pid: i32) -> bool {
    let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.windows(AGENT_PREFIX.len()).any(|bytes| bytes == AGENT_PREFIX.as_bytes())
}

impl Machine for JobMachine {
    fn find(&self, parent: GroupId, name: &str) -> Option<GroupId> {
        self.taker.groups.child(parent, name)
    }

    fn children(&self, group: GroupId) -> Result<Vec<String>, Error> {
        self.taker.groups.children(group).ok_or(Error::Gone)
    }

    fn create(&self, parent: GroupId, name: &str, owner: u32) -> Result<GroupId, Error> {
        self.taker.groups.create(parent, name, owner)
    }

    fn owner(&self, group: GroupId) -> Result<u32, Error> {
        self.taker.groups.owner(group).ok_or(Error::Gone)
    }

    fn parent(&self, group: GroupId) -> Result<Option<GroupId>, Error> {
        Ok(self.charge(group)?.parent.as_ref().map(|parent| parent.id))
    }

    fn remove(&self, group: GroupId) -> Result<(), Error> {
        let charge = self.charge(group)?;
        let parent = charge.parent.clone().ok_or(Error::Busy)?;
        self.sessions.if_empty(group, || {
            self.taker.groups.remove(group)?;
            // A process that has ended is no process of the group, though its memory may take a moment to go.
            let spaces = self.taker.pager.spaces();
            for space in spaces.into_iter().filter(|space| space.account().group() == charge.group) {
                space.charge_to(parent.clone());
            }
            Ok(())
        })?;
        self.shrink_worker.forget(charge.group);
        Ok(())
    }

    fn limit(&self, group: GroupId, limit: Limit) -> Result<Option<u64>, Error> {
        let charge = self.charge(group)?;
        Ok(match (&self.config.swap, limit) {
            (SwapConfig::None, Limit::SwapMax) if group == GroupId::ROOT => Some(0),
            (SwapConfig::File { size, .. }, Limit::SwapMax) if group == GroupId::ROOT => *size,
            _ => charge.limit(limit),
        })
    }

    fn set_limit(&self, group: GroupId, limit: Limit, bytes: Option<u64>) -> Result<(), Error> {
        let charge = self.charge(group)?;
        match limit {
            Limit::Max | Limit::High if bytes.is_some_and(|bytes| bytes < MEMORY_MAX_LEAST) => {
                return Err(Error::TooSmall);
            }
            Limit::SwapMax if group == GroupId::ROOT => {
                return Err(Error::NotSupported("the swap file is limited as a whole, by --swap-size"));
            }
            Limit::SwapMax => self.engine.set_swap_max(charge.group, bytes).map_err(|_| Error::Gone)?,
            Limit::ZswapMax => self.engine.set_zswap_max(charge.group, bytes).map_err(|_| Error::Gone)?,
            _ => {}
        }
        charge.set_limit(limit, bytes);
        self.watch.post_distance();
        self.taker.groups.watch_bell.ring();
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

    fn shrinker(&self, group: GroupId) -> Result<bool, Error> {
        Ok(self.charge(group)?.shrinker.load(Relaxed))
    }

    fn set_shrinker(&self, group: GroupId, enabled: bool) -> Result<(), Error> {
        let charge = self.charge(group)?;
        self.engine.set_group_shrinker(charge.group, enabled).map_err(|_| Error::Gone)?;
        charge.shrinker.store(enabled, Relaxed);
        Ok(())
    }

    fn processes(&self, group: GroupId) -> Result<Vec<i32>, Error> {
        self.charge(group)?;
        let own = self.below(group).into_iter().filter(|session| session.charge().id == group);
        let mut pids: Vec<i32> = own.map(|session| session.pid).chain(self.sessions.moved_to(group)).collect();
        pids.sort_unstable();
        Ok(pids)
    }

    fn move_process(&self, pid: i32, group: GroupId, may_leave: &MayLeave<'_>) -> Result<(), Error> {
        let charge = self.charge(group)?;
        let was_frozen = self.sessions.of_pid(pid).is_some_and(|session| session.charge().is_frozen());
        self.sessions.move_process(pid, &charge, may_leave)?;
        if let Some(session) = self.sessions.of_pid(pid).filter(|_| was_frozen && !charge.is_frozen()) {
            self.let_fronts_go_on(&charge, vec![session.tenant.clone()]);
        }
        self.bring_below_limits(pid, &charge);
        Ok(())
    }

    fn frozen(&self, group: GroupId) -> Result<bool, Error> {
        Ok(self.charge(group)?.frozen.load(Relaxed))
    }

    fn set_frozen(&self, group: GroupId, frozen: bool) -> Result<(), Error> {
        let charge = self.charge(group)?;
        charge.frozen.store(frozen, Relaxed);
        self.sessions.stop_or_go_on(group);
        if !frozen {
            let sessions = self.below(group);
            let holds = |tenant: &Tenant| {
                tenant.charge.is_below(group) || sessions.iter().any(|session| session.tenant.job == tenant.job)
            };
            self.let_fronts_go_on(&charge, self.jobs.all().into_iter().filter(|tenant| holds(tenant)).collect());
        }
        Ok(())
    }

    fn kill(&self, group: GroupId) -> Result<(), Error> {
        self.charge(group)?;
        // Of whole jobs no process is left out, managed or not.
        let mut jobs = self.jobs.all();
        jobs.retain(|tenant| {
            tenant.charge.is_below(group)
                && self.sessions.of_job(tenant.job).iter().all(|session| session.charge().is_below(group))
        });
        self.kill_whole(&mut jobs);
        let started = Instant::now();
        loop {
            let living = self.below(group);
            if living.is_empty() || started.elapsed() > KILL_PATIENCE || self.ends() {
                break;
            }
            for session in living {
                // It may have ended just now.
                let _ = session.pidfd.kill(libc::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let (began, mut pause) = (Instant::now(), FIRST_PAUSE);
        while !jobs.is_empty() && began.elapsed() <= START_PATIENCE && !self.ends() {
            std::thread::sleep(pause);
            pause *= 2;
            self.kill_whole(&mut jobs);
        }
        if self.ends() && !self.below(group).is_empty() { Err(Error::Again) } else { Ok(()) }
    }

    fn reclaim(&self, group: GroupId, bytes: u64) -> Result<bool, Error> {
        let charge = self.charge(group)?;
        self.watch.measure();
        let most = bytes.min(charge.current.load(Relaxed));
        let (mut reclaimed, mut failures) = (0, 0);
        while reclaimed < most && failures < MOST_FAILURES && !self.ends() {
            // Its number may be another's by now.
            if !self.taker.groups.get(group).is_some_and(|now| Arc::ptr_eq(&now, &charge)) {
                return Err(Error::Gone);
            }
            let sessions = self.watch.measure();
            let concerned = |session: &Session| session.charge().is_below(group) && !session.space.is_shunned();
            for (session, _) in sessions.iter().filter(|(session, _)| concerned(session)) {
                // An error is that of a process that is going away.
                let _ = session.refresh(&self.taker.pager);
            }
            let pages = (most - reclaimed).div_ceil(PAGE_SIZE as u64) as usize;
            let mut freed = self.taker.step(&charge, &sessions, pages, true) as u64 * PAGE_SIZE as u64;
            if freed == 0 {
                freed = self.shrink_pool(&charge, most - reclaimed);
            }
            failures = if freed == 0 { failures + 1 } else { 0 };
            reclaimed += freed;
        }
        self.watch.measure();
        Ok(reclaimed >= bytes)
    }

    fn reclaim_pool(&self, group: GroupId, bytes: u64) -> Result<bool, Error> {
        let charge = self.charge(group)?;
        self.watch.measure();
        let stored = self.engine.group_counters(charge.group).map_err(|_| Error::Gone)?.zswap;
        let freed = self.shrink_pool(&charge, bytes.min(stored));
        self.watch.measure();
        Ok(freed >= bytes)
    }

    fn stats(&self, group: GroupId) -> Result<String, Error> {
        let charge = self.charge(group)?;
        self.watch.measure();
        Ok(Stats::now(&self.taker.groups, &self.engine, &charge).to_json())
    }

    fn figures(&self, group: GroupId) -> Result<Figures, Error> {
        let charge = self.charge(group)?;
        self.watch.measure();
        let engine = self.engine.group_counters(charge.group).map_err(|_| Error::Gone)?;
        let counted = |counter: fn(&pager::Counters) -> &AtomicU64| self.taker.groups.counted(group, counter);
        let event = |event: fn(&Events) -> &AtomicU64| Some(event(&charge.events).load(Relaxed));
        let anon = charge.anon.load(Relaxed);
        let major = counted(|counters| &counters.pgmajfault);
        let minor = counted(|counters| &counters.rescued) + counted(|counters| &counters.zero_filled);
        Ok(Figures {
            current: charge.current.load(Relaxed),
            peak: charge.peak.load(Relaxed),
            swap_current: engine.swap(),
            swap_peak: Some(charge.swap_peak.fetch_max(engine.swap(), Relaxed).max(engine.swap())),
            low: event(|events| &events.low),
            high: event(|events| &events.high),
            max: event(|events| &events.max),
            oom: event(|events| &events.oom),
            oom_kill: event(|events| &events.oom_kill),
            // There is no `memory.swap.high` that could be exceeded.
            swap_high: Some(0),
            swap_max: Some(engine.swap_max),
            swap_fail: Some(engine.swap_fail),
            pressure: Some(charge.stalls.pressure()),
            engine,
            anon,
            anon_by_node: (memory_nodes() == 1).then(|| vec![anon]),
            pgfault: Some(major + minor),
            pgmajfault: Some(major),
            pgscan: Some(counted(|counters| &counters.pgscan)),
            pgsteal: Some(counted(|counters| &counters.pgsteal)),
            thp_collapse_alloc: Some(counted(|counters| &counters.thp_collapse_alloc)),
            unmanaged_current: Some(charge.unmanaged.load(Relaxed)),
            unmanaged_peak: Some(charge.unmanaged_peak.load(Relaxed)),
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

    fn folio_swapin(&self, order: usize) -> bool {
        self.taker.pager.folios().is_enabled(order)
    }

    fn set_folio_swapin(&self, order: usize, enabled: bool) {
        self.taker.pager.folios().enable(order, enabled);
    }

    fn swapin(&self) -> Swapin {
        self.taker.pager.folios().rule()
    }

    fn set_swapin(&self, rule: Swapin) {
        self.taker.pager.folios().set_rule(rule);
    }
}

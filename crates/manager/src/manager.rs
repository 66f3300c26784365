//! The manager's process: its threads and how they begin and end.
//!
//! | thread | does |
//! |---|---|
//! | control | jobs, statistics, the end |
//! | reception (2) | [`Reception`]: connections, ends of processes |
//! | watchdog | [`Watchdog`]: replaces threads that a process holds up |
//! | faults (4) | [`Pager::serve`] |
//! | crew (1 to 4) | [`Pager::work`]: parts of large loads and stores |
//! | huge | [`Pager::collapse_huge_pages`] |
//! | watch, register, register-noisy | [`Watch`] |
//! | reclaim | [`Reclaimer`] |
//! | shrink | [`ShrinkWorker`] |
//! | pressure | [`pressure::listen`] |
//! | reap | [`Pager::reap`]: what a process leaves behind takes a while to free |
//! | unmanaged | [`Unmanaged::run`] |
//! | advice | [`Questions::serve`]: follows `madvise` hints |
//! | door | [`Door::serve`], if operators are to be heard |
//! | stalls | [`stall::run`], with the door |
//!
//! No thread that serves faults waits for a program or for reclaim. Threads that work on the memory of processes have a
//! [`Role`]: one that a process holds up is replaced.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use uzswap_engine::{Config, Zswap};
use uzswap_proto::Job;
use uzswap_proto::control::Joined;
use uzswap_vm::log::log;
use uzswap_vm::owner::Owner;
use uzswap_vm::pager::{Host, Pager};
use uzswap_vm::sys::arena::Arena;
use uzswap_vm::sys::epoll::Epoll;
use uzswap_vm::sys::file::event;
use uzswap_vm::sys::link::{Listener, Peer, peer_handle};
use uzswap_vm::sys::process::{PidFd, is_exiting};
use uzswap_vm::sys::{job, memory, thread};
use uzswap_vm::visit::{self, Role};

use crate::advice::Questions;
use crate::control::{Error, GroupId, Limit, Machine};
use crate::door::{Door, Joining, Joins};
use crate::executioner::{self, Manner};
use crate::front::Bell;
use crate::groups::Groups;
use crate::jobs::{Jobs, Tenant, Word};
use crate::kill_queue;
use crate::machine::{JobMachine, MOST_THAWS};
use crate::oom::Disk;
use crate::quota::Quota;
use crate::reception::Reception;
use crate::reclaim::{Reclaimer, Taker};
use crate::sessions::Sessions;
use crate::shrink::ShrinkWorker;
use crate::stats::{Stats, write_whole};
use crate::swap_file::DiskSwapFile;
use crate::traced::Tracing;
use crate::unmanaged::{LookedAt, Unmanaged};
use crate::watch::Watch;
use crate::watchdog::{self, Watchdog};
use crate::{JobConfig, SwapConfig, descriptors, front, pool_cap, pressure, retire, stall};

/// How long the control thread waits for something to do, and if nothing is to be tried again or to be written meanwhile.
const PAUSE: Duration = Duration::from_millis(100);
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// How often to look whether processes have gone, and if none is about to.
const REAP_PAUSE: Duration = Duration::from_millis(10);
const LONG_REAP_PAUSE: Duration = Duration::from_millis(100);

/// How long a daemon that stops hears those who had begun to come.
const LAST_CALLS: Duration = Duration::from_millis(200);

/// How many jobs one user can have. Each takes descriptors, of which there is an end.
const MOST_JOBS: usize = 1024;

/// Jobs of one user, neither root nor the manager's own, that are being killed because they have lost their fronts when no other may join.
const MOST_KILLS: usize = 8;

/// Threads that serve the reception.
const RECEPTION_THREADS: usize = 2;

/// Threads that serve faults.
const FAULT_THREADS: usize = 4;

/// The most threads that help others.
const MOST_CREW: usize = 4;

/// Everything the manager is given.
pub struct Setup {
    pub config: JobConfig,
    /// Under which it listens for processes.
    pub name: u64,
    /// Each opened by the front, whom programs know (`agent_file`).
    pub listeners: Vec<Listener>,
    pub door: Option<Door>,
    pub swap: Option<DiskSwapFile>,
    pub agent: PathBuf,
    /// The process that stands for it: the front of its job, or a daemon's guard.
    pub front: PidFd,
    pub front_pid: i32,
    pub bell: Bell,
    pub serves: Serves,
}

/// Whose manager it is.
pub enum Serves {
    /// One job's.
    Job {
        job: Job,
        /// Whether the warning that something runs unmanaged has been given.
        warned: bool,
        /// The process that serves the job's control files.
        server: Option<i32>,
    },
    /// That of all jobs that join.
    All,
}

/// Becomes the manager; never returns.
pub fn become_manager(setup: Setup) -> ! {
    job::become_background("uzswap-manager");
    let status = run(setup);
    job::exit_now(status)
}

/// Runs the manager until its end; gives its exit status.
fn run(setup: Setup) -> i32 {
    match Manager::start(setup) {
        Ok(mut manager) => manager.control(),
        Err(error) => {
            log(&format!("uzswap: error: the manager cannot start: {error}"));
            1
        }
    }
}

/// What the pager asks of the manager.
struct ManagerHost {
    sessions: OnceLock<Arc<Sessions>>,
}

impl Host for ManagerHost {
    fn kill(&self, space: u64, why: &str) {
        let session = self.sessions.get().and_then(|sessions| sessions.of_space(space));
        if let Some(session) = session.filter(|session| !session.pidfd.has_ended()) {
            // A namespace that ends takes the worker away before its program is quite gone.
            if !is_exiting(session.pid) {
                session.tenant.tell(&format!("error: killed process {}: {why}", session.pid));
            }
            // It may have ended just now.
            let _ = session.pidfd.kill(libc::SIGKILL);
        }
    }
}

struct Manager {
    config: JobConfig,
    door: Option<Arc<Door>>,
    agent: PathBuf,
    front: PidFd,
    front_pid: i32,
    bell: Bell,
    engine: Arc<Zswap>,
    pager: Arc<Pager>,
    jobs: Arc<Jobs>,
    /// Those who join, if it is a daemon's.
    joining: Option<Waiting>,
    sessions: Arc<Sessions>,
    groups: Arc<Groups>,
    machine: Arc<JobMachine>,
    shrink_worker: Arc<ShrinkWorker>,
    tracing: Arc<Tracing>,
    disk: Disk,
    stop: Arc<AtomicBool>,
    epoll: Epoll,
    waiting_for: HashMap<u64, Source>,
    next_source: u64,
    /// What could not be waited for, for want of kernel memory or of descriptors. It is tried again every 100 ms.
    lost: Vec<Source>,
    /// Groups to be removed as soon as they are empty.
    abandoned: HashSet<GroupId>,
    /// The jobs that are being killed.
    kills: Arc<Quota>,
}

/// What the control thread waits for.
enum Source {
    Finish,
    Front,
    Joins,
    Job(Arc<Tenant>),
    /// The end of the process that has joined with a job.
    JobFront(Arc<Tenant>),
}

impl Manager {
    fn start(setup: Setup) -> std::io::Result<Manager> {
        let Setup { config, name, listeners, door, swap, agent, front, front_pid, bell, serves } = setup;
        memory::raise_descriptor_limit(descriptors::OF_GUARD);
        // Without the right to lock memory the manager works, but may be paged itself; `doctor` says so.
        let _ = memory::lock_all();
        let max_pool_bytes = pool_cap(&config, swap.is_some());
        // An operator may give it more.
        let most_pool_bytes = match door {
            Some(_) => {
                pool_cap(&JobConfig { max_pool: config.ram.max(max_pool_bytes), ..config.clone() }, swap.is_some())
            }
            None => max_pool_bytes,
        };
        let trouble = swap.as_ref().map(DiskSwapFile::trouble).unwrap_or_default();
        let disk = Disk { swap: config.swap.clone(), trouble };
        let engine = Arc::new(Zswap::new(
            Config {
                max_pool_bytes,
                accept_threshold_percent: config.accept_threshold_percent,
                compressor: config.compressor,
                zpool: config.zpool,
                enabled: config.enabled,
                shrinker_enabled: config.shrinker_enabled,
                verify: config.verify,
                swap_limit_bytes: match config.swap {
                    SwapConfig::File { size, .. } => size,
                    SwapConfig::None => None,
                },
                ..Config::default()
            },
            swap.map(|swap| Box::new(swap) as _),
            Arena::reserve(most_pool_bytes)?,
        ));
        let shrink_worker = Arc::new(ShrinkWorker::new(engine.clone(), pool_cap(&config, true)));
        let groups = Arc::new(Groups::new(engine.clone(), Arc::default()));
        groups.root().set_limit(Limit::Max, config.memory_max);
        groups.root().set_limit(Limit::High, config.memory_high);
        let host = Arc::new(ManagerHost { sessions: OnceLock::new() });
        let pager = Arc::new(Pager::new(engine.clone(), host.clone(), config.swapin)?);
        pager.set_capacity(descriptors::processes());
        let jobs = Arc::new(Jobs::new(name));
        let sessions = Arc::new(Sessions::new(jobs.clone(), &agent, pager.clone(), groups.clone()));
        let tracing = Arc::new(Tracing::new(pager.clone(), sessions.clone()));
        assert!(host.sessions.set(sessions.clone()).is_ok(), "set once, here");
        let own = std::process::id() as i32;
        let joining = match serves {
            Serves::Job { job, warned, server } => {
                let spared = [Some(own), server].into_iter().flatten().collect();
                let owner = Peer { pid: front_pid, uid: rustix::process::geteuid().as_raw() };
                let trusted = Arc::new(Owner::trusted());
                let mut tenant = Tenant::new(job, owner, trusted, groups.root(), None, spared);
                tenant.require = config.require;
                tenant.warned.store(warned, Relaxed);
                jobs.add(Arc::new(tenant));
                None
            }
            Serves::All => Some(Waiting::new()?),
        };
        let watch = Arc::new(Watch::new(pager.clone(), sessions.clone(), groups.clone(), &agent));
        let machine = Arc::new(JobMachine {
            parameters: JobMachine::first_parameters(&config),
            thaws: Quota::new(MOST_THAWS),
            ends: AtomicBool::new(false),
            config: config.clone(),
            jobs: jobs.clone(),
            engine: engine.clone(),
            sessions: sessions.clone(),
            watch: watch.clone(),
            taker: Taker { pager: pager.clone(), groups: groups.clone() },
            shrink_worker: shrink_worker.clone(),
        });
        let questions: Arc<Questions> = Arc::default();
        let reception = Arc::new(Reception::new(listeners, sessions.clone(), questions.clone(), front_pid)?);
        let manager = Manager {
            config,
            door: door.map(Arc::new),
            agent,
            front,
            front_pid,
            bell,
            engine,
            pager,
            jobs,
            joining,
            sessions,
            groups,
            machine,
            shrink_worker,
            tracing,
            disk,
            stop: Arc::default(),
            epoll: Epoll::new()?,
            waiting_for: HashMap::new(),
            next_source: 0,
            lost: Vec::new(),
            abandoned: HashSet::new(),
            kills: Quota::new(MOST_KILLS),
        };
        manager.start_threads(&watch, reception, questions)?;
        Ok(manager)
    }

    fn start_threads(
        &self,
        watch: &Arc<Watch>,
        reception: Arc<Reception>,
        questions: Arc<Questions>,
    ) -> std::io::Result<()> {
        for role in self.roles(watch, reception, questions) {
            role.start()?;
        }
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let (groups, worker, stop) = (self.groups.clone(), self.shrink_worker.clone(), self.stop.clone());
        thread("shrink").spawn(move || worker.run(&groups, &stop))?;
        let (groups, worker, stop) = (self.groups.clone(), self.shrink_worker.clone(), self.stop.clone());
        thread("pressure").spawn(move || pressure::listen(&groups, &worker, &stop))?;
        if let Some(door) = self.door.clone() {
            let (machine, joins) = (self.machine.clone(), self.joining.as_ref().map(Waiting::joins).transpose()?);
            let (groups, sessions, stop) = (self.groups.clone(), self.sessions.clone(), self.stop.clone());
            thread("stalls").spawn(move || stall::run(&groups, &sessions, &stop))?;
            thread("door").spawn(move || door.serve(&*machine, joins.as_ref()))?;
        }
        let (watchdog, stop) = (Watchdog::new(self.pager.clone(), self.sessions.clone()), self.stop.clone());
        thread("watchdog").spawn(move || watchdog.run(&stop))?;
        Ok(())
    }

    /// What is done by threads that a process can hold up, once for each thread.
    fn roles(&self, watch: &Arc<Watch>, reception: Arc<Reception>, questions: Arc<Questions>) -> Vec<Arc<Role>> {
        let pager = self.pager.clone();
        let faults = Role::new("faults", move || {
            if let Err(error) = pager.serve() {
                log(&format!("uzswap: error: faults cannot be served: {error}"));
                std::process::abort();
            }
        });
        let pager = self.pager.clone();
        let noisy = Role::new("noisy", move || pager.serve_noisy());
        let pager = self.pager.clone();
        let ties = Role::new("ties", move || pager.tie_new_children());
        let stop = self.stop.clone();
        let reception = Role::new("reception", move || reception.serve(&stop));
        let pager = self.pager.clone();
        let crew = Role::new("crew", move || pager.work());
        // The thread that has the task works, too.
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        let crew_size = processors.saturating_sub(1).clamp(1, MOST_CREW);
        let pager = self.pager.clone();
        let huge = Role::new("huge", move || pager.collapse_huge_pages());
        let (worker, looks) = (self.shrink_worker.clone(), watch.clone());
        let (taker, disk, stop) = (self.machine.taker.clone(), self.disk.clone(), self.stop.clone());
        let reclaim = Role::new("reclaim", move || {
            Reclaimer::new(worker.clone(), looks.clone(), taker.clone(), disk.clone(), stop.clone()).run();
        });
        let (looks, stop) = (watch.clone(), self.stop.clone());
        let watching = Role::new(watchdog::WATCH, move || looks.run(&stop));
        let (looks, stop) = (watch.clone(), self.stop.clone());
        let register = Role::new("register", move || looks.register(&stop));
        let (looks, stop) = (watch.clone(), self.stop.clone());
        let register_noisy = Role::new("register-noisy", move || looks.register_noisy(&stop));
        let (tracing, stop) = (self.tracing.clone(), self.stop.clone());
        let traced = Role::new("traced", move || tracing.run(&stop));
        let (pager, sessions, stop) = (self.pager.clone(), self.sessions.clone(), self.stop.clone());
        let reap = Role::new("reap", move || reap(&pager, &sessions, &stop));
        let pager = self.pager.clone();
        let advice = Role::new("advice", move || questions.serve(&pager));
        let (jobs, sessions, groups) = (self.jobs.clone(), self.sessions.clone(), self.groups.clone());
        let (agent, guard, stop) = (self.agent.clone(), self.front_pid, self.stop.clone());
        let looked_at = LookedAt::default();
        let unmanaged = Role::new("unmanaged", move || {
            Unmanaged::new(jobs.clone(), sessions.clone(), groups.clone(), &agent, looked_at.clone()).run(guard, &stop);
        });
        [
            vec![faults; FAULT_THREADS],
            vec![reception; RECEPTION_THREADS],
            vec![crew; crew_size],
            vec![noisy, ties, huge, reclaim, watching, register, register_noisy, traced, reap, advice, unmanaged],
        ]
        .concat()
    }

    fn control(&mut self) -> i32 {
        self.wait_for(Source::Finish);
        self.wait_for(Source::Front);
        if self.joining.is_some() {
            self.wait_for(Source::Joins);
        }
        let _ = thread::ask_for_promptness();
        self.bell.ring_ready();
        let mut last_sweep = Instant::now();
        let mut last_stats = Instant::now();
        loop {
            if let Some(status) = self.turn() {
                return status;
            }
            if last_sweep.elapsed() > PAUSE {
                self.wait_for_lost();
                self.abandoned.retain(|group| self.machine.remove(*group) == Err(Error::Busy));
                last_sweep = Instant::now();
            }
            if self.config.stats.is_some() && last_stats.elapsed() > Duration::from_secs(1) {
                self.write_stats();
                last_stats = Instant::now();
            }
        }
    }

    /// Does what there is to do, or waits a while for something; gives the exit status if it is the end.
    fn turn(&mut self) -> Option<i32> {
        let has_more = self.config.stats.is_some() || !self.lost.is_empty() || !self.abandoned.is_empty();
        let pause = if has_more { PAUSE } else { LONG_PAUSE };
        let ready = self.epoll.wait(pause.as_millis() as i32).expect("epoll works");
        for number in ready.into_iter().map(|ready| ready.number) {
            let Some(source) = self.waiting_for.remove(&number) else { continue };
            match source {
                Source::Finish if self.joining.is_none() => return Some(self.finish()),
                Source::Finish => {
                    self.bell.hear_finish();
                    // It may be told so twice.
                    if !self.sessions.are_released() && self.retire() {
                        return Some(0);
                    }
                    self.wait_again(number, Source::Finish);
                }
                Source::Front => return Some(self.avenge_front()),
                Source::Joins => {
                    let come = self.joining.as_ref().map(Waiting::take).unwrap_or_default();
                    come.into_iter().for_each(|joining| self.take_in(joining));
                    self.wait_again(number, Source::Joins);
                }
                Source::Job(tenant) => match tenant.hear() {
                    Word::None => self.wait_again(number, Source::Job(tenant)),
                    word => self.see_off(&tenant, word),
                },
                // Its last word may not have been heard yet. Another process may hold its connection.
                Source::JobFront(tenant) => match tenant.hear() {
                    Word::None => self.see_off(&tenant, Word::Lost),
                    word => self.see_off(&tenant, word),
                },
            }
        }
        None
    }

    fn fd_of(&self, source: &Source) -> i32 {
        match source {
            Source::Finish => self.bell.finish().as_raw_fd(),
            Source::Front => self.front.as_raw_fd(),
            Source::Joins => self.joining.as_ref().expect("a daemon's").bell.as_raw_fd(),
            Source::Job(tenant) => tenant.link().expect("it has joined"),
            Source::JobFront(tenant) => tenant.front().expect("it has joined"),
        }
    }

    /// False if that cannot be, for want of kernel memory. Then this source is lost, which the sweep makes good for programs.
    fn wait_for(&mut self, source: Source) -> bool {
        let number = self.next_source;
        self.next_source += 1;
        let waits = self.epoll.add(self.fd_of(&source), number).is_ok();
        if waits {
            self.waiting_for.insert(number, source);
        }
        waits
    }

    fn wait_again(&mut self, number: u64, source: Source) {
        if self.epoll.rearm(self.fd_of(&source), number).is_ok() {
            self.waiting_for.insert(number, source);
        } else {
            self.lost.push(source);
        }
    }

    /// Tries again to wait for what could not be waited for.
    fn wait_for_lost(&mut self) {
        for source in std::mem::take(&mut self.lost) {
            let (fd, number) = (self.fd_of(&source), self.next_source);
            self.next_source += 1;
            self.epoll.remove(fd);
            match self.epoll.add(fd, number) {
                Ok(()) => drop(self.waiting_for.insert(number, source)),
                Err(_) => self.lost.push(source),
            }
        }
    }

    /// A job joins.
    fn take_in(&mut self, joining: Joining) {
        let Joining { stream, peer, group, transient, require } = joining;
        let (name, own) = (self.jobs.name, std::process::id() as i32);
        let others = self.jobs.all().iter().filter(|tenant| tenant.uid == peer.uid).count();
        // Nor can a front be looked after that has no process here, or has ended.
        let Ok(front) = peer_handle(&stream) else { return };
        let kills_many = self.groups.is_limited(peer.uid) && !self.kills.has_room(peer.uid);
        if peer.pid <= 0 || others >= MOST_JOBS || kills_many || front.pid() != Some(peer.pid) {
            return;
        }
        // Without random bytes or with the group gone it finds its connection closed, too.
        let (Ok(token), Some(charge)) = (job::random(), self.groups.get(group)) else { return };
        let job = Job { name, token: token | 1 };
        let (owner, spared) = (self.jobs.owner(peer.uid), vec![own, self.front_pid]);
        let mut tenant = Tenant::new(job, peer, owner, charge, Some((stream, front)), spared);
        (tenant.require, tenant.transient) = (require, transient);
        let tenant = Arc::new(tenant);
        let agent = self.agent.to_string_lossy();
        let prefix = Joined { job, agent: &agent }.prefix();
        let welcome = [str::from_utf8(&prefix).expect("digits and spaces"), &agent].concat();
        self.jobs.add(tenant.clone());
        // A front that cannot be watched loses its connection, and kills its job.
        let is_watched = tenant.welcome(&welcome).is_ok()
            && self.wait_for(Source::Job(tenant.clone()))
            && self.wait_for(Source::JobFront(tenant.clone()));
        if !is_watched {
            self.see_off(&tenant, Word::Bye);
        }
    }

    /// A job that had joined is over, or has lost its front: then nobody guards it.
    fn see_off(&mut self, tenant: &Arc<Tenant>, word: Word) {
        self.jobs.remove(tenant.job.token);
        [tenant.link(), tenant.front()].into_iter().flatten().for_each(|descriptor| self.epoll.remove(descriptor));
        let is_its =
            |source: &Source| matches!(source, Source::Job(of) | Source::JobFront(of) if Arc::ptr_eq(of, tenant));
        self.waiting_for.retain(|_, source| !is_its(source));
        self.lost.retain(|source| !is_its(source));
        if self.sessions.are_released() {
            return;
        }
        if tenant.transient {
            self.abandoned.insert(tenant.charge.id);
        }
        if word == Word::Bye {
            let stats = Stats::now(&self.groups, &self.engine, &tenant.charge);
            return tenant.farewell(&stats.summary(None));
        }
        let front = tenant.front_pid;
        log(&format!("uzswap: error: `uzswap run --connect` ({front}) was killed; its job is killed"));
        let spared = [std::process::id() as i32, self.front_pid];
        let order = self.sessions.kill_order(Manner::StopFirst, tenant, &spared);
        kill_queue::add(order.of_user(tenant.uid).hold(self.kills.take(tenant.uid)));
    }

    /// The front is dead, and with it whoever would guard the jobs: they end here.
    fn avenge_front(&self) -> i32 {
        // First, because nobody does it if we are killed, too.
        front::remove_agent(&self.agent);
        self.door.iter().for_each(|door| door.remove_name());
        let own = std::process::id() as i32;
        // A daemon's jobs have fronts of their own.
        let manner = if self.joining.is_some() { Manner::AtOnce } else { Manner::StopFirst };
        let orders = self.jobs.all().iter().map(|tenant| self.sessions.kill_order(manner, tenant, &[own])).collect();
        executioner::kill(orders);
        kill_queue::finish();
        match self.joining {
            None => log("uzswap: error: `uzswap run` was killed; killed its job"),
            Some(_) => log("uzswap: error: `uzswap daemon` was killed; killed its jobs"),
        }
        1
    }

    fn finish(&self) -> i32 {
        self.stop.store(true, Relaxed);
        front::remove_agent(&self.agent);
        self.groups.root().note_unmanaged(0, 0);
        if self.config.stats.is_some() {
            self.write_stats();
        }
        self.machine.ends.store(true, Relaxed);
        self.door.iter().for_each(|door| door.let_finish());
        self.tracing.look_back();
        if !self.config.quiet {
            log(&self.stats().summary(Some(&self.shrink_worker.peak())));
        }
        0
    }

    /// Ends a daemon: its jobs get back everything and run on without it. False, and all is as it was, if that cannot be.
    fn retire(&mut self) -> bool {
        let door = self.door.clone();
        // They are listed no longer.
        kill_queue::finish();
        self.machine.ends.store(true, Relaxed);
        // Nobody changes anything meanwhile.
        let _quiet = door.as_ref().map(|door| door.keep_quiet());
        if let Err(why) = retire::bring_back(&self.pager, &self.groups, &self.engine) {
            log(&format!("uzswap: error: not stopping: {why}"));
            self.machine.ends.store(false, Relaxed);
            return false;
        }
        door.iter().for_each(|door| door.remove_name());
        self.sessions.release();
        for tenant in self.jobs.all() {
            // Who does not hear it takes us for dead, and kills the job.
            let _ = tenant.release();
        }
        // A process that has begun to come is told to go on alone, by the reception.
        std::thread::sleep(LAST_CALLS);
        retire::release(&self.pager);
        // Programs of a job load it still, also one of which no process has joined yet; then a later manager removes it.
        if self.jobs.all().is_empty() {
            front::remove_agent(&self.agent);
        }
        self.stop.store(true, Relaxed);
        true
    }

    fn stats(&self) -> Stats {
        Stats::now(&self.groups, &self.engine, &self.groups.root())
    }

    fn write_stats(&self) {
        let Some(path) = &self.config.stats else { return };
        if let Err(error) = write_whole(path, &self.stats().to_json()) {
            log(&format!("uzswap: warning: statistics file {}: {error}", path.display()));
        }
    }
}

/// Jobs that wait to be taken in.
struct Waiting {
    queue: mpsc::Receiver<Joining>,
    sender: mpsc::Sender<Joining>,
    /// Rung for each.
    bell: File,
}

impl Waiting {
    fn new() -> std::io::Result<Waiting> {
        let (sender, queue) = mpsc::channel();
        Ok(Waiting { queue, sender, bell: event()? })
    }

    /// Where they come in.
    fn joins(&self) -> std::io::Result<Joins> {
        Ok(Joins { queue: self.sender.clone(), bell: self.bell.try_clone()? })
    }

    fn take(&self) -> Vec<Joining> {
        // Whoever comes after this look rings again.
        let _ = (&self.bell).read(&mut [0; 8]);
        self.queue.try_iter().collect()
    }
}

/// Forgets what processes leave behind, and ends the sessions of those that execute another program, until told to stop.
fn reap(pager: &Pager, sessions: &Sessions, stop: &AtomicBool) {
    let mut swept = Instant::now();
    while !stop.load(Relaxed) && !visit::is_surplus() {
        let more = pager.reap();
        if swept.elapsed() >= LONG_REAP_PAUSE {
            sessions.sweep();
            swept = Instant::now();
        }
        std::thread::sleep(if more { REAP_PAUSE } else { LONG_REAP_PAUSE });
    }
}

//! The manager's process: its threads and how they begin and end.
//!
//! | thread | does |
//! |---|---|
//! | control | connections, ends of processes, statistics, the end of the job |
//! | faults (4) | [`Pager::serve`] |
//! | watch | [`Watch`] |
//! | reclaim | [`Reclaimer`] |
//! | shrink | [`ShrinkWorker`] |
//! | pressure | [`pressure::listen`] |
//! | reap | [`Pager::reap`]: what a process leaves behind takes a while to free |
//! | advice | follows `madvise` hints |
//! | door | [`Door::serve`], if operators are to be heard |
//!
//! No thread that serves faults waits for a program or for reclaim.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use uzswap_engine::{Config, Zswap};
use uzswap_proto::{Advice, Advise, Job, kind};
use uzswap_vm::pager::{Host, Pager};
use uzswap_vm::sys::arena::Arena;
use uzswap_vm::sys::epoll::Epoll;
use uzswap_vm::sys::link::{Link, Listener};
use uzswap_vm::sys::process::PidFd;
use uzswap_vm::sys::{job, memory, thread};

use crate::control::Limit;
use crate::door::Door;
use crate::executioner::{self, Manner};
use crate::front::Bell;
use crate::groups::Groups;
use crate::machine::JobMachine;
use crate::reclaim::{Reclaimer, Taker};
use crate::sessions::{Call, Caller, Session, Sessions, range_of};
use crate::shrink::ShrinkWorker;
use crate::stats::Stats;
use crate::strangers::Strangers;
use crate::swap_file::DiskSwapFile;
use crate::watch::Watch;
use crate::{JobConfig, SwapConfig, front, pool_cap, pressure};

/// How often to look whether processes have gone.
const REAP_PAUSE: Duration = Duration::from_millis(10);
/// How long until a hint that cannot be followed yet is taken up again.
const ADVICE_PAUSE: Duration = Duration::from_millis(1);

/// Threads that serve faults.
const FAULT_THREADS: usize = 4;

/// Everything the manager is given.
pub struct Setup {
    pub config: JobConfig,
    pub job: Job,
    pub listener: Listener,
    pub door: Option<Door>,
    pub swap: Option<DiskSwapFile>,
    pub agent: PathBuf,
    pub front: PidFd,
    pub front_pid: i32,
    pub bell: Bell,
    /// Whether the warning that something runs unmanaged has been given.
    pub warned: bool,
    /// The process that serves the job's control files.
    pub server: Option<i32>,
}

/// Becomes the manager of a job; never returns.
pub fn become_manager(setup: Setup) -> ! {
    job::become_background("uzswap-manager");
    let status = run(setup);
    job::exit_now(status)
}

/// Runs the manager until the job is over; gives its exit status.
fn run(setup: Setup) -> i32 {
    match Daemon::start(setup) {
        Ok(mut daemon) => daemon.control(),
        Err(error) => {
            eprintln!("uzswap: error: the manager cannot start: {error}");
            1
        }
    }
}

/// What the pager asks of the manager.
struct JobHost {
    sessions: OnceLock<Arc<Sessions>>,
}

impl Host for JobHost {
    fn kill(&self, space: u64, why: &str) {
        let session = self.sessions.get().and_then(|sessions| sessions.of_space(space));
        if let Some(session) = session.filter(|session| !session.pidfd.has_ended()) {
            eprintln!("uzswap: error: killed process {}: {why}", session.pid);
            // It may have ended just now.
            let _ = session.pidfd.kill(libc::SIGKILL);
        }
    }
}

struct Daemon {
    config: JobConfig,
    job: Job,
    listener: Listener,
    door: Option<Arc<Door>>,
    agent: PathBuf,
    front: PidFd,
    front_pid: i32,
    bell: Bell,
    engine: Arc<Zswap>,
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    groups: Arc<Groups>,
    shrink_worker: Arc<ShrinkWorker>,
    stop: Arc<AtomicBool>,
    advice: mpsc::Sender<Question>,
    epoll: Epoll,
    waiting_for: HashMap<u64, Source>,
    next_source: u64,
    warned: bool,
    strangers: Strangers,
}

/// A program's hint, and where the answer goes.
type Question = (Link, Arc<Session>, Advise);

/// What the control thread waits for.
enum Source {
    Listener,
    Finish,
    Front,
    Caller(Caller),
    Program(Arc<Session>),
}

impl Daemon {
    fn start(setup: Setup) -> std::io::Result<Daemon> {
        let Setup { config, job, listener, door, swap, agent, front, front_pid, bell, warned, server } = setup;
        memory::raise_descriptor_limit();
        // Without the right to lock memory the manager works, but may be paged itself; `doctor` says so.
        let _ = memory::lock_all();
        let max_pool_bytes = pool_cap(&config, swap.is_some());
        // An operator may give it more.
        let most_pool_bytes = match config.control {
            Some(_) => {
                pool_cap(&JobConfig { max_pool: config.ram.max(max_pool_bytes), ..config.clone() }, swap.is_some())
            }
            None => max_pool_bytes,
        };
        let engine = Arc::new(Zswap::new(
            Config {
                max_pool_bytes,
                accept_threshold_percent: config.accept_threshold_percent,
                compressor: config.compressor,
                zpool: config.zpool,
                enabled: config.enabled,
                shrinker_enabled: config.shrinker_enabled,
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
        let host = Arc::new(JobHost { sessions: OnceLock::new() });
        let pager = Arc::new(Pager::new(engine.clone(), host.clone())?);
        let sessions = Arc::new(Sessions::new(job, &agent, pager.clone(), groups.clone()));
        assert!(host.sessions.set(sessions.clone()).is_ok(), "set once, here");
        let (advice, questions) = mpsc::channel();
        let daemon = Daemon {
            config,
            job,
            listener,
            door: door.map(Arc::new),
            agent,
            front,
            front_pid,
            bell,
            engine,
            pager,
            sessions,
            groups,
            shrink_worker,
            stop: Arc::default(),
            advice,
            epoll: Epoll::new()?,
            waiting_for: HashMap::new(),
            next_source: 0,
            warned,
            strangers: Strangers::new([Some(std::process::id() as i32), server].into_iter().flatten().collect()),
        };
        daemon.start_threads(questions)?;
        Ok(daemon)
    }

    fn start_threads(&self, questions: mpsc::Receiver<Question>) -> std::io::Result<()> {
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        for _ in 0..FAULT_THREADS {
            let pager = self.pager.clone();
            thread("faults").spawn(move || {
                let error = pager.serve().expect_err("serves for ever");
                eprintln!("uzswap: error: faults cannot be served: {error}");
                std::process::abort();
            })?;
        }
        let watch = Arc::new(Watch::new(self.pager.clone(), self.sessions.clone(), self.groups.clone()));
        let taker = Taker { pager: self.pager.clone(), groups: self.groups.clone() };
        let reclaimer = Reclaimer::new(self.shrink_worker.clone(), watch.clone(), taker.clone(), self.stop.clone());
        thread("reclaim").spawn(move || reclaimer.run())?;
        let (worker, stop) = (self.shrink_worker.clone(), self.stop.clone());
        thread("shrink").spawn(move || worker.run(&stop))?;
        if let Some(trigger) = pressure::trigger() {
            let (groups, worker, stop) = (self.groups.clone(), self.shrink_worker.clone(), self.stop.clone());
            thread("pressure").spawn(move || pressure::listen(&trigger, &groups, &worker, &stop))?;
        }
        let (looks, stop) = (watch.clone(), self.stop.clone());
        thread("watch").spawn(move || looks.run(&stop))?;
        let (looks, stop) = (watch.clone(), self.stop.clone());
        thread("register").spawn(move || looks.register(&stop))?;
        let (pager, stop) = (self.pager.clone(), self.stop.clone());
        thread("reap").spawn(move || {
            while !stop.load(Relaxed) {
                pager.reap();
                std::thread::sleep(REAP_PAUSE);
            }
        })?;
        if let Some(door) = self.door.clone() {
            let machine = JobMachine {
                config: self.config.clone(),
                job: self.job,
                front_pid: self.front_pid,
                engine: self.engine.clone(),
                pager: self.pager.clone(),
                sessions: self.sessions.clone(),
                groups: self.groups.clone(),
                watch: watch.clone(),
                taker: taker.clone(),
                shrink_worker: self.shrink_worker.clone(),
                parameters: JobMachine::first_parameters(&self.config),
            };
            thread("door").spawn(move || door.serve(&machine))?;
        }
        let (pager, again) = (self.pager.clone(), self.advice.clone());
        thread("advice").spawn(move || {
            for (link, session, advise) in questions {
                if follow(&pager, &session, &advise) {
                    // The program may have gone away meanwhile.
                    let _ = link.send(&[kind::ADVISED], None);
                } else {
                    std::thread::sleep(ADVICE_PAUSE);
                    let _ = again.send((link, session, advise));
                }
            }
        })?;
        Ok(())
    }

    fn control(&mut self) -> i32 {
        for source in [Source::Listener, Source::Finish, Source::Front] {
            self.wait_for(source);
        }
        // Programs wait for it to begin.
        let _ = thread::ask_for_promptness();
        self.bell.ring_ready();
        let mut last_sweep = Instant::now();
        let mut last_stats = Instant::now();
        loop {
            let ready = self.epoll.wait(100).expect("epoll works");
            for number in ready {
                let Some(source) = self.waiting_for.remove(&number) else { continue };
                match source {
                    Source::Listener => self.accept(number),
                    Source::Finish => return self.finish(),
                    Source::Front => return self.avenge_front(),
                    Source::Caller(caller) => {
                        self.epoll.remove(caller.as_raw_fd());
                        self.hear(caller);
                    }
                    Source::Program(session) => {
                        self.epoll.remove(session.pidfd.as_raw_fd());
                        self.sessions.end(&session);
                    }
                }
            }
            if last_sweep.elapsed() > Duration::from_millis(100) {
                self.sessions.sweep();
                self.look_for_strangers();
                last_sweep = Instant::now();
            }
            if self.config.stats.is_some() && last_stats.elapsed() > Duration::from_secs(1) {
                self.write_stats();
                last_stats = Instant::now();
            }
        }
    }

    fn wait_for(&mut self, source: Source) {
        let fd = match &source {
            Source::Listener => self.listener.as_raw_fd(),
            Source::Finish => self.bell.finish().as_raw_fd(),
            Source::Front => self.front.as_raw_fd(),
            Source::Caller(caller) => caller.as_raw_fd(),
            Source::Program(session) => session.pidfd.as_raw_fd(),
        };
        let number = self.next_source;
        self.next_source += 1;
        // Fails only for want of kernel memory; then this source is lost, which the sweep makes good for programs.
        if self.epoll.add(fd, number).is_ok() {
            self.waiting_for.insert(number, source);
        }
    }

    fn accept(&mut self, number: u64) {
        while let Ok(Some(link)) = self.listener.accept() {
            if let Some(caller) = self.sessions.greet(link) {
                self.wait_for(Source::Caller(caller));
            }
        }
        self.epoll.rearm(self.listener.as_raw_fd(), number).expect("it was added");
        self.waiting_for.insert(number, Source::Listener);
    }

    fn hear(&mut self, caller: Caller) {
        match self.sessions.hear(caller) {
            Call::Later(caller) => self.wait_for(Source::Caller(caller)),
            Call::Joined(session) => self.wait_for(Source::Program(session)),
            Call::Asked(link, session, advise) => {
                self.advice.send((link, session, advise)).expect("the advice thread runs as long as the manager");
            }
            Call::Unmanaged(pid, why) => self.unmanaged(pid, &why),
            Call::Over => {}
        }
    }

    fn look_for_strangers(&mut self) {
        if self.warned && !self.config.require {
            return;
        }
        if let Some((pid, why)) = self.strangers.look(self.front_pid, |pid| self.sessions.has(pid)) {
            self.unmanaged(pid, &why);
        }
    }

    /// A process cannot be managed: one warning for the job, or the end of it.
    fn unmanaged(&mut self, pid: i32, why: &str) {
        if self.config.require {
            eprintln!("uzswap: error: process {pid} cannot be managed ({why}), which --require forbids");
            executioner::kill_job(Manner::AtOnce, self.job, None, &[pid], &[std::process::id() as i32]);
        } else if !std::mem::replace(&mut self.warned, true) {
            eprintln!("uzswap: warning: process {pid} runs unmanaged: {why}; `uzswap doctor` may tell how to mend it");
        }
    }

    /// The front is dead, and with it whoever would guard the job: it ends here.
    fn avenge_front(&self) -> i32 {
        // First, because nobody does it if we are killed, too.
        front::remove_agent(&self.agent);
        self.door.iter().for_each(|door| door.remove_name());
        let known: Vec<i32> = self.sessions.all().iter().map(|session| session.pid).collect();
        executioner::kill_job(Manner::StopFirst, self.job, None, &known, &[std::process::id() as i32]);
        eprintln!("uzswap: error: `uzswap run` was killed; killed its job");
        1
    }

    fn finish(&self) -> i32 {
        self.stop.store(true, Relaxed);
        front::remove_agent(&self.agent);
        if self.config.stats.is_some() {
            self.write_stats();
        }
        self.door.iter().for_each(|door| door.let_finish());
        if !self.config.quiet {
            eprintln!("{}", self.stats().summary(&self.shrink_worker.peak()));
        }
        0
    }

    fn stats(&self) -> Stats {
        Stats::now(&self.groups, self.engine.counters())
    }

    /// Writes the statistics file anew, so that a reader finds the old or the new one whole.
    fn write_stats(&self) {
        let Some(path) = &self.config.stats else { return };
        let mut temporary = path.clone().into_os_string();
        temporary.push(".new");
        let written =
            std::fs::write(&temporary, self.stats().to_json()).and_then(|()| std::fs::rename(&temporary, path));
        if let Err(error) = written {
            eprintln!("uzswap: warning: statistics file {}: {error}", path.display());
        }
    }
}

/// Follows a program's hint; tells whether that is done.
fn follow(pager: &Pager, session: &Session, advise: &Advise) -> bool {
    let range = range_of(advise);
    match advise.advice {
        Advice::PageOut => {
            // An error is that of a program that is going away.
            let _ = pager.refresh(&session.space).and_then(|()| pager.page_out(&session.space, range));
        }
        Advice::Cold => pager.make_cold(&session.space, range),
        Advice::Exclude => return pager.exclude(&session.space, range),
    }
    true
}

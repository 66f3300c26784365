//! The processes of a job: how they come under management, what they ask for, how they leave.
//!
//! One process has one session at a time. A program that executes another one begins a new session; the old memory goes
//! when its worker has been dismissed and nobody else uses it.
//!
//! **Which process.** A connection says nothing before it has given a job's token. The process at its other end is the one that
//! the kernel names. The memory that this process has is opened, and both userfaultfds are proven to be of this memory, and
//! the program to have it (`Pager::adopt`, `Memory::is_of`). The descriptor stays with the memory, so what the process
//! executes afterwards is not looked at: it begins a session of its own, or has none.
//!
//! A new process is in the group of the one that it came from: of its own earlier session, if it has executed another program;
//! else of its nearest ancestor that has a session. One whose ancestors have all ended is known by its process group
//! and its session in the system's sense, which it has inherited. One that was moved before it had a session is where it was
//! moved to, and so are its children. Children that a process had before it was moved stay where they were.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use uzswap_engine::PAGE_SIZE;
use uzswap_proto::{Advise, GREETING_WORDS, Hello, Job, called, greeting, kind, step};
use uzswap_vm::closing::{Handed, User};
use uzswap_vm::pager::Pager;
use uzswap_vm::range::Range;
use uzswap_vm::space::{Space, Worker};
use uzswap_vm::sys::link::{Link, Received, is_pidfd, is_userfaultfd, peer_handle};
use uzswap_vm::sys::pagemap::Pagemap;
use uzswap_vm::sys::process::{
    Identity, Kinship, Memory, PidFd, ancestors, children, field, has_memory_of, is_shortage, lineage, share_memory,
};
use uzswap_vm::sys::thread::{self, Processor};
use uzswap_vm::sys::threads::Threads;
use uzswap_vm::sys::uffd::Uffd;
use uzswap_vm::visit::Visit;

use crate::charge::Charge;
use crate::control::{Error, GroupId, MayLeave};
use crate::descriptors;
use crate::executioner::{Manner, Order};
use crate::groups::Groups;
use crate::jobs::{Jobs, Tenant};
use crate::quota::{Quota, Ticket};

/// A process under management.
#[derive(Debug)]
pub struct Session {
    /// Its number, never used again.
    pub id: u64,
    /// The process.
    pub pid: i32,
    /// A handle on it.
    pub pidfd: Arc<PidFd>,
    /// Its memory.
    pub space: Arc<Space>,
    /// The job that it is of.
    pub tenant: Arc<Tenant>,
    /// Whether it came from a fork and has not executed another program since.
    pub forked: bool,
    /// How often its mappings were to be registered, and how often of these it was done.
    refreshes: [AtomicU64; 2],
    /// Tells that it waits for the thread that registers its mappings.
    pub awaits_registration: AtomicBool,
    /// It was stopped with its group, and was not let go on since.
    stopped: AtomicBool,
    /// When its mappings may be registered next.
    refresh_at: Mutex<Option<Instant>>,
    /// When the last registration of its mappings began that was finished.
    refreshed_at: Mutex<Option<Instant>>,
    charge: RwLock<Arc<Charge>>,
    worker_pid: i32,
    statm: File,
    /// Its threads, for the brake.
    pub threads: Threads,
    /// What it shares, if it is forked.
    pub share: Share,
}

/// How much of a forked process's memory is others' share, as far as is known. Pages that a fork left shared are resident once,
/// however many processes map them.
#[derive(Debug)]
pub struct Share {
    /// In bytes. At first all is its parent's; what it has come to have since this was measured is its own.
    bytes: AtomicU64,
    begun: Instant,
    /// When to measure that again, in microseconds since it began; `u64::MAX` as long as somebody is to do it.
    due: AtomicU64,
}

impl Share {
    fn new(bytes: u64) -> Share {
        /// How soon it is measured first, in microseconds: the sooner the less there is to walk over. Most children execute a program first.
        const SOONEST: u64 = 2_000;
        const LATEST: u64 = 20_000;
        const PAGE_TAKES: u64 = 2;
        let due = (SOONEST + bytes / PAGE_SIZE as u64 * PAGE_TAKES).min(LATEST);
        Share { bytes: AtomicU64::new(bytes), begun: Instant::now(), due: AtomicU64::new(due) }
    }

    /// In bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Whether it is time to measure it. Whoever is told so sees to it: nobody else is, until [`Session::measure_share`].
    pub fn is_due(&self) -> bool {
        let due = self.due.load(Relaxed);
        due <= self.now() && self.due.compare_exchange(due, u64::MAX, Relaxed, Relaxed).is_ok()
    }

    /// It could not be seen to.
    pub fn put_off(&self) {
        self.due.store(self.now(), Relaxed);
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_micros() as u64
    }
}

impl Session {
    /// The account of its group.
    pub fn charge(&self) -> Arc<Charge> {
        self.charge.read().clone()
    }

    /// Asks for its mappings to be registered; gives the number of the request.
    pub fn ask_refresh(&self) -> u64 {
        self.refreshes[0].fetch_add(1, Relaxed) + 1
    }

    /// Asks for the same, unless an earlier request is still to be done.
    pub fn ask_refresh_unless_asked(&self) {
        if self.is_refreshed(self.refreshes_asked()) {
            self.ask_refresh();
        }
    }

    /// How often that was asked for.
    pub fn refreshes_asked(&self) -> u64 {
        self.refreshes[0].load(Relaxed)
    }

    /// Notes that all requests up to this one are done.
    pub fn note_refresh(&self, request: u64) {
        self.refreshes[1].fetch_max(request, Relaxed);
    }

    /// Notes how much of a processor it took to register the mappings. It is next done when no more than one in so many parts of the time
    /// will have been spent on it.
    pub fn note_refresh_cost(&self, cost: Duration) {
        const SHARE: u32 = 5;
        *self.refresh_at.lock() = Some(Instant::now() + cost * (SHARE - 1));
    }

    /// Registers what the process has mapped. False if that is to be done again: the worker is late, it was done a moment ago at a high cost, or
    /// the address space has just become noisy.
    ///
    /// # Errors
    /// The process is going away.
    pub fn refresh(&self, pager: &Pager) -> std::io::Result<bool> {
        if !self.may_be_refreshed() {
            return Ok(false);
        }
        let (asked, begun, started) = (self.refreshes_asked(), thread::processor_time(), Instant::now());
        let done = pager.refresh(&self.space);
        if *done.as_ref().unwrap_or(&true) {
            *self.refreshed_at.lock() = Some(started);
            self.note_refresh(asked);
        }
        if self.space.is_noisy() {
            self.note_refresh_cost(thread::processor_time().saturating_sub(begun));
        }
        done
    }

    /// As [`refresh`](Self::refresh), also for an address space that becomes noisy by it: another user's jobs may wait for the calling thread.
    pub fn refresh_at_once(&self, pager: &Pager) -> std::io::Result<bool> {
        match self.refresh(pager) {
            Ok(false) => self.refresh(pager),
            done => done,
        }
    }

    /// Returns whether the mappings may be registered again by now.
    pub fn may_be_refreshed(&self) -> bool {
        self.refresh_at.try_lock().is_some_and(|at| at.is_none_or(|at| at <= Instant::now()))
    }

    /// Whether reclaim may have passed over memory since `since`, because threads of the manager have not registered it. Not where they
    /// wait for the worker, or leave the process alone.
    pub fn is_unregistered_since(&self, since: Instant) -> bool {
        // The thread that registers tens of thousands of mappings keeps the state locked for long.
        let is_late = self.space.is_shunned() || self.space.awaits_answer() == Some(true);
        !is_late && self.refreshed_at.lock().is_none_or(|at| at < since)
    }

    /// Whether a request is done.
    pub fn is_refreshed(&self, request: u64) -> bool {
        self.refreshes[1].load(Relaxed) >= request
    }

    /// Stops the process if its group, or one above it, is frozen; else lets it go on.
    fn stop_or_go_on(&self) {
        loop {
            let frozen = self.charge().is_frozen();
            self.stopped.store(frozen, Relaxed);
            // It may have ended just now.
            let _ = self.pidfd.kill(if frozen { libc::SIGSTOP } else { libc::SIGCONT });
            // Another thread may have sent the other signal before this one.
            if self.charge().is_frozen() == frozen {
                break;
            }
        }
    }

    /// Resident anonymous pages; 0 once the process is gone.
    pub fn anon_pages(&self) -> u64 {
        anon_pages(&self.statm)
    }

    /// Measures its share anew. That walks over its whole memory and waits for its layout to stand still; it is next due when no more
    /// than one in `rarity` parts of the time will have been spent on it.
    pub fn measure_share(&self, rarity: u32) {
        let _visit = self.space.visit();
        let start = self.share.now();
        self.share.bytes.store(self.shared_bytes().unwrap_or(0), Relaxed);
        let end = self.share.now();
        self.share.due.store(end + (end - start) * u64::from(rarity), Relaxed);
    }

    /// Returns how many bytes of its anonymous memory other processes account for. Both figures come from the same walk of the kernel's.
    /// Compared with a count taken after the walk, pages loaded during it would pass for shared, and would not be charged.
    fn shared_bytes(&self) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.worker_pid)).ok()?;
        let kib = |name| field(&text, name)?.parse::<u64>().ok();
        Some(kib("Anonymous:")?.saturating_sub(kib("Pss_Anon:")?) << 10)
    }

    /// Whether the process still runs in this memory.
    pub fn is_current(&self) -> bool {
        !self.pidfd.has_ended() && has_memory_of(self.pid, self.worker_pid).unwrap_or(true)
    }
}

/// A connection that has not become a session yet.
#[derive(Debug)]
pub enum Caller {
    /// Has said nothing yet.
    Silent(Link),
    /// Has given the token of a job, and been greeted. The manager's own job has as many as it likes.
    Greeted(Arc<Tenant>, Link, Option<Ticket>),
}

impl Caller {
    /// The user that has connected.
    pub fn user(&self) -> User {
        match self {
            Caller::Silent(link) | Caller::Greeted(_, link, _) => link.user(),
        }
    }
}

impl AsRawFd for Caller {
    fn as_raw_fd(&self) -> i32 {
        match self {
            Caller::Silent(link) | Caller::Greeted(_, link, _) => link.as_raw_fd(),
        }
    }
}

/// What a caller's message came to.
#[derive(Debug)]
pub enum Call {
    /// More is to come.
    Later(Caller),
    /// A process has come under management.
    Joined(Arc<Session>),
    /// A process asks something of its memory and waits for the answer.
    Asked(Link, Arc<Session>, Advise, Option<Ticket>),
    /// A process of a job cannot be managed, for this reason. It is proven to be of the job, or not named.
    Unmanaged(Arc<Tenant>, Option<Arc<PidFd>>, String),
    /// Nothing more to do.
    Over,
}

/// All sessions of all jobs.
#[derive(Debug)]
pub struct Sessions {
    jobs: Arc<Jobs>,
    greeting: [u64; GREETING_WORDS],
    device: Option<File>,
    pager: Arc<Pager>,
    groups: Arc<Groups>,
    list: RwLock<List>,
    /// Everything has been brought back: who comes now is told to go on alone.
    released: AtomicBool,
    /// The last session that was looked at by a sweep.
    swept: AtomicU64,
    /// Connections that have been greeted, and have not introduced themselves.
    greeted: Arc<Quota>,
    /// Connections that wait for a hint to be followed.
    asking: Arc<Quota>,
    /// Processes that were moved and have no session.
    moved: Arc<Quota>,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    by_pid: HashMap<i32, Arc<Session>>,
    /// The processes without a session that are not in the group that they would be in as heirs.
    moved: HashMap<i32, Moved>,
    /// The last of them, known by its number, that was looked at by a sweep.
    swept: i32,
}

/// Where a process without a session was moved to.
#[derive(Debug)]
struct Moved {
    process: MovedProcess,
    job: Job,
    charge: Arc<Charge>,
    /// It was stopped with its group when it had a session, and was not let go on since.
    stopped: AtomicBool,
}

/// How a process that was moved is known. A descriptor for each could be all that the manager has: so a user has some, and further ones are
/// known by their identity.
#[derive(Debug)]
enum MovedProcess {
    Handle { process: PidFd, _ticket: Option<Ticket> },
    Number { pid: i32, identity: Identity },
}

impl MovedProcess {
    fn has_ended(&self) -> bool {
        match self {
            MovedProcess::Handle { process, .. } => process.has_ended(),
            MovedProcess::Number { pid, identity } => Identity::of(*pid) != Some(*identity),
        }
    }

    /// Lets it go on after a stop. An error is that of a process that has ended.
    fn go_on(&self) -> std::io::Result<()> {
        match self {
            MovedProcess::Handle { process, .. } => process.kill(libc::SIGCONT),
            MovedProcess::Number { pid, .. } => {
                let process = PidFd::open(*pid)?;
                // The number may be another process's.
                if self.has_ended() { Ok(()) } else { process.kill(libc::SIGCONT) }
            }
        }
    }
}

impl List {
    /// The session of a process that lives: the number of one that has ended may be another's.
    fn living(&self, pid: i32) -> Option<&Arc<Session>> {
        self.by_pid.get(&pid).filter(|session| !session.pidfd.has_ended())
    }

    /// Where a living process was moved to.
    fn moved(&self, pid: i32) -> Option<Arc<Charge>> {
        self.moved_if(pid, |_| true)
    }

    /// As [`moved`](Self::moved), for a process of this job only: the process of another may have become the leader of one of its families, or
    /// have had its number before it.
    fn moved_in(&self, job: Job, pid: i32) -> Option<Arc<Charge>> {
        self.moved_if(pid, |moved| moved.job == job)
    }

    fn moved_if(&self, pid: i32, counts: impl Fn(&Moved) -> bool) -> Option<Arc<Charge>> {
        self.moved
            .get(&pid)
            .filter(|moved| counts(moved) && !moved.process.has_ended())
            .map(|moved| moved.charge.clone())
    }

    /// Forgets those that have ended of the next few that are known by their numbers, and of all others.
    fn forget_ended(&mut self) {
        const SOME: usize = 64;
        let mut numbers: Vec<i32> =
            self.moved.iter().filter(|(_, moved)| moved.is_known_by_number()).map(|(pid, _)| *pid).collect();
        numbers.sort_unstable();
        let start = numbers.partition_point(|pid| *pid <= self.swept);
        let next = &numbers[start..numbers.len().min(start + SOME)];
        self.swept = next.last().copied().unwrap_or(0);
        self.moved.retain(|pid, moved| {
            (moved.is_known_by_number() && next.binary_search(pid).is_err()) || !moved.process.has_ended()
        });
    }
}

impl Moved {
    /// Lets the process go on if it was stopped with its group, and that is frozen no longer.
    fn go_on_unless_frozen(&self) {
        if !self.charge.is_frozen() && self.stopped.swap(false, Relaxed) {
            let _ = self.process.go_on();
        }
    }

    fn is_known_by_number(&self) -> bool {
        matches!(self.process, MovedProcess::Number { .. })
    }
}

impl Sessions {
    /// No sessions yet. `agent` is the library that their processes have loaded.
    pub fn new(jobs: Arc<Jobs>, agent: &Path, pager: Arc<Pager>, groups: Arc<Groups>) -> Sessions {
        // Handed to workers, so that a process that changed user can still open a userfaultfd.
        let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok();
        let greeting = greeting(agent.as_os_str().as_bytes());
        let (list, released, swept) = (RwLock::default(), AtomicBool::new(false), AtomicU64::new(0));
        let [greeted, asking, moved] = [(); 3].map(|()| Quota::of_connections(descriptors::limit()));
        Sessions { jobs, greeting, device, pager, groups, list, released, swept, greeted, asking, moved }
    }

    /// As [`Sessions::new`], with so many connections of a user that are greeted at once.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn with_quota(jobs: Arc<Jobs>, agent: &Path, pager: Arc<Pager>, groups: Arc<Groups>, most: usize) -> Sessions {
        Sessions { greeted: Quota::new(most), device: None, ..Sessions::new(jobs, agent, pager, groups) }
    }

    /// Connections of all users that are greeted.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn greeted_now(&self) -> usize {
        self.greeted.count()
    }

    /// Every session.
    pub fn all(&self) -> Vec<Arc<Session>> {
        // Called by a thread that must not wait for a writer who waits for another reader.
        self.list.read_recursive().by_pid.values().cloned().collect()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.list.read().by_pid.len()
    }

    /// The sessions of a job.
    pub fn of_job(&self, job: Job) -> Vec<Arc<Session>> {
        self.list.read().by_pid.values().filter(|session| session.tenant.job == job).cloned().collect()
    }

    /// Returns an order to kill a job, in which its processes that are under management and their workers are known.
    pub fn kill_order(&self, manner: Manner, tenant: &Tenant, spared: &[i32]) -> Order {
        let sessions = self.of_job(tenant.job);
        let living = sessions.iter().filter_map(|session| Some((session, session.pidfd.identity()?)));
        let (workers, known): (Vec<_>, Vec<_>) =
            living.map(|(session, identity)| ((session.pid, session.worker_pid), (session.pid, identity))).unzip();
        Order::new(manner, tenant.job, None, known, spared).with_workers(&workers).of_owner(tenant.uid)
    }

    /// Returns the session of process `pid`.
    pub fn of_pid(&self, pid: i32) -> Option<Arc<Session>> {
        self.list.read().by_pid.get(&pid).cloned()
    }

    /// Returns the account of a process, if it has a session or was moved, and whether it is under management.
    pub fn whereabouts(&self, pid: i32) -> (Option<Arc<Charge>>, bool) {
        let list = self.list.read();
        if let Some(session) = list.living(pid) {
            return (Some(session.charge()), true);
        }
        (list.moved(pid), false)
    }

    /// The session whose memory is `space`.
    pub fn of_space(&self, space: u64) -> Option<Arc<Session>> {
        self.list.read().by_pid.values().find(|session| session.space.id == space).cloned()
    }

    /// From now on nobody is taken under management.
    pub fn release(&self) {
        self.released.store(true, Relaxed);
    }

    /// Whether all go on alone.
    pub fn are_released(&self) -> bool {
        self.released.load(Relaxed)
    }

    /// Hears what a caller has to say.
    pub fn hear(&self, caller: Caller) -> Call {
        match caller {
            Caller::Silent(link) => match link.receive(Duration::ZERO) {
                Ok(Some(received)) => self.first_message(link, &received),
                Ok(None) => Call::Later(Caller::Silent(link)),
                Err(_) => Call::Over,
            },
            Caller::Greeted(tenant, link, ticket) => match link.receive(Duration::ZERO) {
                Ok(Some(received)) => self.introduction(tenant, link, received),
                Ok(None) => Call::Later(Caller::Greeted(tenant, link, ticket)),
                Err(_) => Call::Over,
            },
        }
    }

    fn first_message(&self, mut link: Link, received: &Received) -> Call {
        if let Some(tenant) = called(&received.words).and_then(|token| self.jobs.get(token)) {
            if self.released.load(Relaxed) {
                let _ = link.send(&[kind::RELEASE], None);
                return Call::Over;
            }
            // A worker that is not greeted lets its program run unmanaged.
            let Ok(ticket) = counted(&tenant, &self.greeted) else { return Call::Over };
            let device = self.device.as_ref().map(AsRawFd::as_raw_fd);
            // Its next message has some. They are the job's user's, whatever other users its processes are.
            link.hand_to(User::Of(tenant.uid));
            link.let_descriptors_pass(true);
            return match link.send(&self.greeting, device) {
                Ok(()) => Call::Later(Caller::Greeted(tenant, link, ticket)),
                Err(_) => Call::Over,
            };
        }
        let Some(advise) = Advise::decode(&received.words) else { return Call::Over };
        let session = link.peer().ok().and_then(|peer| self.list.read().by_pid.get(&peer).cloned());
        let session = session.filter(|session| session.tenant.job.token == advise.token);
        let Some(session) = session else { return Call::Over };
        // A hint that is not followed is only a hint.
        let Ok(ticket) = counted(&session.tenant, &self.asking) else { return Call::Over };
        Call::Asked(link, session, advise, ticket)
    }

    /// What a worker says of itself: HELLO, or FAILED.
    fn introduction(&self, tenant: Arc<Tenant>, link: Link, mut received: Received) -> Call {
        link.let_descriptors_pass(false);
        let [kind::FAILED, step, errno] = received.words[..] else {
            return Hello::decode(&received.words)
                .filter(Hello::is_sound)
                .map_or(Call::Over, |hello| self.hello(tenant, link, hello, received));
        };
        let first = received.descriptors.drain(..).next().filter(|_| !tenant.owner.is_shunned());
        let program = first.filter(is_pidfd).and_then(Handed::into_prompt).map(PidFd::from);
        let worker = peer_handle(&link).ok();
        let alike = |one: &PidFd, other: &PidFd| {
            // It waits for a process that executes a program.
            let _visit = Visit::of_process(one.pid()?, &tenant.owner);
            share_memory(one.pid()?, other.pid()?).ok()
        };
        let program =
            program.filter(|program| worker.as_ref().and_then(|worker| alike(program, worker)).unwrap_or(false));
        let process = [program, worker].into_iter().flatten().find_map(|process| proven(&tenant, Arc::new(process)));
        let what = match step {
            step::USERFAULTFD => "userfaultfd",
            _ => "pidfd_open",
        };
        let error = std::io::Error::from_raw_os_error(errno as i32);
        Call::Unmanaged(tenant, process, format!("{what}: {error}"))
    }

    fn hello(&self, tenant: Arc<Tenant>, link: Link, hello: Hello, mut received: Received) -> Call {
        if !matches!(&received.descriptors[..], [uffd, trash, program] if is_userfaultfd(uffd) && is_userfaultfd(trash) && is_pidfd(program))
        {
            return Call::Over;
        }
        let descriptors = std::mem::take(&mut received.descriptors);
        let Ok([uffd, trash, program]) = <[Handed; 3]>::try_from(descriptors) else { return Call::Over };
        let Ok(worker_pid) = link.peer() else { return Call::Over };
        let Some(pidfd) = program.into_prompt().map(PidFd::from) else {
            return Call::Over;
        };
        let Some(pid) = pidfd.pid() else { return Call::Over };
        // The client's may be a handle on a thread (PIDFD_THREAD), with the number and the end of that.
        let Ok(own) = PidFd::open(pid) else { return Call::Over };
        if own.inode() != pidfd.inode() || pidfd.has_ended() {
            return Call::Over;
        }
        let pidfd = Arc::new(own);
        if tenant.owner.is_shunned() {
            let _ = link.send(&[kind::EXIT], None);
            let process = proven(&tenant, pidfd);
            return Call::Unmanaged(tenant, process, "processes of its user hold up threads of the manager".to_owned());
        }
        let _visit = Visit::of_process(pid, &tenant.owner);
        // The memory is opened last: what was opened before it may be of an earlier one, but never of a later one.
        let opened = Pagemap::open(worker_pid)
            .and_then(|pagemap| Ok((Arc::new(pagemap), Memory::open(worker_pid, hello.staging_proof())?)));
        let (pagemap, memory) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                // Not a worker yet that says goodbye by itself.
                let _ = link.send(&[kind::EXIT], None);
                let text = format!("/proc/PID/mem and /proc/PID/pagemap: {error}");
                let process = peer_handle(&link).ok().and_then(|worker| proven(&tenant, Arc::new(worker)));
                return Call::Unmanaged(tenant, process, text);
            }
        };
        let (trash, processor) = (trash.into(), Processor::default());
        let process = pidfd.clone();
        let worker = Worker { link, pid: worker_pid, program: pid, process, memory, pagemap, hello, trash, processor };
        self.join(tenant, worker, uffd.into(), pidfd)
    }

    fn join(&self, tenant: Arc<Tenant>, worker: Worker, uffd: Uffd, pidfd: Arc<PidFd>) -> Call {
        let (worker_pid, pid, forked) = (worker.pid, worker.program, worker.hello.forked);
        let (Ok(statm), Ok(threads)) = (File::open(format!("/proc/{worker_pid}/statm")), Threads::open(pid)) else {
            return Call::Over;
        };
        let claimed = if forked { self.pager.claim(worker) } else { Err(Box::new(worker)) };
        let space = match claimed.unwrap_or_else(|worker| self.adopt(&tenant, *worker, uffd)) {
            Ok(space) => space,
            // A worker that lies.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Call::Over,
            Err(error) => {
                let process = proven(&tenant, pidfd);
                return Call::Unmanaged(tenant, process, error.to_string());
            }
        };
        // A handle on another's process would have that one pay, be moved and be killed in place of its own.
        let is_its_own = space.worker().is_some_and(|worker| worker.is_of_program());
        if !is_its_own || pidfd.has_ended() {
            self.pager.dismiss(&space);
            return Call::Over;
        }
        // No group is removed while the list is locked.
        let (heir, mut list) = loop {
            let group = self.groups.of_engine(space.account().group());
            let heir = group.unwrap_or_else(|| self.heir_of(&tenant, pid));
            let list = self.list.write();
            if self.groups.has(&heir) {
                break (heir, list);
            }
        };
        // From here on the process is known by its number, which another's may be as soon as it has ended.
        if pidfd.has_ended() {
            drop(list);
            self.pager.dismiss(&space);
            return Call::Over;
        }
        // It may have been moved since it was asked whose heir it is.
        let moved = list.moved_in(tenant.job, pid);
        list.moved.remove(&pid);
        let before = list.living(pid).map(|session| session.charge());
        let charge = moved.or(before).unwrap_or(heir);
        list.next += 1;
        space.charge_to(charge.clone());
        let charge = RwLock::new(charge);
        let id = list.next;
        let share = Share::new(if forked { anon_pages(&statm) * PAGE_SIZE as u64 } else { 0 });
        let session = Arc::new(Session {
            id,
            pid,
            pidfd,
            space,
            tenant,
            forked,
            refreshes: Default::default(),
            awaits_registration: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            refresh_at: Default::default(),
            refreshed_at: Default::default(),
            charge,
            worker_pid,
            statm,
            threads,
            share,
        });
        let old = list.by_pid.insert(pid, session.clone());
        drop(list);
        if session.charge().is_frozen() {
            session.stop_or_go_on();
        }
        self.groups.watch_bell.ring();
        self.pager.let_run(&session.space);
        if let Some(old) = old {
            self.pager.dismiss(&old.space);
        }
        Call::Joined(session)
    }

    fn adopt(&self, tenant: &Tenant, worker: Worker, uffd: Uffd) -> std::io::Result<Arc<Space>> {
        let heir = self.heir_of(tenant, worker.program);
        self.pager.adopt(worker, uffd, heir, tenant.owner.clone())
    }

    /// The account of a process of a job that has no session yet, or whose program has executed another.
    fn heir_of(&self, tenant: &Tenant, pid: i32) -> Arc<Charge> {
        let list = self.list.read();
        // Whatever the front itself is part of is another job.
        let ancestors = ancestors(pid).take_while(|pid| *pid != tenant.front_pid);
        let family = Kinship::of(pid).map(|kin| [kin.group, kin.session]).into_iter().flatten();
        let known = ancestors.chain(family).find_map(|pid| {
            let session = || list.by_pid.get(&pid).filter(|session| session.tenant.job == tenant.job);
            list.moved_in(tenant.job, pid).or_else(|| Some(session()?.charge()))
        });
        // A group that was removed had no processes any more. Then the nearest above it counts.
        self.groups.nearest(&known.unwrap_or_else(|| tenant.charge.clone()))
    }

    /// Does `act` if no living process is in a group: none comes meanwhile.
    ///
    /// # Errors
    /// There are some, or what `act` says.
    pub fn if_empty(&self, group: GroupId, act: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let list = self.list.write();
        let has_session =
            list.by_pid.values().any(|session| session.charge().id == group && !session.pidfd.has_ended());
        let has_moved = list.moved.values().any(|moved| moved.charge.id == group && !moved.process.has_ended());
        if has_session || has_moved { Err(Error::Busy) } else { act() }
    }

    /// The living processes that were moved to a group and have no session yet.
    pub fn moved_to(&self, group: GroupId) -> Vec<i32> {
        let list = self.list.read();
        let moved = list.moved.iter().filter(|(_, moved)| moved.charge.id == group && !moved.process.has_ended());
        moved.map(|(pid, _)| *pid).collect()
    }

    /// The account of a process; None if it is of no job.
    pub fn charge_of(&self, pid: i32) -> Option<Arc<Charge>> {
        let list = self.list.read();
        let known = list.living(pid).map(|session| session.charge()).or_else(|| list.moved(pid));
        drop(list);
        known.or_else(|| Some(self.heir_of(&*self.tenant_of(pid)?, pid)))
    }

    /// Stops the processes of a group and of those below it, or lets them go on: as the group, or one above it, is frozen or not.
    pub fn stop_or_go_on(&self, group: GroupId) {
        // `end` waits for this lock: it notes whether a process that executes another program was stopped here.
        let list = self.list.read();
        let sessions = list.by_pid.values().filter(|session| session.charge().is_below(group));
        sessions.for_each(|session| session.stop_or_go_on());
        list.moved.values().filter(|moved| moved.charge.is_below(group)).for_each(Moved::go_on_unless_frozen);
    }

    /// The job that a process is of, by its ancestors.
    fn tenant_of(&self, pid: i32) -> Option<Arc<Tenant>> {
        self.jobs.of_descendant(lineage(pid)?.into_iter().skip(1))
    }

    /// Moves a process of a job to another group, if it may leave the one that it is in: from now on the other pays. All that is said of the
    /// process is said while it lives: its number may be that of another user's afterwards.
    ///
    /// # Errors
    /// There is no such process, or it may not leave.
    pub fn move_process(&self, pid: i32, charge: &Arc<Charge>, may_leave: &MayLeave<'_>) -> Result<(), Error> {
        let process =
            PidFd::open(pid).map_err(|error| if is_shortage(&error) { Error::Again } else { Error::NoProcess })?;
        let session = self.list.read().living(pid).cloned();
        let tenant = session.map(|session| session.tenant.clone()).or_else(|| self.tenant_of(pid));
        let tenant = tenant.ok_or(Error::NoProcess)?;
        may_leave(self.charge_of(pid).ok_or(Error::NoProcess)?.id)?;
        self.leave_children(pid, &tenant);
        let mut list = self.list.write();
        if !self.groups.has(charge) {
            return Err(Error::Gone);
        }
        // It may have been moved meanwhile.
        let now = list.living(pid).map(|session| session.charge()).or_else(|| list.moved(pid));
        now.map_or(Ok(()), |charge| may_leave(charge.id))?;
        if process.has_ended() {
            return Err(Error::NoProcess);
        }
        let Some(session) = list.living(pid) else {
            let stopped = list.moved.get(&pid).is_some_and(|moved| moved.stopped.load(Relaxed));
            self.note_moved(&mut list, &tenant, process, pid, charge.clone(), stopped);
            list.moved.get(&pid).into_iter().for_each(Moved::go_on_unless_frozen);
            return Ok(());
        };
        let before = std::mem::replace(&mut *session.charge.write(), charge.clone());
        self.groups.watch_bell.ring();
        session.space.charge_to(charge.clone());
        if before.is_frozen() != charge.is_frozen() {
            session.stop_or_go_on();
        }
        Ok(())
    }

    /// Notes where a process without a session was moved to, and whether it was stopped with its group.
    fn note_moved(
        &self,
        list: &mut List,
        tenant: &Tenant,
        handle: PidFd,
        pid: i32,
        charge: Arc<Charge>,
        stopped: bool,
    ) {
        list.moved.remove(&pid);
        let process = match counted(tenant, &self.moved) {
            Ok(_ticket) => MovedProcess::Handle { process: handle, _ticket },
            Err(()) => {
                let Some(identity) = handle.identity() else { return };
                MovedProcess::Number { pid, identity }
            }
        };
        list.moved.insert(pid, Moved { process, job: tenant.job, charge, stopped: AtomicBool::new(stopped) });
    }

    /// Has the children of a process that have no session yet stay in its group when it leaves: they would be taken for its heirs
    /// where it is then.
    fn leave_children(&self, pid: i32, tenant: &Tenant) {
        let Some(charge) = self.charge_of(pid) else { return };
        for child in children(pid) {
            let Ok(process) = PidFd::open(child) else { continue };
            // The child may have ended since it was listed, and its number be another process's.
            let is_child = Kinship::of(child).is_some_and(|now| now.parent == pid) && !process.has_ended();
            let mut list = self.list.write();
            let is_known = list.moved(child).is_some() || list.living(child).is_some();
            if is_child && !is_known {
                self.note_moved(&mut list, tenant, process, child, charge.clone(), false);
            }
        }
    }

    /// Ends the sessions whose processes have ended, or execute another program that has not joined.
    ///
    /// One call looks at some of them, and the next at the next: who has ended is heard of anyway.
    pub fn sweep(&self) {
        const SOME: usize = 8;
        let swept = self.swept.load(Relaxed);
        let next: Vec<Arc<Session>> = {
            let list = self.list.read();
            let mut next: Vec<&Arc<Session>> = list.by_pid.values().filter(|session| session.id > swept).collect();
            let last =
                (next.len() > SOME).then(|| next.select_nth_unstable_by_key(SOME - 1, |session| session.id).1.id);
            self.swept.store(last.unwrap_or(0), Relaxed);
            next.into_iter().take(SOME).cloned().collect()
        };
        for session in next.iter().filter(|session| !session.space.is_shunned()) {
            let _visit = session.space.visit();
            if !session.is_current() {
                self.end(session);
            }
        }
        self.list.write().forget_ended();
    }

    /// Ends a session. It is listed until its program has been killed, where that cannot go on without its worker.
    pub fn end(&self, session: &Session) {
        self.pager.dismiss(&session.space);
        let mut list = self.list.write();
        if list.by_pid.get(&session.pid).is_some_and(|current| current.id == session.id) {
            list.by_pid.remove(&session.pid);
            let stopped = session.stopped.load(Relaxed);
            // It executes another program, which is in the same group when it joins, if it does.
            if let Some(process) = PidFd::open(session.pid).ok().filter(|_| !session.pidfd.has_ended()) {
                self.note_moved(&mut list, &session.tenant, process, session.pid, session.charge(), stopped);
            } else if stopped {
                // For want of a descriptor it is not known any more when its group is to go on.
                let _ = session.pidfd.kill(libc::SIGCONT);
            }
        }
    }
}

/// Whether a process is of a job: it descends from its front, which adopts orphans.
pub fn is_of(tenant: &Tenant, pid: i32) -> bool {
    lineage(pid).is_some_and(|line| line[1..].contains(&tenant.front_pid)) && tenant.has_front()
}

/// Returns the handle if its process is of the job. A client can have a handle on any process of the system, and the number of
/// a process that has ended may be another's.
fn proven(tenant: &Tenant, process: Arc<PidFd>) -> Option<Arc<PidFd>> {
    let is = process.pid().is_some_and(|pid| is_of(tenant, pid)) && !process.has_ended();
    is.then_some(process)
}

/// Counts a connection of a job's among those of its user, but for the manager's own job.
///
/// # Errors
/// The user has too many.
fn counted(tenant: &Tenant, quota: &Arc<Quota>) -> Result<Option<Ticket>, ()> {
    if tenant.is_trusted() { Ok(None) } else { quota.take(tenant.uid).map(Some).ok_or(()) }
}

fn anon_pages(statm: &File) -> u64 {
    let mut text = [0; 128];
    let len = statm.read_at(&mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&text[..len]);
    let mut fields = text.split_ascii_whitespace().skip(1).map(|field| field.parse::<u64>().unwrap_or(0));
    let (resident, shared) = (fields.next().unwrap_or(0), fields.next().unwrap_or(0));
    resident.saturating_sub(shared)
}

/// The range that a program named, made of whole pages.
pub fn range_of(advise: &Advise) -> Range {
    const PAGE: u64 = uzswap_proto::PAGE_SIZE as u64;
    let start = advise.address & !(PAGE - 1);
    Range::new(start, advise.address.saturating_add(advise.len).checked_next_multiple_of(PAGE).unwrap_or(!(PAGE - 1)))
}

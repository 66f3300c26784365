//! The processes of a job: how they come under management, what they ask for, how they leave.
//!
//! One process has one session at a time. A program that executes another one begins a new session; the old memory goes
//! when its worker has been dismissed and nobody else uses it.
//!
//! A new process is in the group of the one that it came from: of its own earlier session, if it has executed another program;
//! else of its nearest ancestor that has a session. One whose ancestors have all ended is known by its process group
//! and its session in the system's sense, which it has inherited. One that was moved before it had a session is where it was
//! moved to, and so are its children.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::RwLock;
use uzswap_engine::PAGE_SIZE;
use uzswap_proto::{Advise, GREETING_WORDS, Hello, Job, greeting, kind, step};
use uzswap_vm::pager::Pager;
use uzswap_vm::range::Range;
use uzswap_vm::space::{Space, Worker};
use uzswap_vm::sys::link::{Link, Received};
use uzswap_vm::sys::process::{Kinship, Pagemap, PidFd, share_memory};
use uzswap_vm::sys::uffd::Uffd;

use crate::charge::Charge;
use crate::control::GroupId;
use crate::groups::Groups;

/// How far up a process's ancestors are looked at.
const MOST_ANCESTORS: usize = 64;

/// A process under management.
#[derive(Debug)]
pub struct Session {
    /// Its number, never used again.
    pub id: u64,
    /// The process.
    pub pid: i32,
    /// A handle on it.
    pub pidfd: PidFd,
    /// Its memory.
    pub space: Arc<Space>,
    /// Whether it came from a fork and has not executed another program since.
    pub forked: bool,
    charge: RwLock<Arc<Charge>>,
    worker_pid: i32,
    statm: File,
    /// Its resident anonymous pages when it joined.
    first_pages: u64,
}

impl Session {
    /// The account of its group.
    pub fn charge(&self) -> Arc<Charge> {
        self.charge.read().clone()
    }

    /// Stops the process if its group, or one above it, is frozen; else lets it go on.
    pub fn stop_or_go_on(&self) {
        let frozen = self.charge().path().any(|charge| charge.frozen.load(Relaxed));
        // It may have ended just now.
        let _ = self.pidfd.kill(if frozen { libc::SIGSTOP } else { libc::SIGCONT });
    }

    /// Resident anonymous pages; 0 once the process is gone.
    pub fn anon_pages(&self) -> u64 {
        anon_pages(&self.statm)
    }

    /// Resident bytes that it had from its parent when it joined.
    pub fn inherited(&self) -> u64 {
        if self.forked { self.first_pages * PAGE_SIZE as u64 } else { 0 }
    }

    /// Anonymous pages with those shared with other processes counted in part. Costs a walk over the whole memory.
    pub fn proportional_pages(&self) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.worker_pid)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss_Anon:"))?;
        Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? / 4)
    }

    /// Whether the process still runs in this memory.
    pub fn is_current(&self) -> bool {
        !self.pidfd.has_ended() && share_memory(self.pid, self.worker_pid).unwrap_or(true)
    }
}

/// A connection that has not become a session yet.
#[derive(Debug)]
pub enum Caller {
    /// Has been greeted.
    Greeted(Link),
    /// A forked process that is about to show its inherited memory by the beacon.
    Signalling(Box<Worker>, Uffd, PidFd),
}

impl AsRawFd for Caller {
    fn as_raw_fd(&self) -> i32 {
        match self {
            Caller::Greeted(link) => link.as_raw_fd(),
            Caller::Signalling(worker, ..) => worker.link.as_raw_fd(),
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
    Asked(Link, Arc<Session>, Advise),
    /// A process cannot be managed, for this reason.
    Unmanaged(i32, String),
    /// Nothing more to do.
    Over,
}

/// All sessions of a job.
#[derive(Debug)]
pub struct Sessions {
    job: Job,
    greeting: [u64; GREETING_WORDS],
    device: Option<File>,
    pager: Arc<Pager>,
    groups: Arc<Groups>,
    list: RwLock<List>,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    by_pid: HashMap<i32, Arc<Session>>,
    /// Where processes without a session were moved to.
    moved: HashMap<i32, (PidFd, Arc<Charge>)>,
}

impl Sessions {
    /// No sessions yet. `agent` is the library that their processes have loaded.
    pub fn new(job: Job, agent: &Path, pager: Arc<Pager>, groups: Arc<Groups>) -> Sessions {
        // Handed to workers, so that a process that changed user can still open a userfaultfd.
        let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok();
        let (greeting, list) = (greeting(agent.as_os_str().as_bytes()), RwLock::default());
        Sessions { job, greeting, device, pager, groups, list }
    }

    /// Every session.
    pub fn all(&self) -> Vec<Arc<Session>> {
        // Called by a thread that must not wait for a writer who waits for another reader.
        self.list.read_recursive().by_pid.values().cloned().collect()
    }

    /// Whether process `pid` is under management.
    pub fn has(&self, pid: i32) -> bool {
        self.list.read().by_pid.contains_key(&pid)
    }

    /// The session whose memory is `space`.
    pub fn of_space(&self, space: u64) -> Option<Arc<Session>> {
        self.list.read().by_pid.values().find(|session| session.space.id == space).cloned()
    }

    /// Greets a new connection.
    pub fn greet(&self, link: Link) -> Option<Caller> {
        link.send(&self.greeting, self.device.as_ref().map(AsRawFd::as_raw_fd)).ok()?;
        Some(Caller::Greeted(link))
    }

    /// Hears what a caller has to say.
    pub fn hear(&self, caller: Caller) -> Call {
        match caller {
            Caller::Greeted(link) => match link.receive(Duration::ZERO) {
                Ok(Some(received)) => self.first_message(link, received),
                Ok(None) => Call::Later(Caller::Greeted(link)),
                Err(_) => Call::Over,
            },
            Caller::Signalling(worker, uffd, program) => match worker.link.receive(Duration::ZERO) {
                Ok(Some(received)) if received.words == [kind::BEACON_DONE] => self.join(*worker, uffd, program),
                Ok(None) => Call::Later(Caller::Signalling(worker, uffd, program)),
                _ => Call::Over,
            },
        }
    }

    fn first_message(&self, link: Link, received: Received) -> Call {
        let Ok(peer) = link.peer() else { return Call::Over };
        if let Some(hello) = Hello::decode(&received.words).filter(|hello| hello.token == self.job.token) {
            return self.hello(link, peer, hello, received.descriptors);
        }
        if let Some(advise) = Advise::decode(&received.words).filter(|advise| advise.token == self.job.token) {
            let session = self.list.read().by_pid.get(&peer).cloned();
            return session.map_or(Call::Over, |session| Call::Asked(link, session, advise));
        }
        match received.words[..] {
            [kind::FAILED, token, step, errno, pid] if token == self.job.token => {
                let what = match step {
                    step::USERFAULTFD => "userfaultfd",
                    _ => "pidfd_open",
                };
                let error = std::io::Error::from_raw_os_error(errno as i32);
                Call::Unmanaged(pid as i32, format!("{what}: {error}"))
            }
            _ => Call::Over,
        }
    }

    fn hello(&self, link: Link, worker_pid: i32, hello: Hello, descriptors: Vec<OwnedFd>) -> Call {
        let Ok([uffd, trash, program]) = <[OwnedFd; 3]>::try_from(descriptors) else { return Call::Over };
        let program = PidFd::from(program);
        let pagemap = match Pagemap::open(worker_pid) {
            Ok(pagemap) => pagemap,
            Err(error) => {
                // Not a worker yet that says goodbye by itself.
                let _ = link.send(&[kind::EXIT], None);
                return Call::Unmanaged(worker_pid, format!("/proc/PID/pagemap: {error}"));
            }
        };
        let worker = Worker { link, pid: worker_pid, pagemap, hello, trash: trash.into() };
        if hello.forked {
            return Call::Later(Caller::Signalling(Box::new(worker), uffd.into(), program));
        }
        self.join(worker, uffd.into(), program)
    }

    fn join(&self, worker: Worker, uffd: Uffd, pidfd: PidFd) -> Call {
        let (worker_pid, forked) = (worker.pid, worker.hello.forked);
        let (Some(pid), Ok(statm)) = (pidfd.pid(), File::open(format!("/proc/{worker_pid}/statm"))) else {
            return Call::Over;
        };
        if !share_memory(pid, worker_pid).unwrap_or(true) {
            return Call::Over;
        }
        let claimed = if forked { self.pager.claim(worker) } else { Err(worker) };
        let space = match claimed.unwrap_or_else(|worker| self.pager.adopt(worker, uffd, self.heir_of(pid))) {
            Ok(space) => space,
            Err(error) => return Call::Unmanaged(pid, error.to_string()),
        };
        let mut list = self.list.write();
        // It may have been moved since it was asked whose heir it is.
        let moved = list.moved.remove(&pid).map(|(_, charge)| charge);
        let before = list.by_pid.get(&pid).filter(|session| !session.pidfd.has_ended()).map(|session| session.charge());
        let charge = moved.or(before).unwrap_or_else(|| self.groups.of_engine(space.account().group()));
        list.next += 1;
        space.charge_to(charge.clone());
        let charge = RwLock::new(charge);
        let (id, first_pages) = (list.next, anon_pages(&statm));
        let session = Arc::new(Session { id, pid, pidfd, space, forked, charge, worker_pid, statm, first_pages });
        let old = list.by_pid.insert(pid, session.clone());
        drop(list);
        if session.charge().path().any(|charge| charge.frozen.load(Relaxed)) {
            session.stop_or_go_on();
        }
        self.groups.watch_bell.ring();
        self.pager.let_run(&session.space);
        if let Some(old) = old {
            self.pager.dismiss(&old.space);
        }
        Call::Joined(session)
    }

    /// The account of a process that has no session yet, or whose program has executed another.
    fn heir_of(&self, pid: i32) -> Arc<Charge> {
        let list = self.list.read();
        let ancestors = std::iter::successors(Some(pid), |pid| Some(Kinship::of(*pid)?.parent)).take(MOST_ANCESTORS);
        let family = Kinship::of(pid).map(|kin| [kin.group, kin.session]).into_iter().flatten();
        let known = ancestors.chain(family).find_map(|pid| {
            let moved = list.moved.get(&pid).filter(|(pidfd, _)| !pidfd.has_ended());
            moved.map(|(_, charge)| charge.clone()).or_else(|| Some(list.by_pid.get(&pid)?.charge()))
        });
        // A group that was removed meanwhile had no processes any more.
        known.and_then(|charge| self.groups.get(charge.id)).unwrap_or_else(|| self.groups.root())
    }

    /// The living processes that were moved to a group and have no session yet.
    pub fn moved_to(&self, group: GroupId) -> Vec<i32> {
        let list = self.list.read();
        let moved = list.moved.iter().filter(|(_, (pidfd, charge))| charge.id == group && !pidfd.has_ended());
        moved.map(|(pid, _)| *pid).collect()
    }

    /// Moves a process of the job, which descends from `front`, to another group: from now on that pays. False if there is no
    /// such process.
    pub fn move_process(&self, pid: i32, front: i32, charge: &Arc<Charge>) -> bool {
        let mut list = self.list.write();
        let Some(session) = list.by_pid.get(&pid) else {
            let mut ancestors = std::iter::successors(Some(pid), |pid| Some(Kinship::of(*pid)?.parent)).skip(1);
            let pidfd = PidFd::open(pid).ok().filter(|_| ancestors.any(|ancestor| ancestor == front));
            let known = pidfd.is_some();
            list.moved.extend(pidfd.map(|pidfd| (pid, (pidfd, charge.clone()))));
            return known;
        };
        let before = std::mem::replace(&mut *session.charge.write(), charge.clone());
        self.groups.watch_bell.ring();
        session.space.charge_to(charge.clone());
        let frozen = |charge: &Charge| charge.path().any(|charge| charge.frozen.load(Relaxed));
        if frozen(&before) != frozen(charge) {
            session.stop_or_go_on();
        }
        true
    }

    /// Ends the sessions whose processes have ended, or execute another program that has not joined.
    pub fn sweep(&self) {
        let ended: Vec<Arc<Session>> = self.all().into_iter().filter(|session| !session.is_current()).collect();
        for session in ended {
            self.end(&session);
        }
        self.list.write().moved.retain(|_, (pidfd, _)| !pidfd.has_ended());
    }

    /// Ends a session.
    pub fn end(&self, session: &Session) {
        let mut list = self.list.write();
        if list.by_pid.get(&session.pid).is_some_and(|current| current.id == session.id) {
            list.by_pid.remove(&session.pid);
            // It executes another program, which is in the same group when it joins, if it does.
            let lives = PidFd::open(session.pid).ok().filter(|_| !session.pidfd.has_ended());
            list.moved.extend(lives.map(|pidfd| (session.pid, (pidfd, session.charge()))));
        }
        drop(list);
        self.pager.dismiss(&session.space);
    }
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

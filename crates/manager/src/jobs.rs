//! The jobs of a manager: who began them, where they belong, what they are told.
//!
//! 1. `uzswap run` has one job, that of the root group, and ends with it. A daemon has those that have joined it.
//! 2. A job is known by its token, which only its own processes have; its group is where they begin, and where they fall
//!    back to.
//! 3. A job that has joined has a connection (see `front`) that ends with its front, however that ends. A job that is taken off the
//!    list gets no processes any more: those that still come are killed by their workers.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use rustix::process::getppid;
use uzswap_proto::Job;
use uzswap_proto::control::{Answer, BYE, RELEASED};
use uzswap_vm::log::{log, one_line};
use uzswap_vm::owner::Owner;
use uzswap_vm::sys::link::Peer;
use uzswap_vm::sys::process::PidFd;

use crate::charge::Charge;

/// A job.
#[derive(Debug)]
pub struct Tenant {
    /// Its name and token.
    pub job: Job,
    /// The process that began it, from which all of it descends. The number is that process's while [`Tenant::has_front`].
    pub front_pid: i32,
    /// A handle on that process; `None` for the manager's own job, which ends with its front.
    front: Option<PidFd>,
    /// The user who did.
    pub uid: u32,
    /// The same job, as far as its processes may cost those of others.
    pub owner: Arc<Owner>,
    /// Where its processes begin.
    pub charge: Arc<Charge>,
    /// It would rather die than have a process that is not managed.
    pub require: bool,
    /// Its group goes when it does.
    pub transient: bool,
    /// The connection to a front that has joined.
    link: Option<UnixStream>,
    /// Whether the warning that something runs unmanaged has been given.
    pub warned: AtomicBool,
    /// Processes of uzswap below the front: no part of the job.
    pub spared: Vec<i32>,
}

/// What a front says, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Nothing yet.
    None,
    /// Nothing of the job is left.
    Bye,
    /// It is gone without a word.
    Lost,
}

impl Tenant {
    /// The job that `front` has begun, in the group of `charge`; `spared` are processes of ours. One that has joined has a
    /// connection and a handle on its front.
    pub fn new(
        job: Job,
        front: Peer,
        owner: Arc<Owner>,
        charge: Arc<Charge>,
        joined: Option<(UnixStream, PidFd)>,
        spared: Vec<i32>,
    ) -> Tenant {
        let Peer { pid: front_pid, uid } = front;
        let (link, front) = joined.unzip();
        let warned = AtomicBool::new(false);
        Tenant { job, front_pid, front, uid, owner, charge, require: false, transient: false, link, warned, spared }
    }

    /// Whether its front lives. A process can pass the connection on and end: its number may be another's then.
    pub fn has_front(&self) -> bool {
        self.front.as_ref().is_none_or(|front| !front.has_ended())
    }

    /// The handle to wait on for the end of its front.
    pub fn front(&self) -> Option<RawFd> {
        self.front.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Lets its front go on, if that has stopped.
    ///
    /// # Errors
    /// The front has ended.
    pub fn let_front_go_on(&self) -> io::Result<()> {
        match &self.front {
            Some(front) => front.kill(libc::SIGCONT),
            None => {
                let front = PidFd::open(self.front_pid)?;
                // It is the parent of this process, the manager, as long as it lives.
                let is_parent = getppid().is_some_and(|parent| parent.as_raw_nonzero().get() == self.front_pid);
                if is_parent { front.kill(libc::SIGCONT) } else { Err(io::ErrorKind::NotFound.into()) }
            }
        }
    }

    /// Whether what its processes say of themselves may be believed: it has not joined, but is the manager's own job.
    pub fn is_trusted(&self) -> bool {
        self.link.is_none()
    }

    /// The connection to wait on.
    pub fn link(&self) -> Option<RawFd> {
        self.link.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Tells the user, and the log of a daemon, on one line.
    pub fn tell(&self, text: &str) {
        let text = one_line(&format!("uzswap: {text}"));
        log(&text);
        // A front that does not listen does not hear.
        let _ = self.send(0, &text);
    }

    /// Tells the front that its job runs on without a manager.
    pub fn release(&self) -> io::Result<()> {
        self.send(RELEASED, "")
    }

    /// Answers the request by which the job joins.
    pub fn welcome(&self, text: &str) -> io::Result<()> {
        self.send(0, text)
    }

    /// The last word, to a front that has said goodbye.
    pub fn farewell(&self, text: &str) {
        // It may not have waited.
        let _ = self.send(0, text);
        if let Some(link) = &self.link {
            let _ = link.shutdown(Shutdown::Both);
        }
    }

    fn send(&self, kind: u32, text: &str) -> io::Result<()> {
        let Some(mut link) = self.link.as_ref() else { return Ok(()) };
        let header = Answer { errno: kind, text: text.len() }.encode().ok_or(io::ErrorKind::InvalidInput)?;
        link.write_all(&[&header[..], text.as_bytes()].concat())
    }

    /// Hears the front.
    pub fn hear(&self) -> Word {
        let Some(mut link) = self.link.as_ref() else { return Word::None };
        let mut byte = [0];
        match link.read(&mut byte) {
            Ok(1) if byte[0] == BYE => Word::Bye,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Word::None,
            _ => Word::Lost,
        }
    }

    /// Whether the warning that something runs unmanaged is still to be given; from now on it is not.
    pub fn is_to_be_warned(&self) -> bool {
        !self.warned.swap(true, Relaxed)
    }
}

/// All jobs.
#[derive(Debug)]
pub struct Jobs {
    /// What all their names are.
    pub name: u64,
    list: RwLock<HashMap<u64, Arc<Tenant>>>,
    /// The users that have jobs, or had.
    owners: Mutex<HashMap<u32, Weak<Owner>>>,
}

impl Jobs {
    /// No jobs yet, of a manager that listens under this name.
    pub fn new(name: u64) -> Jobs {
        Jobs { name, list: RwLock::default(), owners: Mutex::default() }
    }

    /// A job of user `uid` that has joined, as the owner of its processes.
    pub fn owner(&self, uid: u32) -> Arc<Owner> {
        let mut owners = self.owners.lock();
        owners.retain(|_, owner| owner.strong_count() > 0);
        let known = owners.get(&uid).and_then(Weak::upgrade);
        let user = known.unwrap_or_else(|| {
            let user = Arc::new(Owner::user());
            owners.insert(uid, Arc::downgrade(&user));
            user
        });
        Arc::new(Owner::job_of(user))
    }

    /// The job of that token.
    pub fn get(&self, token: u64) -> Option<Arc<Tenant>> {
        self.list.read().get(&token).cloned()
    }

    /// Every job.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        self.list.read().values().cloned().collect()
    }

    /// Takes a job in.
    pub fn add(&self, tenant: Arc<Tenant>) {
        self.list.write().insert(tenant.job.token, tenant);
    }

    /// Takes a job off the list.
    pub fn remove(&self, token: u64) {
        self.list.write().remove(&token);
    }

    /// The job that a process belongs to, by its ancestors.
    pub fn of_descendant(&self, ancestors: impl Iterator<Item = i32>) -> Option<Arc<Tenant>> {
        let all = self.all();
        let mut fronts = ancestors.filter_map(|pid| all.iter().find(|tenant| tenant.front_pid == pid));
        // Asked last: by then the number was still that of the front.
        fronts.next().filter(|tenant| tenant.has_front()).cloned()
    }
}

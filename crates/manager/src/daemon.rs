//! `uzswap daemon`: the process that stands for a manager without a job of its own, and guards the jobs that join.
//!
//! 1. It clones the manager into a process that shares its descriptor table (see `front`): so it holds every userfaultfd, and if
//!    the manager dies it kills all jobs, whose faults wait meanwhile. If both die at once the workers do.
//! 2. Signals come here: those that mean the end are passed on to the manager, which may refuse; SIGHUP has the
//!    configuration read again.
//!
//! It has one thread.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use uzswap_vm::log::log;
use uzswap_vm::sys::job::{self, Child, Signals};
use uzswap_vm::sys::link::Listener;
use uzswap_vm::sys::process::PidFd;

use crate::door::Door;
use crate::executioner;
use crate::manager::{Serves, Setup, become_manager};
use crate::{JobConfig, RunError, agent_file, create_swap, front, random};

/// Where jobs and operators come in.
#[derive(Debug)]
pub enum Entrance {
    /// A socket to be opened under this name, with this mode.
    Name(PathBuf, u32),
    /// A socket that has been opened by who has started the daemon.
    Open(UnixListener),
}

/// What the daemon tells who has started it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// Jobs may come.
    Ready,
    /// SIGHUP: the configuration is to be read again.
    Reload,
    /// The end has begun.
    Stopping,
}

const STOPS: [i32; 2] = [libc::SIGTERM, libc::SIGINT];

/// Runs a daemon with the library `agent` for its jobs; gives its exit status: 0, or 125 if the manager died.
///
/// # Errors
/// What has kept it from starting.
pub fn run_daemon(
    config: &JobConfig,
    entrance: Entrance,
    agent: &[u8],
    news: &mut dyn FnMut(News),
) -> Result<i32, RunError> {
    let failed = |what: &'static str| move |error: std::io::Error| RunError::setup(format!("{what}: {error}"));
    let name = random()?;
    let swap = create_swap(config, name)?;
    let listener = Listener::bind_name(name).map_err(failed("the socket for processes"))?;
    let front_pid = std::process::id() as i32;
    let front = PidFd::open(front_pid).map_err(failed("pidfd_open"))?;
    let bell = front::Bell::new().map_err(failed("eventfd"))?;
    let door = match entrance {
        Entrance::Name(path, mode) => {
            let why = |why| RunError::setup(format!("the control socket {}: {why}", path.display()));
            Door::open(&path, mode).map_err(why)?
        }
        Entrance::Open(listener) => Door::listen(listener).map_err(failed("the control socket"))?,
    };
    let agent = agent_file::place(agent, name).map_err(failed("the agent cannot be placed"))?;
    let listeners = agent_file::listeners(listener, &agent);
    let signals = Signals::block(&[&STOPS[..], &[libc::SIGHUP, libc::SIGCHLD]].concat());
    let manager = job::clone_sharing_descriptors()
        .inspect_err(|_| front::remove_agent(&agent))
        .map_err(failed("the manager cannot be cloned"))?;
    if manager == 0 {
        let (config, door, serves) = (config.clone(), Some(door), Serves::All);
        become_manager(Setup { config, name, listeners, door, swap, agent, front, front_pid, bell, serves });
    }
    let mut is_ready = false;
    loop {
        let signal =
            signals.wait(Duration::from_millis(if is_ready { 1000 } else { 10 })).map(|signal| signal.number());
        if !is_ready && bell.is_ready() {
            is_ready = true;
            news(News::Ready);
        }
        while let Some((pid, child)) = job::collect_child() {
            let (true, Child::Ended(status)) = (pid == manager, child) else { continue };
            if status == 0 {
                return Ok(0);
            }
            if !is_ready {
                front::remove_agent(&agent);
                return Err(RunError::setup("the manager could not start".into()));
            }
            let killed = executioner::kill_jobs_of(name, &[front_pid]);
            front::remove_agent(&agent);
            door.remove_name();
            log(&format!("uzswap: error: the manager died (status {status}); killed all jobs ({killed} processes)"));
            return Ok(front::STATUS_LOST);
        }
        match signal {
            Some(libc::SIGHUP) if is_ready => news(News::Reload),
            Some(signal) if STOPS.contains(&signal) => {
                news(News::Stopping);
                bell.ring_finish();
            }
            _ => {}
        }
    }
}

//! Groups, limits, policies, sessions: what stands between the command line and the engine.
//!
//! [`run_job`] is what `uzswap run` calls: it runs one program under an embedded manager. Two processes of ours take
//! part: the front (`front.rs`), which the user started, and the manager (`manager.rs`). [`run_daemon`] has a manager for many
//! jobs, whose fronts join it by [`run_joined`].

mod daemon;
mod front;
mod manager;
mod retire;

mod jobs;

pub mod control;
pub mod control_fs;
mod door;
mod machine;
mod outside;

mod advice;
mod reception;
mod sessions;
mod silent;
mod watchdog;

mod descriptors;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod quota;

mod bell;
mod brake;
mod charge;
mod groups;
mod oom;
mod pressure;
mod reclaim;
mod shrink;
mod stall;
mod traced;
mod turns;
mod watch;

mod swap_file;

mod stats;

mod environment;
mod executioner;
mod kill_queue;

mod agent_file;
mod program;
mod unmanaged;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use std::os::unix::net::UnixStream;

use crate::control_fs::ControlFs;
use crate::door::Door;
use crate::manager::{Serves, Setup, become_manager};
use crate::swap_file::DiskSwapFile;

pub use crate::daemon::{Entrance, News, run_daemon};
pub use crate::stats::write_whole;
pub use crate::swap_file::SwapFaults;
pub use uzswap_vm::swapin::Swapin;

use uzswap_engine::{Compressor, Zpool};
use uzswap_proto::Job;
use uzswap_vm::log::log;
use uzswap_vm::sys::job;
use uzswap_vm::sys::link::Listener;
use uzswap_vm::sys::process::PidFd;

/// The smallest `memory.max` and `memory.high`, in bytes, wherever they are set. Below it no program
/// makes progress: a process start alone touches about 1 MiB, and reclaim needs room to work.
pub const MEMORY_MAX_LEAST: u64 = 4 << 20;

/// Where pages go that leave the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwapConfig {
    /// No swap file: nothing is ever written back.
    None,
    /// A swap file that grows as needed.
    File {
        /// A path to create, or `None` for a file under `/var/tmp`. Unlinked as soon as it exists.
        path: Option<PathBuf>,
        /// The most it may grow to, in bytes; `None` for as much as the file system gives.
        size: Option<u64>,
    },
}

/// Everything `uzswap run` can be told, already parsed and checked. Sizes are in bytes.
#[derive(Debug, Clone)]
pub struct JobConfig {
    /// `memory.max`: resident anonymous memory plus compressed pool of the job.
    pub memory_max: Option<u64>,
    /// `memory.high`: reclaim starts here.
    pub memory_high: Option<u64>,
    /// Cap on the compressed pool.
    pub max_pool: u64,
    /// Percent of the cap at which the pool accepts again.
    pub accept_threshold_percent: u8,
    /// Codec for new stores.
    pub compressor: Compressor,
    /// Allocator for new stores.
    pub zpool: Zpool,
    /// Whether pages are stored in the pool at all.
    pub enabled: bool,
    /// Whether memory pressure writes back before the pool is full.
    pub shrinker_enabled: bool,
    /// Whether checksums of stored pages are kept and checked.
    pub verify: bool,
    /// How many pages a fault brings.
    pub swapin: Swapin,
    /// The swap file.
    pub swap: SwapConfig,
    /// For tests: accesses to the swap file that fail.
    pub swap_faults: Option<SwapFaults>,
    /// The machine's memory, or the enclosing cgroup's limit if that is smaller: what `max_pool_percent` refers to.
    pub ram: u64,
    /// Where the manager listens for operators. An absolute path.
    pub control: Option<PathBuf>,
    /// The job finds the control tree as files, where the kernel has its own.
    pub control_fs: bool,
    /// Variables that the program does not inherit.
    pub not_inherited: Vec<String>,
    /// Where to write the counters as JSON, at the end and every second.
    pub stats: Option<PathBuf>,
    /// No summary on stderr.
    pub quiet: bool,
    /// Refuse programs that cannot be managed instead of running them unmanaged.
    pub require: bool,
}

impl JobConfig {
    /// The cap on the pool as the kernel has it: in percent of RAM, the nearest.
    pub fn max_pool_percent(&self) -> u8 {
        percent(self.max_pool, self.ram)
    }
}

/// What part of `whole` a part is, to the nearest percent.
fn percent(part: u64, whole: u64) -> u8 {
    let whole = u128::from(whole.max(1));
    ((u128::from(part) * 100 + whole / 2) / whole).min(100) as u8
}

/// Why a job did not start.
#[derive(Debug)]
pub struct RunError {
    /// One line: what failed, on what, and what to do.
    pub message: String,
    /// What `uzswap` exits with: 1 if --control-fs cannot be had, 2 for usage and set-up, 126 for not executable, 127 for not found.
    pub exit_status: i32,
}

impl RunError {
    fn setup(message: String) -> RunError {
        RunError { message, exit_status: 2 }
    }
}

/// Runs `command` under the limits of `config`, with the library `agent` preloaded into it and its descendants.
///
/// Returns the exit status that `uzswap run` is to end with: the program's own, 128+N if signal N killed it, or 125 if
/// uzswap itself failed and the job had to be killed.
pub fn run_job(config: &JobConfig, agent: &[u8], command: &[OsString]) -> Result<i32, RunError> {
    let (path, warned) = find_program(&command[0], config.require)?;
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| RunError::setup(format!("{what}: {error}"))
    };
    let (name, token) = (random()?, random()?);
    let job = Job { name, token };
    let swap = create_swap(config, name)?;
    let listener = Listener::bind_name(name).map_err(failed("the job's socket"))?;
    let front_pid = std::process::id() as i32;
    let front = PidFd::open(front_pid).map_err(failed("pidfd_open"))?;
    let bell = front::Bell::new().map_err(failed("eventfd"))?;
    let agent = agent_file::place(agent, name).map_err(failed("the agent cannot be placed"))?;
    let listeners = agent_file::listeners(listener, &agent);
    let mut config = config.clone();
    if config.control_fs {
        // What serves the files needs a socket, even if nobody else does.
        config.control.get_or_insert_with(|| agent_file::socket_beside(&agent));
    }
    let opened = config.control.as_deref().map(open_door).transpose().and_then(|door| {
        let socket = config.control.as_deref().filter(|_| config.control_fs);
        Ok((door, socket.map(ControlFs::start).transpose()?))
    });
    let (door, control_fs) = opened.inspect_err(|_| front::remove_agent(&agent))?;
    let server = control_fs.as_ref().map(|control_fs| control_fs.server);
    let signals = front::block_signals();
    job::become_subreaper().map_err(failed("prctl"))?;
    let manager = job::clone_sharing_descriptors()
        .inspect_err(|_| front::remove_agent(&agent))
        .map_err(failed("the manager cannot be cloned"))?;
    if manager == 0 {
        let (config, serves) = (config.clone(), Serves::Job { job, warned, server });
        become_manager(Setup { config, name, listeners, door, swap, agent, front, front_pid, bell, serves });
    }
    let (socket, not_inherited) = (config.control.clone(), config.not_inherited.clone());
    let program = front::Program { path, command: command.to_vec(), agent, job, socket, not_inherited };
    let status = front::run(&program, manager, control_fs, &bell, &signals);
    front::remove_agent(&program.agent);
    status
}

/// A job that has joined a daemon.
#[derive(Debug)]
pub struct JoinedJob {
    /// Its connection.
    pub link: UnixStream,
    /// Its name and secret.
    pub job: Job,
    /// The daemon's agent.
    pub agent: PathBuf,
    /// Where the daemon listens for operators.
    pub socket: PathBuf,
    /// No summary on stderr.
    pub quiet: bool,
}

/// Whether `command` can be run under a daemon. To be asked before the job joins.
///
/// # Errors
/// It is not to be found, or cannot be managed and must be.
pub fn check_program(command: &[OsString], require: bool) -> Result<PathBuf, RunError> {
    find_program(&command[0], require).map(|(path, _)| path)
}

/// Runs `command`, found at `path`, under a daemon; gives the exit status that `uzswap run` is to end with, as [`run_job`] does.
/// `each_second` is called as long as it runs, and at the end.
///
/// # Errors
/// The program has not been started.
pub fn run_joined(
    joined: JoinedJob,
    path: PathBuf,
    command: &[OsString],
    each_second: &mut dyn FnMut(),
) -> Result<i32, RunError> {
    let JoinedJob { link, job, agent, socket, quiet } = joined;
    let failed = |error: std::io::Error| RunError::setup(format!("the connection to the daemon: {error}"));
    link.set_nonblocking(true).map_err(failed)?;
    let signals = front::block_signals();
    job::become_subreaper().map_err(failed)?;
    let (command, socket, not_inherited) = (command.to_vec(), Some(socket), Vec::new());
    let program = front::Program { path, command, agent, job, socket, not_inherited };
    front::run_joined(&program, link, quiet, &signals, each_second)
}

/// Finds a program, and warns if it cannot be managed; tells whether it has.
fn find_program(name: &std::ffi::OsStr, require: bool) -> Result<(PathBuf, bool), RunError> {
    let path = program::find(name)?;
    let obstacle = program::obstacle(&path);
    if let Some(obstacle) = obstacle {
        let text = format!("{}: {obstacle}: it cannot be managed", path.display());
        if require {
            return Err(RunError::setup(format!("{text}, which --require forbids")));
        }
        log(&format!("uzswap: warning: {text} and runs without a limit"));
    }
    Ok((path, obstacle.is_some()))
}

/// Creates the swap file, if there is to be one.
fn create_swap(config: &JobConfig, name: u64) -> Result<Option<DiskSwapFile>, RunError> {
    let SwapConfig::File { path, .. } = &config.swap else { return Ok(None) };
    let (swap, warnings) = swap_file::create(path.as_deref(), name, config.swap_faults)?;
    for warning in warnings {
        log(&format!("uzswap: warning: {warning}"));
    }
    Ok(Some(swap))
}

/// Opens the control socket. Its name goes when the front lets go of it: after the manager has, however that ended.
fn open_door(path: &Path) -> Result<Door, RunError> {
    Door::open(path, 0o600).map_err(|why| RunError::setup(format!("the control socket {}: {why}", path.display())))
}

/// How much of a job's memory the pool may take: what was asked for, but never so much that nothing is left to work in.
fn pool_cap(config: &JobConfig, with_swap: bool) -> u64 {
    let max = config.memory_max.unwrap_or(u64::MAX);
    // With a swap file to go to, half; without, all but a working minimum.
    let share = if with_swap { max / 2 } else { max - max / 8 - charge::margin(max) };
    config.max_pool.min(share)
}

fn random() -> Result<u64, RunError> {
    // 0 stands for no job in the agent.
    job::random().map(|number| number | 1).map_err(|error| RunError::setup(format!("getrandom: {error}")))
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

//! The process that the user started: it stands for the program towards the shell, and guards the job.
//!
//! 1. It clones the manager into a process that shares its descriptor table. So it holds every userfaultfd that the
//!    manager holds, from the moment the manager does.
//! 2. It starts the program and waits; signals sent to it go on to the program, stops are mirrored.
//! 3. If the manager dies, faults wait (the userfaultfds are still open here), and it kills the whole job.
//! 4. If it dies itself, the manager does the same. If both die at once, each worker kills its own program, whose faults
//!    wait because the worker holds a copy of the userfaultfd.
//!
//! The front of a job that has joined a daemon has a connection to it instead: when that ends it kills the job, unless
//! the daemon has brought back everything and says so. When nothing is left of the job it says so, too.
//!
//! SIGTERM goes to the program, which may take its time. A second one, a second or more after the first, is for the front: it kills
//! the whole job, programs that are traced or stopped included.
//!
//! It has one thread, and keeps nothing else open of its own but the agent's file.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use uzswap_proto::control::{ANSWER_HEADER, Answer, BYE, ENV_SOCKET, RELEASED};
use uzswap_proto::{ENV_JOB, Job};
use uzswap_vm::log::log;
use uzswap_vm::sys::file::event;
use uzswap_vm::sys::job::{self, Child, Signal, Signals};
use uzswap_vm::sys::process::{PidFd, ancestors};

use crate::control_fs::ControlFs;
use crate::executioner::{self, Manner, Order};
use crate::{RunError, agent_file};

/// The exit status when uzswap itself failed and took the job with it.
pub const STATUS_LOST: i32 = 125;

/// The exit status of what was killed.
const STATUS_KILLED: i32 = 128 + libc::SIGKILL;

/// How long a front waits for the last word of its daemon.
const WORD_PATIENCE: Duration = Duration::from_secs(2);

/// The same if the program was killed: perhaps by the guard, whose manager has died, and which keeps the connection open until all jobs are
/// dead.
const KILLED_PATIENCE: Duration = executioner::PATIENCE.saturating_add(WORD_PATIENCE);

/// How long after a SIGTERM another one kills the job. Those that come sooner are the program's, as the first is.
const TERM_PATIENCE: Duration = Duration::from_secs(1);

/// What front and manager tell each other.
pub struct Bell {
    ready: File,
    finish: File,
}

impl Bell {
    /// A pair of counters, both at 0.
    pub fn new() -> std::io::Result<Bell> {
        Ok(Bell { ready: event()?, finish: event()? })
    }

    /// The manager: programs may come.
    pub fn ring_ready(&self) {
        (&self.ready).write_all(&1u64.to_ne_bytes()).expect("an event counter takes a 1");
    }

    pub fn is_ready(&self) -> bool {
        (&self.ready).read_exact(&mut [0; 8]).is_ok()
    }

    /// The front: nothing of the job is left. A daemon's guard: it is to stop.
    pub fn ring_finish(&self) {
        (&self.finish).write_all(&1u64.to_ne_bytes()).expect("an event counter takes a 1");
    }

    /// The manager: it has been heard.
    pub fn hear_finish(&self) {
        let _ = (&self.finish).read(&mut [0; 8]);
    }

    /// What the manager waits on.
    pub fn finish(&self) -> &File {
        &self.finish
    }
}

/// The program to start.
pub struct Program {
    pub path: PathBuf,
    pub command: Vec<OsString>,
    pub agent: PathBuf,
    pub job: Job,
    /// The manager's control socket: the program is told of it.
    pub socket: Option<PathBuf>,
    /// Variables that the program does not inherit.
    pub not_inherited: Vec<String>,
}

/// Signals that a user sends to a job, and SIGRTMIN and above. Not those with which the kernel tells a process of its own mistakes, nor SIGPIPE,
/// which passes for sent by the process itself.
const FORWARDED: &[i32] = &[
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGABRT,
    libc::SIGXCPU,
    libc::SIGIO,
    libc::SIGURG,
    libc::SIGPWR,
    libc::SIGSTKFLT,
    libc::SIGWINCH,
    libc::SIGCONT,
    libc::SIGTSTP,
];

fn is_forwarded(signal: i32) -> bool {
    FORWARDED.contains(&signal) || signal >= libc::SIGRTMIN()
}

/// Blocks the signals that the front waits for. To be called before the manager is cloned, which wants none of them.
pub fn block_signals() -> Signals {
    let waited_for = (1..=libc::SIGRTMAX()).filter(|&signal| is_forwarded(signal));
    Signals::block(&waited_for.chain([libc::SIGCHLD, libc::SIGTTIN, libc::SIGTTOU]).collect::<Vec<_>>())
}

/// Runs the program beside the manager `manager`; gives the exit status for `uzswap run`.
///
/// With `control_fs`, the program finds the control tree as files.
pub fn run(
    program: &Program,
    manager: i32,
    control_fs: Option<ControlFs>,
    bell: &Bell,
    signals: &Signals,
) -> Result<i32, RunError> {
    let server = control_fs.as_ref().map(|control_fs| control_fs.server);
    let mut front = Front { manager: Some(manager), server, ..Front::new(program.job) };
    while !bell.is_ready() {
        signals.wait(Duration::from_millis(1));
        front.collect();
        if front.manager_status.is_some() {
            return Err(RunError::setup("the manager could not start".into()));
        }
    }
    control_fs.map_or(Ok(()), ControlFs::enter).inspect_err(|_| front_stop(bell, manager))?;
    front.program = Some(start(program, signals).inspect_err(|_| front_stop(bell, manager))?);
    loop {
        if let Some(status) = front.wait(signals) {
            if let Some(server) = front.server {
                // It may have ended with the last who saw its files.
                let _ = job::kill(server, libc::SIGKILL);
            }
            front_stop(bell, manager);
            return Ok(status);
        }
        if let Some(status) = front.manager_status {
            remove_agent(&program.agent);
            let killed = kill_own(program.job);
            log(&format!(
                "uzswap: error: the manager died (status {status}); killed the job ({killed} processes), whose \
                 evicted pages died with it"
            ));
            return Ok(STATUS_LOST);
        }
    }
}

/// Runs the program under a daemon; gives the exit status for `uzswap run`.
///
/// `each_second` is called as long as the daemon is there, and at the end.
pub fn run_joined(
    program: &Program,
    link: UnixStream,
    quiet: bool,
    signals: &Signals,
    each_second: &mut dyn FnMut(),
) -> Result<i32, RunError> {
    let mut front = Front::new(program.job);
    // Programs of a job that the daemon has released still load it.
    let _agent = agent_file::hold(&program.agent);
    let mut daemon = Some(Daemon { link, heard: Vec::new() });
    let started = start(program, signals);
    if started.is_err()
        && let Some(daemon) = daemon.take()
    {
        daemon.part(true, WORD_PATIENCE);
    }
    front.program = Some(started?);
    let mut last = Instant::now();
    loop {
        let status = front.wait(signals);
        match daemon.as_mut().map_or(Heard::Nothing, Daemon::hear) {
            Heard::Nothing => {}
            Heard::Text(text) => log(&text),
            Heard::Released => {
                daemon = None;
                log("uzswap: warning: the daemon has stopped; the job runs on without a limit");
            }
            Heard::Gone => return Ok(lost(program.job)),
        }
        if let Some(status) = status {
            if daemon.is_some() {
                each_second();
            }
            let patience = if status == STATUS_KILLED { KILLED_PATIENCE } else { WORD_PATIENCE };
            let answered = daemon.is_none_or(|daemon| daemon.part(quiet, patience));
            // That may be why it was killed.
            return Ok(if answered || status != STATUS_KILLED { status } else { lost(program.job) });
        }
        if daemon.is_some() && last.elapsed() > Duration::from_secs(1) {
            each_second();
            last = Instant::now();
        }
    }
}

/// Ends a job whose daemon is dead; gives the exit status.
fn lost(job: Job) -> i32 {
    kill_own(job);
    log("uzswap: error: the daemon died; killed the job, whose evicted pages died with it");
    STATUS_LOST
}

/// Kills all that descends from this process.
fn kill_own(job: Job) -> usize {
    executioner::kill(vec![Order::new(Manner::StopFirst, job, Some(std::process::id() as i32), Vec::new(), &[])])
}

/// The connection of a job that has joined.
struct Daemon {
    link: UnixStream,
    /// Of a message that has not come whole.
    heard: Vec<u8>,
}

enum Heard {
    Nothing,
    /// For the user.
    Text(String),
    Released,
    Gone,
}

impl Daemon {
    /// What the daemon has said.
    fn hear(&mut self) -> Heard {
        let mut buffer = [0; 4096];
        loop {
            if let Some((header, rest)) = self.heard.split_first_chunk::<ANSWER_HEADER>() {
                let Some(answer) = Answer::decode(*header) else { return Heard::Gone };
                if let Some((text, rest)) = rest.split_at_checked(answer.text) {
                    let (text, rest) = (String::from_utf8_lossy(text).into_owned(), rest.to_vec());
                    self.heard = rest;
                    return if answer.errno == RELEASED { Heard::Released } else { Heard::Text(text) };
                }
            }
            match self.link.read(&mut buffer) {
                Ok(count) if count > 0 => self.heard.extend_from_slice(&buffer[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    return Heard::Nothing;
                }
                _ => return Heard::Gone,
            }
        }
    }

    /// Says goodbye, and hears the last word, for which it waits so long; tells whether there was one.
    fn part(mut self, quiet: bool, patience: Duration) -> bool {
        let said = (&self.link).write_all(&[BYE]).and_then(|()| self.link.set_nonblocking(false));
        if said.is_err() || self.link.set_read_timeout(Some(patience)).is_err() {
            return false;
        }
        let mut answered = false;
        loop {
            match self.hear() {
                Heard::Text(text) => {
                    answered = true;
                    if !quiet {
                        log(&text);
                    }
                }
                // A daemon that has no time is not dead.
                Heard::Nothing | Heard::Released => return true,
                Heard::Gone => return answered,
            }
        }
    }
}

/// Lets the manager finish, and sees it off.
fn front_stop(bell: &Bell, manager: i32) {
    const PATIENCE: Duration = Duration::from_secs(10);
    bell.ring_finish();
    let started = Instant::now();
    loop {
        match job::collect_child() {
            Some((pid, Child::Ended(_))) if pid == manager => return,
            Some(_) => {}
            None if started.elapsed() > PATIENCE => {
                let _ = job::kill(manager, libc::SIGKILL);
            }
            None => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

/// Removes the agent's file and what lies beside it; a second removal is no error.
pub fn remove_agent(path: &Path) {
    agent_file::remove(path);
}

fn start(program: &Program, signals: &Signals) -> Result<i32, RunError> {
    let mut preload = agent_file::preload_name(&program.agent).into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let text = program.job.to_text();
    let mut command = Command::new(&program.path);
    command
        .arg0(&program.command[0])
        .args(&program.command[1..])
        .env("LD_PRELOAD", preload)
        .env(ENV_JOB, str::from_utf8(&text).expect("hexadecimal digits"));
    // What a program finds there is its own manager, or nothing: that of a job further out does not manage it.
    match &program.socket {
        Some(socket) => command.env(ENV_SOCKET, socket),
        None => command.env_remove(ENV_SOCKET),
    };
    for name in &program.not_inherited {
        command.env_remove(name);
    }
    signals.restore_in(&mut command);
    match command.spawn() {
        Ok(child) => Ok(child.id() as i32),
        Err(error) => {
            let shown = program.path.display();
            Err(RunError { message: format!("{shown}: cannot be executed: {error}"), exit_status: 126 })
        }
    }
}

struct Front {
    job: Job,
    /// When the first SIGTERM came.
    asked_to_end: Option<Instant>,
    /// The manager's process, if it is the job's own.
    manager: Option<i32>,
    manager_status: Option<i32>,
    /// The process that serves the job's control files.
    server: Option<i32>,
    program: Option<i32>,
    program_status: Option<i32>,
    program_stopped: bool,
    /// Whether the program was continued by another process, which then has a SIGCONT for the front as well.
    program_continued: bool,
}

impl Front {
    fn new(job: Job) -> Front {
        let (manager, manager_status, server, program, program_status) = (None, None, None, None, None);
        Front {
            job,
            asked_to_end: None,
            manager,
            manager_status,
            server,
            program,
            program_status,
            program_stopped: false,
            program_continued: false,
        }
    }

    /// Waits a while, and passes on what comes; gives the program's status when nothing of the job is left.
    fn wait(&mut self, signals: &Signals) -> Option<i32> {
        if let Some(signal) = signals.wait(Duration::from_millis(100)) {
            self.pass_on(signal);
        }
        self.collect();
        self.program_status.filter(|_| self.manager_status.is_none() && self.is_alone())
    }

    /// Takes note of children that ended, stopped, or were continued.
    fn collect(&mut self) {
        while let Some((pid, news)) = job::collect_child() {
            match news {
                Child::Ended(status) if Some(pid) == self.manager => self.manager_status = Some(status),
                Child::Ended(_) if Some(pid) == self.server => self.server = None,
                Child::Ended(status) if Some(pid) == self.program => self.program_status = Some(status),
                // Stop as the program did, so that the shell sees it.
                Child::Stopped if Some(pid) == self.program => {
                    (self.program_stopped, self.program_continued) = (true, false);
                    let _ = job::kill(std::process::id() as i32, libc::SIGSTOP);
                }
                Child::Continued if Some(pid) == self.program => {
                    self.program_continued |= std::mem::take(&mut self.program_stopped);
                }
                Child::Ended(_) | Child::Stopped | Child::Continued => {}
            }
        }
    }

    /// Whether the program is to be told of a SIGCONT. A shell continues all of the job, and the program may have been stopped
    /// anew since.
    fn passes_on_cont(&mut self) -> bool {
        self.collect();
        let told = std::mem::take(&mut self.program_continued);
        // That it is continued is then our doing.
        self.program_stopped &= told;
        !told
    }

    /// Passes a signal on to the program, unless it came from the terminal, which tells the program by itself, or from the job: such a
    /// one was sent to the program's process group, of which the front is, or to the parent that the program sees.
    fn pass_on(&mut self, signal: Signal) {
        let Some(program) = self.program else { return };
        let own = std::process::id() as i32;
        let is_from_outside = signal.sender().is_some_and(|sender| !ancestors(sender).skip(1).any(|pid| pid == own));
        if signal.number() == libc::SIGTERM && is_from_outside {
            match self.asked_to_end {
                None => self.asked_to_end = Some(Instant::now()),
                Some(first) if first.elapsed() >= TERM_PATIENCE => return self.end_job(program),
                Some(_) => {}
            }
        }
        if signal.number() == libc::SIGCONT && !self.passes_on_cont() {
            return;
        }
        if self.program_status.is_none() && is_forwarded(signal.number()) && is_from_outside {
            // It may have ended a moment ago.
            let _ = signal.pass_on(program);
        }
    }

    /// Kills every process of the job but the manager and what serves its files.
    fn end_job(&mut self, program: i32) {
        let spared: Vec<i32> = [self.manager, self.server].into_iter().flatten().collect();
        let own = std::process::id() as i32;
        // A child of this process that has not been collected.
        let known =
            PidFd::open(program).ok().and_then(|handle| Some((program, handle.identity()?))).into_iter().collect();
        let order = Order::new(Manner::StopFirst, self.job, Some(own), known, &spared);
        let killed = executioner::kill(vec![order]);
        log(&format!("uzswap: warning: a second SIGTERM: killed the job ({killed} processes)"));
        // It was collected while the job was killed.
        self.program_status.get_or_insert(STATUS_KILLED);
    }

    /// Whether nothing of the job is left but what is ours.
    fn is_alone(&self) -> bool {
        let is_ours = |pid: i32| [self.manager, self.server].contains(&Some(pid));
        let own = std::process::id();
        let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children"));
        match children {
            Ok(children) => children.split_ascii_whitespace().all(|pid| pid.parse().is_ok_and(is_ours)),
            Err(_) => executioner::descendants(own as i32).is_some_and(|all| all.into_iter().all(is_ours)),
        }
    }
}

//! Killing a whole job: when its evicted pages are lost, nothing of it may run on.
//!
//! A process belongs to the job if it descends from the job's front, or carries the job's secret in the environment it
//! was started with. Neither alone finds all: an orphan is adopted elsewhere once the front is dead, and a program can
//! overwrite its environment. To look for the secret is to read memory of every process of the machine, which any of them can make long
//! (`environment.rs`): those that are found by then are killed meanwhile.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::time::{Duration, Instant};

use uzswap_proto::{ENV_JOB, Job};
use uzswap_vm::log::log;
use uzswap_vm::sys::job;
use uzswap_vm::sys::process::{PidFd, share_memory};
use uzswap_vm::sys::thread;

use crate::environment;
use crate::quota::Ticket;

/// How long the dead may take to go.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long all processes of the machine may be searched for those of the job, before those that are known by then are killed. Each time it
/// takes longer, if it must.
const FIRST_PATIENCE: Duration = Duration::from_millis(300);

/// How to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Stop all first, so that none sees another die and does something about it.
    StopFirst,
    /// One after the other: where the front lives and is not the caller. It would take a stop for one of the program's own
    /// and stop, too, with nobody left who lets it go on.
    AtOnce,
}

/// Kills every process of the job but those in `spared`, and waits until they are gone. Gives how many there were.
///
/// `front`, if it is the caller, is the ancestor of all of them; `known` are processes known to belong.
pub fn kill_job(manner: Manner, job: Job, front: Option<i32>, known: &[i32], spared: &[i32]) -> usize {
    kill_with(manner, str::from_utf8(&job.to_text()).expect("hexadecimal digits"), front, known, spared)
}

/// Kills a job by a thread of its own, which holds `place` as long: no other job waits for that. `guard` stands for this process, the manager;
/// both are spared.
pub fn kill_aside(manner: Manner, job: Job, known: Vec<i32>, guard: i32, place: Option<Ticket>) {
    let spared = [std::process::id() as i32, guard];
    let kill = move || {
        let _place = place;
        kill_job(manner, job, None, &known, &spared);
    };
    if std::thread::Builder::new().name("kill".to_owned()).spawn(kill).is_err() {
        log("uzswap: error: there is no thread to kill a job; its workers will, when its connections end");
    }
}

/// The same with every job of the daemon of that name, at once: their fronts live.
pub fn kill_jobs_of(name: u64, spared: &[i32]) -> usize {
    kill_with(Manner::AtOnce, &format!("{name:016x}"), None, &[], spared)
}

fn kill_with(manner: Manner, secret: &str, front: Option<i32>, known: &[i32], spared: &[i32]) -> usize {
    let mut killed: HashSet<i32> = HashSet::new();
    let started = Instant::now();
    // When such a process has ended, its number may come to be another's.
    let known: Vec<(i32, PidFd)> = known.iter().filter_map(|&pid| Some((pid, PidFd::open(pid).ok()?))).collect();
    let mut patience = FIRST_PATIENCE;
    loop {
        let processes = processes();
        let known = known.iter().filter(|(_, handle)| !handle.has_ended()).map(|(pid, _)| *pid);
        let mut members: HashSet<i32> = known.filter(|pid| processes.contains_key(pid)).collect();
        members.extend(front.into_iter().flat_map(|front| descendants_in(&processes, front)));
        let mut send = |signal, members: &HashSet<i32>| {
            let alive = alive(members, spared);
            // The worker of a dead program ends by itself, but not while it is stopped, should we die before the next signal.
            let takes = |pid: &&i32| signal != libc::SIGSTOP || !is_called_worker(**pid);
            killed.extend(alive.iter().filter(takes).filter(|&&pid| job::kill(pid, signal).is_ok()));
            alive.is_empty()
        };
        // What is stopped does not see another die.
        if manner == Manner::StopFirst {
            send(libc::SIGSTOP, &members);
        }
        let prefix = format!("{ENV_JOB}={secret}").into_bytes();
        let others = processes.keys().filter(|pid| !members.contains(pid)).copied().collect();
        let (carriers, are_all) = environment::carriers(others, &prefix, Instant::now() + patience);
        members.extend(carriers);
        if manner == Manner::StopFirst {
            send(libc::SIGSTOP, &members);
        }
        let are_gone = send(libc::SIGKILL, &members);
        while front.is_some() && job::collect_child().is_some() {}
        if are_gone && are_all || started.elapsed() > PATIENCE {
            return killed.len();
        }
        patience *= 2;
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Those of `members` that are to be killed. A worker is the last to guard its program, should we die in the middle of this. It ends by itself.
fn alive(members: &HashSet<i32>, spared: &[i32]) -> Vec<i32> {
    let guards = |pid: i32, other: i32| !is_called_worker(other) && share_memory(pid, other).unwrap_or(false);
    let is_worker = |pid: i32| is_called_worker(pid) && members.iter().any(|&other| guards(pid, other));
    members.iter().copied().filter(|&pid| !spared.contains(&pid) && !is_worker(pid)).collect()
}

/// Returns the processes that trace `pid` or one of its threads, other than this one.
///
/// A killed thread that has stopped in its exit for a tracer stays until the tracer lets it go or dies; a second SIGKILL is
/// not heard.
pub fn tracers(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut tracers: Vec<i32> = threads
        .flatten()
        .filter_map(|thread| tracer_in(&fs::read_to_string(thread.path().join("status")).ok()?))
        .collect();
    tracers.sort_unstable();
    tracers.dedup();
    tracers.retain(|&tracer| !thread::is_own(tracer));
    tracers
}

fn tracer_in(status: &str) -> Option<i32> {
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
    (tracer != 0).then_some(tracer)
}

/// Lets a stopped process go on.
pub fn go_on(pid: i32) -> std::io::Result<()> {
    job::kill(pid, libc::SIGCONT)
}

/// Whether a process is stopped by a signal.
pub fn is_stopped(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:\tT "))
}

/// The processes that descend from `front`, itself not included.
pub fn descendants(front: i32) -> Vec<i32> {
    let processes = processes();
    descendants_in(&processes, front)
}

fn descendants_in(processes: &HashMap<i32, Process>, front: i32) -> Vec<i32> {
    let mut found = vec![front];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(processes.iter().filter(|(_, process)| process.parent == parent).map(|(&pid, _)| pid));
        next += 1;
    }
    found.split_off(1)
}

/// Whether a process has a worker's name; what it is called is its own choice.
pub fn is_called_worker(pid: i32) -> bool {
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"uzswap-agent\n")
}

struct Process {
    parent: i32,
}

/// All processes that are not dead.
fn processes() -> HashMap<i32, Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return HashMap::new() };
    (entries.flatten())
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            // The name, in parentheses, may hold anything.
            let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
            let (state, parent) = (fields.next()?, fields.next()?.parse().ok()?);
            (!["Z", "X"].contains(&state)).then_some((pid, Process { parent }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracer_is_read_from_a_status() {
        assert_eq!(tracer_in("Name:\tx\nTracerPid:\t0\nUid:\t0\n"), None);
        assert_eq!(tracer_in("Name:\tx\nTracerPid:\t71\nUid:\t0\n"), Some(71));
        assert!(tracers(std::process::id() as i32).len() < 2);
    }

    #[test]
    fn descendants_are_found_through_generations() {
        let processes: HashMap<i32, Process> =
            [(2, 1), (3, 2), (4, 3), (5, 1)].map(|(pid, parent)| (pid, Process { parent })).into();
        let mut found = descendants_in(&processes, 2);
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
    }
}

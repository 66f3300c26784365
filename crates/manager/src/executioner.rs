//! Killing a whole job: when its evicted pages are lost, nothing of it may run on.
//!
//! A process belongs to the job if it descends from the job's front, or carries the job's secret in the environment it
//! was started with. Neither alone finds all: an orphan is adopted elsewhere once the front is dead, and a program can
//! overwrite its environment. To look for the secret is to read memory of every process of the machine, which any of them can make long
//! (`environment.rs`): those that are found by then are killed meanwhile. One search serves all jobs that are killed at the same time, and
//! goes on where the one before it had to stop.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use uzswap_proto::{ENV_JOB, Job};
use uzswap_vm::sys::job;
use uzswap_vm::sys::process::{Kinship, PidFd, field, share_memory, ticks_ago};
use uzswap_vm::sys::thread;

use crate::environment;

/// How long the dead may take to go.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How long all processes of the machine may be searched for those of the job, before those that are known by then are killed. Each time it
/// takes longer, if it must.
const FIRST_PATIENCE: Duration = Duration::from_millis(300);

/// How long to wait between two searches.
pub const PAUSE: Duration = Duration::from_millis(2);

/// The most time that one search may take.
const MOST_PATIENCE: Duration = Duration::from_millis(2400);

/// How long a process may take from its fork to the program that it is to run. A search before that finds the environment of its parent.
const START: Duration = Duration::from_secs(10);

/// How to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Stop all first, so that none sees another die and does something about it.
    StopFirst,
    /// One after the other: where the front lives and is not the caller. It would take a stop for one of the program's own
    /// and stop, too, with nobody left who lets it go on.
    AtOnce,
}

/// A job that is to be killed, or all jobs of a name.
pub struct Order {
    /// The user whose searches wait, if they have taken much; `None` for one that does not wait.
    pub user: Option<u32>,
    manner: Manner,
    /// What the variable [`ENV_JOB`] of their processes begins with.
    secret: Vec<u8>,
    front: Option<i32>,
    /// When such a process has ended, its number may come to be another's.
    known: Vec<(i32, PidFd)>,
    spared: Vec<i32>,
    /// The programs by their workers.
    workers: Option<HashMap<i32, i32>>,
    begun: Instant,
    paused: Option<Instant>,
    patience: Duration,
    killed: HashSet<i32>,
    /// Processes that do not carry the secret, with when they started.
    others: HashMap<i32, u64>,
    /// Dropped when the job is dead.
    held: Vec<Box<dyn Send>>,
    /// Where it is said how many processes the job had, when it is dead.
    told: Vec<Sender<usize>>,
}

impl Order {
    /// Orders that every process of the job be killed but those in `spared`.
    ///
    /// `front`, if it is the caller, is the ancestor of all of them; `known` are processes known to belong.
    pub fn new(manner: Manner, job: Job, front: Option<i32>, known: &[i32], spared: &[i32]) -> Order {
        Order::of(manner, job.to_text().to_vec(), front, known, spared)
    }

    fn of(manner: Manner, secret: Vec<u8>, front: Option<i32>, known: &[i32], spared: &[i32]) -> Order {
        let known = known.iter().filter_map(|&pid| Some((pid, PidFd::open(pid).ok()?))).collect();
        let (begun, patience, spared) = (Instant::now(), FIRST_PATIENCE, spared.to_vec());
        Order {
            user: None,
            manner,
            secret,
            front,
            known,
            spared,
            workers: None,
            begun,
            paused: None,
            patience,
            killed: HashSet::new(),
            others: HashMap::new(),
            held: Vec::new(),
            told: Vec::new(),
        }
    }

    /// Sets the user of the job, whose searches may have to wait.
    pub fn of_user(self, user: u32) -> Order {
        Order { user: Some(user), ..self }
    }

    /// Sets which processes are programs, each with its worker. Without this, workers are found by a call that a process can hold up.
    pub fn with_workers(self, workers: &[(i32, i32)]) -> Order {
        Order { workers: Some(workers.iter().map(|(program, worker)| (*worker, *program)).collect()), ..self }
    }

    /// Notes that nothing is done about it from now on.
    pub fn pause(&mut self, now: Instant) {
        self.paused = Some(now);
    }

    /// Notes that it goes on: the time since the pause does not count.
    pub fn go_on(&mut self, now: Instant) {
        let since = self.paused.take().map_or(Duration::ZERO, |paused| now.saturating_duration_since(paused));
        self.begun += since;
    }

    /// Keeps `thing` until the job is dead.
    pub fn hold(mut self, thing: impl Send + 'static) -> Order {
        self.held.push(Box::new(thing));
        self
    }

    /// Tells how many processes the job had, when it is dead.
    pub fn tell(mut self, number: Sender<usize>) -> Order {
        self.told.push(number);
        self
    }

    /// Returns whether both are for the same job.
    pub fn is_like(&self, other: &Order) -> bool {
        self.secret == other.secret
    }

    /// Takes over what a later order for the same job says.
    pub fn merge(&mut self, later: Order) {
        (self.manner, self.begun) = (later.manner, later.begun);
        if let (Some(workers), Some(more)) = (&mut self.workers, later.workers) {
            workers.extend(more);
        }
        let is_new = |(pid, handle): &(i32, PidFd)| {
            let is_same = |(other, known): &(i32, PidFd)| other == pid && !known.has_ended();
            !handle.has_ended() && !self.known.iter().any(is_same)
        };
        let new: Vec<(i32, PidFd)> = later.known.into_iter().filter(is_new).collect();
        self.known.extend(new);
        self.held.extend(later.held);
        self.told.extend(later.told);
    }

    /// Returns those processes of the job that are known without a search.
    fn members(&self, processes: &Processes) -> HashSet<i32> {
        let known = self.known.iter().filter(|(_, handle)| !handle.has_ended()).map(|(pid, _)| *pid);
        let known = known.filter(|pid| processes.contains_key(pid));
        known.chain(self.front.into_iter().flat_map(|front| descendants_in(processes, front))).collect()
    }

    /// Notes which of the processes that were looked at do not carry the secret, so that they are not looked at again: those that had started
    /// before `old`.
    fn note_others(&mut self, looked_at: &[i32], members: &HashSet<i32>, processes: &Processes, old: u64) {
        let others = looked_at.iter().filter(|pid| !members.contains(pid));
        let started = others.filter_map(|pid| Some((*pid, processes.get(pid)?.started)));
        self.others.extend(started.filter(|(_, started)| *started < old));
    }

    /// Stops `members`, if they are to be stopped first: what is stopped does not see another die.
    fn stop(&mut self, members: &HashSet<i32>) {
        if self.manner == Manner::StopFirst {
            // The worker of a dead program ends by itself, but not while it is stopped, should we die before the next signal.
            let programs = self.alive(members).into_iter().filter(|pid| !is_called_worker(*pid));
            self.killed.extend(programs.filter(|&pid| job::kill(pid, libc::SIGSTOP).is_ok()));
        }
    }

    /// Kills `members`; returns whether all were dead before.
    fn kill(&mut self, members: &HashSet<i32>) -> bool {
        let alive = self.alive(members);
        self.killed.extend(alive.iter().filter(|&&pid| job::kill(pid, libc::SIGKILL).is_ok()));
        alive.is_empty()
    }

    /// Returns those of `members` that are to be killed. A worker is the last to guard its program, should we die in the middle of this. It ends
    /// by itself.
    fn alive(&self, members: &HashSet<i32>) -> Vec<i32> {
        let shares = |pid: i32, other: i32| !is_called_worker(other) && share_memory(pid, other).unwrap_or(false);
        let is_worker = |pid: i32| match &self.workers {
            Some(workers) => workers.get(&pid).is_some_and(|program| members.contains(program)),
            None => is_called_worker(pid) && members.iter().any(|&other| shares(pid, other)),
        };
        members.iter().copied().filter(|&pid| !self.spared.contains(&pid) && !is_worker(pid)).collect()
    }
}

/// Kills every process of the jobs, and waits until they are gone. Gives how many there were.
pub fn kill(mut orders: Vec<Order>) -> usize {
    let mut killed = 0;
    loop {
        killed += pass(&mut orders);
        if orders.is_empty() {
            return killed;
        }
        std::thread::sleep(PAUSE);
    }
}

/// The same with every job of the daemon of that name, at once: their fronts live.
pub fn kill_jobs_of(name: u64, spared: &[i32]) -> usize {
    kill(vec![Order::of(Manner::AtOnce, format!("{name:016x}").into_bytes(), None, &[], spared)])
}

/// Searches all processes once for those of the jobs, and kills them. The orders of jobs that are dead go; gives how many processes
/// those had.
pub fn pass(orders: &mut Vec<Order>) -> usize {
    let processes = processes();
    let mut members: Vec<HashSet<i32>> = orders.iter().map(|order| order.members(&processes)).collect();
    orders.iter_mut().zip(&members).for_each(|(order, members)| order.stop(members));
    let is_known = |pid: i32, started: u64| {
        members.iter().any(|members| members.contains(&pid))
            || orders.iter().all(|order| order.others.get(&pid) == Some(&started))
    };
    let unknown = processes.iter().filter(|(pid, process)| !is_known(**pid, process.started));
    let unknown = unknown.map(|(pid, _)| *pid).collect();
    let secrets: Vec<Vec<u8>> = orders.iter().map(|order| order.secret.clone()).collect();
    let patience = orders.iter().map(|order| order.patience).max().unwrap_or_default();
    let old = ticks_ago(START);
    let found = environment::carriers(unknown, ENV_JOB, &secrets, Instant::now() + patience);
    for (pid, number) in found.carriers {
        members[number].insert(pid);
    }
    for (order, members) in orders.iter_mut().zip(&members) {
        order.stop(members);
        order.note_others(&found.looked_at, members, &processes, old);
    }
    let mut killed = 0;
    let mut members = members.iter();
    orders.retain_mut(|order| {
        let are_gone = order.kill(members.next().expect("one for each"));
        while order.front.is_some() && job::collect_child().is_some() {}
        let is_over = are_gone && found.are_all || order.begun.elapsed() > PATIENCE;
        order.patience = (order.patience * 2).min(MOST_PATIENCE);
        if is_over {
            killed += order.killed.len();
            // Fails if the asker waits no longer.
            order.told.iter().for_each(|told| _ = told.send(order.killed.len()));
        }
        !is_over
    });
    killed
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

/// Returns the thread that traces another, whose `status` is given.
pub fn tracer_in(status: &str) -> Option<i32> {
    let tracer = field(status, "TracerPid:")?.parse().ok()?;
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

fn descendants_in(processes: &Processes, front: i32) -> Vec<i32> {
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

type Processes = HashMap<i32, Kinship>;

/// All processes that are not dead.
fn processes() -> Processes {
    let Ok(entries) = fs::read_dir("/proc") else { return HashMap::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, Kinship::of(pid).filter(|process| !process.has_ended)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_carry_the_secret_is_looked_at_once_unless_it_is_young() {
        let job = Job::from_text(b"0123456789abcdef0123456789abcdef").expect("a secret");
        let mut order = Order::new(Manner::AtOnce, job, None, &[], &[]);
        let processes =
            HashMap::from([(2, 1), (3, 1), (4, 95), (5, 1)].map(|(pid, started)| (pid, process(1, started))));
        order.note_others(&[2, 3, 4, 6], &HashSet::from([3]), &processes, 90);
        assert_eq!(order.others, HashMap::from([(2, 1)]));
        let own = super::processes()[&(std::process::id() as i32)];
        assert!((ticks_ago(Duration::from_secs(3600))..=ticks_ago(Duration::ZERO)).contains(&own.started));
    }

    fn process(parent: i32, started: u64) -> Kinship {
        Kinship { parent, group: parent, session: parent, has_ended: false, started }
    }

    #[test]
    fn a_tracer_is_read_from_a_status() {
        assert_eq!(tracer_in("Name:\tx\nTracerPid:\t0\nUid:\t0\n"), None);
        assert_eq!(tracer_in("Name:\tx\nTracerPid:\t71\nUid:\t0\n"), Some(71));
        assert!(tracers(std::process::id() as i32).len() < 2);
    }

    #[test]
    fn descendants_are_found_through_generations() {
        let processes = HashMap::from([(2, 1), (3, 2), (4, 3), (5, 1)].map(|(pid, parent)| (pid, process(parent, 0))));
        let mut found = descendants_in(&processes, 2);
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
    }
}

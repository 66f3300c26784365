//! Killing a whole job: when its evicted pages are lost, nothing of it may run on.
//!
//! A process belongs to the job if it descends from the job's front, or carries the job's secret in the environment it
//! was started with. Neither alone finds all: an orphan is adopted elsewhere once the front is dead, and a program can
//! overwrite its environment. To look for the secret is to read memory of every process of the machine, which any of them can make long
//! (`environment.rs`): those that are found by then are killed meanwhile. One search serves all jobs that are killed at the same time, and
//! goes on where the one before it had to stop.
//!
//! **Which process.** A search takes seconds. A process of the job can end meanwhile, and another user's get its number. So no signal is
//! sent to a number:
//! 1. What is proven to belong is an [`Identity`]: by a handle that was opened before the proof, on a process that had not ended after it.
//! 2. A signal is sent by a handle that has this identity. It is closed at once: a job can have more processes than the manager has
//!    descriptors.
//! 3. What seems to belong and could not be proven is met in the next search: no order is done before a search has found nothing.
//! 4. Where descriptors are short, the search is repeated as long as they are, by the queue of a manager that goes on (`kill_queue.rs`). A
//!    process that ends soon tries for [`PATIENCE`]: its end closes the descriptors that keep the programs from being killed by their
//!    tethers.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use std::{fs, io};

use uzswap_proto::{ENV_JOB, Job};
use uzswap_vm::sys::job;
use uzswap_vm::sys::process::{Identity, Kinship, PidFd, field, is_shortage, read_named, ticks_ago};
use uzswap_vm::sys::{memory, thread};

use crate::environment;

/// How long the dead may take to go.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How long all processes of the machine may be searched for those of the job, before those that are known by then are killed. Each time it
/// takes longer, if it must.
const FIRST_PATIENCE: Duration = Duration::from_millis(300);

/// How long other processes are killed before those that are called workers.
const WORKERS_LAST: Duration = Duration::from_secs(1);

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
    /// The user of the job; `None` for jobs of several users, or of the caller.
    owner: Option<u32>,
    manner: Manner,
    /// What the variable [`ENV_JOB`] of their processes begins with.
    secret: Vec<u8>,
    front: Option<i32>,
    known: Vec<(i32, Identity)>,
    spared: Vec<i32>,
    /// The programs by their workers.
    workers: Option<HashMap<i32, i32>>,
    begun: Instant,
    paused: Option<Instant>,
    patience: Duration,
    killed: HashSet<i32>,
    /// In this search, a process that may belong has ended, or could not be proven to.
    is_unclear: bool,
    /// In this search, descriptors or memory were short.
    is_short: bool,
    /// Processes that do not carry the secret.
    others: HashMap<i32, Identity>,
    /// Dropped when the job is dead.
    held: Vec<Box<dyn Send>>,
    /// Where it is said how many processes the job had, when it is dead.
    told: Vec<Sender<usize>>,
}

impl Order {
    /// Orders that every process of the job be killed but those in `spared`.
    ///
    /// `front`, if it is the caller, is the ancestor of all of them; `known` are processes known to belong.
    pub fn new(manner: Manner, job: Job, front: Option<i32>, known: Vec<(i32, Identity)>, spared: &[i32]) -> Order {
        Order::of(manner, job.to_text().to_vec(), front, known, spared)
    }

    fn of(manner: Manner, secret: Vec<u8>, front: Option<i32>, known: Vec<(i32, Identity)>, spared: &[i32]) -> Order {
        let (begun, patience, spared) = (Instant::now(), FIRST_PATIENCE, spared.to_vec());
        Order {
            user: None,
            owner: None,
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
            is_unclear: false,
            is_short: false,
            others: HashMap::new(),
            held: Vec::new(),
            told: Vec::new(),
        }
    }

    /// Sets the user of the job, whose searches may have to wait.
    pub fn of_user(self, user: u32) -> Order {
        Order { user: Some(user), ..self.of_owner(user) }
    }

    /// Sets the user of the job.
    pub fn of_owner(self, user: u32) -> Order {
        Order { owner: Some(user), ..self }
    }

    /// Returns whether one of the processes may be of one of these users. Those of root may run as any user.
    fn may_be_of(&self, users: &HashSet<Option<u32>>) -> bool {
        match self.owner {
            None | Some(0) => !users.is_empty(),
            user => users.contains(&user),
        }
    }

    /// Sets which processes are programs, each with its worker. Without this, those count as workers that are called so, as long as others
    /// live, but not for longer than [`WORKERS_LAST`]: which process has whose memory is told by a call that a process can hold up.
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
        // What an operator kills does not wait for the user's turn.
        self.user = self.user.filter(|_| later.user.is_some());
        if let (Some(workers), Some(more)) = (&mut self.workers, later.workers) {
            workers.extend(more);
        }
        let new: Vec<(i32, Identity)> = later.known.into_iter().filter(|known| !self.known.contains(known)).collect();
        self.known.extend(new);
        self.held.extend(later.held);
        self.told.extend(later.told);
    }

    /// Returns those processes of the job that are known without a search of environments.
    fn members(&mut self, processes: &Processes) -> Members {
        let mut members = Members::new();
        self.known.retain(|&(pid, identity)| match PidFd::open_known(pid, identity) {
            Ok(_) => {
                members.insert(pid, identity);
                true
            }
            Err(error) => {
                // It may have left a child that these processes do not include.
                self.is_unclear = true;
                self.is_short |= is_shortage(&error);
                is_shortage(&error)
            }
        });
        if let Some(front) = self.front {
            let mut proven = Members::new();
            for pid in descendants_in(processes, front) {
                match descendant(pid, front, &proven) {
                    Ok(Some(identity)) => drop(proven.insert(pid, identity)),
                    Ok(None) => self.is_unclear = true,
                    Err(error) => (self.is_unclear, self.is_short) = (true, self.is_short || is_shortage(&error)),
                }
            }
            members.extend(proven);
        }
        members
    }

    /// Notes which of the processes that were looked at do not carry the secret, so that they are not looked at again: those that had started
    /// before `old`.
    fn note_others(&mut self, looked_at: &[(i32, Identity, u64)], members: &Members, old: u64) {
        let others = looked_at.iter().filter(|(pid, _, started)| !members.contains_key(pid) && *started < old);
        self.others.extend(others.map(|(pid, identity, _)| (*pid, *identity)));
    }

    /// Stops `members`, if they are to be stopped first: what is stopped does not see another die.
    fn stop(&mut self, members: &Members) {
        if self.manner == Manner::StopFirst {
            // The worker of a dead program ends by itself, but not while it is stopped, should we die before the next signal.
            let alive = self.alive(members);
            alive
                .into_iter()
                .filter(|pid| !is_called_worker(*pid))
                .for_each(|pid| self.signal(pid, members, libc::SIGSTOP));
        }
    }

    /// Stops those that are known before a search; kills them if the search may take long, by which others would see them die.
    fn begin(&mut self, members: &Members, patience: Duration) {
        match self.manner {
            Manner::StopFirst => self.stop(members),
            Manner::AtOnce if patience > FIRST_PATIENCE => drop(self.kill(members)),
            Manner::AtOnce => {}
        }
    }

    /// Kills `members`; returns whether there were none.
    fn kill(&mut self, members: &Members) -> bool {
        let alive = self.alive(members);
        alive.iter().for_each(|&pid| self.signal(pid, members, libc::SIGKILL));
        alive.is_empty()
    }

    /// Sends a signal to a member, if that has not ended.
    fn signal(&mut self, pid: i32, members: &Members, signal: i32) {
        match PidFd::open_known(pid, members[&pid]).and_then(|process| process.kill(signal)) {
            Ok(()) => drop(self.killed.insert(pid)),
            Err(error) => self.is_short |= is_shortage(&error),
        }
    }

    /// Collects the dead children of the front that are not spared, if the front is the caller.
    fn collect_children(&self, processes: &Processes) {
        let is_its =
            |(pid, process): &(&i32, &Kinship)| Some(process.parent) == self.front && !self.spared.contains(pid);
        processes.iter().filter(is_its).for_each(|(pid, _)| job::collect_dead_child(*pid));
    }

    /// Returns those of `members` that are to be killed. A worker is the last to guard its program, should we die in the middle of this. It ends
    /// by itself.
    fn alive(&self, members: &Members) -> Vec<i32> {
        let living = members.keys().copied().filter(|pid| !self.spared.contains(pid));
        if let Some(workers) = &self.workers {
            let is_worker = |pid: i32| workers.get(&pid).is_some_and(|program| members.contains_key(program));
            return living.filter(|pid| !is_worker(*pid)).collect();
        }
        let (workers, others): (Vec<i32>, Vec<i32>) = living.partition(|pid| is_called_worker(*pid));
        if others.is_empty() || self.begun.elapsed() > WORKERS_LAST { [others, workers].concat() } else { others }
    }
}

/// Kills every process of the jobs, waits up to [`PATIENCE`] until they are gone, and returns how many there were.
/// Only for a process that ends then: it uses the descriptors that the manager leaves free (`descriptors::OF_GUARD`).
pub fn kill(mut orders: Vec<Order>) -> usize {
    memory::raise_descriptor_limit(0);
    let (mut killed, end) = (0, Instant::now() + PATIENCE);
    loop {
        killed += pass(&mut orders);
        if orders.is_empty() || Instant::now() > end {
            return killed + orders.iter().map(|order| order.killed.len()).sum::<usize>();
        }
        std::thread::sleep(PAUSE);
    }
}

/// The same with every job of the daemon of that name, at once: their fronts live.
pub fn kill_jobs_of(name: u64, spared: &[i32]) -> usize {
    kill(vec![Order::of(Manner::AtOnce, format!("{name:016x}").into_bytes(), None, Vec::new(), spared)])
}

/// Searches all processes once for those of the jobs, and kills them. The orders of jobs that are dead go; gives how many processes
/// those had.
pub fn pass(orders: &mut Vec<Order>) -> usize {
    orders.iter_mut().for_each(|order| (order.is_unclear, order.is_short) = (false, false));
    let Ok(processes) = processes() else { return 0 };
    let mut members: Vec<Members> = orders.iter_mut().map(|order| order.members(&processes)).collect();
    let patience = orders.iter().map(|order| order.patience).max().unwrap_or_default();
    orders.iter_mut().zip(&members).for_each(|(order, members)| order.begin(members, patience));
    let is_other = |pid| {
        orders.iter().all(|order| order.others.contains_key(&pid)) && {
            let identity = Identity::of(pid);
            orders.iter().all(|order| order.others.get(&pid).copied() == identity)
        }
    };
    let is_known = |pid| members.iter().any(|members| members.contains_key(&pid)) || is_other(pid);
    let unknown = processes.iter().filter(|(pid, process)| !process.has_ended && !is_known(**pid));
    let unknown = unknown.map(|(pid, _)| *pid).collect();
    let secrets: Vec<Vec<u8>> = orders.iter().map(|order| order.secret.clone()).collect();
    let old = ticks_ago(START);
    let found = environment::carriers(unknown, ENV_JOB, &secrets, Instant::now() + patience);
    for (pid, identity, number) in found.carriers {
        members[number].insert(pid, identity);
    }
    for (order, members) in orders.iter_mut().zip(&members) {
        order.stop(members);
        order.note_others(&found.looked_at, members, old);
    }
    let mut killed = 0;
    let mut members = members.iter().enumerate();
    orders.retain_mut(|order| {
        let (number, members) = members.next().expect("one for each");
        let are_gone = order.kill(members);
        order.collect_children(&processes);
        let are_all =
            found.are_all && !order.may_be_of(&found.left_out) && !found.ended.contains(&number) && !order.is_unclear;
        let gives_up = order.begun.elapsed() > PATIENCE && !found.is_short && !order.is_short;
        let is_over = are_gone && are_all || gives_up;
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
    let mut tracers: Vec<i32> =
        threads.flatten().filter_map(|thread| tracer_in(&read_named(thread.path().join("status")).ok()?)).collect();
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

/// Whether a process is stopped by a signal.
pub fn is_stopped(pid: i32) -> bool {
    let status = read_named(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:\tT "))
}

/// The processes that descend from `front`, itself not included. None if that cannot be told.
pub fn descendants(front: i32) -> Option<Vec<i32>> {
    let mut processes = processes().ok()?;
    processes.retain(|_, process| !process.has_ended);
    Some(descendants_in(&processes, front))
}

/// Returns descendants after their parents.
fn descendants_in(processes: &Processes, front: i32) -> Vec<i32> {
    let mut found = vec![front];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        let is_child = |process: &Kinship| process.parent == parent && !process.has_ended;
        found.extend(processes.iter().filter(|(_, process)| is_child(process)).map(|(&pid, _)| pid));
        next += 1;
    }
    found.split_off(1)
}

/// Proves that process `pid` descends from `front`, which is the caller: it is a child of that, or of one of the `proven`. Returns its
/// identity; `None` if that is not so now.
fn descendant(pid: i32, front: i32, proven: &Members) -> io::Result<Option<Identity>> {
    let process = PidFd::open(pid)?;
    let Some(now) = Kinship::read(pid)? else { return Ok(None) };
    if now.parent != front {
        let Some(parent) = proven.get(&now.parent) else { return Ok(None) };
        // Looked at after its child: it was the parent then.
        match PidFd::open_known(now.parent, *parent) {
            Ok(_) => {}
            Err(error) if is_shortage(&error) => return Err(error),
            Err(_) => return Ok(None),
        }
    }
    // The number was its own while its parent was looked at.
    Ok(process.identity())
}

/// Whether a process has a worker's name; what it is called is its own choice.
pub fn is_called_worker(pid: i32) -> bool {
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"uzswap-agent\n")
}

/// Processes by their numbers.
type Processes = HashMap<i32, Kinship>;
type Members = HashMap<i32, Identity>;

/// All processes, those included that have ended and not been collected.
///
/// # Errors
/// This process is short of descriptors or memory.
fn processes() -> io::Result<Processes> {
    let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let read = |pid| Some(Kinship::read(pid).transpose()?.map(|process| (pid, process)));
    pids.filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use uzswap_vm::sys::process::started;

    use super::*;

    #[test]
    fn what_does_not_carry_the_secret_is_looked_at_once_unless_it_is_young() {
        let job = Job::from_text(b"0123456789abcdef0123456789abcdef").expect("a secret");
        let mut order = Order::new(Manner::AtOnce, job, None, Vec::new(), &[]);
        let identity = |pid: i32| Identity::Inode(pid as u64);
        let looked_at = [(2, 1), (3, 1), (4, 95)].map(|(pid, started)| (pid, identity(pid), started));
        order.note_others(&looked_at, &Members::from([(3, identity(3))]), 90);
        assert_eq!(order.others, HashMap::from([(2, identity(2))]));
        let own = started(std::process::id() as i32).expect("it lives");
        assert!((ticks_ago(Duration::from_secs(3600))..=ticks_ago(Duration::ZERO)).contains(&own));
    }

    /// Starts a process that gets the number `pid`.
    fn with_number(pid: u32, program: &str) -> Child {
        let try_once = |_| {
            fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).expect("the tests run as root");
            let mut child = Command::new(program).arg("100").spawn().expect("a program");
            if child.id() == pid {
                return Some(child);
            }
            child.kill().and_then(|()| child.wait()).expect("our child");
            None
        };
        (0..1000).find_map(try_once).expect("the number is free")
    }

    fn orders(secret: u64, front: Option<i32>, known: Vec<(i32, Identity)>) -> [Order; 2] {
        let job = Job { name: secret, token: secret };
        [Manner::AtOnce, Manner::StopFirst].map(|manner| Order::new(manner, job, front, known.clone(), &[]))
    }

    #[test]
    fn a_process_that_has_the_number_of_a_member_is_not_signalled() {
        let (own, secret) = (std::process::id() as i32, 0x1357_9bdf_0246_8ace);
        let text = Job { name: secret, token: secret }.to_text();
        let mut member = Command::new("sleep")
            .arg("100")
            .env(ENV_JOB, str::from_utf8(&text).expect("digits"))
            .spawn()
            .expect("a member");
        let (number, end) = (member.id() as i32, Instant::now() + PATIENCE);
        let carriers = || environment::carriers(vec![number], ENV_JOB, &[text.to_vec()], end).carriers;
        while carriers().is_empty() {
            assert!(Instant::now() < end, "it has executed its program");
        }
        let carried = carriers()[0].1;
        let [mut descending, mut another] = orders(1, Some(own), Vec::new());
        let mut ways = [descending.members(&processes().unwrap()), Members::from([(number, carried)])];
        // Other tests have children, too.
        ways[0].retain(|pid, _| *pid == number);
        assert_eq!(ways[0].get(&number), Some(&carried), "it descends from this process");
        assert!(another.members(&processes().unwrap()).contains_key(&number));
        let [mut known, _] = orders(1, None, vec![(number, carried)]);
        assert!(known.members(&processes().unwrap()).contains_key(&number) && !known.is_unclear);
        member.kill().and_then(|()| member.wait()).expect("our child");

        let mut other = with_number(number as u32, "sleep");
        for members in &ways {
            for mut order in orders(1, None, Vec::new()) {
                order.stop(members);
                assert!(!order.kill(members), "another search is to tell that nothing is left");
                assert!(order.killed.is_empty(), "another process was signalled");
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(!is_stopped(number) && other.try_wait().expect("our child").is_none(), "another process was signalled");
        assert!(known.members(&processes().unwrap()).is_empty() && known.is_unclear, "its number is another's");
        assert!(known.known.is_empty() && carriers().is_empty());
        other.kill().and_then(|()| other.wait()).expect("our child");
    }

    #[test]
    fn a_process_whose_main_thread_has_ended_is_killed() {
        let job = Job { name: 0x2468_ace0_1357_9bdf, token: 0x1122_3344_5566_7788 };
        let text = job.to_text();
        let script = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[100]).start(); \
            ctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3")
            .args(["-c", script])
            .env(ENV_JOB, str::from_utf8(&text).expect("digits"))
            .spawn()
            .expect("a child");
        let stat = format!("/proc/{}/stat", child.id());
        let end = Instant::now() + PATIENCE;
        while !fs::read_to_string(&stat).expect("it lives").contains(") Z ") {
            assert!(Instant::now() < end, "its main thread ends");
        }
        assert_eq!(kill(vec![Order::new(Manner::AtOnce, job, None, Vec::new(), &[])]), 1);
        assert!(child.try_wait().expect("our child").is_some(), "it lives on");
    }

    #[test]
    fn a_descendant_is_one_whose_parent_is_proven() {
        let own = std::process::id() as i32;
        let mut shell = Command::new("sh").args(["-c", "sleep 100 & wait"]).spawn().expect("a child");
        let parent = shell.id() as i32;
        let below = || descendants(parent).expect("descriptors").first().copied();
        let child = (0..1000).find_map(|_| {
            below().or_else(|| {
                std::thread::sleep(Duration::from_millis(1));
                None
            })
        });
        let child = child.expect("it starts one");
        let none = Members::new();
        let proven =
            Members::from([(parent, descendant(parent, own, &none).unwrap().expect("a child of this process"))]);
        assert_eq!(descendant(child, own, &none).unwrap(), None, "its parent is not proven");
        assert_eq!(
            descendant(child, own, &Members::from([(parent, Identity::Inode(0))])).unwrap(),
            None,
            "an earlier process"
        );
        assert!(descendant(child, own, &proven).unwrap().is_some());
        shell.kill().and_then(|()| shell.wait()).expect("our child");
        assert_eq!(descendant(child, own, &proven).unwrap_or(None), None, "its parent has ended");
        if let Ok(orphan) = PidFd::open(child) {
            let _ = orphan.kill(libc::SIGKILL);
        }
    }

    #[test]
    fn a_tracer_is_read_from_a_status() {
        assert_eq!(tracer_in("Name:\tx\nTracerPid:\t0\nUid:\t0\n"), None);
        assert_eq!(tracer_in("Name:\tx\nTracerPid:\t71\nUid:\t0\n"), Some(71));
        assert!(tracers(std::process::id() as i32).len() < 2);
    }

    #[test]
    fn descendants_are_found_through_generations() {
        let processes = HashMap::from(
            [(2, 1), (3, 2), (4, 3), (5, 1)]
                .map(|(pid, parent)| (pid, Kinship { parent, group: parent, session: parent, has_ended: false })),
        );
        let mut found = descendants_in(&processes, 2);
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
    }
}

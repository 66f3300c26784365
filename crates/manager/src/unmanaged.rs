//! Memory of a job that is not under its limit: which processes have it, and how much.
//!
//! 1. A thread looks at every process that descends from the front of a job: every [`PAUSE`], and for one in [`SHARE`] parts
//!    of a processor's time and one in [`WAITING_SHARE`] of the time at most, for each user: one that has ten thousand processes is looked at
//!    less often, and no other is. The thread measures what processes share in a share of its own, [`PARTING_SHARE`].
//! 2. A process without a session is unmanaged if there is evidence for it ([`Suspect`]): a program that has just started has no
//!    session yet, either. All of its resident private and shared memory counts.
//! 3. Of a managed process its resident shared memory counts (`MAP_SHARED`, memfd, System V): such pages cannot be moved out.
//! 4. A page that several processes map counts once: each is charged with its part of it ([`Parts`]).
//! 5. The bytes are charged to the group of the process and to all groups above it. Without a session of its own a process is
//!    in the group that it was moved to, or else in that of its parent.
//!
//! What this thread reads may wait for a client: the file of a program, or an environment in memory of a userfaultfd of the
//! client's own. No other thread waits for this one, and the watchdog replaces it ([`uzswap_vm::visit`]); the process is passed over
//! until the replaced thread has gone on.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use std::{fs, io};

use parking_lot::Mutex;
use uzswap_proto::ENV_JOB;
use uzswap_vm::owner::Owner;
use uzswap_vm::sys::process::{PidFd, children, field, has_executed, read_named, share_memory};
use uzswap_vm::sys::thread;
use uzswap_vm::visit::{self, Visit};

use crate::charge::Charge;
use crate::control::GroupId;
use crate::environment;
use crate::executioner::{self, Manner, Order};
use crate::groups::Groups;
use crate::jobs::{Jobs, Tenant};
use crate::kill_queue;
use crate::program::{self, Obstacle};
use crate::sessions::{Sessions, is_of};

/// How often to look, and how soon at first: short jobs are looked at, too.
const PAUSE: Duration = Duration::from_millis(400);
const FIRST_PAUSE: Duration = Duration::from_millis(25);

/// The part of a processor that the thread may take to look at one user's processes: one in so many; and to measure parts, in the long run.
const SHARE: u32 = 600;
const PARTING_SHARE: u32 = 200;

/// The part of the time that the thread may spend on one user's processes: they can have it wait.
const WAITING_SHARE: u32 = 20;

/// For how long a time the thread can save up its share of measuring. What it measured while processes came to share memory it has
/// to measure again soon.
const PARTING_CREDIT: Duration = Duration::from_secs(4);

/// How long a program may take until the agent is in it, if it was started without the agent; and if nothing is known of it.
const SETTLED: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(3);

/// Shared memory of a managed process up to this is that of its agent.
const OF_AGENT: u64 = 128 << 10;

/// Processes with less are charged in full.
const WORTH_PARTING: u64 = 1 << 20;

/// The longest time that one look may measure parts.
const PARTING_PATIENCE: Duration = Duration::from_millis(100);

/// The search for unmanaged memory.
#[derive(Debug)]
pub struct Unmanaged {
    jobs: Arc<Jobs>,
    sessions: Arc<Sessions>,
    groups: Arc<Groups>,
    agent: PathBuf,
    /// The processes that threads in this role look at.
    looked_at: LookedAt,
    users: HashMap<u32, OfUser>,
    parts: Parts,
}

/// What was found of one user's processes.
#[derive(Debug)]
struct OfUser {
    /// When to look at them again.
    due: Instant,
    /// They were looked at just now.
    is_fresh: bool,
    suspects: HashMap<i32, Suspect>,
    holders: Vec<Holder>,
}

/// Processes that are being looked at.
pub type LookedAt = Arc<Mutex<HashSet<i32>>>;

/// A process below a front, about to be looked at.
struct Relative {
    pid: i32,
    /// The group that it is in, if it has no session and was not moved.
    charge: Arc<Charge>,
    /// Its parent is unmanaged.
    of_unmanaged: bool,
}

/// A process that has memory that is not under the limit.
#[derive(Debug, Clone)]
struct Holder {
    pid: i32,
    owner: Arc<Owner>,
    charge: Arc<Charge>,
    bytes: u64,
    /// Its private memory is among these: no session has it.
    has_private: bool,
}

/// How much a group or a process has, in bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Amount {
    /// As far as is known. Too much while processes come to share memory.
    estimated: u64,
    /// What was just measured while no process came to have [`WORTH_PARTING`] more.
    measured: u64,
}

impl Unmanaged {
    /// Returns a search that has seen nothing yet. `agent` is the library that managed processes have loaded; `looked_at` is
    /// shared with a thread that this one replaces.
    pub fn new(
        jobs: Arc<Jobs>,
        sessions: Arc<Sessions>,
        groups: Arc<Groups>,
        agent: &Path,
        looked_at: LookedAt,
    ) -> Unmanaged {
        let (users, parts) = (HashMap::new(), Parts::new());
        Unmanaged { jobs, sessions, groups, agent: agent.to_owned(), looked_at, users, parts }
    }

    /// Looks until `stop`. `guard` is the process that stands for the manager.
    pub fn run(mut self, guard: i32, stop: &AtomicBool) {
        let mut pause = FIRST_PAUSE;
        while !stop.load(Relaxed) && !visit::is_surplus() {
            std::thread::sleep(pause);
            if self.look_at_users(guard) {
                self.enter();
            }
            pause = PAUSE.min(2 * pause);
        }
    }

    /// Looks at the processes of those users whose time has come; tells whether anything may have changed.
    fn look_at_users(&mut self, guard: i32) -> bool {
        let mut jobs: HashMap<u32, Vec<Arc<Tenant>>> = HashMap::new();
        self.jobs.all().into_iter().for_each(|tenant| jobs.entry(tenant.uid).or_default().push(tenant));
        let before = self.users.len();
        self.users.retain(|uid, _| jobs.contains_key(uid));
        let mut may_have_changed = self.users.len() < before;
        self.users.values_mut().for_each(|user| user.is_fresh = false);
        for (uid, jobs) in jobs {
            let begun = Instant::now();
            if self.users.get(&uid).is_some_and(|user| user.due > begun) {
                continue;
            }
            let suspects = self.users.remove(&uid).map(|user| user.suspects).unwrap_or_default();
            let start = thread::processor_time();
            let (holders, suspects) = self.look(jobs, suspects, guard);
            let due = begun + ((thread::processor_time() - start) * SHARE).max(begun.elapsed() * WAITING_SHARE);
            self.users.insert(uid, OfUser { due, is_fresh: true, suspects, holders });
            may_have_changed = true;
        }
        may_have_changed
    }

    /// Finds the processes of one user's jobs that have unmanaged memory, and those that are suspects now. Reports one of each job that is
    /// unmanaged as a whole.
    fn look(
        &self,
        jobs: Vec<Arc<Tenant>>,
        mut suspects: HashMap<i32, Suspect>,
        guard: i32,
    ) -> (Vec<Holder>, HashMap<i32, Suspect>) {
        let mut holders = Vec::new();
        let mut seen = HashMap::new();
        for tenant in jobs.into_iter().filter(|tenant| tenant.has_front() && !tenant.owner.is_shunned()) {
            let mut reported = false;
            let mut open = self.relatives(&tenant, tenant.front_pid, &tenant.charge, false);
            while let Some(relative) = open.pop() {
                let Some(look) = LookAt::begin(&self.looked_at, &tenant.owner, relative.pid) else { continue };
                let suspect = suspects.remove(&relative.pid);
                let (holder, is_unmanaged) = self.look_at(&tenant, &relative, suspect, &mut seen);
                drop(look);
                open.extend(self.relatives(&tenant, relative.pid, &holder.charge, is_unmanaged));
                if is_unmanaged && !reported && (tenant.require || !tenant.warned.load(Relaxed)) {
                    reported = true;
                    let why = format!("{}, {}", reason(relative.pid), mib(holder.bytes));
                    // The number was that of a process of the job; the handle may be of a later process.
                    let process = PidFd::open(relative.pid).ok().filter(|_| is_of(&tenant, relative.pid));
                    report(&tenant, process.as_ref(), &why, guard);
                }
                if holder.bytes > 0 {
                    holders.push(holder);
                }
            }
        }
        (holders, seen)
    }

    /// Returns the children of a process of a job that have a memory of their own. The child of a vfork has its parent's. One that executes a
    /// program may hold up the question, and is passed over then.
    fn relatives(&self, tenant: &Tenant, parent: i32, charge: &Arc<Charge>, of_unmanaged: bool) -> Vec<Relative> {
        let has_own = |pid| {
            let look = LookAt::begin(&self.looked_at, &tenant.owner, pid);
            look.is_some_and(|_look| !share_memory(parent, pid).unwrap_or(true))
        };
        let relative = |pid| Relative { pid, charge: charge.clone(), of_unmanaged };
        children(parent).into_iter().filter(|pid| !tenant.spared.contains(pid) && has_own(*pid)).map(relative).collect()
    }

    /// Returns what a process has, and whether all of it is unmanaged.
    fn look_at(
        &self,
        tenant: &Tenant,
        relative: &Relative,
        suspect: Option<Suspect>,
        seen: &mut HashMap<i32, Suspect>,
    ) -> (Holder, bool) {
        let pid = relative.pid;
        let (known, is_managed) = self.sessions.whereabouts(pid);
        let charge = known.unwrap_or_else(|| relative.charge.clone());
        let owner = tenant.owner.clone();
        let resident = Resident::of(pid).unwrap_or_default();
        if is_managed {
            let bytes = if resident.shared > OF_AGENT { resident.shared } else { 0 };
            return (Holder { pid, owner, charge, bytes, has_private: false }, false);
        }
        // A worker is no process of the job, and the dead have no program.
        let Some(program) = program_of(pid) else {
            return (Holder { pid, owner, charge, bytes: 0, has_private: true }, false);
        };
        let old = suspect.filter(|suspect| suspect.program == program);
        let mut suspect = old.unwrap_or_else(|| Suspect::new(pid, program, relative.of_unmanaged));
        if resident.is_held {
            suspect.since = Instant::now();
        }
        let is_unmanaged = suspect.is_unmanaged(|| has_agent(pid, tenant, &self.agent));
        seen.insert(pid, suspect);
        let bytes = if is_unmanaged { resident.private + resident.shared } else { 0 };
        (Holder { pid, owner, charge, bytes, has_private: true }, is_unmanaged)
    }

    /// Enters what was found in the accounts of all groups.
    fn enter(&mut self) {
        let holders: Vec<Holder> = self.users.values().flat_map(|user| user.holders.clone()).collect();
        let mut sums: HashMap<GroupId, Amount> = HashMap::new();
        let looked_at = &self.looked_at;
        // What was found minutes ago is no measure for what others have now, and the number may be another process's.
        let fresh = self.users.values().filter(|user| user.is_fresh).flat_map(|user| &user.holders);
        let fresh: HashSet<i32> = fresh.map(|holder| holder.pid).collect();
        let part = |holder: &Holder| {
            if !fresh.contains(&holder.pid) {
                return None;
            }
            let _look = LookAt::begin(looked_at, &holder.owner, holder.pid)?;
            Part::of(holder)
        };
        for (holder, amount) in holders.iter().zip(self.parts.of(&holders, part)) {
            for charge in holder.charge.path() {
                let sum = sums.entry(charge.id).or_default();
                sum.estimated += amount.estimated;
                sum.measured += amount.measured;
            }
        }
        for charge in &*self.groups.all() {
            let Amount { estimated, measured } = sums.get(&charge.id).copied().unwrap_or_default();
            charge.note_unmanaged(estimated, measured);
        }
    }
}

/// A look at a process, as long as this lives.
struct LookAt {
    pid: i32,
    looked_at: LookedAt,
    _visit: Visit,
}

impl LookAt {
    /// Marks a process as looked at. None if another thread is stuck with it, or is not to visit processes of its owner.
    fn begin(looked_at: &LookedAt, owner: &Arc<Owner>, pid: i32) -> Option<LookAt> {
        let is_free = !owner.is_shunned() && looked_at.lock().insert(pid);
        is_free.then(|| LookAt { pid, looked_at: looked_at.clone(), _visit: Visit::of_process(pid, owner) })
    }
}

impl Drop for LookAt {
    fn drop(&mut self) {
        self.looked_at.lock().remove(&self.pid);
    }
}

/// Tells of a process that cannot be managed: one warning for the job, or the end of it. `guard` stands for the manager.
///
/// `process` is a handle on it, if it is proven to be of the job: it is killed with that. What a client merely names is not.
pub fn report(tenant: &Tenant, process: Option<&PidFd>, why: &str, guard: i32) {
    let is_first = tenant.is_to_be_warned();
    let name = match process.and_then(PidFd::pid) {
        Some(pid) => format!("process {pid}"),
        None => "a process".to_owned(),
    };
    if tenant.require {
        if is_first {
            tenant.tell(&format!("error: {name} cannot be managed ({why}), which --require forbids"));
        }
        // With all others, so that none of them sees it die and does something about it.
        let known = process.and_then(|process| Some((process.pid()?, process.identity()?))).into_iter().collect();
        let spared = [std::process::id() as i32, guard];
        // Its workers need not outlive their programs: this process, the manager, goes on.
        let order = Order::new(Manner::AtOnce, tenant.job, None, known, &spared).with_workers(&[]);
        kill_queue::add(order.of_user(tenant.uid));
    } else if is_first {
        tenant.tell(&format!("warning: {name} runs unmanaged: {why}; `uzswap doctor` may tell how to mend it"));
    }
}

/// A process that has no session.
///
/// Certain at once: its program cannot load the agent, or it was forked from an unmanaged process. After [`SETTLED`]: it has
/// executed a program that was not told to load the agent. After [`PATIENCE`]: all others. A loaded machine, a debugger and a
/// limit delay a program before the agent is in it; the time for which this manager holds it ([`Brake`](crate::brake::Brake)) does not count.
#[derive(Debug)]
struct Suspect {
    program: PathBuf,
    since: Instant,
    is_certain: bool,
}

impl Suspect {
    fn new(pid: i32, program: PathBuf, of_unmanaged: bool) -> Suspect {
        let is_certain = of_unmanaged && !has_executed(pid) || cannot_load(&file_of(pid), &program);
        Suspect { program, since: Instant::now(), is_certain }
    }

    fn is_unmanaged(&mut self, has_agent: impl FnOnce() -> bool) -> bool {
        let age = self.since.elapsed();
        self.is_certain = self.is_certain || age >= PATIENCE || age >= SETTLED && !has_agent();
        self.is_certain
    }
}

/// Whether no agent can be in a process whose program is `file`, under this name.
fn cannot_load(file: &Path, name: &Path) -> bool {
    match program::obstacle(file) {
        // A dynamic linker that was executed itself is linked statically, and loads the agent.
        Some(Obstacle::Static) => !name.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld")),
        Some(Obstacle::Foreign) => true,
        // A process that has changed its user has loaded the agent before.
        Some(Obstacle::Privileged) | None => false,
    }
}

/// Whether a process was started with the agent, or is a copy of one that may have been. True also where that cannot be told: a process
/// that is just executing a program has neither environment nor arguments yet.
fn has_agent(pid: i32, tenant: &Tenant, agent: &Path) -> bool {
    let Ok(environment) = environment::of(pid) else { return true };
    let is_executing = || fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|arguments| arguments.is_empty());
    let job = [ENV_JOB.as_bytes(), b"=", &tenant.job.to_text()].concat();
    environment.is_empty() && is_executing()
        || !has_executed(pid)
        || names_agent(&environment, &job, agent.as_os_str().as_encoded_bytes())
}

/// Whether an environment has this job, and preloads this agent.
fn names_agent(environment: &[u8], job: &[u8], agent: &[u8]) -> bool {
    let entries = || environment.split(|&byte| byte == 0);
    let separates = |byte: &u8| b": ".contains(byte);
    let preloads = |list: &[u8]| list.split(separates).any(|path| path == agent);
    entries().any(|entry| entry == job)
        && entries().filter_map(|entry| entry.strip_prefix(b"LD_PRELOAD=")).any(preloads)
}

/// The program of a process, as a file.
fn file_of(pid: i32) -> PathBuf {
    format!("/proc/{pid}/exe").into()
}

/// Returns the name of the program of a process; `None` if it is dead, or a worker.
fn program_of(pid: i32) -> Option<PathBuf> {
    if executioner::is_called_worker(pid) {
        return None;
    }
    fs::read_link(file_of(pid)).ok()
}

fn reason(pid: i32) -> String {
    let name = program_of(pid).map_or_else(|| "its program".to_owned(), |path| path.display().to_string());
    match program::obstacle(&file_of(pid)) {
        Some(obstacle) => format!("{name} is {obstacle}"),
        None => format!("{name} was started without the agent (LD_PRELOAD)"),
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Resident memory of a process without that of files, in bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Resident {
    private: u64,
    shared: u64,
    /// A thread of this process traces it.
    is_held: bool,
}

impl Resident {
    fn of(pid: i32) -> io::Result<Resident> {
        let status = read_named(format!("/proc/{pid}/status"))?;
        let is_held = executioner::tracer_in(&status).is_some_and(thread::is_own);
        Ok(Resident { private: bytes_of(&status, "RssAnon:"), shared: bytes_of(&status, "RssShmem:"), is_held })
    }
}

/// A field that a file of `/proc` has in KiB, in bytes; 0 if there is none.
fn bytes_of(text: &str, name: &str) -> u64 {
    field(text, name).and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// How much of each process's memory is others' part.
///
/// To measure that takes a walk over the whole memory. Until a process has been measured all of its memory counts for others,
/// unless no other has much. Where processors are short one look measures some processes, and the next look the next.
#[derive(Debug)]
struct Parts {
    /// By process.
    known: HashMap<i32, Estimate>,
    /// When to measure all anew. The time since then is saved up, [`PARTING_CREDIT`] of it at most.
    due: Instant,
}

/// What is known of a process that may share memory.
#[derive(Debug, Clone, Copy)]
struct Estimate {
    /// Bytes of others, when that was last measured.
    others: Option<u64>,
    /// What the process had then, or when it was first seen.
    bytes: u64,
    /// No process has come to have [`WORTH_PARTING`] more since it was measured.
    is_certain: bool,
}

impl Parts {
    fn new() -> Parts {
        let now = Instant::now();
        Parts { known: HashMap::new(), due: now.checked_sub(PARTING_CREDIT).unwrap_or(now) }
    }

    /// Returns what each process has without the parts of others, which `part` measures.
    fn of(&mut self, holders: &[Holder], part: impl Fn(&Holder) -> Option<Part>) -> Vec<Amount> {
        let (start, spent) = (Instant::now(), thread::processor_time());
        let sharing: Vec<usize> = (0..holders.len()).filter(|&i| holders[i].bytes >= WORTH_PARTING).collect();
        let mut amounts: Vec<Amount> =
            holders.iter().map(|holder| Amount { estimated: holder.bytes, measured: holder.bytes }).collect();
        if sharing.len() < 2 {
            self.known.clear();
            return amounts;
        }
        let is_due = start >= self.due;
        let mut before = std::mem::take(&mut self.known);
        let has_changed = |holder: &Holder| {
            before.get(&holder.pid).is_none_or(|known| known.bytes.abs_diff(holder.bytes) >= WORTH_PARTING)
        };
        if sharing.iter().any(|&i| has_changed(&holders[i])) {
            before.values_mut().for_each(|known| known.is_certain = false);
        }
        let is_certain = |pid: i32| before.get(&pid).is_some_and(|known| known.is_certain);
        let mut order = sharing.clone();
        order.sort_by_key(|&i| is_certain(holders[i].pid));
        let mut is_steady = true;
        for i in order {
            let Holder { pid, bytes, .. } = holders[i];
            let measures = is_due && start.elapsed() < PARTING_PATIENCE;
            if let Some(part) = measures.then(|| part(&holders[i])).flatten() {
                is_steady &= part.is_steady;
                let others = Some(bytes.saturating_sub(part.bytes));
                self.known.insert(pid, Estimate { others, bytes, is_certain: true });
                amounts[i] = Amount { estimated: part.bytes, measured: part.bytes };
            } else {
                let known = before.get(&pid).copied();
                let others = known.and_then(|known| known.others);
                let known = known.filter(|known| known.bytes.abs_diff(bytes) < WORTH_PARTING);
                let known = known.unwrap_or(Estimate { others, bytes, is_certain: false });
                self.known.insert(pid, known);
                let estimated = others.map_or(0, |others| bytes.saturating_sub(others));
                amounts[i] = Amount { estimated, measured: if known.is_certain { estimated } else { 0 } };
            }
        }
        if !is_steady {
            // What one has come to share was measured in full of another before: only one of them is certain.
            let largest = (0..amounts.len()).max_by_key(|&index| amounts[index].measured);
            let others = (0..amounts.len()).filter(|&index| Some(index) != largest);
            others.for_each(|index| amounts[index].measured = 0);
            self.known.values_mut().for_each(|known| known.is_certain = false);
        }
        if is_due {
            let earliest = start.checked_sub(PARTING_CREDIT).unwrap_or(start);
            self.due = self.due.max(earliest) + (thread::processor_time() - spent) * PARTING_SHARE;
        }
        amounts
    }
}

/// A process's part of what it has.
struct Part {
    bytes: u64,
    /// The process has not come to have much more since it was looked at.
    is_steady: bool,
}

impl Part {
    fn of(holder: &Holder) -> Option<Part> {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", holder.pid)).ok()?;
        let now = Resident::of(holder.pid).ok()?;
        let with_private = |private, shared| if holder.has_private { private + shared } else { shared };
        let bytes = with_private(bytes_of(&rollup, "Pss_Anon:"), bytes_of(&rollup, "Pss_Shmem:"));
        let is_steady = with_private(now.private, now.shared) <= holder.bytes + WORTH_PARTING;
        Some(Part { bytes, is_steady })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_vm::sys::ptrace::Held;
    use uzswap_vm::sys::threads::Threads;

    #[test]
    fn fields_are_read_in_bytes() {
        let status = "Name:\tRssAnon: 7 kB\nRssAnon:\t     172 kB\nRssFile:\t 2000 kB\nRssShmem:\t  24 kB\n";
        assert_eq!((bytes_of(status, "RssAnon:"), bytes_of(status, "RssShmem:")), (172 << 10, 24 << 10));
        assert_eq!(bytes_of(status, "RssHuge:"), 0);
    }

    #[test]
    fn a_process_that_this_one_holds_is_told_from_others() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell");
        let pid = child.id() as i32;
        let is_held = || Resident::of(pid).expect("it lives").is_held;
        let threads = Threads::open(pid).expect("it lives");
        assert!(!is_held());
        let mut held = Held::default();
        while held.is_empty() {
            held = Held::hold(&threads, &[]);
        }
        assert!(is_held());
        while !held.is_empty() {
            held.let_go();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_held());
        child.kill().and_then(|()| child.wait()).expect("our child");
    }

    #[test]
    fn an_environment_names_job_and_agent() {
        let names = |environment: &[u8]| names_agent(environment, b"UZSWAP_JOB=12", b"/run/agent.so");
        assert!(names(b"A=1\0LD_PRELOAD=/lib/x.so:/run/agent.so\0UZSWAP_JOB=12\0"));
        assert!(names(b"LD_PRELOAD=/run/agent.so /lib/x.so\0UZSWAP_JOB=12"));
        assert!(!names(b"LD_PRELOAD=/run/agent.so\0UZSWAP_JOB=13\0"));
        assert!(!names(b"LD_PRELOAD=/run/agent.so2\0UZSWAP_JOB=12\0"));
        assert!(!names(b"UZSWAP_JOB=12\0"));
        assert!(!names(b""));
    }

    #[test]
    fn a_program_is_judged_by_evidence() {
        let program = PathBuf::from("/bin/program");
        let aged = |age: Duration, is_certain| Suspect {
            program: program.clone(),
            since: Instant::now().checked_sub(age).expect("the machine has run for longer"),
            is_certain,
        };
        assert!(aged(Duration::ZERO, true).is_unmanaged(|| true), "it cannot load the agent");
        assert!(!aged(Duration::ZERO, false).is_unmanaged(|| false), "it may be starting");
        assert!(aged(SETTLED, false).is_unmanaged(|| false), "it was not told to load the agent");
        assert!(!aged(SETTLED, false).is_unmanaged(|| true), "it may be slow");
        assert!(aged(PATIENCE, false).is_unmanaged(|| true), "it never came");
    }

    #[test]
    fn what_is_shared_counts_once() {
        let own = std::process::id() as i32;
        let groups = Groups::new(
            Arc::new(uzswap_engine::Zswap::new(
                Default::default(),
                None,
                uzswap_vm::sys::arena::Arena::reserve(1 << 20).expect("addresses"),
            )),
            Arc::default(),
        );
        let holder = |bytes| Holder {
            pid: own,
            owner: Arc::new(Owner::trusted()),
            charge: groups.root(),
            bytes,
            has_private: true,
        };
        let mut parts = Parts::new();
        let all = |bytes| Amount { estimated: bytes, measured: bytes };
        assert_eq!(
            parts.of(&[holder(64 << 20), holder(4096)], Part::of),
            [all(64 << 20), all(4096)],
            "no other has much"
        );
        let measured = parts.of(&[holder(1 << 40), holder(1 << 40)], Part::of);
        // Other tests change what this process has at any time.
        assert!((1..1 << 40).contains(&measured[1].measured), "{measured:?}");
        assert_eq!(measured[1].estimated, measured[1].measured);
        assert!(
            parts.due > Instant::now() - PARTING_CREDIT && parts.due < Instant::now(),
            "it may be measured again soon"
        );
        parts.due = Instant::now() + Duration::from_secs(60);
        let later = parts.of(&[holder((1 << 40) + WORTH_PARTING), holder(1 << 40)], Part::of);
        assert_eq!(later[0], Amount { estimated: measured[1].estimated + WORTH_PARTING, measured: 0 }, "it has grown");

        parts.due = Instant::now();
        let sizes = std::cell::Cell::new(0);
        let grows = |_: &Holder| {
            sizes.set(sizes.get() + 1);
            Some(Part { bytes: sizes.get() << 20, is_steady: sizes.get() != 2 })
        };
        let measured = parts.of(&[holder(1 << 40), holder(1 << 40), holder(1 << 40)], grows);
        let measured: Vec<u64> = measured.iter().map(|amount| amount.measured).collect();
        assert_eq!(measured, [0, 0, 3 << 20], "what one of them has is certain, while they come to share more");

        // One look has time for one process, and the next for the other.
        let other = Holder { pid: own + 1, ..holder(2 << 20) };
        let both = [holder(2 << 20), other];
        let sum = |amounts: Vec<Amount>| amounts.iter().map(|amount| amount.measured).sum::<u64>();
        let mut parts = Parts::new();
        let only = |pid| move |holder: &Holder| (holder.pid == pid).then_some(Part { bytes: 1 << 20, is_steady: true });
        assert_eq!(sum(parts.of(&both, only(own))), 1 << 20);
        parts.due = Instant::now();
        assert_eq!(sum(parts.of(&both, only(own + 1))), 2 << 20, "nothing has changed meanwhile");
        let third = Holder { pid: own + 2, ..holder(2 << 20) };
        let [first, second] = both;
        assert_eq!(sum(parts.of(&[first, second, third], |_| None)), 0, "nothing is certain of what three share");
    }
}

//! Reading the environments of processes that may be hostile.
//!
//! `/proc/PID/environ` reads memory of the process, from wherever the process says that its environment is (`PR_SET_MM`, which needs no
//! privilege), if it is anonymous memory (since Linux 4.17 it reads no file's). So it can be
//! 1. as long as the process likes: [`MOST`] is read, which is more than the kernel lets a program be started with;
//! 2. behind a lock that the process holds for as long as it likes, of its own memory: then the read returns only when the reader is killed.
//!    Many environments are read by a thread of its own ([`carriers`]). If a read takes longer than [`PATIENCE`] another thread goes on
//!    behind that process, which is passed over until its read has returned; so are all processes of a user with [`MOST_STUCK`] such reads,
//!    and in one search those that are left of a user whose reads have waited for [`MOST_WAITED`].
//!
//! A process can end while it is read, and another get its number. So what is found is an identity, proven by a handle that was opened before
//! the read, on a process that had not ended after it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_vm::sys::process::{Identity, PidFd, is_shortage, read_named, started};

/// Bytes of the longest environment: three quarters of the stack that the kernel counts with, 8 MiB.
const MOST: u64 = 6 << 20;

/// How long one environment may take.
const PATIENCE: Duration = Duration::from_millis(200);

/// Reads of one user that do not return, before no process of that user is read.
const MOST_STUCK: usize = 4;

/// How long the reads of one user may take in one search that each take longer than [`PROMPT`].
const MOST_WAITED: Duration = Duration::from_millis(400);
const PROMPT: Duration = Duration::from_millis(20);

/// Processes whose environments are being read and have not been for long.
static STUCK: LazyLock<Mutex<HashMap<i32, Stuck>>> = LazyLock::new(Mutex::default);

struct Stuck {
    /// Another process may get the number.
    identity: Option<Identity>,
    user: Option<u32>,
}

impl Stuck {
    fn of(pid: i32) -> Stuck {
        Stuck { identity: Identity::of(pid), user: user_of(pid) }
    }
}

/// Returns the environment of a process as it was started, in entries that end with a zero byte each.
///
/// # Errors
/// The process is gone, or may not be looked at.
pub fn of(pid: i32) -> io::Result<Vec<u8>> {
    /// Threads that are asked: those that are about to end have no memory any more.
    const SOME: usize = 8;
    // Without memory there is none: an error from Linux 6.16 on, and an empty text before.
    let has_some = |read: &io::Result<Vec<u8>>| read.as_ref().is_ok_and(|environment| !environment.is_empty());
    let main = read_from(&format!("/proc/{pid}/environ"));
    if has_some(&main) || main.as_ref().is_err_and(|error| error.raw_os_error() != Some(libc::ESRCH)) {
        return main;
    }
    // The main thread may end before others do, which have the memory then.
    let threads = fs::read_dir(format!("/proc/{pid}/task"))?.flatten().skip(1).take(SOME);
    threads.map(|thread| read_from(&thread.path().join("environ"))).find(has_some).unwrap_or(main)
}

fn read_from(path: &(impl AsRef<Path> + ?Sized)) -> io::Result<Vec<u8>> {
    let mut environment = Vec::new();
    File::open(path.as_ref())?.take(MOST).read_to_end(&mut environment)?;
    Ok(environment)
}

/// What a search has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The processes that carry a value, each with the number of the value.
    pub carriers: Vec<(i32, Identity, usize)>,
    /// All whose environment was read, with when they started.
    pub looked_at: Vec<(i32, Identity, u64)>,
    /// Whether all were tried, but for those that are passed over and those of [`left_out`](Found::left_out).
    pub are_all: bool,
    /// The numbers of the values that processes carried which have ended meanwhile: each may have left a child that was not read.
    pub ended: HashSet<usize>,
    /// The users some of whose processes were left out, since others of theirs took long.
    pub left_out: HashSet<Option<u32>>,
    /// Whether some could not be tried for want of descriptors, threads or memory.
    pub is_short: bool,
}

/// Finds those of `pids` whose variable `name` begins with one of `values`, as far as they are found until `end`.
pub fn carriers(pids: Vec<i32>, name: &str, values: &[Vec<u8>], end: Instant) -> Found {
    let left = Arc::new(Mutex::new(Left { pids, ..Left::default() }));
    let wanted = Arc::new(Wanted { name: format!("{name}=").into_bytes(), values: values.to_vec() });
    let mut found = Found { are_all: true, ..Found::default() };
    while !left.lock().pids.is_empty() {
        if Instant::now() > end {
            return Found { are_all: false, ..found };
        }
        let (said, heard) = mpsc::channel();
        let (left, wanted) = (left.clone(), wanted.clone());
        // Without a thread some environment may take for ever.
        if thread::Builder::new().name("environ".to_owned()).spawn(move || read(&left, &wanted, &said, end)).is_err() {
            return Found { are_all: false, is_short: true, ..found };
        }
        follow(&heard, &mut found);
    }
    found.left_out = std::mem::take(&mut left.lock().left_out);
    found
}

/// What is left of a search.
#[derive(Default)]
struct Left {
    pids: Vec<i32>,
    /// For how long those were waited for whose reads were not prompt, by user.
    waited: HashMap<Option<u32>, Duration>,
    left_out: HashSet<Option<u32>>,
}

impl Left {
    /// Takes a process of those that are not passed over. No lock is held while a process is looked at.
    fn take(left: &Mutex<Left>) -> Option<i32> {
        loop {
            let (pid, all_prompt) = {
                let mut left = left.lock();
                (left.pids.pop()?, left.waited.is_empty())
            };
            if is_passed_over(pid) {
                continue;
            }
            if all_prompt {
                return Some(pid);
            }
            let user = user_of(pid);
            let mut left = left.lock();
            if left.waited.get(&user).is_none_or(|waited| *waited < MOST_WAITED) {
                return Some(pid);
            }
            left.left_out.insert(user);
        }
    }

    /// Notes that reading a process took so long.
    fn note(left: &Mutex<Left>, pid: i32, took: Duration) {
        if took > PROMPT {
            let user = user_of(pid);
            *left.lock().waited.entry(user).or_default() += took;
        }
    }
}

/// What is looked for in an environment.
struct Wanted {
    /// The name of the variable, and what divides it from the value.
    name: Vec<u8>,
    /// What the value begins with.
    values: Vec<Vec<u8>>,
}

impl Wanted {
    /// Returns the numbers of the values that are there.
    fn found_in(&self, environment: &[u8]) -> Vec<usize> {
        let entries = environment.split(|&byte| byte == 0).filter_map(|entry| entry.strip_prefix(&self.name[..]));
        let mut numbers = Vec::new();
        for entry in entries {
            for (number, value) in self.values.iter().enumerate() {
                if entry.starts_with(value) && !numbers.contains(&number) {
                    numbers.push(number);
                }
            }
        }
        numbers
    }
}

/// What a reading thread says.
enum Said {
    /// It begins with a process.
    Begins(i32),
    /// It is done with the process.
    Has(i32, Outcome),
}

/// What came of reading an environment.
enum Outcome {
    /// A process of this identity, which started then, has these values; or none of them.
    Carries(Identity, u64, Vec<usize>),
    /// A process that had these values, or none of them, has ended.
    Ended(Vec<usize>),
    /// There is none, or it may not be looked at.
    Failed,
    /// This process is short of descriptors or memory.
    Short,
}

/// Reads the environments of those that are left, one after the other, until one takes long, or the end.
fn read(left: &Mutex<Left>, wanted: &Wanted, said: &Sender<Said>, end: Instant) {
    let mut takes_long = false;
    while !takes_long {
        let Some(pid) = Left::take(left) else { return };
        let start = Instant::now();
        let _ = said.send(Said::Begins(pid));
        let has = values_of(pid, wanted)
            .unwrap_or_else(|error| if is_shortage(&error) { Outcome::Short } else { Outcome::Failed });
        // If nothing listens any more, `pid` is noted as stuck.
        let _ = said.send(Said::Has(pid, has));
        STUCK.lock().remove(&pid);
        Left::note(left, pid, start.elapsed());
        takes_long = start.elapsed() > PATIENCE / 2 || Instant::now() > end;
    }
}

/// Reads the environment of one process.
fn values_of(pid: i32, wanted: &Wanted) -> io::Result<Outcome> {
    let process = PidFd::open(pid)?;
    let values = wanted.found_in(&of(pid)?);
    let started = started(pid).unwrap_or(u64::MAX);
    // If the process has ended by now, what was read may be another's, and the other way round.
    Ok(match process.identity() {
        Some(identity) => Outcome::Carries(identity, started, values),
        None => Outcome::Ended(values),
    })
}

/// Collects what a reading thread finds, until it ends or is stuck.
fn follow(heard: &Receiver<Said>, found: &mut Found) {
    let mut reading = None;
    loop {
        let said = match heard.recv_timeout(PATIENCE) {
            Err(RecvTimeoutError::Timeout) => {
                let Some(pid) = reading else { continue };
                let stuck = Stuck::of(pid);
                STUCK.lock().insert(pid, stuck);
                match heard.try_recv() {
                    // It was done with it just now.
                    Ok(said) => {
                        STUCK.lock().remove(&pid);
                        said
                    }
                    Err(_) => return,
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Ok(said) => said,
        };
        match said {
            Said::Begins(pid) => reading = Some(pid),
            Said::Has(pid, has) => {
                reading = None;
                match has {
                    Outcome::Carries(identity, started, values) => {
                        found.looked_at.push((pid, identity, started));
                        found.carriers.extend(values.into_iter().map(|number| (pid, identity, number)));
                    }
                    Outcome::Failed => {}
                    Outcome::Ended(values) => found.ended.extend(values),
                    Outcome::Short => (found.are_all, found.is_short) = (false, true),
                }
            }
        }
    }
}

fn is_passed_over(pid: i32) -> bool {
    let (identity, count) = {
        let stuck = STUCK.lock();
        (stuck.get(&pid).map(|stuck| stuck.identity), stuck.len())
    };
    if identity.is_some_and(|identity| identity == Identity::of(pid)) {
        return true;
    }
    count >= MOST_STUCK && {
        let user = user_of(pid);
        STUCK.lock().values().filter(|other| other.user == user).count() >= MOST_STUCK
    }
}

/// The real user of a process, whatever it is permitted and whether or not it may be looked at; `None` once it is gone.
fn user_of(pid: i32) -> Option<u32> {
    let status = read_named(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carriers_are_found() {
        let own = std::process::id() as i32;
        let first = of(own).expect("our own");
        let entry =
            first.split(|&byte| byte == 0).find(|entry| entry.contains(&b'=')).expect("an environment").to_vec();
        let end = Instant::now() + Duration::from_secs(60);
        assert_eq!((user_of(own), user_of(0)), (Some(rustix::process::getuid().as_raw()), None));
        let entry = String::from_utf8(entry).expect("text");
        let (name, value) = entry.split_once('=').expect("it has a value");
        let values = [b"no such value".to_vec(), value.as_bytes().to_vec()];
        let found = carriers(vec![own, 0], name, &values, end);
        let identity = Identity::of(own).expect("it lives");
        let carriers_found = vec![(own, identity, 1)];
        let looked_at = vec![(own, identity, started(own).expect("it lives"))];
        assert_eq!(
            found,
            Found { carriers: carriers_found, looked_at: looked_at.clone(), are_all: true, ..Found::default() }
        );
        let found = carriers(vec![own], "no such name", &values, end);
        assert_eq!(found, Found { carriers: vec![], looked_at, are_all: true, ..Found::default() });
        assert_eq!(carriers(vec![own], name, &values, Instant::now() - PATIENCE), Found::default());
    }

    #[test]
    fn a_user_whose_reads_wait_is_passed_over_for_the_rest_of_a_search() {
        let own = std::process::id() as i32;
        let left = Mutex::new(Left { pids: vec![own; 4], ..Left::default() });
        Left::note(&left, own, PROMPT);
        assert_eq!((Left::take(&left), left.lock().waited.len()), (Some(own), 0));
        Left::note(&left, own, MOST_WAITED - PROMPT);
        assert_eq!(Left::take(&left), Some(own));
        Left::note(&left, own, PROMPT + Duration::from_millis(1));
        // Those of others are read.
        left.lock().pids.insert(0, 0);
        assert_eq!((Left::take(&left), Left::take(&left)), (Some(0), None));
        assert_eq!(left.lock().left_out, HashSet::from([user_of(own)]));
    }

    /// What else was searched for is not in doubt.
    #[test]
    fn a_carrier_that_has_ended_leaves_only_its_own_values_in_doubt() {
        let (said, heard) = mpsc::channel();
        let other = Identity::Inode(7);
        for outcome in [Outcome::Ended(vec![2]), Outcome::Failed, Outcome::Carries(other, 9, vec![])] {
            said.send(Said::Begins(1)).and_then(|()| said.send(Said::Has(1, outcome))).expect("it is heard");
        }
        drop(said);
        let mut found = Found { are_all: true, ..Found::default() };
        follow(&heard, &mut found);
        assert_eq!(
            found,
            Found { looked_at: vec![(1, other, 9)], are_all: true, ended: HashSet::from([2]), ..Found::default() }
        );
    }

    #[test]
    fn a_process_may_carry_several_values() {
        let values = ["one", "two", "three"].map(|value| value.as_bytes().to_vec()).to_vec();
        let wanted = Wanted { name: b"JOB=".to_vec(), values };
        assert_eq!(wanted.found_in(b"A=1\0JOB=three and more\0JOB=one\0JOB=three\0two\0"), [2, 0]);
        assert!(wanted.found_in(b"NOJOB=one\0JOB=on\0").is_empty());
    }
}

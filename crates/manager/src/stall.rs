//! How long programs wait for memory: `memory.pressure`, in the form and with the meaning that the kernel's document on
//! pressure stall information (PSI) gives it.
//!
//! - A *stall* is the time that a thread waits because memory is short: for a page that was taken from it, for reclaim to make
//!   room below a limit ([`uzswap_vm::pager::Account::stall`]), or that its process is held by the brake. A page that is
//!   touched for the first time is none if it is filled at once. It begins when we hear of it and ends when it is answered:
//!   how long the thread then takes to run again, nobody can tell us.
//! - *some* is the time in which at least one thread of a group, or below it, stalls. It is exact: an atomic for each
//!   group, changed when the first thread of a process begins to wait and when the last one goes on.
//! - *full* is the part of it in which none of the group's other threads runs or is ready to. Nobody tells us of that, so it is
//!   sampled: every 10 ms, or as soon after as somebody stalls, the threads of the processes in groups that stall at that moment
//!   are looked at, and what has been stalled since the last such look counts as it is found then. It is never more than *some*,
//!   and lags behind it until a look meets a stall, two seconds at most: then that counts as the last one that was met.
//! - The averages are exponential means over 10, 60 and 300 s, brought up to date every two seconds.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_vm::pager::Account;
use uzswap_vm::sys::process::runs_besides;
use uzswap_vm::sys::thread;

use crate::charge::Charge;
use crate::control::{Pressure, Stall};
use crate::groups::Groups;
use crate::sessions::Sessions;

/// How often threads are looked at while somebody stalls, how soon again if nobody did just then, and how seldom it is asked
/// whether anybody has stalled.
const LOOK: Duration = Duration::from_millis(10);
const AGAIN: Duration = Duration::from_millis(2);
const IDLE: Duration = Duration::from_millis(250);

/// The part of a processor that looking may take: one in so many.
const LOOKING_SHARE: u32 = 50;

/// How often averages are brought up to date.
const UPDATE: Duration = Duration::from_secs(2);

/// What the averages are over, in seconds.
const WINDOWS: [f64; 3] = [10.0, 60.0, 300.0];

/// The lower bits of [`Stalls::word`]: how many wait.
const COUNT_BITS: u32 = 16;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// The others: 2^48 microseconds, nearly nine years.
const TIME: u64 = u64::MAX >> COUNT_BITS;

/// The stalls of one group and of all below it.
#[derive(Debug, Default)]
pub struct Stalls {
    /// How many processes have threads that wait, and a time in microseconds: while nobody waits, how long somebody has
    /// waited in all; else the same less the time at which this wait began. So both change in one step.
    word: AtomicU64,
    trends: Mutex<Trends>,
}

/// What only the thread that looks changes.
#[derive(Debug, Default)]
struct Trends {
    /// *some* when it was last looked at, and what of it has not been judged since.
    seen: u64,
    open: u64,
    full: u64,
    /// What was found last.
    was_full: bool,
    /// *some* and *full*: when the averages were last brought up to date, and these, in percent.
    updated: [u64; 2],
    averages: [[f64; 3]; 2],
}

/// Microseconds since some moment.
fn now() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_micros() as u64
}

impl Stalls {
    /// One process more waits, at this time.
    fn begin(&self, now: u64) {
        self.change(|count, time| (count + 1, if count == 0 { time.wrapping_sub(now) } else { time }));
    }

    /// One less.
    fn end(&self, now: u64) {
        self.change(|count, time| (count - 1, if count == 1 { time.wrapping_add(now) } else { time }));
    }

    fn change(&self, change: impl Fn(u64, u64) -> (u64, u64)) {
        let changed = |word: u64| {
            let (count, time) = change(word & COUNT, word >> COUNT_BITS);
            Some((time & TIME) << COUNT_BITS | count)
        };
        let _ = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, changed);
    }

    fn word(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// How long somebody has waited in all, at this time, which must not be before the last change.
    fn some(&self) -> u64 {
        let word = self.word();
        let time = word >> COUNT_BITS;
        if word & COUNT == 0 { time } else { time.wrapping_add(now()) & TIME }
    }

    /// `memory.pressure`.
    pub fn pressure(&self) -> Pressure {
        let trends = self.trends.lock();
        let stall = |which: usize, total| {
            let [avg10, avg60, avg300] = trends.averages[which];
            Stall { avg10, avg60, avg300, total }
        };
        Pressure { some: stall(0, self.some()), full: stall(1, trends.full) }
    }
}

impl Trends {
    /// Takes note of `some`.
    fn see(&mut self, some: u64) {
        self.open += some.saturating_sub(self.seen);
        self.seen = self.seen.max(some);
    }

    /// What has not been judged yet was like this moment, in which somebody stalls.
    fn judge(&mut self, full: bool) {
        let open = std::mem::take(&mut self.open);
        self.full += if full { open } else { 0 };
        self.was_full = full;
    }

    /// Brings the averages up to date, so long after the last time.
    fn update(&mut self, elapsed: Duration) {
        self.judge(self.was_full);
        let totals = [self.seen, self.full];
        for ((total, last), averages) in totals.into_iter().zip(&mut self.updated).zip(&mut self.averages) {
            let part = (total - std::mem::replace(last, total)) as f64 / elapsed.as_micros().max(1) as f64;
            for (average, window) in averages.iter_mut().zip(WINDOWS) {
                let keep = (-elapsed.as_secs_f64() / window).exp();
                *average = *average * keep + part.min(1.0) * 100.0 * (1.0 - keep);
            }
        }
    }
}

impl Charge {
    /// A process begins to wait, in this group and all above it.
    pub(crate) fn begin_stall(&self) {
        let now = now();
        self.path().for_each(|charge| charge.stalls.begin(now));
    }

    /// It goes on.
    pub(crate) fn end_stall(&self) {
        let now = now();
        self.path().for_each(|charge| charge.stalls.end(now));
    }
}

/// A process that does not run, as long as this is there.
#[derive(Debug)]
pub struct Stalled(Arc<Charge>);

impl Stalled {
    /// From now on, in this group.
    pub fn new(charge: Arc<Charge>) -> Stalled {
        charge.stall();
        Stalled(charge)
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        self.0.go_on();
    }
}

/// Looks at who stalls, and keeps averages, until told to stop.
pub fn run(groups: &Groups, sessions: &Sessions, stop: &AtomicBool) {
    let (mut pause, mut noted, mut updated) = (LOOK, Instant::now(), Instant::now());
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(pause);
        let start = thread::processor_time();
        let charges = groups.all();
        let looked = look(&charges, sessions);
        if noted.elapsed() >= IDLE {
            groups.note_swap();
            noted = Instant::now();
        }
        let elapsed = updated.elapsed();
        if elapsed >= UPDATE {
            charges.iter().for_each(|charge| charge.stalls.trends.lock().update(elapsed));
            updated = Instant::now();
        }
        let rest = (thread::processor_time() - start) * LOOKING_SHARE;
        pause = match looked {
            Looked::Nobody => (pause * 2).min(IDLE),
            Looked::NobodyNow => AGAIN.max(rest),
            Looked::Judged => LOOK.max(rest),
        };
    }
}

/// What a look has found.
enum Looked {
    /// Nobody has stalled since the last judgement.
    Nobody,
    /// Somebody has, but does not at this moment.
    NobodyNow,
    Judged,
}

/// Judges the groups that stall at this moment.
fn look(charges: &[Arc<Charge>], sessions: &Sessions) -> Looked {
    let mut any = false;
    for charge in charges {
        let trends = &mut *charge.stalls.trends.lock();
        trends.see(charge.stalls.some());
        any |= trends.open > 0;
    }
    if !any {
        return Looked::Nobody;
    }
    // Who waits first: what is looked at later may have gone on by then.
    let words: Vec<u64> = charges.iter().map(|charge| charge.stalls.word()).collect();
    // The root has everybody's.
    if words[0] & COUNT == 0 {
        return Looked::NobodyNow;
    }
    let seen: Vec<_> =
        sessions.all().into_iter().map(|session| (session.charge(), session.space.stalled(), session.pid)).collect();
    let stall: Vec<bool> = charges
        .iter()
        .zip(words)
        .map(|(charge, word)| {
            // Who is held waits for no page; he has been held all the while.
            let held = word & COUNT > 0 && charge.stalls.word() == word;
            held || seen.iter().any(|(own, tids, _)| !tids.is_empty() && own.is_below(charge.id))
        })
        .collect();
    let stalling = |own: &Charge| charges.iter().zip(&stall).any(|(charge, stall)| *stall && own.is_below(charge.id));
    let running: Vec<&Charge> = seen
        .iter()
        .filter(|(own, tids, pid)| stalling(own) && runs_besides(*pid, tids))
        .map(|(own, ..)| &**own)
        .collect();
    for (charge, _) in charges.iter().zip(&stall).filter(|(_, stall)| **stall) {
        charge.stalls.trends.lock().judge(!running.iter().any(|own| own.is_below(charge.id)));
    }
    if stall[0] { Looked::Judged } else { Looked::NobodyNow }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_lasts_from_the_first_who_begins_to_the_last_who_goes_on() {
        let stalls = Stalls::default();
        let some = || stalls.word() >> COUNT_BITS;
        stalls.begin(100);
        stalls.begin(150);
        stalls.end(170);
        stalls.end(200);
        assert_eq!((some(), stalls.word() & COUNT), (100, 0));
        stalls.begin(1000);
        stalls.end(1000);
        stalls.begin(2000);
        stalls.end(2005);
        assert_eq!((some(), stalls.some(), stalls.pressure().some.total), (105, 105, 105));
    }

    #[test]
    fn who_waits_waits_in_every_group_above() {
        use crate::control::GroupId;
        use uzswap_engine::Group;
        let charge = |id, parent| Arc::new(Charge::new(GroupId(id), Group::ROOT, parent, Arc::default()));
        let top = charge(0, None);
        let [one, two] = [1, 2].map(|id| charge(id, Some(top.clone())));
        let waiting = |charge: &Charge| charge.stalls.word() & COUNT;
        let held = Stalled::new(one.clone());
        two.stall();
        assert_eq!((waiting(&one), waiting(&two), waiting(&top)), (1, 1, 2));
        drop(held);
        two.go_on();
        assert_eq!((waiting(&one), waiting(&two), waiting(&top)), (0, 0, 0));
    }

    #[test]
    fn a_wait_under_way_counts() {
        let stalls = Stalls::default();
        stalls.begin(now());
        std::thread::sleep(Duration::from_millis(20));
        let first = stalls.some();
        assert!(first >= 20_000);
        std::thread::sleep(Duration::from_millis(1));
        stalls.end(now());
        assert!(stalls.some() > first);
        assert_eq!(stalls.some(), stalls.some());
    }

    #[test]
    fn threads_that_begin_and_end_at_once_lose_nothing() {
        let stalls = Stalls::default();
        let start = now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        stalls.begin(now());
                        stalls.end(now());
                    }
                });
            }
        });
        assert_eq!(stalls.word() & COUNT, 0);
        assert!(stalls.some() > 0 && stalls.some() < 10 * (now() - start), "{} of {}", stalls.some(), now() - start);
    }

    #[test]
    fn what_was_not_judged_is_as_the_next_look_finds_it() {
        let mut trends = Trends::default();
        trends.see(500);
        trends.judge(true);
        trends.see(700);
        trends.see(900);
        trends.judge(false);
        trends.judge(true);
        trends.see(1000);
        assert_eq!((trends.full, trends.open), (500, 100));
        trends.update(UPDATE);
        assert_eq!((trends.full, trends.open), (600, 0), "no look has met it");
    }

    #[test]
    fn averages_approach_what_goes_on_and_forget_it_again() {
        let mut trends = Trends::default();
        let pass = |trends: &mut Trends, seconds: u64, percent: u64| {
            for _ in 0..seconds / 2 {
                trends.see(trends.seen + percent * 20_000);
                trends.judge(percent == 100);
                trends.update(UPDATE);
            }
        };
        pass(&mut trends, 10, 50);
        let [ten, sixty, three_hundred] = trends.averages[0];
        // 1 - 1/e of it after a window has passed.
        assert!(
            (ten - 31.6).abs() < 0.1 && (sixty - 7.7).abs() < 0.1 && (three_hundred - 1.6).abs() < 0.1,
            "{trends:?}"
        );
        assert_eq!(trends.averages[1], [0.0; 3]);
        pass(&mut trends, 100, 100);
        assert!((99.9..=100.0).contains(&trends.averages[0][0]) && trends.averages[1][0] > 99.9, "{trends:?}");
        pass(&mut trends, 100, 0);
        assert!(trends.averages[0][0] < 0.01 && trends.averages[0][2] > 10.0, "{trends:?}");
        // Late, and more than there was time for.
        trends.see(trends.seen + 10_000_000);
        trends.update(Duration::from_secs(5));
        assert!(trends.averages[0].iter().all(|average| *average <= 100.0));
    }
}

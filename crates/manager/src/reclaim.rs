//! Keeping groups within their limits.
//!
//! Each round: measure; have processes take turns where they thrash (`turns`); for each group whose charge is above its soft
//! limit, evict a little from the users with most memory: from those of their processes that rest, else from the largest; store what has
//! waited long enough, and have its part of the pool shrunk when they have little to give; let waiting faults try again. A
//! group below `memory.min` is left alone, one below `memory.low` as long as others have something to give, or may have it when their workers
//! have answered or their mappings are registered. When nothing can be reclaimed any more and a limit is still in the way, the largest process
//! under it is killed, as the kernel would; of several users, processes of the user with most. The groups of one user, however many, take no
//! more than that user's part of a round.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use uzswap_engine::{Group, PAGE_SIZE};
use uzswap_vm::owner::Owner;
use uzswap_vm::pager::Pager;
use uzswap_vm::visit;

use crate::charge::{Charge, EXHAUSTED_PAUSE, LONGEST_PAUSE, margin};
use crate::control::{GroupId, Limit};
use crate::executioner;
use crate::groups::Groups;
use crate::oom::{self, Cause, Disk};
use crate::sessions::Session;
use crate::shrink::ShrinkWorker;
use crate::turns::{self, LoadControl};
use crate::watch::Watch;

/// Pages that one step evicts from a process, at least and at most.
const STEP_PAGES: RangeInclusive<usize> = 256..=1024;

/// When the staging areas of a group have so many pages more than may wait there, reclaim stores before it moves out any more. Less is what it
/// is about to store, of two processes.
const SURPLUS_PAGES: usize = 2 * *STEP_PAGES.end();

/// A pool that has less than one in so many bytes of its group's is left alone as long as there is something else to take.
const SMALL_POOL: u64 = 8;

/// What the pool is shrunk by at least, when it is.
const SHRINK_BYTES: u64 = 256 << 10;

/// How long after somebody was refused memory a group is in want of some.
const REFUSAL_COUNTS: Duration = Duration::from_millis(200);

/// How long processes that are not protected may be late before groups below `memory.low` give way: their workers have not answered, or
/// what they have touched has not been registered.
const LATE_PATIENCE: Duration = Duration::from_secs(1);

/// A process whose mappings were registered within this time has next to nothing that is not: this is done every 50 ms near a limit.
const REGISTRATION_COUNTS: Duration = Duration::from_millis(100);

/// How long reclaim may come to nothing, with a thread waiting, before a process is killed; and how long if it has not looked at all that
/// could be taken, or some of it has not been registered meanwhile: tens of thousands of mappings take seconds.
const OOM_PATIENCE: Duration = Duration::from_secs(2);
const OOM_PATIENCE_IN_PARTS: Duration = Duration::from_secs(20);

/// Fewer pages freed within [`OOM_PATIENCE`] come to nothing: of a swap file that fails most writes a few are still done. A disk is faster
/// than 64 KiB in a second.
const LEAST_FREED: u64 = 32;

/// How often reclaim has looked at each page that is resident, in the mean, when it passes for having looked at all.
const LOOKS: u64 = 4;

/// How long it takes to go through all groups that are to be reclaimed from, and how long a step in one of them takes: a group with hundreds
/// of processes, each of which lets reclaim wait for a processor, is not to keep it from the others.
const ROUND: Duration = Duration::from_millis(40);
const SHORTEST_STEP: Duration = Duration::from_millis(2);
const LONGEST_STEP: Duration = Duration::from_millis(20);

/// Takes memory from programs.
#[derive(Clone)]
pub struct Taker {
    /// Whose spaces they have.
    pub pager: Arc<Pager>,
    /// The tree that they are in.
    pub groups: Arc<Groups>,
}

/// The reclaimer of a manager.
pub struct Reclaimer {
    shrink_worker: Arc<ShrinkWorker>,
    watch: Arc<Watch>,
    taker: Taker,
    disk: Disk,
    /// Set when the job is over.
    stop: Arc<AtomicBool>,
    /// What is remembered from round to round of each group that is near its limit.
    need: HashMap<GroupId, Need>,
    /// What the shrink worker had freed when it was last looked at.
    shrunk: u64,
    load: LoadControl,
    /// Sessions whose process was killed and may still be there.
    condemned: HashSet<u64>,
    /// The number of the round.
    round: usize,
}

/// Reclaim in one group that comes to nothing.
#[derive(Debug, Clone, Copy)]
struct Vain {
    since: Instant,
    /// Pages that were freed all the same.
    freed: u64,
    /// Pages that had been looked at when it began.
    scanned: u64,
}

impl Vain {
    /// Begins when `scanned` pages have been looked at.
    fn new(scanned: u64) -> Vain {
        Vain { since: Instant::now(), freed: 0, scanned }
    }

    /// Returns the same after `freed` pages more were freed; None if reclaim has come to something.
    fn after(self, freed: u64) -> Option<Vain> {
        let freed = self.freed + freed;
        (freed < LEAST_FREED).then_some(Vain { freed, ..self })
    }

    /// Tells whether reclaim has looked at all of `resident` pages since, if it has looked at `scanned` by now.
    fn has_looked_at_all(&self, scanned: u64, resident: u64) -> bool {
        scanned.saturating_sub(self.scanned) >= resident * LOOKS
    }
}

#[derive(Debug, Default)]
struct Need {
    vain: Option<Vain>,
    /// How often somebody had been refused memory, and when that was last seen to have changed.
    refusals: u64,
    refused_at: Option<Instant>,
    /// Pages of its own processes that had been looked at.
    scanned: u64,
    /// When it was last tried to take something from it.
    tried_at: Option<Instant>,
}

/// Processes with their resident bytes, largest first.
type Sizes<'a> = &'a [(Arc<Session>, u64)];

/// One of them.
type Measured<'a> = &'a (Arc<Session>, u64);

impl Reclaimer {
    /// A reclaimer that knows nothing of what one before it has done, but which processes may rest.
    pub fn new(
        shrink_worker: Arc<ShrinkWorker>,
        watch: Arc<Watch>,
        taker: Taker,
        disk: Disk,
        stop: Arc<AtomicBool>,
    ) -> Reclaimer {
        let resting = taker.pager.spaces();
        Reclaimer {
            shrink_worker,
            watch,
            taker,
            disk,
            stop,
            need: HashMap::new(),
            shrunk: 0,
            load: LoadControl::new(resting),
            condemned: HashSet::new(),
            round: 0,
        }
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        while !self.is_over() {
            let sessions = self.watch.measure();
            self.control_load(&sessions);
            let more = self.reclaim(&sessions);
            // Otherwise the descriptors of a process that ends stay open for as long as this thread waits.
            drop(sessions);
            // Memory may have become free without reclaim.
            let waiting = self.let_waiting_try();
            self.taker.pager.hear_late_answers();
            if more {
                continue;
            }
            // Nobody tells when an exhausted group could give something again.
            if waiting || self.is_any_exhausted() {
                self.taker.groups.bell.wait(self.taker.groups.reclaim_pause());
                continue;
            }
            if self.load.is_holding() {
                self.taker.groups.bell.wait(turns::LOOK);
                continue;
            }
            // Whoever is refused memory rings, and so does the watch as long as a group has too much.
            while !self.taker.groups.bell.wait(LONGEST_PAUSE) && !self.is_over() {
                self.taker.pager.hear_late_answers();
            }
        }
    }

    /// Whether the job is over, or another thread does this now.
    fn is_over(&self) -> bool {
        self.stop.load(Relaxed) || visit::is_surplus()
    }

    fn is_any_exhausted(&self) -> bool {
        self.taker.groups.all().iter().any(|charge| charge.is_exhausted() && charge.excess() > 0)
    }

    /// Has processes that take each other's memory take turns.
    fn control_load(&mut self, sessions: Sizes<'_>) {
        let taker = &self.taker;
        self.load.look(&taker.pager, |load| {
            let charges = taker.groups.all();
            let concerned = charges.iter().filter(|charge| charge.is_near() || load.concerns(charge.id));
            concerned.map(|charge| (charge.id, taker.processes(charge, sessions))).collect()
        });
    }

    /// Brings all charges nearer to their soft limits; tells whether there is more to do at once.
    fn reclaim(&mut self, sessions: Sizes<'_>) -> bool {
        let charges = self.taker.groups.all();
        self.need.retain(|id, _| charges.iter().any(|charge| charge.id == *id));
        let shrunk = self.shrink_worker.freed();
        let shrunk = shrunk - std::mem::replace(&mut self.shrunk, shrunk);
        let mut more = false;
        let in_need: HashSet<GroupId> =
            charges.iter().filter(|charge| charge.is_near() && charge.excess() > 0).map(|charge| charge.id).collect();
        self.round = self.round.wrapping_add(1);
        let times = times_of_steps(
            self.round,
            sessions.iter().flat_map(|(session, _)| {
                let (user, charge) = (Arc::as_ptr(&session.space.user()), session.charge());
                charge
                    .path()
                    .map(|group| group.id)
                    .filter(|id| in_need.contains(id))
                    .map(|id| (user, id))
                    .collect::<Vec<_>>()
            }),
        );
        // Children first: what they give up is their parents' gain.
        for charge in charges.iter().rev() {
            match charge.is_near() {
                true => {
                    let time = times.get(&charge.id).copied().unwrap_or(LONGEST_STEP);
                    more |= time.is_zero() || self.reclaim_from(charge, sessions, shrunk, time);
                }
                false => charge.set_exhausted(false),
            }
        }
        more
    }

    /// One step in one group, after the pool was shrunk by so many bytes; tells whether it has freed anything.
    fn reclaim_from(&mut self, charge: &Arc<Charge>, sessions: Sizes<'_>, shrunk: u64, time: Duration) -> bool {
        let wanted = charge.excess().max(0) as u64;
        // Who is past the limit may be held, and waits for that reason.
        let waiting = charge.is_above_max() || self.anybody_waits(charge);
        let pages = (wanted as usize / PAGE_SIZE).max(*STEP_PAGES.start());
        let need = self.need.entry(charge.id).or_default();
        let rests = charge.is_exhausted() && need.tried_at.is_some_and(|at| at.elapsed() < EXHAUSTED_PAUSE);
        let step = if wanted == 0 {
            charge.set_exhausted(false);
            Step::default()
        } else if rests {
            Step::default()
        } else {
            let now = Instant::now();
            need.tried_at = Some(now);
            self.taker.step_until(charge, sessions, pages, waiting, Some(now + time))
        };
        let freed = (step.freed * PAGE_SIZE) as u64;
        if freed > 0 && charge.excess() > 0 && charge.limit(Limit::High).is_some() {
            charge.count(|events| &events.high);
        }
        let targets = self.taker.groups.unprotected(charge);
        self.press_pool(sessions, charge, &targets);
        let current = charge.current.load(Relaxed);
        let pool = current.saturating_sub(charge.anon.load(Relaxed));
        let fruitless = self.need.get(&charge.id).is_some_and(|need| need.vain.is_some());
        if freed < wanted / 2 && (pool > current / SMALL_POOL || fruitless) {
            // Programs hold on to what they have: then the pool has too large a part.
            let bytes = (wanted - freed).max(SHRINK_BYTES) / targets.len().max(1) as u64;
            targets.iter().for_each(|target| self.shrink_worker.ask(target.group, bytes, charge.clone()));
        }
        let need = self.need.entry(charge.id).or_default();
        let refusals = charge.events.max.load(Relaxed);
        if std::mem::replace(&mut need.refusals, refusals) != refusals {
            need.refused_at = Some(Instant::now());
        }
        // If the pool is nearly all that the group has, what is freed by a store is wanted back at once.
        let squeezed = pool > charge.max() / 4 * 3 && need.refused_at.is_some_and(|at| at.elapsed() < REFUSAL_COUNTS);
        // Whoever waits below may wait for another limit than this.
        let most = if waiting || squeezed { 0 } else { margin(charge.max()) as i64 };
        let in_need = charge.limit(Limit::Max).is_some() && charge.need() > most;
        let gained = shrunk / PAGE_SIZE as u64 + if squeezed { 0 } else { step.freed as u64 };
        let groups = &self.taker.groups;
        let scanned = || groups.counted(charge.id, |counters| &counters.pgscan);
        need.vain = if in_need { need.vain.unwrap_or_else(|| Vain::new(scanned())).after(gained) } else { None };
        if let Some(vain) = need.vain {
            let is_below = |session: &Session| session.charge().is_below(charge.id);
            let is_unregistered =
                || sessions.iter().any(|(session, _)| is_below(session) && session.is_unregistered_since(vain.since));
            let resident = charge.anon.load(Relaxed) / PAGE_SIZE as u64;
            let is_in_parts = step.is_in_parts && !vain.has_looked_at_all(scanned(), resident);
            let elapsed = vain.since.elapsed();
            if elapsed > OOM_PATIENCE && (elapsed > OOM_PATIENCE_IN_PARTS || !is_in_parts && !is_unregistered()) {
                need.vain = None;
                self.kill_largest(charge, sessions);
            }
        }
        freed > 0 || step.is_broken_off && step.moved > 0
    }

    /// Has the pool shrunk in proportion: of each group of `targets` and below, by as large a part as was looked at of its programs' memory.
    /// What was looked at of the others, which are protected, was so for their own limits.
    fn press_pool(&mut self, sessions: Sizes<'_>, reclaimed: &Arc<Charge>, targets: &[Arc<Charge>]) {
        let below: HashMap<GroupId, (Arc<Charge>, u64)> =
            sessions.iter().fold(HashMap::new(), |mut below, (session, bytes)| {
                let charge = session.charge();
                if targets.iter().any(|target| charge.is_below(target.id)) {
                    below.entry(charge.id).or_insert((charge, 0)).1 += bytes;
                }
                below
            });
        for (id, (charge, bytes)) in below {
            let scanned = charge.counters.pgscan.load(Relaxed);
            let pages = scanned - std::mem::replace(&mut self.need.entry(id).or_default().scanned, scanned);
            let resident = (bytes / PAGE_SIZE as u64).max(1);
            if pages > 0 {
                self.shrink_worker.press(charge.group, pages as f64 / resident as f64, Some(reclaimed.clone()));
            }
        }
    }

    /// Whether threads of a group, or below it, wait for memory.
    fn anybody_waits(&self, charge: &Charge) -> bool {
        let charges = self.taker.groups.all();
        let groups: HashSet<Group> =
            charges.iter().filter(|other| other.is_below(charge.id)).map(|other| other.group).collect();
        self.taker
            .pager
            .open_spaces()
            .iter()
            .any(|space| groups.contains(&space.account().group()) && space.has_waiting())
    }

    /// Tells whether anybody waits.
    fn let_waiting_try(&self) -> bool {
        let mut waiting = false;
        for space in self.taker.pager.open_spaces() {
            if space.has_waiting() {
                self.taker.pager.service_in_turn(&space);
                waiting = true;
            }
        }
        waiting
    }

    /// Kills the tracers, in the job, of a process that was killed and is still there. Returns whether there was one.
    fn kill_tracers(&self, session: &Session, sessions: Sizes<'_>) -> bool {
        let tracers = executioner::tracers(session.pid);
        let mut killed = false;
        for (tracer, _) in sessions.iter().filter(|(other, _)| other.tenant.job == session.tenant.job) {
            if tracer.id != session.id && tracers.contains(&tracer.pid) && tracer.pidfd.kill(libc::SIGKILL).is_ok() {
                killed = true;
                tracer.charge().count(|events| &events.oom_kill);
                session.tenant.tell(&format!(
                    "error: out of memory: killed process {}, too: it traces process {}, which cannot end otherwise",
                    tracer.pid, session.pid
                ));
            }
        }
        killed
    }

    /// Selects the user with most memory, or with most swapped out if the swap file takes no more. None if there is one user only.
    fn largest_user(&self, charge: &Charge, sessions: &[Measured<'_>]) -> Option<*const Owner> {
        let mut users: HashMap<*const Owner, HashMap<GroupId, Arc<Charge>>> = HashMap::new();
        for (session, _) in sessions {
            let own = session.charge();
            users.entry(user_of(session)).or_default().insert(own.id, own);
        }
        if users.len() < 2 {
            return None;
        }
        let engine = &self.shrink_worker.engine;
        let cause = Cause::find(&self.taker.groups, engine, &self.disk, charge, charge);
        let has = |charge: &Charge| match cause {
            Cause::SwapFull | Cause::Disk(_) => engine.swap_of(&[charge.group])[0],
            _ => charge.current.load(Relaxed),
        };
        let sum = |groups: &HashMap<GroupId, Arc<Charge>>| -> u64 {
            // What a group below another has is in the figure of that.
            let is_head = |charge: &Charge| !charge.path().skip(1).any(|above| groups.contains_key(&above.id));
            groups.values().filter(|charge| is_head(charge)).map(|charge| has(charge)).sum()
        };
        users.iter().map(|(user, groups)| (*user, sum(groups))).max_by_key(|(_, bytes)| *bytes).map(|(user, _)| user)
    }

    /// Kills the largest process of a group. In a group of several users it kills processes of the user with most, as many as the limit
    /// needs: the others' threads wait meanwhile. Protected groups come last. A process that was killed before and is still there is not
    /// killed again: its tracer is, or the next largest process.
    fn kill_largest(&mut self, charge: &Charge, sessions: Sizes<'_>) {
        charge.count(|events| &events.oom);
        self.condemned.retain(|id| sessions.iter().any(|(session, _)| session.id == *id));
        let below = || sessions.iter().filter(|(session, _)| session.charge().is_below(charge.id));
        let mut lingering = below().filter(|(session, _)| self.condemned.contains(&session.id));
        if lingering.any(|(session, _)| self.kill_tracers(session, sessions)) {
            return;
        }
        let living = below().filter(|(session, _)| !self.condemned.contains(&session.id));
        let protected = |session: &Session| {
            [Limit::Min, Limit::Low].into_iter().any(|limit| self.taker.protects(session, charge, limit))
        };
        let (kept, free): (Vec<_>, Vec<_>) = living.partition(|(session, _)| protected(session));
        let choice = if free.is_empty() { kept } else { free };
        let Some(user) = self.largest_user(charge, &choice) else {
            return choice.first().into_iter().for_each(|(session, bytes)| self.kill(charge, session, *bytes));
        };
        let mut need = charge.need();
        for (session, bytes) in choice.into_iter().filter(|(session, _)| user_of(session) == user) {
            self.kill(charge, session, *bytes);
            need -= *bytes as i64;
            if need <= 0 {
                break;
            }
        }
    }

    /// Kills a process because a group at its limit has no more memory.
    fn kill(&mut self, charge: &Charge, session: &Session, bytes: u64) {
        self.condemned.insert(session.id);
        let engine = &self.shrink_worker.engine;
        // Before the kill: what the process has swapped out goes with it.
        let cause = Cause::find(&self.taker.groups, engine, &self.disk, charge, &session.charge());
        if !session.pidfd.has_ended() {
            session.charge().count(|events| &events.oom_kill);
            let mib = |bytes: u64| bytes >> 20;
            let (current, max) = (mib(charge.current.load(Relaxed)), mib(charge.max()));
            let who = match charge.id {
                GroupId::ROOT if !session.tenant.is_trusted() => "the daemon".to_owned(),
                GroupId::ROOT => "the job".to_owned(),
                _ => format!("group {}", self.taker.groups.path(charge)),
            };
            let advice = cause.advice(&oom::spelling(&self.taker.groups, charge, !session.tenant.is_trusted()));
            let (pid, bytes) = (session.pid, mib(bytes));
            session.tenant.tell(&format!(
                "error: out of memory: killed process {pid}, {bytes} MiB resident; {who} has {current} of {max} MiB, and {cause}: \
                 {advice}"
            ));
            // Last: with its program the job ends, and this process does not wait for a word that is still to be said. It may have ended.
            let _ = session.pidfd.kill(libc::SIGKILL);
        }
    }
}

/// Identifies the user of a process among users.
fn user_of(session: &Session) -> *const Owner {
    Arc::as_ptr(&session.space.user())
}

impl Taker {
    /// Takes up to so many pages from each of the larger processes of a group and below it; gives the pages whose memory was
    /// freed. In a hurry none is left its second chance. Those that may swap out no more are left alone; if all are, the group is
    /// exhausted. Those below `memory.low` give way when the others have nothing to give.
    pub fn step(&self, charge: &Charge, sessions: Sizes<'_>, pages: usize, hurry: bool) -> usize {
        self.step_until(charge, sessions, pages, hurry, None).freed
    }

    /// As [`step`](Self::step), but breaks off after `end`; the next step goes on there.
    fn step_until(
        &self,
        charge: &Charge,
        sessions: Sizes<'_>,
        pages: usize,
        hurry: bool,
        end: Option<Instant>,
    ) -> Step {
        let below: Vec<Measured<'_>> =
            sessions.iter().filter(|(session, _)| session.charge().is_below(charge.id)).collect();
        let (low, free): (Vec<_>, Vec<_>) = below
            .into_iter()
            .filter(|(session, _)| !self.protects(session, charge, Limit::Min))
            .partition(|(session, _)| self.protects(session, charge, Limit::Low));
        let task = StepTask { pages, moves: true, hurry, end };
        let mut step = self.step_by_user(charge, &free, task);
        if step.is_fruitless() && !low.is_empty() && !hurry {
            // A second chance is worth less than protection.
            step = self.step_by_user(charge, &free, StepTask { hurry: true, ..task });
        }
        if !step.is_fruitless() {
            charge.note_fruitful();
        } else if !low.is_empty() && self.low_gives_way(charge, &free, step.late) {
            let groups: HashSet<GroupId> = low.iter().map(|(session, _)| session.charge().id).collect();
            for group in groups.into_iter().filter_map(|id| self.groups.get(id)) {
                group.count(|events| &events.low);
            }
            let others = self.step_through(charge, &low, task);
            step =
                Step { able: step.able || others.able, is_in_parts: step.is_in_parts || others.is_in_parts, ..others };
        }
        charge.set_exhausted(!step.able && !step.is_broken_off && free.len() + low.len() > 0);
        if step.freed > 0 {
            self.groups.note_swap();
        }
        step
    }

    /// Tells whether groups below `memory.low` give way after a step in which the processes of `free` gave nothing. They do not as long as
    /// these may have something soon: a worker `has_not_answered`, or what a process has touched has not been registered since.
    fn low_gives_way(&self, charge: &Charge, free: &[Measured<'_>], has_not_answered: bool) -> bool {
        let has_more = |first: Instant| {
            let since = Instant::now().checked_sub(REGISTRATION_COUNTS).map_or(first, |recently| first.max(recently));
            let unregistered: Vec<_> =
                free.iter().filter(|(session, _)| session.is_unregistered_since(since)).collect();
            unregistered.iter().for_each(|(session, _)| session.ask_refresh_unless_asked());
            has_not_answered || !unregistered.is_empty()
        };
        charge.note_fruitless(LATE_PATIENCE, has_more).is_none_or(|late| late >= LATE_PATIENCE)
    }

    /// Tells whether a limit protects the group of a process when `target`, above it, is reclaimed from.
    fn protects(&self, session: &Session, target: &Charge, limit: Limit) -> bool {
        self.groups.protects(&session.charge(), target.id, limit)
    }

    /// The processes of a group and below it that take from each other when it is reclaimed from.
    fn processes(&self, charge: &Charge, sessions: Sizes<'_>) -> Vec<turns::Process> {
        let takes_part =
            |session: &Session| session.charge().is_below(charge.id) && !self.protects(session, charge, Limit::Low);
        let sessions: Vec<_> = sessions.iter().filter(|(session, _)| takes_part(session)).collect();
        let (of_larger, _) = by_user(sessions);
        of_larger
            .into_iter()
            .map(|(session, bytes)| {
                let space = session.space.clone();
                turns::Process { id: session.id, pid: session.pid, bytes: *bytes, space }
            })
            .collect()
    }

    /// Takes from the users with most memory first, whatever number of processes they have it in.
    fn step_by_user(&self, charge: &Charge, sessions: &[Measured<'_>], task: StepTask) -> Step {
        let (of_larger, of_smaller) = by_user(sessions.to_vec());
        let step = self.step_through(charge, &of_larger, task);
        if of_smaller.is_empty() || !step.is_fruitless() {
            return step;
        }
        step.then(self.step_through(charge, &of_smaller, task))
    }

    /// Takes from those who rest first.
    fn step_through(&self, charge: &Charge, sessions: &[Measured<'_>], task: StepTask) -> Step {
        let (resting, others): (Vec<_>, Vec<_>) = sessions.iter().partition(|(session, _)| session.space.rests());
        if resting.is_empty() {
            return self.step_evenly(charge, &others, task);
        }
        // Nobody there comes for what waits for a second chance.
        let step = self.step_evenly(charge, &resting, StepTask { hurry: true, ..task });
        if !step.is_fruitless() {
            return step;
        }
        step.then(self.step_evenly(charge, &others, task))
    }

    /// Takes from all alike. Where workers answer late, more comes to wait in staging areas than may: that is stored first. A page that a fork
    /// left shared is copied to be moved out, so with hundreds of processes the copies would come to many times the limit.
    fn step_evenly(&self, charge: &Charge, sessions: &[Measured<'_>], task: StepTask) -> Step {
        let staged: usize = sessions.iter().filter_map(|(session, _)| session.space.staged()).sum();
        if staged > staging_pages(charge) + SURPLUS_PAGES {
            let step = self.go_through(charge, sessions, StepTask { moves: false, ..task });
            // Workers that are stopped never answer: then others give what is wanted.
            if step.freed > 0 {
                return step;
            }
        }
        self.go_through(charge, sessions, task)
    }

    /// Goes through the larger half of the processes, from where the last step broke off, and through the others until something is freed.
    fn go_through(&self, charge: &Charge, sessions: &[Measured<'_>], task: StepTask) -> Step {
        let mut step = Step::default();
        let largest = sessions.first().map_or(0, |(_, bytes)| *bytes);
        let (larger, smaller) = sessions.split_at(sessions.partition_point(|(_, bytes)| *bytes >= largest / 2));
        let resume = charge.resume.load(Relaxed);
        let from = larger.iter().position(|(session, _)| session.id == resume).unwrap_or(0);
        let want = task.pages.min(*STEP_PAGES.end());
        for (session, bytes) in larger[from..].iter().chain(&larger[..from]).chain(smaller) {
            if *bytes < largest / 2 && step.freed > 0 {
                break;
            }
            if session.space.is_shunned() {
                step.late = true;
                continue;
            }
            if task.end.is_some_and(|end| Instant::now() > end) {
                charge.resume.store(session.id, Relaxed);
                step.is_broken_off = true;
                step.is_in_parts = true;
                break;
            }
            let room = self.groups.swap_room(&session.charge(), want);
            step.able |= room > 0;
            if session.space.is_busy() {
                step.is_in_parts = true;
                step.late = true;
                continue;
            }
            let silences = session.space.silences();
            if room > 0 && task.moves {
                let end = task.end.map(|end| end.max(Instant::now() + SHORTEST_STEP));
                // An error is that of a process that is going away.
                let progress = self.pager.evict(&session.space, room, end).unwrap_or_default();
                step.moved += progress.staged;
                step.is_broken_off |= progress.broken_off;
                step.is_in_parts |= progress.broken_off;
            }
            // Without room, what waits in the staging area goes back.
            let keep = if task.hurry || room == 0 { 0 } else { staging_pages(charge) / sessions.len() };
            step.freed += self.pager.store_staged(&session.space, keep).map_or(0, |progress| progress.stored);
            step.late |= session.space.awaits_answer() != Some(false) || session.space.silences() != silences;
        }
        step
    }
}

/// Divides processes into those of the users with at least half of what the largest user has, and the others; each in their order.
fn by_user(sessions: Vec<Measured<'_>>) -> (Vec<Measured<'_>>, Vec<Measured<'_>>) {
    let mut sums: HashMap<*const Owner, u64> = HashMap::new();
    sessions.iter().for_each(|(session, bytes)| *sums.entry(user_of(session)).or_default() += bytes);
    let most = sums.values().max().copied().unwrap_or(0);
    sessions.into_iter().partition(|(session, _)| sums[&user_of(session)] >= most / 2)
}

/// How long a step in each group in need takes at most, by the users that have processes in it. Users have equal parts of a round, and the
/// groups of a user have equal parts of that. Where these would be too short some of the groups have theirs in this round, and the next ones in
/// the next (these have no time now): the groups of one user, however many, take no longer than that. The root has a step in each round.
fn times_of_steps(round: usize, groups: impl Iterator<Item = (*const Owner, GroupId)>) -> HashMap<GroupId, Duration> {
    let mut groups_of_user: HashMap<*const Owner, BTreeSet<GroupId>> = HashMap::new();
    groups.for_each(|(user, id)| {
        groups_of_user.entry(user).or_default().insert(id);
    });
    let users = groups_of_user.len() as u32;
    let mut times = HashMap::new();
    for groups in groups_of_user.values() {
        let most = (ROUND.as_micros() / (SHORTEST_STEP * users).as_micros()).max(1) as usize;
        let count = groups.len().min(most);
        let part = ROUND / users / count as u32;
        let first = round.wrapping_mul(count) % groups.len();
        for (number, id) in groups.iter().enumerate() {
            let has_turn = (number + groups.len() - first) % groups.len() < count || *id == GroupId::ROOT;
            *times.entry(*id).or_insert(Duration::ZERO) += if has_turn { part } else { Duration::ZERO };
        }
    }
    let given = times.values_mut().filter(|time| !time.is_zero());
    given.for_each(|time| *time = (*time).clamp(SHORTEST_STEP, LONGEST_STEP));
    times
}

/// What a step is to do in each process.
#[derive(Debug, Clone, Copy)]
struct StepTask {
    /// How many pages to take.
    pages: usize,
    /// Whether to take any, or only to store what was taken.
    moves: bool,
    /// Whether no page is left its second chance.
    hurry: bool,
    /// When to break off.
    end: Option<Instant>,
}

/// What a step through some processes has come to.
#[derive(Default)]
struct Step {
    /// Pages that have left their programs.
    moved: usize,
    /// Pages whose memory was freed.
    freed: usize,
    /// There was somebody who may swap something out.
    able: bool,
    /// A worker has not answered yet, or a thread of the manager is stuck in its process.
    late: bool,
    /// There was no time for all processes.
    is_broken_off: bool,
    /// Not all that could be taken was looked at: there was no time, or another thread had the locks.
    is_in_parts: bool,
}

impl Step {
    /// What this step, which was fruitless, and the next have come to together.
    fn then(&self, next: Step) -> Step {
        Step {
            able: self.able || next.able,
            late: self.late || next.late,
            is_in_parts: self.is_in_parts || next.is_in_parts,
            ..next
        }
    }

    fn is_fruitless(&self) -> bool {
        self.moved + self.freed == 0 && !self.is_broken_off
    }
}

/// Pages that may wait in the staging areas of a group, for their second chance. The more, the better is known what is cold; but
/// they are resident all the same.
fn staging_pages(charge: &Charge) -> usize {
    (charge.max() / 8 / PAGE_SIZE as u64).clamp(64, 3072) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_groups_of_a_user_take_turns() {
        let [one, other] = [Owner::user(), Owner::user()];
        let groups = || (0..100).map(|id| (&one, id)).chain([(&other, 0), (&other, 200)]);
        let mut served = HashSet::new();
        for round in 0..10 {
            let times = times_of_steps(round, groups().map(|(user, id)| (std::ptr::from_ref(user), GroupId(id))));
            let sum: Duration = times.values().sum();
            assert!(sum <= ROUND + SHORTEST_STEP, "{sum:?}");
            assert!(!times[&GroupId::ROOT].is_zero() && times[&GroupId(200)] == ROUND / 4);
            served.extend(times.into_iter().filter(|(_, time)| !time.is_zero()).map(|(id, _)| id));
        }
        assert_eq!(served.len(), 101, "each has had its turn");
    }

    #[test]
    fn a_trickle_comes_to_nothing() {
        let trickle = (1..LEAST_FREED).try_fold(Vain::new(1000), |vain, _| vain.after(1));
        assert!(trickle.is_some());
        assert!(trickle.and_then(|vain| vain.after(LEAST_FREED)).is_none());
        let vain = Vain::new(1000);
        assert!(!vain.has_looked_at_all(1000 + 99 * LOOKS, 100) && vain.has_looked_at_all(1000 + 100 * LOOKS, 100));
    }

    #[test]
    fn users_have_equal_parts_of_a_round() {
        let [one, other] = [Owner::user(), Owner::user()];
        let groups = [(&one, 1), (&one, 2), (&one, 2), (&one, 3), (&one, 4), (&one, 9), (&other, 5), (&other, 9)];
        let times = times_of_steps(7, groups.into_iter().map(|(user, id)| (std::ptr::from_ref(user), GroupId(id))));
        let of = |id| times[&GroupId(id)];
        assert_eq!([of(1), of(2), of(4), of(5), of(9)], [4, 4, 4, 10, 14].map(Duration::from_millis));
        let alone = times_of_steps(0, [(std::ptr::from_ref(&one), GroupId(1))].into_iter());
        assert_eq!(alone[&GroupId(1)], LONGEST_STEP);
    }
}

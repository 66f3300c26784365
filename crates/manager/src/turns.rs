//! Load control: processes that take each other's memory take turns.
//!
//! Where more programs run than there is memory for, each takes from the others what they are about to use, and all of them wait.
//! To run fewer at a time is the old remedy (Denning, "Thrashing: Its Causes and Prevention", 1968; the swapper of 4.3BSD), which
//! the kernel's reclaim does not have.
//!
//! 1. A group *thrashes* if much of what is taken from its processes is wanted again soon ([`Space::missed`]).
//! 2. Then only as many of its processes that miss pages, or grow, have a *turn* as keep the processors busy, by the time that their
//!    threads run or wait for memory. The others *rest*: who of them comes for memory waits ([`Pager::rest`]), and from them
//!    reclaim takes first. Who neither misses nor grows, or is protected by `memory.low`, is left alone.
//! 3. A turn lasts several times as long as it takes to bring the process's memory back, unless too many wait. Then whoever has
//!    rested the longest is next.
//! 4. Who has a turn and waits for something else than memory makes room for another: it may wait for just that one. And when
//!    processors have little to do and nobody misses much, one more goes on. So nobody waits for long for one who rests.
//!
//! One process alone is never touched by this, nor are as many as there are processors, of one thread each.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use uzswap_engine::PAGE_SIZE;
use uzswap_vm::pager::Pager;
use uzswap_vm::space::Space;
use uzswap_vm::sys::process::runs_besides;
use uzswap_vm::sys::thread::processor_time_of;

use crate::control::GroupId;

/// How often it is looked who misses pages.
pub const LOOK: Duration = Duration::from_millis(50);

/// What is missed is averaged over this time.
const SMOOTH: Duration = Duration::from_millis(200);

/// So many pages missed in a second, for each processor, are thrashing. To bring one back and take another costs some 45 µs.
const THRASHING: f64 = 4000.0;

/// How long it takes, at most, to bring back a page, and how often a turn is longer than to bring back all of a process.
const PAGE_COST: Duration = Duration::from_micros(10);
const WORTH: u32 = 4;

/// The shortest and the longest turn.
const TURN: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(4)];

/// Turns are shorter where so many wait for theirs that one would rest for longer than this.
const LONGEST_REST: Duration = Duration::from_secs(10);

/// How many threads may want to run for each processor: they are not all ready to all the time.
const MOST_LOAD: f64 = 1.2;

/// Who runs or waits for memory for less than this part of the time waits for something else.
const IDLE: f64 = 0.1;

/// The load is averaged over so many looks.
const LOOKS: f64 = 3.0;

/// Who has grown by more than this from one look to the next takes memory from others.
const GROWN: u64 = 1 << 20;

/// How long the processors have to have little to do before one more goes on, and again before the next.
const CALM: Duration = Duration::from_millis(200);

/// A process that may take part.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its number among all.
    pub id: u64,
    /// Its process id.
    pub pid: i32,
    /// Its resident bytes.
    pub bytes: u64,
    /// Its memory.
    pub space: Arc<Space>,
}

/// What a process had missed, how long it had run, and how many resident bytes it had.
type Before = (u64, Duration, u64);

/// Who rests, of all groups. Belongs to the thread that reclaims.
#[derive(Debug)]
pub struct LoadControl {
    processors: usize,
    looked: Instant,
    groups: HashMap<GroupId, Turns>,
    before: HashMap<u64, Before>,
    resting: HashMap<u64, Arc<Space>>,
}

impl LoadControl {
    /// Has all processes of `spaces` go on that an earlier one has made rest.
    pub fn new(spaces: Vec<Arc<Space>>) -> LoadControl {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        let (groups, before) = Default::default();
        // These numbers are no sessions': so they go on at the first look.
        let resting = spaces.into_iter().map(|space| (u64::MAX - space.id, space)).collect();
        LoadControl { processors, looked: Instant::now(), groups, before, resting }
    }

    /// Whether somebody takes part in a group: then it is to be looked at, however much memory it has.
    pub fn concerns(&self, group: GroupId) -> bool {
        self.groups.get(&group).is_some_and(|turns| !turns.members.is_empty())
    }

    /// Whether somebody rests: then [`LoadControl::look`] is to be called every [`LOOK`].
    pub fn is_holding(&self) -> bool {
        !self.resting.is_empty()
    }

    /// Looks at who takes part in each group that is near its limit, if it is time to; has processes rest and go on.
    pub fn look(&mut self, pager: &Pager, groups: impl FnOnce(&Self) -> Vec<(GroupId, Vec<Process>)>) {
        let now = Instant::now();
        let elapsed = now - self.looked;
        if elapsed < LOOK {
            return;
        }
        self.looked = now;
        let groups = groups(self);
        self.groups.retain(|id, _| groups.iter().any(|(other, _)| other == id));
        let mut seen = HashMap::new();
        let mut rest = HashMap::new();
        for (id, processes) in &groups {
            let turns = self.groups.get(id);
            let looks: Vec<Look> = processes.iter().map(|process| self.see(process, turns, &mut seen)).collect();
            let turns = self.groups.entry(*id).or_default();
            turns.decide(now, elapsed, &looks, self.processors);
            let resting = processes.iter().filter(|process| turns.rests(process.id));
            rest.extend(resting.map(|process| (process.id, process.space.clone())));
        }
        self.before = seen;
        // Those first who go on. Of one that has ended somebody else may have the memory.
        for (_, space) in self.resting.extract_if(|id, space| !rest.contains_key(id) && !space.is_shunned()) {
            pager.rest(&space, false);
        }
        for (id, space) in rest.into_iter().filter(|(_, space)| !space.is_shunned()) {
            if !self.resting.contains_key(&id) {
                space.account().counters().rested.fetch_add(1, Relaxed);
            }
            pager.rest(&space, true);
            self.resting.insert(id, space);
        }
    }

    /// What a process of a group has done since the last look.
    fn see(&self, process: &Process, group: Option<&Turns>, seen: &mut HashMap<u64, Before>) -> Look {
        let (id, bytes, space) = (process.id, process.bytes, &process.space);
        // Nobody pays for this where nobody thrashes.
        let group = group.filter(|group| group.is_alert(self.processors));
        let ran = group.and_then(|_| processor_time_of(process.pid)).unwrap_or_default();
        let now = (space.missed(), ran, bytes);
        let before = self.before.get(&id).copied().unwrap_or(now);
        seen.insert(id, now);
        let (missed, ran, grown) = (now.0 - before.0, now.1.saturating_sub(before.1), bytes.saturating_sub(before.2));
        let is_busy = |group: &Turns| match group.members.get(&id) {
            Some(member) => !member.rests,
            None => missed > 0 || grown > GROWN,
        };
        let busy = if group.is_some_and(is_busy) { busy(process) } else { 0 };
        Look { id, missed, ran, busy, bytes, grown }
    }
}

/// How many threads of a process run or wait for memory at this moment; all those who run, or have not been heard yet, count as
/// one.
fn busy(process: &Process) -> usize {
    let stalled = process.space.stalled();
    let runs = process.space.is_to_be_heard() || runs_besides(process.pid, &stalled);
    stalled.len() + usize::from(runs)
}

/// What a process has done in a while.
#[derive(Debug, Clone, Copy, Default)]
struct Look {
    id: u64,
    /// Pages that it wanted soon after they had been taken.
    missed: u64,
    ran: Duration,
    /// [`busy`], of those for whom that matters.
    busy: usize,
    bytes: u64,
    /// By how many bytes it has grown.
    grown: u64,
}

/// Who takes part in a group, by its number.
#[derive(Debug, Default)]
struct Turns {
    members: HashMap<u64, Member>,
    /// Pages missed in a second.
    rate: f64,
    calm_since: Option<Instant>,
}

#[derive(Debug)]
struct Member {
    /// Since when it has had its turn, or has rested.
    since: Instant,
    rests: bool,
    /// How many of its threads ran or waited for memory at a time, while it had its turn.
    load: f64,
    bytes: u64,
}

impl Turns {
    /// Whether it is to be looked more closely.
    fn is_alert(&self, processors: usize) -> bool {
        self.rate > THRASHING / 2.0 * processors as f64 || !self.members.is_empty()
    }

    fn rests(&self, id: u64) -> bool {
        self.members.get(&id).is_some_and(|member| member.rests)
    }

    /// Decides who rests from now on, by what was done since the last time.
    fn decide(&mut self, now: Instant, elapsed: Duration, looks: &[Look], processors: usize) {
        let missed: u64 = looks.iter().map(|look| look.missed).sum();
        let seconds = elapsed.as_secs_f64();
        self.rate += (missed as f64 / seconds - self.rate) * seconds / (seconds + SMOOTH.as_secs_f64());
        let thrashing = THRASHING * processors as f64;
        let thrashes = self.rate > thrashing;
        self.take_part(now, looks, thrashes);
        let most = processors as f64 * MOST_LOAD;
        if thrashes {
            let mut load = self.load();
            // Those who came last.
            for id in self.in_order(false).into_iter().skip(1).rev() {
                if load > most {
                    load -= self.members[&id].load;
                    self.turn(id, true, now);
                }
            }
        }
        let (active, resting) = (self.in_order(false), self.in_order(true));
        let Some(&next) = resting.first() else { return };
        let ran: Duration = looks.iter().map(|look| look.ran).sum();
        if self.rate > thrashing / 4.0 || ran > elapsed * processors as u32 / 4 * 3 {
            self.calm_since = None;
        }
        let calm = now - *self.calm_since.get_or_insert(now) >= CALM;
        if calm || active.is_empty() || self.load() + self.members[&next].load <= most {
            self.turn(next, false, now);
            self.calm_since = None;
            return;
        }
        let longest = LONGEST_REST * active.len() as u32 / resting.len() as u32;
        for (first, next) in active.into_iter().zip(resting) {
            let Member { since, bytes, .. } = self.members[&first];
            // At the look that is nearest.
            if now - since + LOOK / 2 < turn(bytes).min(longest) {
                break;
            }
            self.turn(first, true, now);
            self.turn(next, false, now);
        }
    }

    /// Who takes part: those who miss pages, or grow, while the group thrashes, until they are gone or wait for something else.
    fn take_part(&mut self, now: Instant, looks: &[Look], thrashes: bool) {
        let least = looks.iter().map(|look| look.missed).sum::<u64>() / (4 * looks.len().max(1)) as u64;
        let mut members = HashMap::new();
        for look in looks {
            match self.members.remove(&look.id) {
                Some(member) if member.rests => {
                    members.insert(look.id, member);
                }
                Some(member) => {
                    let load = member.load + (look.busy as f64 - member.load) / LOOKS;
                    if load >= IDLE {
                        members.insert(look.id, Member { load, bytes: look.bytes.max(member.bytes), ..member });
                    }
                }
                None if thrashes && (look.missed > least || look.grown > GROWN) => {
                    // It may be busy for this moment only.
                    let (load, bytes) = (look.busy as f64 / LOOKS, look.bytes);
                    members.insert(look.id, Member { since: now, rests: false, load, bytes });
                }
                None => {}
            }
        }
        if !thrashes && members.values().all(|member| !member.rests) {
            members.clear();
        }
        self.members = members;
    }

    /// How many threads of those who have a turn run or wait for memory at a time.
    fn load(&self) -> f64 {
        self.members.values().filter(|member| !member.rests).map(|member| member.load).sum()
    }

    /// Those who rest, or have a turn, the longest first.
    fn in_order(&self, rests: bool) -> Vec<u64> {
        let mut ids: Vec<u64> = self.members.iter().filter(|(_, m)| m.rests == rests).map(|(id, _)| *id).collect();
        ids.sort_unstable_by_key(|id| (self.members[id].since, *id));
        ids
    }

    fn turn(&mut self, id: u64, rests: bool, now: Instant) {
        if let Some(member) = self.members.get_mut(&id) {
            (member.rests, member.since) = (rests, now);
        }
    }
}

/// How long the turn of a process with so many bytes is.
fn turn(bytes: u64) -> Duration {
    let pages = u32::try_from(bytes / PAGE_SIZE as u64).unwrap_or(u32::MAX);
    (PAGE_COST * WORTH).saturating_mul(pages).clamp(TURN[0], TURN[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Two processors, and a time that goes on by looks.
    struct Machine {
        turns: Turns,
        now: Instant,
    }

    impl Machine {
        fn new() -> Machine {
            Machine { turns: Turns::default(), now: Instant::now() }
        }

        /// The next look. Who does not rest does as `act` says.
        fn look(&mut self, ids: &[u64], act: impl Fn(u64) -> Look) {
            self.now += LOOK;
            let looks: Vec<Look> = ids
                .iter()
                .map(|id| match self.turns.rests(*id) {
                    true => Look { id: *id, busy: 1, bytes: 10 * MIB, ..Look::default() },
                    false => Look { id: *id, ..act(*id) },
                })
                .collect();
            self.turns.decide(self.now, LOOK, &looks, 2);
        }

        fn resting(&self) -> Vec<u64> {
            let mut ids: Vec<u64> = self.turns.members.iter().filter(|(_, m)| m.rests).map(|(id, _)| *id).collect();
            ids.sort_unstable();
            ids
        }
    }

    /// Misses many pages, and runs or waits for them all the time.
    fn thrash(_: u64) -> Look {
        Look { missed: 500, ran: LOOK / 3, busy: 1, bytes: 10 * MIB, ..Look::default() }
    }

    /// Waits for something else than memory.
    fn sleep(_: u64) -> Look {
        Look { bytes: 10 * MIB, ..Look::default() }
    }

    fn compute(_: u64) -> Look {
        Look { ran: LOOK, busy: 1, bytes: 10 * MIB, ..Look::default() }
    }

    #[test]
    fn nobody_rests_where_there_are_no_more_than_processors_or_nobody_thrashes() {
        let mut machine = Machine::new();
        for _ in 0..100 {
            machine.look(&[1, 2], thrash);
            assert!(machine.resting().is_empty());
        }
        let mut machine = Machine::new();
        for _ in 0..100 {
            machine.look(&[1, 2, 3, 4], |id| Look { missed: 50, ..thrash(id) });
            assert!(machine.resting().is_empty());
        }
        // One process with many threads has nobody to make room for.
        for _ in 0..100 {
            machine.look(&[1], |id| Look { missed: 5000, busy: 64, ..thrash(id) });
            assert!(machine.resting().is_empty());
        }
    }

    #[test]
    fn those_who_thrash_take_turns_and_each_gets_its_part() {
        let (mut machine, ids) = (Machine::new(), [1, 2, 3, 4]);
        let mut had = [0u32; 4];
        for look in 0..1000 {
            machine.look(&ids, thrash);
            let resting = machine.resting();
            if look >= 10 {
                assert_eq!(resting.len(), 2, "{resting:?}");
                ids.iter().zip(&mut had).for_each(|(id, had)| *had += u32::from(!resting.contains(id)));
            }
        }
        assert!(had.iter().all(|had| (450..550).contains(had)), "of 990 looks they have had {had:?}");
    }

    #[test]
    fn what_waits_for_each_other_is_not_held() {
        // One after the other for a look each, as if they passed a token: what is missed is much all the same.
        let mut machine = Machine::new();
        for look in 0..200 {
            let ids: Vec<u64> = (0..6).collect();
            machine.look(&ids, |id| if id == look % 6 { Look { missed: 2000, ..thrash(id) } } else { sleep(id) });
            assert!(machine.resting().is_empty(), "look {look}");
        }
    }

    #[test]
    fn whoever_waits_for_something_else_makes_room_within_half_a_second() {
        let (mut machine, ids) = (Machine::new(), [1, 2, 3, 4]);
        (0..20).for_each(|_| machine.look(&ids, thrash));
        let held = machine.resting();
        assert_eq!(held.len(), 2);
        // The two others want what those have who rest.
        for _ in 0..10 {
            machine.look(&ids, |id| if held.contains(&id) { thrash(id) } else { sleep(id) });
        }
        assert!(machine.resting().is_empty());
    }

    #[test]
    fn who_ends_makes_room_and_when_all_is_calm_all_go_on() {
        let mut machine = Machine::new();
        (0..20).for_each(|_| machine.look(&[1, 2, 3, 4], thrash));
        let held = machine.resting();
        machine.look(&held, thrash);
        machine.look(&held, thrash);
        assert!(machine.resting().is_empty());
        (0..20).for_each(|_| machine.look(&[1, 2, 3, 4], thrash));
        assert_eq!(machine.resting().len(), 2);
        // Half of the processors' time, and no misses.
        for _ in 0..40 {
            machine.look(&[1, 2, 3, 4], |id| Look { ran: LOOK / 4, ..compute(id) });
        }
        assert!(machine.resting().is_empty() && machine.turns.members.is_empty());
    }

    #[test]
    fn a_newcomer_that_grows_waits_for_its_turn() {
        let mut machine = Machine::new();
        (0..20).for_each(|_| machine.look(&[1, 2, 3], thrash));
        assert_eq!(machine.resting().len(), 1);
        for _ in 0..2 {
            machine.look(&[1, 2, 3, 9], |id| if id == 9 { Look { grown: 2 * MIB, ..compute(id) } } else { thrash(id) });
        }
        assert!(machine.turns.rests(9));
        machine.look(&[1, 2, 3, 9, 10], |id| if id == 10 { compute(id) } else { thrash(id) });
        assert!(!machine.turns.rests(10), "it takes nothing from anybody");
    }

    #[test]
    fn of_many_each_has_its_turn_soon() {
        let mut machine = Machine::new();
        let ids: Vec<u64> = (0..200).collect();
        let mut rested = [0; 200];
        for look in 0..2000 {
            machine.look(&ids, |id| Look { bytes: 1 << 30, ..thrash(id) });
            for (id, rested) in rested.iter_mut().enumerate() {
                *rested = if machine.turns.rests(id as u64) { *rested + 1 } else { 0 };
                assert!(*rested <= 240, "{id} has rested for {rested} looks at the {look}th");
            }
        }
        assert!((198..=199).contains(&machine.resting().len()), "{:?}", machine.resting().len());
    }

    #[test]
    fn a_turn_is_worth_what_it_costs() {
        assert_eq!([0, 10 * MIB, 1 << 30, 1 << 50].map(turn), [TURN[0], TURN[0], TURN[1], TURN[1]]);
        assert_eq!(turn(64 * MIB), Duration::from_micros(655_360));
    }
}

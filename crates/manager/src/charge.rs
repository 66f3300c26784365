//! What a group is charged for, and who may have more.
//!
//! 1. A group is charged for the resident anonymous pages of its processes and for their compressed bytes, and for those of all
//!    groups below it. The charge is measured by [`Charge::measured`]; between two measurements every fill is deducted from what
//!    is left, in the group and in each above it, so that no number of threads can fill past a limit.
//! 2. Limits change at any time; whoever looks sees the old or the new one.
//! 3. No lock is taken by a fault: all that it reads and changes here are atomics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::{Group, MAX_SHARDS, PAGE_SIZE};
use uzswap_vm::pager::{Account, Counters};

use crate::bell::Bell;
use crate::control::{GroupId, Limit};
use crate::stall::Stalls;

const PAGE: i64 = PAGE_SIZE as i64;

/// By how many bytes a group may have more than it was given before that is more than the inaccuracy of the kernel's figures.
const UNSEEN: i64 = 256 << 10;

/// The longest time without a look.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Programs do not touch fresh memory faster than this: what two processors do.
const BYTES_PER_MILLISECOND: u64 = 4 << 20;

/// What is touched at most in that time.
pub fn touched_in(time: Duration) -> u64 {
    (time.as_micros() as u64).saturating_mul(BYTES_PER_MILLISECOND) / 1000
}

/// How often reclaim looks at a group that it can take nothing from: something may have come back, or been freed.
pub const EXHAUSTED_PAUSE: Duration = Duration::from_millis(5);

/// Stands for no limit: half of all, so that sums do not overflow.
const UNLIMITED: u64 = u64::MAX >> 1;

const LIMITS: [Limit; 6] = [Limit::Max, Limit::High, Limit::Low, Limit::Min, Limit::SwapMax, Limit::ZswapMax];

fn protects(limit: Limit) -> bool {
    matches!(limit, Limit::Low | Limit::Min)
}

/// Steps of reclaim in a group, one after the other, that came to nothing.
#[derive(Debug, Clone, Copy)]
struct Fruitless {
    first: Instant,
    /// The first of the latest ones that were late.
    late_since: Option<Instant>,
    latest: Instant,
}

/// The account of one group. Sizes are in bytes.
#[derive(Debug)]
pub struct Charge {
    /// The group.
    pub id: GroupId,
    /// The group in the engine.
    pub group: Group,
    /// The group above.
    pub parent: Option<Arc<Charge>>,
    /// By `Limit`.
    limits: [AtomicU64; 6],
    /// `memory.zswap.writeback` of the group itself.
    pub writeback: AtomicBool,
    /// `memory.zswap.shrinker.enabled` of the group itself.
    pub shrinker: AtomicBool,
    /// Its processes are stopped, whatever those above it say.
    pub frozen: AtomicBool,
    left: AtomicI64,
    /// What was given and is not resident yet: pages that are being loaded.
    coming: AtomicI64,
    /// It has been measured to have more than it was given.
    unseen: AtomicBool,
    /// By how much more than usual reclaim keeps it below its limit, in bytes: its programs were seen to grow unseen.
    reserve: AtomicU64,
    /// Reclaim finds nothing to take: what is left may not be swapped out.
    exhausted: AtomicBool,
    /// The latest steps of reclaim, if they came to nothing.
    fruitless: Mutex<Option<Fruitless>>,
    /// The session at which the latest step of reclaim broke off.
    pub resume: AtomicU64,
    /// Processes were here or below when it was last measured, however little of their memory they pay for.
    occupied: AtomicBool,
    /// Resident anonymous memory, last measured.
    pub anon: AtomicU64,
    /// The most it ever was.
    pub anon_peak: AtomicU64,
    /// Resident memory of its processes that is not under any limit, last measured, and the most it ever was.
    pub unmanaged: AtomicU64,
    pub unmanaged_peak: AtomicU64,
    /// Compressed bytes in each of the engine's shards, last seen.
    pub zswap: [AtomicU64; MAX_SHARDS],
    /// Anonymous memory and pool, last measured.
    pub current: AtomicU64,
    /// The most it ever was.
    pub peak: AtomicU64,
    /// The most that was seen to be swapped out at once.
    pub swap_peak: AtomicU64,
    /// How long programs waited, here or below.
    pub stalls: Stalls,
    /// What happened to the pages of its own processes.
    pub counters: Counters,
    /// What happened for want of memory, here or below.
    pub events: Events,
    bell: Arc<Bell>,
}

/// `memory.events`.
#[derive(Debug, Default)]
pub struct Events {
    /// Reclaimed from though below `memory.low`.
    pub low: AtomicU64,
    /// Reclaimed from because above `memory.high`.
    pub high: AtomicU64,
    /// Refused memory because at `memory.max`.
    pub max: AtomicU64,
    /// Nothing could be reclaimed any more.
    pub oom: AtomicU64,
    /// Processes killed for that.
    pub oom_kill: AtomicU64,
}

impl Account for Charge {
    fn admit(&self, pages: u64) -> bool {
        let bytes = pages as i64 * PAGE;
        let Some(refused) = self.path().find(|charge| !charge.take(bytes)) else { return true };
        for charge in self.path().take_while(|charge| charge.id != refused.id) {
            charge.left.fetch_add(bytes, Relaxed);
        }
        refused.count(|events| &events.max);
        false
    }

    fn admitted(&self) {
        self.bell.wake();
    }

    fn most_ahead(&self) -> usize {
        const SHARE: u64 = 32;
        const LEAST: u64 = 64;
        let limit = self.path().map(Charge::max).min().unwrap_or(UNLIMITED);
        (limit / SHARE / PAGE_SIZE as u64).max(LEAST) as usize
    }

    fn spare(&self) -> usize {
        const SHARE: u64 = 8;
        // Of less, reclaim is not far.
        const FREE: u64 = 4;
        let left = |charge: &Charge| u64::try_from(charge.left.load(Relaxed)).unwrap_or(0);
        let free = |charge: &Charge| Some(left(charge)).filter(|left| *left >= charge.max() / FREE).unwrap_or(0);
        (self.path().map(free).min().unwrap_or(0) / SHARE) as usize / PAGE_SIZE
    }

    fn load_begins(&self, pages: u64) {
        self.path().for_each(|charge| charge.expect(pages as i64 * PAGE));
    }

    fn load_ends(&self, pages: u64) {
        self.path().for_each(|charge| charge.expect(-(pages as i64 * PAGE)));
    }

    fn group(&self) -> Group {
        self.group
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn stall(&self) {
        self.begin_stall();
    }

    fn go_on(&self) {
        self.end_stall();
    }
}

impl Charge {
    /// An account without limits, for a new group.
    pub fn new(id: GroupId, group: Group, parent: Option<Arc<Charge>>, bell: Arc<Bell>) -> Charge {
        Charge {
            id,
            group,
            parent,
            limits: LIMITS.map(|limit| AtomicU64::new(if protects(limit) { 0 } else { UNLIMITED })),
            writeback: AtomicBool::new(true),
            shrinker: AtomicBool::new(true),
            frozen: AtomicBool::default(),
            left: AtomicI64::new(UNLIMITED as i64),
            coming: AtomicI64::default(),
            unseen: AtomicBool::default(),
            reserve: AtomicU64::default(),
            exhausted: AtomicBool::default(),
            fruitless: Mutex::default(),
            resume: AtomicU64::default(),
            occupied: AtomicBool::default(),
            anon: AtomicU64::default(),
            anon_peak: AtomicU64::default(),
            unmanaged: AtomicU64::default(),
            unmanaged_peak: AtomicU64::default(),
            zswap: Default::default(),
            current: AtomicU64::default(),
            peak: AtomicU64::default(),
            swap_peak: AtomicU64::default(),
            stalls: Stalls::default(),
            counters: Counters::default(),
            events: Events::default(),
            bell,
        }
    }

    /// This group and those above it, the root last.
    pub fn path(&self) -> impl Iterator<Item = &Charge> {
        std::iter::successors(Some(self), |charge| charge.parent.as_deref())
    }

    /// Enters how much memory is not under any limit: an estimate, and what there is at least.
    pub fn note_unmanaged(&self, estimated: u64, at_least: u64) {
        self.unmanaged.store(estimated, Relaxed);
        self.unmanaged_peak.fetch_max(at_least, Relaxed);
    }

    /// Whether this is that group, or one below it.
    pub fn is_below(&self, group: GroupId) -> bool {
        self.path().any(|charge| charge.id == group)
    }

    /// A limit; None if there is none.
    pub fn limit(&self, limit: Limit) -> Option<u64> {
        Some(self.limits[limit as usize].load(Relaxed)).filter(|bytes| *bytes < UNLIMITED)
    }

    /// Sets a limit, or takes it away.
    pub fn set_limit(&self, limit: Limit, bytes: Option<u64>) {
        self.limits[limit as usize].store(bytes.unwrap_or(UNLIMITED).min(UNLIMITED), Relaxed);
        let taken = self.current.load(Relaxed) as i64 + self.coming.load(Relaxed);
        self.left.store(self.max() as i64 - taken, Relaxed);
        self.exhausted.store(false, Relaxed);
        self.bell.ring();
    }

    /// `memory.max`, or more than there is.
    pub fn max(&self) -> u64 {
        self.limits[Limit::Max as usize].load(Relaxed)
    }

    fn high(&self) -> u64 {
        self.limits[Limit::High as usize].load(Relaxed)
    }

    /// Reclaim keeps the charge below this: `memory.high`, or a margin below `memory.max`.
    pub fn soft(&self) -> u64 {
        self.mark(self.reserve.load(Relaxed))
    }

    /// The same with so many bytes in reserve.
    fn mark(&self, reserve: u64) -> u64 {
        let max = self.max();
        self.high().min(max - (margin(max) + reserve).min(max))
    }

    /// Has reclaim make room for so many bytes besides, a quarter of the limit at most; 0 when no longer.
    pub fn set_reserve(&self, bytes: u64) {
        let bytes = bytes.min(self.max() / 4);
        if self.reserve.load(Relaxed) != bytes {
            self.reserve.store(bytes, Relaxed);
        }
    }

    /// From here on mappings are watched; below, a group costs nothing.
    fn watch_from(&self) -> u64 {
        let high = self.high();
        let max = self.max().min(high.saturating_add(margin(high)));
        max - watched_room(max)
    }

    fn expect(&self, bytes: i64) {
        self.coming.fetch_add(bytes, Relaxed);
    }

    /// Returns the bytes that are being brought back.
    pub fn coming(&self) -> i64 {
        self.coming.load(Relaxed)
    }

    /// Enters a measurement, with what was being brought back before it was complete.
    pub fn measured(&self, anon: u64, pool: u64, coming: i64) {
        let current = anon + pool;
        self.anon.store(anon, Relaxed);
        self.anon_peak.fetch_max(anon, Relaxed);
        self.current.store(current, Relaxed);
        self.peak.fetch_max(current, Relaxed);
        // Else what is on its way would be given twice.
        let left = self.max() as i64 - current as i64 - coming;
        if self.left.swap(left, Relaxed) - left > UNSEEN {
            self.unseen.store(true, Relaxed);
        }
    }

    /// Notes whether there are processes here or below.
    pub fn set_occupied(&self, occupied: bool) {
        if self.occupied.load(Relaxed) != occupied {
            self.occupied.store(occupied, Relaxed);
        }
    }

    /// Returns whether the charge can grow: a forked child can touch memory at once, though all that it has is shared, and charged to its
    /// parent.
    pub fn can_grow(&self) -> bool {
        self.occupied.load(Relaxed) || self.current.load(Relaxed) > 0
    }

    /// Whether it was measured to have clearly more than it was given.
    pub fn has_grown_unseen(&self) -> bool {
        self.unseen.load(Relaxed)
    }

    /// Forgets that it had more than it was given.
    pub fn forget_unseen(&self) {
        self.unseen.store(false, Relaxed);
    }

    /// Whether reclaim has found nothing to take, and is therefore not to be called.
    pub fn is_exhausted(&self) -> bool {
        self.exhausted.load(Relaxed)
    }

    /// Notes whether reclaim finds nothing to take.
    pub fn set_exhausted(&self, exhausted: bool) {
        if self.is_exhausted() != exhausted {
            self.exhausted.store(exhausted, Relaxed);
        }
    }

    /// Notes that a step of reclaim has come to nothing. `is_late` tells, by when the first of such steps was, whether there may be
    /// something to take a little later. Returns for how long all steps have been late; `None` if this one is not. A step after a pause
    /// longer than `memory` begins anew.
    pub fn note_fruitless(&self, memory: Duration, is_late: impl FnOnce(Instant) -> bool) -> Option<Duration> {
        let mut steps = self.fruitless.lock();
        let now = Instant::now();
        let before = steps.filter(|steps| now - steps.latest <= memory);
        let first = before.map_or(now, |steps| steps.first);
        let late_since = is_late(first).then(|| before.and_then(|steps| steps.late_since).unwrap_or(now));
        *steps = Some(Fruitless { first, late_since, latest: now });
        late_since.map(|since| now - since)
    }

    /// Notes that a step of reclaim has come to something.
    pub fn note_fruitful(&self) {
        *self.fruitless.lock() = None;
    }

    /// Takes so many bytes if so much is left besides the reserve. Wakes reclaim when little is.
    fn take(&self, bytes: i64) -> bool {
        let left = self.left.fetch_sub(bytes, Relaxed) - bytes;
        if left < (self.max() - self.soft()) as i64 && !self.is_exhausted() {
            self.bell.mark();
        }
        let enough = left >= self.reserve.load(Relaxed) as i64;
        if !enough {
            self.left.fetch_add(bytes, Relaxed);
        }
        enough
    }

    /// Counts an event here and in all groups above.
    pub fn count(&self, event: fn(&Events) -> &AtomicU64) {
        for charge in self.path() {
            event(&charge.events).fetch_add(1, Relaxed);
        }
    }

    /// Bytes by which the charge should fall; 0 or less if it is low enough.
    pub fn excess(&self) -> i64 {
        (self.max() as i64 - self.left.load(Relaxed)) - self.soft() as i64
    }

    /// Bytes by which the charge must fall: without what reclaim makes room for besides.
    pub fn need(&self) -> i64 {
        (self.max() as i64 - self.left.load(Relaxed)) - self.mark(0) as i64
    }

    /// Whether the group, or one above it, is frozen.
    pub fn is_frozen(&self) -> bool {
        self.path().any(|charge| charge.frozen.load(Relaxed))
    }

    /// Whether the limit is so near that mappings are watched.
    pub fn is_near(&self) -> bool {
        self.current.load(Relaxed) > self.watch_from()
    }

    /// Whether the limit is so far that a program which starts now need not be seen at once.
    pub fn is_far(&self) -> bool {
        // It waits a hundredth of a second to be seen, and then for a processor.
        const UNSEEN_FOR: Duration = Duration::from_millis(500);
        self.current.load(Relaxed) + touched_in(UNSEEN_FOR) < self.watch_from()
    }

    /// Whether the group is past its limit.
    pub fn is_above_max(&self) -> bool {
        self.current.load(Relaxed) > self.max()
    }

    /// Whether what is touched until the next look could be too much, if that comes late enough for `lead` bytes besides.
    pub fn is_at_brink(&self, lead: u64) -> bool {
        self.has_used_of_margin(1, lead)
    }

    /// Whether what is touched until the next look will be too much, in the same sense.
    pub fn is_past_brink(&self, lead: u64) -> bool {
        self.has_used_of_margin(2, lead)
    }

    /// Whether so many quarters of what is between the mark where reclaim begins and the limit are used up.
    fn has_used_of_margin(&self, quarters: u64, lead: u64) -> bool {
        let mark = self.mark(0);
        self.current.load(Relaxed) + lead > mark + (self.max() - mark) / 4 * quarters
    }

    /// How long nothing can happen that must be seen, if `lead` bytes are touched besides: memory is not touched faster than this.
    pub fn pause(&self, lead: u64) -> Duration {
        let current = self.current.load(Relaxed) + lead;
        let micros = |bytes: u64| bytes.saturating_mul(1000) / BYTES_PER_MILLISECOND;
        let until = |bytes: u64| Duration::from_micros(micros(bytes.saturating_sub(current)));
        // Unwatched until the first mark; from there on, what was mapped since the last look.
        let unwatched = until(self.watch_from()).max(Duration::from_millis(2));
        let left = (until(self.max()) / 2).max(Duration::from_micros(250));
        unwatched.min(left).min(LONGEST_PAUSE)
    }

    /// How long reclaim may wait, unless it is called.
    pub fn reclaim_pause(&self) -> Duration {
        if self.is_exhausted() { self.pause(0).max(EXHAUSTED_PAUSE) } else { self.pause(0) }
    }
}

/// How far below the limit reclaim keeps the charge: room for what is touched while it works.
pub fn margin(max: u64) -> u64 {
    (max / 16).clamp(2 << 20, 64 << 20)
}

/// How far below the limit mappings begin to be watched: what memory may grow by until the manager has seen that it
/// grows. Two processors dirty some 4 MiB in a millisecond.
fn watched_room(max: u64) -> u64 {
    (max / 10 * 3).max(24 << 20).min(max / 4 * 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(id: u32, parent: Option<&Arc<Charge>>) -> Arc<Charge> {
        Arc::new(Charge::new(GroupId(id), Group::ROOT, parent.cloned(), Arc::default()))
    }

    fn limited(max: Option<u64>, high: Option<u64>) -> Arc<Charge> {
        let charge = charge(0, None);
        charge.set_limit(Limit::Max, max);
        charge.set_limit(Limit::High, high);
        charge
    }

    #[test]
    fn it_is_known_for_how_long_steps_have_come_to_nothing_and_have_been_late() {
        let (charge, memory) = (limited(None, None), Duration::from_secs(60));
        let begun = Instant::now();
        let step = |late: bool, memory| charge.note_fruitless(memory, |first| late && first >= begun);
        let pass = || std::thread::sleep(Duration::from_millis(2));
        assert_eq!(step(false, memory), None);
        pass();
        assert_eq!(step(true, memory), Some(Duration::ZERO), "the one before was not late");
        pass();
        assert!(step(true, memory) >= Some(Duration::from_millis(2)));
        assert_eq!(charge.note_fruitless(memory, |first| first.elapsed() < Duration::from_millis(4)), None);
        pass();
        assert_eq!(step(true, memory), Some(Duration::ZERO));
        pass();
        assert_eq!(step(true, Duration::ZERO), Some(Duration::ZERO), "there was a pause");
        pass();
        charge.note_fruitful();
        assert_eq!(
            charge.note_fruitless(memory, |first| first.elapsed() < Duration::from_millis(2)),
            Some(Duration::ZERO)
        );
    }

    #[test]
    fn nothing_is_to_spare_where_reclaim_is_near() {
        let parent = Arc::new(limited(Some(64 << 20), None));
        let child = charge(1, Some(&parent));
        assert_eq!(child.spare() as u64, 64 << 20 >> 15);
        parent.measured(40 << 20, 0, 0);
        assert_eq!(child.spare() as u64, 24 << 20 >> 15);
        parent.measured(49 << 20, 0, 0);
        assert_eq!(child.spare(), 0);
        assert!(charge(0, None).spare() > 1 << 30);
    }

    #[test]
    fn no_more_is_given_than_is_left() {
        let charge = limited(Some(16 << 20), None);
        charge.measured(15 << 20, (1 << 20) - 2 * PAGE as u64, 0);
        assert!(charge.admit(1));
        assert!(!charge.admit(2));
        assert!(charge.admit(1));
        assert!(!charge.admit(1));
        assert_eq!((charge.excess(), charge.events.max.load(Relaxed)), (2 << 20, 2));
        charge.measured(8 << 20, 0, 0);
        assert!(charge.excess() < 0);
        assert_eq!((charge.peak.load(Relaxed), charge.anon_peak.load(Relaxed)), ((16 << 20) - 8192, 15 << 20));
    }

    #[test]
    fn what_is_on_its_way_is_not_given_twice() {
        let (top, mib) = (limited(Some(16 << 20), None), (1u64 << 20) / PAGE as u64);
        let below = charge(1, Some(&top));
        assert!(below.admit(12 * mib));
        below.load_begins(12 * mib);
        top.measured(2 << 20, 0, top.coming());
        assert!(!below.admit(4 * mib) && below.admit(2 * mib), "2 MiB are resident, 12 are coming");
        below.load_ends(12 * mib);
        top.measured(16 << 20, 0, top.coming());
        assert!(!below.admit(1));
    }

    #[test]
    fn the_reserve_is_not_for_those_who_can_wait() {
        let charge = limited(Some(16 << 20), None);
        charge.measured(14 << 20, 0, 0);
        charge.set_reserve(1 << 20);
        assert!(charge.admit(256) && !charge.admit(1));
        charge.set_reserve(0);
        assert!(charge.admit(256) && !charge.admit(1));
    }

    #[test]
    fn what_one_group_on_the_path_refuses_is_charged_to_none() {
        let top = limited(Some(16 << 20), None);
        let (below, beside) = (charge(1, Some(&top)), charge(2, Some(&top)));
        below.set_limit(Limit::Max, Some(4096));
        assert!(below.admit(1) && !below.admit(1));
        assert_eq!((below.events.max.load(Relaxed), top.events.max.load(Relaxed)), (1, 1));
        assert!(beside.admit((16 << 20) / 4096 - 1), "the refused page was given back");
        assert!(!beside.admit(1) && !below.admit(1), "the one above has no more");
        below.set_limit(Limit::Max, None);
        assert!(!below.admit(1));
        top.set_limit(Limit::Max, None);
        assert!(below.admit(1));
        assert!(below.is_below(top.id) && !beside.is_below(below.id));
    }

    #[test]
    fn high_is_where_reclaim_begins() {
        assert_eq!(limited(Some(64 << 20), Some(32 << 20)).soft(), 32 << 20);
        assert_eq!(limited(Some(64 << 20), None).soft(), 60 << 20);
        assert!(limited(None, None).soft() > 1 << 60);
    }

    #[test]
    fn a_group_without_a_hard_limit_is_watched_near_its_high_mark() {
        let charge = limited(None, Some(256 << 20));
        charge.measured(64 << 20, 0, 0);
        assert!(!charge.is_near());
        charge.measured(257 << 20, 0, 0);
        assert!(charge.is_near() && charge.excess() == 1 << 20);
        assert!(charge.admit(1 << 20), "it is never refused anything");
    }

    #[test]
    fn reclaim_rests_where_it_has_found_nothing_until_that_may_have_changed() {
        let charge = limited(Some(64 << 20), None);
        charge.measured(62 << 20, 0, 0);
        assert!(charge.excess() > 0 && charge.reclaim_pause() == charge.pause(0));
        charge.set_exhausted(true);
        assert_eq!(charge.reclaim_pause(), EXHAUSTED_PAUSE);
        charge.set_limit(Limit::SwapMax, None);
        assert!(!charge.is_exhausted());
    }

    #[test]
    fn a_limit_is_far_only_where_there_is_room_for_what_starts_unseen() {
        let far = |max: u64, anon: u64| {
            let charge = limited(Some(max << 20), None);
            charge.measured(anon << 20, 0, 0);
            charge.is_far()
        };
        assert_eq!(
            [far(1 << 10, 0), far(4 << 10, 0), far(4 << 10, 1 << 10), far(8 << 10, 1 << 10)],
            [false, true, false, true]
        );
        assert!(limited(None, None).is_far());
    }

    #[test]
    fn small_limits_are_watched_from_further_below() {
        let watched = |max: u64| (max - limited(Some(max), None).watch_from()) >> 20;
        assert_eq!((watched(16 << 20), watched(64 << 20), watched(1000 << 20)), (12, 24, 300));
    }
}

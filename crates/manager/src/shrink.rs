//! The shrink worker: writes back the coldest entries of the pool. A thread of its own, because it decompresses and waits
//! for the disk, which no other thread may. It works
//! 1. when stores are refused: until they are accepted again, and no further;
//! 2. under pressure, before that: of what the shrinker has on offer, as large a part as was looked at of the programs'
//!    memory, or all of it if the host itself is short of memory;
//! 3. when the pool comes near its cap all the same, so that stores need not be refused, and when the programs of a group hold
//!    on to what they have: then the pool has too large a part of the group's memory.
//!
//! The cap is that of all groups, so it is the pools of unprotected groups (`memory.low`, `memory.min`) that shrink for it. Protection
//! gives way when nothing could be written back in them for a while: what is on its way to or from the disk comes back at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use uzswap_engine::{Group, Zswap};
use uzswap_vm::sys::process::memory_nodes;

use crate::charge::Charge;
use crate::control::{GroupId, Limit};
use crate::groups::Groups;

/// Percent of the cap that the pool is kept below.
const KEEP_PERCENT: u64 = 95;

/// What is freed at once, so that a new wish is soon heard.
const STEP_BYTES: u64 = 1 << 20;

/// How long the pools of unprotected groups, if there is something in them, may give nothing for the cap before protected groups give way.
/// What keeps them is a load or a write under way, or writes that fail.
const GIVE_WAY_AFTER: Duration = Duration::from_millis(200);

/// Entries that are worth a scan: those of one write.
const SCAN_ENTRIES: u64 = 32;

/// The worker and what it is asked.
pub struct ShrinkWorker {
    /// What it shrinks.
    pub engine: Arc<Zswap>,
    cap: AtomicU64,
    nodes: u8,
    wishes: Mutex<HashMap<Group, Wish>>,
    bell: Condvar,
    freed: AtomicU64,
    peak: Mutex<PoolPeak>,
    /// Which of the unprotected groups is the next to shrink for the cap.
    turn: AtomicUsize,
}

/// What others want of the worker, of one group and all below it.
#[derive(Clone, Default)]
struct Wish {
    /// Of the pool's memory.
    bytes: u64,
    /// Of what the shrinker has on offer, 0 to 1.
    part: f64,
    /// The group whose limit it was last wanted for. None if the host is short of memory.
    reclaimed: Option<Arc<Charge>>,
}

impl Wish {
    fn is_fulfilled(&self) -> bool {
        self.bytes == 0 && self.part == 0.0
    }

    /// Tells whether the limit that this was wanted for is no longer near: it was lifted, or memory has become free.
    fn is_outdated(&self) -> bool {
        self.reclaimed.as_ref().is_some_and(|reclaimed| !reclaimed.is_near())
    }
}

/// When the pools of unprotected groups gave nothing, and nothing came of them in between.
struct Vain {
    first: Instant,
    last: Instant,
}

impl Vain {
    /// Notes that they give nothing now; tells whether they may go on so. What is long over does not count.
    fn is_young(vain: &mut Option<Vain>, now: Instant) -> bool {
        let recent = vain.take().filter(|vain| now.saturating_duration_since(vain.last) < GIVE_WAY_AFTER);
        let first = recent.map_or(now, |vain| vain.first);
        *vain = Some(Vain { first, last: now });
        now.saturating_duration_since(first) < GIVE_WAY_AFTER
    }
}

/// The pool when it was largest.
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolPeak {
    /// Bytes of memory.
    pub bytes: u64,
    /// Bytes of pages kept in it, for each byte of memory.
    pub ratio: f64,
}

impl ShrinkWorker {
    /// Keeps the pool of `engine` below `cap` bytes.
    pub fn new(engine: Arc<Zswap>, cap: u64) -> ShrinkWorker {
        let nodes = memory_nodes().min(usize::from(u8::MAX)) as u8;
        let (wishes, bell, freed, peak, turn) = Default::default();
        ShrinkWorker { engine, cap: AtomicU64::new(cap), nodes, wishes, bell, freed, peak, turn }
    }

    /// Keeps it below another number of bytes from now on.
    pub fn set_cap(&self, cap: u64) {
        self.cap.store(cap, Relaxed);
    }

    /// Asks for at least `bytes` of the pool's memory, from a group and all below it, as long as the limit of `reclaimed` is near. Asked
    /// again before it is done, the larger wish counts.
    pub fn ask(&self, group: Group, bytes: u64, reclaimed: Arc<Charge>) {
        let mut wishes = self.wishes.lock();
        let wish = wishes.entry(group).or_default();
        wish.bytes = bytes.max(wish.bytes);
        wish.reclaimed = Some(reclaimed);
        self.bell.notify_one();
    }

    /// Tells of pressure on the memory of a group, itself alone, that has looked at a `part` (0 to 1) of it: of the host, or as long as the
    /// limit of `reclaimed` is near.
    pub fn press(&self, group: Group, part: f64, reclaimed: Option<Arc<Charge>>) {
        let mut wishes = self.wishes.lock();
        let wish = wishes.entry(group).or_default();
        // The worker looks often enough; this is not urgent.
        wish.part = (wish.part + part).min(1.0);
        wish.reclaimed = reclaimed;
    }

    /// Forgets what was asked of a group that was removed.
    pub fn forget(&self, group: Group) {
        self.wishes.lock().remove(&group);
    }

    /// Bytes of the pool's memory given back since the start.
    pub fn freed(&self) -> u64 {
        self.freed.load(Relaxed)
    }

    /// The pool when it was largest.
    pub fn peak(&self) -> PoolPeak {
        *self.peak.lock()
    }

    /// Works until told to stop.
    pub fn run(&self, groups: &Groups, stop: &AtomicBool) {
        let mut vain = None;
        while !stop.load(Relaxed) {
            let size = self.engine.pool_bytes();
            self.observe(size);
            let wishes = self.wishes();
            // A pool that is far from its cap takes a while to come near it.
            let pause = Duration::from_millis(match size {
                0 => 100,
                _ if size < self.cap.load(Relaxed) / 2 => 20,
                _ => 2,
            });
            if size == 0 && wishes.is_empty() {
                self.bell.wait_for(&mut self.wishes.lock(), pause);
                continue;
            }
            let freed = self.shrink_for_cap(groups, &mut vain);
            let mut busy = freed > 0;
            for (group, wish) in wishes {
                // What was freed for all counts for all together.
                let wanted = if group == Group::ROOT { wish.bytes.saturating_sub(freed) } else { wish.bytes };
                let shrunk = match wanted.min(STEP_BYTES) {
                    0 => 0,
                    bytes => self.engine.shrink_below(group, bytes),
                };
                let scanned = self.scan(group, wish.part);
                busy |= shrunk > 0 || scanned > 0.0;
                let given = if group == Group::ROOT { shrunk + freed } else { shrunk };
                self.note(group, &wish, given, scanned);
                self.freed.fetch_add(shrunk, Relaxed);
            }
            self.freed.fetch_add(freed, Relaxed);
            if !busy {
                self.bell.wait_for(&mut self.wishes.lock(), pause);
            }
        }
    }

    /// Returns what is wanted, without what is wanted no longer.
    fn wishes(&self) -> HashMap<Group, Wish> {
        let mut wishes = self.wishes.lock();
        wishes.retain(|_, wish| !wish.is_outdated());
        wishes.clone()
    }

    /// Frees what the pool has above the cap, or above what it takes to accept stores again: of unprotected groups, or, when these have
    /// nothing or have given nothing for a while (`vain`), of those that only `memory.low` protects, or else of all. Gives how much that
    /// was.
    fn shrink_for_cap(&self, groups: &Groups, vain: &mut Option<Vain>) -> u64 {
        let surplus =
            self.engine.pool_bytes().saturating_sub(self.cap.load(Relaxed) / 100 * KEEP_PERCENT).min(STEP_BYTES);
        // Asked once: what is wanted only a moment later is not to be taken from all.
        let wanted = surplus.max(self.engine.shrink_needed().unwrap_or(0));
        if wanted == 0 {
            return 0;
        }
        let shrink_all = || {
            let freed = self.engine.shrink_until_accepting();
            if surplus > freed { freed + self.engine.shrink(surplus - freed) } else { freed }
        };
        let unprotected_by = |limits: &[Limit]| groups.unprotected_by(limits, &groups.root());
        let free = unprotected_by(&[Limit::Low, Limit::Min]);
        let zswap =
            |charge: &Arc<Charge>| self.engine.group_counters(charge.group).map_or(0, |counters| counters.zswap);
        match self.shrink_in_turn(&free, wanted) {
            None => shrink_all(),
            Some(0) if free.iter().any(|charge| zswap(charge) > 0) && Vain::is_young(vain, Instant::now()) => 0,
            Some(0) => {
                let freed = self.shrink_in_turn(&unprotected_by(&[Limit::Min]), wanted).filter(|freed| *freed > 0);
                let freed = freed.unwrap_or_else(shrink_all);
                if freed > 0 {
                    groups.note_low_gave_way();
                }
                freed
            }
            Some(freed) => {
                *vain = None;
                freed
            }
        }
    }

    /// Frees at least `bytes` of some groups and of what is below them, as far as they have as much. None if they are all there is.
    fn shrink_in_turn(&self, targets: &[Arc<Charge>], bytes: u64) -> Option<u64> {
        let mut freed = 0;
        for _ in targets {
            let target = &targets[self.turn.fetch_add(1, Relaxed) % targets.len()];
            if target.id == GroupId::ROOT {
                return None;
            }
            freed += self.engine.shrink_below(target.group, bytes - freed);
            if freed >= bytes {
                break;
            }
        }
        Some(freed)
    }

    /// Scans a part of what a group has on offer; gives the part that was done, which is none as long as it is too little.
    fn scan(&self, group: Group, part: f64) -> f64 {
        let mut done = 0.0;
        for node in 0..self.nodes {
            let offered = self.engine.shrinker_count(group, node);
            let entries = (offered as f64 * part) as u64;
            if entries >= SCAN_ENTRIES || part >= 1.0 {
                let before = self.engine.pool_bytes();
                self.engine.shrinker_scan(group, node, entries);
                self.freed.fetch_add(before.saturating_sub(self.engine.pool_bytes()), Relaxed);
                done = part;
            }
        }
        done
    }

    /// Notes what has been done of a wish.
    fn note(&self, group: Group, done: &Wish, freed: u64, scanned: f64) {
        let mut wishes = self.wishes.lock();
        let Some(wish) = wishes.get_mut(&group) else { return };
        wish.part = (wish.part - scanned).max(0.0);
        // If nothing can be written back just now, reclaim asks again.
        wish.bytes = wish.bytes.saturating_sub(if freed > 0 { freed } else { done.bytes });
        if wish.is_fulfilled() {
            wishes.remove(&group);
        }
    }

    fn observe(&self, size: u64) {
        let mut peak = self.peak.lock();
        if size > peak.bytes {
            *peak = PoolPeak { bytes: size, ratio: self.engine.counters().root.zswapped as f64 / size as f64 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_engine::{Config, HeapSource, HeapSwapFile, Home, PAGE_SIZE};

    #[test]
    fn what_a_limit_wanted_is_forgotten_when_it_is_lifted() {
        const MIB: u64 = 1 << 20;
        let engine = Arc::new(Zswap::new(Config::default(), None, HeapSource));
        let groups = Groups::new(engine.clone(), Arc::default());
        let worker = ShrinkWorker::new(engine, 64 * MIB);
        let id = groups.create(GroupId::ROOT, "limited", 0).expect("room");
        let charge = groups.get(id).expect("there");
        charge.set_limit(Limit::Max, Some(32 * MIB));
        charge.measured(40 * MIB, 0, 0);
        worker.ask(charge.group, 8 * MIB, charge.clone());
        worker.press(charge.group, 0.5, Some(charge.clone()));
        assert_eq!(worker.wishes()[&charge.group].bytes, 8 * MIB);
        charge.set_limit(Limit::Max, None);
        assert!(worker.wishes().is_empty());
        worker.press(charge.group, 1.0, None);
        assert_eq!(worker.wishes()[&charge.group].part, 1.0, "the host is still short of memory");
    }

    #[test]
    fn protection_gives_way_to_the_cap_when_the_others_give_nothing_for_a_while() {
        const CAP: u64 = 64 * PAGE_SIZE as u64;
        let config = Config { max_pool_bytes: CAP, ..Config::default() };
        let engine = Arc::new(Zswap::new(config, Some(Box::<HeapSwapFile>::default()), HeapSource));
        let groups = Groups::new(engine.clone(), Arc::default());
        let worker = ShrinkWorker::new(engine.clone(), CAP);
        let group = |name| groups.get(groups.create(GroupId::ROOT, name, 0).expect("room")).expect("there");
        let (quiet, loud) = (group("quiet"), group("loud"));
        quiet.set_limit(Limit::Low, Some(1 << 30));
        let written = |charge: &Charge| engine.group_counters(charge.group).expect("there").zswpwb;
        let low = || quiet.events.low.load(Relaxed);
        let store = |charge: &Charge, seed: u32| {
            let noise = |i: usize| (seed.wrapping_add(i as u32).wrapping_mul(0x9e37_79b9) >> 24) as u8;
            let page = std::array::from_fn(|i| if i < PAGE_SIZE / 2 { noise(i) } else { 0 });
            engine.swap_out(&page, Home { group: charge.group, node: 0 }).expect("room")
        };
        let fill = |charge: &Charge| {
            let full = (16..1000).any(|seed| {
                store(charge, seed << 12);
                engine.shrink_needed().is_some()
            });
            assert!(full, "stores are accepted");
        };
        // What is protected is older than all else.
        (0..16).for_each(|seed| {
            store(&quiet, seed);
        });
        fill(&loud);
        groups.measured(std::iter::empty());
        let mut vain = None;
        assert!(worker.shrink_for_cap(&groups, &mut vain) > 0);
        assert_eq!((written(&quiet), low()), (0, 0), "the other gave");
        assert_eq!(worker.shrink_for_cap(&groups, &mut vain), 0, "nothing is wanted");

        // Nothing of the other may be written back.
        engine.set_writeback(loud.group, false).expect("there");
        fill(&loud);
        assert_eq!((worker.shrink_for_cap(&groups, &mut vain), written(&quiet), low()), (0, 0, 0), "not at once");
        let ago = |time: Duration| Instant::now().checked_sub(time).expect("the machine has run for so long");
        vain = Some(Vain { first: ago(3 * GIVE_WAY_AFTER), last: ago(2 * GIVE_WAY_AFTER) });
        assert_eq!((worker.shrink_for_cap(&groups, &mut vain), written(&quiet), low()), (0, 0, 0), "that is long over");
        vain = Some(Vain { first: ago(GIVE_WAY_AFTER), last: ago(GIVE_WAY_AFTER / 2) });
        assert!(worker.shrink_for_cap(&groups, &mut vain) > 0);
        assert!(written(&quiet) > 0 && low() == 1, "{} {}", written(&quiet), low());
    }
}

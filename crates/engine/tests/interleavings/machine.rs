//! What the scenarios share: the schedulers, a swap file in memory, and an engine whose pages are known.

use parking_lot::Mutex;
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use uzswap_engine::*;

/// More schedules than this take too long: these take about two minutes.
const MOST_SCHEDULES: usize = 1_000_000;
/// Preemptions at chosen moments in one schedule; most races need no more.
const PREEMPTIONS: usize = 3;

/// Runs a scenario in every schedule there is.
pub fn exhaust(scenario: fn()) {
    if !replay(scenario) {
        let tried = run(DfsScheduler::new(Some(MOST_SCHEDULES), false), scenario);
        println!("{tried} schedules");
        assert!(tried < MOST_SCHEDULES, "too many schedules to try them all: explore this scenario instead");
    }
}

/// Runs a scenario in every schedule there is if `UZSWAP_EXHAUST` is set, in some at random otherwise.
pub fn exhaust_if_asked(scenario: fn()) {
    if std::env::var_os("UZSWAP_EXHAUST").is_some() { exhaust(scenario) } else { explore(scenario) }
}

/// Runs a scenario in schedules taken at random: of all, and of those with few preemptions.
pub fn explore(scenario: fn()) {
    if !replay(scenario) {
        let iterations = std::env::var("UZSWAP_ITERATIONS")
            .map_or(1000, |iterations| iterations.parse().expect("UZSWAP_ITERATIONS is a number"));
        run(RandomScheduler::new(iterations), scenario);
        run(PctScheduler::new(PREEMPTIONS, iterations), scenario);
    }
}

/// Runs a scenario in the one schedule that is asked for, if there is one.
fn replay(scenario: fn()) -> bool {
    let schedule = std::env::var("UZSWAP_SCHEDULE");
    if let Ok(schedule) = &schedule {
        run(ReplayScheduler::new_from_encoded(schedule), scenario);
    }
    schedule.is_ok()
}

fn run(scheduler: impl Scheduler + 'static, scenario: fn()) -> usize {
    let mut config = shuttle::Config::new();
    // Whole pages are on the stack.
    config.stack_size = 1 << 18;
    // The engine's atomics count and do nothing else, so their order does not matter.
    config.silence_warnings = true;
    shuttle::Runner::new(scheduler, config).run(scenario)
}

/// Runs two threads at once.
pub fn at_once<A: Send, B>(first: impl FnOnce() -> A + Send, second: impl FnOnce() -> B) -> (A, B) {
    shuttle::thread::scope(|scope| {
        let first = scope.spawn(first);
        let second = second();
        (first.join().expect("a panic ends the execution"), second)
    })
}

/// A swap file. A write is not one step: others may come before each of its pages, and before its end.
#[derive(Clone, Default)]
pub struct Disk(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Read wherever somebody else may come.
    pause: AtomicBool,
    contents: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    data: Vec<u8>,
    /// What is being written or discarded.
    busy: Vec<Range<u64>>,
    writes: u64,
    failing: bool,
}

impl Disk {
    /// From now on all writes fail, or none.
    pub fn set_failing(&self, failing: bool) {
        self.0.contents.lock().failing = failing;
    }

    /// Writes that have begun, and whether one is under way.
    pub fn writes(&self) -> (u64, bool) {
        self.pause();
        let contents = self.0.contents.lock();
        (contents.writes, !contents.busy.is_empty())
    }

    fn pause(&self) {
        self.0.pause.load(SeqCst);
    }

    fn begin(&self, range: Range<u64>) {
        let mut contents = self.0.contents.lock();
        contents.check_idle(&range);
        contents.busy.push(range);
    }

    fn end(&self, range: Range<u64>) {
        self.0.contents.lock().busy.retain(|busy| *busy != range);
    }
}

impl Contents {
    fn check_idle(&self, range: &Range<u64>) {
        let meets = |busy: &Range<u64>| busy.start < range.end && range.start < busy.end;
        assert!(!self.busy.iter().any(meets), "two at once for the same bytes of the swap file");
    }

    fn at(&mut self, offset: u64, len: usize) -> &mut [u8] {
        let end = offset as usize + len;
        if self.data.len() < end {
            self.data.resize(end, 0);
        }
        &mut self.data[offset as usize..end]
    }
}

impl SwapFile for Disk {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        self.begin(range.clone());
        self.0.contents.lock().writes += 1;
        let failing = self.0.contents.lock().failing;
        for (start, piece) in range.clone().step_by(PAGE_SIZE).zip(data.chunks(PAGE_SIZE)) {
            self.pause();
            let mut contents = self.0.contents.lock();
            let place = contents.at(start, piece.len());
            if failing { place.fill(0xee) } else { place.copy_from_slice(piece) }
        }
        self.pause();
        self.end(range);
        if failing { Err(io::Error::other("injected")) } else { Ok(()) }
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        self.0.contents.lock().check_idle(&range);
        self.pause();
        let mut contents = self.0.contents.lock();
        contents.check_idle(&range);
        buf.copy_from_slice(contents.at(offset, buf.len()));
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) {
        let range = offset..offset + len;
        self.begin(range.clone());
        self.pause();
        let mut contents = self.0.contents.lock();
        let end = contents.data.len().min(range.end as usize);
        contents.data.get_mut(offset as usize..end).unwrap_or_default().fill(0);
        drop(contents);
        self.end(range);
    }
}

/// A reference to a page, and which page that is.
#[derive(Debug, Clone, Copy)]
pub struct Owned {
    pub slot: Slot,
    pub seed: u8,
}

/// A page that compresses well; different for each seed, and all zeros for 0.
pub fn page(seed: u8) -> Page {
    let mut page = [seed; PAGE_SIZE];
    page[..64].iter_mut().enumerate().for_each(|(i, byte)| *byte = seed.wrapping_mul(i as u8 + 1));
    page
}

/// An engine and its swap file.
pub struct Machine {
    pub zswap: Zswap,
    pub disk: Disk,
}

impl Machine {
    pub fn new(config: Config) -> Machine {
        let disk = Disk::default();
        let zswap = Zswap::new(config, Some(Box::new(disk.clone())), HeapSource);
        Machine { zswap, disk }
    }

    /// Pages that are in the pool, and that the next scan of their list writes back.
    pub fn cold<const N: usize>(&self, seeds: [u8; N], home: Home) -> [Owned; N] {
        let owned = seeds.map(|seed| self.store(seed, home).expect("room"));
        assert_eq!(self.scan(home.group, N as u64), 0, "each passes once");
        owned
    }

    pub fn store(&self, seed: u8, home: Home) -> Result<Owned, SwapOutError> {
        Ok(Owned { slot: self.zswap.swap_out(&page(seed), home)?, seed })
    }

    /// Looks at so many entries of a group and writes back those that are cold; returns how many.
    pub fn scan(&self, group: Group, entries: u64) -> u64 {
        self.zswap.shrinker_scan(group, 0, entries)
    }

    /// Loads a page, which must be the right one; returns where it was.
    pub fn read(&self, owned: Owned) -> Origin {
        let mut loaded = [0xcc; PAGE_SIZE];
        let origin = self.zswap.load(owned.slot, &mut loaded).expect("the page can be loaded");
        assert!(loaded == page(owned.seed), "{owned:?} holds another page, in {origin:?}");
        origin
    }

    /// A fault: the page is loaded, and the reference given up.
    pub fn take(&self, owned: Owned) -> Origin {
        let origin = self.read(owned);
        self.zswap.invalidate(owned.slot);
        origin
    }

    /// The end of a scenario: everything is in order, all pages are there, and without them nothing is left.
    pub fn end(&self, owned: impl IntoIterator<Item = Owned>) {
        self.zswap.check_valid();
        for owned in owned {
            self.take(owned);
        }
        self.zswap.check_valid();
        let counters = self.zswap.counters();
        assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
        assert_eq!(self.zswap.pools().len(), 1, "retired pools are gone");
    }
}

/// Zbud has no size classes to compact, which would be a hundred locks, and in one shard there is one lock to take; otherwise
/// as by default.
pub const SMALL: Config = Config {
    writeback: Writeback::Compressed,
    enabled: true,
    max_pool_bytes: 1 << 40,
    accept_threshold_percent: 90,
    compressor: Compressor::Lz4,
    zpool: Zpool::Zbud,
    shrinker_enabled: true,
    verify: false,
    swap_limit_bytes: Some(256 * PAGE_SIZE as u64),
    policy: Policy::PerGroupLru,
    shards: 1,
};

/// The home of pages of a group on node 0.
pub fn of(group: Group) -> Home {
    Home { group, node: 0 }
}

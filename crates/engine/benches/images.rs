//! What the engine adds to the bare codec, on pages of real memory: `cargo bench -p uzswap-engine --bench images`.
//!
//! Prints four tables: store and load beside the codec alone, and what it takes to give up what was loaded; two threads beside one; ten million entries beside ten
//! thousand; and what a byte of memory holds.
//! With `--quick` it looks at a quarter of the pages, three times instead of nine; with `--codec`, `--threads`, `--entries` or
//! `--capacity` it prints that table.
//!
//! 1. The pool's memory was touched before, and is used again without going through the heap: what the system asks for a fresh
//!    page is more than most of what is measured here, and neither the codec's nor the engine's (see `Warm`). What `Warm` itself
//!    costs, a lock above all, is not the engine's either, but in what it is said to add: it is told below the table.
//! 2. What belongs to the caller is ready before the clock starts: threads, the codecs' contexts, the slots to be loaded.
//! 3. The codec alone compresses each page into a place of its own, as long as it needs; the places follow each other in any
//!    order, as those do that have come free in a pool. Pages are loaded in another order, as those are that are faulted on, by
//!    it and by the engine. In the order of memory the processor reads and writes ahead, and one would measure that.
//! 4. One thread's time is that which it had on the processor; only that of two is by the clock, beside what two can do that
//!    share nothing.

#[path = "memory/codec.rs"]
mod codec;
mod memory;
#[path = "memory/slots.rs"]
mod slots;

use codec::{CODECS, Codec};
use memory::{Image, images, median, time};
use slots::{Random, shuffle, store};
use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Duration;
use uzswap_engine::{
    Compressor, Config, Group, Home, MAX_ZSPAGE_PAGES, PAGE_SIZE, Page, PageRun, PageSource, Policy, Slot, Zswap,
};

fn main() {
    let given = |name: &str| std::env::args().any(|argument| argument == name);
    let quick = given("--quick");
    let (pages, rounds) = if quick { (1024, 3) } else { (4096, 9) };
    let all = !["--codec", "--threads", "--entries", "--capacity"].into_iter().any(given);
    let images = images(pages);
    if all || given("--codec") {
        against_the_codec(&images, rounds);
    }
    if all || given("--threads") {
        two_threads(&images, rounds);
    }
    if all || given("--entries") {
        many_entries(&images[1], if quick { 1_000_000 } else { 10_000_000 }, 5 * rounds);
    }
    if all || given("--capacity") {
        capacity(&images);
    }
}

/// Memory that is kept when it is given back, for all engines.
struct Warm;

struct Places {
    /// Memory that was never in a run.
    fresh: &'static mut [u8],
    /// Places that were, by their pages.
    kept: [Vec<&'static mut [u8]>; MAX_ZSPAGE_PAGES + 1],
}

static WARM: Mutex<Places> = Mutex::new(Places { fresh: &mut [], kept: [const { Vec::new() }; MAX_ZSPAGE_PAGES + 1] });

struct WarmRun {
    place: &'static mut [u8],
    bytes: usize,
}

impl PageSource for Warm {
    type Run = WarmRun;

    fn take(&self, most: usize) -> Option<WarmRun> {
        let Places { fresh, kept } = &mut *WARM.lock().expect("nobody panics");
        let place = kept[most].pop().unwrap_or_else(|| {
            if fresh.len() < most * PAGE_SIZE {
                // Zeros from the heap may be pages that were never touched; ones are not.
                let memory = vec![1; 64 << 20].leak();
                let start = memory.as_ptr().align_offset(PAGE_SIZE);
                *fresh = &mut memory[start..];
            }
            let (place, rest) = std::mem::take(fresh).split_at_mut(most * PAGE_SIZE);
            *fresh = rest;
            place
        });
        Some(WarmRun { place, bytes: PAGE_SIZE })
    }
}

impl PageRun for WarmRun {
    fn resize(&mut self, pages: usize) -> bool {
        self.bytes = pages * PAGE_SIZE;
        true
    }
}

impl AsRef<[u8]> for WarmRun {
    fn as_ref(&self) -> &[u8] {
        &self.place[..self.bytes]
    }
}

impl AsMut<[u8]> for WarmRun {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.place[..self.bytes]
    }
}

impl Drop for WarmRun {
    fn drop(&mut self) {
        let place = std::mem::take(&mut self.place);
        WARM.lock().expect("nobody panics").kept[place.len() / PAGE_SIZE].push(place);
    }
}

fn zswap(compressor: Compressor) -> Zswap {
    let config = Config { compressor, ..Config::default() };
    Zswap::new(config, None, Warm)
}

fn load(zswap: &Zswap, slots: &[Slot]) {
    let mut page = [0; PAGE_SIZE];
    for &slot in slots {
        zswap.load(slot, &mut page).expect("as stored");
        black_box(&page);
    }
}

fn invalidate(zswap: &Zswap, slots: &[Slot]) {
    slots.iter().for_each(|slot| zswap.invalidate(*slot));
}

fn load_and_invalidate(zswap: &Zswap, slots: &[Slot]) {
    let mut page = [0; PAGE_SIZE];
    for &slot in slots {
        zswap.load(slot, &mut page).expect("as stored");
        black_box(&page);
        zswap.invalidate(slot);
    }
}

/// What this thread has had of the processor: what others do on the machine does not count.
fn processor_time() -> Duration {
    // The kernel brings the figure up to date when it looks for another thread to run.
    std::thread::yield_now();
    let times = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts the time of threads");
    let nanoseconds = times.split_ascii_whitespace().next().and_then(|time| time.parse().ok());
    Duration::from_nanos(nanoseconds.expect("a number"))
}

/// What this thread has spent on the processor for some work.
fn spent<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = processor_time();
    let result = work();
    (processor_time() - start, result)
}

/// The numbers below `count`, in an order that `seed` decides.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    shuffle(&mut order, seed);
    order
}

fn against_the_codec(images: &[Image], rounds: usize) {
    println!("microseconds a page     codec   store          added    codec    load          added  invalidate");
    for compressor in CODECS {
        for image in images {
            let pages = &image.pages;
            let (zswap, mut bare) = (zswap(compressor), Codec::new(compressor));
            let (mut memory, mut page) = (vec![1; (pages.len() + 1) * 2 * PAGE_SIZE], [0; PAGE_SIZE]);
            let lengths: Vec<usize> = pages.iter().map(|page| bare.compress(page, &mut memory)).collect();
            let (mut places, mut end) = (vec![0; pages.len()], 0);
            for number in shuffled(pages.len(), 1) {
                // Codecs write some bytes behind their output, where they have room.
                places[number] = end;
                end += lengths[number] + 64;
            }
            let order = shuffled(pages.len(), 2);
            // So that the tables have grown before they are measured.
            load_and_invalidate(&zswap, &store(&zswap, pages));
            let mut times: [Vec<Duration>; 5] = Default::default();
            for _ in 0..rounds {
                let (compressed, ()) = spent(|| {
                    for (number, page) in pages.iter().enumerate() {
                        bare.compress(page, &mut memory[places[number]..][..2 * PAGE_SIZE]);
                    }
                });
                let (stored, slots) = spent(|| store(&zswap, pages));
                let (decompressed, ()) = spent(|| {
                    for &number in &order {
                        bare.decompress(&memory[places[number]..][..lengths[number]], &mut page);
                        black_box(&page);
                    }
                });
                assert_eq!(pages[order[pages.len() - 1]], page, "the codec alone returns what it was given");
                let slots: Vec<Slot> = order.iter().map(|&number| slots[number]).collect();
                let (loaded, ()) = spent(|| load(&zswap, &slots));
                let (invalidated, ()) = spent(|| invalidate(&zswap, &slots));
                for (times, time) in times.iter_mut().zip([compressed, stored, decompressed, loaded, invalidated]) {
                    times.push(time);
                }
            }
            let [compress, stored, decompress, loaded, invalidated] = times.map(|times| median(times, pages.len()));
            let added = |bare: f64, ours: f64| format!("{:+.2} ({:+.0} %)", ours - bare, (ours / bare - 1.0) * 100.0);
            println!(
                "{:<8}{:<14}{compress:>7.2}{stored:>8.2}{:>16}{decompress:>8.2}{loaded:>8.2}{:>16}{invalidated:>11.2}",
                compressor.name(),
                image.name,
                added(compress, stored),
                added(decompress, loaded)
            );
        }
    }
    let runs = images[0].pages.len();
    let source = (0..rounds).map(|_| spent(|| (0..runs).for_each(|_| drop(black_box(Warm.take(1))))).0);
    println!("of it the page source, for a run taken and given back:{:>7.2}", median(source.collect(), runs));
}

/// How often in a second the engines' threads, one each, store and load `pages`, and what a thread spends on the processor each
/// time. Each goes through the pages until all have been at it for `WINDOW`; what counts is the whole passes until then, so that
/// no thread is ever counted while another has ended.
fn together(engines: &[&Zswap], pages: &[Page]) -> (f64, Duration) {
    const WINDOW: Duration = Duration::from_millis(400);
    let (start, stop) = (Barrier::new(engines.len() + 1), AtomicBool::new(false));
    let work = |zswap: &Zswap| {
        // The codec's contexts are the thread's, and each is on a processor of its own before the clock starts.
        load_and_invalidate(zswap, &store(zswap, pages));
        start.wait();
        let (mut passes, mut clock, mut processor) = (0, Duration::ZERO, Duration::ZERO);
        loop {
            let (on_processor, (elapsed, ())) = spent(|| time(|| load_and_invalidate(zswap, &store(zswap, pages))));
            if stop.load(Ordering::Relaxed) {
                return (f64::from(passes) / clock.as_secs_f64(), processor / passes);
            }
            (passes, clock, processor) = (passes + 1, clock + elapsed, processor + on_processor);
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = engines.iter().map(|zswap| scope.spawn(|| work(zswap))).collect();
        start.wait();
        std::thread::sleep(WINDOW);
        stop.store(true, Ordering::Relaxed);
        let each = threads.into_iter().map(|thread| thread.join().expect("nobody panics"));
        let (passes, spent): (Vec<f64>, Vec<Duration>) = each.unzip();
        (passes.iter().sum(), spent.iter().sum::<Duration>() / engines.len() as u32)
    })
}

/// On one engine, and on one each: that is what the machine can do; and on one that counts under a lock who is in a pool; and
/// on one whose group has a limit that is far. The last column is what the processors had to do for a page of one thread, divided by what they had to do for one of two that
/// share an engine: it counts no waiting, but does not depend on who else is on the machine.
fn two_threads(images: &[Image], rounds: usize) {
    println!("\nthroughput of two threads, one thread's being 1   together     apart    locked   limited   processor");
    // A pass is a quarter of the pages: many fit into the time.
    let pages = &images[1].pages[..images[1].pages.len() / 4];
    for compressor in CODECS {
        let (zswap, other) = (zswap(compressor), zswap(compressor));
        let config = Config { compressor, policy: Policy::LockedPoolReference, ..Config::default() };
        let locked = Zswap::new(config, None, Warm);
        let limited = self::zswap(compressor);
        limited.set_zswap_max(Group::ROOT, Some(1 << 40)).expect("the root is always there");
        let mut ratios: [Vec<f64>; 5] = Default::default();
        for _ in 0..rounds {
            // Next to each other in time, so that both had the same machine.
            let (one, alone) = together(&[&zswap], pages);
            let (two, shared) = together(&[&zswap, &zswap], pages);
            let (apart, _) = together(&[&zswap, &other], pages);
            let (held, _) = together(&[&locked, &locked], pages);
            let (of_limited, _) = together(&[&limited, &limited], pages);
            let spent = alone.as_secs_f64() / shared.as_secs_f64();
            for (ratios, ratio) in ratios.iter_mut().zip([two / one, apart / one, held / one, of_limited / one, spent])
            {
                ratios.push(ratio);
            }
        }
        let ratios = ratios.map(|mut ratios| {
            ratios.sort_unstable_by(f64::total_cmp);
            format!("{:>10.2}", ratios[ratios.len() / 2])
        });
        println!("{:<48}{}", compressor.name(), ratios.concat());
    }
}

/// A page that hardly takes room, and is like no other.
fn small(number: usize) -> Page {
    let mut page = [0; PAGE_SIZE];
    page[..8].copy_from_slice(&(number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    page
}

fn many_entries(heap: &Image, many: usize, rounds: usize) {
    const FEW: usize = 10_000;
    println!("\nmicroseconds to load, give up and store anew an entry chosen at random");
    println!("{:<26}{:>10}{:>12}{:>8}", "", format!("{FEW}"), format!("{many}"), "ratio");
    let ours = |number: usize| heap.pages[number % heap.pages.len()];
    for (name, page_of) in [(heap.name, &ours as &dyn Fn(usize) -> Page), ("8 bytes and zeros", &small)] {
        let mut sides = [FEW, many].map(|entries| Exchange::new(entries, page_of));
        // In turn, so that both had the same machine.
        let times: Vec<[Duration; 2]> = (0..rounds).map(|_| sides.each_mut().map(Exchange::round)).collect();
        let [few, lots] = [0, 1].map(|side| median(times.iter().map(|times| times[side]).collect(), Exchange::DRAWN));
        println!("lz4     {name:<18}{few:>10.2}{lots:>12.2}{:>8.2}", lots / few);
        let [few, lots] = sides.map(|side| side.zswap.metadata_bytes() as f64 / side.slots.len() as f64);
        println!("{:<26}{few:>10.1}{lots:>12.1}", "  bytes of metadata each");
    }
}

/// An engine whose entries are loaded and stored again, one of them after the other.
struct Exchange {
    zswap: Zswap,
    slots: Vec<Slot>,
    random: Random,
}

impl Exchange {
    /// How many entries a round draws.
    const DRAWN: usize = 10_000;

    fn new(entries: usize, page_of: &dyn Fn(usize) -> Page) -> Exchange {
        let zswap = zswap(Compressor::Lz4);
        let slots = (0..entries).map(|number| zswap.swap_out(&page_of(number), Home::ROOT).expect("room")).collect();
        Exchange { zswap, slots, random: Random(1) }
    }

    fn round(&mut self) -> Duration {
        let Exchange { zswap, slots, random } = self;
        // A program's page table is not the engine's: who loads has the slot at hand. Each is drawn once.
        let mut drawn: Vec<Slot> = (0..Self::DRAWN).map(|_| slots.swap_remove(random.below(slots.len()))).collect();
        let mut page = [0; PAGE_SIZE];
        let (time, ()) = spent(|| {
            for slot in &mut drawn {
                zswap.load(*slot, &mut page).expect("as stored");
                zswap.invalidate(*slot);
                *slot = zswap.swap_out(&page, Home::ROOT).expect("room");
            }
        });
        slots.extend(drawn);
        time
    }
}

/// Of 256 MiB of pages: in a small pool the size classes' last zspages, half empty, would weigh more than the rest.
fn capacity(images: &[Image]) {
    const PAGES: usize = 1 << 16;
    println!("\nbytes held in a byte of memory");
    println!("{:<22}{:>7}{:>8}{:>9}", "", "codec", "engine", "of it");
    for compressor in CODECS {
        for image in images.iter().filter(|image| image.name != "zero") {
            let (zswap, mut bare) = (zswap(compressor), Codec::new(compressor));
            let mut buffer = vec![0; 2 * PAGE_SIZE];
            let packed: usize = image.pages.iter().map(|page| bare.compress(page, &mut buffer).min(PAGE_SIZE)).sum();
            let codec = (image.pages.len() * PAGE_SIZE) as f64 / packed as f64;
            for _ in (0..PAGES).step_by(image.pages.len()) {
                store(&zswap, &image.pages);
            }
            let used = zswap.pool_bytes() + zswap.metadata_bytes();
            let engine = (PAGES * PAGE_SIZE) as f64 / used as f64;
            let name = compressor.name();
            println!("{name:<8}{:<14}{codec:>7.2}{engine:>8.2}{:>8.1}%", image.name, engine / codec * 100.0);
        }
    }
}

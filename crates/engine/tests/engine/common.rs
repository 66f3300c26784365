//! A swap file and a page source in memory, and the faults that they can be asked for.

use parking_lot::Mutex;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use uzswap_engine::*;

/// Faults to inject, and what was seen; shared by the test and the fakes.
#[derive(Default)]
pub struct Faults {
    /// Writes fail with an I/O error.
    pub write_errors: AtomicBool,
    /// Writes fail for lack of space.
    pub disk_full: AtomicBool,
    /// Writes of more than this many bytes fail for lack of space, unless 0.
    pub largest_write: AtomicU64,
    /// Writes stop half way, with an I/O error.
    pub short_writes: AtomicBool,
    /// Reads fail with an I/O error.
    pub read_errors: AtomicBool,
    /// Reads return a wrong byte.
    pub damaged_reads: AtomicBool,
    /// Memory of the pool is read with wrong bits from now on.
    pub damaged_memory: AtomicBool,
    /// The page source has nothing.
    pub no_memory: AtomicBool,
    /// Writes that succeeded, and their bytes.
    pub writes: AtomicU64,
    pub bytes_written: AtomicU64,
    pub bytes_discarded: AtomicU64,
    /// Reads that were asked for.
    pub reads: AtomicU64,
    /// What the file holds.
    pub data: Mutex<Vec<u8>>,
    /// Called before each write.
    pub before_write: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

struct File(Arc<Faults>);

impl SwapFile for File {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let faults = &self.0;
        assert!(data.len() <= 1 << 20);
        let hook = faults.before_write.lock().take();
        if let Some(mut hook) = hook {
            hook();
        }
        let largest = faults.largest_write.load(Relaxed);
        if faults.write_errors.load(Relaxed) {
            return Err(io::Error::other("injected"));
        }
        if faults.disk_full.load(Relaxed) || (largest > 0 && data.len() as u64 > largest) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut file = faults.data.lock();
        let (start, end) = (offset as usize, offset as usize + data.len());
        if file.len() < end {
            file.resize(end, 0);
        }
        if faults.short_writes.load(Relaxed) {
            file[start..][..data.len() / 2].copy_from_slice(&data[..data.len() / 2]);
            return Err(io::Error::other("injected, half way"));
        }
        file[start..end].copy_from_slice(data);
        faults.writes.fetch_add(1, Relaxed);
        faults.bytes_written.fetch_add(data.len() as u64, Relaxed);
        Ok(())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.reads.fetch_add(1, Relaxed);
        if self.0.read_errors.load(Relaxed) {
            return Err(io::Error::other("injected"));
        }
        let file = self.0.data.lock();
        let bytes = file.get(offset as usize..offset as usize + buf.len());
        buf.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        if self.0.damaged_reads.load(Relaxed) {
            buf[17 % buf.len()] ^= 1;
        }
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) {
        self.0.bytes_discarded.fetch_add(len, Relaxed);
        let mut file = self.0.data.lock();
        let end = file.len().min((offset + len) as usize);
        file.get_mut(offset as usize..end).unwrap_or_default().fill(0);
    }
}

struct Memory(Arc<Faults>);

impl PageSource for Memory {
    type Run = Run;

    fn take(&self, most: usize) -> Option<Run> {
        let run = if self.0.no_memory.load(Relaxed) { None } else { HeapSource.take(most) };
        run.map(|run| Run { run, damaged: OnceLock::new(), faults: self.0.clone() })
    }
}

struct Run {
    run: <HeapSource as PageSource>::Run,
    /// The memory as it is read once it is damaged. What a run takes counts as metadata: hence the box.
    #[allow(clippy::box_collection)]
    damaged: OnceLock<Box<Vec<u8>>>,
    faults: Arc<Faults>,
}

impl PageRun for Run {
    fn resize(&mut self, pages: usize) -> bool {
        let grows = pages * PAGE_SIZE > self.run.as_ref().len();
        !(grows && self.faults.no_memory.load(Relaxed)) && self.run.resize(pages)
    }
}

impl AsRef<[u8]> for Run {
    fn as_ref(&self) -> &[u8] {
        if self.faults.damaged_memory.load(Relaxed) {
            let damage = |(place, byte): (usize, &u8)| if place % 64 == 17 { byte ^ 1 } else { *byte };
            return self.damaged.get_or_init(|| Box::new(self.run.as_ref().iter().enumerate().map(damage).collect()));
        }
        self.run.as_ref()
    }
}

impl AsMut<[u8]> for Run {
    fn as_mut(&mut self) -> &mut [u8] {
        self.run.as_mut()
    }
}

pub const ROOMY: Config = Config {
    max_pool_bytes: 1 << 40,
    enabled: true,
    accept_threshold_percent: 90,
    compressor: Compressor::Lz4,
    zpool: Zpool::Zsmalloc,
    shrinker_enabled: true,
    verify: true,
    swap_limit_bytes: None,
    writeback: Writeback::Compressed,
    policy: Policy::PerGroupLru,
    shards: 4,
};

/// The same in each form that pages can have on disk.
pub fn both(config: Config) -> [Config; 2] {
    Writeback::ALL.map(|writeback| Config { writeback, ..config.clone() })
}

/// Whether so many pages made by [`page`] take `bytes` on disk.
#[track_caller]
pub fn expect_on_disk(writeback: Writeback, pages: u64, bytes: u64) {
    let expected = match writeback {
        Writeback::Compressed => 2500 * pages..=3200 * pages,
        Writeback::Pages => 4096 * pages..=4096 * pages,
    };
    assert!(expected.contains(&bytes), "{pages} pages take {bytes} bytes on disk");
}

pub fn zswap(config: Config, swap: bool) -> (Zswap, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let file: Option<Box<dyn SwapFile>> = if swap { Some(Box::new(File(faults.clone()))) } else { None };
    (Zswap::new(config, file, Memory(faults.clone())), faults)
}

/// A small generator of pseudo-random numbers, so that a seed is all that a failure needs to be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// A page that compresses to about half; different for each seed.
pub fn page(seed: u64) -> Page {
    let mut random = Random(seed);
    let mut page = [0; PAGE_SIZE];
    for (i, word) in page.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        word[..8].copy_from_slice(&random.next().to_le_bytes());
        word[8] = i as u8 & 3;
    }
    page
}

/// A page that does not compress.
pub fn noise(seed: u64) -> Page {
    let mut random = Random(seed);
    let mut page = [0; PAGE_SIZE];
    page.as_chunks_mut().0.iter_mut().for_each(|word| *word = random.next().to_le_bytes());
    page
}

/// Loads a page and checks it; returns where it was.
#[track_caller]
pub fn expect(zswap: &Zswap, slot: Slot, page: &Page) -> Origin {
    let mut loaded = [0xcc; PAGE_SIZE];
    let origin = zswap.load(slot, &mut loaded).expect("the page can be loaded");
    assert!(loaded == *page, "another page than was stored");
    origin
}

/// Stores the pages of the seeds from `seeds`.
pub fn fill(zswap: &Zswap, seeds: std::ops::Range<u64>, home: Home) -> Vec<Slot> {
    seeds.map(|seed| zswap.swap_out(&page(seed), home).expect("room")).collect()
}

/// A new group below the root.
pub fn group(zswap: &Zswap) -> Group {
    zswap.create_group(Group::ROOT).expect("room for a group")
}

/// The home of pages of a group on node 0.
pub fn of(group: Group) -> Home {
    Home { group, node: 0 }
}

/// How many of these pages of seeds from 0 on are on disk.
pub fn on_disk(zswap: &Zswap, slots: &[Slot], first_seed: u64) -> usize {
    let origins = slots.iter().zip(first_seed..).map(|(&slot, seed)| expect(zswap, slot, &page(seed)));
    origins.filter(|origin| *origin == Origin::Disk).count()
}

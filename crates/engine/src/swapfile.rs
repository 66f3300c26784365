//! The swap file: who implements it, and which of it is in use.
//!
//! 1. Space is given out in units of 128 bytes, at writeback and never before, so no swap file is sized in advance. Whatever
//!    is freed can be used again at once by anything that fits: nothing has to be moved together.
//! 2. 1 MiB is a cluster, the most that is written at once. The lists are by the longest run of free units in a cluster, so
//!    one that has room is found without a search. A request takes the tightest run that does, of what there is: that
//!    keeps whole clusters free for long sequential writes.
//! 3. Waste is bounded twice. The file grows only while more than half of it is in use, or if it has no run of a page left.
//!    At its limit, space is refused only if no free run is as long as the entry: less than a page lies between any two
//!    entries then.
//! 4. A cluster that has become empty is discarded in the file before it is used again. Nobody may hold a lock
//!    during the discard, so the cluster is on no list until `discarded`.

use crate::PAGE_SIZE;
use crate::sync::Mutex;
use crate::table::{Cell, Links, List, NIL, Nodes, Table};
use std::io;
use std::ops::Range;

/// What space is counted in, in bytes.
pub(crate) const UNIT: usize = 128;
/// Units of a page.
pub(crate) const PAGE: u32 = units(PAGE_SIZE);
/// Units in a cluster, the most that is written at once.
pub(crate) const CLUSTER: u32 = units(1 << 20);

const WORDS: usize = CLUSTER as usize / 64;
/// Lists of clusters: one for each longest run up to a page's, then one for each power of two; the first is of none.
const LISTS: usize = list(CLUSTER) + 1;
/// A run of this many units is long enough for any request.
const LONG: u32 = units(128 << 10);

const _: () = assert!(PAGE.is_power_of_two() && LONG.is_power_of_two() && CLUSTER.is_multiple_of(64));

/// A file that grows as it is written to. Called without any lock held, from several threads at once, never for the same
/// bytes. Must not call back into the engine.
pub trait SwapFile: Send + Sync {
    /// Writes all of `data`, at most 1 MiB, at `offset` (bytes).
    ///
    /// # Errors
    /// `StorageFull` and its like if there is no space; anything else is reported as an I/O error. What a failed write has
    /// left in the file does not matter.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Fills all of `buf` from `offset` (bytes).
    ///
    /// # Errors
    /// Whatever the system reports; also if the file is shorter.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Fills the buffers of several reads. One that can do so at once does.
    ///
    /// # Errors
    /// Those of [`read_at`](Self::read_at), of any of them.
    fn read_all(&self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        reads.iter_mut().try_for_each(|read| self.read_at(read.offset, read.buffer))
    }

    /// The bytes from `offset` on are not needed any more: punch a hole, as well as can be.
    fn discard(&self, offset: u64, len: u64);
}

/// One read of several: all of `buffer`, from `offset` (bytes).
#[derive(Debug)]
pub struct ReadAt<'a> {
    /// Where it begins in the file.
    pub offset: u64,
    /// What is to be filled.
    pub buffer: &'a mut [u8],
}

/// Keeps the file in the heap. For tests and experiments: to write there saves no memory.
#[derive(Default)]
pub struct HeapSwapFile(Mutex<Vec<u8>>);

impl SwapFile for HeapSwapFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut file = self.0.lock();
        let (start, end) = (offset as usize, offset as usize + data.len());
        let length = file.len().max(end);
        file.resize(length, 0);
        file[start..end].copy_from_slice(data);
        Ok(())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let file = self.0.lock();
        let bytes = file.get(offset as usize..offset as usize + buf.len());
        buf.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    /// Leaves zeros, so that whoever still reads there notices.
    fn discard(&self, offset: u64, len: u64) {
        let mut file = self.0.lock();
        let end = file.len().min((offset + len) as usize);
        file.get_mut(offset as usize..end).unwrap_or_default().fill(0);
    }
}

/// Units that so many bytes take.
pub(crate) const fn units(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT) as u32
}

/// Offset of a unit in the file, in bytes.
pub(crate) fn offset(unit: u32) -> u64 {
    unit as u64 * UNIT as u64
}

/// Neighbouring units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Run {
    pub start: u32,
    pub len: u32,
}

impl Run {
    pub fn end(&self) -> u32 {
        self.start + self.len
    }
}

/// Which units are in use.
pub(crate) struct DiskSpace {
    /// Cluster `n`, from 1, holds the units from `(n - 1) * CLUSTER` on; none is ever removed.
    clusters: Table<Cluster>,
    lists: [List; LISTS],
    limit: u32,
    used: u32,
}

struct Cluster {
    /// A bit for each unit in use.
    bits: Box<[u64]>,
    /// Units in use, those beyond the limit included.
    used: u16,
    /// The list it is on; 0: none, as it is full or waits for its discard.
    list: u8,
    links: Links,
}

impl Cell for Cluster {
    fn vacant(next: u32) -> Self {
        Cluster { bits: Box::default(), used: u16::MAX, list: 0, links: Links { prev: NIL, next } }
    }
    fn next_vacant(&self) -> Option<u32> {
        (self.used == u16::MAX).then_some(self.links.next)
    }
}

impl Nodes for Table<Cluster> {
    fn links(&mut self, index: u32) -> &mut Links {
        &mut self.get_mut(index).links
    }
}

/// The list of clusters whose longest free run is `run` units.
const fn list(run: u32) -> usize {
    if run < PAGE { run as usize } else { PAGE as usize + (run / PAGE).ilog2() as usize }
}

/// The first list whose clusters all have a run of `want` units.
fn fitting(want: u32) -> usize {
    if want <= PAGE { want as usize } else { list(want.next_power_of_two()) }
}

/// The words that a range of bits touches, and the bits in each.
fn words(bits: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    (bits.start / 64..bits.end.div_ceil(64)).map(move |word| {
        let (first, end) = (bits.start.max(word * 64), bits.end.min(word * 64 + 64));
        (word as usize, (!0 >> (64 - (end - first))) << (first % 64))
    })
}

impl Cluster {
    fn new() -> Option<Cluster> {
        let mut bits = Vec::new();
        bits.try_reserve_exact(WORDS).ok()?;
        bits.resize(WORDS, 0);
        Some(Cluster { bits: bits.into(), used: 0, list: 0, links: Links::default() })
    }

    fn set(&mut self, range: Range<u32>, used: bool) {
        let len = (range.end - range.start) as u16;
        for (word, mask) in words(range) {
            let before = if used { 0 } else { mask };
            assert_eq!(
                self.bits[word] & mask,
                before,
                "space in word {word} of its cluster is freed or given out twice"
            );
            self.bits[word] ^= mask;
        }
        self.used = if used { self.used + len } else { self.used - len };
    }

    /// The first unit from `from` on that is in use, or that is not; CLUSTER if there is none.
    fn next(&self, used: bool, from: u32) -> u32 {
        let flip = if used { 0 } else { !0 };
        let found = words(from..CLUSTER).find_map(|(word, mask)| {
            let bits = (self.bits[word] ^ flip) & mask;
            (bits != 0).then(|| word as u32 * 64 + bits.trailing_zeros())
        });
        found.unwrap_or(CLUSTER)
    }

    /// The first unit of the free run that ends before `end`.
    fn start_of_free(&self, end: u32) -> u32 {
        let mut before = (0..=end / 64).rev().map(|word| {
            let mask = if word == end / 64 { !(!0 << (end % 64)) } else { !0 };
            (word, self.bits[word as usize] & mask)
        });
        before.find(|(_, bits)| *bits != 0).map_or(0, |(word, bits)| word * 64 + 64 - bits.leading_zeros())
    }

    /// The first run of `want` free units, or else the longest shorter one.
    fn best_run(&self, want: u32) -> Range<u32> {
        let mut best = 0..0;
        let mut start = self.next(false, 0);
        while start < CLUSTER {
            let end = self.next(true, start);
            if end - start > best.end - best.start {
                best = start..end.min(start + want);
                if best.end - best.start == want {
                    break;
                }
            }
            start = self.next(false, end);
        }
        best
    }

    fn longest(&self) -> u32 {
        let best = self.best_run(CLUSTER);
        best.end - best.start
    }
}

impl DiskSpace {
    /// Space for `limit_bytes` (rounded down to pages), at most and by default 512 GiB less a page.
    pub fn new(limit_bytes: Option<u64>) -> DiskSpace {
        let pages = limit_bytes.unwrap_or(u64::MAX) / PAGE_SIZE as u64;
        DiskSpace {
            clusters: Table::new(),
            lists: [List::default(); LISTS],
            limit: pages.min((u32::MAX / PAGE) as u64) as u32 * PAGE,
            used: 0,
        }
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        offset(self.used)
    }

    /// Memory of the books, in bytes.
    pub fn memory(&self) -> usize {
        self.clusters.memory() + self.clusters.used() as usize * WORDS * size_of::<u64>()
    }

    /// Up to `want` neighbouring units (1 to CLUSTER); None if there are none.
    pub fn allocate(&mut self, want: u32) -> Option<Run> {
        let sparse = self.used as u64 * 2 < self.clusters.used() as u64 * CLUSTER as u64;
        let tightest = self.lists[fitting(want.min(LONG))..].iter().find_map(List::head);
        let index = tightest
            .or_else(|| self.roomiest().filter(|&index| sparse && self.clusters.get(index).list >= PAGE as u8))
            .or_else(|| self.add_cluster())
            .or_else(|| self.roomiest())?;
        let cluster = self.clusters.get_mut(index);
        let range = cluster.best_run(want);
        cluster.set(range.clone(), true);
        let list = list(cluster.longest());
        self.relist(index, list);
        self.used += range.end - range.start;
        Some(Run { start: (index - 1) * CLUSTER + range.start, len: range.end - range.start })
    }

    /// Frees units of one cluster. If that leaves it empty, returns the cluster: the caller discards it in the file,
    /// then calls `discarded`.
    pub fn free(&mut self, run: Run) -> Option<Emptied> {
        let index = run.start / CLUSTER + 1;
        let start = run.start % CLUSTER;
        let absent = self.absent(index);
        let cluster = self.clusters.get_mut(index);
        cluster.set(start..start + run.len, false);
        self.used -= run.len;
        if cluster.used as u32 == absent {
            self.relist(index, 0);
            return Some(Emptied(index));
        }
        let merged = cluster.next(true, start) - cluster.start_of_free(start);
        let list = list(merged).max(cluster.list as usize);
        self.relist(index, list);
        None
    }

    /// The cluster is discarded and may be used again.
    pub fn discarded(&mut self, Emptied(index): Emptied) {
        self.relist(index, list(CLUSTER - self.absent(index)));
    }

    /// Units of the cluster that lie beyond the limit; they count as in use.
    fn absent(&self, index: u32) -> u32 {
        (index as u64 * CLUSTER as u64).saturating_sub(self.limit as u64) as u32
    }

    /// A cluster of the last list that has one.
    fn roomiest(&self) -> Option<u32> {
        self.lists.iter().rev().find_map(List::head)
    }

    fn relist(&mut self, index: u32, list: usize) {
        let before = std::mem::replace(&mut self.clusters.get_mut(index).list, list as u8) as usize;
        if before == list {
            return;
        }
        if before != 0 {
            self.lists[before].unlink(&mut self.clusters, index);
        }
        if list != 0 {
            self.lists[list].push_front(&mut self.clusters, index);
        }
    }

    /// The next cluster of the file, empty and on its list; None at the limit.
    fn add_cluster(&mut self) -> Option<u32> {
        let index = self.clusters.insert(Cluster::new()?, self.limit.div_ceil(CLUSTER))?;
        let there = CLUSTER - self.absent(index);
        if there < CLUSTER {
            self.clusters.get_mut(index).set(there..CLUSTER, true);
        }
        self.relist(index, list(there));
        Some(index)
    }

    /// Panics unless `in_use` is exactly what is in use and all counts and lists agree.
    pub fn check_valid(&mut self, in_use: impl Iterator<Item = Run>) {
        self.clusters.check_valid();
        let mut expected = vec![false; self.clusters.used() as usize * CLUSTER as usize];
        let mut used = 0;
        for run in in_use {
            assert!(run.len > 0 && run.start / CLUSTER == (run.end() - 1) / CLUSTER, "{run:?} leaves its cluster");
            for unit in run.start..run.end() {
                assert!(!std::mem::replace(&mut expected[unit as usize], true), "unit {unit} has two owners");
            }
            used += run.len;
        }
        assert_eq!(used, self.used, "units in use");
        let members: Vec<_> = self.lists.iter().map(|list| list.check_valid(&mut self.clusters)).collect();
        for (index, cluster) in self.clusters.iter() {
            let first = (index - 1) * CLUSTER;
            let is_used = |unit: u32| expected[unit as usize] || unit >= self.limit;
            for unit in 0..CLUSTER {
                let bit = cluster.bits[unit as usize / 64] >> (unit % 64) & 1 == 1;
                assert_eq!(bit, is_used(first + unit), "unit {}", first + unit);
            }
            let used = (first..first + CLUSTER).filter(|&unit| is_used(unit)).count();
            assert_eq!(cluster.used as usize, used, "units in use of cluster {index}");
            assert_eq!(cluster.list as usize, list(cluster.longest()), "cluster {index} is on the wrong list");
            assert!(cluster.list == 0 || members[cluster.list as usize].contains(&index), "cluster {index} is lost");
        }
    }
}

/// An empty cluster that waits for its discard.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Emptied(u32);

impl Emptied {
    /// Offset and length in bytes of what is to be discarded.
    pub fn range(&self) -> (u64, u64) {
        (offset(self.0 - 1) * CLUSTER as u64, offset(CLUSTER))
    }
}

#[cfg(test)]
#[path = "swapfile_tests.rs"]
mod tests;

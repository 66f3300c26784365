//! The swap file: who implements it, and which of its blocks are in use.
//!
//! 1. A block is one page. Blocks are given out at writeback, never before, so no swap file is sized in advance.
//! 2. 256 blocks (1 MiB) are a cluster, the most that is written at once. Large requests take an empty cluster, or the
//!    emptiest; single pages take the fullest: that keeps whole clusters free for long sequential writes.
//! 3. A cluster that has become empty is discarded in the file before it is used again. Nobody may hold a lock
//!    during the discard, so the cluster is on no list until `discarded`.

use crate::PAGE_SIZE;
use crate::table::{Cell, Links, List, NIL, Nodes, Table};
use std::io;

/// Blocks in a cluster, and the most pages written at once.
pub(crate) const CLUSTER: usize = 256;

const WORDS: usize = CLUSTER / 64;
/// Lists of clusters with some free blocks; the last holds the empty ones.
const LISTS: usize = 9;
/// From this many blocks on, a request is worth an empty cluster.
const LARGE: usize = 32;

/// A file that grows as it is written to. Called without any lock held, from several threads at once, never for the same
/// bytes. Must not call back into the engine.
pub trait SwapFile: Send + Sync {
    /// Writes all of `data` at `offset` (bytes); both are multiples of [`PAGE_SIZE`], the length at most 1 MiB.
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

    /// The bytes from `offset` on are not needed any more: punch a hole, as well as can be.
    fn discard(&self, offset: u64, len: u64);
}

/// Offset of a block in the file, in bytes.
pub(crate) fn offset(block: u32) -> u64 {
    block as u64 * PAGE_SIZE as u64
}

/// Neighbouring blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub start: u32,
    pub len: u32,
}

/// Which blocks are in use.
pub(crate) struct DiskSpace {
    /// Cluster `n`, from 1, holds the blocks from `(n - 1) * CLUSTER` on; none is ever removed.
    clusters: Table<Cluster>,
    /// By the number of free blocks: list `n` those with 2^n to 2^(n+1) - 1, the last the empty clusters.
    lists: [List; LISTS],
    limit: u32,
    used: u32,
}

struct Cluster {
    /// A bit for each block in use.
    bits: [u64; WORDS],
    /// Blocks in use.
    used: u16,
    /// On a list: neither full nor waiting for its discard.
    listed: bool,
    links: Links,
}

impl Cell for Cluster {
    fn vacant(next: u32) -> Self {
        Cluster { bits: [0; WORDS], used: u16::MAX, listed: false, links: Links { prev: NIL, next } }
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

impl Cluster {
    fn list(&self) -> usize {
        (CLUSTER - self.used as usize).ilog2() as usize
    }

    fn is_used(&self, block: usize) -> bool {
        self.bits[block / 64] >> (block % 64) & 1 == 1
    }

    /// The first run of `want` free blocks, or else the longest shorter one.
    fn best_run(&self, want: usize) -> (usize, usize) {
        let mut best = (0, 0);
        let mut start = 0;
        for block in 0..=CLUSTER {
            if block == CLUSTER || self.is_used(block) {
                start = block + 1;
            } else if block + 1 - start > best.1 {
                best = (start, block + 1 - start);
                if best.1 == want {
                    break;
                }
            }
        }
        best
    }
}

impl DiskSpace {
    /// Space for `limit_bytes` (rounded down to pages), at most and by default 16 TiB less a page.
    pub fn new(limit_bytes: Option<u64>) -> DiskSpace {
        let limit = limit_bytes.unwrap_or(u64::MAX) / PAGE_SIZE as u64;
        DiskSpace {
            clusters: Table::new(),
            lists: [List::default(); LISTS],
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
            used: 0,
        }
    }

    /// Blocks in use.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Memory of the books, in bytes.
    pub fn memory(&self) -> usize {
        self.clusters.memory()
    }

    /// Up to `want` neighbouring blocks (1 to CLUSTER); None if there are none.
    pub fn allocate(&mut self, want: usize) -> Option<Run> {
        let cluster = if want >= LARGE {
            let cluster = self.lists[LISTS - 1].head().or_else(|| self.add_cluster());
            cluster.or_else(|| self.lists.iter().rev().find_map(List::head))?
        } else {
            self.lists.iter().find_map(List::head).or_else(|| self.add_cluster())?
        };
        let (start, len) = self.clusters.get(cluster).best_run(want);
        for block in start..start + len {
            self.set(cluster, block, true);
        }
        self.relist(cluster);
        self.used += len as u32;
        Some(Run { start: (cluster - 1) * CLUSTER as u32 + start as u32, len: len as u32 })
    }

    /// Frees a block. If that leaves its cluster empty, returns the cluster: the caller discards it in the file,
    /// then calls `discarded`.
    pub fn free(&mut self, block: u32) -> Option<Emptied> {
        let cluster = block / CLUSTER as u32 + 1;
        self.set(cluster, block as usize % CLUSTER, false);
        self.used -= 1;
        if self.clusters.get(cluster).used as usize == self.absent(cluster) {
            self.unlist(cluster);
            return Some(Emptied(cluster));
        }
        self.relist(cluster);
        None
    }

    /// The cluster is discarded and may be used again.
    pub fn discarded(&mut self, Emptied(cluster): Emptied) {
        self.relist(cluster);
    }

    /// Blocks of the cluster that lie beyond the limit; they count as in use.
    fn absent(&self, cluster: u32) -> usize {
        (cluster as u64 * CLUSTER as u64).saturating_sub(self.limit as u64) as usize
    }

    fn set(&mut self, cluster: u32, block: usize, used: bool) {
        self.unlist(cluster);
        let cluster = self.clusters.get_mut(cluster);
        assert_ne!(cluster.is_used(block), used, "block {block} of its cluster is freed or given out twice");
        cluster.bits[block / 64] ^= 1 << (block % 64);
        cluster.used = if used { cluster.used + 1 } else { cluster.used - 1 };
    }

    fn unlist(&mut self, index: u32) {
        let cluster = self.clusters.get_mut(index);
        if std::mem::replace(&mut cluster.listed, false) {
            let list = cluster.list();
            self.lists[list].unlink(&mut self.clusters, index);
        }
    }

    fn relist(&mut self, index: u32) {
        let cluster = self.clusters.get_mut(index);
        if (cluster.used as usize) < CLUSTER {
            cluster.listed = true;
            let list = cluster.list();
            self.lists[list].push_front(&mut self.clusters, index);
        }
    }

    /// The next cluster of the file, empty and on its list; None at the limit.
    fn add_cluster(&mut self) -> Option<u32> {
        let clusters = self.limit.div_ceil(CLUSTER as u32);
        let cluster = Cluster { bits: [0; WORDS], used: 0, listed: false, links: Links::default() };
        let index = self.clusters.insert(cluster, clusters)?;
        for block in CLUSTER - self.absent(index)..CLUSTER {
            self.set(index, block, true);
        }
        self.relist(index);
        Some(index)
    }

    /// Panics unless `in_use` is exactly the blocks in use and all counts and lists agree.
    pub fn check_valid(&mut self, in_use: impl Iterator<Item = u32>) {
        self.clusters.check_valid();
        let mut expected = vec![0u64; self.clusters.used() as usize * CLUSTER];
        for block in in_use {
            assert_eq!(std::mem::replace(&mut expected[block as usize], 1), 0, "block {block} has two owners");
        }
        assert_eq!(expected.iter().sum::<u64>(), self.used as u64, "blocks in use");
        let members: Vec<_> = self.lists.iter().map(|list| list.check_valid(&mut self.clusters)).collect();
        for (index, cluster) in self.clusters.iter() {
            let first = (index as usize - 1) * CLUSTER;
            let mut used = 0;
            for block in 0..CLUSTER {
                let expected = expected[first + block] == 1 || first + block >= self.limit as usize;
                assert_eq!(cluster.is_used(block), expected, "block {}", first + block);
                used += expected as u16;
            }
            assert_eq!(cluster.used, used, "blocks in use of cluster {index}");
            let listed = used < CLUSTER as u16 && members[cluster.list()].contains(&index);
            assert_eq!(cluster.listed, listed, "cluster {index} is on the wrong list");
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
        let len = (CLUSTER * PAGE_SIZE) as u64;
        ((self.0 as u64 - 1) * len, len)
    }
}

#[cfg(test)]
#[path = "swapfile_tests.rs"]
mod tests;

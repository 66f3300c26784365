//! Checksums of the original contents of pages, for `Config::verify`.
//!
//! 1. A sum lies beside the table of entries, at the same index. The table of sums exists only where checking is on.
//! 2. A sum is written under the lock under which its slot is made, and stays until the slot is given to another page. A holder of
//!    a reference can therefore read it at any time.
//! 3. Same-filled pages have none: their entry holds the contents themselves.

use crate::Page;

/// Sums in a chunk.
const CHUNK: usize = 8 << 10;

/// The sums of one shard.
pub(crate) struct Sums {
    chunks: Vec<Box<[u32]>>,
}

/// Returns the checksum of a page.
pub(crate) fn of(page: &Page) -> u32 {
    crc32fast::hash(page)
}

impl Sums {
    pub fn new() -> Sums {
        Sums { chunks: Vec::new() }
    }

    /// Makes room for the sum at `index`; None if there is no memory for it.
    pub fn reserve(&mut self, index: u32) -> Option<()> {
        while self.chunks.len() <= index as usize / CHUNK {
            let mut chunk = Vec::new();
            chunk.try_reserve_exact(CHUNK).ok()?;
            chunk.resize(CHUNK, 0);
            self.chunks.try_reserve(1).ok()?;
            self.chunks.push(chunk.into_boxed_slice());
        }
        Some(())
    }

    pub fn get(&self, index: u32) -> u32 {
        self.chunks[index as usize / CHUNK][index as usize % CHUNK]
    }

    /// Sets the sum at an index that there is room for.
    pub fn set(&mut self, index: u32, sum: u32) {
        self.chunks[index as usize / CHUNK][index as usize % CHUNK] = sum;
    }

    /// Returns the memory of the table, in bytes.
    pub fn memory(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<u32>()
    }
}

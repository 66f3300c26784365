//! What the fuzz targets reach of the inside: an allocator alone, and lzo-rle alone. And memory for an allocator that runs
//! out, which the unit tests have too.

use crate::PAGE_SIZE;
use crate::lzo;
use crate::sync::{AtomicU64, Ordering::Relaxed};
use crate::zbud::Zbud;
use crate::zpool::{Allocator, HeapSource, PageRun, PageSource, Place, Zpool};
use crate::zsmalloc::Zsmalloc;
use std::collections::HashMap;
use std::sync::Arc;

/// An allocator and the owner of its objects, who names them by number.
pub struct Pool {
    allocator: Box<dyn Allocator>,
    /// Where each object is, and its length.
    objects: HashMap<u32, (Place, usize)>,
    next: u32,
}

impl Pool {
    /// An empty one.
    pub fn new(zpool: Zpool, memory: impl PageSource + 'static) -> Pool {
        let memory = Arc::new(memory);
        let allocator: Box<dyn Allocator> = match zpool {
            Zpool::Zsmalloc => Box::new(Zsmalloc::new(memory)),
            Zpool::Zbud => Box::new(Zbud::new(memory)),
        };
        Pool { allocator, objects: HashMap::new(), next: 0 }
    }

    /// Stores a copy of 1 to PAGE_SIZE bytes; None if there is no memory. Panics if another object's place is given out.
    pub fn malloc(&mut self, data: &[u8]) -> Option<u32> {
        let place = self.allocator.malloc(data, self.next).ok()?;
        assert!(self.objects.values().all(|(other, _)| *other != place), "a place in use is given out");
        self.objects.insert(self.next, (place, data.len()));
        self.next += 1;
        Some(self.next - 1)
    }

    /// The bytes of an object.
    pub fn get(&self, object: u32) -> &[u8] {
        let (place, length) = self.objects[&object];
        self.allocator.get(place, length)
    }

    /// Frees an object; returns the pages that went back.
    pub fn free(&mut self, object: u32) -> u64 {
        let (place, length) = self.objects.remove(&object).expect("an object that was not freed");
        self.allocator.free(place, length)
    }

    /// One step of compaction in the size class of objects of `length` bytes; returns the pages that went back.
    pub fn compact(&mut self, length: usize) -> u64 {
        let Pool { allocator, objects, .. } = self;
        let mut moved = |owner, to| objects.get_mut(&owner).expect("the owner of an object").0 = to;
        allocator.compact_step(allocator.class_of(length), &mut moved).unwrap_or(0)
    }

    /// Pages held, objects held, and the bytes of these.
    pub fn totals(&self) -> (u64, u32, u64) {
        (self.allocator.pages(), self.allocator.objects(), self.allocator.bytes())
    }

    /// Panics if anything contradicts anything.
    pub fn check_valid(&mut self) {
        self.allocator.check_valid();
        self.objects.iter().for_each(|(owner, (place, _))| self.allocator.check_owner(*place, *owner));
    }
}

/// Has memory for so many pages more; what is given back to it is gone.
#[derive(Clone)]
pub struct Limited(Arc<AtomicU64>);

/// A run from a [`Limited`].
pub struct LimitedRun {
    run: <HeapSource as PageSource>::Run,
    memory: Limited,
}

impl Limited {
    /// With memory for so many pages.
    pub fn new(pages: u64) -> Limited {
        Limited(Arc::new(AtomicU64::new(pages)))
    }

    /// Has memory for so many pages from now on.
    pub fn set(&self, pages: u64) {
        self.0.store(pages, Relaxed);
    }

    fn spend(&self, pages: usize) -> bool {
        self.0.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(pages as u64)).is_ok()
    }
}

impl PageSource for Limited {
    type Run = LimitedRun;

    fn take(&self, most: usize) -> Option<LimitedRun> {
        let run = if self.spend(1) { HeapSource.take(most) } else { None };
        run.map(|run| LimitedRun { run, memory: self.clone() })
    }
}

impl PageRun for LimitedRun {
    fn resize(&mut self, pages: usize) -> bool {
        let before = self.run.as_ref().len() / PAGE_SIZE;
        let room = self.memory.spend(pages.saturating_sub(before));
        if room {
            assert!(self.run.resize(pages), "the heap has no memory");
        }
        room
    }
}

impl AsRef<[u8]> for LimitedRun {
    fn as_ref(&self) -> &[u8] {
        self.run.as_ref()
    }
}

impl AsMut<[u8]> for LimitedRun {
    fn as_mut(&mut self) -> &mut [u8] {
        self.run.as_mut()
    }
}

/// Compresses up to a page; returns the length, or None if `output` is too short.
pub fn lzo_compress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    lzo::compress(input, output, &mut [0; lzo::POSITIONS])
}

/// Decompresses a stream; returns the length, or None if it is damaged or too long.
pub fn lzo_decompress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    lzo::decompress(input, output)
}

//! What the fuzz targets reach of the inside: an allocator alone, and lzo-rle alone.

use crate::lzo;
use crate::zbud::Zbud;
use crate::zpool::{Allocator, PageSource, Place, Zpool};
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

/// Compresses up to a page; returns the length, or None if `output` is too short.
pub fn lzo_compress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    lzo::compress(input, output, &mut [0; lzo::POSITIONS])
}

/// Decompresses a stream; returns the length, or None if it is damaged or too long.
pub fn lzo_decompress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    lzo::decompress(input, output)
}

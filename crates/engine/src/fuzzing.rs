//! What the fuzz targets reach of the inside: an allocator alone, and lzo-rle alone.

use crate::lzo;
use crate::zbud::Zbud;
use crate::zpool::{Allocator, Handle, PageSource, Zpool};
use crate::zsmalloc::Zsmalloc;
use std::sync::Arc;

/// An allocator; objects are named by number.
pub struct Pool(Box<dyn Allocator>);

impl Pool {
    /// An empty one.
    pub fn new(zpool: Zpool, memory: impl PageSource + 'static) -> Pool {
        let memory = Arc::new(memory);
        Pool(match zpool {
            Zpool::Zsmalloc => Box::new(Zsmalloc::new(memory)),
            Zpool::Zbud => Box::new(Zbud::new(memory)),
        })
    }

    /// Stores a copy of 1 to PAGE_SIZE bytes; None if there is no memory.
    pub fn malloc(&mut self, data: &[u8]) -> Option<u32> {
        self.0.malloc(data).ok().map(|handle| handle.0)
    }

    /// The bytes of an object.
    pub fn get(&self, object: u32) -> &[u8] {
        self.0.get(Handle(object))
    }

    /// Frees an object; returns the pages that went back.
    pub fn free(&mut self, object: u32) -> u64 {
        self.0.free(Handle(object))
    }

    /// One step of compaction in the size class of objects of `length` bytes; returns the pages that went back.
    pub fn compact(&mut self, length: usize) -> u64 {
        self.0.compact_step(self.0.class_of(length)).unwrap_or(0)
    }

    /// Pages held, objects held, and the bytes of these.
    pub fn totals(&self) -> (u64, u32, u64) {
        (self.0.pages(), self.0.objects(), self.0.bytes())
    }

    /// Panics if anything contradicts anything.
    pub fn check_valid(&mut self) {
        self.0.check_valid();
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

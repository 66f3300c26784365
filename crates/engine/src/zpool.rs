//! What a pool asks of its allocator, and where an allocator gets its memory.

use crate::PAGE_SIZE;
use crate::names::{UnknownName, named};
use std::fmt;
use std::str::FromStr;

/// Longest run of pages that is ever asked of a [`PageSource`].
pub const MAX_ZSPAGE_PAGES: usize = 128;

/// An allocator, by its kernel name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Zpool {
    /// `zsmalloc`: packs objects across pages, the densest.
    #[default]
    Zsmalloc,
    /// `zbud`: at most two objects in a page, for comparison.
    Zbud,
}

impl Zpool {
    /// Every allocator.
    pub const ALL: [Zpool; 2] = [Zpool::Zsmalloc, Zpool::Zbud];

    /// The kernel's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Zpool::Zsmalloc => "zsmalloc",
            Zpool::Zbud => "zbud",
        }
    }
}

impl fmt::Display for Zpool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Zpool {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        named("zpool", &Zpool::ALL, Zpool::name, name)
    }
}

/// A run of whole pages; dropping it gives the memory back to where it came from. Its bytes are `AsRef` and `AsMut`.
pub trait PageRun: AsRef<[u8]> + AsMut<[u8]> + Send + 'static {
    /// Makes the run `pages` long, 1 to the most that was said: takes memory behind its end, with any content, or gives back
    /// what is there. What stays keeps its content. False if there is no memory: the run is then as it was.
    fn resize(&mut self, pages: usize) -> bool;
}

/// Where allocators get their memory from.
///
/// Called with the pool locked: an implementation must be quick and must never wait for a page of the program.
pub trait PageSource: Send + Sync + 'static {
    /// What it gives. Kept among what is known of a zspage, so it should be small.
    type Run: PageRun;

    /// A run of one page with any content, which nobody will make longer than `most` pages (1 to [`MAX_ZSPAGE_PAGES`]); None
    /// if there is no memory.
    fn take(&self, most: usize) -> Option<Self::Run>;
}

/// Takes the memory from the heap. For tests and experiments: heap memory is seldom given back to the system.
#[derive(Debug, Default)]
pub struct HeapSource;

/// A run from a [`HeapSource`].
#[derive(Debug)]
pub struct HeapRun(Vec<u8>);

impl PageSource for HeapSource {
    type Run = HeapRun;

    fn take(&self, _: usize) -> Option<HeapRun> {
        let mut run = HeapRun(Vec::new());
        run.resize(1).then_some(run)
    }
}

impl PageRun for HeapRun {
    fn resize(&mut self, pages: usize) -> bool {
        let bytes = pages * PAGE_SIZE;
        let room = self.0.try_reserve(bytes.saturating_sub(self.0.len())).is_ok();
        if room {
            self.0.resize(bytes, 0);
        }
        room
    }
}

impl AsRef<[u8]> for HeapRun {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl AsMut<[u8]> for HeapRun {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Most zspages of a pool: their numbers have 28 bits.
pub(crate) const MAX_ZSPAGES: u32 = (1 << 28) - 1;
/// Most places in a zspage: their numbers have 13 bits.
pub(crate) const MAX_PLACES: usize = 1 << 13;

/// Where an object is in its pool: good until the object is moved, of which its owner is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub zspage: u32,
    pub index: u16,
}

/// Why an object could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocError {
    /// The page source has no run of pages.
    Pages,
    /// No memory for the tables.
    Metadata,
}

/// Copies bytes to or from a pool's memory, in pieces: for a long slice the C library may use a single instruction
/// (`rep movsb`), which takes longer where memory has to be waited for.
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    const PIECE: usize = 512;
    assert_eq!(to.len(), from.len(), "a copy of another length");
    for (to, from) in to.chunks_mut(PIECE).zip(from.chunks(PIECE)) {
        to.copy_from_slice(from);
    }
}

/// Keeps objects of 1 to PAGE_SIZE bytes in whole pages. An object's owner keeps its place and its length, and tells them
/// with every call. There is no lock in it: who has it has one around it.
pub(crate) trait Allocator: Send {
    /// Stores a copy of `data`, 1 to PAGE_SIZE bytes, of the owner of that number (below 2^30). Takes at most one page more.
    fn malloc(&mut self, data: &[u8], owner: u32) -> Result<Place, AllocError>;
    /// The object's bytes; anything if there is none. [`check_owner`](Self::check_owner) tells.
    fn get(&self, place: Place, length: usize) -> &[u8];
    /// Frees the object; returns the pages that went back to the system by it.
    fn free(&mut self, place: Place, length: usize) -> u64;
    /// The longest object that takes less than a whole page.
    fn largest_below_page(&self) -> usize;
    /// Pages held.
    fn pages(&self) -> u64;
    /// Objects held.
    fn objects(&self) -> u32;
    /// Bytes of all objects, as stored.
    fn bytes(&self) -> u64;
    /// Memory of everything but the pages, in bytes; what the heap adds to it is not known.
    fn metadata(&self) -> usize;
    /// Number of size classes: the range of [`compact_step`](Self::compact_step).
    fn classes(&self) -> usize;
    /// The size class of objects of `length` bytes.
    fn class_of(&self, length: usize) -> usize;
    /// Moves objects of a class together until a page is free, and gives it back; returns the pages given back, or None if
    /// that class has too little room. `moved` tells an owner the new place. One step moves about a page's worth of objects.
    fn compact_step(&mut self, class: usize, moved: &mut dyn FnMut(u32, Place)) -> Option<u64>;
    /// Panics unless there is an object at `place`, and it is the owner's.
    fn check_owner(&self, place: Place, owner: u32);
    /// Panics if anything contradicts anything. Visits every object.
    fn check_valid(&mut self);
}

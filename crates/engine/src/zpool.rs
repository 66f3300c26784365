//! What a pool asks of its allocator, and where an allocator gets its memory.

use crate::PAGE_SIZE;
use crate::names::{UnknownName, named};
use std::fmt;
use std::str::FromStr;

/// Longest run of pages that is asked of a [`PageSource`].
pub const MAX_ZSPAGE_PAGES: usize = 8;

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

/// A run of whole pages; dropping it gives the memory back to where it came from.
pub trait PageRun: AsRef<[u8]> + AsMut<[u8]> + Send {}
impl<T: AsRef<[u8]> + AsMut<[u8]> + Send> PageRun for T {}

/// Where allocators get their memory from.
///
/// Called with the pool locked: an implementation must be quick and must never wait for a page of the program.
pub trait PageSource: Send + Sync {
    /// A run of `pages` contiguous pages (1 to [`MAX_ZSPAGE_PAGES`]), exactly `pages * PAGE_SIZE` bytes with any
    /// content; None if there is no memory.
    fn take(&self, pages: usize) -> Option<Box<dyn PageRun>>;
}

/// Takes the memory from the heap. For tests and experiments: heap memory is seldom given back to the system.
#[derive(Debug, Default)]
pub struct HeapSource;

impl PageSource for HeapSource {
    fn take(&self, pages: usize) -> Option<Box<dyn PageRun>> {
        let mut run = Vec::new();
        run.try_reserve_exact(pages * PAGE_SIZE).ok()?;
        run.resize(pages * PAGE_SIZE, 0);
        Some(Box::new(run.into_boxed_slice()))
    }
}

/// The name of an object in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Handle(pub u32);

/// Why an object could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocError {
    /// The page source has no run of pages.
    Pages,
    /// No memory for the tables.
    Metadata,
}

/// Keeps objects of 1 to PAGE_SIZE bytes in whole pages. There is no lock in it: the owner has one around it.
pub(crate) trait Allocator: Send {
    /// Stores a copy of `data`, 1 to PAGE_SIZE bytes.
    fn malloc(&mut self, data: &[u8]) -> Result<Handle, AllocError>;
    /// The object's bytes.
    fn get(&self, handle: Handle) -> &[u8];
    /// Length of the object in bytes.
    fn length(&self, handle: Handle) -> usize;
    /// Frees the object; returns the pages that went back to the system by it.
    fn free(&mut self, handle: Handle) -> u64;
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
    /// Moves objects of a class together until a run of pages is free, and gives it back; returns its pages, or None if
    /// that class has too little room. One step moves less than a run's worth of objects.
    fn compact_step(&mut self, class: usize) -> Option<u64>;
    /// Panics if anything contradicts anything. Visits every object.
    fn check_valid(&mut self);
}

//! Memory for the pool: taken from the system page by page as it is touched, and given back when a run of pages is free.
//!
//! One reserved range of addresses, cut into places of [`MAX_ZSPAGE_PAGES`] pages. A run gets a place and uses its beginning. The
//! last few free places keep their memory, because under churn they are wanted again at once.
//!
//! # Safety
//! A place belongs to at most one run at a time (it leaves the free list when a run takes it and returns when the run is
//! dropped); the range stays mapped as long as any run or the arena lives.

#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use uzswap_engine::{MAX_ZSPAGE_PAGES, PAGE_SIZE, PageRun, PageSource};

const PLACE: usize = MAX_ZSPAGE_PAGES * PAGE_SIZE;

/// Free places that keep their memory.
const WARM: usize = 64;

/// The pool's memory.
#[derive(Debug)]
pub struct Arena(Arc<Range>);

#[derive(Debug)]
struct Range {
    start: NonNull<u8>,
    places: usize,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Places that still have memory.
    warm: Vec<usize>,
    cold: Vec<usize>,
    /// Places from here on were never used.
    fresh: usize,
}

// SAFETY: the pointer is to a mapping that any thread may use; who uses which part is decided under the lock.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Arena {
    /// Reserves addresses, but no memory, for a pool of up to `bytes`.
    pub fn reserve(bytes: u64) -> io::Result<Arena> {
        // At worst each run is of one page.
        let places = usize::try_from(bytes / PAGE_SIZE as u64 + 1).unwrap_or(usize::MAX).min((1 << 45) / PLACE);
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), places * PLACE, rights, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at 0 unasked");
        Ok(Arena(Arc::new(Range { start, places, free: Mutex::default() })))
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the whole of our mapping; no run is left, each holds a reference.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.places * PLACE) };
    }
}

impl PageSource for Arena {
    fn take(&self, pages: usize) -> Option<Box<dyn PageRun>> {
        assert!((1..=MAX_ZSPAGE_PAGES).contains(&pages));
        let mut free = self.0.free.lock();
        let place = free.warm.pop().or_else(|| free.cold.pop()).or_else(|| {
            let fresh = free.fresh;
            (fresh < self.0.places).then(|| {
                free.fresh += 1;
                fresh
            })
        })?;
        Some(Box::new(Run { range: self.0.clone(), place, pages }))
    }
}

struct Run {
    range: Arc<Range>,
    place: usize,
    pages: usize,
}

impl Run {
    fn start(&self) -> *mut u8 {
        // SAFETY: the place lies within the mapping.
        unsafe { self.range.start.as_ptr().add(self.place * PLACE) }
    }
}

impl AsRef<[u8]> for Run {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the place is this run's alone, mapped and initialised (with zeros, by the kernel).
        unsafe { std::slice::from_raw_parts(self.start(), self.pages * PAGE_SIZE) }
    }
}

impl AsMut<[u8]> for Run {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.pages * PAGE_SIZE) }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let mut free = self.range.free.lock();
        if free.warm.len() < WARM {
            free.warm.push(self.place);
            return;
        }
        // As MADV_DONTNEED, for memory that may be locked.
        const MADV_DONTNEED_LOCKED: libc::c_int = 24;
        // SAFETY: the place is still this run's; nobody reads what was in it any more. It reads as zeros afterwards.
        unsafe { libc::madvise(self.start().cast(), PLACE, MADV_DONTNEED_LOCKED) };
        free.cold.push(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_apart_and_their_memory_comes_back() {
        let arena = Arena::reserve(200 * PAGE_SIZE as u64).expect("reserve");
        let mut runs: Vec<_> = (0..200).map(|i| arena.take(i % MAX_ZSPAGE_PAGES + 1).expect("room")).collect();
        for (i, run) in runs.iter_mut().enumerate() {
            let run: &mut [u8] = (**run).as_mut();
            assert_eq!(run.len(), (i % MAX_ZSPAGE_PAGES + 1) * PAGE_SIZE);
            run.fill(i as u8);
        }
        for (i, run) in runs.iter().enumerate() {
            assert!((**run).as_ref().iter().all(|&byte| byte == i as u8));
        }
        assert!(arena.take(1).is_some(), "one more than asked for");
        runs.clear();
        assert_eq!(arena.0.free.lock().warm.len(), WARM);
        assert!((0..200).all(|_| arena.take(MAX_ZSPAGE_PAGES).is_some()));
    }

    #[test]
    fn an_arena_that_is_full_says_so() {
        let arena = Arena::reserve(PAGE_SIZE as u64).expect("reserve");
        let (first, second) = (arena.take(1), arena.take(1));
        assert!(first.is_some() && second.is_some());
        assert!(arena.take(1).is_none());
    }
}

//! Memory for the pool: taken from the system page by page as it is touched, and given back as pages come free.
//!
//! One reserved range of addresses, cut into places as they are asked for. A run gets a place that it can grow in, and uses
//! its beginning. A place is as long as the next power of two, so that one that is left fits others; not longer, because
//! memory that lies close together takes fewer page tables, and is found faster through them. The last few free pages keep
//! their memory, because under churn they are wanted again at once. The memory of others is given back together, for many at
//! once: each time interrupts the processors that run other threads of this process.
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

/// Places are 1, 2, 4, ... [`MAX_ZSPAGE_PAGES`] pages long.
const SIZES: usize = MAX_ZSPAGE_PAGES.ilog2() as usize + 1;

const _: () = assert!(MAX_ZSPAGE_PAGES.is_power_of_two());

/// Most pages of addresses that are reserved: a quarter of what a process has.
const MAX_RANGE: usize = 1 << (45 - PAGE_SIZE.ilog2());

/// Free pages that keep their memory, at most.
const WARM: usize = 128;

/// Pages whose memory is given back together.
const TOGETHER: usize = 128;

/// Stretches that they may be in.
const STRETCHES: usize = 64;

/// The pool's memory.
#[derive(Debug)]
pub struct Arena(Arc<Range>);

#[derive(Debug)]
struct Range {
    start: NonNull<u8>,
    pages: usize,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// By their size.
    places: [Places; SIZES],
    /// Pages that have memory and are in no run, those behind the ends of runs included.
    spare: usize,
    /// Pages of the range from here on were never used.
    fresh: usize,
    leaving: Leaving,
}

/// Free pages whose memory is about to be given back. None of them is in a run: who wants one back says so.
#[derive(Debug, Default)]
struct Leaving {
    /// For a place the pages from the first to before the second.
    stretches: Vec<(usize, u8, u8)>,
    pages: usize,
}

/// Places of one size that are in no run, each named by its first page.
#[derive(Debug, Default)]
struct Places {
    /// Those whose first pages still have memory, and how many.
    warm: Vec<(usize, u8)>,
    cold: Vec<usize>,
}

// SAFETY: the pointer is to a mapping that any thread may use; who uses which part is decided under the lock.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Arena {
    /// Reserves addresses, but no memory, for a pool of up to `bytes`.
    pub fn reserve(bytes: u64) -> io::Result<Arena> {
        // At worst each run is of one page, and all were of every size in turn.
        let runs = usize::try_from(bytes / PAGE_SIZE as u64 + 1).unwrap_or(usize::MAX);
        let pages = runs.saturating_mul(2 * MAX_ZSPAGE_PAGES - 1).min(MAX_RANGE);
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE_SIZE, rights, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at 0 unasked");
        Ok(Arena(Arc::new(Range { start, pages, free: Mutex::default() })))
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the whole of our mapping; no run is left, each holds a reference.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.pages * PAGE_SIZE) };
    }
}

impl PageSource for Arena {
    type Run = Run;

    fn take(&self, most: usize) -> Option<Run> {
        assert!((1..=MAX_ZSPAGE_PAGES).contains(&most));
        let size = most.next_power_of_two().ilog2() as u8;
        let mut free = self.0.free.lock();
        let (place, warm) = free.place(size, self.0.pages)?;
        free.spare -= usize::from(warm.min(1));
        if warm == 0 {
            free.leaving.stay(place, 1);
        }
        drop(free);
        Some(Run { range: self.0.clone(), place, size, pages: 1, warm: warm.max(1) })
    }
}

impl Free {
    /// A place of a size, and how many of its pages have memory.
    fn place(&mut self, size: u8, end: usize) -> Option<(usize, u8)> {
        let Places { warm, cold } = &mut self.places[usize::from(size)];
        warm.pop().or_else(|| cold.pop().map(|place| (place, 0))).or_else(|| {
            let (fresh, after) = (self.fresh, self.fresh + (1 << size));
            (after <= end).then(|| {
                self.fresh = after;
                (fresh, 0)
            })
        })
    }
}

impl Leaving {
    /// The memory of pages of a place is to go, up to where some of it already is to.
    fn add(&mut self, place: usize, start: u8, end: u8) {
        match self.stretches.iter_mut().rfind(|stretch| stretch.0 == place) {
            Some(stretch) => stretch.1 = start,
            None => self.stretches.push((place, start, end)),
        }
        self.pages += usize::from(end - start);
    }

    /// That of its first `pages` is to stay, where it has not gone.
    fn stay(&mut self, place: usize, pages: u8) {
        let Some(found) = self.stretches.iter().rposition(|stretch| stretch.0 == place) else { return };
        let (_, start, end) = &mut self.stretches[found];
        let first = pages.clamp(*start, *end);
        self.pages -= usize::from(first - *start);
        *start = first;
        if first == *end {
            self.stretches.swap_remove(found);
        }
    }

    /// Whether it is time to go.
    fn is_due(&self) -> bool {
        self.pages >= TOGETHER || self.stretches.len() >= STRETCHES
    }
}

impl Range {
    /// Gives back the memory of what is leaving.
    fn give_back(&self, leaving: &mut Leaving) {
        // As MADV_DONTNEED, for memory that may be locked.
        const MADV_DONTNEED_LOCKED: libc::c_int = 24;
        // This process, since Linux 6.14. An older kernel refuses it, and others may; nothing is lost.
        const PIDFD_SELF_THREAD_GROUP: libc::c_int = -10001;
        let parts = leaving.stretches.iter().map(|&(place, start, end)| libc::iovec {
            iov_base: self.start.as_ptr().wrapping_add((place + usize::from(start)) * PAGE_SIZE).cast(),
            iov_len: usize::from(end - start) * PAGE_SIZE,
        });
        let parts: Vec<libc::iovec> = parts.collect();
        // SAFETY: these pages are of the mapping and in no run: nobody reads what was in them any more. They read as zeros
        // afterwards.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                PIDFD_SELF_THREAD_GROUP,
                parts.as_ptr(),
                parts.len(),
                MADV_DONTNEED_LOCKED,
                0,
            )
        };
        if done != (leaving.pages * PAGE_SIZE) as libc::c_long {
            for part in parts {
                // SAFETY: as above.
                unsafe { libc::madvise(part.iov_base, part.iov_len, MADV_DONTNEED_LOCKED) };
            }
        }
        *leaving = Leaving::default();
    }
}

/// A run of pages of an [`Arena`].
#[derive(Debug)]
pub struct Run {
    range: Arc<Range>,
    /// The first page of its place.
    place: usize,
    /// The logarithm of the pages of its place.
    size: u8,
    pages: u8,
    /// Pages of the place that have memory and keep it, as far as is known: those of the run, and perhaps some behind its end.
    warm: u8,
}

impl PageRun for Run {
    fn resize(&mut self, pages: usize) -> bool {
        assert!((1..=1 << self.size).contains(&pages));
        self.set_pages(pages as u8);
        true
    }
}

impl Run {
    fn start(&self) -> *mut u8 {
        // SAFETY: the place lies within the mapping.
        unsafe { self.range.start.as_ptr().add(self.place * PAGE_SIZE) }
    }

    /// Moves the end of the run. What is behind it afterwards keeps its memory if not too much does already; returns how
    /// many pages of the place do.
    fn set_pages(&mut self, pages: u8) -> u8 {
        let mut free = self.range.free.lock();
        free.spare -= usize::from(self.warm - self.pages);
        if pages > self.warm {
            free.leaving.stay(self.place, pages);
            self.warm = pages;
        }
        if pages < self.pages && free.spare + usize::from(self.warm - pages) > WARM {
            free.leaving.add(self.place, pages, self.warm);
            if free.leaving.is_due() {
                self.range.give_back(&mut free.leaving);
            }
            self.warm = pages;
        }
        free.spare += usize::from(self.warm - pages);
        drop(free);
        self.pages = pages;
        self.warm
    }
}

impl AsRef<[u8]> for Run {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the place is this run's alone, mapped and initialised (with zeros, by the kernel).
        unsafe { std::slice::from_raw_parts(self.start(), self.pages as usize * PAGE_SIZE) }
    }
}

impl AsMut<[u8]> for Run {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.pages as usize * PAGE_SIZE) }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let warm = self.set_pages(0);
        let places = &mut self.range.free.lock().places[usize::from(self.size)];
        match warm {
            0 => places.cold.push(self.place),
            _ => places.warm.push((self.place, warm)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths that the runs of the tests may grow to.
    fn most(run: usize) -> usize {
        run % MAX_ZSPAGE_PAGES + 1
    }

    #[test]
    fn runs_are_apart_and_their_memory_comes_back() {
        let arena = Arena::reserve(200 * PAGE_SIZE as u64).expect("reserve");
        let mut runs: Vec<_> = (0..200).map(|i| arena.take(most(i)).expect("room")).collect();
        for (i, run) in runs.iter_mut().enumerate() {
            assert_eq!(run.as_ref().len(), PAGE_SIZE);
            assert!(run.resize(most(i)));
            let run: &mut [u8] = run.as_mut();
            assert_eq!(run.len(), most(i) * PAGE_SIZE);
            run.fill(i as u8);
        }
        for (i, run) in runs.iter().enumerate() {
            assert!(run.as_ref().iter().all(|&byte| byte == i as u8));
        }
        assert!(arena.take(1).is_some(), "one more than asked for");
        for (i, run) in runs.iter_mut().enumerate() {
            let pages = i * 7 % most(i) + 1;
            assert!(run.resize(pages));
            let run: &[u8] = run.as_ref();
            assert_eq!(run.len(), pages * PAGE_SIZE);
            assert!(run.iter().all(|&byte| byte == i as u8));
        }
        assert!((1..=WARM).contains(&arena.0.free.lock().spare));
        runs.clear();
        let spare = arena.0.free.lock().spare;
        assert!((1..=WARM).contains(&spare), "{spare}");
        let free = arena.0.free.lock();
        assert_eq!(
            spare,
            free.places.iter().flat_map(|places| &places.warm).map(|(_, pages)| usize::from(*pages)).sum()
        );
        drop(free);
        let again: Vec<_> = (0..200).map(|i| arena.take(most(i)).expect("what came back")).collect();
        assert_eq!(again.len(), 200);
    }

    #[test]
    fn no_memory_of_a_run_is_given_back() {
        let arena = Arena::reserve(4000 * PAGE_SIZE as u64).expect("reserve");
        let mut runs: Vec<Option<(Run, u8)>> = (0..60).map(|_| None).collect();
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for step in 0..30_000 {
            let (number, mark) = (random(60), step as u8);
            match &mut runs[number] {
                None => runs[number] = Some((arena.take(random(MAX_ZSPAGE_PAGES) + 1).expect("room"), mark)),
                Some(_) if random(8) == 0 => runs[number] = None,
                Some((run, marked)) => {
                    let is_whole =
                        run.as_ref().chunks(PAGE_SIZE).all(|page| page[0] == *marked && page[4095] == *marked);
                    assert!(is_whole, "step {step}");
                    run.resize(random(1 << run.size) + 1);
                    *marked = mark;
                }
            }
            if let Some((run, marked)) = &mut runs[number] {
                run.as_mut().fill(*marked);
            }
            let free = arena.0.free.lock();
            let ends = runs.iter().flatten().map(|(run, _)| usize::from(run.warm - run.pages));
            let places = free.places.iter().flat_map(|places| &places.warm).map(|(_, pages)| usize::from(*pages));
            assert_eq!(free.spare, ends.chain(places).sum::<usize>(), "step {step}");
            assert!(free.spare <= WARM && !free.leaving.is_due(), "{free:?}");
        }
    }

    #[test]
    fn an_arena_that_is_full_says_so() {
        let arena = Arena::reserve(PAGE_SIZE as u64).expect("reserve");
        // Room for two runs of each size in turn: they stay where they were.
        for size in 0..SIZES {
            let runs = [0, 1].map(|_| arena.take(1 << size));
            assert!(runs.iter().all(Option::is_some), "{size}");
        }
        let runs = [0, 1].map(|_| arena.take(1));
        assert!(runs.iter().all(Option::is_some));
        assert!(arena.take(1).is_none());
    }
}

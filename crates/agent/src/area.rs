//! The agent's region of the address space: where each of its areas lies, and mapping it.
//!
//! ```text
//!   guard │ control block, heads, stacks │ guard │ beacon │ guard │ staging │ guard │ trash │ guard
//!           shared: never managed                  one page   private, each with a userfaultfd
//! ```
//! The staging and the trash area each end with a proof page, into which the manager copies a random number. The guards keep
//! the kernel from merging an area with memory of the program. Only the beacon is inherited by a forked child, and there it is
//! empty: the child's read of it faults, and the manager answers with a number that names the userfaultfd that the child
//! inherited. Where the io_uring of the tether is mapped the kernel chooses (`tether.rs`).
//!
//! # Safety
//! Maps fresh memory and replaces parts of it; touches nothing that existed before.

use core::mem::size_of;

use uzswap_proto::{MAX_HEADS, PAGE_SIZE, STAGING_PAGES, TRASH_PAGES};

use crate::sys::{self, call};

/// The heads of robust lists (`robust.rs`).
const HEADS_PAGES: usize = MAX_HEADS * size_of::<u64>() / PAGE_SIZE;

const CONTROL_PAGES: usize = 16 + HEADS_PAGES;

/// The control block and the usher's stack.
const USHER_STACK: usize = 2 * PAGE_SIZE;

const CONTROL: usize = PAGE_SIZE;
const BEACON: usize = CONTROL + (CONTROL_PAGES + 1) * PAGE_SIZE;
const STAGING: usize = BEACON + 2 * PAGE_SIZE;
/// Pages of an area's proof.
const PROOF_PAGES: usize = 1;

const TRASH: usize = STAGING + (STAGING_PAGES + PROOF_PAGES + 1) * PAGE_SIZE;

/// Length of the region in bytes.
pub const REGION_LEN: usize = TRASH + (TRASH_PAGES + PROOF_PAGES + 1) * PAGE_SIZE;

/// A mapped region.
#[derive(Clone, Copy)]
pub struct Region {
    start: usize,
}

impl Region {
    /// Maps a new region, or gives the negative errno.
    pub fn map() -> Result<Region, isize> {
        // SAFETY: no fixed address.
        let start = unsafe { call!(sys::SYS_MMAP, 0, REGION_LEN, PROT_NONE, PRIVATE, usize::MAX, 0) };
        if start < 0 {
            return Err(start);
        }
        let region = Region { start: start as usize };
        region.furnish().inspect_err(|_| region.unmap())?;
        Ok(region)
    }

    fn furnish(self) -> Result<(), isize> {
        for (offset, len, flags) in [
            (CONTROL, CONTROL_PAGES * PAGE_SIZE, SHARED),
            (BEACON, PAGE_SIZE, PRIVATE),
            (STAGING, (STAGING_PAGES + PROOF_PAGES) * PAGE_SIZE, PRIVATE),
            (TRASH, (TRASH_PAGES + PROOF_PAGES) * PAGE_SIZE, PRIVATE),
        ] {
            let at = self.start + offset;
            // SAFETY: replaces a part of the region just mapped, which nobody uses yet.
            check(unsafe { call!(sys::SYS_MMAP, at, len, PROT_RW, flags | MAP_FIXED, usize::MAX, 0) })?;
        }
        // Everything before and after the beacon stays out of children.
        advise(self.start, BEACON, MADV_DONTFORK)?;
        advise(self.start + BEACON + PAGE_SIZE, REGION_LEN - BEACON - PAGE_SIZE, MADV_DONTFORK)?;
        advise(self.beacon(), PAGE_SIZE, MADV_WIPEONFORK)
    }

    /// Unmaps the region.
    pub fn unmap(self) {
        // SAFETY: the region is ours; the caller has no worker in it.
        unsafe { call!(sys::SYS_MUNMAP, self.start, REGION_LEN) };
    }

    /// Where the region starts.
    pub fn start(self) -> usize {
        self.start
    }

    /// The control block, at the low end of the worker's stack.
    pub fn control(self) -> usize {
        self.start + CONTROL
    }

    /// The end of the usher's stack, which begins after the control block.
    pub fn usher_stack_top(self) -> usize {
        self.control() + USHER_STACK
    }

    /// Room for [`MAX_HEADS`] words.
    pub fn heads(self) -> usize {
        self.usher_stack_top()
    }

    /// The end of the worker's stack, which begins after the heads.
    pub fn stack_top(self) -> usize {
        self.start + CONTROL + CONTROL_PAGES * PAGE_SIZE
    }

    /// The beacon page.
    pub fn beacon(self) -> usize {
        self.start + BEACON
    }

    /// The staging area.
    pub fn staging(self) -> usize {
        self.start + STAGING
    }

    /// The trash area.
    pub fn trash(self) -> usize {
        self.start + TRASH
    }
}

const PROT_NONE: usize = 0;
const PROT_RW: usize = 3;
const MAP_FIXED: usize = 0x10;
const SHARED: usize = 0x21; // MAP_SHARED | MAP_ANONYMOUS
const PRIVATE: usize = 0x4022; // MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
const MADV_DONTFORK: usize = 10;
const MADV_WIPEONFORK: usize = 18;

fn advise(at: usize, len: usize, advice: usize) -> Result<(), isize> {
    // SAFETY: only on the region, which is ours.
    check(unsafe { call!(sys::SYS_MADVISE, at, len, advice) })
}

fn check(result: isize) -> Result<(), isize> {
    if result < 0 { Err(result) } else { Ok(()) }
}

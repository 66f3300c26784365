//! Guard pages that a program has put into its mappings (`MADV_GUARD_INSTALL`), of which the kernel sends no event.
//!
//! # Safety
//! Reads the page tables of another process; the kernel writes only into the structures passed.

#![allow(unsafe_code)]

use std::os::fd::AsRawFd;

use crate::range::Range;
use crate::sys::process::Pagemap;

/// The guard pages in `range`, in order, at most [`AT_ONCE`] runs; and where the search ended. A kernel that cannot tell finds
/// none.
pub fn find(pagemap: &Pagemap, range: Range) -> (Vec<Range>, u64) {
    const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
    const IS_GUARD: u64 = 1 << 8;
    let mut regions = [[0u64; 3]; AT_ONCE];
    // struct pm_scan_arg: size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, return.
    let mut scan = [
        size_of::<[u64; 12]>() as u64,
        0,
        range.start,
        range.end,
        0,
        regions.as_mut_ptr() as u64,
        AT_ONCE as u64,
        0,
        0,
        IS_GUARD,
        0,
        IS_GUARD,
    ];
    // SAFETY: the structure has the kernel's layout and points to as many regions as it says.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, scan.as_mut_ptr()) };
    let Ok(found) = usize::try_from(found) else { return (Vec::new(), range.end) };
    (regions[..found].iter().map(|&[start, end, _]| Range::new(start, end)).collect(), scan[4])
}

/// How many runs of guard pages are found at once.
pub const AT_ONCE: usize = 32;

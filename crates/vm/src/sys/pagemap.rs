//! Page tables of another process, as the kernel shows them in `/proc/PID/pagemap`: which pages are present, and where a program has
//! put guard pages (`MADV_GUARD_INSTALL`), of which the kernel sends no event.
//!
//! # Safety
//! Reads the page tables of another process; the kernel writes only into the structures passed.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use crate::PAGE;
use crate::range::Range;

/// The page tables of a process's memory.
#[derive(Debug)]
pub struct Pagemap(File);

/// What a search for pages has found.
#[derive(Debug)]
pub struct Present {
    /// Runs of anonymous pages that are present, in order.
    pub runs: Vec<Range>,
    /// Those of them that lie in huge pages.
    pub huge: Vec<Range>,
    /// Runs of guard pages, in order.
    pub guards: Vec<Range>,
    /// Where the search has ended.
    pub end: u64,
}

// Categories of pages.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO: u64 = 1 << 5;
const IS_HUGE: u64 = 1 << 6;
const IS_GUARD: u64 = 1 << 8;

/// The category of guard pages; none before Linux 6.15, which refuses a search for it.
static GUARDS: LazyLock<u64> = LazyLock::new(|| {
    let scan = || Scan { mask: IS_GUARD, ..Scan::of(Range::page(0)) };
    let found = Pagemap::open(std::process::id() as i32).and_then(|own| own.scan(scan(), &mut []).map(drop));
    if found.is_ok() { IS_GUARD } else { 0 }
});

/// Asks the kernel what it can tell of. To be called before descriptors can be short: the answer stays.
pub fn probe() {
    LazyLock::force(&GUARDS);
}

impl Pagemap {
    /// Opens the pagemap of `pid`'s memory as it is now; it stays that memory's whatever the process executes.
    pub fn open(pid: i32) -> io::Result<Pagemap> {
        File::open(format!("/proc/{pid}/pagemap")).map(Pagemap)
    }

    /// Finds anonymous pages that are present in `range`, and guard pages: up to `pages` of both.
    pub fn present(&self, range: Range, pages: usize) -> io::Result<Present> {
        let mut regions = [Region::default(); 128];
        let scan = Scan {
            max_pages: pages as u64,
            inverted: IS_FILE | IS_ZERO,
            mask: IS_FILE | IS_ZERO,
            any_of: IS_PRESENT | *GUARDS,
            returned: IS_PRESENT | IS_HUGE | *GUARDS,
            ..Scan::of(range)
        };
        let (found, end) = self.scan(scan, &mut regions)?;
        let of = |category| found.iter().filter(move |region| region.categories & category != 0).map(Region::range);
        Ok(Present { runs: of(IS_PRESENT).collect(), huge: of(IS_HUGE).collect(), guards: of(IS_GUARD).collect(), end })
    }

    /// Finds runs of guard pages in `range`, in order: a few, and where the search has ended. A kernel that cannot tell finds none.
    pub fn guards(&self, range: Range) -> (Vec<Range>, u64) {
        let mut regions = [Region::default(); 32];
        let scan = Scan { mask: *GUARDS, returned: *GUARDS, ..Scan::of(range) };
        match self.scan(scan, &mut regions) {
            Ok((found, end)) if *GUARDS != 0 => (found.iter().map(Region::range).collect(), end),
            _ => (Vec::new(), range.end),
        }
    }

    /// Finds runs of pages in `range` where something is, if only a mark of the kernel's.
    pub fn occupied(&self, range: Range) -> io::Result<Vec<Range>> {
        let (mut all, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let mut regions = [Region::default(); 32];
            let any_of = IS_PRESENT | IS_SWAPPED;
            let scan = Scan { any_of, returned: any_of, ..Scan::of(Range::new(at, range.end)) };
            let (found, end) = self.scan(scan, &mut regions)?;
            all.extend(found.iter().map(Region::range));
            at = end;
        }
        Ok(all)
    }

    /// Returns the last page of `range` that is in memory, on its way to another place there, or in the kernel's swap.
    pub fn last_present(&self, range: Range) -> io::Result<Option<u64>> {
        let (mut last, mut at) = (None, range.start);
        while at < range.end {
            let mut regions = [Region::default(); 128];
            let not = IS_FILE | IS_ZERO | *GUARDS;
            let any_of = IS_PRESENT | IS_SWAPPED;
            let scan =
                Scan { inverted: not, mask: not, any_of, returned: any_of, ..Scan::of(Range::new(at, range.end)) };
            let (found, end) = self.scan(scan, &mut regions)?;
            last = found.last().map(|run| run.end - PAGE).or(last);
            at = end;
        }
        Ok(last)
    }

    /// Returns whether `page` is there and anonymous: what lies there is in no memory but this and that of a fork.
    pub fn is_private(&self, page: u64) -> io::Result<bool> {
        const IS_FILE_OR_SHARED: u64 = 1 << 61;
        let word = self.word(page)?;
        // One that the kernel moves or has swapped out counts as swapped.
        Ok(word >> 62 != 0 && word & IS_FILE_OR_SHARED == 0)
    }

    /// Returns the kernel's word about one page: bit 63 present, 62 swapped, 61 of a file or shared.
    pub fn word(&self, page: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, page / PAGE * 8)?;
        Ok(u64::from_ne_bytes(word))
    }

    /// Returns whether nothing is mapped at `page`, neither in memory nor in the kernel's swap.
    pub fn is_absent(&self, page: u64) -> io::Result<bool> {
        Ok(self.word(page)? >> 62 == 0)
    }

    /// Searches as `scan` says; what was found, and where the search has ended.
    fn scan<'a>(&self, mut scan: Scan, regions: &'a mut [Region]) -> io::Result<(&'a [Region], u64)> {
        const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
        (scan.regions, scan.regions_len) = (regions.as_mut_ptr() as u64, regions.len() as u64);
        // SAFETY: the structure has the kernel's layout and points to as many regions as it says.
        let found = unsafe { libc::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        let found = super::check(found)?;
        Ok((&regions[..found as usize], scan.walk_end))
    }
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

impl Region {
    fn range(&self) -> Range {
        Range::new(self.start, self.end)
    }
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    inverted: u64,
    mask: u64,
    any_of: u64,
    returned: u64,
}

impl Scan {
    /// A search of `range` for any pages.
    fn of(range: Range) -> Scan {
        Scan { size: size_of::<Scan>() as u64, start: range.start, end: range.end, ..Scan::default() }
    }
}

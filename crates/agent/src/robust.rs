//! Robust mutexes that threads hold: the pages that hold them are not to be away when their thread ends.
//!
//! The kernel walks the robust list of a thread that ends, and marks each mutex there. It serves no userfault then: at the first
//! mutex that it cannot read it stops, and that mutex and all after it stay locked for ever.
//!
//! 1. The lists are walked *after* pages were moved out, before the manager hears of it. A thread that takes a mutex later
//!    touches its page, and so brings it back. A thread that took it earlier has it in its list, or announced in the list's
//!    head. So no held mutex is overlooked. Pages that were just moved are moved back; the manager brings others back.
//! 2. Everything is read through `/proc/PID/mem`, which gives an error where a page is away instead of waiting for it. A list may
//!    lead into the file of a slow file system: then this worker waits, and no thread of the manager does.
//! 3. As long as no list had a mutex in it, at most [`AT_ONCE`] lists are looked at after each move, in turn: few programs use
//!    robust mutexes. From the first one on all lists are looked at each time.
//!
//! # Safety
//! The kernel writes into buffers of this stack. The table of heads is a part of the agent's own region, used here only.

use uzswap_proto::{MAX_HEADS, PAGE_SIZE};

use crate::area::Region;
use crate::sys::{self, call};

/// Lists that are looked at after a move if none had a mutex in it so far.
const AT_ONCE: usize = 16;

/// Mutexes that are looked at after a move. The kernel follows 2048 for each thread.
const MOST: usize = 4096;

/// What the kernel knows a list by: `struct robust_list_head`.
const HEAD_WORDS: usize = 3;

/// The robust lists of the program's threads.
pub struct Lists {
    /// A descriptor of the program's memory; -1 if there is none.
    memory: i32,
    heads: *mut u64,
    count: usize,
    /// The list to begin with next.
    next: usize,
    /// Whether a list had a mutex in it.
    used: bool,
}

impl Lists {
    /// Knows of no list.
    pub fn new(region: Region) -> Lists {
        Lists { memory: -1, heads: region.heads() as *mut u64, count: 0, next: 0, used: false }
    }

    /// Takes note of heads: `words[0]` is how many came before. A descriptor of the memory comes with the first.
    pub fn learn(&mut self, words: &[u64], descriptor: i32) {
        if descriptor >= 0 {
            if self.memory >= 0 {
                // SAFETY: our own descriptor.
                unsafe { call!(sys::SYS_CLOSE, self.memory) };
            }
            self.memory = descriptor;
        }
        let Some((&first, heads)) = words.split_first() else { return };
        let first = (first as usize).min(MAX_HEADS);
        let heads = &heads[..heads.len().min(MAX_HEADS - first)];
        for (offset, head) in heads.iter().enumerate() {
            // SAFETY: the index is below MAX_HEADS, for which there is room.
            unsafe { self.heads.add(first + offset).write(*head) };
        }
        self.count = first + heads.len();
    }

    /// Tells `found` each page that has a part of a mutex which a thread holds, until it returns false.
    pub fn held(&mut self, mut found: impl FnMut(u64) -> bool) {
        if self.memory < 0 || self.count == 0 {
            return;
        }
        let lists = if self.used { self.count } else { self.count.min(AT_ONCE) };
        let mut walk = Walk { memory: self.memory, left: MOST, last: 0, found: &mut found };
        for _ in 0..lists {
            self.next = (self.next + 1) % self.count;
            // SAFETY: the index is below the number of heads written.
            let head = unsafe { self.heads.add(self.next).read() };
            match walk.list(head) {
                Some(any) => self.used |= any,
                None => return,
            }
        }
    }
}

/// A walk along lists.
struct Walk<'a, F> {
    memory: i32,
    /// Mutexes that may still be looked at.
    left: usize,
    /// The page told last.
    last: u64,
    found: &'a mut F,
}

impl<F: FnMut(u64) -> bool> Walk<'_, F> {
    /// Walks along one list; tells whether there was a mutex in it. `None` if the walk is over.
    fn list(&mut self, head: u64) -> Option<bool> {
        let mut words = [0; HEAD_WORDS];
        if !self.read(head, &mut words) {
            return Some(false);
        }
        let [mut entry, offset, pending] = words;
        if pending != 0 {
            self.tell(pending, offset)?;
        }
        let mut any = pending != 0;
        while address(entry) != head && entry != 0 {
            any = true;
            self.left = self.left.checked_sub(1)?;
            self.tell(entry, offset)?;
            let mut next = [0];
            if !self.read(address(entry), &mut next) {
                break;
            }
            [entry] = next;
        }
        Some(any)
    }

    /// Tells the pages of a mutex: that of its list entry, and that of its word, which is `offset` away.
    fn tell(&mut self, entry: u64, offset: u64) -> Option<()> {
        for part in [address(entry), address(entry).wrapping_add(offset)] {
            let page = part & !(PAGE_SIZE as u64 - 1);
            if page != self.last {
                self.last = page;
                (self.found)(page).then_some(())?;
            }
        }
        Some(())
    }

    fn read(&self, address: u64, words: &mut [u64]) -> bool {
        // An address beyond this is a negative offset.
        if address > isize::MAX as u64 {
            return false;
        }
        let len = size_of_val(words);
        // SAFETY: the buffer is as long as said.
        let read = unsafe { call!(sys::SYS_PREAD64, self.memory, words.as_mut_ptr(), len, address) };
        read == len as isize
    }
}

/// The address in a list entry, whose lowest bit tells the kind of mutex.
fn address(entry: u64) -> u64 {
    entry & !1
}

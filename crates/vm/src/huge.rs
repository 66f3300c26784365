//! Huge pages: what was one before it was evicted becomes one again when it is back.
//!
//! 1. A huge page leaves in small ones; the first to go splits it. Reclaim tells on its way that there was one.
//! 2. When all of its pages are in the program again, it is due a second later: under thrash some have left again by then, and it
//!    was not worth it.
//! 3. The worker then has the kernel put them together (`MADV_COLLAPSE`), which changes nothing that the program could read. Where
//!    a page is missing, or the program wants none, the kernel refuses, and they stay small.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use uzswap_proto::kind;

use crate::evict::Talk;
use crate::pager::Pager;
use crate::range::Range;
use crate::space::{Request, Space, State};
use crate::table::CHUNK;
use crate::visit;

const _: () = assert!(CHUNK == uzswap_proto::HUGE_PAGE_SIZE as u64);

/// How long a huge page has to be back.
const REST: Duration = Duration::from_secs(1);

/// Which pages of an address space were huge, by their numbers, and of which some are away or were a moment ago.
#[derive(Debug, Default)]
pub(crate) struct HugePages(BTreeSet<u64>);

impl HugePages {
    /// These lie in huge pages.
    pub fn seen(&mut self, ranges: &[Range]) {
        self.0.extend(ranges.iter().flat_map(|range| range.start / CHUNK..range.end.div_ceil(CHUNK)));
    }

    /// The range is no longer what it was.
    pub fn forget(&mut self, range: Range) {
        if self.0.is_empty() {
            return;
        }
        let (first, last) = (range.start / CHUNK, range.end.div_ceil(CHUNK));
        let gone: Vec<u64> = self.0.range(first..last.max(first)).copied().collect();
        for number in gone {
            self.0.remove(&number);
        }
    }
}

impl State {
    /// Pages of `range` have come back: the huge pages that are whole by that.
    pub fn whole_again(&mut self, range: Range) -> Vec<Range> {
        if self.huge.0.is_empty() {
            return Vec::new();
        }
        let numbers = range.start / CHUNK..range.end.div_ceil(CHUNK);
        let whole = numbers.filter(|number| !self.table.holds_any_of(number * CHUNK) && self.huge.0.remove(number));
        whole.map(|number| Range::sized(number * CHUNK, CHUNK)).collect()
    }
}

/// The huge pages that are to be made, in the order in which they are due. No lock is taken under this one's.
#[derive(Default)]
pub(crate) struct Collapses {
    queue: Mutex<VecDeque<Due>>,
    more: Condvar,
}

struct Due {
    at: Instant,
    space: u64,
    range: Range,
}

impl Collapses {
    /// These are back.
    pub fn add(&self, space: &Space, whole: Vec<Range>) {
        if whole.is_empty() {
            return;
        }
        let at = Instant::now() + REST;
        self.queue.lock().extend(whole.into_iter().map(|range| Due { at, space: space.id, range }));
        self.more.notify_one();
    }

    /// The next, when it is due.
    fn wait(&self) -> Due {
        let mut queue = self.queue.lock();
        loop {
            match queue.front().map(|due| due.at) {
                None => self.more.wait(&mut queue),
                Some(at) if at > Instant::now() => drop(self.more.wait_until(&mut queue, at)),
                Some(_) => return queue.pop_front().expect("there is one"),
            }
        }
    }
}

impl Pager {
    /// Makes huge pages of those that are due, until the calling thread is replaced.
    pub fn collapse_huge_pages(&self) {
        while !visit::is_surplus() {
            let Due { space, range, .. } = self.collapses.wait();
            if let Some(space) = self.space(space).filter(|space| !space.is_shunned()) {
                self.collapse(&space, range);
            }
        }
    }

    fn collapse(&self, space: &Space, range: Range) {
        let _visit = space.visit();
        let _conversation = space.conversation.lock();
        let Some(worker) = self.resume(space) else { return };
        {
            let mut state = space.lock();
            if state.gone || !state.registered.missing(range).is_empty() {
                return;
            }
            if state.table.holds_any_of(range.start) || space.account().spare() == 0 {
                // It has its chance when it comes back the next time.
                state.huge.seen(&[range]);
                return;
            }
            state.request = Some(Request::Collapse);
        }
        if let Talk::Answered(1) = self.talk(space, &worker, &[kind::COLLAPSE, range.start]) {
            space.count(|counters| &counters.thp_collapse_alloc, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;
    use crate::table::PageState;

    #[test]
    fn a_huge_page_is_whole_again_when_its_last_page_is_back() {
        let (mut state, at) = (State::default(), 0x7f00_0020_0000);
        let pages = |first: u64, count: u64| Range::sized(at + first * PAGE, count * PAGE);
        assert!(state.whole_again(pages(0, 1)).is_empty(), "it never was one");
        for page in [3, 500, 600] {
            state.table.set(at + page * PAGE, PageState::Staged(page as u32));
        }
        state.huge.seen(&[pages(0, 1), pages(600, 1)]);
        state.table.set(at + 3 * PAGE, PageState::Resident);
        assert!(state.whole_again(pages(3, 1)).is_empty(), "one is away");
        state.table.set(at + 500 * PAGE, PageState::Resident);
        assert_eq!(state.whole_again(pages(500, 100)), [pages(0, 512)]);
        assert!(state.whole_again(pages(500, 1)).is_empty(), "that was said");
        state.huge.forget(pages(600, 1));
        state.table.set(at + 600 * PAGE, PageState::Resident);
        assert!(state.whole_again(pages(600, 1)).is_empty(), "it was forgotten");
    }
}

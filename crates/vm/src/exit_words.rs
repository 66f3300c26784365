//! Exit words: what the kernel reads and writes in a program's memory when one of its threads ends.
//!
//! The kernel serves no userfault for a thread that ends: what it cannot reach then, it passes over. A process-shared robust mutex
//! would stay locked for ever if the head of its owner's list were evicted, and a thread that joins another might wait for ever.
//!
//! 1. The kernel tells where the head of each thread's robust list is (`get_robust_list`). The word that it clears at a
//!    thread's end (`set_tid_address`) it does not tell; libc keeps it within [`BEFORE`] bytes in front of the head.
//! 2. The pages of both are never evicted. Those that were evicted before their thread was known are brought back.
//! 3. Threads are looked for before pages are evicted: if their number has changed, and once a second, as a thread may have
//!    taken the place of another.
//!
//! The addresses are the program's own claim. Nothing is read there, so a false one only keeps a page of that program.
//!
//! Not covered: list nodes, that is held robust mutexes, in private memory. To find them, the manager would have to read memory
//! that the program may change, and may let block, at each eviction.

use std::time::{Duration, Instant};

use crate::PAGE;
use crate::pager::Pager;
use crate::range::{Range, RangeSet};
use crate::space::{Fault, Space, State};
use crate::sys::robust;
use crate::table::PageState;

/// Bytes in front of a list's head that are kept, too. In glibc the word that is cleared is 16 bytes before the head.
const BEFORE: u64 = 256;

/// How often threads are looked for if their number is what it was.
const INTERVAL: Duration = Duration::from_secs(1);

/// How many times as long as a search there is none, at least.
const REST: u32 = 100;

/// The pages of a program that hold exit words.
#[derive(Default)]
pub(crate) struct ExitWords {
    pages: RangeSet,
    /// How many threads there were at the last search.
    threads: u64,
    /// When the next search may be made, and when it must.
    due: Option<[Instant; 2]>,
}

impl ExitWords {
    /// Whether `page` holds some.
    pub fn contains(&self, page: u64) -> bool {
        self.pages.contains(page)
    }

    /// Whether threads are to be looked for, of which there are so many now.
    fn is_due(&self, now: Instant, threads: u64) -> bool {
        self.due.is_none_or(|[may, must]| now >= must || now >= may && threads != self.threads)
    }
}

impl Pager {
    /// Keeps the exit words of the program's threads from being evicted, and has those brought back that were. To be called
    /// before pages are evicted, outside the conversation with the worker.
    pub(crate) fn keep_exit_words(&self, space: &Space) {
        let Some(worker) = space.worker() else { return };
        let (started, threads) = (Instant::now(), robust::count_threads(worker.program));
        {
            let state = &mut *space.lock();
            if !state.exit_words.is_due(started, threads) {
                return;
            }
            // No other thread is to search meanwhile.
            state.exit_words.due = Some([started + INTERVAL; 2]);
        }
        let mut pages = RangeSet::default();
        robust::heads(worker.program).into_iter().for_each(|head| pages.insert(pages_around(head)));
        let wanted = {
            let state = &mut *space.lock();
            let rest = started.elapsed() * REST;
            state.exit_words = ExitWords { pages, threads, due: Some([started + rest, started + rest.max(INTERVAL)]) };
            let kept: Vec<Range> = state.exit_words.pages.iter().collect();
            let pages = kept.into_iter().flat_map(|range| (range.start..range.end).step_by(PAGE as usize));
            pages.filter(|page| state.want_back(*page)).count()
        };
        if wanted > 0 {
            self.service(space);
        }
    }
}

impl State {
    /// Has `page` brought back as if a thread had come for it, if it is away; tells whether it is. To be answered by
    /// [`Pager::service`].
    pub fn want_back(&mut self, page: u64) -> bool {
        let away = matches!(self.table.get(page), PageState::Staged(_) | PageState::Stored(_));
        if away {
            let since = Instant::now();
            self.waiting.push(Fault { page, write: false, tid: 0, since, stalls: false, insists: true });
        }
        away
    }
}

/// The pages that hold the head of a robust list and what lies before it. None if no program can have memory there.
fn pages_around(head: Range) -> Range {
    /// The end of the largest address space, with five levels of page tables.
    const END: u64 = 1 << 56;
    if head.start < PAGE || head.end > END || head.len() > PAGE {
        return Range::new(0, 0);
    }
    Range::new(Range::page(head.start.saturating_sub(BEFORE)).start, Range::page(head.end - 1).end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_around_heads() {
        let around = |start| pages_around(Range::sized(start, 24));
        assert_eq!(around(0x7f00_0000_1800), Range::sized(0x7f00_0000_1000, PAGE));
        assert_eq!(around(0x7f00_0000_1010), Range::sized(0x7f00_0000_0000, 2 * PAGE));
        assert_eq!(around(0x7f00_0000_1ff0), Range::sized(0x7f00_0000_1000, 2 * PAGE));
        // What no program can have, though its thread may say so.
        assert!([0, 8, u64::MAX, u64::MAX - 24].into_iter().all(|start| around(start).is_empty()));
        assert!(pages_around(Range::sized(PAGE, 1 << 40)).is_empty());
    }

    #[test]
    fn a_search_is_due_for_new_threads_and_once_a_second() {
        let (now, ms) = (Instant::now(), Duration::from_millis(1));
        let mut words = ExitWords::default();
        assert!(words.is_due(now, 3));
        (words.threads, words.due) = (3, Some([now + ms, now + INTERVAL]));
        assert!(!words.is_due(now, 4) && words.is_due(now + ms, 4));
        assert!(!words.is_due(now + ms, 3) && words.is_due(now + INTERVAL, 3));
    }
}

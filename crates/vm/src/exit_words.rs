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
//! 4. Held robust mutexes can lie in any page, and are known by following the lists. The manager does not read there: the program
//!    may change what is read, and may let a read block. It tells the worker where the lists begin, and the worker follows them after
//!    each move (`robust.rs` of the agent). The pages that it names in its answer are kept, and brought back if they are away.
//! 5. A page that once held a held mutex is kept from then on: a thread that takes the mutex and ends while the page is on its way out
//!    would end before the worker has put it back.
//! 6. A thread may have taken a mutex, and lost its page to a move, before it was known. So when new lists are known of a program that
//!    uses robust mutexes, or that asks for an eviction, the worker follows them at once, whether or not there is a page to move.
//! 7. The pages of threads that have ended are kept, too, and in a forked child those of its parent's other threads: libc keeps their
//!    stacks for threads to come, in a list, and a child that has just been forked writes into that. Nothing of ours runs in the child before. If
//!    the page had been evicted from its parent, and all of uzswap were killed at that moment, the child would wait there for ever.
//!
//! The addresses are the program's own claim. The manager reads nothing there, so a false one only keeps a page of that program.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::PAGE;
use crate::pager::Pager;
use crate::range::{Range, RangeSet};
use crate::space::{Fault, Space, State, Worker};
use crate::sys::robust;
use crate::table::PageState;
use uzswap_proto::{MAX_HEADS, MAX_WORDS, kind};

/// Bytes in front of a list's head that are kept, too. In glibc the word that is cleared is 16 bytes before the head.
const BEFORE: u64 = 256;

/// How often threads are looked for if their number is what it was.
const INTERVAL: Duration = Duration::from_secs(1);

/// How many times as long as a search there is none, at least; and in a program that uses robust mutexes, whose next thread may
/// hold one.
const REST: u32 = 100;
const REST_IF_USED: u32 = 8;

/// From so many pages on that were kept for held mutexes, those are forgotten whose mutexes are held no more.
const MOST_HELD: u64 = 1024;

/// From so many pages on that were kept for threads that have ended, those are forgotten.
const MOST_FORMER: u64 = 256;

/// The pages of a program that hold exit words.
#[derive(Default)]
pub(crate) struct ExitWords {
    pages: RangeSet,
    /// Those of threads that have ended, and of threads that the parent had at the fork.
    former: RangeSet,
    /// The pages that hold robust mutexes which threads held when their lists were followed.
    held: RangeSet,
    /// Whether there ever were some.
    used: bool,
    /// When the search began that found what is known.
    searched: Option<Instant>,
    /// Where lists begin, and whether the worker is still to be told.
    heads: Vec<u64>,
    untold: bool,
    /// How many threads there were at the last search.
    threads: u64,
    /// When the next search may be made, and when it must.
    due: Option<[Instant; 2]>,
}

impl ExitWords {
    /// Whether `page` holds some.
    pub fn contains(&self, page: u64) -> bool {
        self.pages.contains(page) || self.held.contains(page) || self.former.contains(page)
    }

    /// Whether any page of `range` holds some.
    pub fn overlap(&self, range: Range) -> bool {
        self.pages.overlaps(range) || self.held.overlaps(range) || self.former.overlaps(range)
    }

    /// Takes note of the pages of the threads that there are now, of which there are so many.
    fn take_pages(&mut self, pages: RangeSet, threads: u64) {
        let ended = std::mem::replace(&mut self.pages, pages);
        self.threads = threads;
        self.keep_former(&ended);
    }

    /// Keeps the pages of threads that have ended, but not of arbitrarily many.
    fn keep_former(&mut self, ended: &RangeSet) {
        let ended = ended.iter().flat_map(|range| self.pages.missing(range));
        let new: Vec<Range> = ended.filter(|range| !self.former.covers(*range)).collect();
        if !new.is_empty() && size(&self.former) > MOST_FORMER * PAGE {
            self.former = RangeSet::default();
        }
        new.into_iter().take(MOST_FORMER as usize).for_each(|range| self.former.insert(range));
    }

    /// What a forked child knows.
    pub fn inherit(&self) -> ExitWords {
        let mut child = ExitWords { former: self.former.clone(), ..ExitWords::default() };
        child.keep_former(&self.pages);
        child
    }

    /// Takes note of where the lists begin, in order.
    fn take_heads(&mut self, heads: Vec<u64>) {
        if heads != self.heads {
            (self.heads, self.untold) = (heads, true);
        }
    }

    /// Returns what the worker is to be told before it moves anything.
    pub fn untold(&mut self) -> Option<Vec<u64>> {
        std::mem::take(&mut self.untold).then(|| self.heads.clone())
    }

    /// Takes note of the pages with held mutexes, as the worker tells them.
    pub fn hold(&mut self, pages: &[u64]) {
        if pages.is_empty() {
            return;
        }
        self.used = true;
        if size(&self.held) > MOST_HELD * PAGE {
            self.held = RangeSet::default();
        }
        pages.iter().for_each(|page| self.held.insert(Range::page(*page)));
    }

    /// Whether a search that began then tells something newer than what is known. Searches can overtake each other.
    fn is_newer(&mut self, started: Instant) -> bool {
        let newer = self.searched.is_none_or(|searched| searched < started);
        if newer {
            self.searched = Some(started);
        }
        newer
    }

    /// Whether threads are to be looked for, of which there are so many now.
    fn is_due(&self, now: Instant, threads: u64) -> bool {
        self.due.is_none_or(|[may, must]| now >= must || now >= may && threads != self.threads)
    }
}

impl Pager {
    /// Keeps the exit words of the program's threads from being evicted, and has those brought back that were. To be called
    /// before pages are evicted, outside the conversation with the worker. If the program has asked for the eviction, a thread that
    /// has just begun may hold a robust mutex in that very page: then `now` has threads looked for in any case.
    pub(crate) fn keep_exit_words(&self, space: &Space, now: bool) {
        let Some(worker) = space.worker() else { return };
        let (started, threads) = (Instant::now(), robust::count_threads(worker.program));
        {
            let state = &mut *space.lock();
            if !now && !state.exit_words.is_due(started, threads) {
                return;
            }
            // No other thread is to search meanwhile.
            state.exit_words.due = Some([started + INTERVAL; 2]);
        }
        let mut pages = RangeSet::default();
        let mut heads = robust::heads(worker.program);
        // The number may have been another process's by then.
        if worker.process.has_ended() {
            return;
        }
        heads.iter().for_each(|head| pages.insert(pages_around(*head)));
        heads.retain(|head| !pages_around(*head).is_empty());
        let mut heads: Vec<u64> = heads.into_iter().take(MAX_HEADS).map(|head| head.start).collect();
        heads.sort_unstable();
        let follow;
        let wanted = {
            let state = &mut *space.lock();
            let words = &mut state.exit_words;
            if !words.is_newer(started) {
                return;
            }
            let rest = started.elapsed() * if words.used { REST_IF_USED } else { REST };
            words.take_pages(pages, threads);
            words.due = Some([started + rest, started + if words.used { rest } else { rest.max(INTERVAL) }]);
            words.take_heads(heads);
            follow = words.untold && (now || words.used);
            let kept: Vec<Range> = state.exit_words.pages.iter().collect();
            let pages = kept.into_iter().flat_map(|range| (range.start..range.end).step_by(PAGE as usize));
            pages.filter(|page| state.want_back(*page)).count()
        };
        if wanted > 0 {
            self.service(space);
        }
        if follow {
            self.follow_lists(space);
        }
    }
}

/// Tells `worker` where robust lists begin. It obeys in order, so there is no answer to wait for.
pub(crate) fn tell_heads(worker: &Worker, heads: &[u64]) {
    const AT_ONCE: usize = MAX_WORDS - 2;
    let mut told = 0;
    loop {
        let part = &heads[told..heads.len().min(told + AT_ONCE)];
        let words: Vec<u64> = [kind::HEADS, told as u64].into_iter().chain(part.iter().copied()).collect();
        let memory = (told == 0).then(|| worker.memory.as_raw_fd());
        told += part.len();
        // Fails only for a process that is going away.
        if worker.link.send(&words, memory).is_err() || told == heads.len() {
            return;
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

/// The number of bytes in all ranges of `set`.
fn size(set: &RangeSet) -> u64 {
    set.iter().map(Range::len).sum()
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
    fn a_worker_is_told_of_new_heads_once() {
        let mut words = ExitWords::default();
        assert_eq!(words.untold(), None);
        words.take_heads(vec![8, 16]);
        assert_eq!((words.untold(), words.untold()), (Some(vec![8, 16]), None));
        words.take_heads(vec![8, 16]);
        assert_eq!(words.untold(), None);
        words.take_heads(vec![]);
        assert_eq!(words.untold(), Some(vec![]));
    }

    #[test]
    fn pages_that_held_a_held_mutex_are_kept_unless_they_are_too_many() {
        let mut words = ExitWords::default();
        words.hold(&[PAGE, 3 * PAGE]);
        assert!(words.contains(PAGE) && !words.contains(2 * PAGE) && words.contains(3 * PAGE) && words.used);
        words.hold(&[]);
        assert!(words.contains(PAGE));
        (0..=MOST_HELD).for_each(|page| words.hold(&[2 * page * PAGE]));
        words.hold(&[PAGE]);
        assert!(words.contains(PAGE) && !words.contains(2 * PAGE) && words.used);
    }

    #[test]
    fn pages_of_threads_that_have_ended_are_kept_unless_they_are_too_many() {
        let set = |pages: &[u64]| {
            let mut set = RangeSet::default();
            pages.iter().for_each(|page| set.insert(Range::page(page * PAGE)));
            set
        };
        let mut words = ExitWords::default();
        words.take_pages(set(&[1, 3]), 2);
        words.take_pages(set(&[3]), 1);
        assert!(words.contains(PAGE) && words.contains(3 * PAGE) && !words.contains(2 * PAGE));
        // The child's only thread has not been seen.
        let mut child = words.inherit();
        assert!(child.contains(PAGE) && child.contains(3 * PAGE) && child.pages.is_empty());
        child.take_pages(set(&[3]), 1);
        assert!(child.contains(PAGE) && child.contains(3 * PAGE));

        let many: Vec<u64> = (0..2 * MOST_FORMER).map(|number| 5 + 2 * number).collect();
        words.take_pages(set(&many), many.len() as u64);
        words.take_pages(set(&[]), 0);
        assert!(
            words.contains(PAGE)
                && size(&words.former) > MOST_FORMER * PAGE
                && size(&words.former) < 2 * MOST_FORMER * PAGE
        );
        words.take_pages(set(&[1000]), 1);
        words.take_pages(set(&[]), 0);
        assert!(!words.contains(PAGE) && words.contains(1000 * PAGE));
    }

    #[test]
    fn an_older_search_does_not_replace_a_newer_one() {
        let (older, mut words) = (Instant::now(), ExitWords::default());
        let newer = older + Duration::from_millis(1);
        assert!(words.is_newer(newer) && !words.is_newer(older) && words.is_newer(newer + Duration::from_millis(1)));
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

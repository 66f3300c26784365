//! Out of the program: eviction into the staging area, and from there into the engine.
//!
//! 1. [`Pager::evict`] picks pages and asks the worker to move them into the staging area. From the request until its answer
//!    has been recorded, nothing is read from the userfaultfd; the record is made under the lock under which the request ends.
//! 2. A staged page that is touched goes back uncompressed (see `fault`); that is its second chance.
//! 3. [`Pager::store_staged`] gives the oldest staged pages to the engine, then has the worker free their memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::{Duration, Instant};

use uzswap_engine::{PAGE_SIZE, Slot};
use uzswap_proto::{MAX_BATCH_PAGES, Run, STAGING_PAGES, evict, evicted, kind};

use crate::events::wait_for_program;
use crate::exit_words::tell_heads;
use crate::pager::{Pager, Progress};
use crate::range::{Range, RangeSet};
use crate::space::{Request, Space, State, Worker};
use crate::sys::pagemap::Present;
use crate::sys::uffd::{FillError, Probe};
use crate::table::{PageState, STATE_BITS};
use crate::{PAGE, layout, visit};

/// How a request to a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Talk {
    /// It did this many pages.
    Answered(usize),
    /// No answer yet: stopped or starved; ask later.
    Silent,
    /// No worker, or it is gone.
    Gone,
}

/// How long to wait for somebody else's conversation with a worker.
const CONVERSATION_PATIENCE: Duration = Duration::from_millis(2);

/// Pages of one EVICT of reclaim: large enough to pay for the round trip, small enough for faults not to wait long.
const EVICT_PAGES: usize = 256;
const _: () = assert!(EVICT_PAGES <= MAX_BATCH_PAGES);

/// The same where a program asks for its pages to go, and the crew helps to store them: the larger the batch, the less they wait for each other
/// and for the worker. Of 512 pages in place of 256 a gibibyte takes a sixth less time (`lab bench --only "paged out"`).
const PAGE_OUT_PAGES: usize = MAX_BATCH_PAGES;

/// Reclaim looks at so many pages for each that it wants, before it takes what is hot as well.
const MOST_SEEN: usize = 16;

/// What reclaim has moved to the staging area is stored in groups of this many pages.
pub(crate) const STORE_PAGES: usize = 256;

impl Pager {
    /// Registers what is mapped and not yet watched, so that it can be evicted and so that fresh pages are seen as they
    /// are touched. False if it is to be called again: the worker is busy, or there are so many mappings that the address space has become
    /// noisy.
    pub fn refresh(&self, space: &Space) -> io::Result<bool> {
        let _visit = space.visit();
        self.keep_exit_words(space, false);
        // Between a request and its answer no event may be read.
        let Some(_conversation) = space.conversation.try_lock_for(CONVERSATION_PATIENCE) else { return Ok(false) };
        let Some(worker) = space.worker() else { return Ok(true) };
        let Some(mappings) = space.manageable(worker.pid)? else { return Ok(false) };
        let mut state = space.lock();
        if state.gone || state.request.is_some() {
            return Ok(state.gone);
        }
        self.drain(space, &mut state);
        self.look_over(space, &mut state, worker.pid);
        // From the first registered page on, children have to say whose they are.
        space.uffd.register(Range::page(worker.hello.beacon))?;
        state.beacon = Some(worker.hello.beacon);
        let parts = mappings.into_iter().flat_map(|mapping| mapping.without(worker.region()));
        let parts = parts.flat_map(|part| part.without(Range::page(worker.hello.beacon)));
        let missing: Vec<Range> = parts.flat_map(|part| state.registered.missing(part)).collect();
        let mut tried = RangeSet::default();
        for part in layout::worth_watching(missing, &state.registered) {
            // Refused where another userfaultfd watches, or where the mapping has changed meanwhile.
            if space.uffd.register(part).is_ok() {
                tried.insert(part);
            }
            visit::step();
        }
        if !tried.is_empty() {
            self.take_registered(space, &mut state, &worker, &tried);
        }
        drop(state);
        self.service(space);
        Ok(true)
    }

    /// Records what has really become registered of the ranges that were tried.
    ///
    /// What was not watched changes without an event. When a range was registered, a part of it may have been unmapped
    /// already, and the kernel passes over holes; something else may be mapped there by now, of whose pages we would
    /// not see a fault once they were evicted. So the mappings are read again: each of them now is watched as a whole or
    /// not at all, which its userfaultfd tells, as soon as everything that changes has been read. Nothing that is registered may
    /// be missed: what happens to it is told by events all the same.
    fn take_registered(&self, space: &Space, state: &mut State, worker: &Worker, tried: &RangeSet) {
        let mut tries = 0;
        loop {
            let mut settled = true;
            for mapping in layout::all(worker.pid).unwrap_or_default() {
                // What came to be known by events meanwhile, by a move from elsewhere, may have been evicted before.
                let unknown = tried.within(mapping).into_iter().flat_map(|part| state.registered.missing(part));
                visit::step();
                for part in unknown.collect::<Vec<_>>() {
                    match space.uffd.probe(part.start) {
                        Probe::Registered => {
                            // What is not watched has not been evicted: whatever is known of it is of something else.
                            state.empty(&self.engine, part);
                            state.registered.insert(part);
                        }
                        Probe::Changing => settled = false,
                        Probe::NotRegistered | Probe::Gone => {}
                    }
                }
            }
            if settled || state.gone {
                return;
            }
            wait_for_program(&space.uffd, &mut tries);
            self.drain(space, state);
        }
    }

    /// Moves about `pages` pages out of the program into its staging area: those that reclaim's hand comes to, but for what is
    /// hot (see `heat`). Breaks off after `end`; the next call goes on there.
    pub fn evict(&self, space: &Space, pages: usize, end: Option<Instant>) -> io::Result<Progress> {
        let _visit = space.visit();
        self.keep_exit_words(space, false);
        let _conversation = space.conversation.lock();
        let Some(worker) = self.resume(space) else { return Ok(Progress::default()) };
        let (hand, ranges) = {
            let mut state = space.lock();
            state.settle_removals(Range::new(0, u64::MAX));
            (state.hand, state.registered.iter().collect::<Vec<_>>())
        };
        let mut progress = Progress::default();
        if pages == 0 {
            return Ok(progress);
        }
        self.search_guards(space, &worker, &ranges);
        // Were all hot, there would be no end to passing over.
        let patience = pages * MOST_SEEN;
        // Once round from the hand: what lies after it, then what lies before. Small ranges go together.
        let after = ranges.iter().map(|r| r.intersect(Range::new(hand, u64::MAX)));
        let before = ranges.iter().map(|r| r.intersect(Range::new(0, hand)));
        let (mut runs, mut found, mut seen) = (Vec::new(), 0, 0);
        for range in after.chain(before).filter(|r| !r.is_empty()) {
            let mut at = range.start;
            while at < range.end {
                let present = self.present(space, &worker, Range::new(at, range.end), EVICT_PAGES - found)?;
                at = present.end;
                found += present.runs.iter().map(|run| (run.len() / PAGE) as usize).sum::<usize>();
                runs.extend(present.runs);
                progress.broken_off = end.is_some_and(|end| Instant::now() > end);
                if found < EVICT_PAGES.min(pages - progress.staged) && !progress.broken_off {
                    continue;
                }
                match self.evict_found(space, &worker, &mut runs, seen < patience)? {
                    Some(staged) => progress.staged += staged,
                    None => return Ok(Progress { broken_off: false, ..progress }),
                }
                seen += std::mem::take(&mut found);
                if progress.staged >= pages || progress.broken_off {
                    let mut state = space.lock();
                    state.hand = at;
                    state.heat.advance(seen, at <= hand);
                    return Ok(progress);
                }
            }
        }
        progress.staged += self.evict_found(space, &worker, &mut runs, seen < patience)?.unwrap_or(0);
        space.lock().heat.advance(seen + found, true);
        Ok(progress)
    }

    /// Finds up to so many pages that could be evicted.
    fn present(&self, space: &Space, worker: &Worker, range: Range, pages: usize) -> io::Result<Present> {
        let present = worker.pagemap.present(range, pages)?;
        if !present.huge.is_empty() {
            space.lock().huge.seen(&present.huge);
        }
        Ok(present)
    }

    /// Moves what was found on a round; `None` if the worker is not to be had, or the staging area is full.
    fn evict_found(
        &self,
        space: &Space,
        worker: &Worker,
        runs: &mut Vec<Range>,
        spare_hot: bool,
    ) -> io::Result<Option<usize>> {
        if space.lock().staging.len() + EVICT_PAGES > STAGING_PAGES {
            return Ok(None);
        }
        self.evict_runs(space, worker, &std::mem::take(runs), spare_hot)
    }

    /// Moves all of `range` out and into the engine, now. Breaks off after `end`; returns what is left of the range then.
    pub fn page_out(&self, space: &Space, range: Range, end: Instant) -> io::Result<Option<Range>> {
        let _visit = space.visit();
        self.keep_exit_words(space, true);
        let parts = space.lock().registered.within(range);
        for part in parts {
            let Some(worker) = space.worker() else { return Ok(None) };
            // From the end of one batch to the beginning of the next.
            let _together = worker.together();
            let mut at = part.start;
            while at < part.end {
                // What would only be moved out to be put back stays where it is.
                if self.engine.swap_room(space.account().group(), 1) == 0 {
                    return Ok(None);
                }
                {
                    let _conversation = space.conversation.lock();
                    let Some(worker) = self.resume(space) else { return Ok(None) };
                    space.lock().settle_removals(Range::new(at, part.end));
                    let present = self.present(space, &worker, Range::new(at, part.end), PAGE_OUT_PAGES)?;
                    at = present.end;
                    for guard in present.guards {
                        // Where the layout is changing, the next search finds it again.
                        self.drop_guarded(space, &mut space.lock(), &worker.pagemap, guard);
                    }
                    if self.evict_runs(space, &worker, &present.runs, false)?.is_none() {
                        return Ok(None);
                    }
                }
                self.store_oldest(space, 0, true)?;
                if Instant::now() > end {
                    return Ok(Some(Range::new(at, range.end)));
                }
            }
        }
        Ok(None)
    }

    /// Makes what is in `range` the first that reclaim takes.
    pub fn make_cold(&self, space: &Space, range: Range) {
        let _visit = space.visit();
        let mut state = space.lock();
        let parts = state.registered.within(range);
        if let Some(first) = parts.first() {
            state.hand = first.start;
        }
        for part in parts {
            state.heat.forget(part);
        }
    }

    /// Never evicts from `range` again, and brings back what was. Tells whether that is done; if not, as a worker is late
    /// with its answer, it is to be called again.
    pub fn exclude(&self, space: &Space, range: Range) -> bool {
        let _visit = space.visit();
        space.lock().excluded.insert(range);
        self.bring_back(space, range)
    }

    /// Hears the workers that were silent when they were last asked, so that faults do not wait for them needlessly. Tries
    /// faults again that could not be answered because the layout was changing.
    pub fn hear_late_answers(&self) {
        if !self.some_are_late.swap(false, Relaxed) {
            return;
        }
        for space in self.open_spaces() {
            let _visit = space.visit();
            let Some(conversation) = space.conversation.try_lock() else {
                // Whoever is in conversation need not be there to hear the answer.
                self.some_are_late.store(true, Relaxed);
                continue;
            };
            let Some(late) = space.try_lock_in_passing().map(|state| state.request.is_some()) else {
                self.some_are_late.store(true, Relaxed);
                continue;
            };
            if late {
                self.resume(&space);
            }
            drop(conversation);
            // Their layout was changing when they were last tried.
            if space.has_waiting() {
                self.service_in_turn(&space);
            }
        }
    }

    /// The worker, ready for a request: answers that were late are taken first.
    pub(crate) fn resume(&self, space: &Space) -> Option<Arc<Worker>> {
        let worker = {
            let state = space.lock();
            let worker = state.worker.clone().filter(|_| !state.gone)?;
            if state.request.is_none() {
                return Some(worker);
            }
            worker
        };
        matches!(self.listen(space, &worker, Duration::ZERO), Talk::Answered(_)).then_some(worker)
    }

    /// Moves the pages of `runs` that may go; gives how many went, `None` if the worker is not to be had.
    fn evict_runs(&self, space: &Space, worker: &Worker, runs: &[Range], spare_hot: bool) -> io::Result<Option<usize>> {
        if !self.evicting.load(Relaxed) || space.held_in.load(Relaxed) {
            return Ok(None);
        }
        let pages: Vec<u64> = runs.iter().flat_map(|run| (run.start..run.end).step_by(PAGE_SIZE)).collect();
        space.count(|counters| &counters.pgscan, pages.len() as u64);
        let (mut staged, mut retry) = (0, pages);
        // A second round for pages that a fork left shared: touched for writing, they become this process's alone.
        for touch in [0, evict::TOUCH] {
            while !retry.is_empty() {
                let taken = retry.len().min(MAX_BATCH_PAGES);
                let batch: Vec<u64> = retry.drain(..taken).collect();
                match self.evict_batch(space, worker, batch, touch, spare_hot && touch == 0)? {
                    Some(count) => staged += count,
                    None => return Ok(None),
                }
            }
            retry = std::mem::take(&mut space.lock().busy);
            if retry.is_empty() {
                break;
            }
        }
        Ok(Some(staged))
    }

    fn evict_batch(
        &self,
        space: &Space,
        worker: &Worker,
        mut pages: Vec<u64>,
        touch: u64,
        spare_hot: bool,
    ) -> io::Result<Option<usize>> {
        let (words, heads) = {
            let mut state = space.lock();
            self.drain(space, &mut state);
            if state.gone {
                return Ok(None);
            }
            let evictable = state.are_evictable(hull(&pages));
            pages.retain(|&page| (evictable || state.is_evictable(page)) && may_go(&mut state, page, spare_hot));
            let (first, room) = state.staging.reserve(pages.len());
            // What has no room stays for the next time.
            pages.truncate(room);
            if pages.is_empty() {
                drop(state);
                self.service(space);
                return Ok(Some(0));
            }
            pages.iter().for_each(|page| state.heat.taken(*page));
            let mut words = vec![kind::EVICT, worker.staging_page(first), touch];
            words.extend(runs_of(&pages).into_iter().map(|run| run.0));
            state.request = Some(Request::Evict { first, pages });
            (words, state.exit_words.untold())
        };
        heads.iter().for_each(|heads| tell_heads(worker, heads));
        space.tie(worker);
        match self.talk(space, worker, &words) {
            Talk::Answered(moved) => Ok(Some(moved)),
            Talk::Silent | Talk::Gone => Ok(None),
        }
    }

    /// Has the worker follow the lists of robust mutexes, by an EVICT without pages.
    pub(crate) fn follow_lists(&self, space: &Space) {
        let _conversation = space.conversation.lock();
        let Some(worker) = self.resume(space) else { return };
        let heads = {
            let mut state = space.lock();
            if state.gone {
                return;
            }
            state.request = Some(Request::Evict { first: 0, pages: Vec::new() });
            state.exit_words.untold()
        };
        heads.iter().for_each(|heads| tell_heads(&worker, heads));
        self.talk(space, &worker, &[kind::EVICT, worker.staging_page(0), 0]);
    }

    /// Stores staged pages, oldest first, until `keep` or fewer are left.
    pub fn store_staged(&self, space: &Space, keep: usize) -> io::Result<Progress> {
        self.store_oldest(space, keep, false)
    }

    fn store_oldest(&self, space: &Space, keep: usize, helped: bool) -> io::Result<Progress> {
        let _visit = space.visit();
        let _conversation = space.conversation.lock();
        let most = if helped { PAGE_OUT_PAGES } else { STORE_PAGES };
        let mut progress = Progress::default();
        while let Some(worker) = self.resume(space) {
            let run: Vec<(u32, Option<u64>)> = {
                let state = space.lock();
                let surplus = state.staging.len().saturating_sub(keep);
                let count = state.staging.oldest_run(surplus.min(most));
                (0..count).map(|i| state.staging.sequence(i)).map(|s| (s, state.staging.get(s))).collect()
            };
            if run.is_empty() {
                break;
            }
            let sequences: Vec<u32> = run.iter().filter(|(_, page)| page.is_some()).map(|(s, _)| *s).collect();
            let slots = self.store(space, &worker, sequences.clone(), helped)?;
            let (stored, refused) = self.take_stored(space, &worker, &sequences, slots)?;
            progress.stored += stored;
            let done = {
                let mut state = space.lock();
                // A page that could neither be stored nor put back stays, and so does what came after it.
                let done = run.iter().take_while(|(sequence, _)| state.staging.get(*sequence).is_none()).count();
                state.staging.begin_discard(done);
                space.traffic.begin_discard(done as u64 * PAGE);
                state.request = Some(Request::Discard { pages: done });
                done
            };
            let words = [kind::DISCARD, worker.staging_page(run[0].0), done as u64];
            if self.talk(space, &worker, &words) != Talk::Answered(run.len()) || refused > 0 {
                break;
            }
        }
        Ok(progress)
    }

    /// Takes note of what the engine has stored, and puts back what it has refused; how many pages each.
    fn take_stored(
        &self,
        space: &Space,
        worker: &Worker,
        sequences: &[u32],
        slots: Vec<Option<Slot>>,
    ) -> io::Result<(usize, usize)> {
        let (mut stored, mut refused) = (0, Vec::new());
        let mut state = space.lock();
        for (&sequence, slot) in sequences.iter().zip(slots) {
            // While we stored it, the page may have been rescued, discarded, unmapped or stored by a fork, or have
            // moved; the ring entry tells, because it is only ever changed under this lock together with the table.
            match (state.staging.get(sequence), slot) {
                (Some(page), Some(slot)) => {
                    state.staging.clear(sequence);
                    state.table.set(page, PageState::Stored(slot));
                    stored += 1;
                }
                (Some(_), None) => refused.push(sequence),
                (None, Some(slot)) => self.engine.invalidate(slot),
                (None, None) => {}
            }
        }
        for &sequence in &refused {
            let mut data = [[0; PAGE_SIZE]];
            let Some(page) = state.staging.get(sequence) else { continue };
            if !self.drop_under_guards(space, &mut state, Range::page(page)) || state.staging.get(sequence).is_none() {
                continue;
            }
            state.read_staged(worker, &[sequence], &mut data)?;
            let (_, error) = space.fill(page, data.as_flattened());
            space.uffd.wake(Range::page(page));
            if let None | Some(FillError::Exists) = error {
                state.staging.clear(sequence);
                state.table.set(page, PageState::Resident);
            }
            // Else it stays staged.
        }
        Ok((stored, refused.len()))
    }

    /// Sends a request to the worker, which has been recorded in the state, and applies the answer.
    pub(crate) fn talk(&self, space: &Space, worker: &Worker, words: &[u64]) -> Talk {
        let _together = worker.together();
        match worker.link.send(words, None) {
            Ok(()) => self.listen(space, worker, space.owner.patience()),
            Err(_) => self.lose_worker(space),
        }
    }

    /// Parts with the worker of `space`, which is gone, or talks nonsense.
    fn lose_worker(&self, space: &Space) -> Talk {
        self.part_with_worker(space);
        self.service(space);
        Talk::Gone
    }

    /// Lets go of the worker of `space`. If its program lives on in this memory, what is staged or on its way is lost with the worker.
    /// To be called by the thread that may talk with the worker.
    pub(crate) fn part_with_worker(&self, space: &Space) {
        let Some(worker) = space.worker() else { return };
        let is_lost = {
            let state = space.lock();
            state.request.is_some() || state.staging.live() > 0
        };
        // Without the lock, for a look at the memory may take long.
        let kills = is_lost && lives_in(space, &worker);
        let mut state = space.lock();
        if kills {
            self.host.kill(space.id, "its worker is gone");
        }
        // Pages may be on their way that pass for untouched: nothing is filled any more, whatever becomes of the kill.
        state.gone |= matches!(state.request.take(), Some(Request::Evict { .. }));
        state.worker = None;
        self.left_alone.fetch_add(1, Release);
    }

    pub(crate) fn listen(&self, space: &Space, worker: &Worker, patience: Duration) -> Talk {
        let asked = Instant::now();
        let heard = visit::bounded(|| worker.link.receive(patience));
        space.owner.waited(asked.elapsed());
        let words = match heard {
            Ok(None) => {
                space.silences.fetch_add(1, Relaxed);
                self.some_are_late.store(true, Relaxed);
                return Talk::Silent;
            }
            Ok(Some(mut received)) => std::mem::take(&mut received.words),
            Err(_) => return self.lose_worker(space),
        };
        // One lock from the end of the request to the last page of its answer: in between, a page that has gone would
        // pass for one that was never touched.
        let mut state = space.lock();
        let done = match (words.first(), state.request.take()) {
            (Some(&kind::EVICTED), Some(Request::Evict { first, pages })) => {
                self.take_evicted(space, &mut state, worker.pid, first, &pages, &words)
            }
            (Some(&kind::DISCARDED), Some(Request::Discard { pages })) => {
                // A page that is being looked at cannot be moved just now; it and what follows stay for the next time.
                let freed = words.get(1).map_or(0, |&freed| pages.min(freed as usize));
                let pages = state.staging.discard(freed);
                space.count(|counters| &counters.discarded, freed as u64);
                // Entries that nothing was moved to free no memory.
                space.traffic.end_discard(pages as u64 * PAGE);
                freed
            }
            (Some(&kind::COLLAPSED), Some(Request::Collapse)) => usize::from(words.get(1) == Some(&1)),
            (_, request) => {
                state.request = request;
                drop(state);
                return self.lose_worker(space);
            }
        };
        drop(state);
        // What was not read during an EVICT is read now.
        self.service(space);
        Talk::Answered(done)
    }

    /// Takes note of which pages went; gives how many.
    fn take_evicted(
        &self,
        space: &Space,
        state: &mut State,
        pid: i32,
        first: u32,
        pages: &[u64],
        words: &[u64],
    ) -> usize {
        let (mut moved, mut unsure, mut doubts) = (0, Vec::new(), false);
        let kept = state.exit_words.overlap(hull(pages));
        for (i, &page) in pages.iter().enumerate() {
            match evicted::get(words, i) {
                status @ (evicted::MOVED | evicted::UNSURE) => {
                    let sequence = first.wrapping_add(i as u32) & ((1 << STATE_BITS) - 1);
                    // It was there, so it is newer than what a fork left in the table.
                    let older = state.table.get(page);
                    state.drop_contents(&self.engine, older);
                    state.staging.fill(sequence, page);
                    state.table.set(page, PageState::Staged(sequence));
                    moved += 1;
                    if status == evicted::UNSURE {
                        unsure.push(sequence);
                    } else if kept && state.exit_words.contains(page) {
                        // Its thread became known while it was moved. The caller services the space.
                        state.want_back(page);
                    }
                }
                evicted::UNWATCHED => doubts = true,
                status if i32::from(status) == libc::EBUSY => state.busy.push(page),
                _ => {}
            }
        }
        let held: Vec<u64> =
            evicted::held(words).iter().copied().filter(|page| page.is_multiple_of(PAGE) && *page < 1 << 56).collect();
        state.exit_words.hold(&held);
        // The caller services the space.
        for page in held {
            state.want_back(page);
        }
        space.count(|counters| &counters.pgsteal, moved as u64);
        space.count(|counters| &counters.busy, state.busy.len() as u64);
        if doubts || !unsure.is_empty() {
            self.forget_unwatched(space, state, pid, &unsure);
        }
        moved
    }
}

/// Returns whether the program of `worker` still has this memory. It may have ended, or execute another program, which must not be killed.
fn lives_in(space: &Space, worker: &Worker) -> bool {
    worker.memory.is_of(worker.program).unwrap_or_else(|_| space.uffd.probe(PAGE) != Probe::Gone)
}

/// Whether a page may go that was present a moment ago and may be evicted now.
fn may_go(state: &mut State, page: u64, spare_hot: bool) -> bool {
    if spare_hot && state.heat.passes(page) {
        return false;
    }
    // What is stored may be there all the same, newer, since a fork. Only its move proves that: it may as well have
    // come to `page` by a remap, after a page was seen there.
    matches!(state.table.get(page), PageState::Resident | PageState::Stored(_))
}

/// The smallest range that has all these pages in it.
fn hull(pages: &[u64]) -> Range {
    let ends = pages.iter().fold((u64::MAX, 0), |(start, end), &page| (start.min(page), end.max(page + PAGE)));
    if pages.is_empty() { Range::new(0, 0) } else { Range::new(ends.0, ends.1) }
}

/// Joins neighbouring pages.
fn runs_of(pages: &[u64]) -> Vec<Run> {
    pages.chunk_by(|a, b| a + PAGE == *b).map(|run| Run::new(run[0], run.len())).collect()
}

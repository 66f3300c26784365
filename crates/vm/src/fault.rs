//! Back into the program: the faults of an address space.
//!
//! 1. [`Pager::service`] takes the lock of the address space and reads all messages ([`Pager::drain`], `events`), which applies changes of
//!    the layout and leaves the faults.
//! 2. Waiting faults are answered: zeros for a page that was never touched, a copy for a staged one. A stored page, and
//!    what is to come with it (`swapin`), is marked as loading. Those for whom there is no memory queue up; only the first of
//!    them is tried again, so that an answer costs the same however many wait. Of a process that rests ([`Pager::rest`]) all wait.
//! 3. Without the lock, loading pages are decompressed. Those that under it are still loading are filled, without it again: so
//!    threads fill beside each other, but none while messages are read ([`Space::fills`]). A large load goes in parts, of which
//!    others may take some (`crew`).
//! 4. A fill that the kernel refuses because the layout is changing is tried again after the event has been read.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::{Duration, Instant};

use uzswap_engine::{LoadError, MAX_FOLIO_ORDER, PAGE_SIZE, Page, Slot};
use uzswap_proto::beacon;

use crate::PAGE;
use crate::crew::PART;
use crate::events::{LONGEST_CHANGE, NEVER_SETTLES, wait_for_program};
use crate::log::log;
use crate::pager::{Account, Pager, with_buffer};
use crate::range::Range;
use crate::space::{Fault, Outcome, Request, Space, State};
use crate::swapin::Swapin;
use crate::sys::process::{self, nonce, page_of};
use crate::sys::uffd::{FillError, Uffd};
use crate::table::{CHUNK, PageState};

impl Pager {
    /// Reads what the userfaultfd of `space` has to say and answers it, and what was left waiting before.
    pub fn service(&self, space: &Space) {
        self.service_while(space, || false, || true);
    }

    /// As [`Pager::service`], and goes on as long as `more` finds that there is more to come.
    ///
    /// While a thread is here the userfaultfd is reported to no other, unless several faults wait at once. If `others_wait` for it,
    /// a thread turns to other work after [`VISIT`], or [`LONGEST_VISIT`] if faults are left to be answered, however much there is to
    /// come.
    pub(crate) fn service_while(&self, space: &Space, more: impl Fn() -> bool, others_wait: impl Fn() -> bool) {
        let _visit = space.visit();
        let (mut begun, mut rounds, mut tries) = (Instant::now(), 0u32, 0);
        loop {
            let mut pass = Pass::default();
            let (news, left) = {
                let mut state = space.lock();
                if state.gone || matches!(state.request, Some(Request::Evict { .. })) {
                    // Whoever finishes the request comes here.
                    return;
                }
                let news = self.drain(space, &mut state);
                self.answer_some(space, &mut state, &mut pass);
                (news, !state.waiting.is_empty())
            };
            space.with_account(|account| account.admitted());
            pass.filled.iter().for_each(|range| space.uffd.wake(*range));
            if pass.loads.len() > 1 {
                self.rearm(space);
            }
            // A thread that was woken may have run in place of this one, and faulted again. To read that here takes less time than to have
            // it reported.
            let mut done = !news && !pass.unsettled && pass.loads.is_empty();
            let mut ahead = pass.ahead;
            if !self.keeps(&ahead) {
                self.spread(space, std::mem::take(&mut ahead));
            }
            for load in pass.loads {
                self.finish_load(space, load);
            }
            self.load_ahead(space, ahead);
            while let Some((other, load)) = self.crew.take_load() {
                self.finish_taken(&other, load);
                done = false;
                // Whoever waits for a page comes first.
                if space.uffd.is_readable() {
                    self.crew.call();
                    break;
                }
            }
            rounds += 1;
            let longest = if left { LONGEST_VISIT } else { VISIT };
            let mut is_over = !done && rounds % ROUNDS == 0 && begun.elapsed() > longest;
            if is_over && !others_wait() {
                (begun, is_over) = (Instant::now(), false);
            }
            if pass.unsettled && tries < MOST_WAITS && !is_over {
                wait_for_program(&space.uffd, &mut tries);
            } else if pass.unsettled || is_over && left {
                // The thread that changes the layout does not run, or there is no end to what it does. Faults that wait are tried again
                // by `hear_late_answers`.
                self.some_are_late.store(true, Relaxed);
                self.rearm(space);
                return;
            } else if is_over || done && !more() {
                self.rearm(space);
                return;
            }
        }
    }

    /// Returns whether the thread that heard of a fault loads what goes with it: a few pages, while other address spaces have faults,
    /// too. Then no processor is left for the crew, and to hand the pages on would take longer.
    fn keeps(&self, ahead: &[Load]) -> bool {
        const FEW: usize = 32;
        let pages: usize = ahead.iter().map(|load| load.pages.len()).sum();
        pages == 0 || pages <= FEW && self.has_others_ready()
    }

    /// Loads what is wanted ahead, until a thread of the program waits for a page: that comes first, and others load the rest.
    fn load_ahead(&self, space: &Space, loads: Vec<Load>) {
        let mut loads = loads.into_iter();
        while !loads.as_slice().is_empty() && !space.uffd.is_readable() {
            loads.next().into_iter().for_each(|load| self.finish_load(space, load));
        }
        self.spread(space, loads.collect());
    }

    /// Has others load what is wanted ahead.
    fn spread(&self, space: &Space, loads: Vec<Load>) {
        if loads.is_empty() {
            return;
        }
        match self.space(space.id) {
            Some(space) => self.crew.load(&space, loads),
            // It is being reaped.
            None => loads.into_iter().for_each(|load| self.finish_load(space, load)),
        }
    }

    /// Answers those who wait, as many as one thread can load for before others have to: first those who wait for memory, in
    /// the order in which they came, as long as there is some.
    fn answer_some(&self, space: &Space, state: &mut State, pass: &mut Pass) {
        if state.is_new && !state.waiting.is_empty() {
            state.is_new = false;
            // A child with a worker has a tether of its own.
            state.heirs.iter().filter(|_| state.worker.is_none()).for_each(|heirs| heirs.tie_children(self, space));
        }
        if space.awaits_tie.load(Acquire) {
            return;
        }
        while pass.has_room()
            && let Some(fault) = state.starved.pop_front()
        {
            self.try_answer(space, state, pass, fault);
        }
        let mut waiting = std::mem::take(&mut state.waiting).into_iter();
        while pass.loads.len() < MOST_LOADS
            && let Some(fault) = waiting.next()
        {
            self.try_answer(space, state, pass, fault);
        }
        state.waiting.extend(waiting);
    }

    /// Has a process rest, as long as it may be evicted from: whoever of it comes for memory waits until it is to rest no longer.
    /// A thread of it that finds all its pages in memory goes on. The pager serves the threads that have waited in turn: if they change
    /// mappings without a pause, the caller, which may be the thread that reclaims, does not wait for them.
    pub fn rest(&self, space: &Arc<Space>, rests: bool) {
        let _visit = space.visit();
        {
            let mut state = space.lock();
            state.rests = rests && self.evicting.load(Relaxed) && !space.held_in.load(Relaxed);
            if state.rests {
                return;
            }
            let resting = std::mem::take(&mut state.resting);
            state.waiting.extend(resting);
        }
        self.service_in_turn(space);
    }

    fn try_answer(&self, space: &Space, state: &mut State, pass: &mut Pass, mut fault: Fault) {
        if state.rests && !fault.insists && needs_memory(state, fault) {
            space.stall(state, &mut fault);
            state.resting.push(fault);
            // It waits for something else now.
            state.changing_since = None;
            return;
        }
        match self.answer(space, state, pass, &mut fault) {
            Answer::Done => answered(space, state, fault),
            Answer::Load(pages) => pass.load(space, fault, &pages),
            Answer::NoRoom => {
                space.stall(state, &mut fault);
                state.changing_since = None;
                // The first fault of a pass that finds no memory stays the first to be tried again.
                match std::mem::replace(&mut pass.starves, true) {
                    true => state.starved.push_back(fault),
                    false => state.starved.push_front(fault),
                }
            }
            Answer::Unsettled => {
                pass.unsettled = true;
                state.waiting.push(fault);
            }
        }
    }

    /// Answers one fault.
    fn answer(&self, space: &Space, state: &mut State, pass: &mut Pass, fault: &mut Fault) -> Answer {
        let page = fault.page;
        if state.worker.is_none() && state.beacon == Some(page) {
            return self.answer_beacon(space, state, pass, fault);
        }
        if !state.removals.is_empty() {
            // All that a fault may bring. What else is brought keeps a removal waiting longer than it must, no more.
            state.settle_removals(Range::sized(page, CHUNK));
        }
        match state.table.get(page) {
            PageState::Resident => self.answer_untouched(space, state, pass, *fault),
            PageState::Staged(sequence) => {
                space.stall(state, fault);
                self.rescue(space, state, pass, *fault, sequence)
            }
            // The thread that loads it wakes everybody.
            PageState::Loading(_) => {
                self.go_ahead(space, state, pass, page);
                Answer::Done
            }
            PageState::Stored(_) => {
                space.stall(state, fault);
                self.identify(space, state, fault.tid);
                let (window, mut pages) = self.wanted(space, state, page);
                self.pass_over_guards(space, state, &mut pages, fault.is_the_managers());
                if pages.first().is_none_or(|(first, _)| *first != page) {
                    // A guard lies there by now: the thread finds that out when it is woken.
                    pass.filled.push(Range::page(page));
                    return Answer::Done;
                }
                if fault.is_the_managers() {
                    // Its neighbours do.
                    pages.truncate(1);
                }
                while !pass.admits_for(fault, space, pages.len() as u64) {
                    if pages.len() == 1 {
                        return Answer::NoRoom;
                    }
                    pages.truncate(pages.len().div_ceil(8));
                }
                state.readahead.brought(page, window, page + neighbours(&pages) as u64 * PAGE);
                state.begin_loading(&pages);
                Answer::Load(pages)
            }
        }
    }

    /// Somebody has come for `page`, which is loading: has the folios after it loaded, too, if he will want them.
    fn go_ahead(&self, space: &Space, state: &mut State, pass: &mut Pass, page: u64) {
        let (folios, account) = (self.folios(), space.account());
        if folios.rule() != Swapin::Adaptive || account.spare() == 0 {
            return;
        }
        let most = account.most_ahead();
        while let Some((start, window)) = state.readahead.ahead(page, |folio| folios.largest(folio.min(most))) {
            let mut pages = state.table.stored_run(start, window);
            self.pass_over_guards(space, state, &mut pages, false);
            if !pass.admits(space, pages.len() as u64) {
                pages.clear();
            }
            state.readahead.brought(start, window, start + pages.len() as u64 * PAGE);
            if pages.is_empty() {
                return;
            }
            state.begin_loading(&pages);
            pass.load_ahead(space, &pages);
        }
    }

    /// What to bring for a fault at a stored page, that page first; and the window of its walk.
    fn wanted(&self, space: &Space, state: &mut State, page: u64) -> (usize, Vec<(u64, Slot)>) {
        let stored = |page| state.table.stored(page);
        let pages = |start: u64, count: usize| (0..count as u64).map(move |i| start + i * PAGE);
        let folios = self.folios();
        match folios.rule() {
            Swapin::Never => (1, stored(page).into_iter().collect()),
            Swapin::Adaptive => {
                let (most, spare) = space.with_account(|account| (account.most_ahead(), account.spare()));
                let window = state.readahead.window(page, spare == 0, |window| folios.largest(window.min(most)));
                let walk = state.table.stored_run(page, window);
                let around = folios.around(page, spare, |folio| state.table.absent(folio));
                if walk.len() as u64 * PAGE >= around.len() {
                    return (window, walk);
                }
                let after = pages(page, ((around.end - page) / PAGE) as usize);
                let before = pages(around.start, ((page - around.start) / PAGE) as usize);
                (window, after.chain(before).filter_map(stored).collect())
            }
            Swapin::Always => {
                let mut count = folios.largest(1 << MAX_FOLIO_ORDER);
                loop {
                    let start = page - page % (count as u64 * PAGE);
                    let own = stored(page).into_iter();
                    let others = pages(start, count).filter(|other| *other != page);
                    let folio: Option<Vec<_>> = others.map(stored).collect();
                    if let Some(others) = folio {
                        return (1, own.chain(others).collect());
                    }
                    count = folios.largest(count / 2);
                }
            }
        }
    }

    /// A page that was never touched, or was discarded by the program: zeros.
    fn answer_untouched(&self, space: &Space, state: &mut State, pass: &mut Pass, fault: Fault) -> Answer {
        static ZEROS: [u8; MOST_ZEROS * PAGE_SIZE] = [0; MOST_ZEROS * PAGE_SIZE];
        let page = fault.page;
        if let Some(place) = space.staging_place(state, page) {
            state.staging.litter(place);
            if fault.write {
                // The program locks all of its memory (`mlockall`), or writes where it has no business.
                let _ = space.uffd.poison(page);
                pass.filled.push(Range::page(page));
                return Answer::Done;
            }
        }
        let (filled, error) = if fault.write {
            if !pass.admits(space, 1) {
                return Answer::NoRoom;
            }
            let window = state.readahead.window(page, false, |window| window.min(MOST_ZEROS));
            let mut pages = 1;
            while pages < window && may_fill_ahead(space, state, page + pages as u64 * PAGE) {
                pages += 1;
            }
            if let Some(guard) = self.first_guard(state, Range::sized(page, pages as u64 * PAGE)) {
                pages = ((guard - page) / PAGE) as usize;
                if pages == 0 {
                    // The guard was installed while the thread waited. Woken, the thread meets it.
                    pass.filled.push(Range::page(page));
                    return Answer::Done;
                }
            }
            let (filled, error) = space.fill(page, &ZEROS[..pages * PAGE_SIZE]);
            state.readahead.brought(page, window, page + filled.max(PAGE));
            (filled, error)
        } else {
            match space.uffd.zero_quietly(page) {
                Ok(()) => (PAGE, None),
                Err(error) => (0, Some(error)),
            }
        };
        space.count(|counters| &counters.zero_filled, filled / PAGE);
        match error {
            Some(error) if filled == 0 => Answer::from(self.after_failed_fill(space, state, page, error)),
            _ => {
                pass.filled.push(Range::sized(page, filled));
                Answer::Done
            }
        }
    }

    /// Tells a forked child, which asks by a touch of its beacon, the number under which its worker can claim this address space.
    fn answer_beacon(&self, space: &Space, state: &mut State, pass: &mut Pass, fault: &Fault) -> Answer {
        let page = fault.page;
        let Ok(nonce) = nonce() else { return Answer::Unsettled };
        self.name_child(space, state, nonce);
        match space.fill(page, &page_of(&beacon::words(nonce))).1 {
            Some(error) => Answer::from(self.after_failed_fill(space, state, page, error)),
            None => {
                if fault.write {
                    self.identify(space, state, fault.tid);
                }
                pass.filled.push(Range::page(page));
                Answer::Done
            }
        }
    }

    /// Returns what to do about a fault whose page could not be filled. A refusal that nothing can be done about ends the process.
    fn after_failed_fill(&self, space: &Space, state: &mut State, page: u64, error: FillError) -> Outcome {
        if let FillError::Refused(errno) = error {
            let error = io::Error::from_raw_os_error(errno);
            self.host.kill(space.id, &format!("the kernel does not fill its page {page:#x}: {error}"));
        }
        if error == FillError::Changing && state.changing_since.is_some_and(|since| since.elapsed() > LONGEST_CHANGE) {
            self.give_up(space, state, Vec::new(), NEVER_SETTLES);
            return Outcome::Done;
        }
        space.after_failed_fill(state, page, error)
    }

    /// Gives a staged page back: it is copied, and its copy in the staging area is discarded in its turn.
    fn rescue(&self, space: &Space, state: &mut State, pass: &mut Pass, fault: Fault, sequence: u32) -> Answer {
        let page = fault.page;
        // Until that has been discarded the page is there twice.
        if !pass.admits_for(&fault, space, 1) {
            return Answer::NoRoom;
        }
        let is_to_be_searched = fault.is_the_managers() || state.has_guards;
        if is_to_be_searched && !self.drop_under_guards(space, state, Range::page(page)) {
            return Answer::Unsettled;
        }
        if state.table.get(page) != PageState::Staged(sequence) {
            // A guard lies there by now: the thread meets it when it is woken.
            pass.filled.push(Range::page(page));
            return Answer::Done;
        }
        let mut data = [[0; PAGE_SIZE]];
        let worker = state.worker.clone();
        if worker.is_none_or(|worker| state.read_staged(&worker, &[sequence], &mut data).is_err()) {
            // Only a process that outlived the program whose memory it shares comes here.
            self.host.kill(space.id, "a staged page could not be read back");
            let thread = fault.tid as i32;
            if !process::is_exiting(thread) && !process::is_told_to_end(thread) {
                log(&format!(
                    "uzswap: error: page {page:#x} could not be read back: the program has ended, and its worker with it; thread {thread}, which \
                     shares its memory, gets SIGBUS"
                ));
            }
            let _ = space.uffd.poison(page);
            return Answer::Done;
        }
        match space.fill(page, data.as_flattened()).1 {
            None => {
                pass.filled.push(Range::page(page));
                space.note_back(1);
                space.count(|counters| &counters.rescued, 1);
                space.wanted(state, page, true);
            }
            Some(error) => match self.after_failed_fill(space, state, page, error) {
                Outcome::Retry => return Answer::Unsettled,
                // Not mapped: an event about it is to come, which finds the page in the table.
                Outcome::Done if error != FillError::Exists => return Answer::Done,
                Outcome::Done => {}
            },
        }
        state.staging.clear(sequence);
        state.table.set(page, PageState::Resident);
        self.collapses.add(space, state.whole_again(Range::page(page)));
        Answer::Done
    }

    /// Loads the pages of a fault and fills them in.
    pub(crate) fn finish_load(&self, space: &Space, load: Load) {
        with_buffer(load.pages.len(), |buffer| self.load_and_fill(space, load, buffer));
    }

    /// Loads pages into `buffer`; how many, and why not the next.
    fn load(&self, pages: &[(u64, Slot)], buffer: &mut [Page]) -> (usize, Option<LoadError>) {
        if pages.len() > 1 {
            let slots: Vec<Slot> = pages.iter().map(|(_, slot)| *slot).collect();
            if self.engine.load_folio(&slots, buffer).is_ok() {
                return (pages.len(), None);
            }
        }
        for (number, (&(_, slot), data)) in pages.iter().zip(buffer).enumerate() {
            if let Err(error) = self.engine.load(slot, data) {
                return (number, Some(error));
            }
        }
        (pages.len(), None)
    }

    fn load_and_fill(&self, space: &Space, load: Load, buffer: &mut [Page]) {
        let Load { fault, ref pages, ref folio, .. } = load;
        let first = pages[0].0;
        let (loaded, failed) = self.load(pages, buffer);
        // What was loaded ahead is looked at again when it is wanted. What the manager wants may be read when a thread comes for it.
        let lost = fault
            .filter(|_| loaded == 0)
            .and_then(|fault| failed.filter(|error| matches!(error, LoadError::Corrupt) || !fault.is_the_managers()));
        if let Some(error) = &lost {
            let what = match error {
                LoadError::Corrupt => "is damaged".to_owned(),
                LoadError::Io(error) => format!("could not be read from the swap file: {error}"),
            };
            log(&format!("uzswap: error: page {first:#x} {what}; its program gets SIGBUS"));
        }
        let mut state = space.lock();
        // What was unmapped, discarded or moved meanwhile is not filled; its event has been applied.
        let fit = state.table.loading(&pages[..loaded]);
        let fit = self.before_guard(&state, &pages[..fit]);
        let (mut filled, mut refused, mut answer) = (0, None, Answer::Done);
        if lost.is_some() && state.table.loading(&pages[..1]) == 1 {
            match space.uffd.poison(first) {
                // What is damaged stays so. What could not be read is kept: it may be filled in later.
                Ok(()) => filled = usize::from(matches!(lost, Some(LoadError::Corrupt))),
                Err(error) => refused = Some(error),
            }
        } else if fit > 0 {
            let filling = space.fills.read();
            drop(state);
            let data = buffer[..fit].as_flattened();
            let (bytes, error) = space.fill(first, data);
            drop(filling);
            state = space.lock();
            filled = (bytes / PAGE) as usize;
            refused = error.filter(|_| filled == 0);
        }
        if let Some(error) = refused {
            let changing_since = state.changing_since;
            answer = Answer::from(self.after_failed_fill(space, &mut state, first, error));
            if fault.is_none() {
                // No thread waits whose answer would end this time.
                state.changing_since = changing_since;
            }
            if error == FillError::Exists {
                // What is there is newer than what we hold.
                filled = 1;
            }
        }
        let mut stored_again = [false; PART];
        state.table.change(pages, |i, slot, now| {
            let still = now == PageState::Loading(slot);
            stored_again[i] = still && i >= filled;
            still.then_some(if i < filled { PageState::Resident } else { PageState::Stored(slot) })
        });
        if filled > 0 {
            space.note_back(filled);
            space.count(|counters| &counters.readahead, (filled - usize::from(fault.is_some())) as u64);
        }
        let back = Range::new(first, pages[pages.len() - 1].0 + PAGE);
        self.collapses.add(space, state.whole_again(back));
        // A page that was loaded ahead is stored again: a thread that has come for it meanwhile is woken, and comes once more.
        let unsettled = fault.is_some() && matches!(answer, Answer::Unsettled);
        if let Some(fault) = fault {
            if unsettled {
                state.waiting.push(fault);
            } else {
                if filled > 0 {
                    space.wanted(&mut state, fault.page, false);
                    space.count(|counters| &counters.pgmajfault, 1);
                }
                answered(space, &mut state, fault);
            }
        }
        drop(state);
        let spent = pages.iter().zip(stored_again).filter(|(_, stored_again)| !stored_again);
        self.engine.invalidate_all(&spent.map(|(&(_, slot), _)| slot).collect::<Vec<_>>());
        // Also whoever has come for a page that was loading and is stored again. Those who are woken may run in our place, at
        // once: so nothing is left to do, and no lock held, that another could wait for.
        match folio {
            Some(folio) => folio.part_done(&space.uffd),
            None => {
                let skipped = u64::from(unsettled);
                if let rest @ 1.. = pages.len() as u64 - skipped {
                    space.uffd.wake(Range::sized(first + skipped * PAGE, rest * PAGE));
                }
            }
        }
    }
}

/// Whether a fault takes memory that is not on its way yet.
fn needs_memory(state: &State, fault: Fault) -> bool {
    match state.table.get(fault.page) {
        PageState::Loading(_) => false,
        PageState::Stored(_) | PageState::Staged(_) => true,
        // A child reports itself by its beacon.
        PageState::Resident => fault.write && state.beacon != Some(fault.page),
    }
}

fn answered(space: &Space, state: &mut State, fault: Fault) {
    state.changing_since = None;
    space.go_on(state, &fault);
    space.count(|counters| &counters.stall_usec, fault.since.elapsed().as_micros() as u64);
}

fn may_fill_ahead(space: &Space, state: &State, page: u64) -> bool {
    state.registered.contains(page)
        && state.table.get(page) == PageState::Resident
        && space.with_account(|account| account.admit(1))
}

/// What became of a fault.
enum Answer {
    Done,
    /// These pages are loading now.
    Load(Vec<(u64, Slot)>),
    NoRoom,
    Unsettled,
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Answer {
        match outcome {
            Outcome::Done => Answer::Done,
            Outcome::Retry => Answer::Unsettled,
        }
    }
}

/// Neighbouring pages that are loading, at most [`PART`], with the references to their slots: none comes to mean another page
/// meanwhile. Whoever pays has them on the way as long as this lives.
pub(crate) struct Load {
    /// Who waits for the first of them, if it was not thought of ahead.
    fault: Option<Fault>,
    pages: Vec<(u64, Slot)>,
    /// What they are a part of, if nobody waits for just them.
    folio: Option<Arc<Folio>>,
    account: Arc<dyn Account>,
}

/// A folio that is loaded in parts. A thread that comes for a page of it goes on when the last part is done: one that reads faster
/// than pages are filled would else be put to sleep and woken for each part.
struct Folio {
    range: Range,
    /// Parts that are not done.
    left: AtomicUsize,
}

impl Folio {
    fn new(parts: &[&[(u64, Slot)]]) -> Folio {
        let pages = || parts.iter().copied().flatten().map(|(page, _)| *page);
        let (start, end) = (pages().min().unwrap_or(0), pages().max().map_or(0, |last| last + PAGE));
        Folio { range: Range::new(start, end), left: AtomicUsize::new(parts.len()) }
    }

    fn part_done(&self, uffd: &Uffd) {
        if self.left.fetch_sub(1, AcqRel) == 1 {
            uffd.wake(self.range);
        }
    }
}

/// How many of the pages, from the first on, follow each other without a gap.
fn neighbours(pages: &[(u64, Slot)]) -> usize {
    pages.windows(2).take_while(|pair| pair[0].0 + PAGE == pair[1].0).count() + 1
}

/// How many of the pages, from the first on, one thread loads at once: neighbours.
pub(crate) fn part(pages: &[(u64, Slot)]) -> usize {
    neighbours(pages).min(PART)
}

impl Load {
    /// Pages that `account` has admitted.
    pub fn new(fault: Option<Fault>, pages: Vec<(u64, Slot)>, account: Arc<dyn Account>) -> Load {
        account.load_begins(pages.len() as u64);
        Load { fault, pages, folio: None, account }
    }

    /// Which 2 MiB of address space it is in, but perhaps for its end.
    pub fn chunk(&self) -> u64 {
        self.pages[0].0 / CHUNK
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.account.load_ends(self.pages.len() as u64);
    }
}

/// How long a thread serves one address space that has ever more to say before it looks whether others wait.
const VISIT: Duration = Duration::from_millis(5);
const LONGEST_VISIT: Duration = Duration::from_millis(10);

/// Rounds between two looks at the clock.
const ROUNDS: u32 = 4;

/// How often the layout is waited for before the thread turns to other address spaces: some 10 ms.
const MOST_WAITS: u32 = 60;

/// How many faults one thread loads for before it looks again who else waits.
const MOST_LOADS: usize = 16;

/// The most pages that are filled with zeros at once.
const MOST_ZEROS: usize = 64;

/// What has come of the faults that were tried in one go.
#[derive(Default)]
struct Pass {
    loads: Vec<Load>,
    /// What goes with them.
    ahead: Vec<Load>,
    /// Filled without waking who waits for it: that comes when the lock is free, for he may run in our place at once.
    filled: Vec<Range>,
    /// One had to be left because the layout is changing.
    unsettled: bool,
    /// There was no memory for one: there is none for those who came later.
    starves: bool,
}

impl Pass {
    fn has_room(&self) -> bool {
        !self.starves && self.loads.len() < MOST_LOADS
    }

    /// Takes note of pages to be loaded for a fault, the first its own.
    fn load(&mut self, space: &Space, fault: Fault, pages: &[(u64, Slot)]) {
        let (own, rest) = pages.split_at(part(pages));
        self.loads.push(Load::new(Some(fault), own.to_vec(), space.account()));
        self.load_ahead(space, rest);
    }

    /// Takes note of pages to be loaded that nobody waits for yet.
    fn load_ahead(&mut self, space: &Space, pages: &[(u64, Slot)]) {
        for mut pages in pages.chunks(1 << MAX_FOLIO_ORDER) {
            let mut parts = Vec::new();
            while !pages.is_empty() {
                let (part, after) = pages.split_at(part(pages));
                parts.push(part);
                pages = after;
            }
            let folio = Arc::new(Folio::new(&parts));
            for part in parts {
                let mut load = Load::new(None, part.to_vec(), space.account());
                load.folio = Some(folio.clone());
                self.ahead.push(load);
            }
        }
    }

    fn admits(&self, space: &Space, pages: u64) -> bool {
        !self.starves && space.with_account(|account| account.admit(pages))
    }

    fn admits_for(&self, fault: &Fault, space: &Space, pages: u64) -> bool {
        fault.is_the_managers() || self.admits(space, pages)
    }
}

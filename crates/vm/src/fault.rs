//! Back into the program: events and faults of an address space.
//!
//! 1. [`Pager::service`] takes the lock of the address space and reads all messages ([`Pager::drain`]). Changes of the layout
//!    are applied in the order in which they happened; faults are put with those that wait.
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
use crate::epoch::{self, Change, Event, Order};
use crate::evict::STORE_PAGES;
use crate::heirs::{self, Heirs};
use crate::log::log;
use crate::noisy::SETTLES_WITHIN;
use crate::pager::{Account, NO_ROOM, Pager, read_pages, with_buffer};
use crate::range::{Range, RangeSet};
use crate::refused;
use crate::space::{Fault, Outcome, Request, Space, State};
use crate::swapin::Swapin;
use crate::sys::process::{nonce, page_of};
use crate::sys::uffd::{FillError, Message, Probe, Uffd};
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
            space.account().admitted();
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

    /// Reads all there is to read, applies changes of the layout and forks, and leaves the faults in `waiting`. Tells
    /// whether there was anything.
    pub(crate) fn drain(&self, space: &Space, state: &mut State) -> bool {
        // What is being filled is filled as the layout was before anything of this is known. Nobody begins meanwhile.
        // It is soon done, mostly before one would be asleep.
        const LOOKS: usize = 100;
        for look in 0.. {
            if space.fills.try_write().is_some() {
                break;
            }
            if state.unheard.is_empty() && !space.uffd.is_readable() {
                return false;
            }
            if look == LOOKS {
                drop(space.fills.write());
                break;
            }
            std::thread::yield_now();
        }
        let (mut events, mut forks): (Vec<Event>, Vec<Uffd>) = Default::default();
        let (mut news, mut tries, mut begun, mut noted, mut asked) = (false, 0, None, 0, 0);
        let mut messages = std::mem::take(&mut state.unheard);
        // One whose events have no end is read as fast as can be.
        let is_noisy = space.noise.is_noisy();
        let mut now = Instant::now();
        let mut may_fork = state.may_fork(now) && !is_noisy;
        loop {
            let read_all = match heirs::read(&space.uffd, state.heirs.as_deref(), &mut messages, may_fork) {
                Ok(read_all) => read_all,
                Err(error) => {
                    forks.extend(messages.drain(..).filter_map(Message::into_child));
                    self.give_up(space, state, forks, &format!("its memory events cannot be read: {error}"));
                    return false;
                }
            };
            news |= !messages.is_empty();
            for message in messages.drain(..) {
                match message {
                    Message::Fault { address, write, tid } => {
                        let (stalls, insists) = (false, false);
                        state.hear_of(Fault { page: address, write, tid, since: now, stalls, insists });
                    }
                    Message::Change(change) => {
                        if let Change::Remove(range) = change {
                            // The discard goes on as soon as it has been announced.
                            state.await_removal(range);
                        }
                        events.push(Event { change, forks_read: forks.len() });
                    }
                    Message::Fork(child) => {
                        child.make_nonblocking();
                        forks.push(child);
                    }
                }
            }
            if !read_all {
                continue;
            }
            let order = match refused::take_out(space, state, &mut events, &mut asked) {
                true => self.order(space, state, &events, forks.len()),
                false => Order::Later,
            };
            match order {
                Order::Found(ordered) => {
                    self.settle(space, state, ordered, forks);
                    return news;
                }
                Order::TooMany => {
                    self.give_up(space, state, forks, "its threads change its memory layout without a pause");
                    return false;
                }
                Order::Later => {}
            }
            if begun.get_or_insert_with(Instant::now).elapsed() > SETTLES_WITHIN {
                space.note_changes(events.len().saturating_sub(noted));
                noted = events.len();
            }
            wait_for_program(&space.uffd, &mut tries);
            now = Instant::now();
            may_fork = !is_noisy;
        }
    }

    /// Kills a process of whose memory nothing certain is known any more. Its children that were just forked get an error where they
    /// miss contents: were their userfaultfds closed, they would read zeros.
    fn give_up(&self, space: &Space, state: &mut State, forks: Vec<Uffd>, why: &str) {
        self.host.kill(space.id, why);
        state.gone = true;
        forks.into_iter().for_each(|child| self.forsake(space, state, child));
    }

    /// What was read, in order.
    fn order(&self, space: &Space, state: &State, events: &[Event], forks: usize) -> Order {
        if events.len() + forks == 0 {
            return Order::Found(Vec::new());
        }
        match space.uffd.probe(PAGE) {
            Probe::Changing => Order::Later,
            Probe::Gone => Order::Found(events.to_vec()),
            _ => epoch::order(&state.registered, events, |address| is_registered(&space.uffd, address)),
        }
    }

    /// Applies what was read in an epoch.
    fn settle(&self, space: &Space, state: &mut State, ordered: Vec<Event>, forks: Vec<Uffd>) {
        let (mut rest, had_forks) = (ordered, !forks.is_empty());
        for (number, child) in forks.into_iter().enumerate() {
            let mut said = Vec::new();
            let inherited = |address| was_inherited(&child, address, &mut said, state.heirs.as_deref());
            let (before, after) = epoch::split(&state.registered, rest, number, inherited);
            before.into_iter().for_each(|event| state.apply(&self.engine, event.change));
            if number == 0 {
                // Most children are there by now, and what follows takes milliseconds.
                state.heirs.iter().for_each(|heirs| heirs.tie_if_few());
            }
            self.fork(space, state, child, said);
            rest = after;
        }
        rest.into_iter().for_each(|event| state.apply(&self.engine, event.change));
        state.epoch += 1;
        if had_forks {
            state.heirs.iter().for_each(|heirs| heirs.tidy());
        }
    }

    /// Takes a forked child, which has hardly run yet, under management.
    fn fork(&self, space: &Space, state: &mut State, child: Uffd, said: Vec<Message>) {
        if state.gone || !self.has_room(&space.owner) {
            if !std::mem::replace(&mut state.gone, true) {
                self.host.kill(space.id, &format!("it forked, and {NO_ROOM}"));
            }
            // Those that it has forked itself by now miss the same contents.
            let children = said.into_iter().filter_map(Message::into_child).chain([child]);
            return children.for_each(|child| self.forsake(space, state, child));
        }
        let wiped = self.wiped_in_child(state);
        self.flush_staging(space, state, &child, &wiped);
        let mut inherited = State { unheard: said, ..state.inherit(&self.engine) };
        wiped.iter().for_each(|range| inherited.empty(&self.engine, range));
        let (child, added) = self.register(child, inherited, space.account(), space.owner.clone());
        state.heirs.iter().for_each(|heirs| heirs.note(&child));
        child.noise.inherit(&space.noise);
        if let Err(error) = added {
            self.host.kill(space.id, &format!("no room for one more process: {error}"));
        }
    }

    /// Stores all staged pages at once, so that a child can share them. What the engine refuses goes to both. A page that cannot be
    /// read is denied to the child: it would read zeros. In `wiped` it reads zeros by rights.
    fn flush_staging(&self, space: &Space, state: &mut State, child: &Uffd, wiped: &RangeSet) {
        let staged: Vec<(u32, u64)> = state.staging.iter().collect();
        let Some(worker) = state.worker.clone() else {
            deny(child, &staged, wiped);
            return;
        };
        for group in staged.chunks(STORE_PAGES) {
            let sequences: Vec<u32> = group.iter().map(|&(sequence, _)| sequence).collect();
            let read = with_buffer(group.len(), |data| {
                read_pages(&worker, &sequences, data.as_flattened_mut())?;
                let homes = self.homes(space, &worker, &sequences);
                for ((&(sequence, page), &home), data) in group.iter().zip(&homes).zip(data.iter()) {
                    if let Ok(slot) = self.engine.swap_out(data, home) {
                        state.staging.clear(sequence);
                        state.table.set(page, PageState::Stored(slot));
                    } else if !wiped.contains(page)
                        && child.copy(page, data).1.is_some_and(|error| error != FillError::Exists)
                    {
                        self.host.kill(space.id, "it forked while neither pool nor swap file had room");
                        deny(child, &[(sequence, page)], wiped);
                    }
                }
                io::Result::Ok(())
            });
            if read.is_err() {
                self.host.kill(space.id, "a staged page could not be read back");
                deny(child, group, wiped);
            }
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
            return;
        }
        match self.answer(space, state, pass, &mut fault) {
            Answer::Done => answered(space, state, fault),
            Answer::Load(pages) => pass.load(space, fault, &pages),
            Answer::NoRoom if pass.starves => {
                space.stall(state, &mut fault);
                state.starved.push_back(fault);
            }
            // The first of all who wait.
            Answer::NoRoom => {
                pass.starves = true;
                space.stall(state, &mut fault);
                state.starved.push_front(fault);
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
            return self.answer_beacon(space, state, pass, page);
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
                let (window, mut pages) = self.wanted(space, state, page);
                self.pass_over_guards(space, state, &mut pages);
                if fault.needs_no_room() {
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
            self.pass_over_guards(space, state, &mut pages);
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
                let (most, spare) = (space.account().most_ahead(), space.account().spare());
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
                pages = ((guard - page) / PAGE).max(1) as usize;
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
        space.account().counters().zero_filled.fetch_add(filled / PAGE, Relaxed);
        match error {
            Some(error) if filled == 0 => Answer::from(self.after_failed_fill(space, state, page, error)),
            _ => {
                pass.filled.push(Range::sized(page, filled));
                Answer::Done
            }
        }
    }

    /// Tells a forked child, which asks by a touch of its beacon, the number under which its worker can claim this address space.
    fn answer_beacon(&self, space: &Space, state: &mut State, pass: &mut Pass, page: u64) -> Answer {
        let Ok(nonce) = nonce() else { return Answer::Unsettled };
        self.name_child(space, state, nonce);
        match space.fill(page, &page_of(&beacon::words(nonce))).1 {
            Some(error) => Answer::from(self.after_failed_fill(space, state, page, error)),
            None => {
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
        space.after_failed_fill(state, page, error)
    }

    /// Gives a staged page back: it is copied, and its copy in the staging area is discarded in its turn.
    fn rescue(&self, space: &Space, state: &mut State, pass: &mut Pass, fault: Fault, sequence: u32) -> Answer {
        let page = fault.page;
        // Until that has been discarded the page is there twice.
        if !pass.admits_for(&fault, space, 1) {
            return Answer::NoRoom;
        }
        let mut data = [0; PAGE_SIZE];
        let worker = state.worker.clone();
        if worker.is_none_or(|worker| read_pages(&worker, &[sequence], &mut data).is_err()) {
            // Only a process that outlived the program whose memory it shares comes here.
            self.host.kill(space.id, "a staged page could not be read back");
            let _ = space.uffd.poison(page);
            return Answer::Done;
        }
        match space.fill(page, &data).1 {
            None => {
                pass.filled.push(Range::page(page));
                space.account().counters().rescued.fetch_add(1, Relaxed);
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
        // What was loaded ahead is looked at again when it is wanted.
        let corrupt = loaded == 0 && fault.is_some();
        if let (true, Some(error)) = (corrupt, failed) {
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
        let (mut filled, mut answer) = (0, Answer::Done);
        if corrupt && state.table.loading(&pages[..1]) == 1 {
            if let Err(error) = space.uffd.poison(first) {
                answer = Answer::from(self.after_failed_fill(space, &mut state, first, error));
            }
        } else if fit > 0 {
            let filling = space.fills.read();
            drop(state);
            let data = buffer[..fit].as_flattened();
            let (bytes, error) = space.fill(first, data);
            drop(filling);
            state = space.lock();
            filled = (bytes / PAGE) as usize;
            if let (0, Some(error)) = (filled, error) {
                answer = Answer::from(self.after_failed_fill(space, &mut state, first, error));
                if error == FillError::Exists {
                    // What is there is newer than what we hold.
                    filled = 1;
                }
            }
        }
        let mut stored_again = [false; PART];
        state.table.change(pages, |i, slot, now| {
            let still = now == PageState::Loading(slot);
            stored_again[i] = still && i >= filled;
            still.then_some(if i < filled { PageState::Resident } else { PageState::Stored(slot) })
        });
        if filled > 0 {
            space.account().counters().readahead.fetch_add((filled - usize::from(fault.is_some())) as u64, Relaxed);
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
                    space.account().counters().pgmajfault.fetch_add(1, Relaxed);
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
    space.go_on(state, &fault);
    space.account().counters().stall_usec.fetch_add(fault.since.elapsed().as_micros() as u64, Relaxed);
}

fn may_fill_ahead(space: &Space, state: &State, page: u64) -> bool {
    state.registered.contains(page) && state.table.get(page) == PageState::Resident && space.account().admit(1)
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
fn part(pages: &[(u64, Slot)]) -> usize {
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
        !self.starves && space.account().admit(pages)
    }

    fn admits_for(&self, fault: &Fault, space: &Space, pages: u64) -> bool {
        fault.needs_no_room() || self.admits(space, pages)
    }
}

/// Has a forked child get SIGBUS for these pages, whose contents are lost to it, but for those in `wiped`.
fn deny(child: &Uffd, staged: &[(u32, u64)], wiped: &RangeSet) {
    for &(_, page) in staged.iter().filter(|(_, page)| !wiped.contains(*page)) {
        // A page that is there by now is the child's own.
        let _ = child.poison(page);
    }
}

/// Whether a forked child has inherited `address` registered. What the child says meanwhile is added to `said`: were it
/// not read, the child could not go on, and what it changes itself says nothing of what it has inherited.
fn was_inherited(child: &Uffd, address: u64, said: &mut Vec<Message>, heirs: Option<&Heirs>) -> Option<bool> {
    let mut tries = 0;
    loop {
        match child.probe(address) {
            Probe::Changing => {
                // An error is told again to the thread that reads next.
                let _ = heirs::read(child, heirs, said, true);
                wait_for_program(child, &mut tries);
            }
            Probe::Gone => return None,
            probe => {
                let changed = |message: &Message| matches!(message, Message::Change(change) if change.touches(Range::page(address)));
                return (!said.iter().any(changed)).then_some(probe == Probe::Registered);
            }
        }
    }
}

/// Whether `address` lies in a mapping registered with `uffd`, if that can be told.
fn is_registered(uffd: &Uffd, address: u64) -> Option<bool> {
    match uffd.probe(address) {
        Probe::Registered => Some(true),
        Probe::NotRegistered => Some(false),
        Probe::Changing | Probe::Gone => None,
    }
}

/// The layout settles when a thread of the program, which has just been woken, has run: soon.
pub(crate) fn wait_for_program(uffd: &Uffd, tries: &mut u32) {
    const YIELDS: u32 = 50;
    *tries += 1;
    if *tries < YIELDS {
        std::thread::yield_now();
    } else {
        uffd.wait(1);
    }
}

//! The way of a page: out of a program, through the staging area, into the engine, and back.
//!
//! ```text
//!   evict   resident ──EVICT, by the worker──▶ staged ──store_staged──▶ stored (in the engine)
//!   fault   staged ──copy──▶ resident               (rescue)
//!           stored ──▶ loading ──load, copy──▶ resident
//!           never touched ──zeros──▶ resident
//! ```
//!
//! **Order of events and fills.** Each address space has one lock. Messages are read and applied, and pages are filled,
//! under it; only decompression happens outside. So whatever was read is known before anything is filled, and whatever
//! was not read makes the kernel refuse the fill (EAGAIN).
//!
//! **Lock order**: conversation of a space, state of a space, registry, engine. Nobody waits for a program while holding
//! one, but for the short wait of `drain`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::{LoadError, PAGE_SIZE, Page, Slot, Zswap};
use uzswap_proto::{MAX_BATCH_PAGES, Run, STAGING_PAGES, evict, evicted, kind};

use crate::epoch::{self, Change};
use crate::range::Range;
use crate::readahead::MAX_WINDOW;
use crate::space::{Fault, Outcome, Request, Space, State, Worker};
use crate::sys::epoll::Epoll;
use crate::sys::process;
use crate::sys::uffd::{FillError, MAIN_FEATURES, Message, Probe, Uffd};
use crate::table::{PageState, STATE_BITS};
use crate::{PAGE, layout};

/// What the pager needs from whoever runs it.
pub trait Host: Send + Sync {
    /// Asks for memory for `pages` pages to become resident; `false` makes the fault wait until reclaim has made room.
    fn admit(&self, pages: u64) -> bool;
    /// The program of `space` cannot go on with the right bytes: kill it, and say why.
    fn kill(&self, space: u64, why: &str);
}

/// What happened, since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Pages brought back from the engine because a thread wanted them.
    pub pgmajfault: AtomicU64,
    /// Pages brought back along with those.
    pub readahead: AtomicU64,
    /// Staged pages given back uncompressed because they were touched.
    pub rescued: AtomicU64,
    /// Pages filled with zeros on first touch.
    pub zero_filled: AtomicU64,
    /// Pages looked at by reclaim.
    pub pgscan: AtomicU64,
    /// Pages that left their program.
    pub pgsteal: AtomicU64,
    /// Moves refused because the page was in use or shared.
    pub busy: AtomicU64,
    /// Staged pages whose memory was given back to the system.
    pub discarded: AtomicU64,
    /// Microseconds that threads of the job waited for pages and for memory.
    pub stall_usec: AtomicU64,
}

/// How a request to a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Talk {
    /// It did this many pages.
    Answered(usize),
    /// No answer yet: stopped or starved; ask later.
    Silent,
    /// No worker, or it is gone.
    Gone,
}

/// How long a worker may take before reclaim turns to another.
const WORKER_PATIENCE: Duration = Duration::from_millis(500);

/// Pages of one EVICT: large enough to pay for the round trip, small enough for faults not to wait long.
const EVICT_PAGES: usize = 256;
const _: () = assert!(EVICT_PAGES <= MAX_BATCH_PAGES);

/// What has come to the staging area is stored in groups of this many pages.
const STORE_PAGES: usize = 256;

/// Pages taken out by one step of reclaim.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages moved out of the program into the staging area.
    pub staged: usize,
    /// Pages stored, whose memory is free now.
    pub stored: usize,
    /// Pages that the engine had no room for; they were put back.
    pub refused: usize,
}

/// The pager of one manager.
pub struct Pager {
    engine: Arc<Zswap>,
    host: Arc<dyn Host>,
    epoll: Epoll,
    registry: Mutex<Registry>,
    /// Counters.
    pub counters: Counters,
}

#[derive(Default)]
struct Registry {
    next: u64,
    spaces: HashMap<u64, Arc<Space>>,
    /// Which inherited address space a worker's thread id has shown itself in.
    beacons: HashMap<u32, u64>,
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager").finish_non_exhaustive()
    }
}

impl Pager {
    /// A pager that keeps evicted pages in `engine`.
    pub fn new(engine: Arc<Zswap>, host: Arc<dyn Host>) -> io::Result<Pager> {
        let epoll = Epoll::new()?;
        Ok(Pager { engine, host, epoll, registry: Mutex::default(), counters: Counters::default() })
    }

    /// Every address space.
    pub fn spaces(&self) -> Vec<Arc<Space>> {
        self.registry.lock().spaces.values().cloned().collect()
    }

    fn register(&self, uffd: Uffd, state: State) -> io::Result<Arc<Space>> {
        let mut registry = self.registry.lock();
        registry.next += 1;
        let space = Arc::new(Space::new(registry.next, uffd, state));
        self.epoll.add(space.as_raw_fd(), space.id)?;
        registry.spaces.insert(space.id, space.clone());
        Ok(space)
    }

    /// Takes a process under management: its worker, and its userfaultfd fresh from the kernel.
    pub fn adopt(&self, worker: Worker, uffd: Uffd) -> io::Result<Arc<Space>> {
        uffd.handshake(MAIN_FEATURES)?;
        let space = self.register(uffd, State::default())?;
        self.employ(&space, worker)?;
        Ok(space)
    }

    /// Takes a forked process under management in the address space that its worker's beacon showed, if it did.
    pub fn claim(&self, worker: Worker) -> Result<io::Result<Arc<Space>>, Worker> {
        let space = {
            let mut registry = self.registry.lock();
            let id = registry.beacons.remove(&worker.hello.tid);
            id.and_then(|id| registry.spaces.get(&id).cloned())
        };
        let Some(space) = space else { return Err(worker) };
        Ok(self.claim_space(&space, worker).map(|()| space))
    }

    fn claim_space(&self, space: &Space, worker: Worker) -> io::Result<()> {
        worker.link.send(&[kind::MAIN], Some(space.as_raw_fd()))?;
        // Mappings that a child does not inherit (MADV_DONTFORK) were registered in the parent all the same.
        let mappings = layout::manageable(worker.pid)?;
        {
            let mut state = space.lock();
            let known = std::mem::take(&mut state.registered);
            for mapping in mappings {
                if space.uffd.probe(mapping.start) == Probe::Registered {
                    known.within(mapping).into_iter().for_each(|range| state.registered.insert(range));
                }
            }
            let registered = state.registered.clone();
            for lost in registered.missing(Range::new(0, u64::MAX)) {
                state.empty(&self.engine, lost);
            }
        }
        self.employ(space, worker)
    }

    fn employ(&self, space: &Space, worker: Worker) -> io::Result<()> {
        const MOVE: u64 = 1 << 16;
        let hello = worker.hello;
        let area = |start, pages: usize| Range::sized(start, pages as u64 * PAGE);
        space.uffd.register(area(hello.staging, STAGING_PAGES))?;
        worker.trash.handshake(MOVE)?;
        worker.trash.register(area(hello.trash, uzswap_proto::TRASH_PAGES))?;
        space.lock().worker = Some(Arc::new(worker));
        Ok(())
    }

    /// Serves faults and events; returns only with an error. Any number of threads may.
    pub fn serve(&self) -> io::Result<()> {
        loop {
            let ready = self.epoll.wait(-1)?;
            for id in ready {
                let space = self.registry.lock().spaces.get(&id).cloned();
                if let Some(space) = space {
                    space.pace.called();
                    self.service_while(&space, || space.pace.spin(|| space.uffd.spin()));
                    space.pace.left();
                }
            }
        }
    }

    // ---- faults ----

    /// Reads what the userfaultfd of `space` has to say and answers it, and what was left waiting before.
    pub fn service(&self, space: &Space) {
        self.service_while(space, || false);
    }

    /// As [`Pager::service`], and goes on as long as `more` finds that there is more to come.
    ///
    /// While a thread is here the userfaultfd is reported to no other, unless several faults wait at once.
    fn service_while(&self, space: &Space, more: impl Fn() -> bool) {
        let mut tries = 0;
        loop {
            let mut loads = Vec::new();
            let mut unsettled = false;
            let news = {
                let mut state = space.lock();
                if state.gone || matches!(state.request, Some(Request::Evict { .. })) {
                    // Whoever finishes the request comes here.
                    return;
                }
                let news = self.drain(space, &mut state);
                for fault in std::mem::take(&mut state.waiting) {
                    match self.answer(space, &mut state, fault) {
                        Answer::Done => self.count_stall(fault),
                        Answer::Load(load) => loads.push(load),
                        Answer::NoRoom => state.waiting.push(fault),
                        Answer::Unsettled => {
                            unsettled = true;
                            state.waiting.push(fault);
                        }
                    }
                }
                news
            };
            if loads.len() > 1 {
                self.rearm(space);
            }
            let done = !news && !unsettled && loads.is_empty();
            for load in loads {
                self.finish_load(space, load);
            }
            if unsettled {
                wait_for_program(&space.uffd, &mut tries);
            } else if done && !more() {
                self.rearm(space);
                return;
            }
        }
    }

    fn rearm(&self, space: &Space) {
        // Fails only for a space that has been reaped.
        let _ = self.epoll.rearm(space.as_raw_fd(), space.id);
    }

    /// Reads all there is to read, applies changes of the layout and forks, and leaves the faults in `waiting`. Tells
    /// whether there was anything.
    fn drain(&self, space: &Space, state: &mut State) -> bool {
        let mut changes: Vec<Change> = Vec::new();
        let (mut news, mut tries) = (false, 0);
        loop {
            let mut messages = Vec::new();
            if let Err(error) = space.uffd.read(&mut messages) {
                self.host.kill(space.id, &format!("its memory events cannot be read: {error}"));
                state.gone = true;
                return false;
            }
            let read_nothing = messages.is_empty();
            news |= !read_nothing;
            for message in messages {
                match message {
                    Message::Fault { address, write, tid } => {
                        state.waiting.push(Fault { page: address, write, tid, since: Instant::now() });
                    }
                    Message::Change(change) => changes.push(change),
                    Message::Fork(child) => {
                        self.settle(space, state, &mut changes);
                        self.fork(space, state, child);
                    }
                }
            }
            // After a remap, what made room for it may still be unread: see `epoch`.
            let in_doubt = changes.iter().any(|change| matches!(change, Change::Remap { .. }));
            if in_doubt && space.uffd.probe(PAGE) == Probe::Changing {
                if read_nothing {
                    wait_for_program(&space.uffd, &mut tries);
                }
                continue;
            }
            self.settle(space, state, &mut changes);
            if read_nothing {
                return news;
            }
        }
    }

    fn settle(&self, space: &Space, state: &mut State, changes: &mut Vec<Change>) {
        let is_registered = |page| space.uffd.probe(page) == Probe::Registered;
        for change in epoch::order(std::mem::take(changes), is_registered) {
            state.apply(&self.engine, change);
        }
    }

    /// Takes a forked child, which has not run yet, under management.
    fn fork(&self, space: &Space, state: &mut State, child: Uffd) {
        self.flush_staging(space, state, &child);
        let inherited = state.inherit(&self.engine);
        if let Err(error) = self.register(child, inherited) {
            self.host.kill(space.id, &format!("no room for one more process: {error}"));
        }
    }

    /// Stores all staged pages at once, so that a child can share them. What the engine refuses goes to both.
    fn flush_staging(&self, space: &Space, state: &mut State, child: &Uffd) {
        let Some(worker) = state.worker.clone() else { return };
        let mut data = [0; PAGE_SIZE];
        for (sequence, page) in state.staging.iter().collect::<Vec<_>>() {
            if read_pages(&worker, &[sequence], &mut data).is_err() {
                self.host.kill(space.id, "a staged page could not be read back");
                return;
            }
            if let Ok(slot) = self.engine.swap_out(&data) {
                state.staging.clear(sequence);
                state.table.set(page, PageState::Stored(slot));
            } else if child.copy(page, &data).1.is_some_and(|error| error != FillError::Exists) {
                self.host.kill(space.id, "it forked while neither pool nor swap file had room");
            }
        }
    }

    /// Answers one fault.
    fn answer(&self, space: &Space, state: &mut State, fault: Fault) -> Answer {
        let page = fault.page;
        if state.worker.is_none() && state.beacon == Some(page) {
            self.registry.lock().beacons.insert(fault.tid, space.id);
        }
        if !state.removals.is_empty() {
            state.settle_removals();
        }
        match state.table.get(page) {
            PageState::Resident => self.answer_untouched(space, state, fault),
            PageState::Staged(sequence) => self.rescue(space, state, page, sequence),
            // The thread that loads it wakes everybody.
            PageState::Loading(_) => Answer::Done,
            PageState::Stored(_) => {
                let window = state.readahead.window(page);
                let mut pages: Vec<(u64, Slot)> = (0..window as u64)
                    .map_while(|i| match state.table.get(page + i * PAGE) {
                        PageState::Stored(slot) => Some((page + i * PAGE, slot)),
                        _ => None,
                    })
                    .collect();
                if !self.host.admit(pages.len() as u64) {
                    pages.truncate(1);
                    if !self.host.admit(1) {
                        return Answer::NoRoom;
                    }
                }
                state.readahead.brought(page, window, page + pages.len() as u64 * PAGE);
                for &(page, slot) in &pages {
                    // The load's own reference: the slot cannot come to mean another page meanwhile.
                    self.engine.dup(slot);
                    state.table.set(page, PageState::Loading(slot));
                }
                Answer::Load(Load { fault, pages })
            }
        }
    }

    /// A page that was never touched, or was discarded by the program: zeros.
    fn answer_untouched(&self, space: &Space, state: &mut State, fault: Fault) -> Answer {
        static ZEROS: [u8; MAX_WINDOW * PAGE_SIZE] = [0; MAX_WINDOW * PAGE_SIZE];
        let page = fault.page;
        let (filled, error) = if fault.write {
            if !self.host.admit(1) {
                return Answer::NoRoom;
            }
            let window = state.readahead.window(page);
            let mut pages = 1;
            while pages < window && self.may_fill_ahead(state, page + pages as u64 * PAGE) {
                pages += 1;
            }
            let result = space.uffd.copy(page, &ZEROS[..pages * PAGE_SIZE]);
            let (filled, error) = match result {
                // The window went past the end of the mapping.
                (0, Some(FillError::NotMapped)) if pages > 1 => space.uffd.copy(page, &ZEROS[..PAGE_SIZE]),
                result => result,
            };
            state.readahead.brought(page, window, page + filled.max(PAGE));
            (filled, error)
        } else {
            match space.uffd.zero(page) {
                Ok(()) => (PAGE, None),
                Err(error) => (0, Some(error)),
            }
        };
        self.counters.zero_filled.fetch_add(filled / PAGE, Relaxed);
        match error {
            Some(error) if filled == 0 => Answer::from(space.after_failed_fill(state, page, error)),
            _ => Answer::Done,
        }
    }

    fn may_fill_ahead(&self, state: &State, page: u64) -> bool {
        state.registered.contains(page) && state.table.get(page) == PageState::Resident && self.host.admit(1)
    }

    /// Gives a staged page back: it is copied, and its copy in the staging area is discarded in its turn.
    fn rescue(&self, space: &Space, state: &mut State, page: u64, sequence: u32) -> Answer {
        let mut data = [0; PAGE_SIZE];
        let worker = state.worker.clone();
        if worker.is_none_or(|worker| read_pages(&worker, &[sequence], &mut data).is_err()) {
            // Only a process that outlived the program whose memory it shares comes here.
            self.host.kill(space.id, "a staged page could not be read back");
            let _ = space.uffd.poison(page);
            return Answer::Done;
        }
        match space.uffd.copy(page, &data).1 {
            None => {
                self.counters.rescued.fetch_add(1, Relaxed);
                state.young.insert(page);
            }
            Some(error) => match space.after_failed_fill(state, page, error) {
                Outcome::Retry => return Answer::Unsettled,
                // Not mapped: an event about it is to come, which finds the page in the table.
                Outcome::Done if error != FillError::Exists => return Answer::Done,
                Outcome::Done => {}
            },
        }
        state.staging.clear(sequence);
        state.table.set(page, PageState::Resident);
        Answer::Done
    }

    /// Loads the pages of a fault and fills them in.
    fn finish_load(&self, space: &Space, load: Load) {
        with_buffer(load.pages.len(), |buffer| self.load_and_fill(space, load, buffer));
    }

    fn load_and_fill(&self, space: &Space, load: Load, buffer: &mut [Page]) {
        let Load { fault, pages } = load;
        let mut loaded = 0;
        let mut corrupt = false;
        for (&(_, slot), data) in pages.iter().zip(buffer.iter_mut()) {
            match self.engine.load(slot, data) {
                Ok(_) => loaded += 1,
                Err(error) => {
                    corrupt = loaded == 0;
                    if corrupt {
                        let what = match error {
                            LoadError::Corrupt => "is damaged".to_owned(),
                            LoadError::Io(error) => format!("could not be read from the swap file: {error}"),
                        };
                        eprintln!("uzswap: error: page {:#x} {what}; its program gets SIGBUS", fault.page);
                    }
                    break;
                }
            }
        }
        let mut state = space.lock();
        // What was unmapped, discarded or moved meanwhile is not filled; its event has been applied.
        let still = |state: &State, (page, slot): (u64, Slot)| state.table.get(page) == PageState::Loading(slot);
        let fit = pages.iter().take(loaded).take_while(|&&page| still(&state, page)).count();
        let (mut filled, mut answer) = (0, Answer::Done);
        if corrupt && still(&state, pages[0]) {
            if let Err(error) = space.uffd.poison(fault.page) {
                answer = Answer::from(space.after_failed_fill(&mut state, fault.page, error));
            }
        } else if fit > 0 {
            let (bytes, error) = space.uffd.copy(fault.page, buffer[..fit].as_flattened());
            filled = (bytes / PAGE) as usize;
            if let (0, Some(error)) = (filled, error) {
                answer = Answer::from(space.after_failed_fill(&mut state, fault.page, error));
                if error == FillError::Exists {
                    // What is there is newer than what we hold.
                    filled = 1;
                }
            }
        } else {
            space.uffd.wake(Range::page(fault.page));
        }
        for (i, &(page, slot)) in pages.iter().enumerate() {
            if still(&state, (page, slot)) {
                if i < filled {
                    state.table.set(page, PageState::Resident);
                    self.engine.invalidate(slot);
                } else {
                    state.table.set(page, PageState::Stored(slot));
                }
            }
            self.engine.invalidate(slot);
        }
        if let Answer::Unsettled = answer {
            state.waiting.push(fault);
            return;
        }
        // Another thread may have come for a page that was loading and is stored again.
        for &(page, _) in &pages[filled.max(1).min(pages.len())..] {
            space.uffd.wake(Range::page(page));
        }
        if filled > 0 {
            state.young.insert(fault.page);
            self.counters.pgmajfault.fetch_add(1, Relaxed);
            self.counters.readahead.fetch_add(filled as u64 - 1, Relaxed);
        }
        self.count_stall(fault);
    }

    fn count_stall(&self, fault: Fault) {
        self.counters.stall_usec.fetch_add(fault.since.elapsed().as_micros() as u64, Relaxed);
    }

    // ---- reclaim ----

    /// Registers what is mapped and not yet watched, so that it can be evicted and so that fresh pages are seen as they
    /// are touched. Gives the bytes under management.
    pub fn refresh(&self, space: &Space) -> io::Result<u64> {
        let Some(worker) = space.worker() else { return Ok(0) };
        let mappings = layout::manageable(worker.pid)?;
        let mut state = space.lock();
        if state.gone || state.request.is_some() {
            return Ok(0);
        }
        self.drain(space, &mut state);
        // From the first registered page on, children have to say whose they are.
        space.uffd.register(Range::page(worker.hello.beacon))?;
        state.beacon = Some(worker.hello.beacon);
        let mut managed = 0;
        for mapping in mappings {
            for part in outside(mapping, worker.region()) {
                managed += part.len();
                for fresh in state.registered.missing(part) {
                    let continues =
                        state.registered.contains(fresh.start.wrapping_sub(1)) || state.registered.contains(fresh.end);
                    if fresh.len() < layout::SMALLEST && !continues {
                        continue;
                    }
                    // Refused where another userfaultfd watches, or where the mapping has changed meanwhile.
                    if space.uffd.register(fresh).is_ok() {
                        // What is not watched has not been evicted: whatever is known of it is of something else.
                        state.empty(&self.engine, fresh);
                        state.registered.insert(fresh);
                    }
                }
            }
        }
        drop(state);
        self.service(space);
        Ok(managed)
    }

    /// Moves about `pages` pages, the oldest as far as is known, out of the program into its staging area. A page that
    /// was brought back by a fault since reclaim last came by is let go once.
    pub fn evict(&self, space: &Space, pages: usize) -> io::Result<Progress> {
        let _conversation = space.conversation.lock();
        let Some(worker) = self.resume(space) else { return Ok(Progress::default()) };
        let (hand, ranges) = {
            let mut state = space.lock();
            state.settle_removals();
            (state.hand, state.registered.iter().collect::<Vec<_>>())
        };
        let mut progress = Progress::default();
        // Once round from the hand: what lies after it, then what lies before.
        let after = ranges.iter().map(|r| r.intersect(Range::new(hand, u64::MAX)));
        let before = ranges.iter().map(|r| r.intersect(Range::new(0, hand)));
        for range in after.chain(before).filter(|r| !r.is_empty()) {
            let mut at = range.start;
            while at < range.end {
                if progress.staged >= pages {
                    space.lock().hand = at;
                    return Ok(progress);
                }
                if space.lock().staging.len() + EVICT_PAGES > STAGING_PAGES {
                    return Ok(progress);
                }
                let (runs, end) = worker.pagemap.present(Range::new(at, range.end), EVICT_PAGES)?;
                at = end;
                match self.evict_runs(space, &worker, &runs, true)? {
                    Some(staged) => progress.staged += staged,
                    None => return Ok(progress),
                }
            }
        }
        Ok(progress)
    }

    /// Moves all of `range` out and into the engine, now.
    pub fn page_out(&self, space: &Space, range: Range) -> io::Result<Progress> {
        let mut total = Progress::default();
        let parts = space.lock().registered.within(range);
        for part in parts {
            let mut at = part.start;
            while at < part.end {
                {
                    let _conversation = space.conversation.lock();
                    let Some(worker) = self.resume(space) else { return Ok(total) };
                    space.lock().settle_removals();
                    let (runs, end) = worker.pagemap.present(Range::new(at, part.end), EVICT_PAGES)?;
                    at = end;
                    let Some(staged) = self.evict_runs(space, &worker, &runs, false)? else { return Ok(total) };
                    total.staged += staged;
                }
                let progress = self.store_staged(space, 0)?;
                total.stored += progress.stored;
                total.refused += progress.refused;
            }
        }
        Ok(total)
    }

    /// Makes what is in `range` the first that reclaim takes.
    pub fn make_cold(&self, space: &Space, range: Range) {
        let mut state = space.lock();
        let parts = state.registered.within(range);
        if let Some(first) = parts.first() {
            state.hand = first.start;
        }
        for part in parts {
            state.young.remove_range(part);
        }
    }

    /// Never evicts from `range` again, and brings back what was.
    pub fn exclude(&self, space: &Space, range: Range) {
        space.lock().excluded.insert(range);
        // Fails only when the program is gone.
        let _ = self.store_staged(space, 0);
        let mut pages = Vec::new();
        {
            let mut state = space.lock();
            for (page, page_state) in state.table.list(range) {
                if let PageState::Stored(slot) = page_state {
                    self.engine.dup(slot);
                    state.table.set(page, PageState::Loading(slot));
                    pages.push((page, slot));
                }
            }
        }
        for page in pages {
            let fault = Fault { page: page.0, write: false, tid: 0, since: Instant::now() };
            self.finish_load(space, Load { fault, pages: vec![page] });
        }
        self.service(space);
    }

    /// Hears the workers that were silent when they were last asked, so that faults do not wait for them needlessly.
    pub fn hear_late_answers(&self) {
        for space in self.spaces() {
            // Whoever is in conversation hears the answer himself.
            let Some(_conversation) = space.conversation.try_lock() else { continue };
            let late = space.lock().request.is_some();
            if late {
                self.resume(&space);
            }
        }
    }

    /// The worker, ready for a request: answers that were late are taken first.
    fn resume(&self, space: &Space) -> Option<Arc<Worker>> {
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
    fn evict_runs(
        &self,
        space: &Space,
        worker: &Worker,
        runs: &[Range],
        spare_young: bool,
    ) -> io::Result<Option<usize>> {
        let pages: Vec<u64> = runs.iter().flat_map(|run| (run.start..run.end).step_by(PAGE_SIZE)).collect();
        self.counters.pgscan.fetch_add(pages.len() as u64, Relaxed);
        let (mut staged, mut retry) = (0, pages);
        // A second round for pages that a fork left shared: touched for writing, they become this process's alone.
        for touch in [0, evict::TOUCH] {
            while !retry.is_empty() {
                let taken = retry.len().min(EVICT_PAGES);
                let batch: Vec<u64> = retry.drain(..taken).collect();
                match self.evict_batch(space, worker, batch, touch, spare_young && touch == 0)? {
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
        spare_young: bool,
    ) -> io::Result<Option<usize>> {
        let words = {
            let mut state = space.lock();
            self.drain(space, &mut state);
            if state.gone {
                return Ok(None);
            }
            pages.retain(|&page| self.may_go(&mut state, page, spare_young));
            let (first, room) = state.staging.reserve(pages.len());
            // What has no room stays for the next time.
            pages.truncate(room);
            if pages.is_empty() {
                drop(state);
                self.service(space);
                return Ok(Some(0));
            }
            let mut words = vec![kind::EVICT, worker.staging_page(first), touch];
            words.extend(runs_of(&pages).into_iter().map(|run| run.0));
            state.request = Some(Request::Evict { first, pages });
            words
        };
        match self.talk(space, worker, &words) {
            Talk::Answered(moved) => Ok(Some(moved)),
            Talk::Silent | Talk::Gone => Ok(None),
        }
    }

    /// Whether a present page may be evicted now.
    fn may_go(&self, state: &mut State, page: u64, spare_young: bool) -> bool {
        if !state.is_evictable(page) || state.young.remove(page) && spare_young {
            return false;
        }
        match state.table.get(page) {
            PageState::Resident => true,
            // Being there, it is newer than what a fork left in the table.
            old @ PageState::Stored(_) => {
                state.table.set(page, PageState::Resident);
                state.drop_contents(&self.engine, old);
                true
            }
            PageState::Staged(_) | PageState::Loading(_) => false,
        }
    }

    /// Stores staged pages, oldest first, until `keep` or fewer are left.
    pub fn store_staged(&self, space: &Space, keep: usize) -> io::Result<Progress> {
        let _conversation = space.conversation.lock();
        let mut progress = Progress::default();
        while let Some(worker) = self.resume(space) {
            let run: Vec<(u32, Option<u64>)> = {
                let state = space.lock();
                let surplus = state.staging.len().saturating_sub(keep);
                let count = state.staging.oldest_run(surplus.min(STORE_PAGES));
                (0..count).map(|i| state.staging.sequence(i)).map(|s| (s, state.staging.get(s))).collect()
            };
            if run.is_empty() {
                break;
            }
            let sequences: Vec<u32> = run.iter().filter(|(_, page)| page.is_some()).map(|(s, _)| *s).collect();
            let (stored, refused) = with_buffer(sequences.len(), |data| {
                read_pages(&worker, &sequences, data.as_flattened_mut())?;
                io::Result::Ok(self.store_pages(space, &sequences, data))
            })?;
            progress.stored += stored;
            progress.refused += refused;
            let done = {
                let mut state = space.lock();
                // A page that could neither be stored nor put back stays, and so does what came after it.
                let done = run.iter().take_while(|(sequence, _)| state.staging.get(*sequence).is_none()).count();
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

    /// Gives pages to the engine; gives how many it took and how many it refused.
    fn store_pages(&self, space: &Space, sequences: &[u32], data: &[Page]) -> (usize, usize) {
        let slots: Vec<Option<Slot>> = data.iter().map(|page| self.engine.swap_out(page).ok()).collect();
        let (mut stored, mut refused) = (0, 0);
        let mut state = space.lock();
        for ((&sequence, slot), data) in sequences.iter().zip(slots).zip(data) {
            // While we stored it, the page may have been rescued, discarded, unmapped or stored by a fork, or have
            // moved; the ring entry tells, because it is only ever changed under this lock together with the table.
            match (state.staging.get(sequence), slot) {
                (Some(page), Some(slot)) => {
                    state.staging.clear(sequence);
                    state.table.set(page, PageState::Stored(slot));
                    stored += 1;
                }
                (Some(page), None) => {
                    refused += 1;
                    match space.uffd.copy(page, data).1 {
                        None | Some(FillError::Exists) => {
                            state.staging.clear(sequence);
                            state.table.set(page, PageState::Resident);
                        }
                        // Stays staged.
                        Some(_) => {}
                    }
                }
                (None, Some(slot)) => self.engine.invalidate(slot),
                (None, None) => {}
            }
        }
        (stored, refused)
    }

    /// Sends a request to the worker, which has been recorded in the state, and applies the answer.
    fn talk(&self, space: &Space, worker: &Worker, words: &[u64]) -> Talk {
        match worker.link.send(words, None) {
            Ok(()) => self.listen(space, worker, WORKER_PATIENCE),
            Err(_) => self.lose_worker(space),
        }
    }

    /// The worker is gone, or talks nonsense. If its program still lives, what is staged is lost with it.
    fn lose_worker(&self, space: &Space) -> Talk {
        let mut state = space.lock();
        let request = state.request.take();
        if request.is_some() || state.staging.live() > 0 {
            self.host.kill(space.id, "its worker is gone");
        }
        // Pages may be on their way that pass for untouched: nothing is filled any more, whatever becomes of the kill.
        state.gone |= matches!(request, Some(Request::Evict { .. }));
        state.worker = None;
        drop(state);
        self.service(space);
        Talk::Gone
    }

    fn listen(&self, space: &Space, worker: &Worker, patience: Duration) -> Talk {
        let words = match worker.link.receive(patience) {
            Ok(None) => return Talk::Silent,
            Ok(Some(received)) => received.words,
            Err(_) => return self.lose_worker(space),
        };
        // One lock from the end of the request to the last page of its answer: in between, a page that has gone would
        // pass for one that was never touched.
        let mut state = space.lock();
        let done = match (words.first(), state.request.take()) {
            (Some(&kind::EVICTED), Some(Request::Evict { first, pages })) => {
                self.take_evicted(&mut state, first, &pages, &words)
            }
            (Some(&kind::DISCARDED), Some(Request::Discard { pages })) => {
                state.staging.discard(pages);
                self.counters.discarded.fetch_add(pages as u64, Relaxed);
                pages
            }
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
    fn take_evicted(&self, state: &mut State, first: u32, pages: &[u64], words: &[u64]) -> usize {
        let mut moved = 0;
        for (i, &page) in pages.iter().enumerate() {
            match evicted::get(words, i) {
                evicted::MOVED => {
                    let sequence = first.wrapping_add(i as u32) & ((1 << STATE_BITS) - 1);
                    state.staging.fill(sequence, page);
                    state.table.set(page, PageState::Staged(sequence));
                    moved += 1;
                }
                status if i32::from(status) == libc::EBUSY => state.busy.push(page),
                _ => {}
            }
        }
        self.counters.pgsteal.fetch_add(moved as u64, Relaxed);
        self.counters.busy.fetch_add(state.busy.len() as u64, Relaxed);
        moved
    }

    // ---- the end ----

    /// Forgets address spaces that no process uses any more; gives their numbers.
    ///
    /// A userfaultfd is closed only then: were it closed earlier, evicted pages would read as zeros.
    pub fn reap(&self) -> Vec<u64> {
        let mut dead = Vec::new();
        for space in self.spaces() {
            let mut state = space.lock();
            if state.worker.is_none() && space.uffd.probe(PAGE) == Probe::Gone {
                state.release(&self.engine);
                dead.push(space.id);
            }
        }
        if !dead.is_empty() {
            let mut registry = self.registry.lock();
            for id in &dead {
                if let Some(space) = registry.spaces.remove(id) {
                    self.epoll.remove(space.as_raw_fd());
                }
                registry.beacons.retain(|_, space| space != id);
            }
        }
        dead
    }

    /// Tells the worker of `space` that its program has ended or turned to another.
    pub fn dismiss(&self, space: &Space) {
        let _conversation = space.conversation.lock();
        let late = {
            let state = space.lock();
            state.worker.clone().filter(|_| state.request.is_some())
        };
        if let Some(worker) = late {
            self.listen(space, &worker, WORKER_PATIENCE);
        }
        space.lock().worker = None;
    }
}

/// What became of a fault.
enum Answer {
    Done,
    Load(Load),
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

/// A fault and the pages to bring for it, the first its own.
struct Load {
    fault: Fault,
    pages: Vec<(u64, Slot)>,
}

/// Lends a buffer of `pages` pages that stays with the thread: none is allocated or cleared for each fault.
fn with_buffer<T>(pages: usize, work: impl FnOnce(&mut [Page]) -> T) -> T {
    thread_local! {
        static BUFFER: RefCell<Vec<Page>> = const { RefCell::new(Vec::new()) };
    }
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < pages {
            buffer.resize(pages, [0; PAGE_SIZE]);
        }
        work(&mut buffer[..pages])
    })
}

/// Reads staged pages.
fn read_pages(worker: &Worker, sequences: &[u32], data: &mut [u8]) -> io::Result<()> {
    let mut ranges: Vec<Range> = Vec::new();
    for &sequence in sequences {
        let page = worker.staging_page(sequence);
        match ranges.last_mut() {
            Some(last) if last.end == page => last.end += PAGE,
            _ => ranges.push(Range::page(page)),
        }
    }
    let read = process::read_memory(worker.pid, &ranges, data)?;
    if read < data.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

/// The layout settles when a thread of the program, which has just been woken, has run: soon.
fn wait_for_program(uffd: &Uffd, tries: &mut u32) {
    const YIELDS: u32 = 50;
    *tries += 1;
    if *tries < YIELDS {
        std::thread::yield_now();
    } else {
        uffd.wait(1);
    }
}

/// Joins neighbouring pages.
fn runs_of(pages: &[u64]) -> Vec<Run> {
    pages.chunk_by(|a, b| a + PAGE == *b).map(|run| Run::new(run[0], run.len())).collect()
}

/// The parts of `range` that are not in `hole`.
fn outside(range: Range, hole: Range) -> impl Iterator<Item = Range> {
    [Range::new(range.start, range.end.min(hole.start)), Range::new(range.start.max(hole.end), range.end)]
        .into_iter()
        .filter(|part| !part.is_empty())
}

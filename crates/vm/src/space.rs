//! One address space under management: what the manager knows about it.
//!
//! # Invariants
//! - A page is evicted only from a range that is in `registered` and that the worker has found registered right before and
//!   after the move. `registered` is what the events tell; what changes without one is found by asking (`watched`).
//! - While an EVICT is pending nothing is read from the userfaultfd. A change of the layout that begins meanwhile stays
//!   unread, so the kernel refuses the rest of the moves. So a page that was moved was there, at the address that we know,
//!   and nothing fills that address until the answer has been recorded.
//! - A page is `Staged(n)` if and only if entry `n` of the staging ring names it.
//! - A page that is `Stored` holds one reference on its slot; of one that is `Loading` the load holds it, and gives it back if
//!   the page is to be stored again.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};
use uzswap_engine::{Page, Slot, Zswap};
use uzswap_proto::{Hello, Nonce, STAGING_PAGES, kind};

use crate::PAGE;
use crate::change::Change;
use crate::exit_words::ExitWords;
use crate::heat::Heat;
use crate::heirs::{Heirs, MOMENT};
use crate::huge::HugePages;
use crate::layout;
use crate::lone_child::LoneChild;
use crate::noisy::Noise;
use crate::owner::{Counted, LEFT_ALONE, Owner};
use crate::pager::{Account, Counters};
use crate::range::{Range, RangeSet};
use crate::removal::Removals;
use crate::staging::Staging;
use crate::swapin::Readahead;
use crate::sys::link::Link;
use crate::sys::pagemap::Pagemap;
use crate::sys::process::{self, Memory, PidFd, Program};
use crate::sys::tether::Tether;
use crate::sys::thread::{OneProcessor, Processor};
use crate::sys::uffd::{FillError, Message, Uffd};
use crate::table::{PageState, PageTable};
use crate::traffic::Traffic;
use crate::visit::{self, Visit};

/// An address space.
pub struct Space {
    /// Its number, never used again.
    pub id: u64,
    pub(crate) uffd: Uffd,
    account: RwLock<Arc<dyn Account>>,
    /// The user that it belongs to.
    pub owner: Arc<Owner>,
    _counted: Counted,
    /// A thread is stuck here: no other is to come ([`crate::visit`]).
    blocked: AtomicBool,
    /// When a thread was last stuck in stopping the process by ptrace.
    resisted: Mutex<Option<Instant>>,
    state: Mutex<State>,
    /// Held by whoever fills pages without the lock of the state, taken under that; waited for before messages are read. So a page
    /// is filled as of the last message that was read, or not at all.
    pub(crate) fills: RwLock<()>,
    pub(crate) pace: Pace,
    pub(crate) noise: Noise,
    /// This is a forked child whose first fault is answered only when it has been tied ([`crate::heirs`]).
    pub(crate) awaits_tie: AtomicBool,
    /// Nothing is evicted, for a debugger or a core dump reads the memory ([`crate::pager::Pager::hold_in`]).
    pub(crate) held_in: AtomicBool,
    /// Bytes that were brought back for that; they are not charged.
    pub(crate) uncharged: AtomicU64,
    /// What was filled and discarded.
    pub traffic: Traffic,
    /// Pages that were wanted again soon after they had been taken.
    missed: AtomicU64,
    /// How often the worker did not answer in time.
    pub(crate) silences: AtomicU64,
    /// Held by whoever talks to the worker; before `state` in the lock order.
    pub(crate) conversation: Mutex<()>,
    /// What ties the program to this manager's life, once something of it may be evicted.
    tether: Mutex<Option<Tether>>,
    /// The worker whose areas threads of the manager read. Known before the worker is believed; readable without the state.
    areas_of: Mutex<Weak<Worker>>,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Space").field("id", &self.id).finish_non_exhaustive()
    }
}

impl AsRawFd for Space {
    fn as_raw_fd(&self) -> RawFd {
        self.uffd.as_raw_fd()
    }
}

/// The worker of an address space.
#[derive(Debug)]
pub struct Worker {
    /// The connection to it.
    pub link: Link,
    /// Its process id; its memory is the program's.
    pub pid: i32,
    /// The program's process id, as long as [`Worker::process`] has not ended.
    pub program: i32,
    /// A handle on the program's process.
    pub process: Arc<PidFd>,
    /// That memory.
    pub memory: Memory,
    /// Which of the program's pages are present.
    pub pagemap: Arc<Pagemap>,
    /// Where its areas are.
    pub hello: Hello,
    /// Held so that the trash area stays watched.
    pub trash: Uffd,
    /// Where it runs while it is talked with.
    pub processor: Processor,
}

/// A worker that is let go is told so; one that hears nothing and finds its connection closed kills its program.
impl Drop for Worker {
    fn drop(&mut self) {
        // If it is gone already, all the better.
        let _ = self.link.send(&[kind::EXIT], None);
    }
}

impl Worker {
    /// Its program.
    pub(crate) fn program(&self) -> Program {
        Program::new(self.program, self.process.clone())
    }

    /// Whether its program has this memory, now. What is found in memory that is shared with others is no proof.
    pub fn is_of_program(&self) -> bool {
        let is_private = || process::has_private(self.program, self.hello.staging_proof()).unwrap_or(false);
        self.memory.is_of(self.program).unwrap_or(false) && is_private()
    }

    /// Has the worker go on where the calling thread runs, as long as this lives.
    pub(crate) fn together(&self) -> Option<OneProcessor> {
        // The number of a worker that has ended may be another process's.
        OneProcessor::with(self.pid, &self.processor, || self.memory.is_of(self.pid).unwrap_or(false))
    }

    /// The address of the page of the staging area that `sequence` stands for.
    pub(crate) fn staging_page(&self, sequence: u32) -> u64 {
        self.hello.staging + u64::from(sequence) % STAGING_PAGES as u64 * PAGE
    }

    /// The staging area, with its proof page.
    pub(crate) fn staging(&self) -> Range {
        Range::new(self.hello.staging, self.hello.staging_proof() + PAGE)
    }

    /// The place of a page in the staging area, if it lies there.
    pub(crate) fn staging_place(&self, page: u64) -> Option<usize> {
        self.staging().contains(page).then(|| ((page - self.hello.staging) / PAGE) as usize)
    }

    /// The agent's region: nothing of the program's.
    pub(crate) fn region(&self) -> Range {
        Range::sized(self.hello.region, self.hello.region_len)
    }
}

/// A thread of the program that waits for a page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub page: u64,
    pub write: bool,
    /// Which thread; 0 if the manager wants the page back ([`State::want_back`], `release`).
    pub tid: u32,
    pub since: Instant,
    /// It was found to wait for memory, and is among `State::stalled`.
    pub stalls: bool,
    /// The thread does not sleep while it waits: it is answered though its process rests.
    pub insists: bool,
}

impl Fault {
    /// Tells that no thread waits. It is answered even if there is no room: the kernel wants the page when a thread ends, and does not
    /// wait for it.
    pub fn is_the_managers(&self) -> bool {
        self.tid == 0
    }
}

/// What a worker has been asked for and not yet answered.
#[derive(Debug)]
pub(crate) enum Request {
    /// Move these pages into the staging area, from entry `first` on.
    Evict { first: u32, pages: Vec<u64> },
    /// Free this many pages at the head of the staging ring.
    Discard { pages: usize },
    /// Make a huge page.
    Collapse,
}

/// Everything that changes about an address space.
#[derive(Default)]
pub(crate) struct State {
    pub table: PageTable,
    /// What is registered with the userfaultfd and may be evicted.
    pub registered: RangeSet,
    /// Whether guard pages were ever found in this memory.
    pub has_guards: bool,
    /// Before this, memory is not searched for guard pages again.
    pub search_guards_at: Option<Instant>,
    /// Before this, all of `registered` is not asked about again.
    pub look_over_at: Option<Instant>,
    /// What is never evicted because a forked child would find it empty.
    pub excluded: RangeSet,
    /// What is never evicted because the kernel needs it when a thread ends.
    pub exit_words: ExitWords,
    /// Whom reclaim passes over.
    pub heat: Heat,
    pub huge: HugePages,
    pub worker: Option<Arc<Worker>>,
    /// The program, as its worker has proven it. Known also when the worker is gone.
    pub program: Option<Program>,
    /// A forked child that has no worker, as far as it is known which process that is; and how often it was looked for.
    pub lone_child: Option<LoneChild>,
    pub looks_for_process: u32,
    /// Where a child of this process asks which userfaultfd is its own.
    pub beacon: Option<u64>,
    /// What a child was told there that has no worker yet.
    pub nonce: Option<Nonce>,
    /// What holds the userfaultfds of children that have no worker: of this program's tether, or inherited.
    pub heirs: Option<Arc<Heirs>>,
    /// When events were last read; `None` if the layout was found to be changing since.
    pub read_at: Option<Instant>,
    /// Since when the kernel has refused to fill because the layout is changing; `None` if a fault was answered since, or waits for memory.
    pub changing_since: Option<Instant>,
    /// Whether this is a forked child of which no fault has been answered.
    pub is_new: bool,
    pub staging: Staging,
    /// The program has discarded, moved or unmapped what waited in the staging area.
    pub has_lost_places: bool,
    pub request: Option<Request>,
    pub removals: Removals,
    /// Messages that were read before there was anybody to hear them.
    pub unheard: Vec<Message>,
    /// How many epochs of events have been applied.
    pub epoch: u64,
    /// Faults read but not answered: they are new, or wait for the layout to settle.
    pub waiting: Vec<Fault>,
    /// Those that wait for memory, in the order in which they came.
    pub starved: VecDeque<Fault>,
    /// Its threads are to get no memory for a while; and those who have come for some since.
    pub rests: bool,
    pub resting: Vec<Fault>,
    /// The threads that wait for memory: for a page that was taken from them, or for the limit.
    pub stalled: Vec<u32>,
    /// Whom this was told.
    pub stall_told: Option<Arc<dyn Account>>,
    pub readahead: Readahead,
    /// Where reclaim goes on.
    pub hand: u64,
    /// Pages whose move was refused as busy in the last round.
    pub busy: Vec<u64>,
    /// The address space is gone; nothing more is to be done.
    pub gone: bool,
}

impl Space {
    pub(crate) fn new(id: u64, uffd: Uffd, state: State, account: Arc<dyn Account>, owner: Arc<Owner>) -> Space {
        let (account, state) = (RwLock::new(account), Mutex::new(state));
        let _counted = Counted::new(&owner);
        let (blocked, resisted, fills, pace, noise, held_in, uncharged, traffic, missed) = Default::default();
        let (silences, conversation, tether, awaits_tie, areas_of) = Default::default();
        Space {
            id,
            uffd,
            account,
            owner,
            _counted,
            blocked,
            resisted,
            state,
            fills,
            pace,
            noise,
            awaits_tie,
            held_in,
            uncharged,
            traffic,
            missed,
            silences,
            conversation,
            tether,
            areas_of,
        }
    }

    /// Marks the calling thread as busy here, as long as the result lives. Whatever calls the kernel on this address space, or locks
    /// its state, is inside a visit.
    pub fn visit(&self) -> Visit {
        Visit::of_space(self.id)
    }

    /// Marks this as blocked, or no longer so; tells whether that is new.
    pub fn set_blocked(&self, blocked: bool) -> bool {
        let before = self.blocked.swap(blocked, Relaxed);
        match (before, blocked) {
            (false, true) => self.owner.begin_block(),
            (true, false) => self.owner.end_block(),
            _ => {}
        }
        before != blocked
    }

    /// Whether no thread is to visit this: one that has done so is stuck here, or too many are stuck in others of its owner.
    pub fn is_shunned(&self) -> bool {
        self.blocked.load(Relaxed) || self.owner.is_shunned()
    }

    /// Notes that so many changes were read, and the layout has not settled.
    pub(crate) fn note_changes(&self, count: usize) {
        if !self.owner.is_trusted() {
            self.noise.note(count, Instant::now());
        }
    }

    /// Reads which mappings of process `pid` can be managed. `None` if there are so many that this has become noisy by it.
    pub(crate) fn manageable(&self, pid: i32) -> io::Result<Option<Vec<Range>>> {
        if self.owner.is_trusted() {
            return layout::manageable(pid).map(Some);
        }
        let limit = if self.is_noisy() { u64::MAX } else { layout::FEW };
        let found = layout::manageable_within(pid, limit)?;
        self.noise.note_mappings(found.as_ref().is_none_or(|(_, len)| *len > layout::FEW));
        Ok(found.map(|(mappings, _)| mappings))
    }

    /// Returns whether the work on this is left to threads that do nothing else.
    pub fn is_noisy(&self) -> bool {
        self.noise.is_noisy()
    }

    /// Returns whether another thread holds the locks that an eviction needs, and does not give them back at once.
    pub fn is_busy(&self) -> bool {
        const PATIENCE: Duration = Duration::from_millis(2);
        self.conversation.try_lock_for(PATIENCE).is_none() || self.try_lock().is_none()
    }

    /// The user of the job that this belongs to.
    pub fn user(&self) -> Arc<Owner> {
        Owner::user_of(&self.owner)
    }

    /// Has the userfaultfd reported only when there is something to read. Its process can undo this, and costs the thread that serves it a
    /// visit each time: so each time counts as a change.
    pub(crate) fn make_nonblocking(&self) {
        self.uffd.make_nonblocking();
        self.note_changes(1);
    }

    /// Notes that a thread was stuck in stopping the process.
    pub fn note_resistance(&self) {
        *self.resisted.lock() = Some(Instant::now());
        self.owner.note_resistance();
    }

    /// Returns whether threads are not to stop the process by ptrace: a thread was stuck in that not long ago, with this process or with
    /// another of its user, or the process is shunned.
    pub fn resists(&self) -> bool {
        self.is_shunned() || self.owner.resists() || self.resisted.lock().is_some_and(|at| at.elapsed() < LEFT_ALONE)
    }

    /// Notes that threads of the manager are going to read the areas of `worker`.
    pub(crate) fn note_areas_of(&self, worker: &Arc<Worker>) {
        *self.areas_of.lock() = Arc::downgrade(worker);
    }

    /// Returns the place of a page in the staging area, if it lies there.
    pub(crate) fn staging_place(&self, state: &State, page: u64) -> Option<usize> {
        match &state.worker {
            Some(worker) => worker.staging_place(page),
            // The area of one that is about to be taken on is watched already.
            None => self.areas_of.lock().upgrade()?.staging_place(page),
        }
    }

    /// Denies what is missing in the worker's areas: threads that read there, and those that wait there, get an error.
    ///
    /// The manager watches these areas itself. A page that the worker has not put there, or has taken away, is waited for by the thread
    /// that reads it, maybe with the state locked, so that no other thread can answer. The end of the process does not end the
    /// wait: the reader keeps the memory alive. To be called when the process has ended, by a thread that may wait for the lock
    /// of the address space: nothing else is locked here.
    pub fn deny_areas(&self) {
        let Some(worker) = self.areas_of.lock().upgrade() else { return };
        let hello = &worker.hello;
        // A claim that is not proven may have given one in the place of the other. What is present stays.
        for uffd in [&self.uffd, &worker.trash] {
            let staging = (worker.staging().start..worker.staging().end).step_by(PAGE as usize);
            staging.chain([hello.trash_proof()]).all(|page| uffd.poison(page) != Err(FillError::Gone));
        }
    }

    /// Ties the program of `worker` to the life of this manager, if that is not done yet. To be called before the worker is
    /// told to evict. The worker obeys in order, so there is no answer to wait for.
    pub(crate) fn tie(&self, worker: &Worker) {
        let heirs = {
            let mut tether = self.tether.lock();
            if tether.is_some() {
                return;
            }
            // Without a descriptor to spare, the guards that are processes remain. A program that has ended needs none.
            *tether = Tether::new(&worker.process, worker.program, worker.link.user())
                .and_then(|tether| worker.link.send(&[kind::TETHER], Some(tether.far())).map(|()| tether))
                .ok();
            tether.as_ref().map(|tether| Arc::new(Heirs::new(tether.hold().clone(), worker)))
        };
        if heirs.is_some() {
            let inherited = std::mem::replace(&mut self.lock().heirs, heirs);
            inherited.iter().for_each(|heirs| heirs.worker_told(worker.program));
        }
    }

    /// Whether something of the program may have been evicted, here or before it was forked.
    pub fn is_tied(&self) -> bool {
        self.tether.lock().is_some()
    }

    /// Lets the program live without this manager.
    pub(crate) fn untie(&self) {
        *self.tether.lock() = None;
        self.lock().heirs = None;
    }

    /// Who pays for what becomes resident and for what is stored from now on.
    pub fn account(&self) -> Arc<dyn Account> {
        self.account.read().clone()
    }

    /// Passes the account to `act`. Takes no counted reference: all threads that serve faults would write to its one counter.
    pub(crate) fn with_account<T>(&self, act: impl FnOnce(&dyn Account) -> T) -> T {
        act(self.account.read().as_ref())
    }

    /// Adds `by` to a counter of the account.
    pub(crate) fn count(&self, counter: impl FnOnce(&Counters) -> &AtomicU64, by: u64) {
        if by > 0 {
            self.with_account(|account| counter(account.counters()).fetch_add(by, Relaxed));
        }
    }

    /// Makes another pay. What is stored stays charged to whom it was stored for.
    pub fn charge_to(&self, account: Arc<dyn Account>) {
        *self.account.write() = account;
    }

    /// A fault is found to wait for memory.
    pub(crate) fn stall(&self, state: &mut State, fault: &mut Fault) {
        if !std::mem::replace(&mut fault.stalls, true) {
            state.stalled.push(fault.tid);
            self.tell_stall(state);
        }
    }

    /// A fault is answered.
    pub(crate) fn go_on(&self, state: &mut State, fault: &Fault) {
        if fault.stalls
            && let Some(place) = state.stalled.iter().position(|tid| *tid == fault.tid)
        {
            state.stalled.swap_remove(place);
            self.tell_stall(state);
        }
    }

    /// Nobody is left who could go on.
    pub(crate) fn forget_stalls(&self, state: &mut State) {
        state.stalled.clear();
        self.tell_stall(state);
    }

    /// Tells the account whether anybody stalls. Whoever was told of the beginning is told of the end, though another may pay by
    /// then.
    fn tell_stall(&self, state: &mut State) {
        let account = if state.stalled.is_empty() { None } else { Some(self.account()) };
        let told = state.stall_told.as_ref();
        if told.map(Arc::as_ptr).map(<*const _>::cast::<()>) == account.as_ref().map(Arc::as_ptr).map(<*const _>::cast)
        {
            return;
        }
        account.iter().for_each(|account| account.stall());
        let before = std::mem::replace(&mut state.stall_told, account);
        before.iter().for_each(|account| account.go_on());
    }

    /// The threads that wait for memory at this moment, by their numbers as the program knows them. None where the state is not to
    /// be had for the moment.
    pub fn stalled(&self) -> Vec<u32> {
        self.try_lock().map(|state| state.stalled.clone()).unwrap_or_default()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever has it has it for some microseconds, in which nobody is put to sleep and woken. He may have been put off his
        // processor: that may be this one.
        const LOOKS: usize = 200;
        for _ in 0..LOOKS {
            if let Some(state) = self.state.try_lock() {
                visit::step();
                return state;
            }
            std::thread::yield_now();
        }
        let state = self.state.lock();
        visit::step();
        state
    }

    /// As [`lock`](Self::lock), but gives up after a short time: for threads that go through all address spaces, of which one may be
    /// held by its process.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        const PATIENCE: Duration = Duration::from_millis(2);
        self.state.try_lock_for(PATIENCE)
    }

    /// As [`try_lock`](Self::try_lock), but does not wait for a noisy address space at all: a thread serves it almost without a pause,
    /// and the caller, which goes through all of them, would wait for each in vain.
    pub(crate) fn try_lock_in_passing(&self) -> Option<MutexGuard<'_, State>> {
        if self.noise.is_noisy() { self.state.try_lock() } else { self.try_lock() }
    }

    /// Fills pages from `page` on, without waking who waits for them; how many bytes, and why not the others.
    pub(crate) fn fill(&self, page: u64, data: &[u8]) -> (u64, Option<FillError>) {
        let (filled, error) = self.uffd.copy_quietly(page, data);
        self.traffic.fill(filled);
        (filled, error)
    }

    /// Whether nothing is evicted, for a debugger or a core dump reads the memory.
    pub fn is_held_in(&self) -> bool {
        self.held_in.load(Relaxed)
    }

    /// Takes note of pages that have come back.
    pub(crate) fn note_back(&self, pages: usize) {
        if self.is_held_in() {
            self.uncharged.fetch_add(pages as u64 * PAGE, Relaxed);
        }
    }

    /// Bytes of it that are not charged, for they were brought back to be looked at ([`crate::pager::Pager::hold_in`]).
    pub fn uncharged(&self) -> u64 {
        self.uncharged.load(Relaxed)
    }

    /// A page that was taken is wanted again; perhaps while it was in the staging area still.
    pub(crate) fn wanted(&self, state: &mut State, page: u64, rescued: bool) {
        let soon = state.heat.wanted(page, rescued);
        self.missed.fetch_add(u64::from(soon || rescued), Relaxed);
    }

    /// How many pages were wanted again soon after they had been taken: within half a round of reclaim through the process.
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }

    /// Whether threads have come for pages of whom nobody has heard yet.
    pub fn is_to_be_heard(&self) -> bool {
        self.uffd.is_readable()
    }

    /// The worker, if the process has one.
    pub fn worker(&self) -> Option<Arc<Worker>> {
        self.lock().worker.clone()
    }

    /// Whether threads of the program wait for memory, or to be heard. Those of a process that rests do not count, nor those of one
    /// whose state is not to be had for the moment.
    pub fn has_waiting(&self) -> bool {
        let Some(state) = self.try_lock_in_passing() else { return false };
        !(state.waiting.is_empty() && state.starved.is_empty() && state.unheard.is_empty())
    }

    /// Returns whether the worker has not answered its last request yet. `None` if the state is not to be had for the moment.
    pub fn awaits_answer(&self) -> Option<bool> {
        self.try_lock().map(|state| state.request.is_some())
    }

    /// Returns how often the worker did not answer in time. Another thread may have heard the answer since.
    pub fn silences(&self) -> u64 {
        self.silences.load(Relaxed)
    }

    /// Whether its threads get no memory ([`crate::pager::Pager::rest`]).
    pub fn rests(&self) -> bool {
        self.try_lock().is_some_and(|state| state.rests)
    }

    /// Returns how many places of the staging area are in use. None if that cannot be told without waiting.
    pub fn staged(&self) -> Option<usize> {
        self.try_lock().map(|state| state.staging.len())
    }
}

impl State {
    /// Lets go of whatever held `page`'s contents.
    pub fn drop_contents(&mut self, engine: &Zswap, state: PageState) {
        match state {
            PageState::Resident | PageState::Loading(_) => {}
            PageState::Staged(sequence) => self.staging.clear(sequence),
            PageState::Stored(slot) => engine.invalidate(slot),
        }
    }

    /// Stored pages are about to be loaded.
    pub fn begin_loading(&mut self, pages: &[(u64, Slot)]) {
        self.table.change(pages, |_, slot, _| Some(PageState::Loading(slot)));
    }

    /// Whether a page may be evicted.
    pub fn is_evictable(&self, page: u64) -> bool {
        let kept = self.excluded.contains(page) || self.exit_words.contains(page);
        self.registered.contains(page) && !kept && !self.removals.cover(page)
    }

    /// Whether all pages of a range may be evicted. Sooner told than of each of them; false also where it takes a closer look.
    pub fn are_evictable(&self, range: Range) -> bool {
        let kept = self.excluded.overlaps(range) || self.exit_words.overlap(range);
        self.registered.covers(range) && !kept && self.removals.is_empty()
    }

    /// Applies a change of the layout.
    pub fn apply(&mut self, engine: &Zswap, change: Change) {
        match change {
            Change::Unmap(range) => self.forget(engine, range),
            Change::Remap { from, to, len } => self.remap(engine, from, to, len),
            Change::Remove(range) => self.empty(engine, range),
        }
    }

    /// The page tables of the program.
    pub fn pagemap(&self) -> Option<Arc<Pagemap>> {
        let of_worker = self.worker.as_ref().map(|worker| &worker.pagemap);
        of_worker.or(self.lone_child.as_ref().map(|child| &child.pagemap)).cloned()
    }

    /// Processes that have, or had, the program's memory: its worker may have been killed, or the program have ended.
    pub fn processes(&self) -> impl Iterator<Item = i32> + '_ {
        let child = self.lone_child.as_ref().and_then(LoneChild::pid);
        self.worker.iter().map(|worker| worker.pid).chain(self.program.iter().map(|program| program.pid)).chain(child)
    }

    /// Notes if the program has taken away what waits in the staging area.
    pub fn note_lost_places(&mut self, change: Change) {
        let range = match change {
            Change::Unmap(range) | Change::Remove(range) => range,
            Change::Remap { from, len, .. } => Range::sized(from, len),
        };
        let Some(worker) = self.worker.as_ref().filter(|worker| worker.staging().overlaps(range)) else { return };
        self.has_lost_places |= self.staging.iter().any(|(sequence, _)| range.contains(worker.staging_page(sequence)));
    }

    /// Reads staged pages, with the state locked. It does not wait for a page that is missing, as other threads of the manager would have to
    /// answer. What the program has given to the kernel with `MADV_FREE` the kernel takes from the staging area, too, without an event: it
    /// reads as zeros.
    pub fn read_staged(&self, worker: &Worker, sequences: &[u32], data: &mut [Page]) -> io::Result<()> {
        for (&sequence, data) in sequences.iter().zip(data) {
            let page = worker.staging_page(sequence);
            if let Err(error) = worker.memory.read(&[Range::page(page)], data) {
                // The kernel takes all memory of a process that is killed, at times before it has ended.
                let is_ending = |program: &Program| program.is_exiting() || process::is_told_to_end(program.pid);
                if self.has_lost_places
                    || !worker.pagemap.is_absent(page)?
                    || self.program.as_ref().is_some_and(is_ending)
                {
                    return Err(error);
                }
                data.fill(0);
            }
        }
        Ok(())
    }

    /// Lets go of the contents of all pages of `range`.
    pub fn empty(&mut self, engine: &Zswap, range: Range) {
        for (_, state) in self.table.take(range) {
            self.drop_contents(engine, state);
        }
        self.huge.forget(range);
    }

    /// The range is no longer mapped, or not as it was.
    pub fn forget(&mut self, engine: &Zswap, range: Range) {
        self.empty(engine, range);
        self.registered.remove(range);
        self.excluded.remove(range);
        self.heat.forget(range);
        self.removals.forget(range, self.epoch);
    }

    fn remap(&mut self, engine: &Zswap, from: u64, to: u64, len: u64) {
        let (old, new) = (Range::sized(from, len), Range::sized(to, len));
        let taken = self.table.take(old);
        self.huge.forget(old);
        self.removals.take_sentinels(old);
        let moved = |set: &RangeSet| -> Vec<Range> {
            set.within(old).into_iter().map(|r| Range::sized(r.start - from + to, r.len())).collect()
        };
        let (registered, excluded) = (moved(&self.registered), moved(&self.excluded));
        self.registered.remove(old);
        self.excluded.remove(old);
        self.heat.forget(old);
        // Whatever was at the new place has been unmapped by the remap itself.
        self.forget(engine, new);
        registered.into_iter().for_each(|range| self.registered.insert(range));
        excluded.into_iter().for_each(|range| self.excluded.insert(range));
        for (page, state) in taken {
            let page = page - from + to;
            match state {
                PageState::Staged(sequence) => self.staging.rename(sequence, page),
                // Whoever loads it for the old place will find it gone from there.
                PageState::Loading(slot) => {
                    engine.dup(slot);
                    self.table.set(page, PageState::Stored(slot));
                    continue;
                }
                PageState::Resident | PageState::Stored(_) => {}
            }
            self.table.set(page, state);
        }
    }

    /// Keeps `range` from being evicted until its contents have been discarded. To be called as soon as that has been
    /// announced.
    pub fn await_removal(&mut self, range: Range) {
        self.settle_removals(range);
        let last_present = self.worker.as_ref().map(|worker| worker.pagemap.last_present(range));
        let sentinel = match last_present {
            // Nothing there that could escape.
            Some(Ok(None)) => return,
            Some(Ok(Some(page))) => Some(page),
            _ => None,
        };
        let worker = &self.worker;
        self.removals.begin(range, sentinel, self.epoch, |page| is_absent(worker.as_ref(), page));
    }

    /// Drops the removals that overlap `range` and are done. To be called before anything absent is made present there.
    pub fn settle_removals(&mut self, range: Range) {
        let worker = &self.worker;
        self.removals.settle(range, |page| is_absent(worker.as_ref(), page));
    }

    /// What a forked child knows: it gets its own reference to everything that its parent has stored. (What is staged
    /// has to be stored before.)
    ///
    /// Where a page of the parent has come back since the fork, or the child has it as its own, the child's reference is
    /// stale; it is dropped when the page is next moved or filled.
    pub fn inherit(&self, engine: &Zswap) -> State {
        let mut child = State {
            registered: self.registered.clone(),
            excluded: self.excluded.clone(),
            beacon: self.beacon,
            has_guards: self.has_guards,
            exit_words: self.exit_words.inherit(),
            heirs: self.heirs.clone(),
            is_new: true,
            ..State::default()
        };
        for (page, state) in self.table.iter() {
            if let PageState::Stored(slot) | PageState::Loading(slot) = state {
                engine.dup(slot);
                child.table.set(page, PageState::Stored(slot));
            }
        }
        child
    }

    /// Notes what lies in the staging area before anything was moved there: the program may run before its worker is attached, and
    /// look at or lock all of its memory.
    pub fn note_litter(&mut self, worker: &Worker) -> io::Result<()> {
        for range in worker.pagemap.occupied(worker.staging())? {
            let pages = (range.start..range.end).step_by(PAGE as usize);
            pages.filter_map(|page| worker.staging_place(page)).for_each(|place| self.staging.litter(place));
        }
        Ok(())
    }

    /// Tells whether a fork may be there to be read, `now`.
    pub fn may_fork(&mut self, now: Instant) -> bool {
        if self.heirs.is_none() {
            return false;
        }
        self.read_at.replace(now).is_none_or(|at| now - at > MOMENT)
    }

    /// A thread has come for a page.
    ///
    /// One that faults in the kernel while a signal is pending, or ptrace wants it to stop, does not sleep: it comes again and
    /// again for the same page, thousands of times while it waits for memory. That is one fault.
    pub fn hear_of(&mut self, fault: Fault) {
        let known = |other: &Fault| (other.page, other.tid) == (fault.page, fault.tid);
        if let Some(place) = self.resting.iter().position(known) {
            let other = self.resting.swap_remove(place);
            self.waiting.push(Fault { write: other.write | fault.write, insists: true, ..other });
            return;
        }
        match self.starved.iter_mut().chain(&mut self.waiting).find(|other| known(other)) {
            Some(other) => other.write |= fault.write,
            None => self.waiting.push(fault),
        }
    }

    /// Drops everything: the address space is gone.
    pub fn release(&mut self, engine: &Zswap) {
        self.gone = true;
        self.empty(engine, Range::new(0, u64::MAX));
        self.waiting.clear();
        self.starved.clear();
        self.resting.clear();
        self.worker = None;
    }
}

fn is_absent(worker: Option<&Arc<Worker>>, page: u64) -> bool {
    worker.is_some_and(|worker| worker.pagemap.is_absent(page).unwrap_or(false))
}

/// What a failed fill means for a fault.
pub(crate) enum Outcome {
    /// Answered.
    Done,
    /// To be tried again when the layout has settled.
    Retry,
}

impl Space {
    /// Deals with an error of a fill at `page`.
    pub(crate) fn after_failed_fill(&self, state: &mut State, page: u64, error: FillError) -> Outcome {
        match error {
            FillError::Changing | FillError::NoMemory => {
                state.read_at = None;
                if error == FillError::Changing {
                    state.changing_since.get_or_insert_with(Instant::now);
                }
                return Outcome::Retry;
            }
            FillError::Gone | FillError::Refused(_) => state.gone = true,
            // It is there, or nothing of ours is: whoever waits looks again.
            FillError::Exists | FillError::NotMapped => self.uffd.wake(Range::page(page)),
        }
        Outcome::Done
    }
}

/// Whether to wait awake for the next fault: as long as two in three times that was worth it. It costs about twice what it saves.
#[derive(Default)]
pub(crate) struct Pace {
    /// So many times it is left out.
    left_out: AtomicU32,
    /// So often it is left out from one time to the next.
    gap: AtomicU32,
}

/// Threads that wait awake at this moment.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

impl Pace {
    /// Waits awake with `wait`, which tells whether it was worth it, or does not. At most half of the processors are spent on
    /// that.
    pub fn spin(&self, wait: impl FnOnce() -> bool) -> bool {
        const MOST: u32 = 64;
        static LIMIT: LazyLock<usize> =
            LazyLock::new(|| std::thread::available_parallelism().map_or(0, |count| count.get() / 2));
        let left_out = self.left_out.load(Relaxed);
        if left_out > 0 {
            self.left_out.store(left_out - 1, Relaxed);
            return false;
        }
        let is_free = SPINNING.fetch_add(1, Relaxed) < *LIMIT;
        let worth = is_free && wait();
        SPINNING.fetch_sub(1, Relaxed);
        if is_free {
            let gap = self.gap.load(Relaxed);
            let gap = if worth { gap / 2 } else { (gap * 4 + 1).min(MOST) };
            self.gap.store(gap, Relaxed);
            self.left_out.store(gap, Relaxed);
        }
        worth
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;

//! All address spaces of a manager: how they come and go. And the way of a page, which `evict` and `fault` go through:
//!
//! ```text
//!   evict   resident ──EVICT, by the worker──▶ staged ──store_staged──▶ stored (in the engine)
//!   fault   staged ──copy──▶ resident               (rescue)
//!           stored ──▶ loading ──load, copy──▶ resident
//!           never touched ──zeros──▶ resident
//! ```
//!
//! **Order of events and fills.** Each address space has one lock. Messages are read and applied under it, and it is decided there
//! what is filled. Pages are decompressed outside, and filled there, but never while messages are read (`Space::fills`). So
//! whatever was read is known before anything is filled, and whatever was not read makes the kernel refuse the fill (EAGAIN).
//!
//! **Lock order**: conversation of a space, state of a space (its fills below it), registry, engine. Nobody waits for a program while holding
//! one, but for the short wait of `drain`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use parking_lot::Mutex;
use uzswap_engine::{Group, Home, PAGE_SIZE, Page, Zswap};
use uzswap_proto::{Nonce, kind};

use crate::crew::Crew;
use crate::events::wait_for_program;
use crate::heirs::{self, Tie};
use crate::huge::Collapses;
use crate::owner::Owner;
use crate::range::Range;
use crate::space::{Space, State, Worker};
use crate::swapin::{Folios, Swapin};
use crate::sys::epoll::{Epoll, Ready};
use crate::sys::pagemap;
use crate::sys::process::{self, Program};
use crate::sys::uffd::{FillError, MAIN_FEATURES, MOVE, Message, Probe, Uffd};
use crate::user_queue::UserQueue;
use crate::visit::{self, Visit};
use crate::{PAGE, layout, watched};

/// Why a user's process is not taken under management.
pub(crate) const NO_ROOM: &str =
    "its user has as many processes as the manager can serve: raise the manager's limit of open files";

/// How often a child's layout may be found changing before it is given up.
const MOST_TRIES: u32 = 1000;

/// Who pays for the memory of an address space.
pub trait Account: Send + Sync {
    /// Asks for memory for `pages` pages to become resident; `false` makes the fault wait until reclaim has made room.
    fn admit(&self, pages: u64) -> bool;
    /// Has reclaim hear of what has been admitted, if it should. Called with no lock held.
    fn admitted(&self);
    /// The most pages that it does to bring for one fault: a small part of what may be resident. At least 1.
    fn most_ahead(&self) -> usize;
    /// The pages that may be brought besides for one fault without others having to go for them: a small part of what is free.
    fn spare(&self) -> usize;
    /// So many pages that were admitted are on their way: not resident yet, however much is measured.
    fn load_begins(&self, pages: u64);
    /// They have come, or will not.
    fn load_ends(&self, pages: u64);
    /// The group that pays for what is stored.
    fn group(&self) -> Group;
    /// What happens to its pages is counted here.
    fn counters(&self) -> &Counters;
    /// A thread of the address space waits for a page that was taken from it, or for the limit, and none did before.
    fn stall(&self);
    /// The last thread that did so goes on. Told to whom the beginning was told.
    fn go_on(&self);
}

/// What the pager needs from whoever runs it.
pub trait Host: Send + Sync {
    /// The program of `space` cannot go on with the right bytes: kill it, and say why.
    fn kill(&self, space: u64, why: &str);
}

/// What happened to the pages of a group, since the start.
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
    /// Huge pages that became one again after their pages had come back.
    pub thp_collapse_alloc: AtomicU64,
    /// How often a process was made to rest, for others to have their turn.
    pub rested: AtomicU64,
    /// Microseconds that threads of the job waited for pages and for memory.
    pub stall_usec: AtomicU64,
}

/// Pages taken out by one step of reclaim.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages moved out of the program into the staging area.
    pub staged: usize,
    /// Pages stored, whose memory is free now.
    pub stored: usize,
    /// There was no time to look at all pages.
    pub broken_off: bool,
}

/// The pager of one manager.
pub struct Pager {
    pub(crate) engine: Arc<Zswap>,
    pub(crate) host: Arc<dyn Host>,
    epoll: Epoll,
    pub(crate) crew: Crew,
    pub(crate) noisy: UserQueue<Arc<Space>>,
    pub(crate) ties: UserQueue<Tie>,
    pub(crate) collapses: Collapses,
    folios: Folios,
    registry: Mutex<Registry>,
    several_nodes: bool,
    pub(crate) evicting: AtomicBool,
    /// How many address spaces there may be.
    capacity: AtomicUsize,
    /// A worker was silent when it was last asked.
    pub(crate) some_are_late: AtomicBool,
    /// How often an address space may have come to have no worker: it can be forgotten once no process uses it.
    pub(crate) left_alone: AtomicU64,
    /// What that was when all were last looked at, and none was left to be looked at again.
    looked_at: AtomicU64,
}

#[derive(Default)]
struct Registry {
    next: u64,
    spaces: HashMap<u64, Arc<Space>>,
    /// Forked children that were told a number at their beacon, and have no worker yet.
    children: HashMap<Nonce, u64>,
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager").finish_non_exhaustive()
    }
}

impl Pager {
    /// A pager that keeps evicted pages in `engine`.
    pub fn new(engine: Arc<Zswap>, host: Arc<dyn Host>, swapin: Swapin) -> io::Result<Pager> {
        pagemap::probe();
        let epoll = Epoll::new()?;
        let several_nodes = process::memory_nodes() > 1;
        let evicting = AtomicBool::new(true);
        let (some_are_late, left_alone, looked_at) = Default::default();
        let (crew, folios) = (Crew::default(), Folios::new(swapin));
        Ok(Pager {
            engine,
            host,
            epoll,
            crew,
            noisy: UserQueue::default(),
            ties: UserQueue::default(),
            collapses: Collapses::default(),
            folios,
            registry: Mutex::default(),
            several_nodes,
            evicting,
            capacity: AtomicUsize::new(usize::MAX),
            some_are_late,
            left_alone,
            looked_at,
        })
    }

    /// How many pages a fault brings.
    pub fn folios(&self) -> &Folios {
        &self.folios
    }

    /// Every address space.
    pub fn spaces(&self) -> Vec<Arc<Space>> {
        self.registry.lock().spaces.values().cloned().collect()
    }

    /// Every address space that may be visited.
    pub fn open_spaces(&self) -> Vec<Arc<Space>> {
        self.registry.lock().spaces.values().filter(|space| !space.is_shunned()).cloned().collect()
    }

    /// Returns the address space with this number, if it is there still.
    pub fn space(&self, id: u64) -> Option<Arc<Space>> {
        self.registry.lock().spaces.get(&id).cloned()
    }

    /// Sets how many address spaces there may be of all users.
    pub fn set_capacity(&self, spaces: usize) {
        self.capacity.store(spaces, Relaxed);
    }

    /// Returns whether the user of `owner` may have one more address space.
    pub(crate) fn has_room(&self, owner: &Owner) -> bool {
        owner.has_room(self.registry.lock().spaces.len(), self.capacity.load(Relaxed))
    }

    /// Returns whether there are address spaces of users other than that of `owner`.
    pub(crate) fn has_others(&self, owner: &Owner) -> bool {
        !owner.has_all(self.registry.lock().spaces.len())
    }

    /// Adds an address space; tells whether its faults are heard of. If not, it is added as one that is gone: were its userfaultfd closed,
    /// a forked child would read zeros.
    pub(crate) fn register(
        &self,
        uffd: Uffd,
        state: State,
        account: Arc<dyn Account>,
        owner: Arc<Owner>,
    ) -> (Arc<Space>, io::Result<()>) {
        let mut registry = self.registry.lock();
        registry.next += 1;
        let space = Arc::new(Space::new(registry.next, uffd, state, account, owner));
        space.uffd.make_nonblocking();
        let added = self.epoll.add(space.as_raw_fd(), space.id);
        space.lock().gone |= added.is_err();
        registry.spaces.insert(space.id, space.clone());
        self.left_alone.fetch_add(1, Release);
        (space, added)
    }

    /// Takes a process under management: its worker, and its userfaultfd fresh from the kernel.
    ///
    /// # Errors
    /// The kernel refuses, or the userfaultfds are not of the worker's memory.
    pub fn adopt(
        &self,
        worker: Worker,
        uffd: Uffd,
        account: Arc<dyn Account>,
        owner: Arc<Owner>,
    ) -> io::Result<Arc<Space>> {
        let _visit = Visit::of_process(worker.program, &owner);
        if !self.has_room(&owner) {
            return Err(io::Error::other(NO_ROOM));
        }
        uffd.handshake(MAIN_FEATURES)?;
        prove(&uffd, &worker)?;
        let worker = Arc::new(worker);
        // From the beginning: a thread may look at the staging area at once.
        let mut state = State { program: Some(worker.program()), worker: Some(worker.clone()), ..State::default() };
        state.note_litter(&worker)?;
        let (space, added) = self.register(uffd, state, account, owner);
        if let Err(error) = added {
            space.lock().worker = None;
            return Err(error);
        }
        space.note_areas_of(&worker);
        Ok(space)
    }

    /// Takes a forked process under management in the address space that it has inherited, if it was told a number for it.
    ///
    /// # Errors
    /// The address space is another's, or cannot be taken.
    pub fn claim(&self, worker: Worker) -> Result<io::Result<Arc<Space>>, Box<Worker>> {
        let space = {
            let registry = self.registry.lock();
            let id = worker.hello.nonce.and_then(|nonce| registry.children.get(&nonce));
            id.and_then(|id| registry.spaces.get(id).cloned())
        };
        let Some(space) = space else { return Err(Box::new(worker)) };
        Ok(self.claim_space(&space, worker).map(|()| space))
    }

    /// Lets a program run that was taken under management.
    pub fn let_run(&self, space: &Space) {
        if let Some(worker) = space.worker() {
            // Fails only for a process that is going away.
            let _ = worker.link.send(&[kind::GO], None);
        }
    }

    fn claim_space(&self, space: &Space, worker: Worker) -> io::Result<()> {
        let _visit = space.visit();
        let worker = Arc::new(worker);
        space.note_areas_of(&worker);
        // Only now is it certain that the process with the number is the child: it may have been passed on.
        let mut tries = 0;
        while let Err(error) = prove(&space.uffd, &worker) {
            if error.kind() != io::ErrorKind::WouldBlock || tries > MOST_TRIES {
                return Err(error);
            }
            self.service(space);
            wait_for_program(&space.uffd, &mut tries);
        }
        self.forget_uninherited(space, worker.pid)?;
        let inherits = {
            let mut state = space.lock();
            if state.worker.is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if let Some(nonce) = state.nonce.take() {
                self.registry.lock().children.remove(&nonce);
            }
            state.program = Some(worker.program());
            state.lone_child = None;
            // Another may have claimed it in vain meanwhile.
            space.note_areas_of(&worker);
            state.note_litter(&worker)?;
            state.worker = Some(worker.clone());
            state.table.iter().next().is_some()
        };
        worker.link.send(&[kind::MAIN], Some(space.as_raw_fd()))?;
        if inherits {
            space.tie(&worker);
        }
        Ok(())
    }

    /// Forgets what the parent had registered and its forked child has not inherited (`MADV_DONTFORK`).
    fn forget_uninherited(&self, space: &Space, pid: i32) -> io::Result<()> {
        let mut state = space.lock();
        let mut tries = 0;
        loop {
            self.drain(space, &mut state);
            // The child runs meanwhile: its layout may be changing.
            if let Some(lost) = watched::unwatched(space, &state, &layout::all(pid)?) {
                lost.iter().for_each(|range| state.forget(&self.engine, range));
                break;
            }
            wait_for_program(&space.uffd, &mut tries);
        }
        drop(state);
        self.service(space);
        Ok(())
    }

    /// Serves faults and events until the calling thread is replaced. Any number of threads may.
    ///
    /// # Errors
    /// The kernel does not tell of faults any more.
    pub fn serve(&self) -> io::Result<()> {
        while !visit::is_surplus() {
            let ready = self.epoll.wait(-1)?;
            for Ready { number, has_error } in ready {
                if let Some(space) = self.space(number) {
                    if has_error {
                        space.make_nonblocking();
                    }
                    if visit::is_surplus() {
                        self.rearm(&space);
                    } else if space.is_shunned() {
                        // Reported again by `reopen`.
                    } else if space.noise.is_noisy() {
                        self.queue(space);
                    } else {
                        let more = || space.pace.spin(|| space.uffd.spin());
                        self.service_while(&space, more, || visit::is_surplus() || self.epoll.is_ready());
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether address spaces that no thread serves have something to say.
    pub(crate) fn has_others_ready(&self) -> bool {
        self.epoll.is_ready()
    }

    /// Has all address spaces that may be visited again reported, and loads for them taken. To be called when a thread that was stuck has
    /// gone on.
    pub fn reopen(&self) {
        self.open_spaces().iter().for_each(|space| self.rearm(space));
        self.some_are_late.store(true, Relaxed);
        self.left_alone.fetch_add(1, Release);
        self.crew.call();
    }

    /// Notes under which number the worker of a forked child can claim its address space. Any earlier one is forgotten.
    pub(crate) fn name_child(&self, space: &Space, state: &mut State, nonce: Nonce) {
        let mut registry = self.registry.lock();
        if let Some(before) = state.nonce.replace(nonce) {
            registry.children.remove(&before);
        }
        registry.children.insert(nonce, space.id);
    }

    /// Has the userfaultfd of `space` reported again.
    pub(crate) fn rearm(&self, space: &Space) {
        // Fails only for a space that has been reaped.
        let _ = self.epoll.rearm(space.as_raw_fd(), space.id);
    }

    /// Forgets address spaces that no process uses any more; tells whether there are others that soon may be so.
    ///
    /// A userfaultfd is closed only then: were it closed earlier, evicted pages would read as zeros.
    pub fn reap(&self) -> bool {
        let left_alone = self.left_alone.load(Acquire);
        if self.looked_at.load(Relaxed) == left_alone {
            return false;
        }
        let (mut dead, mut more) = (Vec::new(), false);
        for space in self.open_spaces() {
            let _visit = space.visit();
            let Some(mut state) = space.try_lock() else {
                more = true;
                continue;
            };
            if state.worker.is_some() {
                continue;
            }
            let has_ended = || state.program.as_ref().is_none_or(Program::is_exiting);
            let is_gone = match space.uffd.probe(PAGE) {
                Probe::Gone => true,
                // The kernel says that first, also when it is for ever.
                Probe::Changing => has_ended() && space.uffd.has_no_memory(),
                Probe::Registered | Probe::NotRegistered => false,
            };
            if is_gone {
                if !state.unheard.is_empty() {
                    // It may have forked before it ended.
                    self.drain(&space, &mut state);
                }
                state.release(&self.engine);
                space.forget_stalls(&mut state);
                dead.push(space.id);
            } else {
                more = true;
                if state.gone && has_ended() {
                    self.deny_waiting(&space, &mut state);
                }
            }
        }
        if !dead.is_empty() {
            let mut registry = self.registry.lock();
            for id in &dead {
                if let Some(space) = registry.spaces.remove(id) {
                    self.epoll.remove(space.as_raw_fd());
                }
                registry.children.retain(|_, space| space != id);
            }
        }
        if !more {
            // Not before: another thread may have to look, if this one is stuck.
            self.looked_at.store(left_alone, Relaxed);
        }
        more
    }

    /// Takes a child of `space` whose contents are lost: its threads get an error for what it misses ([`Pager::deny_waiting`]).
    pub(crate) fn forsake(&self, space: &Space, state: &State, child: Uffd) {
        let lost = State { gone: true, ..State::default() };
        let (child, _) = self.register(child, lost, space.account(), space.owner.clone());
        state.heirs.iter().for_each(|heirs| heirs.note(&child));
    }

    /// Denies pages to threads that wait for memory whose contents are lost. Its program has been killed for that, but other processes
    /// that read it keep the memory alive (`process_vm_readv`, `/proc/PID/mem`), and would wait for ever: they get an error instead.
    fn deny_waiting(&self, space: &Space, state: &mut State) {
        let mut messages = std::mem::take(&mut state.unheard);
        // Without an error it says whether that was all; with one there is nothing more to be had.
        while !heirs::read(&space.uffd, state.heirs.as_deref(), &mut messages, true).unwrap_or(true) {}
        let lists = [std::mem::take(&mut state.waiting), std::mem::take(&mut state.resting)];
        let known = lists.into_iter().flatten().chain(std::mem::take(&mut state.starved)).map(|fault| fault.page);
        let mut pages: Vec<u64> = known.collect();
        for message in messages {
            match message {
                Message::Fault { address, .. } => pages.push(address),
                // It would miss the same contents.
                Message::Fork(child) => self.forsake(space, state, child),
                Message::Change(_) => {}
            }
        }
        for page in pages {
            // While the layout is changing this fails, and the thread, woken, comes again.
            let _ = space.uffd.poison(page);
            space.uffd.wake(Range::page(page));
        }
    }

    /// The group that pays for staged pages, and the node that the memory of each is on. Should the group be removed before
    /// they are stored, they are refused, and stay.
    pub(crate) fn homes(&self, space: &Space, worker: &Worker, sequences: &[u32]) -> Vec<Home> {
        let mut homes = vec![Home { group: space.account().group(), node: 0 }; sequences.len()];
        if self.several_nodes {
            let pages: Vec<u64> = sequences.iter().map(|&sequence| worker.staging_page(sequence)).collect();
            // A page that has just been rescued is on no node, and is not stored either.
            for (home, node) in homes.iter_mut().zip(process::nodes_of(worker.pid, &pages).unwrap_or_default()) {
                home.node = node.unwrap_or(home.node);
            }
        }
        homes
    }

    /// Parts with the worker of `space`, whose session ends: its program has ended or executes another, or the worker is gone.
    pub fn dismiss(&self, space: &Space) {
        let _visit = space.visit();
        let _conversation = space.conversation.lock();
        let late = {
            let state = space.lock();
            state.worker.clone().filter(|_| state.request.is_some())
        };
        if let Some(worker) = late {
            self.listen(space, &worker, space.owner.patience());
        }
        self.part_with_worker(space);
    }
}

/// Lends a buffer of `pages` pages that stays with the thread: none is allocated or cleared for each fault.
pub(crate) fn with_buffer<T>(pages: usize, work: impl FnOnce(&mut [Page]) -> T) -> T {
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

/// Reads staged pages that are all there, many at once.
///
/// # Errors
/// One is missing, as one that the kernel has taken after MADV_FREE ([`State::read_staged`] reads those). The read would wait for a thread that
/// serves faults; and should the watchdog meanwhile take the reader for one that the process holds up, no thread serves them.
pub(crate) fn read_pages(worker: &Worker, sequences: &[u32], data: &mut [u8]) -> io::Result<()> {
    let mut ranges: Vec<Range> = Vec::new();
    for &sequence in sequences {
        let page = worker.staging_page(sequence);
        match ranges.last_mut() {
            Some(last) if last.end == page => last.end += PAGE,
            _ => ranges.push(Range::page(page)),
        }
    }
    for range in &ranges {
        if worker.pagemap.occupied(*range)?.iter().map(|found| found.len()).sum::<u64>() < range.len() {
            return Err(io::ErrorKind::NotFound.into());
        }
    }
    worker.memory.read(&ranges, data)
}

/// Registers the areas of a worker, and proves that both userfaultfds are of the memory that was opened of the process at the
/// other end of its connection: what is written through them is found there, in a page that it shares with no other memory.
///
/// # Errors
/// They are not, or the areas cannot be had. `WouldBlock`: the layout is changing; to be called again.
fn prove(uffd: &Uffd, worker: &Worker) -> io::Result<()> {
    let hello = &worker.hello;
    uffd.register(worker.staging())?;
    prove_area(uffd, worker, hello.staging_proof())?;
    worker.trash.handshake(MOVE)?;
    // No thread would answer a fault there, and a program may look at all of its memory, or lock it.
    worker.trash.register_quietly(Range::new(hello.trash, hello.trash_proof() + PAGE))?;
    prove_area(&worker.trash, worker, hello.trash_proof())
}

fn prove_area(uffd: &Uffd, worker: &Worker, proof: u64) -> io::Result<()> {
    let nonce = process::nonce()?;
    match uffd.copy(proof, &process::page_of(&nonce)).1 {
        Some(FillError::Changing) => Err(io::ErrorKind::WouldBlock.into()),
        None if worker.memory.has(nonce, proof) && process::has_private(worker.pid, proof)? => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::PermissionDenied, "its userfaultfd is of another memory")),
    }
}

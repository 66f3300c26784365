//! Out of the program: what the kernel tells of changes of an address space's layout, and of its forks.
//!
//! 1. [`Pager::drain`] reads all messages, under the lock of the address space, until the layout has settled. It puts faults with those that
//!    wait for an answer (`fault`).
//! 2. Of what was announced it takes out what the kernel did not do (`refused`), and puts the rest into the order in which it happened
//!    (`epoch`).
//! 3. It applies the changes in this order, and takes each forked child under management where it lies between them.

use std::io;
use std::time::{Duration, Instant};

use crate::PAGE;
use crate::change::{Change, Event, OpenMoves};
use crate::closing::{IS_STUCK, State as Closing};
use crate::epoch::{self, Order};
use crate::evict::STORE_PAGES;
use crate::heirs::{self, Heirs};
use crate::inherited;
use crate::layout;
use crate::lone_child::LoneChild;
use crate::noisy::SETTLES_WITHIN;
use crate::pager::{NO_ROOM, Pager, with_buffer};
use crate::range::{Range, RangeSet};
use crate::refused::{self, Unclear};
use crate::space::{Fault, Space, State};
use crate::sys::limits;
use crate::sys::process::Program;
use crate::sys::smaps::{self, NotInherited};
use crate::sys::uffd::{FillError, Message, Probe, Uffd};
use crate::table::PageState;

/// The longest time that the manager waits for the layout of a process to settle, so that it can order what was read or answer a fault.
/// Then it kills the process. After some changes that the kernel refuses (`brk` that would unmap a sealed part) the kernel never takes
/// back that one is under way. A fork of much memory takes 0.4 s for each GiB.
pub const LONGEST_CHANGE: Duration = Duration::from_secs(30);

/// Why the manager kills it.
pub(crate) const NEVER_SETTLES: &str = "its memory layout does not settle (was a change of its heap refused?)";
const NO_PAUSE: &str = "its threads change its memory layout without a pause";
const UNCLEAR: &str = "its memory layout changed so that it cannot be told what lies where";

impl Pager {
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
        let (mut events, mut forks, mut moves): (Vec<Event>, Vec<Uffd>, OpenMoves) = Default::default();
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
                        if !moves.ends(change) {
                            events.push(Event::new(change, forks.len()));
                        }
                    }
                    Message::Fork(child) => {
                        child.make_nonblocking();
                        forks.push(child);
                    }
                }
            }
            // There may be no end to what comes while this is read.
            let order =
                if read_all { self.order(space, state, &mut events, &mut asked, forks.len()) } else { Order::Later };
            match order {
                Order::Found(ordered) => {
                    self.settle(space, state, ordered, forks);
                    return news;
                }
                Order::TooMany => {
                    self.give_up(space, state, forks, NO_PAUSE);
                    return false;
                }
                Order::Unclear => {
                    self.give_up(space, state, forks, UNCLEAR);
                    return false;
                }
                Order::Later => {}
            }
            let changing_for = begun.get_or_insert_with(Instant::now).elapsed();
            if changing_for > LONGEST_CHANGE {
                self.give_up(space, state, forks, NEVER_SETTLES);
                return false;
            }
            if changing_for > SETTLES_WITHIN {
                if read_all && state.program.as_ref().is_some_and(Program::is_exiting) && space.uffd.has_no_memory() {
                    // The kernel says first that the layout is changing, also when it is for ever.
                    self.settle(space, state, events, forks);
                    return news;
                }
                space.note_changes(events.len().saturating_sub(noted));
                noted = events.len();
            }
            if read_all {
                wait_for_program(&space.uffd, &mut tries);
                now = Instant::now();
                may_fork = !is_noisy;
            }
        }
    }

    /// Kills a process of whose memory nothing certain is known any more. Its children that were just forked get an error where they
    /// miss contents: were their userfaultfds closed, they would read zeros.
    pub(crate) fn give_up(&self, space: &Space, state: &mut State, forks: Vec<Uffd>, why: &str) {
        self.host.kill(space.id, why);
        state.gone = true;
        forks.into_iter().for_each(|child| self.forsake(space, state, child));
    }

    /// What was read and done, in order. `asked` is how many of the events are known to have been done.
    fn order(&self, space: &Space, state: &State, events: &mut Vec<Event>, asked: &mut usize, forks: usize) -> Order {
        if events.len() + forks == 0 {
            return Order::Found(Vec::new());
        }
        match space.uffd.is_watched(PAGE) {
            Probe::Changing => return Order::Later,
            Probe::Gone => return Order::Found(std::mem::take(events)),
            Probe::Registered | Probe::NotRegistered => {}
        }
        if epoch::is_too_much(events, forks > 0) {
            return Order::TooMany;
        }
        match refused::take_out(state, events, asked, forks > 0, &Asked { space, state }) {
            Ok(()) => {}
            Err(Unclear::Changing) => return Order::Later,
            Err(Unclear::Ambiguous) => return Order::Unclear,
        }
        epoch::order(&state.registered, events, |address| is_registered(&space.uffd, address))
    }

    /// Applies what was read in an epoch.
    fn settle(&self, space: &Space, state: &mut State, ordered: Vec<Event>, forks: Vec<Uffd>) {
        let (mut rest, had_forks) = (ordered, !forks.is_empty());
        // All of it has been done by now, also what comes after a fork.
        rest.iter().for_each(|event| state.note_lost_places(event.change));
        for (number, child) in forks.into_iter().enumerate() {
            let mut said = Vec::new();
            let inherited = |address| was_inherited(&child, address, &mut said, state.heirs.as_deref());
            let now = |address| is_registered(&space.uffd, address);
            let (before, after) = inherited::split(&state.registered, rest, number, inherited, now);
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
        let is_stuck = !space.owner.is_trusted() && space.uffd.user().state() == Closing::Stuck;
        if state.gone || is_stuck || !self.has_room(&space.owner) {
            if !std::mem::replace(&mut state.gone, true) {
                self.host.kill(space.id, &format!("it forked, and {}", if is_stuck { IS_STUCK } else { NO_ROOM }));
            }
            // Those that it has forked itself by now miss the same contents.
            let children = said.into_iter().filter_map(Message::into_child).chain([child]);
            return children.for_each(|child| self.forsake(space, state, child));
        }
        let mut child = Newborn { uffd: child, said, until: Instant::now() + NEWBORN_PATIENCE };
        let heirs = state.heirs.clone();
        let inherited = |address| was_inherited(&child.uffd, address, &mut child.said, heirs.as_deref());
        let NotInherited { wiped, left_out } = self.not_inherited(state, inherited);
        self.flush_staging(space, state, &mut child, &wiped);
        let Newborn { uffd: child, said, .. } = child;
        let mut inherited = State { unheard: said, ..state.inherit(&self.engine) };
        wiped.iter().for_each(|range| inherited.empty(&self.engine, range));
        left_out.iter().for_each(|range| inherited.forget(&self.engine, range));
        let (child, added) = self.register(child, inherited, space.account(), space.owner.clone());
        state.heirs.iter().for_each(|heirs| heirs.note(&child));
        child.noise.inherit(&space.noise);
        if let Err(error) = added {
            self.host.kill(space.id, &format!("no room for one more process: {error}"));
        }
    }

    /// Stores all staged pages at once, so that a child can share them. What the engine refuses goes to both. A page that cannot be
    /// read is denied to the child: it would read zeros. In `wiped` it reads zeros by rights.
    fn flush_staging(&self, space: &Space, state: &mut State, child: &mut Newborn, wiped: &RangeSet) {
        let staged: Vec<(u32, u64)> = state.staging.iter().collect();
        let Some(worker) = state.worker.clone() else {
            deny(&child.uffd, &staged, wiped);
            return;
        };
        for group in staged.chunks(STORE_PAGES) {
            let sequences: Vec<u32> = group.iter().map(|&(sequence, _)| sequence).collect();
            let read = with_buffer(group.len(), |data| {
                state.read_staged(&worker, &sequences, data)?;
                let homes = self.homes(space, &worker, &sequences);
                for ((&(sequence, page), &home), data) in group.iter().zip(&homes).zip(data.iter()) {
                    if let Ok(slot) = self.engine.swap_out(data, home) {
                        state.staging.clear(sequence);
                        state.table.set(page, PageState::Stored(slot));
                    } else if !wiped.contains(page) && !child.is_given(page, data, state.heirs.as_deref()) {
                        self.host.kill(space.id, "it forked while neither pool nor swap file had room");
                        deny(&child.uffd, &[(sequence, page)], wiped);
                    }
                }
                io::Result::Ok(())
            });
            if read.is_err() {
                self.host.kill(space.id, "a staged page could not be read back");
                deny(&child.uffd, group, wiped);
            }
        }
    }
}

/// A forked child that is not under management yet.
struct Newborn {
    uffd: Uffd,
    /// What it has said meanwhile.
    said: Vec<Message>,
    /// How long it may take until its layout stands still.
    until: Instant,
}

/// A child whose threads change its layout without a pause.
const NEWBORN_PATIENCE: Duration = Duration::from_secs(1);

impl Newborn {
    /// Gives the child a page of its parent's. True also where it has none at this place (`MADV_DONTFORK`), or a newer one, or has given it up.
    fn is_given(&mut self, page: u64, data: &[u8], heirs: Option<&Heirs>) -> bool {
        let mut tries = 0;
        loop {
            // What it has discarded or unmapped is not to come back, and what it has moved is missing elsewhere.
            let change = self.said.iter().find_map(|message| match message {
                Message::Change(change) if change.touches(Range::page(page)) => Some(change),
                _ => None,
            });
            if let Some(change) = change {
                return !matches!(change, Change::Remap { .. });
            }
            match self.uffd.copy(page, data).1 {
                None | Some(FillError::Exists | FillError::Gone | FillError::NotMapped) => return true,
                Some(FillError::Changing) if Instant::now() < self.until => {
                    // It goes on when its event has been read. An error is told again to the thread that reads next.
                    let _ = heirs::read(&self.uffd, heirs, &mut self.said, true);
                    wait_for_program(&self.uffd, &mut tries);
                }
                Some(_) => return false,
            }
        }
    }
}

/// The kernel's word on a program whose events are read.
struct Asked<'a> {
    space: &'a Space,
    state: &'a State,
}

impl Asked<'_> {
    fn program(&self) -> Option<i32> {
        self.state
            .program
            .as_ref()
            .map(|program| program.pid)
            .or_else(|| self.state.lone_child.as_ref().and_then(LoneChild::pid))
    }
}

impl refused::Kernel for Asked<'_> {
    fn ask(&self, page: u64) -> Probe {
        self.space.uffd.is_watched(page)
    }

    fn is_changing(&self) -> bool {
        self.space.uffd.is_changing()
    }

    fn has_page(&self, range: Range) -> bool {
        let present = self.state.pagemap().and_then(|pagemap| pagemap.present(range, 1).ok());
        present.is_some_and(|present| !present.runs.is_empty())
    }

    fn begins_mapping(&self, at: u64) -> bool {
        let mappings = self.state.processes().find_map(|pid| layout::all(pid).ok()).unwrap_or_default();
        mappings.binary_search_by_key(&at, |mapping| mapping.start).is_ok()
    }

    fn may_refuse(&self, range: Range) -> bool {
        let is_sealed = |pid| smaps::sealed(pid).is_ok_and(|sealed| sealed.overlaps(range));
        limits::is_beyond_machine(range.len())
            || self.program().is_some_and(|pid| limits::may_refuse(pid, range.len()) || is_sealed(pid))
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

//! The watchdog: replaces threads of the manager that a process holds up.
//!
//! A process can hold the lock of its own address space for as long as it likes, and the kernel call of a thread that works on
//! it then does not return. See [`uzswap_vm::visit`] for how that is noticed and why it harms no other process:
//!
//! 1. Every [`PAUSE`] all visits are compared with what they were. One that has made no step for [`STUCK`], in a thread that does
//!    not run, or for [`STUCK_RUNNING`] has taken its thread out of service.
//! 2. Its address space is blocked, and its job and its user have one more that is: at some number none of theirs is visited any more.
//!    So a user costs a bounded number of threads, and each role a bounded time.
//! 3. Another thread begins in the role of the stuck one. At most [`MOST_SURPLUS`] have been replaced and are still there. A watch
//!    thread that is stuck in stopping a process gives that up, and ends; the next one stops neither that process nor others of its user
//!    for some seconds ([`Space::resists`]).
//! 4. A process that blocks a thread for [`PATIENCE`] is killed. A long fork of much memory is over by then.
//! 5. At each look the watchdog interrupts stuck threads by a signal. Nothing else ends a read of a forked child's
//!    userfaultfd that waits because the child has cleared `O_NONBLOCK` and read the messages first: the kernel has no
//!    `RWF_NOWAIT` there. When a stuck thread has gone on, other threads visit its address space again.
//! 6. A thread that reads the areas of a worker waits for a page that is missing there. The death of the process does not end that wait:
//!    the thread keeps the memory alive. So a helper thread denies the areas of dead processes ([`Space::deny_areas`]), again every
//!    [`PAUSE_OF_DENIALS`], since another process may have the same memory and take away what was denied.
//!
//! This thread takes no lock of an address space, and makes no call that waits for a process.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use uzswap_vm::LONGEST_CHANGE;
use uzswap_vm::log::log;
use uzswap_vm::owner::Owner;
use uzswap_vm::pager::Pager;
use uzswap_vm::space::Space;
use uzswap_vm::sys::{ptrace, thread};
use uzswap_vm::visit::{self, Guest, Place};

use crate::sessions::{Session, Sessions};

/// How often to look.
const PAUSE: Duration = Duration::from_millis(40);

/// How long a visit may stand still.
const STUCK: Duration = Duration::from_millis(100);

/// How long a visit of a thread that runs may stand still: its process may have ever more to say.
const STUCK_RUNNING: Duration = Duration::from_millis(500);

/// How long a process may block a thread: longer than a thread waits for the layout of a process to settle, so that the thread kills that
/// process itself and tells why.
const PATIENCE: Duration = LONGEST_CHANGE.saturating_add(Duration::from_secs(5));

/// How long the areas of a dead process are not denied again.
const PAUSE_OF_DENIALS: Duration = Duration::from_secs(1);

/// How many replaced threads there may be that have not ended.
const MOST_SURPLUS: usize = 256;

/// The role whose threads hold threads of processes.
pub const WATCH: &str = "watch";

/// Looks after the threads of a manager.
pub struct Watchdog {
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    visits: HashMap<i32, Seen>,
    blocked: HashMap<u64, Arc<Space>>,
    /// Processes that had no address space yet when a thread got stuck with them, by thread: one process can hold up many.
    strangers: HashMap<i32, (i32, Arc<Owner>)>,
    killed: HashSet<u64>,
    /// The helper threads that deny the areas of workers, by address space, and when they began.
    denials: HashMap<u64, (Instant, JoinHandle<()>)>,
}

/// A visit as it was when it was first seen.
struct Seen {
    guest: Guest,
    steps: u64,
    since: Instant,
}

impl Watchdog {
    /// A watchdog that has seen nothing yet.
    pub fn new(pager: Arc<Pager>, sessions: Arc<Sessions>) -> Watchdog {
        let (visits, blocked, strangers, killed, denials) = Default::default();
        Watchdog { pager, sessions, visits, blocked, strangers, killed, denials }
    }

    /// Looks until told to stop.
    pub fn run(mut self, stop: &AtomicBool) {
        // It has little to do, and others wait for it when it has.
        let _ = thread::ask_for_promptness();
        while !stop.load(Relaxed) {
            std::thread::sleep(PAUSE);
            self.look();
        }
    }

    fn look(&mut self) {
        let places = visit::places();
        let now = Instant::now();
        let mut before = std::mem::take(&mut self.visits);
        let mut stuck = Vec::new();
        for place in &places {
            let (Some(guest), steps) = place.look() else { continue };
            let seen = before.remove(&place.thread()).filter(|seen| (seen.guest, seen.steps) == (guest, steps));
            let seen = seen.unwrap_or(Seen { guest, steps, since: now });
            let age = now - seen.since;
            // One that waits for a processor is not stuck. One that has had so much time reads without an end.
            if age >= STUCK && (age >= STUCK_RUNNING || !thread::is_running(place.thread())) {
                stuck.push((place, guest, age));
            }
            self.visits.insert(place.thread(), seen);
        }
        if stuck.is_empty() && self.blocked.is_empty() && self.strangers.is_empty() {
            return;
        }
        self.block(&stuck);
        let surplus = places.iter().filter(|place| place.is_surplus()).count();
        for (place, guest, _) in stuck.iter().take(MOST_SURPLUS.saturating_sub(surplus)) {
            if is_watch(place)
                && let Guest::Space(id) = *guest
            {
                // Before another thread tries the same.
                self.pager.space(id).iter().for_each(|space| space.note_resistance());
            }
            replace(place);
        }
        for (place, _, _) in &stuck {
            if is_watch(place) && place.is_surplus() {
                // It may hold processes of others, which go on when it ends.
                ptrace::give_up_seizing(place.thread());
            } else if place.role().is_some() && self.stands_still(place) {
                thread::interrupt(place.thread());
            }
        }
        for (_, guest, age) in stuck {
            let Guest::Space(space) = guest else { continue };
            let session = self.sessions.of_space(space);
            if age >= PATIENCE && self.killed.insert(space) {
                session.iter().for_each(|session| kill(session, age));
            }
            // Without a session it joins just now, or has ended: to deny it too early would make its worker useless.
            if session.map_or(age >= PATIENCE, |session| session.pidfd.has_ended()) {
                self.deny(space);
            }
        }
    }

    /// Whether a thread that was found stuck is so still.
    fn stands_still(&self, place: &Place) -> bool {
        let (guest, steps) = place.look();
        self.visits.get(&place.thread()).is_some_and(|seen| (Some(seen.guest), seen.steps) == (guest, steps))
    }

    /// Blocks the address spaces in which threads are stuck, and no others.
    fn block(&mut self, stuck: &[(&Arc<Place>, Guest, Duration)]) {
        let mut reopened = false;
        let is_stuck = |guest| stuck.iter().any(|(_, other, _)| *other == guest);
        let is_stuck_with = |thread, pid| {
            stuck.iter().any(|(place, other, _)| place.thread() == thread && *other == Guest::Process(pid))
        };
        self.blocked.retain(|&id, space| {
            let keep = is_stuck(Guest::Space(id));
            reopened |= !keep && space.set_blocked(false);
            keep
        });
        self.strangers.retain(|&thread, (pid, owner)| {
            let keep = is_stuck_with(thread, *pid);
            if !keep {
                owner.end_block();
                reopened = true;
            }
            keep
        });
        for (place, guest, _) in stuck {
            match *guest {
                Guest::Space(id) if !self.blocked.contains_key(&id) => {
                    if let Some(space) = self.pager.space(id) {
                        space.set_blocked(true);
                        self.blocked.insert(id, space);
                    }
                }
                Guest::Process(pid) if !self.strangers.contains_key(&place.thread()) => {
                    if let Some(owner) = place.owner() {
                        owner.begin_block();
                        self.strangers.insert(place.thread(), (pid, owner));
                    }
                }
                _ => {}
            }
        }
        if reopened {
            self.killed.retain(|id| self.blocked.contains_key(id));
            self.denials.retain(|id, _| self.blocked.contains_key(id));
            self.pager.reopen();
        }
    }

    /// Has a thread deny the areas of a blocked address space, unless one does or did so just now.
    fn deny(&mut self, id: u64) {
        let is_recent =
            |(begun, thread): &(Instant, JoinHandle<()>)| begun.elapsed() < PAUSE_OF_DENIALS || !thread.is_finished();
        if self.denials.get(&id).is_some_and(is_recent) {
            return;
        }
        let Some(space) = self.blocked.get(&id).cloned() else { return };
        let thread = std::thread::Builder::new().name("deny".to_owned()).spawn(move || space.deny_areas());
        // Without a thread it is tried again at the next look.
        if let Ok(thread) = thread {
            self.denials.insert(id, (Instant::now(), thread));
        }
    }
}

/// Kills a process that blocks a thread.
fn kill(session: &Session, age: Duration) {
    session.tenant.tell(&format!(
        "error: killed process {}: it has held the lock of its own memory for {} s, so that its pages cannot be served",
        session.pid,
        age.as_secs()
    ));
    // It may have ended just now.
    let _ = session.pidfd.kill(libc::SIGKILL);
}

/// Returns whether a thread is one that holds threads of processes.
fn is_watch(place: &Place) -> bool {
    place.role().is_some_and(|role| role.name() == WATCH)
}

/// Has another thread take the role of a stuck one, if it has a role.
fn replace(place: &Arc<Place>) {
    let Some(role) = place.role().filter(|_| !place.is_surplus()) else { return };
    if let Err(error) = role.start() {
        // Tried again at the next look.
        log(&format!(
            "uzswap: warning: no thread to replace one of role {} that a process holds up: {error}",
            role.name()
        ));
        return;
    }
    place.make_surplus();
}

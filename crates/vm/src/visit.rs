//! Visits: which thread is busy with which address space, and whether it makes progress.
//!
//! A kernel call on an address space (a fill, a registration, a scan, a read) waits for the lock of that address space, and a process
//! can hold its own lock for as long as it likes. The thread that makes such a call cannot be protected from that, so it is made
//! replaceable:
//!
//! 1. A thread marks what it is busy with: [`Space::visit`](crate::space::Space::visit), or [`Visit::of_process`] for a process
//!    that has no address space here yet. A mark costs two stores; each time the thread locks the state of a space it counts a step.
//! 2. A watchdog compares all marks ([`places`]). A thread whose steps stand still is *stuck*, and the address space that it visits is
//!    *blocked*: no other thread visits it, until the stuck thread has gone on.
//! 3. The watchdog starts another thread in the [`Role`] of the stuck one. The stuck thread is *surplus* from then on, and ends as
//!    soon as it gets back to its loop ([`is_surplus`]). It is interrupted by a signal again and again: that ends the read of a userfaultfd.
//!
//! Waits that end by themselves do not count.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::owner::Owner;
use crate::sys::thread;

/// A mark with this bit names a process instead of an address space.
const PROCESS: u64 = 1 << 63;

/// The places of all threads that have ever made a visit, or have a role.
static PLACES: Mutex<Vec<Arc<Place>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: Own = Own::new();
}

/// What a thread does for the manager, so that another thread can do it in its stead.
pub struct Role {
    name: &'static str,
    work: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Role").field(&self.name).finish()
    }
}

impl Role {
    /// Describes a role. `work` may be begun while an earlier thread in this role is still stuck in it, and has to end
    /// when [`is_surplus`] is true.
    pub fn new(name: &'static str, work: impl Fn() + Send + Sync + 'static) -> Arc<Role> {
        Arc::new(Role { name, work: Box::new(work) })
    }

    /// Starts a thread in this role.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(self: &Arc<Role>) -> io::Result<()> {
        let role = self.clone();
        let work = move || {
            // Set once: the thread is new.
            let _ = OWN.with(|own| own.0.role.set(role.clone()));
            thread::allow_interruption();
            (role.work)();
        };
        std::thread::Builder::new().name(self.name.to_owned()).spawn(work).map(drop)
    }

    /// The name of the role's threads.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// What one thread is busy with.
#[derive(Debug)]
pub struct Place {
    thread: i32,
    role: OnceLock<Arc<Role>>,
    /// The address space or the process that is visited; 0 for none.
    guest: AtomicU64,
    steps: AtomicU64,
    /// The owner of the process that is visited; that of an address space is known there.
    owner: Mutex<Option<Arc<Owner>>>,
    /// The thread is in a wait that ends by itself.
    bounded: AtomicBool,
    surplus: AtomicBool,
}

/// Whom a thread visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guest {
    /// The address space with this number.
    Space(u64),
    /// A process that has no address space here yet.
    Process(i32),
}

impl Place {
    /// The thread's id.
    pub fn thread(&self) -> i32 {
        self.thread
    }

    /// The thread's role, if it has one.
    pub fn role(&self) -> Option<&Arc<Role>> {
        self.role.get()
    }

    /// What the thread visits, unless its wait there ends by itself; and how many steps it has made.
    pub fn look(&self) -> (Option<Guest>, u64) {
        let guest = match self.guest.load(Relaxed) {
            0 => None,
            _ if self.bounded.load(Relaxed) => None,
            guest if guest & PROCESS != 0 => Some(Guest::Process((guest & !PROCESS) as i32)),
            guest => Some(Guest::Space(guest)),
        };
        (guest, self.steps.load(Relaxed))
    }

    /// The owner of the process that is visited, if it is one that has no address space here yet.
    pub fn owner(&self) -> Option<Arc<Owner>> {
        self.owner.lock().clone()
    }

    /// Has the thread end when it gets back to its loop.
    pub fn make_surplus(&self) {
        self.surplus.store(true, Relaxed);
    }

    /// Whether the thread has been replaced.
    pub fn is_surplus(&self) -> bool {
        self.surplus.load(Relaxed)
    }
}

/// The places of all threads.
pub fn places() -> Vec<Arc<Place>> {
    PLACES.lock().clone()
}

/// Whether another thread has taken the role of the calling one, which is to end.
pub fn is_surplus() -> bool {
    OWN.with(|own| own.0.is_surplus())
}

/// Counts a step of the calling thread.
pub(crate) fn step() {
    OWN.with(|own| own.0.steps.store(own.0.steps.load(Relaxed) + 1, Relaxed));
}

/// Does `wait`, which ends by itself in short time whatever a process does.
pub(crate) fn bounded<T>(wait: impl FnOnce() -> T) -> T {
    let set = |value| OWN.with(|own| own.0.bounded.store(value, Relaxed));
    set(true);
    let result = wait();
    step();
    set(false);
    result
}

/// The place of the calling thread, which goes when the thread ends.
struct Own(Arc<Place>);

impl Own {
    fn new() -> Own {
        let (role, guest, steps, owner, bounded, surplus) = Default::default();
        let place = Arc::new(Place { thread: thread::own_id(), role, guest, steps, owner, bounded, surplus });
        PLACES.lock().push(place.clone());
        Own(place)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        PLACES.lock().retain(|place| !Arc::ptr_eq(place, &self.0));
    }
}

/// A visit, as long as this lives. A visit inside another one hides it.
#[derive(Debug)]
pub struct Visit {
    before: u64,
}

impl Visit {
    pub(crate) fn of_space(id: u64) -> Visit {
        debug_assert!(id & PROCESS == 0);
        Visit::begin(id)
    }

    /// Visits a process of `owner` that has no address space here yet.
    pub fn of_process(pid: i32, owner: &Arc<Owner>) -> Visit {
        OWN.with(|own| *own.0.owner.lock() = Some(owner.clone()));
        Visit::begin(pid as u64 | PROCESS)
    }

    fn begin(guest: u64) -> Visit {
        step();
        Visit { before: OWN.with(|own| own.0.guest.swap(guest, Relaxed)) }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        OWN.with(|own| own.0.guest.store(self.before, Relaxed));
        step();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_tells_the_innermost_visit_and_its_steps() {
        let place = OWN.with(|own| own.0.clone());
        assert_eq!(place.look().0, None);
        let outer = Visit::of_space(7);
        let (guest, steps) = place.look();
        assert_eq!(guest, Some(Guest::Space(7)));
        let inner = Visit::of_process(12, &Arc::new(Owner::user()));
        assert_eq!(place.look().0, Some(Guest::Process(12)));
        assert!(place.look().1 > steps);
        drop(inner);
        assert_eq!(place.look().0, Some(Guest::Space(7)));
        bounded(|| assert_eq!(place.look().0, None, "it ends by itself"));
        drop(outer);
        assert_eq!(place.look().0, None);
    }

    #[test]
    fn a_replaced_thread_knows_it_and_leaves_no_place() {
        let (said, heard) = std::sync::mpsc::channel();
        let role = Role::new("test", move || {
            let own = OWN.with(|own| own.0.clone());
            assert!(!is_surplus());
            places().iter().find(|place| place.thread() == own.thread()).expect("it has a place").make_surplus();
            let _ = said.send((is_surplus(), own));
        });
        role.start().expect("a thread");
        let (surplus, place) = heard.recv().expect("it runs");
        assert!(surplus && place.role().is_some_and(|own| Arc::ptr_eq(own, &role)));
        while places().iter().any(|other| Arc::ptr_eq(other, &place)) {
            std::thread::yield_now();
        }
    }
}

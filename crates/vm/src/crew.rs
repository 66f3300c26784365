//! Large tasks in parts, which several threads take: the crew, and whoever the task is for.
//!
//! 1. *Loads.* Of a large load the part that a thread of the program waits for is loaded by the thread that heard of it; the others
//!    are put here, in the order in which they will be wanted. Whoever takes one prefers the first where nobody else fills.
//! 2. *Stores.* Staged pages are read and compressed in parts, by the thread that reclaims and by those of the crew that
//!    have nothing else to do. It waits until all parts are done: so this is for who has time. While programs grow towards their
//!    limit, one who helps may lose his processor to them, and let reclaim wait.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use uzswap_engine::{Home, MAX_FOLIO_ORDER, Slot};

use crate::fault::Load;
use crate::pager::{Pager, read_pages, with_buffer};
use crate::space::{Space, Worker};
use crate::sys::thread::{self, Apart};
use crate::visit::{self, Visit};

/// The most pages that one thread loads or stores at once: a folio.
pub(crate) const PART: usize = 64;
const _: () = assert!(PART <= 1 << MAX_FOLIO_ORDER);

/// How many loads are looked at for one where nobody fills: the parts of four folios.
const MOST_LOOKED_AT: usize = 32;

/// What the crew has to do.
#[derive(Default)]
pub(crate) struct Crew {
    tasks: Mutex<Tasks>,
    more: Condvar,
}

#[derive(Default)]
struct Tasks {
    loads: VecDeque<(Arc<Space>, Load)>,
    /// Where those who have taken a load fill, one entry each.
    filled: Vec<Place>,
    stores: Vec<Arc<Batch>>,
}

/// 2 MiB of an address space, by the numbers of both: what one page table of the kernel maps. That has a lock, which two who fill
/// there would wait for at every page.
type Place = (u64, u64);

enum Task {
    Load(Arc<Space>, Load),
    Store(Arc<Batch>),
}

impl Tasks {
    /// The first load where no thread fills; if one does everywhere, the first of all. Loads of address spaces that are not to be
    /// visited go to the end.
    fn take_load(&mut self) -> Option<(Arc<Space>, Load)> {
        for _ in 0..self.loads.len().min(MOST_LOOKED_AT) {
            if !self.loads[0].0.is_shunned() {
                break;
            }
            self.loads.rotate_left(1);
        }
        let place = |(space, load): &(Arc<Space>, Load)| (space.id, load.chunk());
        let is_free = |load: &(Arc<Space>, Load)| !load.0.is_shunned() && !self.filled.contains(&place(load));
        let free = self.loads.iter().take(MOST_LOOKED_AT).position(is_free);
        let first = || self.loads.front().is_some_and(|load| !load.0.is_shunned()).then_some(0);
        let taken = self.loads.remove(free.or_else(first)?)?;
        self.filled.push(place(&taken));
        Some(taken)
    }
}

impl Crew {
    /// Adds parts of a load for `space`, of which the caller will take what nobody else has. For one it calls nobody.
    pub fn load(&self, space: &Arc<Space>, loads: Vec<Load>) {
        let several = loads.len() > 1;
        self.tasks.lock().loads.extend(loads.into_iter().map(|load| (space.clone(), load)));
        if several {
            self.call();
        }
    }

    /// Has somebody take what is there.
    pub fn call(&self) {
        self.more.notify_all();
    }

    /// The next part of a load, if there is one. The caller tells when it is done.
    pub fn take_load(&self) -> Option<(Arc<Space>, Load)> {
        self.tasks.lock().take_load()
    }

    /// A load that was taken is done.
    pub fn done(&self, place: Place) {
        let filled = &mut self.tasks.lock().filled;
        if let Some(index) = filled.iter().position(|other| *other == place) {
            filled.swap_remove(index);
        }
    }

    /// Waits for something to do. Somebody waits for a load, perhaps.
    fn wait(&self) -> Task {
        let mut tasks = self.tasks.lock();
        loop {
            if let Some((space, load)) = tasks.take_load() {
                return Task::Load(space, load);
            }
            if let Some(batch) = tasks.stores.last() {
                return Task::Store(batch.clone());
            }
            self.more.wait(&mut tasks);
        }
    }
}

/// Staged pages that are being stored.
struct Batch {
    /// The number of the address space that they are of.
    space: u64,
    worker: Arc<Worker>,
    sequences: Vec<u32>,
    homes: Vec<Home>,
    progress: Mutex<BatchProgress>,
    done: Condvar,
}

struct BatchProgress {
    /// The first page that nobody has taken.
    next: usize,
    /// Pages that somebody has taken and not done with.
    pending: usize,
    slots: Vec<Option<Slot>>,
    error: Option<io::Error>,
}

impl Batch {
    /// Takes a part.
    fn take(&self) -> Option<std::ops::Range<usize>> {
        let mut progress = self.progress.lock();
        let start = progress.next;
        let end = self.sequences.len().min(start + PART);
        (progress.next, progress.pending) = (end, progress.pending + (end - start));
        (start < end).then_some(start..end)
    }
}

impl Pager {
    /// Does what there is for the crew to do, until the calling thread is replaced. Any number of threads may.
    pub fn work(&self) {
        // Who waits for the last part is not to wait for a whole time slice.
        let _ = thread::ask_for_short_slices();
        while !visit::is_surplus() {
            match self.crew.wait() {
                Task::Load(space, load) => self.finish_taken(&space, load),
                Task::Store(batch) => {
                    let _visit = Visit::of_space(batch.space);
                    if !self.store_part(&batch) {
                        self.crew.tasks.lock().stores.retain(|other| !Arc::ptr_eq(other, &batch));
                    }
                }
            }
        }
    }

    /// Finishes a load that was taken here.
    pub(crate) fn finish_taken(&self, space: &Space, load: Load) {
        let _visit = space.visit();
        let place = (space.id, load.chunk());
        self.finish_load(space, load);
        self.crew.done(place);
    }

    /// Gives staged pages to the engine, perhaps with the help of the crew; their slots, where it took them.
    pub(crate) fn store(
        &self,
        space: &Space,
        worker: &Arc<Worker>,
        sequences: Vec<u32>,
        helped: bool,
    ) -> io::Result<Vec<Option<Slot>>> {
        let _apart = Apart::begin();
        let homes = self.homes(space, worker, &sequences);
        let progress = BatchProgress { next: 0, pending: 0, slots: vec![None; sequences.len()], error: None };
        let helped = helped && sequences.len() > PART;
        let (worker, progress, done) = (worker.clone(), Mutex::new(progress), Condvar::new());
        let batch = Arc::new(Batch { space: space.id, worker, sequences, homes, progress, done });
        if helped {
            self.crew.tasks.lock().stores.push(batch.clone());
            self.crew.more.notify_all();
        }
        while self.store_part(&batch) {}
        if helped {
            self.crew.tasks.lock().stores.retain(|other| !Arc::ptr_eq(other, &batch));
        }
        let mut progress = batch.progress.lock();
        while progress.pending > 0 {
            batch.done.wait(&mut progress);
        }
        let slots = std::mem::take(&mut progress.slots);
        match progress.error.take() {
            None => Ok(slots),
            Some(error) => {
                self.engine.invalidate_all(&slots.into_iter().flatten().collect::<Vec<_>>());
                Err(error)
            }
        }
    }

    /// Stores a part of a batch; false if there is none left.
    fn store_part(&self, batch: &Batch) -> bool {
        let Some(part) = batch.take() else { return false };
        let (sequences, homes) = (&batch.sequences[part.clone()], &batch.homes[part.clone()]);
        let stored = with_buffer(part.len(), |data| {
            if read_pages(&batch.worker, sequences, data.as_flattened_mut()).is_err() {
                let space = self.space(batch.space).ok_or(io::ErrorKind::NotFound)?;
                space.lock().read_staged(&batch.worker, sequences, data)?;
            }
            let store = |(page, &home)| self.engine.swap_out(page, home).ok();
            io::Result::Ok(data.iter().zip(homes).map(store).collect::<Vec<_>>())
        });
        let mut progress = batch.progress.lock();
        progress.pending -= part.len();
        match stored {
            Ok(slots) => progress.slots[part].copy_from_slice(&slots),
            Err(error) => {
                progress.next = batch.sequences.len();
                progress.error = Some(error);
            }
        }
        if progress.pending == 0 {
            batch.done.notify_all();
        }
        true
    }
}

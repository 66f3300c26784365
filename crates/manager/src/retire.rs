//! Ending a manager while its programs run on: first everything comes back to them.
//!
//! 1. Meanwhile nobody evicts, and nobody has a limit: else what comes back would go again.
//! 2. If there is not memory enough, or it takes too long, all is as it was before.
//! 3. Threads of their own do the work: a process that holds the lock of its memory holds up one of these, and the caller does not wait
//!    for it beyond its time.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use uzswap_engine::Zswap;
use uzswap_vm::pager::Pager;
use uzswap_vm::sys::memory;

use crate::charge::Charge;
use crate::control::Limit;
use crate::groups::Groups;

/// How long it may take for each gibibyte, and in all cases.
const PATIENCE_PER_GIB: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(10);

/// Brings back what all programs have lost, for good. An error says why that cannot be.
pub fn bring_back(pager: &Arc<Pager>, groups: &Groups, engine: &Zswap) -> Result<(), String> {
    let away = engine.counters();
    let bytes = away.root.zswapped + away.root.swapped;
    let available = memory::available().unwrap_or(u64::MAX);
    let mib = |bytes: u64| bytes >> 20;
    if bytes > available {
        return Err(format!(
            "to bring back {} MiB takes more than the {} MiB of memory that are free; end jobs first",
            mib(bytes),
            mib(available)
        ));
    }
    let limits = Lifted::lift(groups);
    pager.set_evicting(false);
    let patience = PATIENCE + PATIENCE_PER_GIB * (bytes >> 30) as u32;
    let (worker, until) = (pager.clone(), Instant::now() + patience);
    if within(patience + PATIENCE, move || worker.bring_back_all(until)) == Some(true) {
        // Nobody has use for limits any more.
        std::mem::forget(limits);
        return Ok(());
    }
    pager.set_evicting(true);
    Err(format!(
        "{} MiB have not been brought back within {} s; is a job stopped, or is the swap file not readable?",
        mib(bytes),
        patience.as_secs()
    ))
}

/// Lets all programs go on without this manager, as far as they let themselves be reached: nothing of theirs is away any more.
pub fn release(pager: &Arc<Pager>) {
    let worker = pager.clone();
    within(PATIENCE, move || worker.release());
}

/// Does `work` in a thread of its own. None if that takes too long, or there is no thread.
fn within<T: Send + 'static>(time: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (said, heard) = mpsc::channel();
    let work = move || drop(said.send(work()));
    std::thread::Builder::new().name("retire".to_owned()).spawn(work).ok()?;
    heard.recv_timeout(time).ok()
}

/// The limits of all groups, which are set again when this is dropped.
struct Lifted(Vec<(Arc<Charge>, Limit, Option<u64>)>);

impl Lifted {
    fn lift(groups: &Groups) -> Lifted {
        let lift = |charge: &Arc<Charge>, limit| {
            let bytes = charge.limit(limit);
            charge.set_limit(limit, None);
            (charge.clone(), limit, bytes)
        };
        let limits = [Limit::Max, Limit::High];
        Lifted(groups.all().iter().flat_map(|charge| limits.map(|limit| lift(charge, limit))).collect())
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        for (charge, limit, bytes) in &self.0 {
            charge.set_limit(*limit, *bytes);
        }
    }
}

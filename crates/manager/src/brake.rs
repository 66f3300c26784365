//! Holding programs whose memory grows unseen while their group is at its limit.
//!
//! What is touched in a mapping that is watched waits at the limit by itself. But a new mapping is not watched before the
//! manager has seen it, and a program that maps and touches faster than reclaim frees would grow past every limit. So
//! its threads that run are held, from the moment its group is seen to have more than it was given so near the limit until
//! reclaim has brought the charge down. Far from a limit nobody is ever held.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzswap_vm::sys::ptrace::Held;

use crate::charge::Charge;
use crate::watch::Sizes;

/// How long a program is held at most while its group is below its limit: what keeps the charge there may be others.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a process has to have grown by, in bytes, to be one of those that are to blame. The kernel counts less no better.
const GROWN: u64 = 128 << 10;

/// Belongs to the thread that looks.
#[derive(Debug, Default)]
pub struct Brake {
    held: HashMap<u64, (Held, Instant)>,
    /// Those to be let go.
    free: Vec<Held>,
    sizes: HashMap<u64, u64>,
}

impl Brake {
    /// Holds and lets go, after a look.
    pub fn adjust(&mut self, sessions: &Sizes) {
        let charges: HashMap<u64, Arc<Charge>> =
            sessions.iter().map(|(session, _)| (session.id, session.charge())).collect();
        let may_go = |id: &u64, (_, since): &mut (Held, Instant)| {
            charges.get(id).is_none_or(|charge| {
                let near = charge.path().any(|charge| charge.excess() > 0) && since.elapsed() < PATIENCE;
                !near && !charge.path().any(Charge::is_above_max)
            })
        };
        self.free.extend(self.held.extract_if(may_go).map(|(_, (held, _))| held));
        self.free.iter_mut().for_each(Held::let_go);
        self.free.retain(|held| !held.is_empty());
        let before = std::mem::take(&mut self.sizes);
        for (session, bytes) in sessions {
            let grown = bytes.saturating_sub(before.get(&session.id).copied().unwrap_or(0));
            // Who has not grown may be the next to run.
            let to_blame = |charge: &Charge| charge.is_past_brink() || (charge.is_at_brink() && grown >= GROWN);
            if !session.charge().path().any(|charge| charge.has_grown_unseen() && to_blame(charge)) {
                continue;
            }
            if let Some((held, _)) = self.held.get_mut(&session.id) {
                // Some of its threads slept.
                held.hold_more(session.pid);
                continue;
            }
            let held = Held::hold(session.pid);
            if !held.is_empty() {
                self.held.insert(session.id, (held, Instant::now()));
            }
        }
        self.sizes = sessions.iter().map(|(session, bytes)| (session.id, *bytes)).collect();
        sessions.iter().for_each(|(session, _)| session.charge().path().for_each(Charge::forget_unseen));
    }
}

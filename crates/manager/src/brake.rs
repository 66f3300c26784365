//! Holding programs whose memory grows unseen while their group is at its limit.
//!
//! What is touched in a mapping that is watched waits at the limit by itself. But a new mapping is not watched before the
//! manager has seen it, and a program that maps and touches faster than reclaim frees would grow past every limit. So
//! its threads that run are held, from the moment its group is seen to have more than it was given so near the limit until its
//! mappings are watched and reclaim has brought the charge down. The thread that looks holds no process far from a limit. It lets go a process
//! for which a signal is pending that ends it: the parent may wait for that end, and it frees more than reclaim.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzswap_vm::sys::process::is_told_to_end;
use uzswap_vm::sys::ptrace::Held;

use crate::charge::{Charge, touched_in};
use crate::control::GroupId;
use crate::sessions::Session;
use crate::stall::Stalled;
use crate::watch::Sizes;

/// How long a program is held at most while its group is below its limit: what keeps the charge there may be others.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a process has to have grown by, in bytes, to be one of those that are to blame. The kernel counts less no better.
const GROWN: u64 = 128 << 10;

/// How many may go at once where the limit is near.
const FEW: usize = 2;

/// For how long reclaim makes room for those who have been held to grow again.
const RESERVED: Duration = Duration::from_millis(100);

/// A process that is held.
#[derive(Debug)]
struct Hold {
    held: Held,
    since: Instant,
    /// When to see next whether the process is told to end.
    see_at: Instant,
    /// The request to have its mappings registered.
    request: u64,
    _stalled: Stalled,
}

/// Belongs to the thread that looks.
#[derive(Debug, Default)]
pub struct Brake {
    /// Groups in which somebody was held not long ago.
    reserved: HashMap<GroupId, (Arc<Charge>, Instant)>,
    held: HashMap<u64, Hold>,
    /// Those to be let go.
    free: Vec<Held>,
    /// Processes that were let go because a signal is to end them, by session.
    ending: HashSet<u64>,
    sizes: HashMap<u64, u64>,
    /// Which threads of each process were held, by session.
    regulars: HashMap<u64, Regulars>,
}

/// Counts how often each thread of a process was held. A thread that starts many others runs whenever memory grows, so it is held time and
/// again; each of the threads that it has started is held once. To hold the first stops more growth than to hold the others, but it may sleep
/// when it is looked at.
#[derive(Debug, Default)]
struct Regulars(HashMap<i32, u32>);

impl Regulars {
    /// Maximum number of threads to look at again and again.
    const MOST: usize = 8;

    /// Maximum number of threads to remember. With more, all counts are halved, and threads whose count becomes 0 are forgotten.
    const REMEMBERED: usize = 1024;

    /// Counts threads that were held once more.
    fn note(&mut self, ids: impl Iterator<Item = i32>) {
        ids.for_each(|id| *self.0.entry(id).or_default() += 1);
        if self.0.len() > Self::REMEMBERED {
            self.0.retain(|_, times| {
                *times /= 2;
                *times > 0
            });
        }
    }

    /// Returns the threads that were held most often, the oldest first among equals: a young one most likely runs only for a moment.
    fn often(&self) -> Vec<i32> {
        let mut ids: Vec<(Reverse<u32>, i32)> = self.0.iter().map(|(&id, &times)| (Reverse(times), id)).collect();
        ids.sort_unstable();
        ids.iter().take(Self::MOST).map(|(_, id)| *id).collect()
    }
}

impl Brake {
    /// Holds and lets go, after a look; the next one comes later than it should by as much as `late`. Gives how many bytes can be
    /// touched besides for want of speed, by those who might be to blame.
    pub fn adjust(&mut self, sessions: &Sizes, late: Duration) -> u64 {
        self.let_go(sessions, touched_in(late));
        let lead = self.hold(sessions, late);
        let forgotten = self.reserved.extract_if(|_, (_, since)| since.elapsed() > RESERVED);
        forgotten.for_each(|(_, (charge, _))| charge.set_reserve(0));
        self.sizes = sessions.iter().map(|(session, bytes)| (session.id, *bytes)).collect();
        self.regulars.retain(|id, _| self.sizes.contains_key(id));
        self.ending.retain(|id| self.sizes.contains_key(id));
        sessions.iter().for_each(|(session, _)| session.charge().path().for_each(Charge::forget_unseen));
        lead
    }

    /// Returns whether a process is held, or is being let go. It goes on only by a later look.
    pub fn holds(&self) -> bool {
        !self.held.is_empty() || self.lets_go()
    }

    /// Whether a thread is about to be let go that has to be looked at once more for that.
    pub fn lets_go(&self) -> bool {
        !self.free.is_empty()
    }

    /// Lets go those who need not be held any longer: not all at once, if `lead` bytes could be too much.
    fn let_go(&mut self, sessions: &Sizes, lead: u64) {
        let living: HashMap<u64, &Arc<Session>> = sessions.iter().map(|(session, _)| (session.id, session)).collect();
        let mut longest_held: Vec<u64> = self.held.keys().copied().collect();
        longest_held.sort_unstable_by_key(|id| self.held[id].since);
        let mut gone = 0;
        for id in longest_held {
            let is_told = living.get(&id).is_some_and(|session| self.is_told_to_end(session));
            let may_go = is_told
                || living.get(&id).is_none_or(|session| {
                    let (charge, hold) = (session.charge(), &self.held[&id]);
                    let waits = charge.path().any(|charge| charge.excess() > 0) || !session.is_refreshed(hold.request);
                    let is_due =
                        (!waits || hold.since.elapsed() > PATIENCE) && !charge.path().any(Charge::is_above_max);
                    let counts = is_due && charge.path().any(|charge| charge.is_at_brink(lead));
                    gone += usize::from(counts);
                    is_due && (!counts || gone <= FEW)
                });
            if may_go {
                self.free.extend(self.held.remove(&id).map(|hold| hold.held));
            }
        }
        self.free.iter_mut().for_each(Held::let_go);
        self.free.retain(|held| !held.is_empty());
    }

    /// Returns whether a signal is to end a process that has been held for long; then it may go.
    fn is_told_to_end(&mut self, session: &Session) -> bool {
        let Some(hold) = self.held.get_mut(&session.id) else { return false };
        let now = Instant::now();
        if now < hold.see_at {
            return false;
        }
        hold.see_at = now + PATIENCE;
        let is_told = is_told_to_end(session.pid);
        if is_told {
            self.ending.insert(session.id);
        }
        is_told
    }

    /// Holds those who grow unseen so near a limit that what they touch till the next look could be too much; gives that.
    fn hold(&mut self, sessions: &Sizes, late: Duration) -> u64 {
        let (mut most, usual) = (0, touched_in(late));
        for (session, bytes) in sessions {
            let charge = session.charge();
            if !charge.path().any(Charge::has_grown_unseen) {
                continue;
            }
            // What a fork has left to it, it has not touched.
            let before = self.sizes.get(&session.id).copied().unwrap_or(session.share.bytes());
            let grown = bytes.saturating_sub(before);
            // While its threads are looked through, those that are not held yet go on.
            let lead = usual + touched_in(session.threads.takes());
            most = lead.max(most);
            // Who has not grown may be the next to run.
            let is_to_blame = |charge: &Charge| {
                let much = charge.is_past_brink(lead) || (charge.is_at_brink(lead) && grown >= GROWN);
                charge.has_grown_unseen() && charge.is_near() && much
            };
            if !charge.path().any(is_to_blame) || session.space.resists() {
                continue;
            }
            if self.ending.contains(&session.id) && is_told_to_end(session.pid) {
                continue;
            }
            let _visit = session.space.visit();
            let regulars = self.regulars.entry(session.id).or_default();
            let often = regulars.often();
            if let Some(hold) = self.held.get_mut(&session.id) {
                // Some of its threads slept.
                hold.held.hold_more(&session.threads, &often);
                continue;
            }
            let held = Held::hold(&session.threads, &often);
            regulars.note(held.ids());
            if !held.is_empty() {
                self.reserve(&charge, usual);
                let (since, request, _stalled) = (Instant::now(), session.ask_refresh(), Stalled::new(charge));
                self.held.insert(session.id, Hold { held, since, see_at: since + PATIENCE, request, _stalled });
            }
        }
        most
    }

    /// Has reclaim make room in each group above a process that is held, for what it touches when it goes on.
    fn reserve(&mut self, charge: &Arc<Charge>, bytes: u64) {
        for charge in std::iter::successors(Some(charge), |charge| charge.parent.as_ref()) {
            charge.set_reserve(bytes);
            self.reserved.insert(charge.id, (charge.clone(), Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_held_every_time_is_known_from_the_first_time_on() {
        const STARTER: i32 = 7;
        let mut regulars = Regulars::default();
        for hold in 0..100 {
            let young = 1000 + hold * 100;
            regulars.note((young..young + 100).chain([STARTER]));
            assert_eq!(regulars.often()[0], STARTER);
            assert!(regulars.often().len() <= Regulars::MOST);
        }
        assert!(regulars.0.len() <= Regulars::REMEMBERED);
    }
}

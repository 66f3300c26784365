//! The numbers by which the kernel knows the names of the tree.
//!
//! 1. A path keeps its number for as long as the kernel remembers it, and no longer: what is asked for once costs nothing
//!    later.
//! 2. A group that was removed here never gets its number back: the kernel holds that inode for dead, even if a new group
//!    has the name by now.
//! 3. No number is given twice.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of the top, which is never forgotten.
pub const TOP: u64 = 1;

/// What a directory shows for a name that has no number.
pub const UNNUMBERED: u64 = 0xffff_ffff;

/// Paths and their numbers.
#[derive(Debug)]
pub struct Names(Mutex<Table>);

#[derive(Debug)]
struct Table {
    known: HashMap<u64, Known>,
    numbers: HashMap<String, u64>,
    next: u64,
}

#[derive(Debug)]
struct Known {
    path: String,
    /// How often the kernel has been given the number.
    lookups: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Present,
    RemovedGroup,
    RemovedFile,
}

impl Names {
    /// The top alone.
    pub fn new() -> Names {
        let top = Known { path: String::new(), lookups: 1, state: State::Present };
        // What stands for a name without a number is given to none.
        let next = UNNUMBERED + 1;
        let table = Table { known: [(TOP, top)].into(), numbers: [(String::new(), TOP)].into(), next };
        Names(Mutex::new(table))
    }

    /// The path of a number; none if it is unknown, or was removed.
    pub fn path(&self, number: u64) -> Option<String> {
        self.table().known.get(&number).filter(|known| known.state == State::Present).map(|known| known.path.clone())
    }

    /// Whether a number is that of a group that was removed here. It is a directory still, for whoever works in it.
    pub fn is_removed_group(&self, number: u64) -> bool {
        self.table().known.get(&number).is_some_and(|known| known.state == State::RemovedGroup)
    }

    /// The number of a path, if it has one.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.table().numbers.get(path).copied()
    }

    /// The number of a path, which the kernel is given once more.
    pub fn look_up(&self, path: &str) -> u64 {
        let table = &mut *self.table();
        if let Some(&number) = table.numbers.get(path) {
            table.known.get_mut(&number).expect("numbers are of what is known").lookups += 1;
            return number;
        }
        let number = table.next;
        table.next += 1;
        table.known.insert(number, Known { path: path.to_owned(), lookups: 1, state: State::Present });
        table.numbers.insert(path.to_owned(), number);
        number
    }

    /// The kernel forgets so many of the times that it was given the number.
    pub fn forget(&self, number: u64, times: u64) {
        let table = &mut *self.table();
        let Some(known) = table.known.get_mut(&number).filter(|_| number != TOP) else { return };
        known.lookups = known.lookups.saturating_sub(times);
        if known.lookups > 0 {
            return;
        }
        let known = table.known.remove(&number).expect("was there just now");
        if table.numbers.get(&known.path) == Some(&number) {
            table.numbers.remove(&known.path);
        }
    }

    /// A group was removed, and with it its files.
    pub fn remove(&self, path: &str) {
        let table = &mut *self.table();
        let below = format!("{path}/");
        for known in table.known.values_mut().filter(|known| known.path == path || known.path.starts_with(&below)) {
            known.state = if known.path == path { State::RemovedGroup } else { State::RemovedFile };
            table.numbers.remove(&known.path);
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change is whole before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_keeps_its_number_until_the_kernel_forgets_it() {
        let names = Names::new();
        let number = names.look_up("cgroup");
        assert_eq!((names.look_up("cgroup"), names.path(number)), (number, Some("cgroup".to_owned())));
        names.forget(number, 1);
        assert_eq!(names.number("cgroup"), Some(number));
        names.forget(number, 1);
        assert_eq!((names.number("cgroup"), names.path(number)), (None, None));
        assert_ne!(names.look_up("cgroup"), number);
        names.forget(TOP, 100);
        assert_eq!(names.path(TOP), Some(String::new()));
        names.forget(77, 1);
    }

    #[test]
    fn a_removed_group_stays_dead_when_its_name_is_given_again() {
        let names = Names::new();
        let all = ["cgroup/a", "cgroup/a/memory.max", "cgroup/ab"].map(|path| names.look_up(path));
        names.remove("cgroup/a");
        assert_eq!(all.map(|number| names.path(number).is_some()), [false, false, true]);
        assert_eq!(all.map(|number| names.is_removed_group(number)), [true, false, false]);
        let again = names.look_up("cgroup/a");
        assert_ne!(again, all[0]);
        names.forget(all[0], 1);
        assert_eq!(names.number("cgroup/a"), Some(again));
    }
}

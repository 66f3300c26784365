//! Connections of processes that have not given a job's token yet: how many there can be, and for how long.
//!
//! 1. Each has [`PATIENCE`] to say something.
//! 2. A user (`SO_PEERCRED`) has [`MOST_OF_ONE`] at most. One more takes the place of that user's oldest.
//! 3. All users together have [`MOST`] at most, or a quarter of the manager's descriptors if that is less. One more takes the
//!    place of the oldest of the user with most.
//! 4. One that gives way is heard first: what it has said by then counts, although the manager has not come to it yet.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// How long a connection may be silent.
const PATIENCE: Duration = Duration::from_secs(2);

const MOST_OF_ONE: usize = 256;
const MOST: usize = 4096;

/// The silent connections, by their numbers, which grow.
#[derive(Debug)]
pub struct Silent {
    most: usize,
    count: usize,
    by_user: HashMap<u32, BTreeMap<u64, Instant>>,
    users: HashMap<u64, u32>,
}

impl Silent {
    /// None yet. `descriptors` is how many the manager can have.
    pub fn new(descriptors: u64) -> Silent {
        let most = MOST.min(usize::try_from(descriptors / 4).unwrap_or(MOST));
        Silent { most, count: 0, by_user: HashMap::new(), users: HashMap::new() }
    }

    /// Adds a connection of a user. Returns the number of the one that gives way to it.
    pub fn add(&mut self, user: u32, number: u64, now: Instant) -> Option<u64> {
        self.by_user.entry(user).or_default().insert(number, now);
        self.users.insert(number, user);
        self.count += 1;
        let largest = if self.by_user[&user].len() > MOST_OF_ONE {
            user
        } else if self.count > self.most {
            *self.by_user.iter().max_by_key(|(_, connections)| connections.len())?.0
        } else {
            return None;
        };
        self.by_user[&largest].first_key_value().map(|(number, _)| *number)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Forgets a connection, if it is one of these.
    pub fn remove(&mut self, number: u64) {
        let Some(user) = self.users.remove(&number) else { return };
        self.count -= 1;
        if let Some(connections) = self.by_user.get_mut(&user) {
            connections.remove(&number);
            if connections.is_empty() {
                self.by_user.remove(&user);
            }
        }
    }

    /// Returns those whose time is over.
    pub fn late(&self, now: Instant) -> Vec<u64> {
        let is_late = |since: &Instant| now.saturating_duration_since(*since) >= PATIENCE;
        let of_one = |connections: &BTreeMap<u64, Instant>| {
            connections.iter().take_while(|(_, since)| is_late(since)).map(|(number, _)| *number).collect::<Vec<u64>>()
        };
        self.by_user.values().flat_map(of_one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_has_so_many_and_its_oldest_gives_way() {
        let (mut silent, now) = (Silent::new(u64::MAX), Instant::now());
        assert_eq!(silent.add(0, 0, now), None);
        for number in 1..=MOST_OF_ONE as u64 {
            assert_eq!(silent.add(1, number, now), None);
        }
        for number in 1..=3 {
            assert_eq!(silent.add(1, 1000 + number, now), Some(number));
            silent.remove(number);
        }
        assert_eq!(silent.add(0, 2000, now), None, "another user has room");
    }

    #[test]
    fn all_users_have_so_many_and_the_largest_gives_way() {
        let (mut silent, now) = (Silent::new(400), Instant::now());
        assert!((0..50).all(|number| silent.add(1, number, now).is_none()));
        assert!((50..100).all(|number| silent.add(number as u32, number, now).is_none()));
        assert_eq!(silent.add(1000, 100, now), Some(0));
        silent.remove(0);
        assert_eq!(silent.add(1001, 101, now), Some(1));
    }

    #[test]
    fn silence_has_an_end() {
        let (mut silent, now) = (Silent::new(u64::MAX), Instant::now());
        silent.add(1, 1, now);
        silent.add(1, 2, now + PATIENCE / 2);
        silent.add(2, 3, now);
        silent.remove(3);
        assert!(silent.late(now + PATIENCE / 2).is_empty());
        assert_eq!(silent.late(now + PATIENCE), [1]);
        assert_eq!(silent.late(now + 2 * PATIENCE), [1, 2]);
        silent.remove(1);
        silent.remove(2);
        assert!(silent.count == 0 && silent.by_user.is_empty() && silent.users.is_empty(), "nothing is left behind");
    }
}

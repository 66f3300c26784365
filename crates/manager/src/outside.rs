//! Connections to the control socket that wait for a place, fairly divided among users.
//!
//! 1. Each user has a queue of bounded length; a connection that finds it full is refused. So one user's crowd delays only that
//!    user's own connections. Root and the manager's user are never refused: while one of their queues is full, no connection
//!    is accepted, and new ones wait in the socket's backlog.
//! 2. Users take turns: each lets in one connection before any lets in a second.
//! 3. Root and the manager's user have places of their own.
//! 4. When all places are taken, the user with the most of them gives one up: its oldest, if that has had time to speak.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::time::Instant;

/// Places of root and the manager's user, and as many of all others.
pub const PLACES: usize = 16;

/// Connections of one user that wait. More are refused.
const MOST_OF_ONE: usize = 64;

/// Connections of root that wait, and as many of the manager's user. More stay in the backlog.
const MOST_OF_PRIVILEGED: usize = 512;

/// Users other than root and the manager's own with connections that wait.
const MOST_USERS: usize = 64;

/// Connections that wait: `C` of each user.
#[derive(Debug)]
pub struct Outside<C> {
    /// In the order of their turns.
    users: VecDeque<(u32, VecDeque<C>)>,
}

impl<C> Default for Outside<C> {
    fn default() -> Self {
        Outside { users: VecDeque::new() }
    }
}

/// A place that is taken.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    /// By a connection of this user.
    pub user: u32,
    /// When it can be given up; `None` if it cannot.
    pub settled: Option<Instant>,
    /// Its age: the least is the oldest.
    pub since: Option<Instant>,
}

/// What to do about those that wait.
#[derive(Debug, PartialEq, Eq)]
pub enum Turn<C> {
    /// Let this one in; it takes the place with this number, if that says one, or a free one.
    In(C, Option<usize>),
    /// Look again at this time.
    Later(Instant),
    /// None waits, or none can be let in before a place becomes free.
    None,
}

impl<C> Outside<C> {
    pub fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// Returns whether root or the manager's user has as many as can wait: then none is to be accepted.
    pub fn is_full(&self, is_privileged: impl Fn(u32) -> bool) -> bool {
        self.users.iter().any(|(user, queue)| is_privileged(*user) && queue.len() >= MOST_OF_PRIVILEGED)
    }

    /// Adds a connection; gives it back if its user has too many.
    pub fn add(&mut self, user: u32, connection: C, is_privileged: impl Fn(u32) -> bool) -> Option<C> {
        if let Some((_, queue)) = self.users.iter_mut().find(|(other, _)| *other == user) {
            if !is_privileged(user) && queue.len() >= MOST_OF_ONE {
                return Some(connection);
            }
            queue.push_back(connection);
        } else {
            if !is_privileged(user) && self.users.len() >= MOST_USERS {
                return Some(connection);
            }
            self.users.push_back((user, VecDeque::from([connection])));
        }
        None
    }

    /// Decides about the next connection, with these places taken.
    pub fn next(&mut self, taken: &[Taken], is_privileged: impl Fn(u32) -> bool, now: Instant) -> Turn<C> {
        let mut later: Option<Instant> = None;
        for turn in 0..self.users.len() {
            let user = self.users[turn].0;
            let alike =
                || taken.iter().enumerate().filter(|(_, place)| is_privileged(place.user) == is_privileged(user));
            let place = if alike().count() < PLACES {
                None
            } else {
                match given_up(alike(), user) {
                    Some((place, settled)) if settled <= now => Some(place),
                    Some((_, settled)) => {
                        later = Some(later.map_or(settled, |later| later.min(settled)));
                        continue;
                    }
                    None => continue,
                }
            };
            return self.take(turn).map_or(Turn::None, |connection| Turn::In(connection, place));
        }
        later.map_or(Turn::None, Turn::Later)
    }

    /// Takes the first connection of the user whose turn it is, and puts that user behind all others.
    fn take(&mut self, turn: usize) -> Option<C> {
        let (user, mut queue) = self.users.remove(turn)?;
        let connection = queue.pop_front();
        if !queue.is_empty() {
            self.users.push_back((user, queue));
        }
        connection
    }
}

/// The place that is given up for `user`, and when: the oldest of the user that has most, which is `user` if no other has more.
fn given_up<'a>(places: impl Iterator<Item = (usize, &'a Taken)> + Clone, user: u32) -> Option<(usize, Instant)> {
    let count = |user| places.clone().filter(|(_, place)| place.user == user).count();
    let (_, largest) =
        places.clone().max_by_key(|(_, place)| (count(place.user), place.user == user, Reverse(place.since)))?;
    let own = places.filter(|(_, place)| place.user == largest.user);
    let (place, oldest) = own.filter(|(_, place)| place.settled.is_some()).min_by_key(|(_, place)| place.since)?;
    Some((place, oldest.settled?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn is_root(user: u32) -> bool {
        user == 0
    }

    fn places(users: &[u32], now: Instant) -> Vec<Taken> {
        let place = |(age, &user): (usize, &u32)| {
            let since = now - Duration::from_millis(100 - age as u64);
            Taken { user, settled: Some(since), since: Some(since) }
        };
        users.iter().enumerate().map(place).collect()
    }

    #[test]
    fn a_crowd_delays_no_other_user_and_not_root() {
        let (mut outside, now) = (Outside::default(), Instant::now());
        for number in 0..1000 {
            let refused = outside.add(1, number, is_root).is_some();
            assert_eq!(refused, number >= MOST_OF_ONE);
        }
        assert_eq!(outside.add(2, 2000, is_root), None);
        assert_eq!(outside.add(0, 3000, is_root), None);
        let crowd = places(&[1; PLACES], now);
        assert_eq!(outside.next(&crowd, is_root, now), Turn::In(0, Some(0)), "the crowd's own oldest goes");
        assert_eq!(outside.next(&crowd, is_root, now), Turn::In(2000, Some(0)), "a turn for each user");
        assert_eq!(outside.next(&crowd, is_root, now), Turn::In(3000, None), "root has places of its own");
        assert_eq!(outside.next(&crowd, is_root, now), Turn::In(1, Some(0)));
    }

    #[test]
    fn only_root_fills_it_and_no_connection_of_root_is_refused() {
        let (mut outside, now) = (Outside::default(), Instant::now());
        for number in 0..10_000 {
            outside.add(number % 1000 + 1, number, is_root);
        }
        assert!(!outside.is_full(is_root));
        for number in 0..MOST_OF_PRIVILEGED as u32 {
            assert!(!outside.is_full(is_root));
            assert_eq!(outside.add(0, number, is_root), None);
        }
        assert!(outside.is_full(is_root));
        assert!(matches!(outside.next(&[], is_root, now), Turn::In(..)));
        while outside.is_full(is_root) {
            assert!(matches!(outside.next(&[], is_root, now), Turn::In(..)));
        }
    }

    #[test]
    fn a_place_is_given_up_when_it_has_had_its_time_and_only_by_the_user_with_most() {
        let (mut outside, now) = (Outside::default(), Instant::now());
        let mut taken = places(&[[1; PLACES / 2], [2; PLACES / 2]].concat(), now);
        assert_eq!(outside.add(3, 0, is_root), None);
        let soon = now + Duration::from_millis(20);
        taken.iter_mut().for_each(|place| place.settled = Some(soon));
        assert_eq!(outside.next(&taken, is_root, now), Turn::Later(soon));
        taken.iter_mut().for_each(|place| place.settled = None);
        assert_eq!(outside.next(&taken, is_root, now), Turn::None, "all are answered elsewhere");
        let each: Vec<u32> = (10..10 + PLACES as u32).collect();
        assert_eq!(outside.next(&places(&each, now), is_root, now), Turn::In(0, Some(0)), "one that has none gets one");
        assert!(outside.is_empty());
    }
}

//! A queue whose users take turns: however much one of them adds, each other is served after one item of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::owner::Owner;

/// Holds items of users, in the order of their turns. The items of a user keep their order.
pub struct UserQueue<T> {
    users: Mutex<VecDeque<(Arc<Owner>, VecDeque<T>)>>,
    more: Condvar,
}

impl<T> Default for UserQueue<T> {
    fn default() -> UserQueue<T> {
        UserQueue { users: Mutex::default(), more: Condvar::new() }
    }
}

impl<T> UserQueue<T> {
    /// Adds what `user` has waiting.
    pub fn add(&self, user: Arc<Owner>, item: T) {
        self.add_to(&mut self.users.lock(), user, item);
    }

    /// Adds what `user` has waiting, unless another thread has the queue at this moment. Returns whether the item was added.
    pub fn try_add(&self, user: Arc<Owner>, item: T) -> bool {
        self.users.try_lock().map(|mut users| self.add_to(&mut users, user, item)).is_some()
    }

    fn add_to(&self, users: &mut VecDeque<(Arc<Owner>, VecDeque<T>)>, user: Arc<Owner>, item: T) {
        match users.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &user)) {
            Some((_, items)) => items.push_back(item),
            None => users.push_back((user, VecDeque::from([item]))),
        }
        // One thread may have been replaced, and end as soon as it wakes.
        self.more.notify_all();
    }

    /// Takes the item whose turn it is, if one waits.
    pub fn try_take(&self) -> Option<T> {
        let mut users = self.users.lock();
        let (user, mut items) = users.pop_front()?;
        let item = items.pop_front();
        if !items.is_empty() {
            users.push_back((user, items));
        }
        item
    }

    /// Waits until there is an item.
    pub fn wait(&self) {
        let mut users = self.users.lock();
        if users.is_empty() {
            self.more.wait(&mut users);
        }
    }

    /// As [`wait`](Self::wait), for `patience` at most.
    pub fn wait_for(&self, patience: Duration) {
        let mut users = self.users.lock();
        if users.is_empty() {
            self.more.wait_for(&mut users, patience);
        }
    }

    /// Waits until there is an item of another user than `user`, for `patience` at most.
    pub fn wait_for_others(&self, user: &Arc<Owner>, patience: Duration) {
        let end = Instant::now() + patience;
        let mut users = self.users.lock();
        while users.iter().all(|(other, _)| Arc::ptr_eq(other, user)) {
            if self.more.wait_until(&mut users, end).timed_out() {
                return;
            }
        }
    }

    /// Returns whether an item waits.
    pub fn is_waiting(&self) -> bool {
        !self.users.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_take_turns() {
        let (turns, one, other) = (UserQueue::default(), Arc::new(Owner::user()), Arc::new(Owner::user()));
        (1..=3).for_each(|item| turns.add(one.clone(), item));
        turns.add(other, 10);
        let order: Vec<i32> = std::iter::from_fn(|| turns.try_take()).collect();
        assert_eq!(order, [1, 10, 2, 3]);
        assert!(!turns.is_waiting());
    }

    #[test]
    fn what_others_add_ends_a_wait_for_others() {
        let (turns, one, other) = (UserQueue::default(), Arc::new(Owner::user()), Arc::new(Owner::user()));
        let (begin, short, long) = (Instant::now(), Duration::from_millis(5), Duration::from_secs(60));
        turns.add(one.clone(), 1);
        turns.wait_for_others(&one, short);
        assert!(begin.elapsed() >= short, "its own does not");
        std::thread::scope(|scope| {
            scope.spawn(|| turns.wait_for_others(&one, long));
            turns.add(one.clone(), 2);
            turns.add(other, 3);
        });
        turns.wait_for_others(&one, long);
        assert!(begin.elapsed() < long / 2);
    }
}

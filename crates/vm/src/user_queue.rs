//! A queue whose users take turns: however much one of them adds, each other is served after one item of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

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

    /// Returns whether an item of another user than `user` waits.
    pub fn has_others(&self, user: &Arc<Owner>) -> bool {
        self.users.lock().iter().any(|(other, _)| !Arc::ptr_eq(other, user))
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
        assert!(!turns.has_others(&one) && turns.has_others(&other));
        turns.add(other, 10);
        assert!(turns.has_others(&one));
        let order: Vec<i32> = std::iter::from_fn(|| turns.try_take()).collect();
        assert_eq!(order, [1, 10, 2, 3]);
        assert!(!turns.is_waiting());
    }
}

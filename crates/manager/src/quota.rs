//! How many of something each user has at once: a descriptor of the manager's is held by each.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The counts of all users.
#[derive(Debug)]
pub struct Quota {
    most: usize,
    users: Mutex<HashMap<u32, usize>>,
}

/// One of them, as long as this lives.
#[derive(Debug)]
pub struct Ticket {
    quota: Arc<Quota>,
    user: u32,
}

impl Quota {
    /// Allows `most` at once to each user.
    pub fn new(most: usize) -> Arc<Quota> {
        Arc::new(Quota { most, users: Mutex::default() })
    }

    /// Returns the quota of connections in one stage of the protocol, if the manager can have so many descriptors.
    pub fn of_connections(descriptors: u64) -> Arc<Quota> {
        const MOST: usize = 1024;
        Quota::new(MOST.min(usize::try_from(descriptors / 8).unwrap_or(MOST)))
    }

    /// Returns how many there are of all users.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn count(&self) -> usize {
        self.users.lock().values().sum()
    }

    /// Tells whether `user` could take another.
    pub fn has_room(&self, user: u32) -> bool {
        self.users.lock().get(&user).is_none_or(|count| *count < self.most)
    }

    /// Counts one more of a user's; `None` if that user has as many as it can have.
    pub fn take(self: &Arc<Quota>, user: u32) -> Option<Ticket> {
        let mut users = self.users.lock();
        let count = users.entry(user).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Ticket { quota: self.clone(), user })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut users = self.quota.users.lock();
        if let Some(count) = users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_so_many_at_once() {
        let quota = Quota::new(2);
        let one = quota.take(1);
        let two = quota.take(1);
        assert!(one.is_some() && two.is_some() && quota.take(1).is_none());
        assert!(quota.take(2).is_some(), "another user has room");
        drop(one);
        let three = quota.take(1);
        assert!(three.is_some() && quota.take(1).is_none());
        drop((two, three));
        assert!(quota.count() == 0 && quota.users.lock().is_empty(), "nothing is left behind");
    }
}

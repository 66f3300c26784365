//! The jobs that a manager is about to kill: one thread kills all of them, by the same searches.
//!
//! A search reads `/proc` of every process of the machine, and a client can have a job killed as often as it likes: it joins, and hangs up.
//! 1. Jobs that wait to be killed are killed together: a search takes as long for many as for one.
//! 2. Orders for the same job are merged.
//! 3. Once searches for the jobs of a user have taken [`BURST`] of a processor's time, they take one [`SHARE`]th of it, and the user's other
//!    jobs wait. The first jobs of other users do not, nor does what an operator kills.
//! 4. The thread makes no call that a process can hold up: it knows the workers, and does not ask the kernel whose memory they have.
//!
//! With a thread and searches for each job, a client that joined and hung up in a loop had the manager take three quarters of two
//! processors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use uzswap_vm::log::log;
use uzswap_vm::sys::thread;

use crate::executioner::{self, Order};

/// How much time of a processor searches for a user may take at once.
const BURST: Duration = Duration::from_millis(200);

/// The part of the time that they take otherwise.
const SHARE: u32 = 10;

/// How often a thread that waits for a kill looks whether it is to wait no longer.
const LOOK: Duration = Duration::from_millis(50);

/// How long the queue may take to be empty when the manager ends.
const LAST_PATIENCE: Duration = Duration::from_secs(3);

static QUEUE: Mutex<Queue> = Mutex::new(Queue::new());
static MORE: Condvar = Condvar::new();

struct Queue {
    orders: Vec<Order>,
    has_thread: bool,
    /// By user.
    debts: BTreeMap<u32, Debt>,
    /// The manager ends: nothing waits.
    ends: bool,
}

impl Queue {
    const fn new() -> Queue {
        Queue { orders: Vec::new(), has_thread: false, debts: BTreeMap::new(), ends: false }
    }

    fn add(&mut self, mut order: Order, now: Instant) {
        order.pause(now);
        match self.orders.iter_mut().find(|other| other.is_like(&order)) {
            Some(other) => other.merge(order),
            None => self.orders.push(order),
        }
    }

    /// Puts an order back that is not done, and merges with it what has come since.
    fn put_back(&mut self, mut order: Order, now: Instant) {
        order.pause(now);
        if let Some(index) = self.orders.iter().position(|other| other.is_like(&order)) {
            order.merge(self.orders.swap_remove(index));
        }
        self.orders.push(order);
    }

    /// Returns how long an order waits.
    fn wait(&self, order: &Order, now: Instant) -> Duration {
        let debt = order.user.filter(|_| !self.ends).and_then(|user| self.debts.get(&user));
        debt.map_or(Duration::ZERO, |debt| debt.wait(now))
    }

    /// Takes the orders that need not wait.
    fn take(&mut self, now: Instant) -> Vec<Order> {
        let orders = std::mem::take(&mut self.orders);
        let (mut due, waiting): (Vec<Order>, Vec<Order>) =
            orders.into_iter().partition(|order| self.wait(order, now).is_zero());
        self.orders = waiting;
        due.iter_mut().for_each(|order| order.go_on(now));
        due
    }

    /// Notes that a search for jobs of `users` ends `now` and took so long.
    fn charge(&mut self, users: &BTreeSet<u32>, took: Duration, now: Instant) {
        self.debts.retain(|_, debt| !debt.left(now).is_zero());
        for user in users {
            let left = self.debts.get(user).map_or(Duration::ZERO, |debt| debt.left(now));
            self.debts.insert(*user, Debt { time: left + took / users.len() as u32, at: now });
        }
    }
}

/// The time that searches have taken, less what has been made up for by then.
struct Debt {
    time: Duration,
    at: Instant,
}

impl Debt {
    fn left(&self, now: Instant) -> Duration {
        self.time.saturating_sub(now.saturating_duration_since(self.at) / SHARE)
    }

    fn wait(&self, now: Instant) -> Duration {
        self.left(now).saturating_sub(BURST) * SHARE
    }
}

/// Has a job killed soon, by a thread of this module.
pub fn add(order: Order) {
    let mut queue = QUEUE.lock();
    queue.add(order, Instant::now());
    MORE.notify_all();
    if !queue.has_thread {
        queue.has_thread = std::thread::Builder::new().name("kill".to_owned()).spawn(work).is_ok();
        if !queue.has_thread {
            log("uzswap: error: there is no thread to kill a job; its workers will, when its connections end");
            queue.orders.clear();
        }
    }
}

/// Has jobs killed, and waits until they are dead, or `is_over`; returns how many processes each of them had.
pub fn kill(orders: Vec<Order>, is_over: impl Fn() -> bool) -> Vec<usize> {
    let numbers: Vec<_> = orders
        .into_iter()
        .map(|order| {
            let (tell, number) = mpsc::channel();
            add(order.tell(tell));
            number
        })
        .collect();
    let wait = |number: mpsc::Receiver<usize>| loop {
        match number.recv_timeout(LOOK) {
            Ok(number) => return number,
            Err(RecvTimeoutError::Timeout) if !is_over() => {}
            // An order that is dropped without a word killed nothing.
            Err(_) => return 0,
        }
    };
    numbers.into_iter().map(wait).collect()
}

/// Has all that waits killed at once, and waits for that, but not for long: the manager ends.
pub fn finish() {
    let (mut queue, end) = (QUEUE.lock(), Instant::now() + LAST_PATIENCE);
    queue.ends = true;
    MORE.notify_all();
    while queue.has_thread && !MORE.wait_until(&mut queue, end).timed_out() {}
    queue.ends = false;
}

fn work() {
    let mut queue = QUEUE.lock();
    while !queue.orders.is_empty() {
        let begun = Instant::now();
        let mut due = queue.take(begun);
        if due.is_empty() {
            let wait = queue.orders.iter().map(|order| queue.wait(order, begun)).min().unwrap_or_default();
            MORE.wait_for(&mut queue, wait);
            continue;
        }
        drop(queue);
        let users = due.iter().filter_map(|order| order.user).collect();
        let before = thread::processor_time();
        executioner::pass(&mut due);
        // The thread that reads the environments takes half as much.
        let took = thread::processor_time().saturating_sub(before) * 3 / 2;
        std::thread::sleep(executioner::PAUSE);
        queue = QUEUE.lock();
        let now = Instant::now();
        queue.charge(&users, took, now);
        due.into_iter().for_each(|order| queue.put_back(order, now));
    }
    queue.has_thread = false;
    MORE.notify_all();
}

#[cfg(test)]
mod tests {
    use uzswap_proto::Job;

    use super::*;
    use crate::executioner::Manner;

    fn order(user: u32, token: u64) -> Order {
        Order::new(Manner::AtOnce, Job { name: 1, token }, None, Vec::new(), &[]).of_user(user)
    }

    #[test]
    fn searches_for_a_user_take_a_part_of_the_time_and_others_do_not_wait() {
        let (mut queue, start, took) = (Queue::new(), Instant::now(), BURST / 10);
        let (mut now, mut searched) = (start, Duration::ZERO);
        for number in 0..100 {
            now += took;
            queue.charge(&BTreeSet::from([1]), took, now);
            let wait = queue.wait(&order(1, 11), now);
            assert!(number >= 10 || wait.is_zero(), "{number}: {wait:?}");
            assert!(queue.wait(&order(2, 12), now).is_zero());
            (now, searched) = (now + wait, searched + took);
        }
        assert!(searched <= BURST + (now - start) / SHARE + took, "{searched:?} in {:?}", now - start);
        queue.charge(&BTreeSet::from([1]), BURST * 2, now);
        [(1, 11), (2, 12), (1, 13)].into_iter().for_each(|(user, token)| queue.add(order(user, token), now));
        assert!(queue.take(now).iter().map(|order| order.user).eq([Some(2)]));
        assert_eq!((queue.take(now).len(), queue.orders.len()), (0, 2));
        let mut operators = order(1, 14);
        operators.user = None;
        queue.add(operators, now);
        assert_eq!((queue.take(now).len(), queue.orders.len()), (1, 2), "an operator's does not wait");
        queue.ends = true;
        assert_eq!(queue.take(now).len(), 2, "nothing waits at the end");
    }

    #[test]
    fn orders_for_a_job_are_one_and_what_they_hold_is_dropped_with_it() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        let (held, dead) = mpsc::channel::<()>();
        queue.add(order(1, 11).hold(held.clone()), now);
        queue.add(order(1, 11).hold(held.clone()), now);
        let taken = queue.take(now).pop().expect("one for both");
        queue.add(order(1, 11).hold(held), now);
        queue.put_back(taken, now);
        assert_eq!((queue.orders.len(), dead.try_recv()), (1, Err(mpsc::TryRecvError::Empty)));
        queue.orders.clear();
        assert_eq!(dead.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }
}

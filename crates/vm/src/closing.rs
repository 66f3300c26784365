//! Closing what clients have handed over, in threads that no other thread waits for.
//!
//! The last `close` of a descriptor can take as long as its former owner likes: a socket lingers (`SO_LINGER`), a file of a FUSE
//! server is flushed, a userfaultfd waits for the lock of an address space that its process holds, and a connection lets go of
//! the descriptors in its unread messages.
//!
//! 1. Descriptors go into a queue. A thread closes one after another, and ends after `REST` without work.
//! 2. A descriptor that finds no idle thread gets a new one, up to `MOST_THREADS`.
//! 3. Connections can end faster than these threads get a processor. So nothing new is accepted while the queue is long and gets
//!    shorter ([`is_behind`]). A queue that stands still is no reason to wait: clients can hold up all threads.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::sys::thread;

/// Threads that close at once. Each can be held by one descriptor.
const MOST_THREADS: usize = 32;

/// How long a thread stays without work.
const REST: Duration = Duration::from_secs(5);

/// A queue that is longer than this is long.
const LONG: usize = 64;

/// A queue stands still if nothing was closed for so long.
const STANDSTILL: Duration = Duration::from_millis(200);

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: VecDeque::new(), idle: 0, threads: 0, closed: None });
static MORE: Condvar = Condvar::new();

struct Queue {
    waiting: VecDeque<OwnedFd>,
    /// Threads that wait for work.
    idle: usize,
    threads: usize,
    /// When a descriptor was last closed.
    closed: Option<Instant>,
}

/// Returns whether many descriptors wait to be closed, and will be soon.
pub fn is_behind() -> bool {
    let queue = QUEUE.lock();
    queue.waiting.len() > LONG && queue.closed.is_some_and(|closed| closed.elapsed() < STANDSTILL)
}

/// Closes a descriptor. Returns at once.
pub fn close(descriptor: OwnedFd) {
    let mut queue = QUEUE.lock();
    queue.waiting.push_back(descriptor);
    if queue.idle >= queue.waiting.len() {
        MORE.notify_one();
    } else if queue.threads < MOST_THREADS {
        // Without a new thread the descriptor waits for one of those that are there, or for the next call.
        let spawned = std::thread::Builder::new().name("close".to_owned()).spawn(work);
        queue.threads += usize::from(spawned.is_ok());
    }
}

fn work() {
    // Descriptors are handed over by threads that run before ordinary ones: they must not pile up here.
    let _ = thread::ask_for_short_slices();
    let mut queue = QUEUE.lock();
    loop {
        if let Some(descriptor) = queue.waiting.pop_front() {
            drop(queue);
            drop(descriptor);
            queue = QUEUE.lock();
            queue.closed = Some(Instant::now());
            continue;
        }
        queue.idle += 1;
        let timed_out = MORE.wait_for(&mut queue, REST).timed_out();
        queue.idle -= 1;
        if timed_out && queue.waiting.is_empty() {
            queue.threads -= 1;
            return;
        }
    }
}

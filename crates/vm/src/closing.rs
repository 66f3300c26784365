//! Closing what clients have handed over, in threads that no other thread waits for.
//!
//! The last `close` of a descriptor can take as long as its former owner likes: a socket lingers (`SO_LINGER`), a file of a FUSE
//! server is flushed, a userfaultfd waits for the lock of an address space that its process holds, and a connection lets go of
//! the descriptors in its unread messages.
//!
//! 1. Descriptors go into a queue. A thread closes one after another, and ends after [`REST`] without work.
//! 2. A descriptor that finds no idle thread gets a new one, up to [`MOST_THREADS`].

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Threads that close at once. Each can be held by one descriptor.
const MOST_THREADS: usize = 32;

/// How long a thread stays without work.
const REST: Duration = Duration::from_secs(5);

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: VecDeque::new(), idle: 0, threads: 0 });
static MORE: Condvar = Condvar::new();

struct Queue {
    waiting: VecDeque<OwnedFd>,
    /// Threads that wait for work.
    idle: usize,
    threads: usize,
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
    let mut queue = QUEUE.lock();
    loop {
        if let Some(descriptor) = queue.waiting.pop_front() {
            drop(queue);
            drop(descriptor);
            queue = QUEUE.lock();
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

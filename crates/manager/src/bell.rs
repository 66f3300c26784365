//! Waking a thread that has work.
//!
//! A fault rings the bell of reclaim, so a ring takes no lock that another thread could hold for long: it marks the bell, and
//! unparks the listener. The watchdog may replace the listening thread at any time, so each thread that waits makes sure that it is the
//! listener. A ring that meets that change leaves the bell marked, and the new listener looks at the mark before it parks.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};
use std::thread::Thread;
use std::time::Duration;

use parking_lot::RwLock;

/// Wakes the one thread that listens.
#[derive(Debug, Default)]
pub struct Bell {
    /// Read by threads that ring, and never waited for by them.
    listener: RwLock<Option<Thread>>,
    rung: AtomicBool,
}

impl Bell {
    /// Wakes the thread that listens, or will: once, however often this is called before it is awake.
    pub fn ring(&self) {
        self.mark();
        self.wake();
    }

    /// Marks the bell as rung; [`Bell::wake`] is to follow.
    pub fn mark(&self) {
        self.rung.store(true, Release);
    }

    /// Wakes the thread that listens, if the bell was rung.
    pub fn wake(&self) {
        if !self.rung.load(Relaxed) {
            return;
        }
        // Pairs with that in `wait`: either this thread finds the listener, or the listener finds the mark.
        fence(SeqCst);
        if let Some(listener) = self.listener.try_read() {
            listener.iter().for_each(Thread::unpark);
        }
    }

    /// Waits until the bell is rung, `patience` at most; sometimes shorter. Tells whether it was. The thread that called this last
    /// listens.
    pub fn wait(&self, patience: Duration) -> bool {
        self.listen();
        fence(SeqCst);
        if !self.rung.load(Relaxed) {
            std::thread::park_timeout(patience);
        }
        self.rung.swap(false, Acquire)
    }

    /// Makes the calling thread the one that listens.
    fn listen(&self) {
        let own = std::thread::current();
        if self.listener.read().as_ref().is_none_or(|listener| listener.id() != own.id()) {
            *self.listener.write() = Some(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(20);

    /// Waits until `bell` has been rung; tells how long that took.
    fn wait_for(bell: &Bell) -> Duration {
        let start = Instant::now();
        while !bell.wait(LONG) && start.elapsed() < LONG {}
        start.elapsed()
    }

    #[test]
    fn a_bell_that_was_rung_before_is_heard_once() {
        let bell = Bell::default();
        bell.ring();
        bell.ring();
        assert!(bell.wait(LONG));
        assert!(!bell.wait(Duration::ZERO));
        bell.wake();
        assert!(!bell.wait(Duration::ZERO), "it was not rung");
    }

    #[test]
    fn the_thread_that_replaces_the_listener_is_woken() {
        let bell = Arc::new(Bell::default());
        bell.wait(Duration::ZERO);
        let (said, heard) = channel();
        let other = bell.clone();
        let listener = std::thread::spawn(move || {
            for _ in 0..100 {
                let took = wait_for(&other);
                said.send(took).expect("the test waits");
            }
        });
        for _ in 0..100 {
            // Before, after, or while the other thread begins to listen.
            std::thread::yield_now();
            bell.ring();
            let took = heard.recv().expect("it was woken");
            assert!(took < LONG / 2, "the listener slept for {took:?}");
        }
        listener.join().expect("it ends");
    }
}

//! The reception: how processes come to the manager, and how it hears of their end.
//!
//! 1. Any number of threads serve the reception, in the same role. What one of them has taken no other has: each source is reported
//!    once, until it is waited for again.
//! 2. A thread that speaks with a process holds no lock of the reception: a process that takes a thread out of service
//!    ([`uzswap_vm::visit`]) takes that one thread.
//! 3. A connection says a job's token first ([`Silent`]), then introduces its process ([`Sessions::hear`]).
//! 4. What could not be waited for, for want of kernel memory or of descriptors, is tried again every [`PAUSE`].
//! 5. A caller whose user has many descriptors that wait to be closed ([`uzswap_vm::closing`]) is heard when they are fewer. If they stand
//!    still, the connection ends unheard.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_vm::closing::{State, User};
use uzswap_vm::log::log;
use uzswap_vm::sys::epoll::Epoll;
use uzswap_vm::sys::link::{Link, Listener};
use uzswap_vm::sys::thread;
use uzswap_vm::visit;

use crate::advice::Questions;
use crate::descriptors;
use crate::sessions::{Call, Caller, Session, Sessions};
use crate::silent::Silent;
use crate::unmanaged;

/// Connections of processes that are accepted before others are heard.
const ACCEPTED: usize = 64;

/// How often to look for connections that have been silent for too long, and how often to look whether to stop.
const PAUSE: Duration = Duration::from_millis(100);
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// The reception of a manager.
pub struct Reception {
    /// By a name, and by a path where that can be had.
    listeners: Vec<Listener>,
    sessions: Arc<Sessions>,
    advice: Arc<Questions>,
    /// The process that stands for the manager.
    front_pid: i32,
    epoll: Epoll,
    desk: Mutex<Desk>,
}

/// What is waited for.
struct Desk {
    waiting_for: HashMap<u64, Source>,
    next: u64,
    /// The callers that have said nothing yet.
    silent: Silent,
    lost: Vec<Source>,
    /// The numbers of callers that have something to say and are not waited for, with their users.
    held: Vec<(u64, User)>,
    swept: Instant,
}

enum Source {
    Listener(usize),
    Caller(Caller),
    Program(Arc<Session>),
}

impl Reception {
    /// A reception that no thread serves yet.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(
        listeners: Vec<Listener>,
        sessions: Arc<Sessions>,
        advice: Arc<Questions>,
        front_pid: i32,
    ) -> std::io::Result<Reception> {
        let silent = Silent::new(descriptors::limit());
        let (waiting_for, lost, held) = Default::default();
        let desk = Desk { waiting_for, next: 0, silent, lost, held, swept: Instant::now() };
        let epoll = Epoll::new()?;
        let reception = Reception { listeners, sessions, advice, front_pid, epoll, desk: Mutex::new(desk) };
        (0..reception.listeners.len()).for_each(|index| reception.wait_for(Source::Listener(index)));
        Ok(reception)
    }

    /// Serves until told to stop, or replaced.
    pub fn serve(&self, stop: &AtomicBool) {
        // Programs wait for it to begin.
        let _ = thread::ask_for_promptness();
        while !stop.load(Relaxed) && !visit::is_surplus() {
            let ready = match self.epoll.wait(self.pause().as_millis() as i32) {
                Ok(ready) => ready,
                Err(error) => {
                    log(&format!("uzswap: error: connections cannot be waited for: {error}"));
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            ready.into_iter().for_each(|ready| self.attend(ready.number));
            self.sweep();
        }
    }

    /// How long to wait for the next message. A thread that adds what is to be looked for does not wait long itself.
    fn pause(&self) -> Duration {
        let desk = self.desk.lock();
        if desk.silent.is_empty() && desk.lost.is_empty() && desk.held.is_empty() { LONG_PAUSE } else { PAUSE }
    }

    /// Does what a source has been waited for.
    fn attend(&self, number: u64) {
        let Some(source) = self.take(number) else { return };
        match source {
            Source::Listener(index) => self.accept(index),
            Source::Caller(caller) => match caller.user().state() {
                State::Prompt => self.follow_up(self.sessions.hear(caller)),
                State::Behind => self.hold(caller),
                State::Stuck => {}
            },
            Source::Program(session) => self.sessions.end(&session),
        }
    }

    /// Takes a source, which is waited for no longer. None if another thread has it.
    fn take(&self, number: u64) -> Option<Source> {
        let desk = &mut *self.desk.lock();
        desk.silent.remove(number);
        let source = desk.waiting_for.remove(&number)?;
        self.epoll.remove(self.fd_of(&source));
        Some(source)
    }

    fn wait_for(&self, source: Source) {
        self.wait_at(&mut self.desk.lock(), source);
    }

    /// Waits for a source, if not now then later; gives the number that it has.
    fn wait_at(&self, desk: &mut Desk, source: Source) -> Option<u64> {
        let number = desk.next;
        desk.next += 1;
        if self.epoll.add(self.fd_of(&source), number).is_err() {
            desk.lost.push(source);
            return None;
        }
        desk.waiting_for.insert(number, source);
        Some(number)
    }

    fn fd_of(&self, source: &Source) -> i32 {
        match source {
            Source::Listener(index) => self.listeners[*index].as_raw_fd(),
            Source::Caller(caller) => caller.as_raw_fd(),
            Source::Program(session) => session.pidfd.as_raw_fd(),
        }
    }

    /// Tries again to wait for what could not be waited for, and ends connections that have been silent for too long.
    fn sweep(&self) {
        let late = {
            let desk = &mut *self.desk.lock();
            if desk.swept.elapsed() < PAUSE {
                return;
            }
            desk.swept = Instant::now();
            for source in std::mem::take(&mut desk.lost) {
                self.wait_at(desk, source);
            }
            // A held caller that is not in `waiting_for` any more was taken by `give_way`.
            let is_heard = |number| {
                let held = desk.waiting_for.get(&number);
                held.is_none_or(|source| self.epoll.add(self.fd_of(source), number).is_ok())
            };
            desk.held.retain(|(number, user)| user.state() == State::Behind || !is_heard(*number));
            desk.silent.late(desk.swept)
        };
        late.into_iter().for_each(|number| self.give_way(number));
    }

    /// Keeps a caller that has something to say until less of its user's waits to be closed. It is among those that are silent, of which
    /// a user has so many, unless it has been greeted.
    fn hold(&self, caller: Caller) {
        let (user, is_silent) = (caller.user(), matches!(caller, Caller::Silent(_)));
        let oldest = {
            let desk = &mut *self.desk.lock();
            let number = desk.next;
            desk.next += 1;
            desk.waiting_for.insert(number, Source::Caller(caller));
            desk.held.push((number, user));
            if is_silent { add_silent(&mut desk.silent, user, number) } else { None }
        };
        if let Some(oldest) = oldest {
            self.give_way(oldest);
        }
    }

    /// Accepts connections: a bounded number, for others wait for this thread, and no more when few descriptors are left.
    fn accept(&self, index: usize) {
        let limit = descriptors::limit();
        for _ in 0..ACCEPTED {
            let Ok(Some(link)) = self.listeners[index].accept() else { break };
            let is_short = descriptors::are_short(link.as_raw_fd(), limit);
            if link.user().state() != State::Stuck {
                self.wait_for_silent(link);
            }
            if is_short {
                // Tried again after a while.
                self.desk.lock().lost.push(Source::Listener(index));
                return;
            }
        }
        self.wait_for(Source::Listener(index));
    }

    /// Waits for the first message of a connection. The oldest of the same user may have to give way.
    fn wait_for_silent(&self, link: Link) {
        let user = link.user();
        let oldest = {
            let desk = &mut *self.desk.lock();
            let number = self.wait_at(desk, Source::Caller(Caller::Silent(link)));
            number.and_then(|number| add_silent(&mut desk.silent, user, number))
        };
        if let Some(oldest) = oldest {
            self.give_way(oldest);
        }
    }

    /// Ends a silent connection, unless it has just said something.
    fn give_way(&self, number: u64) {
        let Some(Source::Caller(caller)) = self.take(number) else { return };
        if caller.user().state() == State::Stuck {
            return;
        }
        match self.sessions.hear(caller) {
            Call::Later(Caller::Silent(_)) => {}
            call => self.follow_up(call),
        }
    }

    /// Does what a caller's message came to.
    fn follow_up(&self, call: Call) {
        match call {
            Call::Later(Caller::Silent(link)) => self.wait_for_silent(link),
            Call::Later(caller) => self.wait_for(Source::Caller(caller)),
            Call::Joined(session) => self.wait_for(Source::Program(session)),
            Call::Asked(link, session, advise, ticket) => self.advice.add(link, session, &advise, ticket),
            Call::Unmanaged(tenant, process, why) => {
                unmanaged::report(&tenant, process.as_deref(), &why, self.front_pid);
            }
            Call::Over => {}
        }
    }
}

/// Counts a connection that has said nothing yet; gives the number of the one that gives way to it.
fn add_silent(silent: &mut Silent, user: User, number: u64) -> Option<u64> {
    match user {
        User::Of(uid) => silent.add(uid, number, Instant::now()),
        User::Own => None,
    }
}

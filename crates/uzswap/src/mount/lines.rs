//! The connections to the manager that requests of the file system share.
//!
//! 1. Each request has a connection to itself for as long as it takes, so none waits for the answer to another.
//! 2. There are few, because the manager has few places; what takes long may have some of them only, so that one is left for
//!    what does not.
//! 3. A connection that rested may have been closed meanwhile. One that ends before its first answer has not been heard:
//!    what was asked is asked again, once, of a fresh one.
//! 4. Nothing waits for ever, for a connection or for an answer.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uzswap_proto::control::Verb;

use crate::client::{Answered, Client};

/// Connections at once.
const MOST: usize = 8;

/// And of these, for what takes long.
const MOST_LONG: usize = 5;

/// How long what is done at once may take. Somebody who looks for a file may wait twice as long: the kernel asks again.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the rest may take.
const LONG_PATIENCE: Duration = Duration::from_secs(60);

/// After this the manager has said what is wrong with a kill, if anything is.
const SOON: Duration = Duration::from_millis(100);

/// How a request is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// It is done at once.
    Short,
    /// It may take a while.
    Long,
    /// It may take a while, but only an error is waited for, which comes at once.
    Unwaited,
}

/// The connections to one manager.
#[derive(Debug)]
pub struct Lines {
    socket: PathBuf,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Client>,
    busy: usize,
    busy_long: usize,
}

impl Lines {
    /// No connection yet.
    pub fn new(socket: PathBuf) -> Lines {
        Lines { socket, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Asks the manager; the error is the number for whoever called.
    pub fn ask(&self, verb: Verb, path: &str, value: &[u8], pace: Pace) -> Result<String, i32> {
        let patience = if pace == Pace::Short { PATIENCE } else { LONG_PATIENCE };
        let idle = self.take(pace, patience)?;
        let (result, client) = match self.exchange(idle, verb, path, value, (pace, patience)) {
            Ok((answered, client)) => (Ok(answered), client),
            Err(error) => (Err(error), None),
        };
        self.give_back(pace, client);
        match result {
            Ok(Answered { errno: 0, text }) => Ok(text),
            Ok(answered) => Err(answered.errno as i32),
            Err(error) => Err(number(&error)),
        }
    }

    /// One request and its answer; gives the connection back if it is still good.
    fn exchange(
        &self,
        idle: Option<Client>,
        verb: Verb,
        path: &str,
        value: &[u8],
        (pace, patience): (Pace, Duration),
    ) -> io::Result<(Answered, Option<Client>)> {
        let ask = |mut client: Client| {
            if pace != Pace::Unwaited {
                return client.ask(verb, path, value, patience).map(|answered| (answered, Some(client)));
            }
            client.send(verb, path, value, patience)?;
            match client.receive(SOON) {
                Ok(answered) => Ok((answered, Some(client))),
                // It is being done. The answer will find nobody.
                Err(error) if is_timeout(&error) => Ok((Answered { errno: 0, text: String::new() }, None)),
                Err(error) => Err(error),
            }
        };
        match idle.map(ask) {
            Some(Err(error)) if is_end(&error) => ask(Client::connect(&self.socket)?),
            Some(done) => done,
            None => ask(Client::connect(&self.socket)?),
        }
    }

    /// Takes a place, and a connection that rests if there is one.
    fn take(&self, pace: Pace, patience: Duration) -> Result<Option<Client>, i32> {
        let until = Instant::now() + patience;
        let mut state = self.state();
        while state.busy >= MOST || pace != Pace::Short && state.busy_long >= MOST_LONG {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(libc::EIO);
            }
            state = self.freed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.busy += 1;
        state.busy_long += usize::from(pace != Pace::Short);
        Ok(state.idle.pop())
    }

    fn give_back(&self, pace: Pace, client: Option<Client>) {
        let mut state = self.state();
        state.busy -= 1;
        state.busy_long -= usize::from(pace != Pace::Short);
        state.idle.extend(client);
        drop(state);
        // Whoever is woken may be one who needs more than this place.
        self.freed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// The error number for a request that got no answer.
fn number(error: &io::Error) -> i32 {
    match error.kind() {
        // Only a value can be that long: the kernel's paths are not.
        ErrorKind::InvalidInput => libc::E2BIG,
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => libc::ENOTCONN,
        _ if is_end(error) => libc::ENOTCONN,
        _ => libc::EIO,
    }
}

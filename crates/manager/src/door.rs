//! The manager's control socket: the first door to the control tree.
//!
//! 1. The socket's name appears when it listens, and not before, with mode 0600. What a dead manager left under the name is
//!    replaced; a live manager's is not. At the end the name goes if it is still ours.
//! 2. Whoever connects says nothing about himself: the kernel says who he is. Root may do all, so may the manager's own
//!    user, others nothing.
//! 3. One thread serves all connections and waits for none of them. What takes long (reclaim, kill) is done by a thread of its
//!    own, which has the connection meanwhile, so that nobody else waits for it. A connection holds one request and one answer at most,
//!    both of bounded length. What is no request ends the connection; so does a request that is not complete, or an answer
//!    that is not taken, in good time.
//! 4. There are only so many connections. One more takes the place of the one that has been there longest without a word, but
//!    only if that had time to say one: else it waits outside.
//! 5. No other thread of the manager waits for this one, but that an answer under way when the job ends is still given:
//!    whoever kills the job by a control file hears that it is done.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use uzswap_proto::control::{Answer, DIRECTORY, PATH_MAX, REQUEST_HEADER, Request, TEXT_MAX, VALUE_MAX, Verb};
use uzswap_vm::sys::file::event;
use uzswap_vm::sys::link::{Peer, peer};

use crate::control::{Error, Kind, Machine, Tree};

/// Connections at once.
const CONNECTIONS: usize = 16;

/// Requests at once that take long. One more is done by whoever serves all.
const LONG: usize = 8;

/// The files that are written to have something done that takes long.
const LONG_FILES: [&str; 2] = ["cgroup.kill", "memory.reclaim"];

/// How long a request may take to arrive, or an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a connection may rest.
const REST: Duration = Duration::from_secs(60);

/// How long a connection keeps its place, whoever else wants it.
const GRACE: Duration = Duration::from_millis(50);

/// How long nobody is let in when there are no descriptors left.
const SHORTAGE: Duration = Duration::from_millis(50);

/// How long to wait for others who give a socket a name in the same directory.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// The longest request.
const REQUEST_MAX: usize = REQUEST_HEADER + PATH_MAX + VALUE_MAX;

/// A socket that listens under a name.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    path: PathBuf,
    /// Which socket it is, for others may come to have the name.
    identity: (u64, u64),
    /// Shared while requests are answered.
    turn: RwLock<()>,
    /// Counts connections that come back from where something took long.
    returns: File,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.remove_name();
    }
}

impl Door {
    /// Listens under the name `path`. The error says what is in the way.
    pub fn open(path: &Path) -> Result<Door, String> {
        let words = |error: io::Error| error.to_string();
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let listener = UnixListener::bind(&temporary).map_err(words)?;
        let named = (|| {
            fs::set_permissions(&temporary, Permissions::from_mode(0o600)).map_err(words)?;
            listener.set_nonblocking(true).map_err(words)?;
            let identity = identity(&temporary).map_err(words)?;
            let returns = event().map_err(words)?;
            give_name(&temporary, path).map(|()| (identity, returns))
        })();
        match named {
            Ok((identity, returns)) => {
                Ok(Door { listener, path: path.to_owned(), identity, turn: RwLock::new(()), returns })
            }
            Err(why) => {
                let _ = fs::remove_file(&temporary);
                Err(why)
            }
        }
    }

    /// Takes the name away, unless somebody else has it by now.
    pub fn remove_name(&self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Waits until what is being answered has been, a second at most. To be called at the end of the job.
    pub fn let_finish(&self) {
        drop(self.turn.try_write_for(Duration::from_secs(1)));
    }

    /// Serves for ever.
    pub fn serve(&self, machine: &(dyn Machine + Sync)) -> ! {
        thread::scope(|scope| {
            let mut connections: Vec<Connection> = Vec::new();
            let mut shut = None;
            let (back, returned) = mpsc::channel();
            let mut away = 0;
            loop {
                let (opens, ready) = wait(&self.listener, &self.returns, &connections, shut);
                let turn = self.turn.read();
                let mut kept = Vec::new();
                for (mut connection, is_ready) in connections.into_iter().zip(ready) {
                    let served = if is_ready { connection.go_on(machine, away < LONG) } else { Ok(Step::Goes) };
                    match served {
                        Ok(Step::Goes) if !connection.is_late() => kept.push(connection),
                        // Without a thread the connection is lost.
                        Ok(Step::TakesLong) => {
                            away += usize::from(self.send_away(connection, machine, scope, &back).is_ok());
                        }
                        _ => {}
                    }
                }
                drop(turn);
                connections = kept;
                // Whoever comes back after this look rings again.
                let _ = (&self.returns).read(&mut [0; 8]);
                let before = connections.len();
                connections.extend(returned.try_iter());
                away -= connections.len() - before;
                if opens {
                    shut = self.let_in(&mut connections, away);
                }
            }
        })
    }

    /// Has a thread answer what is asked on a connection, which then comes back.
    fn send_away<'scope>(
        &'scope self,
        mut connection: Connection,
        machine: &'scope (dyn Machine + Sync),
        scope: &'scope Scope<'scope, '_>,
        back: &Sender<Connection>,
    ) -> io::Result<()> {
        let back = back.clone();
        let work = move || {
            let turn = self.turn.read();
            // An error is the end of the connection, as it will be seen when it is looked after again.
            let _ = connection.answer(machine).and_then(|()| connection.send());
            drop(turn);
            back.send(connection).expect("who serves does so for ever");
            (&self.returns).write_all(&1u64.to_ne_bytes()).expect("an event counter takes a 1");
        };
        thread::Builder::new().name("door, long".to_owned()).spawn_scoped(scope, work).map(drop)
    }

    /// Lets in those who wait, as many as there are places at most, beside those that are `away`. Gives when to look again, if that is not as soon as
    /// somebody is there.
    fn let_in(&self, connections: &mut Vec<Connection>, away: usize) -> Option<Instant> {
        for _ in 0..CONNECTIONS {
            let is_full = connections.len() + away >= CONNECTIONS;
            let oldest = (0..connections.len()).min_by_key(|&index| connections[index].since).filter(|_| is_full);
            if let Some(settled) =
                oldest.map(|index| connections[index].since + GRACE).filter(|at| *at > Instant::now())
            {
                return Some(settled);
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return None,
                    ErrorKind::ConnectionAborted | ErrorKind::Interrupted => continue,
                    _ => return Some(Instant::now() + SHORTAGE),
                },
            };
            let Some(connection) = Connection::new(stream) else { continue };
            if let Some(oldest) = oldest {
                connections.remove(oldest);
            }
            connections.push(connection);
        }
        None
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Gives the socket `temporary` the name `path`, if that is free or a dead manager's. Of several who do so at once only one
/// looks at a time: the directory is locked.
fn give_name(temporary: &Path, path: &Path) -> Result<(), String> {
    let directory = path.parent().and_then(|directory| File::open(directory).ok());
    // Whoever holds the lock for long is none of us, and nothing to wait for; nor is a directory that we cannot read.
    let deadline = Instant::now() + LOCK_PATIENCE;
    while directory
        .as_ref()
        .is_some_and(|directory| flock(directory, FlockOperation::NonBlockingLockExclusive).is_err())
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    in_the_way(path)?;
    fs::rename(temporary, path).map_err(|error| error.to_string())
}

/// Whether what has this name must not be replaced, and why.
fn in_the_way(path: &Path) -> Result<(), String> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err("exists already and is no socket; remove it, or name another".into());
        }
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.to_string()),
        _ => {}
    }
    match UnixStream::connect(path) {
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => Ok(()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err("belongs to another user; name another".into())
        }
        _ => Err("another manager listens there; name another".into()),
    }
}

/// Waits until somebody wants something; tells whether to look who is at the door, which is shut until then if `shut` says so,
/// and which connections can go on.
fn wait(
    listener: &UnixListener,
    returns: &File,
    connections: &[Connection],
    shut: Option<Instant>,
) -> (bool, Vec<bool>) {
    let due = connections.iter().map(Connection::due).chain(shut).min();
    // A nanosecond more, not to look before it is time.
    let patience = due.map(|due| due.saturating_duration_since(Instant::now())).map(|patience| Timespec {
        tv_sec: patience.as_secs() as i64,
        tv_nsec: i64::from(patience.subsec_nanos() + 1).min(999_999_999),
    });
    let at_door = if shut.is_some() { PollFlags::empty() } else { PollFlags::IN };
    let mut all: Vec<PollFd<'_>> = vec![
        PollFd::from_borrowed_fd(listener.as_fd(), at_door),
        PollFd::from_borrowed_fd(returns.as_fd(), PollFlags::IN),
    ];
    all.extend(connections.iter().map(|connection| {
        let wanted = if connection.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        PollFd::from_borrowed_fd(connection.stream.as_fd(), wanted)
    }));
    // Interrupted, or short of memory: then each is tried.
    let tried = poll(&mut all, patience.as_ref()).is_err();
    let is_ready = |of: &PollFd<'_>| tried || !of.revents().is_empty();
    let opens = shut.map_or_else(|| is_ready(&all[0]), |shut| shut <= Instant::now());
    (opens, all[2..].iter().map(is_ready).collect())
}

/// How far a connection has come.
enum Step {
    /// It waits for its peer.
    Goes,
    /// What it asks for takes long, and is not done yet.
    TakesLong,
}

/// One connection.
struct Connection {
    stream: UnixStream,
    peer: Peer,
    /// When it last began to rest, or its request to arrive, or its answer to be taken.
    since: Instant,
    request: Vec<u8>,
    /// What of the answer has not been taken.
    answer: Vec<u8>,
}

impl Connection {
    /// A connection from somebody who may.
    fn new(stream: UnixStream) -> Option<Connection> {
        let peer = peer(&stream).ok()?;
        let own = rustix::process::geteuid().as_raw();
        if ![0, own].contains(&peer.uid) {
            return None;
        }
        stream.set_nonblocking(true).ok()?;
        Some(Connection { stream, peer, since: Instant::now(), request: Vec::new(), answer: Vec::new() })
    }

    /// When it is too late for the next step.
    fn due(&self) -> Instant {
        let rests = self.request.is_empty() && self.answer.is_empty();
        self.since + if rests { REST } else { PATIENCE }
    }

    fn is_late(&self) -> bool {
        self.due() <= Instant::now()
    }

    /// Takes what has come, answers it, and hands over what is taken of the answer: as far as it goes without waiting. An
    /// error is the end of the connection.
    ///
    /// What takes long is not answered if there `is_room` for it elsewhere.
    fn go_on(&mut self, machine: &dyn Machine, is_room: bool) -> io::Result<Step> {
        if self.answer.is_empty() {
            if !self.receive()? {
                return Ok(Step::Goes);
            }
            if is_room && takes_long(&self.request) {
                return Ok(Step::TakesLong);
            }
            self.answer(machine)?;
        }
        self.send().map(|()| Step::Goes)
    }

    /// Has its answer, if its request is complete.
    fn answer(&mut self, machine: &dyn Machine) -> io::Result<()> {
        if let Some(answer) = answer(&self.request, self.peer, machine)? {
            self.request.clear();
            self.answer = answer;
            self.since = Instant::now();
        }
        Ok(())
    }

    /// Takes what has come of one request; nothing of the next. Tells whether there was anything.
    fn receive(&mut self) -> io::Result<bool> {
        let wanted = request_len(&self.request)? - self.request.len();
        let mut buffer = [0; REQUEST_MAX];
        match self.stream.read(&mut buffer[..wanted]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(len) => {
                if self.request.is_empty() {
                    self.since = Instant::now();
                }
                self.request.extend_from_slice(&buffer[..len]);
                // The header may have come just now, and the rest be there.
                if len == wanted && request_len(&self.request)? > self.request.len() {
                    self.receive()
                } else {
                    Ok(true)
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(!self.request.is_empty()),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn send(&mut self) -> io::Result<()> {
        if self.answer.is_empty() {
            return Ok(());
        }
        match self.stream.write(&self.answer) {
            Ok(len) => {
                self.answer.drain(..len);
                if self.answer.is_empty() {
                    self.answer = Vec::new();
                    self.since = Instant::now();
                }
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// How long the request is that begins with these bytes: its header's length until that is there.
fn request_len(bytes: &[u8]) -> io::Result<usize> {
    let Some(header) = bytes.first_chunk::<REQUEST_HEADER>() else { return Ok(REQUEST_HEADER) };
    let request = Request::decode(*header).ok_or(ErrorKind::InvalidData)?;
    Ok(REQUEST_HEADER + request.path + request.value)
}

/// Whether a request is complete and asks for what takes long.
fn takes_long(bytes: &[u8]) -> bool {
    let Some(request) = bytes.first_chunk().and_then(|header| Request::decode(*header)) else { return false };
    let file =
        bytes.get(REQUEST_HEADER..REQUEST_HEADER + request.path).and_then(|path| path.rsplit(|&c| c == b'/').next());
    let is_complete = bytes.len() >= REQUEST_HEADER + request.path + request.value;
    is_complete && request.verb == Verb::Write && LONG_FILES.iter().any(|long| file == Some(long.as_bytes()))
}

/// The answer to a request; none until it is complete. An error is no request.
fn answer(bytes: &[u8], from: Peer, machine: &dyn Machine) -> io::Result<Option<Vec<u8>>> {
    let Some(header) = bytes.first_chunk::<REQUEST_HEADER>() else { return Ok(None) };
    let request = Request::decode(*header).ok_or(ErrorKind::InvalidData)?;
    let body = &bytes[REQUEST_HEADER..];
    if body.len() < request.path + request.value {
        return Ok(None);
    }
    let (path, value) = body.split_at(request.path);
    let result = match str::from_utf8(path) {
        Ok(path) => follow(request.verb, path, value, from, &Tree(machine)),
        // All names are text.
        Err(_) => Err(Error::NotFound),
    };
    let result = result.and_then(|text| if text.len() > TEXT_MAX { Err(Error::TooLarge) } else { Ok(text) });
    let (errno, text) = match result {
        Ok(text) => (0, text),
        Err(error) => (error.number() as u32, error.to_string()),
    };
    let header = Answer { errno, text: text.len() }.encode().expect("the text is short enough");
    Ok(Some([&header[..], text.as_bytes()].concat()))
}

fn follow(verb: Verb, path: &str, value: &[u8], from: Peer, tree: &Tree<'_>) -> Result<String, Error> {
    let nothing = |()| String::new();
    match verb {
        Verb::Read => tree.read(path),
        Verb::Write => tree.write(path, value, from.pid).map(nothing),
        Verb::List => tree.list(path).map(|entries| {
            let slash = |kind| if kind == Kind::Directory { "/" } else { "" };
            entries.iter().map(|entry| format!("{}{}\n", entry.name, slash(entry.kind))).collect()
        }),
        Verb::Make => tree.make(path).map(nothing),
        Verb::Remove => tree.remove(path).map(nothing),
        Verb::Look => tree.look(path).map(|kind| match kind {
            Kind::Directory => DIRECTORY.to_owned(),
            Kind::File { readable, writable } => {
                format!("{}{}", if readable { "r" } else { "" }, if writable { "w" } else { "" })
            }
        }),
    }
}

#[cfg(test)]
#[path = "door_tests.rs"]
mod tests;

//! The manager's control socket: the first door to the control tree.
//!
//! 1. The socket's name appears when it listens, and not before, with mode 0600. What a dead manager left under the name is
//!    replaced; a live manager's is not. At the end the name goes if it is still ours.
//! 2. Whoever connects says nothing about himself: the kernel says who he is. A job's manager hears root and its own user,
//!    nobody else. A daemon hears whom the socket's mode lets in, and the control tree tells what each may change.
//! 3. One thread serves all connections and waits for none of them. What takes long (reclaim, kill) is done by a thread of its
//!    own, which has the connection meanwhile, so that nobody else waits for it. Of one user only so many are done at once; more
//!    wait for their turn. A connection holds one request and one answer at most, both of bounded length. What is no request
//!    ends the connection; so does a request that is not complete, or an answer that is not taken, in good time.
//! 4. There are only so many places for connections. The others wait `outside`, where users take turns: a crowd of one user's
//!    connections delays no other user. A connection that had time to speak gives up its place for one that waits.
//! 5. A connection by which a job joins is handed on: it is the job's from then on.
//! 6. No other thread of the manager waits for this one, but that an answer under way when the job ends is still given:
//!    whoever kills the job by a control file hears that it is done.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock, RwLockWriteGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use uzswap_proto::control::{
    Answer, DIRECTORY, PATH_MAX, REQUEST_HEADER, REQUIRE, Request, TEXT_MAX, TRANSIENT, VALUE_MAX, Verb,
};
use uzswap_vm::sys::file::event;
use uzswap_vm::sys::link::{Peer, peer, refuse_descriptors};
use uzswap_vm::sys::thread::ask_for_short_slices;

use crate::control::{Error, GroupId, Kind, Machine, Tree, Writer};
use crate::descriptors;
use crate::outside::{Outside, Taken, Turn};

/// Connections that are accepted at once.
const ACCEPTED: usize = 64;

/// Requests at once that take long: of root and our own user, and as many of all others.
const LONG: usize = 8;

/// How many of these are of one of the others.
const LONG_OF_ONE: usize = 4;

/// The files that are written to have something done that takes long.
const LONG_FILES: [&str; 3] = ["cgroup.kill", "cgroup.procs", "memory.reclaim"];

/// How long a request may take to arrive, or an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long the end of a job waits for answers, and the end of a daemon for those that take long.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
const QUIET_PATIENCE: Duration = Duration::from_secs(3);

/// How long a connection may rest.
const REST: Duration = Duration::from_secs(60);

/// How long a connection keeps its place, whoever else wants it.
const GRACE: Duration = Duration::from_millis(50);

/// How long none is accepted when few descriptors are left.
const SHORTAGE: Duration = Duration::from_millis(50);

/// How long to wait for others who give a socket a name in the same directory.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// The longest request.
const REQUEST_MAX: usize = REQUEST_HEADER + PATH_MAX + VALUE_MAX;

/// A job that joins.
#[derive(Debug)]
pub struct Joining {
    /// Its connection.
    pub stream: UnixStream,
    /// Its front.
    pub peer: Peer,
    /// Where its processes begin.
    pub group: GroupId,
    /// The group is to be removed at its end.
    pub transient: bool,
    /// It is to be killed rather than to have a process that is not managed.
    pub require: bool,
}

/// Where jobs are taken in.
#[derive(Debug)]
pub struct Joins {
    /// They wait here,
    pub queue: Sender<Joining>,
    /// and this counter is rung for each.
    pub bell: File,
}

/// A socket that listens under a name.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    /// Its name, and which socket that is, for others may come to have the name; none if it is somebody else's to remove.
    name: Option<(PathBuf, (u64, u64))>,
    /// Shared while requests are answered that do not take long.
    turn: RwLock<()>,
    /// How many requests are being answered that take long.
    long: Mutex<usize>,
    /// Told of the end of each of those.
    long_ended: Condvar,
    /// Counts connections that come back from where something took long.
    returns: File,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.remove_name();
    }
}

impl Door {
    /// Listens under the name `path`; those connect whom `mode` lets. The error says what is in the way.
    pub fn open(path: &Path, mode: u32) -> Result<Door, String> {
        let words = |error: io::Error| error.to_string();
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let listener = UnixListener::bind(&temporary).map_err(words)?;
        let named = (|| {
            fs::set_permissions(&temporary, Permissions::from_mode(mode)).map_err(words)?;
            let identity = identity(&temporary).map_err(words)?;
            let mut door = Door::listen(listener).map_err(words)?;
            give_name(&temporary, path)?;
            door.name = Some((path.to_owned(), identity));
            Ok(door)
        })();
        named.inspect_err(|_| drop(fs::remove_file(&temporary)))
    }

    /// Listens at a socket that somebody else has opened, who has named it.
    pub fn listen(listener: UnixListener) -> io::Result<Door> {
        listener.set_nonblocking(true)?;
        // Requests have no descriptors. Closing one could take long.
        refuse_descriptors(&listener);
        let (turn, long, long_ended) = Default::default();
        Ok(Door { listener, name: None, turn, long, long_ended, returns: event()? })
    }

    /// Takes the name away, unless somebody else has it by now.
    pub fn remove_name(&self) {
        if let Some((path, own)) = &self.name
            && identity(path).is_ok_and(|found| found == *own)
        {
            let _ = fs::remove_file(path);
        }
    }

    /// Waits until what is being answered has been, a second or two at most. To be called at the end of the job.
    pub fn let_finish(&self) {
        drop(self.turn.try_write_for(LAST_PATIENCE));
        self.wait_for_long(LAST_PATIENCE);
    }

    /// Waits until what is being answered has been, and keeps the next from being answered as long as this is held. What takes long has been
    /// told to break off, but a process can hold up its thread: so that has [`QUIET_PATIENCE`].
    pub fn keep_quiet(&self) -> RwLockWriteGuard<'_, ()> {
        let quiet = self.turn.write();
        self.wait_for_long(QUIET_PATIENCE);
        quiet
    }

    fn wait_for_long(&self, patience: Duration) {
        let (mut long, end) = (self.long.lock(), Instant::now() + patience);
        while *long > 0 && !self.long_ended.wait_until(&mut long, end).timed_out() {}
    }

    /// Serves for ever. Jobs can join if there are `joins`.
    pub fn serve(&self, machine: &(dyn Machine + Sync), joins: Option<&Joins>) -> ! {
        // Its answers are short, and others wait for them.
        let _ = ask_for_short_slices();
        thread::scope(|scope| {
            let mut connections: Vec<Connection> = Vec::new();
            let mut outside = Outside::default();
            let mut look = Look::default();
            let (back, returned) = mpsc::channel();
            let mut away = Away::default();
            loop {
                let (opens, ready) = wait(&self.listener, &self.returns, &connections, &look);
                // Whoever comes back after this look rings again.
                let _ = (&self.returns).read(&mut [0; 8]);
                let came_back: Vec<Connection> = returned.try_iter().collect();
                came_back.iter().for_each(|connection| away.comes_back(connection.peer.uid));
                let turn = self.turn.read();
                let mut kept = Vec::new();
                for (mut connection, is_ready) in connections.into_iter().zip(ready) {
                    let is_room = away.has_room_for(connection.peer.uid);
                    let served = if is_ready || (connection.waits && is_room) {
                        connection.go_on(machine, is_room, joins.is_some())
                    } else {
                        Ok(Step::Goes)
                    };
                    match served {
                        Ok(Step::Goes) if !connection.is_late() => kept.push(connection),
                        Ok(Step::Joins(group)) => {
                            if let Some(joins) = joins {
                                connection.hand_on(group, joins);
                            }
                        }
                        // Without a thread the connection is lost.
                        Ok(Step::TakesLong) => {
                            let user = connection.peer.uid;
                            if self.send_away(connection, machine, scope, &back).is_ok() {
                                away.goes(user);
                            }
                        }
                        _ => {}
                    }
                }
                drop(turn);
                connections = kept;
                connections.extend(came_back);
                if opens || !outside.is_empty() {
                    if look.shut.is_none_or(|shut| shut <= Instant::now()) {
                        look.shut = self.accept(&mut outside, joins.is_some());
                    }
                    look.next = let_in(&mut outside, &mut connections, &away);
                    // Looked at again with every turn of this loop, since connections wait outside.
                    look.is_full = outside.is_full(is_root_or_own);
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
        let (back, place) = (back.clone(), Long::begin(self));
        let work = move || {
            // An error is the end of the connection, as it will be seen when it is looked after again.
            let _ = connection.answer(machine).and_then(|()| connection.send());
            drop(place);
            // The door serves for ever, and an event counter takes a 1.
            let _ = back.send(connection);
            let _ = (&self.returns).write_all(&1u64.to_ne_bytes());
        };
        thread::Builder::new().name("door, long".to_owned()).spawn_scoped(scope, work).map(drop)
    }

    /// Accepts connections, which then wait outside; those of anybody, or only of root and the manager's user. Returns when to
    /// accept again, if that is not as soon as there is one. Accepts none while root's queue is full.
    fn accept(&self, outside: &mut Outside<(UnixStream, Peer)>, anybody: bool) -> Option<Instant> {
        let limit = descriptors::limit();
        for _ in 0..ACCEPTED {
            if outside.is_full(is_root_or_own) {
                break;
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return None,
                    ErrorKind::ConnectionAborted | ErrorKind::Interrupted => continue,
                    _ => return Some(Instant::now() + SHORTAGE),
                },
            };
            let Ok(peer) = peer(&stream) else { continue };
            let descriptor = stream.as_raw_fd();
            if anybody || is_root_or_own(peer.uid) {
                // A user that has too many outside loses the new one.
                drop(outside.add(peer.uid, (stream, peer), is_root_or_own));
            }
            if descriptors::are_short(descriptor, limit) {
                return Some(Instant::now() + SHORTAGE);
            }
        }
        None
    }
}

/// A request that takes long, as long as this lives.
struct Long<'a>(&'a Door);

impl Long<'_> {
    /// Counts one. To be called in the door's turn, so that none begins while it is kept quiet.
    fn begin(door: &Door) -> Long<'_> {
        *door.long.lock() += 1;
        Long(door)
    }
}

impl Drop for Long<'_> {
    fn drop(&mut self) {
        *self.0.long.lock() -= 1;
        self.0.long_ended.notify_all();
    }
}

/// Gives places to connections that wait outside. Returns when to look again, if that is not as soon as a place is free.
fn let_in(
    outside: &mut Outside<(UnixStream, Peer)>,
    connections: &mut Vec<Connection>,
    away: &Away,
) -> Option<Instant> {
    loop {
        let here = connections.iter().map(|connection| Taken {
            user: connection.peer.uid,
            settled: Some(connection.since + GRACE),
            since: Some(connection.since),
        });
        let elsewhere = away.users.iter().map(|&user| Taken { user, settled: None, since: None });
        let taken: Vec<Taken> = here.chain(elsewhere).collect();
        match outside.next(&taken, is_root_or_own, Instant::now()) {
            Turn::In((stream, peer), place) => {
                let Some(connection) = Connection::new(stream, peer) else { continue };
                if let Some(place) = place {
                    connections.remove(place);
                }
                connections.push(connection);
            }
            Turn::Later(at) => return Some(at),
            Turn::None => return None,
        }
    }
}

/// Who has something done that takes long.
#[derive(Default)]
struct Away {
    users: Vec<u32>,
}

impl Away {
    /// Whether one more request of a user may be done now.
    fn has_room_for(&self, user: u32) -> bool {
        let alike = self.users.iter().filter(|&&other| is_root_or_own(other) == is_root_or_own(user)).count();
        let own = self.users.iter().filter(|&&other| other == user).count();
        alike < LONG && (is_root_or_own(user) || own < LONG_OF_ONE)
    }

    fn goes(&mut self, user: u32) {
        self.users.push(user);
    }

    fn comes_back(&mut self, user: u32) {
        if let Some(place) = self.users.iter().position(|&other| other == user) {
            self.users.swap_remove(place);
        }
    }
}

/// Whether a user is root, or whom the manager runs for.
fn is_root_or_own(user: u32) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&user)
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

/// When to look for connections, besides when one arrives.
#[derive(Default)]
struct Look {
    /// None is accepted until then.
    shut: Option<Instant>,
    /// One that waits outside can get a place then.
    next: Option<Instant>,
    /// None is accepted until one that waits outside gets a place.
    is_full: bool,
}

/// Waits until something is to be done; tells whether to look for new connections, and which connections can go on.
fn wait(listener: &UnixListener, returns: &File, connections: &[Connection], look: &Look) -> (bool, Vec<bool>) {
    let heard: Vec<&Connection> = connections.iter().filter(|connection| !connection.waits).collect();
    let due = heard.iter().map(|connection| connection.due()).chain(look.shut).chain(look.next).min();
    // A nanosecond more, not to look before it is time.
    let patience = due.map(|due| due.saturating_duration_since(Instant::now())).map(|patience| Timespec {
        tv_sec: patience.as_secs() as i64,
        tv_nsec: i64::from(patience.subsec_nanos() + 1).min(999_999_999),
    });
    let at_door = if look.shut.is_some() || look.is_full { PollFlags::empty() } else { PollFlags::IN };
    let mut all: Vec<PollFd<'_>> = vec![
        PollFd::from_borrowed_fd(listener.as_fd(), at_door),
        PollFd::from_borrowed_fd(returns.as_fd(), PollFlags::IN),
    ];
    all.extend(heard.iter().map(|connection| {
        let wanted = if connection.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        PollFd::from_borrowed_fd(connection.stream.as_fd(), wanted)
    }));
    // Interrupted, or short of memory: then each is tried.
    let tried = poll(&mut all, patience.as_ref()).is_err();
    let is_ready = |of: &PollFd<'_>| tried || !of.revents().is_empty();
    let is_time = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
    let opens = is_time(look.shut) || is_time(look.next) || look.shut.is_none() && is_ready(&all[0]);
    let mut ready = all[2..].iter().map(is_ready);
    (opens, connections.iter().map(|connection| !connection.waits && ready.next() == Some(true)).collect())
}

/// How far a connection has come.
enum Step {
    /// It waits for its peer.
    Goes,
    /// What it asks for takes long, and is not done yet.
    TakesLong,
    /// It is a job's that may join in this group.
    Joins(GroupId),
}

/// One connection.
struct Connection {
    stream: UnixStream,
    peer: Peer,
    /// It waits for its turn to have done what takes long.
    waits: bool,
    /// When it last began to rest, or its request to arrive, or its answer to be taken.
    since: Instant,
    request: Vec<u8>,
    /// What of the answer has not been taken.
    answer: Vec<u8>,
}

impl Connection {
    /// A connection that has got a place.
    fn new(stream: UnixStream, peer: Peer) -> Option<Connection> {
        stream.set_nonblocking(true).ok()?;
        Some(Connection { stream, peer, waits: false, since: Instant::now(), request: Vec::new(), answer: Vec::new() })
    }

    /// When it is too late for the next step.
    fn due(&self) -> Instant {
        let rests = self.request.is_empty() && self.answer.is_empty();
        self.since + if rests { REST } else { PATIENCE }
    }

    fn is_late(&self) -> bool {
        !self.waits && self.due() <= Instant::now()
    }

    /// Takes what has come, answers it, and hands over what is taken of the answer: as far as it goes without waiting. An
    /// error is the end of the connection.
    ///
    /// What takes long is not answered, but waits until there `is_room` for it elsewhere. Nobody joins unless `may_join`.
    fn go_on(&mut self, machine: &dyn Machine, is_room: bool, may_join: bool) -> io::Result<Step> {
        if self.answer.is_empty() {
            if !self.waits && !self.receive()? {
                return Ok(Step::Goes);
            }
            if takes_long(&self.request) {
                self.waits = !is_room;
                return Ok(if is_room { Step::TakesLong } else { Step::Goes });
            }
            if let Some(group) = self.joins(machine).filter(|_| may_join) {
                return Ok(Step::Joins(group));
            }
            self.answer(machine)?;
        }
        self.send().map(|()| Step::Goes)
    }

    /// The group that it may join in, if that is what it asks for.
    fn joins(&self, machine: &dyn Machine) -> Option<GroupId> {
        let (request, path, _) = parts(&self.request).ok()??;
        let path = str::from_utf8(path).ok().filter(|_| request.verb == Verb::Join)?;
        Tree(machine).joinable(path, writer(self.peer)).ok()
    }

    /// Gives the connection of a job that joins to who takes it in.
    fn hand_on(self, group: GroupId, joins: &Joins) {
        let Ok(Some((_, _, value))) = parts(&self.request) else { return };
        let wishes = |wish: &str| value.split(|&byte| byte == b'\n').any(|line| line == wish.as_bytes());
        let (transient, require) = (wishes(TRANSIENT), wishes(REQUIRE));
        // Nobody takes jobs in any more: then the connection ends.
        let _ = joins.queue.send(Joining { stream: self.stream, peer: self.peer, group, transient, require });
        let _ = (&joins.bell).write_all(&1u64.to_ne_bytes());
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

/// A request's header, its path and its value.
type Parts<'a> = (Request, &'a [u8], &'a [u8]);

/// A request; none until it is complete. An error is no request.
fn parts(bytes: &[u8]) -> io::Result<Option<Parts<'_>>> {
    let Some((header, body)) = bytes.split_first_chunk::<REQUEST_HEADER>() else { return Ok(None) };
    let request = Request::decode(*header).ok_or(ErrorKind::InvalidData)?;
    let complete = body.len() >= request.path + request.value;
    Ok(complete.then(|| {
        let (path, value) = body.split_at(request.path);
        (request, path, value)
    }))
}

/// Whether a request is complete and asks for what takes long.
fn takes_long(bytes: &[u8]) -> bool {
    let Ok(Some((request, path, _))) = parts(bytes) else { return false };
    let file = path.rsplit(|&byte| byte == b'/').next();
    request.verb == Verb::Write && LONG_FILES.iter().any(|long| file == Some(long.as_bytes()))
}

fn writer(peer: Peer) -> Writer {
    Writer { pid: peer.pid, uid: peer.uid }
}

/// The answer to a request; none until it is complete. An error is no request.
fn answer(bytes: &[u8], from: Peer, machine: &dyn Machine) -> io::Result<Option<Vec<u8>>> {
    let Some((request, path, value)) = parts(bytes)? else { return Ok(None) };
    let result = match str::from_utf8(path) {
        Ok(path) => follow(request.verb, path, value, writer(from), &Tree(machine)),
        // All names are text.
        Err(_) => Err(Error::NotFound),
    };
    let result = result.and_then(|text| if text.len() > TEXT_MAX { Err(Error::TooLarge) } else { Ok(text) });
    let (errno, text) = match result {
        Ok(text) => (0, text),
        Err(error) => (error.number() as u32, error.to_string()),
    };
    let header = Answer { errno, text: text.len() }.encode().ok_or(ErrorKind::InvalidData)?;
    Ok(Some([&header[..], text.as_bytes()].concat()))
}

fn follow(verb: Verb, path: &str, value: &[u8], from: Writer, tree: &Tree<'_>) -> Result<String, Error> {
    let nothing = |()| String::new();
    match verb {
        Verb::Read => tree.read(path),
        Verb::Write => tree.write(path, value, from).map(nothing),
        Verb::List => tree.list(path).map(|entries| {
            let slash = |kind| if kind == Kind::Directory { "/" } else { "" };
            entries.iter().map(|entry| format!("{}{}\n", entry.name, slash(entry.kind))).collect()
        }),
        Verb::Make => tree.make(path, from).map(nothing),
        Verb::Remove => tree.remove(path, from).map(nothing),
        Verb::Join => Err(tree.joinable(path, from).err().unwrap_or(Error::NotSupported(
            "this manager has a job of its own, and no other; jobs join an uzswap daemon",
        ))),
        Verb::Stats => tree.stats(path),
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

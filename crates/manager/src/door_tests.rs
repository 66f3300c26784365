//! The door with clients of every kind, over a manager in miniature.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use uzswap_proto::control::ANSWER_HEADER;

use super::*;
use crate::control::mock::Mock;
use crate::outside::PLACES;

/// A directory of the test's own.
struct Place(PathBuf);

impl Place {
    fn new() -> Place {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("uz-door-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).expect("a fresh directory");
        Place(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }

    /// A door that is served.
    fn serve(&self) -> PathBuf {
        self.serve_machine(Mock::new())
    }

    fn serve_machine(&self, machine: Mock) -> PathBuf {
        let door = Door::open(&self.socket(), 0o600).expect("a free name");
        thread::spawn(move || door.serve(&machine, None));
        self.socket()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("the test's own");
    }
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("somebody listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    stream
}

fn request(verb: Verb, path: &str, value: &str) -> Vec<u8> {
    let header = Request { verb, path: path.len(), value: value.len() }.encode().expect("short enough");
    [&header[..], path.as_bytes(), value.as_bytes()].concat()
}

/// Takes an answer.
fn answer_of(stream: &mut UnixStream) -> io::Result<(u32, String)> {
    let mut header = [0; ANSWER_HEADER];
    stream.read_exact(&mut header)?;
    let answer = Answer::decode(header).expect("a header");
    let mut text = vec![0; answer.text];
    stream.read_exact(&mut text)?;
    Ok((answer.errno, String::from_utf8(text).expect("text")))
}

fn ask(stream: &mut UnixStream, verb: Verb, path: &str, value: &str) -> (u32, String) {
    stream.write_all(&request(verb, path, value)).expect("taken");
    answer_of(stream).expect("an answer")
}

/// Whether the other end has closed the connection, or does soon.
fn is_closed(stream: &mut UnixStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn still_serves(socket: &Path) -> bool {
    ask(&mut connect(socket), Verb::Read, "parameters/zpool", "") == (0, "zsmalloc\n".into())
}

#[test]
fn all_verbs_and_many_requests_on_one_connection() {
    let place = Place::new();
    let stream = &mut connect(&place.serve());
    assert_eq!(ask(stream, Verb::Make, "cgroup/a", ""), (0, String::new()));
    assert_eq!(ask(stream, Verb::Make, "cgroup/a", ""), (libc::EEXIST as u32, "File exists".into()));
    assert_eq!(ask(stream, Verb::Write, "cgroup/a/memory.max", "1M\n").0, 0);
    assert_eq!(ask(stream, Verb::Read, "cgroup/a/memory.max", ""), (0, "1048576\n".into()));
    let (errno, list) = ask(stream, Verb::List, "cgroup", "");
    assert!(errno == 0 && list.contains("memory.max\n") && list.ends_with("\na/\n"), "{list}");
    for (path, what) in [
        ("", "/"),
        ("cgroup/a", "/"),
        ("cgroup/memory.stat", "r"),
        ("cgroup/memory.max", "rw"),
        ("cgroup/memory.reclaim", "w"),
    ] {
        assert_eq!(ask(stream, Verb::Look, path, ""), (0, what.to_owned()), "{path}");
    }
    assert_eq!(ask(stream, Verb::Look, "cgroup/b", "").0, libc::ENOENT as u32);
    assert_eq!(ask(stream, Verb::Remove, "cgroup/a", "").0, 0);
    assert_eq!(ask(stream, Verb::Read, "cgroup/a/memory.max", "").0, libc::ENOENT as u32);
    // Two at once: the second waits for its turn.
    stream.write_all(&[request(Verb::Read, "parameters/enabled", ""), request(Verb::List, "", "")].concat()).unwrap();
    assert_eq!(answer_of(stream).unwrap(), (0, "Y\n".into()));
    assert!(answer_of(stream).unwrap().1.starts_with("cgroup/\n"));
    // A byte at a time.
    for byte in request(Verb::Read, "parameters/enabled", "") {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(answer_of(stream).unwrap(), (0, "Y\n".into()));
}

#[test]
fn the_longest_request_and_one_that_is_too_long() {
    let place = Place::new();
    let stream = &mut connect(&place.serve());
    let (path, value) = (format!("cgroup/memory.max{}", "/".repeat(PATH_MAX - 17)), " ".repeat(VALUE_MAX));
    assert_eq!(ask(stream, Verb::Write, &path, &value).0, libc::ENOTDIR as u32);
    assert_eq!(ask(stream, Verb::Write, "cgroup/memory.max", &value).0, libc::EINVAL as u32);
    let mut header = Request { verb: Verb::Read, path: 0, value: 0 }.encode().unwrap();
    header[4..6].copy_from_slice(&(PATH_MAX as u16 + 1).to_ne_bytes());
    stream.write_all(&header).unwrap();
    assert!(is_closed(stream));
}

#[test]
fn the_name_is_ours_alone_from_the_beginning_to_the_end() {
    let place = Place::new();
    let door = Door::open(&place.socket(), 0o600).unwrap();
    assert_eq!(fs::metadata(place.socket()).unwrap().permissions().mode() & 0o7777, 0o600);
    let why = Door::open(&place.socket(), 0o600).unwrap_err();
    assert!(why.contains("another manager"), "{why}");
    assert!(UnixStream::connect(place.socket()).is_ok(), "the first is as it was");
    drop(door);
    assert_eq!(fs::read_dir(&place.0).unwrap().count(), 0, "nothing is left");
    // What a dead one left is replaced.
    drop(UnixListener::bind(place.socket()).unwrap());
    let door = Door::open(&place.socket(), 0o600).unwrap();
    assert!(UnixStream::connect(place.socket()).is_ok());
    assert_eq!(fs::read_dir(&place.0).unwrap().count(), 1);
    // What has come to be there is not ours to remove.
    fs::remove_file(place.socket()).unwrap();
    fs::write(place.socket(), "mine").unwrap();
    drop(door);
    assert!(place.socket().exists());
    let why = Door::open(&place.socket(), 0o600).unwrap_err();
    assert!(why.contains("no socket"), "{why}");
    assert_eq!(fs::read(place.socket()).unwrap(), b"mine");
    assert!(Door::open(&place.0.join("absent/socket"), 0o600).is_err());
    assert!(Door::open(&place.0.join("n".repeat(120)), 0o600).is_err(), "longer than a socket's name can be");
}

#[test]
fn of_many_who_want_a_dead_ones_name_one_gets_it() {
    for _ in 0..20 {
        let place = Place::new();
        drop(UnixListener::bind(place.socket()).unwrap());
        let listeners: Vec<_> = (0..6).map(|one| place.0.join(one.to_string())).collect();
        let listeners: Vec<_> = listeners.iter().map(|path| (path, UnixListener::bind(path).unwrap())).collect();
        let named: Vec<bool> = thread::scope(|scope| {
            let racers = listeners.iter().map(|(path, _)| scope.spawn(|| give_name(path, &place.socket()).is_ok()));
            racers.collect::<Vec<_>>().into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        assert_eq!(named.iter().filter(|named| **named).count(), 1);
        let (_, winner) = &listeners[named.iter().position(|named| *named).unwrap()];
        // The others looked whether somebody listens; we are the last.
        winner.set_nonblocking(true).unwrap();
        while winner.accept().is_ok() {}
        let _stream = UnixStream::connect(place.socket()).unwrap();
        assert!(winner.accept().is_ok(), "the name is the winner's");
    }
}

#[test]
fn those_who_stall_are_dropped_and_nobody_waits_for_them() {
    let place = Place::new();
    let socket = place.serve();
    // Half a header, a header alone, a request without its end.
    let whole = request(Verb::Write, "cgroup/memory.max", "1M");
    let mut stalling: Vec<UnixStream> = [3, REQUEST_HEADER, whole.len() - 1]
        .map(|len| {
            let mut stream = connect(&socket);
            stream.write_all(&whole[..len]).unwrap();
            stream
        })
        .into();
    // One that never takes its answers.
    let mut deaf = connect(&socket);
    deaf.set_nonblocking(true).unwrap();
    let list = request(Verb::List, "cgroup", "").repeat(100);
    let start = Instant::now();
    while deaf.write(&list).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(20), "the door reads on from a client that takes no answers");
    }
    let start = Instant::now();
    assert!(still_serves(&socket));
    assert!(start.elapsed() < PATIENCE / 2, "somebody waited: {:?}", start.elapsed());
    for stream in &mut stalling {
        assert!(is_closed(stream));
    }
    assert!(start.elapsed() >= PATIENCE / 2, "dropped too soon");
    let mut rest = Vec::new();
    // If it begins to read in good time after all, it is told the rest, and that it is over.
    deaf.shutdown(Shutdown::Write).unwrap();
    deaf.set_nonblocking(false).unwrap();
    deaf.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // Either the end, or a reset because requests were left unread.
    match deaf.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    assert!(still_serves(&socket));
}

#[test]
fn a_crowd_displaces_those_who_rest() {
    let place = Place::new();
    let socket = place.serve();
    let mut crowd: Vec<UnixStream> = (0..3 * PLACES).map(|_| connect(&socket)).collect();
    assert!(still_serves(&socket));
    assert!(is_closed(&mut crowd[0]), "the first has rested longest");
    let last = crowd.last_mut().unwrap();
    assert_eq!(ask(last, Verb::Read, "parameters/enabled", ""), (0, "Y\n".into()));
}

#[test]
fn the_end_waits_for_what_takes_long_and_not_for_ever() {
    let place = Place::new();
    let door = Arc::new(Door::open(&place.socket(), 0o600).expect("a free name"));
    let machine = Arc::new(Mock::new());
    machine.0.write().reclaim_takes = Duration::from_millis(500);
    let (served, asked) = (door.clone(), machine.clone());
    thread::spawn(move || served.serve(&*asked, None));
    let mut long = connect(&place.socket());
    let mut begin = || {
        long.write_all(&request(Verb::Write, "cgroup/memory.reclaim", "4096")).unwrap();
        let start = Instant::now();
        while *door.long.lock() == 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "the door has not begun what takes long");
            thread::yield_now();
        }
        Instant::now()
    };
    begin();
    let quiet = door.keep_quiet();
    assert!(*door.long.lock() == 0, "what it asked for is done");
    let mut other = connect(&place.socket());
    other.write_all(&request(Verb::Read, "parameters/enabled", "")).unwrap();
    other.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(answer_of(&mut other).is_err(), "nothing is answered meanwhile");
    drop(quiet);
    machine.0.write().reclaim_takes = Duration::from_secs(100);
    let begun = begin();
    drop(door.keep_quiet());
    assert!((QUIET_PATIENCE..2 * QUIET_PATIENCE).contains(&begun.elapsed()));
}

#[test]
fn nobody_waits_for_what_takes_long() {
    const TAKES: Duration = Duration::from_millis(500);
    let place = Place::new();
    let machine = Mock::new();
    machine.0.write().reclaim_takes = TAKES;
    let socket = place.serve_machine(machine);
    let start = Instant::now();
    let reclaim = request(Verb::Write, "cgroup/memory.reclaim", "4096");
    let read = request(Verb::Read, "parameters/enabled", "");
    // More than are done at once, each with another request behind it, which has to wait.
    let mut long: Vec<UnixStream> = (0..LONG + 3).map(|_| connect(&socket)).collect();
    for stream in &mut long {
        stream.write_all(&[&reclaim[..], &read].concat()).unwrap();
    }
    while start.elapsed() < TAKES + TAKES / 2 {
        let asked = Instant::now();
        assert!(still_serves(&socket));
        assert!(asked.elapsed() < TAKES / 2, "somebody waited: {:?}", asked.elapsed());
    }
    for stream in &mut long {
        assert_eq!(answer_of(stream).unwrap(), (0, String::new()));
        assert_eq!(answer_of(stream).unwrap(), (0, "Y\n".into()));
    }
    // Those who have gone meanwhile leave nothing behind.
    for _ in 0..3 * PLACES {
        connect(&socket).write_all(&reclaim).unwrap();
    }
    assert!(still_serves(&socket));
}

#[test]
fn one_user_leaves_room_for_others() {
    let (mut away, own, [one, another, third]) =
        (Away::default(), rustix::process::geteuid().as_raw(), [901, 902, 903]);
    for user in [one, another] {
        for _ in 0..LONG_OF_ONE {
            assert!(away.has_room_for(user));
            away.goes(user);
        }
        assert!(!away.has_room_for(user));
    }
    assert!(!away.has_room_for(third));
    for _ in 0..LONG {
        assert!(away.has_room_for(own) && away.has_room_for(0));
        away.goes(own);
    }
    assert!(!away.has_room_for(0));
    away.comes_back(one);
    assert!(away.has_room_for(one) && away.has_room_for(third) && !away.has_room_for(another));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn garbage_harms_nobody(bytes in prop::collection::vec(any::<u8>(), 0..200), like in any::<bool>()) {
        thread_local! { static DOOR: (Place, PathBuf) = { let place = Place::new(); let socket = place.serve(); (place, socket) } }
        DOOR.with(|(_, socket)| {
            let mut stream = connect(socket);
            let mut bytes = bytes.clone();
            if like && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&request(Verb::Write, "", "")[..4]);
            }
            // It may be dropped before it has said all.
            let _ = stream.write_all(&bytes);
            prop_assert!(still_serves(socket));
            Ok(())
        })?;
    }
}

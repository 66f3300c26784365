//! `uzswap mount`: the control tree of a manager as a file system, by FUSE.
//!
//! 1. It is a client of the manager's socket like `get` and `set`. The manager knows nothing of it, and needs not wait for it.
//! 2. The command ends when the file system is there; what serves it stays behind, until it is unmounted, is sent SIGINT,
//!    SIGTERM or SIGHUP, or the manager goes away. With `--foreground` it is the command itself that stays.
//! 3. Nothing is left mounted. A guard, a process of its own, unmounts what a killed server leaves behind.
//! 4. `/dev/fd/0` for a directory means that standard input is `/dev/fuse`, and the mount somebody else's affair; so
//!    `uzswap run --control-fs` does it.

mod lines;
mod names;
mod points;
mod tree;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::ArgMatches;
use fuser::{Config, Session, SessionACL};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use uzswap_manager::control_fs::{attach, open_device};
use uzswap_proto::control::Verb;
use uzswap_vm::sys::job::{Signals, become_background};

use crate::client::{self, Client};
use crate::{Failure, say};
use lines::Lines;
use points::{Device, mount_point, unmount};
use tree::{ControlFs, Owner};

/// Requests of the kernel that are looked after at once. What takes long has a thread of its own besides.
const THREADS: usize = 4;

/// How long the manager may take to show that it is one.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long whoever handed us `/dev/fuse` may take to mount it.
const MOUNT_PATIENCE: Duration = Duration::from_secs(30);

/// The directory that stands for standard input.
const GIVEN: &str = "/dev/fd/0";

/// Signals that end it.
const ENDING: &[i32] = &[libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Why the file system is no longer to be served.
enum End {
    Signal,
    Unmounted,
    ManagerGone,
}

/// `uzswap mount DIR`.
pub fn mount(matches: &ArgMatches) -> Result<i32, Failure> {
    let named: &OsString = matches.get_one("dir").expect("is required");
    if let Some(device) = matches.get_one::<String>("guard") {
        return Ok(guard(Path::new(named), device));
    }
    let socket = std::path::absolute(client::socket(matches)?).map_err(|error| failure(error.to_string()))?;
    if named == GIVEN {
        return serve_given(&socket).map_err(failure);
    }
    if !matches.get_flag("foreground") {
        return start(&socket, named).map_err(failure);
    }
    serve(&socket, Path::new(named), matches.get_flag("started")).map_err(failure)
}

fn failure(message: String) -> Failure {
    Failure::new(message, 1)
}

/// This binary once more.
fn again() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("uzswap").arg("mount");
    command
}

/// Starts a server in the background, and ends as soon as it serves; or as it does, after it has said why.
fn start(socket: &Path, dir: &OsString) -> Result<i32, String> {
    let mut command = again();
    command.arg("--socket").arg(socket).args(["--foreground", "--started", "--"]).arg(dir);
    let mut server = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let mut word = Vec::new();
    // An error is the end, too.
    let _ = server.stdout.take().expect("is piped").read_to_end(&mut word);
    if !word.is_empty() {
        return Ok(0);
    }
    let status = server.wait().map_err(|error| error.to_string())?;
    status.code().ok_or_else(|| format!("{}: the server was killed before it served", dir.display()))
}

/// Mounts the tree and serves it until the end. `started` tells that somebody waits for a word on standard output.
fn serve(socket: &Path, named: &Path, started: bool) -> Result<i32, String> {
    let owner = manager(socket)?;
    let point = mount_point(named)?;
    let device = open_device()?;
    // Before there are threads, which inherit it.
    let signals = Signals::block(ENDING);
    attach(&device, &point)?;
    let at = Device::at(&point).ok_or_else(|| format!("{}: was unmounted at once", point.display()))?;
    let guard = start_guard(&point, &at);
    let served = session(device.into(), socket, owner).and_then(|session| {
        if started {
            detach()?;
        }
        Ok(wait_for_end(session, signals, socket))
    });
    // If somebody else has unmounted it, or did so a moment ago, there is nothing to do.
    unmount(&point, &at);
    if let Some(mut guard) = guard {
        drop(guard.stdin.take());
        let _ = guard.wait();
    }
    if let End::ManagerGone = served? {
        say(&format!("{}: unmounted, for the manager at {} has ended", point.display(), socket.display()));
    }
    Ok(0)
}

/// Makes sure that a manager listens; gives its user, which owns the socket.
fn manager(socket: &Path) -> Result<Owner, String> {
    let not_connected = |error: io::Error| client::not_connected(socket, &error);
    let owner = fs::metadata(socket).map_err(not_connected)?;
    let mut client = Client::connect(socket).map_err(not_connected)?;
    client.ask(Verb::Look, "", b"", PATIENCE).map_err(|error| client::not_answered(socket, &error, PATIENCE))?;
    Ok(Owner { uid: owner.uid(), gid: owner.gid() })
}

fn session(device: OwnedFd, socket: &Path, owner: Owner) -> Result<Session<ControlFs>, String> {
    let tree = ControlFs::new(Arc::new(Lines::new(socket.to_owned())), owner);
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(THREADS);
    Session::from_fd(tree, device, SessionACL::All, config).map_err(|error| format!("/dev/fuse: {error}"))
}

/// Leaves whoever started us: his session, directory and output, after the word that he waits for.
fn detach() -> Result<(), String> {
    let words = |error: io::Error| error.to_string();
    become_background("uzswap-mount");
    env::set_current_dir("/").map_err(words)?;
    io::stdout().write_all(b"+").and_then(|()| io::stdout().flush()).map_err(words)?;
    let nowhere = fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(words)?;
    dup2_stdout(&nowhere).and_then(|()| dup2_stderr(&nowhere)).map_err(|error| error.to_string())
}

fn wait_for_end(session: Session<ControlFs>, signals: Signals, socket: &Path) -> End {
    let (ends, end) = mpsc::channel();
    let tell = |end: End, wait: Box<dyn FnOnce() + Send>| {
        let ends: Sender<End> = ends.clone();
        thread::spawn(move || {
            wait();
            // If nobody listens any more, it has ended already.
            let _ = ends.send(end);
        });
    };
    let socket = socket.to_owned();
    tell(End::Signal, Box::new(move || while signals.wait(Duration::from_secs(3600)).is_none() {}));
    tell(End::ManagerGone, Box::new(move || outlast(&socket)));
    // However it ends, it does.
    tell(End::Unmounted, Box::new(move || drop(session.run())));
    end.recv().expect("the senders are here")
}

/// Waits until no manager listens any more. It ends connections now and then; what tells is whether there is a new one.
fn outlast(socket: &Path) {
    while let Ok(mut client) = Client::connect(socket) {
        client.outlast();
        // Not in a circle, if it is rather crowded there.
        thread::sleep(Duration::from_millis(10));
    }
}

/// Serves a mount that whoever started us makes, and that goes with those who see it. It ends with him at the latest.
fn serve_given(socket: &Path) -> Result<i32, String> {
    become_background("uzswap-control");
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| error.to_string())?;
    let device = io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    let nowhere = fs::File::open("/dev/null").map_err(|error| format!("/dev/null: {error}"))?;
    dup2_stdin(nowhere).map_err(|error| error.to_string())?;
    env::set_current_dir("/").map_err(|error| error.to_string())?;
    wait_until_mounted(&device)?;
    let owner = fs::metadata(socket).map_err(|error| client::not_connected(socket, &error))?;
    let session = session(device, socket, Owner { uid: owner.uid(), gid: owner.gid() })?;
    // An error is that of a mount that was torn down.
    let _ = session.run();
    Ok(0)
}

/// Waits until the kernel has something to say. Before it is mounted, the device has errors only.
fn wait_until_mounted(device: &OwnedFd) -> Result<(), String> {
    let until = Instant::now() + MOUNT_PATIENCE;
    while Instant::now() < until {
        let mut waited_for = [PollFd::new(device, PollFlags::IN)];
        let patience = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut waited_for, Some(&patience)).is_ok() && waited_for[0].revents().contains(PollFlags::IN) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err("/dev/fuse: was not mounted".to_owned())
}

/// Starts the guard of a mount. Without one it is served all the same.
fn start_guard(point: &Path, device: &Device) -> Option<Child> {
    let mut command = again();
    command.arg("--guard").arg(&device.0).arg("--").arg(point);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

/// The guard: waits until the server is no more, and unmounts what it has left.
fn guard(point: &Path, device: &str) -> i32 {
    become_background("uzswap-guard");
    // Its directory would keep a file system busy; if there is no other, so be it.
    let _ = env::set_current_dir("/");
    // Nothing comes but the end.
    let _ = io::stdin().read_to_end(&mut Vec::new());
    unmount(&PathBuf::from(point), &Device(device.to_owned()));
    0
}

//! The agent on disk, for as long as the job runs: the dynamic linker wants a file to preload. What is written to its board shows
//! in every program that has it mapped.
//!
//! Processes can outlive their manager, with the file's name in `LD_PRELOAD`: a user able to create a file of that name
//! would run code in them. Therefore:
//!
//! 1. The file lies in a directory of the manager's user that no other user can write to, rename or remove. A directory or a
//!    symbolic link that another user has put there is refused.
//! 2. The directory stays when the manager ends, so that its name stays taken.
//! 3. Every user may read the file: processes of the job may change their user.
//! 4. The manager holds a lock on its file, and so does the front of each job that has joined it: such jobs can outlive the manager. A later
//!    manager removes files of its directory that are not locked.
//!
//! In the directory lies an empty one, `libasan.so`, and programs are told to load the agent by way of it. A program built with
//! AddressSanitizer refuses to start unless the name of the first library contains that. The name is checked as it was given; a
//! sanitizer that is linked statically wants no such name among the files that are mapped, which are named without detours.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use uzswap_proto::{
    BOARD, BOARD_LANDMARK, BOARD_OWNER, BOARD_PID_NAMESPACE, BOARD_SOCKET_PATH, BOARD_USER_NAMESPACE, SOCKET_PATH,
};
use uzswap_vm::sys::file::file_system;
use uzswap_vm::sys::link::Listener;
use uzswap_vm::sys::process::PidFd;

/// How the names of agents begin.
pub const PREFIX: &str = "uzswap-agent.";

/// The directory by way of which programs load the agent.
const DETOUR: &str = "libasan.so";

/// The longest path of a directory. A socket's address beside the agent has 107 bytes.
const DIRECTORY_MAX: usize = 60;

const STICKY: u32 = 0o1000;
const OTHERS_WRITE: u32 = 0o022;

/// Writes the agent where programs can load it from. The error says which directory is refused and why.
pub fn place(agent: &[u8], unique: u64) -> io::Result<PathBuf> {
    let mut last_error = io::Error::new(ErrorKind::NotFound, "no directory allows executable files");
    for directory in candidates(rustix::process::geteuid().as_raw()) {
        let placed = prepare(&directory).and_then(|usable| {
            usable
                .then(|| write(&directory, &format!("{PREFIX}{}.{unique:016x}", std::process::id()), agent))
                .transpose()
        });
        match placed {
            Ok(Some(path)) => return Ok(path),
            Ok(None) => {}
            Err(error) => {
                last_error = io::Error::new(error.kind(), format!("{}: {error}", directory.display()));
            }
        }
    }
    Err(last_error)
}

/// Returns the directories that the agent of `user` may lie in, best first: those whose parent only that user can write to, then
/// those in directories for temporary files.
fn candidates(user: u32) -> Vec<PathBuf> {
    let own = if user == 0 {
        vec![PathBuf::from("/run/uzswap"), PathBuf::from("/var/lib/uzswap")]
    } else {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
        runtime.map(|path| path.join("uzswap")).into_iter().collect()
    };
    let shared = ["/tmp", "/var/tmp", "/dev/shm"].map(|parent| Path::new(parent).join(format!("uzswap-{user}")));
    own.into_iter().chain(shared).filter(|path| path.as_os_str().len() <= DIRECTORY_MAX).collect()
}

/// Creates `directory` if it does not exist, checks that no other user can change what is in it, and removes what dead managers
/// have left there. False if programs cannot be loaded from there.
fn prepare(directory: &Path) -> io::Result<bool> {
    let refused = |why: String| io::Error::new(ErrorKind::PermissionDenied, why);
    let user = rustix::process::geteuid().as_raw();
    let parent = directory.parent().unwrap_or(Path::new("/"));
    let Ok(above) = fs::metadata(parent) else { return Ok(false) };
    if file_system(parent).is_ok_and(|fs| fs.no_exec) {
        return Ok(false);
    }
    // In a sticky directory a name belongs to the user that has created it.
    let is_safe = above.mode() & OTHERS_WRITE == 0 || above.mode() & STICKY != 0;
    if ![0, user].contains(&above.uid()) || !is_safe {
        return Err(refused(format!("other users can rename what is in {}", parent.display())));
    }
    match DirBuilder::new().mode(0o755).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(directory);
    let opened = opened.map_err(|error| refused(format!("is no directory that can be used ({error}); remove it")))?;
    let found = opened.metadata()?;
    if found.uid() != user {
        return Err(refused(format!("belongs to user {}, not to user {user}; remove it", found.uid())));
    }
    // Created under another umask, or opened up by its owner.
    if found.mode() & 0o777 != 0o755 {
        opened.set_permissions(Permissions::from_mode(0o755))?;
    }
    sweep(directory);
    match DirBuilder::new().mode(0o755).create(directory.join(DETOUR)) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(true),
    }
}

/// What processes that have loaded the agent at `path` can reach: `by_name`, and a socket for those in other network namespaces, who run
/// unmanaged if it cannot be had. To be called by the process that is on the board.
pub fn listeners(by_name: Listener, path: &Path) -> Vec<Listener> {
    [by_name].into_iter().chain(Listener::bind_path(&attach_socket(path)).ok()).collect()
}

/// Returns the name by which programs are to load the agent at `path`.
pub fn preload_name(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(directory), Some(name)) if directory.join(DETOUR).is_dir() => {
            directory.join(DETOUR).join("..").join(name)
        }
        _ => path.to_owned(),
    }
}

/// Removes the agent at `path` and what lies beside it; a second removal is no error. The agent goes last: as long as it is there, the rest
/// is found ([`sweep`]).
pub fn remove(path: &Path) {
    for path in [&socket_beside(path), &attach_socket(path), path] {
        let _ = fs::remove_file(path);
    }
}

/// Returns a name for a control socket that the user has not named. It is removed like the agent's.
pub fn socket_beside(agent: &Path) -> PathBuf {
    agent.with_extension("socket")
}

/// The agent for `path`, with this process, its user, its namespaces and the path of its socket on the board.
fn inscribed(agent: &[u8], path: &Path) -> Vec<u8> {
    let mut agent = agent.to_vec();
    let Some(title) = board(&agent) else { return agent };
    let mut say = |at: usize, bytes: &[u8]| {
        let at = title + BOARD.len() + at;
        agent[at..at + bytes.len()].copy_from_slice(bytes);
    };
    for (at, link) in [(BOARD_PID_NAMESPACE, "/proc/self/ns/pid"), (BOARD_USER_NAMESPACE, "/proc/self/ns/user")] {
        if let Ok(namespace) = fs::metadata(link) {
            say(at, &namespace.ino().to_ne_bytes());
        }
    }
    let own = std::process::id();
    if let Some(inode) = PidFd::open(own as i32).ok().and_then(|process| process.inode()) {
        say(BOARD_LANDMARK, &u64::from(own).to_ne_bytes());
        say(BOARD_LANDMARK + 8, &inode.to_ne_bytes());
    }
    say(BOARD_OWNER, &u64::from(rustix::process::geteuid().as_raw()).to_ne_bytes());
    let socket = attach_socket(path);
    if socket.as_os_str().len() < SOCKET_PATH {
        say(BOARD_SOCKET_PATH, socket.as_os_str().as_bytes());
    }
    agent
}

/// The path of the socket for processes in other network namespaces. It is cleared away like the agent's.
pub fn attach_socket(agent: &Path) -> PathBuf {
    agent.with_extension("attach")
}

/// Where the board begins.
fn board(agent: &[u8]) -> Option<usize> {
    agent.windows(BOARD.len()).position(|bytes| bytes == BOARD)
}

/// Writes the agent, and locks it for as long as this process or the manager lives.
fn write(directory: &Path, name: &str, agent: &[u8]) -> io::Result<PathBuf> {
    let path = directory.join(format!("{name}.so"));
    // Under another name until it is locked: a sweep removes what is not.
    let hidden = directory.join(format!(".{name}"));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(&hidden)?;
    let placed = flock(&file, FlockOperation::NonBlockingLockShared)
        .map_err(io::Error::from)
        .and_then(|()| file.set_permissions(Permissions::from_mode(0o755)))
        .and_then(|()| file.write_all(&inscribed(agent, &path)))
        .and_then(|()| fs::rename(&hidden, &path));
    placed.inspect_err(|_| drop(fs::remove_file(&hidden)))?;
    // Front and manager share their descriptors: it closes when both have ended.
    std::mem::forget(file);
    Ok(path)
}

/// The agent's board.
#[derive(Debug)]
pub struct Board {
    file: File,
    at: u64,
    said: bool,
}

impl Board {
    /// That of the agent at `path`.
    pub fn open(path: &Path) -> io::Result<Board> {
        let bytes = fs::read(path)?;
        let title = board(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        let file = OpenOptions::new().write(true).open(path)?;
        Ok(Board { file, at: (title + BOARD.len()) as u64, said: false })
    }

    /// Says whether all limits are far, if that is news.
    pub fn say(&mut self, far: bool) {
        if far != self.said && self.file.write_all_at(&[far as uzswap_proto::Board], self.at).is_ok() {
            self.said = far;
        }
    }
}

/// Keeps the agent at `path` from being removed by a later manager, as long as the file is open.
pub fn hold(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    flock(&file, FlockOperation::NonBlockingLockShared)?;
    Ok(file)
}

/// Removes the agents of managers that have ended, and the sockets beside them.
fn sweep(directory: &Path) {
    let Ok(entries) = directory.read_dir() else { return };
    for entry in entries.flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        if !name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(".so")) {
            continue;
        }
        let is_free = |file: File| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if File::open(&path).is_ok_and(is_free) {
            remove(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that is removed at the end of a test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("uz-agent-file-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_directory_that_others_could_change_is_refused() {
        let scratch = Scratch::new("refused");
        let directory = scratch.0.join("uzswap");
        std::os::unix::fs::symlink("/", &directory).unwrap();
        assert!(prepare(&directory).unwrap_err().to_string().contains("is no directory"));
        fs::remove_file(&directory).unwrap();
        fs::write(&directory, "").unwrap();
        assert!(prepare(&directory).is_err(), "a file");
        fs::remove_file(&directory).unwrap();
        fs::set_permissions(&scratch.0, Permissions::from_mode(0o777)).unwrap();
        assert!(prepare(&directory).unwrap_err().to_string().contains("other users can rename"));
        fs::set_permissions(&scratch.0, Permissions::from_mode(0o1777)).unwrap();
        assert!(prepare(&directory).unwrap());
        fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
        assert!(prepare(&directory).unwrap());
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o755, "closed to others again");
    }

    #[test]
    fn what_a_dead_manager_has_left_is_removed_and_a_live_one_keeps_its_agent() {
        let scratch = Scratch::new("swept");
        let live = write(&scratch.0, "uzswap-agent.1.a", b"agent").unwrap();
        let dead = scratch.0.join("uzswap-agent.1.b.so");
        fs::write(&dead, "").unwrap();
        fs::write(socket_beside(&dead), "").unwrap();
        fs::write(attach_socket(&dead), "").unwrap();
        fs::write(scratch.0.join("other"), "").unwrap();
        sweep(&scratch.0);
        let mut left: Vec<_> = scratch.0.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["other", "uzswap-agent.1.a.so"]);
        assert_eq!(fs::read(live).unwrap(), b"agent");
    }
}

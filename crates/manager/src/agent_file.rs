//! The agent on disk, for as long as the job runs: the dynamic linker wants a file to preload. What is written to its board shows
//! in every program that has it mapped.
//!
//! It lies where every user of the job can read it, and is named after the process that answers for it, so that what a
//! killed machine left behind is cleared away by the next run.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use uzswap_proto::BOARD;
use uzswap_vm::sys::file::file_system;

const PREFIX: &str = "uzswap-agent.";

/// Writes the agent where programs can load it from.
pub fn place(agent: &[u8], unique: u64) -> io::Result<PathBuf> {
    let mut last_error = io::Error::new(io::ErrorKind::NotFound, "no directory allows executable files");
    for directory in ["/tmp", "/var/tmp", "/dev/shm"].map(Path::new) {
        if file_system(directory).is_ok_and(|fs| fs.no_exec) {
            continue;
        }
        sweep(directory);
        let path = directory.join(format!("{PREFIX}{}.{unique:016x}.so", std::process::id()));
        match write(&path, agent) {
            Ok(()) => return Ok(path),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

/// A name for a control socket that nobody has named. It is cleared away like the agent's.
pub fn socket_beside(agent: &Path) -> PathBuf {
    agent.with_extension("socket")
}

fn write(path: &Path, agent: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(path)?;
    file.write_all(agent).inspect_err(|_| drop(fs::remove_file(path)))
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
        let title = bytes.windows(BOARD.len()).position(|bytes| bytes == BOARD).ok_or(io::ErrorKind::InvalidData)?;
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

/// Removes the agents of runs that are no more.
fn sweep(directory: &Path) {
    let Ok(entries) = directory.read_dir() else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

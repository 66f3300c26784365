//! The agent on disk, for as long as the job runs: the dynamic linker wants a file to preload.
//!
//! It lies where every user of the job can read it, and is named after the process that answers for it, so that what a
//! killed machine left behind is cleared away by the next run.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

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
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o555).open(path)?;
    file.write_all(agent).inspect_err(|_| drop(fs::remove_file(path)))
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

//! The swap file: unlinked from the moment it exists, so that nobody else opens it and nothing is left behind.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use uzswap_engine::{ReadAt, SwapFile};
use uzswap_vm::sys::file::{file_system, punch_hole};
use uzswap_vm::sys::uring;

use crate::RunError;

/// Where the swap file goes if nothing else is said: a directory that is on a disk on most systems.
const DEFAULT_DIRECTORY: &str = "/var/tmp";

/// A file that holds pages written back.
#[derive(Debug)]
pub struct DiskSwapFile(File);

/// Creates the swap file at `path`, or in the default directory; gives it and a warning, if there is cause for one.
pub fn create(path: Option<&Path>, unique: u64) -> Result<(DiskSwapFile, Option<String>), RunError> {
    let default = || Path::new(DEFAULT_DIRECTORY).join(format!("uzswap.{unique:016x}.swap"));
    let path = path.map_or_else(default, PathBuf::from);
    let refuse = |error: &dyn std::fmt::Display| {
        RunError::setup(format!(
            "swap file {}: {error}; name another with --swap-file, or use --no-swap",
            path.display()
        ))
    };
    let file = (OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path))
        .map_err(|error| refuse(&error))?;
    std::fs::remove_file(&path).map_err(|error| refuse(&error))?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let in_memory = file_system(directory).is_ok_and(|fs| fs.in_memory);
    let warning = in_memory.then(|| {
        format!("the swap file is on {}, which is kept in memory: name a disk with --swap-file", directory.display())
    });
    Ok((DiskSwapFile(file), warning))
}

impl SwapFile for DiskSwapFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn read_all(&self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        uring::read_all(&self.0, reads)
    }

    fn discard(&self, offset: u64, len: u64) {
        // Where the file system cannot, the blocks are used again all the same.
        let _ = punch_hole(&self.0, offset, len);
    }
}

//! The swap file: unlinked from the moment it exists, so that nobody else opens it and nothing is left behind.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

use uzswap_engine::{ReadAt, SwapFile};
use uzswap_vm::sys::file::{file_system, punch_hole};
use uzswap_vm::sys::uring;

use crate::RunError;

/// Where the swap file goes if nothing else is said: a directory that is on a disk on most systems.
const DEFAULT_DIRECTORY: &str = "/var/tmp";

/// A file that holds pages written back.
#[derive(Debug)]
pub struct DiskSwapFile {
    file: File,
    trouble: Trouble,
    faults: Option<Faults>,
}

/// How the last write to the swap file ended.
#[derive(Debug, Clone, Default)]
pub struct Trouble(Arc<AtomicI32>);

impl Trouble {
    /// The error number of the last write; None if it has succeeded.
    pub fn errno(&self) -> Option<i32> {
        Some(self.0.load(Relaxed)).filter(|errno| *errno != 0)
    }

    /// Notes how a write ended.
    pub fn note(&self, result: &io::Result<()>) {
        let errno = result.as_ref().map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
        if self.0.load(Relaxed) != errno {
            self.0.store(errno, Relaxed);
        }
    }
}

/// For tests: reads and writes of the swap file that fail on purpose, at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapFaults {
    /// The same seed has the same calls fail, as far as they come in the same order.
    pub seed: u64,
    /// How many of a thousand reads fail.
    pub reads: u16,
    /// How many of a thousand writes fail.
    pub writes: u16,
}

impl SwapFaults {
    /// The environment variable that has them injected.
    pub const VARIABLE: &str = "UZSWAP_SWAP_FAULTS";

    /// Parses `SEED:READS:WRITES`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<SwapFaults, String> {
        let mut parts = text.split(':');
        let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok());
        let rate = |number: Option<u64>| number.and_then(|n| u16::try_from(n).ok()).filter(|rate| *rate <= 1000);
        match (number(), rate(number()), rate(number()), parts.next()) {
            (Some(seed), Some(reads), Some(writes), None) => Ok(SwapFaults { seed, reads, writes }),
            _ => Err(format!(
                "{}: '{text}' is not SEED:READS:WRITES, with two numbers of a thousand",
                SwapFaults::VARIABLE
            )),
        }
    }
}

#[derive(Debug)]
struct Faults {
    plan: SwapFaults,
    calls: AtomicU64,
}

impl Faults {
    /// Fails, or does not, for a call of which so many of a thousand fail.
    fn inject(&self, rate: u16) -> io::Result<()> {
        let mut z = self.plan.seed.wrapping_add(self.calls.fetch_add(1, Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        if z % 1000 >= u64::from(rate) {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(if z >> 40 & 1 == 0 { libc::EIO } else { libc::ENOSPC }))
    }
}

/// Creates the swap file at `path`, or in the default directory; gives it and warnings, if there is cause for any.
pub fn create(
    path: Option<&Path>,
    unique: u64,
    faults: Option<SwapFaults>,
) -> Result<(DiskSwapFile, Vec<String>), RunError> {
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
    let mut warnings = Vec::new();
    if file_system(directory).is_ok_and(|fs| fs.in_memory) {
        warnings.push(format!(
            "the swap file is on {}, which is kept in memory: name a disk with --swap-file",
            directory.display()
        ));
    }
    if faults.is_some() {
        warnings.push(format!("accesses to the swap file fail on purpose ({})", SwapFaults::VARIABLE));
    }
    let faults = faults.map(|plan| Faults { plan, calls: AtomicU64::new(0) });
    Ok((DiskSwapFile { file, trouble: Trouble::default(), faults }, warnings))
}

impl DiskSwapFile {
    /// How its last write ended, now and later.
    pub fn trouble(&self) -> Trouble {
        self.trouble.clone()
    }

    fn inject(&self, rate: impl Fn(&SwapFaults) -> u16) -> io::Result<()> {
        self.faults.as_ref().map_or(Ok(()), |faults| faults.inject(rate(&faults.plan)))
    }
}

impl SwapFile for DiskSwapFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let written = self.inject(|plan| plan.writes).and_then(|()| self.file.write_all_at(data, offset));
        self.trouble.note(&written);
        written
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.inject(|plan| plan.reads)?;
        self.file.read_exact_at(buffer, offset)
    }

    fn read_all(&self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        reads.iter().try_for_each(|_| self.inject(|plan| plan.reads))?;
        uring::read_all(&self.file, reads)
    }

    fn discard(&self, offset: u64, len: u64) {
        // Where the file system cannot, the blocks are used again all the same.
        let _ = punch_hole(&self.file, offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_come_at_their_rate_and_again_with_their_seed() {
        assert_eq!(SwapFaults::parse("7:250:1000"), Ok(SwapFaults { seed: 7, reads: 250, writes: 1000 }));
        for text in ["", "1", "1:2", "1:2:3:4", "1:1001:0", "1:0:1001", "x:1:1", "1:-1:1"] {
            assert!(SwapFaults::parse(text).unwrap_err().contains("SEED:READS:WRITES"), "{text}");
        }
        let outcomes = |seed| {
            let faults = Faults { plan: SwapFaults { seed, reads: 250, writes: 0 }, calls: AtomicU64::new(0) };
            (0..4000).map(|_| faults.inject(250).is_err()).collect::<Vec<_>>()
        };
        let failed = outcomes(1).into_iter().filter(|failed| *failed).count();
        assert!((900..1100).contains(&failed), "{failed}");
        assert_eq!(outcomes(1), outcomes(1));
        assert_ne!(outcomes(1), outcomes(2));
        let (swap, warnings) =
            create(None, 0x7ab5, Some(SwapFaults { seed: 1, reads: 0, writes: 1000 })).expect("a disk");
        assert_eq!((warnings.len(), swap.trouble().errno()), (1, None));
        assert!(swap.write_at(0, b"x").is_err() && swap.trouble().errno().is_some());
    }
}

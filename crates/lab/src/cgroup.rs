//! A memory cgroup for the rivals, version 1 or 2, whichever the machine has; removed when dropped.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::bench::Side;
use crate::processes::kibibytes;

/// A version of memory cgroups.
#[derive(Debug)]
struct Version {
    /// Where they are.
    hierarchy: &'static str,
    /// The file with their limit.
    limit: &'static str,
    /// Whether a group pays for what zswap keeps of it, as a group of uzswap does.
    charges_zswap: bool,
}

const VERSIONS: [Version; 2] = [
    Version { hierarchy: "/sys/fs/cgroup", limit: "memory.max", charges_zswap: true },
    Version { hierarchy: "/sys/fs/cgroup/memory", limit: "memory.limit_in_bytes", charges_zswap: false },
];

/// A memory cgroup with nobody in it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    version: &'static Version,
    /// For whom what limit was asked for last, in bytes.
    asked: Cell<(Side, u64)>,
    /// What zswap kept meanwhile, in bytes, of each that was asked for: on the average of the last run.
    kept: RefCell<BTreeMap<(Side, u64), u64>>,
}

/// What zswap keeps while a program runs.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    sum: u64,
    times: u64,
}

impl Kept {
    /// Looks now.
    pub(crate) fn look(&mut self) {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        self.sum += kibibytes(&text, "Zswap").unwrap_or(0);
        self.times += 1;
    }
}

impl Cgroup {
    pub(crate) fn new() -> Result<Cgroup> {
        let name = format!("uzswap-lab-{}", std::process::id());
        for version in &VERSIONS {
            let path = Path::new(version.hierarchy).join(&name);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let cgroup = Cgroup { path, version, asked: Cell::new((Side::Bare, 0)), kept: RefCell::default() };
            if cgroup.limit_file().exists() {
                return Ok(cgroup);
            }
        }
        bail!("no memory cgroup can be made in {} or {}", VERSIONS[0].hierarchy, VERSIONS[1].hierarchy)
    }

    fn limit_file(&self) -> PathBuf {
        self.path.join(self.version.limit)
    }

    /// A command that runs in it, held to `bytes`: where zswap is not charged for what it keeps, without what it kept the last
    /// time. Else the rival would have more memory than uzswap.
    pub(crate) fn command(&self, side: Side, bytes: u64) -> Result<Command> {
        self.asked.set((side, bytes));
        let kept = self.kept.borrow().get(&(side, bytes)).copied().unwrap_or(0);
        let (file, limit) = (self.limit_file(), bytes.saturating_sub(kept).max(bytes / 8));
        fs::write(&file, limit.to_string()).with_context(|| format!("cannot write to {}", file.display()))?;
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        Ok(command)
    }

    /// Takes note of what zswap has kept while the last command ran.
    pub(crate) fn note(&self, kept: &Kept) {
        if !self.version.charges_zswap {
            self.kept.borrow_mut().insert(self.asked.get(), kept.sum / kept.times.max(1));
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Who was killed is in it until its memory is gone.
        const LOOKS: u32 = 100;
        let mut removed = fs::remove_dir(&self.path);
        for _ in 0..LOOKS {
            if removed.is_ok() {
                return;
            }
            sleep(Duration::from_millis(50));
            removed = fs::remove_dir(&self.path);
        }
        if let Err(error) = removed {
            eprintln!("uzswap lab: cannot remove {}: {error}", self.path.display());
        }
    }
}

//! A memory cgroup for the rivals, version 1 or 2, whichever the machine has; removed when dropped.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

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
    /// In bytes: the limit that was asked for, and the one that is set.
    limits: Cell<(u64, u64)>,
}

impl Cgroup {
    pub(crate) fn new() -> Result<Cgroup> {
        let name = format!("uzswap-lab-{}", std::process::id());
        for version in &VERSIONS {
            let path = Path::new(version.hierarchy).join(&name);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let cgroup = Cgroup { path, version, limits: Cell::default() };
            if cgroup.limit_file().exists() {
                return Ok(cgroup);
            }
        }
        bail!("no memory cgroup can be made in {} or {}", VERSIONS[0].hierarchy, VERSIONS[1].hierarchy)
    }

    fn limit_file(&self) -> PathBuf {
        self.path.join(self.version.limit)
    }

    /// A command that runs in it, held to `bytes`.
    pub(crate) fn command(&self, bytes: u64) -> Result<Command> {
        let limit = self.limit_file();
        fs::write(&limit, bytes.to_string()).with_context(|| format!("cannot write to {}", limit.display()))?;
        self.limits.set((bytes, bytes));
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        Ok(command)
    }

    /// Takes what zswap keeps off the limit, where the kernel does not: else the rival would have more memory. To be called
    /// often while somebody is in the group.
    pub(crate) fn charge_zswap(&self) {
        /// Smaller changes are not worth the call.
        const STEP: u64 = 1 << 20;
        let (asked, set) = self.limits.get();
        let Some(kept) = zswap_bytes().filter(|_| !self.version.charges_zswap) else { return };
        let limit = asked.saturating_sub(kept).max(asked / 8);
        // Fails if it cannot be reached at once: then the next time.
        if limit.abs_diff(set) >= STEP && fs::write(self.limit_file(), limit.to_string()).is_ok() {
            self.limits.set((asked, limit));
        }
    }
}

/// What the kernel's zswap keeps, in bytes of memory.
fn zswap_bytes() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, "Zswap").ok()
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("uzswap lab: cannot remove {}: {error}", self.path.display());
        }
    }
}

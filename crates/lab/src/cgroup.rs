//! A memory cgroup for the rivals, version 1 or 2, whichever the machine has; removed when dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Where memory cgroups may be, and the file with their limit.
const HIERARCHIES: [(&str, &str); 2] =
    [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];

/// A memory cgroup with nobody in it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    limit: &'static str,
}

impl Cgroup {
    pub(crate) fn new() -> Result<Cgroup> {
        let name = format!("uzswap-lab-{}", std::process::id());
        for (hierarchy, limit) in HIERARCHIES {
            let path = Path::new(hierarchy).join(&name);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let cgroup = Cgroup { path, limit };
            if cgroup.path.join(limit).exists() {
                return Ok(cgroup);
            }
        }
        bail!("no memory cgroup can be made in {} or {}", HIERARCHIES[0].0, HIERARCHIES[1].0)
    }

    /// A command that runs in it, held to `bytes`.
    pub(crate) fn command(&self, bytes: u64) -> Result<Command> {
        let limit = self.path.join(self.limit);
        fs::write(&limit, bytes.to_string()).with_context(|| format!("cannot write to {}", limit.display()))?;
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        Ok(command)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("uzswap lab: cannot remove {}: {error}", self.path.display());
        }
    }
}

//! The kernel's own zswap as a rival: a swap file, a codec, a large pool.
//!
//! Each step is undone in reverse order when [`KernelZswap`] is dropped, also when set-up fails half way:
//! 1. the swap file is made (it lies in the scratch directory, which removes it);
//! 2. each parameter is remembered, then changed;
//! 3. the swap file is switched on, last: nothing of it is used before zswap stands in front of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::program::{Interrupt, Scratch, run};

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// Those that a kernel may have.
const CODECS: [&str; 7] = ["lzo", "lzo-rle", "lz4", "lz4hc", "deflate", "zstd", "842"];

/// How many pages a fault brings, as a power of two.
const READAHEAD: &str = "/proc/sys/vm/page-cluster";

/// The kernel's zswap, switched on for as long as this lives.
#[derive(Debug)]
pub(crate) struct KernelZswap {
    swap_file: Option<PathBuf>,
    found: Vec<(PathBuf, String)>,
}

impl KernelZswap {
    /// Sets it up with a swap file of `bytes`.
    pub(crate) fn set_up(codec: &str, bytes: u64, scratch: &Scratch, interrupt: &Interrupt) -> Result<Self> {
        if swaps_active()? {
            bail!("this machine already swaps (see /proc/swaps), which would mix with the measurement");
        }
        let file = scratch.path().join("swap");
        run(Command::new("fallocate").arg("-l").arg(bytes.to_string()).arg(&file), scratch, interrupt)?;
        run(Command::new("chmod").arg("600").arg(&file), scratch, interrupt)?;
        run(Command::new("mkswap").arg(&file), scratch, interrupt)?;

        let mut this = Self { swap_file: None, found: Vec::new() };
        for (name, value) in
            [("compressor", codec), ("max_pool_percent", "50"), ("shrinker_enabled", "N"), ("enabled", "Y")]
        {
            this.set(Path::new(PARAMETERS).join(name), value)?;
        }
        let readahead = fs::read_to_string(READAHEAD).with_context(|| format!("cannot read {READAHEAD}"))?;
        this.set(READAHEAD.into(), readahead.trim())?;
        this.swap_file = Some(file.clone());
        run(Command::new("swapon").arg(&file), scratch, interrupt)?;
        Ok(this)
    }

    /// Has the swap file used without zswap, or with it again and a codec, and with its shrinker or without.
    pub(crate) fn enable(&self, codec: Option<&str>, shrinker: bool) -> Result<()> {
        let parameter = |name| Path::new(PARAMETERS).join(name);
        if let Some(codec) = codec {
            write(&parameter("compressor"), codec)?;
        }
        for (name, value) in [("enabled", codec.is_some()), ("shrinker_enabled", shrinker)] {
            write(&parameter(name), if value { "Y" } else { "N" })?;
        }
        Ok(())
    }

    /// The codecs that this kernel has besides the one that is in use.
    pub(crate) fn other_codecs(&self) -> Vec<&'static str> {
        let file = Path::new(PARAMETERS).join("compressor");
        let Ok(used) = fs::read_to_string(&file) else { return Vec::new() };
        let others = CODECS.into_iter().filter(|codec| *codec != used.trim() && write(&file, codec).is_ok()).collect();
        // If this fails, so does the next work.
        let _ = write(&file, used.trim());
        others
    }

    /// Has a fault bring as many pages as the machine was found to, or its own only.
    pub(crate) fn read_ahead(&self, ahead: bool) -> Result<()> {
        let found = self.found.iter().find(|(path, _)| path == Path::new(READAHEAD)).map(|(_, value)| value.as_str());
        write(Path::new(READAHEAD), found.filter(|_| ahead).unwrap_or("0"))
    }

    fn set(&mut self, path: PathBuf, value: &str) -> Result<()> {
        let found = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        self.found.push((path.clone(), found.trim().to_owned()));
        write(&path, value)
    }
}

fn write(path: &Path, value: &str) -> Result<()> {
    fs::write(path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}

impl Drop for KernelZswap {
    fn drop(&mut self) {
        if let Some(file) = &self.swap_file
            && swaps_active().unwrap_or(true)
            && !Command::new("swapoff").arg(file).status().is_ok_and(|status| status.success())
        {
            eprintln!("uzswap lab: cannot swapoff {}: run it yourself", file.display());
        }
        for (path, value) in self.found.iter().rev() {
            if let Err(error) = fs::write(path, value) {
                eprintln!("uzswap lab: cannot restore {} to {value}: {error}", path.display());
            }
        }
    }
}

fn swaps_active() -> Result<bool> {
    Ok(fs::read_to_string("/proc/swaps").context("cannot read /proc/swaps")?.lines().count() > 1)
}

/// How many pages the kernel's zswap has stored since boot; 0 if it does not count them.
pub(crate) fn stored_since_boot() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("zswpout ")?.parse().ok()).unwrap_or(0)
}

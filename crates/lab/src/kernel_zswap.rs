//! The kernel's own zswap as a rival: a swap file, a codec, a large pool.
//!
//! Each step is undone in reverse order when [`KernelZswap`] is dropped, also when set-up fails half way:
//! 1. the swap file is made (it lies in the scratch directory, which removes it);
//! 2. each module parameter is remembered, then changed;
//! 3. the swap file is switched on, last: nothing of it is used before zswap stands in front of it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::program::{Interrupt, Scratch, run};

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// The kernel's zswap, switched on for as long as this lives.
#[derive(Debug)]
pub(crate) struct KernelZswap {
    swap_file: Option<PathBuf>,
    found: Vec<(&'static str, String)>,
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
        this.set("compressor", codec)?;
        this.set("max_pool_percent", "50")?;
        this.set("shrinker_enabled", "N")?;
        this.set("enabled", "Y")?;
        this.swap_file = Some(file.clone());
        run(Command::new("swapon").arg(&file), scratch, interrupt)?;
        Ok(this)
    }

    /// Has the swap file used without zswap, or with it again, and with its shrinker or without.
    pub(crate) fn enable(&self, zswap: bool, shrinker: bool) -> Result<()> {
        for (name, value) in [("enabled", zswap), ("shrinker_enabled", shrinker)] {
            let path = format!("{PARAMETERS}/{name}");
            fs::write(&path, if value { "Y" } else { "N" }).with_context(|| format!("cannot change {path}"))?;
        }
        Ok(())
    }

    fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
        let path = format!("{PARAMETERS}/{name}");
        let found = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        self.found.push((name, found.trim().to_owned()));
        fs::write(&path, value).with_context(|| format!("cannot write {value} to {path}"))
    }
}

impl Drop for KernelZswap {
    fn drop(&mut self) {
        if let Some(file) = &self.swap_file
            && swaps_active().unwrap_or(true)
            && !Command::new("swapoff").arg(file).status().is_ok_and(|status| status.success())
        {
            eprintln!("uzswap lab: cannot swapoff {}: run it yourself", file.display());
        }
        for (name, value) in self.found.iter().rev() {
            if let Err(error) = fs::write(format!("{PARAMETERS}/{name}"), value) {
                eprintln!("uzswap lab: cannot restore {PARAMETERS}/{name} to {value}: {error}");
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

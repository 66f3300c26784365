//! Runs one measured program; an interrupt ends it and becomes an error, so that every guard gets its turn.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Set by SIGINT, SIGTERM and SIGHUP, instead of dying of them.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From here on the signals only set the flag.
    pub(crate) fn catch() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag)).context("cannot catch signals")?;
        }
        Ok(Self(flag))
    }

    /// An error once a signal has come.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::SeqCst) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// A private directory on a real file system, removed at the end.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Result<Self> {
        let path = PathBuf::from(format!("/var/tmp/uzswap-lab-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("uzswap lab: cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Runs the command to its end and returns what it wrote to stderr; anything but success is an error.
pub(crate) fn run(command: &mut Command, scratch: &Scratch, interrupt: &Interrupt) -> Result<String> {
    interrupt.check()?;
    let path = scratch.path().join("stderr");
    let name = command.get_program().to_string_lossy().into_owned();
    let stderr = File::create(&path)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .with_context(|| format!("cannot run {name}"))?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if let Err(error) = interrupt.check() {
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
        sleep(Duration::from_millis(10));
    };
    interrupt.check()?;
    let words = std::fs::read_to_string(&path)?;
    if !status.success() {
        bail!("{name} failed ({status}): {}", words.trim());
    }
    Ok(words)
}

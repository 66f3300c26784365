//! Builds and runs one measured program; an interrupt ends it and becomes an error, so that every guard gets its turn.

use std::fs::{DirBuilder, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

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

/// Prints a line. Where nobody reads it that is an error, not the end: every guard is to have its turn.
macro_rules! tell {
    ($($words:tt)*) => {
        crate::program::print(format_args!($($words)*))
    };
}
pub(crate) use tell;

pub(crate) fn print(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot write to stdout")
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

/// Builds a C program from its source.
pub(crate) fn build(name: &str, source: &str, scratch: &Scratch, interrupt: &Interrupt) -> Result<PathBuf> {
    let (file, program) = (scratch.path().join(name).with_extension("c"), scratch.path().join(name));
    std::fs::write(&file, source)?;
    run(
        Command::new("cc").arg("-O2").arg("-o").arg(&program).arg(&file).args(["-pthread", "-lm"]),
        scratch,
        interrupt,
    )?;
    Ok(program)
}

/// Runs the command to its end and returns what it wrote to stderr; anything but success is an error.
pub(crate) fn run(command: &mut Command, scratch: &Scratch, interrupt: &Interrupt) -> Result<String> {
    run_beside(command, scratch, interrupt, None, || {})
}

/// A program was ended because it took too long.
#[derive(Debug)]
pub(crate) struct Overdue;

impl std::fmt::Display for Overdue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("took too long")
    }
}

impl std::error::Error for Overdue {}

/// The same; meanwhile does something a hundred times a second. What takes longer than `most` is ended with [`Overdue`].
pub(crate) fn run_beside(
    command: &mut Command,
    scratch: &Scratch,
    interrupt: &Interrupt,
    most: Option<Duration>,
    mut beside: impl FnMut(),
) -> Result<String> {
    let start = Instant::now();
    interrupt.check()?;
    let path = scratch.path().join("stderr");
    let name = command.get_program().to_string_lossy().into_owned();
    let stderr = File::create(&path)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {name}"))?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let overdue = most.is_some_and(|most| start.elapsed() > most);
        if let Err(error) = interrupt.check().and(if overdue { Err(Overdue.into()) } else { Ok(()) }) {
            // With all that it has started: no cgroup goes that somebody is in.
            kill_process_group(Pid::from_child(&child), Signal::KILL)?;
            child.wait()?;
            return Err(error);
        }
        beside();
        sleep(Duration::from_millis(10));
    };
    interrupt.check()?;
    let words = std::fs::read_to_string(&path)?;
    if !status.success() {
        bail!("{name} failed ({status}): {}", words.trim());
    }
    Ok(words)
}

/// A program that tells what it has done, a line each time, and goes on when it is told.
#[derive(Debug)]
pub(crate) struct Held {
    child: Child,
    words: BufReader<ChildStdout>,
}

impl Held {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.with_context(|| format!("cannot run {name}"))?;
        let words = BufReader::new(child.stdout.take().expect("a pipe"));
        Ok(Self { child, words })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the line that begins with `word`, and gives the rest of it.
    pub(crate) fn hear(&mut self, word: &str, interrupt: &Interrupt) -> Result<String> {
        let mut line = String::new();
        self.words.read_line(&mut line)?;
        interrupt.check()?;
        let rest = line.strip_prefix(word).with_context(|| format!("the program says {line:?} instead of {word:?}"))?;
        Ok(rest.trim().to_owned())
    }

    /// Lets it go on to its next line.
    pub(crate) fn go_on(&mut self) -> Result<()> {
        Ok(self.child.stdin.as_mut().expect("a pipe").write_all(b"\n")?)
    }

    /// Lets it go on to its end, which must be a success.
    pub(crate) fn finish(mut self, interrupt: &Interrupt) -> Result<()> {
        drop(self.child.stdin.take());
        let status = self.child.wait()?;
        interrupt.check()?;
        if !status.success() {
            bail!("the program failed ({status})");
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Both fail if it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

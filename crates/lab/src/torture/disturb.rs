//! What is changed while the programs of a round run, and what a daemon may keep when they have gone.
//!
//! Every change is made by `uzswap set`, `mkdir` or `rmdir`. A refusal is no failure: the manager may be about to end, or the group
//! to be in use. A command that does not end is one.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::plan::{COMPRESSORS, Random, ZPOOLS};
use super::round::Round;
use super::traces::{MARK, Part, Traced, marked, what_they_do};

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a daemon may take to free what its last job had.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);
/// What an empty pool may keep for new pages, and the swap file for new clusters, in bytes.
const MOST_POOL: u64 = 1 << 20;
const MOST_DISK: u64 = 4 << 20;
/// The groups that are made; one is below another.
const GROUPS: [&str; 3] = ["one", "two", "one/below"];

/// Makes one random change.
pub(super) fn change(round: &Round<'_>, random: &mut Random, processes: &[Traced]) -> Result<()> {
    let limit = round.plan.limit;
    let socket = random.below(round.plan.programs);
    let set = |path: &str, value: String| run(round, socket, &["set", path, &value]).map(drop);
    if round.plan.groups && random.below(2) == 0 {
        return change_group(round, random, processes, socket);
    }
    match random.below(9) {
        0 | 1 => set("parameters/compressor", random.one_of(&COMPRESSORS).to_owned()),
        2 => set("parameters/zpool", random.one_of(&ZPOOLS).to_owned()),
        3 => set("cgroup/memory.max", (limit + random.below(limit)).to_string()),
        4 => set("cgroup/memory.high", (limit / 2 + random.below(limit)).to_string()),
        5 => set("parameters/shrinker_enabled", random.one_of(&["Y", "N"]).to_owned()),
        6 => set("parameters/accept_threshold_percent", (50 + random.below(50)).to_string()),
        7 => set("parameters/max_pool_percent", (1 + random.below(30)).to_string()),
        _ => set("cgroup/memory.reclaim", random.below(limit / 2).to_string()),
    }
}

/// Makes, changes or removes a group, or moves a process into one.
fn change_group(round: &Round<'_>, random: &mut Random, processes: &[Traced], socket: u64) -> Result<()> {
    let limit = round.plan.limit;
    let group = random.one_of(&GROUPS);
    let file = |name: &str| format!("cgroup/{group}/{name}");
    let set = |name: &str, value: String| run(round, socket, &["set", &file(name), &value]).map(drop);
    match random.below(14) {
        0..3 => run(round, socket, &["mkdir", group]).map(drop),
        3..8 => {
            let programs: Vec<_> = processes.iter().filter(|process| process.part == Part::Program).collect();
            let Some(one) = programs.get(random.below(programs.len().max(1) as u64) as usize) else { return Ok(()) };
            let target = if random.below(4) == 0 { "cgroup/cgroup.procs".to_owned() } else { file("cgroup.procs") };
            run(round, socket, &["set", &target, &one.id.to_string()]).map(drop)
        }
        8 if random.below(3) == 0 => set("memory.max", "max".to_owned()),
        8 => set("memory.max", (limit / 2 + random.below(limit)).to_string()),
        9 => set("memory.low", random.below(limit).to_string()),
        10 => set("memory.zswap.max", random.one_of(&["max", "0", "1M", "2M"]).to_owned()),
        11 => set("memory.zswap.shrinker.enabled", random.below(2).to_string()),
        12 => {
            set("cgroup.freeze", "1".to_owned())?;
            sleep(Duration::from_millis(random.below(100)));
            set("cgroup.freeze", "0".to_owned())
        }
        _ => {
            // Busy, most of the time.
            set("memory.reclaim", format!("{} source=zswap", random.below(limit / 4)))?;
            run(round, socket, &["rmdir", group]).map(drop)
        }
    }
}

/// Runs a command of an operator; gives what it said, or nothing if it was refused.
fn run(round: &Round<'_>, socket: u64, arguments: &[&str]) -> Result<Option<String>> {
    let mut command: Command = round.uzswap("operator")?;
    command.env_remove(MARK).env_remove("UZSWAP_VERIFY");
    command.args(arguments).arg("--socket").arg(round.socket(socket));
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context("cannot run uzswap")?;
    let end = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            bail!("HANG: uzswap {arguments:?} does not end\n{}", what_they_do(&marked(&round.mark)));
        }
        sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Waits until a daemon without jobs has no page, no slot and no space on disk in use.
pub(super) fn await_empty(round: &Round<'_>) -> Result<()> {
    let figure = |path: &str| -> Result<u64> {
        let text = run(round, 0, &["get", path])?.with_context(|| format!("the daemon does not give {path}"))?;
        text.trim().parse().with_context(|| format!("{path} is {text:?}"))
    };
    let end = Instant::now() + EMPTY_WITHIN;
    loop {
        let pages = figure("debug/stored_pages")?;
        let (pool, swapped) = (figure("debug/pool_total_size")?, figure("cgroup/memory.swap.current")?);
        let disk = round.manager().map_or(0, disk_of);
        if pages == 0 && swapped == 0 && pool <= MOST_POOL && disk <= MOST_DISK {
            return Ok(());
        }
        if Instant::now() > end {
            bail!(
                "LEAK: without jobs {pages} pages are stored, {swapped} bytes swapped out, the pool has {pool} bytes and the swap \
                 file {disk}"
            );
        }
        sleep(Duration::from_millis(100));
    }
}

/// The bytes that the swap file of a manager takes on disk. It is unlinked from the beginning.
fn disk_of(manager: u32) -> u64 {
    let links = fs::read_dir(format!("/proc/{manager}/fd")).into_iter().flatten().flatten();
    let is_swap = |path: &std::path::Path| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains(".swap"));
    let files = links.map(|link| link.path()).filter(|path| is_swap(path));
    files.filter_map(|path| fs::metadata(path).ok()).map(|file| file.blocks() * 512).max().unwrap_or(0)
}

//! Which processes belong to a round, and what they do: by a marker in their environment, whatever their parents have become.

use std::fmt::Write as _;
use std::fs;

/// Part of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// `uzswap run`, or the process that started a daemon.
    Front,
    Manager,
    Worker,
    Program,
}

/// A process of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Traced {
    pub id: u32,
    pub part: Part,
}

/// The variable that marks the processes of a round.
pub(crate) const MARK: &str = "TORTURE_ROUND";

/// Returns the live processes that bear the marker. A zombie has no environment.
pub(crate) fn marked(mark: &str) -> Vec<Traced> {
    let word = format!("{MARK}={mark}\0");
    let own = fs::read_link("/proc/self/exe").ok();
    let ids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let ours = |id: &u32| {
        let environment = fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        environment.windows(word.len()).any(|window| window == word.as_bytes())
    };
    let part = |id| match fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default().trim() {
        "uzswap-manager" => Part::Manager,
        name if name.starts_with("uzswap-agent") => Part::Worker,
        _ if own.is_some() && fs::read_link(format!("/proc/{id}/exe")).ok() == own => Part::Front,
        _ => Part::Program,
    };
    ids.filter(ours).map(|id| Traced { id, part: part(id) }).collect()
}

/// Whether a process is stopped by a signal.
pub(crate) fn is_stopped(id: u32) -> bool {
    fs::read_to_string(format!("/proc/{id}/status")).is_ok_and(|status| status.contains("\nState:\tT "))
}

/// Whether a process is the first of a pid namespace inside this one, and its worker is among those that were killed.
pub(crate) fn is_first_without_worker(id: u32, killed: &[Traced]) -> bool {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    let is_first = numbers.split_ascii_whitespace().skip(1).last() == Some("1");
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let is_killed = |id: u32| killed.contains(&Traced { id, part: Part::Worker });
    // It does not collect its worker while it waits.
    is_first && children.split_ascii_whitespace().filter_map(|id| id.parse().ok()).any(is_killed)
}

/// Returns where each task of these processes sits, and of their children that have lost their memory, which bear no marker: the report on a
/// hang.
pub(crate) fn what_they_do(processes: &[Traced]) -> String {
    let mut report = String::new();
    let marked: Vec<u32> = processes.iter().map(|process| process.id).collect();
    let mut open: Vec<(u32, String)> =
        processes.iter().map(|process| (process.id, format!("{:?}", process.part))).collect();
    open.reverse();
    while let Some((id, part)) = open.pop() {
        let _ = writeln!(report, "process {id} ({part})");
        for task in fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten() {
            let file = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let (status, stack, call) = (file("status"), file("stack"), file("syscall"));
            let line = |name| status.lines().find(|line| line.starts_with(name)).unwrap_or("gone");
            let stack: Vec<&str> = stack.lines().filter_map(|line| line.split(' ').nth(1)).take(8).collect();
            let name = task.file_name();
            let _ = writeln!(
                report,
                "    task {} {}: {}; {}; system call {}; stack {}",
                name.display(),
                file("comm").trim(),
                line("State"),
                line("TracerPid"),
                call.trim(),
                stack.join(" < ")
            );
            let children = file("children");
            let unmarked =
                children.split_ascii_whitespace().filter_map(|id| id.parse().ok()).filter(|id| !marked.contains(id));
            open.extend(unmarked.map(|id| (id, format!("without a marker, child of {}", name.display()))));
        }
    }
    report
}

/// Returns what the descriptors of a process are of, in order, but for those that a manager may come to have at any time: io_urings of
/// its threads, and the kernel's word on pressure once there is a pool.
pub(crate) fn descriptors(id: u32) -> Vec<String> {
    let links = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    let targets = links.filter_map(|link| Some(fs::read_link(link.path()).ok()?.to_string_lossy().into_owned()));
    let is_counted = |target: &String| {
        target != "anon_inode:[io_uring]" && !target.ends_with("/memory.pressure") && target != "/proc/pressure/memory"
    };
    let mut targets: Vec<String> = targets.filter(is_counted).collect();
    targets.sort_unstable();
    targets
}

/// Returns the files of uzswap in the places for temporary files whose names have one of these process ids in them.
pub(crate) fn files_of(processes: &[u32]) -> Vec<String> {
    let has = |file: &String, id: &u32| file.split(|c: char| !c.is_ascii_digit()).any(|part| part == id.to_string());
    files_of_uzswap().into_iter().filter(|file| processes.iter().any(|id| has(file, id))).collect()
}

/// Returns the files of uzswap in the places for temporary files.
pub(crate) fn files_of_uzswap() -> Vec<String> {
    let mut found = Vec::new();
    for top in ["/tmp", "/var/tmp", "/dev/shm"] {
        for entry in fs::read_dir(top).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("uzswap") && !name.starts_with("uzswap-lab") {
                found.push(format!("{top}/{name}"));
            }
        }
    }
    found
}

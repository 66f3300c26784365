//! Looking at a running job from outside: the resident memory of a process tree, and the counters in its stats file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Resident anonymous bytes of `root`'s descendants, and of `root` itself if `with_root`. What is uzswap's own is not the
/// job's: the manager, and the workers, whose memory is their programs' and would count twice.
pub fn resident(root: u32, with_root: bool) -> u64 {
    let parents = parents();
    let descends = |mut pid: u32| {
        // A tree of processes is never this deep; a number reused while we looked could make a ring.
        for _ in 0..64 {
            match parents.get(&pid) {
                Some(&parent) if parent == root => return true,
                Some(&parent) => pid = parent,
                None => return false,
            }
        }
        false
    };
    let job = parents.keys().filter(|&&pid| if pid == root { with_root } else { descends(pid) });
    job.filter(|&&pid| !is_ours(pid)).map(|&pid| anonymous(pid).unwrap_or(0)).sum()
}

fn is_ours(pid: u32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    ["uzswap-manager", "uzswap-agent"].contains(&name.trim_end())
}

/// Every process and its parent.
fn parents() -> BTreeMap<u32, u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return BTreeMap::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?))).collect()
}

/// The fourth field of a stat line; the second is a name in parentheses that may hold anything.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn anonymous(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// The counters of a job that the demo shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats {
    /// Resident anonymous bytes.
    pub resident: u64,
    /// Bytes of the compressed pool.
    pub pool: u64,
    /// Bytes of program data in the pool.
    pub zswapped: u64,
    /// Bytes of program data in the swap file.
    pub disk: u64,
    /// Bytes moved from pool to disk so far.
    pub written_back: u64,
    /// Faults that had to wait for a page.
    pub faults: u64,
    /// Time the job waited for memory.
    pub stalled: Duration,
}

impl Stats {
    /// Reads a stats file; `None` while there is none, or none yet that is whole.
    pub fn read(path: &Path) -> Option<Stats> {
        Stats::parse(&fs::read_to_string(path).ok()?)
    }

    fn parse(text: &str) -> Option<Stats> {
        let value: serde_json::Value = serde_json::from_str(text).ok()?;
        let counter = |name: &str| value.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
        Some(Stats {
            resident: counter("anon"),
            pool: counter("zswap"),
            zswapped: counter("zswapped"),
            disk: counter("swapped_pages") * 4096,
            written_back: counter("written_back_pages") * 4096,
            faults: counter("pgmajfault"),
            stalled: Duration::from_micros(counter("stall_usec")),
        })
    }

    /// Program data that is not resident.
    pub fn swapped(&self) -> u64 {
        self.zswapped + self.disk
    }

    /// How many bytes of program data a byte of the pool holds.
    pub fn ratio(&self) -> String {
        if self.pool == 0 { "-".into() } else { format!("{:.2}", self.zswapped as f64 / self.pool as f64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_stat_lines_may_hold_anything() {
        assert_eq!(parent("12 (a) b) c) S 7 1 1"), Some(7));
        assert_eq!(parent("12 (x"), None);
    }

    #[test]
    fn our_own_memory_is_seen() {
        let me = std::process::id();
        assert!(resident(me, true) > 0);
        assert!(resident(me, true) >= resident(me, false));
    }

    #[test]
    fn stats_are_read_and_half_a_file_is_not() {
        let stats =
            Stats::parse(r#"{"anon": 5, "zswap": 10, "zswapped": 25, "swapped_pages": 7, "written_back_pages": 2}"#);
        let stats = stats.expect("whole");
        assert_eq!((stats.resident, stats.swapped(), stats.written_back), (5, 25 + 7 * 4096, 8192));
        assert_eq!(stats.ratio(), "2.50");
        assert_eq!(Stats::parse(r#"{"anon": 5, "#), None);
    }
}

//! The figures of a job: as JSON for programs, as one line for people.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;
use uzswap_engine::{Counters, PAGE_SIZE, Zswap};

use crate::charge::Charge;
use crate::groups::Groups;
use crate::shrink::PoolPeak;

/// Writes a file anew, so that a reader finds the old text or the new one whole. Follows no link that another user has planted: the
/// text is written to a fresh file beside `path`, which then takes its name.
pub fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{:016x}.new", uzswap_vm::sys::job::random()?));
    let written = OpenOptions::new().write(true).create_new(true).open(&temporary).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        fs::rename(&temporary, path)
    });
    // What could not be created is not this call's to remove.
    written.inspect_err(|error| {
        if error.kind() != io::ErrorKind::AlreadyExists {
            let _ = fs::remove_file(&temporary);
        }
    })
}

/// The summary tells of unmanaged memory above this.
const WORTH_TELLING: u64 = 1 << 20;

/// Everything that is counted. Kernel names; plain names are in pages or events, `memory.*`, `anon*`, `unmanaged*`, `zswap*`,
/// `pool_total_size` and `swap_current` in bytes.
#[derive(Debug, Serialize)]
pub struct Stats {
    #[serde(rename = "memory.current")]
    memory_current: u64,
    #[serde(rename = "memory.peak")]
    memory_peak: u64,
    #[serde(rename = "memory.max")]
    memory_max: u64,
    anon: u64,
    anon_peak: u64,
    unmanaged_current: u64,
    unmanaged_peak: u64,
    oom_kill: u64,
    pgmajfault: u64,
    readahead: u64,
    rescued: u64,
    thp_collapse_alloc: u64,
    zero_filled: u64,
    pgscan: u64,
    pgsteal: u64,
    busy: u64,
    rested: u64,
    stall_usec: u64,
    #[serde(flatten)]
    engine: Counters,
}

impl Stats {
    /// The figures of a group now.
    pub fn now(groups: &Groups, engine: &Zswap, charge: &Charge) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let counted = |counter| groups.counted(charge.id, counter);
        let mut all = engine.counters();
        // A group that was removed meanwhile has none.
        all.root = engine.group_counters(charge.group).unwrap_or_default();
        Stats {
            memory_current: read(&charge.current),
            memory_peak: read(&charge.peak),
            memory_max: charge.max(),
            anon: read(&charge.anon),
            anon_peak: read(&charge.anon_peak),
            unmanaged_current: read(&charge.unmanaged),
            unmanaged_peak: read(&charge.unmanaged_peak),
            oom_kill: read(&charge.events.oom_kill),
            pgmajfault: counted(|counters| &counters.pgmajfault),
            readahead: counted(|counters| &counters.readahead),
            rescued: counted(|counters| &counters.rescued),
            thp_collapse_alloc: counted(|counters| &counters.thp_collapse_alloc),
            zero_filled: counted(|counters| &counters.zero_filled),
            pgscan: counted(|counters| &counters.pgscan),
            pgsteal: counted(|counters| &counters.pgsteal),
            busy: counted(|counters| &counters.busy),
            rested: counted(|counters| &counters.rested),
            stall_usec: counted(|counters| &counters.stall_usec),
            engine: all,
        }
    }

    /// The JSON text.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain numbers become JSON");
        text.push('\n');
        text
    }

    /// One line for the terminal; with the pool's peak if that was this group's alone.
    pub fn summary(&self, pool: Option<&PoolPeak>) -> String {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let pool = pool.map_or_else(String::new, |pool| {
            let ratio = if pool.bytes > 0 { format!(" (ratio {:.1})", pool.ratio) } else { String::new() };
            format!("pool {}{ratio}, ", mib(pool.bytes))
        });
        let written = self.engine.root.pswpout * PAGE_SIZE as u64;
        let unmanaged = match self.unmanaged_peak {
            peak if peak > WORTH_TELLING => format!(", {} unmanaged", mib(peak)),
            _ => String::new(),
        };
        format!(
            "uzswap: peak resident {}, {pool}written back {}, {} faults, stalled {:.1} s{unmanaged}",
            mib(self.anon_peak),
            mib(written),
            self.pgmajfault,
            self.stall_usec as f64 / 1e6,
        )
    }
}

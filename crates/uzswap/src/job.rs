//! From settings to the job that the manager runs: defaults, percentages, and every check that can be made early.
//!
//! Errors name the setting as the user wrote it and say what would be right. Nothing is created here: a check that only
//! creating a file could answer is left to the manager.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use uzswap_manager::{JobConfig, MEMORY_MAX_LEAST, SwapConfig, SwapFaults};

use crate::flags::variable;
use crate::ram::Ram;
use crate::settings::Settings;
use crate::size::Human;

/// More than a process has addresses: nobody can mean that. Above RAM is allowed, and means "no limit of ours".
pub const MEMORY_MAX_MOST: u64 = 1 << 47;
/// The pool and the swap file hold at least one page.
const PAGE: u64 = 4096;
/// Cap on the pool, percent of RAM, as the kernel has it.
const MAX_POOL_PERCENT: u8 = 20;
/// Percent of the cap at which a full pool accepts again, as the kernel has it.
const ACCEPT_THRESHOLD_PERCENT: u8 = 90;
/// Bytes of a socket's absolute path: what the system takes (107), less what its name is longer by before it listens.
const SOCKET_NAME_MOST: usize = 107 - ".4194304".len();
/// Without a limit of our own, at least this much of the cgroup's limit is left to page cache, kernel and manager.
const HEADROOM_LEAST: u64 = 32 << 20;

/// Checks the `settings` of a job and fills in the defaults.
pub fn job_config(settings: &Settings, ram: &Ram) -> Result<JobConfig, String> {
    let limits = match limits(settings, ram)? {
        (None, None) => (Some(enclosing_limit(ram)?), None),
        given => given,
    };
    let stats = stats(settings)?;
    let control = settings.path("control").map(|path| check_socket(&path)).transpose();
    let control = control.map_err(|why| format!("{}: {why}", settings.spelling("control")))?;
    let config = manager_config(settings, ram, limits)?;
    let (control_fs, require) = (settings.switch("control-fs"), settings.switch("require"));
    Ok(JobConfig { control, control_fs, stats, quiet: settings.switch("quiet"), require, ..config })
}

/// Checks the `settings` of a daemon and fills in the defaults. Without a limit there is none.
pub fn daemon_config(settings: &Settings, ram: &Ram) -> Result<JobConfig, String> {
    manager_config(settings, ram, limits(settings, ram)?)
}

/// Where the daemon is to listen.
pub fn daemon_socket(settings: &Settings) -> Result<PathBuf, String> {
    let path = settings.path("socket").or_else(default_socket).ok_or("no place for the socket: give --socket FILE")?;
    check_socket(&path).map_err(|why| format!("{}: {why}", settings.spelling("socket")))
}

/// Where daemons listen that have not been told where.
pub fn default_socket() -> Option<PathBuf> {
    const NAME: &str = "uzswap.sock";
    if rustix::process::geteuid().is_root() {
        return Some(Path::new("/run").join(NAME));
    }
    let directory = std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty())?;
    Some(PathBuf::from(directory).join(NAME))
}

/// The accesses to the swap file that are to fail, for tests.
fn swap_faults() -> Result<Option<SwapFaults>, String> {
    let text = std::env::var_os(SwapFaults::VARIABLE);
    text.map(|text| SwapFaults::parse(&text.to_string_lossy())).transpose()
}

/// Where the counters go.
pub fn stats(settings: &Settings) -> Result<Option<PathBuf>, String> {
    let stats = settings.path("stats");
    if let Some(path) = &stats {
        check_stats(path).map_err(|why| format!("{}: {why}", settings.spelling("stats")))?;
    }
    Ok(stats)
}

fn manager_config(settings: &Settings, ram: &Ram, limits: (Option<u64>, Option<u64>)) -> Result<JobConfig, String> {
    let (memory_max, memory_high) = limits;
    let max_pool = match (settings.size("max-pool"), settings.percent("max-pool-percent")) {
        (Some(_), _) => bounded(settings, "max-pool", PAGE, ram.bytes(), ram)?.expect("is set"),
        (None, percent) => percent_of(percent.unwrap_or(MAX_POOL_PERCENT), ram.bytes()),
    };
    let enabled = settings.yes_no("enabled").unwrap_or(true);
    let swap = swap(settings, ram)?;
    if !enabled && swap == SwapConfig::None {
        let (enabled, no_swap) = (settings.spelling("enabled"), settings.spelling("no-swap"));
        return Err(format!("{enabled} N with {no_swap} leaves pages nowhere to go; leave one of them out"));
    }
    Ok(JobConfig {
        memory_max,
        memory_high,
        max_pool,
        accept_threshold_percent: settings.percent("accept-threshold-percent").unwrap_or(ACCEPT_THRESHOLD_PERCENT),
        compressor: settings.codec("compressor").unwrap_or_default(),
        zpool: settings.zpool("zpool").unwrap_or_default(),
        enabled,
        shrinker_enabled: settings.yes_no("shrinker-enabled").unwrap_or(true),
        verify: settings.switch("verify"),
        swapin: settings.swapin("swapin").unwrap_or_default(),
        swap,
        swap_faults: swap_faults()?,
        ram: ram.bytes(),
        control: None,
        control_fs: false,
        not_inherited: vec![variable("control")],
        stats: None,
        quiet: true,
        require: false,
    })
}

fn percent_of(percent: u8, bytes: u64) -> u64 {
    (u128::from(bytes) * u128::from(percent) / 100) as u64
}

/// The limits that were given.
pub fn limits(settings: &Settings, ram: &Ram) -> Result<(Option<u64>, Option<u64>), String> {
    let max = bounded(settings, "memory-max", MEMORY_MAX_LEAST, MEMORY_MAX_MOST, ram)?;
    let high = bounded(settings, "memory-high", MEMORY_MAX_LEAST, MEMORY_MAX_MOST, ram)?;
    match (max, high) {
        (Some(max), Some(high)) if high > max => Err(format!(
            "{} ({}) is above {} ({}); lower it, or raise the limit",
            settings.spelling("memory-high"),
            Human(high),
            settings.spelling("memory-max"),
            Human(max)
        )),
        given => Ok(given),
    }
}

/// The limit for a job that was given none: the enclosing cgroup's, less headroom.
fn enclosing_limit(ram: &Ram) -> Result<u64, String> {
    let Some(limit) = &ram.limit else {
        return Err(
            "no memory limit: no cgroup limits this process; give --memory-max, for example --memory-max 256M".into()
        );
    };
    let headroom = (limit.bytes / 8).max(HEADROOM_LEAST);
    let max = limit.bytes.saturating_sub(headroom);
    if max < MEMORY_MAX_LEAST {
        return Err(format!(
            "no memory limit: the cgroup's limit of {} ({}) leaves too little beside {} of headroom; give --memory-max",
            Human(limit.bytes),
            limit.file.display(),
            Human(headroom)
        ));
    }
    Ok(max)
}

/// A size setting in bytes, refused below `least` and above `most`.
fn bounded(settings: &Settings, name: &str, least: u64, most: u64, ram: &Ram) -> Result<Option<u64>, String> {
    let Some(amount) = settings.size(name) else { return Ok(None) };
    let bytes = amount.bytes(ram.bytes());
    let spelling = settings.spelling(name);
    if bytes < least {
        return Err(format!("{spelling}: {} is too little to work with; give at least {}", Human(bytes), Human(least)));
    }
    if bytes > most {
        return Err(format!("{spelling}: {} is more than makes sense; give at most {}", Human(bytes), Human(most)));
    }
    Ok(Some(bytes))
}

fn swap(settings: &Settings, ram: &Ram) -> Result<SwapConfig, String> {
    if settings.switch("no-swap") {
        return Ok(SwapConfig::None);
    }
    let size = settings.size("swap-size").map(|amount| amount.bytes(ram.bytes()));
    if let Some(size) = size.filter(|&size| size < PAGE) {
        let spelling = settings.spelling("swap-size");
        return Err(format!(
            "{spelling}: {} is less than one page; give at least {}, or --no-swap",
            Human(size),
            Human(PAGE)
        ));
    }
    let path = settings.path("swap-file");
    if let Some(path) = &path {
        check_swap_file(path).map_err(|why| format!("{}: {why}", settings.spelling("swap-file")))?;
    }
    Ok(SwapConfig::File { path, size })
}

fn check_swap_file(path: &Path) -> Result<(), String> {
    let shown = path.display();
    if path.is_dir() {
        return Err(format!("{shown} is a directory; name a file in it that does not exist yet"));
    }
    if path.symlink_metadata().is_ok() {
        return Err(format!("{shown} exists already and would be overwritten; name a file that does not exist yet"));
    }
    check_directory(path)
}

fn check_stats(path: &Path) -> Result<(), String> {
    let shown = path.display();
    if path.is_dir() {
        return Err(format!("{shown} is a directory; name a file"));
    }
    if path.exists() {
        return access(path, Access::WRITE_OK).map_err(|error| format!("cannot write {shown}: {}", words(error)));
    }
    check_directory(path)
}

/// Where the control socket goes: an absolute path, because the job's programs work in other directories.
fn check_socket(path: &Path) -> Result<PathBuf, String> {
    check_directory(path)?;
    if path.symlink_metadata().is_ok_and(|found| !found.file_type().is_socket()) {
        let shown = path.display();
        return Err(format!("{shown} exists already and is no socket; name a file that does not exist yet"));
    }
    let path = std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let len = path.as_os_str().len();
    if len > SOCKET_NAME_MOST {
        return Err(format!("{} has {len} bytes; a socket's name has {SOCKET_NAME_MOST} at most", path.display()));
    }
    Ok(path)
}

/// Whether a file can be created at `path`.
fn check_directory(path: &Path) -> Result<(), String> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let shown = directory.display();
    if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(format!("{} does not name a file", path.display()));
    }
    if !directory.exists() {
        return Err(format!("the directory {shown} does not exist; create it or name another"));
    }
    if !directory.is_dir() {
        return Err(format!("{shown} is not a directory; name another"));
    }
    access(&directory, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|error| format!("cannot create a file in {shown}: {}", words(error)))
}

/// What the system said, without its number.
fn words(error: rustix::io::Errno) -> String {
    let text = std::io::Error::from(error).to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::{self, Of};
    use crate::ram::Limit;
    use uzswap_engine::{Compressor, Zpool};

    fn config(arguments: &[&str], ram: &Ram) -> Result<JobConfig, String> {
        let line = [&["uzswap", "run"], arguments, &["--", "true"]].concat();
        let matches = flags::command().try_get_matches_from(line).expect("clap takes it");
        let run = matches.subcommand_matches("run").expect("run");
        job_config(&Settings::read(Of::Run, run, |_| None, Path::new("/nonexistent"))?, ram)
    }

    fn limited(bytes: u64) -> Ram {
        Ram { machine: 8 << 30, limit: Some(Limit { bytes, file: "/cg/memory.max".into() }) }
    }

    #[test]
    fn the_defaults_are_the_kernels() {
        let job = config(&["--memory-max", "256M"], &Ram { machine: 10 << 30, limit: None }).expect("config");
        assert_eq!((job.memory_max, job.memory_high, job.max_pool), (Some(256 << 20), None, 2 << 30));
        assert_eq!((job.accept_threshold_percent, job.compressor), (90, Compressor::Lz4));
        assert_eq!(job.swap, SwapConfig::File { path: None, size: None });
        assert_eq!((job.enabled, job.shrinker_enabled, job.zpool), (true, true, Zpool::Zsmalloc));
    }

    #[test]
    fn pages_must_have_somewhere_to_go() {
        let ram = limited(1 << 30);
        assert!(config(&["--enabled", "N"], &ram).is_ok_and(|job| !job.enabled));
        let nowhere = config(&["--enabled", "N", "--no-swap"], &ram).unwrap_err();
        assert!(nowhere.contains("--enabled N with --no-swap"), "{nowhere}");
    }

    #[test]
    fn the_control_socket_has_an_absolute_name() {
        let control = |path: &str| config(&["--memory-max", "64M", "--control", path], &limited(1 << 30));
        let job = control("socket").expect("config");
        assert_eq!(job.control, Some(std::env::current_dir().expect("a directory").join("socket")));
        assert_eq!((job.ram, job.not_inherited), (1 << 30, vec!["UZSWAP_CONTROL".to_owned()]));
        let refused = |path: &str| control(path).expect_err(path);
        assert!(refused("/etc/passwd").contains("no socket"));
        assert!(refused("/no/such/directory/socket").contains("does not exist"));
        assert!(refused(&format!("/tmp/{}", "n".repeat(100))).contains("99 at most"));
    }

    #[test]
    fn percents_mean_the_smaller_ram() {
        let job = config(&["--memory-max", "50%", "--max-pool-percent", "25"], &limited(1 << 30)).expect("config");
        assert_eq!((job.memory_max, job.max_pool), (Some(512 << 20), 256 << 20));
    }

    #[test]
    fn without_a_limit_the_cgroups_less_headroom() {
        let max = |bytes| config(&[], &limited(bytes)).map(|job| job.memory_max);
        assert_eq!(max(1 << 30), Ok(Some(896 << 20)));
        assert_eq!(max(64 << 20), Ok(Some(32 << 20)));
        assert!(max(35 << 20).is_err_and(|error| error.contains("give --memory-max")));
        assert!(config(&[], &Ram { machine: 1 << 30, limit: None }).is_err_and(|error| error.contains("--memory-max")));
        assert_eq!(config(&["--memory-high", "1G"], &limited(2 << 30)).map(|job| job.memory_max), Ok(None));
    }
}

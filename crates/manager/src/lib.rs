//! Groups, limits, policies, sessions: what stands between the command line and the engine.
//!
//! [`run_job`] is what `uzswap run` calls: it runs one program under an embedded manager.

use std::ffi::OsString;
use std::path::PathBuf;

use uzswap_engine::Compressor;

/// Where pages go that leave the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwapConfig {
    /// No swap file: nothing is ever written back.
    None,
    /// A swap file that grows as needed.
    File {
        /// A path to create (mode 0600, removed at the end), or `None` for an unlinked file under `/var/tmp`.
        path: Option<PathBuf>,
        /// The most it may grow to, in bytes; `None` for as much as the file system gives.
        size: Option<u64>,
    },
}

/// Everything `uzswap run` can be told, already parsed and checked. Sizes are in bytes.
#[derive(Debug, Clone)]
pub struct JobConfig {
    /// `memory.max`: resident anonymous memory plus compressed pool of the job.
    pub memory_max: Option<u64>,
    /// `memory.high`: reclaim starts here.
    pub memory_high: Option<u64>,
    /// Cap on the compressed pool.
    pub max_pool: u64,
    /// Percent of the cap at which the pool accepts again.
    pub accept_threshold_percent: u8,
    /// Codec for new stores.
    pub compressor: Compressor,
    /// The swap file.
    pub swap: SwapConfig,
    /// Where to write the counters as JSON, at the end and every second.
    pub stats: Option<PathBuf>,
    /// No summary on stderr.
    pub quiet: bool,
    /// Refuse programs that cannot be managed instead of running them unmanaged.
    pub require: bool,
}

/// Why a job did not start; [`RunError::exit_status`] is what `uzswap` exits with.
#[derive(Debug)]
pub struct RunError {
    /// One line: what failed, on what, and what to do.
    pub message: String,
    /// 2 for usage and set-up, 126 for not executable, 127 for not found.
    pub exit_status: i32,
}

/// Runs `command` under the limits of `config` and returns the exit status that `uzswap run` is to end with
/// (the program's own, or 128+N if signal N killed it).
pub fn run_job(_config: &JobConfig, _command: &[OsString]) -> Result<i32, RunError> {
    Err(RunError { message: "not built yet".into(), exit_status: 2 })
}

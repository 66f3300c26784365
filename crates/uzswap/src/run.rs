//! `uzswap run`: settings, then the machine's fitness, then the job.

use std::env;
use std::ffi::OsString;
use std::path::Path;

use clap::ArgMatches;
use uzswap_manager::run_job;
use uzswap_vm::doctor::{Check, blocking_problems, surroundings};

use crate::Failure;
use crate::job::job_config;
use crate::ram::Ram;
use crate::settings::Settings;

/// The library that is preloaded into the programs of a job; built by this crate's build script.
static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libuzswap_agent.so"));

/// Runs the program that the command line names and returns its exit status.
pub fn run(matches: &ArgMatches) -> Result<i32, Failure> {
    let root = Path::new("/");
    let settings = Settings::read(matches, |name| env::var_os(name), root)?;
    let config = job_config(&settings, &Ram::detect(root)?)?;
    if let Some(problem) = blocking_problems().first() {
        return Err(cannot_run(problem).into());
    }
    let command: Vec<OsString> = matches.get_many("command").expect("is required").cloned().collect();
    run_job(&config, AGENT, &command).map_err(|error| Failure { message: error.message, status: error.exit_status })
}

/// The doctor's words for its first finding, in one line.
pub fn cannot_run(problem: &Check) -> String {
    let places = surroundings();
    let remedy = problem.remedies.iter().find(|remedy| places.contains(&remedy.place));
    let remedy = remedy.map(|remedy| remedy.text.lines().map(str::trim).collect::<Vec<_>>().join(" / "));
    let remedy = remedy.map_or_else(String::new, |text| format!("; to grant it: {text}"));
    format!("cannot run here: {}: {}{remedy}; see uzswap doctor", problem.name, problem.finding)
}

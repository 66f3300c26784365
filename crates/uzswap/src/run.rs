//! `uzswap run`: settings, then the machine's fitness, then the job.

use std::env;
use std::ffi::OsString;
use std::path::Path;

use clap::ArgMatches;
use uzswap_manager::run_job;
use uzswap_vm::doctor::{Check, blocking_problems, surroundings};

use crate::connect::connect;
use crate::environment::misspelt;
use crate::flags::Of;
use crate::job::job_config;
use crate::ram::Ram;
use crate::settings::Settings;
use crate::{Failure, one_line, say};

/// The library that is preloaded into the programs of a job; built by this crate's build script.
pub static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libuzswap_agent.so"));

/// Runs the program that the command line names and returns its exit status.
pub fn run(matches: &ArgMatches) -> Result<i32, Failure> {
    let root = Path::new("/");
    let settings = Settings::read(Of::Run, matches, |name| env::var_os(name), root)?;
    misspelt(env::vars_os().map(|(name, _)| name))
        .iter()
        .for_each(|warning| say(&format!("warning: {}", one_line(warning))));
    let command: Vec<OsString> = matches.get_many("command").expect("is required").cloned().collect();
    if settings.switch("connect") {
        return connect(&settings, &Ram::detect(root)?, &command);
    }
    if settings.group("cgroup").is_some() {
        return Err(format!("{} is a group of a daemon's; give --connect, too", settings.spelling("cgroup")).into());
    }
    let config = job_config(&settings, &Ram::detect(root)?)?;
    if let Some(problem) = blocking_problems().first() {
        return Err(cannot_run(problem).into());
    }
    Ok(run_job(&config, AGENT, &command)?)
}

/// The doctor's words for its first finding, in one line.
pub fn cannot_run(problem: &Check) -> String {
    let places = surroundings();
    let remedy = problem.remedies.iter().find(|remedy| places.contains(&remedy.place));
    let remedy = remedy.map(|remedy| remedy.text.lines().map(str::trim).collect::<Vec<_>>().join(" / "));
    let remedy = remedy.map_or_else(String::new, |text| format!("; to grant it: {text}"));
    format!("cannot run here: {}: {}{remedy}; see uzswap doctor", problem.name, problem.finding)
}

//! `uzswap lab`: what is asked of an experiment.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::ArgMatches;
use uzswap_lab::options::Options;
use uzswap_lab::torture::{self, TortureOptions};
use uzswap_lab::{bench, capacity};

use crate::ram::Ram;
use crate::size::parse_amount;
use crate::{Failure, say};
use uzswap_manager::MEMORY_MAX_LEAST;

/// Runs an experiment; the status is 0 if it could be done, else 1.
pub fn lab(matches: &ArgMatches) -> Result<i32, Failure> {
    let (name, matches) = matches.subcommand().expect("a subcommand is required");
    if name == "torture" {
        let done = torture::run(&torture_options(matches)?);
        return done.map(|()| 0).map_err(|error| {
            // A report has lines of its own.
            say(&format!("{error:#}"));
            Failure::new("lab torture failed; the report is above".to_owned(), 1)
        });
    }
    let options = options(matches)?;
    let done = if name == "bench" { bench::run(&options) } else { capacity::run(&options) };
    done.map(|()| 0).map_err(|error| Failure::new(format!("lab {name}: {error:#}"), 1))
}

fn torture_options(matches: &ArgMatches) -> Result<TortureOptions, String> {
    let given = |name| matches.get_one::<String>(name);
    let minutes = given("minutes").expect("has a default");
    let time = minutes.parse().ok().filter(|minutes: &f64| (0.0..=100_000.0).contains(minutes));
    let limit = given("limit").map(|size| parse_amount(size).map_err(|why| format!("--limit: {why}"))).transpose()?;
    let ram = Ram::detect(Path::new("/"))?.bytes();
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs());
    Ok(TortureOptions {
        time: Duration::from_secs_f64(60.0 * time.ok_or(format!("--minutes: '{minutes}' is not a number of minutes"))?),
        seed: matches.get_one("seed").copied().unwrap_or_else(clock),
        programs: *matches.get_one("programs").expect("has a default"),
        limit: limit.map(|amount| amount.bytes(ram)).map(|bytes| bytes.max(MEMORY_MAX_LEAST)),
        without: given("without").expect("has a default").clone(),
    })
}

fn options(matches: &ArgMatches) -> Result<Options, String> {
    let ram = Ram::detect(Path::new("/"))?.bytes();
    let size = parse_amount(matches.get_one::<String>("size").expect("has a default"));
    let project = only_of_bench::<PathBuf>(matches, "project");
    if project.as_deref().is_some_and(|directory| !has_makefile(directory)) {
        return Err("--project: needs a directory with a Makefile; configure the project first".to_owned());
    }
    Ok(Options {
        size: size.map_err(|why| format!("--size: {why}"))?.bytes(ram),
        runs: *matches.get_one::<u64>("runs").expect("has a default") as usize,
        json: matches.get_one("json").cloned(),
        svg: only_of_bench(matches, "svg"),
        only: only_of_bench(matches, "only"),
        project,
    })
}

fn only_of_bench<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> Option<T> {
    matches.try_get_one(name).ok().flatten().cloned()
}

fn has_makefile(directory: &Path) -> bool {
    ["GNUmakefile", "makefile", "Makefile"].iter().any(|name| directory.join(name).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options, String> {
        let matches = crate::flags::command().try_get_matches_from([&["uzswap", "lab"], words].concat());
        let matches = matches.map_err(|error| error.to_string())?;
        let (_, lab) = matches.subcommand().expect("lab");
        options(lab.subcommand().expect("an experiment").1)
    }

    #[test]
    fn options_have_defaults_and_limits() {
        let defaults = Options { size: 1 << 30, runs: 7, json: None, svg: None, only: None, project: None };
        assert_eq!(parse(&["bench"]), Ok(defaults.clone()));
        assert_eq!(parse(&["capacity"]), Ok(Options { size: 256 << 20, runs: 3, ..defaults.clone() }));
        let given = parse(&["bench", "--size", "1.5G", "--runs=3", "--only", "Zipf", "--svg", "p.svg"]);
        let (only, svg) = (Some("Zipf".to_owned()), Some("p.svg".into()));
        assert_eq!(given, Ok(Options { size: 3 << 29, runs: 3, only, svg, ..defaults }));
        for (bad, why) in [
            (&[][..], "Usage"),
            (&["sort"], "sort"),
            (&["bench", "--size"], "--size"),
            (&["bench", "--size", "0"], "zero"),
            (&["bench", "--size", "-1"], "negative"),
            (&["bench", "--size", "9999999999G"], "absurdly large"),
            (&["bench", "--size", "é"], "not a size"),
            (&["bench", "--runs", "0"], "--runs"),
            (&["bench", "--fast"], "--fast"),
            (&["bench", "--project", "/nowhere"], "Makefile"),
            (&["capacity", "--svg", "p.svg"], "--svg"),
        ] {
            assert!(parse(bad).is_err_and(|error| error.contains(why)), "{bad:?}");
        }
    }
}

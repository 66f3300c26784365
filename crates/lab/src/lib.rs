//! Experiments and rivals: the same work on uzswap and on what the kernel has, side by side in one run.
//!
//! - [`mod@bench`]: what uzswap is to be fast at, with what is asked of it
//! - [`capacity`]: how much a byte of memory holds, in both
//! - [`options`]: what the command line of every experiment says
//! - `program`: builds and runs one measured program and gives up when the user interrupts
//! - `kernel_zswap`, `cgroup`: set the rivals up, and leave everything as it was found
//! - `processes`: what the system tells of processes and memory

pub mod bench;
pub mod capacity;
pub mod options;

mod cgroup;
mod kernel_zswap;
mod processes;
mod program;

use options::Options;

const USAGE: &str = "usage: uzswap lab bench|capacity [--size SIZE] [--runs N] [--json FILE] [--svg FILE] [--only TEXT] \
                     [--project DIR]; --svg, --only and --project are for bench";

/// `uzswap lab ARGS...`; returns the exit status.
pub fn main(args: &[String]) -> i32 {
    let Some((name, rest)) = args.split_first() else {
        eprintln!("{USAGE}");
        return 2;
    };
    let (experiment, size, runs): (fn(&Options) -> anyhow::Result<()>, _, _) = match name.as_str() {
        "help" | "-h" | "--help" => {
            println!("{USAGE}");
            return 0;
        }
        "bench" => (bench::run, 1 << 30, 7),
        "capacity" => (capacity::run, 256 << 20, 3),
        _ => {
            eprintln!("uzswap lab: no experiment {name:?}; {USAGE}");
            return 2;
        }
    };
    let options = match Options::parse(rest, size, runs) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("uzswap lab {name}: {error:#}");
            return 2;
        }
    };
    if name != "bench" && (options.svg.is_some() || options.only.is_some() || options.project.is_some()) {
        eprintln!("uzswap lab {name}: --svg, --only and --project are for bench; {USAGE}");
        return 2;
    }
    match experiment(&options) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("uzswap lab {name}: {error:#}");
            1
        }
    }
}

//! Experiments and rivals: the same work on uzswap and on what the kernel has, side by side in one run.
//!
//! - [`pageout`]: memory paged out and read back, in uzswap and in the kernel's own zswap
//! - `program`: runs one measured program and gives up when the user interrupts
//! - `kernel_zswap`: sets the kernel's zswap up, and leaves everything as it was found

pub mod pageout;

mod kernel_zswap;
mod program;

const USAGE: &str = "usage: uzswap lab pageout [--size SIZE] [--runs N] [--json FILE]";

/// `uzswap lab ARGS...`; returns the exit status.
pub fn main(args: &[String]) -> i32 {
    let Some((name, rest)) = args.split_first() else {
        eprintln!("{USAGE}");
        return 2;
    };
    if matches!(name.as_str(), "help" | "-h" | "--help") {
        println!("{USAGE}");
        return 0;
    }
    let options = match (name.as_str(), pageout::Options::parse(rest)) {
        ("pageout", Ok(options)) => options,
        ("pageout", Err(error)) => {
            eprintln!("uzswap lab pageout: {error:#}");
            return 2;
        }
        _ => {
            eprintln!("uzswap lab: no experiment {name:?}; {USAGE}");
            return 2;
        }
    };
    match pageout::run(&options) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("uzswap lab {name}: {error:#}");
            1
        }
    }
}

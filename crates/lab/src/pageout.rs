//! `uzswap lab pageout`: pages half increasing bytes, half zeros, paged out with `MADV_PAGEOUT` and read back in order,
//! under uzswap and on the kernel's own zswap in turn (A B A B), after one pair that warms the memory.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::kernel_zswap::{KernelZswap, stored_since_boot};
use crate::options::Options;
use crate::program::{Interrupt, Scratch, build, run as run_program};

/// The program is the one of the end-to-end tests.
const SOURCE: &str = include_str!("../../../tests/programs/pageout.c");

/// One run of the program, in microseconds.
#[derive(Debug, Clone, Copy)]
struct Sample {
    page_out: u64,
    read_back: u64,
}

impl Sample {
    fn parse(words: &str) -> Result<Self> {
        let figure = |name: &str| {
            words
                .lines()
                .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
                .with_context(|| format!("the program did not print {name}: {}", words.trim()))
        };
        Ok(Self { page_out: figure("pageout_us ")?, read_back: figure("read_us ")? })
    }
}

/// Runs the experiment and prints its table.
pub fn run(options: &Options) -> Result<()> {
    let interrupt = Interrupt::catch()?;
    let scratch = Scratch::new()?;
    let program = build("pageout", SOURCE, &scratch, &interrupt)?;
    let kernel = match KernelZswap::set_up("lzo-rle", 2 * options.size, &scratch, &interrupt) {
        Ok(kernel) => Some(kernel),
        Err(reason) => {
            interrupt.check()?;
            eprintln!("the kernel's zswap is left out: {reason:#}");
            None
        }
    };

    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for turn in 0..=options.runs {
        let sample = run_ours(&program, options.size, &scratch, &interrupt)?;
        let rival = match &kernel {
            Some(_) => Some(run_kernel(&program, options.size, &scratch, &interrupt)?),
            None => None,
        };
        if turn > 0 {
            ours.push(sample);
            theirs.extend(rival);
        }
    }
    drop(kernel);
    print_table(options, &ours, &theirs);
    let samples = |list: &[Sample]| -> Vec<_> {
        list.iter().map(|s| json!({ "pageout_us": s.page_out, "read_us": s.read_back })).collect()
    };
    options.write_json(&json!({ "experiment": "pageout", "size": options.size, "runs": options.runs,
                                "uzswap": samples(&ours), "kernel_zswap": samples(&theirs) }))?;
    Ok(())
}

fn run_ours(program: &Path, size: u64, scratch: &Scratch, interrupt: &Interrupt) -> Result<Sample> {
    let limit = (4 * size).to_string();
    let mut command = Command::new(std::env::current_exe().context("cannot find uzswap itself")?);
    command.args(["run", "--quiet", "--memory-max", &limit, "--"]).arg(program).arg(size.to_string());
    let before = stored_since_boot();
    let words = run_program(&mut command, scratch, interrupt)?;
    let stored = (stored_since_boot() - before) * 4096;
    if stored > size / 10 {
        bail!("the kernel's zswap took {stored} bytes while uzswap was measured: this would be no comparison");
    }
    Sample::parse(&words)
}

fn run_kernel(program: &Path, size: u64, scratch: &Scratch, interrupt: &Interrupt) -> Result<Sample> {
    let before = stored_since_boot();
    let words = run_program(Command::new(program).arg(size.to_string()), scratch, interrupt)?;
    let stored = (stored_since_boot() - before) * 4096;
    if stored < size / 2 {
        bail!("the kernel's zswap took only {stored} of {size} bytes: this would be no comparison");
    }
    Sample::parse(&words)
}

fn median(samples: &[Sample], figure: fn(&Sample) -> u64) -> f64 {
    let mut values: Vec<u64> = samples.iter().map(figure).collect();
    values.sort_unstable();
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] as f64 } else { (values[middle - 1] + values[middle]) as f64 / 2.0 }
}

fn print_table(options: &Options, ours: &[Sample], theirs: &[Sample]) {
    let row = |name: &str, samples: &[Sample]| {
        let seconds = |figure| median(samples, figure) / 1e6;
        println!("{name:<16}{:>10.3} s{:>10.3} s", seconds(|s| s.page_out), seconds(|s| s.read_back));
    };
    let mebibytes = options.size >> 20;
    println!("{mebibytes} MiB, half compressible: medians of {} runs", options.runs);
    println!("{:<16}{:>12}{:>12}", "", "page out", "read back");
    row("uzswap", ours);
    if theirs.is_empty() {
        return;
    }
    row("kernel zswap", theirs);
    let ratio = |figure| median(ours, figure) / median(theirs, figure);
    println!("{:<16}{:>12.2}{:>12.2}", "ratio", ratio(|s| s.page_out), ratio(|s| s.read_back));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_found_between_other_words() {
        let sample = Sample::parse("uzswap: a word\npageout_us 12\nresident_after_bytes 0\nread_us 34\n").unwrap();
        assert_eq!((sample.page_out, sample.read_back), (12, 34));
        assert!(Sample::parse("pageout_us 12\n").is_err());
    }

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        let samples = [4, 1, 3, 2].map(|n| Sample { page_out: n, read_back: 10 * n });
        assert_eq!(median(&samples, |s| s.page_out), 2.5);
        assert_eq!(median(&samples[..3], |s| s.read_back), 30.0);
    }
}

//! `uzswap lab pageout`: pages half increasing bytes, half zeros, paged out with `MADV_PAGEOUT` and read back in order,
//! under uzswap and on the kernel's own zswap in turn (A B A B), after one pair that warms the memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::kernel_zswap::{KernelZswap, stored_since_boot};
use crate::program::{Interrupt, Scratch, run as run_program};

/// The program is the one of the end-to-end tests.
const SOURCE: &str = include_str!("../../../tests/programs/pageout.c");

/// What the command line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Bytes paged out.
    pub size: u64,
    /// Measured runs of each side.
    pub runs: usize,
    /// Where the raw samples go.
    pub json: Option<PathBuf>,
}

impl Options {
    /// Parses what follows `uzswap lab pageout`.
    pub fn parse(args: &[String]) -> Result<Self> {
        let mut options = Self { size: 1 << 30, runs: 5, json: None };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let mut value = || args.next().with_context(|| format!("{name} needs a value"));
            match name.as_str() {
                "--size" => options.size = parse_size(value()?)?,
                "--runs" => options.runs = value()?.parse().context("--runs needs a number")?,
                "--json" => options.json = Some(value()?.into()),
                _ => bail!("unknown option {name}"),
            }
        }
        if options.runs == 0 {
            bail!("--runs must be at least 1");
        }
        Ok(options)
    }
}

/// A size in bytes, or with one of the binary suffixes K, M, G.
fn parse_size(text: &str) -> Result<u64> {
    let shift = match text.bytes().last() {
        Some(b'K' | b'k') => 10,
        Some(b'M' | b'm') => 20,
        Some(b'G' | b'g') => 30,
        _ => 0,
    };
    let digits = if shift > 0 { &text[..text.len() - 1] } else { text };
    let number: u64 = digits.parse().with_context(|| format!("{text:?} is not a size (examples: 512M, 1G)"))?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if (1 << 20..=1 << 40).contains(&bytes) => Ok(bytes),
        _ => bail!("the size {text} is not between 1M and 1024G"),
    }
}

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
    let program = build(&scratch, &interrupt)?;
    let kernel = match KernelZswap::set_up(2 * options.size, &scratch, &interrupt) {
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
    if let Some(path) = &options.json {
        let samples = |list: &[Sample]| -> Vec<_> {
            list.iter().map(|s| json!({ "pageout_us": s.page_out, "read_us": s.read_back })).collect()
        };
        let raw = json!({ "experiment": "pageout", "size": options.size, "runs": options.runs,
                          "uzswap": samples(&ours), "kernel_zswap": samples(&theirs) });
        std::fs::write(path, format!("{raw:#}\n")).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn build(scratch: &Scratch, interrupt: &Interrupt) -> Result<PathBuf> {
    let (source, program) = (scratch.path().join("pageout.c"), scratch.path().join("pageout"));
    std::fs::write(&source, SOURCE)?;
    run_program(Command::new("cc").arg("-O2").arg("-o").arg(&program).arg(&source), scratch, interrupt)?;
    Ok(program)
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

    fn parse(words: &[&str]) -> Result<Options> {
        Options::parse(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn options_have_defaults_and_limits() {
        assert_eq!(parse(&[]).unwrap(), Options { size: 1 << 30, runs: 5, json: None });
        assert_eq!(
            parse(&["--size", "256M", "--runs", "3"]).unwrap(),
            Options { size: 256 << 20, runs: 3, json: None }
        );
        for bad in [&["--size"][..], &["--size", "0"], &["--size", "-1"], &["--size", "9999999999G"], &["--size", "é"]]
        {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse(&["--runs", "0"]).is_err());
        assert!(parse(&["--fast"]).is_err());
    }

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

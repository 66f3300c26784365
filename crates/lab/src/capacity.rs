//! `uzswap lab capacity`: how many bytes of a Python process's heap one byte of memory holds, in uzswap and in the kernel's own
//! zswap, with each codec that they have.
//!
//! Everything counts, not the compressed bytes alone: in uzswap, by what the manager has grown while the pages were stored;
//! in the kernel, the pool and what the slabs have grown, which is where it keeps its entries. The kernel counts what zswap
//! has taken; a page that it refuses is on disk and in neither figure.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::kernel_zswap::KernelZswap;
use crate::options::Options;
use crate::processes::{kibibytes, manager_of, resident};
use crate::program::{Held, Interrupt, Scratch, build, run as run_program, tell};

const IMAGE: &str = include_str!("../programs/heap_image.py");
const HOLD: &str = include_str!("../programs/hold.c");

/// In the order of the table.
const CODECS: [&str; 4] = ["lz4", "lzo-rle", "zstd", "deflate"];

/// What was stored, and in how much memory; bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sample {
    stored: u64,
    memory: u64,
}

impl Sample {
    fn ratio(self) -> f64 {
        self.stored as f64 / self.memory as f64
    }
}

/// Runs the experiment and prints its table.
pub fn run(options: &Options) -> Result<()> {
    let interrupt = Interrupt::catch()?;
    let scratch = Scratch::new()?;
    let program = build("hold", HOLD, &scratch, &interrupt)?;
    let (script, image) = (scratch.path().join("heap_image.py"), scratch.path().join("image"));
    fs::write(&script, IMAGE)?;
    run_program(Command::new("python3").arg(&script).arg(&image).arg(options.size.to_string()), &scratch, &interrupt)?;

    tell!(
        "{} MiB of a Python heap: bytes stored in a byte of memory, medians of {}",
        options.size >> 20,
        options.runs
    )?;
    tell!("{:<10}{:>10}{:>15}{:>9}", "", "uzswap", "kernel zswap", "ratio")?;
    let mut raw = Vec::new();
    for codec in CODECS {
        let (mut ours, mut theirs, mut reason) = (Vec::new(), Vec::new(), None);
        for _ in 0..options.runs {
            ours.push(store_in_uzswap(codec, &program, &image, options.size, &interrupt)?);
            match KernelZswap::set_up(codec, 2 * options.size, &scratch, &interrupt) {
                Ok(_kernel) => theirs.push(store_in_kernel(&program, &image, &interrupt)?),
                Err(error) => reason = Some(error),
            }
            interrupt.check()?;
        }
        print_row(codec, &ours, &theirs, reason)?;
        let samples = |list: &[Sample]| -> Vec<_> {
            list.iter().map(|sample| json!({ "stored": sample.stored, "memory": sample.memory })).collect()
        };
        raw.push(json!({ "codec": codec, "uzswap": samples(&ours), "kernel_zswap": samples(&theirs) }));
    }
    options.write_json(&json!({ "experiment": "capacity", "size": options.size, "codecs": raw }))
}

fn store_in_uzswap(codec: &str, program: &Path, image: &Path, size: u64, interrupt: &Interrupt) -> Result<Sample> {
    let mut command = Command::new(std::env::current_exe().context("cannot find uzswap itself")?);
    command.args(["run", "--quiet", "--no-swap", "--memory-max", &(8 * size).to_string(), "--compressor", codec, "--"]);
    let mut job = Held::start(command.arg(program).arg(image))?;
    let manager = |job: &Held| resident(manager_of(job.id())?);
    job.hear("filled", interrupt)?;
    let before = manager(&job)?;
    job.go_on()?;
    let left: u64 = job.hear("out", interrupt)?.parse()?;
    let memory = manager(&job)?.saturating_sub(before);
    job.finish(interrupt)?;
    if left > size / 10 {
        bail!("{left} of {size} bytes were not paged out: this would be no comparison");
    }
    Ok(Sample { stored: size - left, memory })
}

fn store_in_kernel(program: &Path, image: &Path, interrupt: &Interrupt) -> Result<Sample> {
    let mut job = Held::start(Command::new(program).arg(image))?;
    job.hear("filled", interrupt)?;
    let before = Meminfo::read()?;
    job.go_on()?;
    job.hear("out", interrupt)?;
    let after = Meminfo::read()?;
    job.finish(interrupt)?;
    let memory = (after.zswap + after.slab).saturating_sub(before.zswap + before.slab);
    Ok(Sample { stored: after.zswapped.saturating_sub(before.zswapped), memory })
}

/// What the kernel says of its own memory, in bytes.
#[derive(Debug, Clone, Copy)]
struct Meminfo {
    zswap: u64,
    zswapped: u64,
    slab: u64,
}

impl Meminfo {
    fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let figure = |name| kibibytes(&text, name);
        Ok(Self { zswap: figure("Zswap")?, zswapped: figure("Zswapped")?, slab: figure("Slab")? })
    }
}

fn median(samples: &[Sample]) -> f64 {
    let mut ratios: Vec<f64> = samples.iter().map(|sample| sample.ratio()).collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

fn print_row(codec: &str, ours: &[Sample], theirs: &[Sample], reason: Option<anyhow::Error>) -> Result<()> {
    let mine = median(ours);
    if theirs.is_empty() {
        let reason = reason.map_or_else(String::new, |error| error.to_string());
        tell!("{codec:<10}{mine:>10.3}{:>15}{:>9}   {reason}", "-", "-")
    } else {
        let kernel = median(theirs);
        tell!("{codec:<10}{mine:>10.3}{kernel:>15.3}{:>9.3}", mine / kernel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_of_the_whole() {
        let samples = [(30, 10), (40, 10), (10, 10)].map(|(stored, memory)| Sample { stored, memory });
        assert_eq!(median(&samples), 3.0);
    }
}

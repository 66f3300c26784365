//! The works: what is run, and what is measured of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Bench, Side, figure};
use crate::options::Options;
use crate::processes::{manager_of, resident};
use crate::program::{Held, Interrupt, Overdue, Scratch, run as run_program, tell};

/// The C programs, by their names. The first is of the end-to-end tests.
pub(crate) const PROGRAMS: [(&str, &str); 4] = [
    ("pageout", include_str!("../../../../tests/programs/pageout.c")),
    ("zipf", include_str!("../../programs/zipf.c")),
    ("crowd", include_str!("../../programs/crowd.c")),
    ("hold", include_str!("../../programs/hold.c")),
];

const HEAP_IMAGE: &str = include_str!("../../programs/heap_image.py");
const HEAVY: &str = include_str!("../../../../tests/programs/heavy.cpp");
const HEAP: &str = include_str!("../../../../tests/programs/heap.py");

/// How many times as long as uzswap a rival may take to make the project.
const LONGER: u32 = 2;

/// How often the trivial program is started.
const STARTS: u32 = 1000;

/// What is done. Sizes are those of the default, 1 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Work {
    /// 1 GiB, pages half increasing bytes, half zeros, paged out, read in order and checked.
    Pattern,
    /// 512 MiB of the same, each page read once in random order.
    Random,
    /// 1 GiB from the heap of a Python process, in order.
    Heap,
    /// Random reads by two threads of 512 MiB of that in 256 MiB.
    Zipf,
    /// Four compilations, two at a time, in a quarter of the memory that they need.
    Thrash,
    /// `make -j4` of a project in a third of the memory that it needs.
    Make,
    /// 64 processes with 512 MiB together that read all of it at once, in random order.
    Crowd,
    /// The same by one process.
    Alone,
    /// `/bin/true`, 1000 times, from a shell.
    Start,
    /// g++, with far more memory than it needs.
    Compile,
    /// A Python program, with far more memory than it needs.
    Python,
    /// A process with 1 GiB that is all in the pool.
    Manager,
}

/// Makes what the works need besides their programs.
pub(crate) fn prepare(options: &Options, scratch: &Scratch, interrupt: &Interrupt) -> Result<()> {
    for (name, text) in [("heap_image.py", HEAP_IMAGE), ("heavy.cpp", HEAVY), ("heap.py", HEAP)] {
        fs::write(scratch.path().join(name), text)?;
    }
    let mut python = std::process::Command::new("python3");
    python.arg(scratch.path().join("heap_image.py")).arg(scratch.path().join("image"));
    run_program(python.arg((options.size / 8).to_string()), scratch, interrupt).map(drop)
}

impl Work {
    /// Whether the kernel does better with one page for a fault: it may else find no memory to reclaim where there is some.
    pub(crate) fn is_random(self) -> bool {
        matches!(self, Work::Zipf)
    }

    /// Does it once; what was measured.
    pub(crate) fn run(self, bench: &Bench<'_>, side: Side) -> Result<Vec<(&'static str, f64)>> {
        let size = bench.options.size;
        match self {
            Work::Pattern => page_out(bench, side, size, "order", None),
            Work::Random => page_out(bench, side, size / 2, "random", None),
            Work::Heap => page_out(bench, side, size, "order", Some(bench.file("image"))),
            Work::Zipf => {
                let mut command = bench.command(side, size / 4)?;
                command.arg(bench.program("zipf")).arg(bench.file("image")).arg((size / 2).to_string());
                let words = bench.run(side, command.args(["2", "4"]), true)?;
                Ok(vec![("reads", figure(&words, "reads ")? / 4.0)])
            }
            Work::Thrash => thrash(bench, side),
            Work::Make => make(bench, side),
            Work::Crowd => crowd(bench, side, 64),
            Work::Alone => crowd(bench, side, 1),
            Work::Start => {
                let shell = format!("i=0; while [ $i -lt {STARTS} ]; do /bin/true; i=$((i+1)); done");
                let took = time(bench, side, &["sh", "-c", &shell])?;
                Ok(vec![("each", took.as_secs_f64() * 1e6 / f64::from(STARTS))])
            }
            Work::Compile => {
                let (source, object) = (bench.file("heavy.cpp"), bench.file("heavy.o"));
                let paths = [source, object].map(|path| path.to_string_lossy().into_owned());
                let took = time(
                    bench,
                    side,
                    &["g++", "-std=c++20", "-O2", "-DUNIT=1", "-DINSTANCES=1", "-c", &paths[0], "-o", &paths[1]],
                )?;
                Ok(vec![("time", took.as_secs_f64())])
            }
            Work::Python => {
                let took = time(bench, side, &["python3", &bench.file("heap.py").to_string_lossy()])?;
                Ok(vec![("time", took.as_secs_f64())])
            }
            Work::Manager => manager(bench),
        }
    }
}

fn page_out(
    bench: &Bench<'_>,
    side: Side,
    size: u64,
    order: &str,
    image: Option<PathBuf>,
) -> Result<Vec<(&'static str, f64)>> {
    // Without zswap what is paged out stays in the swap cache, until memory is short.
    let mut command = bench.command(side, if side == Side::Swap { size / 8 } else { 4 * size })?;
    command.arg(bench.program("pageout")).arg(size.to_string()).arg(order).args(image);
    let words = bench.run(side, &mut command, true)?;
    let left = figure(&words, "resident_after_bytes ")?;
    if left > size as f64 / 10.0 && side != Side::Swap {
        bail!("{left} of {size} bytes were not paged out: this would be no comparison");
    }
    let seconds = |name| figure(&words, name).map(|figure| figure / 1e6);
    Ok(vec![("page out", seconds("pageout_us ")?), ("read", seconds("read_us ")?)])
}

fn crowd(bench: &Bench<'_>, side: Side, processes: u32) -> Result<Vec<(&'static str, f64)>> {
    let size = bench.options.size / 2;
    let mut command = bench.command(side, 4 * size)?;
    command.arg(bench.program("crowd")).arg(processes.to_string()).arg(size.to_string());
    let words = bench.run(side, &mut command, true)?;
    Ok(vec![("fault", figure(&words, "read_us ")? / (size / 4096) as f64)])
}

fn thrash(bench: &Bench<'_>, side: Side) -> Result<Vec<(&'static str, f64)>> {
    // Two compilations have 540 MiB at their peak.
    const LIMIT: u64 = 136 << 20;
    let script = "for i in 1 2 3 4; do echo $i; done | xargs -P 2 -I @ g++ -std=c++20 -O2 -DUNIT=@ -DINSTANCES=1 -c \"$0\" -o \"$1/@.o\"";
    let mut command = bench.command(side, LIMIT)?;
    command.args(["sh", "-c", script]).arg(bench.file("heavy.cpp")).arg(bench.file(""));
    let start = Instant::now();
    bench.run(side, &mut command, true)?;
    let took = start.elapsed().as_secs_f64();
    Ok(vec![("time", took), ("loads", told(&bench.file("stats"), "zswpin")?)])
}

fn make(bench: &Bench<'_>, side: Side) -> Result<Vec<(&'static str, f64)>> {
    let project = bench.options.project.as_deref().context("there is no project")?;
    if bench.limit.get().is_none() {
        make_within(bench, Side::Uzswap, project, 64 << 30)?;
        let peak = told(&bench.file("stats"), "anon_peak")?;
        tell!("(the project takes {:.0} MiB at its peak, and is given a third of that)", peak / f64::from(1 << 20))?;
        // Nobody else has set it.
        let _ = bench.limit.set((peak / 3.0) as u64);
    }
    let limit = *bench.limit.get().expect("it has been set");
    let took = make_within(bench, side, project, limit)?;
    if side == Side::Uzswap {
        *bench.made_in.borrow_mut() = Some(took);
    }
    Ok(vec![("time", took.as_secs_f64())])
}

/// Makes a project from the beginning. The kernel, which may take for ever, is given [`LONGER`] times as long as uzswap took just
/// before: if that is too little, it is what it took.
fn make_within(bench: &Bench<'_>, side: Side, project: &Path, limit: u64) -> Result<Duration> {
    bench.run(Side::Bare, bench.command(Side::Bare, limit)?.args(["make", "-C"]).arg(project).arg("clean"), false)?;
    let most = bench.made_in.borrow().filter(|_| side == Side::Shrinker).map(|made_in| made_in * LONGER);
    let mut command = bench.command(side, limit)?;
    let start = Instant::now();
    match bench.run_within(side, command.args(["make", "-j4", "-C"]).arg(project), false, most) {
        Err(error) if error.is::<Overdue>() => {
            tell!("({} was ended after {LONGER} times as long as uzswap took)", side.name())?;
            most.context("nobody was to be ended")
        }
        done => done.map(|_| start.elapsed()),
    }
}

/// A number from the statistics of a job.
fn told(stats: &Path, name: &str) -> Result<f64> {
    let text = fs::read_to_string(stats).context("no statistics")?;
    let told: serde_json::Value = serde_json::from_str(&text)?;
    told[name].as_f64().with_context(|| format!("no {name} in the statistics"))
}

/// How long a command takes with far more memory than it needs.
fn time(bench: &Bench<'_>, side: Side, words: &[&str]) -> Result<Duration> {
    let mut command = bench.command(side, 16 << 30)?;
    let start = Instant::now();
    bench.run(side, command.args(words), false)?;
    Ok(start.elapsed())
}

/// What the manager has grown by, beyond the pool, while a process was paged out.
fn manager(bench: &Bench<'_>) -> Result<Vec<(&'static str, f64)>> {
    let (size, stats) = (bench.options.size, bench.file("stats"));
    let mut command = std::process::Command::new(std::env::current_exe().context("cannot find uzswap itself")?);
    command.args(["run", "--quiet", "--no-swap", "--memory-max", &(4 * size).to_string(), "--stats"]).arg(&stats);
    let image = bench.file("image");
    let mut job = Held::start(command.arg("--").arg(bench.program("hold")).arg(&image).arg(size.to_string()))?;
    job.hear("filled", &bench.interrupt)?;
    job.go_on()?;
    let left: u64 = job.hear("out", &bench.interrupt)?.parse()?;
    // Statistics are written once a second.
    std::thread::sleep(Duration::from_millis(2500));
    let pool = told(&stats, "pool_total_size")?;
    let beside = resident(manager_of(job.id())?)? as f64 - pool;
    job.finish(&bench.interrupt)?;
    if left > size / 10 {
        bail!("{left} of {size} bytes were not paged out: this would be no comparison");
    }
    Ok(vec![("memory", beside / (1 << 20) as f64 / (size as f64 / (1u64 << 30) as f64))])
}

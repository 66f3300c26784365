//! `uzswap lab bench`: the works that uzswap is to be fast at, each beside its rivals in the same run, in turn (A B C A B C), after
//! one round that warms the memory.
//!
//! `works` says what is run and what is measured of it; here is who it is compared with, what is asked of the ratio, and how
//! all of it is told: a table, and on demand the raw samples and a plot (`plot`).

mod plot;
mod works;

use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::cgroup::{Cgroup, Kept};
use crate::kernel_zswap::{KernelZswap, stored_since_boot};
use crate::options::Options;
use crate::program::{Interrupt, Scratch, build, run_beside, tell};
use works::Work;

/// Where a work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Uzswap,
    /// uzswap that brings a single page for each fault.
    PageByPage,
    /// The kernel's zswap, with lzo-rle.
    Zswap,
    /// The same with another codec.
    Codec(&'static str),
    /// The kernel's zswap, with lzo-rle and its shrinker.
    Shrinker,
    /// A swap file without zswap.
    Swap,
    /// Memory without a limit.
    Bare,
}

impl Side {
    fn name(self) -> Cow<'static, str> {
        Cow::from(match self {
            Side::Codec(codec) => return format!("kernel zswap, {codec}").into(),
            Side::Uzswap => "uzswap",
            Side::PageByPage => "uzswap, page by page",
            Side::Zswap => "kernel zswap",
            Side::Shrinker => "kernel zswap, shrinker",
            Side::Swap => "swap file",
            Side::Bare => "no limit",
        })
    }

    fn is_kernels(self) -> bool {
        self.is_zswap() || self == Side::Swap
    }

    fn is_zswap(self) -> bool {
        self.codec().is_some()
    }

    /// That of the kernel's zswap, where that is used.
    fn codec(self) -> Option<&'static str> {
        match self {
            Side::Zswap | Side::Shrinker => Some("lzo-rle"),
            Side::Codec(codec) => Some(codec),
            _ => None,
        }
    }
}

/// What is asked of our figure beside the other.
#[derive(Debug, Clone, Copy)]
enum Asked {
    /// At most so many times the other.
    AtMost(f64),
    /// At least so many times the other.
    AtLeast(f64),
    /// So much more than the other at most.
    Added(f64),
    /// At most this; there is no other.
    Below(f64),
}

impl Asked {
    fn holds(self, value: f64) -> bool {
        match self {
            Asked::AtMost(bar) | Asked::Added(bar) | Asked::Below(bar) => value <= bar,
            Asked::AtLeast(bar) => value >= bar,
        }
    }

    /// The value of which something is asked.
    fn value(self, ours: f64, other: f64) -> f64 {
        match self {
            Asked::AtMost(_) | Asked::AtLeast(_) => ours / other,
            Asked::Added(_) => ours - other,
            Asked::Below(_) => ours,
        }
    }

    fn told(self) -> String {
        match self {
            Asked::AtMost(bar) | Asked::Below(bar) => format!("≤ {bar}"),
            Asked::AtLeast(bar) => format!("≥ {bar}"),
            Asked::Added(bar) => format!("≤ +{bar}"),
        }
    }
}

/// A figure of a work, done on some side.
type Cell = (Work, Side, &'static str);

/// A line of the table.
struct Row {
    name: &'static str,
    unit: &'static str,
    ours: Cell,
    other: Cell,
    asked: Asked,
}

/// The lines, in the order in which they are measured: those of works that share a rival next to each other.
fn rows() -> Vec<Row> {
    let row = |name, unit, ours, other, asked| Row { name, unit, ours, other, asked };
    let beside_zswap = |name, work, figure, asked| {
        row(name, "s", (work, Side::Uzswap, figure), (work, Side::Zswap, figure), Asked::AtMost(asked))
    };
    vec![
        beside_zswap("pattern, read in order", Work::Pattern, "read", 0.40),
        beside_zswap("pattern, paged out", Work::Pattern, "page out", 0.70),
        beside_zswap("pattern, read at random", Work::Random, "read", 1.6),
        beside_zswap("Python's heap, in order", Work::Heap, "read", 0.5),
        row(
            "Zipf, two threads",
            "reads/s",
            (Work::Zipf, Side::Uzswap, "reads"),
            (Work::Zipf, Side::Zswap, "reads"),
            Asked::AtLeast(0.8),
        ),
        row(
            "in order, page by page",
            "s",
            (Work::Pattern, Side::Uzswap, "read"),
            (Work::Pattern, Side::PageByPage, "read"),
            Asked::AtMost(0.5),
        ),
        row(
            "thrash, page by page",
            "s",
            (Work::Thrash, Side::Uzswap, "time"),
            (Work::Thrash, Side::PageByPage, "time"),
            Asked::AtMost(1.02),
        ),
        row(
            "thrash, loads, page by page",
            "pages",
            (Work::Thrash, Side::Uzswap, "loads"),
            (Work::Thrash, Side::PageByPage, "loads"),
            Asked::AtMost(1.02),
        ),
        row(
            "make -j4 of a project",
            "s",
            (Work::Make, Side::Uzswap, "time"),
            (Work::Make, Side::Shrinker, "time"),
            Asked::AtMost(1.1),
        ),
        row(
            "a fault among 64 processes",
            "µs",
            (Work::Crowd, Side::PageByPage, "fault"),
            (Work::Alone, Side::PageByPage, "fault"),
            Asked::AtMost(1.3),
        ),
        row(
            "start and end of a program",
            "µs",
            (Work::Start, Side::Uzswap, "each"),
            (Work::Start, Side::Bare, "each"),
            Asked::Added(250.0),
        ),
        row(
            "compile, far from the limit",
            "s",
            (Work::Compile, Side::Uzswap, "time"),
            (Work::Compile, Side::Bare, "time"),
            Asked::AtMost(1.01),
        ),
        row(
            "Python, far from the limit",
            "s",
            (Work::Python, Side::Uzswap, "time"),
            (Work::Python, Side::Bare, "time"),
            Asked::AtMost(1.01),
        ),
        row(
            "manager beside the pool",
            "MiB/GiB",
            (Work::Manager, Side::Uzswap, "memory"),
            (Work::Manager, Side::Uzswap, "memory"),
            Asked::Below(24.0),
        ),
    ]
}

/// Works that are also done by the kernel's zswap with its other codecs, and on a swap file without zswap, for the record.
const FOR_THE_RECORD: [Work; 4] = [Work::Pattern, Work::Random, Work::Heap, Work::Zipf];

/// What was measured, by its names.
type Figures = Vec<(&'static str, f64)>;

/// So often a work of the kernel's is run again, of all its turns.
const MOST_KILLED: u32 = 50;

/// What a work has to hand.
pub(crate) struct Bench<'a> {
    pub options: &'a Options,
    pub interrupt: Interrupt,
    programs: BTreeMap<&'static str, PathBuf>,
    /// Bytes that the project is made in.
    limit: OnceCell<u64>,
    /// How long that took under uzswap the last time.
    made_in: RefCell<Option<Duration>>,
    // Undone in this order: the swap file is among the scratch.
    cgroup: Option<Cgroup>,
    kernel: Option<KernelZswap>,
    scratch: Scratch,
}

impl Bench<'_> {
    /// A file of our own among the scratch.
    pub fn file(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub fn program(&self, name: &str) -> &Path {
        &self.programs[name]
    }

    /// A command that does its work on a side, in `limit` bytes.
    pub fn command(&self, side: Side, limit: u64) -> Result<Command> {
        match side {
            Side::Uzswap | Side::PageByPage => {
                let mut command = Command::new(std::env::current_exe().context("cannot find uzswap itself")?);
                let rule = if side == Side::Uzswap { "adaptive" } else { "never" };
                command.args(["run", "--quiet", "--swapin", rule, "--memory-max", &limit.to_string(), "--stats"]);
                command.arg(self.file("stats")).arg("--");
                Ok(command)
            }
            Side::Zswap | Side::Codec(_) | Side::Shrinker | Side::Swap => {
                self.cgroup.as_ref().context("there is no cgroup")?.command(side, limit)
            }
            Side::Bare => Ok(Command::new("env")),
        }
    }

    /// Runs a command to its end; what it says on stderr. An error if the kernel's zswap has not been used where it is
    /// measured, or has been where it is not.
    pub fn run(&self, side: Side, command: &mut Command, must_swap: bool) -> Result<String> {
        self.run_within(side, command, must_swap, None)
    }

    /// The same; what takes longer than `most` is ended, with [`Overdue`](crate::program::Overdue).
    pub fn run_within(
        &self,
        side: Side,
        command: &mut Command,
        must_swap: bool,
        most: Option<Duration>,
    ) -> Result<String> {
        if let Some(kernel) = &self.kernel {
            kernel.enable(side.codec(), side == Side::Shrinker)?;
        }
        let before = stored_since_boot();
        let mut kept = Kept::default();
        let words = run_beside(command, &self.scratch, &self.interrupt, most, || kept.look());
        if let (true, Some(cgroup)) = (side.is_zswap(), &self.cgroup) {
            cgroup.note(&kept);
        }
        let words = words?;
        let stored = stored_since_boot() - before;
        if must_swap && side.is_zswap() && stored == 0 {
            bail!("the kernel's zswap has taken nothing: this would be no comparison");
        }
        if !side.is_zswap() && stored > 1000 {
            bail!("the kernel's zswap has taken {stored} pages while {} was measured", side.name());
        }
        Ok(words)
    }

    /// Does a work once; on the kernel's side again, as long as that fails, for the kernel may find no memory to reclaim where
    /// there is some, and kill.
    fn attempt(&self, work: Work, side: Side, killed: &mut BTreeMap<(Work, Side), u32>) -> Result<Figures> {
        loop {
            let done = work.run(self, side);
            let times = killed.entry((work, side)).or_insert(0);
            if done.is_ok() || !side.is_kernels() || *times == MOST_KILLED {
                return done;
            }
            self.interrupt.check()?;
            *times += 1;
        }
    }

    /// Whether a side is there to be measured.
    fn has(&self, side: Side) -> bool {
        !side.is_kernels() || self.kernel.is_some() && self.cgroup.is_some()
    }
}

/// The figure that a program has told in a line `NAME NUMBER`.
pub(crate) fn figure(words: &str, name: &str) -> Result<f64> {
    let number = words.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    number.with_context(|| format!("the program did not print {name}: {}", words.trim()))
}

type Samples = BTreeMap<(Work, Side, &'static str), Vec<f64>>;

/// Runs everything, or the lines whose names contain what was asked for, and tells it.
pub fn run(options: &Options) -> Result<()> {
    let possible = |row: &Row| row.ours.0 != Work::Make || options.project.is_some();
    let rows: Vec<Row> = rows().into_iter().filter(|row| options.wants(row.name) && possible(row)).collect();
    if rows.is_empty() {
        bail!("no line of the table has {:?} in its name", options.only.as_deref().unwrap_or_default());
    }
    let bench = set_up(options)?;
    let mut cells: Vec<(Work, Side)> = Vec::new();
    let codecs = bench.kernel.as_ref().map_or(Vec::new(), KernelZswap::other_codecs);
    let record: Vec<Side> = codecs.into_iter().map(Side::Codec).chain([Side::Swap]).collect();
    for row in &rows {
        let record = if FOR_THE_RECORD.contains(&row.ours.0) { &record[..] } else { &[] };
        let record = record.iter().map(|side| (row.ours.0, *side));
        for cell in [(row.ours.0, row.ours.1), (row.other.0, row.other.1)].into_iter().chain(record) {
            if !cells.contains(&cell) && bench.has(cell.1) {
                cells.push(cell);
            }
        }
    }
    let (mut samples, mut killed) = (Samples::new(), BTreeMap::<(Work, Side), u32>::new());
    // Works that are compared with each other alternate; the next begin when these are done.
    for mut together in groups(&rows, &cells) {
        for turn in 0..=options.runs {
            for (work, side) in together.clone() {
                if let Some(kernel) = &bench.kernel {
                    kernel.read_ahead(!work.is_random())?;
                }
                // What zswap keeps is known better each time.
                let times = if turn == 0 && side.is_zswap() { 3 } else { 1 };
                let attempts = std::iter::repeat_with(|| bench.attempt(work, side, &mut killed));
                let done = attempts.take(times).last().expect("once at least");
                let done = done.with_context(|| format!("{work:?} on {}", side.name()));
                bench.interrupt.check()?;
                match done {
                    Ok(figures) if turn > 0 => figures.into_iter().for_each(|(name, value)| {
                        samples.entry((work, side, name)).or_default().push(value);
                    }),
                    Ok(_) => {}
                    Err(reason) if side.is_kernels() => {
                        eprintln!("left out: {reason:#}");
                        together.retain(|cell| *cell != (work, side));
                        samples.retain(|cell, _| (cell.0, cell.1) != (work, side));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let done = |row: &&Row| together.contains(&(row.ours.0, row.ours.1));
        rows.iter().filter(done).try_for_each(|row| print_row(row, &samples))?;
    }
    drop(bench);
    for ((work, side), times) in killed.into_iter().filter(|(_, times)| *times > 0) {
        tell!("  {work:?} on {}: failed {times} times, and was run again", side.name())?;
    }
    for ((work, side, figure), values) in &samples {
        if matches!(side, Side::Codec(_) | Side::Swap) {
            tell!("{:<46}{:>26.2}", format!("  {work:?}: {figure}, {}", side.name()), median(values))?;
        }
    }
    if let Some(path) = &options.svg {
        let lines = rows.iter().filter_map(|row| plot::Line::new(row, &samples));
        plot::draw(path, &lines.collect::<Vec<_>>())?;
    }
    let raw: Vec<_> = (samples.iter())
        .map(|((work, side, figure), values)| {
            json!({ "work": format!("{work:?}"), "side": side.name(), "figure": figure, "samples": values })
        })
        .collect();
    options.write_json(&json!({ "experiment": "bench", "size": options.size, "runs": options.runs, "samples": raw }))
}

fn set_up(options: &Options) -> Result<Bench<'_>> {
    let interrupt = Interrupt::catch()?;
    let scratch = Scratch::new()?;
    let mut programs = BTreeMap::new();
    for (name, source) in works::PROGRAMS {
        programs.insert(name, build(name, source, &scratch, &interrupt)?);
    }
    works::prepare(options, &scratch, &interrupt)?;
    let lzo_rle = Side::Zswap.codec().expect("it is the kernel's zswap");
    let kernel = KernelZswap::set_up(lzo_rle, 4 * options.size, &scratch, &interrupt);
    let cgroup = Cgroup::new();
    if let (Err(reason), _) | (_, Err(reason)) = (&kernel, &cgroup) {
        interrupt.check()?;
        eprintln!("the kernel's zswap and swap are left out: {reason:#}");
    }
    tell!("medians of {} runs; {} MiB of data at most", options.runs, options.size >> 20)?;
    tell!("{:<30}{:>12}{:>14}{:>16}{:>10}{:>10}", "", "", "uzswap", "other", "value", "asked")?;
    let (limit, made_in) = Default::default();
    Ok(Bench { options, interrupt, programs, limit, made_in, cgroup: cgroup.ok(), kernel: kernel.ok(), scratch })
}

/// Cells that some line compares, directly or by way of others, are together.
fn groups(rows: &[Row], cells: &[(Work, Side)]) -> Vec<Vec<(Work, Side)>> {
    let mut groups: Vec<Vec<(Work, Side)>> = Vec::new();
    for &cell in cells {
        let compared = |with: &(Work, Side)| {
            let pair = [cell, *with];
            with.0 == cell.0
                || rows
                    .iter()
                    .any(|row| pair.contains(&(row.ours.0, row.ours.1)) && pair.contains(&(row.other.0, row.other.1)))
        };
        match groups.iter_mut().find(|group| group.iter().any(compared)) {
            Some(group) => group.push(cell),
            None => groups.push(vec![cell]),
        }
    }
    groups
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

fn print_row(row: &Row, samples: &Samples) -> Result<()> {
    let told = |cell: &Cell| samples.get(cell).map(|values| median(values));
    let Some(ours) = told(&row.ours) else { return Ok(()) };
    let alone = matches!(row.asked, Asked::Below(_));
    let Some(other) = told(&row.other) else {
        return tell!("{:<30}{:>12}{ours:>14.2}{:>16}", row.name, row.unit, "-");
    };
    let value = row.asked.value(ours, other);
    let other = if alone { "-".to_owned() } else { format!("{other:.2}") };
    let missed = if row.asked.holds(value) { "" } else { "   missed" };
    let asked = row.asked.told();
    tell!("{:<30}{:>12}{ours:>14.2}{other:>16}{value:>10.2}{asked:>10}{missed}", row.name, row.unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn works_that_are_compared_are_done_in_turn() {
        let rows = rows();
        let cells: Vec<(Work, Side)> =
            rows.iter().flat_map(|row| [(row.ours.0, row.ours.1), (row.other.0, row.other.1)]).collect();
        for group in groups(&rows, &cells) {
            for row in &rows {
                let ours = group.contains(&(row.ours.0, row.ours.1));
                assert_eq!(ours, group.contains(&(row.other.0, row.other.1)), "{}", row.name);
            }
        }
    }

    #[test]
    fn what_is_asked_can_be_missed() {
        assert!(Asked::AtMost(0.4).holds(Asked::AtMost(0.4).value(2.0, 5.0)));
        assert!(!Asked::AtMost(0.4).holds(Asked::AtMost(0.4).value(2.1, 5.0)));
        assert!(!Asked::AtLeast(0.8).holds(Asked::AtLeast(0.8).value(3.9, 5.0)));
        assert!(!Asked::Added(250.0).holds(Asked::Added(250.0).value(1251.0, 1000.0)));
        assert!(!Asked::Below(24.0).holds(Asked::Below(24.0).value(25.0, 25.0)));
    }

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[4.0, 1.0, 3.0]), 3.0);
    }
}

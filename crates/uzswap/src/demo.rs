//! `uzswap demo`: a real program over more data than its limit, and the same program without uzswap.
//!
//! 1. Warm the machine's memory, so that the run that comes first does not pay for pages never touched since boot.
//! 2. Run the program alone, then under `uzswap run`; sample both from outside.
//! 3. Compare the digests: equal, or the demo fails. Then print the table.

mod sample;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use clap::ArgMatches;
use uzswap_vm::doctor::blocking_problems;

use crate::flags::{ALL, Kind};
use crate::ram::Ram;
use crate::size::{Human, parse_amount};
use crate::{Failure, print, run, say};
use sample::{Stats, resident};

const PROGRAM: &str = include_str!("demo/workload.py");
const SAMPLE_EVERY: Duration = Duration::from_millis(50);
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
const DATA_LEAST: u64 = 16 << 20;

struct Options {
    size: u64,
    memory_max: u64,
    compressor: String,
    seed: u64,
}

/// What was seen of one run.
#[derive(Debug, Default)]
struct Outcome {
    digest: String,
    seconds: f64,
    resident_peak: u64,
    /// The counters when most was swapped out; `None` for a run without uzswap.
    fullest: Option<Stats>,
    /// The last counters.
    last: Option<Stats>,
}

/// Runs the demo; the status is 0 if both runs agree, else 1.
pub fn demo(matches: &ArgMatches) -> Result<i32, Failure> {
    let options = Options::read(matches)?;
    if let Err(error) = Command::new("python3").arg("-c").arg("").stdin(Stdio::null()).status() {
        let message =
            format!("the demo's program needs python3 ({error}); install it, for example: apt-get install python3");
        return Err(message.into());
    }
    if let Some(problem) = blocking_problems().first() {
        return Err(run::cannot_run(problem).into());
    }
    say(&format!("demo: python3 builds and walks {} of data, first without uzswap", Human(options.size)));
    warm(options.size);
    let plain = watch("without", options.program(&mut Command::new("python3")), None)?;
    let directory = Scratch::new()?;
    let stats = directory.0.join("stats.json");
    let uzswap = std::env::current_exe().map_err(|error| format!("cannot find the uzswap binary: {error}"))?;
    let mut limited = Command::new(uzswap);
    // The user's own settings are not what is shown here.
    ALL.iter().for_each(|flag| {
        limited.env_remove(flag.variable());
    });
    limited
        .args(["run", "--config", "/dev/null"])
        .arg(format!("--memory-max={}", options.memory_max))
        .arg("--compressor")
        .arg(&options.compressor);
    limited.arg("--stats").arg(&stats).args(["--quiet", "--", "python3"]);
    say(&format!("demo: now under uzswap run --memory-max {}", Human(options.memory_max)));
    let limited = watch("with uzswap", options.program(&mut limited), Some(&stats))?;
    let same = plain.digest == limited.digest;
    let written = print(&table(&options, &plain, &limited));
    Ok(if written != 0 { written } else { i32::from(!same) })
}

impl Options {
    fn read(matches: &ArgMatches) -> Result<Options, String> {
        let text = |name: &str| matches.get_one::<String>(name).expect("has a default").as_str();
        let ram = Ram::detect(Path::new("/"))?.bytes();
        let size = |name: &str, least| {
            let bytes =
                parse_amount(text(name)).map(|amount| amount.bytes(ram)).map_err(|why| format!("--{name}: {why}"))?;
            if bytes < least { Err(format!("--{name}: give at least {}", Human(least))) } else { Ok(bytes) }
        };
        let options = Options {
            size: size("size", DATA_LEAST)?,
            memory_max: size("memory-max", DATA_LEAST)?,
            compressor: Kind::Codec
                .parse(text("compressor"))
                .map(|_| text("compressor").to_owned())
                .map_err(|why| format!("--compressor: {why}"))?,
            seed: text("seed").parse().map_err(|_| format!("--seed: '{}' is not a whole number", text("seed")))?,
        };
        // The run without uzswap holds everything, and a little for the interpreter.
        let needed = options.size + options.size / 8;
        if needed > ram {
            return Err(format!(
                "--size: the run without uzswap needs {}, there are {}; give a smaller --size",
                Human(needed),
                Human(ram)
            ));
        }
        Ok(options)
    }

    fn program<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.args(["-c", PROGRAM]).arg(self.seed.to_string()).arg(self.size.to_string())
    }
}

/// Touches as much memory as the data will need, and gives it back.
fn warm(bytes: u64) {
    let memory = vec![1u8; bytes as usize];
    std::hint::black_box(&memory);
}

/// A directory of our own, gone at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, String> {
        let path = std::env::temp_dir().join(format!("uzswap-demo-{}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs `command` to its end, prints how far it is, and samples it.
fn watch(name: &str, command: &mut Command, stats: Option<&Path>) -> Result<Outcome, Failure> {
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", command.get_program().display()))?;
    let said = Arc::new(Mutex::new((String::from("starting"), String::new())));
    let reader = follow(&mut child, &said);
    let (mut outcome, mut reported) = (Outcome::default(), started);
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|error| format!("cannot wait for the {name} run: {error}"))? {
            break status;
        }
        // Under uzswap run the child is the manager: what it holds itself is the pool, not the job.
        let resident = resident(child.id(), stats.is_none());
        outcome.resident_peak = outcome.resident_peak.max(resident);
        if reported.elapsed() >= PROGRESS_EVERY {
            reported = Instant::now();
            outcome.look(stats);
            say(&progress(
                name,
                &said.lock().expect("reader lives").0,
                started.elapsed(),
                resident,
                outcome.last.as_ref(),
            ));
        }
        thread::sleep(SAMPLE_EVERY);
    };
    let _ = reader.join();
    outcome.look(stats);
    outcome.seconds = started.elapsed().as_secs_f64();
    outcome.digest.clone_from(&said.lock().expect("reader is done").1);
    if !status.success() || outcome.digest.is_empty() {
        return Err(Failure::new(format!("demo: the run {name} ended early ({status})"), 1));
    }
    Ok(outcome)
}

impl Outcome {
    fn look(&mut self, stats: Option<&Path>) {
        let Some(now) = stats.and_then(Stats::read) else { return };
        if self.fullest.as_ref().is_none_or(|fullest| now.swapped() > fullest.swapped()) {
            self.fullest = Some(now.clone());
        }
        self.last = Some(now);
    }
}

/// Reads the program's lines: its stage, and at the end its digest.
fn follow(child: &mut Child, said: &Arc<Mutex<(String, String)>>) -> thread::JoinHandle<()> {
    let (output, said) = (child.stdout.take().expect("is piped"), Arc::clone(said));
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let mut said = said.lock().expect("watcher lives");
            if let Some(stage) = line.strip_prefix("stage ") {
                said.0 = stage.to_owned();
            } else if let Some(digest) = line.strip_prefix("digest ") {
                said.1 = digest.to_owned();
            }
        }
    })
}

fn progress(name: &str, stage: &str, elapsed: Duration, resident: u64, stats: Option<&Stats>) -> String {
    let mut line =
        format!("demo: {name:<11} {:>4.0} s  {stage:<15} resident {:>9}", elapsed.as_secs_f64(), Human(resident));
    if let Some(stats) = stats {
        line += &format!("  pool {:>9}  disk {:>9}", Human(stats.pool), Human(stats.disk));
    }
    line
}

fn table(options: &Options, plain: &Outcome, limited: &Outcome) -> String {
    let mut rows = vec![
        ("result".to_owned(), plain.digest.clone(), limited.digest.clone()),
        ("time".into(), format!("{:.1} s", plain.seconds), format!("{:.1} s", limited.seconds)),
        ("resident, peak".into(), Human(plain.resident_peak).to_string(), Human(limited.resident_peak).to_string()),
    ];
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), "-".to_owned(), value));
    row("limit", Human(options.memory_max).to_string());
    match (&limited.fullest, &limited.last) {
        (Some(fullest), Some(last)) => {
            row("when most was out:", String::new());
            row("  resident", Human(fullest.resident).to_string());
            row("  in the pool", format!("{} held in {}", Human(fullest.zswapped), Human(fullest.pool)));
            row("  on disk", Human(fullest.disk).to_string());
            row("  ratio of the pool", fullest.ratio());
            row("written back", Human(last.written_back).to_string());
            row("faults served", last.faults.to_string());
            row("time stalled", format!("{:.1} s", last.stalled.as_secs_f64()));
        }
        _ => row("counters", "none were written".into()),
    }
    let mut text = format!("\n{:<20} {:>14} {:>26}\n", "", "without uzswap", "with uzswap");
    for (name, one, other) in rows {
        let one = if other.is_empty() { "" } else { &one };
        text += format!("{name:<20} {one:>14} {other:>26}").trim_end();
        text.push('\n');
    }
    text += if plain.digest == limited.digest {
        "\nThe results are the same.\n"
    } else {
        "\nThe results DIFFER: this is a bug in uzswap.\n"
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_whether_the_results_agree() {
        let options = Options { size: 1 << 30, memory_max: 256 << 20, compressor: "lz4".into(), seed: 1 };
        let outcome = |digest: &str| Outcome { digest: digest.into(), seconds: 2.0, ..Outcome::default() };
        assert!(table(&options, &outcome("a"), &outcome("a")).ends_with("the same.\n"));
        assert!(table(&options, &outcome("a"), &outcome("b")).contains("DIFFER"));
    }
}

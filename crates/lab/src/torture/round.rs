//! One round: starts its processes, disturbs them, waits for their end, and judges what they leave.

use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::Counts;
use super::disturb;
use super::plan::{Plan, Random, Strike, Swap};
use super::traces::{
    MARK, Part, Traced, descriptors, files_of, files_of_uzswap, is_first_without_worker, is_stopped, marked,
    what_they_do,
};
use crate::program::{Interrupt, Scratch};

/// How long a job may take beyond its time: machines are slow under pressure.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long anything of a job may be there after its end.
const GONE_WITHIN: Duration = Duration::from_secs(10);
/// How long a daemon may take to begin or to stop.
const DAEMON_WITHIN: Duration = Duration::from_secs(20);
/// How long the manager may take to close what it had open for a job.
const SETTLED: Duration = Duration::from_secs(2);
/// The variable that has accesses to the swap file fail.
const FAULTS: &str = "UZSWAP_SWAP_FAULTS";
/// Between two disturbances.
const PAUSE: Duration = Duration::from_millis(100);
/// How a program ends that is denied a page: by SIGBUS, because a system call of its own fails, or by SIGSEGV if the page is that of a
/// stack on which the kernel puts a signal.
const DENIED: [i32; 3] = [128 + 7, 4, 128 + 11];
/// Statuses that nothing excuses but a failed read of the swap file: wrong bytes, failed checks, and signals that only a defect sends.
const NEVER: [i32; 7] = [2, 3, 4, 5, 128 + 6, 128 + 7, 128 + 11];

pub(super) struct Round<'a> {
    pub(super) plan: &'a Plan,
    pub(super) mark: String,
    directory: PathBuf,
    jobs: Vec<Child>,
    daemon: Option<Child>,
    /// Every process that was seen.
    seen: Vec<u32>,
    /// What was killed.
    killed: Vec<Traced>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        for _ in 0..100 {
            let left = marked(&self.mark);
            if left.is_empty() {
                break;
            }
            left.iter().for_each(|process| send(process.id, Signal::KILL));
            sleep(Duration::from_millis(50));
        }
        for child in self.jobs.iter_mut().chain(&mut self.daemon) {
            // Both fail if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a round; the error says what went wrong.
pub(crate) fn run(
    plan: &Plan,
    victim: &Path,
    scratch: &Scratch,
    interrupt: &Interrupt,
    counts: &mut Counts,
) -> Result<()> {
    let directory = scratch.path().join(format!("round-{}", plan.seed));
    fs::create_dir(&directory)?;
    let mark = format!("{}-{}", std::process::id(), plan.seed);
    let earlier = files_of_uzswap();
    let mut round =
        Round { plan, mark, directory, jobs: Vec::new(), daemon: None, seen: Vec::new(), killed: Vec::new() };
    let before = if plan.daemon { round.start_daemon(victim)? } else { Vec::new() };
    for number in 0..plan.programs {
        let job = round.start_job(number, victim, plan.seconds)?;
        round.jobs.push(job);
    }
    let ended = round.attend(interrupt, counts, before).and_then(|()| round.leaves_no_files(&earlier));
    ended.with_context(|| format!("killed: {}", round.killed_in_words()))?;
    fs::remove_dir_all(&round.directory)?;
    Ok(())
}

impl Round<'_> {
    /// Disturbs the jobs, waits until they have ended, and judges what they did and left. `before` is what the manager had open.
    fn attend(&mut self, interrupt: &Interrupt, counts: &mut Counts, before: Vec<String>) -> Result<()> {
        self.disturb(interrupt)?;
        self.await_jobs(interrupt)?;
        self.judge(counts)?;
        if self.plan.daemon {
            self.stop_daemon(before)?;
        }
        self.await_nothing()
    }

    fn leaves_no_files(&self, earlier: &[String]) -> Result<()> {
        // A process id comes round again: what is older is of another process.
        let left: Vec<String> = files_of(&self.seen).into_iter().filter(|file| !earlier.contains(file)).collect();
        if !left.is_empty() {
            bail!("files left behind: {}", left.join(", "));
        }
        Ok(())
    }

    fn struck(&self) -> bool {
        !self.killed.is_empty()
    }

    fn killed_in_words(&self) -> String {
        let words: Vec<String> = self.killed.iter().map(|Traced { id, part }| format!("{id} ({part:?})")).collect();
        if words.is_empty() { "nothing".to_owned() } else { words.join(", ") }
    }

    pub(super) fn uzswap(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe().context("cannot find uzswap itself")?);
        let file = |kind: &str| File::create(self.directory.join(format!("{name}.{kind}")));
        command.env(MARK, &self.mark).env("UZSWAP_VERIFY", "1").process_group(0);
        if let Some((reads, writes)) = self.plan.faults {
            command.env(FAULTS, format!("{}:{reads}:{writes}", self.plan.seed));
        }
        command.stdin(Stdio::null()).stdout(file("out")?).stderr(file("err")?);
        Ok(command)
    }

    fn text(&self, name: &str, kind: &str) -> String {
        let bytes = fs::read(self.directory.join(format!("{name}.{kind}"))).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(super) fn socket(&self, number: u64) -> PathBuf {
        self.directory.join(if self.plan.daemon { "daemon.sock".to_owned() } else { format!("job-{number}.sock") })
    }

    /// The settings of a manager.
    fn settings(&self, limit: u64) -> Vec<String> {
        let plan = self.plan;
        let mut words = vec!["--memory-max".to_owned(), limit.to_string()];
        words.extend(["--compressor", plan.compressor, "--zpool", plan.zpool].map(str::to_owned));
        match plan.swap {
            Swap::Roomy => {}
            Swap::Tiny => words.extend(["--swap-size".to_owned(), "2M".to_owned()]),
            Swap::None => words.push("--no-swap".to_owned()),
        }
        words
    }

    /// Returns which descriptors the manager has when a first job has come and gone: some it opens only when it has work.
    fn start_daemon(&mut self, victim: &Path) -> Result<Vec<String>> {
        let mut command = self.uzswap("daemon")?;
        command.arg("daemon").arg("--socket").arg(self.socket(0));
        command.args(self.settings(self.plan.limit * self.plan.programs));
        self.daemon = Some(command.spawn().context("cannot run uzswap daemon")?);
        let end = Instant::now() + DAEMON_WITHIN;
        while !self.socket(0).exists() {
            if Instant::now() > end {
                bail!("the daemon does not begin: {}", self.text("daemon", "err"));
            }
            sleep(Duration::from_millis(20));
        }
        let mut first = self.start_job(self.plan.programs, victim, 1)?;
        let end = Instant::now() + PATIENCE;
        while first.try_wait()?.is_none() {
            if Instant::now() > end {
                first.kill()?;
                first.wait()?;
                bail!("HANG: the first job does not end\n{}", what_they_do(&marked(&self.mark)));
            }
            sleep(Duration::from_millis(20));
        }
        let mut fewest: Option<Vec<String>> = None;
        let end = Instant::now() + SETTLED;
        while Instant::now() < end {
            fewest = fewest.into_iter().chain(self.manager_descriptors()).min_by_key(Vec::len);
            sleep(Duration::from_millis(50));
        }
        Ok(fewest.unwrap_or_default())
    }

    fn manager_descriptors(&self) -> Option<Vec<String>> {
        self.manager().map(descriptors)
    }

    /// The manager's process id.
    pub(super) fn manager(&self) -> Option<u32> {
        marked(&self.mark).into_iter().find(|process| process.part == Part::Manager).map(|process| process.id)
    }

    fn start_job(&self, number: u64, victim: &Path, seconds: u64) -> Result<Child> {
        let plan = self.plan;
        let mut command = self.uzswap(&format!("job-{number}"))?;
        command.arg("run");
        if plan.daemon {
            command.arg("--connect").arg("--socket").arg(self.socket(number));
            command.args(["--memory-max", &plan.limit.to_string()]);
        } else {
            command.arg("--control").arg(self.socket(number)).args(self.settings(plan.limit));
        }
        command.arg("--").arg(victim).args([&(plan.seed + number).to_string(), &seconds.to_string()]);
        command.arg(plan.data.to_string()).arg(&self.directory).arg(&plan.without);
        command.spawn().context("cannot run uzswap run")
    }

    /// Changes, stops and kills until the programs' time is up.
    fn disturb(&mut self, interrupt: &Interrupt) -> Result<()> {
        let mut random = self.plan.random.clone();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(self.plan.seconds) {
            interrupt.check()?;
            sleep(PAUSE);
            let processes = marked(&self.mark);
            self.seen.extend(processes.iter().map(|process| process.id));
            if self.plan.strike != Strike::Nothing && !self.struck() && start.elapsed() >= self.plan.strike_at {
                self.strike(&processes, &mut random);
            } else if self.plan.stops && !processes.is_empty() && random.below(4) == 0 {
                let one = processes[random.below(processes.len() as u64) as usize];
                send(one.id, Signal::STOP);
                sleep(Duration::from_millis(random.below(200)));
                send(one.id, Signal::CONT);
                continue_fronts(&processes);
            } else if !self.struck() {
                disturb::change(self, &mut random, &processes)?;
            }
        }
        Ok(())
    }

    fn strike(&mut self, processes: &[Traced], random: &mut Random) {
        let plan = self.plan;
        let hit = |process: &Traced, random: &mut Random| match plan.strike {
            Strike::Nothing => false,
            Strike::Program => process.part == Part::Program,
            Strike::Worker => process.part == Part::Worker,
            Strike::Front => process.part == Part::Front,
            Strike::Manager => process.part == Part::Manager,
            Strike::Subset => random.below(2) == 0,
        };
        let mut chosen: Vec<_> = processes.iter().filter(|process| hit(process, random)).collect();
        let fronts = |list: &[&Traced]| list.iter().any(|process| process.part == Part::Front);
        let managers = |list: &[&Traced]| list.iter().any(|process| process.part == Part::Manager);
        if plan.spare_one_guard && fronts(&chosen) && managers(&chosen) {
            chosen.retain(|process| !matches!(process.part, Part::Worker | Part::Front));
        }
        self.killed = chosen.iter().map(|process| **process).collect();
        chosen.iter().for_each(|process| send(process.id, Signal::KILL));
    }

    fn await_jobs(&mut self, interrupt: &Interrupt) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            interrupt.check()?;
            let mut running = false;
            for job in &mut self.jobs {
                running |= job.try_wait()?.is_none();
            }
            if !running {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("HANG: a job does not end\n{}", what_they_do(&marked(&self.mark)));
            }
            if self.plan.stops {
                continue_fronts(&marked(&self.mark));
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Judges statuses and words, and adds up what the programs have done.
    fn judge(&mut self, counts: &mut Counts) -> Result<()> {
        let tight = self.plan.swap != Swap::Roomy || self.plan.faults.is_some();
        for number in 0..self.jobs.len() {
            let status = self.jobs[number].wait()?;
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
            let name = format!("job-{number}");
            let (said, words) = (self.text(&name, "out"), self.text(&name, "err"));
            let last =
                words.lines().rev().take(12).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n");
            // A page that cannot be read from the swap file is denied: by SIGBUS, or by the system call that wants it.
            let unreadable = |text: &str| text.contains("could not be read from the swap file");
            let denied = self.plan.faults.is_some_and(|(reads, _)| reads > 0)
                && (unreadable(&words) || unreadable(&self.text("daemon", "err")));
            let wrong = ["MISMATCH", "panicked"].iter().any(|word| words.contains(word));
            let failed = words.contains("FAILED") || NEVER.contains(&code);
            if wrong || failed && !(denied && DENIED.contains(&code)) {
                bail!("{name} ended with status {code}:\n{last}");
            }
            let killed = code == 137 && (tight && words.contains("uzswap:") || words.contains("out of memory"));
            let explained = code == 0 || self.struck() || killed || denied && DENIED.contains(&code);
            if !explained {
                bail!("{name} ended with status {code}, and nothing was killed:\n{last}");
            }
            for line in said.lines() {
                let mut parts = line.split(' ');
                let (Some(name), Some(done), Some(refused)) = (parts.next(), parts.next(), parts.next()) else {
                    continue;
                };
                let sum = counts.entry(name.to_owned()).or_default();
                *sum = (sum.0 + done.parse::<u64>()?, sum.1 + refused.parse::<u64>()?);
            }
        }
        Ok(())
    }

    /// Stops the daemon, which must have as many descriptors as in the beginning, and must end with status 0.
    fn stop_daemon(&mut self, before: Vec<String>) -> Result<()> {
        let end = Instant::now() + GONE_WITHIN;
        // Jobs leave with a moment's delay.
        while self.plan.check_descriptors
            && !self.struck()
            && self.manager_descriptors().is_some_and(|now| now.len() > before.len())
        {
            if Instant::now() > end {
                let now = self.manager_descriptors().unwrap_or_default();
                bail!(
                    "the manager had {} descriptors and has {}:\n{before:?}\n{now:?}\n{}",
                    before.len(),
                    now.len(),
                    what_they_do(&marked(&self.mark))
                );
            }
            sleep(Duration::from_millis(50));
        }
        if !self.struck() {
            disturb::await_empty(self)?;
        }
        let Some(daemon) = &mut self.daemon else { return Ok(()) };
        send(daemon.id(), Signal::TERM);
        let end = Instant::now() + DAEMON_WITHIN;
        let status = loop {
            if let Some(status) = daemon.try_wait()? {
                break status;
            }
            if Instant::now() > end {
                bail!("HANG: the daemon does not stop\n{}", what_they_do(&marked(&self.mark)));
            }
            sleep(Duration::from_millis(20));
        };
        let words = self.text("daemon", "err");
        if words.contains("panicked") || !(status.success() || self.struck()) {
            bail!("the daemon ended with {status}:\n{words}");
        }
        Ok(())
    }

    fn await_nothing(&self) -> Result<()> {
        let end = Instant::now() + GONE_WITHIN;
        loop {
            let left = marked(&self.mark);
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > end {
                // The first process of a pid namespace whose worker was killed with front and manager waits until it is killed from outside
                // (docs/decisions/0002-tether.md).
                if !left.iter().all(|process| is_first_without_worker(process.id, &self.killed)) {
                    bail!("processes left behind\n{}", what_they_do(&left));
                }
                left.iter().for_each(|process| send(process.id, Signal::KILL));
            }
            sleep(Duration::from_millis(20));
        }
    }
}

/// Continues each stopped front. A front stops when its program is stopped, and it is the shell that continues both.
fn continue_fronts(processes: &[Traced]) {
    let stopped = |process: &&Traced| process.part == Part::Front && is_stopped(process.id);
    processes.iter().filter(stopped).for_each(|front| send(front.id, Signal::CONT));
}

fn send(id: u32, signal: Signal) {
    // It may have ended.
    if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        let _ = kill_process(id, signal);
    }
}

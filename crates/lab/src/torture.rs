//! `uzswap lab torture`: programs that check every byte, under tiny limits, while what they rely on is changed and killed.
//!
//! 1. A round is one manager, or one daemon, with some victims (`programs/victim.c`). Its plan follows from its seed alone; the
//!    instants at which threads meet do not.
//! 2. During a round parameters and limits change, groups come and go and processes move between them, processes are stopped and
//!    continued, accesses to the swap file fail, and at a random instant some processes are killed.
//! 3. After each round there may be no wrong byte, no hang, no panic, no unexplained status, and nothing left: no process, file
//!    or descriptor, and in a daemon no page, slot or space on disk. A page that cannot be read may end its program, by SIGBUS. The first failure ends the run with the command that repeats the round.
//!
//! - `plan`: what a round does; `round`: does it and judges; `disturb`: what is changed meanwhile; `traces`: which processes belong to a round

mod disturb;
mod plan;
mod round;
mod traces;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::program::{Interrupt, Scratch, build, tell};
use plan::Plan;

const VICTIM: &str = include_str!("../programs/victim.c");

/// What is known to fail today, and is left out unless the user names another list: nothing. An entry goes when its defect is mended.
/// Other names are those of the victim's operations; `all-guards`, the kill of front, manager
/// and workers at once; and `descriptors`, the check that a daemon's manager has closed those of ended jobs after ten seconds.
pub const KNOWN_OPEN: &str = "";

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub struct TortureOptions {
    /// How long; at least one round is run.
    pub time: Duration,
    /// Seed of the first round; each round has the next one.
    pub seed: u64,
    /// Most programs at once.
    pub programs: u64,
    /// The limit of each program, in bytes; None: another one each round.
    pub limit: Option<u64>,
    /// Operations to leave out, separated by commas.
    pub without: String,
}

/// Done and refused operations, by name.
pub(crate) type Counts = BTreeMap<String, (u64, u64)>;

/// Runs rounds until the time is up, or until the first failure, which is the error.
pub fn run(options: &TortureOptions) -> Result<()> {
    let interrupt = Interrupt::catch()?;
    let scratch = Scratch::new()?;
    let victim = build("victim", VICTIM, &scratch, &interrupt)?;
    let start = Instant::now();
    let (mut counts, mut rounds) = (Counts::new(), 0);
    loop {
        let plan = Plan::new(options, options.seed + rounds);
        let began = Instant::now();
        let ended = round::run(&plan, &victim, &scratch, &interrupt, &mut counts);
        interrupt.check()?;
        let word = if ended.is_ok() { "ok" } else { "FAILED" };
        tell!("{word:<7}{plan} ({:.1} s)", began.elapsed().as_secs_f64())?;
        if let Err(error) = ended {
            let limit = options.limit.map_or_else(String::new, |limit| format!(" --limit {limit}"));
            bail!(
                "{error:#}\nto repeat this round: uzswap lab torture --minutes 0 --seed {} --programs {}{limit} --without '{}'",
                plan.seed,
                options.programs,
                options.without
            );
        }
        rounds += 1;
        if start.elapsed() >= options.time {
            break;
        }
    }
    tell!("{rounds} rounds; left out: {}", options.without)?;
    tell!("{:<18}{:>10}{:>10}", "operation", "done", "refused")?;
    for (name, (done, refused)) in &counts {
        tell!("{name:<18}{done:>10}{refused:>10}")?;
    }
    Ok(())
}

//! What a round does, made from its seed.

use std::fmt;
use std::time::Duration;

use super::TortureOptions;

/// A small generator of pseudo-random numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    pub(crate) fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
}

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strike {
    Nothing,
    Program,
    Worker,
    Front,
    Manager,
    /// Each process with even chances.
    Subset,
}

/// How much the swap file may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Swap {
    Roomy,
    Tiny,
    None,
}

/// The plan of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub seed: u64,
    pub daemon: bool,
    pub programs: u64,
    /// Of each program, in bytes.
    pub limit: u64,
    /// MiB that each program works on.
    pub data: u64,
    pub seconds: u64,
    pub compressor: &'static str,
    pub zpool: &'static str,
    pub swap: Swap,
    /// How many of a thousand reads, and writes, of the swap file fail.
    pub faults: Option<(u64, u64)>,
    /// Whether groups are made, changed and removed, and processes are moved between them.
    pub groups: bool,
    pub strike: Strike,
    /// When to strike, after the start.
    pub strike_at: Duration,
    /// Whether processes are stopped and continued.
    pub stops: bool,
    pub spare_one_guard: bool,
    pub check_descriptors: bool,
    /// Operations that the victims leave out.
    pub without: String,
    /// For what is chosen during the round.
    pub random: Random,
}

pub(crate) const COMPRESSORS: [&str; 4] = ["lz4", "lzo-rle", "zstd", "deflate"];
pub(crate) const ZPOOLS: [&str; 2] = ["zsmalloc", "zbud"];

impl Plan {
    pub(crate) fn new(options: &TortureOptions, seed: u64) -> Plan {
        let mut random = Random(seed);
        let limit = options.limit.unwrap_or((8 + random.below(12)) << 20);
        let strikes = [
            Strike::Nothing,
            Strike::Nothing,
            Strike::Nothing,
            Strike::Program,
            Strike::Worker,
            Strike::Front,
            Strike::Manager,
            Strike::Subset,
        ];
        let seconds = 2 + random.below(4);
        let leaves_out = |wanted| options.without.split(',').any(|name| name == wanted);
        Plan {
            seed,
            daemon: random.below(3) == 0,
            programs: 1 + random.below(options.programs),
            limit,
            data: (limit >> 20) * (15 + random.below(15)) / 10,
            seconds,
            compressor: random.one_of(&COMPRESSORS),
            zpool: random.one_of(&ZPOOLS),
            swap: random.one_of(&[Swap::Roomy, Swap::Roomy, Swap::Roomy, Swap::Tiny, Swap::None]),
            faults: match random.below(8) {
                0 => Some((1 + random.below(20), 0)),
                1 => Some((0, 1 + random.below(400))),
                2 => Some((1 + random.below(10), random.below(400))),
                _ => None,
            },
            groups: random.below(2) == 0,
            strike: random.one_of(&strikes),
            strike_at: Duration::from_millis(300 + random.below(seconds * 1000)),
            stops: random.below(3) == 0,
            spare_one_guard: leaves_out("all-guards"),
            check_descriptors: !leaves_out("descriptors"),
            without: options.without.clone(),
            random,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { seed, programs, compressor, zpool, swap, strike, .. } = self;
        let manager = if self.daemon { "daemon" } else { "run" };
        let (limit, data) = (self.limit >> 20, self.data);
        write!(
            f,
            "seed {seed}: {manager}, {programs} of {data} MiB in {limit} MiB, {compressor}, {zpool}, swap {swap:?}, "
        )?;
        write!(f, "kills {strike:?}{}", if self.stops { ", stops" } else { "" })?;
        write!(f, "{}", if self.groups { ", groups" } else { "" })?;
        self.faults.map_or(Ok(()), |(reads, writes)| write!(f, ", faults of {reads} reads and {writes} writes in 1000"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_plan() {
        let options = TortureOptions {
            time: Duration::ZERO,
            seed: 1,
            programs: 3,
            limit: None,
            without: "guard,all-guards".to_owned(),
        };
        let plans: Vec<Plan> = (0..100).map(|seed| Plan::new(&options, seed)).collect();
        assert!((0..100).all(|seed| Plan::new(&options, seed) == plans[seed as usize]));
        assert!(plans.iter().all(|plan| plan.spare_one_guard && (1..=3).contains(&plan.programs)));
        assert!(
            plans.iter().any(|plan| plan.groups) && plans.iter().any(|plan| plan.faults.is_some_and(|it| it.0 > 0))
        );
        for strike in [Strike::Nothing, Strike::Worker, Strike::Subset] {
            assert!(plans.iter().any(|plan| plan.strike == strike && plan.daemon), "{strike:?}");
        }
    }
}

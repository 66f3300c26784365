//! Any sequence of operations, with any faults, against a model that is a map.

use crate::common::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_engine::*;

#[derive(Debug, Clone)]
enum Step {
    SwapOut { kind: u8, seed: u64 },
    Load { which: prop::sample::Index },
    Dup { which: prop::sample::Index },
    Invalidate { which: prop::sample::Index },
    Shrink { bytes: u64 },
    Compact,
    SetCompressor { index: usize },
    SetCap { pages: u64 },
    SetThreshold { percent: u8 },
    Fault { kind: u8, on: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<prop::sample::Index>;
    prop_oneof![
        10 => (0u8..4, 0u64..50).prop_map(|(kind, seed)| Step::SwapOut { kind, seed }),
        4 => which().prop_map(|which| Step::Load { which }),
        2 => which().prop_map(|which| Step::Dup { which }),
        6 => which().prop_map(|which| Step::Invalidate { which }),
        3 => prop_oneof![0u64..100_000, Just(u64::MAX)].prop_map(|bytes| Step::Shrink { bytes }),
        1 => Just(Step::Compact),
        1 => (0usize..4).prop_map(|index| Step::SetCompressor { index }),
        1 => (0u64..40).prop_map(|pages| Step::SetCap { pages }),
        1 => (0u8..=100).prop_map(|percent| Step::SetThreshold { percent }),
        2 => (0u8..5, any::<bool>()).prop_map(|(kind, on)| Step::Fault { kind, on }),
    ]
}

fn content(kind: u8, seed: u64) -> Page {
    match kind {
        0 => page(seed),
        1 => noise(seed),
        2 => [seed as u8; PAGE_SIZE],
        _ => std::array::from_fn(|i| (i as u64 / (seed + 1)) as u8),
    }
}

fn run(swap: bool, limit: Option<u64>, steps: Vec<Step>) {
    let config = Config { max_pool_bytes: 30 * 4096, swap_limit_bytes: limit.map(|pages| pages * 4096), ..ROOMY };
    let (zswap, faults) = zswap(config, swap);
    // One element for each reference.
    let mut model: Vec<(Slot, Page)> = Vec::new();
    for step in steps {
        let pick = |which: prop::sample::Index| (!model.is_empty()).then(|| which.index(model.len()));
        match step {
            Step::SwapOut { kind, seed } => {
                let page = content(kind, seed);
                match zswap.swap_out(&page, Home::ROOT) {
                    Ok(slot) => {
                        assert!(model.iter().all(|(other, _)| *other != slot), "a slot in use is given out");
                        model.push((slot, page));
                    }
                    Err(SwapOutError::Io(_)) => assert!(faults.write_errors.load(Relaxed)),
                    Err(SwapOutError::NoSpace) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Load { which } => {
                if let Some(index) = pick(which) {
                    let (slot, page) = &model[index];
                    let mut loaded = [0; PAGE_SIZE];
                    match zswap.load(*slot, &mut loaded) {
                        Ok(_) => assert!(loaded == *page, "wrong bytes"),
                        Err(LoadError::Io(_)) => assert!(faults.read_errors.load(Relaxed)),
                        Err(LoadError::Corrupt) => assert!(faults.damaged_reads.load(Relaxed)),
                    }
                }
            }
            Step::Dup { which } => {
                if let Some(index) = pick(which) {
                    zswap.dup(model[index].0);
                    model.push(model[index]);
                }
            }
            Step::Invalidate { which } => {
                if let Some(index) = pick(which) {
                    zswap.invalidate(model.swap_remove(index).0);
                }
            }
            Step::Shrink { bytes } => {
                let before = zswap.pool_bytes();
                assert_eq!(zswap.shrink(bytes), before - zswap.pool_bytes());
            }
            Step::Compact => {
                let before = zswap.pool_bytes();
                assert_eq!(zswap.compact(), before - zswap.pool_bytes());
            }
            Step::SetCompressor { index } => zswap.set_compressor(Compressor::ALL[index]),
            Step::SetCap { pages } => zswap.set_max_pool_bytes(pages * 4096),
            Step::SetThreshold { percent } => zswap.set_accept_threshold(percent),
            Step::Fault { kind, on } => fault(&faults, kind).store(on, Relaxed),
        }
        zswap.check_valid();
    }
    (0..5).for_each(|kind| fault(&faults, kind).store(false, Relaxed));
    for (slot, page) in model {
        expect(&zswap, slot, &page);
        zswap.invalidate(slot);
    }
    zswap.check_valid();
    let counters = zswap.counters();
    assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
}

fn fault(faults: &Faults, kind: u8) -> &AtomicBool {
    match kind {
        0 => &faults.write_errors,
        1 => &faults.disk_full,
        2 => &faults.read_errors,
        3 => &faults.damaged_reads,
        _ => &faults.no_memory,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn every_page_comes_out_as_it_went_in(
        swap in prop::bool::weighted(0.8),
        limit in prop::option::of(0u64..60),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        run(swap, limit, steps);
    }
}

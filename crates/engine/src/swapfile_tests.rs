//! Tests of disk space: large requests are sequential, limits hold, emptied clusters are given back.

use super::*;
use proptest::prelude::*;

#[test]
fn large_requests_are_sequential() {
    let mut space = DiskSpace::new(None);
    assert_eq!(space.allocate(CLUSTER), Some(Run { start: 0, len: 256 }));
    assert_eq!(space.allocate(CLUSTER), Some(Run { start: 256, len: 256 }));
    assert_eq!(space.free(100), None);
    assert_eq!(space.allocate(CLUSTER), Some(Run { start: 512, len: 256 }), "rather than a block in between");
    assert_eq!(space.allocate(1), Some(Run { start: 100, len: 1 }), "a single page goes into the gap");
}

#[test]
fn the_limit_is_exact() {
    let mut space = DiskSpace::new(Some(300 * 4096 + 17));
    assert_eq!(space.allocate(CLUSTER), Some(Run { start: 0, len: 256 }));
    assert_eq!(space.allocate(CLUSTER), Some(Run { start: 256, len: 44 }));
    assert_eq!(space.allocate(1), None);
    assert_eq!(DiskSpace::new(Some(4095)).allocate(1), None);
}

#[test]
fn an_empty_cluster_waits_for_its_discard() {
    let mut space = DiskSpace::new(Some(256 * 4096));
    space.allocate(2).unwrap();
    assert_eq!(space.free(0), None);
    let emptied = space.free(1).unwrap();
    assert_eq!(emptied.range(), (0, 1 << 20));
    assert_eq!(space.allocate(1), None);
    space.discarded(emptied);
    assert_eq!(space.allocate(1), Some(Run { start: 0, len: 1 }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_block_has_two_owners(
        limit in prop::option::of(0u64..2000),
        steps in prop::collection::vec((1usize..=CLUSTER, any::<bool>(), any::<prop::sample::Index>()), 1..150),
    ) {
        let mut space = DiskSpace::new(limit.map(|blocks| blocks * PAGE_SIZE as u64));
        let mut model: Vec<u32> = Vec::new();
        for (count, allocate, which) in steps {
            if allocate {
                match space.allocate(count) {
                    Some(run) => {
                        prop_assert!((1..=count as u32).contains(&run.len));
                        model.extend(run.start..run.start + run.len);
                    }
                    None => prop_assert_eq!(Some(model.len() as u64), limit, "space is left"),
                }
            } else {
                let first = if model.is_empty() { 0 } else { which.index(model.len()) };
                for block in model.drain(first..model.len().min(first + count)).collect::<Vec<_>>() {
                    if let Some(emptied) = space.free(block) {
                        space.discarded(emptied);
                    }
                }
            }
            space.check_valid(model.iter().copied());
        }
        prop_assert_eq!(space.used() as usize, model.len());
    }
}

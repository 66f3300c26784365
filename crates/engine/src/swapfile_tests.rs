//! Tests of disk space: requests are sequential, limits hold, waste is bounded, emptied clusters are given back.

use super::*;
use proptest::prelude::*;

const MIB: u32 = CLUSTER;

fn run(start: u32, len: u32) -> Option<Run> {
    Some(Run { start, len })
}

fn free(space: &mut DiskSpace, run: Run) {
    if let Some(emptied) = space.free(run) {
        space.discarded(emptied);
    }
}

#[test]
fn large_requests_are_sequential() {
    let mut space = DiskSpace::new(None);
    assert_eq!(space.allocate(MIB), run(0, MIB));
    assert_eq!(space.allocate(MIB), run(MIB, MIB));
    assert_eq!(space.free(Run { start: 100, len: PAGE }), None);
    assert_eq!(space.allocate(MIB), run(2 * MIB, MIB), "rather than a page in between");
    assert_eq!(space.allocate(PAGE - 1), run(100, PAGE - 1), "a single page goes into the gap");
    assert_eq!(space.allocate(1), run(100 + PAGE - 1, 1), "and what fits beside it");
}

#[test]
fn one_write_follows_the_other() {
    let mut space = DiskSpace::new(None);
    assert_eq!(space.allocate(5000), run(0, 5000));
    assert_eq!(space.allocate(5000), run(5000, MIB - 5000), "what is left is long enough");
    assert_eq!(space.allocate(5000), run(MIB, 5000));
}

#[test]
fn the_limit_is_exact() {
    let mut space = DiskSpace::new(Some(300 * 4096 + 17));
    assert_eq!(space.allocate(MIB), run(0, MIB));
    assert_eq!(space.allocate(MIB), run(MIB, 44 * PAGE));
    assert_eq!(space.allocate(1), None);
    assert_eq!(space.used_bytes(), 300 * 4096);
    assert_eq!(DiskSpace::new(Some(4095)).allocate(1), None);
}

#[test]
fn at_the_limit_the_longest_run_is_given_out() {
    let mut space = DiskSpace::new(Some(1 << 20));
    space.allocate(MIB).unwrap();
    for (start, len) in [(1000, 3), (2000, 17), (3000, 5)] {
        assert_eq!(space.free(Run { start, len }), None);
    }
    assert_eq!(space.allocate(4), run(2000, 4), "the first that is long enough");
    assert_eq!(space.allocate(PAGE), run(2004, 13));
    assert_eq!(space.allocate(PAGE), run(3000, 5));
    assert_eq!(space.allocate(2), run(1000, 2));
}

#[test]
fn the_file_grows_only_while_more_than_half_of_it_is_in_use() {
    let mut space = DiskSpace::new(None);
    (0..4).for_each(|_| assert!(space.allocate(MIB).is_some()));
    let pages: Vec<u32> = (0..4 * MIB).step_by(PAGE as usize).collect();
    let free_every = |space: &mut DiskSpace, first: usize, step: usize| {
        pages[first..].iter().step_by(step).for_each(|&start| free(space, Run { start, len: PAGE }));
    };
    free_every(&mut space, 0, 2);
    assert_eq!(space.allocate(MIB), run(4 * MIB, MIB), "half of it: one more, rather than single pages");
    free_every(&mut space, 1, 4);
    let Run { start, len } = space.allocate(MIB).unwrap();
    assert!(start < 4 * MIB && len == 3 * PAGE, "less than half: what there is");
}

#[test]
fn an_empty_cluster_waits_for_its_discard() {
    let mut space = DiskSpace::new(Some(1 << 20));
    space.allocate(2).unwrap();
    assert_eq!(space.free(Run { start: 0, len: 1 }), None);
    let emptied = space.free(Run { start: 1, len: 1 }).unwrap();
    assert_eq!(emptied.range(), (0, 1 << 20));
    assert_eq!(space.allocate(1), None);
    space.discarded(emptied);
    assert_eq!(space.allocate(1), run(0, 1));
}

#[test]
#[should_panic = "freed or given out twice"]
fn what_is_free_cannot_be_freed() {
    let mut space = DiskSpace::new(None);
    space.allocate(100).unwrap();
    let _ = space.free(Run { start: 99, len: 2 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_unit_has_two_owners(
        limit in prop::option::of(0u64..800),
        steps in prop::collection::vec(
            (prop_oneof![1..=PAGE, 1..=CLUSTER], 1usize..300, any::<bool>(), any::<prop::sample::Index>()), 1..150),
    ) {
        let mut space = DiskSpace::new(limit.map(|pages| pages * PAGE_SIZE as u64));
        let mut model: Vec<Run> = Vec::new();
        for (want, count, allocate, which) in steps {
            if allocate {
                let longest = (1..LISTS).rev().find(|&list| space.lists[list].head().is_some());
                match space.allocate(want) {
                    // Given out in one piece, freed in pieces.
                    Some(Run { start, len }) => {
                        prop_assert!((1..=want).contains(&len));
                        prop_assert!(len == want || len >= LONG || longest.is_none_or(|list| list < fitting(want)));
                        let part = len.min(1 + want % 40);
                        let parts = (start..start + len).step_by(part as usize);
                        model.extend(parts.map(|at| Run { start: at, len: part.min(start + len - at) }));
                    }
                    None => prop_assert_eq!(Some(space.used_bytes() / PAGE_SIZE as u64), limit, "space is left"),
                }
            } else {
                let first = if model.is_empty() { 0 } else { which.index(model.len()) };
                for run in model.drain(first..model.len().min(first + count)).collect::<Vec<_>>() {
                    free(&mut space, run);
                }
            }
            space.check_valid(model.iter().copied());
        }
        prop_assert_eq!(space.used, model.iter().map(|run| run.len).sum::<u32>());
    }
}

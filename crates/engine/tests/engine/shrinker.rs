//! Writeback under pressure: how much is on offer, what is passed over, where the scan ends. Each test quotes its line of the
//! contract.

use crate::common::*;
use uzswap_engine::*;

const ROOT: Group = Group::ROOT;

/// What a list of incompressible pages offers: each is worth a whole page.
fn noise_list(zswap: &Zswap, pages: u64) -> Vec<Slot> {
    (0..pages).map(|seed| zswap.swap_out(&noise(seed), Home::ROOT).unwrap()).collect()
}

// "size of the group's LRU on that node"
#[test]
fn a_count_is_of_one_group_and_node() {
    let (zswap, _) = zswap(ROOMY, true);
    let parent = group(&zswap);
    let child = zswap.create_group(parent).unwrap();
    for (group, node, pages) in [(parent, 0, 5), (parent, 2, 7), (child, 0, 11)] {
        for seed in 0..pages {
            zswap.swap_out(&noise(seed), Home { group, node }).unwrap();
        }
    }
    let counts =
        [(parent, 0), (parent, 1), (parent, 2), (child, 0), (ROOT, 0)].map(|(g, n)| zswap.shrinker_count(g, n));
    assert_eq!(counts, [5, 0, 7, 11, 0]);
    assert_eq!((zswap.shrinker_scan(parent, 2, 14), zswap.shrinker_count(parent, 2)), (7, 0));
    assert_eq!((zswap.shrinker_count(parent, 0), zswap.shrinker_count(child, 0)), (5, 11));
}

// "scaled by how well the entries compress (an entry that compresses well is worth keeping)"
#[test]
fn what_compresses_well_is_offered_less() {
    let (zswap, _) = zswap(ROOMY, true);
    fill(&zswap, 0..100, Home::ROOT);
    let counters = zswap.counters();
    assert_eq!(zswap.shrinker_count(ROOT, 0), 100 * counters.root.zswap / counters.root.zswapped);
}

// "less a protected part that grows with what was recently loaded or swapped in from disk"
#[test]
fn loads_and_reads_from_disk_protect() {
    let (zswap, _) = zswap(ROOMY, true);
    let disk = noise_list(&zswap, 16);
    zswap.shrink(u64::MAX);
    let pool = noise_list(&zswap, 100);
    assert_eq!(zswap.shrinker_count(ROOT, 0), 100);
    for (slot, seed) in pool.iter().zip(0..10) {
        expect(&zswap, *slot, &noise(seed));
    }
    assert_eq!(zswap.shrinker_count(ROOT, 0), 90);
    disk.iter().zip(0..).for_each(|(slot, seed)| assert_eq!(expect(&zswap, *slot, &noise(seed)), Origin::Disk));
    assert_eq!(zswap.shrinker_count(ROOT, 0), 74);
    // A fill value says nothing of the list.
    let filled = zswap.swap_out(&[7; PAGE_SIZE], Home::ROOT).unwrap();
    expect(&zswap, filled, &[7; PAGE_SIZE]);
    assert!((73..=74).contains(&zswap.shrinker_count(ROOT, 0)));
}

// "and decays as the list is scanned"
#[test]
fn protection_is_used_up() {
    let (zswap, _) = zswap(ROOMY, true);
    let slots = noise_list(&zswap, 40);
    // Old entries stay at the cold end; the newest is loaded over and over.
    for _ in 0..20 {
        expect(&zswap, slots[39], &noise(39));
    }
    assert_eq!(zswap.shrinker_count(ROOT, 0), 20);
    assert_eq!(zswap.shrinker_scan(ROOT, 0, 10), 0, "second chances");
    assert_eq!(zswap.shrinker_count(ROOT, 0), 30);

    // Everything protected: the next round gets at it.
    for _ in 0..60 {
        expect(&zswap, slots[39], &noise(39));
    }
    assert_eq!(zswap.shrinker_count(ROOT, 0), 0);
    assert_eq!(zswap.shrinker_count(ROOT, 0), 20);

    // A list that grows sheds it.
    noise_list(&zswap, 10);
    assert!(zswap.shrinker_count(ROOT, 0) >= 35, "{}", zswap.shrinker_count(ROOT, 0));
}

// "Each entry has one second chance (a referenced bit) before it is written"
#[test]
fn each_entry_has_one_second_chance() {
    let (zswap, _) = zswap(ROOMY, true);
    let slots = fill(&zswap, 0..10, Home::ROOT);
    assert_eq!(zswap.shrinker_scan(ROOT, 0, 10), 0);
    assert_eq!(zswap.shrinker_scan(ROOT, 0, 4), 4);
    assert_eq!(on_disk(&zswap, &slots[..4], 0), 4, "the coldest");
    assert_eq!(zswap.counters().written_back_pages, 4);
    zswap.check_valid();
}

// "Stops when it meets an entry that is being faulted at that moment"
#[test]
fn a_scan_ends_at_an_entry_in_flight() {
    let (zswap, _) = zswap(ROOMY, true);
    let slots = fill(&zswap, 0..10, Home::ROOT);
    zswap.shrinker_scan(ROOT, 0, 10);
    // Loaded, not given up yet: its fault is under way.
    expect(&zswap, slots[3], &page(3));
    assert_eq!(zswap.shrinker_scan(ROOT, 0, 10), 3);
    assert_eq!(expect(&zswap, slots[4], &page(4)), Origin::Pool);
    assert_eq!(expect(&zswap, slots[3], &page(3)), Origin::Pool);
    zswap.check_valid();
}

// "shrinker_enabled"; "Opt-out per group with memory.zswap.writeback"
#[test]
fn the_shrinker_can_be_switched_off() {
    let (zswap, _) = zswap(ROOMY, true);
    noise_list(&zswap, 10);
    zswap.set_shrinker_enabled(false);
    assert_eq!((zswap.shrinker_count(ROOT, 0), zswap.shrinker_scan(ROOT, 0, 100)), (0, 0));
    zswap.set_shrinker_enabled(true);
    zswap.set_writeback(ROOT, false).unwrap();
    assert_eq!((zswap.shrinker_count(ROOT, 0), zswap.shrinker_scan(ROOT, 0, 100)), (0, 0));
    zswap.set_writeback(ROOT, true).unwrap();
    assert_eq!((zswap.shrinker_count(ROOT, 0), zswap.shrinker_scan(ROOT, 0, 20)), (10, 10));
}

// The kernel series' first version: memory.zswap.shrinker.enabled
#[test]
fn a_group_can_opt_out_of_the_shrinker_alone() {
    let (zswap, _) = zswap(ROOMY, true);
    let parent = group(&zswap);
    let child = zswap.create_group(parent).unwrap();
    let own = fill(&zswap, 0..40, of(child));
    zswap.set_group_shrinker(parent, false).unwrap();
    zswap.shrinker_scan(child, 0, 40);
    assert_eq!(
        (zswap.shrinker_count(child, 0), zswap.shrinker_scan(child, 0, 100), on_disk(&zswap, &own, 0)),
        (0, 0, 0)
    );
    // At a limit it is written back all the same.
    assert!(zswap.shrink_below(child, 4096) > 0);
    zswap.set_group_shrinker(parent, true).unwrap();
    assert!(zswap.shrinker_scan(child, 0, 100) > 0);
    zswap.check_valid();
}

#[test]
fn without_a_swap_file_nothing_is_on_offer() {
    let (zswap, _) = zswap(ROOMY, false);
    noise_list(&zswap, 10);
    assert_eq!((zswap.shrinker_count(ROOT, 0), zswap.shrinker_scan(ROOT, 0, 100)), (0, 0));
    let gone = group(&zswap);
    zswap.remove_group(gone).unwrap();
    assert_eq!((zswap.shrinker_count(gone, 0), zswap.shrinker_scan(gone, 0, 1)), (0, 0));
}

//! The policies of the past do what they did: that is why they were replaced.

use crate::common::*;
use uzswap_engine::*;

fn with(policy: Policy) -> Zswap {
    zswap(Config { policy, max_pool_bytes: 64 * 4096, accept_threshold_percent: 50, ..ROOMY }, true).0
}

#[test]
fn one_page_per_shrink() {
    let zswap = with(Policy::OnePagePerShrink);
    for seed in 0..64 {
        zswap.swap_out(&noise(seed), Home::ROOT).unwrap();
    }
    for run in 1..=3 {
        assert_eq!(zswap.shrink_until_accepting(), 4096);
        assert_eq!(zswap.counters().written_back_pages, run);
    }
    zswap.check_valid();
}

#[test]
fn one_list_for_all_takes_a_neighbours_pages() {
    let zswap = with(Policy::GlobalLru);
    let (quiet, busy) = (group(&zswap), group(&zswap));
    let old = fill(&zswap, 0..16, of(quiet));
    let young = fill(&zswap, 16..32, of(busy));
    let opted_out = group(&zswap);
    let kept = fill(&zswap, 32..40, of(opted_out));
    zswap.set_writeback(opted_out, false).unwrap();
    zswap.check_valid();
    zswap.shrink(1);
    assert_eq!((on_disk(&zswap, &old, 0), on_disk(&zswap, &young, 16)), (16, 0));
    zswap.remove_group(quiet).unwrap();
    zswap.shrink(u64::MAX);
    assert_eq!((on_disk(&zswap, &young, 16), on_disk(&zswap, &kept, 32)), (16, 0), "no writeback is no writeback");
    zswap.check_valid();
}

#[test]
fn a_list_for_each_pool_takes_turns_between_them() {
    let zswap = with(Policy::PerPoolLru);
    let old = fill(&zswap, 0..16, Home::ROOT);
    zswap.set_compressor(Compressor::Zstd);
    let new = fill(&zswap, 16..32, Home::ROOT);
    zswap.check_valid();
    zswap.shrink(1);
    assert_eq!((on_disk(&zswap, &old, 0), on_disk(&zswap, &new, 16)), (8, 8), "in whatever order they were stored");
}

#[test]
fn a_scan_of_any_length_ends_where_nothing_may_be_written() {
    let zswap = with(Policy::GlobalLru);
    let opted_out = group(&zswap);
    fill(&zswap, 0..4, of(opted_out));
    zswap.set_writeback(opted_out, false).unwrap();
    assert_eq!(zswap.shrinker_scan(Group::ROOT, 0, u64::MAX), 0);
}

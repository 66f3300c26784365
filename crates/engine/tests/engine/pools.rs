//! Pools that come and go, and folios that leave and come back whole. Each test quotes its line of the contract.

use crate::common::*;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::*;

use Compressor::{Lz4, Zstd};
use Zpool::{Zbud, Zsmalloc};

// "changing it at run time opens a new pool, the old one lives until empty and can be revived"
#[test]
fn a_retired_pool_lives_until_it_is_empty() {
    let (zswap, _) = zswap(ROOMY, true);
    let old = fill(&zswap, 0..2, Home::ROOT);
    zswap.set_compressor(Zstd);
    zswap.set_zpool(Zbud);
    // The one in between was never stored to.
    assert_eq!(zswap.pools(), [(Zstd, Zbud), (Lz4, Zsmalloc)]);
    let new = fill(&zswap, 2..4, Home::ROOT);
    zswap.check_valid();
    zswap.invalidate(old[0]);
    expect(&zswap, old[1], &page(1));
    zswap.invalidate(old[1]);
    assert_eq!(zswap.pools(), [(Zstd, Zbud)]);
    assert_eq!(on_disk(&zswap, &new, 2), 0);
    zswap.check_valid();
}

#[test]
fn a_retired_pool_is_revived_when_it_is_chosen_again() {
    let (zswap, _) = zswap(ROOMY, true);
    fill(&zswap, 0..1, Home::ROOT);
    zswap.set_compressor(Zstd);
    fill(&zswap, 1..2, Home::ROOT);
    zswap.set_compressor(Lz4);
    fill(&zswap, 2..3, Home::ROOT);
    assert_eq!(zswap.pools(), [(Lz4, Zsmalloc), (Zstd, Zsmalloc)]);
    zswap.shrink(u64::MAX);
    assert_eq!(zswap.pools(), [(Lz4, Zsmalloc)]);
    zswap.check_valid();
}

// "One LRU and one shrinker serve all pools"; entries of the old pool are written back first
#[test]
fn the_old_pools_entries_are_the_coldest() {
    let (zswap, _) = zswap(ROOMY, true);
    let old = fill(&zswap, 0..16, Home::ROOT);
    zswap.set_compressor(Zstd);
    let new = fill(&zswap, 16..32, Home::ROOT);
    zswap.shrink(1);
    assert_eq!((on_disk(&zswap, &old, 0), on_disk(&zswap, &new, 16)), (16, 0));
    assert_eq!(zswap.pools(), [(Zstd, Zsmalloc)]);
}

// "max_pool_percent: cap on all pools together"
#[test]
fn the_cap_is_on_all_pools_together() {
    let (zswap, _) = zswap(Config { max_pool_bytes: 30 * 4096, ..ROOMY }, false);
    for (zpool, compressor) in [(Zsmalloc, Lz4), (Zbud, Lz4), (Zbud, Zstd)] {
        zswap.set_zpool(zpool);
        zswap.set_compressor(compressor);
        for seed in 0..10 {
            zswap.swap_out(&noise(seed), Home::ROOT).unwrap();
        }
    }
    assert_eq!((zswap.pools().len(), zswap.counters().pool_total_size), (3, 30 * 4096));
    assert!(zswap.swap_out(&page(0), Home::ROOT).is_err());
    assert_eq!(zswap.counters().pool_limit_hit, 1);
}

// "`zbud` (two objects a page)"
#[test]
fn zbud_keeps_two_pages_in_one() {
    let (zswap, _) = zswap(Config { zpool: Zbud, ..ROOMY }, true);
    let tiny: Page = std::array::from_fn(|i| (i / 64) as u8);
    let slots: Vec<Slot> = (0..100).map(|_| zswap.swap_out(&tiny, Home::ROOT).unwrap()).collect();
    assert_eq!(zswap.pool_bytes(), 50 * 4096);
    zswap.shrink(u64::MAX);
    slots.iter().for_each(|&slot| assert_eq!(expect(&zswap, slot, &tiny), Origin::Disk));
    zswap.check_valid();
}

#[test]
fn zpools_have_the_kernels_names() {
    assert_eq!(Zpool::ALL.map(|zpool| zpool.to_string().parse()), [Ok(Zsmalloc), Ok(Zbud)]);
    let error = "z3fold".parse::<Zpool>().unwrap_err();
    assert_eq!(error.to_string(), "unknown zpool \"z3fold\": there are zsmalloc, zbud");
}

fn folio(pages: u64) -> Vec<Page> {
    (0..pages).map(page).collect()
}

fn load(zswap: &Zswap, slots: &[Slot]) -> (Vec<Page>, Vec<Origin>) {
    let mut pages = vec![[0xcc; PAGE_SIZE]; slots.len()];
    let origins = zswap.load_folio(slots, &mut pages).expect("it can be loaded");
    (pages, origins)
}

#[test]
fn pages_that_are_no_folio_are_counted_as_those_that_make_them_up() {
    let (zswap, _) = zswap(ROOMY, true);
    let pages = folio(21);
    let slots: Vec<Slot> = pages.iter().map(|page| zswap.swap_out(page, Home::ROOT).unwrap()).collect();
    assert!(load(&zswap, &slots).0 == pages);
    let loaded: Vec<usize> = (0..=MAX_FOLIO_ORDER).filter(|&order| zswap.folio_counters(order).zswpin == 1).collect();
    assert_eq!(loaded, [2, 4], "and the last page is none");
    assert!(load(&zswap, &slots[..1]).0 == pages[..1]);
    assert_eq!(zswap.folio_counters(0).zswpin, 1);
    zswap.check_valid();
}

// "Large folios load whole"; "Per folio size": zswpout, zswpin
#[test]
fn folios_of_every_order_leave_and_come_back() {
    let (zswap, _) = zswap(ROOMY, true);
    for order in 0..=MAX_FOLIO_ORDER {
        let pages = folio(1 << order);
        let slots = zswap.swap_out_folio(&pages, Home::ROOT).unwrap();
        let (loaded, origins) = load(&zswap, &slots);
        assert!(loaded == pages && origins.iter().all(|origin| *origin == Origin::Pool));
        slots.into_iter().for_each(|slot| zswap.invalidate(slot));
        let counters = zswap.folio_counters(order);
        assert_eq!(counters, FolioCounters { zswpout: 1, zswpin: 1, ..FolioCounters::default() });
    }
    assert_eq!((zswap.counters().root.zswpout, zswap.counters().stored_pages), (1023, 0));
}

// "All or nothing for a folio. Any failed store removes stale entries of every page of that folio."
#[test]
fn a_folio_is_stored_whole_or_not_at_all() {
    let (zswap, faults) = zswap(ROOMY, false);
    let mut pages = folio(16);
    pages[3] = [0; PAGE_SIZE];
    zswap.swap_out_folio(&pages, Home::ROOT).unwrap();
    let before = zswap.counters();
    faults.no_memory.store(true, Relaxed);
    assert!(matches!(zswap.swap_out_folio(&folio(64), Home::ROOT), Err(SwapOutError::NoSpace)));
    let after = zswap.counters();
    assert_eq!(
        (after.stored_pages, after.root.zswap, after.pool_total_size),
        (16, before.root.zswap, before.pool_total_size)
    );
    assert_eq!((after.root.zswpout, after.root.swpout_zero), (15, 1), "no event of a folio that was refused");
    assert_eq!(zswap.folio_counters(6), FolioCounters { swpout_fallback: 1, ..FolioCounters::default() });
    zswap.check_valid();
}

#[test]
fn a_refused_folio_is_written_in_one_piece() {
    for config in both(Config { max_pool_bytes: 0, ..ROOMY }) {
        let (zswap, faults) = zswap(config, true);
        let mut pages = folio(512);
        pages[100] = [0; PAGE_SIZE];
        let slots = zswap.swap_out_folio(&pages, Home::ROOT).unwrap();
        assert_eq!(
            (faults.writes.load(Relaxed), zswap.counters().root.pswpout),
            (2, 511),
            "1 MiB at most in one write"
        );
        let (loaded, origins) = load(&zswap, &slots);
        assert!(loaded == pages && origins[100] == Origin::SameFilled && origins[101] == Origin::Disk);
        let counters = zswap.folio_counters(9);
        assert_eq!((counters.swpout, counters.swpin, zswap.counters().root.pswpin), (1, 1, 511));
        zswap.check_valid();

        faults.write_errors.store(true, Relaxed);
        assert!(matches!(zswap.swap_out_folio(&pages, Home::ROOT), Err(SwapOutError::Io(_))));
        assert_eq!((zswap.counters().swapped_pages, zswap.counters().swap_current), (511, 511 * 4096));
        zswap.check_valid();
    }
}

#[test]
fn a_folio_that_outgrows_the_disk_leaves_nothing_there() {
    for config in both(Config { max_pool_bytes: 0, swap_limit_bytes: Some(300 * 4096), ..ROOMY }) {
        let (zswap, _) = zswap(config, true);
        assert!(matches!(zswap.swap_out_folio(&folio(512), Home::ROOT), Err(SwapOutError::NoSpace)));
        assert_eq!(zswap.counters().swap_current, 0);
        zswap.check_valid();
    }
}

// "a folio partly in the pool and partly on disk must work too"
#[test]
fn a_folio_partly_on_disk_loads_whole() {
    for config in both(ROOMY) {
        let (zswap, _) = zswap(config, true);
        let mut pages = folio(64);
        pages[5] = [0; PAGE_SIZE];
        pages[6] = [9; PAGE_SIZE];
        let slots = zswap.swap_out_folio(&pages, Home::ROOT).unwrap();
        zswap.shrink(1);
        let (loaded, origins) = load(&zswap, &slots);
        assert!(loaded == pages);
        assert_eq!(origins.iter().filter(|origin| **origin == Origin::Disk).count(), 16);
        assert_eq!(origins.iter().filter(|origin| **origin == Origin::Pool).count(), 46);
        assert_eq!(
            (zswap.folio_counters(6).swpin, zswap.counters().root.pswpin, zswap.counters().root.zswpin),
            (1, 16, 47)
        );
    }
}

#[test]
fn a_folio_that_cannot_be_read_is_an_error() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let slots = zswap.swap_out_folio(&folio(4), Home::ROOT).unwrap();
        zswap.shrink(u64::MAX);
        faults.read_errors.store(true, Relaxed);
        assert!(matches!(zswap.load_folio(&slots, &mut [[0; PAGE_SIZE]; 4]), Err(LoadError::Io(_))));
        faults.read_errors.store(false, Relaxed);
        faults.damaged_reads.store(true, Relaxed);
        assert!(matches!(zswap.load_folio(&slots, &mut [[0; PAGE_SIZE]; 4]), Err(LoadError::Corrupt)));
        assert_eq!((zswap.folio_counters(2).swpin_fallback, zswap.counters().decompress_fail), (2, 1));
    }
}

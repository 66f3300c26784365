//! One test for each line of what is promised.

use crate::common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::*;

// "Exclusive: the entry is gone afterwards"
#[test]
fn an_exclusive_load_is_load_and_invalidate() {
    let (zswap, _) = zswap(ROOMY, false);
    let slot = zswap.swap_out(&page(1), Home::ROOT).unwrap();
    assert_eq!(expect(&zswap, slot, &page(1)), Origin::Pool);
    let before = zswap.counters();
    assert_eq!((before.stored_pages, before.root.zswapped, before.root.zswpout, before.root.zswpin), (1, 4096, 1, 1));
    assert!((1000..3600).contains(&before.root.zswap) && before.pool_total_size >= 4096, "{before:?}");
    zswap.invalidate(slot);
    let after = zswap.counters();
    assert_eq!((after.stored_pages, after.root.zswapped, after.root.zswap, after.pool_total_size), (0, 0, 0, 0));
    zswap.check_valid();
}

#[test]
fn every_owner_has_a_reference() {
    let (zswap, _) = zswap(ROOMY, false);
    let slot = zswap.swap_out(&page(1), Home::ROOT).unwrap();
    zswap.dup(slot);
    zswap.invalidate(slot);
    expect(&zswap, slot, &page(1));
    zswap.invalidate(slot);
    assert_eq!(zswap.counters().stored_pages, 0);
}

#[test]
fn a_page_may_have_more_owners_than_its_entry_can_count() {
    let (zswap, _) = zswap(ROOMY, true);
    let slot = zswap.swap_out(&page(1), Home::ROOT).unwrap();
    for round in 1..=2 {
        (0..20_000 * round).for_each(|_| zswap.dup(slot));
        zswap.check_valid();
        (0..20_000 * round).for_each(|_| zswap.invalidate(slot));
        zswap.check_valid();
        expect(&zswap, slot, &page(1));
        zswap.shrink(u64::MAX);
    }
    zswap.invalidate(slot);
    assert_eq!((zswap.counters().stored_pages, zswap.counters().swap_current), (0, 0));
    zswap.check_valid();
}

// "Same-filled page: keep the fill value alone"
#[test]
fn a_same_filled_page_takes_no_pool_memory() {
    let (zswap, _) = zswap(ROOMY, false);
    let mut filled = [0; PAGE_SIZE];
    filled.as_chunks_mut().0.fill(*b"01234567");
    let slot = zswap.swap_out(&filled, Home::ROOT).unwrap();
    assert_eq!(zswap.pool_bytes(), 0);
    assert_eq!(expect(&zswap, slot, &filled), Origin::SameFilled);
    let counters = zswap.counters();
    assert_eq!(
        (counters.same_filled_pages, counters.stored_pages, counters.root.zswpout, counters.root.zswpin),
        (1, 1, 1, 1)
    );
    filled[4095] ^= 1;
    zswap.swap_out(&filled, Home::ROOT).unwrap();
    assert!(zswap.pool_bytes() > 0);
    zswap.invalidate(slot);
    assert_eq!(zswap.counters().same_filled_pages, 0);
}

#[test]
fn zeros_are_counted_apart_and_no_limit_applies_to_them() {
    let (zswap, _) = zswap(Config { max_pool_bytes: 0, ..ROOMY }, false);
    let slot = zswap.swap_out(&[0; PAGE_SIZE], Home::ROOT).unwrap();
    assert_eq!(expect(&zswap, slot, &[0; PAGE_SIZE]), Origin::SameFilled);
    let counters = zswap.counters();
    assert_eq!(
        (counters.root.swpout_zero, counters.root.swpin_zero, counters.root.zswpout, counters.root.zswpin),
        (1, 1, 0, 0)
    );
    assert_eq!((counters.pool_limit_hit, counters.same_filled_pages), (0, 1));
}

#[test]
fn an_incompressible_page_is_kept_as_it_is() {
    for swap in [true, false] {
        let (zswap, _) = zswap(ROOMY, swap);
        let slot = zswap.swap_out(&noise(1), Home::ROOT).unwrap();
        assert_eq!(expect(&zswap, slot, &noise(1)), Origin::Pool);
        let counters = zswap.counters();
        assert_eq!(
            (counters.stored_incompressible_pages, counters.root.zswap, counters.pool_total_size),
            (1, 4096, 4096)
        );
        zswap.invalidate(slot);
        assert_eq!(zswap.counters().stored_incompressible_pages, 0);
    }
}

// Not of the kernel: after eight pages that do not compress, the codec sees a sample of each, and one page in sixteen whole.
#[test]
fn a_page_that_compresses_is_found_among_those_that_do_not() {
    // Where a sample is taken there is noise, elsewhere there are zeros.
    let hidden = |seed| {
        let mut page = noise(seed);
        page.chunks_exact_mut(512).for_each(|part| part[64..].fill(0));
        page
    };
    for compressor in Compressor::ALL {
        let (zswap, _) = zswap(Config { compressor, ..ROOMY }, false);
        let kept = || zswap.counters().stored_incompressible_pages;
        let store = |pages: &[Page]| -> Vec<Slot> {
            pages.iter().map(|page| zswap.swap_out(page, Home::ROOT).unwrap()).collect()
        };
        let noises: Vec<Page> = (0..100).map(noise).collect();
        let pages: Vec<Page> = (100..200).map(hidden).collect();
        store(&pages[..10]);
        assert_eq!(kept(), 0, "{compressor}: nothing is taken for granted");
        let slots = store(&noises);
        assert_eq!(kept(), 100);
        store(&[page(0)]);
        assert_eq!(kept(), 100, "{compressor}: the sample shows it");
        store(&noises);
        let hidden = store(&pages);
        assert!((200..216).contains(&kept()), "{compressor}: {} of those that do not show", kept() - 200);
        let pairs = slots.iter().zip(&noises).chain(hidden.iter().zip(&pages));
        pairs.for_each(|(slot, page)| assert_eq!(expect(&zswap, *slot, page), Origin::Pool));
        let before = kept();
        zswap.swap_out_folio(&[&noises, &pages[..28]].concat(), Home::ROOT).unwrap();
        assert!((100..116).contains(&(kept() - before)), "{compressor}: {} of a folio", kept() - before);
    }
}

// "At the cap: count pool_limit_hit, mark the pool full, queue the shrink worker, refuse. While marked full: refuse (and count,
// and queue the worker again) until the pool is at or under the accept threshold"
#[test]
fn at_the_cap_stores_are_refused_until_the_accept_threshold() {
    let cap = 100 * 4096;
    let (zswap, _) = zswap(Config { max_pool_bytes: cap, accept_threshold_percent: 50, ..ROOMY }, false);
    let mut slots = Vec::new();
    while zswap.pool_bytes() < cap {
        assert_eq!(zswap.shrink_needed(), None);
        slots.push(zswap.swap_out(&noise(slots.len() as u64), Home::ROOT).unwrap());
    }
    assert_eq!((slots.len(), zswap.counters().pool_limit_hit), (100, 0));
    assert_eq!(zswap.shrink_needed(), Some(cap / 2), "the cap is reached");
    assert!(matches!(zswap.swap_out(&page(0), Home::ROOT), Err(SwapOutError::NoSpace)));
    assert_eq!(zswap.counters().pool_limit_hit, 1);

    // Below the cap but above the threshold: still refused, and counted.
    slots.drain(..49).for_each(|slot| zswap.invalidate(slot));
    assert_eq!(zswap.shrink_needed(), Some(4096));
    assert!(matches!(zswap.swap_out(&page(0), Home::ROOT), Err(SwapOutError::NoSpace)));
    assert_eq!(zswap.counters().pool_limit_hit, 2);

    // At the threshold: accepted, and above it again without having been at the cap: still accepted.
    zswap.invalidate(slots.pop().unwrap());
    assert_eq!(zswap.shrink_needed(), None);
    slots.extend([zswap.swap_out(&noise(1), Home::ROOT).unwrap(), zswap.swap_out(&noise(2), Home::ROOT).unwrap()]);
    assert!(zswap.pool_bytes() > cap / 2);
    zswap.swap_out(&noise(3), Home::ROOT).unwrap();
    assert_eq!((zswap.counters().pool_limit_hit, zswap.shrink_needed()), (2, None));
}

// "100 = no hysteresis"
#[test]
fn a_threshold_of_100_percent_is_no_hysteresis() {
    let (zswap, _) = zswap(Config { max_pool_bytes: 10 * 4096, accept_threshold_percent: 100, ..ROOMY }, true);
    let slots: Vec<_> = (0..10).map(|seed| zswap.swap_out(&noise(seed), Home::ROOT).unwrap()).collect();
    assert_eq!(zswap.shrink_needed(), Some(1));
    zswap.invalidate(slots[0]);
    assert_eq!(zswap.shrink_needed(), None);
    zswap.swap_out(&noise(10), Home::ROOT).unwrap();
    assert_eq!(zswap.counters().pool_limit_hit, 0);
}

// "The caller then writes the page to the swap file, if allowed"
#[test]
fn a_refused_page_goes_straight_to_the_swap_file() {
    for config in both(Config { max_pool_bytes: 0, ..ROOMY }) {
        let (zswap, faults) = zswap(config, true);
        let slot = zswap.swap_out(&page(1), Home::ROOT).unwrap();
        assert_eq!(expect(&zswap, slot, &page(1)), Origin::Disk);
        let counters = zswap.counters();
        assert_eq!(
            (counters.pool_limit_hit, counters.root.pswpout, counters.root.pswpin, counters.root.zswpout),
            (1, 1, 1, 0)
        );
        assert_eq!((counters.swapped_pages, counters.stored_pages, counters.root.zswpwb), (1, 0, 0));
        assert_eq!((faults.bytes_written.load(Relaxed), counters.swap_current), (4096, 4096), "as it is");
        zswap.invalidate(slot);
        assert_eq!((zswap.counters().swap_current, zswap.counters().swapped_pages), (0, 0));
        zswap.check_valid();
    }
}

#[test]
fn a_full_swap_file_is_no_space_and_a_broken_one_an_error() {
    for config in both(Config { max_pool_bytes: 0, swap_limit_bytes: Some(4096), ..ROOMY }) {
        let (zswap, faults) = zswap(config, true);
        faults.write_errors.store(true, Relaxed);
        assert!(matches!(zswap.swap_out(&page(1), Home::ROOT), Err(SwapOutError::Io(_))));
        faults.write_errors.store(false, Relaxed);
        faults.disk_full.store(true, Relaxed);
        assert!(matches!(zswap.swap_out(&page(1), Home::ROOT), Err(SwapOutError::NoSpace)));
        faults.disk_full.store(false, Relaxed);
        zswap.swap_out(&page(1), Home::ROOT).unwrap();
        assert!(matches!(zswap.swap_out(&page(2), Home::ROOT), Err(SwapOutError::NoSpace)), "the limit");
        zswap.check_valid();
    }
}

// "reject_alloc_fail"
#[test]
fn without_memory_a_store_is_refused_and_counted() {
    let (zswap, faults) = zswap(ROOMY, false);
    faults.no_memory.store(true, Relaxed);
    assert!(matches!(zswap.swap_out(&page(1), Home::ROOT), Err(SwapOutError::NoSpace)));
    assert_eq!(zswap.counters().reject_alloc_fail, 1);
    faults.no_memory.store(false, Relaxed);
    zswap.swap_out(&page(1), Home::ROOT).unwrap();
    zswap.check_valid();
}

// "taking the coldest entry"
#[test]
fn shrink_writes_the_coldest_first() {
    for config in both(ROOMY) {
        let (zswap, _) = zswap(config.clone(), true);
        let slots = fill(&zswap, 0..200, Home::ROOT);
        let before = zswap.pool_bytes();
        let freed = zswap.shrink(before / 4);
        assert!(freed >= before / 4, "{freed} of {before}");
        assert_eq!(zswap.pool_bytes(), before - freed);
        let written = zswap.counters().written_back_pages as usize;
        assert!((50..150).contains(&written), "{written}");
        for (i, &slot) in slots.iter().enumerate() {
            let origin = if i < written { Origin::Disk } else { Origin::Pool };
            assert_eq!(expect(&zswap, slot, &page(i as u64)), origin, "page {i}");
        }
        let counters = zswap.counters();
        assert_eq!((counters.root.zswpwb, counters.root.pswpout), (written as u64, written as u64));
        assert_eq!((counters.swapped_pages, counters.stored_pages), (written as u64, 200 - written as u64));
        expect_on_disk(config.writeback, written as u64, counters.swap_current);
        zswap.check_valid();
    }
}

#[test]
fn a_shared_entry_that_was_loaded_has_a_second_chance() {
    let (zswap, _) = zswap(ROOMY, true);
    let slots = fill(&zswap, 0..100, Home::ROOT);
    zswap.dup(slots[0]);
    expect(&zswap, slots[0], &page(0));
    zswap.invalidate(slots[0]);
    zswap.shrink(4096);
    assert_eq!(expect(&zswap, slots[1], &page(1)), Origin::Disk);
    assert_eq!(expect(&zswap, slots[0], &page(0)), Origin::Pool);
    zswap.shrink(u64::MAX);
    assert_eq!(expect(&zswap, slots[0], &page(0)), Origin::Disk);
    assert_eq!((zswap.pool_bytes(), zswap.shrink(1)), (0, 0));
}

#[test]
fn a_writeback_is_few_large_writes() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config.clone(), true);
        fill(&zswap, 0..1024, Home::ROOT);
        zswap.shrink(u64::MAX);
        // Packed entries do not fill a cluster evenly: the rest of one is a write of its own.
        let writes = if config.writeback == Writeback::Pages { 4 } else { 6 };
        assert_eq!((zswap.counters().written_back_pages, faults.writes.load(Relaxed)), (1024, writes));
    }
}

#[test]
fn freed_disk_space_is_discarded_and_used_again() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config.clone(), true);
        for round in 1..=3 {
            let slots = fill(&zswap, 0..512, Home::ROOT);
            zswap.shrink(u64::MAX);
            expect_on_disk(config.writeback, 512, zswap.counters().swap_current);
            slots.into_iter().for_each(|slot| zswap.invalidate(slot));
            assert_eq!(zswap.counters().swap_current, 0);
            assert_eq!(faults.bytes_discarded.load(Relaxed), round * (2 << 20));
            assert!(faults.data.lock().len() <= 2 << 20);
        }
        zswap.check_valid();
    }
}

#[test]
fn without_a_swap_file_nothing_is_written_back() {
    let (zswap, _) = zswap(ROOMY, false);
    fill(&zswap, 0..10, Home::ROOT);
    assert_eq!(zswap.shrink(u64::MAX), 0);
    assert_eq!(zswap.counters().stored_pages, 10);
}

// "Failures put it back and count reject_reclaim_fail"
#[test]
fn a_failed_write_loses_nothing_and_gives_up() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let slots = fill(&zswap, 0..300, Home::ROOT);
        faults.write_errors.store(true, Relaxed);
        assert_eq!(zswap.shrink(u64::MAX), 0);
        let counters = zswap.counters();
        // Attempts of 256, 128, ... 1 pages, then single ones: 16 in all.
        assert_eq!((counters.reject_reclaim_fail, counters.written_back_pages), (256 + 255 + 7, 0));
        assert_eq!((counters.stored_pages, counters.swap_current), (300, 0));
        zswap.check_valid();
        faults.write_errors.store(false, Relaxed);
        zswap.shrink(u64::MAX);
        slots.iter().enumerate().for_each(|(i, &slot)| assert_eq!(expect(&zswap, slot, &page(i as u64)), Origin::Disk));
    }
}

#[test]
fn a_nearly_full_disk_is_filled_with_smaller_writes() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        fill(&zswap, 0..64, Home::ROOT);
        faults.largest_write.store(8 * 4096, Relaxed);
        assert!(zswap.shrink(u64::MAX) > 0);
        assert_eq!(zswap.counters().written_back_pages, 64);
    }
}

#[test]
fn writeback_stops_at_the_swap_limit() {
    for config in both(Config { swap_limit_bytes: Some(100 * 4096), ..ROOMY }) {
        let (zswap, _) = zswap(config.clone(), true);
        fill(&zswap, 0..300, Home::ROOT);
        zswap.shrink(u64::MAX);
        let counters = zswap.counters();
        assert_eq!((counters.swapped_pages + counters.stored_pages, counters.reject_reclaim_fail), (300, 0));
        expect_on_disk(config.writeback, counters.swapped_pages, counters.swap_current);
        assert!((98 * 4096..=100 * 4096).contains(&counters.swap_current), "{counters:?}");
        zswap.check_valid();
    }
}

// "An entry that is invalidated or loaded meanwhile is not written"
#[test]
fn an_entry_that_changes_while_it_is_written_is_not_recorded() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config.clone(), true);
        let zswap = Arc::new(zswap);
        let slots = fill(&zswap, 0..40, Home::ROOT);
        let (other, during) = (slots.clone(), zswap.clone());
        *faults.before_write.lock() = Some(Box::new(move || {
            during.invalidate(other[0]);
            let again = during.swap_out(&page(100), Home::ROOT).unwrap();
            assert_eq!(again, other[0], "the slot is given out again");
            assert_eq!(expect(&during, other[1], &page(1)), Origin::Pool, "a load takes the pool's copy");
            during.dup(other[2]);
        }));
        // One write of the sixteen coldest.
        zswap.shrink(1);
        assert_eq!(expect(&zswap, slots[0], &page(100)), Origin::Pool);
        assert_eq!(expect(&zswap, slots[1], &page(1)), Origin::Pool, "loaded meanwhile");
        assert_eq!(expect(&zswap, slots[2], &page(2)), Origin::Disk, "shared meanwhile");
        zswap.invalidate(slots[2]);
        assert_eq!(expect(&zswap, slots[2], &page(2)), Origin::Disk);
        assert_eq!((zswap.counters().written_back_pages, zswap.counters().swapped_pages), (14, 14));
        expect_on_disk(config.writeback, 14, zswap.counters().swap_current);
        zswap.check_valid();
    }
}

#[test]
fn nothing_waits_for_a_writeback() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let zswap = Arc::new(zswap);
        let slots = fill(&zswap, 0..100, Home::ROOT);
        zswap.shrink(1);
        assert_eq!(expect(&zswap, slots[0], &page(0)), Origin::Disk);
        let (started, writing) = std::sync::mpsc::channel();
        let (finish, finished) = std::sync::mpsc::channel::<()>();
        *faults.before_write.lock() = Some(Box::new(move || {
            started.send(()).unwrap();
            finished.recv().unwrap();
        }));
        let shrinker = std::thread::spawn({
            let zswap = zswap.clone();
            move || zswap.shrink(u64::MAX)
        });
        writing.recv().unwrap();
        assert_eq!(expect(&zswap, slots[0], &page(0)), Origin::Disk);
        assert_eq!(expect(&zswap, slots[50], &page(50)), Origin::Pool, "it is being written");
        slots.iter().for_each(|&slot| zswap.invalidate(slot));
        zswap.swap_out(&page(1000), Home::ROOT).unwrap();
        zswap.compact();
        finish.send(()).unwrap();
        shrinker.join().unwrap();
        zswap.check_valid();
    }
}

// "Bad data (decompressor or checksum says no): count decompress_fail"
#[test]
fn damage_in_the_pool_is_found_and_counted() {
    for verify in [true, false] {
        for config in both(Config { verify, ..ROOMY }) {
            let (zswap, faults) = zswap(config, true);
            // A page that does not compress is kept as it is: no codec could notice.
            let pages = [noise(1), noise(2)];
            let slots = pages.map(|page| zswap.swap_out(&page, Home::ROOT).unwrap());
            let mut page = [0; PAGE_SIZE];
            zswap.load(slots[0], &mut page).unwrap();
            assert_eq!(page, pages[0]);
            faults.damaged_memory.store(true, Relaxed);
            if !verify {
                assert!(zswap.load(slots[0], &mut page).is_ok() && page != pages[0], "the damage is there");
                continue;
            }
            assert!(matches!(zswap.load(slots[0], &mut page), Err(LoadError::Corrupt)));
            assert!(matches!(zswap.load_folio(&slots, &mut [[0; PAGE_SIZE]; 2]), Err(LoadError::Corrupt)));
            assert_eq!(zswap.counters().decompress_fail, 2);
            // What is damaged is not written, for on disk it would look sound.
            zswap.shrink(u64::MAX);
            assert_eq!(zswap.counters().written_back_pages, 0);
            assert!(zswap.counters().decompress_fail > 2);
        }
    }
}

#[test]
fn checksums_hold_on_disk_and_for_pages_that_the_pool_refused() {
    for config in both(Config { enabled: false, ..ROOMY }) {
        let (zswap, _) = zswap(config, true);
        let slots: Vec<Slot> = (0..20).map(|key| zswap.swap_out(&noise(key), Home::ROOT).unwrap()).collect();
        zswap.set_enabled(true);
        let pooled: Vec<Slot> = (20..40).map(|key| zswap.swap_out(&noise(key), Home::ROOT).unwrap()).collect();
        zswap.shrink(u64::MAX);
        for (key, slot) in slots.into_iter().chain(pooled).enumerate() {
            let mut page = [0; PAGE_SIZE];
            zswap.load(slot, &mut page).unwrap();
            assert_eq!(page, noise(key as u64));
        }
    }
}

#[test]
fn damage_on_disk_is_found_and_counted() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let slots = fill(&zswap, 0..2, Home::ROOT);
        zswap.shrink(u64::MAX);
        let load = |slot| zswap.load(slot, &mut [0; PAGE_SIZE]);
        faults.damaged_reads.store(true, Relaxed);
        assert!(matches!(load(slots[0]), Err(LoadError::Corrupt)));
        faults.damaged_reads.store(false, Relaxed);
        // Both take the same space.
        let length = zswap.counters().swap_current as usize / 2;
        let first = faults.data.lock()[..length].to_vec();
        faults.data.lock().copy_within(..length, length);
        assert!(matches!(load(slots[1]), Err(LoadError::Corrupt)), "an entry in another's place");
        expect(&zswap, slots[0], &page(0));

        // A place put back to what it held for an earlier page.
        slots.into_iter().for_each(|slot| zswap.invalidate(slot));
        let slot = zswap.swap_out(&page(3), Home::ROOT).unwrap();
        zswap.shrink(u64::MAX);
        expect(&zswap, slot, &page(3));
        faults.data.lock()[..length].copy_from_slice(&first);
        assert!(matches!(load(slot), Err(LoadError::Corrupt)), "rolled back");
        assert_eq!(zswap.counters().decompress_fail, 3);
        assert_eq!(zswap.counters().root.pswpin, 2, "only pages that were delivered");
    }
}

#[test]
fn a_failed_read_can_be_tried_again() {
    let (zswap, faults) = zswap(ROOMY, true);
    let slots = fill(&zswap, 0..1, Home::ROOT);
    zswap.shrink(u64::MAX);
    faults.read_errors.store(true, Relaxed);
    assert!(matches!(zswap.load(slots[0], &mut [0; PAGE_SIZE]), Err(LoadError::Io(_))));
    faults.read_errors.store(false, Relaxed);
    expect(&zswap, slots[0], &page(0));
}

#[test]
fn entries_remember_their_codec() {
    for config in both(ROOMY) {
        let (zswap, _) = zswap(config, true);
        let mut slots = Vec::new();
        for (seed, compressor) in Compressor::ALL.into_iter().enumerate() {
            zswap.set_compressor(compressor);
            slots.push(zswap.swap_out(&page(seed as u64), Home::ROOT).unwrap());
        }
        for (seed, &slot) in slots.iter().enumerate() {
            assert_eq!(expect(&zswap, slot, &page(seed as u64)), Origin::Pool);
        }
        zswap.shrink(u64::MAX);
        assert_eq!(zswap.pools().len(), 1, "the pools of the others are gone");
        slots
            .iter()
            .enumerate()
            .for_each(|(seed, &slot)| assert_eq!(expect(&zswap, slot, &page(seed as u64)), Origin::Disk));
    }
}

#[test]
fn compaction_gives_pages_back() {
    let (zswap, _) = zswap(ROOMY, false);
    let slots = fill(&zswap, 0..1000, Home::ROOT);
    let (keep, drop): (Vec<_>, Vec<_>) = slots.into_iter().enumerate().partition(|(i, _)| i % 20 == 0);
    drop.into_iter().for_each(|(_, slot)| zswap.invalidate(slot));
    let before = zswap.pool_bytes();
    let freed = zswap.compact();
    assert!(freed > before / 2, "{freed} of {before}");
    assert_eq!(zswap.pool_bytes(), before - freed);
    keep.into_iter().for_each(|(i, slot)| drop_checked(&zswap, slot, i as u64));
    assert_eq!(zswap.pool_bytes(), 0);
}

fn drop_checked(zswap: &Zswap, slot: Slot, seed: u64) {
    expect(zswap, slot, &page(seed));
    zswap.invalidate(slot);
}

#[test]
fn metadata_is_at_most_64_bytes_a_page() {
    for config in both(Config { verify: false, ..ROOMY }) {
        let (zswap, _) = zswap(config, true);
        let pages = 20_000;
        fill(&zswap, 0..pages, Home::ROOT);
        let in_pool = zswap.metadata_bytes();
        assert!(in_pool <= 64 * pages, "{} bytes a page in the pool", in_pool / pages);
        zswap.shrink(u64::MAX);
        assert!(zswap.metadata_bytes() <= 64 * pages, "{} bytes a page on disk", zswap.metadata_bytes() / pages);
    }
}

#[test]
fn the_engine_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Zswap>();
}

// "One counter per cause of refusal, exactly these names"
#[test]
fn counters_carry_the_kernels_names() {
    let (zswap, _) = zswap(ROOMY, false);
    let json = serde_json::to_value(zswap.counters()).unwrap();
    let names: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = vec![
        "pool_limit_hit",
        "reject_reclaim_fail",
        "reject_alloc_fail",
        "reject_kmemcache_fail",
        "reject_compress_fail",
        "reject_compress_poor",
        "decompress_fail",
        "written_back_pages",
        "pool_total_size",
        "stored_pages",
        "stored_incompressible_pages",
        "same_filled_pages",
        "zswpin",
        "zswpout",
        "zswpwb",
        "pswpin",
        "pswpout",
        "swpin_zero",
        "swpout_zero",
        "zswap",
        "zswapped",
        "zswap_incomp",
        "zswap_max_hit",
        "swap_current",
        "swapped_pages",
    ];
    expected.sort();
    assert_eq!(names, expected);
}

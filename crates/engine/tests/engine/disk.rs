//! What is on disk: packed, authentic to the last byte, within its limit, and given back.

use crate::common::*;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::*;

const ROOT: Home = Home::ROOT;

/// Pages that take from a few bytes to a whole page.
fn mixed(seed: u64) -> Page {
    let noisy = 1 + (seed * 7919 % 4096) as usize;
    let mut page = noise(seed);
    page[noisy..].fill(seed as u8);
    page
}

#[test]
fn entries_are_packed() {
    let (zswap, faults) = zswap(ROOMY, true);
    let slots: Vec<Slot> = (0..200).map(|seed| zswap.swap_out(&mixed(seed), ROOT).unwrap()).collect();
    let in_pool = zswap.counters().root.zswap;
    zswap.shrink(u64::MAX);
    let on_disk = zswap.counters().swap_current;
    assert_eq!(zswap.counters().swapped_pages, 200);
    assert!((in_pool..in_pool + 200 * 128).contains(&on_disk), "{in_pool} in the pool, {on_disk} on disk");
    assert_eq!((faults.bytes_written.load(Relaxed), faults.data.lock().len() as u64), (on_disk, on_disk));
    slots.iter().zip(0..).for_each(|(slot, seed)| assert_eq!(expect(&zswap, *slot, &mixed(seed)), Origin::Disk));
    zswap.check_valid();
}

#[test]
fn a_folio_that_was_written_back_is_read_at_once() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let pages: Vec<Page> = (0..64).map(mixed).collect();
        let slots = zswap.swap_out_folio(&pages, ROOT).unwrap();
        zswap.shrink(u64::MAX);
        let mut loaded = vec![[0; PAGE_SIZE]; 64];
        let origins = zswap.load_folio(&slots, &mut loaded).unwrap();
        assert!(loaded == pages && origins.iter().filter(|origin| **origin == Origin::Disk).count() >= 63);
        assert_eq!((faults.writes.load(Relaxed), faults.reads.load(Relaxed)), (1, 1));
    }
}

#[test]
fn entries_that_are_scattered_on_disk_are_each_their_own() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let pages: Vec<Page> = (0..96).map(mixed).collect();
        let slots: Vec<Slot> = pages.iter().map(|page| zswap.swap_out(page, ROOT).unwrap()).collect();
        zswap.shrink(u64::MAX);
        // Pairs of neighbours, from the last to the first.
        let chosen: Vec<usize> = (0..96).rev().filter(|number| number % 3 > 0).collect();
        let wanted: Vec<Slot> = chosen.iter().map(|number| slots[*number]).collect();
        let mut loaded = vec![[0; PAGE_SIZE]; 64];
        zswap.load_folio(&wanted, &mut loaded).unwrap();
        assert!(loaded.iter().zip(&chosen).all(|(page, number)| *page == pages[*number]));
        assert!((16..=32).contains(&faults.reads.load(Relaxed)), "{} reads", faults.reads.load(Relaxed));
    }
}

#[test]
fn no_byte_on_disk_can_be_changed() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let pages = [page(1), noise(2), mixed(3)];
        let slots: Vec<Slot> = pages.iter().map(|page| zswap.swap_out(page, ROOT).unwrap()).collect();
        let bytes = zswap.counters().root.zswap;
        zswap.shrink(u64::MAX);
        let (mut found, length) = (0, faults.data.lock().len());
        for byte in 0..length {
            faults.data.lock()[byte] ^= 0x10;
            for (slot, page) in slots.iter().zip(&pages) {
                let mut loaded = [0; PAGE_SIZE];
                match zswap.load(*slot, &mut loaded) {
                    Ok(_) => assert!(loaded == *page, "wrong bytes after damage to byte {byte}"),
                    Err(LoadError::Corrupt) => found += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            faults.data.lock()[byte] ^= 0x10;
        }
        // What fills an entry's last unit up belongs to nobody.
        assert!(found >= bytes, "{found} of {bytes}");
        assert_eq!(zswap.counters().decompress_fail, found);
    }
}

#[test]
fn what_a_broken_write_has_left_does_not_matter() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let slots: Vec<Slot> = (0..100).map(|seed| zswap.swap_out(&mixed(seed), ROOT).unwrap()).collect();
        faults.short_writes.store(true, Relaxed);
        assert_eq!(zswap.shrink(u64::MAX), 0);
        assert_eq!((zswap.counters().swap_current, zswap.counters().swapped_pages), (0, 0));
        zswap.set_enabled(false);
        assert!(matches!(zswap.swap_out(&mixed(101), ROOT), Err(SwapOutError::Io(_))));
        faults.short_writes.store(false, Relaxed);
        zswap.shrink(u64::MAX);
        slots.iter().zip(0..).for_each(|(slot, seed)| assert_eq!(expect(&zswap, *slot, &mixed(seed)), Origin::Disk));
        zswap.check_valid();
    }
}

/// Stores and frees at random until the disk has been full for long: it is neither outgrown nor lost to fragments.
#[test]
fn a_full_disk_stays_usable() {
    const LIMIT: u64 = 2 << 20;
    for config in both(Config { max_pool_bytes: 64 << 10, swap_limit_bytes: Some(LIMIT), ..ROOMY }) {
        let (zswap, faults) = zswap(config.clone(), true);
        let mut random = Random(1);
        let mut owned: Vec<(Slot, u64)> = Vec::new();
        let (mut full, mut least) = (0, u64::MAX);
        for seed in 0..20_000 {
            match zswap.swap_out(&mixed(seed), ROOT) {
                Ok(slot) => owned.push((slot, seed)),
                Err(error) => {
                    assert!(matches!(error, SwapOutError::NoSpace));
                    full += 1;
                    least = least.min(zswap.counters().swapped_pages);
                    for _ in 0..random.below(40) {
                        let (slot, seed) = owned.swap_remove(random.below(owned.len()));
                        expect(&zswap, slot, &mixed(seed));
                        zswap.invalidate(slot);
                    }
                }
            }
            if seed % 8 == 0 {
                zswap.shrink_until_accepting();
            }
            assert!(zswap.counters().swap_current <= LIMIT);
        }
        zswap.check_valid();
        assert!(faults.data.lock().len() as u64 <= LIMIT);
        // Holes too short for what is refused take no more than compression gains.
        assert!(full > 100 && least >= LIMIT / 4096, "full {full} times, once with {least} pages");
        owned.into_iter().for_each(|(slot, _)| zswap.invalidate(slot));
        let counters = zswap.counters();
        assert_eq!((counters.swap_current, counters.swapped_pages, counters.pool_total_size), (0, 0, 0));
        zswap.check_valid();
    }
}

/// Without a limit, what is freed is used again before the file grows.
#[test]
fn a_file_without_a_limit_is_at_most_half_waste() {
    for config in both(ROOMY) {
        let (zswap, faults) = zswap(config, true);
        let mut random = Random(1);
        let mut owned: Vec<Slot> = Vec::new();
        let mut most = 0;
        for round in 0..40 {
            owned.extend(fill(&zswap, round * 200..round * 200 + 200, ROOT));
            zswap.shrink(u64::MAX);
            most = most.max(zswap.counters().swap_current);
            while owned.len() > 800 {
                zswap.invalidate(owned.swap_remove(random.below(owned.len())));
            }
        }
        let file = faults.data.lock().len() as u64;
        assert!(file <= 2 * most + (1 << 20), "{file} bytes for {most}");
    }
}

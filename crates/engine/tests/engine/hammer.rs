//! Real threads on one engine: contents are verified at every load, and everything once they are done.

use crate::common::*;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use uzswap_engine::*;

const THREADS: usize = 4;
const ROUNDS: usize = 4;
const STEPS: usize = 3000;

/// One thread's part: pages of its own, some with several references.
fn work(zswap: &Zswap, random: &mut Random, owned: &mut Vec<(Slot, u64)>) {
    let parent = group(zswap);
    zswap.set_zswap_max(parent, (random.below(2) == 0).then_some(200 << 10)).expect("it is there");
    let most = (random.below(2) == 0).then_some(400 << 10);
    zswap.set_swap_max(parent, most).expect("it is there");
    let mut child = zswap.create_group(parent).expect("room");
    for step in 0..STEPS {
        if step % 300 == 0 {
            // Entries of the old group are being loaded, written back and freed meanwhile.
            zswap.remove_group(child).expect("it has no children");
            child = zswap.create_group(parent).expect("room");
        }
        let home = Home { group: child, node: random.below(2) as u8 };
        let which = (!owned.is_empty()).then(|| random.below(owned.len()));
        match (random.below(10), which) {
            (0..4, _) | (_, None) => {
                let seed = random.next();
                if let Ok(slot) = zswap.swap_out(&content(seed), home) {
                    owned.push((slot, seed));
                }
                assert!(most.is_none_or(|most| zswap.swap_of(&[parent])[0] <= most), "past the limit");
            }
            (4..7, Some(which)) => {
                let (slot, seed) = owned.swap_remove(which);
                expect(zswap, slot, &content(seed));
                zswap.invalidate(slot);
            }
            (7, Some(which)) => {
                zswap.dup(owned[which].0);
                owned.push(owned[which]);
            }
            (8, Some(which)) => drop(expect(zswap, owned[which].0, &content(owned[which].1))),
            (_, Some(which)) => zswap.invalidate(owned.swap_remove(which).0),
        }
    }
    zswap.remove_group(child).expect("it has no children");
    zswap.remove_group(parent).expect("it has none left");
}

fn content(seed: u64) -> Page {
    match seed % 8 {
        0 => noise(seed),
        1 => [seed as u8; PAGE_SIZE],
        _ => page(seed),
    }
}

fn hammer(config: Config) {
    let seed = std::env::var("SEED").map_or(0x5eed, |seed| seed.parse().expect("SEED is a number"));
    println!("SEED={seed}");
    let config = Config { max_pool_bytes: 2 << 20, swap_limit_bytes: Some(32 << 20), ..config };
    let (zswap, faults) = zswap(config, true);
    let (barrier, running) = (Barrier::new(THREADS + 1), AtomicUsize::new(0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (zswap, barrier, running) = (&zswap, &barrier, &running);
            scope.spawn(move || {
                let mut random = Random(seed + thread as u64);
                let mut owned = Vec::new();
                for round in 0..ROUNDS {
                    running.fetch_add(1, Relaxed);
                    barrier.wait();
                    work(zswap, &mut random, &mut owned);
                    zswap.set_compressor(Compressor::ALL[(round + thread) % 4]);
                    zswap.set_zpool(Zpool::ALL[(round * thread) % 2]);
                    running.fetch_sub(1, Relaxed);
                    barrier.wait();
                    barrier.wait();
                }
                for (slot, seed) in owned {
                    expect(zswap, slot, &content(seed));
                    zswap.invalidate(slot);
                }
            });
        }
        // A second shrinker contends with the first.
        scope.spawn(|| {
            while !done.load(Relaxed) {
                zswap.shrink(64 << 10);
                zswap.shrinker_scan(Group::ROOT, 0, zswap.shrinker_count(Group::ROOT, 0));
                thread::yield_now();
            }
        });
        let mut random = Random(seed ^ 0xffff);
        for _ in 0..ROUNDS {
            barrier.wait();
            while running.load(Relaxed) > 0 {
                faults.write_errors.store(random.below(8) == 0, Relaxed);
                zswap.shrink_until_accepting();
                zswap.compact();
                zswap.counters();
                thread::yield_now();
            }
            faults.write_errors.store(false, Relaxed);
            barrier.wait();
            zswap.check_valid();
            barrier.wait();
        }
        done.store(true, Relaxed);
    });
    zswap.check_valid();
    let counters = zswap.counters();
    assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
    assert!(counters.written_back_pages > 0 && counters.root.pswpin > 0 && counters.root.zswpin > 0, "{counters:?}");
}

#[test]
fn threads_do_not_disturb_each_other() {
    Writeback::ALL.into_iter().for_each(|writeback| hammer(Config { writeback, ..ROOMY }));
    hammer(Config { policy: Policy::LockedPoolReference, ..ROOMY });
}

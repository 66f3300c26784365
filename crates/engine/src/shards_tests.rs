//! Pages in all shards at once. A thread alone fills one; these tests choose for it.

use super::*;
use crate::{Compressor, Config, HeapSource, HeapSwapFile, Home, Origin, PAGE_SIZE, Page, SwapFile, Zpool, Zswap};

fn zswap(config: Config, swap: bool) -> Zswap {
    let file = swap.then(|| Box::new(HeapSwapFile::default()) as Box<dyn SwapFile>);
    Zswap::new(config, file, HeapSource)
}

/// A page that compresses to about half; different for each seed.
fn page(seed: u64) -> Page {
    let mut random = Random(seed);
    let mut page = [0; PAGE_SIZE];
    page.as_chunks_mut::<16>().0.iter_mut().for_each(|word| word[..8].copy_from_slice(&random.next().to_le_bytes()));
    page
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 32) as usize % end
    }
}

/// This thread's next store goes there.
fn choose(shard: usize) {
    LAST.with(|last| last.set(shard));
}

fn store(zswap: &Zswap, shard: usize, seed: u64, home: Home) -> Option<Slot> {
    choose(shard);
    let slot = zswap.swap_out(&page(seed), home).ok()?;
    assert_eq!(slot.shard(), shard);
    Some(slot)
}

fn load(zswap: &Zswap, slot: Slot, seed: u64) -> Origin {
    let mut loaded = [0xcc; PAGE_SIZE];
    let origin = zswap.load(slot, &mut loaded).expect("the page can be loaded");
    assert!(loaded == page(seed), "another page than was stored");
    origin
}

#[test]
fn the_coldest_of_all_shards_goes_first() {
    const PAGES: u64 = 2048;
    let zswap = zswap(Config::default(), true);
    let mut random = Random(1);
    let slots: Vec<Slot> =
        (0..PAGES).map(|seed| store(&zswap, random.below(MAX_SHARDS), seed, Home::ROOT).expect("room")).collect();
    // What is written first is what was stored first, but for what an age does not tell.
    while zswap.counters().swapped_pages < PAGES / 2 {
        assert!(zswap.shrink(PAGE_SIZE as u64) > 0);
    }
    let written = |first: usize, end: usize| {
        let origins = (first..end).map(|n| load(&zswap, slots[n], n as u64));
        origins.filter(|origin| *origin == Origin::Disk).count()
    };
    let half = zswap.counters().swapped_pages as usize;
    let untold = MAX_SHARDS * 2 * (PAGES as usize / 64).max(64);
    assert_eq!((written(0, half - untold), written(half + untold, PAGES as usize)), (half - untold, 0));
}

#[test]
fn a_group_has_reached_its_limit_when_all_shards_have_together() {
    let zswap = zswap(Config::default(), false);
    let group = zswap.create_group(Group::ROOT).expect("room");
    let home = Home { group, node: 0 };
    let one = store(&zswap, 0, 0, home).expect("room");
    let length = zswap.group_counters(group).expect("it is there").zswap;
    zswap.set_zswap_max(group, Some(4 * length)).expect("it is there");
    let stored = (1..12).filter(|seed| store(&zswap, *seed as usize % MAX_SHARDS, *seed, home).is_some()).count();
    let counters = zswap.group_counters(group).expect("it is there");
    assert!((4 * length..4 * length + PAGE_SIZE as u64).contains(&counters.zswap), "a page too many, or too few");
    assert_eq!(counters.zswap_max_hit, 11 - stored as u64);
    zswap.invalidate(one);
    zswap.check_valid();
}

#[test]
fn stores_of_a_limited_group_wait_for_no_other_shard() {
    let zswap = zswap(Config::default(), false);
    let group = zswap.create_group(Group::ROOT).expect("room");
    let home = Home { group, node: 0 };
    zswap.set_zswap_max(group, Some(1 << 20)).expect("it is there");
    zswap.set_swap_max(group, Some(1 << 20)).expect("it is there");
    store(&zswap, 0, 0, home).expect("room");
    std::thread::scope(|scope| {
        let (say, heard) = std::sync::mpsc::channel();
        // Held until the stores are done, or have waited for long.
        let held = zswap.shards.shard(3);
        let zswap = &zswap;
        scope.spawn(move || {
            for seed in 1..40 {
                store(zswap, 0, seed, home).expect("room");
            }
            say.send(()).expect("the test waits");
        });
        let done = heard.recv_timeout(std::time::Duration::from_secs(20));
        drop(held);
        done.expect("a store waits for a shard that is not its own");
    });
    zswap.check_valid();
}

#[test]
fn leases_keep_a_group_within_its_limits() {
    let zswap = zswap(Config::default(), false);
    let above = zswap.create_group(Group::ROOT).expect("room");
    let group = zswap.create_group(above).expect("room");
    let home = Home { group, node: 0 };
    let most = 100 * PAGE_SIZE as u64;
    zswap.set_swap_max(above, Some(most)).expect("it is there");
    let slots = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (zswap, slots) = (&zswap, &slots);
            scope.spawn(move || {
                let stored = (0..60).filter_map(|n| zswap.swap_out(&page(100 * thread + n), home).ok());
                slots.lock().expect("nobody panics").extend(stored);
            });
        }
    });
    let slots = slots.into_inner().expect("nobody panics");
    let swapped = |zswap: &Zswap| zswap.swap_of(&[above])[0];
    assert_eq!((slots.len(), swapped(&zswap)), (100, most), "all that it may swap out, and no more");
    // What was freed can be stored again; a lower limit holds at once, whatever was leased.
    zswap.invalidate_all(&slots[..80]);
    store(&zswap, 1, 1000, home).expect("room");
    zswap.set_swap_max(above, Some(most / 2)).expect("it is there");
    let more = (0..100).filter(|seed| store(&zswap, *seed as usize % MAX_SHARDS, 2000 + seed, home).is_some()).count();
    assert_eq!((more, swapped(&zswap)), (29, most / 2));
    zswap.set_swap_max(above, None).expect("it is there");
    // The same for compressed bytes: a page too much at most for each store under way, here one.
    let most = zswap.group_counters(above).expect("it is there").zswap + 64 * PAGE_SIZE as u64;
    zswap.set_zswap_max(above, Some(most)).expect("it is there");
    for seed in 0..400 {
        let _ = store(&zswap, seed as usize % MAX_SHARDS, 3000 + seed, home);
    }
    let stored = zswap.group_counters(above).expect("it is there").zswap;
    assert!((most..most + PAGE_SIZE as u64).contains(&stored), "{stored} of {most}");
    zswap.check_valid();
}

#[test]
fn a_number_is_given_away_when_no_shard_names_it() {
    let zswap = zswap(Config::default(), false);
    let number = |group| zswap.shards.any().groups.find(group).expect("it is there");
    for shard in 0..MAX_SHARDS {
        let group = zswap.create_group(Group::ROOT).expect("room");
        let (before, slot) = (number(group), store(&zswap, shard, 1, Home { group, node: 0 }).expect("room"));
        zswap.remove_group(group).expect("it has no children");
        let other = zswap.create_group(Group::ROOT).expect("room");
        assert_ne!(number(other), before, "a page of shard {shard} names it");
        zswap.invalidate(slot);
        let third = zswap.create_group(Group::ROOT).expect("room");
        assert_eq!(number(third), before);
        for group in [other, third] {
            zswap.remove_group(group).expect("it has no children");
        }
        zswap.check_valid();
    }
}

#[test]
fn any_sequence_of_operations_in_all_shards() {
    let config =
        Config { max_pool_bytes: 60 * PAGE_SIZE as u64, swap_limit_bytes: Some(64 << 12), ..Config::default() };
    let zswap = zswap(config, true);
    let mut random = Random(2);
    let mut groups = vec![Group::ROOT];
    let mut owned: Vec<(Slot, u64)> = Vec::new();
    for step in 0..4000 {
        choose(random.below(MAX_SHARDS));
        let home = Home { group: groups[random.below(groups.len())], node: random.below(2) as u8 };
        let which = random.below(owned.len().max(1));
        match random.below(20) {
            0..8 => owned.extend(zswap.swap_out(&page(step), home).ok().map(|slot| (slot, step))),
            8..12 if which < owned.len() => {
                let (slot, seed) = owned.swap_remove(which);
                load(&zswap, slot, seed);
                zswap.invalidate(slot);
            }
            12 if which < owned.len() => {
                zswap.dup(owned[which].0);
                owned.push(owned[which]);
            }
            13 => drop(zswap.shrink(random.next() % 50_000)),
            14 => drop(zswap.shrink_until_accepting()),
            15 => drop(zswap.shrinker_scan(home.group, home.node, 20)),
            16 => drop(zswap.compact()),
            17 => zswap.set_compressor(Compressor::ALL[random.below(4)]),
            18 => zswap.set_zpool(Zpool::ALL[random.below(2)]),
            19 if random.below(2) == 0 => groups.push(zswap.create_group(home.group).expect("room")),
            _ if zswap.remove_group(home.group).is_ok() => groups.retain(|group| *group != home.group),
            _ => {}
        }
        if step % 8 == 0 {
            zswap.check_valid();
        }
    }
    for (slot, seed) in owned {
        load(&zswap, slot, seed);
        zswap.invalidate(slot);
    }
    zswap.check_valid();
    let counters = zswap.counters();
    assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
}

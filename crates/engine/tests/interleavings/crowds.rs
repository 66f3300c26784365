//! More threads and longer runs, in schedules taken at random.

use crate::machine::*;
use parking_lot::Mutex;
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::scope;
use uzswap_engine::*;

const ROOT: Group = Group::ROOT;
const THREADS: usize = 3;
const STEPS: usize = 5;
/// On disk; the programs below reach it.
const FEW_PAGES: u64 = 6 * PAGE_SIZE as u64;

fn below(end: usize) -> usize {
    thread_rng().gen_range(0..end)
}

#[test]
fn a_slot_wanders_from_page_to_page_under_two_writebacks() {
    explore(|| {
        let machine = Machine::new(SMALL);
        let mut pages = machine.cold([1, 2, 3], Home::ROOT);
        scope(|scope| {
            scope.spawn(|| machine.zswap.shrink(u64::MAX));
            scope.spawn(|| machine.scan(ROOT, 4));
            for page in pages.iter_mut() {
                machine.take(*page);
                *page = machine.store(page.seed + 3, Home::ROOT).expect("room");
            }
        });
        machine.end(pages);
    });
}

#[test]
fn objects_move_while_they_are_loaded_written_and_freed() {
    explore(|| {
        let machine = Machine::new(Config { zpool: Zpool::Zsmalloc, ..SMALL });
        let pages: Vec<Owned> = (0..120).map(|seed| machine.store(seed, Home::ROOT).expect("room")).collect();
        let (freed, kept): (Vec<Owned>, Vec<Owned>) = pages.into_iter().partition(|owned| owned.seed % 3 > 0);
        scope(|scope| {
            scope.spawn(|| machine.zswap.compact());
            scope.spawn(|| machine.scan(ROOT, 130));
            scope.spawn(|| {
                for &owned in &kept {
                    machine.read(owned);
                }
            });
            freed.into_iter().for_each(|owned| machine.zswap.invalidate(owned.slot));
        });
        machine.end(kept);
    });
}

#[test]
fn the_worker_shrinks_a_pool_that_is_being_filled() {
    explore(|| {
        let cap = 2 * PAGE_SIZE as u64;
        let machine = Machine::new(Config { max_pool_bytes: cap, accept_threshold_percent: 50, ..SMALL });
        let owned = Mutex::new(Vec::new());
        scope(|scope| {
            scope.spawn(|| machine.zswap.shrink_until_accepting());
            for seeds in [1..6, 6..11] {
                let (machine, owned) = (&machine, &owned);
                scope.spawn(move || {
                    for seed in seeds {
                        let page = machine.store(seed, Home::ROOT).expect("room on disk");
                        owned.lock().push(page);
                    }
                });
            }
        });
        machine.zswap.shrink_until_accepting();
        assert_eq!(machine.zswap.shrink_needed(), None, "the worker stopped above the threshold");
        machine.end(owned.into_inner());
    });
}

#[test]
fn stores_of_a_group_at_its_limit_shrink_it() {
    explore(|| {
        let machine = Machine::new(SMALL);
        let parent = machine.zswap.create_group(ROOT).expect("room");
        let child = machine.zswap.create_group(parent).expect("room");
        let page = machine.store(1, of(child)).expect("room");
        let limit = machine.zswap.group_counters(parent).expect("it is there").zswap;
        machine.zswap.set_zswap_max(parent, Some(limit)).expect("it is there");
        let (a, b) = at_once(|| machine.store(2, of(child)), || machine.store(3, of(parent)));
        machine.end([page, a.expect("room on disk"), b.expect("room on disk")]);
    });
}

#[test]
fn stores_at_once_keep_to_what_may_be_swapped_out() {
    explore(|| {
        let machine = Machine::new(Config { shards: 2, ..SMALL });
        let parent = machine.zswap.create_group(ROOT).expect("room");
        let child = machine.zswap.create_group(parent).expect("room");
        machine.zswap.set_swap_max(parent, Some(2 * PAGE_SIZE as u64)).expect("it is there");
        let page = machine.store(1, of(child)).expect("room");
        let (a, b) = at_once(|| machine.store(2, of(child)), || machine.store(0, of(parent)));
        assert!(a.is_ok() != b.is_ok(), "there was room for one");
        assert_eq!(machine.zswap.swap_of(&[parent, child])[0], 2 * PAGE_SIZE as u64);
        machine.end([page].into_iter().chain(a).chain(b));
    });
}

/// What the threads of a random program share.
struct Job {
    machine: Machine,
    groups: Mutex<Vec<Group>>,
}

#[test]
fn random_programs() {
    explore(|| {
        let config = Config { max_pool_bytes: FEW_PAGES, swap_limit_bytes: Some(FEW_PAGES), ..SMALL };
        let machine = Machine::new(config);
        let group = machine.zswap.create_group(ROOT).expect("room");
        let common = [machine.store(1, of(group)), machine.store(2, Home::ROOT), machine.store(0, of(group))];
        let common = common.map(|stored| stored.expect("room"));
        let job = Job { machine, groups: Mutex::new(vec![ROOT, group]) };
        let left = scope(|scope| {
            let start = |_| {
                let (job, mut owned) = (&job, common.to_vec());
                common.iter().for_each(|owned| job.machine.zswap.dup(owned.slot));
                scope.spawn(move || {
                    (0..STEPS).for_each(|_| job.step(&mut owned));
                    owned
                })
            };
            let threads: Vec<_> = (0..THREADS).map(start).collect();
            common.iter().for_each(|owned| job.machine.zswap.invalidate(owned.slot));
            let left = threads.into_iter().flat_map(|thread| thread.join().expect("a panic ends the execution"));
            left.collect::<Vec<Owned>>()
        });
        job.machine.disk.set_failing(false);
        job.machine.end(left);
    });
}

impl Job {
    /// One operation of a thread, on a page that it owns.
    fn step(&self, owned: &mut Vec<Owned>) {
        let Job { machine, .. } = self;
        let zswap = &machine.zswap;
        let home = of(self.group());
        let which = if owned.is_empty() { None } else { Some(below(owned.len())) };
        match (below(25), which) {
            (0..5, _) | (_, None) => owned.extend(machine.store(below(200) as u8, home)),
            (5..8, Some(which)) => drop(machine.take(owned.swap_remove(which))),
            (8..10, Some(which)) => drop(machine.read(owned[which])),
            (10, Some(which)) => {
                zswap.dup(owned[which].slot);
                owned.push(owned[which]);
            }
            (11..13, Some(which)) => zswap.invalidate(owned.swap_remove(which).slot),
            (13, _) => owned.extend(self.store_folio(home)),
            (14, _) => drop(zswap.shrink(PAGE_SIZE as u64)),
            (15..17, _) => drop(machine.scan(home.group, 3)),
            (17, _) => drop(zswap.shrink_until_accepting()),
            (18, _) => zswap.set_compressor([Compressor::Lz4, Compressor::LzoRle][below(2)]),
            (19, _) => zswap.set_zpool(Zpool::ALL[below(2)]),
            (20, _) => self.change_groups(home.group),
            // The group may have been removed since it was chosen.
            (21, _) => drop(zswap.set_writeback(home.group, below(2) > 0)),
            (22, _) => drop(zswap.set_zswap_max(home.group, Some(below(200) as u64).filter(|max| max % 2 > 0))),
            (23, _) => drop(zswap.set_swap_max(home.group, [None, Some(FEW_PAGES)][below(2)])),
            (_, _) => machine.disk.set_failing(below(2) > 0),
        }
    }

    fn group(&self) -> Group {
        let groups = self.groups.lock();
        let which = below(groups.len());
        groups[which]
    }

    fn store_folio(&self, home: Home) -> Vec<Owned> {
        let seeds = [below(200) as u8, below(200) as u8];
        let slots = self.machine.zswap.swap_out_folio(&seeds.map(page), home).unwrap_or_default();
        slots.into_iter().zip(seeds).map(|(slot, seed)| Owned { slot, seed }).collect()
    }

    fn change_groups(&self, group: Group) {
        if self.machine.zswap.remove_group(group).is_ok() {
            self.groups.lock().retain(|other| *other != group);
        } else if let Ok(child) = self.machine.zswap.create_group(group) {
            self.groups.lock().push(child);
        }
    }
}

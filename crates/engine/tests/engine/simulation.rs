//! A machine in miniature, a million operations long: a tree of groups on four nodes, a shrink worker, reclaim, a swap file
//! that fails, and programs that store, load, fork and end. Nothing in it depends on anything but the seed:
//!
//! `UZSWAP_SEED=<seed> cargo test -p uzswap-engine simulation` replays a failure.

use crate::common::*;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::*;

const OPERATIONS: u32 = 1_000_000;
const NODES: usize = 4;
const MAX_GROUPS: usize = 24;
const MAX_REFERENCES: usize = 3000;
/// Distinct pages; making them is most of the work.
const PAGES: usize = 512;

struct Machine {
    random: Random,
    zswap: Zswap,
    faults: std::sync::Arc<Faults>,
    /// Room on disk: for most of what there is, so that it is full now and then.
    disk: u64,
    /// Bytes there from which on it may be full: with entries packed, there may be no room for the longest.
    full: u64,
    /// Each group with its parent; the root first.
    groups: Vec<(Group, Group)>,
    /// Each reference and the page it stands for.
    owned: Vec<(Slot, usize)>,
    pages: Vec<Page>,
    page: Page,
    /// Times that each kind of operation came to something.
    stored: u64,
    refused: u64,
    worked: u64,
}

impl Machine {
    fn new(seed: u64, writeback: Writeback) -> Machine {
        let (disk, full) = match writeback {
            Writeback::Compressed => (4 << 20, 7 << 19),
            Writeback::Pages => (12 << 20, 12 << 20),
        };
        let config = Config { max_pool_bytes: 2 << 20, swap_limit_bytes: Some(disk), writeback, ..ROOMY };
        let (zswap, faults) = zswap(config, true);
        let pages = (0..PAGES as u64).map(|n| match n % 8 {
            0 => noise(n),
            1 => [n as u8; PAGE_SIZE],
            2 => std::array::from_fn(|i| (i as u64 / (n + 1)) as u8),
            _ => page(n),
        });
        Machine {
            random: Random(seed),
            zswap,
            faults,
            disk,
            full,
            groups: vec![(Group::ROOT, Group::ROOT)],
            owned: Vec::new(),
            pages: pages.collect(),
            page: [0; PAGE_SIZE],
            stored: 0,
            refused: 0,
            worked: 0,
        }
    }

    fn group(&mut self) -> Group {
        self.groups[self.random.below(self.groups.len())].0
    }

    fn home(&mut self) -> Home {
        Home { group: self.group(), node: self.random.below(NODES) as u8 }
    }

    fn step(&mut self) {
        match self.random.below(1000) {
            0..420 => self.swap_out(),
            420..680 => self.fault(),
            680..780 => self.peek(),
            780..820 => self.fork(),
            820..935 => self.discard(),
            935..950 => self.swap_out_folio(),
            950..970 => self.reclaim(),
            970..985 => self.work(),
            985..995 => self.change_groups(),
            _ => self.change_parameters(),
        }
    }

    fn swap_out(&mut self) {
        if self.owned.len() >= MAX_REFERENCES {
            return self.discard();
        }
        let (which, home) = (self.random.below(PAGES), self.home());
        match self.zswap.swap_out(&self.pages[which], home) {
            Ok(slot) => {
                self.stored += 1;
                self.owned.push((slot, which));
            }
            Err(_) => self.refused += 1,
        }
    }

    fn swap_out_folio(&mut self) {
        let order = self.random.below(5);
        let first = self.random.below(PAGES - (1 << order));
        let home = self.home();
        let pages = first..first + (1 << order);
        if let Ok(slots) = self.zswap.swap_out_folio(&self.pages[pages.clone()], home) {
            self.owned.extend(slots.into_iter().zip(pages));
        }
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.owned.is_empty()).then(|| self.random.below(self.owned.len()))
    }

    fn load(&mut self, index: usize) -> bool {
        let (slot, which) = self.owned[index];
        match self.zswap.load(slot, &mut self.page) {
            Ok(_) => assert!(self.page == self.pages[which], "another page than was stored"),
            Err(LoadError::Io(_)) => assert!(self.faults.read_errors.load(Relaxed)),
            Err(LoadError::Corrupt) => panic!("nothing is damaged here"),
        }
        !self.faults.read_errors.load(Relaxed)
    }

    /// A page comes back.
    fn fault(&mut self) {
        if let Some(index) = self.pick()
            && self.load(index)
        {
            self.zswap.invalidate(self.owned.swap_remove(index).0);
        }
    }

    /// A page is filled and the fill refused: the entry stays.
    fn peek(&mut self) {
        if let Some(index) = self.pick() {
            self.load(index);
        }
    }

    fn fork(&mut self) {
        if let Some(index) = self.pick() {
            self.zswap.dup(self.owned[index].0);
            self.owned.push(self.owned[index]);
        }
    }

    fn discard(&mut self) {
        if let Some(index) = self.pick() {
            self.zswap.invalidate(self.owned.swap_remove(index).0);
        }
    }

    /// Memory pressure in one group.
    fn reclaim(&mut self) {
        let Home { group, node } = self.home();
        let entries = self.zswap.shrinker_count(group, node);
        self.zswap.shrinker_scan(group, node, entries.min(32));
    }

    fn work(&mut self) {
        if self.zswap.shrink_needed().is_some() {
            let before = self.zswap.counters().reject_reclaim_fail;
            self.worked += (self.zswap.shrink_until_accepting() > 0) as u64;
            let failed = self.zswap.counters().reject_reclaim_fail > before;
            let disk_is_full = self.zswap.counters().swap_current >= self.full;
            let all_may_write = self.groups.len() == 1;
            if all_may_write && !failed && !disk_is_full {
                assert_eq!(self.zswap.shrink_needed(), None, "the worker stopped above the threshold");
            }
        }
    }

    fn change_groups(&mut self) {
        let which = self.random.below(self.groups.len());
        let (group, _) = self.groups[which];
        match self.random.below(11) {
            0..4 if self.groups.len() < MAX_GROUPS => {
                self.groups.push((self.zswap.create_group(group).expect("room"), group));
            }
            4..8 => match self.zswap.remove_group(group) {
                Ok(()) => drop(self.groups.swap_remove(which)),
                Err(GroupError::Root) => assert_eq!(which, 0),
                Err(error) => assert_eq!(error, GroupError::HasChildren),
            },
            8 => {
                let max = [None, None, None, Some(0), Some(100 << 10), Some(100 << 10)][self.random.below(6)];
                // The root's would hold for everything.
                let max = max.filter(|_| group != Group::ROOT);
                self.zswap.set_zswap_max(group, max).expect("it is there");
            }
            9 => {
                let max = (self.random.below(4) == 0 && group != Group::ROOT).then_some(200 << 10);
                self.zswap.set_swap_max(group, max).expect("it is there");
            }
            _ => {
                let allowed = group == Group::ROOT || self.random.below(4) > 0;
                self.zswap.set_writeback(group, allowed).expect("it is there");
            }
        }
    }

    fn change_parameters(&mut self) {
        match self.random.below(9) {
            0 | 1 => self.zswap.set_compressor([Compressor::Lz4, Compressor::LzoRle][self.random.below(2)]),
            2 => self.zswap.set_zpool(Zpool::ALL[self.random.below(2)]),
            3 => self.zswap.set_max_pool_bytes((1 + self.random.below(4) as u64) << 19),
            4 => self.zswap.set_accept_threshold(50 + self.random.below(51) as u8),
            5 => self.faults.write_errors.store(self.random.below(4) == 0, Relaxed),
            6 => self.faults.short_writes.store(self.random.below(4) == 0, Relaxed),
            7 => self.faults.read_errors.store(self.random.below(6) == 0, Relaxed),
            _ => self.faults.no_memory.store(self.random.below(6) == 0, Relaxed),
        }
    }

    fn end(mut self) {
        self.faults.read_errors.store(false, Relaxed);
        while !self.owned.is_empty() {
            self.fault();
        }
        self.zswap.check_valid();
        let counters = self.zswap.counters();
        assert_eq!(
            (counters.stored_pages, counters.root.zswap, counters.pool_total_size, counters.swap_current),
            (0, 0, 0, 0)
        );
        assert_eq!(self.zswap.pools().len(), 1, "retired pools are gone");
        // It would prove little if most of it had not happened.
        assert!(
            self.stored > 50_000 && self.refused > 1000 && self.worked > 100,
            "{} {} {}",
            self.stored,
            self.refused,
            self.worked
        );
        assert!(counters.written_back_pages > 10_000 && counters.root.pswpin > 5000, "{counters:?}");
        for events in [counters.pool_limit_hit, counters.reject_reclaim_fail, counters.reject_alloc_fail] {
            assert!(events > 0, "{counters:?}");
        }
    }
}

fn simulate(writeback: Writeback) {
    let seed = std::env::var("UZSWAP_SEED").map_or(0x5eed, |seed| seed.parse().expect("UZSWAP_SEED is a number"));
    println!("UZSWAP_SEED={seed}");
    let mut machine = Machine::new(seed, writeback);
    for operation in 0..OPERATIONS {
        machine.step();
        if operation % 10_000 == 0 {
            machine.zswap.check_valid();
            assert!(machine.faults.data.lock().len() as u64 <= machine.disk, "the file has outgrown its limit");
        }
    }
    machine.end();
}

#[test]
fn a_million_operations_leave_everything_in_order() {
    simulate(Writeback::Compressed);
}

#[test]
fn a_million_operations_with_whole_pages_on_disk() {
    simulate(Writeback::Pages);
}

//! What an operator can set and do, with any value and in any order, on an engine in use. Contents, charges and lists stay
//! in order; what a group, a limit or a switch forbids does not happen.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use uzswap_engine::*;

#[derive(Debug, Arbitrary)]
struct Input {
    policy: u8,
    max_pool_bytes: Amount,
    accept_threshold_percent: u8,
    swap: bool,
    swap_limit_bytes: Option<Amount>,
    steps: Vec<Step>,
}

/// A small number of pages, or any number of bytes.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Amount {
    Pages(u8),
    Bytes(u64),
}

impl Amount {
    fn bytes(self) -> u64 {
        match self {
            Amount::Pages(pages) => pages as u64 * PAGE_SIZE as u64,
            Amount::Bytes(bytes) => bytes,
        }
    }
}

#[derive(Debug, Arbitrary)]
enum Step {
    Store { page: u8, group: u8, node: u8 },
    StoreFolio { page: u8, order: u8, group: u8 },
    Load { which: u8 },
    Dup { which: u8 },
    Invalidate { which: u8 },
    Shrink { bytes: Amount },
    Work,
    Scan { group: u8, node: u8, entries: Amount },
    Compact,
    CreateGroup { parent: u8 },
    RemoveGroup { group: u8 },
    TakeOffline { group: u8 },
    SetZswapMax { group: u8, bytes: Option<Amount> },
    SetSwapMax { group: u8, bytes: Option<Amount> },
    SetWriteback { group: u8, allowed: bool },
    SetEnabled { on: bool },
    SetShrinkerEnabled { on: bool },
    SetCompressor { name: Name },
    SetZpool { name: Name },
    SetMaxPool { bytes: Amount },
    SetAcceptThreshold { percent: u8 },
}

#[derive(Debug, Arbitrary)]
enum Name {
    Known(u8),
    Any(String),
}

impl Name {
    /// The choice of that name, if there is one.
    fn choice<T: Copy + PartialEq + std::fmt::Debug + std::str::FromStr>(
        &self,
        all: &[T],
        name_of: fn(T) -> &'static str,
    ) -> Option<T> {
        let name: &str = match self {
            Name::Known(which) => name_of(all[*which as usize % all.len()]),
            Name::Any(name) => name,
        };
        let parsed = name.parse().ok();
        assert_eq!(parsed, all.iter().copied().find(|choice| name_of(*choice) == name));
        parsed
    }
}

/// Zeros, same-filled, or compressing more or less well or not at all.
fn page(which: u8) -> Page {
    let mut state = which as u32 + 1;
    std::array::from_fn(|i| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match which % 4 {
            _ if which < 2 => which,
            0 => (state >> 24) as u8,
            1 if i % 2 == 0 => (state >> 24) as u8,
            2 if i < 64 => (state >> 24) as u8,
            _ => (i / (which as usize + 1)) as u8,
        }
    })
}

/// A group as it was made; it may have been removed since.
struct Known {
    group: Group,
    parent: usize,
    removed: bool,
    writeback: bool,
    zswap_max: Option<u64>,
    swap_max: Option<u64>,
}

struct Machine {
    zswap: Zswap,
    groups: Vec<Known>,
    owned: Vec<(Slot, u8)>,
    enabled: bool,
}

impl Machine {
    fn group(&self, which: u8) -> usize {
        which as usize % self.groups.len()
    }

    /// A group and those above it, the root last.
    fn path(&self, group: usize) -> impl Iterator<Item = &Known> {
        let above = |&group: &usize| (group > 0).then(|| self.groups[group].parent);
        std::iter::successors(Some(group), above).map(|group| &self.groups[group])
    }

    fn may_write_back(&self, group: usize) -> bool {
        self.path(group).all(|known| known.writeback)
    }

    fn load(&self, (slot, which): (Slot, u8)) -> Origin {
        let mut loaded = [0xcc; PAGE_SIZE];
        let origin = self.zswap.load(slot, &mut loaded).expect("nothing is damaged here");
        assert!(loaded == page(which), "wrong bytes");
        origin
    }

    fn stored(&mut self, group: usize, stored: Result<Vec<Slot>, SwapOutError>, which: Vec<u8>) {
        let removed = self.groups[group].removed;
        match stored {
            Ok(slots) => {
                assert!(!removed, "stored for a group that is gone");
                for known in self.path(group) {
                    let held = self.zswap.swap_of(&[known.group])[0];
                    assert!(known.swap_max.is_none_or(|max| held <= max), "more is swapped out than may be");
                }
                for (slot, which) in slots.into_iter().zip(which) {
                    assert!(self.owned.iter().all(|(other, _)| *other != slot), "a slot in use is given out");
                    self.owned.push((slot, which));
                    let unlimited = self.path(group).all(|known| known.zswap_max != Some(0));
                    match self.load((slot, which)) {
                        Origin::SameFilled => assert!(which < 2 && (which == 0 || self.enabled && unlimited)),
                        Origin::Pool => assert!(self.enabled && unlimited, "stored in a pool that is closed to it"),
                        Origin::Disk => assert!(self.may_write_back(group), "written although that is forbidden"),
                    }
                }
            }
            Err(SwapOutError::NoGroup) => assert!(removed),
            Err(SwapOutError::WritebackForbidden) => assert!(!self.may_write_back(group)),
            Err(SwapOutError::SwapMax) => assert!(self.path(group).any(|known| known.swap_max.is_some())),
            Err(SwapOutError::NoSpace) => {}
            Err(SwapOutError::Io(error)) => panic!("{error}"),
        }
    }

    fn change(
        &mut self,
        group: u8,
        changed: impl FnOnce(&Zswap, Group) -> Result<(), GroupError>,
    ) -> Option<&mut Known> {
        let group = self.group(group);
        let known = &mut self.groups[group];
        match changed(&self.zswap, known.group) {
            Ok(()) => {
                assert!(!known.removed);
                Some(known)
            }
            Err(GroupError::Root) => {
                assert_eq!(known.group, Group::ROOT);
                None
            }
            Err(error) => {
                assert_eq!((error, known.removed), (GroupError::Gone, true));
                None
            }
        }
    }

    fn remove(&mut self, group: usize) {
        let inside = |known: &Known| !known.removed && known.group != Group::ROOT && known.parent == group;
        let expected = match &self.groups[group] {
            Known { removed: true, .. } => Err(GroupError::Gone),
            _ if group == 0 => Err(GroupError::Root),
            _ if self.groups.iter().any(inside) => Err(GroupError::HasChildren),
            _ => Ok(()),
        };
        assert_eq!(self.zswap.remove_group(self.groups[group].group), expected);
        self.groups[group].removed |= expected.is_ok();
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Store { page: which, group, node } => {
                let group = self.group(group);
                let stored = self.zswap.swap_out(&page(which), Home { group: self.groups[group].group, node });
                self.stored(group, stored.map(|slot| vec![slot]), vec![which]);
            }
            Step::StoreFolio { page: first, order, group } => {
                let group = self.group(group);
                let which: Vec<u8> = (0..1u8 << (order % 4)).map(|i| first.wrapping_add(i)).collect();
                let pages: Vec<Page> = which.iter().map(|which| page(*which)).collect();
                let home = Home { group: self.groups[group].group, node: 0 };
                // Some of a folio may be on disk although others of it found room: what is written has to be whole.
                let stored = self.zswap.swap_out_folio(&pages, home);
                self.stored(group, stored, which);
            }
            Step::Load { which } if !self.owned.is_empty() => {
                self.load(self.owned[which as usize % self.owned.len()]);
            }
            Step::Dup { which } if !self.owned.is_empty() => {
                let owned = self.owned[which as usize % self.owned.len()];
                self.zswap.dup(owned.0);
                self.owned.push(owned);
            }
            Step::Invalidate { which } if !self.owned.is_empty() => {
                let which = which as usize % self.owned.len();
                self.zswap.invalidate(self.owned.swap_remove(which).0);
            }
            Step::Load { .. } | Step::Dup { .. } | Step::Invalidate { .. } => {}
            Step::Shrink { bytes } => {
                let before = self.zswap.pool_bytes();
                assert_eq!(self.zswap.shrink(bytes.bytes()), before - self.zswap.pool_bytes());
            }
            Step::Work => {
                let before = self.zswap.pool_bytes();
                assert_eq!(self.zswap.shrink_until_accepting(), before - self.zswap.pool_bytes());
            }
            Step::Scan { group, node, entries } => {
                let group = self.group(group);
                let (handle, before) = (self.groups[group].group, self.zswap.counters().written_back_pages);
                self.zswap.shrinker_count(handle, node);
                let written = self.zswap.shrinker_scan(handle, node, entries.bytes());
                assert_eq!(self.zswap.counters().written_back_pages, before + written);
                assert!(written == 0 || self.may_write_back(group), "written although that is forbidden");
            }
            Step::Compact => {
                let before = self.zswap.pool_bytes();
                assert_eq!(self.zswap.compact(), before - self.zswap.pool_bytes());
            }
            Step::CreateGroup { parent } => {
                let parent = self.group(parent);
                match self.zswap.create_group(self.groups[parent].group) {
                    Ok(group) => {
                        self.groups.push(Known { group, parent, removed: false, writeback: true, zswap_max: None, swap_max: None })
                    }
                    Err(error) => assert_eq!((error, self.groups[parent].removed), (GroupError::Gone, true)),
                }
            }
            Step::RemoveGroup { group } => self.remove(self.group(group)),
            Step::TakeOffline { group } => drop(self.change(group, Zswap::take_group_offline)),
            Step::SetZswapMax { group, bytes } => {
                let max = bytes.map(Amount::bytes);
                if let Some(known) = self.change(group, |zswap, group| zswap.set_zswap_max(group, max)) {
                    known.zswap_max = max;
                }
            }
            Step::SetSwapMax { group, bytes } => {
                let max = bytes.map(Amount::bytes);
                if let Some(known) = self.change(group, |zswap, group| zswap.set_swap_max(group, max)) {
                    known.swap_max = max;
                }
            }
            Step::SetWriteback { group, allowed } => {
                if let Some(known) = self.change(group, |zswap, group| zswap.set_writeback(group, allowed)) {
                    known.writeback = allowed;
                }
            }
            Step::SetEnabled { on } => {
                self.enabled = on;
                self.zswap.set_enabled(on);
            }
            Step::SetShrinkerEnabled { on } => self.zswap.set_shrinker_enabled(on),
            Step::SetCompressor { name } => {
                if let Some(compressor) = name.choice(&Compressor::ALL, Compressor::name) {
                    self.zswap.set_compressor(compressor);
                    assert_eq!(self.zswap.pools()[0].0, compressor);
                }
            }
            Step::SetZpool { name } => {
                if let Some(zpool) = name.choice(&Zpool::ALL, Zpool::name) {
                    self.zswap.set_zpool(zpool);
                    assert_eq!(self.zswap.pools()[0].1, zpool);
                }
            }
            Step::SetMaxPool { bytes } => self.zswap.set_max_pool_bytes(bytes.bytes()),
            Step::SetAcceptThreshold { percent } => self.zswap.set_accept_threshold(percent % 101),
        }
    }
}

fuzz_target!(|input: Input| {
    let config = Config {
        policy: Policy::ALL[input.policy as usize % Policy::ALL.len()],
        max_pool_bytes: input.max_pool_bytes.bytes(),
        accept_threshold_percent: input.accept_threshold_percent % 101,
        swap_limit_bytes: input.swap_limit_bytes.map(Amount::bytes),
        ..Config::default()
    };
    let swap = input.swap.then(|| Box::new(HeapSwapFile::default()) as Box<dyn SwapFile>);
    let zswap = Zswap::new(config, swap, HeapSource);
    let root = Known { group: Group::ROOT, parent: 0, removed: false, writeback: true, zswap_max: None, swap_max: None };
    let mut machine = Machine { zswap, groups: vec![root], owned: Vec::new(), enabled: true };
    for step in input.steps {
        machine.step(step);
        machine.zswap.check_valid();
    }
    for owned in std::mem::take(&mut machine.owned) {
        machine.load(owned);
        machine.zswap.invalidate(owned.0);
    }
    (0..machine.groups.len()).rev().for_each(|group| machine.remove(group));
    machine.zswap.check_valid();
    let counters = machine.zswap.counters();
    assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
    assert_eq!(machine.zswap.pools().len(), 1, "retired pools are gone");
});

//! Any sequence of operations, with any faults, against a model that is a map.

use crate::common::*;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_engine::*;

#[derive(Debug, Clone)]
enum Step {
    SwapOut { kind: u8, seed: u64, group: prop::sample::Index, node: u8 },
    SwapOutFolio { order: u32, seed: u64, group: prop::sample::Index },
    LoadFolio { first: prop::sample::Index, order: u32 },
    Load { which: prop::sample::Index },
    Dup { which: prop::sample::Index },
    Invalidate { which: prop::sample::Index },
    Shrink { bytes: u64 },
    Work,
    Scan { group: prop::sample::Index, node: u8, entries: u64 },
    CreateGroup { parent: prop::sample::Index },
    RemoveGroup { which: prop::sample::Index },
    TakeOffline { which: prop::sample::Index },
    SetZswapMax { which: prop::sample::Index, pages: Option<u64> },
    SetSwapMax { which: prop::sample::Index, pages: Option<u64> },
    SetWriteback { which: prop::sample::Index, allowed: bool },
    Compact,
    SetCompressor { index: usize },
    SetZpool { index: usize },
    SetEnabled { on: bool },
    SetCap { pages: u64 },
    SetThreshold { percent: u8 },
    Fault { kind: u8, on: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<prop::sample::Index>;
    prop_oneof![
        10 => (0u8..4, 0u64..50, which(), 0u8..3)
            .prop_map(|(kind, seed, group, node)| Step::SwapOut { kind, seed, group, node }),
        2 => (0u32..4, 0u64..50, which()).prop_map(|(order, seed, group)| Step::SwapOutFolio { order, seed, group }),
        2 => (which(), 0u32..4).prop_map(|(first, order)| Step::LoadFolio { first, order }),
        4 => which().prop_map(|which| Step::Load { which }),
        2 => which().prop_map(|which| Step::Dup { which }),
        6 => which().prop_map(|which| Step::Invalidate { which }),
        3 => prop_oneof![0u64..100_000, Just(u64::MAX)].prop_map(|bytes| Step::Shrink { bytes }),
        2 => Just(Step::Work),
        2 => (which(), 0u8..3, 0u64..40).prop_map(|(group, node, entries)| Step::Scan { group, node, entries }),
        2 => which().prop_map(|parent| Step::CreateGroup { parent }),
        2 => which().prop_map(|which| Step::RemoveGroup { which }),
        1 => which().prop_map(|which| Step::TakeOffline { which }),
        1 => (which(), prop::option::of(0u64..10)).prop_map(|(which, pages)| Step::SetZswapMax { which, pages }),
        1 => (which(), prop::option::of(0u64..20)).prop_map(|(which, pages)| Step::SetSwapMax { which, pages }),
        1 => (which(), any::<bool>()).prop_map(|(which, allowed)| Step::SetWriteback { which, allowed }),
        1 => Just(Step::Compact),
        1 => (0usize..4).prop_map(|index| Step::SetCompressor { index }),
        1 => (0usize..2).prop_map(|index| Step::SetZpool { index }),
        1 => prop::bool::weighted(0.7).prop_map(|on| Step::SetEnabled { on }),
        1 => (0u64..40).prop_map(|pages| Step::SetCap { pages }),
        1 => (0u8..=100).prop_map(|percent| Step::SetThreshold { percent }),
        2 => (0u8..6, any::<bool>()).prop_map(|(kind, on)| Step::Fault { kind, on }),
    ]
}

fn content(kind: u8, seed: u64) -> Page {
    match kind {
        0 => page(seed),
        1 => noise(seed),
        2 => [seed as u8; PAGE_SIZE],
        _ => std::array::from_fn(|i| (i as u64 / (seed + 1)) as u8),
    }
}

/// The tree as it should be, besides the root.
#[derive(Default)]
struct Tree {
    /// Each group, its parent, and whether it may write back.
    groups: Vec<(Group, Group, bool)>,
    root_is_read_only: bool,
    /// In pages.
    swap_max: HashMap<Group, u64>,
}

impl Tree {
    fn pick(&self, which: prop::sample::Index) -> Group {
        let index = which.index(self.groups.len() + 1);
        self.groups.get(index).map_or(Group::ROOT, |(group, ..)| *group)
    }

    fn may_write_back(&self, group: Group) -> bool {
        match self.groups.iter().find(|(found, ..)| *found == group) {
            None => !self.root_is_read_only,
            Some(&(_, parent, allowed)) => allowed && self.may_write_back(parent),
        }
    }

    /// How many pages the limits of a group and of those above it still let out.
    fn swap_room(&self, zswap: &Zswap, group: Group) -> u64 {
        let counters = zswap.group_counters(group).unwrap();
        let held = (counters.zswapped + counters.swapped) / 4096;
        let own = self.swap_max.get(&group).map_or(u64::MAX, |max| max.saturating_sub(held));
        let parent = self.groups.iter().find(|(found, ..)| *found == group).map(|(_, parent, _)| *parent);
        own.min(parent.map_or(u64::MAX, |parent| self.swap_room(zswap, parent)))
    }

    fn set_writeback(&mut self, group: Group, allowed: bool) {
        match self.groups.iter_mut().find(|(found, ..)| *found == group) {
            None => self.root_is_read_only = !allowed,
            Some(found) => found.2 = allowed,
        }
    }
}

fn run(policy: Policy, writeback: Writeback, swap: bool, limit: Option<u64>, steps: Vec<Step>) {
    let swap_limit_bytes = limit.map(|pages| pages * 4096);
    let config = Config { policy, writeback, max_pool_bytes: 30 * 4096, swap_limit_bytes, ..ROOMY };
    let (zswap, faults) = zswap(config, swap);
    let mut tree = Tree::default();
    // One element for each reference.
    let mut model: Vec<(Slot, Page)> = Vec::new();
    for step in steps {
        let pick = |which: prop::sample::Index| (!model.is_empty()).then(|| which.index(model.len()));
        let refused = |error, group, room, pages| match error {
            SwapOutError::SwapMax => assert!(room < pages, "refused with room for {room} of {pages}"),
            _ if room < pages => panic!("refused for another reason: {error}"),
            SwapOutError::Io(_) => assert!(faults.write_errors.load(Relaxed) || faults.short_writes.load(Relaxed)),
            SwapOutError::WritebackForbidden => assert!(!tree.may_write_back(group)),
            SwapOutError::NoSpace => {}
            SwapOutError::NoGroup => panic!("{group:?} is there"),
        };
        match step {
            Step::SwapOut { kind, seed, group, node } => {
                let page = content(kind, seed);
                let group = tree.pick(group);
                let room = tree.swap_room(&zswap, group);
                assert_eq!(zswap.swap_room(group, 1), room.min(1));
                match zswap.swap_out(&page, Home { group, node }) {
                    Ok(slot) => {
                        assert!(model.iter().all(|(other, _)| *other != slot), "a slot in use is given out");
                        assert!(room >= 1, "past a limit");
                        model.push((slot, page));
                    }
                    Err(error) => refused(error, group, room, 1),
                }
            }
            Step::SwapOutFolio { order, seed, group } => {
                let pages: Vec<Page> = (0..1 << order).map(|i| content((seed % 4) as u8, seed + i)).collect();
                let group = tree.pick(group);
                let pages_held = || zswap.counters().stored_pages + zswap.counters().swapped_pages;
                let before = pages_held();
                let room = tree.swap_room(&zswap, group);
                match zswap.swap_out_folio(&pages, Home { group, node: 0 }) {
                    Ok(slots) => {
                        assert!(room >= pages.len() as u64, "past a limit");
                        model.extend(slots.into_iter().zip(pages));
                    }
                    Err(error) => {
                        refused(error, group, room, pages.len() as u64);
                        // A group at its limit may have been shrunk for it.
                        assert_eq!(pages_held(), before, "nothing is left of it");
                    }
                }
            }
            Step::LoadFolio { first, order } => {
                let first = if model.is_empty() { 0 } else { first.index(model.len()) };
                let Some(folio) = model.get(first..first + (1 << order)) else { continue };
                let slots: Vec<Slot> = folio.iter().map(|(slot, _)| *slot).collect();
                let mut loaded = vec![[0; PAGE_SIZE]; slots.len()];
                match zswap.load_folio(&slots, &mut loaded) {
                    Ok(_) => {
                        assert!(folio.iter().zip(&loaded).all(|((_, page), loaded)| page == loaded), "wrong bytes")
                    }
                    Err(LoadError::Io(_)) => assert!(faults.read_errors.load(Relaxed)),
                    Err(LoadError::Corrupt) => assert!(faults.damaged_reads.load(Relaxed)),
                }
            }
            Step::Work => {
                let before = zswap.pool_bytes();
                assert_eq!(zswap.shrink_until_accepting(), before - zswap.pool_bytes());
            }
            Step::Scan { group, node, entries } => {
                let group = tree.pick(group);
                let before = zswap.counters().written_back_pages;
                zswap.shrinker_count(group, node);
                let written = zswap.shrinker_scan(group, node, entries);
                assert_eq!(zswap.counters().written_back_pages, before + written);
                assert!(written == 0 || tree.may_write_back(group));
            }
            Step::CreateGroup { parent } => {
                let parent = tree.pick(parent);
                tree.groups.push((zswap.create_group(parent).unwrap(), parent, true));
            }
            Step::RemoveGroup { which } => {
                let group = tree.pick(which);
                let has_children = tree.groups.iter().any(|(_, parent, _)| *parent == group);
                let removed = zswap.remove_group(group);
                if group == Group::ROOT {
                    assert_eq!(removed, Err(GroupError::Root));
                } else if has_children {
                    assert_eq!(removed, Err(GroupError::HasChildren));
                } else {
                    assert_eq!(removed, Ok(()));
                    tree.groups.retain(|(other, ..)| *other != group);
                    tree.swap_max.remove(&group);
                }
            }
            Step::TakeOffline { which } => drop(zswap.take_group_offline(tree.pick(which))),
            Step::SetZswapMax { which, pages } => {
                zswap.set_zswap_max(tree.pick(which), pages.map(|pages| pages * 4096)).unwrap();
            }
            Step::SetSwapMax { which, pages } => {
                let group = tree.pick(which);
                zswap.set_swap_max(group, pages.map(|pages| pages * 4096)).unwrap();
                match pages {
                    Some(pages) => tree.swap_max.insert(group, pages),
                    None => tree.swap_max.remove(&group),
                };
            }
            Step::SetWriteback { which, allowed } => {
                let group = tree.pick(which);
                tree.set_writeback(group, allowed);
                zswap.set_writeback(group, allowed).unwrap();
            }
            Step::SetZpool { index } => zswap.set_zpool(Zpool::ALL[index]),
            Step::SetEnabled { on } => zswap.set_enabled(on),
            Step::Load { which } => {
                if let Some(index) = pick(which) {
                    let (slot, page) = &model[index];
                    let mut loaded = [0; PAGE_SIZE];
                    match zswap.load(*slot, &mut loaded) {
                        Ok(_) => assert!(loaded == *page, "wrong bytes"),
                        Err(LoadError::Io(_)) => assert!(faults.read_errors.load(Relaxed)),
                        Err(LoadError::Corrupt) => assert!(faults.damaged_reads.load(Relaxed)),
                    }
                }
            }
            Step::Dup { which } => {
                if let Some(index) = pick(which) {
                    zswap.dup(model[index].0);
                    model.push(model[index]);
                }
            }
            Step::Invalidate { which } => {
                if let Some(index) = pick(which) {
                    zswap.invalidate(model.swap_remove(index).0);
                }
            }
            Step::Shrink { bytes } => {
                let before = zswap.pool_bytes();
                assert_eq!(zswap.shrink(bytes), before - zswap.pool_bytes());
            }
            Step::Compact => {
                let before = zswap.pool_bytes();
                assert_eq!(zswap.compact(), before - zswap.pool_bytes());
            }
            Step::SetCompressor { index } => zswap.set_compressor(Compressor::ALL[index]),
            Step::SetCap { pages } => zswap.set_max_pool_bytes(pages * 4096),
            Step::SetThreshold { percent } => zswap.set_accept_threshold(percent),
            Step::Fault { kind, on } => fault(&faults, kind).store(on, Relaxed),
        }
        zswap.check_valid();
        let most = swap_limit_bytes.unwrap_or(u64::MAX);
        assert!(zswap.counters().swap_current <= most && faults.data.lock().len() as u64 <= most, "beyond the limit");
    }
    (0..6).for_each(|kind| fault(&faults, kind).store(false, Relaxed));
    for (slot, page) in model {
        expect(&zswap, slot, &page);
        zswap.invalidate(slot);
    }
    zswap.check_valid();
    let counters = zswap.counters();
    assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
    assert_eq!(counters.swapped_pages, 0);
}

fn fault(faults: &Faults, kind: u8) -> &AtomicBool {
    match kind {
        0 => &faults.write_errors,
        1 => &faults.disk_full,
        2 => &faults.read_errors,
        3 => &faults.damaged_reads,
        4 => &faults.short_writes,
        _ => &faults.no_memory,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn every_page_comes_out_as_it_went_in(
        policy in prop_oneof![4 => Just(Policy::PerGroupLru), 1 => prop::sample::select(&Policy::ALL[..])],
        writeback in prop::sample::select(&Writeback::ALL[..]),
        swap in prop::bool::weighted(0.8),
        limit in prop::option::of(0u64..60),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        run(policy, writeback, swap, limit, steps);
    }
}

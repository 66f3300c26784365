//! A manager in miniature: groups in a list, processes that are numbers. What a real one would do is noted down.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use parking_lot::RwLock;
use uzswap_engine::{Compressor, Counters, FolioCounters, GroupCounters, Zpool};

use crate::Swapin;

use super::error::Error;
use super::machine::*;

/// A manager that remembers what it was told.
pub struct Mock(pub RwLock<State>);

/// What there is.
pub struct State {
    pub groups: BTreeMap<GroupId, Group>,
    next: u32,
    pub parameters: Parameters,
    pub folios: BTreeSet<usize>,
    pub swapin: Swapin,
    /// What was killed and reclaimed.
    pub done: Vec<String>,
    /// Bytes that can be reclaimed.
    pub reclaimable: u64,
    /// How long it takes to reclaim.
    pub reclaim_takes: Duration,
    /// What [`Machine::figures`] gives.
    pub figures: Figures,
}

/// One group.
#[derive(Default)]
pub struct Group {
    parent: Option<GroupId>,
    name: String,
    owner: u32,
    limits: Vec<(Limit, Option<u64>)>,
    writeback: bool,
    shrinker: bool,
    pub processes: BTreeSet<i32>,
    frozen: bool,
}

impl Mock {
    /// A root with processes 100 and 101.
    pub fn new() -> Mock {
        let root = Group { processes: [100, 101].into(), writeback: true, shrinker: true, ..Group::default() };
        let parameters = Parameters {
            enabled: true,
            compressor: Compressor::Lz4,
            zpool: Zpool::Zsmalloc,
            max_pool_percent: 20,
            accept_threshold_percent: 90,
            shrinker_enabled: false,
        };
        Mock(RwLock::new(State {
            groups: [(GroupId::ROOT, root)].into(),
            next: 1,
            parameters,
            folios: BTreeSet::new(),
            swapin: Swapin::default(),
            done: Vec::new(),
            reclaimable: 1 << 20,
            reclaim_takes: Duration::ZERO,
            figures: Figures::default(),
        }))
    }

    fn with<T>(&self, group: GroupId, look: impl FnOnce(&mut Group) -> T) -> Result<T, Error> {
        self.0.write().groups.get_mut(&group).map(look).ok_or(Error::Gone)
    }
}

impl Machine for Mock {
    fn find(&self, parent: GroupId, name: &str) -> Option<GroupId> {
        let state = self.0.read();
        state.groups.iter().find(|(_, group)| group.parent == Some(parent) && group.name == name).map(|(&id, _)| id)
    }

    fn children(&self, group: GroupId) -> Result<Vec<String>, Error> {
        self.with(group, |_| ())?;
        let state = self.0.read();
        Ok(state.groups.values().filter(|child| child.parent == Some(group)).map(|child| child.name.clone()).collect())
    }

    fn create(&self, parent: GroupId, name: &str, owner: u32) -> Result<GroupId, Error> {
        if self.find(parent, name).is_some() {
            return Err(Error::Exists);
        }
        let mut state = self.0.write();
        let id = GroupId(state.next);
        state.next += 1;
        let name = name.to_owned();
        let group = Group { parent: Some(parent), name, owner, writeback: true, shrinker: true, ..Group::default() };
        state.groups.insert(id, group);
        Ok(id)
    }

    fn remove(&self, group: GroupId) -> Result<(), Error> {
        if !self.children(group)?.is_empty() || !self.processes(group)?.is_empty() {
            return Err(Error::Busy);
        }
        self.0.write().groups.remove(&group);
        Ok(())
    }

    fn owner(&self, group: GroupId) -> Result<u32, Error> {
        self.with(group, |group| group.owner)
    }

    fn parent(&self, group: GroupId) -> Result<Option<GroupId>, Error> {
        self.with(group, |group| group.parent)
    }

    fn limit(&self, group: GroupId, limit: Limit) -> Result<Option<u64>, Error> {
        let of =
            |group: &mut Group| group.limits.iter().rev().find(|(which, _)| *which == limit).map(|(_, bytes)| *bytes);
        self.with(group, of).map(Option::flatten)
    }

    fn set_limit(&self, group: GroupId, limit: Limit, bytes: Option<u64>) -> Result<(), Error> {
        self.with(group, |group| group.limits.push((limit, bytes)))
    }

    fn writeback(&self, group: GroupId) -> Result<bool, Error> {
        self.with(group, |group| group.writeback)
    }

    fn set_writeback(&self, group: GroupId, allowed: bool) -> Result<(), Error> {
        self.with(group, |group| group.writeback = allowed)
    }

    fn shrinker(&self, group: GroupId) -> Result<bool, Error> {
        self.with(group, |group| group.shrinker)
    }

    fn set_shrinker(&self, group: GroupId, enabled: bool) -> Result<(), Error> {
        self.with(group, |group| group.shrinker = enabled)
    }

    fn processes(&self, group: GroupId) -> Result<Vec<i32>, Error> {
        self.with(group, |group| group.processes.iter().copied().collect())
    }

    fn move_process(&self, pid: i32, group: GroupId, may_leave: &MayLeave<'_>) -> Result<(), Error> {
        self.with(group, |_| ())?;
        let from =
            |state: &State| state.groups.iter().find(|(_, group)| group.processes.contains(&pid)).map(|(&id, _)| id);
        let from = from(&self.0.read()).ok_or(Error::NoProcess)?;
        may_leave(from)?;
        let mut state = self.0.write();
        let from = state.groups.values_mut().find(|group| group.processes.contains(&pid)).ok_or(Error::NoProcess)?;
        from.processes.remove(&pid);
        state.groups.get_mut(&group).expect("looked at just now").processes.insert(pid);
        Ok(())
    }

    fn frozen(&self, group: GroupId) -> Result<bool, Error> {
        self.with(group, |group| group.frozen)
    }

    fn set_frozen(&self, group: GroupId, frozen: bool) -> Result<(), Error> {
        self.with(group, |group| group.frozen = frozen)
    }

    fn kill(&self, group: GroupId) -> Result<(), Error> {
        self.with(group, |group| group.processes.clear())?;
        self.0.write().done.push(format!("kill {}", group.0));
        Ok(())
    }

    fn reclaim(&self, group: GroupId, bytes: u64) -> Result<bool, Error> {
        let takes = self.0.read().reclaim_takes;
        std::thread::sleep(takes);
        let mut state = self.0.write();
        state.done.push(format!("reclaim {} {bytes}", group.0));
        let enough = state.reclaimable >= bytes;
        state.reclaimable = state.reclaimable.saturating_sub(bytes);
        Ok(enough)
    }

    fn reclaim_pool(&self, group: GroupId, bytes: u64) -> Result<bool, Error> {
        self.0.write().done.push(format!("reclaim {} {bytes} of the pool", group.0));
        Ok(true)
    }

    fn stats(&self, group: GroupId) -> Result<String, Error> {
        self.with(group, |_| "{}".to_owned())
    }

    fn figures(&self, group: GroupId) -> Result<Figures, Error> {
        self.with(group, |_| ())?;
        Ok(self.0.read().figures.clone())
    }

    fn parameters(&self) -> Parameters {
        self.0.read().parameters
    }

    fn set_parameter(&self, parameter: Parameter) -> Result<(), Error> {
        let parameters = &mut self.0.write().parameters;
        match parameter {
            Parameter::Enabled(enabled) => parameters.enabled = enabled,
            Parameter::Compressor(compressor) => parameters.compressor = compressor,
            Parameter::Zpool(zpool) => parameters.zpool = zpool,
            Parameter::MaxPoolPercent(percent) => parameters.max_pool_percent = percent,
            Parameter::AcceptThresholdPercent(percent) => parameters.accept_threshold_percent = percent,
            Parameter::ShrinkerEnabled(enabled) => parameters.shrinker_enabled = enabled,
        }
        Ok(())
    }

    fn counters(&self) -> Counters {
        // Each different, so that one shown under another's name is seen.
        Counters {
            pool_limit_hit: 1,
            reject_reclaim_fail: 2,
            reject_alloc_fail: 3,
            reject_kmemcache_fail: 4,
            reject_compress_fail: 5,
            reject_compress_poor: 6,
            decompress_fail: 7,
            written_back_pages: 8,
            pool_total_size: 9,
            stored_pages: 10,
            stored_incompressible_pages: 11,
            same_filled_pages: 12,
            root: GroupCounters::default(),
            swap_current: 13,
            swapped_pages: 14,
        }
    }

    fn folio_counters(&self, order: usize) -> FolioCounters {
        let count = |number| 10 * order as u64 + number;
        FolioCounters {
            zswpout: count(1),
            zswpin: count(2),
            swpin: count(3),
            swpin_fallback: count(4),
            swpout: count(5),
            swpout_fallback: count(6),
        }
    }

    fn folio_swapin(&self, order: usize) -> bool {
        self.0.read().folios.contains(&order)
    }

    fn set_folio_swapin(&self, order: usize, enabled: bool) {
        let folios = &mut self.0.write().folios;
        if enabled {
            folios.insert(order);
        } else {
            folios.remove(&order);
        }
    }

    fn swapin(&self) -> Swapin {
        self.0.read().swapin
    }

    fn set_swapin(&self, rule: Swapin) {
        self.0.write().swapin = rule;
    }
}

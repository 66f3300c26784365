//! Groups: a tree of them, each with its limits, its counts, and an LRU for each node.
//!
//! 1. Whatever is charged to a group is charged to every group above it too, so a group's counts include its
//!    descendants', and the root's are the machine's.
//! 2. An entry stays charged to the group that stored it, wherever its owner moves.
//! 3. The entries of a removed group go to its parent, a list at a time. They go on naming the removed group, which forwards
//!    to its parent; whoever looks an entry's group up makes the entry, and each group passed, name the living one.
//! 4. A number is given to another group only when nothing names it, in any shard. Handles carry a generation besides, so
//!    one that outlives its group is recognised.
//! 5. Each shard has the whole tree, with the counts, the names and the LRUs of its own entries: see `shards`.

use crate::PAGE_SIZE;
use crate::counters::GroupCounters;
use crate::lru::Lru;
use crate::slots::{Slot, Slots};

/// The number of the root.
pub(crate) const ROOT: u16 = 0;

/// The name of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    number: u16,
    generation: u32,
}

impl Group {
    /// The group above all others.
    pub const ROOT: Group = Group { number: ROOT, generation: 0 };
}

/// Where a page lived before it was swapped out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Home {
    /// The group that pays for it.
    pub group: Group,
    /// The NUMA node its memory was on.
    pub node: u8,
}

impl Home {
    /// For whoever has neither groups nor nodes.
    pub const ROOT: Home = Home { group: Group::ROOT, node: 0 };
}

/// Why a group could not be made, changed or removed. Nothing has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The group was removed.
    #[error("the group was removed")]
    Gone,
    /// The group has children.
    #[error("the group has children: remove them first")]
    HasChildren,
    /// The root cannot be removed.
    #[error("the root group cannot be removed")]
    Root,
    /// There are 65536 groups, or removed groups that entries still name.
    #[error("too many groups: there are 65536 already, with those that entries remember")]
    TooMany,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Online,
    /// About to be removed: the shrink worker passes it by.
    Offline,
    /// Removed; its entries belong to another group, perhaps removed since.
    Forwards(u16),
}

struct Member {
    life: Life,
    generation: u32,
    parent: u16,
    children: u32,
    /// Entries, and removed groups, that name this number.
    names: u64,
    zswap_max: Option<u64>,
    swap_max: Option<u64>,
    writeback: bool,
    shrinker: bool,
    /// What stores into this shard may take of the limits without asking the other shards.
    lease: Lease,
    counters: GroupCounters,
    /// By node.
    lrus: Vec<Lru>,
}

/// Pages that one shard may store for a group before all shards are looked at again.
///
/// All leases of a group together are no more than what it may still store: so its limits hold though no shard asks another.
/// What makes that less than it was, a lower limit, ends all leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Lease {
    /// Of `zswap_max`; each page is taken to need all of its bytes.
    pub zswap: u64,
    /// Of `swap_max`.
    pub swap: u64,
}

/// Which lists a scan may take from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All that are online and may write back.
    All,
    /// Those of a group and everything below it.
    Below(u16),
    One(u16, u8),
}

/// Where a round of visits stands. A number, so that it outlives the group it names.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    pub group: u16,
    pub node: u8,
}

pub(crate) struct Groups {
    members: Vec<Member>,
    /// Living groups with a `swap_max`: as long as there is none, nobody looks for one.
    swap_limits: u32,
}

impl Groups {
    pub fn new() -> Groups {
        Groups { members: vec![Member::new(ROOT, 0)], swap_limits: 0 }
    }

    /// Numbers there are, in use or not: those below this one.
    pub fn numbers(&self) -> usize {
        self.members.len()
    }

    /// Whether a number's group was removed and nothing names it.
    pub fn is_vacant(&self, number: u16) -> bool {
        matches!(self.member(number).life, Life::Forwards(_)) && self.member(number).names == 0
    }

    /// Whether the number of a group that was removed cannot be another's yet: something names it, in this shard.
    pub fn is_remembered(&self, group: Group) -> bool {
        let member = self.member(group.number);
        member.generation == group.generation && matches!(member.life, Life::Forwards(_)) && member.names > 0
    }

    /// A group below a living one, of a number that is vacant, or the next.
    pub fn create(&mut self, parent: u16, number: u16) -> Group {
        if number as usize == self.members.len() {
            self.members.push(Member::new(ROOT, 0));
        } else if let Life::Forwards(to) = self.member(number).life {
            self.unname(to);
        }
        let generation = self.member(number).generation.wrapping_add(1);
        *self.member_mut(number) = Member::new(parent, generation);
        self.member_mut(parent).children += 1;
        Group { number, generation }
    }

    /// Removes a group without children; its parent inherits its entries, as the coldest.
    pub fn remove(&mut self, slots: &mut Slots, group: Group) -> Result<(), GroupError> {
        let number = self.find(group).ok_or(GroupError::Gone)?;
        if number == ROOT {
            return Err(GroupError::Root);
        }
        let member = self.member_mut(number);
        if member.children > 0 {
            return Err(GroupError::HasChildren);
        }
        let parent = member.parent;
        member.life = Life::Forwards(parent);
        let limits_swap = member.swap_max.take().is_some();
        let lrus = std::mem::take(&mut member.lrus);
        for (node, lru) in lrus.into_iter().enumerate().filter(|(_, lru)| lru.len() > 0) {
            self.lru_mut(parent, node as u8).inherit(slots, lru);
        }
        self.swap_limits -= u32::from(limits_swap);
        let heir = self.member_mut(parent);
        heir.children -= 1;
        heir.names += 1;
        Ok(())
    }

    /// The number of a group that has not been removed.
    pub fn find(&self, Group { number, generation }: Group) -> Option<u16> {
        let member = self.members.get(number as usize)?;
        let there = member.generation == generation && matches!(member.life, Life::Online | Life::Offline);
        there.then_some(number)
    }

    fn member(&self, number: u16) -> &Member {
        &self.members[number as usize]
    }

    fn member_mut(&mut self, number: u16) -> &mut Member {
        &mut self.members[number as usize]
    }

    pub fn set_offline(&mut self, number: u16) {
        self.member_mut(number).life = Life::Offline;
    }

    pub fn set_zswap_max(&mut self, number: u16, bytes: Option<u64>) {
        self.member_mut(number).zswap_max = bytes;
        self.set_lease(number, Lease::default());
    }

    pub fn set_swap_max(&mut self, number: u16, bytes: Option<u64>) {
        let before = std::mem::replace(&mut self.member_mut(number).swap_max, bytes);
        self.swap_limits += u32::from(bytes.is_some());
        self.swap_limits -= u32::from(before.is_some());
        self.set_lease(number, Lease::default());
    }

    pub fn set_shrinker(&mut self, number: u16, enabled: bool) {
        self.member_mut(number).shrinker = enabled;
    }

    pub fn set_lease(&mut self, number: u16, lease: Lease) {
        self.member_mut(number).lease = lease;
    }

    /// Takes room for `pages` in the pool from this shard's leases of all limited groups on the path; false, and nothing is taken,
    /// if one has too little. What they may swap out besides is only looked at.
    pub fn take_lease(&mut self, number: u16, pages: u64) -> bool {
        let suffices = |member: &Member| {
            (member.zswap_max.is_none() || member.lease.zswap >= pages)
                && (member.swap_max.is_none() || member.lease.swap >= pages)
        };
        self.take_from(number, suffices, |lease| lease.zswap = lease.zswap.saturating_sub(pages))
    }

    /// Takes one page from this shard's leases of what the groups on the path may swap out; false, and nothing is taken, if one
    /// has none.
    pub fn take_swap_lease(&mut self, number: u16) -> bool {
        let suffices = |member: &Member| member.swap_max.is_none() || member.lease.swap > 0;
        self.take_from(number, suffices, |lease| lease.swap = lease.swap.saturating_sub(1))
    }

    fn take_from(&mut self, number: u16, suffices: impl Fn(&Member) -> bool, take: impl Fn(&mut Lease)) -> bool {
        if !self.path(number).all(|number| suffices(self.member(number))) {
            return false;
        }
        let mut number = number;
        loop {
            let member = self.member_mut(number);
            take(&mut member.lease);
            if number == ROOT {
                return true;
            }
            number = member.parent;
        }
    }

    pub fn set_writeback(&mut self, number: u16, allowed: bool) {
        self.member_mut(number).writeback = allowed;
    }

    pub fn counters(&self, number: u16) -> &GroupCounters {
        &self.member(number).counters
    }

    pub fn counters_mut(&mut self, number: u16) -> &mut GroupCounters {
        &mut self.member_mut(number).counters
    }

    /// A group and those above it, the root last.
    pub fn path(&self, number: u16) -> impl Iterator<Item = u16> {
        std::iter::successors(Some(number), |&number| (number != ROOT).then(|| self.member(number).parent))
    }

    /// Changes the counts of a group and of all above it.
    pub fn charge(&mut self, number: u16, change: impl Fn(&mut GroupCounters)) {
        let mut number = number;
        loop {
            let member = self.member_mut(number);
            change(&mut member.counters);
            if number == ROOT {
                break;
            }
            number = member.parent;
        }
    }

    /// Charges an object of `length` bytes, or takes the charge back.
    pub fn charge_object(&mut self, number: u16, length: usize, stored: bool) {
        let page = PAGE_SIZE as u64;
        let (length, incompressible) = (length as u64, if length == PAGE_SIZE { page } else { 0 });
        let change = |gauge: &mut u64, bytes: u64| if stored { *gauge += bytes } else { *gauge -= bytes };
        self.charge(number, |counters| {
            change(&mut counters.zswap, length);
            change(&mut counters.zswapped, page);
            change(&mut counters.zswap_incomp, incompressible);
        });
    }

    /// Whether a group and all above it allow writeback.
    pub fn may_write_back(&self, number: u16) -> bool {
        self.path(number).all(|number| self.member(number).writeback)
    }

    /// Whether a group and all above it leave its entries to the pressure-driven shrinker.
    pub fn may_shrink(&self, number: u16) -> bool {
        self.path(number).all(|number| self.member(number).shrinker) && self.may_write_back(number)
    }

    /// A group's limit in compressed bytes.
    pub fn zswap_max(&self, number: u16) -> Option<u64> {
        self.member(number).zswap_max
    }

    /// A group's limit in bytes swapped out, wherever they are.
    pub fn swap_max(&self, number: u16) -> Option<u64> {
        self.member(number).swap_max
    }

    /// Whether a group, or one above it, has a limit of either kind.
    pub fn is_limited(&self, number: u16) -> bool {
        self.path(number).any(|number| self.member(number).zswap_max.is_some()) || self.is_swap_limited(number)
    }

    /// Whether a group, or one above it, has a limit to what is swapped out.
    pub fn is_swap_limited(&self, number: u16) -> bool {
        self.swap_limits > 0 && self.path(number).any(|number| self.member(number).swap_max.is_some())
    }
}

impl Groups {
    /// An entry names a group.
    pub fn name(&mut self, number: u16) {
        self.member_mut(number).names += 1;
    }

    /// An entry that names a group has gone, or names another.
    pub fn unname(&mut self, number: u16) {
        self.member_mut(number).names -= 1;
    }

    /// The living group that has what names `number`. Groups passed on the way forward to it directly from now on.
    #[inline]
    pub fn resolve(&mut self, number: u16) -> u16 {
        if let Life::Forwards(_) = self.member(number).life { self.follow(number) } else { number }
    }

    fn follow(&mut self, number: u16) -> u16 {
        let mut living = number;
        while let Life::Forwards(to) = self.member(living).life {
            living = to;
        }
        let mut passed = number;
        while let Life::Forwards(to) = self.member(passed).life {
            if to != living {
                self.member_mut(passed).life = Life::Forwards(living);
                self.name(living);
                self.unname(to);
            }
            passed = to;
        }
        living
    }

    /// The list of a group and node.
    pub fn lru_mut(&mut self, number: u16, node: u8) -> &mut Lru {
        let lrus = &mut self.member_mut(number).lrus;
        if lrus.len() <= node as usize {
            lrus.resize_with(node as usize + 1, Lru::default);
        }
        &mut lrus[node as usize]
    }

    /// Entries on the list of a group and node.
    pub fn listed(&self, number: u16, node: u8) -> u32 {
        self.member(number).lrus.get(node as usize).map_or(0, Lru::len)
    }

    /// Nodes that a group may have entries from: those below this one.
    pub fn nodes(&self, number: u16) -> usize {
        self.member(number).lrus.len()
    }

    /// The coldest entry of a group and node.
    pub fn coldest(&self, slots: &Slots, number: u16, node: u8) -> Option<Slot> {
        self.member(number).lrus.get(node as usize)?.coldest(slots)
    }

    pub fn eligible(&self, scope: Scope, number: u16) -> bool {
        let online = self.member(number).life == Life::Online;
        let inside = match scope {
            Scope::All => online,
            Scope::Below(top) => online && self.path(number).any(|above| above == top),
            Scope::One(only, _) => number == only,
        };
        inside && self.may_write_back(number)
    }

    /// Entries that a scan can meet.
    pub fn entries(&self, scope: Scope) -> u64 {
        if let Scope::One(number, node) = scope {
            return if self.eligible(scope, number) { self.listed(number, node) as u64 } else { 0 };
        }
        let listed = |number: u16| self.member(number).lrus.iter().map(|lru| lru.len() as u64).sum::<u64>();
        let numbers = (0..self.members.len()).map(|number| number as u16);
        // What has no entries need not be judged.
        numbers
            .map(|number| (number, listed(number)))
            .filter(|(number, n)| *n > 0 && self.eligible(scope, *number))
            .map(|(_, n)| n)
            .sum()
    }

    /// Whether what must be the same in all shards is the same in two.
    pub fn is_same_tree(&self, other: &Groups) -> bool {
        let of = |member: &Member| {
            // A group that was removed forwards as far as its shard has followed.
            let life = Some(member.life).filter(|life| !matches!(life, Life::Forwards(_)));
            (
                life,
                member.generation,
                member.parent,
                member.children,
                (member.zswap_max, member.swap_max),
                (member.writeback, member.shrinker),
            )
        };
        self.members.iter().map(of).eq(other.members.iter().map(of))
    }

    /// Every group that has not been removed.
    pub fn living(&self) -> impl Iterator<Item = u16> {
        let there = |member: &Member| matches!(member.life, Life::Online | Life::Offline);
        self.members.iter().enumerate().filter(move |(_, member)| there(member)).map(|(number, _)| number as u16)
    }

    /// Panics if the tree, its names or its lists contradict each other; `names` are the groups that entries name.
    /// Returns the slots on each list.
    pub fn check_valid(&self, slots: &mut Slots, names: impl Iterator<Item = u16>) -> Vec<((u16, u8), Vec<Slot>)> {
        let mut named = vec![0; self.members.len()];
        names.for_each(|number| named[number as usize] += 1);
        let mut children = vec![0; self.members.len()];
        let mut lists = Vec::new();
        for (number, member) in self.members.iter().enumerate() {
            match member.life {
                Life::Forwards(to) => named[to as usize] += 1,
                Life::Online | Life::Offline if number as u16 != ROOT => children[member.parent as usize] += 1,
                Life::Online | Life::Offline => {}
            }
            for (node, lru) in member.lrus.iter().enumerate() {
                lists.push(((number as u16, node as u8), lru.check_valid(slots)));
            }
        }
        let swap_limits = self.members.iter().filter(|member| member.swap_max.is_some()).count();
        assert_eq!(self.swap_limits as usize, swap_limits, "groups with a limit to what is swapped out");
        for (number, member) in self.members.iter().enumerate() {
            let living = matches!(member.life, Life::Online | Life::Offline);
            assert_eq!(member.names, named[number], "names of group {number}");
            assert!(
                living || (member.lrus.is_empty() && children[number] == 0),
                "group {number} is removed and in use"
            );
            assert!(!living || member.children == children[number], "children of group {number}");
        }
        lists
    }
}

impl Member {
    fn new(parent: u16, generation: u32) -> Member {
        Member {
            life: Life::Online,
            generation,
            parent,
            children: 0,
            names: 0,
            zswap_max: None,
            swap_max: None,
            writeback: true,
            shrinker: true,
            lease: Lease::default(),
            counters: GroupCounters::default(),
            lrus: Vec::new(),
        }
    }
}

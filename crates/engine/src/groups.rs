//! Groups: a tree of them, each with its limits, its counts, and an LRU for each node.
//!
//! 1. Whatever is charged to a group is charged to every group above it too, so a group's counts include its
//!    descendants', and the root's are the machine's.
//! 2. An entry stays charged to the group that stored it, wherever its owner moves.
//! 3. The entries of a removed group go to its parent, a list at a time. They go on naming the removed group, which forwards
//!    to its parent; whoever looks an entry's group up makes the entry, and each group passed, name the living one.
//! 4. A number is given to another group only when nothing names it. Handles carry a generation besides, so one
//!    that outlives its group is recognised.

use crate::PAGE_SIZE;
use crate::counters::GroupCounters;
use crate::lru::Lru;
use crate::slots::Slots;

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
    /// The number waits for a group.
    Vacant,
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
    writeback: bool,
    counters: GroupCounters,
    /// By node.
    lrus: Vec<Lru>,
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
    group: u16,
    node: u8,
}

pub(crate) struct Groups {
    members: Vec<Member>,
    vacant: Vec<u16>,
    /// Where the shrink worker stopped.
    pub cursor: Cursor,
}

impl Groups {
    pub fn new() -> Groups {
        let mut groups = Groups { members: Vec::new(), vacant: Vec::new(), cursor: Cursor::default() };
        groups.members.push(Member::new(ROOT, 0));
        groups
    }

    pub fn create(&mut self, parent: Group) -> Result<Group, GroupError> {
        let parent = self.find(parent).ok_or(GroupError::Gone)?;
        let number = match self.vacant.pop() {
            Some(number) => number,
            None => {
                let number = u16::try_from(self.members.len()).map_err(|_| GroupError::TooMany)?;
                self.members.push(Member::new(ROOT, 0));
                number
            }
        };
        let generation = self.member(number).generation.wrapping_add(1);
        *self.member_mut(number) = Member::new(parent, generation);
        self.member_mut(parent).children += 1;
        Ok(Group { number, generation })
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
        let lrus = std::mem::take(&mut member.lrus);
        for (node, lru) in lrus.into_iter().enumerate().filter(|(_, lru)| lru.len() > 0) {
            self.lru_mut(parent, node as u8).inherit(slots, lru);
        }
        let heir = self.member_mut(parent);
        heir.children -= 1;
        heir.names += 1;
        self.vacate_unnamed(number);
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

    /// Bytes by which a group is not below its limit.
    pub fn above_limit(&self, number: u16) -> u64 {
        let Member { zswap_max, counters, .. } = self.member(number);
        zswap_max.map_or(0, |max| (counters.zswap + 1).saturating_sub(max))
    }

    /// The first group on the path that has reached its limit, and that limit.
    pub fn at_limit(&self, number: u16) -> Option<(u16, u64)> {
        self.path(number).find_map(|number| {
            let Member { zswap_max, counters, .. } = self.member(number);
            zswap_max.filter(|max| counters.zswap >= *max).map(|max| (number, max))
        })
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
        self.vacate_unnamed(number);
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

    /// Gives a removed group's number free if nothing names it, and then perhaps the one it forwards to, and so on.
    fn vacate_unnamed(&mut self, number: u16) {
        let mut number = number;
        while let Member { life: Life::Forwards(to), names: 0, .. } = *self.member(number) {
            self.member_mut(number).life = Life::Vacant;
            self.vacant.push(number);
            self.member_mut(to).names -= 1;
            number = to;
        }
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

    fn eligible(&self, scope: Scope, number: u16) -> bool {
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

    /// Moves the cursor on to the next list that a scan may take from, after at most a whole round; None if there is
    /// none.
    pub fn next_list(&self, scope: Scope, cursor: &mut Cursor) -> Option<(u16, u8)> {
        if let Scope::One(number, node) = scope {
            return (self.entries(scope) > 0).then_some((number, node));
        }
        let groups = self.members.len();
        let start = (cursor.group as usize).min(groups - 1);
        // The group that the cursor stands in comes twice: the nodes after the cursor first, the others last.
        for step in 0..=groups {
            let number = ((start + step) % groups) as u16;
            let lrus = &self.member(number).lrus;
            let from = if step == 0 { cursor.node as usize + 1 } else { 0 };
            let node = (from..lrus.len()).find(|&node| lrus[node].len() > 0);
            if let Some(node) = node.filter(|_| self.eligible(scope, number)) {
                *cursor = Cursor { group: number, node: node as u8 };
                return Some((number, node as u8));
            }
        }
        None
    }

    /// Every group that has not been removed.
    pub fn living(&self) -> impl Iterator<Item = u16> {
        let there = |member: &Member| matches!(member.life, Life::Online | Life::Offline);
        self.members.iter().enumerate().filter(move |(_, member)| there(member)).map(|(number, _)| number as u16)
    }

    /// Panics if the tree, its names or its lists contradict each other; `names` are the groups that entries name.
    /// Returns the slots on each list.
    pub fn check_valid(&self, slots: &mut Slots, names: impl Iterator<Item = u16>) -> Vec<((u16, u8), Vec<u32>)> {
        let mut named = vec![0; self.members.len()];
        names.for_each(|number| named[number as usize] += 1);
        let mut children = vec![0; self.members.len()];
        let mut lists = Vec::new();
        for (number, member) in self.members.iter().enumerate() {
            match member.life {
                Life::Vacant => assert!(self.vacant.contains(&(number as u16)), "group {number} is lost"),
                Life::Forwards(to) => named[to as usize] += 1,
                Life::Online | Life::Offline if number as u16 != ROOT => children[member.parent as usize] += 1,
                Life::Online | Life::Offline => {}
            }
            for (node, lru) in member.lrus.iter().enumerate() {
                lists.push(((number as u16, node as u8), lru.check_valid(slots)));
            }
        }
        for (number, member) in self.members.iter().enumerate() {
            let living = matches!(member.life, Life::Online | Life::Offline);
            assert_eq!(member.names, named[number], "names of group {number}");
            assert!(
                living || (member.lrus.is_empty() && children[number] == 0),
                "group {number} is removed and in use"
            );
            assert!(!living || member.children == children[number], "children of group {number}");
            assert!(
                member.names > 0 || !matches!(member.life, Life::Forwards(_)),
                "group {number} forwards for nobody"
            );
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
            writeback: true,
            counters: GroupCounters::default(),
            lrus: Vec::new(),
        }
    }
}

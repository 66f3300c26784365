//! The tree of groups: their names, their accounts, and what protects one from the need of another.
//!
//! 1. A group is a number, a name below its parent, an account (`charge`), and a group of the engine's. All groups are in one
//!    map; after its lock only those of the engine are taken. The thread that looks must not be late, and finds the accounts
//!    without that lock.
//! 2. A group is removed only when it has no children and no processes. What the engine has stored for it goes to its
//!    parent, and so do its counts.
//! 3. Users make groups, and each group costs all users something: so they are bounded in number and in depth.
//! 4. A process that has no session yet belongs to the group of the process that it came from.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::RwLock;
use uzswap_engine::{Group, Zswap};
use uzswap_vm::pager::Counters;

use crate::bell::Bell;
use crate::charge::{Charge, LONGEST_PAUSE};
use crate::control::{Error, GroupId, Limit};

/// All groups.
pub struct Groups {
    engine: Arc<Zswap>,
    /// Wakes the reclaimer.
    pub bell: Arc<Bell>,
    /// Wakes the thread that looks: something else is to be seen from now on.
    pub watch_bell: Bell,
    tree: RwLock<Tree>,
    /// The accounts in the tree, for those who must not wait: written only to be replaced.
    charges: RwLock<Arc<[Arc<Charge>]>>,
}

#[derive(Debug, Default)]
struct Tree {
    next: u32,
    /// Parents come before their children.
    nodes: BTreeMap<GroupId, Node>,
    /// Groups that were removed, by the user whose they were, as far as these are counted.
    removed: HashMap<u32, Vec<Group>>,
}

#[derive(Debug)]
struct Node {
    name: String,
    /// The user whose it is.
    owner: u32,
    children: BTreeMap<String, GroupId>,
    charge: Arc<Charge>,
}

impl Tree {
    /// Counts the groups of a user.
    fn owned(&mut self, user: u32, engine: &Zswap) -> usize {
        let living = self.nodes.values().filter(|node| node.owner == user).count();
        let Some(removed) = self.removed.get_mut(&user) else { return living };
        if living + removed.len() >= MOST_OWNED {
            *removed = engine.remembered_groups(removed);
        }
        let owned = living + removed.len();
        self.removed.retain(|_, removed| !removed.is_empty());
        owned
    }

    /// Tells whether the groups of a user are counted.
    fn is_limited(&self, user: u32) -> bool {
        ![0, self.nodes[&ROOT].owner].contains(&user)
    }
}

impl std::fmt::Debug for Groups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Groups").finish_non_exhaustive()
    }
}

const ROOT: GroupId = GroupId::ROOT;

/// Most groups of one user, other than root and the manager's own. Groups that were removed count as long as pages are stored that remember
/// them.
const MOST_OWNED: usize = 1024;

/// Groups that are left to root and the manager's user.
const RESERVED: usize = 4096;

/// Most groups on the way from the root to the deepest. Each charge, each limit and each step of reclaim goes along all of them.
const MOST_DEEP: usize = 32;

impl Groups {
    /// The root alone.
    pub fn new(engine: Arc<Zswap>, bell: Arc<Bell>) -> Groups {
        let root = Arc::new(Charge::new(ROOT, Group::ROOT, None, bell.clone()));
        let charges = RwLock::new(Arc::from([root.clone()]));
        let owner = rustix::process::geteuid().as_raw();
        let node = Node { name: String::new(), owner, children: BTreeMap::new(), charge: root };
        let tree = RwLock::new(Tree { next: 1, nodes: BTreeMap::from([(ROOT, node)]), removed: HashMap::new() });
        Groups { engine, bell, watch_bell: Bell::default(), tree, charges }
    }

    /// The account of a group.
    pub fn get(&self, id: GroupId) -> Option<Arc<Charge>> {
        self.tree.read().nodes.get(&id).map(|node| node.charge.clone())
    }

    /// The account of the root.
    pub fn root(&self) -> Arc<Charge> {
        self.get(ROOT).expect("the root is always there")
    }

    /// Returns the account of a group of the engine's; `None` if the group has been removed.
    pub fn of_engine(&self, group: Group) -> Option<Arc<Charge>> {
        let tree = self.tree.read();
        tree.nodes.values().find(|node| node.charge.group == group).map(|node| node.charge.clone())
    }

    /// Whether the account is that of a group that there is: the number of one that was removed may be another's.
    pub fn has(&self, charge: &Arc<Charge>) -> bool {
        self.get(charge.id).is_some_and(|now| Arc::ptr_eq(&now, charge))
    }

    /// The account of the nearest group that there is, of this one and those above it.
    pub fn nearest(&self, charge: &Arc<Charge>) -> Arc<Charge> {
        let mut next = Some(charge);
        while let Some(charge) = next.filter(|charge| !self.has(charge)) {
            next = charge.parent.as_ref();
        }
        next.cloned().unwrap_or_else(|| self.root())
    }

    /// All accounts, parents before their children.
    pub fn all(&self) -> Arc<[Arc<Charge>]> {
        self.charges.read_recursive().clone()
    }

    /// To be called whenever the tree has changed.
    fn set_all(&self, tree: &Tree) {
        let charges = tree.nodes.values().map(|node| node.charge.clone()).collect();
        *self.charges.write() = charges;
    }

    /// The child of that name.
    pub fn child(&self, id: GroupId, name: &str) -> Option<GroupId> {
        self.tree.read().nodes.get(&id)?.children.get(name).copied()
    }

    /// Tells whether what a user takes is bounded: root and the manager's own user are free.
    pub fn is_limited(&self, user: u32) -> bool {
        self.tree.read().is_limited(user)
    }

    /// The user whose group it is.
    pub fn owner(&self, id: GroupId) -> Option<u32> {
        self.tree.read().nodes.get(&id).map(|node| node.owner)
    }

    /// The names of the children, in order.
    pub fn children(&self, id: GroupId) -> Option<Vec<String>> {
        self.tree.read().nodes.get(&id).map(|node| node.children.keys().cloned().collect())
    }

    /// The path of a group, from `/`.
    pub fn path(&self, charge: &Charge) -> String {
        let tree = self.tree.read();
        let names: Vec<&str> =
            charge.path().filter_map(|charge| tree.nodes.get(&charge.id)).map(|node| node.name.as_str()).collect();
        let path = names.into_iter().rev().collect::<Vec<_>>().join("/");
        if path.is_empty() { "/".to_owned() } else { path }
    }

    /// A new group of `owner`'s below `parent`.
    ///
    /// # Errors
    /// `Gone`, `Exists`; `NotPermitted` if it were too deep; `Again` if there are as many as there can be, which removed ones count for as long
    /// as something of theirs is stored, or if a user has as many as one may have.
    pub fn create(&self, parent: GroupId, name: &str, owner: u32) -> Result<GroupId, Error> {
        let tree = &mut *self.tree.write();
        if tree.is_limited(owner)
            && (tree.owned(owner, &self.engine) >= MOST_OWNED || self.engine.free_groups() <= RESERVED)
        {
            return Err(Error::Again);
        }
        let above = tree.nodes.get_mut(&parent).ok_or(Error::Gone)?;
        if above.charge.path().count() > MOST_DEEP {
            return Err(Error::NotPermitted("groups are at most 32 deep"));
        }
        if above.children.contains_key(name) {
            return Err(Error::Exists);
        }
        let group = self.engine.create_group(above.charge.group).map_err(|_| Error::Again)?;
        let id = GroupId(tree.next);
        tree.next += 1;
        above.children.insert(name.to_owned(), id);
        let charge = Arc::new(Charge::new(id, group, Some(above.charge.clone()), self.bell.clone()));
        tree.nodes.insert(id, Node { name: name.to_owned(), owner, children: BTreeMap::new(), charge });
        self.set_all(tree);
        Ok(id)
    }

    /// Removes a group that nothing is charged to any more.
    ///
    /// # Errors
    /// `Gone`; `Busy` if it has children. The root is always busy.
    pub fn remove(&self, id: GroupId) -> Result<(), Error> {
        let tree = &mut *self.tree.write();
        let node = tree.nodes.get(&id).ok_or(Error::Gone)?;
        let charge = node.charge.clone();
        let Some(parent) = charge.parent.as_ref().filter(|_| node.children.is_empty()) else {
            return Err(Error::Busy);
        };
        self.engine.remove_group(charge.group).map_err(|_| Error::Busy)?;
        let node = tree.nodes.remove(&id).expect("just seen");
        if tree.is_limited(node.owner) {
            tree.removed.entry(node.owner).or_default().push(charge.group);
        }
        tree.nodes.get_mut(&parent.id).expect("a parent outlives its children").children.remove(&node.name);
        for counter in EVERY_COUNTER {
            counter(&parent.counters).fetch_add(counter(&charge.counters).load(Relaxed), Relaxed);
        }
        self.set_all(tree);
        Ok(())
    }

    /// What has happened to the pages of a group and of all below it.
    pub fn counted(&self, id: GroupId, counter: fn(&Counters) -> &AtomicU64) -> u64 {
        let tree = self.tree.read();
        let below = tree.nodes.values().filter(|node| node.charge.is_below(id));
        below.map(|node| counter(&node.charge.counters).load(Relaxed)).sum()
    }

    /// Enters what was measured: resident bytes of processes, by the group each is in.
    pub fn measured(&self, processes: impl Iterator<Item = (Arc<Charge>, u64)>) {
        let charges = self.all();
        // First: what arrives meanwhile is counted twice rather than not at all.
        let coming: Vec<i64> = charges.iter().map(|charge| charge.coming()).collect();
        let mut anon: HashMap<GroupId, u64> = HashMap::new();
        for (charge, bytes) in processes {
            charge.path().for_each(|charge| *anon.entry(charge.id).or_default() += bytes);
        }
        charges.iter().for_each(|charge| charge.set_occupied(anon.contains_key(&charge.id)));
        let enter = |place: usize, pool: u64| {
            let charge: &Charge = &charges[place];
            charge.measured(anon.get(&charge.id).copied().unwrap_or(0), pool, coming[place]);
        };
        // The root, the first, pays for the pool as it is, the others for what of theirs is in it.
        enter(0, self.engine.pool_bytes());
        let below = &charges[1..];
        if below.is_empty() {
            return;
        }
        let groups: Vec<Group> = below.iter().map(|charge| charge.group).collect();
        self.engine.zswap_of(&groups, |shard, place, bytes| below[place].zswap[shard].store(bytes, Relaxed));
        for (place, charge) in below.iter().enumerate() {
            enter(place + 1, charge.zswap.iter().map(|bytes| bytes.load(Relaxed)).sum());
        }
    }

    /// How long nothing can happen in any group that must be seen, if `lead` bytes are touched besides.
    pub fn pause(&self, lead: u64) -> Duration {
        self.shortest(|charge| charge.pause(lead))
    }

    /// How long reclaim may wait, unless it is called.
    pub fn reclaim_pause(&self) -> Duration {
        self.shortest(Charge::reclaim_pause)
    }

    fn shortest(&self, pause: impl Fn(&Charge) -> Duration) -> Duration {
        let charges = self.all();
        let pauses = charges.iter().filter(|charge| charge.can_grow()).map(|charge| pause(charge));
        pauses.min().unwrap_or(LONGEST_PAUSE)
    }

    /// How many of so many pages a group may swap out. None at all is counted as a refusal.
    pub fn swap_room(&self, charge: &Charge, pages: usize) -> usize {
        match charge.path().any(|charge| charge.limit(Limit::SwapMax).is_some()) {
            true => self.engine.swap_room(charge.group, pages as u64) as usize,
            false => pages,
        }
    }

    /// Takes note of how much is swapped out, if it is more than ever. To be called when something has been.
    pub fn note_swap(&self) {
        let charges = self.all();
        let groups: Vec<Group> = charges.iter().map(|charge| charge.group).collect();
        for (charge, bytes) in charges.iter().zip(self.engine.swap_of(&groups)) {
            charge.swap_peak.fetch_max(bytes, Relaxed);
        }
    }

    /// How much of a group's charge is protected by `limit` (`Low` or `Min`) when `target`, which is above it, is
    /// reclaimed from. What the children of a group claim together is granted as far as the group itself is protected, to
    /// each in proportion to what it uses of its claim (as `memory.low` is described in the kernel's cgroup v2 document).
    pub fn protection(&self, charge: &Charge, target: GroupId, limit: Limit) -> u64 {
        if charge.id == target {
            return 0;
        }
        let Some(parent) = &charge.parent else { return 0 };
        let own = charge.limit(limit).unwrap_or(u64::MAX);
        if parent.id == target || own == 0 {
            return own;
        }
        let granted = self.protection(parent, target, limit);
        let claim = |charge: &Charge| charge.limit(limit).unwrap_or(u64::MAX).min(charge.current.load(Relaxed));
        let tree = self.tree.read();
        let siblings = tree.nodes.get(&parent.id).into_iter().flat_map(|node| node.children.values());
        let claims: u64 = siblings.filter_map(|id| tree.nodes.get(id)).map(|node| claim(&node.charge)).sum();
        if claims <= granted {
            return own.min(granted);
        }
        (u128::from(granted) * u128::from(claim(charge)) / u128::from(claims.max(1))) as u64
    }

    /// The groups whose own pages in the pool may be written back for the need of the host: all but those that are protected, and those
    /// below them. If nothing of others is in the pool it is those that have only `memory.low`, which is counted.
    pub fn exposed(&self) -> Vec<Arc<Charge>> {
        let all = self.all();
        let held = |limit| all.iter().filter(|it| self.protects(it, ROOT, limit)).map(|it| it.id).collect::<Vec<_>>();
        let (low, min) = (held(Limit::Low), held(Limit::Min));
        let is_below = |charge: &Charge, heads: &[GroupId]| charge.path().any(|above| heads.contains(&above.id));
        let is_free = |charge: &Charge| !is_below(charge, &low) && !is_below(charge, &min);
        let zswap = |charge: &Charge| self.engine.group_counters(charge.group).map_or(0, |counters| counters.zswap);
        // What is below a protected group is in the figure of that.
        let is_head = |charge: &Charge| !is_free(charge) && charge.parent.as_ref().is_none_or(|parent| is_free(parent));
        let kept: u64 = all.iter().filter(|charge| is_head(charge)).map(|charge| zswap(charge)).sum();
        if low.is_empty() || zswap(&all[0]) > kept {
            return all.iter().filter(|charge| is_free(charge)).cloned().collect();
        }
        self.note_low_gave_way();
        all.iter().filter(|charge| !is_below(charge, &min)).cloned().collect()
    }

    /// The groups whose pools may be shrunk for the need of `target`: itself, if no group below it is protected, or else those
    /// below that are not. If all are it is those that have only `memory.low`.
    pub fn unprotected(&self, target: &Charge) -> Vec<Arc<Charge>> {
        let free = self.unprotected_by(&[Limit::Low, Limit::Min], target);
        if free.is_empty() { self.unprotected_by(&[Limit::Min], target) } else { free }
    }

    /// As [`unprotected`](Self::unprotected), where only these limits protect: none if they protect all.
    pub fn unprotected_by(&self, limits: &[Limit], target: &Charge) -> Vec<Arc<Charge>> {
        let all = self.all();
        let below: Vec<&Arc<Charge>> = all.iter().filter(|charge| charge.is_below(target.id)).collect();
        let is_protected = |charge: &Charge| limits.iter().any(|limit| self.protects(charge, target.id, *limit));
        let protected: Vec<&Charge> = below.iter().map(|charge| &***charge).filter(|it| is_protected(it)).collect();
        let is_mixed = |id| protected.iter().any(|charge| charge.is_below(id));
        let is_free = |charge: &Charge| !charge.path().any(|above| protected.iter().any(|it| it.id == above.id));
        let heads = below.iter().filter(|charge| !is_mixed(charge.id) && is_free(charge));
        let is_top =
            |charge: &Charge| charge.id == target.id || charge.parent.as_ref().is_none_or(|parent| is_mixed(parent.id));
        heads.filter(|charge| is_top(charge)).map(|charge| (*charge).clone()).collect()
    }

    /// Counts that the protection of `memory.low` gave way to the need of the host.
    pub fn note_low_gave_way(&self) {
        let all = self.all();
        let low = all.iter().filter(|charge| self.protects(charge, ROOT, Limit::Low));
        low.for_each(|charge| charge.count(|events| &events.low));
    }

    /// Tells whether a limit protects all of a group's charge when `target`, above it, is reclaimed from.
    pub fn protects(&self, charge: &Charge, target: GroupId, limit: Limit) -> bool {
        let granted = self.protection(charge, target, limit);
        granted > 0 && charge.current.load(Relaxed) <= granted
    }
}

const EVERY_COUNTER: [fn(&Counters) -> &AtomicU64; 11] = [
    |counters| &counters.pgmajfault,
    |counters| &counters.readahead,
    |counters| &counters.rescued,
    |counters| &counters.thp_collapse_alloc,
    |counters| &counters.rested,
    |counters| &counters.zero_filled,
    |counters| &counters.pgscan,
    |counters| &counters.pgsteal,
    |counters| &counters.busy,
    |counters| &counters.discarded,
    |counters| &counters.stall_usec,
];

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_engine::{Config, HeapSource, Home};

    fn groups() -> Groups {
        let engine = Arc::new(Zswap::new(Config::default(), None, HeapSource));
        Groups::new(engine, Arc::default())
    }

    #[test]
    fn a_tree_of_names() {
        let groups = groups();
        let build = groups.create(ROOT, "build", 0).expect("room");
        let job = groups.create(build, "ci-17", 0).expect("room");
        assert_eq!(groups.create(ROOT, "build", 0), Err(Error::Exists));
        assert_eq!((groups.child(ROOT, "build"), groups.child(ROOT, "ci-17")), (Some(build), None));
        assert_eq!(groups.children(ROOT).expect("there"), ["build"]);
        let path = |id| groups.path(&groups.get(id).expect("there"));
        assert_eq!((path(job).as_str(), path(ROOT).as_str()), ("/build/ci-17", "/"));
        assert_eq!(groups.remove(build), Err(Error::Busy));
        assert_eq!(groups.remove(ROOT), Err(Error::Busy));
        groups.remove(job).expect("empty");
        groups.remove(build).expect("empty");
        assert_eq!((groups.remove(build), groups.children(build), groups.all().len()), (Err(Error::Gone), None, 1));
        let users = (0..MOST_OWNED).map(|number| groups.create(ROOT, &number.to_string(), 12345)).collect::<Vec<_>>();
        assert!(users.iter().all(Result::is_ok));
        assert_eq!(groups.create(users[0].clone().expect("room"), "one more", 12345), Err(Error::Again));
        assert!(groups.create(ROOT, "somebody else's", 12346).is_ok());
    }

    #[test]
    fn groups_are_not_deep() {
        let groups = groups();
        let nested = |id, _| groups.create(id, "below", 0);
        let deepest = (0..MOST_DEEP).try_fold(ROOT, nested).expect("room");
        assert!(matches!(groups.create(deepest, "below", 0), Err(Error::NotPermitted(_))));
    }

    #[test]
    fn a_removed_group_counts_as_long_as_pages_remember_it() {
        let groups = groups();
        let mut slots = Vec::new();
        for number in 0..MOST_OWNED as u32 {
            let id = groups.create(ROOT, "again", 12345).expect("room");
            let page = std::array::from_fn(|i| ((i as u32 / 7).wrapping_mul(number + 3) % 50) as u8);
            slots.push(
                groups
                    .engine
                    .swap_out(&page, Home { group: groups.get(id).expect("there").group, node: 0 })
                    .expect("room"),
            );
            groups.remove(id).expect("empty");
        }
        assert_eq!(groups.create(ROOT, "again", 12345), Err(Error::Again));
        assert!(groups.create(ROOT, "another's", 12346).is_ok());
        groups.engine.invalidate(slots.pop().expect("many"));
        assert!(groups.create(ROOT, "again", 12345).is_ok());
    }

    #[test]
    fn a_group_is_watched_for_its_processes_even_if_they_share_all_that_they_have() {
        let groups = groups();
        let small = groups.create(ROOT, "small", 0).expect("room");
        let charge = groups.get(small).expect("there");
        charge.set_limit(Limit::Max, Some(8 << 20));
        groups.measured(std::iter::empty());
        assert_eq!(groups.pause(0), LONGEST_PAUSE, "an empty group cannot grow");
        groups.measured([(charge.clone(), 0)].into_iter());
        assert!(groups.pause(0) <= Duration::from_millis(2));
        groups.measured(std::iter::empty());
        assert_eq!(groups.pause(0), LONGEST_PAUSE);
    }

    #[test]
    fn charges_and_counts_reach_every_group_above() {
        let groups = groups();
        let above = groups.create(ROOT, "above", 0).expect("room");
        let below = groups.create(above, "below", 0).expect("room");
        let charge = groups.get(below).expect("there");
        let page = std::array::from_fn(|i| (i / 7 % 50) as u8);
        groups.engine.swap_out(&page, Home { group: charge.group, node: 0 }).expect("room");
        charge.counters.pgsteal.fetch_add(3, Relaxed);
        groups.measured([(charge.clone(), 4096), (groups.root(), 8192)].into_iter());
        let current = |id| groups.get(id).expect("there").current.load(Relaxed);
        let zswap = groups.engine.counters().root.zswap;
        assert!((100..2000).contains(&zswap), "{zswap}");
        assert_eq!((current(below), current(above)), (4096 + zswap, 4096 + zswap));
        assert_eq!(current(ROOT), 3 * 4096 + groups.engine.pool_bytes());
        groups.remove(below).expect("nothing is resident");
        assert_eq!(groups.counted(above, |counters| &counters.pgsteal), 3, "the parent has it now");
        groups.measured(std::iter::empty());
        assert_eq!(current(above), zswap, "what is stored is the parent's, too");
        assert!(groups.of_engine(charge.group).is_none() && !groups.has(&charge));
        assert_eq!(groups.nearest(&charge).id, above);
    }

    #[test]
    fn the_pool_of_a_protected_group_is_left_alone() {
        let groups = groups();
        let [one, two] = ["one", "two"].map(|name| groups.create(ROOT, name, 0).expect("room"));
        let [low, min] = ["low", "min"].map(|name| groups.create(one, name, 0).expect("room"));
        let charge = |id| groups.get(id).expect("there");
        [ROOT, one, two, low, min].into_iter().for_each(|id| charge(id).measured(10, 0, 0));
        let free = |id| groups.unprotected(&charge(id)).iter().map(|charge| charge.id).collect::<Vec<_>>();
        assert_eq!((free(ROOT), free(one)), (vec![ROOT], vec![one]), "nobody is protected");
        charge(one).set_limit(Limit::Min, Some(20));
        charge(min).set_limit(Limit::Min, Some(20));
        charge(low).set_limit(Limit::Low, Some(20));
        charge(one).measured(30, 0, 0);
        assert_eq!(free(ROOT), [two, low], "what the parent does not grant does not count");
        assert_eq!((free(one), free(min), free(two)), (vec![low], vec![min], vec![two]), "for itself, or if all are");
        charge(low).measured(30, 0, 0);
        assert_eq!(free(one), [low], "no more than it is granted");
    }

    #[test]
    fn the_need_of_the_host_exposes_only_what_is_not_protected() {
        let groups = groups();
        let [plain, low, min] = ["plain", "low", "min"].map(|name| groups.create(ROOT, name, 0).expect("room"));
        let below = groups.create(low, "below", 0).expect("room");
        let charge = |id| groups.get(id).expect("there");
        let page = std::array::from_fn(|i| (i / 7 % 50) as u8);
        let store = |id| groups.engine.swap_out(&page, Home { group: charge(id).group, node: 0 }).expect("room");
        let slot = store(plain);
        store(below);
        store(min);
        groups.measured(std::iter::empty());
        let exposed = || groups.exposed().iter().map(|charge| charge.id).collect::<Vec<_>>();
        assert_eq!(exposed(), [ROOT, plain, low, min, below], "nobody is protected");
        charge(low).set_limit(Limit::Low, Some(1 << 20));
        charge(min).set_limit(Limit::Min, Some(1 << 20));
        assert_eq!(exposed(), [ROOT, plain]);
        let events = |id| charge(id).events.low.load(Relaxed);
        assert_eq!(events(low), 0);
        groups.engine.invalidate(slot);
        assert_eq!((exposed(), events(low)), (vec![ROOT, plain, low, below], 1), "nothing else is left");
    }

    #[test]
    fn protection_is_granted_in_proportion_to_use() {
        let groups = groups();
        let parent = groups.create(ROOT, "parent", 0).expect("room");
        let [one, two] = ["one", "two"].map(|name| groups.create(parent, name, 0).expect("room"));
        for (id, low, used) in [(parent, 60, 120), (one, 60, 60), (two, 60, 20)] {
            let charge = groups.get(id).expect("there");
            charge.set_limit(Limit::Low, Some(low));
            charge.measured(used, 0, 0);
        }
        let granted = |id, target| groups.protection(&groups.get(id).expect("there"), target, Limit::Low);
        assert_eq!((granted(one, ROOT), granted(two, ROOT)), (45, 15), "60 for claims of 60 and 20");
        assert_eq!((granted(one, parent), granted(two, parent), granted(one, one)), (60, 60, 0));
        groups.get(parent).expect("there").set_limit(Limit::Low, Some(1000));
        assert_eq!((granted(one, ROOT), granted(two, ROOT)), (60, 60));
        groups.get(one).expect("there").set_limit(Limit::Low, Some(0));
        assert_eq!((granted(one, ROOT), granted(two, ROOT)), (0, 60));
    }
}

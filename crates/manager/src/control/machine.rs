//! What the control tree is a view of: typed operations on groups and parameters, as a manager has them.
//!
//! The tree checks names and values; the rest is the machine's affair, because only it can do so in one step: that a
//! name is free (`Exists`), that a group is empty (`Busy`), that it is still there (`Gone`).

use uzswap_engine::{Compressor, Counters, FolioCounters, GroupCounters, Zpool};
use uzswap_vm::swapin::Swapin;

use super::error::Error;

/// The name of a group. Numbers of removed groups may be given again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// Whether a process may be taken out of a group; an error tells why not.
pub type MayLeave<'a> = dyn Fn(GroupId) -> Result<(), Error> + 'a;

impl GroupId {
    /// The group above all others.
    pub const ROOT: GroupId = GroupId(0);
}

/// Who changes something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writer {
    /// The process.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// What a group can be limited in, or be protected by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// `memory.max`
    Max,
    /// `memory.high`
    High,
    /// `memory.low`
    Low,
    /// `memory.min`
    Min,
    /// `memory.swap.max`
    SwapMax,
    /// `memory.zswap.max`
    ZswapMax,
}

/// How long processes waited for memory.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stall {
    /// Percent of the last ten seconds.
    pub avg10: f64,
    /// Percent of the last minute.
    pub avg60: f64,
    /// Percent of the last five minutes.
    pub avg300: f64,
    /// Microseconds in all.
    pub total: u64,
}

/// `memory.pressure`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressure {
    /// Some process waited.
    pub some: Stall,
    /// All did.
    pub full: Stall,
}

/// What is counted for a group and all below it, under the names of its files. `None` is what this manager does not
/// count: its line is left out, as the kernel does, for a zero would be taken for a fact.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// `memory.current`, in bytes.
    pub current: u64,
    /// `memory.peak`, in bytes.
    pub peak: u64,
    /// `memory.swap.current`, in bytes.
    pub swap_current: u64,
    /// `memory.swap.peak`, in bytes.
    pub swap_peak: Option<u64>,
    /// `low` of `memory.events`.
    pub low: Option<u64>,
    /// `high` of `memory.events`.
    pub high: Option<u64>,
    /// `max` of `memory.events`.
    pub max: Option<u64>,
    /// `oom` of `memory.events`.
    pub oom: Option<u64>,
    /// `oom_kill` of `memory.events`.
    pub oom_kill: Option<u64>,
    /// `high` of `memory.swap.events`.
    pub swap_high: Option<u64>,
    /// `max` of `memory.swap.events`.
    pub swap_max: Option<u64>,
    /// `fail` of `memory.swap.events`.
    pub swap_fail: Option<u64>,
    /// What the engine counts.
    pub engine: GroupCounters,
    /// Resident anonymous bytes.
    pub anon: u64,
    /// The same by NUMA node, from node 0 on.
    pub anon_by_node: Option<Vec<u64>>,
    /// Faults that were served.
    pub pgfault: Option<u64>,
    /// Of these, those that wanted a page that had left.
    pub pgmajfault: Option<u64>,
    /// Pages looked at by reclaim.
    pub pgscan: Option<u64>,
    /// Pages reclaimed.
    pub pgsteal: Option<u64>,
    /// Pages that came back soon after they had left.
    pub workingset_refault_anon: Option<u64>,
    /// Huge pages that became one again after their pages had come back.
    pub thp_collapse_alloc: Option<u64>,
    /// Folios swapped out whole.
    pub thp_swpout: Option<u64>,
    /// Folios swapped out in parts.
    pub thp_swpout_fallback: Option<u64>,
    /// Resident bytes that are not under any limit: processes without a session, and shared memory.
    pub unmanaged_current: Option<u64>,
    /// The most that these ever were.
    pub unmanaged_peak: Option<u64>,
    /// `memory.pressure`.
    pub pressure: Option<Pressure>,
}

/// The parameters of zswap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    /// New stores are accepted.
    pub enabled: bool,
    /// The codec of new stores.
    pub compressor: Compressor,
    /// The allocator of new stores.
    pub zpool: Zpool,
    /// Cap on all pools, percent of RAM.
    pub max_pool_percent: u8,
    /// Percent of the cap at which a full pool accepts again.
    pub accept_threshold_percent: u8,
    /// Memory pressure writes back before the pool is full.
    pub shrinker_enabled: bool,
}

/// A parameter and its new value. Percentages are 100 at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameter {
    /// See [`Parameters::enabled`].
    Enabled(bool),
    /// See [`Parameters::compressor`].
    Compressor(Compressor),
    /// See [`Parameters::zpool`].
    Zpool(Zpool),
    /// See [`Parameters::max_pool_percent`].
    MaxPoolPercent(u8),
    /// See [`Parameters::accept_threshold_percent`].
    AcceptThresholdPercent(u8),
    /// See [`Parameters::shrinker_enabled`].
    ShrinkerEnabled(bool),
}

/// A manager, as the tree sees it. Every operation on a group may find it [`Error::Gone`]. Orders are 2 to 9.
pub trait Machine {
    /// The child of `parent` with this name.
    fn find(&self, parent: GroupId, name: &str) -> Option<GroupId>;
    /// The names of a group's children.
    fn children(&self, group: GroupId) -> Result<Vec<String>, Error>;
    /// Makes a group, which is then `owner`'s. [`Error::Exists`] if the name is taken.
    fn create(&self, parent: GroupId, name: &str, owner: u32) -> Result<GroupId, Error>;
    /// Removes a group. [`Error::Busy`] if it has processes or children.
    fn remove(&self, group: GroupId) -> Result<(), Error>;
    /// The user whose group it is; the root is the manager's own.
    fn owner(&self, group: GroupId) -> Result<u32, Error>;
    /// The group above; none above the root.
    fn parent(&self, group: GroupId) -> Result<Option<GroupId>, Error>;

    /// A limit in bytes; none is `max`.
    fn limit(&self, group: GroupId, limit: Limit) -> Result<Option<u64>, Error>;
    /// Sets a limit, to whole pages.
    fn set_limit(&self, group: GroupId, limit: Limit, bytes: Option<u64>) -> Result<(), Error>;
    /// `memory.zswap.writeback` of the group itself.
    fn writeback(&self, group: GroupId) -> Result<bool, Error>;
    /// Sets it.
    fn set_writeback(&self, group: GroupId, allowed: bool) -> Result<(), Error>;

    /// `memory.zswap.shrinker.enabled` of the group itself.
    fn shrinker(&self, group: GroupId) -> Result<bool, Error>;
    /// Sets it.
    fn set_shrinker(&self, group: GroupId, enabled: bool) -> Result<(), Error>;

    /// The processes of a group, without those of its children.
    fn processes(&self, group: GroupId) -> Result<Vec<i32>, Error>;
    /// Moves a process, if it may leave the group that it is in. [`Error::NoProcess`] if there is none of this number.
    fn move_process(&self, pid: i32, group: GroupId, may_leave: &MayLeave<'_>) -> Result<(), Error>;
    /// Whether the group is frozen.
    fn frozen(&self, group: GroupId) -> Result<bool, Error>;
    /// Freezes or thaws it.
    fn set_frozen(&self, group: GroupId, frozen: bool) -> Result<(), Error>;
    /// Kills all processes of a group and of those below.
    fn kill(&self, group: GroupId) -> Result<(), Error>;
    /// Reclaims so many bytes; tells whether it was that much.
    fn reclaim(&self, group: GroupId, bytes: u64) -> Result<bool, Error>;
    /// Writes back so many bytes of the group's pool; tells whether it was that much.
    fn reclaim_pool(&self, group: GroupId, bytes: u64) -> Result<bool, Error>;
    /// All that is counted of a group, as JSON.
    fn stats(&self, group: GroupId) -> Result<String, Error>;
    /// What is counted.
    fn figures(&self, group: GroupId) -> Result<Figures, Error>;

    /// The parameters.
    fn parameters(&self) -> Parameters;
    /// Sets one.
    fn set_parameter(&self, parameter: Parameter) -> Result<(), Error>;
    /// What is counted for the whole machine.
    fn counters(&self) -> Counters;
    /// What is counted for folios of this order.
    fn folio_counters(&self, order: usize) -> FolioCounters;
    /// Whether folios of this order are swapped in whole.
    fn folio_swapin(&self, order: usize) -> bool;
    /// Sets that.
    fn set_folio_swapin(&self, order: usize, enabled: bool);
    /// By what rule a fault brings more than its own page.
    fn swapin(&self) -> Swapin;
    /// Sets it.
    fn set_swapin(&self, rule: Swapin);
}

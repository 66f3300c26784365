//! Policies of the past, to compare with.
//!
//! They differ from today's in two answers only: on which list an entry is, and when a run of the shrink worker is done. The
//! main path asks here and does not know the reason.

use crate::groups::ROOT;
use crate::pools::PoolId;

/// How entries are listed and written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// An LRU for each group and node; a run of the worker ends at the accept threshold.
    #[default]
    PerGroupLru,
    /// A run of the worker writes back one page.
    OnePagePerShrink,
    /// One LRU for all groups and nodes.
    GlobalLru,
    /// An LRU for each pool, without regard to groups and nodes.
    PerPoolLru,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Policy; 4] = [Policy::PerGroupLru, Policy::OnePagePerShrink, Policy::GlobalLru, Policy::PerPoolLru];

    /// The list, as a group and a number in that group, of an entry of `group` that lived on `node`.
    pub(crate) fn list(self, group: u16, node: u8, pool: PoolId) -> (u16, u8) {
        match self {
            Policy::PerGroupLru | Policy::OnePagePerShrink => (group, node),
            Policy::GlobalLru => (ROOT, 0),
            Policy::PerPoolLru => (ROOT, pool.number()),
        }
    }

    /// Whether entries of several groups share a list.
    pub(crate) fn mixes_groups(self) -> bool {
        matches!(self, Policy::GlobalLru | Policy::PerPoolLru)
    }

    /// Most pages in one run of the worker.
    pub(crate) fn pages_per_run(self) -> u64 {
        if self == Policy::OnePagePerShrink { 1 } else { u64::MAX }
    }
}

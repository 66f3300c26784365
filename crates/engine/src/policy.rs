//! Policies of the past, to compare with.
//!
//! They differ from today's in three answers only: on which list an entry is, when a run of the shrink worker is done, and
//! what a store or load holds while it is at work. The main path asks here and does not know the reason.

use crate::groups::ROOT;
use crate::pools::{POOLS, PoolId};
use crate::sync::Mutex;

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
    /// While a page is compressed or decompressed its pool is held, by a count under one lock for all of them.
    LockedPoolReference,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Policy; 5] = [
        Policy::PerGroupLru,
        Policy::OnePagePerShrink,
        Policy::GlobalLru,
        Policy::PerPoolLru,
        Policy::LockedPoolReference,
    ];

    /// The list, as a group and a number in that group, of an entry of `group` that lived on `node`.
    pub(crate) fn list(self, group: u16, node: u8, pool: PoolId) -> (u16, u8) {
        match self {
            Policy::PerGroupLru | Policy::OnePagePerShrink | Policy::LockedPoolReference => (group, node),
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

/// What is held of pools, where anything is.
pub(crate) struct PoolReferences(Option<Mutex<[u32; POOLS]>>);

/// One reference.
pub(crate) struct PoolReference<'a>(Option<(&'a Mutex<[u32; POOLS]>, PoolId)>);

impl PoolReferences {
    pub fn new(policy: Policy) -> PoolReferences {
        PoolReferences((policy == Policy::LockedPoolReference).then(Mutex::default))
    }

    /// Holds a pool for as long as the reference lives.
    pub fn hold(&self, pool: PoolId) -> PoolReference<'_> {
        PoolReference(self.0.as_ref().map(|counts| {
            counts.lock()[pool.number() as usize] += 1;
            (counts, pool)
        }))
    }

    /// Panics if one is held.
    pub fn check_valid(&self) {
        let counts = self.0.as_ref().map(|counts| *counts.lock());
        assert_eq!(counts.unwrap_or_default(), [0; POOLS], "pools are held, and nobody is at work");
    }
}

impl Drop for PoolReference<'_> {
    fn drop(&mut self) {
        if let Some((counts, pool)) = self.0 {
            counts.lock()[pool.number() as usize] -= 1;
        }
    }
}

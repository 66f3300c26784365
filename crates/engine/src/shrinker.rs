//! Writeback under memory pressure, before any limit is hit. Whoever reclaims memory asks how much there is to gain from a
//! group, and then for a part of it. There is nothing to tune:
//!
//! 1. A list protects as many entries as pages of it were loaded lately, from the pool or from disk: both say that it is
//!    still hot. Protection is used up as the list is scanned, and cut back as the list grows (see `lru`). Pressure that
//!    lasts gets through: a count that finds everything protected leaves half of the protection.
//! 2. What is not protected counts for as much as it would give back: an entry that takes a quarter of its page is
//!    worth four times more in the pool than on disk, so a quarter of them is on offer.
//! 3. Each entry passes once, as it was stored or loaded since the last scan. A loaded one also ends the scan: its fault may be
//!    under way, and what comes after it is warmer still.

use crate::groups::Group;
use crate::zswap::Zswap;

impl Zswap {
    /// How many entries of a group, itself alone, could be written back from a node. Forbidden by
    /// `memory.zswap.writeback`, switched off for the group or for all, or without a swap file: 0.
    pub fn shrinker_count(&self, group: Group, node: u8) -> u64 {
        let all = &mut self.shards.all();
        let state = all.one();
        let Some(number) = state.groups.find(group) else { return 0 };
        let offered = state.config.shrinker_enabled && self.swap.is_some() && state.groups.may_shrink(number);
        let listed = all.listed(number, node);
        if !offered || listed == 0 {
            return 0;
        }
        let protected = all.iter_mut().map(|state| state.groups.lru_mut(number, node).protected).sum();
        let free = listed.saturating_sub(protected);
        if free == 0 {
            all.iter_mut().for_each(|state| state.groups.lru_mut(number, node).protected /= 2);
        }
        let counters = all.counters(number);
        // Entries times compressed bytes fit: 2^30 times 2^42, and more besides.
        (free as u128 * counters.zswap as u128 / counters.zswapped.max(1) as u128) as u64
    }

    /// Looks at up to `nr` entries from the cold end of a group's list and writes back those that are neither in use nor new;
    /// returns how many.
    pub fn shrinker_scan(&self, group: Group, node: u8, nr: u64) -> u64 {
        let number = {
            let state = self.shards.any();
            let number = state.groups.find(group).filter(|_| state.config.shrinker_enabled);
            number.filter(|number| state.groups.may_shrink(*number))
        };
        number.map_or(0, |number| self.scan_list(number, node, nr))
    }
}

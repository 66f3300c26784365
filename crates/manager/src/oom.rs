//! Why a group is out of memory, and what an operator can do about it: the words that go with the end of a process.
//!
//! Each cause names what stands in the way of moving pages out. Every advice ends with the limit that was reached, since to
//! raise that always helps.

use std::fmt;
use std::io;

use uzswap_engine::{PAGE_SIZE, Zswap};

use crate::SwapConfig;
use crate::charge::Charge;
use crate::control::{GroupId, Limit};
use crate::groups::Groups;
use crate::swap_file::Trouble;

/// A swap file with less room than one write takes is full.
const WRITE: u64 = 32 * PAGE_SIZE as u64;

/// Why nothing can be moved out any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// This group has swapped out what its `memory.swap.max` allows.
    SwapMax(String),
    /// There is no swap file; whether the pool is at its cap.
    NoSwap { pool_is_full: bool },
    /// This group has `memory.zswap.writeback` 0; whether the pool is at its cap, or the group at its `memory.zswap.max`.
    WritebackForbidden { group: String, pool_is_full: bool },
    /// The swap file has grown to its `--swap-size`.
    SwapFull,
    /// The last write to the swap file has failed, with this error number.
    Disk(i32),
    /// Programs hold on to what they have: it cannot be moved, or is in use all the time.
    Held,
}

/// What a manager writes pages back to.
#[derive(Debug, Clone)]
pub struct Disk {
    /// As it was configured.
    pub swap: SwapConfig,
    /// Whether writes fail.
    pub trouble: Trouble,
}

impl Cause {
    /// Finds what keeps the pages of `of`, a group at or below `limited`, from leaving.
    pub fn find(groups: &Groups, engine: &Zswap, disk: &Disk, limited: &Charge, of: &Charge) -> Cause {
        let path = |charge: &Charge| groups.path(charge);
        if limited.is_exhausted() {
            let swapped = |charge: &Charge| engine.swap_of(&[charge.group])[0];
            let reached = |charge: &&Charge| {
                charge.limit(Limit::SwapMax).is_some_and(|max| swapped(charge) + PAGE_SIZE as u64 > max)
            };
            if let Some(charge) = of.path().find(reached) {
                return Cause::SwapMax(path(charge));
            }
        }
        let at_zswap_max = |charge: &Charge| {
            let stored = engine.group_counters(charge.group).map_or(0, |counters| counters.zswap);
            charge.limit(Limit::ZswapMax).is_some_and(|max| stored >= max)
        };
        let pool_is_full = engine.shrink_needed().is_some() || of.path().any(at_zswap_max);
        let SwapConfig::File { size, .. } = &disk.swap else { return Cause::NoSwap { pool_is_full } };
        if let Some(charge) = of.path().find(|charge| !charge.writeback.load(std::sync::atomic::Ordering::Relaxed)) {
            return Cause::WritebackForbidden { group: path(charge), pool_is_full };
        }
        match (disk.trouble.errno(), size) {
            (Some(errno), _) => Cause::Disk(errno),
            (None, Some(size)) if engine.counters().swap_current + WRITE > *size => Cause::SwapFull,
            _ => Cause::Held,
        }
    }
}

/// What stands in the way.
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = |is_full: bool| if is_full { ", and the pool is at its cap" } else { "" };
        match self {
            Cause::SwapMax(group) => write!(f, "group {group} has swapped out all that its memory.swap.max allows"),
            Cause::NoSwap { pool_is_full } => write!(f, "there is no swap file{}", full(*pool_is_full)),
            Cause::WritebackForbidden { group, pool_is_full } => {
                write!(f, "memory.zswap.writeback of group {group} is 0{}", full(*pool_is_full))
            }
            Cause::SwapFull => write!(f, "the swap file is full"),
            Cause::Disk(libc::ENOSPC) => write!(f, "the disk of the swap file is full"),
            Cause::Disk(libc::EFBIG) => write!(f, "the swap file is as large as a file may be (ulimit -f)"),
            Cause::Disk(errno) => {
                write!(f, "the swap file cannot be written: {}", io::Error::from_raw_os_error(*errno))
            }
            Cause::Held => write!(
                f,
                "what is resident is in use, or cannot be moved (locked, pinned, read-only, written in a file mapping)"
            ),
        }
    }
}

impl Cause {
    /// What can be done, but for raising the limit.
    fn remedy(&self) -> Option<&'static str> {
        Some(match self {
            Cause::SwapMax(_) => "its memory.swap.max",
            Cause::NoSwap { pool_is_full: true } => "--max-pool, leave out --no-swap",
            Cause::NoSwap { pool_is_full: false } => return None,
            Cause::WritebackForbidden { .. } => "allow writeback",
            Cause::SwapFull => "--swap-size",
            Cause::Disk(libc::ENOSPC) => "free space there, name another disk with --swap-file",
            Cause::Disk(_) => "name another place with --swap-file",
            Cause::Held => return None,
        })
    }

    /// What to do; `limit` is the limit that was reached, as an operator spells it.
    pub fn advice(&self, limit: &str) -> String {
        match (self, self.remedy()) {
            (Cause::NoSwap { pool_is_full: false }, _) => format!("leave out --no-swap, or raise {limit}"),
            (Cause::SwapMax(_) | Cause::SwapFull | Cause::NoSwap { .. }, Some(remedy)) => {
                format!("raise {remedy}, or raise {limit}")
            }
            (_, Some(remedy)) => format!("{remedy}, or raise {limit}"),
            (_, None) => format!("raise {limit}"),
        }
    }
}

/// The limit of a group as an operator spells it.
pub fn spelling(groups: &Groups, charge: &Charge, of_daemon: bool) -> String {
    match (charge.id, of_daemon) {
        (GroupId::ROOT, true) => "the daemon's --memory-max".to_owned(),
        (GroupId::ROOT, false) => "--memory-max".to_owned(),
        _ => format!("memory.max of group {}", groups.path(charge)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;
    use uzswap_engine::{Config, HeapSource, HeapSwapFile, Home, Page};

    fn page(seed: u64) -> Page {
        std::array::from_fn(|i| ((i as u64 + 1).wrapping_mul(seed * 2 + 0x9e37_79b9_7f4a_7c15) >> 29) as u8)
    }

    #[test]
    fn each_cause_is_found_and_has_words_of_its_own() {
        let engine = |config: Config| Arc::new(Zswap::new(config, Some(Box::<HeapSwapFile>::default()), HeapSource));
        let roomy = engine(Config::default());
        let groups = Groups::new(roomy.clone(), Arc::default());
        let id = groups.create(GroupId::ROOT, "a", 0).expect("room");
        let (root, group) = (groups.root(), groups.get(id).expect("there"));
        let file = |size| Disk { swap: SwapConfig::File { path: None, size }, trouble: Trouble::default() };
        let find = |disk: &Disk| Cause::find(&groups, &roomy, disk, &root, &group);
        assert_eq!(find(&file(None)), Cause::Held);
        assert_eq!(find(&file(Some(4096))), Cause::SwapFull);
        let failing = file(Some(4096));
        failing.trouble.note(&Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(find(&failing), Cause::Disk(libc::ENOSPC));
        failing.trouble.note(&Ok(()));
        assert_eq!(find(&failing), Cause::SwapFull, "a write has succeeded since");
        let none = Disk { swap: SwapConfig::None, trouble: Trouble::default() };
        assert_eq!(find(&none), Cause::NoSwap { pool_is_full: false });
        group.writeback.store(false, Relaxed);
        let forbidden = |pool_is_full| Cause::WritebackForbidden { group: "/a".to_owned(), pool_is_full };
        assert_eq!(find(&file(None)), forbidden(false));
        roomy.swap_out(&page(1), Home { group: group.group, node: 0 }).expect("room");
        group.set_limit(Limit::ZswapMax, Some(1));
        assert_eq!(find(&file(None)), forbidden(true));
        group.set_limit(Limit::SwapMax, Some(4096));
        root.set_exhausted(true);
        assert_eq!(find(&file(None)), Cause::SwapMax("/a".to_owned()));
        for (cause, advice) in [
            (Cause::SwapMax("/a".to_owned()), "raise its memory.swap.max, or raise L"),
            (Cause::NoSwap { pool_is_full: true }, "raise --max-pool, leave out --no-swap, or raise L"),
            (Cause::NoSwap { pool_is_full: false }, "leave out --no-swap, or raise L"),
            (forbidden(true), "allow writeback, or raise L"),
            (Cause::SwapFull, "raise --swap-size, or raise L"),
            (Cause::Disk(libc::ENOSPC), "free space there, name another disk with --swap-file, or raise L"),
            (Cause::Disk(libc::EIO), "name another place with --swap-file, or raise L"),
            (Cause::Held, "raise L"),
        ] {
            assert_eq!(cause.advice("L"), advice, "{cause}");
        }
        assert_eq!(spelling(&groups, &group, true), "memory.max of group /a");
    }
}

//! Every control file, once: its name, what reading it gives, what writing it does.
//!
//! A table belongs to a kind of directory; its functions get the number of the directory that the file was found in: a
//! group, or the order of a folio. A file without a function for reading cannot be read, and so with writing.

use super::error::Error;
use super::machine::{Figures, GroupId, Limit, Machine, Parameter, Writer};
use super::values::*;
use uzswap_engine::{Compressor, Counters, FolioCounters, Zpool};
use uzswap_vm::swapin::Swapin;

/// Gives the text of a file.
type Read<D> = fn(&dyn Machine, D) -> Result<String, Error>;

/// Takes a value, from whom is given last.
type Write<D> = fn(&dyn Machine, D, &str, Writer) -> Result<(), Error>;

/// A control file of directories that a `D` tells apart.
pub struct File<D: 'static> {
    /// Its name.
    pub name: &'static str,
    /// How it is read.
    pub read: Option<Read<D>>,
    /// How it is written.
    pub write: Option<Write<D>>,
}

/// What the tree needs of a file that it has found.
pub trait Open {
    /// Whether it can be read, and written.
    fn rights(&self) -> (bool, bool);
    /// Reads it.
    fn read(&self, machine: &dyn Machine) -> Result<String, Error>;
    /// Writes it, for `writer`.
    fn write(&self, machine: &dyn Machine, value: &str, writer: Writer) -> Result<(), Error>;
}

impl<D: Copy> Open for (&'static File<D>, D) {
    fn rights(&self) -> (bool, bool) {
        (self.0.read.is_some(), self.0.write.is_some())
    }

    fn read(&self, machine: &dyn Machine) -> Result<String, Error> {
        self.0.read.ok_or(Error::Access)?(machine, self.1)
    }

    fn write(&self, machine: &dyn Machine, value: &str, writer: Writer) -> Result<(), Error> {
        self.0.write.ok_or(Error::Access)?(machine, self.1, value, writer)
    }
}

const fn shown<D>(name: &'static str, read: Read<D>) -> File<D> {
    File { name, read: Some(read), write: None }
}

const fn told<D>(name: &'static str, write: Write<D>) -> File<D> {
    File { name, read: None, write: Some(write) }
}

const fn both<D>(name: &'static str, read: Read<D>, write: Write<D>) -> File<D> {
    File { name, read: Some(read), write: Some(write) }
}

/// A limit, under the name of its file.
macro_rules! limit {
    ($name:literal, $limit:ident) => {
        both(
            $name,
            |machine, group| machine.limit(group, Limit::$limit).map(limit_line),
            |machine, group, value, _| machine.set_limit(group, Limit::$limit, limit(value)?),
        )
    };
}

/// A limit that keeps memory from other groups, unless it is `$none`: to set another value takes the right that `$may` checks, too.
macro_rules! claim {
    ($name:literal, $limit:ident, $none:expr, $may:path) => {
        both(
            $name,
            |machine, group| machine.limit(group, Limit::$limit).map(limit_line),
            |machine, group, value, writer| {
                let bytes = limit(value)?;
                if bytes != $none {
                    $may(machine, group, writer)?;
                }
                machine.set_limit(group, Limit::$limit, bytes)
            },
        )
    };
}

/// A switch that, off, has a group's pages stay in the pool.
macro_rules! switch {
    ($name:literal, $read:ident, $write:ident) => {
        both(
            $name,
            |machine, group| machine.$read(group).map(bit_line),
            |machine, group, value, writer| {
                let on = bit(value, Error::Invalid)?;
                if !on {
                    may_keep(machine, group, writer)?;
                }
                machine.$write(group, on)
            },
        )
    };
}

/// A file of a group's figures. One that this manager does not keep is there all the same, as the kernel's pressure files are
/// where it was built to keep none.
macro_rules! figure {
    ($name:literal, $text:expr) => {
        shown($name, |machine, group| {
            let text: fn(&Figures) -> Option<String> = $text;
            text(&machine.figures(group)?).ok_or(Error::NotSupported("this manager does not keep count of it"))
        })
    };
}

/// A number of [`Counters`] or [`FolioCounters`], under its own name.
macro_rules! counter {
    ($counters:ident, $name:ident) => {
        shown(stringify!($name), |machine, of| Ok(line($counters(machine, of).$name)))
    };
}

/// A group's directory.
pub static GROUP: &[File<GroupId>] = &[
    shown("cgroup.controllers", |_, _| Ok(line("memory"))),
    shown("cgroup.events", |machine, group| {
        let (populated, frozen) = (is_populated(machine, group)?, machine.frozen(group)?);
        Ok(keyed([("populated", Some(populated.into())), ("frozen", Some(frozen.into()))]))
    }),
    both(
        "cgroup.freeze",
        |machine, group| machine.frozen(group).map(bit_line),
        |machine, group, value, _| machine.set_frozen(group, bit(value, Error::Range)?),
    ),
    told("cgroup.kill", |machine, group, value, _| match bit(value, Error::Range)? {
        true => machine.kill(group),
        false => Err(Error::Range),
    }),
    both(
        "cgroup.procs",
        |machine, group| Ok(machine.processes(group)?.into_iter().map(line).collect()),
        |machine, group, value, writer| {
            let pid = match pid(value)? {
                0 => writer.pid,
                pid => pid,
            };
            // What it leaves must be his as well: else nobody could be kept in a group.
            machine.move_process(pid, group, &|from| may_change(machine, from, writer))
        },
    ),
    both("cgroup.subtree_control", |_, _| Ok(line("memory")), |_, _, value, _| control_subtree(value)),
    figure!("memory.current", |figures| Some(line(figures.current))),
    figure!("memory.events", |f| {
        Some(keyed([("low", f.low), ("high", f.high), ("max", f.max), ("oom", f.oom), ("oom_kill", f.oom_kill)]))
    }),
    limit!("memory.high", High),
    claim!("memory.low", Low, Some(0), may_protect),
    limit!("memory.max", Max),
    claim!("memory.min", Min, Some(0), may_protect),
    figure!("memory.numa_stat", |figures| figures.anon_by_node.as_ref().map(|bytes| nodes_line("anon", bytes))),
    figure!("memory.peak", |figures| Some(line(figures.peak))),
    figure!("memory.pressure", |figures| {
        let pressure = figures.pressure?;
        Some(stall_line("some", &pressure.some) + &stall_line("full", &pressure.full))
    }),
    told("memory.reclaim", |machine, group, value, _| reclaim_from(machine, group, value)),
    figure!("memory.stat", |figures| Some(stat(figures))),
    figure!("memory.swap.current", |figures| Some(line(figures.swap_current))),
    figure!("memory.swap.events", |f| Some(keyed([("high", f.swap_high), ("max", f.swap_max), ("fail", f.swap_fail)]))),
    claim!("memory.swap.max", SwapMax, None, may_keep),
    figure!("memory.swap.peak", |figures| figures.swap_peak.map(line)),
    figure!("memory.zswap.current", |figures| Some(line(figures.engine.zswap))),
    limit!("memory.zswap.max", ZswapMax),
    switch!("memory.zswap.shrinker.enabled", shrinker, set_shrinker),
    switch!("memory.zswap.writeback", writeback, set_writeback),
];

/// The directory `parameters`.
pub static PARAMETERS: &[File<()>] = &[
    both(
        "accept_threshold_percent",
        |machine, ()| Ok(line(machine.parameters().accept_threshold_percent)),
        |machine, (), value, _| machine.set_parameter(Parameter::AcceptThresholdPercent(up_to(value, 100)?)),
    ),
    both(
        "compressor",
        |machine, ()| Ok(line(machine.parameters().compressor)),
        |machine, (), value, _| {
            let compressor = strip(value).parse().map_err(|_| no_choice(&Compressor::ALL))?;
            machine.set_parameter(Parameter::Compressor(compressor))
        },
    ),
    both(
        "enabled",
        |machine, ()| Ok(yes_no_line(machine.parameters().enabled)),
        |machine, (), value, _| machine.set_parameter(Parameter::Enabled(yes_no(value)?)),
    ),
    both(
        "max_pool_percent",
        |machine, ()| Ok(line(machine.parameters().max_pool_percent)),
        |machine, (), value, _| machine.set_parameter(Parameter::MaxPoolPercent(up_to(value, 100)?)),
    ),
    both(
        "shrinker_enabled",
        |machine, ()| Ok(yes_no_line(machine.parameters().shrinker_enabled)),
        |machine, (), value, _| machine.set_parameter(Parameter::ShrinkerEnabled(yes_no(value)?)),
    ),
    both(
        "zpool",
        |machine, ()| Ok(line(machine.parameters().zpool)),
        |machine, (), value, _| {
            let zpool = strip(value).parse().map_err(|_| no_choice(&Zpool::ALL))?;
            machine.set_parameter(Parameter::Zpool(zpool))
        },
    ),
    both(
        "swapin",
        |machine, ()| Ok(line(machine.swapin())),
        |machine, (), value, _| {
            machine.set_swapin(strip(value).parse().map_err(|_| no_choice(&Swapin::ALL))?);
            Ok(())
        },
    ),
];

/// The directory `debug`.
pub static DEBUG: &[File<()>] = &[
    counter!(counters, decompress_fail),
    counter!(counters, pool_limit_hit),
    counter!(counters, pool_total_size),
    counter!(counters, reject_alloc_fail),
    counter!(counters, reject_compress_fail),
    counter!(counters, reject_compress_poor),
    counter!(counters, reject_kmemcache_fail),
    counter!(counters, reject_reclaim_fail),
    counter!(counters, same_filled_pages),
    counter!(counters, stored_incompressible_pages),
    counter!(counters, stored_pages),
    counter!(counters, written_back_pages),
];

/// The directory of a folio's size.
pub static FOLIO: &[File<usize>] = &[both(
    "swapin_enabled",
    |machine, order| Ok(bit_line(machine.folio_swapin(order))),
    |machine, order, value, _| {
        machine.set_folio_swapin(order, bit(value, Error::Invalid)?);
        Ok(())
    },
)];

/// The directory `stats` in it.
pub static FOLIO_STATS: &[File<usize>] = &[
    counter!(folios, swpin),
    counter!(folios, swpin_fallback),
    counter!(folios, swpout),
    counter!(folios, swpout_fallback),
    counter!(folios, zswpin),
    counter!(folios, zswpout),
];

fn counters(machine: &dyn Machine, (): ()) -> Counters {
    machine.counters()
}

fn folios(machine: &dyn Machine, order: usize) -> FolioCounters {
    machine.folio_counters(order)
}

/// One directory's `memory.stat`.
fn stat(figures: &Figures) -> String {
    let engine = &figures.engine;
    keyed([
        ("anon", Some(figures.anon)),
        ("zswap", Some(engine.zswap)),
        ("zswapped", Some(engine.zswapped)),
        ("zswap_incomp", Some(engine.zswap_incomp)),
        ("workingset_refault_anon", figures.workingset_refault_anon),
        ("pswpin", Some(engine.pswpin)),
        ("pswpout", Some(engine.pswpout)),
        ("pgscan", figures.pgscan),
        ("pgsteal", figures.pgsteal),
        ("pgfault", figures.pgfault),
        ("pgmajfault", figures.pgmajfault),
        ("swpin_zero", Some(engine.swpin_zero)),
        ("swpout_zero", Some(engine.swpout_zero)),
        ("zswpin", Some(engine.zswpin)),
        ("zswpout", Some(engine.zswpout)),
        ("zswpwb", Some(engine.zswpwb)),
        ("thp_collapse_alloc", figures.thp_collapse_alloc),
        ("thp_swpout", figures.thp_swpout),
        ("thp_swpout_fallback", figures.thp_swpout_fallback),
        ("unmanaged_current", figures.unmanaged_current),
        ("unmanaged_peak", figures.unmanaged_peak),
    ])
}

/// Whether somebody may change a group: its owner, the manager's own user, and root.
pub fn may_change(machine: &dyn Machine, group: GroupId, writer: Writer) -> Result<(), Error> {
    if is_operator(machine, writer)? || machine.owner(group)? == writer.uid { Ok(()) } else { Err(Error::Access) }
}

/// Checks whether a writer may protect a group at the cost of the groups beside it. The owner of the group above may: what that group protects
/// is granted no more than what protects it.
fn may_protect(machine: &dyn Machine, group: GroupId, writer: Writer) -> Result<(), Error> {
    match machine.parent(group)? {
        Some(above) if may_change(machine, above, writer).is_err() => Err(Error::NotPermitted(
            "it takes memory from groups of other users: root, or the user of the group above, may set it",
        )),
        _ => Ok(()),
    }
}

/// Checks whether a writer may have a group keep its pages in memory, or in the pool that all groups share: no limit of the group's user bounds
/// how many.
fn may_keep(machine: &dyn Machine, _: GroupId, writer: Writer) -> Result<(), Error> {
    match is_operator(machine, writer)? {
        true => Ok(()),
        false => Err(Error::NotPermitted(
            "it takes memory from groups of other users: root, or the daemon's user, may set it",
        )),
    }
}

/// Whether somebody may change everything.
pub fn is_operator(machine: &dyn Machine, writer: Writer) -> Result<bool, Error> {
    Ok(writer.uid == 0 || writer.uid == machine.owner(GroupId::ROOT)?)
}

fn no_choice<T: std::fmt::Display>(all: &[T]) -> Error {
    Error::NoChoice(all.iter().map(T::to_string).collect::<Vec<_>>().join(", "))
}

/// Whether a group or any below it has processes. A group that is removed meanwhile has none.
fn is_populated(machine: &dyn Machine, group: GroupId) -> Result<bool, Error> {
    machine.processes(group)?;
    let mut open = vec![group];
    while let Some(group) = open.pop() {
        if machine.processes(group).is_ok_and(|processes| !processes.is_empty()) {
            return Ok(true);
        }
        let children = machine.children(group).unwrap_or_default();
        open.extend(children.iter().filter_map(|name| machine.find(group, name)));
    }
    Ok(false)
}

/// Children of ours always have the one controller there is: it can be switched on again, but not off.
fn control_subtree(value: &str) -> Result<(), Error> {
    let changes: Vec<&str> = strip(value).split(' ').filter(|change| !change.is_empty()).collect();
    if changes.iter().any(|change| !["+memory", "-memory"].contains(change)) {
        return Err(Error::Invalid);
    }
    if changes.contains(&"-memory") {
        return Err(Error::NotSupported("memory is always under control"));
    }
    Ok(())
}

fn reclaim_from(machine: &dyn Machine, group: GroupId, value: &str) -> Result<(), Error> {
    let wanted = reclaim(value)?;
    // With a swappiness of 0 only files may be reclaimed, and of those we have none.
    let done = match wanted {
        Reclaim { bytes: 0, .. } => true,
        Reclaim { bytes, of_pool: true, .. } => machine.reclaim_pool(group, bytes)?,
        Reclaim { swappiness: Some(0), .. } => false,
        Reclaim { bytes, .. } => machine.reclaim(group, bytes)?,
    };
    if done { Ok(()) } else { Err(Error::Again) }
}

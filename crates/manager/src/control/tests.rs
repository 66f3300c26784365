//! The tree over a manager in miniature: every file read and written, every error, and anything at all.

use proptest::prelude::*;
use uzswap_engine::{Compressor, GroupCounters};

use super::machine::{Pressure, Stall};
use super::mock::Mock;
use super::*;

/// A process of the manager's own user.
const WRITER: Writer = Writer { pid: 101, uid: 0 };

fn write(tree: &Tree<'_>, path: &str, value: &str) -> Result<(), Error> {
    tree.write(path, value.as_bytes(), WRITER)
}

fn names(entries: &[Entry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.name.as_str()).collect()
}

/// Every path there is.
fn all(tree: &Tree<'_>, path: &str) -> Vec<(String, Kind)> {
    let entries = tree.list(path).expect("a directory");
    let below = entries.into_iter().flat_map(|entry| {
        let path = format!("{path}/{}", entry.name);
        let deeper = if entry.kind == Kind::Directory { all(tree, &path) } else { Vec::new() };
        std::iter::once((path, entry.kind)).chain(deeper)
    });
    below.collect()
}

#[test]
fn the_layout() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    let top = tree.list("").unwrap();
    assert_eq!(names(&top)[..4], ["cgroup", "parameters", "debug", "hugepages-16kB"]);
    assert_eq!((names(&top)[10], top.len()), ("hugepages-2048kB", 11));
    for path in ["/", "//", ".", "/./"] {
        assert_eq!(tree.list(path).unwrap(), top, "{path}");
    }
    tree.make("cgroup/b", WRITER).unwrap();
    tree.make("/cgroup/a/", WRITER).unwrap();
    tree.make("cgroup//a/./deep", WRITER).unwrap();
    let group = tree.list("cgroup").unwrap();
    assert_eq!(names(&group)[group.len() - 2..], ["a", "b"]);
    let files = names(&group)[..group.len() - 2].to_vec();
    assert_eq!(names(&tree.list("cgroup/a/deep").unwrap()), files, "all groups have the same files");
    assert!(files.is_sorted());
    assert_eq!(tree.list("hugepages-64kB").unwrap().len(), 2);
    assert_eq!(tree.list("hugepages-64kB/stats").unwrap().len(), 6);
}

#[test]
fn every_file_is_what_the_list_says() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    mock.0.write().figures = full_figures();
    tree.make("cgroup/a", WRITER).unwrap();
    let paths = all(&tree, "");
    assert_eq!(paths.len(), 11 + 2 * 25 + 1 + 7 + 12 + 8 * 8);
    for (path, kind) in paths {
        assert_eq!(tree.look(&path), Ok(kind), "{path}");
        let Kind::File { readable, writable } = kind else {
            assert_eq!(
                (tree.read(&path), write(&tree, &path, "1")),
                (Err(Error::IsDirectory), Err(Error::IsDirectory))
            );
            continue;
        };
        match tree.read(&path) {
            Ok(text) => assert!(readable && (text.ends_with('\n') || text.is_empty()), "{path}: {text:?}"),
            Err(error) => assert_eq!((error, readable), (Error::Access, false), "{path}"),
        }
        let written = write(&tree, &path, "\u{1}");
        let refused = matches!(written, Err(Error::Invalid | Error::NoChoice(_)));
        assert!(if writable { refused } else { written == Err(Error::Access) }, "{path}: {written:?}");
        assert_eq!(tree.list(&path), Err(Error::NotDirectory), "{path}");
        assert_eq!(tree.make(&path, WRITER), Err(Error::Exists), "{path}");
        assert_eq!(tree.remove(&path, WRITER), Err(Error::NotDirectory), "{path}");
        for below in [format!("{path}/x"), format!("{path}/"), format!("{path}/.")] {
            assert_eq!(tree.read(&below), Err(Error::NotDirectory), "{below}");
        }
    }
}

/// What can be read back as it was written, in every group.
#[test]
fn values_read_back() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    tree.make("cgroup/a", WRITER).unwrap();
    for group in ["cgroup", "cgroup/a"] {
        for limit in ["memory.max", "memory.high", "memory.low", "memory.min", "memory.swap.max", "memory.zswap.max"] {
            let path = format!("{group}/{limit}");
            for (value, text) in [("1M\n", "1048576\n"), ("4097", "4096\n"), ("0", "0\n"), ("max", "max\n")] {
                write(&tree, &path, value).unwrap();
                assert_eq!(tree.read(&path).unwrap(), text);
            }
            assert_eq!(write(&tree, &path, "1MB"), Err(Error::Invalid));
            // Another limit is another number.
            write(&tree, &path, &format!("{}K", 4 * limit.len())).unwrap();
        }
        assert_eq!(tree.read(&format!("{group}/memory.high")).unwrap(), "45056\n");
        assert_eq!(tree.read(&format!("{group}/memory.swap.max")).unwrap(), "61440\n");
        for (file, otherwise) in [
            ("cgroup.freeze", Error::Range),
            ("memory.zswap.shrinker.enabled", Error::Invalid),
            ("memory.zswap.writeback", Error::Invalid),
        ] {
            let path = format!("{group}/{file}");
            for value in ["0", "1"] {
                write(&tree, &path, value).unwrap();
                assert_eq!(tree.read(&path).unwrap(), format!("{value}\n"));
            }
            assert_eq!(write(&tree, &path, "2"), Err(otherwise));
        }
        assert_eq!(tree.read(&format!("{group}/cgroup.events")).unwrap().lines().nth(1), Some("frozen 1"));
    }
    for (name, value, text) in [
        ("enabled", "0", "N\n"),
        ("shrinker_enabled", "on", "Y\n"),
        ("compressor", " zstd\n", "zstd\n"),
        ("zpool", "zbud", "zbud\n"),
        ("swapin", "never", "never\n"),
        ("max_pool_percent", "35\n", "35\n"),
        ("accept_threshold_percent", "100", "100\n"),
    ] {
        let path = format!("parameters/{name}");
        write(&tree, &path, value).unwrap();
        assert_eq!(tree.read(&path).unwrap(), text);
    }
    assert_eq!(write(&tree, "parameters/max_pool_percent", "101"), Err(Error::Invalid));
    assert_eq!(write(&tree, "parameters/enabled", "maybe"), Err(Error::Invalid));
    let unknown = write(&tree, "parameters/compressor", "snappy").unwrap_err();
    assert_eq!(unknown.number(), libc::ENOENT);
    assert!(Compressor::ALL.iter().all(|codec| unknown.to_string().contains(codec.name())), "{unknown}");
    write(&tree, "hugepages-64kB/swapin_enabled", "1").unwrap();
    assert_eq!(tree.read("hugepages-64kB/swapin_enabled").unwrap(), "1\n");
    assert_eq!(tree.read("hugepages-32kB/swapin_enabled").unwrap(), "0\n");
}

fn full_figures() -> Figures {
    let stall = |avg10| Stall { avg10, avg60: 0.25, avg300: 0.0, total: 77 };
    Figures {
        current: 1,
        peak: 2,
        swap_current: 3,
        swap_peak: Some(4),
        low: Some(5),
        high: Some(6),
        max: Some(7),
        oom: Some(8),
        oom_kill: Some(9),
        swap_high: Some(10),
        swap_max: Some(11),
        swap_fail: Some(12),
        engine: GroupCounters {
            zswap: 20,
            zswapped: 21,
            zswap_incomp: 22,
            swapped: 23,
            zswpin: 23,
            zswpout: 24,
            zswpwb: 25,
            pswpin: 26,
            pswpout: 27,
            swpin_zero: 28,
            swpout_zero: 29,
            zswap_max_hit: 30,
            swap_max: 31,
            swap_fail: 32,
        },
        anon: 40,
        anon_by_node: Some(vec![30, 10]),
        pgfault: Some(41),
        pgmajfault: Some(42),
        pgscan: Some(43),
        pgsteal: Some(44),
        workingset_refault_anon: Some(45),
        thp_collapse_alloc: Some(48),
        thp_swpout: Some(46),
        thp_swpout_fallback: Some(47),
        unmanaged_current: Some(49),
        unmanaged_peak: Some(50),
        pressure: Some(Pressure { some: stall(12.345), full: stall(1.0) }),
    }
}

#[test]
fn figures_have_the_kernels_form() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    mock.0.write().figures = full_figures();
    for (file, text) in [
        ("memory.current", "1\n"),
        ("memory.peak", "2\n"),
        ("memory.swap.current", "3\n"),
        ("memory.swap.peak", "4\n"),
        ("memory.events", "low 5\nhigh 6\nmax 7\noom 8\noom_kill 9\n"),
        ("memory.swap.events", "high 10\nmax 11\nfail 12\n"),
        ("memory.zswap.current", "20\n"),
        ("memory.numa_stat", "anon N0=30 N1=10\n"),
        (
            "memory.pressure",
            "some avg10=12.35 avg60=0.25 avg300=0.00 total=77\nfull avg10=1.00 avg60=0.25 avg300=0.00 total=77\n",
        ),
        ("cgroup.procs", "100\n101\n"),
        ("cgroup.controllers", "memory\n"),
        ("cgroup.subtree_control", "memory\n"),
        ("cgroup.events", "populated 1\nfrozen 0\n"),
    ] {
        assert_eq!(tree.read(&format!("cgroup/{file}")).unwrap(), text, "{file}");
    }
    let stat = tree.read("cgroup/memory.stat").unwrap();
    for line in [
        "anon 40",
        "zswap 20",
        "zswapped 21",
        "zswap_incomp 22",
        "zswpin 23",
        "zswpout 24",
        "zswpwb 25",
        "pswpin 26",
        "pswpout 27",
        "swpin_zero 28",
        "swpout_zero 29",
        "pgfault 41",
        "pgmajfault 42",
        "pgscan 43",
        "pgsteal 44",
        "workingset_refault_anon 45",
        "thp_collapse_alloc 48",
        "thp_swpout 46",
        "thp_swpout_fallback 47",
        "unmanaged_current 49",
        "unmanaged_peak 50",
    ] {
        assert!(stat.lines().any(|found| found == line), "{line}: {stat}");
    }
    assert_eq!(stat.lines().count(), 21);
}

#[test]
fn what_is_not_counted_is_left_out() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    mock.0.write().figures = Figures { oom_kill: Some(3), ..Figures::default() };
    assert_eq!(tree.read("cgroup/memory.events").unwrap(), "oom_kill 3\n");
    assert_eq!(tree.read("cgroup/memory.swap.events").unwrap(), "");
    assert!(!tree.read("cgroup/memory.stat").unwrap().contains("pgfault"));
    for file in ["memory.pressure", "memory.numa_stat", "memory.swap.peak"] {
        assert_eq!(tree.read(&format!("cgroup/{file}")).unwrap_err().number(), libc::EOPNOTSUPP, "{file}");
    }
}

#[test]
fn counters_stand_under_their_names() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    for (name, text) in [
        ("pool_limit_hit", "1\n"),
        ("reject_reclaim_fail", "2\n"),
        ("reject_alloc_fail", "3\n"),
        ("reject_kmemcache_fail", "4\n"),
        ("reject_compress_fail", "5\n"),
        ("reject_compress_poor", "6\n"),
        ("decompress_fail", "7\n"),
        ("written_back_pages", "8\n"),
        ("pool_total_size", "9\n"),
        ("stored_pages", "10\n"),
        ("stored_incompressible_pages", "11\n"),
        ("same_filled_pages", "12\n"),
    ] {
        assert_eq!(tree.read(&format!("debug/{name}")).unwrap(), text, "{name}");
    }
    for (size, order) in [(16, 2), (64, 4), (2048, 9)] {
        for (number, name) in
            ["zswpout", "zswpin", "swpin", "swpin_fallback", "swpout", "swpout_fallback"].iter().enumerate()
        {
            let text = format!("{order}{}\n", number + 1);
            assert_eq!(tree.read(&format!("hugepages-{size}kB/stats/{name}")).unwrap(), text, "{name}");
        }
    }
}

#[test]
fn groups_come_and_go() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    tree.make("cgroup/a", WRITER).unwrap();
    tree.make("cgroup/a/b", WRITER).unwrap();
    assert_eq!(tree.make("cgroup/a", WRITER), Err(Error::Exists));
    assert_eq!(tree.read("cgroup/a/cgroup.events").unwrap(), "populated 0\nfrozen 0\n");
    write(&tree, "cgroup/a/b/cgroup.procs", "100\n").unwrap();
    write(&tree, "cgroup/a/b/cgroup.procs", "0").unwrap();
    assert_eq!(tree.read("cgroup/a/b/cgroup.procs").unwrap(), "100\n101\n", "0 is the writer");
    assert_eq!(tree.read("cgroup/cgroup.procs").unwrap(), "");
    for group in ["cgroup", "cgroup/a", "cgroup/a/b"] {
        assert_eq!(tree.read(&format!("{group}/cgroup.events")).unwrap(), "populated 1\nfrozen 0\n", "by a descendant");
    }
    assert_eq!(tree.remove("cgroup/a", WRITER), Err(Error::Busy), "it has a child");
    assert_eq!(tree.remove("cgroup/a/b", WRITER), Err(Error::Busy), "it has processes");
    write(&tree, "cgroup/a/b/cgroup.kill", "1").unwrap();
    assert_eq!(mock.0.read().done, ["kill 2"]);
    tree.remove("cgroup/a/b", WRITER).unwrap();
    tree.remove("cgroup/a/", WRITER).unwrap();
    assert_eq!(tree.look("cgroup/a"), Err(Error::NotFound));
    assert_eq!(tree.remove("cgroup/a", WRITER), Err(Error::NotFound));
}

#[test]
fn a_user_changes_only_what_is_his() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    let [me, you] = [(100, 7), (101, 8)].map(|(pid, uid)| Writer { pid, uid });
    tree.make("cgroup/mine", me).unwrap();
    tree.make("cgroup/mine/deep", me).unwrap();
    for (path, value) in [("cgroup/mine/memory.max", "1M"), ("cgroup/mine/deep/memory.low", "1M")] {
        assert_eq!(tree.write(path, value.as_bytes(), me), Ok(()), "{path}");
        assert_eq!(tree.write(path, value.as_bytes(), you), Err(Error::Access), "{path}");
        assert_eq!(tree.write(path, value.as_bytes(), WRITER), Ok(()), "root may all");
        assert!(tree.read(path).is_ok());
    }
    for path in ["cgroup/memory.max", "parameters/compressor", "hugepages-64kB/swapin_enabled"] {
        assert_eq!(tree.write(path, b"1", me), Err(Error::Access), "{path}");
    }
    // What takes from groups of others.
    let taking = [
        ("mine/memory.low", "1M", "0"),
        ("mine/memory.min", "max", "0"),
        ("mine/memory.zswap.writeback", "0", "1"),
        ("mine/deep/memory.zswap.shrinker.enabled", "0", "1"),
        ("mine/deep/memory.swap.max", "1M", "max"),
    ];
    for (file, takes, gives) in taking {
        let path = format!("cgroup/{file}");
        assert!(matches!(tree.write(&path, takes.as_bytes(), me), Err(Error::NotPermitted(_))), "{path}");
        assert_eq!(tree.write(&path, takes.as_bytes(), WRITER), Ok(()), "{path}");
        assert_eq!(tree.write(&path, gives.as_bytes(), me), Ok(()), "{path}");
    }
    // Root's job would be another's to kill.
    tree.make("cgroup/mine/roots", WRITER).unwrap();
    tree.make("cgroup/roots", WRITER).unwrap();
    assert!(tree.joinable("cgroup/mine/deep", me).is_ok() && tree.joinable("cgroup/roots", WRITER).is_ok());
    assert_eq!(tree.joinable("cgroup/roots", me), Err(Error::Access));
    for path in ["cgroup/mine", "cgroup/mine/deep", "cgroup/mine/roots"] {
        assert!(matches!(tree.joinable(path, WRITER), Err(Error::NotPermitted(_))), "{path}");
    }
    tree.remove("cgroup/mine/roots", me).unwrap_err();
    tree.remove("cgroup/mine/roots", WRITER).unwrap();
    assert_eq!(tree.make("cgroup/mine/yours", you), Err(Error::Access));
    assert_eq!(tree.remove("cgroup/mine/deep", you), Err(Error::Access));
    // Both processes are in the root.
    assert_eq!(tree.write("cgroup/mine/cgroup.procs", b"0", me), Err(Error::Access));
    assert_eq!(tree.write("cgroup/mine/cgroup.procs", b"100", WRITER), Ok(()));
    assert_eq!(tree.write("cgroup/mine/deep/cgroup.procs", b"0", me), Ok(()));
    assert_eq!(tree.write("cgroup/cgroup.procs", b"0", me), Err(Error::Access));
    tree.make("cgroup/yours", you).unwrap();
    assert_eq!(tree.write("cgroup/yours/cgroup.procs", b"100", you), Err(Error::Access));
    assert_eq!(tree.remove("cgroup/yours", you), Ok(()));
}

#[test]
fn what_is_refused_and_why() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    for path in [
        "x",
        "cgroup/x",
        "cgroup/x/memory.max",
        "cgroup/..",
        "../cgroup",
        "hugepages-8kB",
        "hugepages-4096kB",
        "debug/x",
    ] {
        assert_eq!(tree.read(path), Err(Error::NotFound), "{path}");
        assert_eq!(write(&tree, path, "1"), Err(Error::NotFound), "{path}");
        assert_eq!(tree.list(path), Err(Error::NotFound), "{path}");
        assert_eq!(tree.remove(path, WRITER), Err(Error::NotFound), "{path}");
    }
    for (path, error) in [
        ("", Error::Exists),
        ("cgroup", Error::Exists),
        ("cgroup/.", Error::Exists),
        ("cgroup/..", Error::Exists),
        ("cgroup/memory.max", Error::Exists),
        ("cgroup/memory.max/x", Error::NotDirectory),
        ("cgroup/x/y", Error::NotFound),
        ("cgroup/two\nlines", Error::Invalid),
        ("cgroup/zero\0", Error::Invalid),
    ] {
        assert_eq!(tree.make(path, WRITER), Err(error), "{path:?}");
    }
    for path in ["x", "parameters/x", "debug/x", "hugepages-16kB/x", "hugepages-16kB/stats/x"] {
        assert_eq!(tree.make(path, WRITER).unwrap_err().number(), libc::EPERM, "{path}");
    }
    for path in ["", "parameters", "debug", "hugepages-16kB", "hugepages-16kB/stats"] {
        assert_eq!(tree.remove(path, WRITER).unwrap_err().number(), libc::EPERM, "{path}");
    }
    assert_eq!(tree.remove("cgroup", WRITER), Err(Error::Busy));
    let (name, path) = ("n".repeat(256), "/".repeat(4097));
    assert_eq!(tree.make(&format!("cgroup/{name}"), WRITER), Err(Error::NameTooLong));
    assert_eq!(tree.read(&format!("cgroup/{name}")), Err(Error::NameTooLong));
    assert_eq!((tree.list(&path), tree.make(&path, WRITER)), (Err(Error::NameTooLong), Err(Error::NameTooLong)));
    assert_eq!(tree.write("cgroup/memory.max", &[b' '; 4097], WRITER), Err(Error::TooLong));
    assert_eq!(tree.write("cgroup/memory.max", b"\xff", WRITER), Err(Error::Invalid));
    for (value, error) in
        [("-1", Error::Invalid), ("x", Error::Invalid), ("", Error::Invalid), ("999", Error::NoProcess)]
    {
        assert_eq!(write(&tree, "cgroup/cgroup.procs", value), Err(error), "{value}");
    }
    for (value, error) in [("0", Error::Range), ("2", Error::Range), ("yes", Error::Invalid)] {
        assert_eq!(write(&tree, "cgroup/cgroup.kill", value), Err(error), "{value}");
    }
    for value in ["", "+memory", " +memory +memory\n"] {
        assert_eq!(write(&tree, "cgroup/cgroup.subtree_control", value), Ok(()), "{value}");
    }
    for (value, number) in [("+cpu", libc::EINVAL), ("memory", libc::EINVAL), ("-memory", libc::EOPNOTSUPP)] {
        assert_eq!(write(&tree, "cgroup/cgroup.subtree_control", value).unwrap_err().number(), number, "{value}");
    }
    assert!(mock.0.read().done.is_empty());
}

#[test]
fn reclaim_says_when_it_was_not_all() {
    let mock = Mock::new();
    let tree = Tree(&mock);
    let reclaim = |value| write(&tree, "cgroup/memory.reclaim", value);
    assert_eq!(reclaim("512K"), Ok(()));
    assert_eq!(reclaim("1M swappiness=200"), Err(Error::Again));
    assert_eq!(mock.0.read().done, ["reclaim 0 524288", "reclaim 0 1048576"]);
    assert_eq!(reclaim("4095"), Ok(()), "less than a page is nothing");
    assert_eq!(reclaim("1M swappiness=0"), Err(Error::Again), "there are no files to reclaim");
    assert_eq!(reclaim("1M swappiness=201"), Err(Error::Invalid));
    assert_eq!(mock.0.read().done.len(), 2);
    assert_eq!(reclaim("1M source=zswap"), Ok(()));
    assert_eq!(mock.0.read().done[2], "reclaim 0 1048576 of the pool");
}

#[test]
fn a_group_that_is_gone_is_no_device() {
    let mock = Mock::new();
    let file = (files::GROUP.iter().find(|file| file.name == "memory.max").unwrap(), GroupId(9));
    assert_eq!(file.read(&mock), Err(Error::Gone));
    assert_eq!(Error::Gone.number(), libc::ENODEV);
}

/// Paths that lead somewhere, or nearly.
fn path() -> impl Strategy<Value = String> {
    let files = files::GROUP.iter().map(|file| file.name).chain(files::PARAMETERS.iter().map(|file| file.name));
    let names: Vec<&str> =
        files.chain(["cgroup", "parameters", "hugepages-16kB", "stats", "a", "b", ".", "..", ""]).collect();
    let part = prop_oneof![prop::sample::select(names).prop_map(str::to_owned), "\\PC{0,6}"];
    let known = prop::collection::vec(part, 0..4).prop_map(|parts| format!("cgroup/{}", parts.join("/")));
    prop_oneof![4 => known, 1 => "(?s).{0,40}", 1 => "[/.a]{0,12}"]
}

/// Values that are right, or nearly.
fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        "[ \n]?[-+]?(0x)?[0-9a-f]{0,20}[KMGTPEkx ]?(swappiness=)?[0-9max]{0,5}\n?".prop_map(String::into_bytes),
        "max|[01yYnN]|on|off|lz4|zbud|[+-]memory".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..40),
    ]
}

proptest! {
    #[test]
    fn nothing_panics(steps in prop::collection::vec((0..6, path(), value(), any::<i32>(), any::<bool>()), 1..20)) {
        let mock = Mock::new();
        let tree = Tree(&mock);
        for (what, path, value, pid, operates) in steps {
            let writer = Writer { pid, uid: u32::from(!operates) };
            let wrong = match what {
                0 => tree.read(&path).map(drop),
                1 => tree.list(&path).map(drop),
                2 => tree.make(&path, writer),
                3 => tree.remove(&path, writer),
                4 => tree.look(&path).map(drop),
                _ => tree.write(&path, &value, writer),
            };
            if let Err(error) = wrong {
                prop_assert!(error.number() > 0 && !error.to_string().is_empty());
            }
        }
        for (path, _) in all(&tree, "") {
            prop_assert!(tree.look(&path).is_ok(), "{path:?} is listed and not there");
        }
    }
}

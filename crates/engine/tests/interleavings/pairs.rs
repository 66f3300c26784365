//! Two threads that meet, in every schedule there is; where that are hundreds of thousands, in some at random.

use crate::machine::*;
use uzswap_engine::*;

const ROOT: Group = Group::ROOT;

// There are hundreds of thousands of schedules, which take more than a minute.
#[test]
fn a_fault_and_a_writeback() {
    exhaust_if_asked(|| {
        let machine = Machine::new(SMALL);
        let [page] = machine.cold([1], Home::ROOT);
        at_once(|| machine.scan(ROOT, 1), || machine.take(page));
        machine.end([]);
    });
}

// "An entry that is invalidated or loaded meanwhile is not written"
#[test]
fn a_page_that_is_loaded_while_it_is_written_stays_in_the_pool() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let [page] = machine.cold([1], Home::ROOT);
        let load = || {
            let before = machine.disk.writes();
            let origin = machine.read(page);
            origin == Origin::Pool && before.1 && machine.disk.writes() == before
        };
        let (_, meanwhile) = at_once(|| machine.scan(ROOT, 1), load);
        assert!(!meanwhile || machine.read(page) == Origin::Pool);
        machine.end([page]);
    });
}

#[test]
fn a_slot_that_is_given_to_another_page_while_it_is_written() {
    explore(|| {
        let machine = Machine::new(SMALL);
        let [page] = machine.cold([1], Home::ROOT);
        let replace = || {
            machine.zswap.invalidate(page.slot);
            let next = machine.store(2, Home::ROOT).expect("room");
            assert_eq!(next.slot, page.slot, "the last slot freed is the first given out");
            next
        };
        let (_, next) = at_once(|| machine.scan(ROOT, 1), replace);
        machine.end([next]);
    });
}

#[test]
fn the_pages_of_one_cluster_have_different_fates() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let [first, second] = machine.cold([1, 2], Home::ROOT);
        at_once(|| machine.scan(ROOT, 2), || machine.zswap.invalidate(first.slot));
        machine.end([second]);
    });
}

#[test]
fn a_write_that_fails_and_a_fault() {
    explore(|| {
        let machine = Machine::new(SMALL);
        machine.disk.set_failing(true);
        let [first, second] = machine.cold([1, 2], Home::ROOT);
        at_once(|| machine.scan(ROOT, 1), || machine.take(first));
        machine.disk.set_failing(false);
        assert_eq!(machine.read(second), Origin::Pool);
        machine.end([second]);
    });
}

#[test]
fn owners_come_and_go() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let page = machine.store(1, Home::ROOT).expect("room");
        machine.zswap.dup(page.slot);
        let fork = || {
            machine.zswap.dup(page.slot);
            machine.take(page);
            machine.zswap.invalidate(page.slot);
        };
        at_once(fork, || machine.take(page));
        machine.end([]);
    });
}

#[test]
fn owners_leave_during_a_writeback() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let [page] = machine.cold([1], Home::ROOT);
        let fork = || {
            machine.zswap.dup(page.slot);
            machine.zswap.invalidate(page.slot);
        };
        at_once(|| machine.scan(ROOT, 1), fork);
        machine.end([page]);
    });
}

#[test]
fn two_stores() {
    exhaust(|| {
        let machine = Machine::new(Config { shards: 2, ..SMALL });
        let (a, b) = at_once(|| machine.store(1, Home::ROOT), || machine.store(2, Home::ROOT));
        machine.end([a.expect("room"), b.expect("room")]);
    });
}

// "It is exceeded by a page at most for each store under way"
#[test]
fn two_stores_that_reach_the_cap() {
    explore(|| {
        let cap = PAGE_SIZE as u64;
        let machine = Machine::new(Config { max_pool_bytes: cap, shards: 2, ..SMALL });
        let (a, b) = at_once(|| machine.store(1, Home::ROOT), || machine.store(2, Home::ROOT));
        assert!((cap..=2 * cap).contains(&machine.zswap.pool_bytes()));
        let next = machine.store(3, Home::ROOT).expect("room on disk");
        assert_eq!(machine.read(next), Origin::Disk);
        machine.end([a.expect("room"), b.expect("room"), next]);
    });
}

#[test]
fn a_store_whose_pool_is_retired() {
    for scenario in [retirement_during_a_store::<1> as fn(), retirement_during_a_store::<2>] {
        exhaust(scenario);
    }
}

fn retirement_during_a_store<const SHARDS: usize>() {
    let machine = Machine::new(Config { shards: SHARDS, ..SMALL });
    let retire = || {
        machine.zswap.set_compressor(Compressor::LzoRle);
        machine.zswap.set_zpool(Zpool::Zsmalloc);
    };
    let (page, ()) = at_once(|| machine.store(1, Home::ROOT).expect("room"), retire);
    assert!((1..=2).contains(&machine.zswap.pools().len()));
    machine.end([page]);
}

#[test]
fn a_retired_pool_is_revived_as_its_last_entry_goes() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let page = machine.store(1, Home::ROOT).expect("room");
        machine.zswap.set_compressor(Compressor::LzoRle);
        let revive = || {
            machine.zswap.set_compressor(Compressor::Lz4);
            machine.store(2, Home::ROOT).expect("room")
        };
        let (_, next) = at_once(|| machine.take(page), revive);
        machine.end([next]);
    });
}

#[test]
fn the_last_entry_of_a_retired_pool_is_written_back() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let [page] = machine.cold([1], Home::ROOT);
        at_once(|| machine.scan(ROOT, 1), || machine.zswap.set_compressor(Compressor::LzoRle));
        machine.end([page]);
    });
}

#[test]
fn a_store_whose_group_is_removed() {
    let in_pool = [removal_during_a_store::<1, false> as fn(), removal_during_a_store::<2, false>];
    let on_disk = [removal_during_a_store::<1, true> as fn(), removal_during_a_store::<2, true>];
    for scenario in in_pool.into_iter().chain(on_disk) {
        exhaust(scenario);
    }
}

fn removal_during_a_store<const SHARDS: usize, const ON_DISK: bool>() {
    let machine = Machine::new(Config { enabled: !ON_DISK, shards: SHARDS, ..SMALL });
    let group = machine.zswap.create_group(ROOT).expect("room");
    let remove = || machine.zswap.remove_group(group).expect("it has no children");
    let (stored, ()) = at_once(|| machine.store(1, of(group)), remove);
    assert!(matches!(stored, Ok(_) | Err(SwapOutError::NoGroup)));
    machine.end(stored.ok());
}

#[test]
fn a_group_that_is_removed_and_replaced_while_a_page_of_it_is_written() {
    for scenario in [removal_during_a_write::<false> as fn(), removal_during_a_write::<true>] {
        exhaust(scenario);
    }
}

fn removal_during_a_write<const FAILS: bool>() {
    let machine = Machine::new(SMALL);
    let group = machine.zswap.create_group(ROOT).expect("room");
    let [page] = machine.cold([1], of(group));
    machine.disk.set_failing(FAILS);
    let replace = || {
        machine.zswap.remove_group(group).expect("it has no children");
        machine.zswap.create_group(ROOT).expect("room")
    };
    let (_, next) = at_once(|| machine.scan(group, 1), replace);
    assert_eq!(machine.zswap.group_counters(next), Ok(GroupCounters::default()), "another group's charge");
    machine.end([page]);
}

// "after a `false` no page of theirs is written"
#[test]
fn no_write_outlasts_its_being_forbidden() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let group = machine.zswap.create_group(ROOT).expect("room");
        let [page] = machine.cold([1], of(group));
        forbid_during(&machine, group, || machine.scan(group, 1));
        machine.end([page]);
    });
}

#[test]
fn no_write_of_a_refused_page_outlasts_its_being_forbidden() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        let group = machine.zswap.create_group(ROOT).expect("room");
        machine.zswap.set_enabled(false);
        let page = forbid_during(&machine, group, || machine.store(1, of(group)));
        machine.end(page.ok());
    });
}

/// Forbids a group to write while it does `work`, which may write as long as that has not returned.
fn forbid_during<T: Send>(machine: &Machine, group: Group, work: impl FnOnce() -> T + Send) -> T {
    let forbid = || {
        machine.zswap.set_writeback(group, false).expect("it is there");
        machine.disk.writes()
    };
    let (done, (writes, under_way)) = at_once(work, forbid);
    assert_eq!((writes, under_way), (machine.disk.writes().0, false));
    done
}

#[test]
fn a_hole_is_punched_before_its_place_is_given_away() {
    exhaust(|| {
        let machine = Machine::new(SMALL);
        machine.zswap.set_enabled(false);
        let page = machine.store(1, Home::ROOT).expect("room on disk");
        let (_, next) = at_once(|| machine.zswap.invalidate(page.slot), || machine.store(2, Home::ROOT));
        assert!(matches!(next, Ok(_) | Err(SwapOutError::NoSpace)));
        machine.end(next.ok());
    });
}

#[test]
fn a_folio_is_loaded_while_it_is_written() {
    explore(|| {
        let machine = Machine::new(SMALL);
        let folio = machine.cold([1, 2], Home::ROOT);
        let load = || {
            let mut pages = [[0; PAGE_SIZE]; 2];
            machine.zswap.load_folio(&folio.map(|owned| owned.slot), &mut pages).expect("both can be loaded");
            assert!(pages == [page(1), page(2)]);
        };
        at_once(|| machine.scan(ROOT, 2), load);
        machine.end(folio);
    });
}

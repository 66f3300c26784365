//! Groups: who is charged, who is written back, and whose pages never reach the disk. Each test quotes its line of the
//! contract.

use crate::common::*;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::*;

// "charge the group"
#[test]
fn charge_the_group_and_all_above_it() {
    let (zswap, _) = zswap(ROOMY, true);
    let parent = group(&zswap);
    let child = zswap.create_group(parent).unwrap();
    let sibling = group(&zswap);
    let slots = fill(&zswap, 0..4, of(child));
    let zero = zswap.swap_out(&[0; PAGE_SIZE], of(child)).unwrap();
    zswap.swap_out(&noise(1), of(parent)).unwrap();
    let counters = |group| zswap.group_counters(group).unwrap();
    assert_eq!((counters(child).zswpout, counters(child).swpout_zero, counters(child).zswapped), (4, 1, 5 * 4096));
    assert_eq!((counters(parent).zswpout, counters(parent).zswap_incomp), (5, 4096));
    assert_eq!(counters(parent).zswap, counters(child).zswap + 4096);
    assert_eq!(counters(Group::ROOT), counters(parent));
    assert_eq!(counters(sibling), GroupCounters::default());

    expect(&zswap, slots[0], &page(0));
    expect(&zswap, zero, &[0; PAGE_SIZE]);
    zswap.shrink(u64::MAX);
    expect(&zswap, slots[0], &page(0));
    for group in [child, parent, Group::ROOT] {
        let c = counters(group);
        let pages = if group == child { 4 } else { 5 };
        assert_eq!((c.zswpin, c.pswpin, c.swpin_zero, c.zswpwb, c.pswpout, c.zswap), (1, 1, 1, pages, pages, 0));
    }
    zswap.check_valid();
}

#[test]
fn deleted_groups_hand_their_entries_to_their_parent() {
    let (zswap, _) = zswap(ROOMY, true);
    let parent = group(&zswap);
    let child = zswap.create_group(parent).unwrap();
    let grandchild = zswap.create_group(child).unwrap();
    let before = fill(&zswap, 0..20, of(parent));
    let slots = fill(&zswap, 20..40, of(grandchild));
    assert_eq!(zswap.remove_group(parent), Err(GroupError::HasChildren));
    assert_eq!(zswap.remove_group(Group::ROOT), Err(GroupError::Root));
    let charged = zswap.group_counters(grandchild).unwrap().zswap;
    for group in [grandchild, child] {
        zswap.remove_group(group).unwrap();
        zswap.check_valid();
        assert_eq!(zswap.remove_group(group), Err(GroupError::Gone));
        assert_eq!(zswap.group_counters(group), Err(GroupError::Gone));
        assert!(matches!(zswap.swap_out(&page(0), of(group)), Err(SwapOutError::NoGroup)));
    }
    assert!(zswap.group_counters(parent).unwrap().zswap > charged);
    // The heirs' own limits hold for them from now on.
    zswap.set_writeback(parent, false).unwrap();
    assert_eq!(zswap.shrink(u64::MAX), 0);
    zswap.set_writeback(parent, true).unwrap();
    zswap.shrink(1);
    assert_eq!((on_disk(&zswap, &slots, 20), on_disk(&zswap, &before, 0)), (16, 0), "they are the coldest");
    slots.into_iter().chain(before).for_each(|slot| zswap.invalidate(slot));
    zswap.check_valid();
    assert_eq!(zswap.group_counters(parent).unwrap().zswap, 0);
}

#[test]
fn a_number_is_not_given_away_while_an_entry_names_it() {
    let (zswap, _) = zswap(ROOMY, true);
    let mut kept = Vec::new();
    for seed in 0..200 {
        let parent = group(&zswap);
        let child = zswap.create_group(parent).unwrap();
        kept.extend(fill(&zswap, seed..seed + 1, of(child)));
        zswap.remove_group(child).unwrap();
        if seed % 3 == 0 {
            expect(&zswap, kept[seed as usize], &page(seed));
        }
        zswap.remove_group(parent).unwrap();
        let other = group(&zswap);
        assert_eq!(zswap.group_counters(other).unwrap(), GroupCounters::default());
        zswap.check_valid();
        zswap.remove_group(other).unwrap();
    }
    kept.into_iter().enumerate().for_each(|(seed, slot)| {
        expect(&zswap, slot, &page(seed as u64));
        zswap.invalidate(slot);
    });
    zswap.check_valid();
    assert_eq!(zswap.counters().root.zswap, 0);
}

#[test]
fn a_group_may_be_removed_while_its_entries_are_written() {
    let (zswap, faults) = zswap(ROOMY, true);
    let zswap = std::sync::Arc::new(zswap);
    for fails in [false, true] {
        let doomed = group(&zswap);
        let slots = fill(&zswap, 0..10, of(doomed));
        let (during, failing) = (zswap.clone(), faults.clone());
        *faults.before_write.lock() = Some(Box::new(move || {
            during.remove_group(doomed).unwrap();
            failing.write_errors.store(fails, Relaxed);
        }));
        zswap.shrink(u64::MAX);
        faults.write_errors.store(false, Relaxed);
        zswap.check_valid();
        assert_eq!(on_disk(&zswap, &slots, 0), if fails { 0 } else { 10 });
        slots.into_iter().for_each(|slot| zswap.invalidate(slot));
        zswap.check_valid();
    }
}

// "If a group on the path is over memory.zswap.max: shrink that group once; still over: refuse."
#[test]
fn a_group_over_its_limit_shrinks_only_itself_and_its_descendants() {
    let (zswap, _) = zswap(ROOMY, true);
    let (limited, neighbour) = (group(&zswap), group(&zswap));
    let child = zswap.create_group(limited).unwrap();
    let neighbours = fill(&zswap, 0..50, of(neighbour));
    let mut own = fill(&zswap, 50..80, of(limited));
    own.extend(fill(&zswap, 80..100, of(child)));
    let usage = zswap.group_counters(limited).unwrap().zswap;
    zswap.set_zswap_max(limited, Some(usage)).unwrap();
    let slot = zswap.swap_out(&page(100), of(child)).unwrap();
    assert_eq!(expect(&zswap, slot, &page(100)), Origin::Pool);
    assert!(zswap.group_counters(limited).unwrap().zswap < usage);
    let written = on_disk(&zswap, &own, 50);
    assert!((1..=16).contains(&written), "{written}");
    assert_eq!(on_disk(&zswap, &neighbours, 0), 0, "a neighbour's pages");

    // Still over: refused, so written through, and counted for that group.
    zswap.set_zswap_max(limited, Some(1)).unwrap();
    let slot = zswap.swap_out(&page(101), of(child)).unwrap();
    assert_eq!(expect(&zswap, slot, &page(101)), Origin::Disk);
    assert_eq!(zswap.group_counters(limited).unwrap().zswap_max_hit, 1);
    assert_eq!(zswap.group_counters(child).unwrap().zswap_max_hit, 0);
    assert_eq!((on_disk(&zswap, &neighbours, 0), zswap.counters().pool_limit_hit), (0, 0));
    zswap.check_valid();
}

// "memory.zswap.max (hard limit; 0 = never use zswap)"
#[test]
fn a_limit_of_0_never_stores() {
    let (zswap, faults) = zswap(ROOMY, true);
    let group = group(&zswap);
    zswap.set_zswap_max(group, Some(0)).unwrap();
    let slot = zswap.swap_out(&page(1), of(group)).unwrap();
    assert_eq!(expect(&zswap, slot, &page(1)), Origin::Disk);
    assert_eq!((zswap.counters().root.zswpout, faults.writes.load(Relaxed)), (0, 1));
    zswap.swap_out(&page(1), Home::ROOT).unwrap();
    assert_eq!(zswap.counters().root.zswpout, 1);
}

// "memory.swap.max": pages swapped out, in the pool or on disk, of a group and all below it.
#[test]
fn a_group_swaps_out_no_more_than_it_may() {
    let (zswap, _) = zswap(ROOMY, true);
    let (limited, neighbour) = (group(&zswap), group(&zswap));
    let child = zswap.create_group(limited).unwrap();
    zswap.set_swap_max(limited, Some(4 * 4096)).unwrap();
    let counts = |group| {
        let counters = zswap.group_counters(group).unwrap();
        (counters.zswapped + counters.swapped, counters.swap_max, counters.swap_fail)
    };
    let mut slots = fill(&zswap, 0..2, of(child));
    slots.push(zswap.swap_out(&[0; PAGE_SIZE], of(limited)).unwrap());
    zswap.set_zswap_max(child, Some(0)).unwrap();
    slots.push(zswap.swap_out(&page(3), of(child)).unwrap());
    assert_eq!(expect(&zswap, slots[3], &page(3)), Origin::Disk);
    assert_eq!((counts(limited), counts(child)), ((4 * 4096, 0, 0), (3 * 4096, 0, 0)));
    for (refused, home) in [(page(4), of(child)), ([0; PAGE_SIZE], of(limited)), ([7; PAGE_SIZE], of(limited))] {
        assert!(matches!(zswap.swap_out(&refused, home), Err(SwapOutError::SwapMax)));
    }
    assert_eq!((counts(limited), counts(child)), ((4 * 4096, 3, 3), (3 * 4096, 0, 1)), "the limit is not the child's");
    assert_eq!((zswap.counters().root.swap_max, counts(neighbour).1), (3, 0));
    zswap.swap_out(&page(5), of(neighbour)).unwrap();

    // Written back is swapped out all the same.
    zswap.shrink(u64::MAX);
    assert!(matches!(zswap.swap_out(&page(4), of(limited)), Err(SwapOutError::SwapMax)));
    // What is there may be more than is allowed; it comes back as ever, and makes room only once it is below.
    zswap.set_swap_max(limited, Some(2 * 4096)).unwrap();
    for page in [page(0), page(1)] {
        assert!(matches!(zswap.swap_out(&page, of(limited)), Err(SwapOutError::SwapMax)));
        let slot = slots.remove(0);
        expect(&zswap, slot, &page);
        zswap.invalidate(slot);
    }
    assert!(matches!(zswap.swap_out(&page(0), of(limited)), Err(SwapOutError::SwapMax)));
    zswap.set_swap_max(limited, None).unwrap();
    zswap.swap_out(&page(0), of(limited)).unwrap();
    zswap.check_valid();
}

#[test]
fn a_folio_is_swapped_out_whole_or_not_at_all_within_the_limit() {
    let (zswap, faults) = zswap(ROOMY, true);
    let group = group(&zswap);
    zswap.set_swap_max(group, Some(7 * 4096)).unwrap();
    let mixed: Vec<Page> = (0..4).map(|i| if i % 2 == 0 { [0; PAGE_SIZE] } else { page(i) }).collect();
    let slots = zswap.swap_out_folio(&mixed, of(group)).unwrap();
    for on_disk in [false, true] {
        zswap.set_zswap_max(group, on_disk.then_some(0)).unwrap();
        assert!(matches!(zswap.swap_out_folio(&mixed, of(group)), Err(SwapOutError::SwapMax)));
        assert_eq!(
            (zswap.counters().root.swap_max, zswap.group_counters(group).unwrap().zswapped),
            (1 + u64::from(on_disk), 4 * 4096)
        );
    }
    assert_eq!(faults.writes.load(Relaxed), 0, "written in vain");
    slots.into_iter().for_each(|slot| zswap.invalidate(slot));
    zswap.swap_out_folio(&mixed, of(group)).unwrap();
    zswap.check_valid();
}

#[test]
fn what_may_be_swapped_out_is_told_beforehand() {
    let (zswap, _) = zswap(ROOMY, false);
    let group = group(&zswap);
    let child = zswap.create_group(group).unwrap();
    let refusals = || zswap.group_counters(child).unwrap().swap_fail;
    assert_eq!((zswap.swap_room(child, 100), refusals()), (100, 0));
    zswap.set_swap_max(group, Some(10 * 4096)).unwrap();
    fill(&zswap, 0..7, of(group));
    assert_eq!((zswap.swap_room(child, 100), zswap.swap_room(child, 2), refusals()), (3, 2, 0));
    fill(&zswap, 0..3, of(child));
    assert_eq!((zswap.swap_room(child, 100), zswap.swap_room(child, 0), refusals()), (0, 0, 1));
    assert_eq!(zswap.swap_of(&[Group::ROOT, group, child]), [10 * 4096, 10 * 4096, 3 * 4096]);
    zswap.remove_group(child).unwrap();
    assert_eq!((zswap.swap_room(child, 100), zswap.swap_of(&[child])), (0, vec![0]));
    zswap.check_valid();
}

// "fail": also for want of space.
#[test]
fn what_finds_no_space_has_failed() {
    let (zswap, _) = zswap(Config { enabled: false, ..ROOMY }, false);
    let group = group(&zswap);
    assert!(matches!(zswap.swap_out(&page(1), of(group)), Err(SwapOutError::NoSpace)));
    assert!(matches!(zswap.swap_out_folio(&[page(1), [0; PAGE_SIZE]], of(group)), Err(SwapOutError::NoSpace)));
    let counters = zswap.group_counters(group).unwrap();
    assert_eq!((counters.swap_max, counters.swap_fail), (0, 2));
}

// "memory.zswap.writeback (0 = never to disk, stores that are refused included; hierarchical)"
#[test]
fn without_writeback_nothing_of_a_group_reaches_the_disk() {
    let (zswap, faults) = zswap(ROOMY, true);
    let parent = group(&zswap);
    let child = zswap.create_group(parent).unwrap();
    let slots = fill(&zswap, 0..20, of(child));
    zswap.set_writeback(parent, false).unwrap();
    assert_eq!(zswap.shrink(u64::MAX), 0);
    assert_eq!(zswap.shrinker_count(child, 0), 0);
    assert_eq!(zswap.shrinker_scan(child, 0, 100), 0);
    // Over its own limit, with the cap hit, and switched off: refused, and told why.
    zswap.set_zswap_max(child, Some(1)).unwrap();
    assert!(matches!(zswap.swap_out(&page(1), of(child)), Err(SwapOutError::WritebackForbidden)));
    zswap.set_zswap_max(child, None).unwrap();
    zswap.set_max_pool_bytes(4096);
    assert!(matches!(zswap.swap_out(&page(1), of(child)), Err(SwapOutError::WritebackForbidden)));
    assert!(matches!(zswap.swap_out_folio(&[page(1), page(2)], of(child)), Err(SwapOutError::WritebackForbidden)));
    zswap.shrink_until_accepting();
    assert_eq!(faults.writes.load(Relaxed), 0);
    assert_eq!(on_disk(&zswap, &slots, 0), 0);
    zswap.set_writeback(parent, true).unwrap();
    zswap.set_writeback(child, false).unwrap();
    assert_eq!(zswap.shrink(u64::MAX), 0);
    zswap.set_writeback(child, true).unwrap();
    assert!(zswap.shrink(u64::MAX) > 0);
    zswap.check_valid();
}

// "an incompressible page is kept raw if the group may write back, refused otherwise"
#[test]
fn an_incompressible_page_is_refused_where_it_could_not_be_written_back() {
    let (zswap, _) = zswap(ROOMY, true);
    let group = group(&zswap);
    zswap.set_writeback(group, false).unwrap();
    assert!(matches!(zswap.swap_out(&noise(1), of(group)), Err(SwapOutError::WritebackForbidden)));
    let counters = zswap.counters();
    assert_eq!((counters.reject_compress_poor, counters.stored_pages), (1, 0));
    zswap.set_writeback(group, true).unwrap();
    zswap.swap_out(&noise(1), of(group)).unwrap();
    assert_eq!(zswap.group_counters(group).unwrap().zswap_incomp, 4096);
}

// "Runs until the pool is at or under the accept threshold, not for one page"
#[test]
fn the_worker_stops_exactly_at_the_threshold() {
    let (zswap, _) = zswap(Config { max_pool_bytes: 100 * 4096, accept_threshold_percent: 80, ..ROOMY }, true);
    let mut slots = Vec::new();
    while zswap.shrink_needed().is_none() {
        slots.push(zswap.swap_out(&noise(slots.len() as u64), Home::ROOT).unwrap());
    }
    assert_eq!(zswap.shrink_until_accepting(), 20 * 4096);
    assert_eq!((zswap.pool_bytes(), zswap.counters().written_back_pages), (80 * 4096, 20));
    assert_eq!((zswap.counters().swap_current, zswap.counters().reject_reclaim_fail), (20 * 4096, 0));
    assert_eq!(zswap.shrink_until_accepting(), 0, "it is not queued");
    // Without having been at the cap, being above the threshold is no reason.
    slots.push(zswap.swap_out(&noise(1000), Home::ROOT).unwrap());
    assert_eq!((zswap.shrink_needed(), zswap.shrink_until_accepting()), (None, 0));
    zswap.check_valid();
}

#[test]
fn the_worker_stops_at_the_threshold_with_compressed_pages_too() {
    let (zswap, _) = zswap(Config { max_pool_bytes: 100 * 4096, accept_threshold_percent: 50, ..ROOMY }, true);
    let mut seed = 0;
    while zswap.shrink_needed().is_none() {
        zswap.swap_out(&page(seed), Home::ROOT).unwrap();
        seed += 1;
    }
    zswap.shrink_until_accepting();
    let pool = zswap.pool_bytes();
    assert!(pool <= 50 * 4096 && pool > 42 * 4096, "{} pages: at most a zspage under it", pool / 4096);
    zswap.check_valid();
}

#[test]
fn the_worker_compacts_before_it_writes() {
    let (zswap, faults) = zswap(Config { max_pool_bytes: 200 * 4096, ..ROOMY }, true);
    let mut slots = Vec::new();
    while zswap.shrink_needed().is_none() {
        slots.push(zswap.swap_out(&page(slots.len() as u64), Home::ROOT).unwrap());
    }
    assert!(zswap.swap_out(&page(0), Home::ROOT).is_ok(), "written through");
    let writes = faults.writes.load(Relaxed);
    // Every third goes: hardly a zspage is empty, yet there is room for many.
    slots.iter().step_by(3).for_each(|&slot| zswap.invalidate(slot));
    assert!(zswap.shrink_needed().is_some(), "{}", zswap.pool_bytes() / 4096);
    assert!(zswap.shrink_until_accepting() > 0);
    assert_eq!((zswap.shrink_needed(), faults.writes.load(Relaxed)), (None, writes));
    zswap.check_valid();
}

// "it walks the online groups round robin and continues where it last stopped"; "it skips groups that are going away"
#[test]
fn the_worker_goes_round_and_remembers_where_it_stopped() {
    let (zswap, _) = zswap(ROOMY, true);
    let groups: Vec<Group> = (0..4).map(|_| group(&zswap)).collect();
    let nodes = |group| [Home { group, node: 0 }, Home { group, node: 3 }];
    let slots: Vec<Vec<Slot>> = groups
        .iter()
        .flat_map(|&group| nodes(group))
        .zip(0u64..)
        .map(|(home, n)| fill(&zswap, n * 100..n * 100 + 40, home))
        .collect();
    let by_group =
        || groups.iter().map(|&group| zswap.group_counters(group).map_or(0, |c| c.zswpwb)).collect::<Vec<_>>();
    zswap.shrink(1);
    assert_eq!(by_group(), [16, 0, 0, 0], "both nodes of the first");
    zswap.shrink(1);
    assert_eq!(by_group(), [16, 16, 0, 0], "it goes on with the second");
    // Where it stands goes away; it goes on all the same.
    zswap.remove_group(groups[1]).unwrap();
    zswap.shrink(1);
    assert_eq!(by_group(), [16, 0, 16, 0]);
    zswap.take_group_offline(groups[3]).unwrap();
    zswap.shrink(1);
    assert_eq!(by_group(), [16, 0, 16, 0], "the root's turn, which has the entries of the second");
    assert_eq!(zswap.counters().root.zswpwb, 64);
    zswap.shrink(u64::MAX);
    assert_eq!(by_group(), [80, 0, 80, 0], "it passes by what is going away");
    let written: Vec<usize> = slots.iter().zip(0..).map(|(slots, n)| on_disk(&zswap, slots, n * 100)).collect();
    assert_eq!(written, [40, 40, 40, 40, 40, 40, 0, 0]);
    zswap.check_valid();
}

// "it gives up after repeated failures (16)"
#[test]
fn the_worker_gives_up_after_16_failures() {
    let (zswap, faults) = zswap(Config { max_pool_bytes: 40 * 4096, ..ROOMY }, true);
    let slots: Vec<Slot> = (0..40).map(|seed| zswap.swap_out(&noise(seed), Home::ROOT).unwrap()).collect();
    faults.write_errors.store(true, Relaxed);
    assert_eq!(zswap.shrink_until_accepting(), 0);
    let counters = zswap.counters();
    // Four entries are in excess; sixteen are written at once: 16, 8, 4, 2, and 1 twelve times.
    assert_eq!((counters.reject_reclaim_fail, counters.written_back_pages), (16 + 8 + 4 + 2 + 12, 0));
    zswap.check_valid();
    faults.write_errors.store(false, Relaxed);
    zswap.shrink_until_accepting();
    assert_eq!(expect(&zswap, slots[0], &noise(0)), Origin::Disk, "the order is as it was");
    assert_eq!(zswap.counters().written_back_pages, 4);
}

// "Refuse if not enabled"; "switching off leaves stored pages where they are"
#[test]
fn switched_off_nothing_is_stored_and_nothing_moves() {
    let (zswap, _) = zswap(ROOMY, true);
    let stored = fill(&zswap, 0..1, Home::ROOT)[0];
    zswap.set_enabled(false);
    let refused = zswap.swap_out(&page(1), Home::ROOT).unwrap();
    assert_eq!(expect(&zswap, stored, &page(0)), Origin::Pool);
    assert_eq!(expect(&zswap, refused, &page(1)), Origin::Disk);
    zswap.set_enabled(true);
    assert_eq!(expect(&zswap, fill(&zswap, 2..3, Home::ROOT)[0], &page(2)), Origin::Pool);
}

#[test]
fn what_is_stored_stays_charged_to_whom_it_was_stored_for() {
    let (zswap, _) = zswap(ROOMY, true);
    let (before, after) = (group(&zswap), group(&zswap));
    let slot = fill(&zswap, 0..1, of(before))[0];
    let moved = fill(&zswap, 1..2, of(after))[0];
    expect(&zswap, slot, &page(0));
    let pages = |group| zswap.group_counters(group).map(|counters| (counters.zswapped / 4096, counters.zswpin));
    assert_eq!((pages(before), pages(after)), (Ok((1, 1)), Ok((1, 0))));
    zswap.invalidate(slot);
    zswap.invalidate(moved);
    assert_eq!((pages(before), pages(after)), (Ok((0, 1)), Ok((0, 0))));
}

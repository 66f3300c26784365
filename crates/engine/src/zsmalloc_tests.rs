//! Tests of the allocator against a plain map of what was put in.

use super::*;
use crate::fuzzing::Limited;
use crate::zpool::HeapSource;
use proptest::prelude::*;
use std::collections::HashMap;

#[test]
fn classes_cover_every_size_with_little_waste() {
    let (classes, by_steps) = size_classes();
    assert_eq!(classes.last().map(|class| (class.size, class.pages, class.places)), Some((4096, 1, 1)));
    for length in 1..=PAGE_SIZE {
        let class = &classes[by_steps[length.div_ceil(SIZE_STEP)] as usize];
        assert!(class.size as usize >= length);
        assert!(class.places as usize * class.size as usize <= class.pages as usize * PAGE_SIZE);
        let share = class.pages as usize * PAGE_SIZE / class.places as usize;
        assert!(share <= length + 16 + length / 32, "{length} bytes take {share}");
    }
}

#[test]
fn a_zspage_has_the_pages_that_it_needs() {
    let mut pool = Zsmalloc::new(Arc::new(HeapSource));
    let mut places = Vec::new();
    for i in 0..200 {
        places.push(pool.malloc(&[i; 1000], i as u32).unwrap());
        let least = (places.len() as u64 * 1000).div_ceil(PAGE_SIZE as u64);
        assert!((least..=least + 2).contains(&pool.pages()), "{} pages for {} objects", pool.pages(), places.len());
        pool.check_valid();
    }
    assert_eq!((pool.bytes(), pool.objects()), (200_000, 200));
    let mut held = pool.pages();
    while let Some(place) = places.pop() {
        held -= pool.free(place, 1000);
        let least = (places.len() as u64 * 1000).div_ceil(PAGE_SIZE as u64);
        assert!(pool.pages() == held && held <= least + 2, "{held} pages for {} objects", places.len());
        pool.check_valid();
    }
    assert_eq!((pool.pages(), pool.bytes(), pool.objects()), (0, 0, 0));
}

#[test]
fn compaction_frees_what_can_be_freed() {
    let mut pool = Zsmalloc::new(Arc::new(HeapSource));
    let places: Vec<_> = (0..=255).map(|i| pool.malloc(&[i; 1000], i as u32).unwrap()).collect();
    let before = pool.pages();
    // One object in four stays, in every zspage.
    let mut kept: HashMap<u32, Place> = (0..).zip(places).collect();
    kept.retain(|owner, place| {
        let keep = owner % 4 == 3;
        if !keep {
            pool.free(*place, 1000);
        }
        keep
    });
    pool.check_valid();
    assert!(pool.pages() > before * 9 / 10, "fragmented: {} of {before} pages are left", pool.pages());
    let fragmented = pool.pages();
    let freed: u64 = (0..pool.classes()).map(|class| compact(&mut pool, class, &mut kept)).sum();
    assert_eq!(pool.pages(), fragmented - freed);
    assert!(pool.pages() <= 64 * 1000 / PAGE_SIZE as u64 + 3, "{} of {before} pages are left", pool.pages());
    for (owner, place) in kept {
        assert_eq!(pool.get(place, 1000), [owner as u8; 1000]);
    }
}

/// Compacts a class as far as it goes; each step gives a page back or is the last.
fn compact(pool: &mut Zsmalloc<impl PageSource>, class: usize, owners: &mut HashMap<u32, Place>) -> u64 {
    let mut freed = 0;
    loop {
        let mut moves = 0;
        let step = pool.compact_step(class, &mut |owner, place| {
            moves += 1;
            *owners.get_mut(&owner).expect("an owner of an object") = place;
        });
        pool.check_valid();
        let Some(pages) = step else { return freed };
        assert!(pages > 0 && moves <= PAGE_SIZE / pool.classes[class].size as usize + 1);
        freed += pages;
    }
}

#[derive(Debug, Clone)]
enum Step {
    Malloc { length: usize, byte: u8 },
    Free { which: prop::sample::Index },
    Compact { class: prop::sample::Index },
    Memory { pages: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let length = prop_oneof![1usize..=PAGE_SIZE, 900usize..1000, Just(PAGE_SIZE), 1usize..64];
    let step = prop_oneof![
        6 => (length, any::<u8>()).prop_map(|(length, byte)| Step::Malloc { length, byte }),
        4 => any::<prop::sample::Index>().prop_map(|which| Step::Free { which }),
        2 => any::<prop::sample::Index>().prop_map(|class| Step::Compact { class }),
        1 => (0u64..40).prop_map(|pages| Step::Memory { pages }),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn objects_keep_their_bytes(steps in steps()) {
        let memory = Limited::new(20);
        let mut pool = Zsmalloc::new(Arc::new(memory.clone()));
        let mut model: HashMap<u32, Vec<u8>> = HashMap::new();
        let mut places: HashMap<u32, Place> = HashMap::new();
        for (owner, step) in (1..).zip(steps) {
            match step {
                Step::Malloc { length, byte } => {
                    let data: Vec<u8> = (0..length).map(|i| byte.wrapping_add(i as u8)).collect();
                    let before = pool.pages();
                    match pool.malloc(&data, owner) {
                        Ok(place) => {
                            places.insert(owner, place);
                            model.insert(owner, data);
                        }
                        Err(error) => prop_assert_eq!(error, AllocError::Pages),
                    }
                    prop_assert!(pool.pages() <= before + 1);
                }
                Step::Free { which } if !model.is_empty() => {
                    let mut owners: Vec<u32> = model.keys().copied().collect();
                    owners.sort_unstable();
                    let owner = owners[which.index(owners.len())];
                    let (place, data) = (places.remove(&owner).unwrap(), model.remove(&owner).unwrap());
                    let before = pool.pages();
                    let freed = pool.free(place, data.len());
                    prop_assert_eq!(pool.pages(), before - freed);
                }
                Step::Free { .. } => {}
                Step::Compact { class } => {
                    let (class, before) = (class.index(pool.classes()), pool.pages());
                    let freed = compact(&mut pool, class, &mut places);
                    prop_assert_eq!(pool.pages(), before - freed);
                }
                Step::Memory { pages } => memory.set(pages),
            }
            pool.check_valid();
            prop_assert_eq!(pool.objects() as usize, model.len());
            prop_assert_eq!(pool.bytes() as usize, model.values().map(Vec::len).sum::<usize>());
        }
        for (owner, data) in &model {
            pool.check_owner(places[owner], *owner);
            prop_assert_eq!(pool.get(places[owner], data.len()), data.as_slice());
        }
    }
}

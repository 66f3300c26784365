//! Tests of the allocator against a plain map of what was put in.

use super::*;
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
        assert!(share <= length + 16 + length / 7, "{length} bytes take {share}");
    }
}

#[test]
fn an_empty_zspage_goes_back_at_once() {
    let mut pool = Zsmalloc::new(Arc::new(HeapSource));
    let handles: Vec<_> = (0..100).map(|i| pool.malloc(&[i; 1000]).unwrap()).collect();
    assert_eq!(pool.bytes(), 100_000);
    assert!((25..=32).contains(&pool.pages()), "{}", pool.pages());
    let freed: u64 = handles.into_iter().map(|handle| pool.free(handle)).sum();
    assert!(freed >= 25);
    assert_eq!((pool.pages(), pool.bytes(), pool.objects()), (0, 0, 0));
}

#[test]
fn compaction_frees_what_can_be_freed() {
    let mut pool = Zsmalloc::new(Arc::new(HeapSource));
    let mut handles: Vec<_> = (0..=255).map(|i| pool.malloc(&[i; 1000]).unwrap()).collect();
    let before = pool.pages();
    // One object in four stays, in every zspage.
    let mut index = 0;
    handles.retain(|&handle| {
        index += 1;
        let keep = index % 4 == 0;
        if !keep {
            pool.free(handle);
        }
        keep
    });
    pool.check_valid();
    assert_eq!(pool.pages(), before, "fragmented");
    let freed: u64 =
        (0..pool.classes()).map(|class| std::iter::from_fn(|| pool.compact_step(class)).sum::<u64>()).sum();
    pool.check_valid();
    assert_eq!(pool.pages(), before - freed);
    assert!(pool.pages() <= before / 3, "{} of {before} pages are left", pool.pages());
    for (i, handle) in handles.into_iter().enumerate() {
        assert_eq!(pool.get(handle), [i as u8 * 4 + 3; 1000]);
    }
}

/// Has memory for so many pages.
struct Limited(Arc<std::sync::atomic::AtomicUsize>);

impl PageSource for Limited {
    fn take(&self, pages: usize) -> Option<Box<dyn PageRun>> {
        use std::sync::atomic::Ordering::Relaxed;
        self.0.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(pages)).ok()?;
        HeapSource.take(pages)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Malloc { length: usize, byte: u8 },
    Free { which: prop::sample::Index },
    Compact { class: prop::sample::Index },
    Memory { pages: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let length = prop_oneof![1usize..=PAGE_SIZE, 900usize..1000, Just(PAGE_SIZE), 1usize..64];
    let step = prop_oneof![
        6 => (length, any::<u8>()).prop_map(|(length, byte)| Step::Malloc { length, byte }),
        4 => any::<prop::sample::Index>().prop_map(|which| Step::Free { which }),
        2 => any::<prop::sample::Index>().prop_map(|class| Step::Compact { class }),
        1 => (0usize..40).prop_map(|pages| Step::Memory { pages }),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn objects_keep_their_bytes(steps in steps()) {
        let memory = Arc::new(std::sync::atomic::AtomicUsize::new(20));
        let mut pool = Zsmalloc::new(Arc::new(Limited(memory.clone())));
        let mut model: Vec<(Handle, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Malloc { length, byte } => {
                    let data: Vec<u8> = (0..length).map(|i| byte.wrapping_add(i as u8)).collect();
                    match pool.malloc(&data) {
                        Ok(handle) => model.push((handle, data)),
                        Err(error) => prop_assert_eq!(error, AllocError::Pages),
                    }
                }
                Step::Free { which } if !model.is_empty() => {
                    let (handle, _) = model.swap_remove(which.index(model.len()));
                    let before = pool.pages();
                    let freed = pool.free(handle);
                    prop_assert_eq!(pool.pages(), before - freed);
                }
                Step::Free { .. } => {}
                Step::Compact { class } => drop(pool.compact_step(class.index(pool.classes()))),
                Step::Memory { pages } => memory.store(pages, std::sync::atomic::Ordering::Relaxed),
            }
            pool.check_valid();
            prop_assert_eq!(pool.objects() as usize, model.len());
        }
        let handles: HashMap<_, _> = model.iter().map(|(handle, data)| (*handle, data)).collect();
        prop_assert_eq!(handles.len(), model.len());
        for (handle, data) in &model {
            prop_assert_eq!(pool.get(*handle), data.as_slice());
            prop_assert_eq!(pool.length(*handle), data.len());
        }
    }
}

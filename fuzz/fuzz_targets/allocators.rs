//! Any sequence of operations on an allocator leaves it in order, and every object with its bytes.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use uzswap_engine::fuzzing::{Limited, Pool};
use uzswap_engine::{PAGE_SIZE, Zpool};

#[derive(Debug, Arbitrary)]
struct Input {
    zbud: bool,
    pages: u8,
    steps: Vec<Step>,
}

/// `Fill` makes several objects of one length, so that zspages fill; `Memory` says for how many more pages there is memory.
#[derive(Debug, Arbitrary)]
enum Step {
    Malloc { length: u16, byte: u8 },
    Fill { length: u16, objects: u8 },
    Free { which: u16 },
    Compact { length: u16 },
    Memory { pages: u8 },
}

fuzz_target!(|input: Input| {
    let memory = Limited::new(input.pages as u64);
    let zpool = if input.zbud { Zpool::Zbud } else { Zpool::Zsmalloc };
    let mut pool = Pool::new(zpool, memory.clone());
    let mut model: Vec<(u32, Vec<u8>)> = Vec::new();
    let length_of = |length: u16| 1 + length as usize % PAGE_SIZE;
    for step in input.steps {
        match step {
            Step::Malloc { length, byte } => malloc(&mut pool, &mut model, length_of(length), byte),
            Step::Fill { length, objects } => {
                (0..objects % 32).for_each(|byte| malloc(&mut pool, &mut model, length_of(length), byte));
            }
            Step::Free { which } if !model.is_empty() => {
                let (object, data) = model.swap_remove(which as usize % model.len());
                assert_eq!(pool.get(object), data);
                let before = pool.totals().0;
                assert_eq!(pool.free(object), before - pool.totals().0);
            }
            Step::Free { .. } => {}
            Step::Compact { length } => {
                let before = pool.totals().0;
                assert_eq!(pool.compact(length_of(length)), before - pool.totals().0);
            }
            Step::Memory { pages } => memory.set(pages as u64),
        }
        pool.check_valid();
    }
    let bytes: usize = model.iter().map(|(_, data)| data.len()).sum();
    assert_eq!((pool.totals().1, pool.totals().2), (model.len() as u32, bytes as u64));
    for (object, data) in &model {
        assert_eq!(pool.get(*object), data);
    }
    for (object, _) in model {
        pool.free(object);
    }
    pool.check_valid();
    assert_eq!(pool.totals(), (0, 0, 0));
});

fn malloc(pool: &mut Pool, model: &mut Vec<(u32, Vec<u8>)>, length: usize, byte: u8) {
    let data: Vec<u8> = (0..length).map(|i| byte.wrapping_add(i as u8)).collect();
    if let Some(object) = pool.malloc(&data) {
        assert!(model.iter().all(|(other, _)| *other != object), "an object in use is given out");
        model.push((object, data));
    }
}

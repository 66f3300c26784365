//! The page state machine against a model: programs whose every page has a known content, evicted, stored, loaded,
//! rescued, remapped, unmapped, discarded and forked at random. What a fault would bring is always what the program
//! last had there.

use std::collections::HashMap;

use proptest::prelude::*;
use uzswap_engine::{Config, HeapSource, Home, PAGE_SIZE, Page, Slot, Zswap};

use super::*;
use crate::closing::{Handed, User};
use crate::owner::Owner;

const BASE: u64 = 1 << 30;
const PAGES: u64 = 96;

#[derive(Debug, Clone)]
enum Step {
    Write { process: usize, page: u64, content: u8 },
    Evict { process: usize, page: u64, pages: u64 },
    Store { process: usize, pages: usize },
    Fault { process: usize, page: u64 },
    BeginLoad { process: usize, page: u64 },
    FinishLoads { process: usize },
    Remap { process: usize, from: u64, to: u64, pages: u64 },
    Unmap { process: usize, page: u64, pages: u64 },
    Remove { process: usize, page: u64, pages: u64 },
    Fork { process: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let process = 0usize..3;
    let page = 0..PAGES;
    let pages = 1u64..24;
    prop_oneof![
        4 => (process.clone(), page.clone(), 1u8..).prop_map(|(process, page, content)| Step::Write { process, page, content }),
        4 => (process.clone(), page.clone(), pages.clone())
            .prop_map(|(process, page, pages)| Step::Evict { process, page, pages }),
        3 => (process.clone(), 1usize..40).prop_map(|(process, pages)| Step::Store { process, pages }),
        3 => (process.clone(), page.clone()).prop_map(|(process, page)| Step::Fault { process, page }),
        2 => (process.clone(), page.clone()).prop_map(|(process, page)| Step::BeginLoad { process, page }),
        2 => process.clone().prop_map(|process| Step::FinishLoads { process }),
        2 => (process.clone(), page.clone(), page.clone(), pages.clone())
            .prop_map(|(process, from, to, pages)| Step::Remap { process, from, to, pages }),
        1 => (process.clone(), page.clone(), pages.clone())
            .prop_map(|(process, page, pages)| Step::Unmap { process, page, pages }),
        1 => (process.clone(), page, pages).prop_map(|(process, page, pages)| Step::Remove { process, page, pages }),
        1 => process.prop_map(|process| Step::Fork { process }),
    ]
}

/// A process: what the manager knows of it, what its memory and staging area hold, and what its program expects.
#[derive(Default)]
struct Process {
    state: State,
    memory: HashMap<u64, u8>,
    staged: HashMap<u32, u8>,
    loads: Vec<(u64, Slot)>,
    expected: HashMap<u64, u8>,
}

fn page_of(content: u8) -> Page {
    let mut page = [content; PAGE_SIZE];
    page[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    page
}

fn address(page: u64) -> u64 {
    BASE + page * PAGE
}

fn range(page: u64, pages: u64) -> Range {
    Range::new(address(page), address((page + pages).min(PAGES)))
}

fn addresses(range: Range) -> impl Iterator<Item = u64> {
    (range.start..range.end).step_by(PAGE_SIZE)
}

impl Process {
    /// What a fault at `page` brings; the page is resident afterwards.
    fn fault(&mut self, engine: &Zswap, page: u64) {
        let mut data = [0; PAGE_SIZE];
        let content = match self.state.table.set(page, PageState::Resident) {
            PageState::Resident => 0,
            PageState::Staged(sequence) => {
                self.state.staging.clear(sequence);
                self.staged[&sequence]
            }
            PageState::Stored(slot) => {
                engine.load(slot, &mut data).expect("nothing fails here");
                engine.invalidate(slot);
                data[PAGE_SIZE - 1]
            }
            PageState::Loading(slot) => {
                engine.load(slot, &mut data).expect("nothing fails here");
                data[PAGE_SIZE - 1]
            }
        };
        self.memory.entry(page).or_insert(content);
    }

    fn evict(&mut self, engine: &Zswap, range: Range) {
        for page in addresses(range) {
            if !self.state.is_evictable(page) || !self.memory.contains_key(&page) {
                continue;
            }
            // Present and yet in the table: what a fork left is stale.
            let stale = self.state.table.set(page, PageState::Resident);
            self.state.drop_contents(engine, stale);
            let (sequence, 1) = self.state.staging.reserve(1) else { return };
            self.staged.insert(sequence, self.memory.remove(&page).expect("just seen"));
            self.state.staging.fill(sequence, page);
            self.state.table.set(page, PageState::Staged(sequence));
        }
    }

    fn store(&mut self, engine: &Zswap, pages: usize) {
        let count = self.state.staging.oldest_run(pages);
        for sequence in (0..count).map(|i| self.state.staging.sequence(i)).collect::<Vec<_>>() {
            if let Some(page) = self.state.staging.get(sequence) {
                let slot = engine.swap_out(&page_of(self.staged[&sequence]), Home::ROOT).expect("there is room");
                self.state.staging.clear(sequence);
                self.state.table.set(page, PageState::Stored(slot));
            }
        }
        self.state.staging.discard(count);
    }

    fn begin_load(&mut self, page: u64) {
        if let PageState::Stored(slot) = self.state.table.get(page)
            && !self.memory.contains_key(&page)
        {
            self.state.table.set(page, PageState::Loading(slot));
            self.loads.push((page, slot));
        }
    }

    fn finish_loads(&mut self, engine: &Zswap) {
        for (page, slot) in std::mem::take(&mut self.loads) {
            let mut data = [0; PAGE_SIZE];
            engine.load(slot, &mut data).expect("the load holds a reference");
            if self.state.table.get(page) == PageState::Loading(slot) {
                self.state.table.set(page, PageState::Resident);
                self.memory.insert(page, data[PAGE_SIZE - 1]);
            }
            engine.invalidate(slot);
        }
    }

    fn vacate(&mut self, range: Range) {
        self.memory.retain(|page, _| !range.contains(*page));
        self.expected.retain(|page, _| !range.contains(*page));
    }

    fn remap(&mut self, engine: &Zswap, old: Range, to: u64) {
        let new = Range::sized(to, old.len());
        if old.is_empty() || new.end > address(PAGES) || old.overlaps(new) {
            return;
        }
        let taken = |map: &HashMap<u64, u8>| -> Vec<(u64, u8)> {
            map.iter().filter(|(page, _)| old.contains(**page)).map(|(page, c)| (page - old.start + to, *c)).collect()
        };
        let (memory, expected) = (taken(&self.memory), taken(&self.expected));
        self.vacate(old);
        self.vacate(new);
        self.memory.extend(memory);
        self.expected.extend(expected);
        self.state.apply(engine, Change::Remap { from: old.start, to, len: old.len() });
        // The kernel says this too; the old place is mapped anew by the program.
        self.state.apply(engine, Change::Unmap(old));
        self.state.registered.insert(old);
        self.state.registered.insert(new);
    }

    fn fork(&mut self, engine: &Zswap) -> Process {
        self.store(engine, usize::MAX);
        self.store(engine, usize::MAX);
        Process {
            state: self.state.inherit(engine),
            memory: self.memory.clone(),
            expected: self.expected.clone(),
            ..Process::default()
        }
    }

    /// Every page, brought back, is what the program expects.
    fn check(&mut self, engine: &Zswap) {
        self.finish_loads(engine);
        for page in 0..PAGES {
            if !self.memory.contains_key(&address(page)) {
                self.fault(engine, address(page));
            }
            let expected = self.expected.get(&address(page)).copied().unwrap_or(0);
            assert_eq!(self.memory[&address(page)], expected, "page {page}");
        }
        self.state.release(engine);
    }
}

fn engine() -> Zswap {
    let config = Config { max_pool_bytes: 64 << 20, ..Config::default() };
    Zswap::new(config, None, HeapSource)
}

fn run(engine: &Zswap, steps: Vec<Step>) {
    let mut processes = vec![Process::default()];
    processes[0].state.registered.insert(range(0, PAGES));
    for step in steps {
        let of = |process: usize| process % processes.len();
        match step {
            Step::Write { process, page, content } => {
                let i = of(process);
                let process = &mut processes[i];
                process.finish_loads(engine);
                if !process.memory.contains_key(&address(page)) {
                    process.fault(engine, address(page));
                }
                process.memory.insert(address(page), content);
                process.expected.insert(address(page), content);
            }
            Step::Evict { process, page, pages } => {
                let i = of(process);
                processes[i].evict(engine, range(page, pages));
            }
            Step::Store { process, pages } => {
                let i = of(process);
                processes[i].store(engine, pages);
            }
            Step::Fault { process, page } => {
                let i = of(process);
                if !processes[i].memory.contains_key(&address(page)) {
                    processes[i].fault(engine, address(page));
                }
            }
            Step::BeginLoad { process, page } => {
                let i = of(process);
                processes[i].begin_load(address(page));
            }
            Step::FinishLoads { process } => {
                let i = of(process);
                processes[i].finish_loads(engine);
            }
            Step::Remap { process, from, to, pages } => {
                let i = of(process);
                processes[i].remap(engine, range(from, pages), address(to));
            }
            Step::Unmap { process, page, pages } => {
                let i = of(process);
                processes[i].vacate(range(page, pages));
                processes[i].state.apply(engine, Change::Unmap(range(page, pages)));
                processes[i].state.registered.insert(range(page, pages));
            }
            Step::Remove { process, page, pages } => {
                let i = of(process);
                processes[i].vacate(range(page, pages));
                processes[i].state.apply(engine, Change::Remove(range(page, pages)));
            }
            Step::Fork { process } => {
                let i = of(process);
                let child = processes[i].fork(engine);
                if processes.len() == 3 {
                    processes.pop().expect("there are three").check(engine);
                }
                processes.push(child);
            }
        }
    }
    for mut process in processes {
        process.check(engine);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_page_is_always_what_the_program_last_had_there(steps in prop::collection::vec(step(), 1..150)) {
        let engine = engine();
        run(&engine, steps);
        engine.check_valid();
        // Every reference has been given back.
        prop_assert_eq!(engine.counters().stored_pages, 0);
    }
}

/// Counts the stalls that it is told of, begun and ended.
#[derive(Default)]
struct Told {
    counters: crate::pager::Counters,
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl Account for Told {
    fn admit(&self, _: u64) -> bool {
        true
    }

    fn admitted(&self) {}

    fn most_ahead(&self) -> usize {
        1
    }

    fn spare(&self) -> usize {
        0
    }

    fn load_begins(&self, _: u64) {}

    fn load_ends(&self, _: u64) {}

    fn group(&self) -> uzswap_engine::Group {
        uzswap_engine::Group::ROOT
    }

    fn counters(&self) -> &crate::pager::Counters {
        &self.counters
    }

    fn stall(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    fn go_on(&self) {
        self.ended.fetch_add(1, Relaxed);
    }
}

#[test]
fn a_stall_is_ended_with_whom_it_was_begun_with() {
    let [one, two] = [(), ()].map(|()| Arc::new(Told::default()));
    let file = std::fs::File::open("/dev/null").unwrap();
    let space = Space::new(
        1,
        Handed::new(User::Own, file.into()).into(),
        State::default(),
        one.clone(),
        Arc::new(Owner::trusted()),
    );
    let told = || [&one, &two].map(|told| (told.begun.load(Relaxed), told.ended.load(Relaxed)));
    let fault = |tid| Fault { page: 0, write: false, tid, since: Instant::now(), stalls: false, insists: false };
    let (mut a, mut b, other) = (fault(7), fault(8), fault(7));
    let state = &mut *space.lock();
    space.stall(state, &mut a);
    space.stall(state, &mut a);
    space.stall(state, &mut b);
    assert_eq!((told(), &state.stalled), ([(1, 0), (0, 0)], &vec![7, 8]));
    space.go_on(state, &other);
    space.go_on(state, &a);
    assert_eq!((told(), &state.stalled), ([(1, 0), (0, 0)], &vec![8]), "one waits still");
    // Another pays from now on: it is told at the next change.
    space.charge_to(two.clone());
    a.stalls = false;
    space.stall(state, &mut a);
    assert_eq!(told(), [(1, 1), (1, 0)]);
    space.forget_stalls(state);
    assert_eq!(told(), [(1, 1), (1, 1)]);
    space.go_on(state, &a);
    assert_eq!(told(), [(1, 1), (1, 1)], "it is gone");
}

#[test]
fn who_comes_again_for_the_same_page_waits_once() {
    let fault = |page, tid, write| Fault { page, write, tid, since: Instant::now(), stalls: false, insists: false };
    let mut state = State::default();
    let starved = fault(0x1000, 7, false);
    state.starved.push_back(starved);
    for (page, tid, write) in
        [(0x1000, 7, true), (0x1000, 7, false), (0x1000, 8, false), (0x2000, 7, false), (0x2000, 7, true)]
    {
        state.hear_of(fault(page, tid, write));
    }
    assert_eq!((state.starved.len(), state.starved[0].write, state.starved[0].since), (1, true, starved.since));
    let waiting: Vec<_> = state.waiting.iter().map(|fault| (fault.page, fault.tid, fault.write)).collect();
    assert_eq!(waiting, [(0x1000, 8, false), (0x2000, 7, true)]);
    // One who is to rest and does not sleep goes on.
    state.resting.push(fault(0x3000, 7, true));
    state.hear_of(fault(0x3000, 8, false));
    assert_eq!((state.resting.len(), state.waiting.last().map(|fault| fault.insists)), (1, Some(false)));
    state.hear_of(fault(0x3000, 7, false));
    let last = state.waiting.last().map(|fault| (fault.tid, fault.write, fault.insists));
    assert_eq!((state.resting.len(), last), (0, Some((7, true, true))));
}

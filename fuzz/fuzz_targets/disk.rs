//! A swap file that somebody changes: whatever is done to its bytes, a load gives the right page or an error, and an error
//! only where bytes were changed.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use std::io;
use std::sync::{Arc, Mutex};
use uzswap_engine::*;

/// First what the engine does, then what is done to its file: `Exchange` lets two ranges change places, `Keep` remembers the
/// whole file so that `Replay` can put a part of it back, `Repair` undoes all changes.
#[derive(Debug, Arbitrary)]
enum Step {
    Store { page: u8, on_disk: bool },
    StoreFolio { page: u8, order: u8, on_disk: bool },
    WriteBack,
    Load { which: u8 },
    LoadFolio { first: u8, order: u8 },
    Invalidate { which: u8 },
    SetCompressor { which: u8 },
    Flip { at: u32, mask: u8 },
    Fill { at: u32, length: u16, byte: u8 },
    Truncate { at: u32 },
    Exchange { a: u32, b: u32, length: u16 },
    ExchangePages { a: u8, b: u8 },
    Keep,
    Replay { which: u8, at: u32, length: u16 },
    ReplayPages { which: u8, first: u8, pages: u8 },
    Repair,
}

#[derive(Default)]
struct Contents {
    /// What the file holds, and what it would hold if nobody had changed it.
    data: Vec<u8>,
    written: Vec<u8>,
    kept: Vec<Vec<u8>>,
    /// A read has returned something else than was written.
    harmed: bool,
}

#[derive(Clone, Default)]
struct File(Arc<Mutex<Contents>>);

impl SwapFile for File {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let contents = &mut *self.0.lock().unwrap();
        let (start, end) = (offset as usize, offset as usize + data.len());
        for file in [&mut contents.data, &mut contents.written] {
            file.resize(file.len().max(end), 0);
            file[start..end].copy_from_slice(data);
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let contents = &mut *self.0.lock().unwrap();
        let range = offset as usize..offset as usize + buf.len();
        let read = contents.data.get(range.clone());
        contents.harmed |= read != contents.written.get(range);
        buf.copy_from_slice(read.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) {
        let contents = &mut *self.0.lock().unwrap();
        for file in [&mut contents.data, &mut contents.written] {
            let end = file.len().min((offset + len) as usize);
            file.get_mut(offset as usize..end).unwrap_or_default().fill(0);
        }
    }
}

impl Contents {
    /// A range that is in the file, about there and at most that long.
    fn range(&self, at: u32, length: u16) -> std::ops::Range<usize> {
        let start = at as usize % (self.data.len() + 1);
        start..self.data.len().min(start + length as usize)
    }

    fn pages(&self, first: u8, pages: u8) -> (u32, u16) {
        (first as u32 * PAGE_SIZE as u32, (pages % 8) as u16 * PAGE_SIZE as u16)
    }

    fn change(&mut self, step: Step) {
        match step {
            Step::Flip { at, mask } => {
                let range = self.range(at, 1);
                self.data[range].iter_mut().for_each(|byte| *byte ^= mask);
            }
            Step::Fill { at, length, byte } => {
                let range = self.range(at, length);
                self.data[range].fill(byte);
            }
            Step::Truncate { at } => {
                let start = self.range(at, 0).start;
                self.data.truncate(start);
            }
            Step::Exchange { a, b, length } => {
                let (a, b) = (self.range(a, length), self.range(b, length));
                let (from_a, from_b) = (self.data[a.clone()].to_vec(), self.data[b.clone()].to_vec());
                let length = from_a.len().min(from_b.len());
                self.data[a][..length].copy_from_slice(&from_b[..length]);
                self.data[b][..length].copy_from_slice(&from_a[..length]);
            }
            Step::ExchangePages { a, b } => {
                let [(a, length), (b, _)] = [a, b].map(|page| self.pages(page, 1));
                self.change(Step::Exchange { a, b, length });
            }
            Step::Keep if self.kept.len() < 8 => self.kept.push(self.data.clone()),
            Step::Replay { which, at, length } if !self.kept.is_empty() => {
                let range = self.range(at, length);
                let kept = &self.kept[which as usize % self.kept.len()];
                let end = range.end.min(kept.len());
                if let Some(old) = kept.get(range.start..end) {
                    self.data[range.start..end].copy_from_slice(old);
                }
            }
            Step::ReplayPages { which, first, pages } => {
                let (at, length) = self.pages(first, pages);
                self.change(Step::Replay { which, at, length });
            }
            Step::Repair => self.data.clone_from(&self.written),
            _ => {}
        }
    }
}

/// Some that compress well, some less, some not at all.
fn page(which: u8) -> Page {
    let mut state = which as u32 + 1;
    std::array::from_fn(|i| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let random = (state >> 24) as u8;
        match which % 4 {
            0 => random,
            1 if i % 2 == 0 => random,
            _ => which,
        }
    })
}

struct Job {
    zswap: Zswap,
    file: File,
    owned: Vec<(Slot, u8)>,
}

impl Job {
    fn load(&self, first: usize, count: usize) {
        let owned = &self.owned[first..first + count];
        let slots: Vec<Slot> = owned.iter().map(|(slot, _)| *slot).collect();
        let mut pages = vec![[0xcc; PAGE_SIZE]; count];
        self.file.0.lock().unwrap().harmed = false;
        let failures = self.zswap.counters().decompress_fail;
        let loaded = if let [slot] = slots[..] {
            self.zswap.load(slot, &mut pages[0]).map(|_| ())
        } else {
            self.zswap.load_folio(&slots, &mut pages).map(|_| ())
        };
        match loaded {
            Ok(()) => {
                assert!(owned.iter().zip(&pages).all(|((_, which), loaded)| *loaded == page(*which)), "wrong bytes")
            }
            Err(error) => {
                assert!(self.file.0.lock().unwrap().harmed, "{error}, and the file is as it was written");
                let corrupt = matches!(error, LoadError::Corrupt) as u64;
                assert_eq!(self.zswap.counters().decompress_fail, failures + corrupt);
            }
        }
    }

    fn store(&mut self, first: u8, order: u8, on_disk: bool) {
        let which: Vec<u8> = (0..1u8 << (order % 4)).map(|i| first.wrapping_add(i)).collect();
        let pages: Vec<Page> = which.iter().map(|which| page(*which)).collect();
        self.zswap.set_enabled(!on_disk);
        if let Ok(slots) = self.zswap.swap_out_folio(&pages, Home::ROOT) {
            self.owned.extend(slots.into_iter().zip(which));
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Store { page, on_disk } => self.store(page, 0, on_disk),
            Step::StoreFolio { page, order, on_disk } => self.store(page, order, on_disk),
            Step::WriteBack => drop(self.zswap.shrink(u64::MAX)),
            Step::SetCompressor { which } => self.zswap.set_compressor(Compressor::ALL[which as usize % 4]),
            Step::Load { which } if !self.owned.is_empty() => self.load(which as usize % self.owned.len(), 1),
            Step::LoadFolio { first, order } if !self.owned.is_empty() => {
                let (first, count) = (first as usize % self.owned.len(), 1 << (order % 4));
                if first + count <= self.owned.len() {
                    self.load(first, count);
                }
            }
            Step::Invalidate { which } if !self.owned.is_empty() => {
                let which = which as usize % self.owned.len();
                self.zswap.invalidate(self.owned.swap_remove(which).0);
            }
            step => self.file.0.lock().unwrap().change(step),
        }
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let file = File::default();
    let config = Config { swap_limit_bytes: Some(200 * PAGE_SIZE as u64), ..Config::default() };
    let zswap = Zswap::new(config, Some(Box::new(file.clone())), HeapSource);
    let mut job = Job { zswap, file, owned: Vec::new() };
    steps.into_iter().for_each(|step| job.step(step));
    job.zswap.check_valid();
    (0..job.owned.len()).for_each(|which| job.load(which, 1));
    job.file.0.lock().unwrap().change(Step::Repair);
    (0..job.owned.len()).for_each(|which| job.load(which, 1));
    job.owned.drain(..).for_each(|(slot, _)| job.zswap.invalidate(slot));
    job.zswap.check_valid();
    let counters = job.zswap.counters();
    assert_eq!((counters.stored_pages, counters.pool_total_size, counters.swap_current), (0, 0, 0));
});

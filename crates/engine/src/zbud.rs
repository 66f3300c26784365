//! An allocator after the kernel's zbud: at most two objects in a page, one from each end. Simple, and never denser than
//! two to one: here for comparison.
//!
//! 1. Room is counted in chunks of 64 bytes. A page with one object is on the list of as many chunks as it has free;
//!    a page with two is on none; a page with none goes back to the system at once.
//! 2. A handle is the page and the end. Nothing ever moves, so there is nothing to compact.

use crate::PAGE_SIZE;
use crate::table::{CellOf, Links, List, Nodes, Table};
use crate::zpool::{AllocError, Allocator, Handle, PageRun, PageSource};
use std::sync::Arc;

const CHUNK: usize = 64;
const CHUNKS: usize = PAGE_SIZE / CHUNK;
/// Most pages: a handle has one bit more than a page's number.
const MAX_PAGES: u32 = u32::MAX >> 1;

pub(crate) struct Zbud {
    memory: Arc<dyn PageSource>,
    budpages: Table<CellOf<Budpage>>,
    /// Pages with one object, by free chunks.
    unbuddied: [List; CHUNKS],
    objects: u32,
    bytes: u64,
}

struct Budpage {
    run: Box<dyn PageRun>,
    /// Bytes of the object at the start and of that at the end; 0: none.
    lengths: [u16; 2],
    links: Links,
}

impl Nodes for Table<CellOf<Budpage>> {
    fn links(&mut self, index: u32) -> &mut Links {
        &mut self.get_mut(index).used_mut().links
    }
}

impl Budpage {
    /// The list that this page belongs on; None if it has two objects, or one that leaves no chunk free.
    fn list(&self) -> Option<usize> {
        let [first, last] = self.lengths.map(usize::from);
        let free = CHUNKS - chunks(first) - chunks(last);
        ((first == 0) != (last == 0) && free > 0).then_some(free)
    }

    /// Where the object at an end is.
    fn range(&self, end: usize) -> std::ops::Range<usize> {
        let length = self.lengths[end] as usize;
        if end == 0 { 0..length } else { PAGE_SIZE - length..PAGE_SIZE }
    }
}

fn chunks(length: usize) -> usize {
    length.div_ceil(CHUNK)
}

fn place(handle: Handle) -> (u32, usize) {
    (handle.0 >> 1, handle.0 as usize & 1)
}

impl Zbud {
    pub fn new(memory: Arc<dyn PageSource>) -> Zbud {
        Zbud { memory, budpages: Table::new(), unbuddied: [List::default(); CHUNKS], objects: 0, bytes: 0 }
    }

    /// A page on no list.
    fn add_page(&mut self) -> Result<u32, AllocError> {
        let run = self.memory.take(1).ok_or(AllocError::Pages)?;
        assert_eq!((*run).as_ref().len(), PAGE_SIZE, "the page source gave a run of another length");
        let budpage = Budpage { run, lengths: [0; 2], links: Links::default() };
        self.budpages.insert(CellOf::Used(budpage), MAX_PAGES).ok_or(AllocError::Metadata)
    }
}

impl Allocator for Zbud {
    fn malloc(&mut self, data: &[u8]) -> Result<Handle, AllocError> {
        assert!((1..=PAGE_SIZE).contains(&data.len()), "an object of {} bytes", data.len());
        // The tightest page that the object fits into.
        let want = chunks(data.len());
        let index = match self.unbuddied[want.min(CHUNKS - 1)..].iter().find_map(List::head) {
            Some(index) if want < CHUNKS => {
                let list = self.budpages.get(index).used().list().expect("on a list");
                self.unbuddied[list].unlink(&mut self.budpages, index);
                index
            }
            _ => self.add_page()?,
        };
        let budpage = self.budpages.get_mut(index).used_mut();
        let end = (budpage.lengths[0] != 0) as usize;
        budpage.lengths[end] = data.len() as u16;
        let range = budpage.range(end);
        (*budpage.run).as_mut()[range].copy_from_slice(data);
        if let Some(list) = budpage.list() {
            self.unbuddied[list].push_front(&mut self.budpages, index);
        }
        self.objects += 1;
        self.bytes += data.len() as u64;
        Ok(Handle(index << 1 | end as u32))
    }

    fn get(&self, handle: Handle) -> &[u8] {
        let (index, end) = place(handle);
        let budpage = self.budpages.get(index).used();
        &(*budpage.run).as_ref()[budpage.range(end)]
    }

    fn length(&self, handle: Handle) -> usize {
        let (index, end) = place(handle);
        self.budpages.get(index).used().lengths[end] as usize
    }

    fn free(&mut self, handle: Handle) -> u64 {
        let (index, end) = place(handle);
        let budpage = self.budpages.get_mut(index).used_mut();
        let before = budpage.list();
        let length = std::mem::take(&mut budpage.lengths[end]);
        assert_ne!(length, 0, "an object that is not there");
        self.objects -= 1;
        self.bytes -= length as u64;
        let (empty, after) = (budpage.lengths == [0; 2], budpage.list());
        if let Some(list) = before {
            self.unbuddied[list].unlink(&mut self.budpages, index);
        }
        if let Some(list) = after {
            self.unbuddied[list].push_front(&mut self.budpages, index);
        }
        if empty {
            self.budpages.remove(index);
        }
        empty as u64
    }

    fn largest_below_page(&self) -> usize {
        PAGE_SIZE - CHUNK
    }

    fn pages(&self) -> u64 {
        self.budpages.used() as u64
    }

    fn objects(&self) -> u32 {
        self.objects
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn metadata(&self) -> usize {
        self.budpages.memory()
    }

    fn classes(&self) -> usize {
        0
    }

    fn class_of(&self, _length: usize) -> usize {
        0
    }

    fn compact_step(&mut self, _class: usize) -> Option<u64> {
        None
    }

    fn check_valid(&mut self) {
        self.budpages.check_valid();
        let listed: Vec<_> = self.unbuddied.iter().map(|list| list.check_valid(&mut self.budpages)).collect();
        let (mut objects, mut bytes, mut single) = (0, 0, 0);
        for (index, cell) in self.budpages.iter() {
            let budpage = cell.used();
            assert_ne!(budpage.lengths, [0; 2], "page {index} is empty");
            objects += budpage.lengths.iter().filter(|length| **length > 0).count() as u32;
            bytes += budpage.lengths.iter().map(|length| *length as u64).sum::<u64>();
            if let Some(list) = budpage.list() {
                assert!(listed[list].contains(&index), "page {index} is on the wrong list");
                single += 1;
            }
        }
        assert_eq!((objects, bytes), (self.objects, self.bytes), "objects and bytes stored");
        assert_eq!(single, listed.iter().map(Vec::len).sum::<usize>(), "pages on lists");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zpool::HeapSource;
    use proptest::prelude::*;

    #[test]
    fn two_objects_share_a_page_and_never_three() {
        let mut pool = Zbud::new(Arc::new(HeapSource));
        let handles: Vec<_> = (1..=6).map(|i| pool.malloc(&[i; 100]).unwrap()).collect();
        assert_eq!(pool.pages(), 3);
        assert_eq!(handles.into_iter().map(|handle| pool.free(handle)).sum::<u64>(), 3);
        assert_eq!((pool.pages(), pool.bytes(), pool.objects()), (0, 0, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn objects_keep_their_bytes(
            steps in prop::collection::vec((1usize..=PAGE_SIZE, any::<u8>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut pool = Zbud::new(Arc::new(HeapSource));
            let mut model: Vec<(Handle, Vec<u8>)> = Vec::new();
            for (length, byte, which) in steps {
                if byte % 3 == 0 && !model.is_empty() {
                    let (handle, data) = model.swap_remove(which.index(model.len()));
                    prop_assert_eq!(pool.get(handle), data.as_slice());
                    let before = pool.pages();
                    prop_assert_eq!(pool.free(handle), before - pool.pages());
                } else {
                    model.push((pool.malloc(&vec![byte; length]).unwrap(), vec![byte; length]));
                }
                pool.check_valid();
            }
            for (handle, data) in model {
                prop_assert_eq!(pool.get(handle), data.as_slice());
                prop_assert_eq!(pool.length(handle), data.len());
            }
        }
    }
}

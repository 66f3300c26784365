//! An allocator after the kernel's zbud: at most two objects in a page, one from each end. Simple, and never denser than
//! two to one: here for comparison.
//!
//! 1. Room is counted in chunks of 64 bytes. A page with one object is on the list of as many chunks as it has free;
//!    a page with two is on none; a page with none goes back to the system at once.
//! 2. A place is the page and the end. Nothing ever moves, so there is nothing to compact.

use crate::PAGE_SIZE;
use crate::table::{CellOf, Links, List, Nodes, Table};
use crate::zpool::{AllocError, Allocator, MAX_ZSPAGES, PageSource, Place, copy};
use std::sync::Arc;

const CHUNK: usize = 64;
const CHUNKS: usize = PAGE_SIZE / CHUNK;

pub(crate) struct Zbud<M: PageSource> {
    memory: Arc<M>,
    budpages: Table<CellOf<Budpage<M::Run>>>,
    /// Pages with one object, by free chunks.
    unbuddied: [List; CHUNKS],
    objects: u32,
    bytes: u64,
}

struct Budpage<R> {
    run: R,
    /// Bytes of the object at the start and of that at the end; 0: none.
    lengths: [u16; 2],
    links: Links,
}

impl<R> Nodes for Table<CellOf<Budpage<R>>> {
    fn links(&mut self, index: u32) -> &mut Links {
        &mut self.get_mut(index).used_mut().links
    }
}

impl<R> Budpage<R> {
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

impl<M: PageSource> Zbud<M> {
    pub fn new(memory: Arc<M>) -> Zbud<M> {
        Zbud { memory, budpages: Table::new(), unbuddied: [List::default(); CHUNKS], objects: 0, bytes: 0 }
    }

    /// A page on no list.
    fn add_page(&mut self) -> Result<u32, AllocError> {
        let run = self.memory.take(1).ok_or(AllocError::Pages)?;
        assert_eq!(run.as_ref().len(), PAGE_SIZE, "the page source gave a run of another length");
        let budpage = Budpage { run, lengths: [0; 2], links: Links::default() };
        self.budpages.insert(CellOf::Used(budpage), MAX_ZSPAGES).ok_or(AllocError::Metadata)
    }
}

impl<M: PageSource> Allocator for Zbud<M> {
    fn malloc(&mut self, data: &[u8], _owner: u32) -> Result<Place, AllocError> {
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
        copy(&mut budpage.run.as_mut()[range], data);
        if let Some(list) = budpage.list() {
            self.unbuddied[list].push_front(&mut self.budpages, index);
        }
        self.objects += 1;
        self.bytes += data.len() as u64;
        Ok(Place { zspage: index, index: end as u16 })
    }

    fn get(&self, Place { zspage, index: end }: Place, length: usize) -> &[u8] {
        let budpage = self.budpages.get(zspage).used();
        &budpage.run.as_ref()[budpage.range(end as usize)][..length]
    }

    fn free(&mut self, Place { zspage: index, index: end }: Place, length: usize) -> u64 {
        let budpage = self.budpages.get_mut(index).used_mut();
        let before = budpage.list();
        let stored = std::mem::take(&mut budpage.lengths[end as usize]) as usize;
        assert_eq!(stored, length, "the length of an object");
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

    fn compact_step(&mut self, _class: usize, _moved: &mut dyn FnMut(u32, Place)) -> Option<u64> {
        None
    }

    fn check_owner(&self, Place { zspage, index: end }: Place, _owner: u32) {
        assert_ne!(self.budpages.get(zspage).used().lengths[end as usize], 0, "an object that is not there");
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
        let places: Vec<_> = (1..=6).map(|i| pool.malloc(&[i; 100], 1).unwrap()).collect();
        assert_eq!(pool.pages(), 3);
        assert_eq!(places.into_iter().map(|place| pool.free(place, 100)).sum::<u64>(), 3);
        assert_eq!((pool.pages(), pool.bytes(), pool.objects()), (0, 0, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn objects_keep_their_bytes(
            steps in prop::collection::vec((1usize..=PAGE_SIZE, any::<u8>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut pool = Zbud::new(Arc::new(HeapSource));
            let mut model: Vec<(Place, Vec<u8>)> = Vec::new();
            for (length, byte, which) in steps {
                if byte % 3 == 0 && !model.is_empty() {
                    let (place, data) = model.swap_remove(which.index(model.len()));
                    prop_assert_eq!(pool.get(place, data.len()), data.as_slice());
                    let before = pool.pages();
                    prop_assert_eq!(pool.free(place, data.len()), before - pool.pages());
                } else {
                    model.push((pool.malloc(&vec![byte; length], 1).unwrap(), vec![byte; length]));
                }
                pool.check_valid();
            }
            for (place, data) in model {
                prop_assert_eq!(pool.get(place, data.len()), data.as_slice());
            }
        }
    }
}

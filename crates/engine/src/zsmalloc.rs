//! The pool's allocator, after the kernel's zsmalloc: objects of 1 to 4096 bytes, packed tightly into whole pages.
//!
//! 1. A size class holds objects of one rounded-up size. Its zspages are runs of 1 to 8 pages, as many as leave the least
//!    waste; a run is contiguous, so an object may straddle its pages at no cost.
//! 2. Pages hold nothing but objects. Which object owns which place is in the zspage's `places`, outside the pages; free
//!    places are chained through the same array.
//! 3. An object is named by a handle. The handle leads to the object's place, and only the handle: that is what lets
//!    compaction move objects.
//! 4. A zspage that is neither empty nor full is on the list of its class that fits how full it is. Allocation takes the
//!    fullest, compaction empties the emptiest. An empty zspage goes back to the system at once.
//!
//! There is no lock in here: the owner has one around it.

use crate::PAGE_SIZE;
use crate::table::{Cell, CellOf, Links, List, NIL, Nodes, Table};
use crate::zpool::{AllocError, Allocator, Handle, MAX_ZSPAGE_PAGES, PageRun, PageSource};
use std::sync::Arc;

/// Sizes are rounded up to a multiple of this many bytes.
const SIZE_STEP: usize = 16;
/// Lists of partly filled zspages in a class.
const FULLNESS_GROUPS: usize = 8;
/// End of the chain of free places.
const NO_PLACE: u16 = u16::MAX;
/// Marks a free place; the low half is then the next free place.
const FREE: u32 = 1 << 31;

const _: () = assert!(PAGE_SIZE.is_multiple_of(SIZE_STEP));
const _: () = assert!(MAX_ZSPAGE_PAGES * PAGE_SIZE / SIZE_STEP < NO_PLACE as usize);

pub(crate) struct Zsmalloc {
    memory: Arc<dyn PageSource>,
    classes: Vec<Class>,
    /// Class by size in steps, rounded up.
    class_by_steps: Vec<u8>,
    zspages: Table<CellOf<Zspage>>,
    objects: Table<ObjectCell>,
    pages: u64,
    bytes: u64,
}

struct Class {
    /// Bytes of each place.
    size: u32,
    pages: u8,
    /// Places in a zspage.
    places: u16,
    zspages: u32,
    objects: u64,
    partial: [List; FULLNESS_GROUPS],
}

struct Zspage {
    run: Box<dyn PageRun>,
    /// For each place the handle of its object, or FREE and the next free place.
    places: Box<[u32]>,
    links: Links,
    used: u16,
    free: u16,
    class: u8,
}

/// Where an object is. A vacant cell has length 0 and its link in `zspage`.
#[derive(Clone, Copy)]
struct ObjectCell {
    zspage: u32,
    place: u16,
    length: u16,
}

impl Cell for ObjectCell {
    fn vacant(next: u32) -> Self {
        ObjectCell { zspage: next, place: 0, length: 0 }
    }
    fn next_vacant(&self) -> Option<u32> {
        (self.length == 0).then_some(self.zspage)
    }
}

impl Nodes for Table<CellOf<Zspage>> {
    fn links(&mut self, index: u32) -> &mut Links {
        &mut self.get_mut(index).used_mut().links
    }
}

impl Zspage {
    /// The list of its class that this zspage belongs on; None if full (or empty: then it is not kept at all).
    fn fullness(&self) -> Option<usize> {
        let places = self.places.len();
        let used = self.used as usize;
        (used > 0 && used < places).then(|| used * FULLNESS_GROUPS / places)
    }

    /// Puts an object into a free place.
    fn put(&mut self, size: u32, handle: u32, data: &[u8]) -> u16 {
        let place = self.free;
        let owner = &mut self.places[place as usize];
        assert!(*owner & FREE != 0, "place {place} is not free");
        self.free = *owner as u16;
        *owner = handle;
        self.used += 1;
        let start = place as usize * size as usize;
        (*self.run).as_mut()[start..start + data.len()].copy_from_slice(data);
        place
    }

    /// Frees a place.
    fn clear(&mut self, place: u16, handle: u32) {
        let owner = &mut self.places[place as usize];
        assert_eq!(*owner, handle, "place {place} belongs to another object");
        *owner = FREE | self.free as u32;
        self.free = place;
        self.used -= 1;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Size classes
// ---------------------------------------------------------------------------------------------------------------------

/// Pages and places of the zspages that waste least on objects of `size` bytes; the shortest run among equals.
fn best_zspage(size: usize) -> (usize, usize) {
    let places = |pages: usize| pages * PAGE_SIZE / size;
    // a / b < c / d  as  a * d < c * b
    let wastes_less = |a: usize, b: usize| (a * PAGE_SIZE % size) * b < (b * PAGE_SIZE % size) * a;
    let pages = (1..=MAX_ZSPAGE_PAGES).reduce(|best, pages| if wastes_less(pages, best) { pages } else { best });
    let pages = pages.expect("at least one length");
    (pages, places(pages))
}

/// The classes in ascending order of size. Sizes that would have the same zspages share a class, that of the largest.
fn size_classes() -> (Vec<Class>, Vec<u8>) {
    let mut classes: Vec<Class> = Vec::new();
    let mut class_by_steps = vec![0];
    for steps in 1..=PAGE_SIZE / SIZE_STEP {
        let size = steps * SIZE_STEP;
        let (pages, places) = best_zspage(size);
        match classes.last_mut() {
            Some(last) if (last.pages as usize, last.places as usize) == (pages, places) => last.size = size as u32,
            _ => classes.push(Class {
                size: size as u32,
                pages: pages as u8,
                places: places as u16,
                zspages: 0,
                objects: 0,
                partial: Default::default(),
            }),
        }
        class_by_steps.push(u8::try_from(classes.len() - 1).expect("fewer than 256 classes"));
    }
    (classes, class_by_steps)
}

impl Class {
    fn free_places(&self) -> u64 {
        self.zspages as u64 * self.places as u64 - self.objects
    }

    fn fullest(&self) -> Option<u32> {
        self.partial.iter().rev().find_map(List::head)
    }

    fn emptiest(&self) -> Option<u32> {
        self.partial.iter().find_map(List::head)
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Objects
// ---------------------------------------------------------------------------------------------------------------------

impl Zsmalloc {
    pub fn new(memory: Arc<dyn PageSource>) -> Zsmalloc {
        let (classes, class_by_steps) = size_classes();
        let (zspages, objects) = (Table::new(), Table::new());
        Zsmalloc { memory, classes, class_by_steps, zspages, objects, pages: 0, bytes: 0 }
    }

    /// Puts an object into a free place of a zspage and tells the handle.
    fn put(&mut self, class: usize, index: u32, handle: u32, data: &[u8]) {
        let size = self.classes[class].size;
        let zspage = self.zspages.get_mut(index).used_mut();
        let before = zspage.fullness();
        let place = zspage.put(size, handle, data);
        self.relist(class, index, before);
        let object = self.objects.get_mut(handle);
        (object.zspage, object.place) = (index, place);
    }

    /// Moves a zspage from the list `before` to the one that fits it now.
    fn relist(&mut self, class: usize, index: u32, before: Option<usize>) {
        let after = self.zspages.get(index).used().fullness();
        if before != after {
            let partial = &mut self.classes[class].partial;
            if let Some(list) = before {
                partial[list].unlink(&mut self.zspages, index);
            }
            if let Some(list) = after {
                partial[list].push_front(&mut self.zspages, index);
            }
        }
    }

    fn add_zspage(&mut self, class: usize) -> Result<u32, AllocError> {
        let &Class { pages, places, .. } = &self.classes[class];
        let run = self.memory.take(pages as usize).ok_or(AllocError::Pages)?;
        assert_eq!((*run).as_ref().len(), pages as usize * PAGE_SIZE, "the page source gave a run of another length");
        let chain = (1..places).chain([NO_PLACE]).map(|next| FREE | next as u32).collect();
        let zspage = Zspage { run, places: chain, links: Links::default(), used: 0, free: 0, class: class as u8 };
        let index = self.zspages.insert(CellOf::Used(zspage), u32::MAX - 1).ok_or(AllocError::Metadata)?;
        self.classes[class].zspages += 1;
        self.pages += pages as u64;
        Ok(index)
    }

    /// Gives a zspage that is on no list back to the system; returns its pages.
    fn remove_zspage(&mut self, index: u32) -> u64 {
        let CellOf::Used(zspage) = self.zspages.remove(index) else { panic!("a zspage that is not there") };
        assert_eq!(zspage.used, 0, "zspage {index} is not empty");
        let class = &mut self.classes[zspage.class as usize];
        class.zspages -= 1;
        self.pages -= class.pages as u64;
        class.pages as u64
    }
}

impl Allocator for Zsmalloc {
    fn largest_below_page(&self) -> usize {
        self.classes[self.classes.len() - 2].size as usize
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn objects(&self) -> u32 {
        self.objects.used()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn metadata(&self) -> usize {
        let places: usize = self.classes.iter().map(|class| class.zspages as usize * class.places as usize).sum();
        self.zspages.memory() + self.objects.memory() + places * size_of::<u32>()
    }

    fn malloc(&mut self, data: &[u8]) -> Result<Handle, AllocError> {
        assert!((1..=PAGE_SIZE).contains(&data.len()), "an object of {} bytes", data.len());
        let class = self.class_of(data.len());
        let object = ObjectCell { zspage: NIL, place: 0, length: data.len() as u16 };
        let handle = self.objects.insert(object, FREE - 1).ok_or(AllocError::Metadata)?;
        let zspage = self.classes[class].fullest().map_or_else(|| self.add_zspage(class), Ok);
        let zspage = zspage.inspect_err(|_| {
            self.objects.remove(handle);
        })?;
        self.put(class, zspage, handle, data);
        self.classes[class].objects += 1;
        self.bytes += data.len() as u64;
        Ok(Handle(handle))
    }

    fn get(&self, handle: Handle) -> &[u8] {
        let ObjectCell { zspage, place, length } = *self.objects.get(handle.0);
        let zspage = self.zspages.get(zspage).used();
        let start = place as usize * self.classes[zspage.class as usize].size as usize;
        &(*zspage.run).as_ref()[start..start + length as usize]
    }

    fn length(&self, handle: Handle) -> usize {
        self.objects.get(handle.0).length as usize
    }

    fn free(&mut self, handle: Handle) -> u64 {
        let ObjectCell { zspage: index, place, length } = self.objects.remove(handle.0);
        self.bytes -= length as u64;
        let zspage = self.zspages.get_mut(index).used_mut();
        let class = zspage.class as usize;
        let before = zspage.fullness();
        zspage.clear(place, handle.0);
        let empty = zspage.used == 0;
        self.relist(class, index, before);
        self.classes[class].objects -= 1;
        if empty { self.remove_zspage(index) } else { 0 }
    }

    fn class_of(&self, length: usize) -> usize {
        self.class_by_steps[length.div_ceil(SIZE_STEP)] as usize
    }

    fn classes(&self) -> usize {
        self.classes.len()
    }

    fn compact_step(&mut self, class: usize) -> Option<u64> {
        let Class { places, size, .. } = self.classes[class];
        if self.classes[class].free_places() < places as u64 {
            return None;
        }
        let source = self.classes[class].emptiest().expect("free places are in partly filled zspages");
        let before = self.zspages.get(source).used().fullness();
        self.classes[class].partial[before.expect("on a list")].unlink(&mut self.zspages, source);
        // From here the source is on no list, so that no object can be moved into it.
        let mut data = [0; PAGE_SIZE];
        for place in 0..places {
            let zspage = self.zspages.get_mut(source).used_mut();
            let handle = zspage.places[place as usize];
            if handle & FREE != 0 {
                continue;
            }
            let length = self.objects.get(handle).length as usize;
            let start = place as usize * size as usize;
            data[..length].copy_from_slice(&(*zspage.run).as_ref()[start..start + length]);
            zspage.clear(place, handle);
            let target = self.classes[class].fullest().expect("the other zspages have a zspage's worth of free places");
            self.put(class, target, handle, &data[..length]);
        }
        Some(self.remove_zspage(source))
    }

    fn check_valid(&mut self) {
        self.zspages.check_valid();
        self.objects.check_valid();
        let mut listed = std::collections::HashMap::new();
        for (index, class) in self.classes.iter().enumerate() {
            for (group, list) in class.partial.iter().enumerate() {
                for zspage in list.check_valid(&mut self.zspages) {
                    assert_eq!(listed.insert(zspage, (index, group)), None, "zspage {zspage} is on two lists");
                }
            }
        }
        let (mut pages, mut places_used) = (0, 0);
        let mut zspages = vec![0; self.classes.len()];
        let mut objects = vec![0; self.classes.len()];
        for (index, cell) in self.zspages.iter() {
            let zspage = cell.used();
            let class = zspage.class as usize;
            assert!(zspage.used > 0, "zspage {index} is empty");
            let list = zspage.fullness().map(|group| (class, group));
            assert_eq!(listed.get(&index).copied(), list, "zspage {index} is on the wrong list");
            zspages[class] += 1;
            objects[class] += zspage.used as u64;
            pages += self.classes[class].pages as u64;
            places_used += zspage.check_places(index, &self.objects);
        }
        assert_eq!(pages, self.pages, "pages held");
        assert_eq!(places_used, self.objects.used(), "places in use against objects");
        assert_eq!(
            self.objects.iter().map(|(_, object)| object.length as u64).sum::<u64>(),
            self.bytes,
            "bytes stored"
        );
        for (index, class) in self.classes.iter().enumerate() {
            assert_eq!((zspages[index], objects[index]), (class.zspages, class.objects), "counts of class {index}");
        }
    }
}

impl Zspage {
    /// Returns the number of places in use; panics if they and the objects or the free chain disagree.
    fn check_places(&self, index: u32, objects: &Table<ObjectCell>) -> u32 {
        let mut used = 0;
        for (place, &owner) in self.places.iter().enumerate().filter(|(_, owner)| **owner & FREE == 0) {
            let object = objects.get(owner);
            assert_eq!((object.zspage, object.place as usize), (index, place), "object {owner} is elsewhere");
            used += 1;
        }
        assert_eq!(used, self.used as u32, "places in use of zspage {index}");
        let (mut free, mut place) = (0, self.free);
        while place != NO_PLACE {
            let owner = self.places[place as usize];
            assert!(owner & FREE != 0, "the free chain of zspage {index} runs through an object");
            free += 1;
            assert!(free + used <= self.places.len() as u32, "the free chain of zspage {index} runs in a circle");
            place = owner as u16;
        }
        assert_eq!(free + used, self.places.len() as u32, "free places of zspage {index}");
        used
    }
}

#[cfg(test)]
#[path = "zsmalloc_tests.rs"]
mod tests;

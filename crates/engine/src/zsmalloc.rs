//! The pool's allocator, after the kernel's zsmalloc: objects of 1 to 4096 bytes, packed tightly into whole pages.
//!
//! 1. A size class holds objects of one rounded-up size. Its zspages are contiguous runs, so an object may straddle pages at
//!    no cost. A full one has as many pages, 1 to 128, as leave the least waste.
//! 2. A zspage grows by a page when its next place needs one, and gives back the pages behind its last object: no
//!    class holds more than it has objects for, but for its holes and the rest of one page.
//! 3. Pages hold nothing but objects. Who owns which place is in the zspage's `places`, outside the pages; the holes
//!    between the objects are chained through the same array. The last place is never a hole.
//! 4. An object's owner keeps its place; each place names its owner, who is told when compaction moves the object.
//! 5. A zspage that has holes is on the list of its class that fits how full it is; one without, that can grow, on the
//!    last. A store takes a hole in the fullest before one grows; compaction empties the last page of the emptiest.
//!
//! There is no lock in here: the owner has one around it.

use crate::PAGE_SIZE;
use crate::table::{CellOf, Links, List, NIL, Nodes, Table};
use crate::zpool::{
    AllocError, Allocator, MAX_PLACES, MAX_ZSPAGE_PAGES, MAX_ZSPAGES, PageRun, PageSource, Place, copy,
};
use smallvec::SmallVec;
use std::sync::Arc;

/// Sizes are rounded up to a multiple of this many bytes.
const SIZE_STEP: usize = 16;
/// Lists of zspages with holes in a class.
const FULLNESS_GROUPS: usize = 8;
/// The list of zspages without holes that can grow.
const GROWING: usize = FULLNESS_GROUPS;
/// Marks a hole. Its neighbours in the chain of holes are in the 15 bits below, and in the 15 lowest.
const HOLE: u32 = 1 << 31;
/// The end of the chain of holes.
const NO_PLACE: u16 = (1 << 15) - 1;

const _: () = assert!(PAGE_SIZE.is_multiple_of(SIZE_STEP));
const _: () = assert!(MAX_PLACES < NO_PLACE as usize);

pub(crate) struct Zsmalloc<M: PageSource> {
    memory: Arc<M>,
    classes: Vec<Class>,
    /// Class by size in steps, rounded up.
    class_by_steps: Vec<u16>,
    zspages: Table<CellOf<Zspage<M::Run>>>,
    /// Owners that there is room for outside the zspages.
    owners: usize,
    pages: u64,
    objects: u32,
    bytes: u64,
}

struct Class {
    /// Bytes of each place.
    size: u32,
    /// Pages and places of a zspage that is full.
    pages: u8,
    places: u16,
    holes: u32,
    lists: [List; FULLNESS_GROUPS + 1],
}

struct Zspage<R> {
    run: R,
    /// For each place the owner of its object, or a hole with its neighbours. Few need no memory elsewhere.
    places: SmallVec<[u32; 4]>,
    links: Links,
    used: u16,
    /// The first of the chain of holes.
    hole: u16,
    class: u16,
    pages: u8,
}

impl<R> Nodes for Table<CellOf<Zspage<R>>> {
    fn links(&mut self, index: u32) -> &mut Links {
        &mut self.get_mut(index).used_mut().links
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
    let lengths = (1..=MAX_ZSPAGE_PAGES).filter(|pages| places(*pages) <= MAX_PLACES);
    let pages = lengths.reduce(|best, pages| if wastes_less(pages, best) { pages } else { best });
    let pages = pages.expect("a page has few enough places");
    (pages, places(pages))
}

/// The classes in ascending order of size. Sizes that would have the same zspages share a class, that of the largest.
fn size_classes() -> (Vec<Class>, Vec<u16>) {
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
                holes: 0,
                lists: Default::default(),
            }),
        }
        class_by_steps.push(u16::try_from(classes.len() - 1).expect("fewer classes than steps"));
    }
    (classes, class_by_steps)
}

impl Class {
    /// The fullest zspage with a hole.
    fn fullest(&self) -> Option<u32> {
        self.lists[..FULLNESS_GROUPS].iter().rev().find_map(List::head)
    }

    /// The fullest zspage with a hole, but for one.
    fn fullest_but<R>(&self, one: u32, zspages: &mut Table<CellOf<Zspage<R>>>) -> Option<u32> {
        let heads = self.lists[..FULLNESS_GROUPS].iter().rev().filter_map(List::head);
        let mut others = heads.map(|head| if head == one { zspages.links(head).next } else { head });
        others.find(|index| *index != NIL)
    }

    /// The emptiest zspage with a hole.
    fn emptiest(&self) -> Option<u32> {
        self.lists[..FULLNESS_GROUPS].iter().find_map(List::head)
    }

    /// The pages that so many places take.
    fn pages_of(&self, places: usize) -> usize {
        (places * self.size as usize).div_ceil(PAGE_SIZE)
    }

    /// The list of a zspage; None if it is full, or has no object: then it is not kept.
    fn list_of<R>(&self, zspage: &Zspage<R>) -> Option<usize> {
        let (used, places) = (zspage.used as usize, zspage.places.len());
        if used == 0 || used == self.places as usize {
            None
        } else if used == places {
            Some(GROWING)
        } else {
            Some(used * FULLNESS_GROUPS / places)
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Zspages
// ---------------------------------------------------------------------------------------------------------------------

/// The neighbours of a hole in the chain: the one before and the one after.
fn neighbours(hole: u32) -> (u16, u16) {
    assert!(hole & HOLE != 0, "a place that is no hole is in the chain of holes");
    ((hole >> 15) as u16 & NO_PLACE, hole as u16 & NO_PLACE)
}

fn hole(before: u16, after: u16) -> u32 {
    HOLE | (before as u32) << 15 | after as u32
}

impl<R> Zspage<R> {
    /// Puts a hole at the head of the chain.
    fn chain(&mut self, place: u16) {
        self.places[place as usize] = hole(NO_PLACE, self.hole);
        if self.hole != NO_PLACE {
            let (_, after) = neighbours(self.places[self.hole as usize]);
            self.places[self.hole as usize] = hole(place, after);
        }
        self.hole = place;
    }

    /// Takes a hole out of the chain.
    fn unchain(&mut self, place: u16) {
        let (before, after) = neighbours(self.places[place as usize]);
        match before {
            NO_PLACE => self.hole = after,
            _ => self.places[before as usize] = hole(neighbours(self.places[before as usize]).0, after),
        }
        if after != NO_PLACE {
            self.places[after as usize] = hole(before, neighbours(self.places[after as usize]).1);
        }
    }

    /// Makes room for the owner of one place more, and for some to come, of `most` in all; returns for how many more there is
    /// room elsewhere.
    fn reserve_owners(&mut self, most: usize) -> Result<usize, AllocError> {
        let (len, before) = (self.places.len(), self.owners());
        if len == self.places.capacity() {
            let more = len.max(8).min(most - len);
            self.places.try_reserve_exact(more).map_err(|_| AllocError::Metadata)?;
        }
        Ok(self.owners() - before)
    }

    /// For how many owners there is room elsewhere.
    fn owners(&self) -> usize {
        if self.places.spilled() { self.places.capacity() } else { 0 }
    }

    /// Drops the holes at the end.
    fn trim(&mut self) {
        while let Some(last) = self.places.last()
            && last & HOLE != 0
        {
            self.unchain(self.places.len() as u16 - 1);
            self.places.pop();
        }
    }
}

impl<M: PageSource> Zsmalloc<M> {
    pub fn new(memory: Arc<M>) -> Zsmalloc<M> {
        let (classes, class_by_steps) = size_classes();
        Zsmalloc { memory, classes, class_by_steps, zspages: Table::new(), owners: 0, pages: 0, objects: 0, bytes: 0 }
    }

    /// Does something to a zspage, after which it is on the list that fits, has the pages that it needs, and is gone if it
    /// has no object left. Returns the pages given back.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Zspage<M::Run>)) -> u64 {
        let zspage = self.zspages.get_mut(index).used_mut();
        let class = &mut self.classes[zspage.class as usize];
        let (before, holes) = (class.list_of(zspage), zspage.places.len() as u32 - zspage.used as u32);
        change(zspage);
        let (after, pages) = (class.list_of(zspage), class.pages_of(zspage.places.len()));
        class.holes = class.holes - holes + (zspage.places.len() as u32 - zspage.used as u32);
        let freed = (zspage.pages as usize).saturating_sub(pages);
        if freed > 0 {
            if pages > 0 {
                zspage.run.resize(pages);
            }
            zspage.pages = pages as u8;
            self.pages -= freed as u64;
        }
        if before != after {
            if let Some(list) = before {
                class.lists[list].unlink(&mut self.zspages, index);
            }
            if let Some(list) = after {
                class.lists[list].push_front(&mut self.zspages, index);
            }
        }
        if pages == 0 {
            self.owners -= self.zspages.remove(index).used().owners();
        }
        freed as u64
    }

    /// Puts an object into a hole of a zspage, or behind its last: it has pages for that.
    fn put(&mut self, index: u32, owner: u32, data: &[u8]) -> Place {
        let zspage = self.zspages.get(index).used();
        let place = if zspage.hole == NO_PLACE { zspage.places.len() as u16 } else { zspage.hole };
        self.put_at(Place { zspage: index, index: place }, owner, data)
    }

    fn put_at(&mut self, place: Place, owner: u32, data: &[u8]) -> Place {
        let size = self.classes[self.zspages.get(place.zspage).used().class as usize].size as usize;
        let index = place.index as usize;
        self.change(place.zspage, |zspage| {
            if index == zspage.places.len() {
                zspage.places.push(owner);
            } else {
                zspage.unchain(place.index);
                zspage.places[index] = owner;
            }
            zspage.used += 1;
            copy(&mut zspage.run.as_mut()[index * size..][..data.len()], data);
        });
        place
    }

    /// Takes an object away and leaves a hole, or nothing if it was the last.
    fn clear(&mut self, Place { zspage, index }: Place) -> u64 {
        self.change(zspage, |zspage| {
            assert!(zspage.places[index as usize] & HOLE == 0, "place {index} is free already");
            zspage.chain(index);
            zspage.used -= 1;
            // Else the last place, which nothing has read, is no hole.
            if index as usize + 1 == zspage.places.len() {
                zspage.trim();
            }
        })
    }

    /// A zspage that has pages for one place more: the one that grows, or a new one.
    fn grow(&mut self, class: usize) -> Result<u32, AllocError> {
        let Some(index) = self.classes[class].lists[GROWING].head() else { return self.add_zspage(class) };
        let zspage = self.zspages.get_mut(index).used_mut();
        self.owners += zspage.reserve_owners(self.classes[class].places as usize)?;
        let pages = self.classes[class].pages_of(zspage.places.len() + 1);
        if pages > zspage.pages as usize {
            if !zspage.run.resize(pages) {
                return Err(AllocError::Pages);
            }
            self.pages += pages as u64 - zspage.pages as u64;
            zspage.pages = pages as u8;
        }
        Ok(index)
    }

    /// An empty zspage of one page, on no list.
    fn add_zspage(&mut self, class: usize) -> Result<u32, AllocError> {
        let run = self.memory.take(self.classes[class].pages as usize).ok_or(AllocError::Pages)?;
        let (places, links, number) = (SmallVec::new(), Links::default(), class as u16);
        let mut zspage = Zspage { run, places, links, used: 0, hole: NO_PLACE, class: number, pages: 1 };
        let owners = zspage.reserve_owners(self.classes[class].places as usize)?;
        let index = self.zspages.insert(CellOf::Used(zspage), MAX_ZSPAGES).ok_or(AllocError::Metadata)?;
        self.owners += owners;
        self.pages += 1;
        Ok(index)
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Objects
// ---------------------------------------------------------------------------------------------------------------------

impl<M: PageSource> Allocator for Zsmalloc<M> {
    fn malloc(&mut self, data: &[u8], owner: u32) -> Result<Place, AllocError> {
        assert!((1..=PAGE_SIZE).contains(&data.len()) && owner & HOLE == 0, "an object of {} bytes", data.len());
        let class = self.class_of(data.len());
        let zspage = self.classes[class].fullest().map_or_else(|| self.grow(class), Ok)?;
        self.objects += 1;
        self.bytes += data.len() as u64;
        Ok(self.put(zspage, owner, data))
    }

    fn get(&self, place: Place, length: usize) -> &[u8] {
        let zspage = self.zspages.get(place.zspage).used();
        let start = place.index as usize * self.classes[zspage.class as usize].size as usize;
        &zspage.run.as_ref()[start..start + length]
    }

    fn free(&mut self, place: Place, length: usize) -> u64 {
        self.objects -= 1;
        self.bytes -= length as u64;
        self.clear(place)
    }

    fn largest_below_page(&self) -> usize {
        self.classes[self.classes.len() - 2].size as usize
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn objects(&self) -> u32 {
        self.objects
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn metadata(&self) -> usize {
        self.zspages.memory() + self.owners * size_of::<u32>()
    }

    fn class_of(&self, length: usize) -> usize {
        self.class_by_steps[length.div_ceil(SIZE_STEP)] as usize
    }

    fn classes(&self) -> usize {
        self.classes.len()
    }

    fn compact_step(&mut self, class: usize, moved: &mut dyn FnMut(u32, Place)) -> Option<u64> {
        let Class { size, holes, .. } = self.classes[class];
        let source = self.classes[class].emptiest()?;
        let zspage = self.zspages.get(source).used();
        // Whoever reaches into the last page has to go elsewhere.
        let first = (zspage.pages as usize - 1) * PAGE_SIZE / size as usize;
        let tail: Vec<u32> = zspage.places[first..].to_vec();
        // As many holes as the tail has places: those in the tail are in both counts.
        if (holes as usize) < tail.len() {
            return None;
        }
        let mut freed = 0;
        let mut data = [0; PAGE_SIZE];
        for (index, &owner) in tail.iter().enumerate().rev().filter(|(_, owner)| **owner & HOLE == 0) {
            let (data, from) = (&mut data[..size as usize], first + index);
            let zspage = self.zspages.get(source).used();
            data.copy_from_slice(&zspage.run.as_ref()[from * size as usize..][..size as usize]);
            let to = match self.classes[class].fullest_but(source, &mut self.zspages) {
                Some(other) => self.put(other, owner, data),
                None => {
                    let mut places = self.zspages.get(source).used().places[..first].iter();
                    let hole = places.position(|owner| owner & HOLE != 0).expect("there are holes enough");
                    self.put_at(Place { zspage: source, index: hole as u16 }, owner, data)
                }
            };
            moved(owner, to);
            // What is left of the tail keeps the holes before it: only those behind the last object are dropped.
            freed += self.clear(Place { zspage: source, index: from as u16 });
        }
        Some(freed)
    }

    fn check_owner(&self, place: Place, owner: u32) {
        assert_eq!(self.zspages.get(place.zspage).used().places[place.index as usize], owner, "owner of {place:?}");
    }

    fn check_valid(&mut self) {
        self.zspages.check_valid();
        let mut listed = std::collections::HashMap::new();
        for (index, class) in self.classes.iter().enumerate() {
            for (group, list) in class.lists.iter().enumerate() {
                for zspage in list.check_valid(&mut self.zspages) {
                    assert_eq!(listed.insert(zspage, (index, group)), None, "zspage {zspage} is on two lists");
                }
            }
        }
        let (mut pages, mut objects, mut owners) = (0, 0, 0);
        let mut holes = vec![0; self.classes.len()];
        for (index, cell) in self.zspages.iter() {
            let zspage = cell.used();
            let number = zspage.class as usize;
            let class = &self.classes[number];
            assert!(zspage.used > 0, "zspage {index} is empty");
            assert!(zspage.places.len() <= class.places as usize, "zspage {index} is too long");
            assert_eq!(zspage.pages as usize, class.pages_of(zspage.places.len()), "pages of zspage {index}");
            assert_eq!(zspage.run.as_ref().len(), zspage.pages as usize * PAGE_SIZE, "run of zspage {index}");
            let list = class.list_of(zspage).map(|list| (number, list));
            assert_eq!(listed.remove(&index), list, "zspage {index} is on the wrong list");
            holes[number] += zspage.check_places(index);
            pages += zspage.pages as u64;
            objects += zspage.used as u32;
            owners += zspage.owners();
        }
        assert!(listed.is_empty(), "zspages that are not there are on lists");
        assert_eq!(
            (pages, objects, owners),
            (self.pages, self.objects, self.owners),
            "pages, objects and room for owners"
        );
        for (index, class) in self.classes.iter().enumerate() {
            assert_eq!(holes[index], class.holes, "holes of class {index}");
        }
    }
}

impl<R> Zspage<R> {
    /// Returns the number of holes; panics if they and their chain disagree.
    fn check_places(&self, index: u32) -> u32 {
        let holes = self.places.iter().filter(|owner| **owner & HOLE != 0).count();
        assert_eq!(holes + self.used as usize, self.places.len(), "places in use of zspage {index}");
        assert!(self.places.last().is_some_and(|last| last & HOLE == 0), "zspage {index} ends with a hole");
        let (mut chained, mut last, mut place) = (0, NO_PLACE, self.hole);
        while place != NO_PLACE {
            let (before, after) = neighbours(self.places[place as usize]);
            assert_eq!(before, last, "hole {place} of zspage {index} and the one before it disagree");
            chained += 1;
            assert!(chained <= holes, "the chain of holes of zspage {index} runs in a circle");
            (last, place) = (place, after);
        }
        assert_eq!(chained, holes, "holes of zspage {index} in the chain");
        holes as u32
    }
}

#[cfg(test)]
#[path = "zsmalloc_tests.rs"]
mod tests;

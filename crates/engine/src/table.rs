//! Tables addressed by a 32-bit index, and doubly linked lists threaded through them.
//!
//! Everything the engine knows about a page lives in such tables rather than behind pointers: an index is half a pointer,
//! and a list of indices needs no unsafe code.
//! 1. A table grows by whole chunks; what is in it never moves, so no growth copies more than the list of chunks.
//! 2. Index 0 is never handed out: it means "none" in every link.
//! 3. Cells that are not in use are chained through themselves, the last freed first.

/// The index that stands for "none".
pub(crate) const NIL: u32 = 0;

/// About the size of a chunk in bytes.
const CHUNK_BYTES: usize = 32 << 10;

/// What a table holds: a cell is either in use or a link of the chain of vacant cells.
pub(crate) trait Cell {
    /// A vacant cell that is followed by `next`.
    fn vacant(next: u32) -> Self;
    /// The vacant cell after this one; None if this one is in use.
    fn next_vacant(&self) -> Option<u32>;
}

/// A cell for what has no place of its own for a link.
pub(crate) enum CellOf<T> {
    Vacant { next: u32 },
    Used(T),
}

impl<T> Cell for CellOf<T> {
    fn vacant(next: u32) -> Self {
        CellOf::Vacant { next }
    }

    fn next_vacant(&self) -> Option<u32> {
        match self {
            CellOf::Vacant { next } => Some(*next),
            CellOf::Used(_) => None,
        }
    }
}

impl<T> CellOf<T> {
    /// What is in the cell; panics if it is vacant.
    pub fn used(&self) -> &T {
        match self {
            CellOf::Used(content) => content,
            CellOf::Vacant { .. } => panic!("a cell that is vacant"),
        }
    }

    /// The same, to be changed.
    pub fn used_mut(&mut self) -> &mut T {
        match self {
            CellOf::Used(content) => content,
            CellOf::Vacant { .. } => panic!("a cell that is vacant"),
        }
    }
}

/// A table of cells.
pub(crate) struct Table<T> {
    chunks: Vec<Box<[T]>>,
    vacant: u32,
    used: u32,
}

impl<T: Cell> Table<T> {
    /// Cells in a chunk: a power of two, so that to find a cell takes no division.
    const CHUNK: usize = 1 << (CHUNK_BYTES / size_of::<T>()).ilog2();

    pub fn new() -> Table<T> {
        Table { chunks: Vec::new(), vacant: NIL, used: 0 }
    }

    /// Cells in use.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Memory of the table, in bytes.
    pub fn memory(&self) -> usize {
        self.chunks.len() * Self::CHUNK * size_of::<T>()
    }

    /// The index that the next insertion will have; None if there is no memory for it, or if `limit` cells exist already.
    pub fn next(&mut self, limit: u32) -> Option<u32> {
        if self.vacant == NIL {
            self.grow(limit)?;
        }
        Some(self.vacant)
    }

    /// Puts a cell in and names it; None as for [`next`](Self::next).
    pub fn insert(&mut self, cell: T, limit: u32) -> Option<u32> {
        let index = self.next(limit)?;
        let place = self.get_mut(index);
        self.vacant = place.next_vacant().expect("a vacant cell is in use");
        *self.get_mut(index) = cell;
        self.used += 1;
        Some(index)
    }

    /// Takes a cell out.
    pub fn remove(&mut self, index: u32) -> T {
        let cell = std::mem::replace(self.get_mut(index), T::vacant(NIL));
        assert!(cell.next_vacant().is_none(), "cell {index} was not in use");
        *self.get_mut(index) = T::vacant(self.vacant);
        self.vacant = index;
        self.used -= 1;
        cell
    }

    pub fn get(&self, index: u32) -> &T {
        &self.chunks[index as usize / Self::CHUNK][index as usize % Self::CHUNK]
    }

    pub fn get_mut(&mut self, index: u32) -> &mut T {
        &mut self.chunks[index as usize / Self::CHUNK][index as usize % Self::CHUNK]
    }

    /// Every cell in use, with its index.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let cells = self.chunks.iter().flatten().enumerate().skip(1);
        cells.filter(|(_, cell)| cell.next_vacant().is_none()).map(|(index, cell)| (index as u32, cell))
    }

    fn grow(&mut self, limit: u32) -> Option<()> {
        let first = self.chunks.len() * Self::CHUNK;
        let end = (first + Self::CHUNK).min(limit as usize + 1);
        let start = first.max(1);
        if start >= end {
            return None;
        }
        let mut chunk = Vec::new();
        chunk.try_reserve_exact(Self::CHUNK).ok()?;
        for index in first..first + Self::CHUNK {
            let next = if index + 1 < end { index as u32 + 1 } else { NIL };
            chunk.push(T::vacant(next));
        }
        self.chunks.try_reserve(1).ok()?;
        self.chunks.push(chunk.into_boxed_slice());
        self.vacant = start as u32;
        Some(())
    }

    /// Panics if the chain of vacant cells and the number in use do not add up.
    pub fn check_valid(&self) {
        let cells = self.chunks.len() * Self::CHUNK;
        let in_use = self.iter().count();
        assert_eq!(in_use, self.used as usize, "cells in use against the table's count");
        let (mut vacant, mut index) = (0, self.vacant);
        while index != NIL {
            vacant += 1;
            assert!(vacant + in_use < cells, "the chain of vacant cells runs in a circle");
            index = self.get(index).next_vacant().expect("a cell in use is in the chain of vacant cells");
        }
    }
}

/// The links of a list member, kept inside the member itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Links {
    pub prev: u32,
    pub next: u32,
}

/// Where a list finds the links of its members.
pub(crate) trait Nodes {
    fn links(&mut self, index: u32) -> &mut Links;
}

/// A doubly linked list; every operation takes constant time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn head(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    pub fn push_front(&mut self, nodes: &mut impl Nodes, index: u32) {
        *nodes.links(index) = Links { prev: NIL, next: self.head };
        match self.head {
            NIL => self.tail = index,
            head => nodes.links(head).prev = index,
        }
        self.head = index;
        self.len += 1;
    }

    pub fn push_back(&mut self, nodes: &mut impl Nodes, index: u32) {
        *nodes.links(index) = Links { prev: self.tail, next: NIL };
        match self.tail {
            NIL => self.head = index,
            tail => nodes.links(tail).next = index,
        }
        self.tail = index;
        self.len += 1;
    }

    /// Puts all members of another list before the head.
    pub fn prepend(&mut self, nodes: &mut impl Nodes, other: List) {
        if other.len == 0 {
            return;
        }
        match self.head {
            NIL => self.tail = other.tail,
            head => {
                nodes.links(head).prev = other.tail;
                nodes.links(other.tail).next = head;
            }
        }
        self.head = other.head;
        self.len += other.len;
    }

    /// Takes a member out; it must be in this list.
    pub fn unlink(&mut self, nodes: &mut impl Nodes, index: u32) {
        let Links { prev, next } = std::mem::take(nodes.links(index));
        match prev {
            NIL => self.head = next,
            prev => nodes.links(prev).next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => nodes.links(next).prev = prev,
        }
        self.len -= 1;
    }

    /// Panics if a member's neighbours are not that.
    pub fn check_member(&self, nodes: &mut impl Nodes, index: u32) {
        let Links { prev, next } = *nodes.links(index);
        let after = if prev == NIL { self.head } else { nodes.links(prev).next };
        let before = if next == NIL { self.tail } else { nodes.links(next).prev };
        assert!(after == index && before == index, "the neighbours of member {index} are not that");
    }

    /// The members from head to tail; panics if the links contradict each other.
    pub fn check_valid(&self, nodes: &mut impl Nodes) -> Vec<u32> {
        let mut members = Vec::new();
        let (mut prev, mut index) = (NIL, self.head);
        while index != NIL {
            let links = *nodes.links(index);
            assert_eq!(links.prev, prev, "member {index} and the one before it disagree");
            members.push(index);
            assert!(members.len() <= self.len as usize, "the list is longer than its count {}", self.len);
            (prev, index) = (index, links.next);
        }
        assert_eq!(self.tail, prev, "the tail is not the last member");
        assert_eq!(self.len as usize, members.len(), "members against the list's count");
        members
    }
}

//! Putting events into the order in which they happened.
//!
//! The kernel queues an event after it has done the deed and let the address space go, so events of threads that run at
//! the same time can be read in the wrong order. What is certain:
//! - the thread that caused an event goes on only when the event has been read, so deeds that the program itself puts in
//!   order are read in order;
//! - from before the deed until its event is read, operations on the userfaultfd fail with EAGAIN. Events between two
//!   moments at which they did not fail form an **epoch**; order is in doubt only within one.
//!
//! In doubt is only this: a remap to `B` and, read after it, an unmap of (or a remap away from) something in `B`. Either
//! the second came later and took what the first had brought, or it came first and made the room that the first was
//! given by the kernel. What is mapped at `B` now decides.

use crate::range::Range;

/// A change of the layout of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The mapping at `from` went to `to`, `len` bytes.
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// The contents are about to be discarded; the mapping stays.
    Remove(Range),
    /// The mapping is gone.
    Unmap(Range),
}

impl Change {
    /// What the change takes away.
    fn vacates(self) -> Option<Range> {
        match self {
            Change::Remap { from, len, .. } => Some(Range::sized(from, len)),
            Change::Unmap(range) => Some(range),
            Change::Remove(_) => None,
        }
    }
}

/// Orders the changes of one epoch, given as they were read. `is_registered` tells whether an address lies in a mapping
/// that is registered with the userfaultfd now.
pub fn order(read: Vec<Change>, mut is_registered: impl FnMut(u64) -> bool) -> Vec<Change> {
    let mut ordered: Vec<Change> = Vec::with_capacity(read.len());
    for change in read {
        let mut at = ordered.len();
        if let Some(vacated) = change.vacates() {
            for (i, earlier) in ordered.iter().enumerate() {
                let Change::Remap { to, len, .. } = *earlier else { continue };
                let common = Range::sized(to, len).intersect(vacated);
                if !common.is_empty() && is_registered(common.start) {
                    at = i;
                    break;
                }
            }
        }
        ordered.insert(at, change);
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0x10000;
    const B: u64 = 0x20000;
    const C: u64 = 0x30000;

    fn remap(from: u64, to: u64) -> Change {
        Change::Remap { from, to, len: 0x4000 }
    }

    #[test]
    fn order_stands_where_nothing_is_in_doubt() {
        let read = vec![remap(A, B), Change::Unmap(Range::sized(A, 0x4000)), Change::Remove(Range::sized(B, 0x1000))];
        assert_eq!(order(read.clone(), |_| panic!("nothing to ask")), read);
        let read = vec![Change::Unmap(Range::sized(B, 0x4000)), remap(A, B)];
        assert_eq!(order(read.clone(), |_| panic!("nothing to ask")), read);
    }

    #[test]
    fn an_unmap_that_made_room_comes_first() {
        let unmap = Change::Unmap(Range::sized(B + 0x1000, 0x1000));
        let mut asked = Vec::new();
        let ordered = order(vec![remap(A, B), unmap], |address| {
            asked.push(address);
            true
        });
        assert_eq!((ordered, asked), (vec![unmap, remap(A, B)], vec![B + 0x1000]));
        assert_eq!(order(vec![remap(A, B), unmap], |_| false), [remap(A, B), unmap]);
    }

    #[test]
    fn a_remap_that_made_room_comes_first() {
        assert_eq!(order(vec![remap(A, B), remap(B, C)], |_| true), [remap(B, C), remap(A, B)]);
        assert_eq!(order(vec![remap(A, B), remap(B, C)], |_| false), [remap(A, B), remap(B, C)]);
    }
}

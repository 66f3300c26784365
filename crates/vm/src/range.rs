//! Ranges of addresses and sets of them. Pure arithmetic.

use std::collections::BTreeMap;

use crate::PAGE;

/// A half-open range of addresses, page-aligned at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address after the range.
    pub end: u64,
}

impl Range {
    /// From `start` to `end`; empty if `end` is not greater.
    pub fn new(start: u64, end: u64) -> Range {
        Range { start, end: end.max(start) }
    }

    /// `len` bytes from `start`.
    pub fn sized(start: u64, len: u64) -> Range {
        Range { start, end: start.saturating_add(len) }
    }

    /// The page that contains `address`.
    pub fn page(address: u64) -> Range {
        let start = address & !(PAGE - 1);
        Range { start, end: start + PAGE }
    }

    /// Bytes.
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether nothing is in it.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Whether `address` is in it.
    pub fn contains(self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// What both have in common; empty if nothing.
    pub fn intersect(self, other: Range) -> Range {
        Range::new(self.start.max(other.start), self.end.min(other.end))
    }

    /// What of it lies before and what behind `hole`; either may be empty.
    pub fn without(self, hole: Range) -> [Range; 2] {
        if !self.overlaps(hole) {
            return [self, Range::new(0, 0)];
        }
        [Range::new(self.start, hole.start), Range::new(hole.end, self.end)]
    }

    /// Whether they have something in common.
    pub fn overlaps(self, other: Range) -> bool {
        !self.intersect(other).is_empty()
    }
}

/// A set of addresses as disjoint ranges; neighbours are joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    ends: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds a range.
    pub fn insert(&mut self, range: Range) {
        if range.is_empty() {
            return;
        }
        let mut joined = range;
        // Whatever touches the new range, ends included, becomes one with it.
        while let Some((&start, &end)) = self.ends.range(..=joined.end).next_back() {
            if end < joined.start {
                break;
            }
            self.ends.remove(&start);
            joined = Range::new(joined.start.min(start), joined.end.max(end));
        }
        self.ends.insert(joined.start, joined.end);
    }

    /// Takes a range out.
    pub fn remove(&mut self, range: Range) {
        while let Some((&start, &end)) = self.ends.range(..range.end).next_back() {
            if end <= range.start || range.is_empty() {
                break;
            }
            self.ends.remove(&start);
            if range.end < end {
                self.ends.insert(range.end, end);
            }
            if start < range.start {
                self.ends.insert(start, range.start);
            }
        }
    }

    /// Whether `address` is in the set.
    pub fn contains(&self, address: u64) -> bool {
        self.ends.range(..=address).next_back().is_some_and(|(_, &end)| address < end)
    }

    /// Whether all of `range` is in the set.
    pub fn covers(&self, range: Range) -> bool {
        self.ends.range(..=range.start).next_back().is_some_and(|(_, &end)| range.end <= end)
    }

    /// Whether any address of `range` is in the set.
    pub fn overlaps(&self, range: Range) -> bool {
        self.ends.range(..range.end).next_back().is_some_and(|(_, &end)| range.start < end) && !range.is_empty()
    }

    /// The parts of `range` that are in the set, in order.
    pub fn within(&self, range: Range) -> Vec<Range> {
        let first = self.ends.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        (self.ends.range(first..range.end.max(first)))
            .map(|(&start, &end)| Range::new(start, end).intersect(range))
            .filter(|part| !part.is_empty())
            .collect()
    }

    /// The parts of `range` that are not in the set, in order.
    pub fn missing(&self, range: Range) -> Vec<Range> {
        let mut missing = Vec::new();
        let mut from = range.start;
        for part in self.within(range) {
            missing.push(Range::new(from, part.start));
            from = part.end;
        }
        missing.push(Range::new(from, range.end));
        missing.retain(|part| !part.is_empty());
        missing
    }

    /// All ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.ends.iter().map(|(&start, &end)| Range { start, end })
    }

    /// Whether nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn pages(range: Range) -> impl Iterator<Item = u64> {
        (range.start..range.end).step_by(PAGE as usize)
    }

    proptest! {
        /// A set of ranges behaves as the set of the pages in it.
        #[test]
        fn behaves_as_a_set_of_pages(steps in prop::collection::vec((any::<bool>(), 0u64..40, 0u64..12), 1..60),
                                     ask in (0u64..40, 0u64..20)) {
            let mut set = RangeSet::default();
            let mut model = BTreeSet::new();
            for (add, start, len) in steps {
                let range = Range::sized(start * PAGE, len * PAGE);
                if add {
                    set.insert(range);
                    model.extend(pages(range));
                } else {
                    set.remove(range);
                    pages(range).for_each(|page| { model.remove(&page); });
                }
                prop_assert!(set.iter().zip(set.iter().skip(1)).all(|(a, b)| a.end < b.start));
                prop_assert_eq!(set.iter().flat_map(pages).collect::<BTreeSet<_>>(), model.clone());
            }
            let ask = Range::sized(ask.0 * PAGE, ask.1 * PAGE);
            prop_assert_eq!(set.overlaps(ask), pages(ask).any(|page| model.contains(&page)));
            prop_assert!(ask.is_empty() || set.covers(ask) == pages(ask).all(|page| model.contains(&page)));
            let (inside, outside): (Vec<u64>, Vec<u64>) = pages(ask).partition(|page| model.contains(page));
            prop_assert_eq!(set.within(ask).into_iter().flat_map(pages).collect::<Vec<_>>(), inside);
            prop_assert_eq!(set.missing(ask).into_iter().flat_map(pages).collect::<Vec<_>>(), outside);
            for page in pages(ask) {
                prop_assert_eq!(set.contains(page), model.contains(&page));
            }
        }
    }
}

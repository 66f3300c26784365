//! Storing pages, and orders to use their slots in.

use uzswap_engine::{Home, Page, Slot, Zswap};

pub fn store(zswap: &Zswap, pages: &[Page]) -> Vec<Slot> {
    pages.iter().map(|page| zswap.swap_out(page, Home::ROOT).expect("room")).collect()
}

/// Numbers that follow from the seed: the same each time.
pub struct Random(pub u64);

impl Random {
    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// Puts them in an order that `seed` decides.
pub fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut random = Random(seed);
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last + 1));
    }
}

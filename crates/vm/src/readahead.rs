//! How many pages a fault should bring, judged by the faults before it.
//!
//! A fault where an earlier one left off is part of a sequential walk: its window doubles, up to [`MAX_WINDOW`]. Any
//! other fault brings its own page only. A few walks are followed at once.

use crate::PAGE;

/// The most pages that one fault brings.
pub const MAX_WINDOW: usize = 64;

const WALKS: usize = 8;

#[derive(Debug, Clone, Copy, Default)]
struct Walk {
    next: u64,
    window: usize,
}

/// The walks through one address space.
#[derive(Debug, Default)]
pub struct Readahead {
    walks: [Walk; WALKS],
    oldest: usize,
}

impl Readahead {
    /// How many pages to bring for a fault at `page`.
    pub fn window(&mut self, page: u64) -> usize {
        let found = self.walks.iter().position(|walk| walk.window > 0 && walk.next == page);
        let index = found.unwrap_or_else(|| {
            self.oldest = (self.oldest + 1) % WALKS;
            self.walks[self.oldest] = Walk::default();
            self.oldest
        });
        let walk = &mut self.walks[index];
        walk.window = (walk.window * 2).clamp(1, MAX_WINDOW);
        walk.next = page + walk.window as u64 * PAGE;
        walk.window
    }

    /// The fault brought fewer pages than its window: the walk will go on at `next`.
    pub fn brought(&mut self, page: u64, window: usize, next: u64) {
        let expected = page + window as u64 * PAGE;
        if let Some(walk) = self.walks.iter_mut().find(|walk| walk.window == window && walk.next == expected) {
            walk.next = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_doubles_its_window_and_strangers_do_not_disturb_it() {
        let mut readahead = Readahead::default();
        let mut page = 1 << 30;
        let mut windows = Vec::new();
        for stranger in 0..8u64 {
            let window = readahead.window(page);
            windows.push(window);
            page += window as u64 * PAGE;
            assert_eq!(readahead.window((1 << 40) + stranger * 10 * PAGE), 1);
        }
        assert_eq!(windows, [1, 2, 4, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn a_walk_goes_on_where_it_was_cut_short() {
        let mut readahead = Readahead::default();
        assert_eq!((readahead.window(0x1000), readahead.window(0x2000)), (1, 2));
        readahead.brought(0x2000, 2, 0x3000);
        assert_eq!(readahead.window(0x3000), 4);
    }
}

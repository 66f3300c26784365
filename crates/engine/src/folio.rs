//! Folios: 2^order pages that leave and come back together.
//!
//! 1. A store is all or nothing. Pages go in one by one, for each is compressed on its own; the first refusal takes the others
//!    out again. Nobody knows their slots yet, and no event is counted before the last is in.
//! 2. A folio that the pool has refused is written to the swap file, as far as can be in one piece.
//! 3. A load takes each page from where it is. Those that are on disk are read at once, neighbours in one piece.

use crate::Page;
use crate::groups::Home;
use crate::slots::{Sealed, Slot};
use crate::zswap::{LoadError, Origin, Refusal, SwapOutError, Zswap, same_filled};
use serde::Serialize;

/// The largest folio: 512 pages, 2 MiB.
pub const MAX_FOLIO_ORDER: usize = 9;

/// What is counted for one size of folio, under the names of `hugepages-<size>kB/stats`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FolioCounters {
    /// Stored whole in the pool.
    pub zswpout: u64,
    /// Loaded whole, nothing of it from disk.
    pub zswpin: u64,
    /// Loaded whole, some of it from disk.
    pub swpin: u64,
    /// Not loaded whole: a page could not be read.
    pub swpin_fallback: u64,
    /// Written whole to the swap file.
    pub swpout: u64,
    /// Neither: the folio stays with the caller, who may try its parts.
    pub swpout_fallback: u64,
}

impl Zswap {
    /// Swaps a folio out, whole: into the pool or, refused there, to the swap file. Panics unless it is 2^0 to 2^9 pages.
    ///
    /// # Errors
    /// See [`SwapOutError`]; the whole folio stays with the caller.
    pub fn swap_out_folio(&self, pages: &[Page], home: Home) -> Result<Vec<Slot>, SwapOutError> {
        let order = order(pages.len());
        let mut slots = Vec::with_capacity(pages.len());
        let swapped_out = match self.store_folio(pages, home, &mut slots) {
            Ok(()) => {
                self.count_folio(order, |counters| counters.zswpout += 1);
                Ok(())
            }
            Err(refusal) => {
                self.invalidate_all(&std::mem::take(&mut slots));
                let written = match refusal {
                    Refusal::Pool => self.write_folio(pages, home, &mut slots),
                    refusal => Err(refusal.into()),
                };
                self.count_folio(order, |counters| match written {
                    Ok(()) => counters.swpout += 1,
                    Err(_) => counters.swpout_fallback += 1,
                });
                written
            }
        };
        if let Err(error) = &swapped_out {
            self.invalidate_all(&slots);
            self.count_failure(error, home);
        }
        swapped_out.map(|()| slots)
    }

    fn store_folio(&self, pages: &[Page], home: Home, slots: &mut Vec<Slot>) -> Result<(), Refusal> {
        let mut admission = None;
        let mut zeros = 0;
        for page in pages {
            let fill = same_filled(page);
            let slot = if fill == Some([0; 8]) {
                zeros += 1;
                self.store_filled([0; 8], home, |_| {})?
            } else {
                let admitted = match &mut admission {
                    Some(admitted) => admitted,
                    none => none.insert(self.admit(home, pages.len() - slots.len())?),
                };
                self.store(page, fill, home, admitted, |_| {})?
            };
            slots.push(slot);
        }
        let stored = pages.len() as u64 - zeros;
        let mut state = self.shards.any();
        let group = state.group(home.group)?;
        state.groups.charge(group, |counters| {
            counters.zswpout += stored;
            counters.swpout_zero += zeros;
        });
        Ok(())
    }

    /// Writes the pages that are not zeros.
    fn write_folio(&self, pages: &[Page], home: Home, slots: &mut Vec<Slot>) -> Result<(), SwapOutError> {
        let is_zero = |page: &Page| same_filled(page) == Some([0; 8]);
        let others: Vec<&Page> = pages.iter().filter(|page| !is_zero(page)).collect();
        let mut written = self.write_through(&others, home)?.into_iter();
        let recorded = pages.iter().try_for_each(|page| {
            slots.push(if is_zero(page) {
                self.store_zeros(home)?
            } else {
                let sealed = written.next().expect("an entry for each page");
                self.record_written(sealed, self.sum(page), home).inspect_err(|_| self.free_space([sealed.run()]))?
            });
            Ok(())
        });
        self.free_space(written.map(|sealed| sealed.run()));
        recorded
    }

    /// Loads the pages of several slots, as [`load`](Self::load) each of them; where each was. A number that is no power of two is
    /// counted as the folios that make it up, the largest first; a single page that is left over is none. Panics unless there are
    /// as many pages as slots, and no more than the largest folio has.
    ///
    /// # Errors
    /// That of the first page that could not be loaded; the content of `pages` is then undefined.
    pub fn load_folio(&self, slots: &[Slot], pages: &mut [Page]) -> Result<Vec<Origin>, LoadError> {
        assert_eq!(slots.len(), pages.len(), "a page for each slot");
        assert!((1..=1 << MAX_FOLIO_ORDER).contains(&slots.len()), "folios of {} pages", slots.len());
        let loaded = self.load_each(slots, pages);
        let mut folios = self.folios.lock();
        for order in orders(slots.len()) {
            let counters = &mut folios[order];
            match &loaded {
                Ok(origins) if origins.contains(&Origin::Disk) => counters.swpin += 1,
                Ok(_) => counters.zswpin += 1,
                Err(_) => counters.swpin_fallback += 1,
            }
        }
        drop(folios);
        loaded
    }

    fn load_each(&self, slots: &[Slot], pages: &mut [Page]) -> Result<Vec<Origin>, LoadError> {
        let mut origins = Vec::with_capacity(slots.len());
        // What is on disk, and which page it is.
        let mut on_disk: Vec<(usize, Sealed)> = Vec::new();
        // An entry in the pool may be written back at any moment before its load, so each is looked at once only.
        self.load_or_locate(slots, pages, |index, origin| {
            origins.push(origin.unwrap_or(Origin::Disk));
            on_disk.extend(origin.err().map(|sealed| (index, sealed)));
        })?;
        on_disk.sort_unstable_by_key(|(_, sealed)| sealed.place);
        self.read_several(&on_disk, pages)?;
        for (index, _) in &on_disk {
            self.check_sum(slots[*index], &pages[*index])?;
            self.shards.of(slots[*index]).count_read(slots[*index]);
        }
        Ok(origins)
    }

    /// What is counted for folios of 2^order pages. Panics above [`MAX_FOLIO_ORDER`].
    pub fn folio_counters(&self, order: usize) -> FolioCounters {
        self.folios.lock()[order]
    }

    fn count_folio(&self, order: usize, count: impl FnOnce(&mut FolioCounters)) {
        count(&mut self.folios.lock()[order]);
    }
}

/// The orders of the folios that make up so many pages. One page is a folio only if it is all.
fn orders(pages: usize) -> impl Iterator<Item = usize> {
    let least = usize::from(pages > 1);
    (least..=MAX_FOLIO_ORDER).rev().filter(move |order| pages >> order & 1 == 1)
}

fn order(pages: usize) -> usize {
    let order = pages.trailing_zeros() as usize;
    assert!(pages.is_power_of_two() && order <= MAX_FOLIO_ORDER, "a folio of {pages} pages");
    order
}

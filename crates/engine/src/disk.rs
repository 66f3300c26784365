//! To disk and back: entries packed one after another, each sealed at its place.
//!
//! 1. An entry goes to disk as it is in the pool: compressed, or a whole page that does not compress. (Or, for comparison,
//!    each page as the program knows it.) A page that the pool has refused goes there as it is, for to compress it costs more
//!    than to write it; only where no run of a page is left it is compressed.
//! 2. Its length and its codec are kept in its slot: the pool it came from may be gone when it is read.
//! 3. An entry begins at a unit of its own, so that its space can be freed alone. The rest of its last unit is zeros.
//! 4. What was read is opened before it is decompressed: no codec ever sees bytes that somebody else has made.

use crate::Page;
use crate::compress::{Compressor, Scratch, with_scratch};
use crate::groups::Home;
use crate::seal::{Nonce, Sealer};
use crate::slots::{Sealed, Slot};
use crate::swapfile::{self, CLUSTER, PAGE, ReadAt, Run, SwapFile, UNIT, units};
use crate::zswap::{LoadError, Refusal, SwapOutError, Zswap};
use std::io;

/// In what form pages are on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Writeback {
    /// As they are in the pool, packed.
    #[default]
    Compressed,
    /// As programs know them: 4096 bytes each.
    Pages,
}

impl Writeback {
    /// Both.
    pub const ALL: [Writeback; 2] = [Writeback::Compressed, Writeback::Pages];
}

pub(crate) struct Swap {
    pub file: Box<dyn SwapFile>,
    pub sealer: Sealer,
    pub form: Writeback,
}

/// The content of one write: entries on their way to neighbouring units.
#[derive(Default)]
pub(crate) struct Batch {
    run: Run,
    /// Those that are in.
    pub entries: Vec<Sealed>,
    bytes: Vec<u8>,
}

impl Batch {
    /// Begins to fill `run`.
    pub fn begin(&mut self, run: Run) {
        self.run = run;
        self.entries.clear();
        self.bytes.clear();
    }

    /// Seals an entry and puts it in; false if there is no room for it.
    pub fn push(&mut self, sealer: &Sealer, nonce: Nonce, compressor: Compressor, data: &[u8]) -> bool {
        let Run { start: place, len } = self.left(self.entries.len());
        if units(data.len()) > len {
            return false;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(data);
        let tag = sealer.seal(nonce, place, &mut self.bytes[start..]);
        self.bytes.resize(start + units(data.len()) as usize * UNIT, 0);
        self.entries.push(Sealed { place, length: data.len() as u16, compressor, nonce, tag });
        true
    }

    /// Writes all of it at once.
    pub fn write(&self, file: &dyn SwapFile) -> io::Result<()> {
        file.write_at(swapfile::offset(self.run.start), &self.bytes)
    }

    /// What is left of the run after the first `entries`.
    pub fn left(&self, entries: usize) -> Run {
        let start = entries.checked_sub(1).map_or(self.run.start, |last| self.entries[last].run().end());
        Run { start, len: self.run.end() - start }
    }
}

impl Zswap {
    /// Writes pages that the pool has refused, in as few pieces as there is room for. All or none.
    pub(crate) fn write_through(&self, pages: &[&Page], home: Home) -> Result<Vec<Sealed>, SwapOutError> {
        let _through = self.through.read();
        let mut written = Vec::with_capacity(pages.len());
        let mut batch = Batch::default();
        while written.len() < pages.len() {
            if let Err(error) = self.write_first(&pages[written.len()..], home, &mut batch) {
                self.free_space(written.iter().map(Sealed::run));
                return Err(error);
            }
            written.append(&mut batch.entries);
        }
        Ok(written)
    }

    /// Writes at least the first of these pages, and as many more as there is room for in one piece.
    fn write_first(&self, pages: &[&Page], home: Home, batch: &mut Batch) -> Result<(), SwapOutError> {
        let (swap, run, compressor) = self.space_for(pages.len(), home)?;
        let compresses = swap.form == Writeback::Compressed && run.len < PAGE;
        batch.begin(run);
        for page in pages {
            let fits = with_scratch(|scratch| {
                let room = run.len as usize * UNIT;
                let length = if compresses { scratch.compress(compressor, page, room).ok().flatten() } else { None };
                let data = length.map_or(page.as_slice(), |length| &scratch.buffer[..length]);
                batch.push(&swap.sealer, swap.sealer.nonce(), compressor, data)
            });
            if !fits {
                break;
            }
        }
        let written = match batch.entries.len() {
            0 => Err(SwapOutError::NoSpace),
            _ => batch.write(&*swap.file).map_err(SwapOutError::of_write),
        };
        self.free_space([if written.is_ok() { batch.left(batch.entries.len()) } else { run }]);
        written
    }

    /// Space for up to `pages` pages from `home`, the swap file that it is in, and the codec to use.
    fn space_for(&self, pages: usize, home: Home) -> Result<(&Swap, Run, Compressor), SwapOutError> {
        let state = self.shards.any();
        let group = state.groups.find(home.group).ok_or(SwapOutError::NoGroup)?;
        if !state.groups.may_write_back(group) {
            return Err(SwapOutError::WritebackForbidden);
        }
        let swap = self.swap.as_ref().ok_or(SwapOutError::NoSpace)?;
        let want = (pages as u32 * PAGE).min(CLUSTER);
        let run = self.space.lock().allocate(want).ok_or(SwapOutError::NoSpace)?;
        Ok((swap, run, state.config.compressor))
    }

    /// A slot for a page that was written to the swap file.
    pub(crate) fn record_written(&self, sealed: Sealed, sum: Option<u32>, home: Home) -> Result<Slot, SwapOutError> {
        let recorded = self.insert(home, sum, |state, group| {
            state.groups.charge(group, |counters| counters.pswpout += 1);
            let slot = state.store_sealed(sealed, group, home.node);
            slot.ok_or_else(|| {
                self.events.reject_kmemcache_fail.count();
                Refusal::Pool
            })
        });
        recorded.map_err(SwapOutError::from)
    }

    /// Reads one entry. The caller's reference keeps its space from being given to another.
    pub(crate) fn read(&self, sealed: &Sealed, page: &mut Page) -> Result<(), LoadError> {
        let swap = self.swap.as_ref().expect("what is on disk was written to a swap file");
        with_scratch(|scratch| {
            let bytes = &mut scratch.buffer[..sealed.length as usize];
            swap.file.read_at(swapfile::offset(sealed.place), bytes).map_err(LoadError::Io)?;
            self.unpack(swap, scratch, sealed, page)
        })
    }

    /// Reads several entries, each with the number of its page, in the order in which they are on disk: all at once, and those
    /// that are neighbours in one piece.
    pub(crate) fn read_several(&self, entries: &[(usize, Sealed)], pages: &mut [Page]) -> Result<(), LoadError> {
        if entries.is_empty() {
            return Ok(());
        }
        let swap = self.swap.as_ref().expect("what is on disk was written to a swap file");
        let units: u32 = entries.iter().map(|(_, sealed)| sealed.run().len).sum();
        let mut bytes = vec![0; units as usize * UNIT];
        let (mut rest, mut reads) = (bytes.as_mut_slice(), Vec::new());
        for run in entries.chunk_by(|(_, x), (_, y)| x.run().end() == y.place) {
            let (first, last) = (run[0].1.place, run[run.len() - 1].1);
            let (buffer, others) = rest.split_at_mut((last.run().end() - first) as usize * UNIT);
            // The last unit of a file may not be there as a whole.
            let length = (last.place - first) as usize * UNIT + last.length as usize;
            reads.push(ReadAt { offset: swapfile::offset(first), buffer: &mut buffer[..length] });
            rest = others;
        }
        swap.file.read_all(&mut reads).map_err(LoadError::Io)?;
        let mut from = 0;
        for (index, sealed) in entries {
            let entry = &bytes[from..][..sealed.length as usize];
            from += sealed.run().len as usize * UNIT;
            with_scratch(|scratch| {
                scratch.buffer[..entry.len()].copy_from_slice(entry);
                self.unpack(swap, scratch, sealed, &mut pages[*index])
            })?;
        }
        Ok(())
    }

    /// Opens the entry that is in the buffer, and decompresses it.
    fn unpack(&self, swap: &Swap, scratch: &mut Scratch, sealed: &Sealed, page: &mut Page) -> Result<(), LoadError> {
        let &Sealed { place, length, compressor, nonce, tag } = sealed;
        let length = length as usize;
        let opened = swap.sealer.open(nonce, place, &tag, &mut scratch.buffer[..length]);
        opened.map_err(|_| self.corrupt())?;
        scratch.decompress(compressor, 0..length, page).map_err(|_| self.corrupt())
    }

    /// Frees space on disk, and discards in the file the clusters that this has emptied.
    pub(crate) fn free_space(&self, runs: impl IntoIterator<Item = Run>) {
        for run in runs.into_iter().filter(|run| run.len > 0) {
            let emptied = self.space.lock().free(run);
            if let (Some(emptied), Some(swap)) = (emptied, &self.swap) {
                // Until `discarded` nobody is given any of this cluster, so the hole cannot hit new data.
                let (offset, len) = emptied.range();
                swap.file.discard(offset, len);
                self.space.lock().discarded(emptied);
            }
        }
    }
}

impl SwapOutError {
    /// What a failed write means.
    fn of_write(error: io::Error) -> SwapOutError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => SwapOutError::NoSpace,
            _ => SwapOutError::Io(error),
        }
    }
}

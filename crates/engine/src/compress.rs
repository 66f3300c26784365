//! The codecs, and the memory they work in.
//!
//! 1. Each thread has a scratch of its own with the codecs' contexts and one buffer: (de)compression takes no lock, and
//!    no memory after a codec's first use on a thread.
//! 2. LZ4 is the C library, which is faster than its ports to Rust; lzo-rle is our own, for want of a free one.
//! 3. Bytes are copied out of the pool into the scratch under the pool's lock and decompressed after it is dropped.
//! 4. The buffer has room for the worst that a codec makes of a page. A codec that need not look for the end of its output is
//!    faster; what has come out too long is refused afterwards.
//! 5. Zeros at the end of a page are left to `memset`, which is faster at them than any codec: a codec is given what comes before,
//!    and a page that comes out shorter ends with zeros.
//! 6. Where page after page does not compress (media, what is encrypted or compressed already), the codec is spared most of
//!    them: see [`Streak`].

use crate::names::{UnknownName, named};
use crate::{PAGE_SIZE, Page, lzo};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

const ZSTD_LEVEL: i32 = 1;
const DEFLATE_LEVEL: i32 = 1;
/// Pages of which compressed bytes are copied out of the pool in one go.
pub(crate) const GATHERED: usize = 16;
/// No codec makes as much of a page.
const ROOM: usize = GATHERED * PAGE_SIZE;

/// A codec, by its kernel name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Compressor {
    /// `lz4`: LZ4, the fastest.
    #[default]
    Lz4,
    /// `lzo-rle`: LZO with run-length encoding of zeros, the kernel's default.
    LzoRle,
    /// `zstd`: Zstandard, slower and denser.
    Zstd,
    /// `deflate`: Deflate, for comparison.
    Deflate,
}

impl Compressor {
    /// Every codec.
    pub const ALL: [Compressor; 4] = [Compressor::Lz4, Compressor::LzoRle, Compressor::Zstd, Compressor::Deflate];

    /// The kernel's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Compressor::Lz4 => "lz4",
            Compressor::LzoRle => "lzo-rle",
            Compressor::Zstd => "zstd",
            Compressor::Deflate => "deflate",
        }
    }
}

impl fmt::Display for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Compressor {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        named("compressor", &Compressor::ALL, Compressor::name, name)
    }
}

/// The codec has no memory to work in, or cannot read its input.
#[derive(Debug)]
pub(crate) struct CodecError;

/// How many pages in a row did not compress. After [`HOPELESS`](Self::HOPELESS) of them only a sample of each is compressed,
/// and the page only if that got smaller; but one in [`RETRIED`](Self::RETRIED) is always tried whole. A page that would compress is
/// thus kept as it is only among those that do not, and where its sample does not show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Streak(u8);

impl Streak {
    const HOPELESS: u8 = 8;
    const RETRIED: u8 = 16;

    /// Whether the next page is to be sampled first.
    pub fn asks_for_sample(self) -> bool {
        self.0 >= Self::HOPELESS && self.0 < Self::HOPELESS + Self::RETRIED - 1
    }

    /// Counts a page.
    pub fn count(&mut self, compressed: bool) {
        self.0 = match self.0 {
            _ if compressed => 0,
            number if number < Self::HOPELESS + Self::RETRIED - 1 => number + 1,
            _ => Self::HOPELESS,
        };
    }
}

/// One thread's contexts and buffers.
pub(crate) struct Scratch {
    /// Compressed bytes, or a page on its way to disk.
    pub buffer: Box<[u8; ROOM]>,
    codecs: Codecs,
}

#[derive(Default)]
struct Codecs {
    lzo: Option<Box<lzo::Positions>>,
    zstd: Option<Zstd>,
    deflate: Option<Deflate>,
}

struct Zstd {
    compressor: zstd::bulk::Compressor<'static>,
    decompressor: zstd::bulk::Decompressor<'static>,
}

struct Deflate {
    compressor: libdeflater::Compressor,
    decompressor: libdeflater::Decompressor,
}

crate::sync::thread_local! {
    static SCRATCH: RefCell<Scratch> =
        RefCell::new(Scratch { buffer: Box::new([0; ROOM]), codecs: Codecs::default() });
}

/// Runs `work` with this thread's scratch; not to be nested.
pub(crate) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with(|scratch| work(&mut scratch.borrow_mut()))
}

/// A page without the zeros at its end, but for what is left of the last 64 bytes.
fn without_tail(page: &Page) -> &[u8] {
    const STEP: usize = 64;
    let is_zero = |step: &&[u8; STEP]| step.iter().fold(0, |all, byte| all | byte) == 0;
    let tail = page.as_chunks().0.iter().rev().take_while(is_zero).count();
    &page[..(PAGE_SIZE - tail * STEP).max(STEP)]
}

impl Scratch {
    /// Compresses a page into the buffer and returns the length: at most `limit`, None if it takes more.
    pub fn compress(&mut self, compressor: Compressor, page: &Page, limit: usize) -> Result<Option<usize>, CodecError> {
        Ok(self.compress_bytes(compressor, without_tail(page))?.filter(|length| *length <= limit))
    }

    /// Whether pieces from all over a page, taken together, get smaller.
    pub fn compresses_sample(&mut self, compressor: Compressor, page: &Page) -> Result<bool, CodecError> {
        const PIECE: usize = 64;
        const PIECES: usize = 8;
        let mut sample = [0; PIECES * PIECE];
        for (piece, part) in sample.chunks_exact_mut(PIECE).zip(page.chunks_exact(PAGE_SIZE / PIECES)) {
            piece.copy_from_slice(&part[..PIECE]);
        }
        Ok(self.compress_bytes(compressor, &sample)?.is_some_and(|length| length < sample.len()))
    }

    fn compress_bytes(&mut self, compressor: Compressor, bytes: &[u8]) -> Result<Option<usize>, CodecError> {
        let output = self.buffer.as_mut_slice();
        Ok(match compressor {
            Compressor::Lz4 => lz4::block::compress_to_buffer(bytes, None, false, output).ok(),
            Compressor::LzoRle => {
                let positions = self.codecs.lzo.get_or_insert_with(|| Box::new([0; lzo::POSITIONS]));
                lzo::compress(bytes, output, positions)
            }
            Compressor::Zstd => self.codecs.zstd()?.compressor.compress_to_buffer(bytes, output).ok(),
            Compressor::Deflate => self.codecs.deflate().compressor.deflate_compress(bytes, output).ok(),
        })
    }

    /// Decompresses these bytes of the buffer; a whole page of them is the page itself.
    pub fn decompress(
        &mut self,
        compressor: Compressor,
        from: Range<usize>,
        page: &mut Page,
    ) -> Result<(), CodecError> {
        let input = &self.buffer[from];
        if input.len() == PAGE_SIZE {
            page.copy_from_slice(input);
            return Ok(());
        }
        let decompressed = match compressor {
            Compressor::Lz4 => lz4::block::decompress_to_buffer(input, Some(PAGE_SIZE as i32), page).ok(),
            Compressor::LzoRle => lzo::decompress(input, page),
            Compressor::Zstd => self.codecs.zstd()?.decompressor.decompress_to_buffer(input, page.as_mut_slice()).ok(),
            Compressor::Deflate => self.codecs.deflate().decompressor.deflate_decompress(input, page).ok(),
        };
        page[decompressed.ok_or(CodecError)?..].fill(0);
        Ok(())
    }
}

impl Codecs {
    fn zstd(&mut self) -> Result<&mut Zstd, CodecError> {
        if self.zstd.is_none() {
            let compressor = zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(|_| CodecError)?;
            let decompressor = zstd::bulk::Decompressor::new().map_err(|_| CodecError)?;
            self.zstd = Some(Zstd { compressor, decompressor });
        }
        self.zstd.as_mut().ok_or(CodecError)
    }

    fn deflate(&mut self) -> &mut Deflate {
        self.deflate.get_or_insert_with(|| {
            let level = libdeflater::CompressionLvl::new(DEFLATE_LEVEL).expect("a level that exists");
            let compressor = libdeflater::Compressor::new(level);
            Deflate { compressor, decompressor: libdeflater::Decompressor::new() }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        for compressor in Compressor::ALL {
            assert_eq!(compressor.to_string().parse(), Ok(compressor));
        }
        let error = "lz5".parse::<Compressor>().unwrap_err();
        assert_eq!(error.to_string(), "unknown compressor \"lz5\": there are lz4, lzo-rle, zstd, deflate");
    }

    #[test]
    fn after_eight_pages_that_do_not_compress_one_in_sixteen_is_not_sampled() {
        let mut streak = Streak::default();
        let mut asked = |compressed| {
            let asked = streak.asks_for_sample();
            streak.count(compressed);
            asked
        };
        let whole: Vec<usize> = (0..1000).filter(|_| !asked(false)).collect();
        let expected: Vec<usize> = (0..8).chain((23..1000).step_by(16)).collect();
        assert_eq!(whole, expected);
        asked(true);
        assert!((0..8).all(|_| !asked(false)) && asked(true) && !asked(true), "from the beginning");
    }

    #[test]
    fn every_codec_returns_what_it_was_given() {
        let mut page = [0; PAGE_SIZE];
        page.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7 % 50) as u8);
        for compressor in Compressor::ALL {
            with_scratch(|scratch| {
                let length = scratch.compress(compressor, &page, 3600).unwrap().unwrap();
                assert!(length < 2000, "{compressor}: {length}");
                let mut out = [0; PAGE_SIZE];
                scratch.decompress(compressor, 0..length, &mut out).unwrap();
                assert_eq!(out, page, "{compressor}");
                assert!(scratch.decompress(compressor, 0..length - 1, &mut out).is_err(), "{compressor}, cut short");
                assert_eq!(scratch.compress(compressor, &page, length - 1).unwrap(), None, "{compressor}, no room");
            });
        }
    }
    #[test]
    fn zeros_at_the_end_are_not_left_to_the_codec() {
        for used in [0, 1, 63, 64, 65, 2048, 4032, 4033, PAGE_SIZE] {
            let mut page = [0; PAGE_SIZE];
            page[..used].iter_mut().enumerate().for_each(|(i, byte)| *byte = 1 + (i % 200) as u8);
            assert_eq!(without_tail(&page).len(), used.next_multiple_of(64).max(64));
            for compressor in Compressor::ALL {
                with_scratch(|scratch| {
                    let length = scratch.compress(compressor, &page, 3600).unwrap().unwrap();
                    let mut out = [0xff; PAGE_SIZE];
                    scratch.decompress(compressor, 0..length, &mut out).unwrap();
                    assert_eq!(out, page, "{compressor}, {used} bytes and zeros");
                });
            }
        }
    }
}

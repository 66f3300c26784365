//! zswap itself: slots, entries, pools, allocator, compressors, LRU, writeback, counters.

/// A codec, by its kernel name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compressor {
    /// LZ4, fast.
    #[default]
    Lz4,
    /// LZO with run-length encoding, the kernel's default.
    LzoRle,
    /// Zstandard.
    Zstd,
    /// Deflate.
    Deflate,
}

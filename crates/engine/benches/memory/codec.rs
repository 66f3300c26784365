//! The bare codecs, to compare the engine with, or to try what it might do.

use uzswap_engine::Compressor;

/// lzo-rle is our own, and made for pages: there is no other to compare it with.
pub const CODECS: [Compressor; 3] = [Compressor::Lz4, Compressor::Zstd, Compressor::Deflate];

/// The codec as the engine calls it, without the engine.
pub struct Codec {
    compressor: Compressor,
    zstd: (zstd::bulk::Compressor<'static>, zstd::bulk::Decompressor<'static>),
    deflate: (libdeflater::Compressor, libdeflater::Decompressor),
}

impl Codec {
    pub fn new(compressor: Compressor) -> Codec {
        let level = libdeflater::CompressionLvl::new(1).expect("level 1");
        Codec {
            compressor,
            zstd: (zstd::bulk::Compressor::new(1).expect("zstd"), zstd::bulk::Decompressor::new().expect("zstd")),
            deflate: (libdeflater::Compressor::new(level), libdeflater::Decompressor::new()),
        }
    }

    /// Returns the length.
    pub fn compress(&mut self, block: &[u8], buffer: &mut [u8]) -> usize {
        match self.compressor {
            Compressor::Lz4 => lz4::block::compress_to_buffer(block, None, false, buffer).expect("lz4"),
            Compressor::Zstd => self.zstd.0.compress_to_buffer(block, buffer).expect("zstd"),
            _ => self.deflate.0.deflate_compress(block, buffer).expect("deflate"),
        }
    }

    /// Panics unless it fills the block.
    pub fn decompress(&mut self, data: &[u8], block: &mut [u8]) {
        let length = match self.compressor {
            Compressor::Lz4 => lz4::block::decompress_to_buffer(data, Some(block.len() as i32), block).expect("lz4"),
            Compressor::Zstd => self.zstd.1.decompress_to_buffer(data, block).expect("zstd"),
            _ => self.deflate.1.deflate_decompress(data, block).expect("deflate"),
        };
        assert_eq!(length, block.len());
    }
}

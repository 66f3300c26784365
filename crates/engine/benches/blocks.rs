//! Whether neighbouring pages should be compressed as one object, on pages of real memory:
//! `cargo bench -p uzswap-engine --bench blocks`.
//!
//! Prints, for blocks of 1 to 16 pages: how many bytes a byte holds; what a page costs to compress and to decompress with
//! its block; what it costs if it is the only one wanted, for which its whole block is decompressed; and which share of
//! the pages has to leave one by one for the block, which stays until the last has left, to weigh more than the
//! pages alone would. With `--quick` it looks at a quarter of the pages, three times instead of nine.

#[path = "memory/codec.rs"]
mod codec;
mod memory;

use codec::{CODECS, Codec};
use memory::{BLOCK, images, median, time};
use std::hint::black_box;
use std::time::Duration;
use uzswap_engine::PAGE_SIZE;

const SIZES: [usize; 4] = [1, 4, 8, BLOCK];

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (pages, rounds) = if quick { (1024, 3) } else { (4096, 9) };
    let images = images(pages);
    println!("microseconds a page     KiB   ratio  compress  decompress  one alone  loses at");
    for compressor in CODECS {
        let mut codec = Codec::new(compressor);
        for image in images.iter().filter(|image| image.name != "zero") {
            let bytes = image.pages.as_flattened();
            // All sizes in each round, so that a machine that drifts drifts for all.
            let mut times: [[Vec<Duration>; 2]; SIZES.len()] = Default::default();
            let mut packed = [0; SIZES.len()];
            for _ in 0..rounds {
                for ((size, times), packed) in SIZES.iter().zip(&mut times).zip(&mut packed) {
                    let mut buffer = vec![0; 2 * size * PAGE_SIZE];
                    let blocks = || bytes.chunks_exact(size * PAGE_SIZE);
                    let compress = time(|| blocks().map(|block| codec.compress(block, &mut buffer)).sum::<usize>());
                    let data: Vec<Vec<u8>> = blocks()
                        .map(|block| {
                            let length = codec.compress(block, &mut buffer);
                            buffer[..length].to_vec()
                        })
                        .collect();
                    let mut block = vec![0; size * PAGE_SIZE];
                    let decompress =
                        time(|| data.iter().for_each(|data| codec.decompress(black_box(data), &mut block)));
                    times[0].push(compress.0);
                    times[1].push(decompress.0);
                    *packed = data.iter().map(|data| data.len().min(size * PAGE_SIZE)).sum();
                }
            }
            let alone = packed[0] as f64;
            for ((size, [compress, decompress]), packed) in SIZES.iter().zip(times).zip(packed) {
                let decompress = median(decompress, image.pages.len());
                println!(
                    "{:<8}{:<14}{:>5}{:>8.2}{:>10.2}{decompress:>12.2}{:>11.2}{:>8.0} %",
                    compressor.name(),
                    image.name,
                    size * PAGE_SIZE / 1024,
                    bytes.len() as f64 / packed as f64,
                    median(compress, image.pages.len()),
                    decompress * *size as f64,
                    (1.0 - packed as f64 / alone) * 100.0,
                );
            }
        }
    }
}

//! What the engine adds to the bare codec, on pages of real memory: `cargo bench -p uzswap-engine --bench images`.
//!
//! Prints four tables: store and load beside the codec alone; two threads beside one; ten million entries beside ten
//! thousand; and what a byte of memory holds.
//! With `--quick` it looks at a quarter of the pages, three times instead of nine.

mod memory;

use memory::{Image, images, median, time};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use uzswap_engine::{Compressor, Config, HeapSource, Home, PAGE_SIZE, Page, Slot, Zswap};

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (pages, rounds) = if quick { (1024, 3) } else { (4096, 9) };
    let images = images(pages);
    against_the_codec(&images, rounds);
    two_threads(&images, rounds);
    many_entries(if quick { 1_000_000 } else { 10_000_000 }, rounds);
    capacity(&images);
}

fn zswap(compressor: Compressor) -> Zswap {
    let config = Config { compressor, ..Config::default() };
    Zswap::new(config, None, Box::new(HeapSource))
}

fn store(zswap: &Zswap, pages: &[Page]) -> Vec<Slot> {
    pages.iter().map(|page| zswap.swap_out(page, Home::ROOT).expect("room")).collect()
}

fn load(zswap: &Zswap, slots: &[Slot]) {
    let mut page = [0; PAGE_SIZE];
    for &slot in slots {
        zswap.load(slot, &mut page).expect("as stored");
        black_box(&page);
        zswap.invalidate(slot);
    }
}

/// The codec as the engine calls it, without the engine.
struct Bare {
    compressor: Compressor,
    zstd: (zstd::bulk::Compressor<'static>, zstd::bulk::Decompressor<'static>),
    deflate: (libdeflater::Compressor, libdeflater::Decompressor),
}

impl Bare {
    fn new(compressor: Compressor) -> Bare {
        let level = libdeflater::CompressionLvl::new(1).expect("level 1");
        Bare {
            compressor,
            zstd: (zstd::bulk::Compressor::new(1).expect("zstd"), zstd::bulk::Decompressor::new().expect("zstd")),
            deflate: (libdeflater::Compressor::new(level), libdeflater::Decompressor::new()),
        }
    }

    fn compress(&mut self, page: &Page, buffer: &mut [u8]) -> usize {
        match self.compressor {
            Compressor::Lz4 => lz4::block::compress_to_buffer(page, None, false, buffer).expect("lz4"),
            Compressor::Zstd => self.zstd.0.compress_to_buffer(page, buffer).expect("zstd"),
            _ => self.deflate.0.deflate_compress(page, buffer).expect("deflate"),
        }
    }

    fn decompress(&mut self, data: &[u8], page: &mut Page) {
        let length = match self.compressor {
            Compressor::Lz4 => lz4::block::decompress_to_buffer(data, Some(PAGE_SIZE as i32), page).expect("lz4"),
            Compressor::Zstd => self.zstd.1.decompress_to_buffer(data, page.as_mut_slice()).expect("zstd"),
            _ => self.deflate.1.deflate_decompress(data, page).expect("deflate"),
        };
        assert_eq!(length, PAGE_SIZE);
    }
}

/// lzo-rle is our own: there is no other to compare it with.
const CODECS: [Compressor; 3] = [Compressor::Lz4, Compressor::Zstd, Compressor::Deflate];

fn against_the_codec(images: &[Image], rounds: usize) {
    println!("microseconds a page     codec   store          added    codec    load          added");
    for compressor in CODECS {
        for image in images {
            let pages = &image.pages;
            let (zswap, mut bare) = (zswap(compressor), Bare::new(compressor));
            let (mut buffer, mut page) = (vec![0; 2 * PAGE_SIZE], [0; PAGE_SIZE]);
            let packed: Vec<Vec<u8>> = (pages.iter())
                .map(|page| {
                    let length = bare.compress(page, &mut buffer);
                    buffer[..length].to_vec()
                })
                .collect();
            // So that the tables have grown before they are measured.
            load(&zswap, &store(&zswap, pages));
            let mut times: [Vec<Duration>; 4] = Default::default();
            for _ in 0..rounds {
                times[0].push(time(|| pages.iter().map(|page| bare.compress(page, &mut buffer)).sum::<usize>()).0);
                let (stored, slots) = time(|| store(&zswap, pages));
                times[1].push(stored);
                times[2].push(time(|| packed.iter().for_each(|data| bare.decompress(black_box(data), &mut page))).0);
                times[3].push(time(|| load(&zswap, &slots)).0);
            }
            let [compress, stored, decompress, loaded] = times.map(|times| median(times, pages.len()));
            let added = |bare: f64, ours: f64| format!("{:+.2} ({:+.0} %)", ours - bare, (ours / bare - 1.0) * 100.0);
            println!(
                "{:<8}{:<14}{compress:>7.2}{stored:>8.2}{:>16}{decompress:>8.2}{loaded:>8.2}{:>16}",
                compressor.name(),
                image.name,
                added(compress, stored),
                added(decompress, loaded)
            );
        }
    }
}

fn two_threads(images: &[Image], rounds: usize) {
    println!("\nthroughput of two threads, one thread's being 1");
    let pages = &images[1].pages;
    for compressor in CODECS {
        let zswap = zswap(compressor);
        let run = |threads: usize| {
            let start = Barrier::new(threads + 1);
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        start.wait();
                        load(&zswap, &store(&zswap, pages));
                    });
                }
                start.wait();
                Instant::now()
            })
            .elapsed()
        };
        let (one, two): (Vec<Duration>, Vec<Duration>) = (0..rounds).map(|_| (run(1), run(2))).unzip();
        println!("{:<8}{:>6.2}", compressor.name(), 2.0 * median(one, 1) / median(two, 1));
    }
}

/// A page that hardly takes room, and is like no other.
fn small(number: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    page[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    page
}

fn many_entries(many: usize, rounds: usize) {
    const FEW: usize = 10_000;
    println!("\nmicroseconds to load, give up and store anew an entry chosen at random");
    let mut costs = Vec::new();
    for entries in [FEW, many] {
        let zswap = zswap(Compressor::Lz4);
        let mut slots: Vec<Slot> =
            (0..entries as u64).map(|n| zswap.swap_out(&small(n), Home::ROOT).expect("room")).collect();
        let mut random = 1u64;
        let mut page = [0; PAGE_SIZE];
        let times = (0..rounds).map(|_| {
            time(|| {
                for _ in 0..FEW {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let slot = &mut slots[(random >> 33) as usize % entries];
                    zswap.load(*slot, &mut page).expect("as stored");
                    zswap.invalidate(*slot);
                    *slot = zswap.swap_out(&page, Home::ROOT).expect("room");
                }
            })
            .0
        });
        costs.push(median(times.collect(), FEW));
        let metadata = zswap.metadata_bytes() as f64 / entries as f64;
        println!("{entries:>10} entries{:>8.2}{metadata:>8.1} bytes of metadata each", costs[costs.len() - 1]);
    }
    println!("ratio{:>22.2}", costs[1] / costs[0]);
}

/// Of 256 MiB of pages: in a small pool the size classes' last zspages, half empty, would weigh more than the rest.
fn capacity(images: &[Image]) {
    const PAGES: usize = 1 << 16;
    println!("\nbytes held in a byte of memory");
    println!("{:<22}{:>7}{:>8}{:>9}", "", "codec", "engine", "of it");
    for compressor in CODECS {
        for image in images.iter().filter(|image| image.name != "zero") {
            let (zswap, mut bare) = (zswap(compressor), Bare::new(compressor));
            let mut buffer = vec![0; 2 * PAGE_SIZE];
            let packed: usize = image.pages.iter().map(|page| bare.compress(page, &mut buffer).min(PAGE_SIZE)).sum();
            let codec = (image.pages.len() * PAGE_SIZE) as f64 / packed as f64;
            for _ in (0..PAGES).step_by(image.pages.len()) {
                store(&zswap, &image.pages);
            }
            let used = zswap.pool_bytes() + zswap.metadata_bytes();
            let engine = (PAGES * PAGE_SIZE) as f64 / used as f64;
            let name = compressor.name();
            println!("{name:<8}{:<14}{codec:>7.2}{engine:>8.2}{:>8.1}%", image.name, engine / codec * 100.0);
        }
    }
}

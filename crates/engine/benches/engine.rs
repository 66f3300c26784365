//! What a store and a load cost, and how much of it is the codec: `cargo bench -p uzswap-engine`.
//!
//! Pages are words from a small vocabulary with some zeros, about what program memory compresses to.

fn main() {
    print_metadata();
    divan::main();
}

use divan::{Bencher, black_box};
use uzswap_engine::{Compressor, Config, HeapSource, Home, PAGE_SIZE, Page, Slot, SwapFile, Zswap};

const PAGES: usize = 1024;
const NAMES: [&str; 4] = ["lz4", "lzo-rle", "zstd", "deflate"];

fn pages() -> Vec<Page> {
    let mut random = 1u64;
    let mut next = move || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        random >> 33
    };
    let words: Vec<[u8; 8]> = (0..256).map(|_| (next() * next()).to_le_bytes()).collect();
    let mut word = move || match next() % 8 {
        0..3 => [0; 8],
        3..6 => words[(next() % 256) as usize],
        _ => (0x7f00_0000_0000 | next()).to_le_bytes(),
    };
    (0..PAGES).map(|_| std::array::from_fn::<_, { PAGE_SIZE / 8 }, _>(|_| word())).map(flatten).collect()
}

fn flatten(words: [[u8; 8]; PAGE_SIZE / 8]) -> Page {
    words.as_flattened().try_into().expect("as long as a page")
}

fn zswap(compressor: &str, swap: Option<Box<dyn SwapFile>>) -> Zswap {
    let compressor: Compressor = compressor.parse().expect("a known compressor");
    let config = Config { compressor, ..Config::default() };
    Zswap::new(config, swap, HeapSource)
}

fn store_all(zswap: &Zswap, pages: &[Page]) -> Vec<Slot> {
    pages.iter().map(|page| zswap.swap_out(page, Home::ROOT).expect("room")).collect()
}

/// What has to be known of every page, in the pool and on disk.
fn print_metadata() {
    let zswap = zswap("lz4", Some(Box::new(Null)));
    let (pages, rounds) = (pages(), 32);
    (0..rounds).for_each(|_| drop(store_all(&zswap, &pages)));
    let per_page = |bytes: u64| bytes / (rounds * PAGES) as u64;
    let in_pool = per_page(zswap.metadata_bytes());
    zswap.shrink(u64::MAX);
    eprintln!("metadata: {in_pool} bytes a page in the pool, {} once on disk", per_page(zswap.metadata_bytes()));
}

fn load_all(zswap: &Zswap, slots: Vec<Slot>) {
    let mut page = [0; PAGE_SIZE];
    for slot in slots {
        zswap.load(slot, &mut page).expect("as stored");
        black_box(&page);
        zswap.invalidate(slot);
    }
}

/// 1024 pages in.
#[divan::bench(args = NAMES)]
fn store_1024(bencher: Bencher<'_, '_>, compressor: &str) {
    let pages = pages();
    let zswap = zswap(compressor, None);
    load_all(&zswap, store_all(&zswap, &pages));
    let kept = std::cell::RefCell::new(Vec::new());
    bencher
        .with_inputs(|| load_all(&zswap, kept.take()))
        .bench_local_values(|()| *kept.borrow_mut() = store_all(&zswap, &pages));
    let counters = zswap.counters();
    eprintln!(
        "{compressor}: {} bytes a page, {} with waste",
        counters.root.zswap / PAGES as u64,
        zswap.pool_bytes() / PAGES as u64
    );
}

/// 1024 pages out, exclusively.
#[divan::bench(args = NAMES)]
fn load_1024(bencher: Bencher<'_, '_>, compressor: &str) {
    let pages = pages();
    let zswap = zswap(compressor, None);
    bencher.with_inputs(|| store_all(&zswap, &pages)).bench_local_values(|slots| load_all(&zswap, slots));
}

/// The codec alone, 1024 pages.
#[divan::bench(args = ["lz4", "zstd", "deflate"])]
fn bare_compress_1024(bencher: Bencher<'_, '_>, compressor: &str) {
    let pages = pages();
    let mut codec = Bare::new(compressor);
    bencher.bench_local(|| pages.iter().map(|page| codec.compress(page)).sum::<usize>());
}

/// The codec alone, 1024 pages.
#[divan::bench(args = ["lz4", "zstd", "deflate"])]
fn bare_decompress_1024(bencher: Bencher<'_, '_>, compressor: &str) {
    let mut codec = Bare::new(compressor);
    let compressed: Vec<Vec<u8>> = pages()
        .iter()
        .map(|page| {
            let length = codec.compress(page);
            codec.buffer[..length].to_vec()
        })
        .collect();
    bencher.bench_local(|| compressed.iter().for_each(|data| codec.decompress(data)));
}

struct Bare {
    name: String,
    buffer: Vec<u8>,
    page: Page,
    zstd: (zstd::bulk::Compressor<'static>, zstd::bulk::Decompressor<'static>),
    deflate: (libdeflater::Compressor, libdeflater::Decompressor),
}

impl Bare {
    fn new(name: &str) -> Bare {
        let zstd = (zstd::bulk::Compressor::new(1).expect("zstd"), zstd::bulk::Decompressor::new().expect("zstd"));
        let level = libdeflater::CompressionLvl::new(1).expect("level 1");
        let deflate = (libdeflater::Compressor::new(level), libdeflater::Decompressor::new());
        Bare { name: name.to_owned(), buffer: vec![0; 2 * PAGE_SIZE], page: [0; PAGE_SIZE], zstd, deflate }
    }

    fn compress(&mut self, page: &Page) -> usize {
        match self.name.as_str() {
            "lz4" => lz4::block::compress_to_buffer(page, None, false, &mut self.buffer).expect("lz4"),
            "zstd" => self.zstd.0.compress_to_buffer(page, self.buffer.as_mut_slice()).expect("zstd"),
            _ => self.deflate.0.deflate_compress(page, &mut self.buffer).expect("deflate"),
        }
    }

    fn decompress(&mut self, data: &[u8]) {
        let page = &mut self.page;
        let length = match self.name.as_str() {
            "lz4" => lz4::block::decompress_to_buffer(data, Some(PAGE_SIZE as i32), page).expect("lz4"),
            "zstd" => self.zstd.1.decompress_to_buffer(data, page.as_mut_slice()).expect("zstd"),
            _ => self.deflate.1.deflate_decompress(data, page).expect("deflate"),
        };
        assert_eq!(length, PAGE_SIZE);
    }
}

/// A swap file that forgets: what is left is the cost of decompressing, sealing and keeping the books.
struct Null;

impl SwapFile for Null {
    fn write_at(&self, _offset: u64, _data: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
    fn read_at(&self, _offset: u64, _buf: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::NotFound.into())
    }
    fn discard(&self, _offset: u64, _len: u64) {}
}

/// 1024 pages from the pool to a swap file that costs nothing.
#[divan::bench(args = NAMES)]
fn writeback_1024(bencher: Bencher<'_, '_>, compressor: &str) {
    let pages = pages();
    let zswap = zswap(compressor, Some(Box::new(Null)));
    let kept = std::cell::RefCell::new(Vec::new());
    bencher
        .with_inputs(|| {
            kept.take().into_iter().for_each(|slot| zswap.invalidate(slot));
            *kept.borrow_mut() = store_all(&zswap, &pages);
        })
        .bench_local_values(|()| zswap.shrink(u64::MAX));
}

/// Two threads, each 1024 pages in and out of one pool.
#[divan::bench(args = NAMES)]
fn two_threads_store_and_load_1024_each(bencher: Bencher<'_, '_>, compressor: &str) {
    let pages = pages();
    let zswap = zswap(compressor, None);
    bencher.bench_local(|| {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| load_all(&zswap, store_all(&zswap, &pages)));
            }
        });
    });
}

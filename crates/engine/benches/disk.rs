//! The two forms that pages can have on disk beside each other, on pages of real memory:
//! `cargo bench -p uzswap-engine --bench disk`.
//!
//! Prints three tables: what a page costs to write and to load; what is left on disk after pages were freed at random, and
//! after many rounds of that; and how many pages a full disk holds. The swap file is in /var/tmp, or in the directory
//! named by TMPDIR. With `--quick` it looks at a quarter of the pages, three times instead of nine.

mod memory;
#[path = "memory/slots.rs"]
mod slots;

use memory::{Image, images, median, time};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use slots::{shuffle, store};
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, io};
use uzswap_engine::{Compressor, Config, HeapSource, Home, PAGE_SIZE, Page, Slot, SwapFile, Writeback, Zswap};

fn main() {
    let quick = env::args().any(|argument| argument == "--quick");
    let (pages, rounds) = if quick { (1024, 3) } else { (4096, 9) };
    let images: Vec<Image> = images(pages).into_iter().filter(|image| image.name != "zero").collect();
    costs(&images, rounds);
    space(&images);
    capacity(&images);
}

struct Disk(Arc<File>);

impl SwapFile for Disk {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn discard(&self, offset: u64, len: u64) {
        let _ = fallocate(&*self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len);
    }
}

/// An engine, and its swap file from outside.
fn engine(config: Config) -> (Zswap, Arc<File>) {
    let directory = env::var("TMPDIR").unwrap_or("/var/tmp".into());
    let path = format!("{directory}/uzswap.bench.{}", std::process::id());
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).expect("a swap file");
    fs::remove_file(path).expect("it was just made");
    let file = Arc::new(file);
    (Zswap::new(config, Some(Box::new(Disk(file.clone()))), HeapSource), file)
}

fn load(zswap: &Zswap, slots: &[Slot]) {
    let mut page = [0; PAGE_SIZE];
    for &slot in slots {
        zswap.load(slot, &mut page).expect("as stored");
        black_box(&page);
    }
}

fn free(zswap: &Zswap, slots: impl IntoIterator<Item = Slot>) {
    slots.into_iter().for_each(|slot| zswap.invalidate(slot));
}

fn forms(config: &Config) -> [(Zswap, Arc<File>); 2] {
    Writeback::ALL.map(|writeback| engine(Config { writeback, ..config.clone() }))
}

fn costs(images: &[Image], rounds: usize) {
    const COLD: usize = 256;
    println!(
        "microseconds a page; store: into the pool; write: from there to disk; refused: not taken by the pool, but written"
    );
    println!("at once, as it is; load: from the page cache; cold: at random, from the disk");
    let names = ["bytes", "store", "write", "+ sync", "refused", "load", "cold"];
    println!("{:<34}{}", "", names.map(|name| format!("{name:>9}")).concat());
    for compressor in [Compressor::Lz4, Compressor::Zstd] {
        for image in images {
            let pages = &image.pages;
            let engines = forms(&Config { compressor, ..Config::default() });
            let mut times: [[Vec<Duration>; 6]; 2] = Default::default();
            let mut bytes = [0; 2];
            for round in 0..=rounds {
                for (form, (zswap, file)) in engines.iter().enumerate() {
                    let (stored, mut slots) = time(|| store(zswap, pages));
                    let write = time(|| zswap.shrink(u64::MAX)).0;
                    let sync = write + time(|| file.sync_data().expect("synced")).0;
                    bytes[form] = zswap.counters().swap_current / pages.len() as u64;
                    let loaded = time(|| load(zswap, &slots)).0;
                    fadvise(&**file, 0, None, Advice::DontNeed).expect("dropped from the cache");
                    shuffle(&mut slots, 1);
                    let cold = time(|| load(zswap, &slots[..COLD])).0;
                    free(zswap, slots);
                    zswap.set_max_pool_bytes(0);
                    let (refused, slots) = time(|| store(zswap, pages));
                    free(zswap, slots);
                    zswap.set_max_pool_bytes(u64::MAX);
                    if round > 0 {
                        let all = [stored, write, sync, refused, loaded, cold];
                        times[form].iter_mut().zip(all).for_each(|(times, time)| times.push(time));
                    }
                }
            }
            for (form, times) in times.into_iter().enumerate() {
                print!("{:<8}{:<14}{:<12}{:>9}", compressor.name(), image.name, name(form), bytes[form]);
                let counts = [pages.len(), pages.len(), pages.len(), pages.len(), pages.len(), COLD];
                times.into_iter().zip(counts).for_each(|(times, pages)| print!("{:>9.2}", median(times, pages)));
                println!();
            }
        }
    }
}

fn name(form: usize) -> String {
    format!("{:?}", Writeback::ALL[form]).to_lowercase()
}

/// Bytes in use, and bytes that the file takes on the disk, for each page that is still there.
fn space(images: &[Image]) {
    println!(
        "\nbytes on disk for each page left (of the file), of those stored, and in the end of 40 rounds that replace a quarter"
    );
    println!("{:<34}{:>15}{:>15}{:>15}{:>15}{:>15}", "", "all", "1/2", "1/10", "1/100", "rounds");
    for image in images {
        for (form, (zswap, file)) in forms(&Config::default()).into_iter().enumerate() {
            print!("{:<22}{:<12}", image.name, name(form));
            let print = |left: usize| {
                file.sync_data().expect("synced");
                let taken = file.metadata().expect("a file").blocks() * 512;
                let each = |bytes: u64| bytes / left as u64;
                print!("{:>15}", format!("{} ({})", each(zswap.counters().swap_current), each(taken)));
            };
            let pages: Vec<Page> = (0..4).flat_map(|_| image.pages.iter().copied()).collect();
            let mut slots = store(&zswap, &pages);
            zswap.shrink(u64::MAX);
            shuffle(&mut slots, 1);
            for share in [1, 2, 10, 100] {
                free(&zswap, slots.drain(pages.len() / share..));
                print(slots.len());
            }
            for _ in 0..40 {
                slots.extend(store(&zswap, &image.pages));
                zswap.shrink(u64::MAX);
                shuffle(&mut slots, 1);
                let keep = slots.len().min(3 * image.pages.len());
                free(&zswap, slots.drain(keep..));
            }
            print(slots.len());
            println!();
        }
    }
}

/// Pages in a file of 16 MiB: freshly filled, and after many rounds in each of which a tenth is freed at random and the file
/// filled again.
fn capacity(images: &[Image]) {
    const LIMIT: u64 = 16 << 20;
    println!(
        "\npages of program memory that a full swap file of 4096 pages holds, and after 100 rounds of freeing a tenth"
    );
    for image in images {
        let config = Config { max_pool_bytes: 1 << 20, swap_limit_bytes: Some(LIMIT), ..Config::default() };
        for (form, (zswap, _file)) in forms(&config).into_iter().enumerate() {
            let mut slots = Vec::new();
            let mut pages = image.pages.iter().cycle();
            let mut fill = |slots: &mut Vec<Slot>| {
                while let Ok(slot) = zswap.swap_out(pages.next().expect("endless"), Home::ROOT) {
                    slots.push(slot);
                    if zswap.shrink_needed().is_some() {
                        zswap.shrink_until_accepting();
                    }
                }
                zswap.counters().swapped_pages
            };
            let fresh = fill(&mut slots);
            let mut settled = 0;
            for _ in 0..100 {
                shuffle(&mut slots, 1);
                free(&zswap, slots.drain(slots.len() / 10 * 9..));
                settled = fill(&mut slots);
            }
            println!("{:<22}{:<12}{fresh:>8}{settled:>8}", image.name, name(form));
        }
    }
}

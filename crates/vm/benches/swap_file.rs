//! Reads of a swap file that the disk has to be asked for: `cargo bench -p uzswap-vm --bench swap_file`.
//!
//! Prints two tables: what an entry takes of a folio whose entries are scattered over the file, read all at once by io_uring
//! and one after another; and how long a read takes alone, and beside a writer that writes back at a steady rate and as fast as can be.
//! The file, of 512 MiB, is in /var/tmp, or in the directory named by TMPDIR.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use uzswap_engine::ReadAt;
use uzswap_vm::sys::uring;

const SIZE: u64 = 512 << 20;
/// Bytes of an entry, about.
const ENTRY: usize = 1500;
const CLUSTER: usize = 1 << 20;
const ROUNDS: usize = 9;

fn main() {
    let file = swap_file();
    folios(&file);
    beside_a_writer(&file);
}

fn swap_file() -> File {
    let directory = std::env::var("TMPDIR").unwrap_or("/var/tmp".into());
    let path = format!("{directory}/uzswap.bench.{}", std::process::id());
    let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a swap file");
    std::fs::remove_file(path).expect("it was just made");
    let cluster: Vec<u8> = (0..CLUSTER).map(|i| ((i * i) >> 7) as u8).collect();
    (0..SIZE).step_by(CLUSTER).for_each(|at| file.write_all_at(&cluster, at).expect("room on disk"));
    file.sync_all().expect("a disk");
    file
}

/// None of the file is in memory any more.
fn forget(file: &File) {
    fadvise(file, 0, None, Advice::DontNeed).expect("advice");
}

fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 20) % below
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn folios(file: &File) {
    uring::probe().expect("io_uring is permitted");
    // Its neighbours are not read with an entry: they would be somebody else's.
    fadvise(file, 0, None, Advice::Random).expect("advice");
    println!("microseconds an entry {:>14}{:>14}   ratio", "one by one", "at once");
    let mut state = 1;
    for pages in [4, 16, 32] {
        let (mut single, mut at_once) = (Vec::new(), Vec::new());
        for round in 0..2 * ROUNDS {
            let mut bytes = vec![0; pages * ENTRY];
            let buffers = bytes.chunks_exact_mut(ENTRY);
            let mut reads: Vec<ReadAt<'_>> =
                buffers.map(|buffer| ReadAt { offset: random(&mut state, SIZE - ENTRY as u64), buffer }).collect();
            forget(file);
            let start = Instant::now();
            if round % 2 == 0 {
                reads.iter_mut().for_each(|read| file.read_exact_at(read.buffer, read.offset).expect("it is there"));
                single.push(start.elapsed());
            } else {
                uring::read_all(file, &mut reads).expect("they are there");
                at_once.push(start.elapsed());
            }
        }
        let [single, at_once] =
            [&mut single, &mut at_once].map(|times| median(times).as_secs_f64() * 1e6 / pages as f64);
        println!("{pages:>4} scattered {single:>21.1}{at_once:>14.1}{:>8.2}", at_once / single);
    }
}

fn beside_a_writer(file: &File) {
    println!("\nmicroseconds a read {:>16}{:>8}{:>8}", "median", "99 %", "99.9 %");
    for (name, clusters_a_second) in
        [("alone", 0.0), ("200 MiB/s are written", 200.0), ("all that can be", f64::INFINITY)]
    {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| write_back(file, clusters_a_second, &stop));
            let mut times = read_for(file, Duration::from_secs(3));
            stop.store(true, Relaxed);
            times.sort_unstable();
            let part = |part: f64| times[(times.len() as f64 * part) as usize].as_secs_f64() * 1e6;
            println!("{name:<25}{:>11.0}{:>8.0}{:>8.0}", part(0.5), part(0.99), part(0.999));
        });
        file.sync_all().expect("a disk");
    }
}

/// Writes clusters to the second half.
fn write_back(file: &File, clusters_a_second: f64, stop: &AtomicBool) {
    let (cluster, start) = (vec![7; CLUSTER], Instant::now());
    let mut written = 0;
    while !stop.load(Relaxed) && clusters_a_second > 0.0 {
        file.write_all_at(&cluster, SIZE / 2 + written * CLUSTER as u64 % (SIZE / 2)).expect("room on disk");
        written += 1;
        while !stop.load(Relaxed) && written as f64 / clusters_a_second > start.elapsed().as_secs_f64() {
            std::thread::sleep(Duration::from_micros(500));
        }
    }
}

/// How long reads of the first half take, none of which is in memory.
fn read_for(file: &File, time: Duration) -> Vec<Duration> {
    forget(file);
    let (mut times, mut state, start) = (Vec::new(), 3, Instant::now());
    let mut buffer = [0; ENTRY];
    while start.elapsed() < time {
        let page = random(&mut state, SIZE / 2 / 4096) * 4096;
        let begun = Instant::now();
        file.read_exact_at(&mut buffer, page).expect("it is there");
        times.push(begun.elapsed());
        fadvise(file, page, std::num::NonZero::new(4096), Advice::DontNeed).expect("advice");
    }
    times
}

//! Pages of real memory for the benchmarks, and how times are told. Needs `python3`, whose library is the text and whose heap
//! is the heap.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use uzswap_engine::{PAGE_SIZE, Page};

pub struct Image {
    pub name: &'static str,
    pub pages: Vec<Page>,
}

pub fn images(pages: usize) -> Vec<Image> {
    let mut random = 1u64;
    let mut noise = vec![[0; PAGE_SIZE]; pages];
    noise.as_flattened_mut().as_chunks_mut::<8>().0.iter_mut().for_each(|word| {
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        *word = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb).to_le_bytes();
    });
    let program = fs::read(std::env::current_exe().expect("this program has a file")).expect("it can be read");
    vec![
        Image { name: "text", pages: cut(&text(pages * PAGE_SIZE), pages) },
        Image { name: "python heap", pages: python_heap(pages) },
        Image { name: "object file", pages: cut(&program, pages) },
        Image { name: "zero", pages: vec![[0; PAGE_SIZE]; pages] },
        Image { name: "random", pages: noise },
    ]
}

/// Neighbouring pages of an image.
pub const BLOCK: usize = 16;

/// Cuts `bytes` into blocks of neighbouring pages, evenly over their length, or over and over if there are too few.
fn cut(bytes: &[u8], pages: usize) -> Vec<Page> {
    let (whole, _) = bytes.as_chunks::<PAGE_SIZE>();
    let blocks = whole.len() / BLOCK;
    let step = (blocks / (pages / BLOCK)).max(1);
    (0..pages / BLOCK).flat_map(|i| whole[i * step % blocks * BLOCK..][..BLOCK].iter().copied()).collect()
}

/// The sources of Python's library.
fn text(bytes: usize) -> Vec<u8> {
    let output = Command::new("python3").args(["-c", "import os; print(os.path.dirname(os.__file__))"]).output();
    let output = output.expect("python3 is installed");
    let directory = String::from_utf8(output.stdout).expect("a path in UTF-8");
    let mut files: Vec<_> = (fs::read_dir(directory.trim()).expect("Python's library can be read"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "py"))
        .collect();
    files.sort();
    let mut text = Vec::new();
    for file in files.iter().cycle() {
        fs::File::open(file).and_then(|mut file| file.read_to_end(&mut text)).expect("a source can be read");
        if text.len() >= bytes {
            break;
        }
    }
    text
}

/// Pages of a Python process that holds dictionaries, lists, strings and numbers.
fn python_heap(pages: usize) -> Vec<Page> {
    const SCRIPT: &str = "import random, sys\n\
        random.seed(1)\n\
        words = open(random.__file__).read().split()\n\
        keep = [{'name': ' '.join(random.choices(words, k=4)), 'id': i, 'value': random.random(),\n\
                 'tags': random.sample(words, 3)} for i in range(int(sys.argv[1]))]\n\
        print('ready', flush=True)\n\
        sys.stdin.read()";
    let mut python = (Command::new("python3").args(["-c", SCRIPT, &(pages * 8).to_string()]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is installed");
    let mut ready = [0; 5];
    python.stdout.as_mut().expect("a pipe").read_exact(&mut ready).expect("Python runs");
    let (id, mut heap) = (python.id(), Vec::new());
    let memory = fs::File::open(format!("/proc/{id}/mem")).expect("our child's memory");
    for line in fs::read_to_string(format!("/proc/{id}/maps")).expect("our child's mappings").lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        if fields[1] != "rw-p" || fields[4] != "0" || fields.get(5).is_some_and(|name| *name != "[heap]") {
            continue;
        }
        let (start, end) = fields[0].split_once('-').expect("a range");
        let address = |text| u64::from_str_radix(text, 16).expect("an address");
        let mut bytes = vec![0; (address(end) - address(start)) as usize];
        if memory.read_exact_at(&mut bytes, address(start)).is_ok() {
            heap.extend(bytes);
        }
    }
    python.kill().and_then(|()| python.wait()).expect("our child");
    cut(&heap, pages)
}

pub fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed(), result)
}

/// The median, in microseconds a page.
pub fn median(mut times: Vec<Duration>, pages: usize) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6 / pages as f64
}

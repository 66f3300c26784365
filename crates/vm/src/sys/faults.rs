//! How much memory all programs of the machine can have touched anew, from the page faults that the kernel counts.
//!
//! Memory becomes resident by a fault, of a page or of a huge page, or by the kernel's gathering pages into a huge one.
//! Whoever has many processes to measure can tell by one file that there is nothing new in any of them.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use crate::PAGE;

const HUGE: u64 = 2 << 20;

/// Counts the bytes that can have been touched.
#[derive(Debug)]
pub struct FaultMeter {
    counters: File,
    text: Vec<u8>,
    /// What a fault that is not of a whole huge page can bring, at most.
    most: u64,
}

impl FaultMeter {
    /// Opens the kernel's counters.
    pub fn open() -> io::Result<FaultMeter> {
        let most = if folios_between_are_never_used() { PAGE } else { HUGE };
        Ok(FaultMeter { counters: File::open("/proc/vmstat")?, text: vec![0; 32 << 10], most })
    }

    /// Bytes that can have been touched since the system was started; `None` if that cannot be told.
    pub fn touched(&mut self) -> Option<u64> {
        let len = self.counters.read_at(&mut self.text, 0).ok()?;
        touched(str::from_utf8(&self.text[..len]).ok()?, self.most)
    }
}

fn touched(counters: &str, most: u64) -> Option<u64> {
    let (mut faults, mut huge) = (None, 0);
    for (name, count) in counters.split('\n').filter_map(|line| line.split_once(' ')) {
        match name {
            "pgfault" => faults = count.parse::<u64>().ok(),
            "thp_fault_alloc" | "thp_collapse_alloc" => huge += count.parse::<u64>().unwrap_or(0),
            _ => (),
        }
    }
    Some(faults?.wrapping_mul(most).wrapping_add(huge.wrapping_mul(HUGE)))
}

/// Whether no fault is answered with more than a page and less than 2 MiB.
fn folios_between_are_never_used() -> bool {
    let Ok(sizes) = fs::read_dir("/sys/kernel/mm/transparent_hugepage") else { return true };
    let sizes = sizes.flatten().map(|entry| entry.path());
    let between = sizes.filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with("hugepages-") && name != "hugepages-2048kB"
    });
    between
        .into_iter()
        .all(|path| fs::read_to_string(path.join("enabled")).map_or(true, |text| text.contains("[never]")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_and_huge_pages_are_counted() {
        let counters = "nr_free_pages 7\npgfault 100\npgmajfault 5\nthp_fault_alloc 2\nthp_collapse_alloc 1\n";
        assert_eq!(touched(counters, PAGE), Some(100 * PAGE + 3 * HUGE));
        assert_eq!(touched("pgfault 1\n", PAGE), Some(PAGE));
        assert_eq!((touched("", PAGE), touched("pgfault x\n", PAGE)), (None, None));
    }

    #[test]
    fn touching_memory_shows() {
        let mut meter = FaultMeter::open().expect("/proc/vmstat");
        let before = meter.touched().expect("a count");
        let memory = std::hint::black_box(vec![1u8; 8 << 20]);
        assert!(meter.touched().expect("a count") - before >= memory.len() as u64);
    }
}

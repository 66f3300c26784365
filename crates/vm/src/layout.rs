//! Which mappings of a process are managed.
//!
//! Managed is private anonymous memory that can be read and written, executed or not (a move wants both ends to have the
//! same rights; the worker gives the staging area those of what it moves). Left alone: files, shared memory, the stack that grows by itself,
//! reserves without rights, guard pages, what cannot be written, and small mappings as long as they are few.

use std::fs::File;
use std::io::{self, Read};

use crate::range::{Range, RangeSet};

/// Mappings smaller than this are left alone, unless they continue a managed one, or are more than [`MOST_SMALL`] together.
const SMALLEST: u64 = 64 << 10;

/// What the small mappings of a process that are not managed may have together, in bytes.
const MOST_SMALL: u64 = 1 << 20;

/// How many small mappings are registered at once: reclaim cannot look at the address space meanwhile.
const SMALL_AT_ONCE: usize = 1024;

/// The text of `/proc/PID/maps` is this long at most for a process with few mappings: three thousand, if it is short for each.
pub const FEW: u64 = 256 << 10;

/// All mappings of process `pid`, in order.
pub fn all(pid: i32) -> io::Result<Vec<Range>> {
    Ok(read(pid)?.lines().filter_map(|line| addresses(line.split_ascii_whitespace().next()?)).collect())
}

/// The mappings of process `pid` that can be managed, in order.
pub fn manageable(pid: i32) -> io::Result<Vec<Range>> {
    Ok(parse(&read(pid)?))
}

/// As [`manageable`], with the length of the text that tells them. `None` if that is longer than `limit`.
pub fn manageable_within(pid: i32, limit: u64) -> io::Result<Option<(Vec<Range>, u64)>> {
    let maps = read_up_to(pid, limit.saturating_add(1))?;
    let len = maps.len() as u64;
    Ok((len <= limit).then(|| (parse(&maps), len)))
}

/// Selects those of `missing`, which is not registered, that are to be registered now: all but small ones, and of these those that continue
/// what is registered; where the small ones are many, some of them at a time.
pub(crate) fn worth_watching(missing: Vec<Range>, registered: &RangeSet) -> Vec<Range> {
    let is_left_alone = |part: &Range| {
        let continues = registered.contains(part.start.wrapping_sub(1)) || registered.contains(part.end);
        part.len() < SMALLEST && !continues
    };
    let (left_alone, mut worth): (Vec<Range>, Vec<Range>) = missing.into_iter().partition(is_left_alone);
    if left_alone.iter().map(|part| part.len()).sum::<u64>() > MOST_SMALL {
        worth.extend(left_alone.into_iter().take(SMALL_AT_ONCE));
    }
    worth
}

fn read(pid: i32) -> io::Result<String> {
    read_up_to(pid, u64::MAX)
}

fn read_up_to(pid: i32, limit: u64) -> io::Result<String> {
    let mut maps = Vec::new();
    File::open(format!("/proc/{pid}/maps"))?.take(limit).read_to_end(&mut maps)?;
    // The limit may cut a name.
    has_memory(String::from_utf8_lossy(&maps).into_owned())
}

/// Refuses the empty text that the kernel gives for a process that has ended and was not waited for: its memory may live on in
/// another process, with all its mappings.
pub(crate) fn has_memory(maps: String) -> io::Result<String> {
    if maps.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(maps) }
}

/// The manageable mappings in the text of `/proc/PID/maps`.
fn parse(maps: &str) -> Vec<Range> {
    maps.lines().filter_map(parse_line).collect()
}

fn addresses(field: &str) -> Option<Range> {
    let (start, end) = field.split_once('-')?;
    Some(Range::new(u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

fn parse_line(line: &str) -> Option<Range> {
    let mut fields = line.split_ascii_whitespace();
    let range = addresses(fields.next()?)?;
    let (rights, _offset, _device, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let name = fields.next().unwrap_or("");
    let anonymous = inode == "0" && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:"));
    (anonymous && ["rw-p", "rwxp"].contains(&rights)).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_anonymous_writable_memory_is_managed() {
        let maps = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
55d0c1000000-55d0c1021000 rw-p 00021000 fe:00 1234                       /usr/bin/prog
7f0000000000-7f0000021000 rw-p 00000000 00:00 0
7f0000021000-7f0004000000 ---p 00000000 00:00 0
7f0010000000-7f0010021000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
7f0020000000-7f0020021000 rwxp 00000000 00:00 0
7f0028000000-7f0028021000 r-xp 00000000 00:00 0
7f0030000000-7f0030021000 rw-p 00000000 00:00 0                          [anon:arena]
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
7ffd00031000-7ffd00032000 r--p 00000000 00:00 0                          [vvar]
";
        let starts: Vec<u64> = parse(maps).into_iter().map(|range| range.start).collect();
        assert_eq!(starts, [0x55d0_c000_0000, 0x7f00_0000_0000, 0x7f00_2000_0000, 0x7f00_3000_0000]);
    }

    #[test]
    fn small_mappings_are_watched_where_they_are_many() {
        const PAGE: u64 = 4096;
        let small = |count: u64| -> Vec<Range> { (1..=count).map(|i| Range::sized(i * 2 * PAGE, PAGE)).collect() };
        let large = Range::sized(1 << 40, SMALLEST);
        let watched = |missing: &[Range], registered: &RangeSet| worth_watching(missing.to_vec(), registered);
        let mut registered = RangeSet::default();
        assert_eq!(watched(&[small(MOST_SMALL / PAGE), vec![large]].concat(), &registered), [large]);
        let many = small(MOST_SMALL / PAGE + 1);
        assert_eq!(watched(&many, &registered), many);
        assert_eq!(watched(&small(1 << 16), &registered), small(SMALL_AT_ONCE as u64));
        // What continues a watched mapping is watched, on both sides of it.
        registered.insert(Range::sized(5 * PAGE, PAGE));
        assert_eq!(watched(&small(4), &registered), [Range::sized(4 * PAGE, PAGE), Range::sized(6 * PAGE, PAGE)]);
    }

    #[test]
    fn many_mappings_are_not_read_to_the_end() {
        let own = std::process::id() as i32;
        let (all, len) = manageable_within(own, u64::MAX).unwrap().unwrap();
        assert!(!all.is_empty() && len > 1000);
        assert!(manageable_within(own, len / 2).unwrap().is_none());
    }

    #[test]
    fn a_process_that_was_not_waited_for_has_no_known_mappings() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        let is_zombie = || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
        while !is_zombie() {
            std::thread::yield_now();
        }
        assert!(all(pid).is_err() && manageable(pid).is_err());
        child.wait().unwrap();
        assert!(!all(std::process::id() as i32).unwrap().is_empty());
    }
}

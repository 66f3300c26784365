//! Which mappings of a process are managed.
//!
//! Managed is private anonymous memory that can be read and written but not executed (a move wants both ends to have the
//! same rights, and the staging area is read-write). Left alone: files, shared memory, the stack that grows by itself,
//! reserves without rights, guard pages, code from a compiler at run time, and what is too small to matter.

use std::fs::File;
use std::io::{self, Read};

use crate::range::Range;

/// Mappings smaller than this are left alone, unless they continue a managed one, or are more than [`MOST_SMALL`] together.
pub const SMALLEST: u64 = 64 << 10;

/// What the small mappings of a process that are not managed may have together, in bytes.
pub const MOST_SMALL: u64 = 1 << 20;

/// How many small mappings are registered at once: reclaim cannot look at the address space meanwhile.
pub const SMALL_AT_ONCE: usize = 1024;

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
    if !anonymous || rights != "rw-p" {
        return None;
    }
    Some(range)
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
7f0030000000-7f0030021000 rw-p 00000000 00:00 0                          [anon:arena]
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
7ffd00031000-7ffd00032000 r--p 00000000 00:00 0                          [vvar]
";
        let starts: Vec<u64> = parse(maps).into_iter().map(|range| range.start).collect();
        assert_eq!(starts, [0x55d0_c000_0000, 0x7f00_0000_0000, 0x7f00_3000_0000]);
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

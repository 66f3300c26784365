//! What the kernel does with mappings by their flags (`VmFlags` of `/proc/PID/smaps`). Expensive: the kernel looks at every
//! page that is present.

use std::io;

use crate::layout::has_memory;
use crate::range::{Range, RangeSet};

/// The mappings that a fork does not copy to the child as they are.
#[derive(Debug, Default)]
pub struct NotInherited {
    /// The child has them, empty (`MADV_WIPEONFORK`).
    pub wiped: RangeSet,
    /// The child does not have them (`MADV_DONTFORK`).
    pub left_out: RangeSet,
}

/// Returns the mappings of process `pid` that its next fork will not copy as they are.
pub fn not_inherited(pid: i32) -> io::Result<NotInherited> {
    let smaps = read(pid)?;
    Ok(NotInherited { wiped: parse(&smaps, "wf"), left_out: parse(&smaps, "dc") })
}

/// The mappings of process `pid` that cannot be unmapped or replaced (`mseal`). Kernels from 6.10 to 6.13 do not show them.
pub fn sealed(pid: i32) -> io::Result<RangeSet> {
    Ok(parse(&read(pid)?, "sl"))
}

fn read(pid: i32) -> io::Result<String> {
    has_memory(std::fs::read_to_string(format!("/proc/{pid}/smaps"))?)
}

fn parse(smaps: &str, wanted: &str) -> RangeSet {
    let (mut found, mut mapping) = (RangeSet::default(), Range::new(0, 0));
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_ascii_whitespace().any(|flag| flag == wanted) {
                found.insert(mapping);
            }
        } else if let Some((start, end)) = line.split_once(' ').and_then(|(range, _)| range.split_once('-'))
            && let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            mapping = Range::new(start, end);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_belong_to_the_mapping_above_them() {
        let smaps = "\
7f0000000000-7f0000002000 rw-p 00000000 00:00 0
Size:                  8 kB
VmFlags: rd wr mr mw me ac wf sd
7f0000002000-7f0000004000 rw-p 00000000 00:00 0                          [anon:a-b wf]
Size:                  8 kB
VmFlags: rd wr mr mw me ac sd
";
        assert_eq!(parse(smaps, "wf").iter().collect::<Vec<_>>(), [Range::new(0x7f00_0000_0000, 0x7f00_0000_2000)]);
        assert!(parse(smaps, "sl").is_empty());
    }
}

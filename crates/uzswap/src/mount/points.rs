//! Where the tree is mounted: what is there now, and taking away what is ours and nothing else.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;
use uzswap_manager::control_fs::FS_TYPE;

/// A mounted file system, by its number as `/proc/self/mountinfo` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device(pub String);

impl Device {
    /// Our file system at `point`, if that is what is to be seen there.
    pub fn at(point: &Path) -> Option<Device> {
        let mounts = fs::read("/proc/self/mountinfo").ok()?;
        ours_at(&mounts, point)
    }
}

/// The directory that the user has named, if the tree can be mounted there.
pub fn mount_point(named: &Path) -> Result<PathBuf, String> {
    let shown = named.display();
    let found = fs::canonicalize(named).and_then(|path| Ok((fs::metadata(&path)?, path)));
    let (found, path) = found.map_err(|error| match error.kind() {
        ErrorKind::NotFound => format!("{shown}: does not exist; create it: mkdir {shown}"),
        _ if error.raw_os_error() == Some(libc::ENOTCONN) => {
            format!("{shown}: is a mount whose server is dead; take it away first: umount {shown}")
        }
        _ => format!("{shown}: {error}; name another directory"),
    })?;
    if !found.is_dir() {
        return Err(format!("{shown}: is not a directory; name one"));
    }
    if Device::at(&path).is_some() {
        return Err(format!("{shown}: a control tree is mounted there already; take it away first: umount {shown}"));
    }
    Ok(path)
}

/// Unmounts `device` from `point`, if it is still to be seen there. Whoever is in it keeps what he has until he leaves.
pub fn unmount(point: &Path, device: &Device) {
    if Device::at(point).as_ref() == Some(device) {
        // Somebody else may have been faster.
        let _ = rustix::mount::unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
}

/// The number of what is mounted last at `point`, if it is of our kind.
fn ours_at(mounts: &[u8], point: &Path) -> Option<Device> {
    let point = point.as_os_str().as_encoded_bytes();
    // ID PARENT MAJOR:MINOR ROOT POINT OPTIONS FIELD* - TYPE SOURCE OPTIONS
    let last = mounts
        .split(|&byte| byte == b'\n')
        .rfind(|line| line.split(|&byte| byte == b' ').nth(4).is_some_and(|escaped| unescape(escaped) == point))?;
    let mut fields = last.split(|&byte| byte == b' ');
    let device = fields.nth(2)?;
    fields.find(|&field| field == b"-")?;
    let is_ours = fields.next()? == FS_TYPE.as_bytes();
    is_ours.then(|| Device(String::from_utf8_lossy(device).into_owned()))
}

/// Spaces and the like are written as a backslash and three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| str::from_utf8(digits).ok());
        let escaped = digits.filter(|_| byte == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_last_is_what_is_seen() {
        let line = |device: &str, point: &str, kind: &str| {
            format!("29 1 {device} / {point} rw,nosuid shared:1 master:2 - {kind} uzswap rw\n")
        };
        let mounts =
            [line("0:45", "/a\\040b", FS_TYPE), line("0:46", "/c", FS_TYPE), line("0:47", "/c", "tmpfs")].concat();
        let found = |point: &str| ours_at(mounts.as_bytes(), Path::new(point));
        assert_eq!(found("/a b"), Some(Device("0:45".to_owned())));
        assert_eq!((found("/c"), found("/a"), found("")), (None, None, None));
        assert_eq!(ours_at(b"broken\n1 2 3 4 /x\n", Path::new("/x")), None);
    }
}

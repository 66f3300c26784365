//! Finding the program to run, and telling whether the agent can enter it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::RunError;

/// Finds `name` as the shell would: with a slash it is a path, without it is looked for in `PATH`.
pub fn find(name: &OsStr) -> Result<PathBuf, RunError> {
    let shown = name.to_string_lossy();
    let mut found_not_executable = false;
    let candidates: Vec<PathBuf> = if name.as_bytes().contains(&b'/') {
        vec![PathBuf::from(name)]
    } else {
        let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin:/bin"));
        std::env::split_paths(&path).map(|directory| directory.join(name)).collect()
    };
    for candidate in candidates {
        match candidate.metadata() {
            Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => return Ok(candidate),
            Ok(_) => found_not_executable = true,
            Err(_) => {}
        }
    }
    Err(if found_not_executable {
        RunError { message: format!("{shown}: not an executable file; check its permissions"), exit_status: 126 }
    } else {
        RunError { message: format!("{shown}: no such program; check the name and PATH"), exit_status: 127 }
    })
}

/// Why the agent cannot be preloaded into a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// No dynamic linker, no preloading.
    Static,
    /// The dynamic linker ignores preloading where a program runs with rights of another.
    Privileged,
    /// Not for this processor.
    Foreign,
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Obstacle::Static => "statically linked",
            Obstacle::Privileged => "setuid or setgid",
            Obstacle::Foreign => "built for another processor",
        })
    }
}

/// Tells why the agent could not enter the program at `path`; for a script, the interpreter decides.
pub fn obstacle(path: &Path) -> Option<Obstacle> {
    obstacle_within(path, 4)
}

fn obstacle_within(path: &Path, scripts_left: u32) -> Option<Obstacle> {
    let metadata = path.metadata().ok()?;
    let privileged = (metadata.mode() & libc::S_ISUID != 0 && metadata.uid() != current_uid())
        || metadata.mode() & (libc::S_ISGID | 0o010) == libc::S_ISGID | 0o010;
    if privileged {
        return Some(Obstacle::Privileged);
    }
    // The headers of a program stand at its beginning.
    let mut head = Vec::new();
    File::open(path).ok()?.take(64 << 10).read_to_end(&mut head).ok()?;
    if let Some(script) = head.strip_prefix(b"#!") {
        let line = script.split(|&byte| byte == b'\n').next()?;
        let interpreter = line.split(|byte| byte.is_ascii_whitespace()).find(|word| !word.is_empty())?;
        let interpreter = PathBuf::from(OsString::from_vec(interpreter.to_vec()));
        return if scripts_left == 0 { None } else { obstacle_within(&interpreter, scripts_left - 1) };
    }
    elf_obstacle(&head)
}

fn current_uid() -> u32 {
    Path::new("/proc/self").metadata().map_or(u32::MAX, |metadata| metadata.uid())
}

/// Reads the program headers of a 64-bit little-endian ELF file: without an interpreter it is static.
fn elf_obstacle(head: &[u8]) -> Option<Obstacle> {
    const PT_INTERP: u32 = 3;
    const X86_64: u16 = 62;
    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    let half = |at: usize| head.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    if head.get(4) != Some(&2) || half(18) != Some(X86_64) {
        return Some(Obstacle::Foreign);
    }
    let table = usize::try_from(u64::from_le_bytes(head.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (usize::from(half(54)?), usize::from(half(56)?));
    let is_interpreter = |i: usize| {
        let at = table.checked_add(i * size)?;
        Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?) == PT_INTERP)
    };
    if (0..count).any(|i| is_interpreter(i).unwrap_or(false)) { None } else { Some(Obstacle::Static) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_the_shell_finds_them() {
        assert!(find(OsStr::new("sh")).is_ok());
        assert!(find(OsStr::new("/bin/sh")).is_ok());
        assert_eq!(find(OsStr::new("no-such-program-here")).unwrap_err().exit_status, 127);
        assert_eq!(find(OsStr::new("/etc/passwd")).unwrap_err().exit_status, 126);
        assert_eq!(find(OsStr::new("/etc")).unwrap_err().exit_status, 126);
    }

    #[test]
    fn a_dynamic_program_can_be_entered() {
        assert_eq!(obstacle(&find(OsStr::new("sh")).unwrap()), None);
    }

    #[test]
    fn without_an_interpreter_a_program_is_static() {
        let mut elf = vec![0; 64 + 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[18] = 62;
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = 1;
        elf[64] = 1;
        assert_eq!(elf_obstacle(&elf), Some(Obstacle::Static));
        elf[64] = 3;
        assert_eq!(elf_obstacle(&elf), None);
        elf[18] = 40;
        assert_eq!(elf_obstacle(&elf), Some(Obstacle::Foreign));
    }
}

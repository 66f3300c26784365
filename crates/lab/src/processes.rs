//! What the system tells of processes and of memory.

use std::fs;

use anyhow::{Context, Result};

/// The manager of a job, by the process that started it.
pub(crate) fn manager_of(front: u32) -> Result<u32> {
    let children = fs::read_to_string(format!("/proc/{front}/task/{front}/children"))?;
    let is_manager =
        |id: &u32| fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|name| name == "uzswap-manager\n");
    let mut ids = children.split_ascii_whitespace().filter_map(|id| id.parse().ok());
    ids.find(is_manager).context("the manager is not to be found")
}

/// Bytes of anonymous and shared memory of a process.
pub(crate) fn resident(process: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    Ok(kibibytes(&status, "RssAnon")? + kibibytes(&status, "RssShmem")?)
}

/// The value of the line `NAME: VALUE kB`, in bytes.
pub(crate) fn kibibytes(text: &str, name: &str) -> Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(number.with_context(|| format!("the kernel does not tell {name}"))? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_name() {
        let text = "Zswap:              12 kB\nZswapped:           34 kB\n";
        assert_eq!((kibibytes(text, "Zswap").unwrap(), kibibytes(text, "Zswapped").unwrap()), (12 << 10, 34 << 10));
        assert!(kibibytes(text, "Zswa").is_err());
    }
}

//! Messages on standard error, which neither stop nor end the process that writes them.
//!
//! 1. A write that fails (full disk, pipe without a reader) is ignored.
//! 2. A standard error that takes nothing (full pipe, stopped terminal) delays one message by one second. Later messages are
//!    dropped until it takes something again.
//! 3. A message is one line. Control characters, which come with names that programs choose, are escaped.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The longest time that a message may wait until standard error takes it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest message, in bytes. A pipe that is ready for writing takes as much at once.
const LONGEST: usize = 4096;

/// Standard error took nothing when it was last tried.
static BLOCKED: AtomicBool = AtomicBool::new(false);

/// Writes a line to standard error. Never panics; waits at most one second.
pub fn log(text: &str) {
    let mut line = one_line(text);
    let end = (0..LONGEST.min(line.len() + 1)).rev().find(|&end| line.is_char_boundary(end)).unwrap_or(0);
    line.truncate(end);
    line.push('\n');
    let patience = if BLOCKED.load(Relaxed) { Duration::ZERO } else { PATIENCE };
    let ready = is_ready(patience);
    BLOCKED.store(!ready, Relaxed);
    if ready {
        // There is no place left to report an error to.
        let _ = rustix::io::write(io::stderr(), line.as_bytes());
    }
}

/// Returns `text` with its control characters escaped.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

/// Waits until standard error takes a write without blocking, or reports an error.
fn is_ready(patience: Duration) -> bool {
    let patience = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
    let stderr = io::stderr();
    let mut descriptors = [PollFd::new(&stderr, PollFlags::OUT)];
    poll(&mut descriptors, Some(&patience)).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_forge_a_line() {
        assert_eq!(one_line("killed a\nuzswap: \u{1b}[31m\u{85}b"), "killed a\\nuzswap: \\u{1b}[31m\\u{85}b");
        assert_eq!(one_line("a name: é ☃"), "a name: é ☃");
    }
}

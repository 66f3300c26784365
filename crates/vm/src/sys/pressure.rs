//! Pressure stall information: being told when tasks wait for memory.
//!
//! # Safety
//! One pollfd of a descriptor of our own.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// A trigger on one pressure file.
#[derive(Debug)]
pub struct Trigger(File);

impl Trigger {
    /// Fires when some task has waited for memory for `stall` within two seconds, once in that time. `file` is
    /// `/proc/pressure/memory`, or `memory.pressure` of a cgroup. Two seconds are the window that any user may ask for.
    pub fn open(file: &Path, stall: Duration) -> io::Result<Trigger> {
        const WINDOW: Duration = Duration::from_secs(2);
        let mut file = File::options().read(true).write(true).open(file)?;
        // The kernel takes the text whole, with its terminating zero.
        file.write_all(format!("some {} {}\0", stall.as_micros(), WINDOW.as_micros()).as_bytes())?;
        Ok(Trigger(file))
    }

    /// Waits for the trigger to fire, `patience` at most; tells whether it did. An error if its cgroup is gone.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        // SAFETY: one pollfd.
        let ready = unsafe { libc::poll(&raw mut poll, 1, patience.as_millis() as libc::c_int) };
        match super::check(ready) {
            Ok(_) if poll.revents & libc::POLLERR != 0 => Err(io::ErrorKind::NotFound.into()),
            Ok(ready) => Ok(ready > 0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trigger_can_be_had_by_any_user_and_does_not_fire_at_once() {
        let trigger = Trigger::open(Path::new("/proc/pressure/memory"), Duration::from_secs(2)).unwrap();
        assert!(!trigger.wait(Duration::from_millis(1)).unwrap());
        assert!(
            Trigger::open(Path::new("/proc/pressure/memory"), Duration::from_secs(3)).is_err(),
            "longer than the window"
        );
    }
}

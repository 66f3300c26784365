//! The manager's end of what ties a program to the manager's life.
//!
//! The kernel kills the program when the descriptor table that the manager shares with the front is gone: then the near end of a
//! socket pair is closed, and the far end, which the program's memory holds open, signals that to the program.
//!
//! # Safety
//! One structure is passed, with its true size.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// A tie, as long as this lives; and beyond, unless it is undone.
#[derive(Debug)]
pub struct Tether {
    _near: OwnedFd,
    far: UnixStream,
}

impl Tether {
    /// Has process `pid` killed when this process and all that share its descriptors are gone, if [`Tether::far`] is still
    /// open somewhere then.
    pub fn new(pid: i32) -> io::Result<Tether> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            pid: libc::pid_t,
        }
        const F_SETSIG: libc::c_int = 10;
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_PID: libc::c_int = 1;
        let (near, far) = UnixStream::pair()?;
        let owner = Owner { kind: F_OWNER_PID, pid };
        // SAFETY: the structure has the kernel's layout; the others are numbers.
        unsafe {
            super::check(libc::fcntl(far.as_raw_fd(), F_SETOWN_EX, &raw const owner))?;
            super::check(libc::fcntl(far.as_raw_fd(), F_SETSIG, libc::SIGKILL))?;
            super::check(libc::fcntl(far.as_raw_fd(), libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK))?;
        }
        Ok(Tether { _near: near.into(), far })
    }

    /// The end to be held by the memory of the program.
    pub fn far(&self) -> RawFd {
        self.far.as_raw_fd()
    }
}

/// What was tied is dismissed: it needs no manager any more.
impl Drop for Tether {
    fn drop(&mut self) {
        // SAFETY: a number. From here on the end of the connection signals nothing.
        unsafe { libc::fcntl(self.far.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    fn far_end_alone(tether: Tether) -> UnixStream {
        // As when the process dies: nothing is undone, and the near end closes.
        let far = tether.far.try_clone().unwrap();
        let tether = std::mem::ManuallyDrop::new(tether);
        // SAFETY: the near end is not used again.
        unsafe { libc::close(tether._near.as_raw_fd()) };
        far
    }

    #[test]
    fn the_end_of_the_near_side_kills() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let far = far_end_alone(Tether::new(child.id() as i32).unwrap());
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        drop(far);
    }

    #[test]
    fn what_is_dismissed_lives_on() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let tether = Tether::new(child.id() as i32).unwrap();
        let far = tether.far.try_clone().unwrap();
        drop(tether);
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none(), "it was killed");
        drop(far);
        child.kill().and_then(|()| child.wait()).unwrap();
    }
}

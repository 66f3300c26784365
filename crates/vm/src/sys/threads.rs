//! Looking through the threads of a process, the youngest first, by a thread that may wait for nobody: the directory is
//! opened before, and nothing is allocated.

use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, fstat, openat, seek};
use rustix::io::{Errno, read};

/// The threads of one process.
#[derive(Debug)]
pub struct Threads {
    pid: i32,
    /// `/proc/PID/task`. Its entries are in the order in which the threads were started.
    tasks: OwnedFd,
}

impl Threads {
    /// The threads of process `pid`.
    ///
    /// # Errors
    /// If it has ended.
    pub fn open(pid: i32) -> io::Result<Threads> {
        Ok(Threads { pid, tasks: File::open(format!("/proc/{pid}/task"))?.into() })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        // The links of the directory: one for each, its own and that of its parent.
        fstat(&self.tasks).map_or(0, |tasks| (tasks.st_nlink as usize).saturating_sub(2))
    }

    /// How long it takes to look through them.
    pub fn takes(&self) -> Duration {
        const EACH: Duration = Duration::from_micros(8);
        EACH * self.count() as u32
    }

    /// Calls `look` with each thread from place `from` on: first the one that the program began with, which is at place 0, then
    /// the youngest. One that starts or ends meanwhile may be missed.
    pub fn look_through(&self, from: usize, mut look: impl FnMut(i32)) {
        if from == 0 {
            look(self.pid);
        }
        let mut end = self.count();
        let from = from.max(1);
        while end > from {
            let start = end.saturating_sub(SOME).max(from);
            let mut ids = [0; SOME];
            let found = self.list(start, &mut ids[..end - start]).unwrap_or(0);
            ids[..found].iter().rev().for_each(|&id| look(id));
            end = start;
        }
    }

    /// Lists threads from a place on; gives how many.
    fn list(&self, place: usize, ids: &mut [i32]) -> Result<usize, Errno> {
        // Two come before the first thread: the directory itself and that above.
        seek(&self.tasks, SeekFrom::Start(place as u64 + 2))?;
        let mut buffer = [MaybeUninit::uninit(); SOME * 32];
        let mut entries = RawDir::new(&self.tasks, &mut buffer);
        let mut count = 0;
        while count < ids.len()
            && let Some(entry) = entries.next()
        {
            let id = entry?.file_name().to_str().ok().and_then(|name| name.parse().ok());
            if let Some(id) = id {
                ids[count] = id;
                count += 1;
            }
        }
        Ok(count)
    }

    /// Whether a thread runs, or will as soon as a lock of the kernel is free.
    pub fn runs(&self, id: i32) -> bool {
        let mut text = [0; 128];
        let len = self.stat(id, &mut text).unwrap_or(0);
        // What follows the name, which may have any character but is short.
        let state = text[..len].iter().rposition(|&byte| byte == b')').and_then(|end| text[..len].get(end + 2));
        matches!(state, Some(b'R' | b'D'))
    }

    /// The beginning of a thread's `stat`.
    fn stat(&self, id: i32, text: &mut [u8; 128]) -> io::Result<usize> {
        let mut path = [0; 24];
        write!(&mut path[..], "{id}/stat\0")?;
        let path = std::ffi::CStr::from_bytes_until_nul(&path).map_err(io::Error::other)?;
        let file = openat(&self.tasks, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(read(&file, text)?)
    }
}

/// How many threads are listed at once.
const SOME: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn own_id() -> i32 {
        let link = std::fs::read_link("/proc/thread-self").unwrap();
        link.file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    #[test]
    fn the_youngest_come_first_and_none_twice() {
        const CROWD: usize = 3 * SOME;
        let (ended, waits) = std::sync::mpsc::channel::<()>();
        let waits = std::sync::Mutex::new(waits);
        std::thread::scope(|scope| {
            let mut started = Vec::new();
            for _ in 0..CROWD {
                let (tell, told) = std::sync::mpsc::channel();
                let waits = &waits;
                scope.spawn(move || {
                    tell.send(own_id()).unwrap();
                    let _ = waits.lock().unwrap().recv();
                });
                started.push(told.recv().unwrap());
            }
            let threads = Threads::open(std::process::id() as i32).unwrap();
            let seen = |from| {
                let mut seen = Vec::new();
                threads.look_through(from, |id| seen.push(id));
                seen
            };
            let all = seen(0);
            assert_eq!(all[0], std::process::id() as i32);
            // Other tests start and end threads.
            let mut ours: Vec<i32> = all.iter().copied().filter(|id| started.contains(id)).collect();
            ours.reverse();
            assert_eq!(ours, started);
            assert!(threads.count() >= CROWD);
            let youngest = seen(threads.count() - 1);
            assert!(youngest.len() <= 1);
            assert!(threads.runs(own_id()));
            assert!(!threads.runs(started[0]) && !threads.runs(0));
            drop(ended);
        });
    }

    #[test]
    fn who_has_ended_has_no_threads() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let threads = Threads::open(child.id() as i32).unwrap();
        child.wait().unwrap();
        assert_eq!(threads.count(), 0);
        threads.look_through(1, |id| panic!("{id} has ended"));
        assert!(!threads.runs(child.id() as i32));
    }
}

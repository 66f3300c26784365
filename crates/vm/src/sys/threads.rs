//! Lists the threads of a process without blocking: the directory is opened before, and nothing is allocated. The thread that sees memory
//! grow does so; while it waits, programs grow past their limits.

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

    /// The process.
    pub fn pid(&self) -> i32 {
        self.pid
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

    /// Calls `look` with each thread. The oldest come first, since they start others, then the youngest, since they touch new memory. To look
    /// through a thousand takes milliseconds, in which a thread that slept may wake and start a hundred. So in between `look` is called
    /// again and again with the first threads of the program, with those of `often`, and with those that were started meanwhile. One that
    /// starts or ends meanwhile may be missed.
    pub fn look_through(&self, often: &[i32], mut look: impl FnMut(i32)) {
        let mut known = self.count();
        let (mut oldest, mut first, mut last_rounds) = (known, SOME, LAST_ROUNDS);
        while last_rounds > 0 {
            look(self.pid);
            self.look_at(1, known.min(first), &mut look);
            first = FIRST;
            often.iter().for_each(|&id| look(id));
            let before = std::mem::replace(&mut known, self.count());
            self.look_at(before, known, &mut look);
            let start = oldest.saturating_sub(SOME).max(1);
            self.look_at(start, oldest, &mut look);
            oldest = start.min(oldest);
            if oldest <= 1 {
                last_rounds = if known > before { last_rounds - 1 } else { 0 };
            }
        }
    }

    /// Calls `look` once with each thread but the first.
    pub fn look_at_others(&self, mut look: impl FnMut(i32)) {
        self.look_at(1, self.count(), &mut look);
    }

    /// Calls `look` with the threads at the places from `start` to `end`, the youngest first.
    fn look_at(&self, start: usize, mut end: usize, look: &mut impl FnMut(i32)) {
        while end > start {
            let from = end.saturating_sub(SOME).max(start);
            let mut ids = [0; SOME];
            let found = self.list(from, &mut ids[..end - from]).unwrap_or(0);
            ids[..found].iter().rev().for_each(|&id| look(id));
            end = from;
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

/// The threads before this place are the first of the program, which often start the others.
const FIRST: usize = 9;

/// How often to look for threads that were started meanwhile once all others were looked at.
const LAST_ROUNDS: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn own_id() -> i32 {
        let link = std::fs::read_link("/proc/thread-self").unwrap();
        link.file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    #[test]
    fn all_are_looked_at_and_the_first_one_again_and_again() {
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
            let (mut all, first) = (Vec::new(), std::process::id() as i32);
            threads.look_through(&[], |id| all.push(id));
            assert_eq!(all[0], first);
            assert!(all.iter().filter(|&&id| id == first).count() > CROWD / SOME);
            assert!(started.iter().all(|id| all.contains(id)));
            let place = |id: &i32| all.iter().position(|other| other == id);
            assert!(place(&started[CROWD - 1]) < place(&started[CROWD / 2]), "the youngest come first");
            assert!(threads.count() >= CROWD);
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
        let mut seen = Vec::new();
        threads.look_through(&[], |id| seen.push(id));
        assert_eq!(seen, [child.id() as i32]);
        assert!(!threads.runs(child.id() as i32));
    }
}

//! Looking at other processes: their memory, whether they live.
//!
//! # Safety
//! Reads other processes only; buffers of ours are passed with their true sizes.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};
use uzswap_proto::Nonce;

use crate::PAGE;
use crate::range::Range;
use crate::sys::pagemap::Pagemap;
use crate::sys::threads::Threads;

/// The memory that a process had when this was opened, whatever the process executes later.
///
/// A process id does not name a memory: the process may execute a setuid program at any time. So single pages are read through
/// a descriptor that stays with the memory, and larger pieces by the id, together with a number that was written through the
/// descriptor just before: another memory does not have it.
#[derive(Debug)]
pub struct Memory {
    pid: i32,
    file: File,
    /// A page of the agent's, where no other process reads or writes: room for many numbers, so that threads do not share one.
    proof: u64,
    /// Numbers written.
    challenges: AtomicU64,
}

impl AsRawFd for Memory {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Memory {
    /// Opens the memory of process `pid`. `proof` is a page in it that will be present.
    pub fn open(pid: i32, proof: u64) -> io::Result<Memory> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        Ok(Memory { pid, file, proof, challenges: AtomicU64::new(0) })
    }

    /// Whether this number is at `address`.
    pub fn has(&self, nonce: Nonce, address: u64) -> bool {
        let mut found = [0; size_of::<Nonce>()];
        self.file.read_exact_at(&mut found, address).is_ok() && found == bytes_of(nonce)
    }

    /// Whether process `pid` has this memory, now.
    ///
    /// # Errors
    /// One of them is gone, or may not be looked at.
    pub fn is_of(&self, pid: i32) -> io::Result<bool> {
        let (nonce, address) = self.challenge()?;
        any_thread(pid, |id| Ok(Memory::open(id, self.proof)?.has(nonce, address)))
    }

    /// Writes a new number into the proof page; gives it, and where it is.
    fn challenge(&self) -> io::Result<(Nonce, u64)> {
        const ROOM: u64 = PAGE / size_of::<Nonce>() as u64;
        let nonce = nonce()?;
        let address = self.proof + self.challenges.fetch_add(1, Relaxed) % ROOM * size_of::<Nonce>() as u64;
        self.file.write_all_at(&bytes_of(nonce), address)?;
        Ok((nonce, address))
    }

    /// Reads `buffer.len()` bytes from the addresses in `from`, one after another.
    ///
    /// # Errors
    /// An address cannot be read, or the process has another memory by now.
    pub fn read(&self, from: &[Range], buffer: &mut [u8]) -> io::Result<()> {
        // Of so few pages a descriptor is quicker.
        const FEW: usize = 2 * PAGE as usize;
        if buffer.len() > FEW {
            match self.read_at_once(from, buffer) {
                // The process with that id is gone; others may have its memory still.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                result => return result,
            }
        }
        let mut rest = buffer;
        for range in from {
            let (part, after) = rest.split_at_mut(range.len() as usize);
            self.file.read_exact_at(part, range.start)?;
            rest = after;
        }
        Ok(())
    }

    /// Reads many pages by one call. This waits for a page that is missing, and fails where another process has the number by now.
    fn read_at_once(&self, from: &[Range], buffer: &mut [u8]) -> io::Result<()> {
        // The kernel takes 1024 ranges at once, of which one is the proof.
        const AT_ONCE: usize = 1023;
        let mut done = 0;
        for ranges in from.chunks(AT_ONCE) {
            let (nonce, address) = self.challenge()?;
            let mut found = [0u8; size_of::<Nonce>()];
            let proof = Range::sized(address, found.len() as u64);
            let to_iovec = |r: &Range| libc::iovec { iov_base: r.start as *mut _, iov_len: r.len() as usize };
            let remote: Vec<libc::iovec> = ranges.iter().chain([&proof]).map(to_iovec).collect();
            let len: usize = ranges.iter().map(|r| r.len() as usize).sum();
            let data = &mut buffer[done..done + len];
            let local = [
                libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: len },
                libc::iovec { iov_base: found.as_mut_ptr().cast(), iov_len: found.len() },
            ];
            // SAFETY: the local buffers are a slice of ours and an array on this stack; the remote addresses are the other
            // process's affair.
            let read =
                unsafe { libc::process_vm_readv(self.pid, local.as_ptr(), 2, remote.as_ptr(), remote.len() as u64, 0) };
            if read < 0 {
                return Err(io::Error::last_os_error());
            }
            if read as usize != len + found.len() || found != bytes_of(nonce) {
                data.fill(0);
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the process has another memory"));
            }
            done += len;
        }
        Ok(())
    }
}

/// A fresh random number that no process can guess.
pub fn nonce() -> io::Result<Nonce> {
    thread_local! {
        /// Numbers that are not used yet.
        static STOCK: RefCell<Vec<Nonce>> = const { RefCell::new(Vec::new()) };
    }
    STOCK.with_borrow_mut(|stock| {
        if stock.is_empty() {
            let mut words = [0; 32];
            super::job::fill_random(&mut words)?;
            stock.extend(words.chunks_exact(2).map(|pair| [pair[0], pair[1]]));
        }
        stock.pop().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    })
}

fn bytes_of(nonce: Nonce) -> [u8; size_of::<Nonce>()] {
    let mut bytes = [0; size_of::<Nonce>()];
    bytes[..8].copy_from_slice(&nonce[0].to_ne_bytes());
    bytes[8..].copy_from_slice(&nonce[1].to_ne_bytes());
    bytes
}

/// A page that begins with these words.
pub fn page_of(words: &[u64]) -> [u8; PAGE as usize] {
    let mut page = [0; PAGE as usize];
    for (bytes, word) in page.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    page
}

/// Returns the NUMA node of each page of process `pid`; None for a page that is not there.
pub fn nodes_of(pid: i32, pages: &[u64]) -> io::Result<Vec<Option<u8>>> {
    let mut nodes = vec![-libc::ENOENT; pages.len()];
    // SAFETY: as many addresses as results; no nodes to move to, so that nothing moves.
    let result =
        unsafe { libc::syscall(libc::SYS_move_pages, pid, pages.len(), pages.as_ptr(), 0, nodes.as_mut_ptr(), 0) };
    super::check(result as libc::c_int)?;
    Ok(nodes.into_iter().map(|node| u8::try_from(node).ok()).collect())
}

/// How many NUMA nodes have memory: the highest number, plus one.
pub fn memory_nodes() -> usize {
    // A list of ranges, such as `0` or `0-1,3`. A kernel without NUMA has no such file.
    let text = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    let numbers = text.trim().split([',', '-']).filter_map(|number| number.parse::<usize>().ok());
    numbers.max().map_or(1, |highest| highest + 1)
}

/// What a process has inherited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kinship {
    /// The process that it is a child of now.
    pub parent: i32,
    /// Its process group; 0 if the kernel does not tell (without pid namespaces).
    pub group: i32,
    /// Its session; 0 if the kernel does not tell.
    pub session: i32,
    /// Whether it has ended with all its threads, and only waits to be collected.
    pub has_ended: bool,
}

impl Kinship {
    /// Of process `pid`; `None` if there is none, or it is not to be seen from here.
    pub fn of(pid: i32) -> Option<Kinship> {
        Kinship::read(pid).ok().flatten()
    }

    /// As [`of`](Kinship::of). This waits for no process, as `/proc/PID/stat` does while the process executes a program.
    ///
    /// # Errors
    /// This process is short of descriptors or memory ([`is_shortage`]): there may be such a process.
    pub fn read(pid: i32) -> io::Result<Option<Kinship>> {
        match read_named(format!("/proc/{pid}/status")) {
            Ok(text) => Ok(Kinship::parse(&text)),
            Err(error) if is_shortage(&error) => Err(error),
            Err(_) => Ok(None),
        }
    }

    fn parse(status: &str) -> Option<Kinship> {
        let number = |name| field(status, name)?.parse().ok();
        let main_has_ended = ["Z", "X"].contains(&field(status, "State:")?);
        let has_ended = main_has_ended && number("Threads:")? <= 1;
        // The number in this namespace is the first.
        let [group, session] = ["NSpgid:", "NSsid:"].map(|name| number(name).unwrap_or(0));
        Some(Kinship { parent: number("PPid:")?, group, session, has_ended })
    }
}

/// Returns when process `pid` started, in clock ticks since the system did. While the process executes a program this waits, and it can do
/// that for as long as it likes (Linux 6.18).
pub fn started(pid: i32) -> Option<u64> {
    let text = read_named(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything.
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Reads a file of `/proc` with the name of a process in it, which may hold any bytes.
pub fn read_named(path: impl AsRef<Path>) -> io::Result<String> {
    std::fs::read(path).map(|text| String::from_utf8_lossy(&text).into_owned())
}

/// Whether a call failed because this process, or the system, is short of descriptors or memory.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Returns the time so long ago, in the clock ticks of [`started`].
pub fn ticks_ago(time: Duration) -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let then = Duration::new(now.tv_sec as u64, now.tv_nsec as u32).saturating_sub(time);
    then.as_millis() as u64 * clock_ticks_per_second() / 1000
}

/// Returns the process that a thread is of. `None` if there is no such thread.
pub fn process_of(thread: i32) -> Option<i32> {
    field(&read_named(format!("/proc/{thread}/status")).ok()?, "Tgid:")?.parse().ok()
}

/// How far up a process's ancestors are looked at.
const MOST_ANCESTORS: usize = 64;

/// Returns a process, its parent and so on.
pub fn ancestors(pid: i32) -> impl Iterator<Item = i32> {
    std::iter::successors(Some(pid), |pid| Some(Kinship::of(*pid)?.parent)).take(MOST_ANCESTORS)
}

/// Returns the same as a list that was true at one moment. The parent of each process is read twice: if it is the same,
/// it has not ended in between, and its number is no other process's. `None` if the list has changed at each try.
pub fn lineage(pid: i32) -> Option<Vec<i32>> {
    const TRIES: u32 = 3;
    let is_parent = |pair: &[i32]| Kinship::of(pair[0]).is_some_and(|now| now.parent == pair[1]);
    (0..TRIES).map(|_| ancestors(pid).collect::<Vec<i32>>()).find(|line| line.windows(2).all(is_parent))
}

/// The children of process `pid`, of all its threads.
pub fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Whether a thread of process `pid`, other than these, runs or is ready to.
pub fn runs_besides(pid: i32, others: &[u32]) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let ids = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|id| !others.contains(id)).any(|id: u32| {
        let status = read_named(format!("/proc/{pid}/task/{id}/status")).unwrap_or_default();
        field(&status, "State:") == Some("R")
    })
}

/// Whether process `pid` is on its way out, with all its threads.
pub fn is_exiting(pid: i32) -> bool {
    const PF_EXITING: u64 = 4;
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| flags(&thread.path()).is_none_or(|flags| flags & PF_EXITING != 0))
}

/// The first word of a field of a file of `/proc`. The name comes with its colon.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_ascii_whitespace().next()
}

/// Whether a signal is pending for process `pid` that would end it: the process neither ignores the signal nor has a handler for it, but may
/// block it. So a process can make this true for as long as it likes.
pub fn is_told_to_end(pid: i32) -> bool {
    /// Signals that do not end a process that has no handler for them.
    const HARMLESS: [i32; 8] = [
        libc::SIGCHLD,
        libc::SIGCONT,
        libc::SIGURG,
        libc::SIGWINCH,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
    ];
    let text = read_named(format!("/proc/{pid}/status")).unwrap_or_default();
    let signals = |name| u64::from_str_radix(field(&text, name)?, 16).ok();
    let [Some(pending), Some(ignored), Some(caught)] = ["ShdPnd:", "SigIgn:", "SigCgt:"].map(signals) else {
        return false;
    };
    let harmless = HARMLESS.iter().fold(0, |set, signal| set | 1 << (signal - 1));
    pending & !(ignored | caught | harmless) != 0
}

/// Whether process `pid` has executed a program since it was forked. True if that cannot be told.
pub fn has_executed(pid: i32) -> bool {
    const PF_FORKNOEXEC: u64 = 0x40;
    flags(format!("/proc/{pid}").as_ref()).is_none_or(|flags| flags & PF_FORKNOEXEC == 0)
}

/// The kernel's flags of a task (`PF_…`), whose directory in `/proc` is given. `None` if it is gone.
fn flags(task: &Path) -> Option<u64> {
    let text = read_named(task.join("stat")).ok()?;
    // The name before may hold anything.
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(6)?.parse().ok()
}

/// What tells a process from those that have its number later. It takes no descriptor, as a handle does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// As [`PidFd::inode`] gives it.
    Inode(u64),
    /// When it started, in clock ticks: before Linux 6.9.
    Started(u64),
}

/// A handle on a process that is not fooled by its number being used again.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl From<OwnedFd> for PidFd {
    fn from(fd: OwnedFd) -> PidFd {
        PidFd(fd)
    }
}

impl Identity {
    /// Returns the identity of the process that has this number now; `None` if there is none, or it is not to be seen from here.
    pub fn of(pid: i32) -> Option<Identity> {
        PidFd::open(pid).ok()?.identity()
    }
}

impl PidFd {
    /// The process's id; `None` if it is dead, or not to be seen from here.
    pub fn pid(&self) -> Option<i32> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.as_raw_fd())).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok().filter(|&pid| pid > 0)
    }

    /// Opens a handle on `pid`.
    pub fn open(pid: i32) -> io::Result<PidFd> {
        // SAFETY: no pointers; the descriptor is fresh.
        unsafe {
            let fd = super::check(libc::syscall(libc::SYS_pidfd_open, pid, 0) as libc::c_int)?;
            Ok(PidFd(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// The inode number of this handle, which all handles of the process have, and no other process's until the machine restarts.
    /// `None` before Linux 6.9, where all processes have the same.
    pub fn inode(&self) -> Option<u64> {
        const PIDFS: u64 = 0x5049_4446;
        let is_own = rustix::fs::fstatfs(&self.0).is_ok_and(|system| system.f_type as u64 == PIDFS);
        rustix::fs::fstat(&self.0).ok().filter(|_| is_own).map(|stat| stat.st_ino)
    }

    /// What the process can be known by when this handle is closed; `None` if it has ended, or is not to be seen from here.
    pub fn identity(&self) -> Option<Identity> {
        let identity = match self.inode() {
            Some(inode) => Identity::Inode(inode),
            None => Identity::Started(started(self.pid()?)?),
        };
        // Then the number was the process's when it was looked at.
        (!self.has_ended()).then_some(identity)
    }

    /// Opens a handle on the process that had this number and this identity.
    ///
    /// # Errors
    /// [`is_shortage`], or the process has ended.
    pub fn open_known(pid: i32, identity: Identity) -> io::Result<PidFd> {
        let handle = PidFd::open(pid)?;
        match handle.identity() {
            Some(found) if found == identity => Ok(handle),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// Sends a signal. A process that is gone is an error, ESRCH.
    pub fn kill(&self, signal: i32) -> io::Result<()> {
        // SAFETY: no siginfo.
        let result = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.as_raw_fd(), signal, 0, 0) };
        super::check(result as libc::c_int).map(drop)
    }

    /// The status of the process as wait(2) gives it. `None` until its parent has waited for it, and before Linux 6.15.
    pub fn wait_status(&self) -> Option<i32> {
        /// `PIDFD_GET_INFO` for a structure of 64 bytes, the first version of it.
        const PIDFD_GET_INFO: libc::c_ulong = 0xc040_ff0b;
        const INFO_EXIT: u64 = 1 << 3;
        const EXIT_CODE: usize = 60;
        let mut info = [0u64; 8];
        info[0] = INFO_EXIT;
        // SAFETY: the structure is as long as the number of the call says; the kernel writes no more.
        let result = unsafe { libc::ioctl(self.as_raw_fd(), PIDFD_GET_INFO, info.as_mut_ptr()) };
        if result != 0 || info[0] & INFO_EXIT == 0 {
            return None;
        }
        let bytes: Vec<u8> = info.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Some(i32::from_ne_bytes(bytes[EXIT_CODE..].try_into().ok()?))
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        loop {
            let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd.
            match super::check(unsafe { libc::poll(&raw mut poll, 1, 0) }) {
                // A signal came.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.is_ok_and(|ready| ready > 0),
            }
        }
    }
}

/// Whether `page` of process `pid` is in no memory but that, and those of its forks: what was written there was written through it.
///
/// # Errors
/// The process is gone, or may not be looked at.
pub fn has_private(pid: i32, page: u64) -> io::Result<bool> {
    any_thread(pid, |id| Pagemap::open(id)?.is_private(page))
}

/// A program, by its number and by a handle: when it has ended, another process may get the number.
#[derive(Debug)]
pub struct Program {
    /// Its process id.
    pub pid: i32,
    /// A handle on its process.
    pub process: Arc<PidFd>,
}

impl Program {
    /// The program with this process id.
    pub fn new(pid: i32, process: Arc<PidFd>) -> Program {
        Program { pid, process }
    }

    /// Whether it has ended, or is on its way out with all its threads.
    pub fn is_exiting(&self) -> bool {
        self.process.has_ended() || is_exiting(self.pid)
    }
}

/// Whether two processes share one address space; an error if one is gone or not to be looked at.
pub fn share_memory(one: i32, other: i32) -> io::Result<bool> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: no pointers.
    let result = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    super::check(result as libc::c_int).map(|order| order == 0)
}

/// Returns whether process `pid` has the memory that process `other` has.
///
/// # Errors
/// One of them is gone, or may not be looked at.
pub fn has_memory_of(pid: i32, other: i32) -> io::Result<bool> {
    any_thread(pid, |id| share_memory(id, other))
}

/// Returns whether `is` is true of a thread of process `pid`. A thread that has ended has no memory, and the main thread may end before
/// others do (`pthread_exit` in `main`). If it is true of none, the answer is that for the main thread.
fn any_thread(pid: i32, is: impl Fn(i32) -> io::Result<bool>) -> io::Result<bool> {
    let main = is(pid);
    if !matches!(main, Ok(true)) {
        let mut found = false;
        Threads::open(pid)?.look_at_others(|id| found = found || is(id).unwrap_or(false));
        if found {
            return Ok(true);
        }
    }
    main
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_runs_is_told_from_who_sleeps() {
        let pid = std::process::id() as i32;
        let own = Kinship::of(pid).map(|_| std::fs::read_link("/proc/thread-self").unwrap());
        let id: u32 = own.unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap();
        assert!(runs_besides(pid, &[]), "we do");
        let mut sleeper = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!runs_besides(sleeper.id() as i32, &[]));
        sleeper.kill().and_then(|()| sleeper.wait()).unwrap();
        assert!(!runs_besides(sleeper.id() as i32, &[id]), "it is gone");
    }

    #[test]
    fn a_process_with_a_name_of_any_bytes_is_seen() {
        let script = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xff\\n) Z'); print('named', flush=True); time.sleep(100)";
        let mut python = std::process::Command::new("python3");
        let mut child = python.args(["-c", script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut said = [0; 5];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).expect("it has its name");
        let pid = child.id() as i32;
        let kin = Kinship::of(pid).expect("it lives");
        assert_eq!((kin.parent, kin.has_ended, is_exiting(pid)), (std::process::id() as i32, false, false));
        let own = Kinship::of(kin.parent).expect("we do");
        assert_eq!((kin.group, kin.session), (own.group, own.session));
        child.kill().and_then(|()| child.wait()).unwrap();
    }

    #[test]
    fn a_process_is_told_to_end_if_nothing_but_its_mask_stands_in_the_way() {
        let told = |prepare: &str, signal: &str| {
            let script = format!(
                "import os, signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); {prepare}; \
                 os.kill(os.getpid(), signal.{signal}); print('sent', flush=True); time.sleep(100)"
            );
            let mut python = std::process::Command::new("python3");
            let mut child = python.args(["-c", &script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
            let mut sent = [0; 4];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut sent).expect("it sends the signal");
            let told = is_told_to_end(child.id() as i32);
            child.kill().and_then(|()| child.wait()).unwrap();
            told
        };
        assert!(told("pass", "SIGTERM"));
        assert!(!told("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "SIGTERM"));
        assert!(!told("signal.signal(signal.SIGTERM, lambda *_: 0)", "SIGTERM"));
        assert!(!told("pass", "SIGCHLD"));
        assert!(!is_told_to_end(0), "there is none");
    }

    #[test]
    fn memory_is_read_from_the_process_that_it_was_opened_of() {
        let mut memory = vec![7u8; 16 * PAGE as usize];
        let first = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let last = first + 8 * PAGE;
        let own = std::process::id() as i32;
        let handle = Memory::open(own, last).unwrap();
        assert!(handle.is_of(own).unwrap());
        assert!(!handle.is_of(1).unwrap_or(false), "another process has another memory");
        for pages in [1, 2, 3, 8] {
            let mut data = vec![0; pages * PAGE as usize];
            handle.read(&[Range::sized(first, data.len() as u64)], &mut data).unwrap();
            assert!(data.iter().all(|&byte| byte == 7), "{pages} pages");
        }
        let elsewhere = Memory { pid: 1, ..handle };
        let mut data = vec![9; 4 * PAGE as usize];
        assert!(elsewhere.read(&[Range::sized(first, data.len() as u64)], &mut data).is_err());
        assert!(data.iter().all(|&byte| byte != 7));
        memory.clear();
    }

    #[test]
    fn the_kernel_tells_the_node_of_a_page_that_is_there() {
        let memory = vec![1u8; 2 * PAGE as usize];
        let page = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let nodes = nodes_of(std::process::id() as i32, &[page, 0, page]).unwrap();
        assert!(nodes[0].is_some_and(|node| usize::from(node) < memory_nodes()));
        assert_eq!(nodes[1..], [None, nodes[0]], "a page that is not there costs no other its node");
    }
}

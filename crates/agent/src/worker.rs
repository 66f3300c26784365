//! The worker: a process that shares the program's memory and moves its pages when the manager says so.
//!
//! 1. The program clones an usher, the usher clones the worker and ends: so the worker is no child of the program, which
//!    would otherwise hear of its end (a process that executes another program hears of all its children). In a pid namespace
//!    inside that of the manager, and for a child subreaper, there is no usher: an orphan would become an ordinary child of the
//!    namespace's first process or of the subreaper, which may wait until it has none. There the worker is a child of the program
//!    without an exit signal, which a plain `wait` does not see.
//! 2. It leaves everything of the program but the memory: descriptors, session, signals.
//! 3. It opens the userfaultfds (one for the program's memory and the staging area, one for the trash area), and attaches
//!    to the manager.
//! 4. It obeys: TETHER ties the program to the life of the manager (`tether.rs`), EVICT moves pages into the staging area, DISCARD
//!    frees pages of the staging area, COLLAPSE makes a huge page of small ones, which changes nothing that a program could read.
//!    HEADS tells it whose robust mutexes to look after (`robust.rs`).
//!
//! An EVICT is issued on the userfaultfd that also watches the source. The kernel refuses (EAGAIN) to move on it from
//! the moment an unmap, remap or fork of watched memory begins until the manager has read the event of it; and the
//! manager reads no events while an EVICT is under way. So a page is never moved out of a mapping that is not the one
//! the manager meant.
//!
//! A discarded page leaves through the trash area, whose userfaultfd has no events: MADV_DONTNEED on the staging area
//! itself would wait for the manager to read an event.
//!
//! When the manager dies, the connection ends; the worker then kills the program, whose faults wait meanwhile because
//! the worker, and the program's memory itself, hold the userfaultfd open. A program that it cannot kill is denied its pages (`denial.rs`).
//!
//! # Safety
//! Shares its memory with the program: it writes only to its own stack, to the control mapping and, by UFFDIO_MOVE, to
//! the staging and trash areas. It changes the rights of no memory but the staging area's.

use core::ffi::CStr;
use core::mem::{size_of, size_of_val};
use core::sync::atomic::{
    AtomicBool, AtomicIsize, AtomicU32, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use uzswap_proto::{
    GREETING_WORDS, HUGE_PAGE_SIZE, Hello, Job, MAX_BATCH_PAGES, MAX_WORDS, Nonce, PAGE_SIZE, Run, TRASH_PAGES, beacon,
    call, evict, evicted, kind, step,
};

use crate::area::{REGION_LEN, Region};
use crate::attach::socket_path;
use crate::connection::connect;
use crate::denial;
use crate::family;
use crate::robust::Lists;
use crate::sys::{self, EAGAIN, EBUSY, EEXIST, EFAULT, EINTR, EINVAL, ENOENT, ESRCH, call};
use crate::tether::{self, Tie};

const MADV_DONTNEED: usize = 4;

/// The program that gets a worker.
pub struct Program {
    /// Its job.
    pub job: Job,
    /// Its process id.
    pub id: i32,
    /// Whether it was forked, and has executed nothing since.
    pub forked: bool,
    /// Whether it has inherited evicted pages: then it does not live without a manager.
    pub inherits: bool,
    /// What the manager wrote into its beacon, if it did. Of a program that inherits the worker finds it out.
    pub nonce: Option<Nonce>,
    /// Whether it runs on at once, and is attached if it is still there a while later.
    pub may_wait: bool,
}

/// The name of a worker, as `/proc/PID/comm` tells it.
pub const NAME: &CStr = c"uzswap-agent";

/// What the program's thread, the usher and the worker tell each other, one after the other.
pub struct Control {
    program: Program,
    beacon: usize,
    region: Region,
    /// A handle on the program, or a negative errno. Told by the usher to the worker.
    pidfd: AtomicIsize,
    /// The process id of the worker's parent, which waits for it: the usher, or the program. Told likewise.
    parent: AtomicIsize,
    /// The worker's process id, 0 if none is wanted any more, or a negative errno. Told by the usher to the program.
    pub worker: AtomicIsize,
    /// Whether the program may run on: 0 until that is known, [`RUNS`] or [`DIES`]; a futex. Told by the worker to the usher.
    settled: AtomicU32,
    /// Whether pages have been evicted. Told by the worker to the program.
    pub evicts: AtomicBool,
    /// The mapping that children are to inherit (`tether.rs`), or 0. Told likewise.
    pub heirloom: AtomicUsize,
}

/// The program runs on.
const RUNS: u32 = 1;
/// The program has inherited pages that are gone with the manager: the thread that waits ends it.
const DIES: u32 = 2;

impl Control {
    /// For a program, its beacon and the region of its worker.
    pub fn new(program: Program, beacon: usize, region: Region) -> Control {
        let (pidfd, worker, settled) = (AtomicIsize::new(-1), AtomicIsize::new(0), AtomicU32::new(0));
        let evicts = AtomicBool::new(program.inherits);
        let (heirloom, parent) = (AtomicUsize::new(0), AtomicIsize::new(0));
        Control { program, beacon, region, pidfd, parent, worker, settled, evicts, heirloom }
    }

    /// Whether the program runs on at once.
    pub fn may_wait(&self) -> bool {
        self.program.may_wait
    }

    /// Lets the program run, or has its own thread end it: a kill from inside its pid namespace has no effect on the first process there.
    fn settle(&self, fate: u32) {
        const FUTEX_WAKE_PRIVATE: usize = 1 | 128;
        self.settled.store(fate, Release);
        // SAFETY: wakes the thread that waits for this word.
        unsafe { call!(sys::SYS_FUTEX, &raw const self.settled, FUTEX_WAKE_PRIVATE, 1) };
    }

    /// Waits until the worker, a child of the caller, has settled or ended, but not for ever. False if the program has inherited evicted pages,
    /// and no manager is left to serve them: then the worker has said so or is killed, and the caller ends the program.
    ///
    /// Such a worker waits for its beacon, and where the memory itself keeps the userfaultfd open (`tether.rs`) nothing else wakes it.
    /// The program would wait there, too, if the worker has been killed.
    pub fn wait_until_settled(&self, worker: isize) -> bool {
        const FUTEX_WAIT_PRIVATE: usize = 128;
        const TRIES: usize = 40;
        const TRIES_IF_IT_INHERITS: usize = 60;
        let moment = [0u64, 50_000_000];
        let mut has_ended = false;
        for _ in 0..if self.program.inherits { TRIES_IF_IT_INHERITS } else { TRIES } {
            // A filter of system calls may have killed it, or a user who kills all of uzswap. Asked first: a worker can settle, and end.
            has_ended = sys::has_ended(worker);
            match self.settled.load(Acquire) {
                0 => {}
                fate => return fate == RUNS,
            }
            if has_ended {
                break;
            }
            // SAFETY: waits for 50 ms at most, while the word is 0.
            unsafe { call!(sys::SYS_FUTEX, &raw const self.settled, FUTEX_WAIT_PRIVATE, 0, &raw const moment) };
        }
        // A manager that is only slow is called all the same.
        let called = connect(self.program.job);
        if let Ok(socket) = called {
            // SAFETY: our own descriptor.
            unsafe { call!(sys::SYS_CLOSE, socket) };
        }
        let goes_on = !self.program.inherits || called.is_ok();
        if !goes_on && !has_ended {
            sys::kill(worker);
        }
        goes_on
    }
}

/// Where the usher starts. All signals are blocked and stay so.
pub extern "C" fn usher(control: *const Control) -> ! {
    // SAFETY: only the control block's atomics change while others see it. The worker's stack is used by nobody else and
    // lives as long as the address space.
    //
    // The parent is asked after the pidfd was opened: if it is still the program, the pidfd is the program's and not that
    // of a later process with its number.
    unsafe {
        call!(sys::SYS_CLOSE_RANGE, 0, u32::MAX, 0);
        let shared = &*control;
        shared.pidfd.store(call!(sys::SYS_PIDFD_OPEN, shared.program.id, 0), Relaxed);
        shared.parent.store(call!(sys::SYS_GETPID), Relaxed);
        if shared.program.inherits {
            sys::die_with_parent(true);
        }
        if call!(sys::SYS_GETPPID) as i32 == shared.program.id {
            let stack = shared.region.stack_top() as *mut u8;
            let worker = sys::clone_memory(sys::CLONE_FILES, stack, main, control);
            shared.worker.store(worker, Relaxed);
            if worker > 0 && !shared.program.may_wait && !shared.wait_until_settled(worker) {
                sys::kill_by(shared.pidfd.load(Relaxed));
            }
        }
    }
    sys::exit(0)
}

/// Where the worker starts that has no usher: as a child of the program, with a copy of its descriptor table. All signals are
/// blocked and stay so.
pub extern "C" fn alone(control: *const Control) -> ! {
    // SAFETY: as in `usher`.
    unsafe {
        call!(sys::SYS_CLOSE_RANGE, 0, u32::MAX, 0);
        let shared = &*control;
        shared.pidfd.store(call!(sys::SYS_PIDFD_OPEN, shared.program.id, 0), Relaxed);
        shared.parent.store(shared.program.id as isize, Relaxed);
        if call!(sys::SYS_GETPPID) as i32 != shared.program.id {
            sys::exit(0)
        }
    }
    main(control)
}

/// Where the worker starts. All signals are blocked and stay so.
pub extern "C" fn main(control: *const Control) -> ! {
    // SAFETY: written before we were cloned; from then on only its atomics change.
    let control = unsafe { &*control };
    leave_the_program();
    if control.program.may_wait && !stays(control) {
        sys::exit(0)
    }
    match Worker::attach(control) {
        // The program runs on when the manager says so: it is seen to grow from its first page on.
        Ok(worker) => worker.obey(control),
        Err(fate) => control.settle(fate),
    }
    sys::exit(0)
}

/// Whether the program is still there after a while, and still in this memory: it may have executed another.
fn stays(control: &Control) -> bool {
    const WHILE: usize = 10;
    const POLLIN: u64 = 1;
    const KCMP_VM: usize = 1;
    let pidfd = control.pidfd.load(Relaxed);
    if pidfd < 0 {
        return true;
    }
    let mut poll = pidfd as u64 | POLLIN << 32;
    // SAFETY: `poll` is a `struct pollfd`. The processes are named by number only; the program is not gone, or was not just now.
    unsafe {
        let ended = call!(sys::SYS_POLL, &raw mut poll, 1, WHILE) > 0;
        // Where it is not told we attach to what the program has left behind, until what it executes does.
        let elsewhere = call!(sys::SYS_KCMP, call!(sys::SYS_GETPID), control.program.id, KCMP_VM, 0, 0) > 0;
        !ended && !elsewhere
    }
}

fn leave_the_program() {
    const PR_SET_NAME: usize = 15;
    // SAFETY: none of these has an effect on the program: the worker has its own working directory, session and name.
    unsafe {
        call!(sys::SYS_SETSID);
        call!(sys::SYS_CHDIR, c"/".as_ptr());
        call!(sys::SYS_PRCTL, PR_SET_NAME, NAME.as_ptr());
    }
}

struct Worker {
    socket: i32,
    /// The greeting: from word 1 on the path of this library, as a C string.
    greeting: [u64; GREETING_WORDS],
    /// A pidfd.
    program: i32,
    /// The file of this library: its lock tells whether front or manager is alive, even when its name is gone. A negative errno where it is
    /// not to be seen.
    library: isize,
    uffd: i32,
    trash_uffd: i32,
    region: Region,
    lists: Lists,
}

impl Worker {
    /// Attaches to the manager.
    ///
    /// # Errors
    /// What becomes of the program instead: it runs unmanaged, or dies.
    fn attach(control: &Control) -> Result<Worker, u32> {
        let program = &control.program;
        let pidfd = control.pidfd.load(Relaxed);
        let nonce = if program.inherits { ask(control) } else { program.nonce };
        if program.inherits && nonce.is_none() {
            // No manager has answered: it is gone, and with it what the program has inherited.
            sys::kill_by(pidfd);
            return Err(DIES);
        }
        let mut words = [0; MAX_WORDS];
        let mut device = -1;
        let socket = (0..ATTEMPTS).find_map(|_| {
            let socket = connect(program.job).ok()?;
            let answered =
                send(socket, &call(program.job.token), &[]) && receive(socket, &mut words, Some(&mut device)) > 0;
            if !answered {
                // SAFETY: our own descriptor.
                unsafe { call!(sys::SYS_CLOSE, socket) };
            }
            answered.then_some(socket)
        });
        let Some(socket) = socket.filter(|_| words[0] == kind::GREETING) else {
            // The program may be where the manager's socket is not to be reached: then its faults are served all the same.
            if program.inherits && words[0] != kind::RELEASE && !is_served(control) {
                // The manager is gone, and with it what the program has inherited.
                sys::kill_by(pidfd);
                return Err(DIES);
            }
            return Err(RUNS);
        };
        if pidfd == -ESRCH {
            return Err(RUNS);
        }
        let failed = |step: u64, errno: isize| {
            let handle = [pidfd as i32];
            send(socket, &[kind::FAILED, step, -errno as u64], if pidfd >= 0 { &handle } else { &[] });
            Err(RUNS)
        };
        if pidfd < 0 {
            return failed(step::PIDFD, pidfd);
        }
        let (uffd, trash_uffd) = match (open_userfaultfd(device), open_userfaultfd(device)) {
            (Ok(uffd), Ok(trash_uffd)) => (uffd, trash_uffd),
            (Err(errno), _) | (_, Err(errno)) => return failed(step::USERFAULTFD, errno),
        };
        if device >= 0 {
            // SAFETY: our own descriptor.
            unsafe { call!(sys::SYS_CLOSE, device) };
        }
        let mut greeting = [0; GREETING_WORDS];
        greeting.copy_from_slice(&words[..GREETING_WORDS]);
        let (region, program) = (control.region, pidfd as i32);
        let lists = Lists::new(region);
        let mut worker = Worker { socket, greeting, program, library: -1, uffd, trash_uffd, region, lists };
        worker.library = sys::open(-1, worker.library_path());
        worker.introduce(control, nonce, &mut words);
        Ok(worker)
    }

    /// Says hello.
    fn introduce(&self, control: &Control, nonce: Option<Nonce>, words: &mut [u64; MAX_WORDS]) {
        let hello = Hello {
            forked: control.program.forked,
            nonce,
            region: self.region.start() as u64,
            region_len: REGION_LEN as u64,
            beacon: control.beacon as u64,
            staging: self.region.staging() as u64,
            trash: self.region.trash() as u64,
        };
        let count = hello.encode(words);
        self.say(&words[..count], &[self.uffd, self.trash_uffd, self.program]);
    }

    /// Obeys the manager until it says EXIT or RELEASE, or is gone.
    fn obey(mut self, control: &Control) {
        let mut words = [0; MAX_WORDS];
        loop {
            let mut descriptor = -1;
            let count = receive(self.socket, &mut words, Some(&mut descriptor));
            if count <= 0 {
                self.kill_program();
            }
            match words[0] {
                kind::EVICT => {
                    control.evicts.store(true, Relaxed);
                    self.evict(&words[..count as usize]);
                }
                kind::DISCARD => self.discard(words[1], words[2]),
                kind::COLLAPSE => self.collapse(words[1]),
                kind::MAIN => {
                    if descriptor >= 0 {
                        // SAFETY: our own descriptor.
                        unsafe { call!(sys::SYS_CLOSE, self.uffd) };
                        self.uffd = descriptor;
                    }
                }
                kind::TETHER => {
                    if descriptor >= 0 {
                        // Without it the guards remain that are processes.
                        if let Tie::Ring(heirloom) = tether::tie(&[self.uffd, self.trash_uffd, descriptor]) {
                            control.heirloom.store(heirloom, Relaxed);
                        }
                        // SAFETY: our own descriptor.
                        unsafe { call!(sys::SYS_CLOSE, descriptor) };
                    }
                }
                kind::HEADS => self.lists.learn(&words[1..count as usize], descriptor),
                kind::GO => control.settle(RUNS),
                kind::EXIT => return control.settle(RUNS),
                kind::RELEASE => {
                    control.evicts.store(false, Relaxed);
                    return control.settle(RUNS);
                }
                _ => self.kill_program(),
            }
        }
    }

    /// Without its connection to the manager the worker cannot bring evicted pages back: it kills the program. Of a manager that has ended it
    /// removes the library, too, for no other process may be left to do so, and kills the program's family, of whom some have no worker yet.
    fn kill_program(&self) -> ! {
        // First: a program that is being killed forks no more relatives.
        sys::kill_by(self.program as isize);
        if self.has_outlived_manager() {
            let socket = socket_path();
            // Before the worker kills the other workers of its family, which do the same. The library last: a manager that sweeps the directory
            // finds the socket by it.
            // SAFETY: both are C strings.
            unsafe {
                call!(sys::SYS_UNLINK, socket.as_ptr());
                call!(sys::SYS_UNLINK, self.library_path().as_ptr());
            }
            family::kill(self.library_path().to_bytes());
        }
        denial::until_end(self.program, self.uffd);
        sys::exit(0)
    }

    /// The path of this library, as the manager wrote it into the greeting.
    fn library_path(&self) -> &CStr {
        let words = &self.greeting[1..];
        // SAFETY: the words' own bytes.
        let bytes = unsafe { core::slice::from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words)) };
        CStr::from_bytes_until_nul(bytes).unwrap_or_default()
    }

    /// Whether front and manager have both ended, which have the library's file locked as long as they live. False where it is not to be
    /// seen.
    fn has_outlived_manager(&self) -> bool {
        const LOCK_EX_NB: usize = 2 | 4;
        const LOCK_UN: usize = 8;
        const LOOKS: usize = 50;
        const MILLISECONDS: usize = 2;
        for _ in 0..LOOKS {
            // SAFETY: our own descriptor, or none; waits for no descriptor.
            unsafe {
                if call!(sys::SYS_FLOCK, self.library, LOCK_EX_NB) == 0 {
                    // Other workers ask the same.
                    call!(sys::SYS_FLOCK, self.library, LOCK_UN);
                    return true;
                }
                // A process that ends closes its descriptors one after the other: the lock may go some time after the connection.
                call!(sys::SYS_POLL, 0, 0, MILLISECONDS);
            }
        }
        false
    }

    fn say(&self, words: &[u64], descriptors: &[i32]) {
        if !send(self.socket, words, descriptors) {
            self.kill_program();
        }
    }

    /// Answers EVICT: moves the runs that it names, and tells what became of each page.
    fn evict(&mut self, words: &[u64]) {
        let touch = words[2] & evict::TOUCH != 0;
        // What the program has locked is not moved to what is not locked: so it stays.
        self.empty_trash(1);
        let runs = &words[evict::FIRST_RUN..];
        let (mut count, mut pages) = (0, 0);
        while count < runs.len() && pages + Run(runs[count]).pages() <= MAX_BATCH_PAGES {
            pages += Run(runs[count]).pages();
            count += 1;
        }
        let runs = &runs[..count];
        let mut eviction = Eviction::new(words[1], pages, touch);
        self.evict_watched(&mut eviction, runs);
        let mut len = evicted::first_held(eviction.pages);
        let uffd = self.uffd;
        self.lists.held(|page| {
            eviction.put_back(uffd, runs, page);
            eviction.reply[len] = page;
            len += 1;
            len < MAX_WORDS
        });
        if eviction.executes {
            eviction.change_rights();
        }
        eviction.reply[0] = kind::EVICTED;
        eviction.reply[1] = eviction.pages as u64;
        self.say(&eviction.reply[..len], &[]);
    }

    /// Moves the pages of `runs` that lie in registered mappings.
    ///
    /// UFFDIO_MOVE takes pages out of any private memory, and a mapping can lose its registration without an event
    /// (SHM_REMAP). So the kernel is asked before and after. One question covers all runs that lie in one mapping; runs
    /// in several mappings are divided until each part lies in one.
    fn evict_watched(&self, eviction: &mut Eviction, runs: &[u64]) {
        let (Some(&first), Some(&last)) = (runs.first(), runs.last()) else { return };
        let (first, last) = (Run(first), Run(last));
        let end = last.address() + (last.pages() * PAGE_SIZE) as u64;
        match self.watched(first.address(), end) {
            Watched::Yes if !eviction.stopped => {
                let before = eviction.pages;
                runs.iter().for_each(|&run| self.evict_run(eviction, Run(run)));
                if !matches!(self.watched(first.address(), end), Watched::Yes) {
                    eviction.doubt(before);
                }
            }
            Watched::No if runs.len() > 1 => {
                let (front, back) = runs.split_at(runs.len() / 2);
                self.evict_watched(eviction, front);
                self.evict_watched(eviction, back);
            }
            Watched::No if first.pages() > 1 => {
                let front = first.pages() / 2;
                let middle = first.address() + (front * PAGE_SIZE) as u64;
                self.evict_watched(eviction, &[Run::new(first.address(), front).0]);
                self.evict_watched(eviction, &[Run::new(middle, first.pages() - front).0]);
            }
            Watched::No => eviction.note(evicted::UNWATCHED),
            Watched::Yes | Watched::Changing => {
                eviction.stopped = true;
                let pages: usize = runs.iter().map(|&run| Run(run).pages()).sum();
                (0..pages).for_each(|_| eviction.note(evicted::NOT_TRIED));
            }
        }
    }

    /// Moves the pages of one run.
    fn evict_run(&self, eviction: &mut Eviction, run: Run) {
        let mut done = 0;
        while done < run.pages() {
            let from = run.address() + (done * PAGE_SIZE) as u64;
            let to = eviction.to + (eviction.pages * PAGE_SIZE) as u64;
            let (moved, status) = if eviction.stopped {
                (0, evicted::NOT_TRIED)
            } else {
                self.move_run(eviction, to, from, run.pages() - done)
            };
            eviction.stopped |= status == evicted::NOT_TRIED;
            (0..moved.max(1)).for_each(|_| eviction.note(status));
            done += moved.max(1);
        }
    }

    /// Finds out where a page is of which the kernel says that something was at its destination already (EEXIST).
    ///
    /// Nothing was there before: the manager has nothing moved to a place where something is. But where the kernel migrates pages at the
    /// same time, a UFFDIO_MOVE of several pages may say so of pages that it has moved itself
    /// (docs/decisions/0010-changes-without-an-event.md). So the page is moved back.
    fn where_is(&self, to: u64, from: u64) -> u8 {
        match move_pages(self.uffd, from, to, 1, 0) {
            // It is back; or it was never away.
            result if result == PAGE_SIZE as isize || result == -EEXIST => evicted::KEPT,
            // There is nothing at the destination.
            result if result == -ENOENT => EEXIST as u8,
            // It is at the destination and cannot be moved from there at this moment.
            _ => evicted::MOVED,
        }
    }

    /// Whether all from `start` to `end` lies in one mapping that is registered with a userfaultfd.
    ///
    /// UFFDIO_CONTINUE never does anything to private memory. It is refused because the destination is not registered
    /// (ENOENT) before it is refused because the memory is private (EINVAL).
    fn watched(&self, start: u64, end: u64) -> Watched {
        const UFFDIO_CONTINUE: usize = 0xc020_aa07;
        if end <= start {
            return Watched::No;
        }
        let mut request = [start, end - start, 0, 0];
        // SAFETY: the request has the kernel's layout.
        match unsafe { call!(sys::SYS_IOCTL, self.uffd, UFFDIO_CONTINUE, request.as_mut_ptr()) } {
            error if error == -EINVAL => Watched::Yes,
            error if error == -EAGAIN => Watched::Changing,
            _ => Watched::No,
        }
    }

    /// Moves pages from the head of a run; gives how many went, and if none did, the status of the first.
    fn move_run(&self, eviction: &mut Eviction, to: u64, from: u64, pages: usize) -> (usize, u8) {
        let mut result = move_pages(self.uffd, to, from, pages, 0);
        if result == -EINVAL && eviction.has_hope && eviction.change_rights() {
            result = move_pages(self.uffd, to, from, pages, 0);
            if result == -EINVAL {
                eviction.has_hope = false;
                eviction.change_rights();
            }
        }
        if result == -EBUSY && eviction.touch && touch_page(from) {
            result = move_pages(self.uffd, to, from, 1, 0);
        }
        match result {
            moved if moved > 0 => (moved as usize / PAGE_SIZE, evicted::MOVED),
            error if error == -EAGAIN => (0, evicted::NOT_TRIED),
            error if error == -EEXIST => (0, self.where_is(to, from)),
            error => (0, (-error).clamp(1, evicted::UNSURE as isize - 1) as u8),
        }
    }

    /// Whatever is mapped there by now stays what it is: it comes to lie in a huge page, or is left alone.
    fn collapse(&self, address: u64) {
        const MADV_COLLAPSE: usize = 25;
        // SAFETY: what is read at any address stays the same.
        let result = unsafe { call!(sys::SYS_MADVISE, address, HUGE_PAGE_SIZE, MADV_COLLAPSE) };
        self.say(&[kind::COLLAPSED, u64::from(result == 0)], &[]);
    }

    fn discard(&self, address: u64, pages: u64) {
        const ALLOW_SRC_HOLES: u64 = 2;
        let trash = self.region.trash() as u64;
        let pages = pages.min(MAX_BATCH_PAGES as u64);
        let (mut done, mut retries) = (0, RETRIES);
        while done < pages {
            let from = address + done * PAGE_SIZE as u64;
            match move_pages(self.trash_uffd, trash, from, (pages - done) as usize, ALLOW_SRC_HOLES) {
                moved if moved > 0 => {
                    self.empty_trash(moved as usize / PAGE_SIZE);
                    done += moved as u64 / PAGE_SIZE as u64;
                }
                result if result == -EAGAIN => {}
                // Moved, though the kernel says otherwise (see `where_is`), or the program has touched the trash area. What has left
                // is skipped next time.
                result if result == -EEXIST && retries > 0 => {
                    retries -= 1;
                    self.empty_trash((pages - done) as usize);
                }
                // The program has locked or written the staging area: an error lies where nothing was moved to.
                result if result == -EFAULT && retries > 0 => {
                    retries -= 1;
                    // SAFETY: nothing of the program's is there.
                    unsafe { call!(sys::SYS_MADVISE, from, PAGE_SIZE, MADV_DONTNEED) };
                }
                _ => break,
            }
        }
        self.say(&[kind::DISCARDED, done], &[]);
    }

    /// Frees the first pages of the trash area. If the program has locked it (`mlockall`), that is undone for both areas: what is
    /// locked can neither be discarded, nor does the kernel move into it what is not.
    fn empty_trash(&self, pages: usize) {
        let (staging, trash) = (self.region.staging(), self.region.trash());
        // SAFETY: both areas are ours, and what lies between them. The contents of the trash area are not needed.
        unsafe {
            if call!(sys::SYS_MADVISE, trash, pages * PAGE_SIZE, MADV_DONTNEED) == -EINVAL {
                call!(sys::SYS_MUNLOCK, staging, trash + TRASH_PAGES * PAGE_SIZE - staging);
                call!(sys::SYS_MADVISE, trash, pages * PAGE_SIZE, MADV_DONTNEED);
            }
        }
    }
}

/// Touches the beacon of a forked child: a manager answers with the number under which the child's address space can be claimed. `None`
/// if the page reads as zeros.
fn ask(control: &Control) -> Option<Nonce> {
    while_waited_for(control, || look(control.beacon))
}

/// Calls `wait`, which waits for ever if the manager is gone (see [`Control::wait_until_settled`]). The kernel kills the worker if its parent,
/// which waits for it, is killed meanwhile.
fn while_waited_for<T>(control: &Control, wait: impl FnOnce() -> T) -> T {
    sys::die_with_parent(true);
    // SAFETY: no pointers.
    if unsafe { call!(sys::SYS_GETPPID) } != control.parent.load(Relaxed) {
        sys::exit(0)
    }
    let result = wait();
    sys::die_with_parent(false);
    result
}

/// Returns the number in the beacon of a forked child.
fn look(page: usize) -> Option<Nonce> {
    // SAFETY: the beacon is the agent's own page. If the program has unmapped it the worker ends here by a signal.
    match unsafe { (page as *const [u64; 3]).read_volatile() } {
        [beacon::INHERITED, low, high] => Some([low, high]),
        _ => None,
    }
}

/// Whether faults of this forked child are served by a living manager: its beacon, emptied, is filled again.
fn is_served(control: &Control) -> bool {
    while_waited_for(control, || {
        // SAFETY: the beacon is the agent's own page, of which only this process uses the first word. If the program has unmapped
        // it the worker ends here by a signal, and the program runs on.
        unsafe { call!(sys::SYS_MADVISE, control.beacon, PAGE_SIZE, MADV_DONTNEED) };
        look(control.beacon).is_some()
    })
}

/// What the worker knows of the registration of a range.
enum Watched {
    Yes,
    No,
    /// Cannot be told: the layout is changing.
    Changing,
}

/// One EVICT under way.
struct Eviction {
    /// Where the first page goes.
    to: u64,
    /// Bytes that lie there for all of them.
    len: usize,
    /// Whether what lies there may be executed at this moment.
    executes: bool,
    /// Whether it has never been in vain to change that.
    has_hope: bool,
    /// Whether busy pages are touched.
    touch: bool,
    /// The layout is changing: nothing more is tried.
    stopped: bool,
    /// Pages dealt with.
    pages: usize,
    /// Their statuses.
    reply: [u64; MAX_WORDS],
}

impl Eviction {
    fn new(to: u64, pages: usize, touch: bool) -> Eviction {
        let (executes, has_hope, stopped, len) = (false, true, false, pages * PAGE_SIZE);
        Eviction { to, len, executes, has_hope, touch, stopped, pages: 0, reply: [0; MAX_WORDS] }
    }

    /// Lets what lies in the places of all its pages be executed, or no longer; whether that is done. The kernel moves pages only
    /// between memory of the same rights (else EINVAL), and some programs may execute all of their heap.
    fn change_rights(&mut self) -> bool {
        const PROT_READ_WRITE: usize = 3;
        const PROT_EXEC: usize = 4;
        let rights = if self.executes { PROT_READ_WRITE } else { PROT_READ_WRITE | PROT_EXEC };
        // SAFETY: a part of the staging area, which is ours. What lies there stays as it is.
        let is_done = unsafe { call!(sys::SYS_MPROTECT, self.to, self.len, rights) } == 0;
        self.executes ^= is_done;
        is_done
    }

    /// Notes the status of the next page.
    fn note(&mut self, status: u8) {
        evicted::set(&mut self.reply, self.pages, status);
        self.pages += 1;
    }

    /// Moves `page` back, if it is one of those just moved. Where that is refused, the manager does it.
    fn put_back(&mut self, uffd: i32, runs: &[u64], page: u64) {
        let mut index = 0;
        for run in runs {
            let (start, pages) = (Run(*run).address(), Run(*run).pages());
            let offset = page.wrapping_sub(start) as usize / PAGE_SIZE;
            if page >= start && offset < pages {
                index += offset;
                let moved = index < self.pages && evicted::get(&self.reply, index) == evicted::MOVED;
                let from = self.to + (index * PAGE_SIZE) as u64;
                // Where the kernel says that the page is there already, it has moved it (see `where_is`).
                if moved && [PAGE_SIZE as isize, -EEXIST].contains(&move_pages(uffd, page, from, 1, 0)) {
                    evicted::set(&mut self.reply, index, evicted::KEPT);
                }
                return;
            }
            index += pages;
        }
    }

    /// Marks the pages moved since page `first` as not known to have been registered.
    fn doubt(&mut self, first: usize) {
        for page in first..self.pages {
            if evicted::get(&self.reply, page) == evicted::MOVED {
                evicted::set(&mut self.reply, page, evicted::UNSURE);
            }
        }
    }
}

/// Makes the page at `address` this process's alone if a fork left it shared; false if it cannot be written.
///
/// Adds 0 to its first word by a futex operation, which the kernel does atomically, and answers EFAULT (instead of
/// waiting for the manager, or killing us) if the page is not there.
fn touch_page(address: u64) -> bool {
    const FUTEX_WAKE_OP_PRIVATE: usize = 5 | 128;
    // Add 0; wake a thread that waits for the word only if it is a value that hardly occurs.
    const ADD_ZERO: usize = 1 << 28 | 0x5a5;
    let unused = 0u32;
    // SAFETY: adds 0 to the word at `address`. A waiter woken by chance looks at the word again.
    unsafe { call!(sys::SYS_FUTEX, &raw const unused, FUTEX_WAKE_OP_PRIVATE, 0, 0, address, ADD_ZERO) >= 0 }
}

/// UFFDIO_MOVE of up to `pages` pages; gives the bytes moved or a negative errno.
fn move_pages(uffd: i32, to: u64, from: u64, pages: usize, mode: u64) -> isize {
    const UFFDIO_MOVE: usize = 0xc028_aa05;
    #[repr(C)]
    struct Move {
        to: u64,
        from: u64,
        len: u64,
        mode: u64,
        moved: i64,
    }
    let mut request = Move { to, from, len: (pages * PAGE_SIZE) as u64, mode, moved: 0 };
    // SAFETY: the request has the kernel's layout. The kernel checks both ranges; it moves only into an area that is
    // registered with this userfaultfd and only where nothing is.
    let result = unsafe { call!(sys::SYS_IOCTL, uffd, UFFDIO_MOVE, &raw mut request) };
    if request.moved != 0 { request.moved as isize } else { result }
}

fn open_userfaultfd(device: i32) -> Result<i32, isize> {
    const FLAGS: usize = 0o2_004_000; // O_CLOEXEC | O_NONBLOCK
    const USERFAULTFD_IOC_NEW: usize = 0xaa00;
    let result = if device >= 0 {
        // SAFETY: no pointers.
        unsafe { call!(sys::SYS_IOCTL, device, USERFAULTFD_IOC_NEW, FLAGS) }
    } else {
        // SAFETY: no pointers.
        unsafe { call!(sys::SYS_USERFAULTFD, FLAGS) }
    };
    if result < 0 { Err(result) } else { Ok(result as i32) }
}

/// How often a DISCARD is tried again after the kernel has said that it did not move what it has moved.
const RETRIES: usize = 16;

/// How often the manager is called. It ends a connection that is silent for long, as that of a process that is stopped before it
/// can call.
const ATTEMPTS: usize = 3;

#[repr(C)]
struct Buffer {
    base: usize,
    len: usize,
}

/// `struct msghdr`.
#[repr(C)]
struct Header {
    name: usize,
    name_len: u32,
    buffers: *const Buffer,
    buffers_len: usize,
    control: usize,
    control_len: usize,
    flags: i32,
}

/// `struct cmsghdr` with room for the descriptors that any message of ours carries.
#[repr(C)]
struct Descriptors {
    len: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; 3],
}

const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
const DESCRIPTORS_HEADER: usize = 16;

/// Sends a message with up to three descriptors; false if the manager is gone.
pub fn send(socket: i32, words: &[u64], descriptors: &[i32]) -> bool {
    const MSG_NOSIGNAL: usize = 0x4000;
    let mut rights = Descriptors { len: 0, level: SOL_SOCKET, kind: SCM_RIGHTS, descriptors: [-1; 3] };
    rights.descriptors[..descriptors.len()].copy_from_slice(descriptors);
    rights.len = DESCRIPTORS_HEADER + size_of_val(descriptors);
    let buffer = Buffer { base: words.as_ptr() as usize, len: size_of_val(words) };
    let with_rights = !descriptors.is_empty();
    let header = Header {
        name: 0,
        name_len: 0,
        buffers: &raw const buffer,
        buffers_len: 1,
        control: if with_rights { &raw const rights as usize } else { 0 },
        control_len: if with_rights { rights.len } else { 0 },
        flags: 0,
    };
    loop {
        // SAFETY: header, buffer and rights live on this stack until the call returns.
        let sent = unsafe { call!(sys::SYS_SENDMSG, socket, &raw const header, MSG_NOSIGNAL) };
        if sent != -EINTR {
            return sent == buffer.len as isize;
        }
    }
}

/// Receives a message and, where `descriptor` is given, one descriptor; gives the words received, 0 or less if the
/// manager is gone.
pub fn receive(socket: i32, words: &mut [u64; MAX_WORDS], descriptor: Option<&mut i32>) -> isize {
    const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
    let mut rights = Descriptors { len: 0, level: 0, kind: 0, descriptors: [-1; 3] };
    let buffer = Buffer { base: words.as_mut_ptr() as usize, len: size_of_val(words) };
    let mut header = Header {
        name: 0,
        name_len: 0,
        buffers: &raw const buffer,
        buffers_len: 1,
        control: if descriptor.is_some() { &raw mut rights as usize } else { 0 },
        control_len: if descriptor.is_some() { size_of::<Descriptors>() } else { 0 },
        flags: 0,
    };
    loop {
        // SAFETY: header, buffer and rights live on this stack until the call returns.
        let received = unsafe { call!(sys::SYS_RECVMSG, socket, &raw mut header, MSG_CMSG_CLOEXEC) };
        if received == -EINTR {
            continue;
        }
        // SAFETY: the kernel has written to `rights` behind the compiler's back.
        let rights = unsafe { (&raw const rights).read_volatile() };
        if let Some(descriptor) = descriptor
            && rights.len >= DESCRIPTORS_HEADER + 4
            && (rights.level, rights.kind) == (SOL_SOCKET, SCM_RIGHTS)
        {
            *descriptor = rights.descriptors[0];
        }
        return received / size_of::<u64>() as isize;
    }
}

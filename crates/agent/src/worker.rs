//! The worker: a process that shares the program's memory and moves its pages when the manager says so.
//!
//! 1. The program clones an usher, the usher clones the worker and ends: so the worker is no child of the program, which
//!    would otherwise hear of its end (a process that executes another program hears of all its children).
//! 2. It leaves everything of the program but the memory: descriptors, session, signals.
//! 3. It opens the userfaultfds (one for the program's memory and the staging area, one for the trash area), attaches
//!    to the manager, and in a forked child reads the inherited beacon.
//! 4. It obeys: EVICT moves pages into the staging area, DISCARD frees pages of the staging area, COLLAPSE makes a huge page of
//!    small ones, which changes nothing that a program could read.
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
//! the worker holds a copy of the userfaultfd.
//!
//! # Safety
//! Shares its memory with the program: it writes only to its own stack, to the control mapping and, by UFFDIO_MOVE, to
//! the staging and trash areas.

use core::mem::size_of;
use core::sync::atomic::{
    AtomicBool, AtomicIsize, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use uzswap_proto::{
    GREETING_WORDS, HUGE_PAGE_SIZE, Hello, Job, MAX_BATCH_PAGES, MAX_WORDS, PAGE_SIZE, Run, evict, evicted, kind, step,
};

use crate::area::{REGION_LEN, Region};
use crate::sys::{self, EAGAIN, EBUSY, EINTR, ESRCH, Processors, call};

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
    /// Whether it runs on at once, and is attached if it is still there a while later.
    pub may_wait: bool,
    /// Where it may run, if its thread stays where it is meanwhile.
    pub processors: Option<Processors>,
}

/// What the program's thread, the usher and the worker tell each other, one after the other.
pub struct Control {
    program: Program,
    beacon: usize,
    region: Region,
    /// A handle on the program, or a negative errno. Told by the usher to the worker.
    pidfd: AtomicIsize,
    /// The worker's process id, 0 if none is wanted any more, or a negative errno. Told by the usher to the program.
    pub worker: AtomicIsize,
    /// Whether the program may run on: 0 or 1, a futex. Told by the worker to the usher.
    settled: AtomicU32,
    /// Whether pages have been evicted. Told by the worker to the program.
    pub evicts: AtomicBool,
}

impl Control {
    /// For a program, its beacon and the region of its worker.
    pub fn new(program: Program, beacon: usize, region: Region) -> Control {
        let (pidfd, worker, settled) = (AtomicIsize::new(-1), AtomicIsize::new(0), AtomicU32::new(0));
        let evicts = AtomicBool::new(program.inherits);
        Control { program, beacon, region, pidfd, worker, settled, evicts }
    }

    /// Lets the program run.
    fn settle(&self) {
        const FUTEX_WAKE_PRIVATE: usize = 1 | 128;
        self.settled.store(1, Release);
        // SAFETY: wakes whoever waits for this word.
        unsafe { call!(sys::SYS_FUTEX, &raw const self.settled, FUTEX_WAKE_PRIVATE, 1) };
    }

    /// Waits until the worker has settled, but not for ever.
    fn wait_until_settled(&self) {
        const FUTEX_WAIT_PRIVATE: usize = 128;
        const TRIES: usize = 20;
        let moment = [0u64, 100_000_000];
        for _ in 0..TRIES {
            if self.settled.load(Acquire) != 0 {
                return;
            }
            // SAFETY: waits for 100 ms at most, while the word is 0.
            unsafe { call!(sys::SYS_FUTEX, &raw const self.settled, FUTEX_WAIT_PRIVATE, 0, &raw const moment) };
        }
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
        if call!(sys::SYS_GETPPID) as i32 == shared.program.id {
            let stack = shared.region.stack_top() as *mut u8;
            let worker = sys::clone_memory(sys::CLONE_FILES, stack, main, control);
            shared.worker.store(worker, Relaxed);
            if worker > 0 && !shared.program.may_wait {
                shared.wait_until_settled();
            }
        }
    }
    sys::exit(0)
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
        Some(worker) => {
            control.program.processors.iter().for_each(sys::run_on);
            worker.obey(control)
        }
        None => control.settle(),
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
        call!(sys::SYS_PRCTL, PR_SET_NAME, c"uzswap-agent".as_ptr());
    }
}

struct Worker {
    socket: i32,
    /// The greeting: from word 1 on the path of this library, as a C string.
    greeting: [u64; GREETING_WORDS],
    /// A pidfd.
    program: i32,
    uffd: i32,
    trash_uffd: i32,
    region: Region,
}

impl Worker {
    /// Attaches to the manager; `None` if the program is to run unmanaged.
    fn attach(control: &Control) -> Option<Worker> {
        let pidfd = control.pidfd.load(Relaxed);
        let mut words = [0; MAX_WORDS];
        let mut device = -1;
        let socket =
            connect(control.program.job).ok().filter(|&socket| receive(socket, &mut words, Some(&mut device)) > 0);
        let Some(socket) = socket.filter(|_| words[0] == kind::GREETING) else {
            if control.program.inherits {
                // The manager is gone, and with it what the program has inherited.
                kill(pidfd);
            }
            return None;
        };
        let failed = |step: u64, errno: isize| {
            send(
                socket,
                &[kind::FAILED, control.program.job.token, step, -errno as u64, control.program.id as u64],
                &[],
            );
            None
        };
        if pidfd == -ESRCH {
            return None;
        }
        if pidfd < 0 {
            return failed(step::PIDFD, pidfd);
        }
        let (uffd, trash_uffd) = match (open_userfaultfd(device), open_userfaultfd(device)) {
            (Ok(uffd), Ok(trash_uffd)) => (uffd, trash_uffd),
            (Err(errno), _) | (_, Err(errno)) => return failed(step::USERFAULTFD, errno),
        };
        let mut greeting = [0; GREETING_WORDS];
        greeting.copy_from_slice(&words[..GREETING_WORDS]);
        let mut worker = Worker { socket, greeting, program: pidfd as i32, uffd, trash_uffd, region: control.region };
        worker.introduce(control, &mut words);
        Some(worker)
    }

    /// Says hello; in a forked child, lights the beacon and takes the userfaultfd that it inherited.
    fn introduce(&mut self, control: &Control, words: &mut [u64; MAX_WORDS]) {
        let hello = Hello {
            token: control.program.job.token,
            forked: control.program.forked,
            // SAFETY: no arguments.
            tid: unsafe { call!(sys::SYS_GETTID) } as u32,
            region: self.region.start() as u64,
            region_len: REGION_LEN as u64,
            beacon: control.beacon as u64,
            staging: self.region.staging() as u64,
            trash: self.region.trash() as u64,
        };
        let count = hello.encode(words);
        self.say(&words[..count], &[self.uffd, self.trash_uffd, self.program]);
        if !control.program.forked {
            return;
        }
        // SAFETY: the kernel reads 8 bytes of the beacon as a set of signals to block (all are) and says EFAULT if there
        // is no beacon any more.
        unsafe { call!(sys::SYS_RT_SIGPROCMASK, 0, control.beacon, 0, 8) };
        self.say(&[kind::BEACON_DONE], &[]);
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
                kind::GO => control.settle(),
                kind::EXIT => return control.settle(),
                kind::RELEASE => {
                    control.evicts.store(false, Relaxed);
                    return control.settle();
                }
                _ => self.kill_program(),
            }
        }
    }

    /// The manager is gone: evicted pages are lost, and the program with them. Nobody may be left to clear away this
    /// library.
    fn kill_program(&self) -> ! {
        kill(self.program as isize);
        // SAFETY: the greeting, which came from the manager, ends with a zero byte.
        unsafe { call!(sys::SYS_UNLINK, self.greeting[1..].as_ptr()) };
        sys::exit(0)
    }

    fn say(&self, words: &[u64], descriptors: &[i32]) {
        if !send(self.socket, words, descriptors) {
            self.kill_program();
        }
    }

    fn evict(&self, words: &[u64]) {
        let mut reply = [0; MAX_WORDS];
        let mut pages = 0;
        let mut to = words[1];
        let mut stopped = false;
        for run in words[evict::FIRST_RUN..].iter().map(|&word| Run(word)) {
            if pages + run.pages() > MAX_BATCH_PAGES {
                break;
            }
            let mut done = 0;
            while done < run.pages() {
                let offset = (done * PAGE_SIZE) as u64;
                let (moved, status) = if stopped {
                    (0, evicted::NOT_TRIED)
                } else {
                    self.move_run(to + offset, run.address() + offset, run.pages() - done, words[2] & evict::TOUCH != 0)
                };
                stopped |= status == evicted::NOT_TRIED;
                for page in 0..moved {
                    evicted::set(&mut reply, pages + done + page, evicted::MOVED);
                }
                done += moved;
                if moved == 0 {
                    evicted::set(&mut reply, pages + done, status);
                    done += 1;
                }
            }
            pages += run.pages();
            to += (run.pages() * PAGE_SIZE) as u64;
        }
        reply[0] = kind::EVICTED;
        reply[1] = pages as u64;
        self.say(&reply[..evicted::FIRST_STATUS + pages.div_ceil(8)], &[]);
    }

    /// Moves pages from the head of a run; gives how many went, and if none did, the status of the first.
    fn move_run(&self, to: u64, from: u64, pages: usize, touch: bool) -> (usize, u8) {
        let mut result = move_pages(self.uffd, to, from, pages, 0);
        if result == -EBUSY && touch && touch_page(from) {
            result = move_pages(self.uffd, to, from, 1, 0);
        }
        match result {
            moved if moved > 0 => (moved as usize / PAGE_SIZE, evicted::MOVED),
            error if error == -EAGAIN => (0, evicted::NOT_TRIED),
            error => (0, (-error).clamp(1, 254) as u8),
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
        const MADV_DONTNEED: usize = 4;
        let trash = self.region.trash() as u64;
        let pages = pages.min(MAX_BATCH_PAGES as u64);
        let mut done = 0;
        while done < pages {
            let from = address + done * PAGE_SIZE as u64;
            match move_pages(self.trash_uffd, trash, from, (pages - done) as usize, ALLOW_SRC_HOLES) {
                moved if moved > 0 => {
                    // SAFETY: the trash area is ours.
                    unsafe { call!(sys::SYS_MADVISE, trash, moved, MADV_DONTNEED) };
                    done += moved as u64 / PAGE_SIZE as u64;
                }
                result if result == -EAGAIN => {}
                _ => break,
            }
        }
        self.say(&[kind::DISCARDED, done], &[]);
    }
}

/// Kills the process that `pidfd` stands for.
fn kill(pidfd: isize) {
    const SIGKILL: usize = 9;
    // SAFETY: no signal information.
    unsafe { call!(sys::SYS_PIDFD_SEND_SIGNAL, pidfd, SIGKILL, 0, 0) };
}

/// Makes the page at `address` this process's alone if a fork left it shared; false if it cannot be written.
///
/// Adds 0 to its first word by a futex operation, which the kernel does atomically, and answers EFAULT (instead of
/// waiting for the manager, or killing us) if the page is not there.
fn touch_page(address: u64) -> bool {
    const FUTEX_WAKE_OP_PRIVATE: usize = 5 | 128;
    // Add 0; wake somebody who waits for the word only if it is a value that hardly occurs.
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

/// Connects to the job's manager.
pub fn connect(job: Job) -> Result<i32, isize> {
    const AF_UNIX: u16 = 1;
    const SEQPACKET_CLOEXEC: usize = 5 | 0o2_000_000;
    #[repr(C)]
    struct Address {
        family: u16,
        zero: u8,
        name: [u8; uzswap_proto::SOCKET_NAME],
    }
    let address = Address { family: AF_UNIX, zero: 0, name: job.socket_name() };
    // SAFETY: no pointers.
    let socket = unsafe { call!(sys::SYS_SOCKET, AF_UNIX, SEQPACKET_CLOEXEC, 0) };
    if socket < 0 {
        return Err(socket);
    }
    // The address has no padding at its end: 2 + 1 + 23 bytes, aligned to 2.
    const { assert!(size_of::<Address>() == 3 + uzswap_proto::SOCKET_NAME) };
    loop {
        // SAFETY: the address lives on this stack.
        let result = unsafe { call!(sys::SYS_CONNECT, socket, &raw const address, size_of::<Address>()) };
        match result {
            0.. => return Ok(socket as i32),
            result if result == -EINTR => {}
            error => {
                // SAFETY: our own descriptor.
                unsafe { call!(sys::SYS_CLOSE, socket) };
                return Err(error);
            }
        }
    }
}

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

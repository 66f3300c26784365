//! What agent, manager and tools say to each other.
//!
//! One `SOCK_SEQPACKET` connection on an abstract unix socket joins each worker (see the agent crate) to the manager.
//! A message is a short array of 64-bit words in the machine's own byte order (both ends run on one machine); word 0 is
//! its [`kind`]. Descriptors travel beside it as `SCM_RIGHTS`.
//!
//! ```text
//!   worker                                manager
//!     │ ───────────── connect ──────────────▶ │
//!     │ ◀── GREETING  (+ /dev/userfaultfd) ── │   the device, so that programs which changed user can still attach
//!     │ ─── HELLO     (+ 3 descriptors) ────▶ │   userfaultfd, trash userfaultfd, pidfd; or FAILED
//!     │ (forked child: reads the beacon)      │   a fault there tells which inherited userfaultfd is whose
//!     │ ─── BEACON_DONE ────────────────────▶ │
//!     │ ◀── MAIN      (+ userfaultfd) ─────── │   a forked child gets the userfaultfd it inherited, if it did
//!     │ ◀── GO ────────────────────────────── │   the program runs
//!     │ ◀── EVICT / DISCARD / COLLAPSE ────── │   any number of times, each answered
//!     │ ─── EVICTED / DISCARDED / COLLAPSED ▶ │
//!     │ ◀── EXIT, RELEASE or end of file ──── │   end of file alone: the manager is gone, kill the program
//! ```
//!
//! A program thread that calls `madvise` with a hint opens a connection of its own, says [`Advise`] and waits for
//! [`kind::ADVISED`].
//!
//! The manager trusts nothing in a message: a wrong one harms only the program that sent it.
//!
//! What operators say to the manager is in [`control`].
#![no_std]

pub mod control;

/// Bytes in a page.
pub const PAGE_SIZE: usize = 4096;

/// The environment variable that tells the agent where its manager is: [`Job`] in text form.
pub const ENV_JOB: &str = "UZSWAP_JOB";

/// The prefix of the abstract socket's name.
pub const SOCKET_PREFIX: &str = "uzswap-";

/// Where the board begins, in the agent's file and in every program: a page of the library that the manager writes to, by
/// way of the file, and programs only read. Nobody has to be asked for what it says. The byte after this is [`Board`].
pub const BOARD: [u8; 16] = *b"uzswap's board 1";

/// What is on the board: 1 if all limits are far, else 0.
pub type Board = u8;

/// Changes whenever a message does.
pub const VERSION: u64 = 5;

/// Bytes of a huge page.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Words in the longest message.
pub const MAX_WORDS: usize = 4 + MAX_BATCH_PAGES;

/// Pages that one [`kind::EVICT`] can name.
pub const MAX_BATCH_PAGES: usize = 512;

/// Words of [`kind::GREETING`].
pub const GREETING_WORDS: usize = 17;

/// [`kind::GREETING`] with the agent's path, which is left out if it is too long.
pub fn greeting(agent: &[u8]) -> [u64; GREETING_WORDS] {
    let mut words = [0; GREETING_WORDS];
    words[0] = kind::GREETING;
    if agent.len() < (GREETING_WORDS - 1) * 8 {
        for (word, bytes) in words[1..].iter_mut().zip(agent.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(padded);
        }
    }
    words
}

/// Pages in a process's staging area (16 MiB of address space; memory only while pages wait there).
pub const STAGING_PAGES: usize = 4096;

/// Pages in a process's trash area, through which discarded pages leave.
pub const TRASH_PAGES: usize = MAX_BATCH_PAGES;

/// Word 0 of a message.
pub mod kind {
    /// Manager to worker, [`super::GREETING_WORDS`] long, with the userfaultfd device if the manager could open it. From
    /// word 1 on the agent's path as a C string, for the worker to remove if manager and front die together.
    pub const GREETING: u64 = 1;
    /// Worker to manager: [`super::Hello`].
    pub const HELLO: u64 = 2;
    /// Worker to manager: the beacon has been read.
    pub const BEACON_DONE: u64 = 3;
    /// Manager to worker, with the userfaultfd to move pages on.
    pub const MAIN: u64 = 4;
    /// Manager to worker: whatever the program touches is seen from now on, it may run.
    pub const GO: u64 = 5;
    /// Manager to worker: see [`super::evict`].
    pub const EVICT: u64 = 6;
    /// Worker to manager: see [`super::evicted`].
    pub const EVICTED: u64 = 7;
    /// Manager to worker: word 1 the address, word 2 the pages of a run of the staging area to free.
    pub const DISCARD: u64 = 8;
    /// Worker to manager: word 1 is how many of the pages were freed, from the first on.
    pub const DISCARDED: u64 = 9;
    /// Manager to worker: the program is gone, go too.
    pub const EXIT: u64 = 10;
    /// Program to manager: [`super::Advise`].
    pub const ADVISE: u64 = 11;
    /// Manager to program: the advice has been followed.
    pub const ADVISED: u64 = 12;
    /// Manager to worker: nothing of the program's is evicted, and nothing will be: leave it alone, and go.
    pub const RELEASE: u64 = 14;
    /// Manager to worker: make one huge page of the pages of the 2 MiB that begin at the address in word 1, which are all there.
    pub const COLLAPSE: u64 = 15;
    /// Worker to manager: word 1 is 1 if that is done, else 0.
    pub const COLLAPSED: u64 = 16;
    /// Worker to manager: word 1 the token, word 2 a [`super::step`], word 3 an errno. The program runs unmanaged.
    pub const FAILED: u64 = 13;
}

/// What a worker was doing when it failed to attach.
pub mod step {
    /// Opening the userfaultfds.
    pub const USERFAULTFD: u64 = 1;
    /// Opening a pidfd of its program.
    pub const PIDFD: u64 = 2;
}

/// Where a job's manager listens and the secret that admits to it.
///
/// In text, as [`ENV_JOB`] carries it: 16 hexadecimal digits of `name`, 16 of `token`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// The socket is called [`SOCKET_PREFIX`] and these 16 digits.
    pub name: u64,
    /// Every first message on a connection carries this.
    pub token: u64,
}

/// Length of [`Job`] in text.
pub const JOB_TEXT: usize = 32;

/// Length of the abstract socket's name, without the leading zero byte.
pub const SOCKET_NAME: usize = SOCKET_PREFIX.len() + 16;

impl Job {
    /// The text for [`ENV_JOB`].
    pub fn to_text(self) -> [u8; JOB_TEXT] {
        let mut text = [0; JOB_TEXT];
        write_hex(self.name, &mut text[..16]);
        write_hex(self.token, &mut text[16..]);
        text
    }

    /// Reads what [`Job::to_text`] wrote; `None` if it is anything else.
    pub fn from_text(text: &[u8]) -> Option<Job> {
        if text.len() != JOB_TEXT {
            return None;
        }
        Some(Job { name: read_hex(&text[..16])?, token: read_hex(&text[16..])? })
    }

    /// The abstract socket's name, without the leading zero byte.
    pub fn socket_name(self) -> [u8; SOCKET_NAME] {
        let mut name = [0; SOCKET_NAME];
        name[..SOCKET_PREFIX.len()].copy_from_slice(SOCKET_PREFIX.as_bytes());
        write_hex(self.name, &mut name[SOCKET_PREFIX.len()..]);
        name
    }
}

fn write_hex(value: u64, out: &mut [u8]) {
    for (i, digit) in out.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(value >> (60 - 4 * i)) as usize & 15];
    }
}

fn read_hex(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0u64, |value, &c| Some(value << 4 | u64::from(char::from(c).to_digit(16)?)))
}

/// A worker introduces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// [`Job::token`].
    pub token: u64,
    /// Whether the process came from fork without exec: it may have inherited a userfaultfd.
    pub forked: bool,
    /// The worker's thread id as it sees it itself: faults on the beacon carry it.
    pub tid: u32,
    /// Start of the one region that holds the agent's areas: nothing in it belongs to the program.
    pub region: u64,
    /// Length of the region in bytes.
    pub region_len: u64,
    /// The beacon page.
    pub beacon: u64,
    /// The staging area, [`STAGING_PAGES`] long.
    pub staging: u64,
    /// The trash area, [`TRASH_PAGES`] long.
    pub trash: u64,
}

impl Hello {
    /// Writes the message; returns its length in words.
    pub fn encode(&self, words: &mut [u64; MAX_WORDS]) -> usize {
        let message = [
            kind::HELLO,
            VERSION,
            self.token,
            u64::from(self.forked),
            u64::from(self.tid),
            self.region,
            self.region_len,
            self.beacon,
            self.staging,
            self.trash,
        ];
        words[..message.len()].copy_from_slice(&message);
        message.len()
    }

    /// Reads the message; `None` if it is not one.
    pub fn decode(words: &[u64]) -> Option<Hello> {
        let &[kind::HELLO, VERSION, token, forked, tid, region, region_len, beacon, staging, trash] = words else {
            return None;
        };
        let tid = u32::try_from(tid).ok()?;
        Some(Hello { token, forked: forked != 0, tid, region, region_len, beacon, staging, trash })
    }
}

/// A run of pages in one word: the address of the first, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run(pub u64);

impl Run {
    /// `address` is page-aligned; `pages` is 1 to 4096.
    pub fn new(address: u64, pages: usize) -> Run {
        debug_assert!(address.is_multiple_of(PAGE_SIZE as u64) && (1..=PAGE_SIZE).contains(&pages));
        Run(address | (pages as u64 - 1))
    }

    /// The first page's address.
    pub fn address(self) -> u64 {
        self.0 & !(PAGE_SIZE as u64 - 1)
    }

    /// The number of pages.
    pub fn pages(self) -> usize {
        (self.0 & (PAGE_SIZE as u64 - 1)) as usize + 1
    }
}

/// Move runs of the program's pages into the staging area, one after another from `destination` on.
///
/// Words: kind, destination, flags, then one [`Run`] each.
pub mod evict {
    /// Touch a page for writing if it is refused as busy: one that a fork left shared becomes this process's alone.
    pub const TOUCH: u64 = 1;
    /// Index of the first run.
    pub const FIRST_RUN: usize = 3;
}

/// The answer to [`kind::EVICT`]: kind, number of pages, then a status byte for each page, eight to a word.
pub mod evicted {
    /// Index of the first word of status bytes.
    pub const FIRST_STATUS: usize = 2;
    /// The page is in the staging area now.
    pub const MOVED: u8 = 0;
    /// Not tried: the layout of the address space was changing. Anything else is an errno.
    pub const NOT_TRIED: u8 = 255;

    /// Sets the status of page `index`.
    pub fn set(words: &mut [u64], index: usize, status: u8) {
        let (word, shift) = (FIRST_STATUS + index / 8, index % 8 * 8);
        words[word] = words[word] & !(0xff << shift) | u64::from(status) << shift;
    }

    /// The status of page `index`, [`NOT_TRIED`] when the message is too short to tell.
    pub fn get(words: &[u64], index: usize) -> u8 {
        words.get(FIRST_STATUS + index / 8).map_or(NOT_TRIED, |word| (word >> (index % 8 * 8)) as u8)
    }
}

/// What a program asks of a range by `madvise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// `MADV_PAGEOUT`: evict now.
    PageOut,
    /// `MADV_COLD`: make coldest.
    Cold,
    /// `MADV_WIPEONFORK`: a forked child will find these pages empty; leave them alone from now on.
    Exclude,
}

/// A program's hint about a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advise {
    /// [`Job::token`].
    pub token: u64,
    /// The hint.
    pub advice: Advice,
    /// First byte, page-aligned.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Advise {
    /// Writes the message; returns its length in words.
    pub fn encode(&self, words: &mut [u64; MAX_WORDS]) -> usize {
        let advice = match self.advice {
            Advice::PageOut => 0,
            Advice::Cold => 1,
            Advice::Exclude => 2,
        };
        let message = [kind::ADVISE, VERSION, self.token, advice, self.address, self.len];
        words[..message.len()].copy_from_slice(&message);
        message.len()
    }

    /// Reads the message; `None` if it is not one.
    pub fn decode(words: &[u64]) -> Option<Advise> {
        let &[kind::ADVISE, VERSION, token, advice, address, len] = words else { return None };
        let advice = *[Advice::PageOut, Advice::Cold, Advice::Exclude].get(usize::try_from(advice).ok()?)?;
        Some(Advise { token, advice, address, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_survives_the_environment() {
        let job = Job { name: 0x0123_4567_89ab_cdef, token: u64::MAX };
        assert_eq!(Job::from_text(&job.to_text()), Some(job));
        assert_eq!(Job::from_text(b"short"), None);
        assert_eq!(Job::from_text(&[b'g'; JOB_TEXT]), None);
    }

    #[test]
    fn messages_survive_the_wire() {
        let mut words = [0; MAX_WORDS];
        let hello = Hello { token: 1, forked: true, tid: 7, region: 2, region_len: 3, beacon: 4, staging: 5, trash: 6 };
        let n = hello.encode(&mut words);
        assert_eq!(Hello::decode(&words[..n]), Some(hello));
        assert_eq!(Hello::decode(&words[..n - 1]), None);
        let advise = Advise { token: 9, advice: Advice::Cold, address: 4096, len: 8192 };
        let n = advise.encode(&mut words);
        assert_eq!(Advise::decode(&words[..n]), Some(advise));
        words[3] = 3;
        assert_eq!(Advise::decode(&words[..n]), None);
    }

    #[test]
    fn runs_and_statuses_pack() {
        let run = Run::new(0x7f00_0000_0000, 4096);
        assert_eq!((run.address(), run.pages()), (0x7f00_0000_0000, 4096));
        let mut words = [u64::MAX; MAX_WORDS];
        evicted::set(&mut words, 11, 16);
        evicted::set(&mut words, 12, 0);
        assert_eq!((evicted::get(&words, 10), evicted::get(&words, 11), evicted::get(&words, 12)), (255, 16, 0));
        assert_eq!(evicted::get(&words[..2], 0), evicted::NOT_TRIED);
    }
}

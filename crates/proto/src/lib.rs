//! What agent, manager and tools say to each other.
//!
//! One `SOCK_SEQPACKET` connection on an abstract unix socket joins each worker (see the agent crate) to the manager.
//! A message is a short array of 64-bit words in the machine's own byte order (both ends run on one machine); word 0 is
//! its [`kind`]. Descriptors travel beside it as `SCM_RIGHTS`.
//!
//! ```text
//!   worker                                manager
//!     │ ──────── connect, CALL ─────────────▶ │   the job's token; without it nothing is answered
//!     │ ◀── GREETING  (+ /dev/userfaultfd) ── │   the device, so that programs which changed user can still attach
//!     │ ─── HELLO     (+ 3 descriptors) ────▶ │   userfaultfd, trash userfaultfd, pidfd; or FAILED
//!     │           (proof of memory)           │   the manager writes by the userfaultfd and reads from the process
//!     │ ◀── MAIN      (+ userfaultfd) ─────── │   a forked child gets the userfaultfd it inherited, if it did
//!     │ ◀── TETHER    (+ socket) ──────────── │   before anything is evicted: ties the program to the manager's life
//!     │ ◀── GO ────────────────────────────── │   the program runs
//!     │ ◀── HEADS     (+ memory) ──────────── │   where the robust lists of the program's threads begin, when that changes
//!     │ ◀── EVICT / DISCARD / COLLAPSE ────── │   any number of times, each answered
//!     │ ─── EVICTED / DISCARDED / COLLAPSED ▶ │
//!     │ ◀── EXIT, RELEASE or end of file ──── │   end of file alone: the manager is gone, kill the program
//! ```
//!
//! **Proof of memory.** A descriptor, a process id and an address that a worker names are claims. The manager copies a
//! random number through the userfaultfd into the proof page of the staging area, and one through the trash
//! userfaultfd into that of the trash area, and finds both numbers in the memory of the process at the other end of
//! the connection, or refuses. The same page proves that the pidfd is of a process with that memory.
//!
//! **Beacon.** A forked child has to name the userfaultfd that it inherited, which only the manager holds. The beacon is a
//! page that is empty in every child ([`beacon`]). The child reads it; that read is a fault on the inherited
//! userfaultfd, which the manager answers with a random number. The child says this number in HELLO. No process id takes
//! part, so the namespaces of the child do not matter.
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

/// How far behind the title of the board the inode number of the manager's pid namespace is, 8 bytes.
pub const BOARD_PID_NAMESPACE: usize = 8;

/// How far behind the title of the board the process of this pid namespace is that has opened the manager's sockets, 16 bytes: its number there, and the inode number of a
/// pidfd for it, which no other process has until the machine restarts; 0 where the kernel gives pidfds none of their own (before
/// Linux 6.9).
pub const BOARD_LANDMARK: usize = 16;

/// How far behind the title of the board the number of the manager's user is, 8 bytes.
pub const BOARD_OWNER: usize = 32;

/// How far behind the title of the board the inode number of the manager's user namespace is, 8 bytes.
pub const BOARD_USER_NAMESPACE: usize = 40;

/// How far behind the title of the board the path of the manager's socket is, [`SOCKET_PATH`] bytes, with a zero byte behind it.
/// An abstract socket belongs to a network namespace; this one is tried where that is not to be reached.
pub const BOARD_SOCKET_PATH: usize = 48;

/// Length of the longest path of a unix socket, with the zero byte behind it.
pub const SOCKET_PATH: usize = 108;

/// Changes whenever a message does.
pub const VERSION: u64 = 7;

/// Bytes of a huge page.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Words in the longest message.
pub const MAX_WORDS: usize = 4 + MAX_BATCH_PAGES;

/// Heads of robust lists that a worker remembers: the list of any further thread is not followed.
pub const MAX_HEADS: usize = 4096;

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

/// The proof page of an area of `pages` pages: the page behind the last, in the same mapping.
pub const fn proof_page(area: u64, pages: usize) -> u64 {
    area + (pages * PAGE_SIZE) as u64
}

/// A random number that only the manager and the process to which it was shown know.
pub type Nonce = [u64; 2];

/// What the first words of the beacon page say.
pub mod beacon {
    use super::Nonce;

    /// Word 0 in the memory of a process whose worker was made there. In a forked child the page is empty.
    pub const ATTACHED: u64 = u64::from_ne_bytes(*b"attached");
    /// Word 0 of the page with which the manager answers a child: the two words of its [`Nonce`] follow.
    pub const INHERITED: u64 = u64::from_ne_bytes(*b"inherits");

    /// The first words of the page for a child.
    pub const fn words(nonce: Nonce) -> [u64; 3] {
        [INHERITED, nonce[0], nonce[1]]
    }
}

/// Word 0 of a message.
pub mod kind {
    /// Worker to manager, the first message: word 1 is [`super::VERSION`], word 2 the job's token.
    pub const CALL: u64 = 17;
    /// Manager to worker, the answer to CALL, [`super::GREETING_WORDS`] long, with the userfaultfd device if the manager could open it. From
    /// word 1 on the agent's path as a C string, for the worker to remove if manager and front die together.
    pub const GREETING: u64 = 1;
    /// Worker to manager: [`super::Hello`].
    pub const HELLO: u64 = 2;
    /// Manager to worker, with a socket: the kernel kills the program when the other end of it closes. The worker ties the
    /// socket and its userfaultfds to the memory of the program, so that they stay open as long as that exists.
    pub const TETHER: u64 = 3;
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
    /// Manager to worker: word 1 how many heads came before, then one head of a robust list per word. With the first heads comes a
    /// descriptor of the program's memory (`/proc/PID/mem`), which can be read without waiting for an evicted page. Not answered.
    pub const HEADS: u64 = 18;
    /// Worker to manager: word 1 a [`super::step`], word 2 an errno. The program runs unmanaged.
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

/// The words of [`kind::CALL`].
pub fn call(token: u64) -> [u64; 3] {
    [kind::CALL, VERSION, token]
}

/// The token that a [`kind::CALL`] carries; `None` if the message is no call of this version.
pub fn called(words: &[u64]) -> Option<u64> {
    let &[kind::CALL, VERSION, token] = words else { return None };
    Some(token)
}

/// A worker introduces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Whether the process came from fork without exec.
    pub forked: bool,
    /// What the manager wrote into the beacon of this process, if it did: then the process has inherited a userfaultfd.
    pub nonce: Option<Nonce>,
    /// Start of the one region that holds the agent's areas: nothing in it belongs to the program.
    pub region: u64,
    /// Length of the region in bytes.
    pub region_len: u64,
    /// The beacon page.
    pub beacon: u64,
    /// The staging area, [`STAGING_PAGES`] long, with its proof page behind it.
    pub staging: u64,
    /// The trash area, [`TRASH_PAGES`] long, with its proof page behind it.
    pub trash: u64,
}

impl Hello {
    /// Writes the message; returns its length in words.
    pub fn encode(&self, words: &mut [u64; MAX_WORDS]) -> usize {
        let [low, high] = self.nonce.unwrap_or_default();
        let message = [
            kind::HELLO,
            u64::from(self.forked) | u64::from(self.nonce.is_some()) << 1,
            low,
            high,
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
        let &[kind::HELLO, flags @ 0..=3, low, high, region, region_len, beacon, staging, trash] = words else {
            return None;
        };
        let nonce = (flags & 2 != 0).then_some([low, high]);
        Some(Hello { forked: flags & 1 != 0, nonce, region, region_len, beacon, staging, trash })
    }

    /// The proof page of the staging area.
    pub fn staging_proof(&self) -> u64 {
        proof_page(self.staging, STAGING_PAGES)
    }

    /// The proof page of the trash area.
    pub fn trash_proof(&self) -> u64 {
        proof_page(self.trash, TRASH_PAGES)
    }

    /// Whether the areas are made of whole pages and lie beside each other inside the region, which lies in the lower half of
    /// the address space.
    pub fn is_sound(&self) -> bool {
        const END: u64 = 1 << 47;
        let page = PAGE_SIZE as u64;
        let inside = |start: u64, pages: usize| {
            let len = (pages * PAGE_SIZE) as u64;
            start.is_multiple_of(page)
                && start >= self.region
                && start.checked_add(len).is_some_and(|end| end <= self.region.saturating_add(self.region_len))
        };
        let apart = self.staging_proof() + page <= self.trash || self.trash_proof() + page <= self.staging;
        self.region.is_multiple_of(page)
            && self.region >= page
            && self.region.checked_add(self.region_len).is_some_and(|end| end <= END)
            && self.beacon.is_multiple_of(page)
            && self.beacon < END
            && inside(self.staging, STAGING_PAGES + 1)
            && inside(self.trash, TRASH_PAGES + 1)
            && apart
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

/// The answer to [`kind::EVICT`]: kind, number of pages, then a status byte for each page, eight to a word, then the pages that hold
/// robust mutexes which threads hold, one per word.
pub mod evicted {
    use super::MAX_BATCH_PAGES;

    /// Index of the first word of status bytes.
    pub const FIRST_STATUS: usize = 2;
    /// The page is in the staging area now.
    pub const MOVED: u8 = 0;
    /// Not tried: the layout of the address space was changing. Anything not named here is an errno.
    pub const NOT_TRIED: u8 = 255;
    /// Not moved: the page does not lie in a registered mapping.
    pub const UNWATCHED: u8 = 254;
    /// The page is in the staging area now, but its mapping was not seen registered right after the move.
    pub const UNSURE: u8 = 253;
    /// The page is where it was: it was moved, was then found to hold a robust mutex that a thread holds, and was moved back.
    pub const KEPT: u8 = 252;

    /// Index of the first word after the statuses of `pages` pages.
    pub const fn first_held(pages: usize) -> usize {
        FIRST_STATUS + pages.div_ceil(8)
    }

    /// The pages with robust mutexes that are held.
    pub fn held(words: &[u64]) -> &[u64] {
        let pages = words.get(1).map_or(0, |&pages| (pages as usize).min(MAX_BATCH_PAGES));
        words.get(first_held(pages)..).unwrap_or(&[])
    }

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
    /// `MADV_GUARD_INSTALL` that came to an error: some pages may have become guards; drop what is kept under these.
    Guards,
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
            Advice::Guards => 3,
        };
        let message = [kind::ADVISE, VERSION, self.token, advice, self.address, self.len];
        words[..message.len()].copy_from_slice(&message);
        message.len()
    }

    /// Reads the message; `None` if it is not one.
    pub fn decode(words: &[u64]) -> Option<Advise> {
        let &[kind::ADVISE, VERSION, token, advice, address, len] = words else { return None };
        const ALL: [Advice; 4] = [Advice::PageOut, Advice::Cold, Advice::Exclude, Advice::Guards];
        let advice = *ALL.get(usize::try_from(advice).ok()?)?;
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
        let nonce = Some([1, u64::MAX]);
        let hello = Hello { forked: true, nonce, region: 2, region_len: 3, beacon: 4, staging: 5, trash: 6 };
        let n = hello.encode(&mut words);
        assert_eq!(Hello::decode(&words[..n]), Some(hello));
        assert_eq!(Hello::decode(&words[..n - 1]), None);
        let advise = Advise { token: 9, advice: Advice::Cold, address: 4096, len: 8192 };
        let n = advise.encode(&mut words);
        assert_eq!(Advise::decode(&words[..n]), Some(advise));
        words[3] = 4;
        assert_eq!(Advise::decode(&words[..n]), None);
    }

    #[test]
    fn a_call_carries_the_token() {
        assert_eq!(called(&call(7)), Some(7));
        assert_eq!(called(&call(7)[..2]), None);
        assert_eq!(called(&[kind::CALL, VERSION + 1, 7]), None);
    }

    #[test]
    fn only_areas_inside_the_region_are_sound() {
        let page = PAGE_SIZE as u64;
        let (staging, trash) = (0x10_0000, 0x10_0000 + (STAGING_PAGES as u64 + 2) * page);
        let region_len = trash + (TRASH_PAGES as u64 + 1) * page - staging;
        let good = Hello { forked: false, nonce: None, region: staging, region_len, beacon: staging, staging, trash };
        assert!(good.is_sound());
        let wrong = [
            Hello { region_len: region_len - page, ..good },
            Hello { staging: staging + 1, ..good },
            Hello { staging: trash, ..good },
            Hello { trash: u64::MAX - page + 1, ..good },
            Hello { region: u64::MAX - 1, ..good },
            Hello { region: 0, staging: 0, region_len: u64::MAX, ..good },
            Hello { beacon: 3, ..good },
        ];
        assert!(wrong.iter().all(|hello| !hello.is_sound()));
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
        words[1] = 9;
        assert_eq!(evicted::first_held(9), evicted::FIRST_STATUS + 2);
        assert_eq!(evicted::held(&words[..5]), [words[4]]);
        assert!(evicted::held(&words[..4]).is_empty() && evicted::held(&words[..3]).is_empty());
        words[1] = u64::MAX;
        assert!(evicted::held(&words[..5]).is_empty());
    }
}

//! Keeping the pages of debugged and of dumping processes in memory.
//!
//! The kernel serves no userfault for an access through `/proc/PID/mem` or ptrace: it fails with EIO. It serves none for a thread
//! that dumps core, either: the page reads as zeros. So the pages have to be back before they are read.
//!
//! 1. A thread reads `/proc/PID/status` of every process, every [`PAUSE`]; soon again where it has found a tracing stop.
//! 2. A process that is found in the same tracing stop twice is being debugged. A tracer that only follows system calls
//!    (strace) lets its process go on within microseconds, and reads memory by `process_vm_readv`, which waits for
//!    userfaults. Held for its sake, the process would have no limit. Nor does a stop count while the tracer, a process of
//!    the job, waits for memory itself or is held by the brake: if its process were held in then, neither could go on.
//! 3. The process is held in: all of its pages are brought back, and none is evicted. What was brought back for that is not
//!    charged: otherwise a debugger would drive the group over its limit, and its process to an OOM kill.
//! 4. It is let go when its tracer has left; if all its stops were short, already [`GRACE`] after the last of them; and, while it
//!    runs, as soon as its group is short of memory. So the limit holds for a process that grows under a debugger.
//! 5. A process that dumps core is held in, too. The kernel writes the dump faster than pages come back, so pages may be missing
//!    from it: one line says how many. A dump that is over before it is seen shows in the status of the process.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_engine::PAGE_SIZE;
use uzswap_vm::pager::Pager;
use uzswap_vm::sys::{memory, thread};
use uzswap_vm::visit;

use crate::sessions::{Session, Sessions};

/// How often to look, and the part of a processor that looking may take: one in so many.
const PAUSE: Duration = Duration::from_millis(10);
const SHARE: u32 = 256;

/// The same while a process is in a tracing stop that may be that of a debugger.
const SHORT_PAUSE: Duration = Duration::from_millis(1);
const LARGE_SHARE: u32 = 16;

/// The most that is read of a status, which has some 1,500 bytes.
const STATUS_LEN: usize = 4096;

/// The longest time between two looks.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The same as long as nothing has been evicted from any process.
const IDLE_PAUSE: Duration = Duration::from_millis(50);
const IDLE_SHARE: u32 = 1024;

/// Stops of a debugger that is used by a person, or reads symbols, are longer than this.
const LONG_STOP: Duration = Duration::from_millis(100);

/// How long a process is held in after a stop, if none was long.
const GRACE: Duration = Duration::from_secs(1);

/// How long what is late is asked for at every short pause.
const LATE_GRACE: Duration = Duration::from_secs(1);

/// How often the pages that are away are counted, for the line about a dump.
const COUNT_INTERVAL: Duration = Duration::from_millis(100);

/// How long to wait for the parent of a process that has ended.
const PARENT_PATIENCE: Duration = Duration::from_secs(2);

/// How long the end of the manager waits for the thread that looks.
const LOOK_BACK_PATIENCE: Duration = Duration::from_millis(500);

/// The bit of a wait status that tells of a core dump.
const CORE_DUMPED: i32 = 0x80;

/// The watch for tracers and core dumps.
pub struct Tracing {
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    /// What the latest thread knows.
    current: Mutex<Option<Arc<Mutex<Traced>>>>,
}

/// What one thread knows of all processes.
struct Traced {
    pager: Arc<Pager>,
    sessions: Arc<Sessions>,
    known: HashMap<u64, Known>,
}

/// What is known of a process.
struct Known {
    session: Arc<Session>,
    /// The tracing stop that it was in at the last look, and since when.
    stop: Option<(Stop, Instant)>,
    held: Option<Held>,
    /// A debugger was refused for want of memory, and this was said.
    refused: bool,
    /// The pages that were away, when last counted.
    away: usize,
    counted: Instant,
    /// Its dump has been reported.
    dumped: bool,
    ended: Option<Instant>,
}

/// What a look has found.
enum Seen {
    /// Nothing was evicted from any process.
    Nothing,
    /// Something was evicted.
    Evicted,
    /// A process has been in a tracing stop for a moment, and is not held in.
    Stop,
    /// A process that was just held in has pages away still: its worker had not answered.
    Late,
}

/// A process that is held in.
struct Held {
    since: Instant,
    /// Pages were still away when they were last asked for.
    is_late: bool,
    last_stop: Instant,
    /// Until the tracer leaves.
    lasting: bool,
}

/// Tells one tracing stop of a thread from the next: a thread that was let run has been switched to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stop {
    tracer: i32,
    switches: u64,
}

/// What `/proc/PID/status` says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Status {
    tracer: i32,
    in_tracing_stop: bool,
    dumps_core: bool,
    switches: u64,
}

impl Tracing {
    /// A watch that no thread keeps yet.
    pub fn new(pager: Arc<Pager>, sessions: Arc<Sessions>) -> Tracing {
        Tracing { pager, sessions, current: Mutex::new(None) }
    }

    /// Looks until told to stop, or replaced.
    pub fn run(&self, stop: &AtomicBool) {
        // A debugger may be about to read.
        let _ = thread::ask_for_short_slices();
        let traced = Arc::new(Mutex::new(Traced::new(self.pager.clone(), self.sessions.clone())));
        *self.current.lock() = Some(traced.clone());
        let mut last = Duration::ZERO;
        while !stop.load(Relaxed) && !visit::is_surplus() {
            let start = thread::processor_time();
            let (pause, share) = match traced.lock().look() {
                Seen::Nothing => (IDLE_PAUSE, IDLE_SHARE),
                Seen::Evicted => (PAUSE, SHARE),
                Seen::Stop => (SHORT_PAUSE, LARGE_SHARE),
                Seen::Late => (SHORT_PAUSE, 1),
            };
            let taken = thread::processor_time() - start;
            // A look that takes long once was interrupted, or brought pages back. The next one must not be late for that: gdb may
            // read memory 0.2 s after it has attached.
            let usual = taken.min(std::mem::replace(&mut last, taken));
            std::thread::sleep(pause.max((usual * (share - 1)).min(LONGEST_PAUSE)));
        }
    }

    /// Reports the dumps of processes that have ended since the last look. The manager is about to end, and does not wait for long.
    pub fn look_back(&self) {
        let current = self.current.lock().clone();
        if let Some(mut traced) = current.as_ref().and_then(|traced| traced.try_lock_for(LOOK_BACK_PATIENCE)) {
            traced.known.values_mut().for_each(|known| {
                known.look_back();
            });
        }
    }
}

impl Traced {
    /// Knows which processes are held in, and nothing else yet.
    fn new(pager: Arc<Pager>, sessions: Arc<Sessions>) -> Traced {
        let held = sessions.all().into_iter().filter(|session| session.space.is_held_in());
        let known = held.map(|session| (session.id, Known { held: Some(Held::new()), ..Known::new(session) }));
        Traced { known: known.collect(), pager, sessions }
    }

    /// Looks at all processes.
    fn look(&mut self) -> Seen {
        let live = self.sessions.all();
        let ids: HashSet<u64> = live.iter().map(|session| session.id).collect();
        for session in live {
            self.known.entry(session.id).or_insert_with(|| Known::new(session));
        }
        let (pager, sessions) = (&self.pager, &self.sessions);
        self.known.retain(|id, known| {
            if ids.contains(id) {
                known.look(pager, sessions);
                return true;
            }
            known.look_back()
        });
        if self.known.values().any(Known::is_late) {
            Seen::Late
        } else if self.known.values().any(Known::is_to_be_seen_again) {
            Seen::Stop
        } else if self.known.values().any(|known| known.session.space.is_tied()) {
            Seen::Evicted
        } else {
            Seen::Nothing
        }
    }
}

impl Held {
    fn new() -> Held {
        let now = Instant::now();
        Held { since: now, is_late: false, last_stop: now, lasting: false }
    }
}

impl Known {
    fn new(session: Arc<Session>) -> Known {
        let (stop, held, refused, away, dumped, ended) = Default::default();
        Known { session, stop, held, refused, away, counted: Instant::now(), dumped, ended }
    }

    /// Returns whether a second look has to tell soon if a tracing stop is that of a debugger.
    fn is_to_be_seen_again(&self) -> bool {
        self.held.is_none() && self.stop.as_ref().is_some_and(|(_, since)| since.elapsed() < PAUSE)
    }

    /// Returns whether pages are to be asked for again at once: a debugger is about to read them.
    fn is_late(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_late && held.since.elapsed() < LATE_GRACE)
    }

    /// Looks at a process that lives.
    fn look(&mut self, pager: &Pager, sessions: &Sessions) {
        // Of a process that nothing was evicted from, a debugger sees all.
        if self.session.space.is_shunned() || self.held.is_none() && !self.session.space.is_tied() {
            return;
        }
        let Some(status) = Status::of(self.session.pid) else { return };
        if self.counted.elapsed() >= COUNT_INTERVAL {
            self.away = pager.pages_away(&self.session.space);
            self.counted = Instant::now();
        }
        if status.dumps_core {
            return self.hold_for_dump(pager);
        }
        if status.tracer == 0 || thread::is_own(status.tracer) {
            self.stop = None;
            self.refused = false;
            return self.let_go(pager);
        }
        let counts = status.in_tracing_stop && !is_held_up(sessions, status.tracer);
        let stop = Stop { tracer: status.tracer, switches: status.switches };
        match &self.stop {
            Some((last, since)) if counts && *last == stop => {
                let long = since.elapsed() >= LONG_STOP;
                self.hold_for_tracer(pager, status.tracer, long);
            }
            _ => {
                self.stop = counts.then(|| (stop, Instant::now()));
                let is_short = self.session.charge().path().any(|charge| charge.excess() > 0);
                let over = |held: &Held| is_short || !held.lasting && held.last_stop.elapsed() > GRACE;
                if self.held.as_ref().is_some_and(over) {
                    self.let_go(pager);
                }
            }
        }
    }

    fn hold_for_tracer(&mut self, pager: &Pager, tracer: i32, long: bool) {
        if self.held.is_none() && !self.has_room(pager, tracer) {
            return;
        }
        let held = self.hold(pager);
        held.last_stop = Instant::now();
        held.lasting |= long;
    }

    /// Whether there is memory to bring all back; says so once if not.
    fn has_room(&mut self, pager: &Pager, tracer: i32) -> bool {
        let away = (pager.pages_away(&self.session.space) * PAGE_SIZE) as u64;
        let available = memory::available().unwrap_or(u64::MAX);
        if away <= available {
            return true;
        }
        if !std::mem::replace(&mut self.refused, true) {
            self.session.tenant.tell(&format!(
                "warning: process {} is traced by {tracer}, but to bring back its {} MiB takes more than the {} MiB of memory that \
                 are free; the tracer cannot read evicted pages",
                self.session.pid,
                away >> 20,
                available >> 20
            ));
        }
        false
    }

    /// Holds the process in, if that is not done, and brings back what is away. What is late is asked for again at the next look.
    fn hold(&mut self, pager: &Pager) -> &mut Held {
        let space = &self.session.space;
        let held = self.held.get_or_insert_with(|| {
            pager.hold_in(space, true);
            Held::new()
        });
        held.is_late = pager.pages_away(space) > 0 && pager.bring_back_space(space) > 0;
        held
    }

    fn let_go(&mut self, pager: &Pager) {
        if self.held.take().is_some() {
            pager.hold_in(&self.session.space, false);
        }
    }

    fn hold_for_dump(&mut self, pager: &Pager) {
        let away = pager.pages_away(&self.session.space);
        // First: the job may be over before all is back.
        self.report_dump(away);
        if (away * PAGE_SIZE) as u64 <= memory::available().unwrap_or(u64::MAX) {
            self.hold(pager);
        }
    }

    /// Looks at a process that is no longer under management; tells whether to look again.
    fn look_back(&mut self) -> bool {
        if self.dumped || !self.session.pidfd.has_ended() {
            return false;
        }
        if let Some(status) = self.session.pidfd.wait_status() {
            if libc::WIFSIGNALED(status) && status & CORE_DUMPED != 0 {
                self.report_dump(self.away);
            }
            return false;
        }
        self.ended.get_or_insert_with(Instant::now).elapsed() < PARENT_PATIENCE
    }

    fn report_dump(&mut self, away: usize) {
        if away > 0 && !std::mem::replace(&mut self.dumped, true) {
            self.session.tenant.tell(&format!(
                "warning: the core dump of process {} may lack {:.1} MiB that were evicted, and show zeros there; gcore or gdb -p, \
                 while it lives, show all",
                self.session.pid,
                (away * PAGE_SIZE) as f64 / f64::from(1 << 20)
            ));
        }
    }
}

/// Returns whether process `pid` is one of a job, and does not run for want of memory: a thread of it waits for that, or the brake holds it.
fn is_held_up(sessions: &Sessions, pid: i32) -> bool {
    sessions.of_pid(pid).filter(|session| !session.space.is_shunned()).is_some_and(|session| {
        let _visit = session.space.visit();
        session.space.has_waiting() || Status::of(pid).is_some_and(|status| status.in_tracing_stop)
    })
}

impl Status {
    fn of(pid: i32) -> Option<Status> {
        let mut text = [0; STATUS_LEN];
        let len = File::open(format!("/proc/{pid}/status")).and_then(|mut file| file.read(&mut text)).ok()?;
        Some(Status::parse(&String::from_utf8_lossy(&text[..len])))
    }

    fn parse(text: &str) -> Status {
        let mut status = Status::default();
        for (name, value) in text.lines().filter_map(|line| line.split_once(":\t")) {
            match name {
                "State" => status.in_tracing_stop = value.starts_with('t'),
                "TracerPid" => status.tracer = value.parse().unwrap_or(0),
                "CoreDumping" => status.dumps_core = value == "1",
                "voluntary_ctxt_switches" | "nonvoluntary_ctxt_switches" => {
                    status.switches += value.parse::<u64>().unwrap_or(0);
                }
                _ => {}
            }
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_is_told_from_the_next_by_its_switches() {
        let text = |state: &str, tracer: i32, dumping: u8, switches: u64| {
            format!(
                "Name:\ta:\tb\nState:\t{state}\nTracerPid:\t{tracer}\nCoreDumping:\t{dumping}\n\
                 voluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t3\n"
            )
        };
        let stopped = Status::parse(&text("t (tracing stop)", 7, 0, 4));
        assert_eq!(stopped, Status { tracer: 7, in_tracing_stop: true, dumps_core: false, switches: 7 });
        assert_ne!(stopped, Status::parse(&text("t (tracing stop)", 7, 0, 5)));
        assert!(!Status::parse(&text("T (stopped)", 0, 0, 4)).in_tracing_stop);
        assert!(Status::parse(&text("D (disk sleep)", 0, 1, 4)).dumps_core);
    }
}

//! Hints of programs (`madvise`), each of which waits until its hint has been followed.
//!
//! One thread follows them. Users take turns, and a page-out that is not done after [`TURN`] waits for its user's next turn: so a program
//! that has a gigabyte paged out does not keep another user's program in its system call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uzswap_proto::{Advice, Advise, kind};
use uzswap_vm::pager::Pager;
use uzswap_vm::range::Range;
use uzswap_vm::sys::link::Link;
use uzswap_vm::user_queue::UserQueue;
use uzswap_vm::visit;

use crate::quota::Ticket;
use crate::sessions::{Session, range_of};

/// How long until a hint that cannot be followed yet is taken up again.
const PAUSE: Duration = Duration::from_millis(1);

/// The same if there is none: a thread that was replaced may still add one.
const LONG_PAUSE: Duration = Duration::from_millis(500);

/// How long a turn may take.
const TURN: Duration = Duration::from_millis(20);

/// A program's hint that is being followed.
pub struct Question {
    link: Link,
    session: Arc<Session>,
    advice: Advice,
    /// What is left to do of what the program named.
    range: Range,
    begun: bool,
    _ticket: Option<Ticket>,
}

/// Hints that wait to be followed.
#[derive(Default)]
pub struct Questions {
    ready: UserQueue<Question>,
    /// Those that cannot be followed at this moment: a worker is late, or a process holds the lock of its memory.
    late: Mutex<Vec<Question>>,
}

impl Questions {
    /// Adds a hint; the answer goes to `link`.
    pub fn add(&self, link: Link, session: Arc<Session>, advise: &Advise, ticket: Option<Ticket>) {
        let question =
            Question { link, session, advice: advise.advice, range: range_of(advise), begun: false, _ticket: ticket };
        self.ready.add(question.session.space.user(), question);
    }

    /// Follows hints until the calling thread is replaced.
    pub fn serve(&self, pager: &Pager) {
        let mut looked = Instant::now();
        while !visit::is_surplus() {
            if looked.elapsed() >= PAUSE {
                let late = std::mem::take(&mut *self.late.lock());
                late.into_iter().for_each(|question| self.ready.add(question.session.space.user(), question));
                looked = Instant::now();
            }
            match self.ready.try_take() {
                Some(question) => self.follow(pager, question),
                None if self.late.lock().is_empty() => self.ready.wait_for(LONG_PAUSE),
                None => self.ready.wait_for(PAUSE),
            }
        }
    }

    fn follow(&self, pager: &Pager, mut question: Question) {
        let space = &question.session.space;
        let done = !space.is_shunned()
            && match question.advice {
                Advice::PageOut => {
                    // An error is that of a program that is going away.
                    if !std::mem::replace(&mut question.begun, true) {
                        let _ = question.session.refresh_at_once(pager);
                    }
                    if let Ok(Some(left)) = pager.page_out(space, question.range, Instant::now() + TURN) {
                        question.range = left;
                        return self.ready.add(question.session.space.user(), question);
                    }
                    true
                }
                Advice::Cold => {
                    pager.make_cold(space, question.range);
                    true
                }
                Advice::Exclude => pager.exclude(space, question.range),
                Advice::Guards => pager.find_guards(space, question.range),
            };
        if done {
            // The program may have gone away meanwhile.
            let _ = question.link.send(&[kind::ADVISED], None);
        } else {
            self.late.lock().push(question);
        }
    }
}

//! What a fuzz target reaches of the protocol of sessions: connections that have not become a session yet, as a state machine.
//!
//! ```text
//!   silent ──CALL with the token of a job──▶ greeted ──HELLO with three descriptors──▶ a session
//!     └──── anything else ──▶ over             └── FAILED, or anything else ──▶ over
//! ```
//!
//! Each connection is a pair of sockets; nothing else of the kernel takes part. [`Protocol`] predicts what each message comes to, and
//! panics if the manager comes to something else. No sequence of messages without descriptors makes a session.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use uzswap_engine::{Config, HeapSource, Zswap};
use uzswap_proto::{Advise, Hello, Job, MAX_WORDS, call, called, kind};
use uzswap_vm::owner::Owner;
use uzswap_vm::pager::{Host, Pager};
use uzswap_vm::swapin::Swapin;
use uzswap_vm::sys::link::{Link, Peer, pair};
use uzswap_vm::sys::process::PidFd;

use crate::groups::Groups;
use crate::jobs::{Jobs, Tenant};
use crate::sessions::{Call, Caller, Sessions};

/// The tokens of the jobs: the manager's own, and one that has joined.
pub const TOKENS: [u64; 2] = [11, 13];

/// The most connections of a job that has joined that are greeted at once.
const MOST_GREETED: usize = 4;

struct Deaf;

impl Host for Deaf {
    fn kill(&self, _: u64, why: &str) {
        panic!("there is no process to kill: {why}");
    }
}

/// A manager with two jobs, and its connections.
pub struct Protocol {
    sessions: Sessions,
    connections: Vec<Connection>,
}

struct Connection {
    /// The client's end, until it is closed.
    client: Option<Link>,
    /// The manager's, until it is over.
    caller: Option<Caller>,
    /// What was said and not heard yet.
    said: VecDeque<Vec<u64>>,
}

/// What a message should come to.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Nothing,
    Greeted,
    Unmanaged,
    Over,
}

impl Default for Protocol {
    fn default() -> Self {
        Protocol::new()
    }
}

impl Protocol {
    /// No connections yet.
    pub fn new() -> Protocol {
        let engine = Arc::new(Zswap::new(Config::default(), None, HeapSource));
        let groups = Arc::new(Groups::new(engine.clone(), Arc::default()));
        let pager = Arc::new(Pager::new(engine, Arc::new(Deaf), Swapin::default()).expect("an epoll"));
        let jobs = Arc::new(Jobs::new(7));
        let front = Peer { pid: std::process::id() as i32, uid: 1000 };
        let (link, _) = UnixStream::pair().expect("sockets");
        let joined = (link, PidFd::open(front.pid).expect("a handle"));
        for (token, joined) in TOKENS.into_iter().zip([None, Some(joined)]) {
            let (job, owner) =
                (Job { name: 7, token }, Arc::new(if joined.is_none() { Owner::trusted() } else { Owner::user() }));
            jobs.add(Arc::new(Tenant::new(job, front, owner, groups.root(), joined, Vec::new())));
        }
        let sessions = Sessions::with_quota(jobs, Path::new("/agent"), pager, groups, MOST_GREETED);
        Protocol { sessions, connections: Vec::new() }
    }

    /// Opens a connection.
    pub fn connect(&mut self) {
        const MOST: usize = 32;
        if self.connections.len() < MOST {
            let (manager, client) = pair().expect("sockets");
            let caller = Some(Caller::Silent(manager));
            self.connections.push(Connection { client: Some(client), caller, said: VecDeque::new() });
        }
    }

    /// Sends a message on a connection.
    pub fn say(&mut self, which: usize, words: &[u64]) {
        let words = &words[..words.len().min(MAX_WORDS)];
        let Some(connection) = self.at(which) else { return };
        if let Some(client) = &connection.client
            && client.send(words, None).is_ok()
        {
            connection.said.push_back(words.to_vec());
        }
    }

    /// Closes the client's end.
    pub fn leave(&mut self, which: usize) {
        if let Some(connection) = self.at(which) {
            connection.client = None;
        }
    }

    /// Has the manager hear a connection.
    pub fn hear(&mut self, which: usize) {
        let greeted = self.greeted();
        let Some(connection) = self.at(which) else { return };
        let Some(caller) = connection.caller.take() else { return };
        let expected = expected(&caller, connection, greeted);
        let client = connection.client.is_some();
        connection.said.pop_front();
        let (found, caller) = match self.sessions.hear(caller) {
            Call::Later(Caller::Greeted(tenant, link, ticket)) => {
                let found = if expected == Outcome::Greeted { Outcome::Greeted } else { Outcome::Nothing };
                (found, Some(Caller::Greeted(tenant, link, ticket)))
            }
            Call::Later(caller) => (Outcome::Nothing, Some(caller)),
            Call::Joined(_) => panic!("a session without a userfaultfd"),
            Call::Asked(..) => panic!("a hint without a session"),
            Call::Unmanaged(_, process, _) => {
                assert!(process.is_none(), "a process that is not below its front");
                (Outcome::Unmanaged, None)
            }
            Call::Over => (Outcome::Over, None),
        };
        // A peer that has gone cannot be greeted; what it said is lost if it has left something unread.
        let is_lost = !client && found == Outcome::Over;
        assert!(found == expected || is_lost, "{found:?} in place of {expected:?}");
        if let Some(connection) = self.at(which) {
            connection.caller = caller;
        }
    }

    /// Ends all connections: nothing is counted any more.
    pub fn end(mut self) {
        (0..self.connections.len()).for_each(|which| self.hear(which));
        self.connections.clear();
        assert!(self.sessions.count() == 0 && self.sessions.greeted_now() == 0, "something is left");
    }

    fn at(&mut self, which: usize) -> Option<&mut Connection> {
        let count = self.connections.len();
        self.connections.get_mut(which.checked_rem(count)?)
    }

    /// Connections of the job that has joined that are greeted.
    fn greeted(&self) -> usize {
        let is = |connection: &&Connection| matches!(&connection.caller, Some(Caller::Greeted(tenant, ..)) if !tenant.is_trusted());
        self.connections.iter().filter(is).count()
    }
}

/// What the next message should come to, told by the words alone.
fn expected(caller: &Caller, connection: &Connection, greeted: usize) -> Outcome {
    let Some(words) = connection.said.front() else {
        return if connection.client.is_some() { Outcome::Nothing } else { Outcome::Over };
    };
    if words.is_empty() {
        return Outcome::Over;
    }
    match caller {
        Caller::Silent(_) => match called(words) {
            Some(token) if token == TOKENS[0] => Outcome::Greeted,
            Some(token) if token == TOKENS[1] && greeted < MOST_GREETED => Outcome::Greeted,
            _ => Outcome::Over,
        },
        Caller::Greeted(..) if words.len() == 3 && words[0] == kind::FAILED => Outcome::Unmanaged,
        Caller::Greeted(..) => Outcome::Over,
    }
}

/// What is read out of any words makes sense, and is written back as it was.
pub fn decode(words: &[u64]) {
    let mut written = [0; MAX_WORDS];
    if let Some(token) = called(words) {
        assert_eq!(call(token), words);
    }
    if let Some(advise) = Advise::decode(words) {
        let count = advise.encode(&mut written);
        assert_eq!(written[..count], *words);
        let range = crate::sessions::range_of(&advise);
        assert!(range.start.is_multiple_of(4096) && range.end.is_multiple_of(4096));
    }
    if let Some(hello) = Hello::decode(words) {
        if hello.is_sound() {
            let end = hello.region + hello.region_len;
            let areas = [(hello.staging, hello.staging_proof()), (hello.trash, hello.trash_proof())];
            assert!(areas.iter().all(|&(start, proof)| hello.region <= start && start < proof && proof + 4096 <= end));
            let [one, other] = areas;
            assert!(one.1 + 4096 <= other.0 || other.1 + 4096 <= one.0, "one area in the other");
        }
        if hello.nonce.is_some() {
            let count = hello.encode(&mut written);
            assert_eq!(written[..count], *words);
        }
    }
    for index in [0, 1, 7, 8, 511, 512, 4096, usize::MAX / 2] {
        let _ = uzswap_proto::evicted::get(words, index);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn message() -> impl Strategy<Value = Vec<u64>> {
        let token = prop_oneof![Just(TOKENS[0]), Just(TOKENS[1]), any::<u64>()];
        let right = token.prop_map(|token| call(token).to_vec());
        let failed = any::<(u64, u64)>().prop_map(|(step, errno)| vec![kind::FAILED, step, errno]);
        let numbers = prop_oneof![0..20u64, any::<u64>(), (0..1u64 << 35).prop_map(|page| page << 12)];
        prop_oneof![3 => right, 1 => failed, 2 => vec(numbers, 0..12)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_messages_in_any_order(steps in vec((0..6u8, 0..40usize, message()), 0..200)) {
            let mut protocol = Protocol::new();
            for (step, which, message) in steps {
                decode(&message);
                match step {
                    0 | 1 => protocol.connect(),
                    2 | 3 => protocol.say(which, &message),
                    4 => protocol.hear(which),
                    _ => protocol.leave(which),
                }
            }
            protocol.end();
        }
    }

    #[test]
    fn a_user_has_so_many_greeted_and_the_own_job_as_many_as_it_likes() {
        let mut protocol = Protocol::new();
        for which in 0..24 {
            protocol.connect();
            protocol.say(which, &call(TOKENS[which % 2]));
            protocol.hear(which);
        }
        assert_eq!(protocol.greeted(), MOST_GREETED);
        protocol.end();
    }
}

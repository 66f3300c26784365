//! What an operator's command and the manager's control socket say to each other.
//!
//! A `SOCK_STREAM` connection carries any number of requests, each answered before the next is read. A request is a header, a
//! path and a value; an answer is a header and a text. Both headers say how long what follows is, so neither side ever
//! reads more than it has room for.
//!
//! ```text
//!   request   'u' 'z' version verb   path length (u16)    value length (u16)   path    value
//!   answer    'u' 'z' version 0      errno (u32)          text length (u32)    text
//! ```
//!
//! Numbers are in the machine's own byte order: both ends run on one machine. An errno of 0 stands for success; the text is
//! then what was read or listed, and else the words for people.

use crate::{JOB_TEXT, Job};

/// The environment variable that names the control socket of the manager that an operator's command speaks to.
pub const ENV_SOCKET: &str = "UZSWAP_SOCKET";

/// Changes whenever a header does.
pub const VERSION: u8 = 1;

/// Bytes in a request's header.
pub const REQUEST_HEADER: usize = 8;

/// Bytes in an answer's header.
pub const ANSWER_HEADER: usize = 12;

/// Bytes in the longest path, as for the kernel.
pub const PATH_MAX: usize = 4096;

/// Bytes in the longest value: what the kernel takes in one write to a control file.
pub const VALUE_MAX: usize = 4096;

/// Bytes in the longest text of an answer.
pub const TEXT_MAX: usize = 1 << 20;

/// What is to be done with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Read a file.
    Read = 1,
    /// Write a value to a file.
    Write = 2,
    /// List a directory: a name on each line, those of directories with a slash behind.
    List = 3,
    /// Make a group.
    Make = 4,
    /// Remove a group.
    Remove = 5,
    /// What a name stands for: [`DIRECTORY`], or a file that can be read, written or both: `r`, `w`, `rw`.
    Look = 6,
    /// Begin a job in a group: see [`Joined`]. From then on the connection is the job's.
    Join = 7,
    /// All figures of a group, as JSON.
    Stats = 8,
}

/// A wish of a job that joins, each on a line of the value: to be killed rather than to have a process that is not managed.
pub const REQUIRE: &str = "require";

/// And that the group be removed when the job has ended.
pub const TRANSIENT: &str = "transient";

/// What a front says before it closes its job's connection, if nothing of the job is left.
pub const BYE: u8 = b'.';

/// Stands where an answer has its errno, on a job's connection: the daemon has stopped, and has brought back everything; the
/// job goes on without it. Anything else there comes with a text for the user.
pub const RELEASED: u32 = u32::MAX;

/// The answer to [`Verb::Join`], in text: the version of the workers' protocol, the job, and the path of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined<'a> {
    /// The job's name and secret.
    pub job: Job,
    /// The library to preload.
    pub agent: &'a str,
}

impl<'a> Joined<'a> {
    /// What comes before the agent's path.
    pub fn prefix(self) -> [u8; JOINED_PREFIX] {
        let mut text = [b' '; JOINED_PREFIX];
        text[0] = b'0' + crate::VERSION as u8;
        text[2..2 + JOB_TEXT].copy_from_slice(&self.job.to_text());
        text
    }

    /// Reads the text; `None` if it is of another version.
    pub fn decode(text: &'a str) -> Option<Joined<'a>> {
        let (prefix, agent) = text.split_at_checked(JOINED_PREFIX)?;
        let job = Job::from_text(prefix.as_bytes().get(2..2 + JOB_TEXT)?)?;
        let joined = Joined { job, agent };
        (prefix.as_bytes() == joined.prefix()).then_some(joined)
    }
}

/// Bytes before the agent's path in [`Joined`].
pub const JOINED_PREFIX: usize = JOB_TEXT + 3;

const _: () = assert!(crate::VERSION < 10);

/// What [`Verb::Look`] answers for a directory.
pub const DIRECTORY: &str = "/";

impl Verb {
    /// All of them.
    pub const ALL: [Verb; 8] =
        [Verb::Read, Verb::Write, Verb::List, Verb::Make, Verb::Remove, Verb::Look, Verb::Join, Verb::Stats];
}

/// A request's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub verb: Verb,
    /// Bytes of the path; at most [`PATH_MAX`].
    pub path: usize,
    /// Bytes of the value; at most [`VALUE_MAX`].
    pub value: usize,
}

impl Request {
    /// The bytes of the header; `None` if path or value is too long.
    pub fn encode(self) -> Option<[u8; REQUEST_HEADER]> {
        if self.path > PATH_MAX || self.value > VALUE_MAX {
            return None;
        }
        let [p0, p1] = (self.path as u16).to_ne_bytes();
        let [v0, v1] = (self.value as u16).to_ne_bytes();
        Some([b'u', b'z', VERSION, self.verb as u8, p0, p1, v0, v1])
    }

    /// Reads a header; `None` if it is not one.
    pub fn decode(bytes: [u8; REQUEST_HEADER]) -> Option<Request> {
        let [b'u', b'z', VERSION, verb, p0, p1, v0, v1] = bytes else { return None };
        let verb = Verb::ALL.into_iter().find(|&known| known as u8 == verb)?;
        let (path, value) = (u16::from_ne_bytes([p0, p1]).into(), u16::from_ne_bytes([v0, v1]).into());
        (path <= PATH_MAX && value <= VALUE_MAX).then_some(Request { verb, path, value })
    }
}

/// An answer's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// 0, or what went wrong.
    pub errno: u32,
    /// Bytes of the text; at most [`TEXT_MAX`].
    pub text: usize,
}

impl Answer {
    /// The bytes of the header; `None` if the text is too long.
    pub fn encode(self) -> Option<[u8; ANSWER_HEADER]> {
        if self.text > TEXT_MAX {
            return None;
        }
        let mut bytes = [b'u', b'z', VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[4..8].copy_from_slice(&self.errno.to_ne_bytes());
        bytes[8..].copy_from_slice(&(self.text as u32).to_ne_bytes());
        Some(bytes)
    }

    /// Reads a header; `None` if it is not one.
    pub fn decode(bytes: [u8; ANSWER_HEADER]) -> Option<Answer> {
        let [b'u', b'z', VERSION, 0, e0, e1, e2, e3, t0, t1, t2, t3] = bytes else { return None };
        let errno = u32::from_ne_bytes([e0, e1, e2, e3]);
        let text = u32::from_ne_bytes([t0, t1, t2, t3]) as usize;
        (text <= TEXT_MAX).then_some(Answer { errno, text })
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::format;

    #[test]
    fn headers_survive_the_wire() {
        for verb in Verb::ALL {
            let request = Request { verb, path: PATH_MAX, value: 7 };
            assert_eq!(Request::decode(request.encode().unwrap()), Some(request));
        }
        let answer = Answer { errno: 22, text: TEXT_MAX };
        assert_eq!(Answer::decode(answer.encode().unwrap()), Some(answer));
    }

    #[test]
    fn who_joins_hears_where() {
        let joined = Joined { job: Job { name: 1, token: u64::MAX }, agent: "/tmp/agent.so" };
        let prefix = joined.prefix();
        let text = [str::from_utf8(&prefix).unwrap(), joined.agent].concat();
        assert_eq!(Joined::decode(&text), Some(joined));
        let [version, other] = [crate::VERSION, crate::VERSION - 1].map(|version| format!("{version} "));
        for bad in ["", &version, &text[1..], &text.replacen(' ', "-", 1), &text.replacen(&version, &other, 1)] {
            assert_eq!(Joined::decode(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_too_long_or_no_header_is_refused() {
        assert_eq!(Request { verb: Verb::Read, path: PATH_MAX + 1, value: 0 }.encode(), None);
        assert_eq!(Request { verb: Verb::Read, path: 0, value: VALUE_MAX + 1 }.encode(), None);
        assert_eq!(Answer { errno: 0, text: TEXT_MAX + 1 }.encode(), None);
        let good = Request { verb: Verb::Write, path: 1, value: 1 }.encode().unwrap();
        for (index, bad) in [(0, 0), (1, 0), (2, 9), (3, 0), (3, 9), (5, 0xff), (7, 0xff)] {
            let mut bytes = good;
            bytes[index] = bad;
            assert_eq!(Request::decode(bytes), None, "byte {index}");
        }
        assert_eq!(Answer::decode([0xff; ANSWER_HEADER]), None);
        assert_eq!(Answer::decode([b'u', b'z', VERSION, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), None);
    }
}

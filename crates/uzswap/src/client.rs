//! The operator's end of a manager's control socket: one connection, one request after the other.
//!
//! 1. The manager is the one that `--socket` names, or else `UZSWAP_SOCKET`, which programs of a job find set; else the daemon.
//! 2. A connection after an error is of no more use: an answer could be that to an earlier request.

use std::env;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::job::default_socket;
use clap::ArgMatches;
use uzswap_proto::control::{ANSWER_HEADER, Answer, ENV_SOCKET, Request, Verb};

/// Where the manager listens that the command line or the environment names.
pub fn socket(matches: &ArgMatches) -> Result<PathBuf, String> {
    let given = matches.get_one::<OsString>("socket").cloned();
    let from_environment = || env::var_os(ENV_SOCKET).filter(|name| !name.is_empty());
    let named = given.or_else(from_environment).map(PathBuf::from);
    named.or_else(default_socket).ok_or_else(|| {
        format!(
            "no manager to ask: give --socket FILE or set {ENV_SOCKET}, with the FILE of `uzswap run --control FILE` or \
             `uzswap daemon --socket FILE`"
        )
    })
}

/// Why there is no connection, in words.
pub fn not_connected(socket: &Path, error: &io::Error) -> String {
    let why = match error.kind() {
        ErrorKind::NotFound => {
            "does not exist: is the job over, was it started without --control, is there no daemon?".to_owned()
        }
        ErrorKind::ConnectionRefused => "nobody listens there: its manager is dead".to_owned(),
        ErrorKind::PermissionDenied => "belongs to another user: ask as that user or as root".to_owned(),
        _ => error.to_string(),
    };
    format!("{}: {why}", socket.display())
}

/// Why there is no answer, in words.
pub fn not_answered(socket: &Path, error: &io::Error, patience: Duration) -> String {
    let why = match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "closed the connection: it has ended, or has another version, or you are not its user".to_owned()
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("gives no answer for {} s", patience.as_secs()),
        ErrorKind::InvalidData => "answers what this version does not understand".to_owned(),
        _ => error.to_string(),
    };
    format!("the manager at {} {why}", socket.display())
}

/// Whether a value for `cgroup.procs` stands for the process that writes it: 0, however it is written.
pub fn is_writer(path: &str, value: &[u8]) -> bool {
    let text = str::from_utf8(value).unwrap_or_default().trim();
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let digits = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")).unwrap_or(digits);
    path.rsplit('/').next() == Some("cgroup.procs") && !digits.is_empty() && digits.bytes().all(|digit| digit == b'0')
}

/// What a manager answered.
#[derive(Debug)]
pub struct Answered {
    /// 0, or what went wrong.
    pub errno: u32,
    /// What was asked for, or what went wrong in words.
    pub text: String,
}

/// A connection to a manager.
#[derive(Debug)]
pub struct Client(UnixStream);

impl Client {
    /// Connects to the manager that listens at `socket`.
    pub fn connect(socket: &Path) -> io::Result<Client> {
        UnixStream::connect(socket).map(Client)
    }

    /// Asks for one thing, and waits as long as `patience` for each part of the answer. `InvalidInput` if path or value is
    /// longer than what a request holds.
    pub fn ask(&mut self, verb: Verb, path: &str, value: &[u8], patience: Duration) -> io::Result<Answered> {
        self.send(verb, path, value, patience)?;
        self.receive(patience)
    }

    /// The first half of [`Client::ask`].
    pub fn send(&mut self, verb: Verb, path: &str, value: &[u8], patience: Duration) -> io::Result<()> {
        let request = Request { verb, path: path.len(), value: value.len() };
        let header = request.encode().ok_or(ErrorKind::InvalidInput)?;
        self.0.set_write_timeout(Some(patience))?;
        self.0.write_all(&[&header, path.as_bytes(), value].concat())
    }

    /// The second half of [`Client::ask`].
    pub fn receive(&mut self, patience: Duration) -> io::Result<Answered> {
        self.0.set_read_timeout(Some(patience))?;
        let mut header = [0; ANSWER_HEADER];
        self.0.read_exact(&mut header)?;
        let answer = Answer::decode(header).ok_or(ErrorKind::InvalidData)?;
        let mut text = vec![0; answer.text];
        self.0.read_exact(&mut text)?;
        let text = String::from_utf8(text).map_err(|_| ErrorKind::InvalidData)?;
        Ok(Answered { errno: answer.errno, text })
    }

    /// The connection, which is somebody else's from now on.
    pub fn into_stream(self) -> io::Result<UnixStream> {
        self.0.set_read_timeout(None)?;
        self.0.set_write_timeout(None)?;
        Ok(self.0)
    }

    /// Waits until the manager ends the connection.
    pub fn outlast(&mut self) {
        let endless = self.0.set_read_timeout(None);
        // A manager that speaks without being asked is none.
        let _ = endless.and_then(|()| self.0.read(&mut [0]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_writes_0_means_himself() {
        for value in ["0", "0\n", " 0 ", "+0", "-0", "00", "0x0"] {
            assert!(is_writer("cgroup/a/cgroup.procs", value.as_bytes()), "{value}");
        }
        for value in ["", "\n", "10", "0 1", "x", "+"] {
            assert!(!is_writer("cgroup/a/cgroup.procs", value.as_bytes()), "{value}");
        }
        assert!(!is_writer("cgroup/memory.max", b"0"));
    }
}

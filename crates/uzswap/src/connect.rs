//! `uzswap run --connect`: a job of a daemon's.
//!
//! 1. The group is made where it is not there, limited, and joined, all by requests that any operator could make. If one
//!    is refused, what was made is removed again, and nothing has been started.
//! 2. A group that nobody has named is the job's own, and the daemon removes it at the end.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use uzswap_manager::{JoinedJob, check_program, run_joined, write_whole};
use uzswap_proto::control::{Joined, REQUIRE, TRANSIENT, Verb};

use crate::client::{self, Answered, Client};
use crate::job::{default_socket, limits, stats};
use crate::ram::Ram;
use crate::settings::Settings;
use crate::{Failure, say};

/// How long the daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many numbers to try for the name of a group that is to be new.
const NAMES: u32 = 100;

/// Runs `command` under the daemon that the settings name.
pub fn connect(settings: &Settings, ram: &Ram, command: &[OsString]) -> Result<i32, Failure> {
    let (max, high) = limits(settings, ram)?;
    let (stats, require, quiet) = (stats(settings)?, settings.switch("require"), settings.switch("quiet"));
    let path = check_program(command, require)?;
    let socket = settings.path("socket").or_else(default_socket);
    let socket = socket.ok_or_else(|| "no daemon to join: give --socket FILE".to_owned())?;
    let socket = std::path::absolute(&socket).map_err(|error| format!("{}: {error}", socket.display()))?;
    let client = Client::connect(&socket).map_err(|error| client::not_connected(&socket, &error))?;
    let mut daemon = Daemon { client, socket, made: Vec::new() };
    let joined = daemon.join(settings.group("cgroup"), [max, high], require).inspect_err(|_| daemon.undo())?;
    let (group, job, agent) = joined;
    let Daemon { client, socket, .. } = daemon;
    let link = client.into_stream().map_err(|error| format!("the connection to the daemon: {error}"))?;
    let mut write_stats = || {
        let Some(file) = &stats else { return };
        if let Err(why) = fetch_stats(&socket, &group, file) {
            say(&format!("warning: statistics file {}: {why}", file.display()));
        }
    };
    let joined = JoinedJob { link, job, agent, socket: socket.clone(), quiet };
    Ok(run_joined(joined, path, command, &mut write_stats)?)
}

/// Writes a group's counters.
fn fetch_stats(socket: &Path, group: &str, file: &Path) -> io::Result<()> {
    let answered = Client::connect(socket)?.ask(Verb::Stats, group, b"", PATIENCE)?;
    match answered.errno {
        0 => write_whole(file, &answered.text),
        _ => Err(io::Error::other(answered.text)),
    }
}

/// A daemon that is about to be joined.
struct Daemon {
    client: Client,
    socket: PathBuf,
    /// Groups that were made for it, the outermost first.
    made: Vec<String>,
}

impl Daemon {
    /// Makes and limits a group, and joins in it; gives its path, the job, and the agent.
    fn join(
        &mut self,
        group: Option<String>,
        limits: [Option<u64>; 2],
        require: bool,
    ) -> Result<(String, uzswap_proto::Job, PathBuf), Failure> {
        let transient = group.is_none();
        let group = match group {
            Some(group) => self.make_all(&group)?,
            None => self.make_new()?,
        };
        for (file, bytes) in ["memory.max", "memory.high"].into_iter().zip(limits) {
            if let Some(bytes) = bytes {
                self.ask(Verb::Write, &format!("{group}/{file}"), bytes.to_string().as_bytes())?;
            }
        }
        let wishes = [(require, REQUIRE), (transient, TRANSIENT)];
        let wishes: Vec<&str> = wishes.into_iter().filter(|(wished, _)| *wished).map(|(_, wish)| wish).collect();
        let text = self.ask(Verb::Join, &group, wishes.join("\n").as_bytes())?;
        let joined = Joined::decode(&text).ok_or_else(|| {
            format!("the daemon at {} has another version; run it and the job with the same", self.socket.display())
        })?;
        let agent = PathBuf::from(joined.agent);
        if !agent.is_file() {
            let agent = agent.display();
            return Err(format!("the daemon's agent, {agent}, cannot be seen from here; share that directory").into());
        }
        Ok((group, joined.job, agent))
    }

    /// Makes a group and those above it, as far as they are not there.
    fn make_all(&mut self, group: &str) -> Result<String, Failure> {
        let mut path = "cgroup".to_owned();
        for name in group.split('/').filter(|name| !name.is_empty()) {
            path = format!("{path}/{name}");
            match self.answer(Verb::Make, &path, b"")? {
                Answered { errno: 0, .. } => self.made.push(path.clone()),
                Answered { errno, .. } if errno == Errno::EXIST.raw_os_error() as u32 => {}
                refused => return Err(failure(&path, refused)),
            }
        }
        Ok(path)
    }

    /// Makes a group with a name that is free.
    fn make_new(&mut self) -> Result<String, Failure> {
        let names = (0..NAMES).map(|number| match number {
            0 => format!("cgroup/run-{}", std::process::id()),
            _ => format!("cgroup/run-{}-{number}", std::process::id()),
        });
        for path in names {
            match self.answer(Verb::Make, &path, b"")? {
                Answered { errno: 0, .. } => {
                    self.made.push(path.clone());
                    return Ok(path);
                }
                Answered { errno, .. } if errno == Errno::EXIST.raw_os_error() as u32 => {}
                refused => return Err(failure(&path, refused)),
            }
        }
        Err("no name is free for a group; give --cgroup".to_owned().into())
    }

    /// Removes what was made. What cannot be has come to be used by others.
    fn undo(&mut self) {
        for path in std::mem::take(&mut self.made).into_iter().rev() {
            let _ = self.answer(Verb::Remove, &path, b"");
        }
    }

    fn ask(&mut self, verb: Verb, path: &str, value: &[u8]) -> Result<String, Failure> {
        match self.answer(verb, path, value)? {
            Answered { errno: 0, text } => Ok(text),
            refused => Err(failure(path, refused)),
        }
    }

    fn answer(&mut self, verb: Verb, path: &str, value: &[u8]) -> Result<Answered, Failure> {
        self.client.ask(verb, path, value, PATIENCE).map_err(|error| {
            Failure::from(match error.kind() {
                ErrorKind::InvalidInput => "a group's path of more than 4096 bytes".to_owned(),
                _ => client::not_answered(&self.socket, &error, PATIENCE),
            })
        })
    }
}

/// What the daemon has refused.
fn failure(path: &str, refused: Answered) -> Failure {
    Failure::new(format!("{path}: {}", refused.text), 2)
}

//! `uzswap daemon`: settings, a socket of its own or of systemd's, and the settings again when they have changed.
//!
//! What has changed is set as an operator would set it, by requests to the manager. What cannot be changed while it runs is
//! named, and stays as it was.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ArgMatches;
use sd_notify::NotifyState;
use uzswap_manager::{Entrance, JobConfig, News, run_daemon};
use uzswap_proto::control::Verb;
use uzswap_vm::doctor::blocking_problems;
use uzswap_vm::sys::link::inherited_listener;

use crate::client::{self, Client};
use crate::flags::Of;
use crate::job::{daemon_config, daemon_socket};
use crate::ram::Ram;
use crate::run::{AGENT, cannot_run};
use crate::settings::Settings;
use crate::{Failure, say};

/// How long the manager may take to change something.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who may connect: the daemon's own user, and root.
const MODE: u32 = 0o600;

/// Runs a daemon; gives its exit status.
pub fn daemon(matches: &ArgMatches) -> Result<i32, Failure> {
    let (settings, config) = read(matches)?;
    let (entrance, socket) = entrance(&settings)?;
    if let Some(problem) = blocking_problems().first() {
        return Err(cannot_run(problem).into());
    }
    let mut current = config.clone();
    let mut news = |news| match news {
        News::Ready => tell_systemd(&[NotifyState::Ready]),
        News::Stopping => tell_systemd(&[NotifyState::Status("stopping: jobs get back their memory")]),
        News::Reload => match read(matches).map_err(|failure| failure.message) {
            Ok((_, now)) => {
                apply(&current, &now, socket.as_deref());
                current = now;
            }
            Err(why) => say(&format!("error: {why}; the settings stay as they were")),
        },
    };
    Ok(run_daemon(&config, entrance, AGENT, &mut news)?)
}

fn read(matches: &ArgMatches) -> Result<(Settings, JobConfig), Failure> {
    let root = Path::new("/");
    let settings = Settings::read(Of::Daemon, matches, |name| env::var_os(name), root)?;
    let config = daemon_config(&settings, &Ram::detect(root)?)?;
    Ok((settings, config))
}

/// The socket that systemd has opened, or else the one to open; and its name.
fn entrance(settings: &Settings) -> Result<(Entrance, Option<PathBuf>), Failure> {
    let given: Vec<_> = sd_notify::listen_fds().map_or_else(|_| Vec::new(), Iterator::collect);
    match given[..] {
        [] => {
            let socket = daemon_socket(settings)?;
            let mode = settings.mode("socket-mode").unwrap_or(MODE);
            Ok((Entrance::Name(socket.clone(), mode), Some(socket)))
        }
        [descriptor] => {
            let listener = inherited_listener(descriptor).map_err(|error| format!("the socket of systemd: {error}"))?;
            let name = listener.local_addr().ok().and_then(|name| name.as_pathname().map(Path::to_owned));
            Ok((Entrance::Open(listener), name))
        }
        _ => Err(format!("{} sockets of systemd; there is use for one", given.len()).into()),
    }
}

fn tell_systemd(states: &[NotifyState<'_>]) {
    // It may not be there, or not want to know.
    let _ = sd_notify::notify(states);
}

/// Sets what has changed.
fn apply(before: &JobConfig, now: &JobConfig, socket: Option<&Path>) {
    let yes_no = |yes: bool| if yes { "Y" } else { "N" }.to_owned();
    let limit = |bytes: Option<u64>| bytes.map_or_else(|| "max".to_owned(), |bytes| bytes.to_string());
    let values = |config: &JobConfig| {
        [
            ("parameters/enabled", yes_no(config.enabled)),
            ("parameters/compressor", config.compressor.to_string()),
            ("parameters/zpool", config.zpool.to_string()),
            ("parameters/accept_threshold_percent", config.accept_threshold_percent.to_string()),
            ("parameters/shrinker_enabled", yes_no(config.shrinker_enabled)),
            ("parameters/swapin", config.swapin.to_string()),
            ("cgroup/memory.max", limit(config.memory_max)),
            ("cgroup/memory.high", limit(config.memory_high)),
            ("parameters/max_pool_percent", config.max_pool_percent().to_string()),
        ]
    };
    if before.swap != now.swap {
        say("warning: another swap file takes effect when the daemon is started anew");
    }
    let changed = values(now).into_iter().zip(values(before)).filter(|(now, before)| now != before);
    for ((path, value), _) in changed {
        if let Err(why) = set(socket, path, &value) {
            say(&format!("error: {path} could not be set to {value}: {why}"));
        }
    }
}

fn set(socket: Option<&Path>, path: &str, value: &str) -> Result<(), String> {
    let socket = socket.ok_or("the socket has no name")?;
    let mut client = Client::connect(socket).map_err(|error| client::not_connected(socket, &error))?;
    let answered = client.ask(Verb::Write, path, value.as_bytes(), PATIENCE);
    match answered.map_err(|error| client::not_answered(socket, &error, PATIENCE))? {
        answered if answered.errno == 0 => Ok(()),
        refused => Err(refused.text),
    }
}

//! `uzswap get`, `set`, `ls`, `mkdir`, `rmdir`, `reclaim` and `stat`: what an operator asks of a manager that listens.
//!
//! 1. Which manager, and what is said to it: `client.rs`.
//! 2. What the manager refuses is told in its words, behind the path, with exit status 1; a command that could not ask at all
//!    ends with 2.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::parent_id;
use std::path::PathBuf;
use std::time::Duration;

use clap::ArgMatches;
use serde_json::{Map, Value};
use uzswap_proto::control::Verb;

use crate::client::{self, Client};
use crate::size::{Human, parse_size};
use crate::{Failure, print};

/// How long the manager may take to answer. To reclaim much, or to kill many, takes a while.
const PATIENCE: Duration = Duration::from_secs(60);

/// What `stat` shows of a group: files with one value.
const VALUES: [&str; 10] = [
    "memory.current",
    "memory.peak",
    "memory.high",
    "memory.max",
    "memory.swap.current",
    "memory.swap.peak",
    "memory.swap.max",
    "memory.zswap.current",
    "memory.zswap.max",
    "memory.zswap.writeback",
];

/// And files with a key and a value on each line.
const KEYED: [&str; 4] = ["cgroup.events", "memory.events", "memory.swap.events", "memory.stat"];

/// A connection to a manager.
struct Manager {
    client: Client,
    name: PathBuf,
}

/// `uzswap get PATH`.
pub fn get(matches: &ArgMatches) -> Result<i32, Failure> {
    Manager::named(matches)?.ask(Verb::Read, &text(matches, "path")?, "").map(|text| print(&text))
}

/// `uzswap set PATH VALUE`.
pub fn set(matches: &ArgMatches) -> Result<i32, Failure> {
    let (path, mut value) = (text(matches, "path")?, text(matches, "value")?);
    if client::is_writer(&path, value.as_bytes()) {
        // The writer: whoever would write to a file in our place.
        value = parent_id().to_string();
    }
    Manager::named(matches)?.ask(Verb::Write, &path, &value).map(|_| 0)
}

/// `uzswap ls [PATH]`.
pub fn ls(matches: &ArgMatches) -> Result<i32, Failure> {
    Manager::named(matches)?.ask(Verb::List, &optional(matches, "path")?, "").map(|names| print(&names))
}

/// `uzswap mkdir GROUP`.
pub fn mkdir(matches: &ArgMatches) -> Result<i32, Failure> {
    let path = directory(&text(matches, "group")?);
    Manager::named(matches)?.ask(Verb::Make, &path, "").map(|_| 0)
}

/// `uzswap rmdir GROUP`.
pub fn rmdir(matches: &ArgMatches) -> Result<i32, Failure> {
    let path = directory(&text(matches, "group")?);
    Manager::named(matches)?.ask(Verb::Remove, &path, "").map(|_| 0)
}

/// `uzswap reclaim [GROUP] SIZE`.
pub fn reclaim(matches: &ArgMatches) -> Result<i32, Failure> {
    let bytes = parse_size(&text(matches, "size")?)?;
    let path = format!("{}/memory.reclaim", directory(&optional(matches, "group")?));
    Manager::named(matches)?.ask(Verb::Write, &path, &bytes.to_string()).map(|_| 0)
}

/// `uzswap stat [GROUP]`.
pub fn stat(matches: &ArgMatches) -> Result<i32, Failure> {
    let directory = directory(&optional(matches, "group")?);
    let mut manager = Manager::named(matches)?;
    let mut all = Map::new();
    for name in VALUES {
        let text = manager.ask(Verb::Read, &format!("{directory}/{name}"), "")?;
        all.insert(name.to_owned(), value(text.trim()));
    }
    for name in KEYED {
        let text = manager.ask(Verb::Read, &format!("{directory}/{name}"), "")?;
        all.insert(name.to_owned(), Value::Object(keyed(&text)));
    }
    Ok(print(&if matches.get_flag("json") { json(all) } else { table(&all) }))
}

/// Where a group's files are; with or without `cgroup` in front, as people write it.
fn directory(group: &str) -> String {
    let group = group.trim_matches('/');
    match group.strip_prefix("cgroup") {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => group.to_owned(),
        _ if group.is_empty() => "cgroup".to_owned(),
        _ => format!("cgroup/{group}"),
    }
}

fn value(text: &str) -> Value {
    text.parse::<u64>().map_or_else(|_| Value::from(text), Value::from)
}

fn keyed(text: &str) -> Map<String, Value> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(key, text)| (key.to_owned(), value(text))).collect()
}

fn json(all: Map<String, Value>) -> String {
    let mut text = serde_json::to_string_pretty(&all).expect("plain values become JSON");
    text.push('\n');
    text
}

/// A line for each figure, sizes as people read them.
fn table(all: &Map<String, Value>) -> String {
    let is_size = |name: &str| {
        let in_stat =
            ["anon", "zswap", "zswapped", "zswap_incomp", "unmanaged_current", "unmanaged_peak"].contains(&name);
        in_stat || name.starts_with("memory.") && name != "memory.zswap.writeback"
    };
    let shown = |name: &str, value: &Value| match (value.as_u64(), value.as_str()) {
        (Some(bytes), _) if is_size(name) => Human(bytes).to_string(),
        (_, Some(text)) => text.to_owned(),
        _ => value.to_string(),
    };
    let mut lines: Vec<(String, String)> = Vec::new();
    for name in VALUES {
        lines.push((name.to_owned(), shown(name, &all[name])));
    }
    for file in KEYED {
        for (key, value) in all[file].as_object().into_iter().flatten() {
            lines.push((format!("{file} {key}"), shown(key, value)));
        }
    }
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

fn text(matches: &ArgMatches, name: &str) -> Result<String, Failure> {
    let given: &OsString = matches.get_one(name).expect("is given");
    given.to_str().map(str::to_owned).ok_or_else(|| format!("{given:?} is not text").into())
}

fn optional(matches: &ArgMatches, name: &str) -> Result<String, Failure> {
    if matches.contains_id(name) { text(matches, name) } else { Ok(String::new()) }
}

impl Manager {
    /// Connects to the manager that the command line names.
    fn named(matches: &ArgMatches) -> Result<Manager, Failure> {
        let name = client::socket(matches)?;
        let client = Client::connect(&name).map_err(|error| client::not_connected(&name, &error))?;
        Ok(Manager { client, name })
    }

    /// Asks for one thing; gives the text of the answer.
    fn ask(&mut self, verb: Verb, path: &str, value: &str) -> Result<String, Failure> {
        let answered = self.client.ask(verb, path, value.as_bytes(), PATIENCE).map_err(|error| {
            Failure::from(match error.kind() {
                ErrorKind::InvalidInput => "a path or value of more than 4096 bytes".to_owned(),
                _ => client::not_answered(&self.name, &error, PATIENCE),
            })
        })?;
        match answered.errno {
            0 => Ok(answered.text),
            _ => {
                let path = if path.is_empty() { "/" } else { path };
                Err(Failure::new(format!("{path}: {}", answered.text), 1))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_named_with_or_without_the_tree() {
        for group in ["", "/", "cgroup", "/cgroup/"] {
            assert_eq!(directory(group), "cgroup", "{group}");
        }
        for group in ["a/b", "/a/b/", "cgroup/a/b"] {
            assert_eq!(directory(group), "cgroup/a/b", "{group}");
        }
        assert_eq!(directory("cgroups"), "cgroup/cgroups");
    }

    #[test]
    fn figures_are_for_people_or_for_programs() {
        let mut all: Map<String, Value> = VALUES.map(|name| (name.to_owned(), value("1048576"))).into_iter().collect();
        all.insert("memory.max".into(), value("max"));
        all.insert("memory.zswap.writeback".into(), value("1"));
        all.extend(KEYED.map(|name| (name.to_owned(), Value::Object(keyed("anon 4096\nzswpin 4096\n")))));
        let text = table(&all);
        for (name, value) in [
            ("memory.current", "1 MiB"),
            ("memory.max", "max"),
            ("memory.zswap.writeback", "1"),
            ("memory.stat anon", "4 KiB"),
            ("memory.stat zswpin", "4096"),
        ] {
            let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).expect(name);
            assert_eq!(line[name.len()..].trim(), value, "{line}");
        }
        let parsed: Value = serde_json::from_str(&json(all)).expect("JSON");
        assert_eq!((parsed["memory.max"].as_str(), parsed["memory.stat"]["anon"].as_u64()), (Some("max"), Some(4096)));
    }
}

//! Style that a machine can check, over every source file of the workspace.
//!
//! - dependencies between crates run only along the arrows of ARCHITECTURE.md
//! - every file opens with `//!` and is short enough to read
//! - no leftovers, no banners but where they help, no paths of one machine
//! - every unsafe block says why it is sound

use std::fs;
use std::path::{Path, PathBuf};

/// Each crate and what it may depend on. The agent is another process and shares only its words; nothing uses the lab but
/// the command that starts it.
const ARROWS: [(&str, &[&str]); 7] = [
    ("engine", &[]),
    ("proto", &[]),
    ("vm", &["engine", "proto"]),
    ("agent", &["proto"]),
    ("manager", &["engine", "vm", "proto"]),
    ("lab", &["engine", "vm", "proto", "manager"]),
    ("uzswap", &["engine", "vm", "proto", "manager", "lab"]),
];
/// Files in which a kernel reader follows side by side.
const BANNERS_ALLOWED: [&str; 2] = ["zswap.rs", "zsmalloc.rs"];
const LINES_MOST: usize = 900;
/// How far above an unsafe block its comment may begin.
const SAFETY_DISTANCE: usize = 12;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("workspace")
}

fn rust_files() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut directories = vec![root().join("crates")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("list").map(|entry| entry.expect("entry").path()) {
            let skip = entry.file_name().is_some_and(|name| name == "target");
            if entry.is_dir() && !skip {
                directories.push(entry);
            } else if entry.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&entry).expect("read");
                files.push((entry, text));
            }
        }
    }
    assert!(files.len() > 10, "where is the source?");
    files
}

/// Runs `judge` over all files and fails with everything it found.
fn all_files(judge: impl Fn(&Path, &str) -> Vec<String>) {
    let found: Vec<String> = rust_files().iter().flat_map(|(path, text)| judge(path, text)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

fn at(path: &Path, line: usize, what: &str) -> String {
    format!("{}:{}: {what}", path.display(), line + 1)
}

#[test]
fn dependencies_run_along_the_arrows() {
    for entry in fs::read_dir(root().join("crates")).expect("list") {
        let directory = entry.expect("entry").path();
        let name = directory.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let allowed = ARROWS.iter().find(|(from, _)| *from == name).unwrap_or_else(|| panic!("no arrows for {name}")).1;
        let manifest = fs::read_to_string(directory.join("Cargo.toml")).expect("manifest");
        let manifest: toml::Table = manifest.parse().expect("TOML");
        for section in ["dependencies", "build-dependencies"] {
            for dependency in
                manifest.get(section).and_then(toml::Value::as_table).into_iter().flat_map(toml::Table::keys)
            {
                let Some(to) = dependency.strip_prefix("uzswap-") else { continue };
                // The agent's file is embedded in what starts it: built along, never linked.
                let built_along = section == "build-dependencies" && to == "agent";
                assert!(allowed.contains(&to) || built_along, "{name} must not depend on {to}");
            }
        }
    }
}

#[test]
fn files_open_with_what_they_guard_and_stay_short() {
    all_files(|path, text| {
        let mut found = Vec::new();
        if !text.starts_with("//!") {
            found.push(at(path, 0, "does not open with //!"));
        }
        if text.lines().count() > LINES_MOST {
            found.push(at(path, LINES_MOST, "too long: split it along its seams"));
        }
        found
    });
}

#[test]
fn nothing_is_left_over() {
    // Spelt in pieces, so that this file does not find itself.
    let leftovers = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("db", "g!("),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("TO", "DO"),
        concat!("#[ig", "nore"),
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
    ];
    all_files(|path, text| {
        let lines = text.lines().enumerate();
        lines
            .filter_map(|(n, line)| leftovers.iter().find(|word| line.contains(**word)).map(|word| at(path, n, word)))
            .collect()
    });
}

#[test]
fn banners_stand_only_where_they_help() {
    all_files(|path, text| {
        if path.file_name().is_some_and(|name| BANNERS_ALLOWED.iter().any(|allowed| name == *allowed)) {
            return Vec::new();
        }
        let is_banner = |line: &str| {
            let rest = line.trim().strip_prefix("//").unwrap_or("");
            rest.contains("----") || rest.contains("====") || rest.contains("####") || rest.contains("****")
        };
        text.lines().enumerate().filter(|(_, line)| is_banner(line)).map(|(n, _)| at(path, n, "banner")).collect()
    });
}

#[test]
fn unsafe_blocks_say_why() {
    all_files(|path, text| {
        let lines: Vec<&str> = text.lines().collect();
        let explained =
            |n: usize| lines[n.saturating_sub(SAFETY_DISTANCE)..=n].iter().any(|line| line.contains("SAFETY:"));
        let opens = |line: &str| {
            let code = line.split("//").next().unwrap_or("");
            code.contains(concat!("unsafe", " {")) && !code.contains('"')
        };
        (0..lines.len())
            .filter(|&n| opens(lines[n]) && !explained(n))
            .map(|n| at(path, n, "no SAFETY comment"))
            .collect()
    });
}

//! The real binary on bad input: one clear line, status 2, nothing on standard output, nothing left behind; and where
//! settings come from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// An empty directory that is also home, gone at the end.
struct Home(PathBuf);

impl Home {
    fn new() -> Home {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("uzswap-cli-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("create");
        Home(path)
    }

    fn uzswap(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzswap"));
        command.args(arguments).current_dir(&self.0).env_clear().env("HOME", &self.0).env("PATH", "/usr/bin:/bin");
        command.envs(variables.iter().copied()).output().expect("uzswap starts")
    }

    fn files(&self) -> usize {
        fs::read_dir(&self.0).expect("list").count()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Asserts a refusal and returns its line; tips of the parser may follow, each on a line of its own.
fn refusal(home: &Home, arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let files = home.files();
    let output = home.uzswap(arguments, variables);
    let error = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert!(error.lines().skip(1).all(|line| line.starts_with("uzswap: tip: ")), "{arguments:?}: {error}");
    assert!(error.starts_with("uzswap: error: ") && error.ends_with('\n'), "{arguments:?}: {error}");
    assert_eq!(home.files(), files, "{arguments:?} left something behind");
    error
}

fn run<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    [&["run"], flags, &["--", "true"]].concat()
}

#[test]
fn bad_flags_are_named_with_what_would_be_right() {
    let home = Home::new();
    for (flags, words) in [
        (&["--memory-max", "0"][..], &["--memory-max", "zero"][..]),
        (&["--memory-max", "-1"], &["--memory-max", "negative"]),
        (&["--memory-max=-5M"], &["--memory-max", "negative"]),
        (&["--memory-max", "99999999T"], &["--memory-max", "absurdly"]),
        (&["--memory-max", "1000T"], &["--memory-max", "more than makes sense"]),
        (&["--memory-max", "lots"], &["--memory-max", "'lots'", "256M"]),
        (&["--memory-max", "256MB"], &["--memory-max", "256M"]),
        (&["--memory-max", ""], &["--memory-max", "not a size"]),
        (&["--memory-max", "1M\nuzswap: all is well"], &["not a size"]),
        (&["--memory-max", "1M"], &["--memory-max", "at least 4 MiB"]),
        (&["--memory-max", "150%"], &["100%"]),
        (&["--memory-high", "2K"], &["--memory-high", "at least 4 MiB"]),
        (&["--memory-max", "64M", "--memory-high", "65M"], &["--memory-high", "above", "--memory-max"]),
        (&["--memory-max", "64M", "--max-pool-percent", "0"], &["--max-pool-percent", "from 1 to 100"]),
        (&["--memory-max", "64M", "--max-pool-percent", "101"], &["from 1 to 100"]),
        (&["--memory-max", "64M", "--max-pool", "1"], &["--max-pool", "at least 4 KiB"]),
        (&["--memory-max", "64M", "--max-pool", "900T"], &["--max-pool", "at most"]),
        (&["--memory-max", "64M", "--max-pool", "9M", "--max-pool-percent", "9"], &["exclude each other"]),
        (&["--memory-max", "64M", "--accept-threshold-percent", "x"], &["--accept-threshold-percent", "'x'"]),
        (&["--memory-max", "64M", "--compressor", "snappy"], &["lz4, lzo-rle, zstd, deflate"]),
        (&["--memory-max", "64M", "--swap-size", "0"], &["--swap-size", "zero"]),
        (&["--memory-max", "64M", "--swap-size", "1K"], &["--swap-size", "one page"]),
        (&["--memory-max", "64M", "--no-swap", "--swap-size", "1G"], &["--no-swap", "--swap-size"]),
        (&["--memory-max", "64M", "--no-swap", "--swap-file", "s"], &["--no-swap", "--swap-file"]),
        (&["--memory-max", "64M", "--swap-file", "no/such"], &["--swap-file", "directory no does not exist"]),
        (&["--memory-max", "64M", "--swap-file", "."], &["--swap-file", "is a directory"]),
        (&["--memory-max", "64M", "--swap-file", "/dev/null"], &["exists already"]),
        (&["--memory-max", "64M", "--stats", "no/such"], &["--stats", "does not exist"]),
        (&["--memory-max", "64M", "--stats", "/"], &["--stats", "is a directory"]),
        (&["--memory-max", "64M", "--stats", "new/"], &["--stats", "does not name a file"]),
        (&["--memory-max"], &["--memory-max"]),
        (&["--memory-min", "1M"], &["--memory-min"]),
        (&["--config", "none.toml"], &["none.toml", "No such file"]),
    ] {
        let line = refusal(&home, &run(flags), &[]);
        for word in words {
            assert!(line.contains(word), "{flags:?}: no {word:?} in {line}");
        }
    }
}

#[test]
fn a_command_line_that_asks_for_nothing_is_refused() {
    let home = Home::new();
    for (arguments, word) in [
        (&[][..], "uzswap --help"),
        (&["run", "--memory-max", "64M"], "CMD"),
        (&["fly"], "fly"),
        (&["completions", "x"], "x"),
    ] {
        let line = refusal(&home, arguments, &[]);
        assert!(line.contains(word), "{line}");
    }
}

#[test]
fn a_read_only_directory_is_seen_early() {
    let home = Home::new();
    let sealed = home.0.join("sealed");
    fs::create_dir(&sealed).expect("create");
    let mut rights = fs::metadata(&sealed).expect("metadata").permissions();
    rights.set_readonly(true);
    fs::set_permissions(&sealed, rights).expect("seal");
    if fs::write(sealed.join("probe"), "").is_ok() {
        return; // root may write anywhere
    }
    for flag in ["--swap-file", "--stats"] {
        let line = refusal(&home, &run(&["--memory-max", "64M", flag, "sealed/file"]), &[]);
        assert!(line.contains(flag) && line.contains("permission denied"), "{line}");
    }
}

#[test]
fn environment_and_files_are_read_and_blamed_by_name() {
    let home = Home::new();
    let line = refusal(&home, &run(&[]), &[("UZSWAP_MEMORY_MAX", "1M")]);
    assert!(line.contains("UZSWAP_MEMORY_MAX: 1 MiB"), "{line}");
    fs::create_dir(home.0.join(".config")).expect("create");
    let file = |text: &str| fs::write(home.0.join(".config/uzswap.toml"), text).expect("write");
    file("memory-max = \"2M\"\n");
    let line = refusal(&home, &run(&[]), &[]);
    assert!(line.contains("memory-max in ") && line.contains("uzswap.toml: 2 MiB"), "{line}");
    let line = refusal(&home, &run(&[]), &[("UZSWAP_MEMORY_MAX", "1M")]);
    assert!(line.contains("UZSWAP_MEMORY_MAX: 1 MiB"), "{line}");
    let line = refusal(&home, &run(&["--memory-max", "3M"]), &[("UZSWAP_MEMORY_MAX", "1M")]);
    assert!(line.contains("--memory-max: 3 MiB"), "{line}");
    file("memory-maximum = \"2M\"\n");
    let line = refusal(&home, &run(&["--memory-max", "64M"]), &[]);
    assert!(line.contains("unknown key 'memory-maximum'") && line.contains("memory-max"), "{line}");
    fs::write(home.0.join("mine.toml"), "memory-max = \"1M\"\n").expect("write");
    let line = refusal(&home, &run(&["--config", "mine.toml"]), &[]);
    assert!(line.contains("memory-max in mine.toml"), "{line}");
    let line = refusal(&home, &run(&[]), &[("UZSWAP_CONFIG", "mine.toml")]);
    assert!(line.contains("memory-max in mine.toml"), "{line}");
}

#[test]
fn help_man_and_completions_name_every_flag() {
    let home = Home::new();
    for arguments in [&["run", "--help"][..], &["man", "run"], &["completions", "bash"], &["completions", "zsh"]] {
        let output = home.uzswap(arguments, &[]);
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}");
        let text = String::from_utf8(output.stdout).expect("text").replace('\\', "");
        for flag in ["--memory-max", "--max-pool-percent", "--swap-file", "--require", "--config"] {
            assert!(text.contains(flag), "{arguments:?} lacks {flag}");
        }
    }
    let help = String::from_utf8(home.uzswap(&["run", "--help"], &[]).stdout).expect("text");
    assert!(help.contains("UZSWAP_MEMORY_MAX") && help.contains("--memory-max <SIZE>"), "{help}");
    assert!(home.uzswap(&["--version"], &[]).stdout.starts_with(b"uzswap "));
}

#[test]
fn the_doctors_status_and_its_json_agree() {
    let home = Home::new();
    let output = home.uzswap(&["doctor", "--json"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let fit = report["run_will_work"].as_bool().expect("a boolean");
    assert_eq!(output.status.code(), Some(i32::from(!fit)));
    let checks = report["checks"].as_array().expect("a list");
    assert!(checks.len() >= 10);
    for check in checks {
        assert!(["ok", "warn", "fail"].contains(&check["state"].as_str().expect("a state")), "{check}");
        assert!(check["name"].is_string() && check["finding"].is_string() && check["remedies"].is_array(), "{check}");
    }
    assert_eq!(checks.iter().all(|check| check["state"] != "fail"), fit);
    let all = home.uzswap(&["doctor", "--all"], &[]);
    assert_eq!(all.status.code(), output.status.code());
    assert_eq!(home.files(), 0);
}

#[test]
fn where_the_machine_does_not_fit_run_uses_the_doctors_words() {
    let home = Home::new();
    let output = home.uzswap(&["doctor", "--json"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let failed = report["checks"].as_array().expect("a list").iter().find(|check| check["state"] == "fail");
    if let Some(check) = failed {
        let line = refusal(&home, &run(&["--memory-max", "64M"]), &[]);
        assert!(line.contains(check["finding"].as_str().expect("text")), "{line}");
    }
    assert!(Path::new(&home.0).is_dir());
}

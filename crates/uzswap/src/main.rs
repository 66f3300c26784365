//! The `uzswap` command: reads the command line, hands over to the part that does the work, and ends with its status.
//!
//! 1. Standard output carries data only (a report that was asked for); every message goes to standard error.
//! 2. An error is one line, `uzswap: error: …`, and nothing has been created or started when it appears. What the parser suggests
//!    follows on lines of its own, `uzswap: tip: …`.
//! 3. Exit status: the program's own for `run`, 1 for what a manager refuses and for a mount that fails, 2 for bad usage or a failed set-up.

mod client;
mod connect;
mod control;
mod daemon;
mod demo;
mod doctor;
mod environment;
mod flags;
mod job;
mod lab;
mod mount;
mod ram;
mod run;
mod settings;
mod size;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::ArgMatches;
use clap::error::ErrorKind;
use uzswap_manager::RunError;

/// Why the command ends without having done its work.
#[derive(Debug)]
struct Failure {
    message: String,
    tips: Vec<String>,
    status: i32,
}

impl Failure {
    fn new(message: String, status: i32) -> Failure {
        Failure { message, tips: Vec::new(), status }
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Failure {
        Failure::new(message, 2)
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        Failure::new(error.message, error.exit_status)
    }
}

fn main() -> ExitCode {
    // A manager that limps on after a thread of it has died would keep its programs waiting. (A release aborts anyway.)
    if cfg!(panic = "unwind") {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            report(panic);
            std::process::abort();
        }));
    }
    let status = dispatch().unwrap_or_else(|failure| {
        say(&format!("error: {}", one_line(&failure.message)));
        failure.tips.iter().for_each(|tip| say(&one_line(tip)));
        failure.status
    });
    // The system keeps eight bits of a status.
    ExitCode::from(status as u8)
}

fn dispatch() -> Result<i32, Failure> {
    let matches = match flags::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => return Ok(print(&error.to_string())),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                return Err("no subcommand; see uzswap --help".to_owned().into());
            }
            _ => return Err(usage(&error.to_string())),
        },
    };
    let (name, matches) = matches.subcommand().expect("a subcommand is required");
    match name {
        "run" => run::run(matches),
        "daemon" => daemon::daemon(matches),
        "doctor" => Ok(doctor::doctor(matches.get_flag("json"), matches.get_flag("all"))),
        "get" => control::get(matches),
        "set" => control::set(matches),
        "ls" => control::ls(matches),
        "mkdir" => control::mkdir(matches),
        "rmdir" => control::rmdir(matches),
        "reclaim" => control::reclaim(matches),
        "stat" => control::stat(matches),
        "mount" => mount::mount(matches),
        "demo" => demo::demo(matches),
        "lab" => lab::lab(matches),
        "completions" => Ok(completions(matches)),
        _ => Ok(man(matches)),
    }
}

fn completions(matches: &ArgMatches) -> i32 {
    let shell: clap_complete::Shell = *matches.get_one("shell").expect("is required");
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut flags::command(), "uzswap", &mut script);
    print(&String::from_utf8_lossy(&script))
}

fn man(matches: &ArgMatches) -> i32 {
    let mut command = flags::command();
    command.build(); // gives each subcommand its full name
    if let Some(name) = matches.get_one::<String>("page") {
        command = command.find_subcommand(name).expect("clap knows the names").clone();
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).expect("writing to memory");
    print(&String::from_utf8_lossy(&page))
}

/// What a clap error says: what is wrong, as one line without its usage, and each of its tips.
fn usage(error: &str) -> Failure {
    let said =
        error.lines().map(str::trim).take_while(|line| !["Usage:", "For more"].iter().any(|end| line.starts_with(end)));
    let (tips, said): (Vec<_>, Vec<_>) =
        said.filter(|line| !line.is_empty()).partition(|line| line.starts_with("tip: "));
    let said = said.join(" ");
    let message = format!("{}; see uzswap --help", said.strip_prefix("error: ").unwrap_or(&said));
    Failure { tips: tips.into_iter().map(str::to_owned).collect(), ..message.into() }
}

/// Names given by the user may hold anything, line breaks included.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// A message on standard error; if nobody can read it, there is nobody to tell.
fn say(message: &str) {
    let _ = writeln!(io::stderr(), "uzswap: {message}");
}

/// Data on standard output; the exit status is 0 even if the reader has gone (`| head`).
fn print(text: &str) -> i32 {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            say(&format!("error: cannot write to standard output: {error}"));
            2
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_errors_become_one_line() {
        let error = flags::command().try_get_matches_from(["uzswap", "run", "--no-such"]).expect_err("unknown flag");
        let Failure { message: line, tips, .. } = usage(&error.to_string());
        assert!(line.contains("--no-such") && !line.contains('\n') && !line.contains("Usage"), "{line}");
        assert!(tips.iter().all(|tip| tip.starts_with("tip: ")) && !line.contains("tip:"), "{line} {tips:?}");
        let error =
            flags::command().try_get_matches_from(["uzswap", "run", "--memroy-max", "1G"]).expect_err("misspelt");
        let Failure { message, tips, .. } = usage(&error.to_string());
        assert_eq!(message, "unexpected argument '--memroy-max' found; see uzswap --help");
        assert_eq!(tips[0], "tip: a similar argument exists: '--memory-max'");
    }

    #[test]
    fn control_characters_cannot_break_the_line() {
        assert_eq!(one_line("a\nb\u{1b}[31mc"), "a\\nb\\u{1b}[31mc");
    }
}

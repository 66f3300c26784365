//! The flags of `uzswap run` and `uzswap daemon`: one definition each, from which parser, help, man page, completions, environment
//! variable and configuration key are made.
//!
//! 1. [`ALL`] is the only place that names a flag; nothing else spells its variable or its key.
//! 2. A value is the same text wherever it comes from and is parsed by its [`Kind`] alone, so that one mistake gives
//!    the same words on the command line, in the environment and in a file.
//! 3. A flag's default is stated in its help and lives in `job.rs`.

use std::fmt;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command, ValueHint};
use uzswap_engine::{Compressor, UnknownName, Zpool};
use uzswap_lab::torture::KNOWN_OPEN;
use uzswap_manager::Swapin;

use crate::size::{Amount, parse_amount};

/// One flag.
#[derive(Debug)]
pub struct Flag {
    /// Long name without dashes; also the configuration key.
    pub name: &'static str,
    /// Whose it is.
    pub of: Of,
    /// What its value is.
    pub kind: Kind,
    /// One line, for `-h`.
    pub help: &'static str,
    /// More, for `--help` and the man page.
    pub more: &'static str,
}

/// Which command has a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// `uzswap run`.
    Run,
    /// `uzswap daemon`.
    Daemon,
    /// Both.
    Both,
}

/// The flags of `uzswap run` or `uzswap daemon`.
pub fn flags(of: Of) -> impl Iterator<Item = &'static Flag> {
    ALL.iter().filter(move |flag| [of, Of::Both].contains(&flag.of))
}

/// What a flag's value looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A size, or a percentage of RAM.
    Size,
    /// A whole number from the first to the second, without a percent sign.
    Percent(u8, u8),
    /// A codec's kernel name.
    Codec,
    /// An allocator's kernel name.
    Zpool,
    /// By what rule a fault brings more than its own page.
    Swapin,
    /// Y or N, as the kernel writes them, or the like.
    YesNo,
    /// A file.
    Path,
    /// A group's path.
    Group,
    /// Who may use a file, in octal digits.
    Mode,
    /// On if given, without a value.
    Switch,
}

/// A parsed value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Of [`Kind::Size`].
    Size(Amount),
    /// Of [`Kind::Percent`].
    Percent(u8),
    /// Of [`Kind::Codec`].
    Codec(Compressor),
    /// Of [`Kind::Zpool`].
    Zpool(Zpool),
    /// Of [`Kind::Swapin`].
    Swapin(Swapin),
    /// Of [`Kind::YesNo`].
    YesNo(bool),
    /// Of [`Kind::Path`].
    Path(PathBuf),
    /// Of [`Kind::Group`].
    Group(String),
    /// Of [`Kind::Mode`].
    Mode(u32),
    /// Of [`Kind::Switch`].
    Switch(bool),
}

/// All flags that a file or the environment may set too.
pub const ALL: &[Flag] = &[
    Flag {
        name: "memory-max",
        of: Of::Both,
        kind: Kind::Size,
        help: "Most memory the job may hold: resident anonymous pages plus compressed pool",
        more: "Reclaim keeps the job below it. Default, if --memory-high is not given either: the limit of the enclosing \
               cgroup less one eighth (at least 32 MiB); where there is none, run refuses to start",
    },
    Flag {
        name: "memory-high",
        of: Of::Both,
        kind: Kind::Size,
        help: "Reclaim starts when the job holds this much",
        more: "At most --memory-max. Alone, it reclaims without ever being a hard limit. Default: chosen from --memory-max",
    },
    Flag {
        name: "max-pool-percent",
        of: Of::Both,
        kind: Kind::Percent(1, 100),
        help: "Cap on the compressed pool, in percent of RAM",
        more: "RAM is the smaller of the machine's memory and the enclosing cgroup's limit. Default: 20",
    },
    Flag {
        name: "max-pool",
        of: Of::Both,
        kind: Kind::Size,
        help: "Cap on the compressed pool, as a size",
        more: "Excludes --max-pool-percent.",
    },
    Flag {
        name: "accept-threshold-percent",
        of: Of::Both,
        kind: Kind::Percent(1, 100),
        help: "A pool that was full accepts pages again at this percentage of its cap",
        more: "100 means no hysteresis. Default: 90",
    },
    Flag {
        name: "compressor",
        of: Of::Both,
        kind: Kind::Codec,
        help: "Codec for pages that are stored from now on",
        more: "One of lz4, lzo-rle, zstd, deflate. Default: lz4",
    },
    Flag {
        name: "zpool",
        of: Of::Both,
        kind: Kind::Zpool,
        help: "Allocator of the pool for pages that are stored from now on",
        more: "One of zsmalloc, zbud. zbud holds at most two pages in one, and is there for comparison. Default: zsmalloc",
    },
    Flag {
        name: "enabled",
        of: Of::Both,
        kind: Kind::YesNo,
        help: "Whether pages are stored in the pool at all",
        more: "Without, all go to the swap file. Default: Y",
    },
    Flag {
        name: "shrinker-enabled",
        of: Of::Both,
        kind: Kind::YesNo,
        help: "Whether memory pressure writes back cold pages before the pool is full",
        more: "Default: Y",
    },
    Flag {
        name: "verify",
        of: Of::Both,
        kind: Kind::Switch,
        help: "Keep a checksum of each page that is stored, and check it whenever the page is read back",
        more: "A page that fails the check is counted in decompress_fail, and the program that touches it gets SIGBUS instead of \
               wrong bytes. It takes 4 bytes for each stored page, and about a microsecond each time.",
    },
    Flag {
        name: "swapin",
        of: Of::Both,
        kind: Kind::Swapin,
        help: "How many pages a fault brings back",
        more: "One of never (its own alone), always (the largest folio around it that is swapped out whole), adaptive (as \
               many as the faults before it make likely to be wanted). The first two are there for comparison. Default: adaptive",
    },
    Flag {
        name: "swap-file",
        of: Of::Both,
        kind: Kind::Path,
        help: "File to create for pages that are written back",
        more: "It must not exist yet; it is created with mode 0600 and removed at the end. \
               Default: an unlinked file under /var/tmp",
    },
    Flag {
        name: "swap-size",
        of: Of::Both,
        kind: Kind::Size,
        help: "Most the swap file may grow to",
        more: "Default: whatever the file system gives",
    },
    Flag {
        name: "no-swap",
        of: Of::Both,
        kind: Kind::Switch,
        help: "Never write pages to disk",
        more: "Pages that the pool refuses stay resident. Excludes --swap-file and --swap-size.",
    },
    Flag {
        name: "control",
        of: Of::Run,
        kind: Kind::Path,
        help: "Socket to create for uzswap get, set, ls, stat and reclaim",
        more: "It has mode 0600 and is removed at the end. The job's programs find its name in UZSWAP_SOCKET, and \
               themselves inherit no UZSWAP_CONTROL: the name is taken.",
    },
    Flag {
        name: "control-fs",
        of: Of::Run,
        kind: Kind::Switch,
        help: "Let the job find its own control files where the kernel has its: under /sys/fs/cgroup",
        more: "In a mount namespace of its own; outside nothing is seen of it. The parameters are at \
               /sys/module/zswap/parameters, and the counters at /sys/kernel/debug/zswap if there is such a directory. It \
               takes CAP_SYS_ADMIN and /dev/fuse; if it cannot be had, the program is not started and the status is 1.",
    },
    Flag {
        name: "connect",
        of: Of::Run,
        kind: Kind::Switch,
        help: "Join the daemon instead of having a manager of its own",
        more: "Which one, tells --socket. Pool and swap file are the daemon's, and so are the settings of both.",
    },
    Flag {
        name: "cgroup",
        of: Of::Run,
        kind: Kind::Group,
        help: "The daemon's group to run in, such as build/ci-17",
        more: "It is made if it is not there, and stays. --memory-max and --memory-high become the group's. Default: a group of \
               the job's own, which goes with it. Only with --connect.",
    },
    Flag {
        name: "socket",
        of: Of::Both,
        kind: Kind::Path,
        help: "Where the daemon listens, for jobs and operators",
        more: "The name goes when the daemon ends. Default: /run/uzswap.sock for root, uzswap.sock in XDG_RUNTIME_DIR for \
               others; a socket that systemd has opened comes before it.",
    },
    Flag {
        name: "socket-mode",
        of: Of::Daemon,
        kind: Kind::Mode,
        help: "Who may connect, as the socket's mode in octal digits",
        more: "Root and the daemon's own user may do all; others may look, and have jobs and groups of their own. Default: 600",
    },
    Flag {
        name: "stats",
        of: Of::Run,
        kind: Kind::Path,
        help: "File for the job's counters, as JSON, rewritten every second and at the end",
        more: "",
    },
    Flag { name: "quiet", of: Of::Run, kind: Kind::Switch, help: "No summary on stderr at the end", more: "" },
    Flag {
        name: "require",
        of: Of::Run,
        kind: Kind::Switch,
        help: "Refuse programs that cannot be managed",
        more: "Without it, a program that the agent cannot enter (static, setuid) runs unmanaged, with a warning.",
    },
];

/// Pairs of flags that exclude each other when given in the same place; else the stronger place wins.
pub const EXCLUSIVE: [(&str, &str); 17] = [
    ("max-pool", "max-pool-percent"),
    ("no-swap", "swap-size"),
    ("no-swap", "swap-file"),
    // A daemon has settings of its own.
    ("connect", "control"),
    ("connect", "control-fs"),
    ("connect", "max-pool"),
    ("connect", "max-pool-percent"),
    ("connect", "accept-threshold-percent"),
    ("connect", "compressor"),
    ("connect", "zpool"),
    ("connect", "enabled"),
    ("connect", "shrinker-enabled"),
    ("connect", "verify"),
    ("connect", "swapin"),
    ("connect", "swap-file"),
    ("connect", "swap-size"),
    ("connect", "no-swap"),
];

impl Flag {
    /// The environment variable: `UZSWAP_MEMORY_MAX`.
    pub fn variable(&self) -> String {
        variable(self.name)
    }

    fn arg(&self) -> Arg {
        let sentence = if self.more.is_empty() { String::new() } else { format!("\n\n{}", self.more) };
        let arg = Arg::new(self.name).long(self.name).help(self.help).long_help(format!(
            "{}{sentence} [env: {}] [key: {}]",
            self.help,
            self.variable(),
            self.name
        ));
        match self.kind {
            Kind::Switch => arg.action(ArgAction::SetTrue),
            // A value may begin with a dash, so that `--memory-max -1` is called negative and not an unknown flag.
            kind => arg
                .action(ArgAction::Set)
                .value_name(kind.placeholder())
                .allow_hyphen_values(true)
                .value_parser(clap::builder::OsStringValueParser::new())
                .value_hint(if kind == Kind::Path { ValueHint::FilePath } else { ValueHint::Other }),
        }
    }
}

/// The environment variable of the flag `name`.
pub fn variable(name: &str) -> String {
    format!("UZSWAP_{}", name.to_uppercase().replace('-', "_"))
}

impl Kind {
    fn placeholder(self) -> &'static str {
        match self {
            Kind::Size => "SIZE",
            Kind::Percent(..) => "PERCENT",
            Kind::Codec | Kind::Zpool | Kind::Swapin => "NAME",
            Kind::YesNo => "Y|N",
            Kind::Group => "GROUP",
            Kind::Mode => "MODE",
            Kind::Path | Kind::Switch => "FILE",
        }
    }

    /// Parses `text`; the error says what is wrong with it and what would be right.
    pub fn parse(self, text: &str) -> Result<Value, String> {
        match self {
            Kind::Size => parse_amount(text).map(Value::Size),
            Kind::Percent(least, most) => match text.parse::<u8>() {
                Ok(percent) if (least..=most).contains(&percent) => Ok(Value::Percent(percent)),
                _ => Err(format!("'{text}' is not a whole number from {least} to {most}")),
            },
            Kind::Codec => text.parse().map(Value::Codec).map_err(|error: UnknownName| error.to_string()),
            Kind::Zpool => text.parse().map(Value::Zpool).map_err(|error: UnknownName| error.to_string()),
            Kind::Swapin => text.parse().map(Value::Swapin).map_err(|error: UnknownName| error.to_string()),
            Kind::YesNo => yes_or_no(text).map(Value::YesNo),
            Kind::Path if text.is_empty() => Err("is empty; give a file name".into()),
            Kind::Path => Ok(Value::Path(text.into())),
            Kind::Group if text.trim_matches('/').is_empty() => Err("is empty; name a group below the root".into()),
            Kind::Group => Ok(Value::Group(text.trim_matches('/').to_owned())),
            Kind::Mode => match u32::from_str_radix(text, 8) {
                Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(Value::Mode(mode)),
                _ => Err(format!("'{text}' is not a mode from 0 to 777, in octal digits")),
            },
            Kind::Switch => yes_or_no(text).map(Value::Switch),
        }
    }
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "y" | "yes" | "true" | "on" => Ok(true),
        "0" | "n" | "no" | "false" | "off" => Ok(false),
        _ => Err(format!("'{text}' is neither yes nor no")),
    }
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}", self.name)
    }
}

/// The whole command line, as clap sees it.
pub fn command() -> Command {
    Command::new("uzswap")
        .version(env!("CARGO_PKG_VERSION"))
        .about("zswap in user space: runs unmodified Linux programs inside a memory limit")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .after_help(
            "Exit status: the program's own for run (128+N if signal N killed it, 126 not executable, 127 not found); \
             2 for bad usage or a failed set-up; daemon: 0 if it was stopped, 125 if its manager died; get, set, ls, reclaim, stat: 1 if the manager refuses; mount: 1 if it fails; doctor: 0 if run will work, else 1.",
        )
        .subcommands([run(), daemon(), doctor(), demo()])
        .subcommands([get(), set(), ls(), mkdir(), rmdir(), reclaim(), stat(), mount()])
        .subcommands([lab(), completions(), man()])
}

fn run() -> Command {
    Command::new("run")
        .about("Run a program inside a memory limit")
        .long_about(
            "Run a program inside a memory limit. Cold anonymous pages are compressed into a pool in RAM and, when that is \
             full or memory is short, written back to a swap file; the program never knows.\n\nEvery flag can also be set \
             by an environment variable or by a key of a TOML file. A flag is stronger than the environment, the \
             environment stronger than the file. Without --config the files are ~/.config/uzswap.toml and, weaker, \
             /etc/uzswap.toml, if they exist.\n\nSizes are bytes, or 512K, 256M, 1.5G, 2T (powers of 1024), or a percentage \
             of RAM such as 25%.",
        )
        .args_override_self(true)
        .args(flags(Of::Run).map(Flag::arg))
        .arg(config())
        .arg(
            Arg::new("command")
                .value_name("CMD")
                .help("The program and its arguments")
                .required(true)
                .num_args(1..)
                .trailing_var_arg(true)
                .value_parser(clap::builder::OsStringValueParser::new())
                .value_hint(ValueHint::CommandWithArguments),
        )
}

fn daemon() -> Command {
    Command::new("daemon")
        .about("Have one manager for many jobs, which join it by run --connect")
        .long_about(
            "Have one manager for many jobs, which join it by run --connect: they share a pool and a swap file, and operators \
             see all of them in one tree of groups.\n\nThe settings come from where those of run do, only that the files are \
             ~/.config/uzswap-daemon.toml and /etc/uzswap-daemon.toml; --memory-max and --memory-high hold for all jobs \
             together. SIGHUP has them read again: what uzswap set could change takes effect. SIGTERM and SIGINT end the \
             daemon: jobs get back what was taken from them and run on without a limit, or, if there is not memory enough for \
             that, it says so and stays.\n\nIt stays in the foreground, and knows systemd's sockets and notifications.",
        )
        .args_override_self(true)
        .args(flags(Of::Daemon).map(Flag::arg))
        .arg(config())
}

fn config() -> Arg {
    Arg::new("config")
        .long("config")
        .value_name("FILE")
        .help("TOML file with settings, instead of the default files")
        .long_help("TOML file with settings, instead of the default files [env: UZSWAP_CONFIG]")
        .value_parser(clap::builder::OsStringValueParser::new())
        .value_hint(ValueHint::FilePath)
}

fn doctor() -> Command {
    Command::new("doctor")
        .about("Say what run needs, whether this machine grants it, and what to do if not")
        .long_about(
            "Say what run needs, whether this machine grants it, and what to do if not. Each thing is tried, not guessed. \
             Exit status 0 if run will work, else 1.",
        )
        .arg(switch("json", "Print the findings as JSON"))
        .arg(switch("all", "Print the remedies for all surroundings, not only for those detected"))
}

fn demo() -> Command {
    Command::new("demo")
        .about("Run a real program over 1 GiB of data in 256 MiB and compare with a run without uzswap")
        .arg(text("size", "SIZE", "1G", "How much data the program holds"))
        .arg(text("memory-max", "SIZE", "256M", "The limit it runs under"))
        .arg(text("compressor", "NAME", Compressor::default().name(), "Codec for stored pages"))
        .arg(text("seed", "NUMBER", "1", "Seed of the generated data"))
}

/// A flag that has a default.
fn text(name: &'static str, value: &'static str, default: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).default_value(default).allow_hyphen_values(true).help(help)
}

fn get() -> Command {
    asks("get", "Print a control file of a running job").arg(tree_path().required(true))
}

fn set() -> Command {
    let value =
        text_arg("value", "VALUE", "What to write: as the kernel's file of that name takes it, such as 512M, max or Y");
    asks("set", "Write a control file of a running job")
        .arg(tree_path().required(true))
        .arg(value.required(true).allow_hyphen_values(true))
}

fn ls() -> Command {
    asks("ls", "List the control files of a running job").arg(tree_path())
}

fn mkdir() -> Command {
    asks("mkdir", "Make a group of processes of a running job")
        .arg(text_arg("group", "GROUP", "Its path, such as build/ci-17; the one above it is there").required(true))
}

fn rmdir() -> Command {
    asks("rmdir", "Remove a group that has no processes and no groups below it")
        .arg(text_arg("group", "GROUP", "Its path").required(true))
}

fn reclaim() -> Command {
    asks("reclaim", "Have memory of a running job reclaimed")
        .allow_missing_positional(true)
        .arg(text_arg("group", "GROUP", "The group; default: the whole job"))
        .arg(text_arg("size", "SIZE", "How much, such as 64M").required(true))
}

fn stat() -> Command {
    asks("stat", "Print the main figures of a running job")
        .arg(text_arg("group", "GROUP", "The group; default: the whole job"))
        .arg(switch("json", "Print them as JSON, sizes in bytes"))
}

fn mount() -> Command {
    asks("mount", "Mount the control tree of a running job as a file system")
        .long_about(
            "Mount the control tree of a running job as a file system, by FUSE, for cat, echo, mkdir and whatever else knows \
             the kernel's files of these names. The command ends as soon as it is mounted. It stays mounted until `umount \
             DIR`, or until the job ends.\n\nA write is one value, at the beginning of the file. Whoever may pass through DIR \
             may read; the manager's user and root may write. It takes CAP_SYS_ADMIN and /dev/fuse.",
        )
        .arg(switch("foreground", "Stay until it is unmounted, or until SIGINT, SIGTERM or SIGHUP, which unmount it"))
        .arg(switch("started", "Say on standard output that it is mounted, and then nothing more").hide(true))
        .arg(Arg::new("guard").long("guard").help("Unmount this device when standard input ends").hide(true))
        .arg(text_arg("dir", "DIR", "Where: a directory").required(true).value_hint(ValueHint::DirPath))
}

/// A subcommand that asks a manager.
fn asks(name: &'static str, about: &'static str) -> Command {
    Command::new(name).about(about).arg(
        Arg::new("socket")
            .long("socket")
            .value_name("FILE")
            .help("Where its manager listens: the FILE of run --control; default: the daemon's [env: UZSWAP_SOCKET]")
            .value_parser(clap::builder::OsStringValueParser::new())
            .value_hint(ValueHint::FilePath),
    )
}

fn tree_path() -> Arg {
    text_arg("path", "PATH", "Such as cgroup/memory.stat, parameters/compressor or debug/stored_pages; see uzswap ls")
}

fn text_arg(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).value_name(value).help(help).value_parser(clap::builder::OsStringValueParser::new())
}

fn lab() -> Command {
    let file = |name: &'static str, help: &'static str| {
        let text = Arg::new(name).long(name).value_name("FILE").help(help);
        text.value_parser(clap::value_parser!(PathBuf)).value_hint(ValueHint::FilePath)
    };
    let experiment = |name: &'static str, size: &'static str, runs: &'static str| {
        Command::new(name)
            .arg(text("size", "SIZE", size, "How much data to work on"))
            .arg(
                text("runs", "N", runs, "How often each side is measured")
                    .value_parser(clap::value_parser!(u64).range(1..=1000)),
            )
            .arg(file("json", "File for the raw samples, as JSON"))
    };
    let bench = experiment("bench", "1G", "7")
        .about("What uzswap is to be fast at, each work beside the kernel's zswap and plain swap in the same run")
        .long_about(
            "What uzswap is to be fast at, each work beside the kernel's zswap and plain swap in the same run. The rivals take \
             root, swapon and a memory cgroup, v1 or v2; without, only uzswap is measured. All is left as it was found, after \
             SIGINT and SIGTERM too.",
        )
        .arg(file("svg", "File for a plot, as SVG"))
        .arg(Arg::new("only").long("only").value_name("TEXT").help("Only the lines of the table with TEXT in their names"))
        .arg(
            Arg::new("project")
                .long("project")
                .value_name("DIR")
                .help("A project to make at a third of its natural peak: configured, so that make builds and make clean removes")
                .value_parser(clap::value_parser!(PathBuf))
                .value_hint(ValueHint::DirPath),
        );
    let capacity = experiment("capacity", "256M", "3")
        .about("How many bytes of a Python heap a byte of memory holds, beside the kernel's zswap");
    Command::new("lab")
        .about("Experiments, beside the rivals in the same run")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommands([bench, capacity, torture()])
}

fn torture() -> Command {
    Command::new("torture")
        .about("Programs that check every byte, under tiny limits, while settings change and processes are killed")
        .long_about(
            "Programs that check every byte, under tiny limits, while settings change and processes are killed. Prints a line for \
             each round, then how often each operation was done and refused. The exit status is 1 at the first wrong byte, hang, \
             panic or thing left behind, with the command that repeats the round. It takes a C compiler.",
        )
        .arg(text("minutes", "N", "1", "How long; a fraction is allowed, and 0 is one round"))
        .arg(
            Arg::new("seed")
                .long("seed")
                .value_name("NUMBER")
                .value_parser(clap::value_parser!(u64))
                .help("Seed of the first round, each has the next one; default: by the clock"),
        )
        .arg(
            text("programs", "K", "2", "Most programs in a round")
                .value_parser(clap::value_parser!(u64).range(1..=64)),
        )
        .arg(Arg::new("limit").long("limit").value_name("SIZE").help("Limit of each program; default: 8 to 20 MiB, at random"))
        .arg(text("without", "LIST", KNOWN_OPEN, "Operations to leave out, separated by commas"))
}

fn completions() -> Command {
    Command::new("completions").about("Print a completion script for a shell").arg(
        Arg::new("shell")
            .value_name("SHELL")
            .required(true)
            .value_parser(clap::value_parser!(clap_complete::Shell))
            .help("For which shell"),
    )
}

fn man() -> Command {
    Command::new("man").about("Print the man page").arg(
        Arg::new("page")
            .value_name("SUBCOMMAND")
            .value_parser([
                "run", "daemon", "doctor", "demo", "get", "set", "ls", "mkdir", "rmdir", "reclaim", "stat", "mount",
                "lab",
            ])
            .help("The page of a subcommand instead of the main page"),
    )
}

fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn who_is_asked_may_stand_anywhere() {
        for line in [
            &["get", "--socket", "S", "a"][..],
            &["get", "a", "--socket", "S"],
            &["set", "a", "-1", "--socket", "S"],
            &["set", "--socket", "S", "a", "-memory"],
            &["ls", "--socket", "S"],
            &["ls", "a", "--socket=S"],
            &["reclaim", "64M", "--socket", "S"],
            &["reclaim", "--socket", "S", "a", "64M"],
            &["stat", "--json", "--socket", "S"],
            &["stat", "a", "--socket", "S"],
        ] {
            let matches = command().try_get_matches_from([&["uzswap"], line].concat()).expect("clap takes it");
            let (_, matches) = matches.subcommand().expect("a subcommand");
            assert_eq!(matches.get_one::<std::ffi::OsString>("socket").expect("given"), "S", "{line:?}");
        }
        for line in [&["get"][..], &["get", "a", "b"], &["set", "a"], &["reclaim"], &["reclaim", "a", "b", "c"]] {
            assert!(command().try_get_matches_from([&["uzswap"], line].concat()).is_err(), "{line:?}");
        }
    }

    #[test]
    fn names_make_variables() {
        assert_eq!(ALL[0].variable(), "UZSWAP_MEMORY_MAX");
        let mut names: Vec<_> = ALL.iter().map(|flag| flag.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len(), "a flag is defined twice");
    }

    #[test]
    fn exclusive_pairs_name_real_flags() {
        for name in EXCLUSIVE.iter().flat_map(|&(one, other)| [one, other]) {
            assert!(ALL.iter().any(|flag| flag.name == name), "{name}");
        }
    }

    #[test]
    fn each_kind_reads_good_and_refuses_bad() {
        for (kind, good, bad, why) in [
            (Kind::Size, "25%", "1X", "not a size"),
            (Kind::Percent(1, 100), "100", "101", "from 1 to 100"),
            (Kind::Percent(1, 100), "1", "-1", "from 1 to 100"),
            (Kind::Percent(1, 100), "50", "50%", "from 1 to 100"),
            (Kind::Codec, "lzo-rle", "LZ4", "lz4, lzo-rle, zstd, deflate"),
            (Kind::Zpool, "zbud", "z3fold", "zsmalloc, zbud"),
            (Kind::Swapin, "never", "often", "never, always, adaptive"),
            (Kind::YesNo, "N", "", "neither yes nor no"),
            (Kind::Path, "/a", "", "file name"),
            (Kind::Switch, "Yes", "2", "neither yes nor no"),
        ] {
            assert!(kind.parse(good).is_ok(), "{good}");
            assert!(kind.parse(bad).is_err_and(|error| error.contains(why)), "{bad}");
        }
    }

    #[test]
    fn the_help_lists_all_names() {
        let of = |kind| ALL.iter().find(|flag| flag.kind == kind).expect("a flag").more;
        assert!(Compressor::ALL.iter().all(|codec| of(Kind::Codec).contains(codec.name())));
        assert!(Zpool::ALL.iter().all(|zpool| of(Kind::Zpool).contains(zpool.name())));
        assert!(Swapin::ALL.iter().all(|rule| of(Kind::Swapin).contains(rule.name())));
    }
}

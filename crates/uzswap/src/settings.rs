//! Settings of `uzswap run` and `uzswap daemon` from three places, weakest last: flags, environment, TOML files.
//!
//! 1. Each place is read into a layer of parsed values; a bad value is an error that names its place, even where a stronger
//!    place would have hidden it.
//! 2. The strongest layer that has a value wins; a switch that is off counts as not given.
//! 3. Flags that exclude each other are an error only within one layer: across layers the stronger one drops the other,
//!    so that `--max-pool 1G` works on a machine whose file says `max-pool-percent = 30`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use clap::parser::ValueSource;
use uzswap_engine::{Compressor, Zpool};
use uzswap_manager::Swapin;

use crate::flags::{ALL, EXCLUSIVE, Flag, Kind, Of, Value, flags};
use crate::size::Amount;

/// Where the values of a layer come from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Flags,
    Environment,
    File(PathBuf),
}

/// The settings in force.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<&'static str, (Value, String)>);

type Layer = (Place, BTreeMap<&'static str, Value>);

impl Settings {
    /// Reads all places; `variable` looks up the environment, `root` is where `/etc` is found.
    pub fn read(
        of: Of,
        matches: &ArgMatches,
        variable: impl Fn(&str) -> Option<OsString>,
        root: &Path,
    ) -> Result<Settings, String> {
        let mut layers = vec![from_flags(of, matches)?, from_environment(of, &variable)?];
        match matches.get_one::<OsString>("config").cloned().or_else(|| variable("UZSWAP_CONFIG")) {
            Some(named) => {
                layers.push(from_file(of, Path::new(&named), true)?.expect("a named file is there or an error"))
            }
            None => {
                let home = variable("HOME").filter(|home| !home.is_empty());
                let name = if of == Of::Daemon { "uzswap-daemon.toml" } else { "uzswap.toml" };
                let user = home.map(|home| Path::new(&home).join(".config").join(name));
                for path in user.into_iter().chain([root.join("etc").join(name)]) {
                    layers.extend(from_file(of, &path, false)?);
                }
            }
        }
        merge(&layers)
    }

    /// A size or percentage.
    pub fn size(&self, name: &str) -> Option<Amount> {
        self.get(name, |value| if let Value::Size(amount) = value { Some(*amount) } else { None })
    }

    /// A percentage.
    pub fn percent(&self, name: &str) -> Option<u8> {
        self.get(name, |value| if let Value::Percent(percent) = value { Some(*percent) } else { None })
    }

    /// A codec.
    pub fn codec(&self, name: &str) -> Option<Compressor> {
        self.get(name, |value| if let Value::Codec(codec) = value { Some(*codec) } else { None })
    }

    /// An allocator.
    pub fn zpool(&self, name: &str) -> Option<Zpool> {
        self.get(name, |value| if let Value::Zpool(zpool) = value { Some(*zpool) } else { None })
    }

    /// A rule of swapping in.
    pub fn swapin(&self, name: &str) -> Option<Swapin> {
        self.get(name, |value| if let Value::Swapin(rule) = value { Some(*rule) } else { None })
    }

    /// Yes or no.
    pub fn yes_no(&self, name: &str) -> Option<bool> {
        self.get(name, |value| if let Value::YesNo(yes) = value { Some(*yes) } else { None })
    }

    /// A group's path.
    pub fn group(&self, name: &str) -> Option<String> {
        self.get(name, |value| if let Value::Group(path) = value { Some(path.clone()) } else { None })
    }

    /// A file's mode.
    pub fn mode(&self, name: &str) -> Option<u32> {
        self.get(name, |value| if let Value::Mode(mode) = value { Some(*mode) } else { None })
    }

    /// A file.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name, |value| if let Value::Path(path) = value { Some(path.clone()) } else { None })
    }

    /// Whether a switch is on.
    pub fn switch(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// How the user wrote `name`: `--memory-max`, `UZSWAP_MEMORY_MAX`, `memory-max in /etc/uzswap.toml`.
    pub fn spelling(&self, name: &str) -> String {
        self.0.get(name).map_or_else(|| format!("--{name}"), |(_, spelling)| spelling.clone())
    }

    fn get<T>(&self, name: &str, pick: impl Fn(&Value) -> Option<T>) -> Option<T> {
        debug_assert!(ALL.iter().any(|flag| flag.name == name), "no flag --{name}");
        self.0.get(name).and_then(|(value, _)| pick(value))
    }
}

impl Place {
    fn spelling(&self, flag: &Flag) -> String {
        match self {
            Place::Flags => flag.to_string(),
            Place::Environment => flag.variable(),
            Place::File(path) => format!("{} in {}", flag.name, path.display()),
        }
    }

    fn parse(&self, flag: &Flag, text: &OsStr) -> Result<Value, String> {
        let parsed = match (flag.kind, text.to_str()) {
            (_, Some(text)) => flag.kind.parse(text),
            (Kind::Path, None) => Ok(Value::Path(text.into())),
            (_, None) => Err(format!("{text:?} is not text")),
        };
        parsed.map_err(|why| format!("{}: {why}", self.spelling(flag)))
    }
}

fn from_flags(of: Of, matches: &ArgMatches) -> Result<Layer, String> {
    let mut values = BTreeMap::new();
    for flag in flags(of).filter(|flag| matches.value_source(flag.name) == Some(ValueSource::CommandLine)) {
        let value = match flag.kind {
            Kind::Switch => Value::Switch(true),
            _ => Place::Flags.parse(flag, matches.get_one::<OsString>(flag.name).expect("has a value"))?,
        };
        values.insert(flag.name, value);
    }
    Ok((Place::Flags, values))
}

fn from_environment(of: Of, variable: impl Fn(&str) -> Option<OsString>) -> Result<Layer, String> {
    let mut values = BTreeMap::new();
    for flag in flags(of) {
        if let Some(text) = variable(&flag.variable()) {
            values.insert(flag.name, Place::Environment.parse(flag, &text)?);
        }
    }
    Ok((Place::Environment, values))
}

/// A file that nobody named may be missing, or lie in a home that is not ours; one that is there must be readable.
fn from_file(of: Of, path: &Path, required: bool) -> Result<Option<Layer>, String> {
    if !required && fs::metadata(path).is_err() {
        return Ok(None);
    }
    let text = fs::read_to_string(path)
        .map_err(|error| format!("cannot read the configuration file {}: {error}", path.display()))?;
    parse_file(of, path, &text).map(Some)
}

fn parse_file(of: Of, path: &Path, text: &str) -> Result<Layer, String> {
    let place = Place::File(path.to_owned());
    let table = text.parse::<toml::Table>().map_err(|error| {
        let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count()) + 1;
        format!("{} line {line} is not TOML: {}", path.display(), error.message())
    })?;
    let mut values = BTreeMap::new();
    for (key, value) in &table {
        let Some(flag) = flags(of).find(|flag| flag.name == key) else {
            let known = flags(of).map(|flag| flag.name).collect::<Vec<_>>().join(", ");
            return Err(format!("unknown key '{key}' in {}; known are {known}", path.display()));
        };
        let text = match (value, flag.kind) {
            (toml::Value::Boolean(on), Kind::Switch | Kind::YesNo) => on.to_string(),
            (toml::Value::Integer(number), Kind::Size | Kind::Percent(..) | Kind::Mode) => number.to_string(),
            (toml::Value::String(text), kind) if kind != Kind::Switch => text.clone(),
            (other, _) => {
                return Err(format!("{}: a value of type {} does not fit", place.spelling(flag), other.type_str()));
            }
        };
        values.insert(flag.name, place.parse(flag, text.as_ref())?);
    }
    Ok((place, values))
}

/// Strongest layer first.
fn merge(layers: &[Layer]) -> Result<Settings, String> {
    let mut chosen: BTreeMap<&'static str, (usize, Value, String)> = BTreeMap::new();
    for flag in ALL {
        let found =
            layers.iter().enumerate().find_map(|(rank, (place, values))| Some((rank, place, values.get(flag.name)?)));
        match found {
            None | Some((_, _, Value::Switch(false))) => {}
            Some((rank, place, value)) => {
                chosen.insert(flag.name, (rank, value.clone(), place.spelling(flag)));
            }
        }
    }
    for (one, other) in EXCLUSIVE {
        let (Some(first), Some(second)) = (chosen.get(one), chosen.get(other)) else { continue };
        match first.0.cmp(&second.0) {
            std::cmp::Ordering::Equal => {
                return Err(format!("{} and {} exclude each other; give one of them", first.2, second.2));
            }
            std::cmp::Ordering::Less => chosen.remove(other),
            std::cmp::Ordering::Greater => chosen.remove(one),
        };
    }
    Ok(Settings(chosen.into_iter().map(|(name, (_, value, spelling))| (name, (value, spelling))).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(place: Place, values: &[(&str, &str)]) -> Layer {
        let parsed = values.iter().map(|(name, text)| {
            let flag = ALL.iter().find(|flag| flag.name == *name).expect("a flag");
            (flag.name, flag.kind.parse(text).expect("a good value"))
        });
        (place, parsed.collect())
    }

    fn file() -> Place {
        Place::File("/etc/uzswap.toml".into())
    }

    #[test]
    fn flag_beats_environment_beats_file() {
        let layers = [
            layer(Place::Flags, &[("memory-max", "1M")]),
            layer(Place::Environment, &[("memory-max", "2M"), ("memory-high", "2M")]),
            layer(file(), &[("memory-max", "3M"), ("memory-high", "3M"), ("swap-size", "3M")]),
        ];
        let settings = merge(&layers).expect("merge");
        let sizes = ["memory-max", "memory-high", "swap-size"].map(|name| settings.size(name));
        assert_eq!(sizes, [1, 2, 3].map(|size| Some(Amount::Bytes(size << 20))));
        assert_eq!(
            ["memory-max", "memory-high", "swap-size", "max-pool"].map(|name| settings.spelling(name)),
            ["--memory-max", "UZSWAP_MEMORY_HIGH", "swap-size in /etc/uzswap.toml", "--max-pool"]
        );
    }

    #[test]
    fn exclusive_flags_clash_only_in_one_place() {
        let same = [layer(Place::Flags, &[("max-pool", "1M"), ("max-pool-percent", "5")])];
        let error = merge(&same).expect_err("clash");
        assert!(error.contains("--max-pool and --max-pool-percent exclude"), "{error}");
        let apart = [
            layer(Place::Flags, &[("max-pool", "1M"), ("swap-size", "1M")]),
            layer(file(), &[("max-pool-percent", "5"), ("no-swap", "yes")]),
        ];
        let settings = merge(&apart).expect("merge");
        assert_eq!((settings.percent("max-pool-percent"), settings.switch("no-swap")), (None, false));
        assert!(settings.size("max-pool").is_some() && settings.size("swap-size").is_some());
    }

    #[test]
    fn a_switch_can_be_turned_off_again() {
        let layers = [layer(Place::Environment, &[("no-swap", "no")]), layer(file(), &[("no-swap", "yes")])];
        assert!(!merge(&layers).expect("merge").switch("no-swap"));
    }

    #[test]
    fn files_take_the_types_that_fit() {
        let text =
            "memory-max = \"1.5G\"\nmax-pool = 65536\naccept-threshold-percent = 80\nquiet = true\nenabled = false\n";
        let (_, values) = parse_file(Of::Run, Path::new("f"), text).expect("parse");
        assert_eq!(values["max-pool"], Value::Size(Amount::Bytes(65536)));
        assert_eq!(values["accept-threshold-percent"], Value::Percent(80));
        assert_eq!(values["quiet"], Value::Switch(true));
        assert_eq!(values["enabled"], Value::YesNo(false));
    }

    #[test]
    fn bad_files_are_named_with_the_key() {
        for (text, why) in [
            ("memory_max = 1", "unknown key 'memory_max' in f"),
            ("[run]\nquiet = true", "unknown key 'run' in f"),
            ("quiet = 1", "quiet in f: a value of type integer"),
            ("memory-max = true", "memory-max in f: a value of type boolean"),
            ("memory-max = -1", "memory-max in f: '-1' is negative"),
            ("compressor = \"snappy\"", "there are lz4"),
            ("quiet = true\nmemory-max = ", "f line 2 is not TOML"),
        ] {
            let error = parse_file(Of::Run, Path::new("f"), text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}

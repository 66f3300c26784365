//! What the command line of every experiment says.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// What the command line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Bytes to work on.
    pub size: u64,
    /// Measured runs of each side.
    pub runs: usize,
    /// Where the raw samples go.
    pub json: Option<PathBuf>,
    /// Where a plot goes.
    pub svg: Option<PathBuf>,
    /// Only the lines of the table with this in their names.
    pub only: Option<String>,
    /// A project to make.
    pub project: Option<PathBuf>,
}

impl Options {
    /// Parses what follows the name of an experiment, of which `size` and `runs` are the defaults.
    pub fn parse(args: &[String], size: u64, runs: usize) -> Result<Self> {
        let mut options = Self { size, runs, json: None, svg: None, only: None, project: None };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let mut value = || args.next().with_context(|| format!("{name} needs a value"));
            match name.as_str() {
                "--size" => options.size = parse_size(value()?)?,
                "--runs" => options.runs = value()?.parse().context("--runs needs a number")?,
                "--json" => options.json = Some(value()?.into()),
                "--svg" => options.svg = Some(value()?.into()),
                "--only" => options.only = Some(value()?.into()),
                "--project" => options.project = Some(project(value()?)?),
                _ => bail!("unknown option {name}"),
            }
        }
        if options.runs == 0 {
            bail!("--runs must be at least 1");
        }
        Ok(options)
    }

    /// Whether a line of the table is asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part.as_str()))
    }

    /// Writes the raw samples where they are wanted.
    pub fn write_json(&self, raw: &serde_json::Value) -> Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        std::fs::write(path, format!("{raw:#}\n")).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A directory with a Makefile.
fn project(path: &str) -> Result<PathBuf> {
    if !["GNUmakefile", "makefile", "Makefile"].iter().any(|name| Path::new(path).join(name).is_file()) {
        bail!("--project needs a directory with a Makefile, configured so that make builds and make clean removes");
    }
    Ok(path.into())
}

/// A size in bytes, or with one of the binary suffixes K, M, G.
fn parse_size(text: &str) -> Result<u64> {
    let shift = match text.bytes().last() {
        Some(b'K' | b'k') => 10,
        Some(b'M' | b'm') => 20,
        Some(b'G' | b'g') => 30,
        _ => 0,
    };
    let digits = if shift > 0 { &text[..text.len() - 1] } else { text };
    let number: u64 = digits.parse().with_context(|| format!("{text:?} is not a size (examples: 512M, 1G)"))?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if (1 << 20..=1 << 40).contains(&bytes) => Ok(bytes),
        _ => bail!("the size {text} is not between 1M and 1024G"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options> {
        Options::parse(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>(), 1 << 30, 5)
    }

    #[test]
    fn options_have_defaults_and_limits() {
        let defaults = Options { size: 1 << 30, runs: 5, json: None, svg: None, only: None, project: None };
        assert_eq!(parse(&[]).unwrap(), defaults);
        let given = parse(&["--size", "256M", "--runs", "3"]).unwrap();
        assert_eq!(given, Options { size: 256 << 20, runs: 3, ..defaults });
        let given = parse(&["--only", "Zipf"]).unwrap();
        assert!(given.wants("Zipf, two threads") && !given.wants("pattern"));
        for bad in [&["--size"][..], &["--size", "0"], &["--size", "-1"], &["--size", "9999999999G"], &["--size", "é"]]
        {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse(&["--runs", "0"]).is_err());
        assert!(parse(&["--fast"]).is_err());
        assert!(parse(&["--project", "/nowhere"]).is_err());
    }
}

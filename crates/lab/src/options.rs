//! What an experiment is to do.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// What an experiment is to do.
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

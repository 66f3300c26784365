//! Experiments and rivals.

use std::ffi::OsString;

/// Runs `uzswap lab ARGS` and returns the exit status.
pub fn main(_arguments: &[OsString]) -> i32 {
    eprintln!("uzswap: error: there are no experiments yet");
    2
}

//! Experiments and rivals.

/// Runs `uzswap lab ARGS` and returns the exit status.
pub fn main(_arguments: &[String]) -> i32 {
    eprintln!("uzswap: error: there are no experiments yet");
    2
}

//! The `uzswap` command.
fn main() {}

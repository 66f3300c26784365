//! The engine under a model checker: its threads are the checker's, one runs at a time, and at each lock, atomic and step of
//! a write the checker chooses who goes on. What must hold, must hold for every such schedule: each page that is loaded is
//! the page that was stored, and in the end `check_valid()` finds nothing and nothing is left.
//!
//! - `pairs`: two threads, a few operations each, in every schedule there is
//! - `crowds`: more threads and longer runs, in schedules taken at random
//!
//! `cargo test -p uzswap-engine --features shuttle --test interleavings` runs them; with `UZSWAP_EXHAUST` set the longest pair, too, in
//! every schedule (`make soak`). `UZSWAP_ITERATIONS` says how many
//! schedules are taken at random (default 1000, and as many again with few preemptions). A failure prints its schedule;
//! with that in `UZSWAP_SCHEDULE`, and the test's name at the end of the command, the same happens again.

mod crowds;
mod machine;
mod pairs;

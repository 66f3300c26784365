//! Experiments and rivals: the same work on uzswap and on what the kernel has, side by side in one run.
//!
//! - [`mod@bench`]: what uzswap is to be fast at, with what is asked of it
//! - [`capacity`]: how much a byte of memory holds, in both
//! - [`torture`]: programs that check every byte, while what they rely on is changed and killed
//! - [`options`]: what an experiment is to do
//! - `program`: builds and runs one measured program and gives up when the user interrupts
//! - `kernel_zswap`, `cgroup`: set the rivals up, and leave everything as it was found
//! - `processes`: what the system tells of processes and memory

pub mod bench;
pub mod capacity;
pub mod options;
pub mod torture;

mod cgroup;
mod kernel_zswap;
mod processes;
mod program;

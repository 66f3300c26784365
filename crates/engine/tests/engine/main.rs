//! The engine through its public interface, on a swap file and memory that fail on request.

mod common;
mod hammer;
mod model;
mod semantics;

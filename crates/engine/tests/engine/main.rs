//! The engine through its public interface, on a swap file and memory that fail on request.

mod common;
mod disk;
mod groups;
mod hammer;
mod model;
mod policies;
mod pools;
mod semantics;
mod shrinker;
mod simulation;

//! Experiments and rivals.

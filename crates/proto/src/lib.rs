//! What agent, manager and tools say to each other.

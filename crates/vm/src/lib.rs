//! userfaultfd, address spaces, staging, reclaim, faults.

pub mod doctor;

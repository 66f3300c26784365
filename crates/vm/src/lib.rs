//! userfaultfd, address spaces, staging, reclaim, faults.

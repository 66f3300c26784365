//! userfaultfd, address spaces, staging, reclaim, faults: the way of a page between a program and the engine.
//!
//! | file | guards |
//! |---|---|
//! | [`pager`] | all address spaces: how they come and go |
//! | `evict` | the way of a page out |
//! | `fault` | the way of a page back; events |
//! | `crew` | large loads and stores in parts, for several threads |
//! | `release` | the way of all pages back |
//! | [`space`] | what is known of one address space |
//! | `table` | where each evicted page is |
//! | `heat` | which pages reclaim passes over |
//! | `huge` | huge pages that were |
//! | `epoch` | the order of events |
//! | `layout` | which mappings are managed |
//! | [`swapin`] | how many pages a fault brings |
//! | [`range`] | address arithmetic |
//! | [`sys`] | the seam to the kernel; all unsafe code |
//! | [`doctor`] | what the machine permits |

pub mod pager;

mod crew;
mod evict;
mod fault;
mod release;

mod heat;
mod huge;
pub mod space;
mod table;

mod epoch;
mod layout;
pub mod range;
pub mod swapin;

pub mod doctor;
pub mod sys;

/// Bytes in a page, as an address difference.
pub(crate) const PAGE: u64 = uzswap_proto::PAGE_SIZE as u64;

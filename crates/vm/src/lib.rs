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
//! | `watched` | whether what passes for registered is |
//! | `guard` | what changes without an event: guard pages, wiping on fork |
//! | `lone_child` | which process a forked child without a worker is |
//! | [`visit`] | which thread is busy with which address space, and whether it makes progress |
//! | [`owner`] | what one user's processes may cost another's |
//! | `exit_words` | what the kernel needs when a thread ends, and libc afterwards |
//! | [`user_queue`] | whose turn it is, of users that wait for one thread |
//! | `removal` | what is about to be discarded |
//! | `huge` | huge pages that were |
//! | `change` | what changes of the layout do to what lies there |
//! | `refused` | what was announced and not done |
//! | `epoch` | the order of events |
//! | `inherited` | which of them a forked child has seen |
//! | [`traffic`] | how many bytes were brought and taken |
//! | `layout` | which mappings are managed |
//! | [`swapin`] | how many pages a fault brings |
//! | [`range`] | address arithmetic |
//! | `closing` | closing of descriptors that clients have handed over, by user |
//! | [`log`](mod@log) | messages on standard error |
//! | [`sys`] | the seam to the kernel; all unsafe code |
//! | [`doctor`] | what the machine permits |

pub mod pager;

pub mod closing;
mod crew;
mod events;
mod evict;
mod exit_words;
mod fault;
mod guard;
mod heirs;
mod lone_child;
mod noisy;
mod release;
mod staging;
mod tied;
pub mod user_queue;
mod watched;

mod heat;
mod huge;
pub mod owner;
mod refused;
mod removal;
pub mod space;
mod table;
pub mod traffic;
pub mod visit;

mod change;
mod epoch;
mod inherited;
mod layout;
pub mod range;
pub mod swapin;

pub mod doctor;
pub mod log;
pub mod sys;

pub use events::LONGEST_CHANGE;

/// Bytes in a page, as an address difference.
pub(crate) const PAGE: u64 = uzswap_proto::PAGE_SIZE as u64;

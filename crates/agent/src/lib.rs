//! The library that is preloaded into every program of a job.
//!
//! It does what the kernel allows only from inside a process: open the userfaultfd, and move pages between the program
//! and its staging area. It holds no data of its own.
//!
//! 1. The constructor (and the child side of every fork) maps the agent's region and clones the
//!    worker: a process that shares the memory but nothing else, so that the program still counts one thread
//!    and sees no descriptor and no signal of ours.
//! 2. The program goes on at once; the worker attaches to the manager in its own time and then obeys it.
//! 3. `madvise` is interposed to pass hints on.
//!
//! # Architecture invariants
//! - Raw system calls only in the worker: no libc, no errno, no thread-local storage, no allocation.
//! - The worker never touches memory that can be evicted (it would wait for itself): its stack and its data lie in a
//!   shared mapping, which is never managed, and it uses no statics.
//! - No libc is linked; the few symbols wanted from it are weak, so that the library loads into any libc's programs. Nothing
//!   else is called or read outside of it, not even `memcpy` (`memory.rs`): `crates/uzswap/tests/agent.rs` reads its symbols
//!   and relocations.
//!
//! # Safety
//! Everything here is raw system calls and raw memory; each block says what makes it sound.
#![cfg_attr(panic = "abort", no_std)]
#![allow(unsafe_code)]

mod attach;
mod worker;

mod denial;
mod family;
mod robust;
mod tether;

mod area;
mod calls;
mod connection;
mod hints;
mod interposed;
mod memory;
mod sys;

/// What a library without the standard one brings itself. (A profile that unwinds is for checking only: it needs the
/// standard library, and nothing is made of it.)
#[cfg(panic = "abort")]
mod alone {
    /// Nothing here panics by intent; if it does all the same, the worker (or the program in its constructor) stops at
    /// once.
    #[panic_handler]
    fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
        crate::sys::exit(134)
    }

    // The core library refers to an unwinder's personality although nothing here unwinds. Hidden: it must not stand in
    // for that of a program written in Rust.
    core::arch::global_asm!(".hidden rust_eh_personality", ".globl rust_eh_personality", "rust_eh_personality:", "ud2");
}

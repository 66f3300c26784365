//! System calls that a hold has cut short, and their repair.
//!
//! PTRACE_INTERRUPT makes a thread in the kernel leave it as a signal would. Most calls begin again by themselves. Two kinds
//! do not, and a program that was sent no signal has no reason to expect what they return:
//! - A call that ends with EINTR whatever the cause, such as `epoll_wait`. Its result is replaced by the kernel's own
//!   ERESTARTNOHAND: the call begins again unless a handler is about to run.
//! - A `write` to a pipe or a socket that has written a part. CPython takes such a count for the end of the write and loses the
//!   rest. The thread stays traced and writes the rest; the program sees the sum.
//!
//! # Safety
//! The calls of ptrace write to a register set of this stack frame and read from it; they reach no other memory of this process.

#![allow(unsafe_code)]

use std::io;

use libc::user_regs_struct as Registers;

use super::process::read_named;

/// Of the kernel: begin again, or end with EINTR if a handler of a signal is to run.
const RESTART_UNLESS_HANDLED: i64 = -514;
/// Of the kernel: begin again.
const RESTART: i64 = -512;

/// The length of the instruction `syscall`.
const INSTRUCTION: u64 = 2;

/// The code segment of 64-bit programs.
const CODE_64: u64 = 0x33;

/// Calls that end with EINTR though no handler ran, and have done nothing then. Not `close`, which has done its work.
const WITHOUT_RESTART: [i64; 18] = [
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_write,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_io_getevents,
    libc::SYS_io_uring_enter,
    libc::SYS_readv,
    libc::SYS_writev,
];

/// What is to be done with a thread that has stopped.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Let it go, with this signal.
    Detach(i32),
    /// Let it run, with this signal, to the beginning or the end of a system call.
    ToCall(i32),
}

/// A write that was cut short.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Write {
    number: u64,
    buffer: u64,
    length: u64,
    written: u64,
    /// Whether the thread is in the call that writes the rest.
    inside: bool,
}

/// Repairs the call of a thread that has stopped after an interruption; gives the write that it has to finish, if any.
pub(super) fn repair(id: i32) -> Option<Write> {
    let mut registers = registers(id).ok()?;
    let write = mend(&mut registers)?;
    set_registers(id, &registers).ok()?;
    write
}

/// Repairs the registers; `None` if there is nothing to repair.
fn mend(registers: &mut Registers) -> Option<Option<Write>> {
    let (number, result) = (registers.orig_rax.cast_signed(), registers.rax.cast_signed());
    if registers.cs != CODE_64 || number < 0 {
        return None;
    }
    if result == -i64::from(libc::EINTR) && WITHOUT_RESTART.contains(&number) {
        registers.rax = RESTART_UNLESS_HANDLED.cast_unsigned();
        return Some(None);
    }
    let is_write = matches!(number, libc::SYS_write | libc::SYS_sendto);
    if !is_write || result <= 0 || result.cast_unsigned() >= registers.rdx {
        return None;
    }
    let (buffer, length) = (registers.rsi, registers.rdx);
    let write = Write { number: registers.orig_rax, buffer, length, written: registers.rax, inside: false };
    write.prepare(registers);
    Some(Some(write))
}

impl Write {
    /// Has the thread make the call again, for the rest.
    fn prepare(&self, registers: &mut Registers) {
        registers.rsi = self.buffer + self.written;
        registers.rdx = self.length - self.written;
        registers.rax = self.number;
        registers.rip -= INSTRUCTION;
        // Nothing that the kernel might begin again by itself.
        registers.orig_rax = u64::MAX;
    }

    /// Has the call end with what was written in all.
    fn complete(&self, registers: &mut Registers) {
        if !self.inside {
            registers.rip += INSTRUCTION;
        }
        (registers.rsi, registers.rdx, registers.rax) = (self.buffer, self.length, self.written);
    }

    /// Takes notice of the end of the call for the rest; whether all is over.
    fn ended(&mut self, result: i64) -> bool {
        self.written += result.max(0).cast_unsigned();
        let goes_on = result > 0 || result == RESTART;
        !goes_on || self.written >= self.length
    }

    /// Goes on when the thread has stopped once more, with that status; with `at_once` the write ends as it is.
    pub(super) fn go_on(&mut self, id: i32, status: i32, at_once: bool) -> Next {
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        let Ok(mut registers) = registers(id) else { return Next::Detach(0) };
        if signal == libc::SIGTRAP | 0x80 {
            if !self.inside {
                self.inside = true;
                return Next::ToCall(0);
            }
            let over = self.ended(registers.rax.cast_signed()) || at_once;
            if over {
                self.complete(&mut registers);
            } else {
                self.prepare(&mut registers);
                self.inside = false;
            }
            let set = set_registers(id, &registers);
            return if over || set.is_err() { Next::Detach(0) } else { Next::ToCall(0) };
        }
        let sent = if event == 0 { signal } else { 0 };
        if sent != 0 && !at_once && !is_caught(id, sent) {
            // Ignored, or the end of the thread.
            return Next::ToCall(sent);
        }
        self.complete(&mut registers);
        let _ = set_registers(id, &registers);
        Next::Detach(sent)
    }
}

/// Whether a thread has a handler for a signal.
fn is_caught(id: i32, signal: i32) -> bool {
    let status = read_named(format!("/proc/{id}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(str::trim);
    mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).is_none_or(|mask| mask >> (signal - 1) & 1 == 1)
}

fn registers(id: i32) -> io::Result<Registers> {
    let mut registers = std::mem::MaybeUninit::<Registers>::zeroed();
    // SAFETY: the kernel writes one register set, of this size.
    let result = unsafe { libc::ptrace(libc::PTRACE_GETREGS, id, std::ptr::null_mut::<u8>(), registers.as_mut_ptr()) };
    super::check(result as libc::c_int)?;
    // SAFETY: zeros are a valid value already.
    Ok(unsafe { registers.assume_init() })
}

fn set_registers(id: i32, registers: &Registers) -> io::Result<()> {
    let from: *const Registers = registers;
    // SAFETY: the kernel reads one register set.
    let result = unsafe { libc::ptrace(libc::PTRACE_SETREGS, id, std::ptr::null_mut::<u8>(), from) };
    super::check(result as libc::c_int).map(drop)
}

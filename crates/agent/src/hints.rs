//! What is done in `madvise`, `process_madvise` and `shmat` (`interposed`): hints of the program go to the manager.
//!
//! `MADV_PAGEOUT` and `MADV_COLD` are followed by the manager. `MADV_WIPEONFORK` empties a range in forked children,
//! which the manager cannot see; it brings the range back and leaves it alone from then on, before the kernel is told.
//! `MADV_GUARD_INSTALL` discards what is under the guards, of which the kernel sends no event. A `MADV_FREE` of the range,
//! which leaves guards alone, sends one: the manager drops what it keeps there. A page that the manager was just filling may
//! have replaced its guard before; so the guards are then installed once more. (`MADV_DONTNEED` would take such a page away: until then
//! another thread would find zeros.)
//!
//! `shmat(SHM_REMAP)` replaces what is mapped without an event. `mremap` announces what it replaces. So the segment is attached elsewhere and
//! moved there.
//!
//! # Safety
//! Passes the program's own arguments on to the kernel.

use uzswap_proto::{Advice, Advise, MAX_WORDS, PAGE_SIZE};

use crate::attach::{evicts, job, weak};
use crate::calls::is_filtered;
use crate::connection::connect;
use crate::sys::{self, EFAULT, EINVAL, call, is_error};
use crate::worker::{receive, send};

const MADV_FREE: i32 = 8;
const MADV_WIPEONFORK: i32 = 18;
const MADV_COLD: i32 = 20;
const MADV_PAGEOUT: i32 = 21;
const MADV_GUARD_INSTALL: i32 = 102;
const SHM_REMAP: i32 = 0o40000;

core::arch::global_asm!(".weak __errno_location");

/// As the libc's.
///
/// # Safety
/// As the libc's: discarding advice discards memory.
pub unsafe extern "C" fn own_madvise(address: usize, len: usize, advice: i32) -> i32 {
    let ours = match advice {
        MADV_PAGEOUT => Some(Advice::PageOut),
        MADV_COLD => Some(Advice::Cold),
        MADV_WIPEONFORK => Some(Advice::Exclude),
        _ => None,
    };
    if let Some(advice) = ours
        && address.is_multiple_of(PAGE_SIZE)
    {
        tell_manager(advice, address, len);
    }
    // The kernel hears it too: it checks the arguments, and handles what is not ours (file pages). What the manager
    // has evicted is not there any more for it to page out.
    // SAFETY: the program's own request.
    let result = unsafe { call!(sys::SYS_MADVISE, address, len, advice) };
    // SAFETY: guards were just installed. The program has called, in place of libc's function.
    unsafe {
        if advice == MADV_GUARD_INSTALL {
            if is_error(result) { tell_of_guards(address, len) } else { announce_guards(address, len) }
        }
        finish(result) as i32
    }
}

/// Has the manager look for guards where the kernel has come to an error: it may have installed some before and, after a hole, behind it.
fn tell_of_guards(address: usize, len: usize) {
    if evicts() {
        tell_manager(Advice::Guards, address, len);
    }
}

/// Has the kernel announce what it has discarded under guards.
///
/// # Safety
/// Of what was in the range nothing but guards is left.
unsafe fn announce_guards(address: usize, len: usize) {
    if evicts() {
        // SAFETY: as the caller's.
        unsafe {
            if is_error(call!(sys::SYS_MADVISE, address, len, MADV_FREE)) {
                // MADV_FREE fails at the first mapping of a file, and announces nothing behind it.
                tell_of_guards(address, len);
            }
            call!(sys::SYS_MADVISE, address, len, MADV_GUARD_INSTALL);
        }
    }
}

/// As the libc's. Of a process that does not execute this, the manager is told nothing.
///
/// # Safety
/// As the libc's: discarding advice discards memory.
pub unsafe extern "C" fn own_process_madvise(
    process: i32,
    ranges: *const [usize; 2],
    count: usize,
    advice: i32,
    flags: u32,
) -> isize {
    // SAFETY: the program's own request.
    let result = unsafe { call!(sys::SYS_PROCESS_MADVISE, process, ranges, count, advice, flags) };
    /// `UIO_MAXIOV`
    const MOST_RANGES: usize = 1024;
    // Else the kernel may not have read the ranges, nor be able to.
    let has_read = result >= 0 || flags == 0 && (1..=MOST_RANGES).contains(&count) && result != -EFAULT;
    if has_read && advice == MADV_GUARD_INSTALL && sys::is_own(process) {
        let mut left = result.max(0) as usize;
        for place in 0..count {
            // SAFETY: the kernel has just read them, and advised the first `result` bytes.
            let [address, len] = unsafe { ranges.add(place).read() };
            if len > left {
                // It came to an error in this one.
                tell_of_guards(address, len);
                break;
            }
            // SAFETY: it has advised all of this one.
            unsafe { announce_guards(address, len) };
            left -= len;
        }
    }
    // SAFETY: the program has called, in place of libc's function.
    unsafe { finish(result) }
}

/// As the libc's.
///
/// # Safety
/// As the libc's: with SHM_REMAP it replaces memory.
pub unsafe extern "C" fn own_shmat(id: i32, address: usize, flags: i32) -> isize {
    let replaces = flags & SHM_REMAP != 0 && job().is_some() && !is_filtered();
    // SAFETY: the program's own request, in place of libc's function.
    unsafe {
        let result =
            if replaces { replace_by_segment(id, address, flags) } else { call!(sys::SYS_SHMAT, id, address, flags) };
        finish(result)
    }
}

/// Does what `shmat` does with SHM_REMAP; gives the address or a negative errno.
///
/// # Safety
/// As [`own_shmat`]'s.
unsafe fn replace_by_segment(id: i32, address: usize, flags: i32) -> isize {
    const SHM_RND: i32 = 0o20000;
    const MREMAP_MAYMOVE_FIXED: usize = 3;
    // The kernel may place a segment where it overlaps `to`, from which it cannot be moved there. No more than two fit so.
    const TRIES: usize = 3;
    let to = if flags & SHM_RND == 0 { address } else { address & !(PAGE_SIZE - 1) };
    if to == 0 || !to.is_multiple_of(PAGE_SIZE) {
        return -EINVAL;
    }
    let (mut attached, mut result) = ([0; TRIES], -EINVAL);
    for place in &mut attached {
        // SAFETY: the kernel attaches it where nothing is mapped.
        let at = unsafe { call!(sys::SYS_SHMAT, id, 0, flags & !(SHM_REMAP | SHM_RND)) };
        result = at;
        if is_error(at) || at as usize == to {
            break;
        }
        let size = segment_size(id);
        // SAFETY: what is moved was just attached; what is replaced the program wants replaced.
        result = unsafe { call!(sys::SYS_MREMAP, at, size, size, MREMAP_MAYMOVE_FIXED, to) };
        if !is_error(result) {
            break;
        }
        *place = at;
        if (at as usize).abs_diff(to) >= size {
            break;
        }
    }
    for place in attached.into_iter().filter(|place| *place != 0) {
        // SAFETY: attached above, and nothing else.
        unsafe { call!(sys::SYS_SHMDT, place) };
    }
    result
}

/// The size of a segment that is attached, in bytes; 0 where the kernel does not tell.
fn segment_size(id: i32) -> usize {
    const IPC_STAT: usize = 2;
    // `struct shmid64_ds`: `shm_segsz` is the seventh word.
    let mut segment = [0usize; 16];
    // SAFETY: a buffer longer than the structure.
    unsafe { call!(sys::SYS_SHMCTL, id, IPC_STAT, segment.as_mut_ptr()) };
    segment[6]
}

/// Returns what a system call came to, as libc tells it: with an errno of this thread, if there is a libc.
///
/// # Safety
/// To be called in a thread of the program only.
pub unsafe extern "C" fn finish(result: isize) -> isize {
    if !is_error(result) {
        return result;
    }
    let errno = weak!("__errno_location");
    if errno != 0 {
        // SAFETY: libc's function that gives the address of this thread's errno.
        unsafe {
            let errno: extern "C" fn() -> *mut i32 = core::mem::transmute(errno);
            *errno() = -result as i32;
        }
    }
    -1
}

/// Says it on a connection of its own and waits until the manager has done it. A manager that cannot be reached is no
/// error: advice is only advice.
fn tell_manager(advice: Advice, address: usize, len: usize) {
    let Some(job) = job().filter(|_| !is_filtered()) else { return };
    let Ok(socket) = connect(job) else { return };
    let mut words = [0; MAX_WORDS];
    let advise = Advise { token: job.token, advice, address: address as u64, len: len as u64 };
    let count = advise.encode(&mut words);
    if send(socket, &words[..count], &[]) {
        receive(socket, &mut words, None);
    }
    // SAFETY: our own descriptor.
    unsafe { call!(sys::SYS_CLOSE, socket) };
}

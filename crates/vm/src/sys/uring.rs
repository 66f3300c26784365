//! Several calls at once, by io_uring: reads of a file, so that the disk works on all of them while one waits for the first; and a read and
//! what is to be done with it, so that no kill comes in between.
//!
//! # Safety
//! The kernel writes to the buffers of a read until it has answered. So nobody returns before all have been answered; if that
//! could not be waited for, the process would end.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};
use uzswap_engine::ReadAt;

/// The most reads at once.
const DEPTH: usize = 64;

thread_local! {
    /// That of this thread; `None` where the system permits none.
    static RING: RefCell<Option<IoUring>> = RefCell::new(IoUring::new(DEPTH as u32).ok());
}

/// Whether the system permits a ring.
pub fn probe() -> io::Result<()> {
    IoUring::new(1).map(drop)
}

/// Fills the buffers of all `reads`, as [`FileExt::read_exact_at`] each of them; one after another where there is no ring. A single
/// one gains nothing by it.
pub fn read_all(file: &File, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
    if let [read] = reads {
        return file.read_exact_at(read.buffer, read.offset);
    }
    RING.with_borrow_mut(|ring| match ring {
        Some(ring) => reads.chunks_mut(DEPTH).try_for_each(|reads| read_at_once(ring, file, reads)),
        None => reads.iter_mut().try_for_each(|read| file.read_exact_at(read.buffer, read.offset)),
    })
}

fn read_at_once(ring: &mut IoUring, file: &File, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
    let file_number = types::Fd(file.as_raw_fd());
    for (number, read) in reads.iter_mut().enumerate() {
        let len = u32::try_from(read.buffer.len()).expect("a buffer of less than 4 GiB");
        let entry = opcode::Read::new(file_number, read.buffer.as_mut_ptr(), len).offset(read.offset).build();
        // SAFETY: file and buffer live until the answer, which is waited for below.
        unsafe { ring.submission().push(&entry.user_data(number as u64)) }.expect("a queue as long as it was made");
    }
    let answers: [i32; DEPTH] = answers(ring, reads.len());
    // A read may have been cut short, or refused for the moment: what is left of it is read as ever, or tells why not.
    for (read, answer) in reads.iter_mut().zip(answers) {
        let done = usize::try_from(answer).unwrap_or(0);
        if done < read.buffer.len() {
            file.read_exact_at(&mut read.buffer[done..], read.offset + done as u64)?;
        }
    }
    Ok(())
}

/// Does `first`, and if that does all that it is asked for, `second`, although the process is killed meanwhile; their results. `None` where
/// there is no ring. If `first` has to wait, it is given up after a millisecond (`ECANCELED`).
///
/// The thread does both in one system call: a thread that is killed does what it has still to do of its own requests before it ends.
///
/// # Safety
/// What both point to has to be valid until this returns.
pub unsafe fn in_one(first: Entry, second: Entry) -> Option<[i32; 2]> {
    RING.with_borrow_mut(|ring| {
        let ring = ring.as_mut()?;
        let moment = types::Timespec::new().nsec(1_000_000);
        let timeout = opcode::LinkTimeout::new(&raw const moment).build();
        let entries =
            [first.flags(Flags::IO_LINK).user_data(0), timeout.flags(Flags::IO_LINK).user_data(2), second.user_data(1)];
        // SAFETY: the caller's promise; all are answered below.
        unsafe { ring.submission().push_multiple(&entries) }.expect("a queue longer than three");
        let [first, second, _]: [i32; 3] = answers(ring, 3);
        Some([first, second])
    })
}

/// Submits what is in the queue, `count` requests numbered from 0, and waits for all of their results.
fn answers<const MOST: usize>(ring: &mut IoUring, count: usize) -> [i32; MOST] {
    let mut answers = [0; MOST];
    let mut answered = 0;
    while answered < count {
        if let Err(error) = ring.submit_and_wait(count - answered)
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
        {
            // The kernel may write to memory that would soon be another's.
            crate::log::log(&format!("uzswap: error: requests to the kernel cannot be waited for: {error}"));
            std::process::abort();
        }
        for answer in ring.completion() {
            answers[answer.user_data() as usize] = answer.result();
            answered += 1;
        }
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(len: usize) -> File {
        let path = std::env::temp_dir().join(format!("uzswap.uring.{}.{len}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
        std::fs::remove_file(path).expect("it was just made");
        let bytes: Vec<u8> = (0..len as u32 / 4).flat_map(u32::to_ne_bytes).collect();
        file.write_all_at(&bytes, 0).expect("room on disk");
        file
    }

    fn read(file: &File, offsets: &[u64], len: usize) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; offsets.len() * len];
        let buffers = bytes.chunks_exact_mut(len).zip(offsets);
        let mut reads: Vec<ReadAt<'_>> = buffers.map(|(buffer, &offset)| ReadAt { offset, buffer }).collect();
        read_all(file, &mut reads)?;
        Ok(bytes.chunks_exact(len).map(|read| u32::from_ne_bytes(read[..4].try_into().unwrap())).collect())
    }

    #[test]
    fn every_buffer_gets_its_own_bytes() {
        let file = file(1 << 20);
        for count in [0, 1, 2, DEPTH, DEPTH + 1, 1000] {
            let offsets: Vec<u64> = (0..count as u64).map(|i| i * 7919 % 262_000 * 4).collect();
            let expected: Vec<u32> = offsets.iter().map(|offset| *offset as u32 / 4).collect();
            assert_eq!(read(&file, &offsets, 128).expect("they are all there"), expected);
        }
    }

    #[test]
    fn what_is_not_there_is_an_error_and_the_ring_stays_good() {
        let file = file(4096);
        for offsets in [[0, 4000], [8000, 0]] {
            assert_eq!(read(&file, &offsets, 128).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
        assert_eq!(read(&file, &[128, 4], 64).unwrap(), [32, 1]);
    }

    #[test]
    fn there_is_a_ring_here() {
        probe().expect("tests need io_uring: kernel.io_uring_disabled=0, and no filter that forbids it");
    }
}

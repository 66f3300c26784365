//! Where the kernel looks when a thread ends: the heads of robust lists.
//!
//! # Safety
//! The kernel writes two words, into variables of ours.

#![allow(unsafe_code)]

use std::collections::HashSet;

use crate::range::Range;

/// Returns the number of threads of process `pid`, zombies included; 0 if it is gone. Constant cost.
pub fn count_threads(pid: i32) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/{pid}/task")).map_or(0, |task| task.nlink())
}

/// Returns the head of the robust list of each thread of process `pid`. Threads that have none are passed over.
pub fn heads(pid: i32) -> Vec<Range> {
    let heads: Vec<(i32, Range)> = threads(pid).into_iter().filter_map(|tid| Some((tid, head(tid)?))).collect();
    // The number of a thread that has ended may be that of another process's by now.
    let still: HashSet<i32> = threads(pid).into_iter().collect();
    heads.into_iter().filter(|(tid, _)| still.contains(tid)).map(|(_, head)| head).collect()
}

/// Lists the threads of process `pid`.
fn threads(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Returns the head of the robust list of thread `tid`, an address that the thread has chosen.
fn head(tid: i32) -> Option<Range> {
    let (mut head, mut len) = (0u64, 0usize);
    // SAFETY: the kernel writes a pointer and a length, both variables of ours.
    let result = unsafe { libc::syscall(libc::SYS_get_robust_list, tid, &raw mut head, &raw mut len) };
    (result == 0 && head != 0).then(|| Range::sized(head, len as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_of_this_process_has_a_head() {
        let pid = std::process::id() as i32;
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let (started, start) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: no pointers.
            started.send(unsafe { libc::gettid() }).unwrap();
            wait.recv().unwrap_err();
        });
        let of_thread = head(start.recv().unwrap()).unwrap();
        assert_eq!(of_thread.len(), 24);
        assert!(heads(pid).contains(&of_thread));
        assert!(count_threads(pid) >= 2);
        drop(end);
        thread.join().unwrap();
        assert_eq!(count_threads(0), 0);
    }
}

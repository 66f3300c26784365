//! What programs find in this library: `clone`, `madvise`, `prctl`, `process_madvise`, `shmat` and `syscall`, which come before all others of these names.
//!
//! A library of the program may have a function of such a name, too: one that watches the calls, or one that has nothing to do with
//! libc's. Then the program wants that one, and the agent does without the call: [`find_next`] looks for it. That a filter of system
//! calls may be installed is noted all the same (`calls`).
//!
//! # Safety
//! Each function goes on to another one with all that it was called with.

use core::arch::{global_asm, naked_asm};
use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::attach::weak;
use crate::{calls, hints};

macro_rules! interposed {
    ($name:ident, $next:ident, $own:path $(, notes $noted:path: $($note:literal),+)?) => {
        /// The program's own function of this name; 0 if it has none but libc's.
        static $next: AtomicUsize = AtomicUsize::new(0);

        /// As the libc's, or as the program's own.
        ///
        /// # Safety
        /// As that.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            // r11 holds no argument.
            naked_asm!(
                "mov r11, qword ptr [rip + {next}]",
                "test r11, r11",
                "jz {own}",
                $($($note,)+)?
                "jmp r11",
                next = sym $next,
                own = sym $own,
                $(noted = sym $noted,)?
            )
        }
    };
}

interposed!(clone, NEXT_CLONE, calls::own_clone);
interposed!(madvise, NEXT_MADVISE, hints::own_madvise);
interposed!(
    prctl,
    NEXT_PRCTL,
    calls::own_prctl,
    notes calls::FILTERED:
    "cmp edi, 22", // PR_SET_SECCOMP
    "jne 2f",
    "mov byte ptr [rip + {noted}], 1",
    "2:"
);
interposed!(process_madvise, NEXT_PROCESS_MADVISE, hints::own_process_madvise);
interposed!(shmat, NEXT_SHMAT, hints::own_shmat);
interposed!(
    syscall,
    NEXT_SYSCALL,
    calls::own_syscall,
    notes calls::FILTERED:
    "cmp rdi, 157", // prctl
    "je 3f",
    "cmp rdi, 317", // seccomp, of which the first two operations install a filter
    "jne 4f",
    "cmp esi, 2",
    "jb 2f",
    "jmp 4f",
    "3:",
    "cmp esi, 22",
    "jne 4f",
    "2:",
    "mov byte ptr [rip + {noted}], 1",
    "4:"
);

// Weak, as in `attach`. A libc that lacks one of them is taken for the next that has the functions.
global_asm!(".weak dlsym", ".weak _dl_find_object", ".weak __errno_location");

/// Finds the functions that the program would have without this library. To be called before `main`, by the constructor.
pub fn find_next() {
    const RTLD_NEXT: usize = usize::MAX;
    type Dlsym = extern "C" fn(usize, *const core::ffi::c_char) -> usize;
    let (dlsym, libc) = (weak!("dlsym"), weak!("__errno_location"));
    if dlsym == 0 || libc == 0 {
        return;
    }
    let (Some(libc), own) = (object_of(libc), object_of(find_next as *const () as usize)) else { return };
    // SAFETY: the dynamic linker's own signature.
    let dlsym: Dlsym = unsafe { core::mem::transmute(dlsym) };
    let find = |name: &CStr, next: &AtomicUsize| {
        let found = dlsym(RTLD_NEXT, name.as_ptr());
        let object = object_of(found);
        if found != 0 && object != Some(libc) && object != own {
            next.store(found, Relaxed);
        }
    };
    find(c"clone", &NEXT_CLONE);
    find(c"madvise", &NEXT_MADVISE);
    find(c"prctl", &NEXT_PRCTL);
    find(c"process_madvise", &NEXT_PROCESS_MADVISE);
    find(c"shmat", &NEXT_SHMAT);
    find(c"syscall", &NEXT_SYSCALL);
}

/// Returns where the shared object is mapped that has something at `address`. `None` if that cannot be told.
fn object_of(address: usize) -> Option<u64> {
    /// Words of glibc's `struct dl_find_object`, of which the second is where the object begins.
    const WORDS: usize = 12;
    type Find = extern "C" fn(usize, *mut [u64; WORDS]) -> i32;
    let find = weak!("_dl_find_object");
    if find == 0 {
        return None;
    }
    let mut found = [0; WORDS];
    // SAFETY: glibc's own signature; it writes no more than the structure.
    let find: Find = unsafe { core::mem::transmute(find) };
    (find(address, &raw mut found) == 0).then_some(found[1])
}

//! The locks, atomics and thread-locals of the engine: all of them come from here.
//!
//! Built with the feature `shuttle` they are those of a model checker, which lets one thread run at a time and chooses at
//! each of them who goes on; such an engine works nowhere else. See `tests/interleavings`.

#[cfg(not(feature = "shuttle"))]
mod chosen {
    pub(crate) use parking_lot::{Mutex, MutexGuard, RwLock};
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
    pub(crate) use std::thread_local;
}

#[cfg(feature = "shuttle")]
mod chosen {
    pub(crate) use shuttle::sync::MutexGuard;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
    pub(crate) use shuttle::thread_local;

    /// The checker's lock with the manners of parking_lot's. Nobody comes after a panic, so poison does not matter.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Mutex<T> {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread has panicked")
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// As [`Mutex`].
    #[derive(Default)]
    pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub fn read(&self) -> shuttle::sync::RwLockReadGuard<'_, T> {
            self.0.read().expect("no thread has panicked")
        }

        pub fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
            self.0.write().expect("no thread has panicked")
        }
    }
}

pub(crate) use chosen::*;

#[cfg(test)]
mod tests {
    #[test]
    fn nothing_goes_past_the_model_checker() {
        let sources = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).unwrap();
        for path in sources.map(|source| source.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name == "sync.rs" || name.ends_with("_tests.rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            for foreign in ["parking_lot", "std::sync::atomic", "std::sync::{", "std::sync::Mutex", "\nthread_local!"] {
                assert!(!code.contains(foreign), "{name} has {:?} without sync.rs", foreign.trim());
            }
        }
    }
}

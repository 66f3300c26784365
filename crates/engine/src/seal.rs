//! Sealing of entries that leave for the disk: encrypted, and authenticated together with their place.
//!
//! 1. The key is random, lives in memory only and dies with the process: nobody reads a swap file afterwards.
//! 2. No nonce is used twice: it is a counter, and nothing seals without taking a new one.
//! 3. Nonce, tag and length stay in memory and the place is authenticated. So an entry that was changed, exchanged with
//!    another or rolled back to what its place once held does not open.

use crate::sync::{AtomicU64, Ordering};
use aes_gcm::aead::{AeadInOut, KeyInit};

/// Unique to one sealing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nonce([u8; 8]);

pub(crate) type Tag = [u8; 16];

pub(crate) struct Sealer {
    cipher: aes_gcm::Aes128Gcm,
    next_nonce: AtomicU64,
}

/// The content is not what was sealed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tampered;

impl Sealer {
    /// A sealer with a fresh key. Panics if the system has no randomness to give.
    pub fn new() -> Sealer {
        let mut key = [0; 16];
        getrandom::fill(&mut key).expect("the system gives no random bytes for the key of the swap file");
        Sealer { cipher: aes_gcm::Aes128Gcm::new(&key.into()), next_nonce: AtomicU64::new(0) }
    }

    /// A nonce that was never given out before.
    pub fn nonce(&self) -> Nonce {
        Nonce(self.next_nonce.fetch_add(1, Ordering::Relaxed).to_le_bytes())
    }

    /// Encrypts bytes in place, at most a page of them.
    pub fn seal(&self, nonce: Nonce, place: u32, data: &mut [u8]) -> Tag {
        let tag = self.cipher.encrypt_inout_detached(&nonce.padded().into(), &place.to_le_bytes(), data.into());
        tag.expect("a page is never too long").into()
    }

    /// Decrypts bytes in place. If they were tampered with, they are undefined afterwards.
    pub fn open(&self, nonce: Nonce, place: u32, tag: &Tag, data: &mut [u8]) -> Result<(), Tampered> {
        let (nonce, place) = (nonce.padded().into(), place.to_le_bytes());
        self.cipher.decrypt_inout_detached(&nonce, &place, data.into(), &(*tag).into()).map_err(|_| Tampered)
    }
}

impl Nonce {
    fn padded(self) -> [u8; 12] {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.0);
        nonce
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_bytes_at_the_same_place_open() {
        let sealer = Sealer::new();
        for length in [1, 100, 4096] {
            let mut sealed = vec![7; length];
            let nonce = sealer.nonce();
            let tag = sealer.seal(nonce, 3, &mut sealed);
            // One byte may come out as it went in: each 256th time.
            assert!(length == 1 || sealed != vec![7; length], "sealed in name only");

            let mut data = sealed.clone();
            assert_eq!(sealer.open(nonce, 3, &tag, &mut data), Ok(()));
            assert_eq!(data, vec![7; length]);

            assert_eq!(sealer.open(nonce, 4, &tag, &mut sealed.clone()), Err(Tampered), "another place");
            assert_eq!(sealer.open(sealer.nonce(), 3, &tag, &mut sealed.clone()), Err(Tampered), "an older content");
            assert_eq!(Sealer::new().open(nonce, 3, &tag, &mut sealed.clone()), Err(Tampered), "another key");
            assert_eq!(sealer.open(nonce, 3, &tag, &mut sealed.clone()[1..]), Err(Tampered), "another length");
            sealed[length - 1] ^= 1;
            assert_eq!(sealer.open(nonce, 3, &tag, &mut sealed), Err(Tampered), "a changed byte");
        }
    }

    #[test]
    fn nonces_never_repeat() {
        let sealer = Sealer::new();
        assert_ne!(sealer.nonce(), sealer.nonce());
    }
}

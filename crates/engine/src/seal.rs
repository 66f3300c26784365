//! Sealing of pages that leave for the disk: encrypted, and authenticated together with their place.
//!
//! 1. The key is random, lives in memory only and dies with the process: nobody reads a swap file afterwards.
//! 2. No nonce is used twice: it is a counter, and nothing seals without taking a new one.
//! 3. Nonce and tag stay in memory and the block number is authenticated. So a block that was changed, exchanged with
//!    another or rolled back to what it once held does not open.

use crate::{PAGE_SIZE, Page};
use aes_gcm::aead::{AeadInOut, KeyInit};
use std::sync::atomic::{AtomicU64, Ordering};

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

    /// Encrypts a page in place.
    pub fn seal(&self, nonce: Nonce, block: u32, page: &mut [u8]) -> Tag {
        assert_eq!(page.len(), PAGE_SIZE);
        let tag = self.cipher.encrypt_inout_detached(&nonce.padded().into(), &block.to_le_bytes(), page.into());
        tag.expect("a page is never too long").into()
    }

    /// Decrypts a page in place. If it was tampered with, its content is undefined afterwards.
    pub fn open(&self, nonce: Nonce, block: u32, tag: &Tag, page: &mut Page) -> Result<(), Tampered> {
        let (nonce, place) = (nonce.padded().into(), block.to_le_bytes());
        let opened = self.cipher.decrypt_inout_detached(&nonce, &place, page.as_mut_slice().into(), &(*tag).into());
        opened.map_err(|_| Tampered)
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
        let mut sealed = [7; PAGE_SIZE];
        let nonce = sealer.nonce();
        let tag = sealer.seal(nonce, 3, &mut sealed);
        assert_ne!(sealed, [7; PAGE_SIZE]);

        let mut page = sealed;
        assert_eq!(sealer.open(nonce, 3, &tag, &mut page), Ok(()));
        assert_eq!(page, [7; PAGE_SIZE]);

        assert_eq!(sealer.open(nonce, 4, &tag, &mut sealed.clone()), Err(Tampered), "another block");
        assert_eq!(sealer.open(sealer.nonce(), 3, &tag, &mut sealed.clone()), Err(Tampered), "an older content");
        assert_eq!(Sealer::new().open(nonce, 3, &tag, &mut sealed.clone()), Err(Tampered), "another key");
        sealed[PAGE_SIZE - 1] ^= 1;
        assert_eq!(sealer.open(nonce, 3, &tag, &mut sealed), Err(Tampered), "a changed byte");
    }

    #[test]
    fn nonces_never_repeat() {
        let sealer = Sealer::new();
        assert_ne!(sealer.nonce(), sealer.nonce());
    }
}

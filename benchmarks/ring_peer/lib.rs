//! The blocks of an AGS1 stream between two buffers by ring: `seal` and `open` return whether all went well.
//!
//! ring works in place, so each block is copied to where it goes first.

use ring::aead::{Aad, LessSafeKey, Nonce, Tag, UnboundKey, AES_128_GCM, AES_256_GCM};
use std::slice::{from_raw_parts, from_raw_parts_mut};

const HEADER: usize = 8;
const NONCE: usize = 12;
const TAG: usize = 16;

/// What both directions need. Sizes are in bytes.
#[repr(C)]
pub struct Task {
    key: *const u8,
    key_nbytes: usize,
    prefix: *const u8,
    prefix_nbytes: usize,
    block_nbytes: usize,
    plain: *mut u8,
    plain_nbytes: usize,
    stream: *mut u8,
    nonces: *const u8,
}

impl Task {
    unsafe fn key(&self) -> Option<LessSafeKey> {
        let algorithm = if self.key_nbytes == 16 { &AES_128_GCM } else { &AES_256_GCM };
        let key = UnboundKey::new(algorithm, from_raw_parts(self.key, self.key_nbytes)).ok()?;
        Some(LessSafeKey::new(key))
    }

    unsafe fn stream(&self) -> &mut [u8] {
        let blocks = self.plain_nbytes.div_ceil(self.block_nbytes);
        from_raw_parts_mut(self.stream, HEADER + self.plain_nbytes + blocks * (NONCE + TAG))
    }

    /// For each block: its sealed bytes, its plaintext and its AAD.
    unsafe fn each(&self, mut work: impl FnMut(&mut [u8], &mut [u8], usize, &[u8]) -> Option<()>) -> Option<()> {
        let plain = from_raw_parts_mut(self.plain, self.plain_nbytes);
        let mut aad = from_raw_parts(self.prefix, self.prefix_nbytes).to_vec();
        aad.extend([0; 4]);
        let sealed = self.stream()[HEADER..].chunks_mut(NONCE + self.block_nbytes + TAG);
        for (i, (sealed, plain)) in sealed.zip(plain.chunks_mut(self.block_nbytes)).enumerate() {
            aad[self.prefix_nbytes..].copy_from_slice(&(i as u32).to_le_bytes());
            work(sealed, plain, i, &aad)?;
        }
        Some(())
    }
}

/// # Safety
/// The pointers of the task must be good for its sizes, `nonces` for a nonce of each block.
#[no_mangle]
pub unsafe extern "C" fn seal(task: &Task) -> bool {
    let Some(key) = task.key() else { return false };
    task.each(|sealed, plain, i, aad| {
        let nonce = from_raw_parts(task.nonces.add(NONCE * i), NONCE);
        let (head, rest) = sealed.split_at_mut(NONCE);
        let (text, tag) = rest.split_at_mut(plain.len());
        head.copy_from_slice(nonce);
        text.copy_from_slice(plain);
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        tag.copy_from_slice(key.seal_in_place_separate_tag(nonce, Aad::from(aad), text).ok()?.as_ref());
        Some(())
    })
    .is_some()
}

/// # Safety
/// As for `seal`, but for the nonces.
#[no_mangle]
pub unsafe extern "C" fn open(task: &Task) -> bool {
    let Some(key) = task.key() else { return false };
    task.each(|sealed, plain, _, aad| {
        let (nonce, rest) = sealed.split_at(NONCE);
        let (text, tag) = rest.split_at(plain.len());
        plain.copy_from_slice(text);
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let tag = Tag::try_from(tag).ok()?;
        key.open_in_place_separate_tag(nonce, Aad::from(aad), tag, plain, 0..).ok()?;
        Some(())
    })
    .is_some()
}

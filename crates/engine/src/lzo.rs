//! lzo-rle: the LZO1X stream with runs of zeros that the kernel calls by this name ("bitstream version 1"), written from
//! the kernel's public description of the format (Documentation/staging/lzo.rst).
//!
//! ```text
//!   17 1                  version, at the start
//!   17+n  n bytes         1 to 238 literals, at the start
//!   0000LLLL              literals: 3 + L, or 18 + extension; only where no literals came just before
//!   0000DDSS H            match of 2 (after 1 to 3 literals, distance 1 + D + 4H) or 3 (after more, 2049 + D + 4H)
//!   0001HLLL DDDDDDSS D   match of 2 + L, or 9 + extension, distance 16384 + 16384H + D; distance 16384 ends the stream
//!   00011LLL 111111SS 255 X   4 + L + 8X zeros
//!   001LLLLL DDDDDDSS D   match of 2 + L, or 33 + extension, distance 1 + D
//!   01LDDDSS H            match of 3 + L, distance 1 + D + 8H
//!   1LLDDDSS H            match of 5 + L, distance 1 + D + 8H
//! ```
//! L = 0 stands for an extension: zero bytes (255 each), then a last byte. S literals (0 to 3) follow a match.

use crate::PAGE_SIZE;

const VERSION: [u8; 2] = [17, 1];
const END: [u8; 3] = [17, 0, 0];
const HASH_BITS: u32 = 12;
/// Shorter runs of zeros are no shorter as a run than as a match.
const SHORTEST_ZERO_RUN: usize = 16;
const LONGEST_ZERO_RUN: usize = 4 + 0x7ff;

/// Positions in the page by a hash of the four bytes found there.
pub(crate) type Positions = [u16; POSITIONS];
pub(crate) const POSITIONS: usize = 1 << HASH_BITS;

/// Where the compressed bytes go; `None` from any method: no more room.
struct Output<'a> {
    buffer: &'a mut [u8],
    len: usize,
    /// The byte whose lower two bits say how many literals follow the last match.
    follow: Option<usize>,
}

impl Output<'_> {
    fn put(&mut self, bytes: &[u8]) -> Option<()> {
        self.buffer.get_mut(self.len..self.len + bytes.len())?.copy_from_slice(bytes);
        self.len += bytes.len();
        Some(())
    }

    /// A length of at least 1 beyond what fits into the instruction.
    fn extension(&mut self, mut length: usize) -> Option<()> {
        while length > 255 {
            self.put(&[0])?;
            length -= 255;
        }
        self.put(&[length as u8])
    }

    fn literals(&mut self, literals: &[u8]) -> Option<()> {
        match (literals.len(), self.follow) {
            (0, _) => return Some(()),
            (count @ 1..=3, Some(follow)) => self.buffer[follow] |= count as u8,
            (count @ 1..=238, None) => self.put(&[17 + count as u8])?,
            (count @ 4..=18, _) => self.put(&[count as u8 - 3])?,
            (count, _) => {
                self.put(&[0])?;
                self.extension(count - 18)?;
            }
        }
        self.put(literals)
    }

    /// A match of at least 3 bytes, at most 16 KiB back.
    fn copy(&mut self, distance: usize, length: usize) -> Option<()> {
        let far = distance - 1;
        if length <= 8 && far < 2048 {
            self.follow = Some(self.len);
            return self.put(&[((length - 1) << 5 | (far & 7) << 2) as u8, (far >> 3) as u8]);
        }
        if length <= 33 {
            self.put(&[(0x20 | (length - 2)) as u8])?;
        } else {
            self.put(&[0x20])?;
            self.extension(length - 33)?;
        }
        self.follow = Some(self.len);
        self.put(&((far << 2) as u16).to_le_bytes())
    }

    fn zeros(&mut self, length: usize) -> Option<()> {
        let run = length - 4;
        self.follow = Some(self.len + 1);
        self.put(&[0x18 | (run & 7) as u8, 0xfc, 0xff, (run >> 3) as u8])
    }
}

/// Compresses up to a page; returns the length, or None if it does not fit.
pub(crate) fn compress(input: &[u8], buffer: &mut [u8], positions: &mut Positions) -> Option<usize> {
    assert!(input.len() <= PAGE_SIZE);
    positions.fill(0);
    let mut output = Output { buffer, len: 0, follow: None };
    output.put(&VERSION)?;
    // A stream starts with literals: its first byte would be taken for a number of them anyway.
    let (mut at, mut pending) = (1, 0);
    while let Some(head) = input.get(at..).and_then(<[u8]>::first_chunk::<4>) {
        let head = u32::from_le_bytes(*head);
        let hash = (head.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize;
        let candidate = std::mem::replace(&mut positions[hash], at as u16) as usize;
        let zeros = if head == 0 { common_length(&input[at..], &[0; PAGE_SIZE]).min(LONGEST_ZERO_RUN) } else { 0 };
        if zeros >= SHORTEST_ZERO_RUN {
            output.literals(&input[pending..at])?;
            output.zeros(zeros)?;
            at += zeros;
            pending = at;
        } else if candidate < at && input[candidate..candidate + 4] == head.to_le_bytes() {
            let length = 4 + common_length(&input[at + 4..], &input[candidate + 4..]);
            output.literals(&input[pending..at])?;
            output.copy(at - candidate, length)?;
            at += length;
            pending = at;
        } else {
            at += 1 + (at - pending) / 32;
        }
    }
    output.literals(&input[pending..])?;
    output.put(&END)?;
    Some(output.len)
}

fn common_length(a: &[u8], b: &[u8]) -> usize {
    let mut length = 0;
    for (x, y) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        let (x, y): ([u8; 8], [u8; 8]) = (x.try_into().expect("eight"), y.try_into().expect("eight"));
        let difference = u64::from_le_bytes(x) ^ u64::from_le_bytes(y);
        if difference != 0 {
            return length + difference.trailing_zeros() as usize / 8;
        }
        length += 8;
    }
    length + a[length..].iter().zip(&b[length..]).take_while(|(x, y)| x == y).count()
}

/// The compressed bytes that are still to be read.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<usize> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte as usize)
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    /// `bits`, or, if they are 0, `base` and an extension.
    fn length(&mut self, bits: usize, base: usize) -> Option<usize> {
        if bits != 0 {
            return Some(bits);
        }
        let mut length = base;
        loop {
            match self.byte()? {
                0 => length += 255,
                last => return Some(length + last),
            }
        }
    }

    fn little_endian(&mut self) -> Option<usize> {
        Some(self.byte()? | self.byte()? << 8)
    }
}

/// Decompresses a stream with or without the version; returns the length, or None if it is damaged or too long.
pub(crate) fn decompress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    let mut input = Input(input);
    let runs = input.0.starts_with(&VERSION) && input.0.len() >= 5;
    if runs {
        input.take(VERSION.len());
    }
    let mut len = 0;
    // Literals just before: 0 to 3 as they are, 4 for more.
    let mut state = 0;
    if *input.0.first()? > 17 {
        let count = input.byte()? - 17;
        literals(&mut input, output, &mut len, count)?;
        state = count.min(4);
    }
    loop {
        let code = input.byte()?;
        let (distance, length);
        let mut follow = code & 3;
        match code {
            0..16 if state == 0 => {
                let count = 3 + input.length(code, 15)?;
                literals(&mut input, output, &mut len, count)?;
                state = 4;
                continue;
            }
            0..16 => {
                let near = (code >> 2) + (input.byte()? << 2);
                (distance, length) = if state == 4 { (near + 2049, 3) } else { (near + 1, 2) };
            }
            16..32 => {
                let base = if code & 8 != 0 { 32768 } else { 16384 };
                if runs && code & 8 != 0 && input.0.first()? & 0xfc == 0xfc && *input.0.get(1)? == 0xff {
                    follow = input.little_endian()? & 3;
                    let count = 4 + (code & 7) + (input.byte()? << 3);
                    output.get_mut(len..len + count)?.fill(0);
                    len += count;
                    literals(&mut input, output, &mut len, follow)?;
                    state = follow;
                    continue;
                }
                length = 2 + input.length(code & 7, 7)?;
                let far = input.little_endian()?;
                follow = far & 3;
                distance = base + (far >> 2);
                if distance == 16384 {
                    return (length == 3 && input.0.is_empty()).then_some(len);
                }
            }
            32..64 => {
                length = 2 + input.length(code & 31, 31)?;
                let far = input.little_endian()?;
                follow = far & 3;
                distance = 1 + (far >> 2);
            }
            _ => {
                length = 1 + (code >> 5);
                distance = 1 + (code >> 2 & 7) + (input.byte()? << 3);
            }
        }
        copy(output, &mut len, distance, length)?;
        literals(&mut input, output, &mut len, follow)?;
        state = follow;
    }
}

/// Most literals and matches are this short; where there is room they are moved as one block, whatever lies behind
/// their end is overwritten later.
const SHORT: usize = 16;

fn literals(input: &mut Input<'_>, output: &mut [u8], len: &mut usize, count: usize) -> Option<()> {
    if count <= SHORT
        && let Some(block) = input.0.first_chunk::<SHORT>()
        && let Some(room) = output[*len..].first_chunk_mut::<SHORT>()
    {
        *room = *block;
        input.0 = &input.0[count..];
    } else {
        output.get_mut(*len..*len + count)?.copy_from_slice(input.take(count)?);
    }
    *len += count;
    Some(())
}

fn copy(output: &mut [u8], len: &mut usize, distance: usize, length: usize) -> Option<()> {
    let start = len.checked_sub(distance)?;
    let end = *len + length;
    let window = output.get_mut(start..)?;
    if length <= SHORT && distance >= SHORT && window.len() >= distance + SHORT {
        let (from, room) = window.split_at_mut(distance);
        room[..SHORT].copy_from_slice(&from[..SHORT]);
    } else {
        // The copy may run into itself: what is there already is repeated.
        let window = window.get_mut(..distance + length)?;
        let mut done = distance;
        while done < window.len() {
            let step = done.min(window.len() - done);
            window.copy_within(..step, done);
            done += step;
        }
    }
    *len = end;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(input: &[u8]) -> Vec<u8> {
        let mut buffer = vec![0; PAGE_SIZE * 2];
        let length = compress(input, &mut buffer, &mut [0; POSITIONS]).expect("there is room");
        buffer.truncate(length);
        let mut output = vec![0xee; input.len()];
        assert_eq!(decompress(&buffer, &mut output), Some(input.len()));
        assert_eq!(output, input);
        buffer
    }

    /// Repetitive input: every kind of instruction comes up.
    fn pages() -> impl Strategy<Value = Vec<u8>> {
        let piece = (0usize..4, 1usize..300, prop::collection::vec(any::<u8>(), 1..60));
        prop::collection::vec(piece, 0..40).prop_map(|pieces| {
            let mut page = Vec::new();
            for (kind, length, bytes) in pieces {
                match kind {
                    0 => page.extend(bytes),
                    1 => page.resize(page.len() + length * 8, 0),
                    2 => page.resize(page.len() + length, bytes[0]),
                    _ => {
                        let start = page.len().saturating_sub(length * 10);
                        let end = page.len().min(start + bytes.len());
                        page.extend_from_within(start..end);
                    }
                }
            }
            page.truncate(PAGE_SIZE);
            page
        })
    }

    proptest! {
        #[test]
        fn what_went_in_comes_out(page in pages()) {
            round_trip(&page);
        }

        #[test]
        fn another_decoder_agrees(page in pages()) {
            // Without runs of zeros the stream is plain LZO1X behind the version.
            let page: Vec<u8> = page.into_iter().map(|byte| byte.max(1)).collect();
            let stream = round_trip(&page);
            let mut output = vec![0; page.len()];
            prop_assert_eq!(lzokay::decompress::decompress(&stream[2..], &mut output), Ok(page.len()));
            prop_assert_eq!(output, page);
        }

        #[test]
        fn another_encoder_is_understood(page in pages()) {
            prop_assume!(!page.is_empty());
            let stream = lzokay::compress::compress(&page).unwrap();
            let mut output = vec![0; page.len()];
            prop_assert_eq!(decompress(&stream, &mut output), Some(page.len()));
            prop_assert_eq!(output, page);
        }

        #[test]
        fn damaged_input_is_survived(page in pages(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut stream = round_trip(&page);
            let at = at.index(stream.len());
            stream[at] = byte;
            decompress(&stream, &mut [0; PAGE_SIZE]);
            decompress(&stream[..at], &mut [0; PAGE_SIZE]);
        }
    }

    #[test]
    fn zeros_are_one_instruction_each_2051_bytes() {
        assert_eq!(round_trip(&[0; PAGE_SIZE]).len(), VERSION.len() + 2 + 2 * 4 + END.len());
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let mut input = b"abc".to_vec();
        input.extend([0; 20]);
        input.extend(b"de");
        assert_eq!(round_trip(&input), [17, 1, 20, b'a', b'b', b'c', 0x18, 0xfe, 0xff, 2, b'd', b'e', 17, 0, 0]);
    }
}

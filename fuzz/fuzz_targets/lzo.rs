//! lzo-rle: what is compressed comes out as it was, and no stream whatever does harm.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use uzswap_engine::PAGE_SIZE;
use uzswap_engine::fuzzing::{lzo_compress, lzo_decompress};

#[derive(Debug, Arbitrary)]
enum Input {
    /// A stream, and bytes that there are for what it holds.
    Stream { stream: Vec<u8>, room: u16 },
    /// A page made of these pieces, and bytes that there are for the stream.
    Page { pieces: Vec<Piece>, room: u16 },
}

/// `Copy` repeats what is there already, from a distance.
#[derive(Debug, Arbitrary)]
enum Piece {
    Literals(Vec<u8>),
    Zeros(u16),
    Run { byte: u8, length: u16 },
    Copy { distance: u16, length: u16 },
}

fuzz_target!(|input: Input| match input {
    Input::Stream { stream, room } => decompress(&stream, room as usize % (PAGE_SIZE + 1)),
    Input::Page { pieces, room } => round_trip(&page(&pieces), room as usize),
});

fn decompress(stream: &[u8], room: usize) {
    let mut output = [0xee; PAGE_SIZE + 64];
    let length = lzo_decompress(stream, &mut output[..room]);
    assert!(length.is_none_or(|length| length <= room));
    assert!(output[room..].iter().all(|byte| *byte == 0xee), "written outside");
    // A stream without a version is plain LZO, and there is another decoder for that.
    let mut other = [0xee; PAGE_SIZE];
    if !stream.starts_with(&[17, 1])
        && let Some(length) = length
        && let Ok(other_length) = lzokay::decompress::decompress(stream, &mut other[..room])
    {
        assert!(output[..length] == other[..other_length], "another decoder reads something else");
    }
}

fn page(pieces: &[Piece]) -> Vec<u8> {
    let mut page = Vec::new();
    for piece in pieces {
        match *piece {
            Piece::Literals(ref bytes) => page.extend_from_slice(bytes),
            Piece::Zeros(length) => page.resize(page.len() + length as usize % PAGE_SIZE, 0),
            Piece::Run { byte, length } => page.resize(page.len() + length as usize % PAGE_SIZE, byte),
            Piece::Copy { distance, length } if !page.is_empty() => {
                let start = page.len() - 1 - distance as usize % page.len();
                (start..start + length as usize % 512).for_each(|at| page.push(page[at]));
            }
            Piece::Copy { .. } => {}
        }
        if page.len() >= PAGE_SIZE {
            break;
        }
    }
    page.truncate(PAGE_SIZE);
    page
}

fn round_trip(page: &[u8], room: usize) {
    let mut buffer = [0; 2 * PAGE_SIZE];
    let length = lzo_compress(page, &mut buffer).expect("there is room");
    let mut output = vec![0xee; page.len()];
    assert_eq!(lzo_decompress(&buffer[..length], &mut output), Some(page.len()));
    assert!(output == page, "another page than was compressed");
    // It fits exactly, or not at all.
    let mut short = vec![0; room % (2 * PAGE_SIZE)];
    assert_eq!(lzo_compress(page, &mut short), (length <= short.len()).then_some(length));
    if let Some(too_short) = page.len().checked_sub(1) {
        assert_eq!(lzo_decompress(&buffer[..length], &mut output[..too_short]), None);
    }
}

//! Sizes and percentages as people write them: any text is a value in its bounds or an error that names the text.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../crates/uzswap/src/size.rs"]
mod size;

use size::{Amount, SIZE_MAX, parse_amount, parse_size};

fuzz_target!(|text: &str| {
    match parse_amount(text) {
        Ok(Amount::Bytes(bytes)) => {
            assert!((1..=SIZE_MAX).contains(&bytes));
            assert_eq!(parse_size(text), Ok(bytes));
            assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
        }
        Ok(Amount::OfRam(part)) => {
            assert!((1..=100_000).contains(&part));
            let amount = Amount::OfRam(part);
            assert_eq!((amount.bytes(0), amount.bytes(100_000)), (0, part as u64));
            assert!(amount.bytes(u64::MAX) >= amount.bytes(u64::MAX - 1));
        }
        Err(error) => assert!(error.contains(text)),
    }
});

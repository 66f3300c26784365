//! Sizes as people write them.
//!
//! `1048576`, `512K`, `256M`, `1.5G`, `2T`, also with the suffix spelt out (`256MiB`), and `25%`. Suffixes are powers
//! of 1024, as the kernel's control files read them; `MB` is refused because it means two things. Arithmetic is on
//! integers throughout: a size that was printed exactly reads back exactly.

use std::fmt;

/// No size may be above this: far more than any machine has, far less than where sums of sizes overflow.
pub const SIZE_MAX: u64 = 1 << 60;

const SUFFIXES: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// A size that may still depend on how much RAM there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Bytes(u64),
    /// So many hundred-thousandths of RAM: `25%` is 25 000.
    OfRam(u32),
}

impl Amount {
    /// In bytes, given the RAM that percents refer to.
    pub fn bytes(self, ram: u64) -> u64 {
        match self {
            Amount::Bytes(bytes) => bytes,
            Amount::OfRam(part) => (u128::from(ram) * u128::from(part) / 100_000) as u64,
        }
    }
}

/// Parses a size or a percentage of RAM; the error says what is wrong with `text`, without naming the flag.
pub fn parse_amount(text: &str) -> Result<Amount, String> {
    let Some(percent) = text.strip_suffix('%') else {
        return parse_size(text).map(Amount::Bytes);
    };
    refuse_negative(text)?;
    let thousandths = scaled(percent, 1000).ok_or_else(|| malformed(text))?;
    match thousandths {
        0 => Err(format!("'{text}' is zero")),
        1..=100_000 => Ok(Amount::OfRam(thousandths as u32)),
        _ => Err(format!("'{text}' is more than all of RAM; give at most 100%")),
    }
}

/// Parses a size in bytes, from 1 to [`SIZE_MAX`].
pub fn parse_size(text: &str) -> Result<u64, String> {
    refuse_negative(text)?;
    let (number, shift) = split_suffix(text)?;
    if shift == 0 && number.contains('.') {
        return Err(format!("'{text}' is not a whole number of bytes; give for example 512K, 256M or 1.5G"));
    }
    match scaled(number, 1 << shift).ok_or_else(|| malformed(text))? {
        0 => Err(format!("'{text}' is zero")),
        bytes if bytes <= u128::from(SIZE_MAX) => Ok(bytes as u64),
        _ => Err(format!("'{text}' is absurdly large; the most is {}", Human(SIZE_MAX))),
    }
}

fn refuse_negative(text: &str) -> Result<(), String> {
    if text.starts_with('-') { Err(format!("'{text}' is negative")) } else { Ok(()) }
}

fn malformed(text: &str) -> String {
    format!("'{text}' is not a size; give for example 512K, 256M, 1.5G or 25%")
}

/// Splits `1.5GiB` into `1.5` and 30.
fn split_suffix(text: &str) -> Result<(&str, u32), String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    if suffix.is_empty() {
        return Ok((number, 0));
    }
    for (letter, shift) in SUFFIXES {
        let Some(rest) = suffix.strip_prefix([letter, letter.to_ascii_lowercase()]) else { continue };
        return match rest {
            "" | "iB" => Ok((number, shift)),
            "B" => Err(format!("'{text}' could be powers of 1000 or of 1024; write {number}{letter} for 1024")),
            _ => Err(malformed(text)),
        };
    }
    Err(malformed(text))
}

/// `number` (digits, at most one point) times `unit`, rounded down; `None` if malformed or beyond 128 bits.
fn scaled(number: &str, unit: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let all_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !all_digits(whole) || !all_digits(fraction) || fraction.len() > 18 {
        return None;
    }
    // A whole part too long for its type is absurd, not malformed: saturate and let the caller's bound refuse it.
    let whole = whole.parse::<u64>().unwrap_or(u64::MAX);
    let part = fraction.parse::<u128>().ok()? * u128::from(unit) / 10u128.pow(fraction.len() as u32);
    Some(u128::from(whole) * u128::from(unit) + part)
}

/// Prints bytes for people: `256 MiB`, `1.5 GiB`, at most one decimal.
#[derive(Debug, Clone, Copy)]
pub struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(&(letter, shift)) = SUFFIXES.iter().rev().find(|&&(_, shift)| self.0 >= 1 << shift) else {
            return f.pad(&format!("{} B", self.0));
        };
        let tenths = (u128::from(self.0) * 10 + (1u128 << shift) / 2) >> shift;
        let text = match (tenths / 10, tenths % 10) {
            (whole, 0) => format!("{whole} {letter}iB"),
            (whole, tenth) => format!("{whole}.{tenth} {letter}iB"),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_documented_forms() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("512K", 512 << 10),
            ("512k", 512 << 10),
            ("256M", 256 << 20),
            ("256MiB", 256 << 20),
            ("1.5G", 3 << 29),
            ("0.5K", 512),
            ("2T", 2 << 40),
            ("1E", 1 << 60),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse_amount("25%").map(|amount| amount.bytes(1 << 30)), Ok(1 << 28));
        assert_eq!(parse_amount("0.5%").map(|amount| amount.bytes(1000)), Ok(5));
        assert_eq!(parse_amount("100%").map(|amount| amount.bytes(u64::MAX)), Ok(u64::MAX));
    }

    #[test]
    fn what_is_refused_and_why() {
        for (text, why) in [
            ("", "not a size"),
            ("M", "not a size"),
            ("1.M", "not a size"),
            (".5M", "not a size"),
            ("1..5M", "not a size"),
            ("1.5.5M", "not a size"),
            ("1 M", "not a size"),
            ("1X", "not a size"),
            ("0x10", "not a size"),
            ("1e9", "not a size"),
            ("١M", "not a size"),
            ("+1M", "not a size"),
            ("%", "not a size"),
            ("1.5", "whole number of bytes"),
            ("256MB", "powers of 1000"),
            ("0", "zero"),
            ("0.0001K", "zero"),
            ("0%", "zero"),
            ("-1M", "negative"),
            ("-5%", "negative"),
            ("101%", "at most 100%"),
            ("2E", "absurdly large"),
            ("99999999999999999999999999999999G", "absurdly large"),
        ] {
            let error = parse_amount(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn people_read_round_numbers() {
        for (bytes, text) in [(17, "17 B"), (1024, "1 KiB"), (256 << 20, "256 MiB"), (3 << 29, "1.5 GiB")] {
            assert_eq!(Human(bytes).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn plain_bytes_read_back(bytes in 1..=SIZE_MAX) {
            prop_assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
        }

        #[test]
        fn suffixes_multiply(count in 1u64..1024, index in 0usize..5) {
            let (letter, shift) = SUFFIXES[index];
            prop_assert_eq!(parse_size(&format!("{count}{letter}")), Ok(count << shift));
            prop_assert_eq!(parse_size(&format!("{count}.5{letter}")), Ok((count << shift) + (1 << (shift - 1))));
        }

        #[test]
        fn nothing_panics_and_accepted_sizes_are_in_range(text in "\\PC{0,12}|-?[0-9.]{1,30}[KMGTPEi%B]{0,3}") {
            if let Ok(amount) = parse_amount(&text) {
                let bytes = amount.bytes(SIZE_MAX);
                prop_assert!((1..=SIZE_MAX).contains(&bytes));
            }
        }

        #[test]
        fn a_larger_percent_is_never_less(low in 1u32..=100_000, more in 0u32..1000, ram in any::<u64>()) {
            let high = (low + more).min(100_000);
            prop_assert!(Amount::OfRam(low).bytes(ram) <= Amount::OfRam(high).bytes(ram));
            prop_assert!(Amount::OfRam(high).bytes(ram) <= ram);
        }

        #[test]
        fn what_people_read_is_near(bytes in 1..=SIZE_MAX) {
            let text = Human(bytes).to_string().replace(" B", "").replace(' ', "");
            let read = parse_size(&text).expect("own output is a size");
            prop_assert!(read.abs_diff(bytes) <= bytes / 19 , "{} {}", read, bytes);
        }
    }
}

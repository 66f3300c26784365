//! Values as the kernel's control files spell them, both ways.

use std::fmt::Write;

use super::error::Error;
use super::machine::Stall;

/// What the kernel keeps limits in.
const PAGE: u64 = uzswap_engine::PAGE_SIZE as u64;

/// A limit from here on is none.
const NO_LIMIT: u64 = i64::MAX as u64 / PAGE * PAGE;

/// Without the white space around it.
pub fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\u{b}')
}

/// A size and what follows it: `1048576`, `0x100000`, `1024K`, `1M`; suffixes are powers of 1024. The kernel takes a
/// value without digits for 0, and wraps round at 64 bits; to limit a group to nothing should take more than a slip, so both
/// are refused.
pub fn size(text: &str) -> Result<(u64, &str), Error> {
    let (number, rest) = unsigned(text)?;
    let shift = match rest.bytes().next().map(|suffix| suffix.to_ascii_uppercase()) {
        Some(b'K') => 10,
        Some(b'M') => 20,
        Some(b'G') => 30,
        Some(b'T') => 40,
        Some(b'P') => 50,
        Some(b'E') => 60,
        _ => return Ok((number, rest)),
    };
    Ok((number.checked_mul(1 << shift).ok_or(Error::Invalid)?, &rest[1..]))
}

/// A limit: a size in whole pages, or `max`.
pub fn limit(text: &str) -> Result<Option<u64>, Error> {
    let text = strip(text);
    if text == "max" {
        return Ok(None);
    }
    match size(text)? {
        (bytes, "") => Ok(Some(bytes / PAGE * PAGE).filter(|&bytes| bytes < NO_LIMIT)),
        _ => Err(Error::Invalid),
    }
}

/// What `memory.reclaim` takes: a size, and how ready to swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reclaim {
    /// In whole pages.
    pub bytes: u64,
    /// 0 to 200; 0 leaves anonymous memory alone.
    pub swappiness: Option<u8>,
    /// What is compressed is written back, and nothing else is taken.
    pub of_pool: bool,
}

/// `SIZE`, `SIZE swappiness=N`, where N is up to 200 or `max`, or `SIZE source=zswap`. A swappiness weighs files against programs'
/// memory, which the pool is neither of: so the two exclude each other.
pub fn reclaim(text: &str) -> Result<Reclaim, Error> {
    let (bytes, options) = size(strip(text))?;
    let (mut swappiness, mut of_pool) = (None, false);
    for option in options.split(' ').map(strip).filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("swappiness", "max")) => swappiness = Some(200),
            Some(("swappiness", number)) => swappiness = Some(up_to(number, 200)?),
            Some(("source", "zswap")) => of_pool = true,
            _ => return Err(Error::Invalid),
        }
    }
    if of_pool && swappiness.is_some() {
        return Err(Error::Invalid);
    }
    Ok(Reclaim { bytes: bytes / PAGE * PAGE, swappiness, of_pool })
}

/// 0 or 1, and nothing else; `otherwise` is the error for another number.
pub fn bit(text: &str, otherwise: Error) -> Result<bool, Error> {
    match integer(text)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(otherwise),
    }
}

/// A yes or no as module parameters take it: the first letter counts, or the first two of `on` and `off`.
pub fn yes_no(text: &str) -> Result<bool, Error> {
    let mut letters = strip(text).bytes().map(|letter| letter.to_ascii_lowercase());
    match (letters.next(), letters.next()) {
        (Some(b'y' | b't' | b'1'), _) | (Some(b'o'), Some(b'n')) => Ok(true),
        (Some(b'n' | b'f' | b'0'), _) | (Some(b'o'), Some(b'f')) => Ok(false),
        _ => Err(Error::Invalid),
    }
}

/// A whole number from 0 to `most`.
pub fn up_to(text: &str, most: u8) -> Result<u8, Error> {
    let number = u8::try_from(integer(text)?).map_err(|_| Error::Invalid)?;
    if number <= most { Ok(number) } else { Err(Error::Invalid) }
}

/// A process: a number that is not negative.
pub fn pid(text: &str) -> Result<i32, Error> {
    i32::try_from(integer(text)?).ok().filter(|&pid| pid >= 0).ok_or(Error::Invalid)
}

/// A whole number with nothing behind it.
fn integer(text: &str) -> Result<i64, Error> {
    let text = strip(text);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    match unsigned(digits)? {
        (number, "") => {
            let number = i64::try_from(number).map_err(|_| Error::Range)?;
            Ok(if negative { -number } else { number })
        }
        _ => Err(Error::Invalid),
    }
}

/// Digits, and what follows them: hexadecimal after `0x`, octal after `0`, else decimal.
fn unsigned(text: &str) -> Result<(u64, &str), Error> {
    let is_hex = |digits: &str| digits.bytes().next().is_some_and(|digit| digit.is_ascii_hexdigit());
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).filter(|digits| is_hex(digits));
    let (digits, radix) = match hex {
        Some(digits) => (digits, 16),
        None if text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    let end = digits.find(|digit: char| !digit.is_digit(radix)).unwrap_or(digits.len());
    let number = u64::from_str_radix(&digits[..end], radix).map_err(|_| Error::Invalid)?;
    Ok((number, &digits[end..]))
}

/// A line with a number.
pub fn line(number: impl std::fmt::Display) -> String {
    format!("{number}\n")
}

/// A limit.
pub fn limit_line(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "max\n".to_owned(), line)
}

/// 0 or 1.
pub fn bit_line(bit: bool) -> String {
    line(u8::from(bit))
}

/// Y or N, as module parameters are shown.
pub fn yes_no_line(yes: bool) -> String {
    line(if yes { 'Y' } else { 'N' })
}

/// A line for each key that has a value.
pub fn keyed<const N: usize>(values: [(&str, Option<u64>); N]) -> String {
    values.iter().filter_map(|(key, value)| value.map(|value| format!("{key} {value}\n"))).collect()
}

/// A line of a pressure file.
pub fn stall_line(kind: &str, stall: &Stall) -> String {
    let Stall { avg10, avg60, avg300, total } = stall;
    format!("{kind} avg10={avg10:.2} avg60={avg60:.2} avg300={avg300:.2} total={total}\n")
}

/// A line of `memory.numa_stat`.
pub fn nodes_line(key: &str, bytes: &[u64]) -> String {
    let mut text = key.to_owned();
    for (node, bytes) in bytes.iter().enumerate() {
        write!(text, " N{node}={bytes}").expect("writing to memory");
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_whole_pages() {
        for (text, bytes) in [
            ("max", None),
            (" max\n", None),
            ("0", Some(0)),
            ("4095", Some(0)),
            ("4097\n", Some(4096)),
            ("\t1M ", Some(1 << 20)),
            ("1k", Some(0)),
            ("8K", Some(8192)),
            ("1g", Some(1 << 30)),
            ("2T", Some(2 << 40)),
            ("0x10000", Some(65536)),
            ("010000", Some(4096)),
            ("1P", Some(1 << 50)),
            ("7E", Some(7 << 60)),
            ("8E", None),
            ("9223372036854775807", None),
            ("18446744073709551615", None),
        ] {
            assert_eq!(limit(text), Ok(bytes), "{text:?}");
        }
        for text in [
            "", " ", "\n", "K", "-1", "+1", "1.5M", "1MB", "1 M", "1M 2M", "maximum", "MAX", "08", "0x", "16E",
            "1\u{0}",
        ] {
            assert_eq!(limit(text), Err(Error::Invalid), "{text:?}");
        }
        assert_eq!(limit("18446744073709551616"), Err(Error::Invalid));
    }

    #[test]
    fn reclaim_takes_a_size_and_a_swappiness() {
        let wanted = |bytes, swappiness| Ok(Reclaim { bytes, swappiness, of_pool: false });
        assert_eq!(reclaim("1M\n"), wanted(1 << 20, None));
        assert_eq!(reclaim(" 1M swappiness=60 "), wanted(1 << 20, Some(60)));
        assert_eq!(reclaim("5000  swappiness=0"), wanted(4096, Some(0)));
        assert_eq!(reclaim("4K swappiness=max"), wanted(4096, Some(200)));
        assert_eq!(reclaim("1M source=zswap\n"), Ok(Reclaim { bytes: 1 << 20, swappiness: None, of_pool: true }));
        for text in [
            "",
            "max",
            "swappiness=1",
            "1M swappiness=201",
            "1M swappiness=-1",
            "1M swappiness",
            "1M x=1",
            "1M 2",
            "1M source=",
            "1M source=swap",
            "1M source",
            "source=zswap",
            "1M source=zswap swappiness=1",
        ] {
            assert_eq!(reclaim(text), Err(Error::Invalid), "{text:?}");
        }
    }

    #[test]
    fn switches_are_read_as_the_kernel_reads_them() {
        for text in ["Y", "y\n", "1", "yes", "true", "on", "oN"] {
            assert_eq!(yes_no(text), Ok(true), "{text}");
        }
        for text in ["N", "n", "0", "no", "False", "off"] {
            assert_eq!(yes_no(text), Ok(false), "{text}");
        }
        for text in ["", " ", "2", "o", "maybe", "-1"] {
            assert_eq!(yes_no(text), Err(Error::Invalid), "{text}");
        }
        assert_eq!((bit("1\n", Error::Range), bit(" 0", Error::Range)), (Ok(true), Ok(false)));
        assert_eq!((bit("2", Error::Range), bit("-1", Error::Invalid)), (Err(Error::Range), Err(Error::Invalid)));
        assert_eq!((bit("", Error::Range), bit("Y", Error::Range)), (Err(Error::Invalid), Err(Error::Invalid)));
    }

    #[test]
    fn numbers_keep_to_their_range() {
        assert_eq!((up_to("100\n", 100), up_to("0", 100)), (Ok(100), Ok(0)));
        for text in ["101", "256", "-1", "", "5%", "1.0"] {
            assert_eq!(up_to(text, 100), Err(Error::Invalid), "{text}");
        }
        assert_eq!((pid("0"), pid(" 17\n")), (Ok(0), Ok(17)));
        for text in ["-1", "2147483648", "1 2", "1\n2", "self"] {
            assert_eq!(pid(text), Err(Error::Invalid), "{text}");
        }
    }
}

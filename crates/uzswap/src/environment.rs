//! Warns of environment variables that begin like a setting of uzswap and are none: a misspelt one would be ignored in silence.

use std::ffi::OsString;

use uzswap_proto::ENV_JOB;
use uzswap_proto::control::ENV_SOCKET;

use uzswap_manager::SwapFaults;

use crate::flags::ALL;

const PREFIX: &str = "UZSWAP_";

/// Returns a warning for each of `names` that begins as uzswap's variables do and is not known, with the nearest known name.
pub fn misspelt(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut known: Vec<String> = ALL.iter().map(|flag| flag.variable()).collect();
    known.extend(["UZSWAP_CONFIG", ENV_JOB, ENV_SOCKET, SwapFaults::VARIABLE].map(str::to_owned));
    let unknown = names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with(PREFIX));
    unknown
        .filter(|name| !known.contains(name))
        .filter_map(|name| {
            let nearest = known.iter().min_by_key(|other| distance(&name, other))?;
            Some(format!("the environment variable {name} is none of uzswap's; did you mean {nearest}?"))
        })
        .collect()
}

/// Returns how many characters have to be inserted, removed or replaced to make one name of the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variables_are_named_with_the_nearest_right_one() {
        let names =
            ["PATH", "UZSWAP_MEMORY_MAX", "UZSWAP_MEMROY_MAX", "UZSWAP_JOB", "UZSWAP_CONFIG", "UZSWAP_COMPRESOR"];
        let said = misspelt(names.into_iter().map(OsString::from));
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("UZSWAP_MEMROY_MAX") && said[0].ends_with("UZSWAP_MEMORY_MAX?"), "{said:?}");
        assert!(said[1].ends_with("UZSWAP_COMPRESSOR?"), "{said:?}");
    }

    #[test]
    fn distances_count_single_changes() {
        assert_eq!((distance("abc", "abc"), distance("", "abc"), distance("kitten", "sitting")), (0, 3, 3));
    }
}

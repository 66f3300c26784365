//! Choices that have names: codecs, allocators and the like.

/// A name that none of the choices has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}: there are {choices}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    choices: String,
}

/// The one of `all` whose name is `name`. `what` says what they are, for the error.
pub fn named<T: Copy>(
    what: &'static str,
    all: &[T],
    name_of: fn(T) -> &'static str,
    name: &str,
) -> Result<T, UnknownName> {
    all.iter().copied().find(|&choice| name_of(choice) == name).ok_or_else(|| {
        let choices: Vec<&str> = all.iter().copied().map(name_of).collect();
        UnknownName { what, name: name.to_owned(), choices: choices.join(", ") }
    })
}

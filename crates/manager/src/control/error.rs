//! What can go wrong with a control file: the kernel's error numbers, and words.

use std::fmt;

/// Why nothing was read, written, listed, made or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Nothing has this name.
    NotFound,
    /// Something has this name already.
    Exists,
    /// A directory is neither read nor written.
    IsDirectory,
    /// A file holds no names.
    NotDirectory,
    /// More than 255 bytes in a name, or 4096 in a path.
    NameTooLong,
    /// The value is not one that the file takes.
    Invalid,
    /// A number that is neither of the two that the file takes.
    Range,
    /// The limit is below the least that can work. The kernel has the same number for it as for a bad value.
    TooSmall,
    /// The value is longer than a page.
    TooLong,
    /// The file is not for reading, or not for writing.
    Access,
    /// The group has processes or children.
    Busy,
    /// Not all of what was to be reclaimed has been.
    Again,
    /// No such process in the job.
    NoProcess,
    /// The group was removed meanwhile.
    Gone,
    /// The text does not fit into an answer.
    TooLarge,
    /// No user, or not this one, may do that; why.
    NotPermitted(&'static str),
    /// This manager cannot do that; why.
    NotSupported(&'static str),
    /// None of the choices has this name; which there are. The kernel has the same number for it as for a file.
    NoChoice(String),
}

impl Error {
    /// The error number.
    pub fn number(&self) -> i32 {
        match self {
            Error::NotFound | Error::NoChoice(_) => libc::ENOENT,
            Error::Exists => libc::EEXIST,
            Error::IsDirectory => libc::EISDIR,
            Error::NotDirectory => libc::ENOTDIR,
            Error::NameTooLong => libc::ENAMETOOLONG,
            Error::Invalid | Error::TooSmall => libc::EINVAL,
            Error::Range => libc::ERANGE,
            Error::TooLong => libc::E2BIG,
            Error::Access => libc::EACCES,
            Error::Busy => libc::EBUSY,
            Error::Again => libc::EAGAIN,
            Error::NoProcess => libc::ESRCH,
            Error::Gone => libc::ENODEV,
            Error::TooLarge => libc::EFBIG,
            Error::NotPermitted(_) => libc::EPERM,
            Error::NotSupported(_) => libc::EOPNOTSUPP,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Error::NotFound => "No such file or directory",
            Error::Exists => "File exists",
            Error::IsDirectory => "Is a directory",
            Error::NotDirectory => "Not a directory",
            Error::NameTooLong => "File name too long",
            Error::Invalid => "Invalid argument",
            Error::TooSmall => "Invalid argument: the least is 4M, as for uzswap run",
            Error::Range => "Numerical result out of range",
            Error::TooLong => "Argument list too long",
            Error::Access => "Permission denied",
            Error::Busy => "Device or resource busy",
            Error::Again => "Resource temporarily unavailable",
            Error::NoProcess => "No such process",
            Error::Gone => "No such device",
            Error::TooLarge => "File too large",
            Error::NotPermitted(why) => return write!(f, "Operation not permitted: {why}"),
            Error::NotSupported(why) => return write!(f, "Operation not supported: {why}"),
            Error::NoChoice(choices) => return write!(f, "No such choice: there are {choices}"),
        })
    }
}

impl std::error::Error for Error {}

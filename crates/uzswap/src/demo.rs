//! demo
use crate::Failure;
use clap::ArgMatches;
/// demo
pub fn demo(_matches: &ArgMatches) -> Result<i32, Failure> {
    Ok(0)
}

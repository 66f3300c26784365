//! Builds the agent, which travels inside the binary.
//!
//! A library for preloading is not something cargo can make a dependency of a binary, so cargo is called once more, in a
//! target directory of its own (the one in use is locked).

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // Asked for now and not when this script was compiled: a target directory may be shared by copies of the project.
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let workspace = here.join("../..");
    for source in ["crates/agent", "crates/proto", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", workspace.join(source).display());
    }
    let target = out.join("agent");
    let status = Command::new(env::var_os("CARGO").expect("cargo sets it"))
        .current_dir(&workspace)
        .args(["rustc", "--release", "--package", "uzswap-agent", "--lib", "--locked"])
        .args(["--config", "profile.release.strip=true", "--config", "profile.release.opt-level='s'"])
        .arg("--target-dir")
        .arg(&target)
        // Without the C compiler's own start files, which refer to functions of the libc, and with every symbol bound here.
        .args(["--", "-Clink-arg=-nostartfiles", "-Clink-arg=-Wl,-Bsymbolic,-z,now"])
        // What the outer build was told about its own compiler runs is not for this one.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the agent cannot be built");
    std::fs::copy(target.join("release/libuzswap_agent.so"), out.join("libuzswap_agent.so"))
        .expect("the agent is there");
}

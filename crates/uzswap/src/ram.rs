//! How much RAM there is for us: the smaller of the machine's memory and the enclosing cgroups' limits.
//!
//! 1. `/proc/meminfo` gives the machine's memory (in a container often the host's).
//! 2. `/proc/self/cgroup` names our cgroups, `/proc/self/mountinfo` says where and from which root their file systems are
//!    mounted; both versions may be there at once.
//! 3. From our cgroup up to the mount point, the smallest of `memory.max` (v2) or `memory.limit_in_bytes` (v1) counts.
//!    Version 1 spells "no limit" as a huge number; whatever is not below the machine's memory is no limit.
//!
//! Everything is read under a root directory, so that tests can show it any machine.

use std::fs;
use std::path::{Path, PathBuf};

/// What percent-of-RAM settings refer to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ram {
    /// The machine's memory in bytes.
    pub machine: u64,
    /// The tightest cgroup limit below that, if any.
    pub limit: Option<Limit>,
}

/// A cgroup limit and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// In bytes.
    pub bytes: u64,
    /// The control file that says so.
    pub file: PathBuf,
}

impl Ram {
    /// Reads this machine's files, or those of a copy of them under `root`.
    pub fn detect(root: &Path) -> Result<Ram, String> {
        let meminfo = root.join("proc/meminfo");
        let text =
            fs::read_to_string(&meminfo).map_err(|error| format!("cannot read {}: {error}", meminfo.display()))?;
        let machine =
            mem_total(&text).ok_or_else(|| format!("{} has no MemTotal; is /proc mounted?", meminfo.display()))?;
        let limit = cgroup_directories(root)
            .into_iter()
            .filter_map(|file| Some(Limit { bytes: fs::read_to_string(&file).ok()?.trim().parse().ok()?, file }))
            .filter(|limit| limit.bytes < machine)
            .min_by_key(|limit| limit.bytes);
        Ok(Ram { machine, limit })
    }

    /// The smaller of machine and limit, in bytes.
    pub fn bytes(&self) -> u64 {
        self.limit.as_ref().map_or(self.machine, |limit| limit.bytes)
    }
}

fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Every limit file from our cgroups up to their mount points.
fn cgroup_directories(root: &Path) -> Vec<PathBuf> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let mounts: Vec<Mount> = read("proc/self/mountinfo").lines().filter_map(Mount::parse).collect();
    let mut files = Vec::new();
    for line in read("proc/self/cgroup").lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let version = match controllers {
            "" => Version::Two,
            _ if controllers.split(',').any(|name| name == "memory") => Version::One,
            _ => continue,
        };
        for mount in mounts.iter().filter(|mount| mount.version == version) {
            files.extend(mount.limit_files(root, Path::new(path)));
        }
    }
    files
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A mounted cgroup file system that can hold memory limits.
struct Mount {
    version: Version,
    /// The cgroup that appears at the mount point: `/`, or the container's own.
    top: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// Parses one line of mountinfo: `id parent major:minor top point options … - type source super-options`.
    fn parse(line: &str) -> Option<Mount> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (top, point) = (unescape(place.next()?), unescape(place.next()?));
        let mut kind = kind.split(' ');
        let version = match kind.next()? {
            "cgroup2" => Version::Two,
            "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => Version::One,
            _ => return None,
        };
        Some(Mount { version, top, point })
    }

    fn limit_files(&self, root: &Path, cgroup: &Path) -> Vec<PathBuf> {
        let name = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        // A path outside `top` (`/../other`, or a host's path with a container's mount) leaves the mount point itself.
        let inside = cgroup.strip_prefix(&self.top).unwrap_or(Path::new(""));
        let inside = if inside.components().any(|part| part.as_os_str() == "..") { Path::new("") } else { inside };
        let point = root.join(self.point.strip_prefix("/").unwrap_or(&self.point));
        inside.ancestors().map(|ancestor| point.join(ancestor).join(name)).collect()
    }
}

/// Undoes mountinfo's octal escapes for blank, tab, newline and backslash.
fn unescape(field: &str) -> PathBuf {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\").into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory that looks like a machine's root, removed at the end.
    struct Machine(PathBuf);

    impl Machine {
        fn new(cgroup: &str, mountinfo: &str, files: &[(&str, &str)]) -> Machine {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name = format!("uzswap-ram-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let machine = Machine(std::env::temp_dir().join(name));
            machine.write("proc/meminfo", "MemTotal:        8388608 kB\nMemFree: 1 kB\n");
            machine.write("proc/self/cgroup", cgroup);
            machine.write("proc/self/mountinfo", mountinfo);
            files.iter().for_each(|(path, text)| machine.write(path, text));
            machine
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("has a parent")).expect("create directory");
            fs::write(path, text).expect("write file");
        }

        fn ram(&self) -> Ram {
            Ram::detect(&self.0).expect("detect")
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n";

    #[test]
    fn without_cgroups_the_machine_counts() {
        let machine = Machine::new("", "", &[]);
        assert_eq!(machine.ram(), Ram { machine: 8 << 30, limit: None });
        assert_eq!(machine.ram().bytes(), 8 << 30);
    }

    #[test]
    fn version_two_takes_the_tightest_ancestor() {
        let machine = Machine::new(
            "0::/pods/pod1/main\n",
            V2,
            &[
                ("sys/fs/cgroup/pods/memory.max", "4294967296\n"),
                ("sys/fs/cgroup/pods/pod1/memory.max", "1073741824\n"),
                ("sys/fs/cgroup/pods/pod1/main/memory.max", "max\n"),
            ],
        );
        let limit = machine.ram().limit.expect("a limit");
        assert_eq!(limit.bytes, 1 << 30);
        assert!(limit.file.ends_with("pods/pod1/memory.max"));
    }

    #[test]
    fn a_cgroup_namespace_shows_the_limit_at_the_mount_point() {
        let machine = Machine::new("0::/\n", V2, &[("sys/fs/cgroup/memory.max", "536870912\n")]);
        assert_eq!(machine.ram().bytes(), 512 << 20);
    }

    #[test]
    fn version_one_in_a_container_with_the_hosts_path() {
        let mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let files = [("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n")];
        assert_eq!(Machine::new("4:memory:/docker/abc\n", mount, &files).ram().bytes(), 256 << 20);
        assert_eq!(Machine::new("4:memory:/somewhere/else\n", mount, &files).ram().bytes(), 256 << 20);
        assert_eq!(Machine::new("4:memory:/docker/abc/../../x\n", mount, &files).ram().bytes(), 256 << 20);
    }

    #[test]
    fn version_one_unlimited_is_no_limit() {
        let files = [("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n")];
        assert_eq!(Machine::new("4:cpu,memory:/a\n", V1, &files).ram().limit, None);
    }

    #[test]
    fn both_versions_at_once() {
        let both = format!("{V1}{V2}");
        let files = [
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/cpu/a/memory.limit_in_bytes", "1\n"),
            ("sys/fs/cgroup/b/memory.max", "3221225472\n"),
        ];
        assert_eq!(Machine::new("4:memory:/a\n2:cpu,cpuacct:/a\n0::/b\n", &both, &files).ram().bytes(), 2 << 30);
    }

    #[test]
    fn nonsense_is_no_limit_and_no_panic() {
        let files = [("sys/fs/cgroup/a/memory.max", "many\n")];
        assert_eq!(Machine::new("0::/a\nx\n:::\n", &format!("garbage - \n - x\n{V2}"), &files).ram().limit, None);
        let machine = Machine::new("", "", &[]);
        machine.write("proc/meminfo", "MemFree: 1 kB\n");
        assert!(Ram::detect(&machine.0).is_err_and(|error| error.contains("MemTotal")));
    }
}

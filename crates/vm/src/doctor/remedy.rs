//! What to do about what is missing, for each surrounding: data, no system calls but looking around.
//!
//! Remedies are commands or snippets that can be used as they stand. They grant the least that suffices.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where a process runs, as far as it decides who can grant something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A Docker container.
    Docker,
    /// A podman container.
    Podman,
    /// A Kubernetes pod.
    Kubernetes,
    /// A systemd service.
    Systemd,
    /// A login on a host.
    Plain,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Docker => "docker",
            Place::Podman => "podman",
            Place::Kubernetes => "kubernetes",
            Place::Systemd => "systemd",
            Place::Plain => "host",
        })
    }
}

/// What to do in one surrounding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// Where it applies.
    pub place: Place,
    /// A sentence, a command or a snippet; may have several lines.
    pub text: String,
}

/// The surroundings of this process, most specific first; never empty.
pub fn surroundings() -> Vec<Place> {
    let set = |name| std::env::var_os(name).is_some();
    let there = |path: &str| Path::new(path).exists();
    let found = [
        (Place::Kubernetes, set("KUBERNETES_SERVICE_HOST") || there("/var/run/secrets/kubernetes.io")),
        (Place::Podman, there("/run/.containerenv")),
        (Place::Docker, there("/.dockerenv")),
        (Place::Systemd, set("INVOCATION_ID")),
    ];
    let mut places: Vec<_> = found.into_iter().filter(|&(_, found)| found).map(|(place, _)| place).collect();
    if places.is_empty() {
        places.push(Place::Plain);
    }
    places
}

/// What was found to be missing.
pub(super) enum Missing {
    /// What an earlier check has already named.
    AnotherCheck,
    /// A newer or fuller kernel.
    Kernel,
    /// The right to a userfaultfd that serves faults of the kernel too.
    FullMode,
    /// The same, where a seccomp filter stands in the way as well.
    FilteredFullMode,
    /// CAP_SYS_PTRACE.
    Ptrace,
    /// CAP_SYS_PTRACE outside every user namespace.
    HostPtrace,
    /// A system call that a seccomp filter refuses.
    Filter(&'static str),
    /// Room to lock memory.
    LockedMemory,
    /// Pressure stall information.
    Pressure,
    /// io_uring, by a setting of the host.
    IoUring,
    /// A directory for temporary files that libraries can be loaded from.
    ExecutableTemp(PathBuf),
    /// A place for the swap file.
    SwapSpace(PathBuf),
}

const PTRACE_CONTAINER: &str = "--cap-add SYS_PTRACE";
const PTRACE_POD: &str = "securityContext:\n  capabilities:\n    add: [\"SYS_PTRACE\"]";
const PTRACE_UNIT: &str = "[Service]\nAmbientCapabilities=CAP_SYS_PTRACE";
const PTRACE_HOST: &str = "run as root, or hand the capability to the job:\n\
     sudo setpriv --reuid $(id -u) --regid $(id -g) --init-groups \\\n  \
     --inh-caps +sys_ptrace --ambient-caps +sys_ptrace uzswap run ...";
/// Ways to userfaultfd alone, for machines that hand out CAP_SYS_PTRACE to the manager only.
const DEVICE_HOST: &str = "userfaultfd can also be granted by itself, fork events still need the capability:\n\
     sudo setfacl -m u:$USER:rw /dev/userfaultfd   (for good: a udev rule\n  \
     KERNEL==\"userfaultfd\", GROUP=\"users\", MODE=\"0660\")\n\
     or: sudo sysctl vm.unprivileged_userfaultfd=1";

impl Missing {
    /// What to do, for every surrounding.
    pub(super) fn remedies(&self) -> Vec<Remedy> {
        let [docker, podman, kubernetes, systemd, host] = match self {
            Missing::AnotherCheck => return Vec::new(),
            Missing::Kernel => everywhere(
                "boot a kernel of version 6.8 or later with CONFIG_USERFAULTFD=y and CONFIG_PROC_PAGE_MONITOR=y \
                 (containers use the host's)",
            ),
            Missing::FullMode => [
                format!("docker run {PTRACE_CONTAINER} --device /dev/userfaultfd ..."),
                format!(
                    "sudo podman run {PTRACE_CONTAINER} --device /dev/userfaultfd ...   (rootless podman cannot grant it)"
                ),
                PTRACE_POD.into(),
                PTRACE_UNIT.into(),
                format!("{PTRACE_HOST}\n{DEVICE_HOST}"),
            ],
            Missing::FilteredFullMode => [
                format!(
                    "docker run {PTRACE_CONTAINER} --security-opt seccomp=unconfined ...   or a profile that allows userfaultfd"
                ),
                format!(
                    "podman run {PTRACE_CONTAINER} --security-opt seccomp=unconfined ...   or a profile that allows userfaultfd"
                ),
                format!("{PTRACE_POD}\n  seccompProfile:\n    type: Unconfined"),
                format!("{PTRACE_UNIT}\nSystemCallFilter=userfaultfd"),
                format!("start it outside the sandbox that set the filter, and {PTRACE_HOST}"),
            ],
            Missing::Ptrace => [
                format!("docker run {PTRACE_CONTAINER} ..."),
                format!("podman run {PTRACE_CONTAINER} ...   (as root)"),
                PTRACE_POD.into(),
                PTRACE_UNIT.into(),
                PTRACE_HOST.into(),
            ],
            Missing::HostPtrace => [
                format!("docker run --userns=host {PTRACE_CONTAINER} ...   (not with rootless Docker)"),
                format!("sudo podman run {PTRACE_CONTAINER} ...   (rootless podman cannot grant it)"),
                format!("hostUsers: true\n{PTRACE_POD}"),
                format!("{PTRACE_UNIT}\nPrivateUsers=no"),
                "run it outside the user namespace".into(),
            ],
            Missing::Filter(call) => [
                format!("docker run --security-opt seccomp=unconfined ...   or a profile that allows {call}"),
                format!("podman run --security-opt seccomp=unconfined ...   or a profile that allows {call}"),
                "securityContext:\n  seccompProfile:\n    type: Unconfined".into(),
                format!("[Service]\nSystemCallFilter={call}"),
                format!("start it outside the sandbox that set the filter, or let it allow {call}"),
            ],
            Missing::LockedMemory => [
                "docker run --ulimit memlock=-1 ...".into(),
                "podman run --ulimit memlock=-1 ...".into(),
                "securityContext:\n  capabilities:\n    add: [\"IPC_LOCK\"]".into(),
                "[Service]\nLimitMEMLOCK=infinity".into(),
                "ulimit -l unlimited, or in /etc/security/limits.conf:   * - memlock unlimited".into(),
            ],
            Missing::Pressure => everywhere("boot the host's kernel with psi=1 (and CONFIG_PSI=y)"),
            Missing::IoUring => {
                everywhere("on the host: sudo sysctl kernel.io_uring_disabled=0 (and CONFIG_IO_URING=y)")
            }
            Missing::ExecutableTemp(directory) => {
                let shown = directory.display();
                [
                    format!(
                        "docker run --tmpfs {shown}:exec ...   or   -e TMPDIR=DIR with a writable directory without noexec"
                    ),
                    format!(
                        "podman run --tmpfs {shown}:exec ...   or   -e TMPDIR=DIR with a writable directory without noexec"
                    ),
                    "mount an emptyDir volume and set TMPDIR to its path".into(),
                    "[Service]\nEnvironment=TMPDIR=/run/uzswap\nRuntimeDirectory=uzswap".into(),
                    "set TMPDIR to a writable directory that is not mounted noexec".into(),
                ]
            }
            Missing::SwapSpace(directory) => {
                let shown = directory.display();
                [
                    format!("docker run -v /some/disk:{shown} ...   or   uzswap run --swap-file FILE, or --no-swap"),
                    format!("podman run -v /some/disk:{shown} ...   or   uzswap run --swap-file FILE, or --no-swap"),
                    format!(
                        "mount an emptyDir volume (without medium: Memory) at {shown}, or use --swap-file FILE or --no-swap"
                    ),
                    "uzswap run --swap-file FILE on a disk with room, or --no-swap".into(),
                    "uzswap run --swap-file FILE on a disk with room, or --no-swap".into(),
                ]
            }
        };
        vec![
            Remedy { place: Place::Docker, text: docker },
            Remedy { place: Place::Podman, text: podman },
            Remedy { place: Place::Kubernetes, text: kubernetes },
            Remedy { place: Place::Systemd, text: systemd },
            Remedy { place: Place::Plain, text: host },
        ]
    }
}

fn everywhere(text: &str) -> [String; 5] {
    [(); 5].map(|()| text.to_owned())
}

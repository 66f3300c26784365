//! The control tree as files for the job alone (`uzswap run --control-fs`).
//!
//! 1. What serves the files is `uzswap mount`, a client of the control socket like any other. It is no process of the job: it
//!    is not managed, and has neither the agent nor the job's secret.
//! 2. The front takes the job into a mount namespace of its own, mounts the tree there, and starts the program in it. The
//!    server stays outside, so the mount is gone with the last process of the job, however that ends.
//! 3. The server ends when the mount is gone, or the front, whichever is first.
//! 4. The front has left its name space, the manager has not: what it reads of the host is the host's.

use std::ffi::CString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::process::{getegid, geteuid};
use uzswap_vm::log::log;
use uzswap_vm::sys::job;

use crate::RunError;

/// The type of the file system, as the kernel shows it.
pub const FS_TYPE: &str = "fuse.uzswap";

/// Where the kernel has the same files: directories of the tree, and whether their absence is worth a word. The first holds the
/// whole tree until the others have their part.
const PLACES: [(&str, &str, bool); 3] = [
    ("cgroup", "/sys/fs/cgroup", true),
    ("parameters", "/sys/module/zswap/parameters", true),
    ("debug", "/sys/kernel/debug/zswap", false),
];

/// Opens the device by which file systems are served.
pub fn open_device() -> Result<File, String> {
    const PATH: &str = "/dev/fuse";
    File::options().read(true).write(true).open(PATH).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => "run as root",
            _ => "load the module: modprobe fuse; or start the container with --device /dev/fuse",
        };
        format!("{PATH}: {}; {remedy}", words(&error))
    })
}

/// Mounts what the holder of `device` serves at the directory `point`. All users see it, as far as its modes allow.
pub fn attach(device: &File, point: &Path) -> Result<(), String> {
    let (fd, user, group) = (device.as_raw_fd(), geteuid().as_raw(), getegid().as_raw());
    let options = format!("fd={fd},rootmode=40755,user_id={user},group_id={group},default_permissions,allow_other");
    let options = CString::new(options).expect("no zero bytes");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("uzswap", point, FS_TYPE, flags, options.as_c_str())
        .map_err(|error| format!("{}: cannot be mounted: {}", point.display(), not_allowed(error)))
}

/// Why, and what to do if it is a matter of rights.
fn not_allowed(error: Errno) -> String {
    let why = words(&error.into());
    match error {
        Errno::PERM | Errno::ACCESS => {
            format!("{why}; it takes CAP_SYS_ADMIN: run as root, or start the container with --cap-add SYS_ADMIN")
        }
        _ => why,
    }
}

/// What the system said, without its number.
fn words(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

/// The server of a job's files, which waits for them to be mounted.
pub struct ControlFs {
    device: File,
    /// The server's process.
    pub server: i32,
}

impl ControlFs {
    /// Starts the server, a client of the manager that will listen at `socket`. To be called before the manager is cloned, which
    /// is to know it.
    pub fn start(socket: &Path) -> Result<ControlFs, RunError> {
        let (_, place, _) = PLACES[0];
        if !Path::new(place).is_dir() {
            return Err(refused(format!("{place}: no such directory; create it, or do without")));
        }
        let device = open_device().map_err(refused)?;
        let input = device.try_clone().map_err(|error| refused(format!("/dev/fuse: {error}")))?;
        // The program that this process runs.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("uzswap")
            .arg("mount")
            .arg("--socket")
            .arg(socket)
            .arg("/dev/fd/0")
            .stdin(input)
            .stdout(Stdio::null());
        // In a job of a job, the outer one's agent would make a process of it that this job waits for.
        command.env_remove("LD_PRELOAD");
        let server = command.spawn().map_err(|error| refused(format!("its server cannot be started: {error}")))?;
        Ok(ControlFs { device, server: server.id() as i32 })
    }

    /// Takes this process into a mount namespace of its own, with the files in it. The manager must answer by now.
    pub fn enter(self) -> Result<(), RunError> {
        let (tree, top, _) = PLACES[0];
        let failed = |what: &str, error: Errno| refused(format!("{what}: {}", not_allowed(error)));
        job::leave_mount_namespace().map_err(|error| {
            failed("a mount namespace", Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EPERM)))
        })?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .map_err(|error| failed("private mounts", error))?;
        attach(&self.device, Path::new(top)).map_err(refused)?;
        // From here on the server alone holds it: when it is dead nobody waits for it.
        drop(self.device);
        for (from, place, is_missed) in &PLACES[1..] {
            if Path::new(place).is_dir() {
                mount_bind(format!("{top}/{from}"), *place).map_err(|error| failed(place, error))?;
            } else if *is_missed {
                log(&format!(
                    "uzswap: warning: {place}: no such directory: the job finds none of its parameters there"
                ));
            }
        }
        // Over the whole tree, which is then out of sight.
        mount_bind(format!("{top}/{tree}"), top).map_err(|error| failed(top, error))
    }
}

fn refused(why: String) -> RunError {
    RunError { message: format!("--control-fs: {why}"), exit_status: 1 }
}

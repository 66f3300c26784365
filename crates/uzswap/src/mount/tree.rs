//! The control tree as a file system: what the kernel asks, turned into requests to the manager and back.
//!
//! 1. Nothing is remembered between two requests but names: whatever is shown was asked for, and errors are the manager's own.
//! 2. An open file shows the text that it had when it was read from its beginning, whatever the pieces it is read in.
//! 3. A write is one value, whole. What may take long has a thread, so that it keeps no other request waiting.
//! 4. Who may do what is decided by the kernel, from owner and mode: this process itself may do everything.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use uzswap_proto::control::{DIRECTORY, PATH_MAX, Verb};

use super::lines::{Lines, Pace};
use super::names::{Names, TOP, UNNUMBERED};
use crate::client::is_writer;

/// How long the kernel may believe what it was told: names and modes change behind its back.
const BELIEVED: Duration = Duration::ZERO;

/// The longest write that is handed over in one piece. Longer than any value, so that one that is too long is seen to be.
const WRITE_MAX: u32 = 16 << 10;

/// Who owns the files.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// The manager's user.
    pub uid: u32,
    /// And group.
    pub gid: u32,
}

/// The control tree of one manager.
#[derive(Debug)]
pub struct ControlFs {
    lines: Arc<Lines>,
    owner: Owner,
    began: SystemTime,
    names: Names,
    open: Mutex<HashMap<u64, Arc<str>>>,
    next_handle: AtomicU64,
}

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Directory,
    File { readable: bool, writable: bool },
}

impl ControlFs {
    /// The tree of the manager at the other end of `lines`.
    pub fn new(lines: Arc<Lines>, owner: Owner) -> ControlFs {
        let began = SystemTime::now();
        ControlFs { lines, owner, began, names: Names::new(), open: Mutex::default(), next_handle: AtomicU64::new(1) }
    }

    fn path(&self, number: INodeNo) -> Result<String, i32> {
        self.names.path(number.0).ok_or(libc::ENODEV)
    }

    /// The path of a name in a directory.
    fn path_in(&self, parent: INodeNo, name: &OsStr) -> Result<String, i32> {
        // All names are text.
        let name = name.to_str().ok_or(libc::ENOENT)?;
        let parent = self.names.path(parent.0).ok_or(libc::ENOENT)?;
        let path = if parent.is_empty() { name.to_owned() } else { format!("{parent}/{name}") };
        if path.len() > PATH_MAX { Err(libc::ENAMETOOLONG) } else { Ok(path) }
    }

    fn look(&self, path: &str) -> Result<Kind, i32> {
        // The top is there as long as we are; to see that it is should not take a manager.
        if path.is_empty() {
            return Ok(Kind::Directory);
        }
        let answer = self.lines.ask(Verb::Look, path, b"", Pace::Short)?;
        match answer.as_str() {
            DIRECTORY => Ok(Kind::Directory),
            rights => Ok(Kind::File { readable: rights.contains('r'), writable: rights.contains('w') }),
        }
    }

    fn attributes(&self, number: u64, kind: Kind) -> FileAttr {
        let (kind, perm, nlink) = match kind {
            Kind::Directory => (FileType::Directory, 0o755, 2),
            Kind::File { readable, writable } => {
                let perm = if readable { 0o444 } else { 0 } | if writable { 0o200 } else { 0 };
                (FileType::RegularFile, perm, 1)
            }
        };
        FileAttr {
            ino: INodeNo(number),
            size: 0,
            blocks: 0,
            atime: self.began,
            mtime: self.began,
            ctime: self.began,
            crtime: self.began,
            kind,
            perm,
            nlink,
            uid: self.owner.uid,
            gid: self.owner.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn attributes_of(&self, number: INodeNo) -> Result<FileAttr, i32> {
        let kind = match self.names.is_removed_group(number.0) {
            true => Kind::Directory,
            false => self.look(&self.path(number)?)?,
        };
        Ok(self.attributes(number.0, kind))
    }

    /// Looks a name up for the kernel, which thereby has its number once more.
    fn entry(&self, path: &str) -> Result<FileAttr, i32> {
        let kind = self.look(path)?;
        Ok(self.attributes(self.names.look_up(path), kind))
    }

    /// Opens a file. Nobody may read what cannot be read, nor write what cannot be written: not even root, whom modes do not
    /// stop.
    fn open_file(&self, number: INodeNo, flags: OpenFlags) -> Result<FileHandle, i32> {
        let Kind::File { readable, writable } = self.look(&self.path(number)?)? else { return Err(libc::EISDIR) };
        let mode = flags.acc_mode();
        if mode != OpenAccMode::O_WRONLY && !readable || mode != OpenAccMode::O_RDONLY && !writable {
            return Err(libc::EACCES);
        }
        Ok(FileHandle(self.next_handle.fetch_add(1, Relaxed)))
    }

    /// The text of what is open: asked for if it is read from the beginning, else as it was then.
    fn text(&self, number: INodeNo, handle: FileHandle, offset: u64, verb: Verb) -> Result<Arc<str>, i32> {
        let known = self.open().get(&handle.0).filter(|_| offset > 0).cloned();
        if let Some(text) = known {
            return Ok(text);
        }
        let text: Arc<str> = self.lines.ask(verb, &self.path(number)?, b"", Pace::Short)?.into();
        self.open().insert(handle.0, text.clone());
        Ok(text)
    }

    fn list(&self, number: INodeNo, handle: FileHandle, offset: u64, reply: &mut ReplyDirectory) -> Result<(), i32> {
        let names = self.text(number, handle, offset, Verb::List)?;
        let path = self.path(number)?;
        let dots = [".", ".."].map(|name| (name, FileType::Directory, number.0));
        let entries = names.lines().map(|line| {
            let (name, kind) = match line.strip_suffix('/') {
                Some(name) => (name, FileType::Directory),
                None => (line, FileType::RegularFile),
            };
            let path = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
            (name, kind, self.names.number(&path).unwrap_or(UNNUMBERED))
        });
        for (index, (name, kind, number)) in dots.into_iter().chain(entries).enumerate().skip(offset as usize) {
            if reply.add(INodeNo(number), index as u64 + 1, kind, name) {
                break;
            }
        }
        Ok(())
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, Arc<str>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long what is written to a file may take. A kill is not waited for: the killed may be the one who writes, and can
/// only go when the write is done.
fn pace_of(path: &str) -> Pace {
    match path.rsplit('/').next() {
        Some("memory.reclaim") => Pace::Long,
        Some("cgroup.kill") => Pace::Unwaited,
        _ => Pace::Short,
    }
}

/// The process of a thread: the kernel names the thread that asks.
fn process_of(thread: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    process.unwrap_or(thread)
}

fn errno(number: i32) -> Errno {
    Errno::from_i32(number)
}

impl Filesystem for ControlFs {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Neither is worth failing for.
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        let _ = config.set_max_write(WRITE_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.path_in(parent, name).and_then(|path| self.entry(&path)) {
            Ok(attributes) => reply.entry(&BELIEVED, &attributes, Generation(0)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn forget(&self, _: &Request, number: INodeNo, times: u64) {
        self.names.forget(number.0, times);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes_of(number) {
            Ok(attributes) => reply.attr(&BELIEVED, &attributes),
            Err(error) => reply.error(errno(error)),
        }
    }

    /// A file can be truncated, as `>` in a shell does, and touched; nothing comes of either.
    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if mode.is_some() || uid.is_some() || gid.is_some() {
            return reply.error(Errno::EPERM);
        }
        match self.attributes_of(number) {
            Ok(attributes) => reply.attr(&BELIEVED, &attributes),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let made = self.path_in(parent, name).and_then(|path| {
            self.lines.ask(Verb::Make, &path, b"", Pace::Short)?;
            self.entry(&path)
        });
        match made {
            Ok(attributes) => reply.entry(&BELIEVED, &attributes, Generation(0)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.path_in(parent, name).and_then(|path| {
            self.lines.ask(Verb::Remove, &path, b"", Pace::Short)?;
            self.names.remove(&path);
            Ok(())
        });
        match removed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn create(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        reply.error(Errno::EPERM);
    }

    fn rename(&self, _: &Request, _: INodeNo, _: &OsStr, _: INodeNo, _: &OsStr, _: RenameFlags, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_file(number, flags) {
            Ok(handle) => reply.opened(handle, FopenFlags::FOPEN_DIRECT_IO),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.text(number, handle, offset, Verb::Read) {
            Ok(text) => {
                let rest = text.as_bytes().get(offset as usize..).unwrap_or_default();
                reply.data(&rest[..rest.len().min(size as usize)]);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn write(
        &self,
        request: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if offset > 0 {
            return reply.error(Errno::EINVAL);
        }
        let path = match self.path(number) {
            Ok(path) => path,
            Err(error) => return reply.error(errno(error)),
        };
        let writer = is_writer(&path, data).then(|| process_of(request.pid()).to_string().into_bytes());
        let (value, len) = (writer.unwrap_or_else(|| data.to_vec()), data.len() as u32);
        let (lines, pace) = (self.lines.clone(), pace_of(&path));
        let write = move || match lines.ask(Verb::Write, &path, &value, pace) {
            Ok(_) => reply.written(len),
            Err(error) => reply.error(errno(error)),
        };
        if pace == Pace::Short {
            write();
        } else {
            // Without a thread the reply is dropped, which answers with an error.
            let _ = thread::Builder::new().name("long write".to_owned()).spawn(write);
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.open().remove(&handle.0);
        reply.ok();
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(self.next_handle.fetch_add(1, Relaxed)), FopenFlags::empty());
    }

    fn readdir(&self, _: &Request, number: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        match self.list(number, handle, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.open().remove(&handle.0);
        reply.ok();
    }
}

const _: () = assert!(TOP == INodeNo::ROOT.0, "the kernel's number of the top");

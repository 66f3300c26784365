//! The control tree: a manager's groups, parameters and counters as files under the kernel's names.
//!
//! ```text
//! cgroup/                  the root group's files; each group below is a directory
//! parameters/              enabled, compressor, zpool, ...
//! debug/                   pool_limit_hit, stored_pages, ...
//! hugepages-16kB/          swapin_enabled, stats/ ; up to hugepages-2048kB/
//! ```
//!
//! 1. The tree is pure: it turns paths and texts into the typed operations of a [`Machine`] and back. It opens nothing, starts
//!    nothing and locks nothing. Whoever wants it reached from outside puts a door in front of it.
//! 2. Each file is named once, in `files.rs`; what values look like is in `values.rs`.
//! 3. Names, formats and error numbers are those of cgroup v2 and of zswap's parameters. Where we differ: the root has all
//!    files of a group, because a job's own tree begins at its root; threads are not told apart; a limit without digits, or
//!    beyond 64 bits, is an error instead of 0.
//! 4. Everybody who comes through a door may look. Who is neither root nor the manager's own user may change only groups that are
//!    his: those that he has made, in the root or in one of his.
//! 5. No path and no value makes it panic.

mod error;
mod files;
mod machine;
mod values;

#[cfg(test)]
pub(crate) mod mock;
#[cfg(test)]
mod tests;

pub use error::Error;
pub use machine::{Figures, GroupId, Limit, Machine, MayLeave, Parameter, Parameters, Pressure, Stall, Writer};

use files::{File, Open, is_operator, may_change};
use uzswap_engine::MAX_FOLIO_ORDER;
use uzswap_proto::control::{PATH_MAX, VALUE_MAX};

/// Bytes in the longest name.
const NAME_MAX: usize = 255;

/// The smallest folio that has a directory: 16 KiB. Pairs of pages are folios nowhere in Linux.
const LEAST_ORDER: usize = 2;

/// The tree over a manager.
pub struct Tree<'a>(pub &'a dyn Machine);

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A file.
    File {
        /// It can be read.
        readable: bool,
        /// It can be written.
        writable: bool,
    },
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// What it stands for.
    pub kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Directory {
    Top,
    Group(GroupId),
    Parameters,
    Debug,
    Folio(usize),
    FolioStats(usize),
}

enum Node {
    Directory(Directory),
    /// And the group that it belongs to.
    File(Box<dyn Open>, Option<GroupId>),
}

impl Tree<'_> {
    /// What `path` stands for.
    pub fn look(&self, path: &str) -> Result<Kind, Error> {
        self.find(path).map(|node| node.kind())
    }

    /// The text of a file.
    pub fn read(&self, path: &str) -> Result<String, Error> {
        self.file(path)?.0.read(self.0)
    }

    /// Writes a file, for `writer`: `cgroup.procs` takes 0 for that process.
    pub fn write(&self, path: &str, value: &[u8], writer: Writer) -> Result<(), Error> {
        let (file, group) = self.file(path)?;
        if !file.rights().1 {
            return Err(Error::Access);
        }
        match group {
            Some(group) => may_change(self.0, group, writer)?,
            None if !is_operator(self.0, writer)? => return Err(Error::Access),
            None => {}
        }
        if value.len() > VALUE_MAX {
            return Err(Error::TooLong);
        }
        file.write(self.0, str::from_utf8(value).map_err(|_| Error::Invalid)?, writer)
    }

    /// The names in a directory: its files, then the directories in it, each by name.
    pub fn list(&self, path: &str) -> Result<Vec<Entry>, Error> {
        let Node::Directory(directory) = self.find(path)? else { return Err(Error::NotDirectory) };
        fn files<D: Copy>(table: &'static [File<D>], number: D) -> Vec<Entry> {
            let entry = |file: &'static File<D>| Entry { name: file.name.to_owned(), kind: kind_of(&(file, number)) };
            table.iter().map(entry).collect()
        }
        let (mut entries, mut directories) = match directory {
            Directory::Top => (Vec::new(), top_names()),
            Directory::Group(group) => (files(files::GROUP, group), self.0.children(group)?),
            Directory::Parameters => (files(files::PARAMETERS, ()), Vec::new()),
            Directory::Debug => (files(files::DEBUG, ()), Vec::new()),
            Directory::Folio(order) => (files(files::FOLIO, order), vec!["stats".to_owned()]),
            Directory::FolioStats(order) => (files(files::FOLIO_STATS, order), Vec::new()),
        };
        if matches!(directory, Directory::Group(_)) {
            directories.sort_unstable();
        }
        entries.extend(directories.into_iter().map(|name| Entry { name, kind: Kind::Directory }));
        Ok(entries)
    }

    /// Makes a group, which is then the user's who does.
    pub fn make(&self, path: &str, by: Writer) -> Result<(), Error> {
        let (above, name) = split(path)?;
        let Some(name) = name else { return Err(Error::Exists) };
        let Node::Directory(directory) = self.walk(above)? else { return Err(Error::NotDirectory) };
        match self.enter(directory, name) {
            Ok(_) => return Err(Error::Exists),
            Err(Error::NotFound) => {}
            Err(error) => return Err(error),
        }
        let Directory::Group(parent) = directory else {
            return Err(Error::NotPermitted("only groups can be made, below cgroup"));
        };
        if name == ".." {
            return Err(Error::Exists);
        }
        // A list has a name on each line.
        if name.contains(['\n', '\0']) {
            return Err(Error::Invalid);
        }
        if parent != GroupId::ROOT {
            may_change(self.0, parent, by)?;
        }
        self.0.create(parent, name, by.uid).map(drop)
    }

    /// Removes a group.
    pub fn remove(&self, path: &str, by: Writer) -> Result<(), Error> {
        match self.find(path)? {
            Node::Directory(Directory::Group(GroupId::ROOT)) => Err(Error::Busy),
            Node::Directory(Directory::Group(group)) => {
                may_change(self.0, group, by).and_then(|()| self.0.remove(group))
            }
            Node::Directory(_) => Err(Error::NotPermitted("only groups can be removed")),
            Node::File(..) => Err(Error::NotDirectory),
        }
    }

    /// Finds the group that a path names, if `by` may have a job there, and no other user could kill or limit it.
    pub fn joinable(&self, path: &str, by: Writer) -> Result<GroupId, Error> {
        let group = self.group(path)?;
        may_change(self.0, group, by)?;
        let mut above = Some(group);
        while let Some(group) = above {
            let owner = Writer { uid: self.0.owner(group)?, ..by };
            if owner.uid != by.uid && !is_operator(self.0, owner)? {
                return Err(Error::NotPermitted(
                    "the group, or one above it, belongs to another user, and that user could kill the job",
                ));
            }
            above = self.0.parent(group)?;
        }
        Ok(group)
    }

    /// All figures of a group, as JSON.
    pub fn stats(&self, path: &str) -> Result<String, Error> {
        self.0.stats(self.group(path)?)
    }

    fn group(&self, path: &str) -> Result<GroupId, Error> {
        match self.find(path)? {
            Node::Directory(Directory::Group(group)) => Ok(group),
            Node::Directory(_) => Err(Error::NotPermitted("only groups have jobs")),
            Node::File(..) => Err(Error::NotDirectory),
        }
    }

    fn file(&self, path: &str) -> Result<(Box<dyn Open>, Option<GroupId>), Error> {
        match self.find(path)? {
            Node::File(file, group) => Ok((file, group)),
            Node::Directory(_) => Err(Error::IsDirectory),
        }
    }

    fn find(&self, path: &str) -> Result<Node, Error> {
        if path.len() > PATH_MAX {
            return Err(Error::NameTooLong);
        }
        match self.walk(path)? {
            // A slash behind a file's name asks for a directory.
            Node::File(..) if names(path).next_back() != path.rsplit('/').next() => Err(Error::NotDirectory),
            node => Ok(node),
        }
    }

    fn walk(&self, path: &str) -> Result<Node, Error> {
        let mut node = Node::Directory(Directory::Top);
        for name in names(path) {
            let Node::Directory(directory) = node else { return Err(Error::NotDirectory) };
            node = self.enter(directory, name)?;
        }
        Ok(node)
    }

    /// What is called `name` in a directory.
    fn enter(&self, directory: Directory, name: &str) -> Result<Node, Error> {
        if name.len() > NAME_MAX {
            return Err(Error::NameTooLong);
        }
        fn file<D: Copy>(table: &'static [File<D>], name: &str, number: D) -> Option<Node> {
            let file = table.iter().find(|file| file.name == name)?;
            Some(Node::File(Box::new((file, number)), None))
        }
        let found = match directory {
            Directory::Top => top(name).map(Node::Directory),
            Directory::Group(group) => match file(files::GROUP, name, group) {
                Some(Node::File(file, _)) => Some(Node::File(file, Some(group))),
                _ => self.0.find(group, name).map(|group| Node::Directory(Directory::Group(group))),
            },
            Directory::Parameters => file(files::PARAMETERS, name, ()),
            Directory::Debug => file(files::DEBUG, name, ()),
            Directory::Folio(order) if name == "stats" => Some(Node::Directory(Directory::FolioStats(order))),
            Directory::Folio(order) => file(files::FOLIO, name, order),
            Directory::FolioStats(order) => file(files::FOLIO_STATS, name, order),
        };
        found.ok_or(Error::NotFound)
    }
}

impl Node {
    fn kind(&self) -> Kind {
        match self {
            Node::Directory(_) => Kind::Directory,
            Node::File(file, _) => kind_of(file.as_ref()),
        }
    }
}

fn kind_of(file: &dyn Open) -> Kind {
    let (readable, writable) = file.rights();
    Kind::File { readable, writable }
}

fn top(name: &str) -> Option<Directory> {
    match name {
        "cgroup" => Some(Directory::Group(GroupId::ROOT)),
        "parameters" => Some(Directory::Parameters),
        "debug" => Some(Directory::Debug),
        _ => (LEAST_ORDER..=MAX_FOLIO_ORDER).find(|&order| folio_name(order) == name).map(Directory::Folio),
    }
}

fn top_names() -> Vec<String> {
    let named = ["cgroup", "parameters", "debug"].map(str::to_owned);
    named.into_iter().chain((LEAST_ORDER..=MAX_FOLIO_ORDER).map(folio_name)).collect()
}

fn folio_name(order: usize) -> String {
    format!("hugepages-{}kB", 4 << order)
}

/// The names that a path goes through. There is no way up: `..` is a name that nothing has.
fn names(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty() && *name != ".")
}

/// A path without its last name, and that name; none in a path that ends at the top.
fn split(path: &str) -> Result<(&str, Option<&str>), Error> {
    if path.len() > PATH_MAX {
        return Err(Error::NameTooLong);
    }
    let Some(name) = names(path).next_back() else { return Ok(("", None)) };
    let at = path.rfind(name).expect("a part of it");
    Ok((&path[..at], Some(name)))
}

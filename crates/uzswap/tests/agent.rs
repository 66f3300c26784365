//! Guards that the agent is complete in itself: the shared object calls and reads nothing outside of it.
//!
//! A function that the dynamic linker binds may be a sanitizer's interceptor, a profiler's or a program's own. It would touch
//! memory of the program, which can be evicted, in the one thread that can bring it back.

use std::collections::BTreeSet;

static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libuzswap_agent.so"));

/// What may be left undefined. Each is weak, and used by threads of the program only.
const WANTED: [&str; 7] =
    ["__clone", "__environ", "__errno_location", "__register_atfork", "_dl_find_object", "dlsym", "pthread_atfork"];

/// What programs find in it.
const OFFERED: [&str; 6] = ["clone", "madvise", "prctl", "process_madvise", "shmat", "syscall"];

const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_PLTRELSZ: u64 = 2;
const DT_JMPREL: u64 = 23;
const DT_TEXTREL: u64 = 22;
const DT_REL: u64 = 17;
const DT_RELR: u64 = 36;

const R_X86_64_GLOB_DAT: u32 = 6;
const R_X86_64_RELATIVE: u32 = 8;

const STB_WEAK: u8 = 2;

fn half(at: usize) -> u16 {
    u16::from_le_bytes(AGENT[at..at + 2].try_into().expect("two bytes"))
}

fn word(at: usize) -> u32 {
    u32::from_le_bytes(AGENT[at..at + 4].try_into().expect("four bytes"))
}

fn long(at: usize) -> u64 {
    u64::from_le_bytes(AGENT[at..at + 8].try_into().expect("eight bytes"))
}

/// A program header: type, flags, offset in the file, address, length in the file, length in memory.
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    in_file: u64,
}

fn segments() -> Vec<Segment> {
    let (table, size, count) = (long(32) as usize, usize::from(half(54)), usize::from(half(56)));
    let segment = |at| Segment {
        kind: word(at),
        flags: word(at + 4),
        offset: long(at + 8),
        address: long(at + 16),
        in_file: long(at + 32),
    };
    (0..count).map(|i| segment(table + i * size)).collect()
}

/// Returns where an address lies in the file.
fn in_file(address: u64) -> usize {
    const PT_LOAD: u32 = 1;
    let holds = |segment: &&Segment| {
        segment.kind == PT_LOAD && (segment.address..segment.address + segment.in_file).contains(&address)
    };
    let segment = segments();
    let segment = segment.iter().find(holds).expect("an address that is loaded");
    (address - segment.address + segment.offset) as usize
}

/// Returns the entries of the dynamic section.
fn dynamic() -> Vec<(u64, u64)> {
    const PT_DYNAMIC: u32 = 2;
    let segments = segments();
    let segment = segments.iter().find(|segment| segment.kind == PT_DYNAMIC).expect("a dynamic section");
    let start = segment.offset as usize;
    let entries = (start..start + segment.in_file as usize).step_by(16).map(|at| (long(at), long(at + 8)));
    entries.take_while(|&(tag, _)| tag != 0).collect()
}

fn value(tag: u64) -> Option<u64> {
    dynamic().into_iter().find(|&(other, _)| other == tag).map(|(_, value)| value)
}

struct Symbol {
    name: String,
    weak: bool,
    defined: bool,
}

fn symbol(index: usize) -> Symbol {
    let at = in_file(value(DT_SYMTAB).expect("symbols")) + index * 24;
    let name = in_file(value(DT_STRTAB).expect("names")) + word(at) as usize;
    let bytes = AGENT[name..].iter().take_while(|&&byte| byte != 0);
    let name = bytes.map(|&byte| char::from(byte)).collect();
    Symbol { name, weak: AGENT[at + 4] >> 4 == STB_WEAK, defined: half(at + 6) != 0 }
}

/// Returns every dynamic symbol but the empty first one: the string table follows the symbols.
fn symbols() -> Vec<Symbol> {
    let [symbols, names] = [DT_SYMTAB, DT_STRTAB].map(|tag| value(tag).expect("both tables"));
    // Between the two may lie hash and version tables, so the hash table's count is asked where there is one.
    let count = match value(0x6fff_fef5) {
        Some(hash) => gnu_count(in_file(hash)),
        None => (names - symbols) as usize / 24,
    };
    (1..count).map(symbol).collect()
}

/// Returns how many symbols there are by the GNU hash table at `at`: the end of the last chain.
fn gnu_count(at: usize) -> usize {
    let (buckets, first, filters) = (word(at) as usize, word(at + 4) as usize, word(at + 8) as usize);
    let table = at + 16 + filters * 8;
    let chains = table + buckets * 4;
    let mut last = (0..buckets).map(|i| word(table + i * 4) as usize).max().unwrap_or(0);
    if last == 0 {
        return first;
    }
    while word(chains + (last - first) * 4) & 1 == 0 {
        last += 1;
    }
    last + 1
}

#[test]
fn nothing_is_wanted_from_outside_but_weak_symbols() {
    assert_eq!(value(DT_NEEDED), None, "it needs a library");
    let undefined: Vec<Symbol> = symbols().into_iter().filter(|symbol| !symbol.defined).collect();
    let strong: Vec<&str> = undefined.iter().filter(|symbol| !symbol.weak).map(|symbol| &*symbol.name).collect();
    assert!(strong.is_empty(), "undefined: {strong:?}");
    let names: BTreeSet<&str> = undefined.iter().map(|symbol| &*symbol.name).collect();
    assert_eq!(names, WANTED.into(), "undefined and weak");
}

#[test]
fn programs_find_nothing_in_it_but_what_is_interposed() {
    let defined: BTreeSet<String> =
        symbols().into_iter().filter(|symbol| symbol.defined).map(|symbol| symbol.name).collect();
    assert_eq!(defined, OFFERED.map(str::to_owned).into());
}

#[test]
fn relocations_bind_only_the_weak_symbols() {
    for tag in [DT_REL, DT_RELR, DT_TEXTREL] {
        assert_eq!(value(tag), None, "relocations of a kind that is not checked here");
    }
    let mut bound = BTreeSet::new();
    for (start, len) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
        let Some(start) = value(start).map(in_file) else { continue };
        for at in (start..start + value(len).expect("a length") as usize).step_by(24) {
            let info = long(at + 8);
            match info as u32 {
                R_X86_64_RELATIVE => {}
                R_X86_64_GLOB_DAT => drop(bound.insert(symbol((info >> 32) as usize).name)),
                other => panic!("a relocation of type {other}"),
            }
        }
    }
    assert!(bound.iter().all(|name| WANTED.contains(&name.as_str())), "bound: {bound:?}");
    assert!(!bound.is_empty(), "the weak symbols are read through the global offset table");
}

#[test]
fn no_segment_is_writable_and_executable_and_none_is_thread_local() {
    const PT_TLS: u32 = 7;
    for segment in segments() {
        assert!(segment.kind != PT_TLS, "thread-local storage belongs to the program");
        assert!(segment.flags & 3 != 3, "writable and executable");
    }
}

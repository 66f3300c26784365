#!/bin/sh
# Builds in DIR the test suites that scripts/compatibility.py --sources DIR runs: compatibility-sources.sh DIR [LTP-CLONE]
# Needs (Debian 12, with deb-src): apt-get install dpkg-dev gcc make autoconf automake pkg-config m4 bison gawk gettext tcl-dev redis-server
# redis-tools. The Linux Test Project is built if a clone of it is named. Takes half an hour on two processors, most of it for glibc.
set -eu
mkdir -p "$1" && cd "$1" && dir=$PWD ltp=${2:-}

unpack() { # package: into package-src
    [ -d "$1-src" ] || { apt-get source -q --download-only "$1" && dpkg-source -x --no-check "$1"_*.dsc "$1-src"; }
    dpkg-parsechangelog -S Version -l "$1-src/debian/changelog"
}

# The servers of the binary package are what is tested.
version=$(unpack redis | tail -1)
(cd redis-src && for program in server cli benchmark check-aof check-rdb; do ln -sf "$(command -v redis-$program)" "src/redis-$program"; done
 echo "$version" >VERSION-BUILT)

version=$(unpack jemalloc | tail -1)
(cd jemalloc-src && autoconf && ./configure -q && make -s tests_unit tests_integration && echo "$version" >VERSION-BUILT)

version=$(unpack sqlite3 | tail -1)
(cd sqlite3-src && ./configure -q --with-tcl=/usr/lib/tcl8.6 --disable-shared && make -s testfixture && echo "$version" >VERSION-BUILT)

if [ -n "$ltp" ]; then
    [ -d ltp-src ] || git clone -q "$ltp" ltp-src
    (cd ltp-src && make -s autotools && ./configure -q && make -s -C lib && make -s -C libs && make -s -C testcases/kernel/mem
     cd testcases/kernel/syscalls
     for call in mmap munmap mremap mprotect mincore mlock madvise brk fork clone vfork msync userfaultfd process_vm_readv remap_file_pages \
                 mallinfo mallopt; do [ ! -d $call ] || make -s -C $call || true; done
     cd "$dir/ltp-src" && mkdir -p bin && find testcases -type f -perm -u+x ! -name '*.sh' -exec ln -sf "$PWD/{}" bin/ \;
     git describe --always >VERSION-BUILT)
fi

version=$(unpack glibc | tail -1)
mkdir -p glibc-build
(cd glibc-build && ../glibc-src/configure -q --prefix=/usr --disable-werror && make -s -j2 && make -s -j2 subdirs=malloc check || true
 echo "$version" >VERSION-BUILT)

# make demo: the main job, on real input, in about a minute.  make test: everything that is checked.

UZSWAP := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)/release/uzswap

# Each program that the job tests run, and the package that brings it.
PROGRAMS := redis-server:redis-server sqlite3:sqlite3 node:nodejs java:default-jdk-headless javac:default-jdk-headless \
            xz:xz-utils g++:g++ gcc:gcc python3:python3 gdb:gdb strace:strace

# Time for the torture.
TORTURE_MINUTES ?= 60

# Time for each fuzz target.
FUZZ_SECONDS ?= 180

.PHONY: help build demo test check docs unit interleavings build-and-explore jobs licences deps soak torture fuzz

help:
	@echo "make demo   run a real program over 1 GiB in 256 MiB, and compare with a run without uzswap"
	@echo "make test   format, lints, documentation, licences, unit tests, real programs inside a limit"
	@echo "make fuzz   each fuzz target for FUZZ_SECONDS ($(FUZZ_SECONDS)); needs a nightly toolchain"
	@echo "make torture  programs that check every byte, while settings change and processes are killed, for TORTURE_MINUTES ($(TORTURE_MINUTES))"
	@echo "make build  the binary: $(UZSWAP)"
	@echo "make deps   install the programs that the tests run, those that are missing"

build:
	cargo build --release --locked -p uzswap

demo: build
	$(UZSWAP) demo

test: check docs licences unit build-and-explore jobs

check:
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked -p uzswap-engine --features shuttle,fuzzing --all-targets -- -D warnings

docs:
	RUSTDOCFLAGS=-Dwarnings cargo doc --locked --no-deps --workspace

licences:
	python3 scripts/licences.py

unit:
	cargo test --locked --workspace

# To explore interleavings takes one processor for a minute, in which the other one builds.
build-and-explore:
	$(MAKE) -j2 interleavings build

interleavings:
	cargo test --locked -p uzswap-engine --features shuttle --test interleavings

jobs: build deps
	python3 tests/run.py --uzswap $(UZSWAP)

soak: build deps
	UZSWAP_EXHAUST=1 cargo test --locked -p uzswap-engine --features shuttle --test interleavings
	python3 tests/run.py --full --uzswap $(UZSWAP)

torture: build
	$(UZSWAP) lab torture --minutes $(TORTURE_MINUTES)

# Safe Rust needs no sanitizer; without one there are several times as many executions.
fuzz:
	@command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
	@set -e; for target in $$(cargo fuzz list); do \
	    cargo +nightly fuzz run --sanitizer none $$target -- \
	        -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -len_control=0 -timeout=20 -print_final_stats=1; done

deps:
	@missing=; for pair in $(PROGRAMS); do \
	    command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; done; \
	missing=$$(printf '%s\n' $$missing | sort -u | tr '\n' ' '); \
	[ -z "$${missing# }" ] && exit 0; \
	command -v apt-get >/dev/null || { echo "make deps: install these first: $$missing" >&2; exit 1; }; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	echo "installing: $$missing"; \
	$$sudo apt-get update -q && \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $$missing

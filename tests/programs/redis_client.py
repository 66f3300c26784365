"""redis_client.py [MIB]: runs a redis-server in the current directory, loads it over a unix socket, verifies every key
through BGSAVE and BGREWRITEAOF, shuts it down, starts it again from its dump, and verifies every key again."""
import hashlib
import os
import socket
import subprocess
import sys
import time
import zlib

SOCKET = "redis.sock"
BATCH = 200


class Server:
    """A redis-server and one connection to it."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", SOCKET, "--save", "", "--appendonly", "no",
             "--dbfilename", "dump.rdb", "--rdbcompression", "yes", "--daemonize", "no", "--logfile", "redis.log"])
        self.socket = self.connect()
        self.file = self.socket.makefile("rb", 1 << 16)

    def connect(self):
        for _ in range(6000):
            if self.process.poll() is not None:
                sys.exit(f"redis-server ended with status {self.process.returncode}")
            try:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(SOCKET)
                return connection
            except OSError:
                connection.close()
                time.sleep(0.05)
        sys.exit("redis-server does not listen")

    def send(self, *commands):
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in command]
        self.socket.sendall(b"".join(parts))

    def reply(self):
        line = self.file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if not kind:
            sys.exit("redis-server closed the connection")
        return rest

    def call(self, *words):
        self.send([word.encode() for word in words])
        return self.reply()

    def wait_for(self, field, wanted=b"0"):
        while True:
            info = dict(line.split(b":", 1) for line in self.call("INFO", "persistence").splitlines() if b":" in line)
            if info[field] == wanted:
                return info
            time.sleep(0.05)

    def ready(self):
        while True:
            try:
                return self.call("PING")
            except RuntimeError:        # it is still loading its dump
                time.sleep(0.05)

    def shutdown(self):
        self.send([b"SHUTDOWN", b"NOSAVE"])
        return self.process.wait()


def key(number):
    return b"key:%08d" % number


def value(number, version):
    """About 1 KiB: a third of it random, the rest text."""
    head = b"%d:%d:" % (number, version)
    return head + hashlib.shake_128(head).digest(320) + b"the quick brown fox %06d " % number * 26


def load(server, numbers, version):
    for start in range(0, len(numbers), BATCH):
        batch = numbers[start:start + BATCH]
        server.send(*([b"SET", key(number), value(number, version)] for number in batch))
        for _ in batch:
            assert server.reply() == b"OK"


def verify(server, count, version_of, when):
    digest = 0
    for start in range(0, count, BATCH):
        batch = range(start, min(start + BATCH, count))
        server.send([b"MGET", *map(key, batch)])
        for number, got in zip(batch, server.reply()):
            if got != value(number, version_of(number)):
                sys.exit(f"MISMATCH {when}: key {number}: {got[:80] if got else got!r}")
            digest = zlib.crc32(got, digest)
    print(f"{when}: {count} keys, {digest:08x}", flush=True)


def main():
    count = (int(sys.argv[1]) if len(sys.argv) > 1 else 100) * 1024 * 1024 // 1150
    server = Server()
    try:
        server.ready()
        load(server, range(count), 0)
        verify(server, count, lambda number: 0, "loaded")
        server.call("BGSAVE")
        load(server, range(0, count, 10), 1)            # changed while the forked child writes
        server.wait_for(b"rdb_bgsave_in_progress")
        changed = lambda number: int(number % 10 == 0)
        verify(server, count, changed, "after BGSAVE")
        server.call("CONFIG", "SET", "appendonly", "yes")
        server.wait_for(b"aof_rewrite_in_progress")
        server.call("BGREWRITEAOF")
        info = server.wait_for(b"aof_rewrite_in_progress")
        print("last save", info[b"rdb_last_bgsave_status"], "last rewrite", info[b"aof_last_bgrewrite_status"])
        verify(server, count, changed, "after BGREWRITEAOF")
        server.call("CONFIG", "SET", "appendonly", "no")
        server.call("SAVE")
        print("shutdown", server.shutdown(), os.path.exists("dump.rdb"))
        server = Server()
        server.ready()
        verify(server, count, changed, "after restart")
        print("shutdown", server.shutdown())
    finally:
        if server.process.poll() is None:
            server.process.kill()


main()

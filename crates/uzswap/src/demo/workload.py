"""The program of `uzswap demo`: builds a data set in memory, walks it twice, prints a digest of all it saw.

A quarter each of log text, records (dicts with pointers to strings and numbers), integer columns, and blobs that are
half random. Only the seed and the size decide the contents. Lines on standard output: `stage TEXT` while it works,
then `digest HEX`.
"""
import array, gc, itertools, random, sys, zlib

seed, total = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
gc.disable()  # nothing here is cyclic, and a loader of this size would do the same

WORDS = [f"{a}{b}" for a in ("conn", "user", "disk", "cache", "retry", "query", "node", "shard") for b in
         ("ected", "_id", " full", " miss", "ing", " done", "-17", " moved", " late", " ok", "=nil", "s", "/a", ":")]
PHRASES = [" ".join(rng.choices(WORDS, k=6)) for _ in range(2048)]
CITIES = [f"city-{n:04d}" for n in range(1000)]


def texts(size):
    """About `size` bytes of log lines."""
    lines, clock, pick = [], 1_700_000_000_000, rng.randrange
    while size > 0:
        clock += pick(50)
        line = f"{clock} [{pick(64):02d}] {PHRASES[pick(2048)]} {PHRASES[pick(2048)]} took {pick(90000)} us"
        lines.append(line)
        size -= len(line) + 57
    return lines


def records(size):
    """About `size` bytes of dicts."""
    pick = rng.randrange
    return [{"id": n, "city": CITIES[pick(1000)], "key": f"{pick(1 << 48):012x}", "score": pick(1 << 20) / 7,
             "seen": 0} for n in range(size // 390)]


def columns(size):
    """About `size` bytes of integer columns: slowly rising numbers, as in an index."""
    block = 1 << 16
    steps = [array.array("q", itertools.accumulate(rng.choices(range(1000), k=block))) for _ in range(8)]
    made = []
    for n in range(size // (block * 8)):
        column = array.array("q", steps[n % 8])
        column[0] = n
        made.append(column)
    return made


def blobs(size):
    """About `size` bytes of blobs, half of each random."""
    return [bytearray(rng.randbytes(8192) + PHRASES[n % 2048].encode().ljust(64) * 128) for n in range(size >> 14)]


parts, slices = {"text": [], "records": [], "columns": [], "blobs": []}, 8
makers = {"text": texts, "records": records, "columns": columns, "blobs": blobs}
for n in range(slices):
    print(f"stage building {100 * n // slices} %", flush=True)
    for name, make in makers.items():
        parts[name].append(make(total // 4 // slices))

digest = 0
for walk in (1, 2):
    for n in range(slices):
        print(f"stage walk {walk}: {100 * n // slices} %", flush=True)
        lines = parts["text"][n]
        for at in range(0, len(lines), 1000):
            digest = zlib.crc32("\n".join(lines[at:at + 1000]).encode(), digest)
        seen = 0
        for record in parts["records"][n]:
            record["seen"] += 1
            seen += record["id"] * record["seen"] + len(record["key"]) + int(record["score"])
        digest = zlib.crc32(str(seen).encode(), digest)
        for column in parts["columns"][n]:
            digest = zlib.crc32(column, digest)
        for blob in parts["blobs"][n]:
            blob[walk] ^= 0x55
            digest = zlib.crc32(blob, digest)
print(f"digest {digest:08x}", flush=True)

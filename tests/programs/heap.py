"""heap.py [MIB]: builds large lists, dicts and bytes, re-reads and changes them, and prints a digest after each pass."""
import hashlib
import random
import sys
import zlib


def digest(parts):
    total = hashlib.sha256()
    for part in parts:
        total.update(repr(part).encode())
    return total.hexdigest()[:16]


def main():
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    rng = random.Random(20230501)
    # What a pass over each is worth: about 60, 190 and 4096 bytes an element.
    numbers = [rng.getrandbits(60) for _ in range(size * 6000)]
    records = {f"key-{i:08d}": (i, f"value {rng.getrandbits(64):x}", [i % 7, None]) for i in range(size * 900)}
    chunks = [bytearray(rng.randbytes(2048) + b"text " * 400) for _ in range(size * 60)]
    print("built", len(numbers), len(records), len(chunks))

    for turn in range(3):
        print("numbers", sum(numbers) % (1 << 61), digest(numbers[turn::9973]))
        print("records", sum(value[0] for value in records.values()), digest(sorted(records)[turn::997]))
        print("chunks", zlib.crc32(b"".join(chunk[:64] for chunk in chunks)), sum(map(zlib.crc32, chunks)))
        for _ in range(size * 200):
            at = rng.randrange(len(numbers))
            numbers[at] = numbers[-1 - at] ^ turn
            key = f"key-{rng.randrange(size * 900):08d}"
            records[key] = (records[key][0] + 1, records[key][1][::-1], [turn])
            chunks[rng.randrange(len(chunks))][turn:turn + 8] = b"%08d" % turn
    numbers.sort()
    print("sorted", digest(numbers[::997]))


main()

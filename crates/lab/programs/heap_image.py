"""heap_image.py FILE BYTES: builds dictionaries, lists, strings and numbers, and writes the pages they are in to FILE."""
import random
import sys

random.seed(1)
WORDS = open(random.__file__).read().split()


def record(number):
    return {"name": " ".join(random.choices(WORDS, k=4)), "id": number, "value": random.random(),
            "tags": random.sample(WORDS, 3)}


def main(path, size):
    keep = [record(number) for number in range(size // 400)]
    left = size
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory, open(path, "wb") as image:
        while left:
            written = left
            maps.seek(0)
            for line in maps.read().splitlines():
                fields = line.split()
                if fields[1] != "rw-p" or fields[4] != "0" or fields[5:] not in ([], ["[heap]"]):
                    continue
                start, end = (int(address, 16) for address in fields[0].split("-"))
                memory.seek(start)
                left -= image.write(memory.read(min(end - start, left)))
            if left == written:
                sys.exit("nothing of the heap can be read")
    return keep


main(sys.argv[1], int(sys.argv[2]))

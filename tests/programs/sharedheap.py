"""Two processes with shared memory of 64 MiB, each beside a heap of its own."""
import mmap
import os
import time

SIZE, PAGE = 64 << 20, 4096
shared = mmap.mmap(-1, SIZE)
for at in range(0, SIZE, PAGE):
    shared[at] = 1
child = os.fork()
total = sum(shared[at] for at in range(0, SIZE, PAGE))
heap = os.urandom(1 << 20) * 12
time.sleep(3)
if not child:
    os._exit(total != SIZE // PAGE or len(heap) != 12 << 20)
os.waitpid(child, 0)
print("done")

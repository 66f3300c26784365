# Dictionaries are filled, read and made anew; a forked child reads the last.
import os

table = {i: (i, str(i)) for i in range(400_000)}
for _ in range(3):
    total = 0
    for key, (number, text) in table.items():
        total = (total * 31 + key + number + len(text)) % 1000000007
    print(total, flush=True)
    table = {key: (number + 1, text + "x") for key, (number, text) in table.items()}
if not os.fork():
    print(sum(len(text) for _, text in table.values()), flush=True)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]))

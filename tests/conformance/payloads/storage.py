"""Fills what can be written, with bytes and then with empty files."""

import json
import os

PLACES = ("/run/ficc", "/tmp", "/dev/shm")
errors = []
written = 0
files = [os.open(f"{place}/full", os.O_WRONLY | os.O_CREAT) for place in PLACES]
try:
    while True:
        written += os.write(files[written // 4096 % 3], b"x" * 4096)
except OSError as error:
    errors.append(error.errno)
for file, place in zip(files, PLACES, strict=True):
    os.close(file)
    os.unlink(f"{place}/full")
made = 0
try:
    while True:
        open(f"{PLACES[made % 3]}/{made}", "w").close()
        made += 1
except OSError as error:
    errors.append(error.errno)
print(json.dumps({"bytes": written, "inodes": made, "errors": errors}))

"""What is below /inputs, and whether any of it can be changed."""

import json
import os
from pathlib import Path


def error_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0


files = {}
for place, _, names in os.walk("/inputs"):
    for name in names:
        path = f"{place}/{name}"
        about = os.stat(path)
        files[os.path.relpath(path, "/inputs")] = {
            "text": Path(path).read_text(),
            "inode": about.st_ino,
            "device": about.st_dev,
            "errors": {
                "write": error_of(lambda path=path: os.open(path, os.O_RDWR)),
                "chmod": error_of(lambda path=path: os.chmod(path, 0o666)),
                "unlink": error_of(lambda path=path: os.unlink(path)),
                "rename": error_of(lambda path=path: os.rename(path, path + "2")),
                "truncate": error_of(lambda path=path: os.truncate(path, 0)),
            },
        }
print(json.dumps({"files": files, "new file": error_of(lambda: os.open("/inputs/new", os.O_CREAT))}))

"""Every directory in which a file can be made, and every file that can be opened for writing."""

import contextlib
import json
import os
import stat

directories, files = [], []
for place, inner, names in os.walk("/"):
    if place == "/":
        inner.remove("proc")
    with contextlib.suppress(OSError):
        fd = os.open(f"{place}/.probe", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.close(fd)
        os.unlink(f"{place}/.probe")
        directories.append(place)
    for name in names:
        path = f"{place}/{name}"
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                os.close(os.open(path, os.O_WRONLY))
                files.append(path)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/dev/mem"):
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY))
        files.append(path)
print(json.dumps({"directories": sorted(directories), "files": files}))

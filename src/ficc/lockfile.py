"""Being the only process that runs on a directory: a lock on a file in it, held for life.

The kernel lets go of it with the last descriptor, however the process ends; what the file holds is the pid of its
holder, for people.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

PID_BYTES_MAX = 32


class Held(Exception):
    """Another process holds the lock; `pid` is what it wrote down of itself."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"pid {pid}")
        self.pid = pid


def hold(path: Path) -> int:
    """Lock a file that is made if need be; the descriptor, which is to be kept open. Raises Held, OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        pid = os.pread(fd, PID_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise Held(pid) from None
    except BaseException:
        os.close(fd)
        raise
    return fd

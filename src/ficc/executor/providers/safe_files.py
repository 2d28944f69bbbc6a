"""Opening a file that an untrusted payload made.

The payload may have put a link, a pipe or a device where its file should be, at any depth. So the path is resolved
beneath a directory descriptor with no link followed, what is there must be a regular file, and that very file is
opened: for reading, and never waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ficc.executor.providers.safe_connect import open_beneath

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(directory: int, path: str) -> int:
    """A descriptor for reading the regular file at `path` beneath `directory`. Raises OSError."""
    fd = open_beneath(directory, path)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        return _reopened(fd)
    finally:
        os.close(fd)


def _reopened(fd: int) -> int:
    name = f"/proc/self/fd/{fd}"
    with contextlib.suppress(PermissionError):
        return os.open(name, _READ)
    os.chmod(name, stat.S_IRUSR)  # of the payload's, which runs as this very account where that is no root
    return os.open(name, _READ)

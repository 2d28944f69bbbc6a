"""Local files on their way into the content store: hashed, and placed without a detour over HTTP where the
store is on this machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 4 << 20
_FICLONE = 0x40049409  # ioctl_ficlone(2)

Progress = Callable[[int], None]


def sha256(path: Path, progress: Progress) -> str:
    """The digest of a file; `progress` is told the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            progress(done)
    return digest.hexdigest()


def place(source: Path, incoming: Path, progress: Progress) -> str:
    """Put a copy of a file into the store's incoming directory, durably; its name there.

    A reflink where the file system has them, else a copy. Never a hard link: its owner could still write it.
    """
    name = f"{source.stat().st_size}-{secrets.token_hex(8)}"
    target = incoming / name
    owner = incoming.stat()
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with source.open("rb", buffering=0) as file:
            if not _reflink(file.fileno(), fd):
                _copy(file.fileno(), fd, progress)
        progress(os.fstat(fd).st_size)
        if os.geteuid() == 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)
        os.fsync(fd)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return name


def _reflink(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _copy(source: int, target: int, progress: Progress) -> None:
    done = 0
    while count := os.sendfile(target, source, None, BLOCK_BYTES):
        done += count
        progress(done)

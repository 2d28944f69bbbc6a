"""Blobs and partials on disk. Every function blocks; callers use threads."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ficc.domain import ids
from ficc.domain.errors import Refused
from ficc.domain.manifest import SHA256, require_sha256

HASH_BLOCK_BYTES = 4 << 20
RESERVE_BYTES = 256 << 20
"""Disk space that uploads never take."""


@dataclass(frozen=True, slots=True)
class Key:
    """A partial: of one project, on its way to one digest."""

    project_id: str
    sha256: str


class ContentStore:
    def __init__(self, root: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.root = root
        self.reserve_bytes = reserve_bytes
        self.blobs = root / "blobs"
        self.partials = root / "partials"
        self.incoming = root / "incoming"

    def prepare(self) -> None:
        for directory in (self.blobs, self.partials, self.incoming):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)

    # Names.

    def blob(self, sha256: str) -> Path:
        return self.blobs / require_sha256(sha256, "sha256")[:2] / sha256

    def partial(self, key: Key) -> Path:
        if not ids.is_id(key.project_id):
            raise ValueError("not a project id")
        return self.partials / key.project_id / require_sha256(key.sha256, "sha256")

    def has_blob(self, sha256: str, size: int) -> bool:
        try:
            facts = self.blob(sha256).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(facts.st_mode) and facts.st_size == size

    # Partials.

    def length(self, key: Key) -> int:
        """Bytes on disk, durable or not; 0 for a partial that is not there."""
        try:
            return self.partial(key).lstat().st_size
        except FileNotFoundError:
            return 0

    def write(self, key: Key, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write at an offset, not yet durable. Raises Refused `disk_full`, OSError."""
        self._check_space(len(data))
        path = self.partial(key)
        made = not path.exists()
        if made:
            self._make_directory(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise _disk_full(error) from error
        finally:
            os.close(fd)
        if made:
            sync_directory(path.parent)

    def sync(self, key: Key) -> None:
        """Make what was written durable (fdatasync)."""
        fd = os.open(self.partial(key), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise _disk_full(error) from error
        finally:
            os.close(fd)

    def truncate(self, key: Key, length: int) -> None:
        """Cut a partial to its durable length; one of no length is removed. Never makes one longer."""
        path = self.partial(key)
        if length == 0:
            path.unlink(missing_ok=True)
        elif self.length(key) > length:
            os.truncate(path, length)

    def _check_space(self, wanted: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free - wanted < self.reserve_bytes:
            raise Refused(
                "disk_full",
                f"The content store has {free} bytes free and keeps {self.reserve_bytes} in reserve; free some space "
                "and send the same piece again.",
                details={"bytes_free": free, "bytes_wanted": wanted},
            )

    @staticmethod
    def _make_directory(path: Path) -> None:
        """Its own entry is durable, too, before anything in it is called durable."""
        path.mkdir(mode=0o700, exist_ok=True)
        sync_directory(path.parent)

    # Publishing.

    def publish(self, key: Key, size: int) -> None:
        """Turn a partial whose size and hash were found right into the blob, durably. Repeated, it makes sure
        of what an earlier call may not have come to."""
        target = self.blob(key.sha256)
        source = self.partial(key)
        self._make_directory(target.parent)
        if self.has_blob(key.sha256, size):
            source.unlink(missing_ok=True)
        else:
            if size == 0:
                self._make_directory(source.parent)
                source.touch(mode=0o600)
            self._finish(source, size)
            os.rename(source, target)
        sync_directory(target.parent)

    @staticmethod
    def _finish(path: Path, size: int) -> None:
        """Make a partial what a blob is: read-only and durable with its size."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != size:
                raise OSError(errno.EIO, "the partial changed its size", str(path))
            os.fchmod(fd, 0o444)
            os.fsync(fd)
        finally:
            os.close(fd)

    def adopt(self, key: Key, name: str, size: int) -> None:
        """Take a file of `incoming` as the full-length partial of a project, durably.

        Raises Refused for a name that is no plain file there, or of another size or owner.
        """
        source, target = self._incoming(name), self.partial(key)
        try:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise Refused(
                "not_found", f"There is no file {name!r} in the incoming directory.", "name"
            ) from None
        except OSError:  # a link, or closed to this account
            raise _not_adoptable(name, size) from None
        try:
            facts = os.fstat(fd)
            plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
            # Somebody else's file could be changed by them at any later time.
            if not plain or facts.st_size != size or facts.st_uid != os.geteuid():
                raise _not_adoptable(name, size)
            os.fchmod(fd, 0o600)
            os.fsync(fd)
        finally:
            os.close(fd)
        self._make_directory(target.parent)
        os.rename(source, target)
        sync_directory(target.parent)

    def decline(self, name: str) -> None:
        """Remove a file of `incoming` that is not needed after all."""
        self._incoming(name).unlink(missing_ok=True)

    def _incoming(self, name: str) -> Path:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise Refused("invalid_request", "The name is that of a file in the incoming directory.", "name")
        return self.incoming / name

    # Sweeping. What is not named as this store names things was not made by it, and is left alone.

    def partial_keys(self, unchanged_since: float) -> list[Key]:
        """Partials whose file was last changed or moved before a time."""
        return [
            Key(project.name, path.name)
            for project in self.partials.iterdir()
            if ids.is_id(project.name) and project.is_dir()
            for path in project.iterdir()
            if SHA256.fullmatch(path.name) and path.lstat().st_ctime < unchanged_since
        ]

    def blob_digests(self, unchanged_since: float) -> list[str]:
        """Blobs that were published before a time."""
        return [
            path.name
            for directory in self.blobs.iterdir()
            if directory.is_dir()
            for path in directory.iterdir()
            if SHA256.fullmatch(path.name)
            and path.name[:2] == directory.name
            and path.lstat().st_ctime < unchanged_since
        ]

    def incoming_names(self, unchanged_since: float) -> list[str]:
        """Files that were put into `incoming` before a time, and never adopted."""
        return [
            path.name
            for path in self.incoming.iterdir()
            if not path.name.startswith(".") and not path.is_dir() and path.lstat().st_ctime < unchanged_since
        ]

    def remove_blob(self, sha256: str) -> None:
        self.blob(sha256).unlink(missing_ok=True)


def hash_file(path: Path, progress: Callable[[int], None]) -> hashlib._Hash:
    """SHA-256 of a file. hashlib lets go of the interpreter lock for blocks of this size, so an event loop in
    another thread goes on. `progress` is told the bytes hashed so far."""
    digest = hashlib.sha256()
    view = memoryview(bytearray(HASH_BLOCK_BYTES))
    done = 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        while count := os.preadv(fd, [view], done):
            digest.update(view[:count])
            done += count
            progress(done)
    finally:
        os.close(fd)
    return digest


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _disk_full(error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(
            "disk_full", "The content store is full; free some space and send the same piece again."
        )
    return error


def _not_adoptable(name: str, size: int) -> Refused:
    return Refused(
        "source_mismatch",
        f"{name!r} is not a plain file of {size} bytes with one name, owned by the controller's account.",
        "name",
    )

"""Blobs and partials on disk. Every function blocks; callers use threads.

What the disk refuses to whoever brings or removes bytes is a refusal: `disk_full` where it has no room,
`content_unavailable` where it lets nothing be written or read.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from ficc.domain import ids
from ficc.domain.errors import Refused
from ficc.domain.manifest import SHA256, require_sha256

HASH_BLOCK_BYTES = 4 << 20
PIECES_AT_ONCE = 1024
"""What Linux takes in one call (IOV_MAX)."""
RESERVE_BYTES = 256 << 20
"""Disk space that uploads never take."""
OWNER_FILE = "installation"
"""In the store's directory: the id of the installation whose blobs these are."""

P = ParamSpec("P")
T = TypeVar("T")


def _told(work: Callable[P, T]) -> Callable[P, T]:
    """The faults of a disk that a caller can be told of, as refusals."""

    @functools.wraps(work)
    def told(*args: P.args, **named: P.kwargs) -> T:
        try:
            return work(*args, **named)
        except OSError as error:
            raise _refusal(error) from error

    return told


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
        self.bin = root / "bin"

    @_told
    def prepare(self) -> None:
        """Make what is missing. Raises Refused."""
        for directory in (self.blobs, self.partials, self.incoming, self.bin):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)

    @_told
    def claim(self, installation_id: str) -> None:
        """Take the store for an installation: another one's sweeper would remove what it has no row for.
        Raises Refused `content_unavailable` where it is another's."""
        owner = self.root / OWNER_FILE
        unfinished = owner.with_name(f".{OWNER_FILE}.{os.getpid()}")
        unfinished.write_text(f"{installation_id}\n")
        try:
            os.link(unfinished, owner)  # of two at the same moment one is first
            sync_directory(self.root)
        except FileExistsError:
            found = owner.read_text().strip()
            if found != installation_id:
                raise Refused(
                    "content_unavailable",
                    f"The content directory {self.root} belongs to installation {found[:64]}; this one is "
                    f"{installation_id}. Set content.directory to another, or, if that installation is gone for good, "
                    f"remove {owner}: blobs that this one does not know are then removed as well.",
                ) from None
        finally:
            unfinished.unlink()

    # Names.

    def blob(self, sha256: str) -> Path:
        return self.blobs / require_sha256(sha256, "sha256")[:2] / sha256

    def partial(self, key: Key) -> Path:
        if not ids.is_id(key.project_id):
            raise ValueError("not a project id")
        return self.partials / key.project_id / require_sha256(key.sha256, "sha256")

    @_told
    def has_blob(self, sha256: str, size: int) -> bool:
        """Whether the blob's file is there, in its size. Raises Refused where nobody can tell."""
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

    @_told
    def write(self, key: Key, offset: int, *pieces: bytes | bytearray | memoryview) -> None:
        """Write pieces one after the other at an offset, not yet durable. Raises Refused, OSError."""
        self._check_space(sum(map(len, pieces)))
        path = self.partial(key)
        made = not path.exists()
        if made:
            self._make_directory(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _write_all(fd, offset, pieces)
        finally:
            os.close(fd)
        if made:
            sync_directory(path.parent)

    @_told
    def sync(self, key: Key) -> None:
        """Make what was written durable (fdatasync)."""
        fd = os.open(self.partial(key), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    @_told
    def truncate(self, key: Key, length: int) -> None:
        """Cut a partial to its durable length; one of no length is removed. Never makes one longer."""
        path = self.partial(key)
        if length == 0:
            path.unlink(missing_ok=True)
        elif self.length(key) > length:
            os.truncate(path, length)

    def free_bytes(self) -> int:
        """What may still be written; below 0 once others have used the reserve."""
        return shutil.disk_usage(self.root).free - self.reserve_bytes

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

    @_told
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
                raise OSError(errno.EINVAL, "the partial changed its size", str(path))
            os.fchmod(fd, 0o444)
            os.fsync(fd)
        finally:
            os.close(fd)

    @_told
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

    @_told
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

    # Removing, in two steps: a rename that takes no time, and the rest, which for a large file does. A power
    # cut may undo the rename; then the file is an orphan once more.

    @_told
    def bin_blob(self, sha256: str) -> bool:
        """Move a blob to the bin; whether there was one."""
        return self._bin(self.blob(sha256), sha256)

    @_told
    def bin_partial(self, key: Key) -> bool:
        """Move a partial to the bin; whether there was one."""
        return self._bin(self.partial(key), f"{key.project_id}.{key.sha256}")

    @_told
    def _bin(self, path: Path, name: str) -> bool:
        try:
            os.rename(path, self.bin / name)
        except FileNotFoundError:
            return False
        return True

    @_told
    def empty_bin(self) -> None:
        """Free what is in the bin, whoever moved it there: nobody takes anything out of it."""
        for path in self.bin.iterdir():
            path.unlink(missing_ok=True)


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


def _write_all(fd: int, offset: int, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    """One call for many pieces; the kernel may take less of them than it was given."""
    views = [memoryview(piece) for piece in pieces if piece]
    while views:
        written = os.pwritev(fd, views[:PIECES_AT_ONCE], offset)
        offset += written
        taken = 0
        while taken < len(views) and written >= len(views[taken]):
            written -= len(views[taken])
            taken += 1
        del views[:taken]
        if written:
            views[0] = views[0][written:]


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refusal(error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(
            "disk_full", "The content store is full; free some space and send the same piece again."
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE):
        return Refused(
            "content_unavailable",
            f"The content store cannot be used: {os.strerror(error.errno)}, at {error.filename or 'a file of it'}. "
            "Look at the disk and at who owns the directory, then try again.",
            retry_after_seconds=1,
        )
    return error


def _not_adoptable(name: str, size: int) -> Refused:
    return Refused(
        "source_mismatch",
        f"{name!r} is not a plain file of {size} bytes with one name, owned by the controller's account.",
        "name",
    )

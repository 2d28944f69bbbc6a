"""Layers into a root file system, below one directory and nowhere else.

Invariants, whatever the archives hold:
- Every path is walked component by component with directory descriptors and `O_NOFOLLOW`. A symbolic link
  on the way is resolved by us, inside the root (an absolute target starts at the root, `..` stops there).
  The last component is never followed: what is there is removed, then made anew.
- Nobody else writes below the root meanwhile: the store extracts into a private directory.
- No device, fifo or socket is made; set-user-id, set-group-id, sticky and other people's write bits are
  dropped; directories are 0755; owners and extended attributes are not taken over, times of files are
  (Python compares them with its compiled files).

Source: OCI Image Format Specification 1.1, "Applying Changesets" and "Whiteouts".
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ficc.images.limits import ImageLimits, refused
from ficc.images.tar import Entry, Kind, Stream, TarReader, shown

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
DIRECTORY_MODE = 0o755
FILE_MODE_MASK = 0o755
DEVICES = (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Place:
    """A directory below the root: descriptors and names from the root down to it."""

    descriptors: list[int]
    names: list[bytes] = field(default_factory=list)

    @property
    def descriptor(self) -> int:
        return self.descriptors[-1]

    def path_of(self, name: bytes) -> bytes:
        return b"/".join((*self.names, name))

    def enter(self, name: bytes) -> None:
        self.descriptors.append(os.open(name, OPEN_DIRECTORY, dir_fd=self.descriptor))
        self.names.append(name)

    def leave(self, levels: int) -> None:
        for _ in range(levels):
            os.close(self.descriptors.pop())
            self.names.pop()


class Extraction:
    """Applies layers, lowest first. The limits hold over all of them."""

    def __init__(self, root: int, limits: ImageLimits) -> None:
        self._root = root
        self._limits = limits
        self._entries = 0
        self._files_bytes = 0
        self._fresh: set[bytes] = set()  # paths that the layer being applied has made or passed through

    def apply(self, layer: Stream) -> None:
        """Raises Refused (`image_refused`), or OSError when there is no room. The caller discards the
        root then."""
        self._fresh.clear()
        reader = TarReader(layer)
        for entry in reader:
            self._count(entry)
            try:
                self._apply_entry(entry, reader)
            except OSError as failure:
                if failure.errno in NO_ROOM:
                    raise
                raise refused(f"{shown(entry.name)} cannot be extracted: {failure.strerror}") from failure

    def _count(self, entry: Entry) -> None:
        self._entries += 1
        self._files_bytes += entry.size
        if self._entries > self._limits.entries_max:
            raise refused(f"the layers have more than {self._limits.entries_max} entries")
        if self._files_bytes > self._limits.files_bytes_max:
            raise refused(f"the files of the image have more than {self._limits.files_bytes_max} bytes")

    def _apply_entry(self, entry: Entry, reader: TarReader) -> None:
        parts = self._parts(entry.name, entry)
        if not parts:  # the root itself
            if entry.kind is not Kind.DIRECTORY:
                raise refused(f"{shown(entry.name)} replaces the root with something else than a directory")
            return
        *parents, name = parts
        if name.startswith(WHITEOUT):
            self._white_out(entry, parents, name)
            return
        if entry.kind in DEVICES and parts[0] == b"dev":
            return  # a usual root has some; the sandbox lays its own /dev over them
        with self._place(parents, entry, create=True) as place:
            assert place is not None
            self._make(entry, place, name, reader)
            for depth in range(1, len(place.names) + 1):
                self._fresh.add(b"/".join(place.names[:depth]))
            self._fresh.add(place.path_of(name))

    def _make(self, entry: Entry, place: Place, name: bytes, reader: TarReader) -> None:
        match entry.kind:
            case Kind.DIRECTORY:
                if not _is_directory(place.descriptor, name):
                    _remove(place.descriptor, name)
                    _make_directory(place.descriptor, name)
            case Kind.FILE:
                _remove(place.descriptor, name)
                _make_file(place.descriptor, name, entry, reader)
            case Kind.SYMLINK:
                if not 0 < len(entry.target) <= self._limits.path_bytes_max:
                    raise refused(f"{shown(entry.name)} is a symbolic link with an unusable target")
                _remove(place.descriptor, name)
                os.symlink(entry.target, name, dir_fd=place.descriptor)
            case Kind.HARD_LINK:
                self._make_hard_link(entry, place, name)
            case _:
                raise refused(f"{shown(entry.name)} is a device or a fifo; an image may hold none")

    def _make_hard_link(self, entry: Entry, place: Place, name: bytes) -> None:
        parts = self._parts(entry.target, entry)
        if not parts:
            raise refused(f"{shown(entry.name)} is a hard link to the root")
        *parents, target = parts
        with self._place(parents, entry, create=False) as there:
            mode = _mode(there.descriptor, target) if there else 0
            if there is None or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise refused(
                    f"{shown(entry.name)} is a hard link to {shown(entry.target)}, which is not a file before it"
                )
            if there.path_of(target) == place.path_of(name):
                return
            _remove(place.descriptor, name)
            os.link(
                target,
                name,
                src_dir_fd=there.descriptor,
                dst_dir_fd=place.descriptor,
                follow_symlinks=False,
            )

    def _white_out(self, entry: Entry, parents: list[bytes], name: bytes) -> None:
        """Hides what lower layers have; what this layer brings stays, wherever it stands in it."""
        hidden = name.removeprefix(WHITEOUT)
        if name != OPAQUE and (hidden in (b"", b".", b"..") or hidden.startswith(WHITEOUT)):
            raise refused(f"{shown(entry.name)} is not a whiteout that the specification knows")
        with self._place(parents, entry, create=False) as place:
            if place is None:
                return
            names = _children(place.descriptor) if name == OPAQUE else [hidden]
            for child in names:
                self._hide(place, child)

    def _hide(self, place: Place, name: bytes) -> None:
        if place.path_of(name) not in self._fresh:
            _remove(place.descriptor, name)
        elif _is_directory(place.descriptor, name):
            place.enter(name)
            for child in _children(place.descriptor):
                self._hide(place, child)
            place.leave(1)

    def _parts(self, path: bytes, entry: Entry) -> list[bytes]:
        """The components of a recorded path. A leading slash means the root of the image."""
        if len(path) > self._limits.path_bytes_max:
            raise refused(f"{shown(path)} is longer than {self._limits.path_bytes_max} bytes")
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise refused(f"{shown(entry.name)} leaves its directory: {shown(path)}")
        return parts

    @contextmanager
    def _place(self, parts: list[bytes], entry: Entry, *, create: bool) -> Iterator[Place | None]:
        """The directory that `parts` lead to, symbolic links followed inside the root. When something on
        the way is missing it is made, or, without `create`, the answer is None."""
        place = Place([os.dup(self._root)])
        try:
            yield place if self._walk(place, parts, entry, create) else None
        finally:
            for descriptor in place.descriptors:
                os.close(descriptor)

    def _walk(self, place: Place, parts: list[bytes], entry: Entry, create: bool) -> bool:
        pending = parts[::-1]
        links = 0
        while pending:
            part = pending.pop()
            if part == b"..":
                place.leave(min(1, len(place.names)))
                continue
            mode = _mode(place.descriptor, part)
            if stat.S_ISLNK(mode):
                links += 1
                if links > self._limits.links_followed_max:
                    raise refused(f"{shown(entry.name)} lies behind too many symbolic links")
                target = os.readlink(part, dir_fd=place.descriptor)
                if target.startswith(b"/"):
                    place.leave(len(place.names))
                pending.extend(step for step in target.split(b"/")[::-1] if step not in (b"", b"."))
                continue
            if mode and not stat.S_ISDIR(mode):
                raise refused(f"{shown(entry.name)} lies below {shown(part)}, which is not a directory")
            if not mode:
                if not create:
                    return False
                _make_directory(place.descriptor, part)
            if len(place.names) >= self._limits.depth_max:
                raise refused(
                    f"{shown(entry.name)} lies below more than {self._limits.depth_max} directories"
                )
            place.enter(part)
        return True


def _mode(folder: int, name: bytes) -> int:
    """Of what is there itself, not of what it links to; 0 when there is nothing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _is_directory(folder: int, name: bytes) -> bool:
    return stat.S_ISDIR(_mode(folder, name))


def _children(folder: int) -> list[bytes]:
    return [os.fsencode(name) for name in os.listdir(folder)]


def _make_directory(folder: int, name: bytes) -> None:
    os.mkdir(name, 0o700, dir_fd=folder)
    os.chmod(name, DIRECTORY_MODE, dir_fd=folder)  # whatever the umask is


def _make_file(folder: int, name: bytes, entry: Entry, reader: TarReader) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        for data in reader.content():
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, entry.mode & FILE_MODE_MASK)
        os.utime(descriptor, (entry.mtime, entry.mtime))
    finally:
        os.close(descriptor)


def _remove(folder: int, name: bytes) -> None:
    mode = _mode(folder, name)
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=folder)
    elif mode:
        os.unlink(name, dir_fd=folder)

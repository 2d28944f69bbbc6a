"""Where the bytes of a layout lie, and streams that prove what they read.

A layout is a directory or a tar archive of one. Both answer `region(name)`: a file descriptor, an offset
and a size. Nothing outside the layout is reachable: names are ours or digests, symbolic links are not
followed, and an archive is read in place.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ficc.images.limits import CHUNK_BYTES, ImageLimits, refused
from ficc.images.tar import Kind, Stream, TarReader, shown

GZIP_MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31  # zlib: the largest window, gzip framing


@dataclass(slots=True)
class Region:
    """A part of an open file, read from its start to its end."""

    descriptor: int
    offset: int
    size: int
    position: int = 0

    def read(self, size: int) -> bytes:
        data = os.pread(self.descriptor, min(size, self.size - self.position), self.offset + self.position)
        self.position += len(data)
        return data

    def skip(self, size: int) -> None:
        self.position = min(self.position + size, self.size)


class Source(Protocol):
    def region(self, name: str) -> Region | None:
        """The named file of the layout, or None."""

    def close(self) -> None: ...


def open_source(path: Path, limits: ImageLimits) -> Source:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as failure:
        raise refused(f"{path}: {failure.strerror}") from None
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        about = os.fstat(descriptor)
        source: Source
        if stat.S_ISDIR(about.st_mode):
            source = DirectorySource(descriptor)
        elif stat.S_ISREG(about.st_mode):
            if os.pread(descriptor, 2, 0) == GZIP_MAGIC:
                raise refused(f"{path} is a compressed archive; unpack it first (gunzip)")
            if os.pread(descriptor, 5, 257) != b"ustar":
                raise refused(f"{path} is neither a directory nor a tar archive")
            source = ArchiveSource(descriptor, about.st_size, limits)
        else:
            raise refused(f"{path} is neither a directory nor a file")
        undo.pop_all()
    return source


class DirectorySource:
    def __init__(self, descriptor: int) -> None:
        self._files = ExitStack()
        self._files.callback(os.close, descriptor)
        self._root = descriptor

    def region(self, name: str) -> Region | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        *folders, last = name.split("/")
        with ExitStack() as passed:
            folder = self._root
            try:
                for part in folders:
                    folder = os.open(part, flags | os.O_DIRECTORY, dir_fd=folder)
                    passed.callback(os.close, folder)
                descriptor = os.open(last, flags, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as failure:
                raise refused(f"{name} of the layout cannot be opened: {failure.strerror}") from None
        self._files.callback(os.close, descriptor)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise refused(f"{name} of the layout is not a regular file")
        return Region(descriptor, 0, about.st_size)

    def close(self) -> None:
        self._files.close()


class ArchiveSource:
    def __init__(self, descriptor: int, size: int, limits: ImageLimits) -> None:
        self._descriptor = descriptor
        self._members: dict[str, tuple[int, int]] = {}
        archive = Region(descriptor, 0, size)
        for count, entry in enumerate(TarReader(archive), start=1):
            if count > limits.archive_entries_max:
                raise refused(f"the archive has more than {limits.archive_entries_max} entries")
            if entry.kind is not Kind.FILE:
                continue  # links name nothing here: a blob is a file of its own
            name = entry.name.removeprefix(b"./").decode(errors="backslashreplace")
            if entry.offset + entry.size > size:
                raise refused(f"the archive ends inside {shown(entry.name)}")
            if name in self._members:
                raise refused(f"the archive holds {shown(entry.name)} twice")
            self._members[name] = (entry.offset, entry.size)

    def region(self, name: str) -> Region | None:
        place = self._members.get(name)
        return Region(self._descriptor, *place) if place else None

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(slots=True)
class Proven:
    """A stream whose size and SHA-256 are checked by the time its end has been read."""

    stream: Stream
    what: str
    sha256: str
    size: int | None = None
    bytes_max: int | None = None
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)
    _read: int = 0

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self._hash.update(data)
        self._read += len(data)
        if self.bytes_max is not None and self._read > self.bytes_max:
            raise refused(f"{self.what} has more than {self.bytes_max} bytes")
        if self.size is not None and self._read > self.size:
            raise refused(f"{self.what} has more than the declared {self.size} bytes")
        return data

    def skip(self, size: int) -> None:
        while size > 0 and (data := self.read(min(size, CHUNK_BYTES))):
            size -= len(data)

    def finish(self) -> None:
        """Reads what is left and compares."""
        while self.read(CHUNK_BYTES):
            pass
        if self.size is not None and self._read != self.size:
            raise refused(f"{self.what} has {self._read} bytes; {self.size} are declared")
        actual = self._hash.hexdigest()
        if actual != self.sha256:
            raise refused(
                f"{self.what} hashes to sha256:{actual}; sha256:{self.sha256} is declared",
                expected=f"sha256:{self.sha256}",
                actual=f"sha256:{actual}",
            )


class Inflated:
    """The content of a gzip stream of one or more members, inflated a chunk at a time."""

    def __init__(self, packed: Stream, what: str) -> None:
        self._packed = packed
        self._what = what
        self._member = zlib.decompressobj(GZIP_WINDOW)
        self._input = b""
        self._fresh = True  # whether the current member has seen no byte yet

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0 and (part := self._some(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        while size > 0 and (part := self.read(min(size, CHUNK_BYTES))):
            size -= len(part)

    def _some(self, size: int) -> bytes:
        """At least one byte and at most `size`, or none at the end."""
        while True:
            if self._member.eof:
                self._input = self._member.unused_data
                self._member = zlib.decompressobj(GZIP_WINDOW)
                self._fresh = True
            if not self._input:
                self._input = self._packed.read(CHUNK_BYTES)
            if not self._input:
                if not self._fresh:
                    raise refused(f"{self._what} ends inside its gzip stream")
                return b""
            try:
                data = self._member.decompress(self._input, size)
            except zlib.error:
                raise refused(f"{self._what} is not a gzip stream, or is damaged") from None
            self._fresh = False
            self._input = self._member.unconsumed_tail
            if data:
                return data

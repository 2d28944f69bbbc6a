"""The outputs of an attempt: files that its plan names, taken out of the sandbox once the payload ended and before
its scratch space goes away, so that they outlive it.

A directory for each attempt holds the files, numbered in the order of the plan, and an index with what there is to
know of each. It is complete or not there. Everything is bounded: by the plan's own storage, by OUTPUT_BYTES_MAX, by
what the disk can spare, and over all attempts by OUTPUTS_BYTES_MAX, where the oldest go first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ficc.domain.errors import Refused
from ficc.executor import logs

OUTPUT_BYTES_MAX = 4 << 30
"""Of one attempt, all its files together."""
OUTPUTS_BYTES_MAX = 16 << 30
"""Of all attempts that are kept."""
DISK_RESERVE_BYTES = 256 << 20
"""What outputs leave free on their disk."""
READ_BYTES_MAX = 1 << 20
"""What one reading returns at most."""
COPY_BYTES = 1 << 20
LOG_BYTES_MAX = 2 * logs.SEGMENT_BYTES_MAX

_INDEX = "index.json"
_UNFINISHED = ".unfinished"

log = logging.getLogger("ficc.executor")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file. `truncated`: the file has less than the payload wrote."""

    data: bytes
    offset: int
    bytes_total: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of one output; `problem` says why there is nothing of it."""

    name: str
    bytes: int = 0
    truncated: bool = False
    problem: str | None = None


class Outputs:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    # Keeping. Blocking, and one attempt at a time.

    def collect(
        self, attempt_id: str, names: Sequence[str], open_file: Callable[[str], int], storage_bytes: int
    ) -> None:
        """Copy what the payload wrote under these names. What cannot be had is said in the index; a disk that takes
        not even that has no outputs of the attempt."""
        unfinished = self._directory / f"{attempt_id}{_UNFINISHED}"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(mode=0o700, parents=True)
            left, index = self._budget(storage_bytes), []
            for number, name in enumerate(names):
                kept = _copy(name, open_file, unfinished / str(number), left)
                left -= kept.bytes
                index.append(kept)
            _write(unfinished / _INDEX, json.dumps([asdict(kept) for kept in index]).encode())
            _sync(unfinished)
            os.rename(unfinished, self._directory / attempt_id)
            _sync(self._directory)
            self._trim(attempt_id)
        except OSError as error:
            log.warning("the outputs of attempt %s were not kept: %s", attempt_id, error)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _budget(self, storage_bytes: int) -> int:
        space = os.statvfs(self._directory)
        spare = space.f_bavail * space.f_frsize - DISK_RESERVE_BYTES
        return max(0, min(storage_bytes, OUTPUT_BYTES_MAX, spare))

    def _trim(self, newest: str) -> None:
        """Let the oldest go until all together are within their bound."""
        kept = sorted((path.stat().st_mtime_ns, path) for path in self._directory.iterdir())
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for _, path in kept}
        total = sum(sizes.values())
        for _, path in kept:
            if total <= OUTPUTS_BYTES_MAX:
                return
            if path.name != newest:
                log.info("the outputs of attempt %s made room", path.name)
                shutil.rmtree(path, ignore_errors=True)
                total -= sizes[path]

    def remove(self, attempt_id: str) -> None:
        shutil.rmtree(self._directory / attempt_id, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> None:
        """Remove what an earlier run left unfinished, and what is of no attempt that is known."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)

    # Reading.

    def read(self, attempt_id: str, name: str, offset: int, limit: int) -> Piece:
        """A part of an output. Blocking. Raises Refused `not_found`."""
        directory = self._directory / attempt_id
        try:
            index = [Kept(**entry) for entry in json.loads((directory / _INDEX).read_bytes())]
        except FileNotFoundError:
            raise Refused(
                "not_found", "The outputs of the attempt are no longer kept, or never were.", "name"
            ) from None
        found = next((number for number, kept in enumerate(index) if kept.name == name), None)
        if found is None:
            names = ", ".join(kept.name for kept in index)
            raise Refused("not_found", f"The plan names no output {name[:128]!r}; it names {names}.", "name")
        kept = index[found]
        if kept.problem is not None:
            raise Refused("not_found", f"There is no output {name!r}: {kept.problem}", "name")
        with (directory / str(found)).open("rb") as file:
            file.seek(offset)
            return Piece(file.read(limit), offset, kept.bytes, kept.truncated)


def piece_of_log(directory: Path, attempt_id: str, offset: int, limit: int) -> Piece:
    """A part of what is kept of a log, counted from its oldest byte. Blocking."""
    data, cut = logs.tail(directory, attempt_id, LOG_BYTES_MAX)
    return Piece(data[offset : offset + limit], offset, len(data), cut)


def _copy(name: str, open_file: Callable[[str], int], target: Path, bytes_max: int) -> Kept:
    """Raises OSError when the target cannot be written."""
    try:
        source = open_file(name)
    except FileNotFoundError:
        return Kept(name, problem="the command did not write it.")
    except OSError as error:
        return Kept(name, problem=f"it cannot be read ({error.strerror or error}).")
    try:
        with open(target, "xb", opener=_private) as file:
            copied = 0
            while data := os.read(source, min(COPY_BYTES, bytes_max - copied)):
                file.write(data)
                copied += len(data)
            truncated = copied == bytes_max and bool(os.read(source, 1))
            file.flush()
            os.fsync(file.fileno())
        return Kept(name, copied, truncated)
    finally:
        os.close(source)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

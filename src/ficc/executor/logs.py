"""The log of an attempt: its output, bounded, the newest kept, on disk so that it outlives the attempt.

Two segments: the current one is written until it is full, then takes the place of the earlier one. A disk
that takes no more costs lines of the log, never the engine: its output is read on and dropped.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

SEGMENT_BYTES_MAX = 1 << 20
TAIL_BYTES_MAX = 256 << 10
"""What one reading returns at most."""
LAST_LINES = 12
LAST_LINES_BYTES_MAX = 2000
LAST_LINE_CHARACTERS_MAX = 200
WORD = re.compile(r"[^\W_]{2}")
TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Sequences of ECMA-48 (colours, cursor) and titles: for a terminal, not for people."""
MISLEADING = re.compile(r"no API key is set|\bCORS\b")
"""What an engine warns of that stands behind our gateway, reached by nothing but a socket of its own."""


class AttemptLog:
    """Raises OSError when it cannot be made."""

    def __init__(self, directory: Path, attempt_id: str) -> None:
        self._current, self._earlier = _paths(directory, attempt_id)
        self._fd = _open(self._current)
        self._bytes = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Append. After `close`, and on a disk that is full, nothing happens."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if self._bytes + len(data) > SEGMENT_BYTES_MAX:
                self._turn_over()
            self._bytes += os.write(self._fd, data[-SEGMENT_BYTES_MAX:])

    def _turn_over(self) -> None:
        os.replace(self._current, self._earlier)
        full, self._fd = self._fd, _open(self._current)
        os.close(full)
        self._bytes = 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def tail(directory: Path, attempt_id: str, bytes_max: int = TAIL_BYTES_MAX) -> tuple[bytes, bool]:
    """The newest bytes of a log, and whether older ones were left out. An attempt without a log has none."""
    current, earlier = _paths(directory, attempt_id)
    newest = _last_bytes(current, bytes_max + 1)
    if len(newest) <= bytes_max:
        newest = _last_bytes(earlier, bytes_max + 1 - len(newest)) + newest
    return newest[-bytes_max:], len(newest) > bytes_max


def last_lines(directory: Path, attempt_id: str) -> str:
    """The last lines of a log, for a reason that people read: without what would send them the wrong way."""
    return "\n".join(_lines(directory, attempt_id)[-LAST_LINES:])


def last_line(directory: Path, attempt_id: str) -> str:
    """The last line of a log that has a word in it."""
    spoken = [line for line in _lines(directory, attempt_id) if WORD.search(line)]
    return spoken[-1].strip()[:LAST_LINE_CHARACTERS_MAX] if spoken else ""


def _lines(directory: Path, attempt_id: str) -> list[str]:
    """The newest lines that are not empty, without what steers a terminal."""
    data, _ = tail(directory, attempt_id, LAST_LINES_BYTES_MAX)
    lines = TERMINAL.sub("", data.decode("utf-8", "replace")).splitlines()
    told = [line for line in lines if line.strip() and not MISLEADING.search(line)]
    return ["".join(c if c.isprintable() else "�" for c in line.replace("\t", " ")) for line in told]


def size(directory: Path, attempt_id: str) -> int:
    """How many bytes a log takes."""
    total = 0
    for path in _paths(directory, attempt_id):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def remove(directory: Path, attempt_id: str) -> None:
    for path in _paths(directory, attempt_id):
        path.unlink(missing_ok=True)


def _paths(directory: Path, attempt_id: str) -> tuple[Path, Path]:
    """The current segment and the earlier one."""
    return directory / f"{attempt_id}.log", directory / f"{attempt_id}.earlier.log"


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _last_bytes(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            return file.read(count)
    except FileNotFoundError:
        return b""

"""How long `ficc up` lives: alone on its state directory, until somebody asks it to end or nobody is left who
started it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ficc.cli.failure import Failure

LOCK_FILE = "up.lock"
"""In the state directory: locked, and holding the pid, as long as `ficc up` runs."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a process of ours to end: Ctrl-C, a supervisor, a terminal that was closed."""


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a state directory against every other `ficc up`. Raises Failure; then nothing was touched."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode().strip() or "unknown"
            raise Failure(
                "already_running",
                f"ficc already runs on {directory} (pid {pid}); ficc open prints its console.",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(fd)


class Asked:
    """Whether this process was asked to end."""

    def __init__(self, lifeline: bool) -> None:
        self._watched = [sys.stdin] if lifeline else []
        self._signalled = False

    def signalled(self, *_: object) -> None:
        self._signalled = True

    def within(self, seconds: float) -> bool:
        """Wait so long at most; whether it was asked."""
        if not self._signalled:
            readable, _, _ = select.select(self._watched, [], [], seconds)
            # Somebody who writes is alive.
            self._signalled |= bool(readable) and not os.read(sys.stdin.fileno(), 4096)
        return self._signalled


@contextmanager
def until_asked(*, lifeline: bool) -> Iterator[Asked]:
    """Take every signal that ends us as a question. `lifeline`: the end of standard input is one too, for a
    process that was started by another and must not outlive it, however that one ends."""
    asked = Asked(lifeline)
    earlier = {
        number: signal.signal(number, asked.signalled)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
    }
    try:
        yield asked
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

"""Commands that stay: started as a user would, watched from outside, and ended with everything below them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent


class Command:
    """A running command; what it says goes to a file."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                env={**os.environ, "NO_COLOR": "1", **environment},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The process and all below it."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def end(self) -> None:
        if self.process.poll() is None:
            family = self.family()
            self.process.terminate()
            try:
                self.process.wait(90)
            finally:
                for process in family:
                    if process.is_running():
                        process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()


def eventually(look: Callable[[], object], what: str, seconds: float = 90.0) -> None:
    """Wait until it holds, for a generous time."""
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, f"after {seconds:.0f} s: not {what}"
        time.sleep(0.1)

"""The programs that a build runs: bounded in time, and their output made fit for a message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence

from ficc.domain.errors import Refused

CREDENTIALS = re.compile(r"//[^/\s@]*@")


def build_failed(message: str) -> Refused:
    return Refused("build_failed", message)


def run_bounded(command: Sequence[str], *, seconds_max: int, what: str) -> tuple[int, str]:
    """Status and output (both streams) of a command, ended with all its children when it takes too long
    or we are interrupted."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds_max)
    except subprocess.TimeoutExpired:
        raise build_failed(f"{what} took more than {seconds_max} s; check the network, try again") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


def last_lines(output: str, count: int = 6) -> str:
    """The end of a tool's output for a message, without what stands before the @ of a URL."""
    lines = [line[:300] for line in output.splitlines() if line.strip()][-count:]
    return CREDENTIALS.sub("//", "\n".join(lines))

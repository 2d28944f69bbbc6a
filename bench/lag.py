"""How late an event loop wakes a task that wanted to sleep for some milliseconds.

    python -m bench.lag [MODULE]

runs a module of ficc as `python -m` does, with such a task on its loop; or the task alone, which then tells what the
machine itself does to a process that does nothing. Each line in the file that `BENCH_LAGS` names is a moment (of
`time.perf_counter`) and how late it was, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TextIO

import uvloop

from bench.beside import run_module

FILE = "BENCH_LAGS"
SLEEP_SECONDS = 0.005


async def watch(file: TextIO) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(SLEEP_SECONDS)
        now = time.perf_counter()
        file.write(f"{now} {now - began - SLEEP_SECONDS}\n")


def lags(file: Path, since: float, until: float) -> list[float]:
    """Those between two moments."""
    found = (tuple(map(float, line.split())) for line in file.read_text().splitlines())
    return [lag for moment, lag in found if since <= moment <= until]


def main() -> None:
    with Path(os.environ[FILE]).open("w", buffering=1) as file:  # before the module gives up the right to
        if len(sys.argv) == 1:
            uvloop.run(watch(file))
        run_module(sys.argv.pop(1), lambda: watch(file))


if __name__ == "__main__":
    main()

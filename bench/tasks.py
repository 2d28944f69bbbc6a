"""How many asyncio tasks a process of ficc has.

    python -m bench.tasks MODULE

runs a module of ficc as `python -m` does, and once a second writes the number of tasks on its loop into a file named
after the module, in the directory that `BENCH_TASKS` names.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import BinaryIO

from bench.beside import run_module

DIRECTORY = "BENCH_TASKS"
SECONDS = 1.0


async def watch(file: BinaryIO) -> None:
    while True:
        await asyncio.sleep(SECONDS)
        os.pwrite(file.fileno(), b"%-8d\n" % (len(asyncio.all_tasks()) - 1), 0)  # without this one


def count(module: str) -> int:
    """What a module wrote last."""
    return int((Path(os.environ[DIRECTORY]) / module).read_text() or 0)


def main() -> None:
    path = Path(os.environ[DIRECTORY]) / sys.argv[1]
    with path.open("wb") as file:  # before the module gives up the right to
        run_module(sys.argv.pop(1), lambda: watch(file))


if __name__ == "__main__":
    main()

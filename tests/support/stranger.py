"""Runs a program of this checkout under another account, as its user would have it.

usage: python stranger.py UID DIRECTORY PROGRAM ARGUMENT…

Python and the checkout may lie where other accounts cannot go; then the program sees a view of them. DIRECTORY
is the account's own and the program's home.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ficc
from ficc.controller.account import become


def main() -> None:
    uid, directory, *words = sys.argv[1:]
    needed = [Path(sys.prefix), Path(sys.base_prefix), Path(ficc.__file__).parents[1], Path(directory)]
    become(int(uid), needed)
    os.chdir(directory)
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, "HOME": directory})


if __name__ == "__main__":
    main()

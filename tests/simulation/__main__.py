"""Run seeds of the simulation: one with its trace, or many in parallel with what they covered."""

from __future__ import annotations

import os
import sys


def run() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text are walked in the same order in every process
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    from simulation.runner import main  # which takes seconds

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())

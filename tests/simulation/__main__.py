"""Run seeds of the simulation: one with its trace, or many in parallel with what they covered."""

from __future__ import annotations

import sys

from simulation.runner import main

sys.exit(main(sys.argv[1:]))

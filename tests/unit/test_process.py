"""What long-running processes do to themselves."""

from __future__ import annotations

import subprocess
import sys

from ficc.process import YOUNG_OBJECTS_MAX

PROGRAM = f"""
import gc
from ficc.process import freeze_garbage_collector
freeze_garbage_collector()
looked = []
gc.callbacks.append(lambda phase, info: looked.append(phase))
held = [[] for _ in range({YOUNG_OBJECTS_MAX} // 2)]
print(gc.get_freeze_count() > 1000, looked)
"""


def test_what_a_burst_of_requests_holds_is_not_looked_through() -> None:
    """In a process of its own: what is frozen stays so."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout == "True []\n"

"""Kills its process with SIGKILL before or after a chosen function: a crash at exactly that point.

In PYTHONPATH of a controller. What is written into the file that FICC_TEST_KILL_FILE names is looked at whenever
one of these functions runs: `before ContentStore.publish`, or `after …`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ficc.content.store import ContentStore

POINTS = ("write", "sync", "publish", "truncate", "adopt", "bin_blob", "bin_partial", "empty_bin")
ORDERS = os.environ.get("FICC_TEST_KILL_FILE")


def killing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if ordered(f"before {name}"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments)
        if ordered(f"after {name}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def ordered(point: str) -> bool:
    try:
        return ORDERS is not None and Path(ORDERS).read_text() == point
    except FileNotFoundError:
        return False


for method in POINTS:
    setattr(ContentStore, method, killing(method, getattr(ContentStore, method)))

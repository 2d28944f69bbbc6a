"""Identifiers made now: the one place where the clock and chance go into an id."""

from __future__ import annotations

import os
import time

from ficc.domain import ids


def new_id() -> str:
    return ids.make(time.time_ns() // 1_000_000, os.urandom(ids.RANDOM_BYTES))

"""The pulse of an engine: when it last sent something of an answer, and since when requests wait for something."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

COMMENT = ord(":")
"""A server-sent comment begins so: an engine's HTTP server sends them while the engine itself hangs."""


class Pulse:
    """Times are CLOCK_MONOTONIC, seconds: what a suspended machine sleeps through counts against nobody."""

    def __init__(self) -> None:
        self._heard = -math.inf
        self._given_up = -math.inf
        """When the first request was sent that ended without a word since the engine was last heard."""

    def hear(self, data: bytes | bytearray) -> None:
        """Something of an answer's body came."""
        if data and data[0] != COMMENT:
            self._heard = time.monotonic()

    def end(self, sent: float) -> None:
        """A request that was sent then is over."""
        if self._heard < sent and self._given_up <= self._heard:
            self._given_up = sent

    def heard_since(self, then: float) -> bool:
        return self._heard >= then

    def waiting_seconds(self, sent: Iterable[float]) -> float:
        """For how long requests have waited without a word from the engine. `sent` is when those were sent that
        wait still; those who gave up count until it is heard again."""
        since = [max(self._heard, one) for one in sent]
        if self._given_up > self._heard:
            since.append(self._given_up)
        return time.monotonic() - min(since) if since else 0.0

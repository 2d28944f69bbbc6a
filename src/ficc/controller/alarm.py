"""A deadline that is moved far more often than it is met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `ring` once the time is over, unless it was moved or cleared before.

    Moving it later or clearing it touches no timer of the loop: the one timer that is pending looks at
    the deadline when it fires, and is armed again if it came too early.
    """

    __slots__ = ("_at", "_loop", "_ring", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at: float | None = None
        self._ring: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, ring: Callable[[], None]) -> None:
        self._at = self._loop.time() + seconds
        self._ring = ring
        if self._timer is None:
            self._timer = self._loop.call_at(self._at, self._fire)
        elif self._timer.when() > self._at:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._at, self._fire)

    def clear(self) -> None:
        self._at = self._ring = None

    def cancel(self) -> None:
        """Clears it and gives up its timer, for an owner that is done with it."""
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._at is None or self._ring is None:
            return
        if self._at > self._loop.time():
            self._timer = self._loop.call_at(self._at, self._fire)
            return
        ring = self._ring
        self.clear()
        ring()

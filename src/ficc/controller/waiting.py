"""Waiting as background work does it: until there is something to do, and never longer than its interval."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def woken(wake: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or for so long. The event stays as it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()

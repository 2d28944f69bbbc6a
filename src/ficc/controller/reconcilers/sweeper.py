"""The sweeper: removes what crashes left in the content store, on a timer. Any number of controllers may sweep
the same store."""

from __future__ import annotations

import asyncio
import logging

from ficc.controller.operations.orphans import Orphans
from ficc.domain.errors import Refused

log = logging.getLogger("ficc.controller")


class Sweeper:
    """The first sweep is that of the controller's start."""

    def __init__(self, orphans: Orphans, interval_seconds: float) -> None:
        self._orphans = orphans
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self._orphans.sweep()
            except Refused as refused:
                log.warning("the content store was not swept: %s", refused)

"""What attempts took of their machines' memory, as executors measure it, for later previews."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ficc.controller.operations.context import Context
from ficc.controller.store import attempts, peaks
from ficc.controller.store.database import Transaction
from ficc.domain.errors import Refused

RETRY_SECONDS = 2.0

log = logging.getLogger("ficc.controller")


class Peaks:
    """Measurements come on the event loop and are written by `run`: the newest of each attempt."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._unwritten: dict[str, int] = {}
        self._wake = asyncio.Event()

    def note(self, attempt_id: str, peak_bytes: int) -> None:
        self._unwritten[attempt_id] = max(peak_bytes, self._unwritten.get(attempt_id, 0))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            noted, self._unwritten = self._unwritten, {}
            try:
                await self._context.database.write(partial(self._write, noted=noted))
            except Refused as refused:
                log.warning("memory peaks were not recorded: %s", refused)
                for attempt_id, peak_bytes in noted.items():
                    self.note(attempt_id, peak_bytes)
                await asyncio.sleep(RETRY_SECONDS)

    def _write(self, tx: Transaction, noted: dict[str, int]) -> None:
        for attempt_id, peak_bytes in noted.items():
            found = attempts.get(tx.connection, attempt_id)
            if found is not None and not found.plan["limits"]["gpu_devices"]:
                peaks.note(tx, found, peak_bytes, self._context.now())

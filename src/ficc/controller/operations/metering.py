"""Usage records on their way into the database: gathered, written in groups, held for a while when it is away.

What is held here is lost when the controller is killed: the records of the last GROUP_SECONDS, and the requests that
were open.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from itertools import islice

from ficc.controller.operations.context import Context
from ficc.controller.store import usage as rows
from ficc.controller.waiting import woken
from ficc.domain.errors import Refused
from ficc.domain.usage import SECONDS_PER_DAY, Outcome, Record

GROUP_SECONDS = 0.1
"""How long a record waits for others to be written with it."""
GROUP_RECORDS_MAX = 5000
"""Of one transaction."""
REFUSALS_MAX = 100
"""Refusals that are kept one by one until the next write; of more, those that are alike become one record."""
RETRY_SECONDS = 1.0
SWEEP_SECONDS = 3600.0
PURGE_RECORDS_MAX = 10_000
"""Of one transaction, so that nobody waits long for the one writer."""

log = logging.getLogger("ficc.controller")


class Metering:
    """The gateway's meter: records come on the event loop and are written by `run`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._held_records_max = context.settings.metering.held_records_max
        self._held: deque[Record] = deque()
        self._refusals = 0
        self._alike: dict[tuple[object, ...], Record] = {}
        self._wake = asyncio.Event()
        self.lost = 0
        """Records that found no room while the database was away."""
        self._lost_said = 0

    def add(self, record: Record) -> None:
        if record.outcome is Outcome.REFUSED:
            self._refusals += 1
            if self._refusals > REFUSALS_MAX:
                self._add_to_alike(record)
                return
        self._keep(record)

    def _keep(self, record: Record) -> None:
        if len(self._held) + len(self._alike) >= self._held_records_max:
            self.lost += record.requests
            return
        self._held.append(record)
        self._wake.set()

    def _add_to_alike(self, record: Record) -> None:
        """One more of a flood. There are as many kinds as callers times codes, and they are bounded with the rest."""
        kind = (record.authority_id, record.service_id, record.path, record.code)
        known = self._alike.get(kind)
        if known is not None:
            self._alike[kind] = known._replace(requests=known.requests + 1)
            self._wake.set()
        elif len(self._held) + len(self._alike) >= self._held_records_max:
            self.lost += 1
        else:
            self._alike[kind] = record
            self._wake.set()

    async def run(self) -> None:
        away = False
        while True:
            await self._wake.wait()
            await asyncio.sleep(GROUP_SECONDS)
            try:
                await self.flush()
                away = False
            except Refused as refused:
                self._say_lost()
                if not away:
                    log.warning("usage records are held until the database answers: %s", refused)
                away = True
                await asyncio.sleep(RETRY_SECONDS)

    async def flush(self) -> None:
        """Write what is held. Raises Refused when the database is away; nothing is forgotten then. Being cancelled
        in the middle writes the same records once more, which changes nothing."""
        self._held.extend(self._alike.values())
        self._alike.clear()
        self._refusals = 0
        while self._held:
            group = list(islice(self._held, GROUP_RECORDS_MAX))
            try:
                await self._context.database.write(partial(rows.add, records=group))
            except Refused:
                raise
            except Exception:  # a fault of ours must not keep all that comes behind it
                log.exception("a group of usage records cannot be written")
                self.lost += sum(record.requests for record in group)
            for _ in group:
                self._held.popleft()
        if not self._alike:
            self._wake.clear()
        self._say_lost()

    async def close(self) -> None:
        """Write what is held, or say that it is lost."""
        try:
            await self.flush()
        except Refused as refused:
            self.lost += sum(record.requests for record in self._held)
            log.warning("usage records were not written: %s", refused)
            self._say_lost()

    def _say_lost(self) -> None:
        if self.lost > self._lost_said:
            log.error(
                "%d usage records were lost since the start: the database was away and metering.held_records_max "
                "was reached, or the controller stopped",
                self.lost,
            )
            self._lost_said = self.lost


class Retention:
    """Removes records that are older than they are kept."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stale = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                await self.sweep()
            except Refused as refused:
                log.warning("old usage records were not removed: %s", refused)
            await woken(self._stale, SWEEP_SECONDS)

    async def sweep(self) -> int:
        """How many were removed. Raises Refused."""
        days = self._context.settings.metering.retention_days
        if not days:
            return 0
        before, removed = self._context.now() - days * SECONDS_PER_DAY, 0
        while True:
            count = await self._context.database.write(lambda tx: rows.purge(tx, before, PURGE_RECORDS_MAX))
            removed += count
            if count < PURGE_RECORDS_MAX:
                return removed

"""The loop that brings what is recorded and what runs together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from ficc.controller.operations.context import Context
from ficc.controller.reconcilers.attempts import AttemptSteps
from ficc.controller.waiting import woken
from ficc.domain.errors import Refused

TICK_SECONDS = 1.0

log = logging.getLogger("ficc.controller")


class Part(Protocol):
    async def once(self) -> set[str]:
        """Take the next step of everything of one kind that is not at rest; the attempts that were looked at.
        Raises Refused while the database is away."""


class Reconciler:
    """Looks again after every commit, after every report of a node, and now and then."""

    def __init__(
        self, context: Context, steps: AttemptSteps, parts: Sequence[Part], wake: asyncio.Event
    ) -> None:
        self._steps = steps
        self._parts = parts
        self._wake = wake
        context.database.on_commit(lambda changes: wake.set())

    async def run(self) -> None:
        while True:
            await woken(self._wake, TICK_SECONDS)
            self._wake.clear()
            try:
                held = [await part.once() for part in self._parts]
                self._steps.forget_all_but(set().union(*held))
            except Refused as refused:
                log.warning("not everything was reconciled: %s", refused)
                await asyncio.sleep(TICK_SECONDS)

    def close(self) -> None:
        self._steps.close()

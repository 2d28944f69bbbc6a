"""Liveness: whether an engine that was ready still answers, judged without taking a slot from anybody.

While anything of an answer comes from the engine it lives, and is not asked. Else there are two questions:

- Does its process answer? It is asked by a route of its endpoint contract that takes no slot (its GET route, if
  the adapter gave it one), ASKS times within the time that is allowed for silence. Any answer will do.
- Does it still do its work? An engine whose device hangs goes on answering the first question. So when requests
  wait and for all that time nothing came of any answer, the readiness request is sent once more, beside the slots.
  Engines take requests in turn, so it may wait behind those that fill the slots: it has as long as a request of the
  service has at all, after which all of them have ended. A saturated engine answers it then; one that answers
  nobody in all this time has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ficc.controller.operations.ports import NodeLink
from ficc.domain.errors import Reason, Refused
from ficc.domain.plan import Fence

ASKS = 3
"""Questions without an answer, one after another, after which an engine's process is held to be dead."""
GONE = frozenset({"service_not_ready", "attempt_unknown", "fenced", "service_stopped"})
"""Refusals that say that the attempt is ending or ended."""


async def death(
    link: NodeLink,
    fence: Fence,
    readiness: Mapping[str, Any],
    silence_seconds: float,
    deadline_seconds: float,
) -> Reason | None:
    """Why the engine is held to be dead, once it is; None when the attempt ends otherwise.

    Raises Refused when the node does not answer.
    """
    try:
        return await _death(link, fence, readiness, silence_seconds, deadline_seconds)
    except Refused as refused:
        if refused.code in GONE:
            return None
        raise


async def _death(
    link: NodeLink,
    fence: Fence,
    readiness: Mapping[str, Any],
    silence_seconds: float,
    deadline_seconds: float,
) -> Reason:
    pause = silence_seconds / (2 * ASKS)  # and as long for each answer
    unanswered = 0
    while unanswered < ASKS:
        await asyncio.sleep(pause)
        said = await link.alive(fence, pause)
        unanswered = 0 if said.answers else unanswered + 1
        doubtful = said.answers and said.waiting_seconds >= silence_seconds
        patience = deadline_seconds + silence_seconds
        if doubtful and not await link.ask(fence, readiness["path"], readiness["body"], patience):
            return Reason(
                "engine_unresponsive", "The engine answers no request any more, our test request included."
            )
    return Reason("engine_unresponsive", f"The engine gave no sign of life for {silence_seconds:.0f} s.")

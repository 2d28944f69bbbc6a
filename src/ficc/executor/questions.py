"""Questions to an engine beside its slots: whether its process answers, and whether it still does its work."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from ficc.domain.errors import Refused
from ficc.executor.endpoint import Exchange, Gate, request_head
from ficc.executor.pulse import Pulse
from ficc.protocol.executor_wire import Data

LOOK_SECONDS = 0.5
"""Between two looks whether an engine answered anybody."""
SECONDS_MAX = 2 * 86_400.0


class Question(Exchange):
    """A request of our own. It is done with the first of its answer, or without one."""

    def __init__(self, gate: Gate, pulse: Pulse) -> None:
        super().__init__(lambda _: None, pulse)
        self._gate = gate
        self.answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def put(self, method: str, path: str, body: bytes, seconds: float) -> None:
        self.transmit(request_head(method, path, "application/json", len(body)) + body, seconds)
        self._gate.questions.add(self)
        self.read(self._take)

    def _take(self, answer: Data | Refused) -> None:
        if not self.answered.done():
            self.answered.set_result(not isinstance(answer, Refused) or answer.code == "engine_error")

    def close(self) -> None:
        self._gate.questions.discard(self)
        self.cancel()


async def alive(gate: Gate, seconds: float) -> bool:
    """Whether the engine's process answers within so long: by what came of answers lately, else by its GET route.
    One that has no such route and listens is taken for alive."""
    path = next((path for method, path in gate.contract.routes if method == "GET"), None)
    if path is None or gate.pulse.heard_since(time.monotonic() - seconds):
        return True
    return await _put(gate, Pulse(), "GET", path, b"", seconds) is True


async def works(gate: Gate, path: str, body: bytes, seconds: float) -> bool:
    """Whether the engine answers this request, or anybody, within so long. Raises Refused."""
    if ("POST", path) not in gate.contract.routes or len(body) > gate.contract.body_bytes_max:
        raise Refused("not_found", f"The endpoint contract admits no POST {path} of {len(body)} bytes.")
    began = time.monotonic()
    asked = asyncio.create_task(_put(gate, gate.pulse, "POST", path, body, seconds))
    try:
        while not asked.done() and not gate.pulse.heard_since(began):
            await asyncio.wait((asked,), timeout=LOOK_SECONDS)
        return await asked if asked.done() else True
    finally:
        asked.cancel()


async def _put(gate: Gate, pulse: Pulse, method: str, path: str, body: bytes, seconds: float) -> bool:
    """Whether there was an answer of any kind. Raises Refused once the gate is closed."""
    gate.check(gate.fence)
    try:
        async with asyncio.timeout(seconds):
            question = await gate.connect(Question(gate, pulse))
    except (TimeoutError, Refused):
        gate.check(gate.fence)
        return False
    try:
        question.put(method, path, body, seconds)
        answered = await question.answered
    finally:
        with suppress(Refused):
            question.close()
    gate.check(gate.fence)
    return answered

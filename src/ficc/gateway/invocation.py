"""One request on its way, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.usage import Tokens
from ficc.gateway.answers import Pull, Source
from ficc.gateway.limiter import Permit
from ficc.gateway.ports import Headers, Replica, Stream
from ficc.gateway.slots import Place
from ficc.protocol import openai
from ficc.protocol.sse import Tally


@dataclass(eq=False, slots=True)
class Invocation:
    """What lives of one request. `id` is unique, `request_id` as the client wishes. `on_abort` is told once, when
    it is ended early. Times are the loop's, `started_at` the clock's."""

    id: str
    request_id: str
    actor: Actor
    path: str
    service_id: str | None
    began: float
    started_at: float
    alias: str | None = None
    generation: int = 0
    replica: Replica | None = None
    """That has the request, or had it last."""
    stream: Stream | None = None
    pull: Pull | None = None
    opening: asyncio.Task[Any] | None = None
    """What waits for the link while the stream is being opened."""
    place: Place | None = None
    permit: Permit | None = None
    ended: Refused | None = None
    on_abort: Callable[[Refused], None] | None = None
    timer: asyncio.TimerHandle | None = None
    release: Callable[[], None] | None = None
    headers: Headers = field(default_factory=list)
    """Besides those of every answer: what is left of the caller's limits."""

    # What is recorded of it.
    queue_seconds: float = 0.0
    status: int | None = None
    """Of the answer, once it has begun."""
    whole: bool = False
    computing: bool = False
    """Whether an engine has it, or may have it."""
    tally: Tally | None = None
    told: Tokens | None = None

    def abort(self, why: Refused) -> None:
        """End the invocation, wherever it stands: in the queue, being opened, in the stream."""
        if self.ended is not None:
            return
        self.ended = why
        if self.place is not None:
            self.place.wake()
        if self.opening is not None:
            self.opening.cancel()
        if self.stream is not None:
            self.stream.abort(why)
        if self.on_abort is not None:
            self.on_abort(why)

    def check(self) -> None:
        if self.ended is not None:
            raise self.ended

    def counted(self) -> Tokens | None:
        """What the engine said of tokens, as far as its answer came."""
        if self.told is None and self.tally is not None:
            self.told = openai.tokens_in_stream(self.tally.tail)
        return self.told


class Chunks:
    """An answer's bytes, with its headers. `aclose` gives everything back, at any moment, once.
    `in_one_piece`: the first chunk is the whole answer."""

    def __init__(
        self,
        request_id: str,
        headers: Headers,
        source: Source,
        close: Callable[[], None],
        *,
        in_one_piece: bool = False,
    ) -> None:
        self.request_id = request_id
        self.headers = headers
        self.in_one_piece = in_one_piece
        self._source = source
        self._close = close

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> bytes:
        return await self._source.__anext__()

    async def aclose(self) -> None:
        self._close()
        await self._source.aclose()

"""The gateway's ports, played from scripts: streams that answer what a test wrote down, one link, one route."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.limits import Allowance
from ficc.domain.plan import Fence
from ficc.domain.service import State
from ficc.domain.usage import Record
from ficc.gateway.limiter import Limiter
from ficc.gateway.ports import Link, Replica, Route, Stream
from ficc.gateway.relay import Chunks, Gateway, Limits
from ficc.protocol.executor_wire import Data, Head

JSON = "application/json"
EVENTS = "text/event-stream"
ACTOR = Actor("token", "t", "somebody", "p", frozenset({"inference:invoke"}))
NOW = 1.7e9
QUIET = "quiet"
"""In a script: nothing comes until the stream is nudged or aborted."""
Line = Data | Refused | str


def head(content_type: str = JSON, data: bytes = b"", *, status: int = 200, end: bool = False) -> Data:
    """The first piece of an answer."""
    return Data(Head(status, content_type), data, end)


def more(data: bytes = b"", *, end: bool = False) -> Data:
    return Data(None, data, end)


class ScriptedStream:
    """Answers each read with the next line of its script, and is silent behind the last."""

    def __init__(self, *script: Line) -> None:
        self._script = list(script)
        self._waiting: asyncio.Future[Data] | None = None
        self._aborted: Refused | None = None
        self.closed = False

    async def read(self) -> Data:
        if self._aborted is not None:
            raise self._aborted
        await asyncio.sleep(0)
        line = self._script.pop(0) if self._script else QUIET
        if isinstance(line, Data):
            return line
        if isinstance(line, Refused):
            raise line
        self._waiting = asyncio.get_running_loop().create_future()
        return await self._waiting

    def nudge(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(more())

    def abort(self, why: Refused) -> None:
        self._aborted = self._aborted or why
        self.closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(why)

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedLink:
    """Opens the streams it was given, in turn; a refusal in their place is raised."""

    answers: list[ScriptedStream | Refused]
    sent: list[bytes] = field(default_factory=list)

    async def open_stream(
        self, fence: Fence, path: str, body: bytes, deadline_seconds: float, *, by_data: bool = False
    ) -> Stream:
        answer = self.answers.pop(0)
        if isinstance(answer, Refused):
            raise answer
        self.sent.append(body)
        return answer


ROUTE = Route(
    service_id="s",
    project_id="p",
    alias="assistant",
    model_name="smollm2",
    capabilities=frozenset({"chat", "completions", "embeddings", "rerank"}),
    state=State.READY,
    generation=1,
    deadline_seconds=60,
    created_at=1.7e9,
    replicas=(Replica("a", "n", Fence("01arz3ndektsv4rrffq69g5fav", 1, "0" * 64), 1, "1" * 64),),
)


@dataclass
class OneRoute:
    route: Route
    the_link: ScriptedLink

    def change(self, state: State) -> None:
        self.route = replace(self.route, state=state)

    def get(self, service_id: str) -> Route | None:
        return self.route if service_id == self.route.service_id else None

    def by_alias(self, project_id: str, alias: str) -> Route | None:
        return self.route if (project_id, alias) == (self.route.project_id, self.route.alias) else None

    def of_project(self, project_id: str) -> Sequence[Route]:
        return [self.route] if project_id == self.route.project_id else []

    def link(self, node_id: str) -> Link | None:
        return self.the_link

    def is_stale(self, service_id: str) -> bool:
        return False

    async def settle(self) -> None:
        pass


class Records(list[Record]):
    """A meter that keeps everything."""

    def add(self, record: Record) -> None:
        self.append(record)


class Known:
    """Whoever shows the secret `good` is one actor, until its credential is gone."""

    def __init__(self, actor: Actor = ACTOR) -> None:
        self.actor = actor
        self.gone = False

    def authenticate(self, secret: str) -> Actor:
        if secret != "good":
            raise Refused("unauthenticated", "This credential is not known.")
        return self.actor

    def recheck(self, actor: Actor) -> Actor:
        if self.gone:
            raise Refused("unauthenticated", "This credential is not known any more.")
        return actor


def gateway(
    *answers: ScriptedStream | Refused,
    limits: Limits | None = None,
    actor: Actor = ACTOR,
    records: Records | None = None,
    project: Allowance | None = None,
    authority: Known | None = None,
) -> tuple[Gateway, OneRoute]:
    """A gateway whose engine gives these answers, one for each request."""
    routes = OneRoute(ROUTE, ScriptedLink(list(answers)))
    numbers = itertools.count(1)
    made = Gateway(
        routes=routes,
        authority=authority or Known(actor),
        limits=limits or Limits(),
        meter=Records() if records is None else records,
        limiter=Limiter(project or Allowance()),
        new_id=lambda: f"r{next(numbers)}",
        now=lambda: NOW,
    )
    return made, routes


async def whole(chunks: Chunks) -> bytes:
    try:
        return b"".join([chunk async for chunk in chunks])
    finally:
        await chunks.aclose()

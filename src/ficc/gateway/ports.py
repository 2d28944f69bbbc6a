"""What the gateway needs of the rest, as protocols: routes, links, authority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.domain.service import State
from ficc.domain.usage import Record
from ficc.protocol.executor_wire import Data

Headers = list[tuple[bytes, bytes]]


class Stream(Protocol):
    """One invocation's answer, pulled."""

    async def read(self) -> Data:
        """The next piece. Raises Refused for an answer that will not be completed."""

    def nudge(self) -> None:
        """Let the waiting read come back with an empty piece; what it asked for goes to the next read."""

    def abort(self, why: Refused) -> None:
        """End it from this side; the waiting read raises `why`."""

    def close(self) -> None:
        """Give it up; idempotent."""


class Link(Protocol):
    """The way to one node's executor."""

    async def open_stream(
        self, fence: Fence, path: str, body: bytes, deadline_seconds: float, *, by_data: bool = False
    ) -> Stream:
        """With `by_data` it comes with its first piece, at less cost. Raises Refused: with `peer_lost` it is not known
        whether the engine saw the request, with any other code it is certain that it did not."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A ready replica. `headers` name what an answer comes from; they are made once."""

    attempt_id: str
    node_id: str
    fence: Fence
    concurrency: int
    model_revision: str
    headers: Headers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        headers = [
            (b"x-ficc-generation", b"%d" % self.fence.generation),
            (b"x-ficc-model-revision", self.model_revision.encode()),
            (b"x-ficc-plan-digest", self.fence.plan_digest.encode()),
        ]
        object.__setattr__(self, "headers", headers)


@dataclass(frozen=True, slots=True)
class Route:
    """A service as the gateway sees it."""

    service_id: str
    project_id: str
    alias: str
    model_name: str
    capabilities: frozenset[str]
    state: State
    generation: int
    deadline_seconds: int
    created_at: float
    replicas: tuple[Replica, ...]


class Routes(Protocol):
    def get(self, service_id: str) -> Route | None: ...

    def by_alias(self, project_id: str, alias: str) -> Route | None: ...

    def of_project(self, project_id: str) -> Sequence[Route]: ...

    def link(self, node_id: str) -> Link | None:
        """The node's link, or None while it is not connected."""

    def is_stale(self, service_id: str) -> bool:
        """Whether this process committed something of the service that is not in the table yet."""

    async def settle(self) -> None:
        """Wait, for a bounded time, until what this process committed before is in the table: whoever was
        told that a service is ready must not be refused for what the table said before."""


class Authority(Protocol):
    def authenticate(self, secret: str) -> Actor:
        """The caller of a bearer credential. Raises Refused `unauthenticated`."""

    def recheck(self, actor: Actor) -> Actor:
        """The caller as it is now. Raises Refused once its credential is gone."""


class Meter(Protocol):
    def add(self, record: Record) -> None:
        """Keep the record of a request that has ended. Never waits."""

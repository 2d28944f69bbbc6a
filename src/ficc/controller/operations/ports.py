"""What operations and reconcilers need of the nodes and the gateway, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ficc.domain import attempt
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason
from ficc.domain.lease import Renew
from ficc.domain.plan import Fence
from ficc.gateway.ports import Link


@dataclass(frozen=True, slots=True)
class Sign:
    """Of an engine: whether its process `answers`, and for how long requests have waited without a word."""

    answers: bool
    waiting_seconds: float


class NodeLink(Link, Protocol):
    """The way to one connected node's executor. Every call raises Refused `executor_unavailable` when it
    got no answer: then what it asked for may have happened."""

    node_id: str
    snapshot: dict[str, Any]

    def reported(self, attempt_id: str) -> attempt.Record | None:
        """What the executor last said of an attempt; None: it has not mentioned it on this link."""

    async def learn(self, attempt_id: str) -> None:
        """Ask about one attempt; it is `reported` after this, or the executor does not know it."""

    async def admit(self, fence: Fence, plan: Mapping[str, Any], first: Renew) -> None: ...

    async def start(self, fence: Fence) -> None: ...

    async def stop(self, fence: Fence, reason: Reason, outcome: Outcome, grace_seconds: float) -> None: ...

    async def upload(
        self,
        fence: Fence,
        model: str,
        input_ids: Sequence[str],
        deadline_seconds: float,
        on_progress: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Have the executor hand admitted inputs to the engine. Harmless to repeat."""

    async def log(self, fence: Fence) -> tuple[str, bool]:
        """The newest part of an attempt's log, and whether older parts are left out."""

    async def last_line(self, fence: Fence) -> str:
        """The last thing that an attempt's engine said, for people; empty if nothing."""

    async def alive(self, fence: Fence, seconds: float) -> Sign:
        """Ask within so long for a sign of life of an engine, beside its slots."""

    async def ask(self, fence: Fence, path: str, body: Mapping[str, Any], seconds: float) -> bool:
        """Whether an engine answers this request, or anybody, within so long. It takes no slot."""

    async def output(self, fence: Fence, name: str | None, offset: int, limit: int) -> Mapping[str, Any]:
        """A part of an output of an attempt, or, without a name, of its log: {"data" in base64, "offset",
        "bytes_total", "truncated"}."""

    async def discard(self, fence: Fence) -> None:
        """Drop the log and the outputs of a released attempt."""

    def forget(self, attempt_id: str) -> None:
        """Drop what was reported of an attempt whose release is recorded."""

    async def renew(self, renewals: list[tuple[Fence, Renew]]) -> list[dict[str, Any]]:
        """One result per lease: {"attempt_id", "deadline_ns"} or {"attempt_id", "refused"}. Never waits
        behind a call or an endpoint."""

    def lease_clock(self) -> tuple[str, int]:
        """The node's boot id and its CLOCK_BOOTTIME in ns, for a lease to be counted from now."""


class Nodes(Protocol):
    def link(self, node_id: str) -> NodeLink | None:
        """The node's link, or None while it is not connected."""

    def links(self) -> Sequence[NodeLink]:
        """Every connected node."""


class Load(Protocol):
    def in_flight(self, service_id: str) -> Mapping[str, int]:
        """Open requests of a service by attempt, through this controller."""

    def total(self, service_id: str) -> int:
        """Open and waiting requests of a service, through this controller."""

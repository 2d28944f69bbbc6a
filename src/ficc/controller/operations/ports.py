"""What operations and reconcilers need of the nodes and the gateway, as protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ficc.domain import attempt
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason
from ficc.domain.lease import Renew
from ficc.domain.plan import Fence
from ficc.gateway.ports import Link


class NodeLink(Link, Protocol):
    """The way to one connected node's executor. Every call raises Refused `executor_unavailable` when it
    got no answer: then what it asked for may have happened."""

    node_id: str
    snapshot: dict[str, Any]

    def reported(self, attempt_id: str) -> attempt.Record | None:
        """What the executor says of an attempt now; None: it does not know it, or has released it."""

    async def admit(self, fence: Fence, plan: Mapping[str, Any], first: Renew) -> None: ...

    async def start(self, fence: Fence) -> None: ...

    async def stop(self, fence: Fence, reason: Reason, outcome: Outcome, grace_seconds: float) -> None: ...

    async def log(self, fence: Fence) -> tuple[str, bool]:
        """The newest part of an attempt's log, and whether older parts are left out."""

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

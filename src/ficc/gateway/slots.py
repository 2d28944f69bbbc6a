"""Slots and queues: how many requests each replica has, and who waits, first come first served.

The counts are this gateway's own and a hint; the executor enforces a replica's concurrency.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ficc.domain import admission
from ficc.domain.errors import Refused
from ficc.domain.routing import Candidate
from ficc.gateway.ports import Replica, Route


@dataclass(slots=True)
class Traffic:
    """One service's: open requests by attempt, and who waits for a slot."""

    in_flight: dict[str, int] = field(default_factory=dict)
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    turn: int = 0


class Slots:
    def __init__(self, queue_max: int) -> None:
        self._queue_max = queue_max
        self._services: dict[str, Traffic] = {}

    def in_flight(self, service_id: str) -> dict[str, int]:
        """Open requests by attempt."""
        service = self._services.get(service_id)
        return dict(service.in_flight) if service else {}

    def waiting(self, service_id: str) -> int:
        service = self._services.get(service_id)
        return len(service.waiting) if service else 0

    def total(self, service_id: str) -> int:
        return sum(self.in_flight(service_id).values()) + self.waiting(service_id)

    def take(self, route: Route, without: Collection[str], *, queued: bool) -> Replica | None:
        """A replica whose slot the caller now holds, or None when it has to wait. `queued`: the caller
        waits already, at the head. Raises Refused `queue_full`."""
        service = self._services.setdefault(route.service_id, Traffic())
        candidates = [
            Candidate(r.attempt_id, service.in_flight.get(r.attempt_id, 0), r.concurrency)
            for r in route.replicas
        ]
        service.turn += 1
        decision = admission.decide(
            candidates,
            waiting=0 if queued else len(service.waiting),
            queue_max=self._queue_max + queued,
            turn=service.turn,
            without=without,
        )
        if isinstance(decision, admission.Wait):
            return None
        service.in_flight[decision.attempt_id] = service.in_flight.get(decision.attempt_id, 0) + 1
        return next(r for r in route.replicas if r.attempt_id == decision.attempt_id)

    def release(self, service_id: str, attempt_id: str) -> None:
        """Give a slot back and let the queue's head try."""
        service = self._services[service_id]
        left = service.in_flight[attempt_id] - 1
        if left:
            service.in_flight[attempt_id] = left
        else:
            del service.in_flight[attempt_id]
        self.wake(service_id)

    def join(self, service_id: str) -> asyncio.Future[None]:
        """A place at the end of the queue: done when its holder is at the head and may try."""
        service = self._services[service_id]
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        service.waiting.append(place)
        return place

    def again(self, service_id: str, place: asyncio.Future[None]) -> asyncio.Future[None]:
        """Keep the head's place after a try that found nothing."""
        service = self._services[service_id]
        fresh: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        service.waiting[service.waiting.index(place)] = fresh
        return fresh

    def leave(self, service_id: str, place: asyncio.Future[None]) -> None:
        """Give a place up, and let the next one try."""
        service = self._services[service_id]
        if place in service.waiting:
            service.waiting.remove(place)
        self.wake(service_id)

    def wake(self, service_id: str) -> None:
        """Let the head try: a slot came free, or the routes changed."""
        service = self._services.get(service_id)
        if service is None:
            return
        if service.waiting:
            if not service.waiting[0].done():
                service.waiting[0].set_result(None)
        elif not service.in_flight:
            del self._services[service_id]

    def wake_all(self) -> None:
        for service_id in list(self._services):
            self.wake(service_id)


class Bodies:
    """How many bytes of request bodies are held at once."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0

    def take(self, count: int) -> None:
        """Raises Refused `bodies_full`."""
        if self._held + count > self._bytes_max:
            raise Refused(
                "bodies_full",
                "Too many request bodies are held at once; try again shortly.",
                retry_after_seconds=admission.RETRY_AFTER_SECONDS,
            )
        self._held += count

    def give_back(self, count: int) -> None:
        self._held -= count

"""Slots and queues: how many requests each replica has, and who waits, caller by caller in turn.

The counts are this gateway's own and a hint; the executor enforces a replica's concurrency.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from ficc.domain import admission
from ficc.domain.errors import Refused
from ficc.domain.routing import Candidate
from ficc.domain.turns import Turn, Turns
from ficc.gateway.ports import Replica, Route


@dataclass(eq=False, slots=True)
class Place:
    """In a queue. `refused`: it was given to another caller, who has fewer."""

    turn: Turn
    woken: asyncio.Future[None]
    refused: Refused | None = None

    def wake(self) -> None:
        """Let its holder look, and try if it is at the head."""
        if not self.woken.done():
            self.woken.set_result(None)


@dataclass(slots=True)
class Traffic:
    """One service's: open requests by attempt, and who waits for a slot."""

    in_flight: dict[str, int] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    places: dict[Turn, Place] = field(default_factory=dict)
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
        return len(service.turns) if service else 0

    def total(self, service_id: str) -> int:
        return sum(self.in_flight(service_id).values()) + self.waiting(service_id)

    def take(
        self, route: Route, caller: str, without: Collection[str], place: Place | None = None
    ) -> Replica | None:
        """A replica whose slot the caller now holds, or None when it has to wait. `place`: where it waits already,
        which counts once it is the head. Raises Refused `queue_full`."""
        service = self._services.get(route.service_id)
        if service is None:
            service = self._services[route.service_id] = Traffic()
        if place is not None and place.turn is not service.turns.first:
            self.wake(route.service_id)  # somebody came before it meanwhile
            return None
        candidates = [
            Candidate(r.attempt_id, service.in_flight.get(r.attempt_id, 0), r.concurrency)
            for r in route.replicas
        ]
        service.turn += 1
        if place is None and len(service.turns) >= self._queue_max:
            self._make_room(service, caller)
        decision = admission.decide(
            candidates,
            waiting=0 if place is not None else len(service.turns),
            queue_max=self._queue_max + (place is not None),
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

    def _make_room(self, service: Traffic, caller: str) -> None:
        """Where one who has many places in a full queue has its last behind the first of one who has none, it gives
        that up."""
        turn = service.turns.displaced_by(caller)
        if turn is not None:
            place = service.places[turn]
            place.refused = Refused(
                "queue_full",
                "The queue is full, and others have fewer requests in it; try again later.",
                retry_after_seconds=admission.RETRY_AFTER_SECONDS,
            )
            service.turns.leave(turn, served=False)
            place.wake()

    def join(self, service_id: str, caller: str) -> Place:
        """A place in the queue: woken when its holder is at the head and may try."""
        service = self._services[service_id]
        place = Place(service.turns.join(caller), asyncio.get_running_loop().create_future())
        service.places[place.turn] = place
        return place

    def again(self, place: Place) -> None:
        """Keep the place after a try that found nothing."""
        place.woken = asyncio.get_running_loop().create_future()

    def leave(self, service_id: str, place: Place, *, served: bool) -> None:
        """Give a place up, and let the next one try."""
        service = self._services[service_id]
        service.turns.leave(place.turn, served=served)
        del service.places[place.turn]
        self.wake(service_id)

    def wake(self, service_id: str) -> None:
        """Let the head try: a slot came free, or the routes changed."""
        service = self._services.get(service_id)
        if service is None:
            return
        first = service.turns.first
        if first is not None:
            service.places[first].wake()
        elif not service.in_flight and not service.places:
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

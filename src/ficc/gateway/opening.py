"""From an admitted request to an open stream: a slot, a replica, and another one where nothing was opened.

Another replica is tried only after an explicit answer that nothing was opened, never after silence.
"""

from __future__ import annotations

import asyncio
from functools import partial

from ficc.domain import admission
from ficc.domain.errors import Refused
from ficc.domain.service import State
from ficc.gateway.invocation import Invocation
from ficc.gateway.ports import Replica, Route, Routes, Stream
from ficc.gateway.slots import Place, Slots

NOT_OPENED = frozenset({"busy", "service_not_ready", "executor_unavailable", "fenced", "attempt_unknown"})
"""Refusals of an open after which another replica may be tried."""
BUSY_SECONDS = 0.05
"""How long a request waits when the executor says busy although the count here says free."""


class Opening:
    def __init__(self, routes: Routes, slots: Slots, queue_seconds: float) -> None:
        self._routes = routes
        self._slots = slots
        self._queue_seconds = queue_seconds

    async def open(self, invocation: Invocation, body: bytes, deadline: float, *, by_data: bool) -> Stream:
        """The answer's stream, with the slot that it takes held by the invocation; with `by_data` not before its first
        piece is there. Raises Refused."""
        loop = asyncio.get_running_loop()
        failed: set[str] = set()
        last: Refused | None = None
        while True:
            replica = await self._slot(invocation, failed, last)
            try:
                stream = await self._try(invocation, replica, body, deadline - loop.time(), by_data)
            except Refused as refused:
                self.give_back(invocation)
                if refused.code not in NOT_OPENED:
                    raise
                invocation.replica = None
                last = refused
                if refused.code == "busy":
                    # Another gateway, or a slot that the engine has not given back yet.
                    await asyncio.sleep(BUSY_SECONDS)
                else:
                    failed.add(replica.attempt_id)
                invocation.check()
                continue
            invocation.stream = stream
            if invocation.ended is not None:
                stream.close()
                raise invocation.ended
            return stream

    async def _try(
        self, invocation: Invocation, replica: Replica, body: bytes, seconds: float, by_data: bool
    ) -> Stream:
        link = self._routes.link(replica.node_id)
        if link is None:
            raise Refused(
                "executor_unavailable", "The replica's node is not connected.", retry_after_seconds=1
            )
        invocation.computing = True
        task = asyncio.current_task()
        assert task is not None
        before, invocation.opening = task.cancelling(), task
        try:
            return await link.open_stream(replica.fence, invocation.path, body, seconds, by_data=by_data)
        except Refused as refused:
            invocation.computing = refused.code == "peer_lost"
            raise
        except asyncio.CancelledError:
            if invocation.ended is not None and task.uncancel() <= before:
                raise invocation.ended from None  # `abort` did it, and nobody else
            raise
        finally:
            invocation.opening = None

    async def _slot(self, invocation: Invocation, failed: set[str], last: Refused | None) -> Replica:
        """A replica whose slot is held, after waiting for one if need be. Raises Refused."""
        service_id = invocation.service_id
        assert service_id is not None
        loop = asyncio.get_running_loop()
        since = loop.time()
        until = since + self._queue_seconds
        place: Place | None = None
        served = False
        caller = invocation.actor.authority_id
        try:
            while True:
                invocation.check()
                if place is not None and place.refused is not None:
                    raise place.refused
                route = self._current(invocation)
                if all(replica.attempt_id in failed for replica in route.replicas):
                    raise _not_ready(last)
                replica = self._slots.take(route, caller, failed, place)
                if replica is not None:
                    served = True
                    invocation.replica = replica
                    invocation.release = partial(self._slots.release, service_id, replica.attempt_id)
                    return replica
                if place is None:
                    place = invocation.place = self._slots.join(service_id, caller)
                else:
                    self._slots.again(place)
                try:
                    async with asyncio.timeout_at(until):
                        await asyncio.shield(place.woken)
                except TimeoutError:
                    raise Refused(
                        "queue_full",
                        f"No slot came free within {self._queue_seconds:.0f} s; try again later.",
                        retry_after_seconds=admission.RETRY_AFTER_SECONDS,
                    ) from None
        finally:
            invocation.place = None
            if place is not None:
                invocation.queue_seconds += loop.time() - since
                self._slots.leave(service_id, place, served=served)

    def _current(self, invocation: Invocation) -> Route:
        """The route as it is now, if the invocation may still go ahead on it. One that waits when the service begins
        to drain was admitted before, and is served."""
        assert invocation.service_id is not None
        route = self._routes.get(invocation.service_id)
        if route is None or route.generation != invocation.generation:
            raise Refused("service_stopped", "The service was stopped while the request waited.")
        if route.state is not State.DRAINING:
            admission.check_state(route.state)
        return route

    def give_back(self, invocation: Invocation) -> None:
        """The slot, if it holds one."""
        release, invocation.release = invocation.release, None
        if release is not None:
            release()


def _not_ready(last: Refused | None) -> Refused:
    message = last.message if last is not None else "No replica of the service is ready."
    return Refused("service_not_ready", message, retry_after_seconds=admission.RETRY_AFTER_SECONDS)

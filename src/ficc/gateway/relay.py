"""One path for every invocation: check, take a slot, open, relay, account for the end exactly once.

Everybody who asks an engine something goes through `Gateway.invoke`: the HTTP routes, and code inside the
controller. Refusals are answers too: a status and one JSON chunk. Whatever ends an invocation early (the client
gone, the deadline, a revoked credential, a stopped service, a lost link) goes through `Invocation.abort`.

Another replica is tried only after an explicit answer that nothing was opened, never after silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from ficc.domain import admission
from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.plan import BODY_BYTES_MAX
from ficc.domain.service import ENDED, ROUTABLE, State
from ficc.gateway import answers
from ficc.gateway.body_reader import BodyReader
from ficc.gateway.ports import Authority, Replica, Route, Routes, Stream
from ficc.gateway.slots import Slots
from ficc.protocol import http_api, openai, sse, strict_json
from ficc.protocol.executor_wire import Data

log = logging.getLogger("ficc.gateway")

NOT_OPENED = frozenset({"busy", "service_not_ready", "executor_unavailable", "fenced", "attempt_unknown"})
"""Refusals of an open after which another replica may be tried."""
BUSY_SECONDS = 0.05
"""How long a request waits when the executor says busy although the count here says free."""

Headers = list[tuple[bytes, bytes]]
_STREAM_HEADERS = (
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache, no-transform"),  # proxies must neither gather events nor rewrite them
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    queue_max: int = admission.QUEUE_MAX
    queue_seconds: float = admission.QUEUE_SECONDS
    json_depth_max: int = strict_json.DEPTH_MAX
    json_values_max: int = strict_json.VALUES_MAX
    body_bytes_max: int = BODY_BYTES_MAX
    body_bytes_total_max: int = admission.BODY_BYTES_TOTAL_MAX
    keep_alive_seconds: float = admission.KEEP_ALIVE_SECONDS


@dataclass(eq=False, slots=True)
class Invocation:
    """What lives of one request. `on_abort` is told once, when it is ended early."""

    request_id: str
    actor: Actor
    service_id: str
    generation: int = 0
    stream: Stream | None = None
    opening: asyncio.Timeout | None = None
    place: asyncio.Future[None] | None = None
    ended: Refused | None = None
    on_abort: Callable[[Refused], None] | None = None
    timer: asyncio.TimerHandle | None = None
    release: Callable[[], None] | None = None

    def abort(self, why: Refused) -> None:
        """End the invocation, wherever it stands: in the queue, being opened, in the stream."""
        if self.ended is not None:
            return
        self.ended = why
        if self.place is not None and not self.place.done():
            self.place.set_result(None)
        if self.opening is not None:
            self.opening.reschedule(0.0)
        if self.stream is not None:
            self.stream.abort(why)
        if self.on_abort is not None:
            self.on_abort(why)

    def check(self) -> None:
        if self.ended is not None:
            raise self.ended


class Chunks:
    """An answer's bytes, with its headers. `aclose` gives everything back, at any moment, once.
    `in_one_piece`: the first chunk is the whole answer."""

    def __init__(
        self,
        request_id: str,
        headers: Headers,
        source: AsyncGenerator[bytes, None],
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


class Gateway:
    def __init__(
        self,
        *,
        routes: Routes,
        authority: Authority,
        limits: Limits,
        new_id: Callable[[], str],
    ) -> None:
        self._routes = routes
        self._authority = authority
        self.limits = limits
        self._reader = BodyReader(depth_max=limits.json_depth_max, values_max=limits.json_values_max)
        self._new_id = new_id
        self.slots = Slots(limits.queue_max)
        self._live: set[Invocation] = set()

    @property
    def live(self) -> int:
        """Invocations that have not ended."""
        return len(self._live)

    async def invoke(
        self,
        service_id: str,
        path: str,
        body: bytes,
        actor: Actor,
        *,
        request: openai.Request | None = None,
        request_id: str | None = None,
        on_begin: Callable[[Invocation], None] | None = None,
    ) -> tuple[int, Chunks]:
        """The status and the answer's chunks; the caller closes the chunks, whatever happens.

        `request` is what `read` made of the body, where that was done before. `on_begin` is handed the
        invocation before anything waits, so that a transport can end it. Cancelling this call ends the
        invocation too.
        """
        invocation = Invocation(request_id or self._new_id(), actor, service_id)
        self._live.add(invocation)
        if on_begin is not None:
            on_begin(invocation)
        try:
            return await self._begin(invocation, path, body, request)
        except Refused as refused:
            self._end(invocation, refused)
            return self._refusal(invocation, refused)
        except BaseException:
            self._end(invocation, None)
            raise

    async def _begin(
        self, invocation: Invocation, path: str, body: bytes, request: openai.Request | None
    ) -> tuple[int, Chunks]:
        route = await self.settled_route(invocation.actor, invocation.service_id)
        capability = openai.CAPABILITY.get(path)
        if capability is None:
            raise Refused("not_found", f"There is no route {path[:64]} for a service.")
        if capability not in route.capabilities:
            raise Refused(
                "capability_unavailable",
                f"The model of {route.alias} was registered for {', '.join(sorted(route.capabilities))}, "
                f"not for {capability}.",
            )
        request = request or await self.read(body)
        if request.model not in (None, route.alias, route.model_name):
            raise Refused(
                "model_not_found",
                f"This URL serves {route.alias!r}; send that as model, or nothing.",
                "model",
            )
        if route.state not in ROUTABLE:
            await self._routes.settle()
            route = self.route(invocation.actor, invocation.service_id)
        admission.check_state(route.state)
        invocation.generation = route.generation
        loop = asyncio.get_running_loop()
        deadline = loop.time() + route.deadline_seconds
        late = Refused(
            "deadline_exceeded",
            f"The service's deadline of {route.deadline_seconds} s passed; it was not replayed.",
        )
        invocation.timer = loop.call_at(deadline, invocation.abort, late)
        stream = await self._open(invocation, path, request.addressed(body, route.alias), deadline)
        comments = request.stream and path == openai.CHAT
        pull = answers.Pull(stream, self.limits.keep_alive_seconds if comments else None)
        invocation.stream = pull
        return await self._answer(invocation, pull)

    async def _answer(self, invocation: Invocation, pull: answers.Pull) -> tuple[int, Chunks]:
        """What the engine answers, as soon as its status is known to be the right one to give."""
        piece = await pull.read()
        end = partial(self._end, invocation)
        if piece.head is not None:
            if piece.head.status >= 400:
                raise await answers.refusal(pull, piece.head.status, piece)
            if not answers.check_head(piece.head):
                return self._document(invocation, pull, await answers.held(pull, piece))
        source = answers.events(pull, piece, invocation.check, end)
        return 200, Chunks(invocation.request_id, list(_STREAM_HEADERS), source, partial(end, None))

    def _document(self, invocation: Invocation, pull: answers.Pull, piece: Data) -> tuple[int, Chunks]:
        end = partial(self._end, invocation)
        headers: Headers = [(b"content-type", http_api.JSON_TYPE)]
        if piece.end:
            headers.append((b"content-length", b"%d" % len(piece.data)))
        source = answers.document(pull, piece, end)
        return 200, Chunks(invocation.request_id, headers, source, partial(end, None), in_one_piece=piece.end)

    def route(self, actor: Actor, service_id: str) -> Route:
        """The service's route, if the actor may use it now. Raises Refused."""
        actor = self._authority.recheck(actor)
        actor.require("inference:invoke")
        route = self._routes.get(service_id)
        if route is None or route.project_id != actor.project_id:
            raise Refused("not_found", f"There is no service {service_id[:64]} in this project.")
        if actor.service_id not in (None, route.service_id):
            raise Refused("denied", "This credential is for another service.", "inference:invoke")
        return route

    async def settled_route(self, actor: Actor, service_id: str) -> Route:
        """The same, once the table had the time to hear of a service that it does not know, or that was just
        changed: whoever was told that a service drains must not see it take a request."""
        if self._routes.get(service_id) is None or self._routes.is_stale(service_id):
            await self._routes.settle()
        return self.route(actor, service_id)

    async def read(self, body: bytes) -> openai.Request:
        """Check a body. Raises Refused."""
        return await self._reader.read(body)

    async def close(self) -> None:
        """End what runs beside this process."""
        await self._reader.close()

    # Slots and opening.

    async def _open(self, invocation: Invocation, path: str, body: bytes, deadline: float) -> Stream:
        loop = asyncio.get_running_loop()
        failed: set[str] = set()
        last: Refused | None = None
        while True:
            replica = await self._slot(invocation, failed, last)
            try:
                stream = await self._try(invocation, replica, path, body, deadline - loop.time())
            except Refused as refused:
                self._give_back(invocation)
                if refused.code not in NOT_OPENED:
                    raise
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
        self, invocation: Invocation, replica: Replica, path: str, body: bytes, seconds: float
    ) -> Stream:
        link = self._routes.link(replica.node_id)
        if link is None:
            raise Refused(
                "executor_unavailable", "The replica's node is not connected.", retry_after_seconds=1
            )
        try:
            async with asyncio.timeout(None) as invocation.opening:  # `abort` makes it run out
                return await link.open_stream(replica.fence, path, body, seconds)
        except TimeoutError:
            invocation.check()
            raise
        finally:
            invocation.opening = None

    async def _slot(self, invocation: Invocation, failed: set[str], last: Refused | None) -> Replica:
        """A replica whose slot is held, after waiting for one if need be. Raises Refused."""
        service_id = invocation.service_id
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limits.queue_seconds
        place: asyncio.Future[None] | None = None
        try:
            while True:
                invocation.check()
                route = self._current(invocation)
                if all(replica.attempt_id in failed for replica in route.replicas):
                    raise _not_ready(last)
                replica = self.slots.take(route, failed, queued=place is not None)
                if replica is not None:
                    invocation.release = partial(self.slots.release, service_id, replica.attempt_id)
                    return replica
                place = self.slots.join(service_id) if place is None else self.slots.again(service_id, place)
                invocation.place = place
                try:
                    async with asyncio.timeout_at(until):
                        await asyncio.shield(place)
                except TimeoutError:
                    raise Refused(
                        "queue_full",
                        f"No slot came free within {self.limits.queue_seconds:.0f} s; try again later.",
                        retry_after_seconds=admission.RETRY_AFTER_SECONDS,
                    ) from None
        finally:
            invocation.place = None
            if place is not None:
                self.slots.leave(service_id, place)

    def _current(self, invocation: Invocation) -> Route:
        """The route as it is now, if the invocation may still go ahead on it. One that waits when the service begins
        to drain was admitted before, and is served."""
        route = self._routes.get(invocation.service_id)
        if route is None or route.generation != invocation.generation:
            raise Refused("service_stopped", "The service was stopped while the request waited.")
        if route.state is not State.DRAINING:
            admission.check_state(route.state)
        return route

    def _give_back(self, invocation: Invocation) -> None:
        release, invocation.release = invocation.release, None
        if release is not None:
            release()

    # Refusals.

    def _refusal(self, invocation: Invocation, refused: Refused) -> tuple[int, Chunks]:
        body = http_api.error_body(refused)

        async def one() -> AsyncGenerator[bytes, None]:
            yield body

        headers = [
            (b"content-type", http_api.JSON_TYPE),
            (b"content-length", b"%d" % len(body)),
            *http_api.error_headers(refused, engine_saw_it=invocation.stream is not None),
        ]
        chunks = Chunks(invocation.request_id, headers, one(), lambda: None, in_one_piece=True)
        return http_api.status_of(refused), chunks

    # Ends.

    def _end(self, invocation: Invocation, why: Refused | None) -> None:
        """Give back whatever the invocation holds. Idempotent, never waits."""
        if invocation not in self._live:
            return
        self._live.discard(invocation)
        if invocation.timer is not None:
            invocation.timer.cancel()
        if invocation.stream is not None:
            invocation.stream.close()
        self._give_back(invocation)
        why = why or invocation.ended
        if why is not None:
            # Clients leave all the time, and it is nobody's fault.
            level = logging.DEBUG if why.code == "client_gone" else logging.INFO
            log.log(
                level, "request %s to %s ended: %s", invocation.request_id, invocation.service_id, why.code
            )

    def recheck(self) -> None:
        """After a change of routes or authority: end what may not go on, and let queues try again."""
        for invocation in list(self._live):
            why = self._why_not(invocation)
            if why is not None:
                invocation.abort(why)
        self.slots.wake_all()

    def _why_not(self, invocation: Invocation) -> Refused | None:
        try:
            self.route(invocation.actor, invocation.service_id)
        except Refused as refused:
            if refused.code == "not_found":
                return _stopped()
            return refused
        route = self._routes.get(invocation.service_id)
        if route is None or not invocation.generation:
            return None
        if route.generation != invocation.generation or route.state in (*ENDED, State.STOPPING):
            return _stopped()
        return None


def _stopped() -> Refused:
    return Refused("service_stopped", "The service was stopped; the request was ended and is not replayed.")


def _not_ready(last: Refused | None) -> Refused:
    message = last.message if last is not None else "No replica of the service is ready."
    return Refused("service_not_ready", message, retry_after_seconds=admission.RETRY_AFTER_SECONDS)

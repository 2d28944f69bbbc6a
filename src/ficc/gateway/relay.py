"""One path for every invocation: check, take a slot, open, relay, account for the end exactly once.

`Gateway.invoke` is the seam for code inside the controller and the HTTP routes are its first caller. A
refusal comes back as a status with one JSON chunk. Whatever ends an invocation early (the client gone, the
deadline, a revoked credential, a stopped service, a lost link) goes through `Invocation.abort`.

Another replica is tried only after an explicit answer that nothing was opened, never after silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from ficc.domain import admission
from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.service import ENDED, ROUTABLE, State
from ficc.gateway.ports import Authority, Replica, Route, Routes, Stream
from ficc.gateway.slots import Slots
from ficc.protocol import http_api, openai, sse

log = logging.getLogger("ficc.gateway")

OFF_LOOP_BYTES = 256 << 10
"""A body above this is checked in another process, so that no other request waits for it."""
NOT_OPENED = frozenset({"busy", "service_not_ready", "executor_unavailable", "fenced", "attempt_unknown"})
"""Refusals of an open after which another replica may be tried."""
BUSY_SECONDS = 0.05
"""How long a request waits when the executor says busy although the count here says free."""

Headers = list[tuple[bytes, bytes]]


class StreamAborted(Exception):
    """The answer broke where nothing can be said in band; the transport must break too."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused))
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Limits:
    queue_max: int = 64
    queue_seconds: float = 30.0
    json_depth_max: int = 64
    json_values_max: int = 262_144


@dataclass(eq=False, slots=True)
class Invocation:
    """What lives of one request. `on_abort` is told once, when it is ended early."""

    request_id: str
    actor: Actor
    service_id: str
    generation: int = 0
    stream: Stream | None = None
    place: asyncio.Future[None] | None = None
    ended: Refused | None = None
    on_abort: Callable[[Refused], None] | None = None
    timer: asyncio.TimerHandle | None = None
    release: Callable[[], None] | None = None

    def abort(self, why: Refused) -> None:
        """End the invocation, wherever it stands: in the queue, before the first byte, in the stream."""
        if self.ended is not None:
            return
        self.ended = why
        if self.place is not None and not self.place.done():
            self.place.set_result(None)
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
        workers: Executor,
        new_id: Callable[[], str],
    ) -> None:
        self._routes = routes
        self._authority = authority
        self._limits = limits
        self._workers = workers
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
        request_id: str | None = None,
        on_begin: Callable[[Invocation], None] | None = None,
    ) -> tuple[int, Chunks]:
        """The status and the answer's chunks; the caller closes the chunks, whatever happens.

        `on_begin` is handed the invocation before anything waits, so that a transport can end it.
        Cancelling this call ends the invocation too.
        """
        invocation = Invocation(request_id or self._new_id(), actor, service_id)
        self._live.add(invocation)
        if on_begin is not None:
            on_begin(invocation)
        try:
            return await self._begin(invocation, path, body)
        except Refused as refused:
            self._end(invocation, refused)
            return self._refusal(invocation, refused)
        except BaseException:
            self._end(invocation, None)
            raise

    async def _begin(self, invocation: Invocation, path: str, body: bytes) -> tuple[int, Chunks]:
        if self._routes.get(invocation.service_id) is None:
            await self._routes.settle()
        route = self._admitted(invocation)
        capability = openai.CAPABILITY.get(path)
        if capability is None:
            raise Refused("not_found", f"There is no route {path[:64]} for a service.")
        if capability not in route.capabilities:
            raise Refused(
                "capability_unavailable",
                f"The model of {route.alias} was registered for {', '.join(sorted(route.capabilities))}, "
                f"not for {capability}.",
            )
        request = await self._read(body, route.alias)
        if request.model not in (None, route.alias, route.model_name):
            raise Refused(
                "model_not_found",
                f"This URL serves {route.alias!r}; send that as model, or nothing.",
                "model",
            )
        if route.state not in ROUTABLE:
            await self._routes.settle()
            route = self._admitted(invocation)
        admission.check_state(route.state)
        invocation.generation = route.generation
        loop = asyncio.get_running_loop()
        deadline = loop.time() + route.deadline_seconds
        late = Refused(
            "deadline_exceeded",
            f"The service's deadline of {route.deadline_seconds} s passed; it was not replayed.",
        )
        invocation.timer = loop.call_at(deadline, invocation.abort, late)
        stream = await self._open(invocation, path, request.body, deadline)
        first = await stream.read()
        assert first.head is not None, "the first piece carries the head"
        if first.head.status >= 400:
            return await self._engine_refusal(
                invocation, stream, first.head.status, bytes(first.data), first.end
            )
        data, streaming = bytes(first.data), sse.is_stream(first.head.content_type)
        relayed = self._events if streaming else self._document
        source = relayed(invocation, stream, data, first.end)
        headers = _answer_headers(first.head.content_type, streaming=streaming)
        whole = first.end and not streaming
        if whole:
            headers.append((b"content-length", b"%d" % len(data)))
        return first.head.status, Chunks(
            invocation.request_id,
            headers,
            source,
            lambda: self._end(invocation, None),
            in_one_piece=whole and bool(data),
        )

    def _admitted(self, invocation: Invocation) -> Route:
        """The route, if the actor may use it now."""
        actor = self._authority.recheck(invocation.actor)
        actor.require("inference:invoke")
        route = self._routes.get(invocation.service_id)
        if route is None or route.project_id != actor.project_id:
            raise Refused("not_found", f"There is no service {invocation.service_id[:64]} in this project.")
        if actor.service_id not in (None, route.service_id):
            raise Refused("denied", "This credential is for another service.", "inference:invoke")
        return route

    async def _read(self, body: bytes, alias: str) -> openai.Request:
        bounds = self._limits.json_depth_max, self._limits.json_values_max
        if len(body) <= OFF_LOOP_BYTES:
            return openai.read(body, alias, depth_max=bounds[0], values_max=bounds[1])
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._workers, read_in_worker, body, alias, *bounds)
        if isinstance(answer, openai.Request):
            return answer
        raise Refused(*answer)

    # Slots and opening.

    async def _open(self, invocation: Invocation, path: str, body: bytes, deadline: float) -> Stream:
        loop = asyncio.get_running_loop()
        failed: set[str] = set()
        last: Refused | None = None
        while True:
            replica = await self._slot(invocation, failed, last)
            try:
                stream = await self._try(replica, path, body, deadline - loop.time())
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

    async def _try(self, replica: Replica, path: str, body: bytes, seconds: float) -> Stream:
        link = self._routes.link(replica.node_id)
        if link is None:
            raise Refused(
                "executor_unavailable", "The replica's node is not connected.", retry_after_seconds=1
            )
        return await link.open_stream(replica.fence, path, body, seconds)

    async def _slot(self, invocation: Invocation, failed: set[str], last: Refused | None) -> Replica:
        """A replica whose slot is held, after waiting for one if need be. Raises Refused."""
        service_id = invocation.service_id
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.queue_seconds
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
                        f"No slot came free within {self._limits.queue_seconds:.0f} s; try again later.",
                        retry_after_seconds=admission.RETRY_AFTER_SECONDS,
                    ) from None
        finally:
            invocation.place = None
            if place is not None:
                self.slots.leave(service_id, place)

    def _current(self, invocation: Invocation) -> Route:
        """The route as it is now, if the invocation may still go ahead on it."""
        route = self._routes.get(invocation.service_id)
        if route is None or route.generation != invocation.generation:
            raise Refused("service_stopped", "The service was stopped while the request waited.")
        admission.check_state(route.state)
        return route

    def _give_back(self, invocation: Invocation) -> None:
        release, invocation.release = invocation.release, None
        if release is not None:
            release()

    # Answers.

    async def _events(
        self, invocation: Invocation, stream: Stream, data: bytes, end: bool
    ) -> AsyncGenerator[bytes, None]:
        """A stream of events, passed on as they come; a break is said in band where that is possible."""
        scanner = sse.Scanner()
        try:
            if not data:
                yield b""  # the head goes out, though the first event may be long in coming
            while True:
                if data:
                    scanner.feed(data)
                    yield data
                if end:
                    break
                invocation.check()
                piece = await stream.read()
                data, end = bytes(piece.data), piece.end
            if not scanner.done:
                raise Refused("engine_error", "The engine ended its stream without saying that it was done.")
        except Refused as refused:
            if scanner.done:
                return  # it broke behind its end
            self._end(invocation, refused)
            if not scanner.between_events:
                raise StreamAborted(refused) from refused
            yield sse.event(http_api.error_document(refused))
        finally:
            self._end(invocation, None)

    async def _document(
        self, invocation: Invocation, stream: Stream, data: bytes, end: bool
    ) -> AsyncGenerator[bytes, None]:
        """A JSON answer; one that breaks off cannot be repaired."""
        try:
            while True:
                if data:
                    yield data
                if end:
                    return
                piece = await stream.read()
                data, end = bytes(piece.data), piece.end
        except Refused as refused:
            self._end(invocation, refused)
            raise StreamAborted(refused) from refused
        finally:
            self._end(invocation, None)

    async def _engine_refusal(
        self, invocation: Invocation, stream: Stream, status: int, data: bytes, end: bool
    ) -> tuple[int, Chunks]:
        """An engine's 4xx or 5xx in our shape."""
        while not end and len(data) < openai.ERROR_BYTES_MAX:
            piece = await stream.read()
            data, end = data + piece.data, piece.end
        status, document = openai.engine_error(status, data)
        self._end(invocation, None)
        error = document["error"]
        refused = Refused(error["code"], error["message"], error["param"])
        body = http_api.json_bytes(document)
        return status, self._one_chunk(invocation, body, http_api.error_headers(refused))

    def _refusal(self, invocation: Invocation, refused: Refused) -> tuple[int, Chunks]:
        body = http_api.error_body(refused)
        return http_api.status_of(refused), self._one_chunk(invocation, body, http_api.error_headers(refused))

    def _one_chunk(self, invocation: Invocation, body: bytes, headers: Headers) -> Chunks:
        async def one() -> AsyncGenerator[bytes, None]:
            yield body

        fixed = [(b"content-type", http_api.JSON_TYPE), (b"content-length", b"%d" % len(body))]
        return Chunks(invocation.request_id, [*fixed, *headers], one(), lambda: None, in_one_piece=True)

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
            log.info("request %s to %s ended: %s", invocation.request_id, invocation.service_id, why.code)

    def recheck(self) -> None:
        """After a change of routes or authority: end what may not go on, and let queues try again."""
        for invocation in list(self._live):
            why = self._why_not(invocation)
            if why is not None:
                invocation.abort(why)
        self.slots.wake_all()

    def _why_not(self, invocation: Invocation) -> Refused | None:
        try:
            self._admitted(invocation)
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


def read_in_worker(
    body: bytes, alias: str, depth_max: int, values_max: int
) -> openai.Request | tuple[str, str, str | None]:
    """`openai.read` for another process: refusals travel as values."""
    try:
        return openai.read(body, alias, depth_max=depth_max, values_max=values_max)
    except Refused as refused:
        return refused.code, refused.message, refused.param


def _stopped() -> Refused:
    return Refused("service_stopped", "The service was stopped; the request was ended and is not replayed.")


def _not_ready(last: Refused | None) -> Refused:
    message = last.message if last is not None else "No replica of the service is ready."
    return Refused("service_not_ready", message, retry_after_seconds=admission.RETRY_AFTER_SECONDS)


def _answer_headers(content_type: str, *, streaming: bool) -> Headers:
    headers: Headers = [(b"content-type", content_type.encode("latin-1") or http_api.JSON_TYPE)]
    if streaming:
        # Proxies must neither gather events nor rewrite them.
        headers += [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
    return headers

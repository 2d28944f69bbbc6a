"""One path for every invocation: check, take a slot, open, relay, account for the end exactly once.

Everybody who asks an engine something goes through `Gateway.invoke`: the HTTP routes, and code inside the
controller. Refusals are answers too: a status and one JSON chunk. Whatever ends an invocation early (the client
gone, the deadline, a revoked credential, a stopped service, a lost link) goes through `Invocation.abort`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ficc.domain import admission
from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.plan import BODY_BYTES_MAX
from ficc.domain.service import ENDED, ROUTABLE, State
from ficc.domain.usage import Outcome
from ficc.gateway import answers
from ficc.gateway.accounting import record_of
from ficc.gateway.body_reader import BodyReader
from ficc.gateway.invocation import Chunks, Invocation
from ficc.gateway.limiter import Limiter
from ficc.gateway.opening import Opening
from ficc.gateway.ports import Authority, Headers, Meter, Route, Routes
from ficc.gateway.slots import Slots
from ficc.protocol import http_api, openai, sse, strict_json
from ficc.protocol.executor_wire import Data

log = logging.getLogger("ficc.gateway")

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


class Gateway:
    def __init__(
        self,
        *,
        routes: Routes,
        authority: Authority,
        limits: Limits,
        meter: Meter,
        limiter: Limiter,
        new_id: Callable[[], str],
        now: Callable[[], float],
    ) -> None:
        self._routes = routes
        self._authority = authority
        self.limits = limits
        self._reader = BodyReader(depth_max=limits.json_depth_max, values_max=limits.json_values_max)
        self._meter = meter
        self._limiter = limiter
        self._new_id = new_id
        self._now = now
        self.slots = Slots(limits.queue_max)
        self._opening = Opening(routes, self.slots, limits.queue_seconds)
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

        `on_begin` is handed the invocation before anything waits, so that a transport can end it. Cancelling this
        call ends the invocation too.
        """
        invocation = self.begin(actor, path, service_id, request_id)
        if on_begin is not None:
            on_begin(invocation)
        return await self.run(invocation, body)

    def begin(
        self, actor: Actor, path: str, service_id: str | None, request_id: str | None = None
    ) -> Invocation:
        """An invocation, of which one record will be kept: whoever begins it runs it, or ends it."""
        number = self._new_id()
        began = asyncio.get_running_loop().time()
        invocation = Invocation(number, request_id or number, actor, path, service_id, began, self._now())
        self._live.add(invocation)
        return invocation

    def end(self, invocation: Invocation, why: Refused | None) -> None:
        """Give back whatever it holds, and keep its record. Idempotent, never waits."""
        self._end(invocation, why)

    async def run(
        self, invocation: Invocation, body: bytes, request: openai.Request | None = None
    ) -> tuple[int, Chunks]:
        """The same as `invoke`, for one that has begun. `request` is what `read` made of the body, where that was
        done before."""
        try:
            return await self._begin(invocation, body, request)
        except Refused as refused:
            self._end(invocation, refused)
            return self._refusal(invocation, refused)
        except Exception:
            self._end(invocation, Refused("internal", "The request failed inside the server."))
            raise
        except BaseException:
            self._end(invocation, None)
            raise

    async def _begin(
        self, invocation: Invocation, body: bytes, request: openai.Request | None
    ) -> tuple[int, Chunks]:
        invocation.check()
        route = await self.find(invocation)
        self.admit(invocation)
        path = invocation.path
        capability = openai.CAPABILITY.get(path)
        if capability is None:
            raise Refused("not_found", f"There is no route {path[:64]} for a service.")
        if capability not in route.capabilities:
            raise Refused(
                "capability_unavailable",
                f"The model of {route.alias} was registered for {', '.join(sorted(route.capabilities))}, "
                f"not for {capability}.",
            )
        if request is None:
            request = await self.read(body)
            route = self.route(invocation.actor, route.service_id)  # reading may have taken a while
        if request.model not in (None, route.alias, route.model_name):
            raise Refused(
                "model_not_found",
                f"This URL serves {route.alias!r}; send that as model, or nothing.",
                "model",
            )
        if route.state not in ROUTABLE:
            await self._routes.settle()
            route = self.route(invocation.actor, route.service_id)
        admission.check_state(route.state)
        invocation.generation = route.generation
        loop = asyncio.get_running_loop()
        deadline = loop.time() + route.deadline_seconds
        invocation.timer = loop.call_at(deadline, _late, invocation, route.deadline_seconds)
        comments = request.stream and path in openai.STREAMED
        body = request.addressed(body, route.alias)
        stream = await self._opening.open(invocation, body, deadline, by_data=not comments)
        pull = answers.Pull(stream, self.limits.keep_alive_seconds if comments else None)
        invocation.stream = invocation.pull = pull
        return await self._answer(invocation, pull)

    async def _answer(self, invocation: Invocation, pull: answers.Pull) -> tuple[int, Chunks]:
        """What the engine answers, as soon as its status is known to be the right one to give."""
        piece = await pull.read()
        end = partial(self._end, invocation)
        assert invocation.replica is not None
        provenance = invocation.replica.headers
        if piece.head is not None:
            if piece.head.status >= 400:
                refused = await answers.refusal(pull, piece.head.status, piece)
                invocation.computing = http_api.status_of(refused) >= 500
                raise refused
            if not answers.check_head(piece.head):
                piece, invocation.told = await answers.held(pull, piece)
                return self._document(invocation, pull, piece, end, provenance)
        invocation.status = 200
        invocation.tally = tally = sse.Tally()
        source = answers.events(pull, piece, invocation.check, end, tally)
        headers = [*_STREAM_HEADERS, *provenance, *invocation.headers]
        return 200, Chunks(invocation.request_id, headers, source, partial(end, None))

    def _document(
        self, invocation: Invocation, pull: answers.Pull, piece: Data, end: answers.End, provenance: Headers
    ) -> tuple[int, Chunks]:
        invocation.status = 200
        headers: Headers = [(b"content-type", http_api.JSON_TYPE), *provenance, *invocation.headers]
        if piece.end:
            headers.append((b"content-length", b"%d" % len(piece.data)))
        source: answers.Source = (
            answers.OnePiece(bytes(piece.data), end) if piece.end else answers.document(pull, piece, end)
        )
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

    async def find(self, invocation: Invocation) -> Route:
        """The route of what an invocation asks for. Raises Refused."""
        assert invocation.service_id is not None
        route = await self.settled_route(invocation.actor, invocation.service_id)
        invocation.alias = route.alias
        return route

    def admit(self, invocation: Invocation) -> None:
        """Count it against the limits of its caller, once. Raises Refused `rate_limited`."""
        actor = invocation.actor
        if invocation.permit is not None or not self._limiter.applies(actor):
            return
        now = asyncio.get_running_loop().time()
        try:
            invocation.permit = self._limiter.enter(actor, now)
        finally:
            invocation.headers = self._limiter.headers(actor, now)

    async def read(self, body: bytes) -> openai.Request:
        """Check a body. Raises Refused."""
        return await self._reader.read(body)

    async def close(self) -> None:
        """End what runs beside this process."""
        await self._reader.close()

    # Refusals.

    def _refusal(self, invocation: Invocation, refused: Refused) -> tuple[int, Chunks]:
        body = http_api.error_body(refused)
        headers = [
            (b"content-type", http_api.JSON_TYPE),
            (b"content-length", b"%d" % len(body)),
            *http_api.error_headers(
                refused, engine_saw_it=invocation.stream is not None or invocation.computing
            ),
            *(invocation.replica.headers if invocation.replica is not None else ()),
            *invocation.headers,
        ]
        chunks = Chunks(invocation.request_id, headers, answers.OnePiece(body), _nothing, in_one_piece=True)
        return http_api.status_of(refused), chunks

    # Ends.

    def _end(self, invocation: Invocation, why: Refused | None, *, whole: bool = False) -> None:
        """Give back whatever the invocation holds, and keep its record. Idempotent, never waits."""
        if invocation not in self._live:
            return
        self._live.discard(invocation)
        if invocation.timer is not None:
            invocation.timer.cancel()
        if invocation.stream is not None:
            invocation.stream.close()
        self._opening.give_back(invocation)
        invocation.whole = whole
        why = why or (None if whole else invocation.ended)
        now = asyncio.get_running_loop().time()
        record = record_of(invocation, why, now)
        self._meter.add(record)
        if invocation.permit is not None:
            tokens = (record.prompt_tokens or 0) + (record.completion_tokens or 0)
            invocation.permit.leave(tokens, now, refused=record.outcome is Outcome.REFUSED)
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
        if invocation.service_id is None or not invocation.generation:
            return None  # it is looked at when it goes ahead
        try:
            self.route(invocation.actor, invocation.service_id)
        except Refused as refused:
            if refused.code == "not_found":
                return _stopped()
            return refused
        route = self._routes.get(invocation.service_id)
        if route is None:
            return None
        if route.generation != invocation.generation or route.state in (*ENDED, State.STOPPING):
            return _stopped()
        return None


def _late(invocation: Invocation, seconds: int) -> None:
    late = f"The service's deadline of {seconds} s passed; it was not replayed."
    invocation.abort(Refused("deadline_exceeded", late))


def _nothing() -> None:
    pass


def _stopped() -> Refused:
    return Refused("service_stopped", "The service was stopped; the request was ended and is not replayed.")

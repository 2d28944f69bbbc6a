"""The OpenAI-compatible routes over HTTP.

    /api/v1/inference/{service}/v1/{models,models/ALIAS,chat/completions,embeddings}
    /api/v1/openai/v1/…     the same, where `model` is the alias and picks the service

Raw ASGI. A credential (a token, or the console's session, which `browser` checks) is looked at before a byte
of the body is read. A client that leaves is noticed at once: while it waits in the queue, before the first byte,
and in the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.gateway.answers import StreamAborted
from ficc.gateway.intake import Intake, Message, Receive, Scope
from ficc.gateway.invocation import Invocation
from ficc.gateway.ports import Authority, Routes
from ficc.gateway.relay import Gateway
from ficc.protocol import content_coding, http_api, openai

Send = Callable[[Message], Awaitable[None]]

_PATH = re.compile(
    r"/api/v1/(?:inference/(?P<service>[^/]{1,64})|openai)"
    r"(?P<rest>/v1/(?:models/(?P<alias>[^/]{1,256})|[a-z/]{1,64}))"
)
PATHS_KEPT = 256
"""Whose parts are remembered: a server is asked for few paths, again and again."""
_MODELS = "/v1/models"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "retry-after", "x-should-retry"),
        *("x-ficc-generation", "x-ficc-model-revision", "x-ficc-plan-digest"),
        *(
            f"x-ratelimit-{what}-{of}"
            for of in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
    )
).encode()


@lru_cache(PATHS_KEPT)
def _parts(path: str) -> re.Match[str] | None:
    return _PATH.fullmatch(path)


def client_gone() -> Refused:
    """One for each client: an exception that is raised more than once keeps whatever it passed, every time."""
    return Refused("client_gone", "The client closed the connection.")


def is_inference(path: str) -> bool:
    """Whether a path is the gateway's: everything else is the management API's."""
    return _parts(path) is not None


class GatewayApp:
    def __init__(
        self,
        *,
        gateway: Gateway,
        routes: Routes,
        authority: Authority,
        browser: Callable[[Scope], Actor],
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._gateway = gateway
        self._routes = routes
        self._authority = authority
        self._browser = browser
        limits = gateway.limits
        self._intake = Intake(
            body_bytes_max=limits.body_bytes_max, total_bytes_max=limits.body_bytes_total_max
        )
        self._allowed_origins = frozenset(origin.encode("latin-1") for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        cors = self._cors(headers.get(b"origin"))
        if scope["method"] == "OPTIONS":
            await _answer(send, 204, b"", [*cors, (b"allow", b"GET, POST, OPTIONS")])
            return
        try:
            actor = self._authenticate(scope, headers)
            match = _parts(scope["path"])
            assert match is not None
            rest = match["rest"]
            if b"%2f" in scope.get("raw_path", b"").lower():
                raise Refused(
                    "not_found", "A slash that is written %2F separates nothing; write it as it is."
                )
            if rest == _MODELS or match["alias"] is not None:
                _check_method(scope, "GET")
                body = await self._models(actor, match["service"], match["alias"])
                await _answer(send, 200, body, cors)
            elif rest in openai.CAPABILITY:
                _check_method(scope, "POST")
                await self._invoke(actor, match["service"], rest, scope, receive, send, headers, cors)
            else:
                known = ", ".join((_MODELS, *openai.CAPABILITY))
                raise Refused("not_found", f"There is no inference route {rest}; there are {known}.")
        except Refused as refused:
            await _refuse(send, refused, cors)

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes]) -> Actor:
        if b"authorization" not in headers and b"cookie" in headers:
            return self._browser(scope)
        kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not secret:
            raise Refused("unauthenticated", "Send the token as `Authorization: Bearer ficc_…`.")
        return self._authority.authenticate(secret.strip().decode("latin-1"))

    def _cors(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        if origin is None or origin not in self._allowed_origins:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    # Routes.

    async def _models(self, actor: Actor, service_id: str | None, alias: str | None) -> bytes:
        """Every model that the URL serves for this actor, or the one of an alias. Raises Refused."""
        actor.require("inference:invoke")
        if service_id is not None:
            found = [await self._gateway.settled_route(actor, service_id)]
        else:
            await self._routes.settle()
            found = [
                route
                for route in self._routes.of_project(actor.project_id)
                if actor.service_id in (None, route.service_id)
            ]
        if alias is None:
            return openai.model_list([(route.alias, route.created_at) for route in found])
        for route in found:
            if route.alias == alias:
                return openai.model(route.alias, route.created_at)
        raise Refused("model_not_found", f"This URL serves no model {alias[:64]!r}.", "model")

    async def _invoke(
        self,
        actor: Actor,
        service_id: str | None,
        path: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        cors: list[tuple[bytes, bytes]],
    ) -> None:
        exchange = _Exchange(scope, receive, send)
        invocation = self._gateway.begin(actor, path, service_id, exchange.request_id)
        body = None
        try:
            actor.require("inference:invoke")
            if service_id is not None:
                await self._gateway.find(invocation)
            self._gateway.admit(invocation)
            announced = self._intake.announced(scope, headers)
            body = await self._intake.take(receive, announced)
            if body is None:
                self._gateway.end(invocation, client_gone())
                return  # it left while it was sending
            request = None
            if service_id is None:
                request = await self._gateway.read(body)
                invocation.service_id = await self._by_model(actor, request)
            await exchange.run(self._gateway, invocation, body, request, cors)
        except Refused as refused:
            self._gateway.end(invocation, refused)
            await _refuse(send, refused, [*invocation.headers, *cors])
        finally:
            self._gateway.end(invocation, None)
            if body is not None:
                self._intake.give_back(body)

    async def _by_model(self, actor: Actor, request: openai.Request) -> str:
        """The service that a body picks. Raises Refused."""
        alias = request.model
        if alias is None:
            raise Refused("invalid_body", "model names the service by its alias.", "model")
        if self._routes.by_alias(actor.project_id, alias) is None:
            await self._routes.settle()
        route = self._routes.by_alias(actor.project_id, alias)
        if route is None or actor.service_id not in (None, route.service_id):
            raise Refused("model_not_found", f"This project serves no model {alias[:64]!r}.", "model")
        return route.service_id


class _Exchange:
    """One request and its answer, ended as soon as the client is gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions", {})
        self._receive = receive
        self._send = send
        self.request_id: str | None = scope.get("ficc.request_id")
        self._abort_connection = extensions.get("ficc.abort")
        self._on_disconnect = extensions.get("ficc.on_disconnect")
        self._watching: asyncio.Task[None] | None = None
        self._sending = False

    async def run(
        self,
        gateway: Gateway,
        invocation: Invocation,
        body: bytes,
        request: openai.Request | None,
        cors: list[tuple[bytes, bytes]],
    ) -> None:
        self._begin(invocation)
        status, chunks = await gateway.run(invocation, body, request)
        try:
            headers = [*chunks.headers, *cors]
            await self._write({"type": "http.response.start", "status": status, "headers": headers})
            more = not chunks.in_one_piece
            async for chunk in chunks:
                await self._write({"type": "http.response.body", "body": chunk, "more_body": more})
            if more:
                await self._write({"type": "http.response.body", "body": b"", "more_body": False})
        except StreamAborted:
            self._break()
        finally:
            await chunks.aclose()
            if self._watching is not None:
                self._watching.cancel()

    def _begin(self, invocation: Invocation) -> None:
        """See to it that the invocation ends with its client: by the edge's word, or by watching."""
        invocation.on_abort = self._aborted
        if self._on_disconnect is not None:
            self._on_disconnect(lambda: invocation.abort(client_gone()))
        else:
            self._watching = asyncio.create_task(self._watch(invocation))

    async def _write(self, message: Message) -> None:
        self._sending = True
        await self._send(message)
        self._sending = False

    async def _watch(self, invocation: Invocation) -> None:
        """Until the client is gone."""
        with contextlib.suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            invocation.abort(client_gone())

    def _aborted(self, why: Refused) -> None:
        """A client that does not read cannot be told; its connection is broken instead."""
        if self._sending:
            self._break()

    def _break(self) -> None:
        if self._abort_connection is None:
            raise RuntimeError("the server offers no way to break a connection")
        self._abort_connection()


def _check_method(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise Refused("method_not_allowed", f"This route takes {method}.")


async def _answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    fixed = [(b"content-type", http_api.JSON_TYPE), (b"content-length", b"%d" % len(body))]
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*(fixed if status != 204 else []), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _refuse(send: Send, refused: Refused, cors: Sequence[tuple[bytes, bytes]]) -> None:
    headers = [*http_api.error_headers(refused), *cors]
    if refused.code == "unauthenticated":
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.param == "content-encoding" and refused.code == "unsupported_media_type":
        headers.append((b"accept-encoding", content_coding.TAKEN.encode()))  # RFC 9110, 15.5.16
    await _answer(send, http_api.status_of(refused), http_api.error_body(refused), headers)

"""The OpenAI-compatible routes over HTTP: the first caller of `Gateway.invoke`.

    /api/v1/inference/{service}/v1/{models,chat/completions,embeddings}
    /api/v1/openai/v1/{models,chat/completions,embeddings}     `model` is the alias and picks the service

Raw ASGI. A credential (a token, or the console's session, which `browser` checks) is looked at before a byte
of the body is read; a client that leaves is noticed at once,
whether it waits in the queue, before the first byte or in the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.gateway.ports import Authority, Route, Routes
from ficc.gateway.relay import Gateway, Invocation, StreamAborted
from ficc.gateway.slots import Bodies
from ficc.protocol import http_api, openai

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_PATH = re.compile(r"/api/v1/(?:inference/(?P<service>[^/]{1,64})|openai)(?P<rest>/v1/[a-z/]{1,64})")
_MODELS = "/v1/models"
CLIENT_GONE = Refused("peer_lost", "The client closed the connection.")


def is_inference(path: str) -> bool:
    """Whether a path is the gateway's: everything else is the management API's."""
    return _PATH.fullmatch(path) is not None


class GatewayApp:
    def __init__(
        self,
        *,
        gateway: Gateway,
        routes: Routes,
        authority: Authority,
        browser: Callable[[Scope], Actor],
        body_bytes_max: int,
        body_bytes_total_max: int,
        json_depth_max: int,
        json_values_max: int,
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._gateway = gateway
        self._routes = routes
        self._authority = authority
        self._browser = browser
        self._body_bytes_max = body_bytes_max
        self._bodies = Bodies(body_bytes_total_max)
        self._json_bounds = {"depth_max": json_depth_max, "values_max": json_values_max}
        self._allowed_origins = frozenset(origin.encode("latin-1") for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        cors = self._cors(headers.get(b"origin"))
        if scope["method"] == "OPTIONS":
            await _answer(send, 204, b"", [*cors, (b"allow", b"GET, POST, OPTIONS")])
            return
        try:
            actor = self._authenticate(scope, headers)
            match = _PATH.fullmatch(scope["path"])
            assert match is not None
            rest = match["rest"]
            if rest == _MODELS:
                _check_method(scope, "GET")
                await self._list_models(actor, match["service"], send, cors)
            elif rest in openai.CAPABILITY:
                _check_method(scope, "POST")
                await self._invoke(actor, match["service"], rest, scope, receive, send, headers, cors)
            else:
                raise Refused("not_found", f"There is no inference route {rest}.")
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
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    # Routes.

    async def _list_models(
        self, actor: Actor, service_id: str | None, send: Send, cors: list[tuple[bytes, bytes]]
    ) -> None:
        actor.require("inference:invoke")
        if service_id is None:
            await self._routes.settle()
            found = [
                route
                for route in self._routes.of_project(actor.project_id)
                if actor.service_id in (None, route.service_id)
            ]
        else:
            found = [await self._visible(actor, service_id)]
        body = openai.model_list([(route.alias, route.created_at) for route in found])
        await _answer(send, 200, body, cors)

    async def _visible(self, actor: Actor, service_id: str) -> Route:
        if self._routes.get(service_id) is None:
            await self._routes.settle()
        route = self._routes.get(service_id)
        if route is None or route.project_id != actor.project_id:
            raise Refused("not_found", f"There is no service {service_id[:64]} in this project.")
        if actor.service_id not in (None, route.service_id):
            raise Refused("denied", "This credential is for another service.", "inference:invoke")
        return route

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
        declared = self._check_head(headers)
        if service_id is not None:
            await self._visible(actor, service_id)
        body = await self._body(receive, declared)
        if body is None:
            return  # the client left while it was sending
        try:
            if service_id is None:
                service_id = await self._by_model(actor, body)
            exchange = _Exchange(scope, receive, send)
            await exchange.run(self._gateway, service_id, path, body, actor, cors)
        finally:
            self._bodies.give_back(len(body))

    def _check_head(self, headers: dict[bytes, bytes]) -> int | None:
        """The declared length. Raises Refused for a body that will not be taken, before it is read."""
        media = headers.get(b"content-type", http_api.JSON_TYPE).partition(b";")[0].strip().lower()
        if media != http_api.JSON_TYPE:
            raise Refused("unsupported_media_type", "Send the body as application/json.", "content-type")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(
                "unsupported_media_type", "Send the body without a content encoding.", "content-encoding"
            )
        length = headers.get(b"content-length")
        if length is None:
            return None
        if int(length) > self._body_bytes_max:
            raise self._too_large()
        return int(length)

    def _too_large(self) -> Refused:
        return Refused("too_large", f"An inference body is at most {self._body_bytes_max} bytes.")

    async def _body(self, receive: Receive, declared: int | None) -> bytes | None:
        """The whole body, its bytes accounted for; None when the client left."""
        held = declared or 0
        self._bodies.take(held)
        body = bytearray()
        kept = False
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > self._body_bytes_max:
                    raise self._too_large()
                if len(body) > held:
                    self._bodies.take(len(body) - held)
                    held = len(body)
                if not message.get("more_body", False):
                    kept = True
                    return bytes(body)
        finally:
            self._bodies.give_back(held - len(body) if kept else held)

    async def _by_model(self, actor: Actor, body: bytes) -> str:
        alias = openai.peek_model(body, **self._json_bounds)
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
        self._request_id: str | None = scope.get("ficc.request_id")
        self._abort_connection = extensions.get("ficc.abort")
        self._on_disconnect = extensions.get("ficc.on_disconnect")
        self._watching: asyncio.Task[None] | None = None
        self._sending = False

    async def run(
        self,
        gateway: Gateway,
        service_id: str,
        path: str,
        body: bytes,
        actor: Actor,
        cors: list[tuple[bytes, bytes]],
    ) -> None:
        status, chunks = await gateway.invoke(
            service_id, path, body, actor, request_id=self._request_id, on_begin=self._begin
        )
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
            self._on_disconnect(lambda: invocation.abort(CLIENT_GONE))
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
            invocation.abort(CLIENT_GONE)

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
    await _answer(send, http_api.status_of(refused), http_api.error_body(refused), headers)

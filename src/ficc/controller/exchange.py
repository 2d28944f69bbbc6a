"""One request and its answer, between the edge and the ASGI application.

Everything that the application sees of HTTP is here: `receive` hands out the body under backpressure and
tells of a client that left, `send` frames the answer. Beside what uvicorn does:

- every answer carries `x-request-id`, and the edge alone writes the fields of its own connection
  (`connection`, `transfer-encoding`); those that an application sets are dropped;
- an answer to HTTP/1.0 ends with the connection, it is never chunked;
- an application that fails is answered for with our error shape, or, once its answer began, cut off so
  that the client can tell it from a whole one;
- a client that stops sending a body that the application waits for is given up.

The scope has, beside ASGI's members, `ficc.request_id` (text) and these extensions:

- `ficc.abort`: a callable without arguments that ends the connection without finishing the answer;
- `ficc.on_disconnect`: takes a callable that is called once, when the client is gone before its answer is
  complete; cheaper than a task that waits in `receive`;
- `ficc.body_is_live`: a callable without arguments that lets this request's body pause for any time,
  for a body that is itself a stream in the making. The application then bounds it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveEvent,
    ASGISendEvent,
    HTTPDisconnectEvent,
    HTTPResponseStartEvent,
    HTTPScope,
)
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr

from ficc.controller.alarm import Alarm
from ficc.domain.errors import Refused
from ficc.protocol.http_api import JSON_TYPE, error_body, error_headers, status_of

if TYPE_CHECKING:
    from ficc.controller.edge import EdgeProtocol

BODY_BUFFER_BYTES_MAX = 64 * 1024  # received and not yet taken; above it the socket is not read
COPY_BYTES_MAX = 16 * 1024  # a larger chunk is handed to the transport in pieces rather than copied

FIELDS_KEPT = 1024
"""Lines of answers' fields that are remembered."""
_ALIKE = frozenset(
    {b"content-type", b"cache-control", b"x-ficc-generation", b"x-ficc-model-revision", b"x-ficc-plan-digest"}
)
"""Fields that have few values, none of which is a secret."""
_OWN_FIELDS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"x-request-id"})
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NOT_IN_A_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES = {status: f"HTTP/1.1 {status} \r\n".encode() for status in range(200, 600)} | {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class Delimited(Enum):
    """What tells the client where the answer's body ends."""

    BY_LENGTH = auto()
    BY_CHUNKS = auto()
    BY_CLOSE = auto()
    WITHOUT_BODY = auto()


class Exchange(RequestResponseCycle):
    def __init__(self, edge: EdgeProtocol, scope: dict[str, Any], keep_alive: bool, expects_continue: bool):
        super().__init__(
            scope=cast(HTTPScope, scope),
            transport=edge.transport,
            flow=edge.flow,
            logger=edge.logger,
            access_logger=edge.access_logger,
            access_log=edge.access_log,
            default_headers=edge.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects_continue,
            keep_alive=keep_alive,
            on_response=edge.on_response_complete,
        )
        self.request_id: str = scope["ficc.request_id"]
        self._extensions = {
            "ficc.abort": self.abort,
            "ficc.on_disconnect": self.set_on_disconnect,
            "ficc.body_is_live": self.set_body_is_live,
        }
        self._on_disconnect: Callable[[], None] | None = None
        scope["extensions"] = self._extensions
        self._edge = edge
        self._delimited: Delimited | None = None  # None until the answer's head is known
        self._head = b""  # known and not yet written: it goes out with the first of the body
        self._length_left = 0

        self._pieces: list[bytes] = []  # of the body, received and not yet taken by the application
        self._pieces_bytes = 0
        self._body_bytes = 0
        self._body_alarm = Alarm(edge.loop)
        self._body_is_live = False
        self._waited_seconds = 0.0

    # ---- the application's run

    async def run_asgi(self, app: ASGI3Application) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:  # the server's grace ran out
            self._fail("The server is stopping; send the request again.")
        except Exception:
            self.logger.exception("Application failed (request %s)", self.request_id)
            self._fail("The request failed inside the server; its logs have the request id.")
        else:
            if not self.response_complete and not self.disconnected:
                self.logger.error("Application returned without an answer (request %s)", self.request_id)
                self._fail("The request failed inside the server; its logs have the request id.")
        finally:
            self._body_alarm.cancel()
            # These lead back here; without them no garbage collection is needed.
            self._extensions.clear()
            self._on_disconnect = None

    def _fail(self, message: str) -> None:
        if not self.response_complete and not self.disconnected:
            self._edge.break_off(Refused("internal", message))

    def hang_up(self) -> None:
        """From now on the client is gone, as far as the application can tell."""
        self.disconnected = True
        self._body_alarm.cancel()
        self.message_event.set()
        self.flow.resume_writing()
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()

    def set_on_disconnect(self, callback: Callable[[], None]) -> None:
        if self.disconnected:
            callback()
        else:
            self._on_disconnect = callback

    def abort(self) -> None:
        """Ends the connection now, leaving the answer visibly unfinished."""
        if not self.response_complete and not self.disconnected:
            self._edge.sever()

    @property
    def ends_with_connection(self) -> bool:
        """Whether an ordinary close would look like the regular end of the answer."""
        return self._delimited is Delimited.BY_CLOSE

    # ---- the request's body

    def add_body(self, piece: bytes) -> None:
        self.waiting_for_100_continue = False
        self._pieces.append(piece)
        self._pieces_bytes += len(piece)
        self._body_bytes += len(piece)
        if self._pieces_bytes > BODY_BUFFER_BYTES_MAX:
            self.flow.pause_reading()
        self.message_event.set()

    def end_body(self) -> None:
        self.waiting_for_100_continue = False
        self.more_body = False
        self.message_event.set()

    def set_body_is_live(self) -> None:
        self._body_is_live = True

    async def receive(self) -> ASGIReceiveEvent:
        if not self.message_event.is_set() and not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if self.more_body:
                await self._wait_for_body()
            else:
                await self.message_event.wait()
        self.message_event.clear()
        if self.disconnected or self.response_complete:
            return HTTPDisconnectEvent(type="http.disconnect")
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._pieces_bytes = 0
        self.flow.resume_reading()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _wait_for_body(self) -> None:
        if self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._body_is_live:
            await self.message_event.wait()
            return
        # A trickle counts as idle too: each byte buys time, but only at the lowest rate that is accepted.
        limits = self._edge.limits
        bought = self._body_bytes / limits.body_bytes_per_second_min - self._waited_seconds
        began = self._edge.loop.time()
        self._body_alarm.set(limits.body_idle_seconds + min(bought, 0.0), self._edge.body_late)
        try:
            await self.message_event.wait()
        finally:
            self._body_alarm.clear()
            self._waited_seconds += self._edge.loop.time() - began

    # ---- the answer

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self._delimited is None:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"an answer starts with http.response.start, not with {message['type']}")
            self._start(message)
        elif self.response_complete:
            raise RuntimeError(f"{message['type']} after the answer was complete")
        elif message["type"] != "http.response.body":
            raise RuntimeError(f"after http.response.start comes http.response.body, not {message['type']}")
        else:
            self._write_body(message.get("body", b""), last=not message.get("more_body", False))

    def _write_body(self, body: bytes, last: bool) -> None:
        """One write per message: streams of tokens spend their time here. The head goes with the first; an
        empty message sends it alone."""
        head = self._head
        if self._delimited is Delimited.BY_LENGTH:
            self._length_left -= len(body)
            if self._length_left < 0 or (last and self._length_left):
                raise RuntimeError("the body's length differs from its content-length")
        elif self._delimited is Delimited.WITHOUT_BODY:
            body = b""
        before, after = head, b""
        if self._delimited is Delimited.BY_CHUNKS:
            if body:
                before += b"%x\r\n" % len(body)
                after = b"\r\n0\r\n\r\n" if last else b"\r\n"
            elif last:
                after = b"0\r\n\r\n"
        if len(body) <= COPY_BYTES_MAX:
            if data := b"%b%b%b" % (before, body, after):
                self.transport.write(data)
        else:
            self.transport.writelines((before, body, after))
        if head:
            self._head = b""
            self.response_started = True
        if last:
            self.response_complete = True
            self.message_event.set()
            self.on_response()

    def _start(self, message: HTTPResponseStartEvent) -> None:
        status = message["status"]
        if self.more_body:
            self.keep_alive = False  # an early answer; the rest of the body is in the next request's way
        lines, length = self._fields(message)
        if self.scope["method"] == "HEAD" or status in (204, 304):
            delimited = Delimited.WITHOUT_BODY
        elif length is not None:
            delimited = Delimited.BY_LENGTH
            self._length_left = length
        elif self.scope["http_version"] == "1.0":
            delimited = Delimited.BY_CLOSE
        else:
            delimited = Delimited.BY_CHUNKS
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self._head = b"".join((_STATUS_LINES[status], *lines, b"\r\n"))
        self._delimited = delimited
        self.waiting_for_100_continue = False
        if self.access_log:
            self._log_access(status)

    def _fields(self, message: HTTPResponseStartEvent) -> tuple[list[bytes], int | None]:
        """The lines of the answer's head that its application, the server and the edge ask for."""
        lines = [b"x-request-id: %b\r\n" % self.request_id.encode()]
        lines += [b"%b: %b\r\n" % field for field in self.default_headers]
        length: int | None = None
        for given, value in message.get("headers", ()):
            name, line = _field(given, value) if given in _ALIKE else _checked_field(given, value)
            if name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
            if name in _OWN_FIELDS:
                continue
            if name == b"content-length":
                if length is not None or not value.isdigit():
                    raise RuntimeError("the answer's content-length must be one decimal number")
                length = int(value)
            lines.append(line)
        return lines, length

    def _log_access(self, status: int) -> None:
        """The query stays out: it may hold what is nobody else's business."""
        self.access_logger.info(
            '%s - "%s %s HTTP/%s" %d',
            get_client_addr(self.scope),
            self.scope["method"],
            self.scope["raw_path"].decode("ascii", "replace"),
            self.scope["http_version"],
            status,
        )


def _checked_field(given: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The name of an answer's field in lower case, and its line. Raises RuntimeError."""
    name = given.lower()
    if not _NAME.fullmatch(name) or _NOT_IN_A_VALUE.search(value):
        raise RuntimeError(f"the answer's header {name!r} breaks the grammar of HTTP")
    return name, b"%b: %b\r\n" % (name, value)


_field = lru_cache(FIELDS_KEPT)(_checked_field)


def error_answer(
    refused: Refused, request_id: str, default_headers: list[tuple[bytes, bytes]], with_body: bool
) -> bytes:
    """A whole answer that says why, for a connection that is closed behind it."""
    body = error_body(refused)
    fields = [
        (b"x-request-id", request_id.encode()),
        *default_headers,
        (b"content-type", JSON_TYPE),
        (b"content-length", b"%d" % len(body)),
        *error_headers(refused),
        (b"connection", b"close"),
    ]
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    return _STATUS_LINES[status_of(refused)] + head + b"\r\n" + (body if with_body else b"")

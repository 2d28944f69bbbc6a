"""The HTTP edge: uvicorn's httptools protocol with limits on everything and one shape of errors.

    uvicorn.Config(app, http=edge_protocol(EdgeLimits()), loop="uvloop", server_header=False, ws="none")

Whoever starts uvicorn decides on `server_header` (leave it off: a version helps nobody but attackers),
`date_header`, `access_log`, `limit_concurrency` and `timeout_graceful_shutdown`; `timeout_keep_alive` has
no effect here. An Upgrade is ignored unless a WebSocket protocol is configured.

A connection is in one of five phases. The invariant that makes the limits exact: httptools is never fed
past the end of a message, so one request is parsed at a time, and what follows it waits, bounded, as
bytes. A message ends after the counted bytes of its Content-Length or else behind an empty line, so
feeding stops at each of these and looks.

Bytes keep being read while an answer is made, so that a client that leaves is noticed at once.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import urllib.parse
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ficc.controller.alarm import Alarm
from ficc.controller.exchange import Exchange, error_answer
from ficc.domain.errors import Refused
from ficc.identifiers import new_id
from ficc.protocol import http_request
from ficc.protocol.http_request import EMPTY_LINE, BodyBounds, bad_http
from ficc.settings import BODY_IDLE_SECONDS, HEADER_SECONDS, WRITE_STALL_SECONDS

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What one connection may ask for. One byte, header or second more is refused."""

    header_bytes_max: int = 64 * 1024
    """Request line and all headers, with their line ends."""
    headers_max: int = 100
    url_bytes_max: int = 8 * 1024
    """Path and query as they were sent."""
    header_seconds: float = HEADER_SECONDS
    """From a head's first byte to its last; on a fresh connection from the connecting."""

    body_idle_seconds: float = BODY_IDLE_SECONDS
    """For which a body may pause while the application waits for it."""
    body_bytes_per_second_min: int = 1024
    """The rate over all that waiting, below which a trickle counts as a pause."""
    chunk_overhead_bytes_max: int = 64 * 1024
    """What is not payload in a chunked body (extensions, trailers, zeros), beyond 128 bytes a chunk."""

    pipelined_bytes_max: int = 64 * 1024
    """Bytes of later requests that wait for an answer in the making. With more, that answer is the
    connection's last and the later requests are not looked at (RFC 9112, 9.3.2 lets clients resend)."""
    keep_alive_seconds: float = 75.0
    """Between an answer and the next request."""

    drain_bytes_max: int = 32 * 1024 * 1024
    """Thrown away behind an early or last answer, so that the client gets to reading it."""
    drain_seconds: float = 10.0
    """For which that goes on, and, over TLS, the client may owe its part of the farewell."""

    write_buffer_bytes_max: int = 64 * 1024
    """Of an answer in our memory, above which `send` waits."""
    unsent_bytes_max: int = 128 * 1024
    """Of an answer in the kernel's memory: it would take megabytes before it let us wait."""
    write_stall_seconds: float = WRITE_STALL_SECONDS
    """For which a client may take nothing of what waits for it, during an answer or behind the last."""


class Phase(Enum):
    HEAD = auto()
    """Waiting for a request, or in the middle of its head."""
    BODY = auto()
    """The application runs and the request's body is still coming."""
    ANSWER = auto()
    """The request is complete, its answer is not."""
    DRAINING = auto()
    """The last answer is written; what comes in is thrown away."""
    CLOSED = auto()
    """Closed, or handed over to a WebSocket; at most the write buffer is left."""


def edge_protocol(limits: EdgeLimits) -> type[EdgeProtocol]:
    """The class for `uvicorn.Config(http=...)`."""
    return type("EdgeProtocol", (EdgeProtocol,), {"limits": limits})


class EdgeProtocol(HttpToolsProtocol):
    limits: ClassVar[EdgeLimits] = EdgeLimits()

    cycle: Exchange

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._phase = Phase.HEAD
        self._alarm = Alarm(self.loop)
        self._held = bytearray()  # received and not given to the parser: a head, or later requests
        self._head_began = True  # whether header_seconds are running
        self._drained_bytes = 0
        self._last_answer = False  # whether the answer in the making is the connection's last
        self._unwritten_bytes = 0  # when the alarm for a stalled client was set
        self._body = BodyBounds(0, 0)

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes_max)
        _limit_unsent(transport, self.limits.unsent_bytes_max)
        self._alarm.set(self.limits.header_seconds, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = Phase.CLOSED
        self._alarm.cancel()
        self._held.clear()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.hang_up()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client is gone, or means to be told nothing more; the transport closes behind this.

        uvicorn would wait for the connection to be lost, which a client that shuts down only its own
        side and reads nothing can put off for ever.
        """
        if self._phase in (Phase.BODY, Phase.ANSWER):
            self.cycle.hang_up()
        self._close()

    def shutdown(self) -> None:
        """The server stops: an answer in the making may end, nothing else starts."""
        if self._phase in (Phase.BODY, Phase.ANSWER):
            self.cycle.keep_alive = False
        else:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.BODY:
            data = self._read_body(data)
        if self._phase is Phase.DRAINING or (self._phase is Phase.ANSWER and self._last_answer):
            self._throw_away(len(data))
        elif self._phase is not Phase.CLOSED and data:
            self._held += data
            self._read_held()

    def _read_held(self) -> None:
        if self._phase is Phase.HEAD:
            self._read_head()
        if self._phase is Phase.BODY and self._held:
            body = bytes(self._held)
            self._held.clear()
            self._held += self._read_body(body)
        if self._phase is Phase.ANSWER and len(self._held) > self.limits.pipelined_bytes_max:
            self._last_answer = True
            self.cycle.keep_alive = False
            self._throw_away(len(self._held))

    # ---- the head

    def _read_head(self) -> None:
        held = self._held
        while held.startswith(b"\r\n"):  # RFC 9112, 2.2: lines that some clients put behind a body
            del held[:2]
        if not held:
            return
        if not self._head_began:
            self._head_began = True
            self._alarm.set(self.limits.header_seconds, self._head_late)
        for_head = held.startswith(b"HEAD ")
        try:
            end = held.find(EMPTY_LINE) + len(EMPTY_LINE)
            if end < len(EMPTY_LINE):
                self._check_unfinished_head()
            elif end > self.limits.header_bytes_max:
                raise self._head_too_large()
            else:
                head = bytes(held[:end])
                del held[:end]
                self._begin(head)
        except Refused as refused:
            fields = http_request.decisive_fields(self.headers or ())
            self._refuse(refused, http_request.own_request_id(fields), with_body=not for_head)

    def _check_unfinished_head(self) -> None:
        """Refuses early what no further byte can mend."""
        held, limits = self._held, self.limits
        http_request.check_first_byte(held[0])
        line_bytes_max = limits.url_bytes_max + http_request.REQUEST_LINE_BESIDES_URL_BYTES_MAX
        line_end = held.find(b"\n", 0, line_bytes_max + 1)
        if line_end >= 0:
            http_request.request_line(bytes(held[: line_end + 1]), limits.url_bytes_max)
        elif len(held) > line_bytes_max:
            raise http_request.url_too_long(limits.url_bytes_max)
        if len(held) >= limits.header_bytes_max:
            raise self._head_too_large()

    def _head_too_large(self) -> Refused:
        limit = self.limits.header_bytes_max
        return Refused("headers_too_large", f"Request line and headers are over {limit} bytes; shorten them.")

    def _head_late(self) -> None:
        if not self._held:  # nobody asked for anything: a browser's spare connection
            self._close()
            return
        seconds = self.limits.header_seconds
        self._refuse(Refused("request_timeout", f"The headers took longer than {seconds:g} seconds."))

    def _begin(self, head: bytes) -> None:
        """Starts the application on a whole head."""
        line = http_request.request_line(head[: head.index(b"\n") + 1], self.limits.url_bytes_max)
        if head.count(b"\r\n") - 2 > self.limits.headers_max:
            raise Refused(
                "headers_too_large", f"The request has more than {self.limits.headers_max} headers."
            )
        head, upgrade = http_request.without_upgrade(head)
        self._phase = Phase.BODY
        self._parse(head)  # moves on to ANSWER if there is no body
        fields = http_request.decisive_fields(self.headers)
        framing = http_request.framing(line.version, fields)
        self._alarm.clear()
        if self.flow.write_paused:  # the client has not even read the answer before
            self._watch_writing()
        self._body = BodyBounds(framing.length, self.limits.chunk_overhead_bytes_max)
        if b" \r\n" in head or b"\t\r\n" in head:  # httptools leaves what follows a value in it
            self.headers[:] = [(name, value.rstrip(b" \t")) for name, value in self.headers]
        request_id = http_request.own_request_id(fields) or new_id()
        asked_for_websocket = http_request.offers_websocket(fields, upgrade) and framing.length == 0
        if asked_for_websocket and line.method == "GET" and self.ws_protocol_class is not None:
            self._become_websocket(request_id)
            return
        self._check_room()
        keep_alive = line.version != "1.0" and self._asked_to_keep_alive
        scope = self._complete_scope(line, request_id)
        self.cycle = Exchange(self, scope, keep_alive, framing.expects_continue)
        if self._phase is Phase.ANSWER:
            self.cycle.end_body()
        self._start_asgi_task(self.cycle, self.app)

    def _complete_scope(self, line: http_request.RequestLine, request_id: str) -> dict[str, Any]:
        path = line.path.decode("ascii")
        scope = cast(dict[str, Any], self.scope)
        scope["method"] = line.method
        scope["http_version"] = line.version
        scope["path"] = self.root_path + (urllib.parse.unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + line.path
        scope["query_string"] = line.query
        scope["ficc.request_id"] = request_id
        return scope

    def _check_room(self) -> None:
        most = self.limit_concurrency
        if most is not None and (len(self.connections) > most or len(self.tasks) >= most):
            message = f"The server has {most} connections, as many as it takes; try again."
            raise Refused("connections_full", message, retry_after_seconds=1)

    def _become_websocket(self, request_id: str) -> None:
        if self._held:
            raise bad_http("Bytes followed the request to upgrade before it was accepted.")
        self.scope["method"] = "GET"
        self.headers[:] = [field for field in self.headers if field[0] != b"x-request-id"]
        self.headers += [(b"x-request-id", request_id.encode()), (b"upgrade", b"websocket")]
        self._phase = Phase.CLOSED
        self._alarm.cancel()
        self.handle_websocket_upgrade()

    # ---- the body

    def _read_body(self, data: bytes) -> bytes:
        """Gives the parser what belongs to this body, and returns what follows it."""
        body, start = self._body, 0
        try:
            while start < len(data) and self._phase is Phase.BODY:
                end = body.next_stop(data, start)
                piece = data[start:end]
                payload_bytes_before = body.payload_bytes
                self._parse(piece)
                body.passed(piece, body.payload_bytes - payload_bytes_before)
                start = end
        except Refused as refused:
            self.break_off(refused)
            return b""
        if self._phase is Phase.ANSWER:
            self.cycle.end_body()
        return data[start:]

    def body_late(self) -> None:
        """The application waited for the body for too long."""
        self.break_off(Refused("request_timeout", "The request's body stopped coming."))

    # ---- what httptools calls; these only take notes, since it would swallow what they raise

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of ours
        except httptools.HttpParserError as malformed:
            raise bad_http(f"The request is malformed: {malformed}.") from None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_parsed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_parsed:  # behind it come trailers, which may be dropped (RFC 9110, 6.5.1)
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_parsed = True
        self._asked_to_keep_alive = self.parser.should_keep_alive()  # forgotten with the message's end

    def on_chunk_header(self) -> None:
        self._body.chunks += 1

    def on_body(self, body: bytes) -> None:
        self._body.payload_bytes += len(body)
        self.cycle.add_body(body)

    def on_message_complete(self) -> None:
        self._phase = Phase.ANSWER

    # ---- the answer and the end

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._phase is Phase.CLOSED or self.transport.is_closing():
            return
        if self._phase is Phase.BODY or self._last_answer or (self._held and not self.cycle.keep_alive):
            self._drain()
        elif not self.cycle.keep_alive:
            self._close()
        else:
            self._phase = Phase.HEAD
            self._head_began = False
            self.headers = []
            self.flow.resume_reading()
            self._alarm.set(self.limits.keep_alive_seconds, self._close)
            self._read_held()

    def break_off(self, refused: Refused) -> None:
        """Ends a request that cannot go on: with an error, or, if its answer began, by cutting it off."""
        self.cycle.hang_up()
        if self.cycle.response_started:
            self._cut_off()
        else:
            self._refuse(refused, self.cycle.request_id, with_body=self.cycle.scope["method"] != "HEAD")

    def sever(self) -> None:
        """Ends the connection in the middle of an answer."""
        self.cycle.hang_up()
        self._cut_off()

    def _cut_off(self) -> None:
        if not self.cycle.ends_with_connection:
            self._close()  # the client misses the last chunk, or bytes of the announced length
            return
        # Here a close would say that all is well. Over TLS the missing farewell tells, otherwise a reset.
        self._phase = Phase.CLOSED
        self._alarm.cancel()
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
        )
        self.transport.abort()

    def _refuse(self, refused: Refused, request_id: str | None = None, with_body: bool = True) -> None:
        if self.transport.is_closing():
            return
        request_id = request_id or new_id()
        self.logger.info("%s - %s (request %s)", self.client, refused, request_id)
        self.transport.write(error_answer(refused, request_id, self.server_state.default_headers, with_body))
        self._drain()

    def _drain(self) -> None:
        """Closes our side and reads on for a while: closing both sides at once, with bytes of the client
        unread, would make its kernel throw away the answer (RFC 9112, 9.6)."""
        self._phase = Phase.DRAINING
        self._held.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._alarm.set(self.limits.drain_seconds, self._close)

    def _throw_away(self, count: int) -> None:
        self._held.clear()
        self._drained_bytes += count
        if self._drained_bytes > self.limits.drain_bytes_max:
            if self._phase is Phase.ANSWER:
                self.sever()
            else:
                self._close()

    def _close(self) -> None:
        """Closes behind what is written, for as long as the client takes it."""
        self._phase = Phase.CLOSED
        self._alarm.clear()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writing()
        else:  # over TLS, the client's part of the farewell is awaited
            self._alarm.set(self.limits.drain_seconds, self.transport.abort)

    # ---- a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._phase in (Phase.BODY, Phase.ANSWER):
            self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._phase in (Phase.BODY, Phase.ANSWER):
            self._alarm.clear()

    def _watch_writing(self) -> None:
        self._unwritten_bytes = self.transport.get_write_buffer_size()
        self._alarm.set(self.limits.write_stall_seconds, self._writing_late)

    def _writing_late(self) -> None:
        if self.transport.get_write_buffer_size() < self._unwritten_bytes:
            self._watch_writing()
            return
        if self._phase in (Phase.BODY, Phase.ANSWER):
            self.cycle.hang_up()
        self._phase = Phase.CLOSED
        self.transport.abort()


def _limit_unsent(transport: asyncio.Transport, unsent_bytes_max: int) -> None:
    """Linux and macOS; elsewhere the kernel's own buffer decides when `send` begins to wait."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, unsent_bytes_max)

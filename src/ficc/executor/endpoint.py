"""The endpoint of an attempt: inference requests into its engine's socket, answers out, bounded.

One `Exchange` is one request to the engine over a connection of its own, so that cancelling it is closing
that connection. What the engine sends waits in a short queue (QUEUE_CHUNKS, READ_BYTES_MAX); while that is full the
engine's socket is left alone, so a slow client slows its engine and costs no memory. Headers toward the engine are
made here: nothing of a client's reaches it but the body. Only status, content type and body come back.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, cast

import httptools

from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Fence
from ficc.executor.inputs import VerifiedFile
from ficc.executor.pulse import Pulse
from ficc.protocol.executor_wire import (
    QUEUE_CHUNKS,
    READ_BYTES_MAX,
    Data,
    Head,
    Open,
)

QUIET_BYTES_MAX = 64 << 10
"""What an engine may send without a byte of body: its header, its trailer, chunk extensions. The parser
holds on to headers, so this bounds memory."""
ENGINE_BUSY_RETRIES = 20
ENGINE_BUSY_SECONDS = 0.01

_BUFFER = memoryview(bytearray(READ_BYTES_MAX))
"""Where every engine is read into: what is read is taken before anything else is."""

Deliver = Callable[["Data | Refused"], None]
"""Takes the answer to one read."""

E = TypeVar("E", bound="Exchange")


class Ending(Protocol):
    def fail(self, why: Refused) -> None:
        """End now, with this reason."""


class Gate:
    """What one attempt's endpoint admits: its contract, its slots and its open exchanges. `files` are the inputs of
    the plan by their ids."""

    def __init__(
        self,
        fence: Fence,
        contract: Endpoint,
        connect: Callable[[], int],
        files: Mapping[str, VerifiedFile] | None = None,
    ) -> None:
        self.fence = fence
        self.contract = contract
        self.files = files or {}
        self._connect = connect
        self._open: set[Exchange] = set()
        self._opening = 0
        self.pulse = Pulse()
        self.questions: set[Ending] = set()
        """Of our own, beside the slots: they too end with the gate."""
        self.uploads: set[Ending] = set()
        """What else is to end with the gate: an upload takes no slot, and there is one at most."""
        self._closed: Refused | None = None
        self._paths = frozenset(path for method, path in contract.routes if method == "POST")

    @property
    def in_flight(self) -> int:
        return len(self._open) + self._opening

    async def open(self, request: Open) -> Exchange:
        """Begin an exchange. Raises Refused; then the engine saw nothing."""
        self.check(request.fence)
        if request.path not in self._paths:
            raise Refused("not_found", f"The endpoint contract admits no POST {request.path}.")
        if len(request.body) > self.contract.body_bytes_max:
            raise Refused(
                "too_large", f"The endpoint takes bodies of at most {self.contract.body_bytes_max} bytes."
            )
        if self.in_flight >= self.contract.concurrency:
            raise Refused("busy", f"All {self.contract.concurrency} slots of the replica are taken.")
        self._opening += 1
        try:
            exchange = await self.connect(Exchange(self._open.discard, self.pulse))
        finally:
            self._opening -= 1
        self._open.add(exchange)
        exchange.send(request)
        return exchange

    @property
    def waiting_seconds(self) -> float:
        """For how long requests have waited without a word from the engine; a reader that does not read waits for
        nothing."""
        return self.pulse.waiting_seconds(one.sent for one in self._open if not one.held_up)

    async def connect(self, exchange: E) -> E:
        """Give an exchange a connection of its own. Raises Refused; then the engine saw nothing."""
        try:
            sock = await self._connected()
            try:
                await asyncio.get_running_loop().create_connection(lambda: exchange, sock=sock)
            except BaseException:
                sock.close()
                raise
            if exchange.closed:
                raise OSError("it closed the connection at once")
        except OSError as error:
            raise Refused(
                "service_not_ready",
                f"The engine takes no connection: {error.strerror or error}.",
                retry_after_seconds=1,
            ) from error
        if self._closed is not None:
            exchange.cancel()
        self._check_open()
        return exchange

    async def _connected(self) -> socket.socket:
        """A connection; while the engine's backlog is full, wait a little."""
        for attempt in range(ENGINE_BUSY_RETRIES + 1):
            try:
                return socket.socket(fileno=self._connect())
            except BlockingIOError:
                if attempt == ENGINE_BUSY_RETRIES:
                    raise
                await asyncio.sleep(ENGINE_BUSY_SECONDS)
        raise AssertionError("unreachable")

    def check(self, fence: Fence) -> None:
        """Refuse what is of another attempt, generation or plan, and everything after close."""
        if fence != self.fence:
            raise Refused("fenced", "The request is fenced for another attempt, generation or plan.")
        self._check_open()

    def _check_open(self) -> None:
        if self._closed is not None:
            # One reason for all: without this it would keep the frames of each whom it was raised to.
            raise self._closed.with_traceback(None)

    def admit_no_more(self, why: Refused) -> None:
        """Refuse whatever comes from now on. Open exchanges take what the engine has sent, to its end."""
        self._closed = self._closed or why

    def close(self, why: Refused) -> None:
        """End every exchange with this reason and admit no more."""
        self.admit_no_more(why)
        for exchange in [*self._open, *self.uploads, *self.questions]:
            exchange.fail(why)


def request_head(method: str, path: str, content_type: str, length: int) -> bytes:
    """The head of a request to an engine: every header that it ever sees."""
    return (
        f"{method} {path} HTTP/1.1\r\n"
        "Host: localhost\r\n"
        f"Content-Type: {content_type}\r\n"
        "Accept: */*\r\n"
        "Accept-Encoding: identity\r\n"
        f"Content-Length: {length}\r\n"
        "Connection: close\r\n\r\n"
    ).encode("ascii")


def late() -> Refused:
    return Refused("deadline_exceeded", "The deadline passed before the engine was done.")


class Exchange(asyncio.BufferedProtocol):
    """One request to the engine and its answer."""

    def __init__(self, on_close: Callable[[Exchange], None], pulse: Pulse | None = None) -> None:
        self._on_close = on_close
        self._pulse = pulse or Pulse()
        self.sent = 0.0
        """When its request was, CLOCK_MONOTONIC."""
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._queue: deque[bytearray] = deque()
        self._fresh: list[bytes] = []
        self._waiting: Deliver | None = None
        self._head: Head | None = None
        self._head_sent = False
        self._quiet_bytes = 0
        self._content_type = ""
        self._framed = False
        self._ended = False
        self._failure: Refused | None = None
        self._paused = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Whether the engine's connection is gone."""
        return self._transport is None

    # The caller's side.

    def send(self, request: Open) -> None:
        head = request_head("POST", request.path, "application/json", len(request.body))
        self.transmit(head + request.body, request.deadline_ms / 1000)

    def transmit(self, request: bytes, seconds: float) -> None:
        """Send a whole request, to be answered within so long."""
        assert self._transport is not None
        self.sent = time.monotonic()
        self._transport.write(request)
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._late)

    def _late(self) -> None:
        self.fail(late())

    @property
    def held_up(self) -> bool:
        """Whether its reader leaves the engine waiting."""
        return self._paused

    def read(self, deliver: Deliver) -> None:
        """Ask for what comes next; answered once, now or later. One read at a time."""
        if self._waiting is not None:
            self.fail(Refused("invalid_request", "Two reads of one stream at once."))
            return
        self._waiting = deliver
        self._hand_out()

    def cancel(self) -> None:
        """Close the engine's connection; whatever is queued is dropped."""
        self.fail(Refused("peer_lost", "The request was cancelled."))

    def fail(self, why: Refused) -> None:
        """End the exchange now, unless it already ended; whatever is queued is dropped."""
        if self._failure is None and not (self._ended and not self._queue):
            self._failure = why
        if self._failure is not None:
            self._queue.clear()
        self._close()
        self._hand_out()

    def _break(self, message: str) -> None:
        """The engine will not complete its answer: said after what came of it was handed out."""
        if self._failure is None and not self._ended:
            self._failure = Refused("engine_error", message)
        self._disconnect()
        self._hand_out()

    # The engine's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        if self._parser is None:
            return
        problem = ""
        try:
            self._parser.feed_data(_BUFFER[:nbytes])
        except httptools.HttpParserUpgrade:
            problem = "The engine offers to speak another protocol, which nobody asked it for."
        except httptools.HttpParserError as error:
            problem = f"The engine's answer is not HTTP: {error}."
        self._quiet_bytes = 0 if self._fresh else self._quiet_bytes + nbytes
        if self._quiet_bytes > QUIET_BYTES_MAX:
            problem = problem or "The engine's header or trailer is over the limit."
        if self._fresh:
            self._enqueue()
        if self._ended:  # its slot is free, however slow the reader is; what follows is not looked at
            self._disconnect()
        elif problem:
            self._break(problem)
            return
        self._hand_out()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._failure is None and self._head is not None and not self._framed and exc is None:
            self._ended = True  # the body was delimited by the close, RFC 9112 section 6.3
        self._break("The engine closed the connection before its answer was complete.")

    # httptools' callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_message_begin(self) -> None:
        if self._head is None:  # forget what an interim answer (1xx) said
            self._content_type, self._framed = "", False

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if self._head is None and not 100 <= status < 200:
            self._head = Head(status, self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._head is not None and not self._ended:
            self._fresh.append(body)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._ended = True

    # Between them.

    def _enqueue(self) -> None:
        """Merge what one reading of the engine brought into the queue: at most one more chunk, since a
        reading brings at most READ_BYTES_MAX bytes."""
        data = bytearray().join(self._fresh)
        self._fresh.clear()
        self._pulse.hear(data)
        queue = self._queue
        if queue and len(queue[-1]) + len(data) <= READ_BYTES_MAX:
            queue[-1] += data
        else:
            queue.append(data)
        if len(queue) >= QUEUE_CHUNKS and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _hand_out(self) -> None:
        """Answer the waiting read, if there is one and something to say."""
        deliver = self._waiting
        if deliver is None:
            return
        if self._failure is not None and not self._queue:
            self._waiting = None
            self._close()
            deliver(self._failure)
            return
        queue = self._queue
        head = None if self._head_sent else self._head
        if not queue and not self._ended and head is None:
            return
        data = queue.popleft() if queue else bytearray()
        while queue and len(data) + len(queue[0]) <= READ_BYTES_MAX:
            data += queue.popleft()
        end = self._ended and not queue
        self._head_sent = self._head_sent or head is not None
        self._waiting = None
        if self._paused and len(queue) < QUEUE_CHUNKS and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        if end:
            self._close()
        deliver(Data(head, data, end))

    def _close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the engine's connection and give the slot back. What is queued stays for its reader, until
        the deadline."""
        transport, self._transport = self._transport, None
        self._parser = None  # it refers back to this object
        if transport is not None:
            transport.abort()
            self._pulse.end(self.sent)
        self._on_close(self)

"""The executor's unix socket: peers are checked, versions agreed, calls dispatched, endpoints pumped.

A connection is for control or for endpoints, as its HELLO says. When an endpoint connection goes away, every
exchange on it is cancelled; when a control connection goes away, nothing happens to any attempt: leases
decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from ficc.client.gather import GatheringWriter
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.executor.endpoint import Exchange, Gate
from ficc.executor.upload import ModelUpload
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import Data, Decoder, Frame, Kind, WireError

log = logging.getLogger("ficc.executor")

STREAMS_MAX = 16_384
"""Open exchanges of one connection."""
CALLS_MAX = 256
"""Unanswered calls of one connection."""
WRITE_BYTES_MAX = 4 << 20
"""Unread answers of one connection, past which nothing more is read from it, and events close it."""

Dispatch = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
FindGate = Callable[[Fence], Gate]


class Server:
    """What all connections share. `hello` is what the executor says of itself."""

    def __init__(
        self,
        *,
        hello: dict[str, Any],
        peers: frozenset[int],
        dispatch: Dispatch,
        find_gate: FindGate,
        snapshot: Callable[[], dict[str, Any]],
    ) -> None:
        self.hello = hello
        self.peers = peers | {0, os.geteuid()}
        self.dispatch = dispatch
        self.find_gate = find_gate
        self.snapshot = snapshot
        self.connections: set[Connection] = set()

    def publish(self, event: dict[str, Any]) -> None:
        """Push an event to every control connection that subscribed."""
        for connection in list(self.connections):
            connection.push(event)

    async def listen(self, path: str) -> asyncio.AbstractServer:
        """Listen on a unix socket. A socket file that an earlier run left is replaced, and the name leads to
        one that answers from its first moment on."""
        unfinished = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(unfinished)
        os.chmod(unfinished, 0o666)  # noqa: S103  # who may speak is decided by the peer's credentials
        loop = asyncio.get_running_loop()
        listener = await loop.create_unix_server(lambda: Connection(self), sock=sock)
        os.rename(unfinished, path)
        return listener


@dataclass(slots=True)
class Stream:
    """One exchange of a connection, and the fence that every action on it carries. `exchange` is None
    while it is being opened; `read_early` says that a read came before."""

    fence: bytes
    exchange: Exchange | ModelUpload | None = None
    read_early: bool = False


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._role: str | None = None
        self._subscribed = False
        self._calls: set[asyncio.Task[None]] = set()
        self._streams: dict[int, Stream] = {}

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connected = cast(asyncio.Transport, transport)
        connected.set_write_buffer_limits(high=WRITE_BYTES_MAX)
        peer = connected.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", peer)
        if uid not in self._server.peers:
            log.warning("refused a connection of uid %d", uid)
            connected.abort()  # and, without a transport, nothing that still arrives is looked at
            return
        self._transport = connected
        self._writer = GatheringWriter(connected)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if self._transport is None:
                    return
                self._on_frame(frame)
        except WireError as error:
            log.warning("closed a connection: %s", error)
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if stream.exchange is not None:
                stream.exchange.cancel()
        # Calls go on: what was asked may be half done. An exchange that is being opened sees that its
        # stream is gone.

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _abort(self) -> None:
        if self._transport is not None:
            self._writer.flush()  # a last word, if there is one
            self._transport.abort()

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._writer.write(data)

    # Frames.

    def _on_frame(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.READ and self._role == "endpoint":
            self._read(frame)
        elif kind == Kind.OPEN and self._role == "endpoint":
            self._open(frame, wire.decode_open(frame.payload))
        elif kind == Kind.UPLOAD and self._role == "endpoint":
            self._open(frame, wire.decode_upload(frame.payload))
        elif kind == Kind.CANCEL and self._role == "endpoint":
            self._cancel(frame)
        elif kind == Kind.CALL and self._role == "control":
            self._call(frame)
        elif kind == Kind.HELLO and self._role is None:
            self._hello(frame)
        else:
            raise WireError(f"{Kind(kind).name} does not belong here")

    def _hello(self, frame: Frame) -> None:
        document = frame.json
        versions = document.get("versions")
        if not isinstance(versions, list) or wire.VERSION not in versions:
            refused = Refused("invalid_request", f"This executor speaks version {wire.VERSION}.", "versions")
            self._send(wire.encode_refusal(Kind.FAILURE, frame.stream, refused))
            raise WireError("no common version")
        role = document.get("role")
        if role not in ("control", "endpoint"):
            raise WireError(f"no such role: {role!r}")
        self._role = role
        self._send(
            wire.encode_json(Kind.HELLO, frame.stream, {"version": wire.VERSION, **self._server.hello})
        )

    # Control.

    def _call(self, frame: Frame) -> None:
        if len(self._calls) >= CALLS_MAX:
            raise WireError("too many unanswered calls")
        task = asyncio.get_running_loop().create_task(self._answer(frame))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, frame: Frame) -> None:
        try:
            document = frame.json
            operation = str(document.pop("op", ""))
            if operation == "subscribe":
                self._subscribed = True
                result = self._server.snapshot()
            else:
                result = await self._server.dispatch(operation, document)
        except Refused as refused:
            self._send(wire.encode_refusal(Kind.FAILURE, frame.stream, refused))
        except (WireError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            malformed = Refused("invalid_request", f"The call is malformed: {type(error).__name__}: {error}.")
            self._send(wire.encode_refusal(Kind.FAILURE, frame.stream, malformed))
        except Exception:
            self._send(wire.encode_refusal(Kind.FAILURE, frame.stream, _fault()))
        else:
            self._send(_result(frame.stream, result))

    def push(self, event: dict[str, Any]) -> None:
        """Send an event to a subscriber; one that does not read is let go, and learns by its loss."""
        if not self._subscribed or self._transport is None:
            return
        if self._transport.get_write_buffer_size() > WRITE_BYTES_MAX:
            log.warning("closed a connection that does not read its events")
            self._abort()
            return
        self._send(wire.encode_json(Kind.EVENT, 0, event))

    # Endpoints.

    def _open(self, frame: Frame, request: wire.Open | wire.Upload) -> None:
        number = frame.stream
        if number in self._streams or len(self._streams) >= STREAMS_MAX:
            raise WireError(f"stream {number} is open already, or there are too many")
        stream = Stream(frame.payload[: Fence.BYTES])
        self._streams[number] = stream
        opening = self._opened(number, stream, request, by_data=bool(frame.flags & wire.BY_DATA))
        task = asyncio.get_running_loop().create_task(opening)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _opened(
        self, number: int, stream: Stream, request: wire.Open | wire.Upload, *, by_data: bool
    ) -> None:
        exchange: Exchange | ModelUpload
        try:
            gate = self._server.find_gate(request.fence)
            if isinstance(request, wire.Upload):
                exchange = ModelUpload.begin(gate, request)
            else:
                exchange = await gate.open(request)
        except Exception as error:
            refused = error if isinstance(error, Refused) else _fault()
            if self._streams.get(number) is stream:
                del self._streams[number]
                self._send(wire.encode_refusal(Kind.REFUSED, number, refused))
            return
        if self._streams.get(number) is not stream:  # cancelled while it was being opened
            exchange.cancel()
            return
        stream.exchange = exchange
        if not by_data:
            self._send(wire.encode(Kind.OPENED, number))
        if stream.read_early:
            exchange.read(lambda answer: self._deliver(number, stream, answer))

    def _read(self, frame: Frame) -> None:
        number = frame.stream
        stream = self._streams.get(number)
        if stream is None:
            return  # refused, ended or cancelled: the answer that says so is under way
        if stream.fence != frame.payload:
            del self._streams[number]
            if stream.exchange is not None:
                stream.exchange.cancel()
            self._send(wire.encode_broken(number, _fenced()))
        elif stream.exchange is None:
            stream.read_early = True
        else:
            stream.exchange.read(lambda answer: self._deliver(number, stream, answer))

    def _deliver(self, number: int, stream: Stream, answer: Data | Refused) -> None:
        if self._streams.get(number) is not stream:
            return  # cancelled, or told of its end already
        if isinstance(answer, Refused):
            del self._streams[number]
            self._send(wire.encode_broken(number, answer))
            return
        if answer.end:
            del self._streams[number]
        self._send(wire.encode_data(number, answer.data, head=answer.head, end=answer.end))

    def _cancel(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None or stream.fence != frame.payload:
            return
        del self._streams[frame.stream]
        if stream.exchange is not None:
            stream.exchange.cancel()


def _result(number: int, result: dict[str, Any]) -> bytes:
    frame = wire.encode_json(Kind.RESULT, number, result)
    if len(frame) - wire.HEADER.size > wire.CONTROL_BYTES_MAX:
        refused = Refused("too_large", f"The answer is over {wire.CONTROL_BYTES_MAX} bytes.")
        return wire.encode_refusal(Kind.FAILURE, number, refused)
    return frame


def _fault() -> Refused:
    """For an exception that nobody expected, while it is handled."""
    log.exception("a fault of ours")
    return Refused("internal", "A fault of the executor; its log has the details.")


def _fenced() -> Refused:
    return Refused("fenced", "The stream belongs to another attempt, generation or plan.")

"""The other end of the executor's socket, for whoever drives one: the controller, later the node agent.

`Control` calls and hears events. `EndpointLink` carries every invocation of one peer over one connection;
an `EndpointStream` pulls its answer read by read, so a caller that stops reading stops the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ficc.client.gather import GatheringWriter
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import Data, Decoder, Frame, Kind, WireError

HELLO_SECONDS = 5.0
CALL_SECONDS = 30.0
WRITE_BYTES_HIGH = 1 << 20

_LOST = "The connection to the executor broke; what it was doing is not known here."


def _unavailable(message: str) -> Refused:
    return Refused("executor_unavailable", message, retry_after_seconds=1)


class _Connection(asyncio.Protocol):
    """Framing, HELLO and loss, shared by both roles."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done once the connection is gone."""

    async def open(self, path: Path, role: str) -> dict[str, Any]:
        """Connect and agree on the version; what the executor says of itself. Raises Refused."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await loop.create_unix_connection(lambda: self, str(path))
                self._write(wire.encode_json(Kind.HELLO, 0, {"versions": [wire.VERSION], "role": role}))
                return await self._hello
        except OSError as error:  # a TimeoutError is one
            self.close()
            why = str(error) or f"no answer within {HELLO_SECONDS:.0f} s"
            raise _unavailable(f"No executor answers at {path}: {why}.") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH)
        self._writer = GatheringWriter(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if self._hello.done():
                    self._on_frame(frame)
                elif frame.kind == Kind.HELLO:
                    self._hello.set_result(frame.json)
                else:
                    self._hello.set_exception(wire.refusal(frame))
        except WireError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._hello.done():
            self._hello.set_exception(_unavailable("The executor closed the connection."))
            self._hello.exception()  # looked at: nobody may be waiting for it any more
        if not self.lost.done():
            self.lost.set_result(None)
        self._on_lost()

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            raise _unavailable("The connection to the executor is closed.")
        self._writer.write(data)

    def _on_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _on_lost(self) -> None:
        raise NotImplementedError


class Control(_Connection):
    """Calls and events. A lost answer leaves what was asked unknown: ask for the status, do not repeat."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__()
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(self, operation: str, seconds: float = CALL_SECONDS, **arguments: Any) -> dict[str, Any]:
        """The executor's result. Raises its refusal, or Refused `executor_unavailable`."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._write(wire.encode_json(Kind.CALL, number, {"op": operation, **arguments}))
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise _unavailable(f"The executor did not answer {operation} within {seconds:.0f} s.") from None
        finally:
            del self._answers[number]

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.EVENT:
            if self._on_event is not None:
                self._on_event(frame.json)
            return
        answer = self._answers.get(frame.stream)
        if answer is None or answer.done():
            return
        if frame.kind == Kind.RESULT:
            answer.set_result(frame.json)
        elif frame.kind == Kind.FAILURE:
            answer.set_exception(wire.refusal(frame))
        else:
            raise WireError("not an answer to a call")

    def _on_lost(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(_unavailable(_LOST))


class EndpointLink(_Connection):
    """Invocations over one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._streams: dict[int, EndpointStream] = {}

    @property
    def usable(self) -> bool:
        return self._transport is not None

    async def open_stream(
        self, fence: Fence, path: str, body: bytes, deadline_seconds: float, *, by_data: bool = False
    ) -> EndpointStream:
        """Begin an invocation. With `by_data` this returns when the first piece of the answer is there to be read, and
        costs one message less.

        Raises Refused: whatever the executor refuses before its engine saw anything (`busy`, `fenced`,
        `service_not_ready`, `not_found`, `too_large`), `executor_unavailable` when nothing was sent, and
        `peer_lost` when it is not known whether the engine saw it.
        """
        if len(body) > wire.BODY_BYTES_MAX:
            raise Refused("too_large", f"A body has at most {wire.BODY_BYTES_MAX} bytes.")
        request = wire.Open(fence, _milliseconds(deadline_seconds), path, body)
        return await self._begin(fence, lambda number: wire.encode_open(number, request, by_data=by_data))

    async def upload(
        self,
        fence: Fence,
        model: str,
        input_ids: Sequence[str],
        deadline_seconds: float,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Let the executor hand admitted inputs to the engine, to be served under this name; what was created.
        Harmless to repeat. Raises Refused as `open_stream` and `EndpointStream.read` do."""
        request = wire.Upload(fence, _milliseconds(deadline_seconds), model, tuple(input_ids))
        stream = await self._begin(fence, lambda number: wire.encode_upload(number, request))
        try:
            while True:
                piece = await stream.read()
                news: dict[str, Any] = json.loads(piece.data)  # a line is one piece
                if piece.end:
                    return news
                if on_progress is not None:
                    on_progress(news)
        finally:
            stream.close()

    async def _begin(self, fence: Fence, encode: Callable[[int], bytes]) -> EndpointStream:
        """Open a stream with this frame."""
        number = next(self._numbers)
        stream = EndpointStream(self, number, wire.packed(fence))
        # The first read goes along, so that a short answer takes one turn.
        self._write(encode(number) + stream.read_frame)
        self._streams[number] = stream
        stream.expect_read()
        try:
            await stream.opened
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def _on_frame(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            return  # of a stream that was cancelled meanwhile
        if frame.kind == Kind.DATA:
            stream.on_data(frame)
        elif frame.kind == Kind.OPENED:
            stream.on_opened()
        elif frame.kind == Kind.REFUSED:
            del self._streams[frame.stream]
            stream.on_refused(wire.refusal(frame))
        else:
            raise WireError("not of an endpoint")

    def _on_lost(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_lost(
                Refused("peer_lost", "The connection to the replica broke; its outcome is not known.")
            )

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def send(self, data: bytes) -> None:
        self._write(data)


class EndpointStream:
    """One invocation's answer, pulled. After the last piece, a refusal or `close` it is over."""

    def __init__(self, link: EndpointLink, number: int, fence: bytes) -> None:
        self._link = link
        self._number = number
        self._fence = fence
        self.read_frame = wire.encode(Kind.READ, number, fence)
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self._answer: asyncio.Future[Data] | None = None
        self._over = False

    def expect_read(self) -> None:
        self._answer = asyncio.get_running_loop().create_future()

    async def read(self) -> Data:
        """The next piece, waited for. Raises Refused for an answer that will not be completed. Cancelling
        it gives the stream up: a piece may have come that nobody has."""
        if self._answer is None:
            if self._over:
                raise RuntimeError("the stream is over: its last piece was read, or it was closed")
            self.expect_read()
            self._link.send(self.read_frame)
        answer = self._answer
        assert answer is not None
        try:
            return await answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            if self._answer is answer:  # else it is what `abort` left for the next read
                self._answer = None

    def nudge(self) -> None:
        """Let the waiting read come back with an empty piece; what it asked for goes to the next read."""
        waiting = self._answer
        if waiting is not None and not waiting.done():
            self.expect_read()
            waiting.set_result(Data(None, b"", False))

    def abort(self, why: Refused) -> None:
        """End the stream from this side: the waiting or next read raises `why`, the engine's connection
        is closed."""
        if self._over:
            return
        self._cancel()
        self._fail(why)

    def close(self) -> None:
        """Give the stream up; idempotent. The executor closes the engine's connection."""
        if not self._over:
            self._cancel()

    def _cancel(self) -> None:
        self._over = True
        self._link.forget(self._number)
        if self._link.usable:
            self._link.send(wire.encode(Kind.CANCEL, self._number, self._fence))

    def on_opened(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def on_data(self, frame: Frame) -> None:
        self.on_opened()
        try:
            data = wire.decode_data(frame)
        except Refused as refused:
            self._end()
            self._fail(refused)
            return
        if data.end:
            self._end()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(data)

    def on_refused(self, refused: Refused) -> None:
        self._over = True
        self._drop_read()
        if not self.opened.done():
            self.opened.set_exception(refused)

    def on_lost(self, why: Refused) -> None:
        self._over = True
        if not self.opened.done():
            self._drop_read()
            self.opened.set_exception(why)
        else:
            self._fail(why)

    def _end(self) -> None:
        self._over = True
        self._link.forget(self._number)

    def _fail(self, why: Refused) -> None:
        """The waiting read, or else the next one, raises `why`."""
        if self._answer is None or self._answer.done():
            self.expect_read()
        assert self._answer is not None
        self._answer.set_exception(why)
        self._answer.exception()  # looked at: nobody may come to read it

    def _drop_read(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def fence_document(fence: Fence) -> Mapping[str, Any]:
    """A fence as control calls carry it."""
    return {
        "attempt_id": fence.attempt_id,
        "generation": fence.generation,
        "plan_digest": fence.plan_digest,
    }

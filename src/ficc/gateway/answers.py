"""What an engine answers, judged and made ready for the client.

A refusal comes back in our one shape of errors. A JSON answer is held until it is whole, or larger than
HELD_BYTES_MAX, so that an engine that breaks off, or sends what is no answer, becomes a proper status and not half of a
success. A stream goes out as it comes; a break or a fault inside it is said in band where that is possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from pydantic_core import from_json

from ficc.domain.errors import Refused
from ficc.domain.usage import Tokens
from ficc.gateway.ports import Stream
from ficc.protocol import http_api, openai, sse
from ficc.protocol.executor_wire import Data, Head

HELD_BYTES_MAX = 256 << 10
"""How much of a JSON answer is held back, and up to which size it is known to be JSON before it goes out."""
EDGE_BYTES_MAX = 4096
"""At each end of what is held of a larger one, where its count of tokens is looked for."""
DONE_SECONDS_MAX = 1.0
"""For which an engine may leave its connection open behind `[DONE]`."""
_JSON_TYPES = frozenset({"", "application/json"})


class Source(Protocol):
    """The chunks of an answer."""

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


class End(Protocol):
    def __call__(self, why: Refused | None, *, whole: bool = False) -> None:
        """Told how an answer ended, as soon as that is known; what is told later does not count."""


class StreamAborted(Exception):
    """The answer broke where nothing can be said in band; the transport must break too."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused))
        self.refused = refused


class Pull:
    """One engine's answer, pulled piece by piece: a `Stream`, with timers. `quiet_seconds`: how long a read may
    bring nothing before it comes back with an empty piece; None: as long as it takes."""

    def __init__(self, stream: Stream, quiet_seconds: float | None = None) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._quiet_seconds = quiet_seconds
        self._heard = self._loop.time()
        self.first_at: float | None = None
        """When the first byte of the answer's body was there, in the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        if quiet_seconds is not None:
            self._timer = self._loop.call_later(quiet_seconds, self._look)

    async def read(self) -> Data:
        piece = await self._stream.read()
        if self.first_at is None and piece.data:
            self.first_at = self._loop.time()
        if self._quiet_seconds is not None:
            self._heard = self._loop.time()
        return piece

    def end_within(self, seconds: float) -> None:
        """Let the engine close its connection by itself, or else end it."""
        self._stop()
        late = Refused("engine_error", "The engine kept its connection open behind the end of its answer.")
        self._timer = self._loop.call_later(seconds, self._stream.abort, late)

    def nudge(self) -> None:
        self._stream.nudge()

    def abort(self, why: Refused) -> None:
        self._stream.abort(why)

    def close(self) -> None:
        self._stop()
        self._stream.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        assert self._quiet_seconds is not None
        left = self._heard + self._quiet_seconds - self._loop.time()
        if left <= 0:
            self.nudge()
            left = self._quiet_seconds
        self._timer = self._loop.call_later(left, self._look)


def check_head(head: Head) -> bool:
    """Whether a success is a stream. Raises Refused for what an engine may not answer."""
    if head.status != 200:
        raise Refused(
            "engine_error", f"The engine answered with status {head.status}, which says nothing here."
        )
    if sse.is_stream(head.content_type):
        return True
    media = head.content_type.partition(";")[0].strip().lower()
    if media not in _JSON_TYPES:
        raise Refused("engine_error", f"The engine answered with {media[:64]!r} instead of JSON.")
    return False


async def refusal(pull: Pull, status: int, piece: Data) -> Refused:
    """An engine's 4xx or 5xx as ours."""
    data = bytearray(piece.data)
    while not piece.end and len(data) < openai.ERROR_BYTES_MAX:
        piece = await pull.read()
        data += piece.data
    return openai.engine_refusal(status, bytes(data))


async def held(pull: Pull, piece: Data) -> tuple[Data, Tokens | None]:
    """The beginning of a JSON answer, or all of it (then it is JSON), and what it says of tokens. Raises Refused."""
    data = piece.data if piece.end else bytearray(piece.data)
    while not piece.end and len(data) <= HELD_BYTES_MAX:
        piece = await pull.read()
        data += piece.data
    whole = bytes(data)
    if piece.end and len(data) <= HELD_BYTES_MAX:
        tokens = openai.tokens(_document_of(whole))
    else:
        tokens = openai.tokens_in_document(whole[:EDGE_BYTES_MAX]) or openai.tokens_in_document(
            whole[-EDGE_BYTES_MAX:]
        )
    return Data(None, whole, piece.end), tokens


def _document_of(data: bytes) -> dict[str, Any]:
    try:
        document = from_json(data, allow_inf_nan=False)
        if isinstance(document, dict):
            return document
    except ValueError:
        pass
    raise Refused("engine_error", "The engine's answer is not a JSON object, or not a whole one.")


class OnePiece:
    """An answer that is there as a whole, as its one chunk."""

    def __init__(self, data: bytes, end: End | None = None) -> None:
        self._data: bytes | None = data
        self._end = end

    async def __anext__(self) -> bytes:
        data, self._data = self._data, None
        if data is not None:
            return data
        if self._end is not None:
            self._end(None, whole=True)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._end is not None:
            self._end(None)


async def document(pull: Pull, piece: Data, end: End) -> AsyncGenerator[bytes, None]:
    """The chunks of a JSON answer; one that breaks off so late cannot be repaired."""
    try:
        while True:
            if piece.data:
                yield bytes(piece.data)
            if piece.end:
                end(None, whole=True)
                return
            piece = await pull.read()
    except Refused as refused:
        end(refused)
        raise StreamAborted(refused) from refused
    finally:
        end(None)


async def events(
    pull: Pull, piece: Data, check: Callable[[], None], end: End, tally: sse.Tally
) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream. `check` raises what ended the invocation meanwhile; `tally` sees what goes out.

    Comments keep the client's connection alive while the engine is quiet, even before its head came (then `piece`
    is empty, and whatever it answers instead of a stream is said in band).
    """
    scanner = sse.Scanner()
    ending = False
    try:
        while piece.head is None:
            yield sse.KEEP_ALIVE
            check()
            piece = await pull.read()
        await _check_stream(pull, piece.head, piece)
        if not piece.data:
            yield b""  # the head goes out, though the first event may be long in coming
        while True:
            if piece.data:
                passed = scanner.feed(piece.data)
                if passed:
                    tally.saw(passed)
                    yield bytes(passed)
                if scanner.fault is not None:
                    raise openai.engine_fault(scanner.fault)
            elif piece.head is None and not piece.end and scanner.between_events:
                yield sse.KEEP_ALIVE
            if piece.end:
                break
            if scanner.done and not ending:
                ending = True
                pull.end_within(DONE_SECONDS_MAX)
            check()
            piece = await pull.read()
        scanner.finish()
        if not scanner.done:
            raise Refused("engine_error", "The engine ended its stream without saying that it was done.")
        end(None, whole=True)
    except Refused as refused:
        scanner.finish()
        if scanner.done:
            end(None, whole=True)
            return  # it broke behind its end
        why = refused if scanner.fault is None else openai.engine_fault(scanner.fault)
        end(why)
        if not scanner.between_events:
            raise StreamAborted(why) from refused
        yield scanner.repair + sse.event(http_api.error_document(why))
    finally:
        end(None)


async def _check_stream(pull: Pull, head: Head, piece: Data) -> None:
    """Raises Refused for what comes in place of a stream after the stream has begun."""
    if head.status >= 400:
        raise await refusal(pull, head.status, piece)
    if not check_head(head):
        raise Refused("engine_error", "The engine answered a request for a stream with a document.")

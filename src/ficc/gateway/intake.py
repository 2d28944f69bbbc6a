"""How the body of an inference request is taken in: refused by its head where that is possible, bounded, accounted for
with all others that are held, and unpacked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from ficc.domain.errors import Refused
from ficc.gateway.slots import Bodies
from ficc.protocol import content_coding, http_api

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


UNPACKING_MAX = 4
"""Bodies unpacked at once: each takes a thread, and up to `content_coding.WINDOW_BYTES_MAX` beside its bytes."""


class Announced(NamedTuple):
    """What a request's head says of its body: the length, if it does, and what it is packed with."""

    length: int | None
    coding: content_coding.Coding | None


class Intake:
    def __init__(self, *, body_bytes_max: int, total_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._bodies = Bodies(total_bytes_max)
        self._unpacking = asyncio.Semaphore(UNPACKING_MAX)

    def announced(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Announced:
        """Raises Refused for a body that will not be taken, before it is read."""
        media = headers.get(b"content-type", http_api.JSON_TYPE).partition(b";")[0].strip().lower()
        if media != http_api.JSON_TYPE:
            raise Refused("unsupported_media_type", "Send the body as application/json.", "content-type")
        coding = None
        if b"content-encoding" in headers:
            coding = content_coding.coding_of(
                [value for name, value in scope["headers"] if name == b"content-encoding"]
            )
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._body_bytes_max:
            raise self._too_large()
        return Announced(None if length is None else int(length), coding)

    async def take(self, receive: Receive, announced: Announced) -> bytes | None:
        """The whole body as it was before it was packed, its bytes accounted for until `give_back`; None when the
        client left. Raises Refused."""
        body = await self._received(receive, announced.length or 0)
        if body is None or announced.coding is None:
            return body
        try:
            async with self._unpacking:
                return await self._unpacked(announced.coding, body)
        finally:
            self._bodies.give_back(len(body))

    def give_back(self, body: bytes) -> None:
        self._bodies.give_back(len(body))

    async def _received(self, receive: Receive, held: int) -> bytes | None:
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

    async def _unpacked(self, coding: content_coding.Coding, packed: bytes) -> bytes:
        """Step by step in a thread, so that neither the loop waits nor memory is taken that is not counted."""
        unpacking = content_coding.Unpacking(coding, packed)
        body = bytearray()
        kept = False
        try:
            while piece := await asyncio.to_thread(unpacking.step):
                self._bodies.take(len(piece))
                body += piece
                if len(body) > self._body_bytes_max:
                    raise self._too_large()
            kept = True
            return bytes(body)
        finally:
            if not kept:
                self._bodies.give_back(len(body))

    def _too_large(self) -> Refused:
        return Refused("too_large", f"An inference body is at most {self._body_bytes_max} bytes.")

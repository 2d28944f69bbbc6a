"""Handing admitted inputs to an engine that takes its model over its own API, before it can answer anything.

The engine's routes are written here and nowhere else: whoever asks names inputs by the ids that the plan admits for
this and the name to serve them under, and can name no file, no path, no header and no address. The bytes are those of
the verified files, read in blocks and sent as fast as the engine takes them. One upload at a time; it takes no slot of
the endpoint, and reports how far it is as JSON lines:

    {"input": id, "bytes_sent": n, "bytes": n}                       as it goes
    {"created": name, "files": {name of the file: "sha256:…"}}       at the end

Asking again is harmless: what the engine has is not sent again.

Source: Ollama's API documentation, "Create a model" and "Push a blob".
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from typing import Self

from ficc.domain.errors import Refused
from ficc.executor.endpoint import Deliver, Exchange, Gate, late, request_head
from ficc.executor.inputs import VerifiedFile
from ficc.protocol.executor_wire import Data, Head, Upload
from ficc.protocol.openai import engine_refusal

BLOCK_BYTES = 1 << 20
ANSWER_BYTES_MAX = 64 << 10
"""Of each of the engine's answers here: a few words."""
_MODEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""As an alias is written: the name stands in a JSON document that is made here."""
_HEAD = Head(200, "application/x-ndjson")


class ModelUpload:
    """One upload, pulled like an answer: `read` waits for progress, `cancel` ends it."""

    def __init__(self, gate: Gate, request: Upload, files: Sequence[VerifiedFile]) -> None:
        self._gate = gate
        self._request = request
        self._files = files
        self._waiting: Deliver | None = None
        self._news: dict[str, object] | None = None
        self._head: Head | None = _HEAD
        self._failure: Refused | None = None
        self._ended = False
        self._task = asyncio.create_task(self._run())

    @classmethod
    def begin(cls, gate: Gate, request: Upload) -> ModelUpload:
        """Raises Refused; then the engine saw nothing."""
        gate.check(request.fence)
        admitted = set(gate.contract.upload_input_ids)
        ids = request.input_ids
        if not ids or not set(ids) <= admitted or len(set(ids)) != len(ids):
            raise Refused(
                "not_found", "Only inputs that the endpoint contract names can be uploaded, each once."
            )
        if not _MODEL.fullmatch(request.model):
            raise Refused(
                "invalid_request", "A model is named in lower-case letters, digits, '.', '_', '-'.", "model"
            )
        if gate.uploads:
            raise Refused("busy", "Inputs are being uploaded to this engine already.", retry_after_seconds=1)
        made = cls(gate, request, [gate.files[one] for one in ids])
        gate.uploads.add(made)
        return made

    # The caller's side.

    def read(self, deliver: Deliver) -> None:
        """Ask for what comes next; answered once, now or later. One read at a time."""
        if self._waiting is not None:
            self.fail(Refused("invalid_request", "Two reads of one stream at once."))
            return
        self._waiting = deliver
        self._hand_out()

    def cancel(self) -> None:
        self.fail(Refused("peer_lost", "The upload was cancelled."))

    def fail(self, why: Refused) -> None:
        """End the upload now, unless it ended: the engine's connection is closed."""
        if not self._ended and self._failure is None:
            self._failure = why
            self._task.cancel()
        self._hand_out()

    def _tell(self, news: dict[str, object], *, end: bool = False) -> None:
        """The newest replaces what nobody asked for."""
        self._news, self._ended = news, end
        self._hand_out()

    def _hand_out(self) -> None:
        deliver = self._waiting
        if deliver is None or (self._news is None and self._failure is None):
            return
        self._waiting = None
        if self._failure is not None:
            deliver(self._failure)
            return
        head, self._head = self._head, None
        line, self._news = json.dumps(self._news).encode() + b"\n", None
        deliver(Data(head, line, self._ended))

    # The engine's side.

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._request.deadline_ms / 1000):
                for one in self._files:
                    await self._hand_over(one)
                files = {one.entry.name: f"sha256:{one.entry.sha256}" for one in self._files}
                body = json.dumps({"model": self._request.model, "files": files, "stream": False}).encode()
                await self._ask("POST", "/api/create", "application/json", body, done={200})
            self._tell({"created": self._request.model, "files": files}, end=True)
        except TimeoutError:
            self.fail(late())
        except Refused as refused:
            self.fail(refused)
        except OSError as error:
            self.fail(Refused("model_not_ready", f"An input cannot be read: {error.strerror}."))
        finally:
            self._gate.uploads.discard(self)

    async def _hand_over(self, file: VerifiedFile) -> None:
        """One blob, unless the engine has it."""
        entry = file.entry
        path = f"/api/blobs/sha256:{entry.sha256}"
        if await self._ask("HEAD", path, "application/octet-stream", b"", done={200, 404}) == 404:
            with _Reading(file) as reading:
                await self._send(reading, path)
        self._tell({"input": entry.id, "bytes_sent": entry.bytes, "bytes": entry.bytes})

    async def _send(self, reading: _Reading, path: str) -> None:
        entry = reading.file.entry
        request = await self._gate.connect(_Request("POST"))
        try:
            await request.write(request_head("POST", path, "application/octet-stream", entry.bytes))
            sent = 0
            while sent < entry.bytes:
                block = await reading.block(min(BLOCK_BYTES, entry.bytes - sent), sent)
                if not block or not await request.write(block):
                    break  # the file was cut short, or the engine has answered already
                sent += len(block)
                self._tell({"input": entry.id, "bytes_sent": sent, "bytes": entry.bytes})
            reading.check()
            _judge(path, *await request.answer(), {200, 201})
        finally:
            request.cancel()

    async def _ask(self, method: str, path: str, content_type: str, body: bytes, *, done: set[int]) -> int:
        """A small request; its status."""
        request = await self._gate.connect(_Request(method))
        try:
            await request.write(request_head(method, path, content_type, len(body)) + body)
            return _judge(path, *await request.answer(), done)
        finally:
            request.cancel()


def _judge(path: str, status: int, answer: bytes, done: set[int]) -> int:
    """The status, if the engine did what it was asked. Raises Refused with the engine's own words."""
    if status not in done:
        words = engine_refusal(status, answer).message
        raise Refused("engine_error", f"The engine answered {status} to {path}: {words}")
    return status


class _Reading:
    """A verified file, open. Its descriptor outlives a read that nobody waits for any more."""

    def __init__(self, file: VerifiedFile) -> None:
        self.file = file
        self._fd = file.open()
        self._under_way: asyncio.Future[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way is None or self._under_way.done():
            os.close(self._fd)
        else:
            self._under_way.add_done_callback(lambda _: os.close(self._fd))

    async def block(self, count: int, at: int) -> bytes:
        self._under_way = asyncio.ensure_future(asyncio.to_thread(os.pread, self._fd, count, at))
        return await asyncio.shield(self._under_way)

    def check(self) -> None:
        """Raises Refused for a file that changed."""
        self.file.check(self._fd)


class _Request(Exchange):
    """An exchange whose body is written bit by bit, and whose whole answer is awaited."""

    def __init__(self, method: str) -> None:
        super().__init__(lambda ended: None)
        self._bodiless = method == "HEAD"
        self._writable = asyncio.Event()
        self._writable.set()

    async def write(self, data: bytes) -> bool:
        """Once the engine takes it; whether it still listens."""
        await self._writable.wait()
        if self._transport is None:
            return False
        self._transport.write(data)
        return True

    async def answer(self) -> tuple[int, bytes]:
        """Status and body. Raises Refused."""
        status, body = 0, bytearray()
        while True:
            came: asyncio.Future[Data | Refused] = asyncio.get_running_loop().create_future()
            self.read(lambda piece, came=came: None if came.done() else came.set_result(piece))  # type: ignore[misc]
            piece = await came
            if isinstance(piece, Refused):
                raise piece
            status = status if piece.head is None else piece.head.status
            body += piece.data
            if piece.end:
                return status, bytes(body)
            if len(body) > ANSWER_BYTES_MAX:
                raise Refused("engine_error", f"The engine's answer is over {ANSWER_BYTES_MAX} bytes.")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._bodiless and self._head is not None:
            self._ended = True  # whatever length it names, RFC 9110 section 9.3.2

    def _disconnect(self) -> None:
        super()._disconnect()
        self._writable.set()

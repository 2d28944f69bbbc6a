"""A small ASGI application with one route per thing that an application can do to the edge."""

from __future__ import annotations

import asyncio
import json
import queue
from typing import Any

from ficc.domain.errors import Refused
from ficc.protocol.http_api import error_body

JSON = [(b"content-type", b"application/json")]
PIECE = b"data: token\n\n"


class EdgeApp:
    """`seen` receives what the routes observe, in order, for the test's thread to wait for."""

    def __init__(self) -> None:
        self.seen: queue.Queue[Any] = queue.Queue()
        self.flooded_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate = asyncio.Event()

    def next_seen(self) -> Any:
        return self.seen.get(timeout=15)

    def open_gate(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._gate.set)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._loop = asyncio.get_running_loop()
        route = getattr(self, scope["path"].strip("/").replace("-", "_") or "echo", self.echo)
        await route(scope, receive, send)

    async def echo(self, scope: Any, receive: Any, send: Any) -> None:
        """Reads all, and answers with all that it was given."""
        body = await read(receive)
        if body is None:
            return
        document = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode("latin-1"),
            "version": scope["http_version"],
            "headers": [
                [name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]
            ],
            "request_id": scope["ficc.request_id"],
            "body": body.decode("latin-1"),
        }
        await reply(send, 200, json.dumps(document).encode())

    async def refuse(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers 413 without having read a byte, then waits for what comes."""
        await reply(send, 413, error_body(Refused("too_large", "Send less.")))
        self.seen.put((await receive())["type"])

    async def ignore_body(self, scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 200, b"{}")

    async def told(self, scope: Any, receive: Any, send: Any) -> None:
        """Asks to be told when the client leaves, by what leads back to the exchange."""
        scope["extensions"]["ficc.on_disconnect"](lambda: receive)
        await reply(send, 200, b"{}")

    async def gated(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers once the test opens the gate."""
        self.seen.put("gated")
        await self._gate.wait()
        await reply(send, 200, b'{"gated":true}')

    async def late(self, scope: Any, receive: Any, send: Any) -> None:
        """Reads all, and answers once the test opens the gate."""
        await read(receive)
        self.seen.put("read")
        await self._gate.wait()
        await reply(send, 200, b"{}")

    async def burst(self, scope: Any, receive: Any, send: Any) -> None:
        """More than fits the buffers, then a pause until the test opens the gate."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
        await self._gate.wait()
        await send({"type": "http.response.body"})

    async def wait(self, scope: Any, receive: Any, send: Any) -> None:
        """Reads the body, then waits for the client to leave."""
        await read(receive)
        self.seen.put("waiting")
        self.seen.put((await receive())["type"])

    async def pieces(self, scope: Any, receive: Any, send: Any) -> None:
        """Tells of every message about the body."""
        while True:
            message = await receive()
            self.seen.put(message)
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                break
        await reply(send, 200, b"{}")

    async def live(self, scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"]["ficc.body_is_live"]()
        await self.pieces(scope, receive, send)

    async def duplex(self, scope: Any, receive: Any, send: Any) -> None:
        """Begins its answer, then goes on reading."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await read(receive)
        self.seen.put("read")
        await send({"type": "http.response.body", "body": PIECE})

    async def stream(self, scope: Any, receive: Any, send: Any) -> None:
        """Three pieces: a small one, none, one that is not copied."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (PIECE, b"", b"x" * 50_000):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def flood(self, scope: Any, receive: Any, send: Any) -> None:
        """Streams until the client is gone, counting what `send` took."""
        watch = asyncio.ensure_future(disconnected(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not watch.done():
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            self.flooded_bytes += 4096
            await asyncio.sleep(0)
        self.seen.put("flood over")

    async def large(self, scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 200, b"x" * 8_000_000)
        self.seen.put("large sent")

    async def abort(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        if b"wait" in scope["query_string"]:
            await self._gate.wait()
        scope["extensions"]["ficc.abort"]()
        await send({"type": "http.response.body", "body": b"never seen", "more_body": False})
        await read(receive)
        self.seen.put((await receive())["type"])

    async def abort_before(self, scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"]["ficc.abort"]()

    async def abort_after(self, scope: Any, receive: Any, send: Any) -> None:
        abort = scope["extensions"]["ficc.abort"]
        await reply(send, 200, b"{}")
        abort()

    async def crash(self, scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("canary-in-a-traceback")

    async def crash_late(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        raise ValueError("late")

    async def silent(self, scope: Any, receive: Any, send: Any) -> None:
        return

    async def bad_header(self, scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 200, b"{}", [(b"x-evil", b"a\r\nset-cookie: b")])

    async def short(self, scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 200, b"{}", [(b"content-length", b"3")])

    async def long(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"{}", "more_body": True})

    async def own_fields(self, scope: Any, receive: Any, send: Any) -> None:
        fields = [(b"X-Request-Id", b"of-the-app"), (b"Connection", b"keep-alive"), (b"keep-alive", b"9")]
        await reply(send, 200, b"{}", [*fields, (b"transfer-encoding", b"gzip, chunked")])

    async def no_content(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def say_close(self, scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 200, b"{}", [(b"content-length", b"2"), (b"connection", b"close")])


async def read(receive: Any) -> bytes | None:
    """The whole body, or None when the client left before its end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        if not message["more_body"]:
            return body


async def disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Any, status: int, body: bytes, fields: Any = None) -> None:
    headers = JSON + ([(b"content-length", b"%d" % len(body))] if fields is None else fields)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

#!/usr/bin/python3
"""A fast stand-in for an engine: HTTP/1.1 over a unix socket or TCP, OpenAI-shaped answers of any length.

It takes llama-server's flags, of which it minds --host and --port. A request says how it is to be answered:
`max_tokens` is the number of chunks (or words), `rate` chunks per second (0: as fast as they are taken),
`first_after` seconds before the first byte. When a request's connection closes before its answer was complete,
a line `aborted ID MONOTONIC_NS` goes to standard output, where ID is the request's `user`. Once it listens, it says
`listening SECONDS`: how long that took it.
"""

import time

BEGAN = time.monotonic()  # before what takes its time to be imported

import argparse  # noqa: E402
import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402

CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    b'[{"index":0,"delta":{"content":"token "},"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    b'[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BATCH = 64
"""Chunks written between two looks at the transport, when as fast as possible."""


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=65536)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while True:
            head, separator, rest = self.received.partition(b"\r\n\r\n")
            if not separator:
                return
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            body, self.received = rest[:length], rest[length:]
            self.task = asyncio.get_running_loop().create_task(self.answer(json.loads(body or b"{}")))

    async def answer(self, request: dict) -> None:
        complete = False
        try:
            await asyncio.sleep(request.get("first_after", 0))
            if request.get("stream"):
                await self.stream(request)
            else:
                self.transport.write(document(request))
            complete = True
        finally:
            if not complete:
                print("aborted", request.get("user"), time.monotonic_ns(), flush=True)

    async def stream(self, request: dict) -> None:
        count, rate = int(request.get("max_tokens") or 16), float(request.get("rate") or 0)
        self.transport.write(STREAM_HEAD)
        frame, began = framed(CHUNK), time.monotonic()
        for number in range(count):
            if rate:
                await asyncio.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
            elif number % BATCH == 0:
                await asyncio.sleep(0)
            await self.writable.wait()
            if self.transport.is_closing():
                await asyncio.sleep(0)  # in which `connection_lost` cancels this
            self.transport.write(frame)
        self.transport.write(framed(LAST) + b"0\r\n\r\n")


def document(request: dict) -> bytes:
    count = int(request.get("max_tokens") or 16)
    if "input" in request:
        answer = {"object": "list", "model": "bench", "data": []}
    else:
        message = {"role": "assistant", "content": "token " * count}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench"}
        answer |= {"choices": [choice], "usage": usage}
    body = json.dumps(answer).encode()
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options, _ = parser.parse_known_args()
    loop = asyncio.get_running_loop()
    if options.host.endswith(".sock"):
        if os.path.exists(options.host):
            os.unlink(options.host)
        server = await loop.create_unix_server(Engine, options.host, backlog=4096)
    else:
        server = await loop.create_server(Engine, options.host, options.port, backlog=4096)
        print("port", server.sockets[0].getsockname()[1], flush=True)
    print("listening", time.monotonic() - BEGAN, flush=True)
    await server.serve_forever()


asyncio.run(main())

"""A real uvicorn server behind the edge in a thread, and a client that sends bytes and believes nothing."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from ficc.controller.edge import EdgeLimits, edge_protocol
from ficc.protocol.http_api import CODES

PATIENCE_SECONDS = 15.0  # far above anything that is waited for: a test that reaches it has failed


class Truncated(Exception):
    """The connection ended inside an answer."""


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    ended_by_close: bool

    def __getitem__(self, name: str) -> str:
        values = self.all(name)
        assert len(values) == 1, f"{name}: {values}"
        return values[0]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code, after checking that this is our error shape in every respect."""
        error = self.json["error"]
        assert set(self.json) == {"error"}
        assert {"code", "message", "type", "param"} <= set(error)
        assert error["message"]
        assert error["type"] == CODES[error["code"]].type
        assert self.status == CODES[error["code"]].status
        assert self["content-type"] == "application/json"
        return error["code"]


class Client:
    """One connection. Every read is strict: what is not valid HTTP/1.1 fails the test."""

    def __init__(self, port: int, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.connect(("127.0.0.1", port))
        self._unread = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes, pause_seconds: float = 0.0) -> Client:
        for piece in pieces:
            self.socket.sendall(piece)
            if pause_seconds:
                time.sleep(pause_seconds)
        return self

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()

    def rest(self) -> bytes:
        """Everything until the server closes."""
        while self._more():
            pass
        rest, self._unread = self._unread, b""
        return rest

    def closed(self) -> bool:
        return self.rest() == b""

    def line(self) -> bytes:
        while b"\r\n" not in self._unread:
            if not self._more():
                raise Truncated(self._unread)
        line, _, self._unread = self._unread.partition(b"\r\n")
        return line

    def answer(self, method: str = "GET") -> Answer:
        return parse_answer(self.line, self._exactly, self.rest, method)

    def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            if not self._more():
                raise Truncated(self._unread)
        data, self._unread = self._unread[:count], self._unread[count:]
        return data

    def _more(self) -> bool:
        data = self.socket.recv(65536)
        self._unread += data
        return bool(data)


def parse_answer(
    line: Callable[[], bytes], exactly: Callable[[int], bytes], rest: Callable[[], bytes], method: str
) -> Answer:
    status = re.fullmatch(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [ -~]*", line())
    assert status, "a status line"
    headers = []
    while field := line():
        parts = re.fullmatch(rb"([a-z0-9-]+): ([ -~]*)", field)
        assert parts, field
        headers.append((parts[1].decode(), parts[2].decode()))
    answer = Answer(int(status[1]), headers, b"", False)
    assert len(answer.all("content-length")) + len(answer.all("transfer-encoding")) <= 1
    if answer.status < 200 or answer.status in (204, 304) or method == "HEAD":
        return answer
    if answer.all("transfer-encoding"):
        assert answer["transfer-encoding"] == "chunked"
        while size := int(re.fullmatch(rb"[0-9a-f]+", line())[0], 16):  # type: ignore[index]
            answer.body += exactly(size)
            assert exactly(2) == b"\r\n"
        assert line() == b""
    elif answer.all("content-length"):
        answer.body = exactly(int(answer["content-length"]))
    else:
        assert answer["connection"] == "close"
        answer.body, answer.ended_by_close = rest(), True
    return answer


@dataclass
class Serving:
    port: int
    server: uvicorn.Server

    def connect(self, **options: Any) -> Client:
        return Client(self.port, **options)

    def ask(self, *request: bytes, method: str = "GET") -> Answer:
        with self.connect() as client:
            return client.send(*request).answer(method)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)


@contextmanager
def serving(app: Any, limits: EdgeLimits | None = None, **config: Any) -> Iterator[Serving]:
    """Serves the ASGI application on loopback until the block ends, and stops gracefully."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    settings: dict[str, Any] = {
        "ws": "none",
        "lifespan": "off",
        "server_header": False,
        "access_log": False,
        "log_config": None,
        "timeout_graceful_shutdown": 5,
        **config,
    }
    protocol = edge_protocol(limits or EdgeLimits())
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, loop="uvloop", **settings))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield Serving(listener.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def eventually(true: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)

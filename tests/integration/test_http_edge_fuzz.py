"""Conversations that no person would write: any split of valid requests, and requests with bytes changed.

The server runs in the test's own loop, so that each piece that is sent is also read as one piece.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from edge_app import EdgeApp
from ficc.controller.edge import EdgeLimits, edge_protocol
from raw_http import Answer, parse_answer

HURRIED = EdgeLimits(
    header_bytes_max=2000,
    headers_max=20,
    header_seconds=0.05,
    body_idle_seconds=0.05,
    keep_alive_seconds=0.05,
    drain_seconds=0.05,
    pipelined_bytes_max=100_000,
)
PATIENT = EdgeLimits(pipelined_bytes_max=100_000)


class Loopback:
    """A listening edge and its loop; `faults` are exceptions that reached the loop."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.loop = uvloop.new_event_loop()
        self.faults: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        config = uvicorn.Config(EdgeApp(), ws="none", lifespan="off", log_config=None, access_log=False)
        state, protocol = ServerState(), edge_protocol(limits)
        make = lambda: protocol(config, state, {}, self.loop)  # noqa: E731
        self._server = self.loop.run_until_complete(self.loop.create_server(make, "127.0.0.1", 0))

    def converse(self, pieces: list[bytes]) -> bytes:
        """Sends the pieces one by one, and returns all that comes until the server closes."""
        received = self.loop.run_until_complete(asyncio.wait_for(self._converse(pieces), 10))
        assert self.faults == []
        return received

    async def _converse(self, pieces: list[bytes]) -> bytes:
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.loop.sock_connect(client, self._server.sockets[0].getsockname())
            receiving = self.loop.create_task(self._receive(client))
            try:
                for piece in pieces:
                    await self.loop.sock_sendall(client, piece)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
            except OSError:  # the server refused and left
                pass
            return await receiving

    async def _receive(self, client: socket.socket) -> bytes:
        received = b""
        try:
            while data := await self.loop.sock_recv(client, 65536):
                received += data
        except ConnectionResetError:
            pass
        return received

    def close(self) -> None:
        self._server.close()
        self.loop.run_until_complete(self._server.wait_closed())
        self.loop.close()


@pytest.fixture(scope="module")
def hurried() -> Iterator[Loopback]:
    loopback = Loopback(HURRIED)
    yield loopback
    loopback.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[Loopback]:
    loopback = Loopback(PATIENT)
    yield loopback
    loopback.close()


def answers_in(wire: bytes) -> list[Answer]:
    """All answers; fails on a byte that belongs to none."""
    answers = []
    at = 0

    def line() -> bytes:
        nonlocal at
        end = wire.index(b"\r\n", at)
        found, at = wire[at:end], end + 2
        return found

    def exactly(count: int) -> bytes:
        nonlocal at
        assert at + count <= len(wire)
        found, at = wire[at : at + count], at + count
        return found

    while at < len(wire):
        answers.append(parse_answer(line, exactly, lambda: exactly(len(wire) - at), "GET"))
    return answers


# ---- what is sent

BODIES = st.lists(
    st.sampled_from(
        [b"\r\n", b"\r", b"\n", b"0", b"0\r\n\r\n", b"\r\n\r\n", b"GET / HTTP/1.1\r\n", b"body", b";"]
    ),
    max_size=8,
).map(b"".join)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=4)) | {0, len(body)})
    wire = b""
    for start, end in itertools.pairwise(cuts):
        if chunk := body[start:end]:
            extension = draw(st.sampled_from([b"", b"", b";a", b';a="b;c"']))
            wire += b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk)
    trailer = draw(st.sampled_from([b"", b"", b"X-Trailer: 1\r\n"]))
    return wire + draw(st.sampled_from([b"0", b"000"])) + b"\r\n" + trailer + b"\r\n"


@st.composite
def requests(draw: st.DrawFn, last: bool) -> tuple[bytes, bytes]:
    """A request's bytes, and the body that the application must see."""
    fields = draw(
        st.sampled_from([b"", b"X-Request-ID: mine\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
    )
    if last:
        fields += b"Connection: close\r\n"
    head = b"POST /x?y HTTP/1.1\r\nHost: a\r\n" + fields
    body = draw(BODIES)
    match draw(st.sampled_from(["none", "counted", "chunked"])):
        case "none":
            return head + b"\r\n", b""
        case "counted":
            return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
        case _:
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + draw(chunked(body)), body


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    count = draw(st.integers(1, 4))
    drawn = [draw(requests(last=number == count - 1)) for number in range(count)]
    return b"".join(wire for wire, _ in drawn), [body for _, body in drawn]


@st.composite
def split(draw: st.DrawFn, wire: bytes) -> list[bytes]:
    if len(wire) < 2 or draw(st.integers(0, 3)) == 0:
        return [wire] if draw(st.booleans()) else [wire[at : at + 1] for at in range(len(wire))]
    cuts = [0, *sorted(draw(st.sets(st.integers(1, len(wire) - 1), max_size=10))), len(wire)]
    return [wire[start:end] for start, end in itertools.pairwise(cuts)]


NASTY = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n\r\n", b"\xff", b";", b"-", b"f" * 17, b"\x16\x03",
    b"\r\nHost: b", b"\r\nContent-Length: 3", b"\r\nTransfer-Encoding: chunked", b"\r\nTransfer-Encoding: gzip",
    b"\r\nExpect: 100-continue", b"\r\nUpgrade: websocket\r\nConnection: upgrade", b"\r\nConnection: close",
    b"HTTP/1.0", b"HTTP/2.0", b"0\r\n\r\n", b"\r\nX: " + b"y" * 2000, b"\r\nX: y" * 20,
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    wire, _ = draw(conversations())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(wire)))
        cut = draw(st.sampled_from([0, 0, 1, 2, 10]))
        put = draw(st.one_of(st.sampled_from(NASTY), st.binary(max_size=3)))
        wire = wire[:at] + put + wire[at + cut :]
    return wire


# ---- what must hold


def test_every_split_in_two(patient: Loopback) -> None:
    """Also between the bytes of an empty line, which ends one request where the next one begins."""
    chunked_body = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n\r\n0\r\n0\r\n\r\n"
    counted_body = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"
    last = b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    wire = chunked_body + counted_body + last
    for cut in range(1, len(wire)):
        answers = answers_in(patient.converse([wire[:cut], wire[cut:]]))
        assert [answer.json["body"] for answer in answers] == ["\r\n0", "body", ""], cut


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_split_of_valid_requests_is_answered_alike(patient: Loopback, data: st.DataObject) -> None:
    wire, bodies = data.draw(conversations())
    answers = answers_in(patient.converse(data.draw(split(wire))))
    assert [answer.status for answer in answers] == [200] * len(bodies)
    assert [answer.json["body"].encode("latin-1") for answer in answers] == bodies


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_are_answered_in_our_shape_and_the_connection_ends(
    hurried: Loopback, data: st.DataObject
) -> None:
    answers = answers_in(hurried.converse(data.draw(split(data.draw(mutated())))))
    for position, answer in enumerate(answers):
        if answer.status == 100:
            continue
        assert answer["x-request-id"]
        if answer.status != 200:
            assert answer.code in ("bad_http", "headers_too_large", "request_timeout")
            assert answer["connection"] == "close"
            assert position == len(answers) - 1
        else:
            assert answer.json["method"]

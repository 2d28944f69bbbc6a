"""The executor's endpoint, on its own socket: what an open, a read and a cancel carry, and how much they move."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from ficc.client.executor import EndpointStream
from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Fence
from ficc.executor.endpoint import Exchange
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import Kind
from support.executor import (
    PATIENCE_SECONDS,
    ROUTE,
    SOCKET,
    ExecutorProcess,
    Session,
    connected_to,
    new_id,
    serving_engine,
    whole,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

READ_BYTES_MAX = 64 << 10
QUEUE_CHUNKS = 4
BODY_BYTES_MAX = 1 << 20
"""Of the endpoint contract that `Session.replica` makes."""
KERNEL_BYTES_MAX = 1 << 20
"""More than the kernel keeps of two unix sockets that nobody reads."""
QUIET_SECONDS = 0.5


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as executor:
        yield executor


@pytest.fixture(scope="module")
def engine(executor: ExecutorProcess) -> Fence:
    return serving_engine(executor)


@pytest.fixture
async def session(executor: ExecutorProcess, engine: Fence) -> AsyncIterator[Session]:
    async with connected_to(executor, engine) as session:
        yield session


class Raw:
    """An endpoint connection that sends whatever frames a test makes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = wire.Decoder()
        self._frames: list[wire.Frame] = []

    @classmethod
    async def to(cls, executor: ExecutorProcess) -> Raw:
        raw = cls(*await asyncio.open_unix_connection(executor.socket))
        raw.send(wire.encode_json(Kind.HELLO, 0, {"versions": [wire.VERSION], "role": "endpoint"}))
        assert (await raw.next()).kind == Kind.HELLO
        return raw

    def send(self, frame: bytes) -> None:
        self._writer.write(frame)

    def open(self, stream: int, fence: Fence, *, by_data: bool = False, **request: Any) -> None:
        body = json.dumps(request).encode()
        self.send(wire.encode_open(stream, wire.Open(fence, 60_000, ROUTE, body), by_data=by_data))

    async def next(self) -> wire.Frame:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self._frames:
                data = await self._reader.read(65536)
                assert data, "the executor closed the connection"
                self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def answer(self, stream: int, fence: Fence) -> bytes:
        """What one stream answers, read to its end."""
        came = b""
        while True:
            self.send(wire.encode(Kind.READ, stream, fence.pack()))
            frame = await self.next()
            assert (frame.kind, frame.stream) == (Kind.DATA, stream)
            piece = wire.decode_data(frame)
            came += piece.data
            if piece.end:
                return came

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def raw(executor: ExecutorProcess) -> AsyncIterator[Raw]:
    made = await Raw.to(executor)
    yield made
    made.close()


def others(fence: Fence) -> dict[str, Fence]:
    """The fence with one of its three parts changed."""
    return {
        "attempt": replace(fence, attempt_id=new_id()),
        "generation": replace(fence, generation=fence.generation + 1),
        "plan digest": replace(fence, plan_digest="0" * 64),
    }


PARTS = ("attempt", "generation", "plan digest")


async def until(condition: Any, what: str) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
    return found


# Fences and stream ids.


@pytest.mark.contract("C-X1")
async def test_streams_are_told_apart_by_their_ids(raw: Raw, engine: Fence) -> None:
    for stream in (7, 2**63):
        raw.open(stream, engine, do="json", word=stream)
        assert ((frame := await raw.next()).kind, frame.stream) == (Kind.OPENED, stream)
    for stream in (2**63, 7):
        assert json.loads(await raw.answer(stream, engine))["echo"]["word"] == stream


@pytest.mark.contract("C-X1")
async def test_the_first_data_says_that_a_stream_is_open_where_that_is_asked_for(
    raw: Raw, engine: Fence
) -> None:
    raw.open(1, engine, by_data=True, do="json", word="one")
    assert json.loads(await raw.answer(1, engine))["echo"]["word"] == "one"
    raw.open(2, others(engine)["generation"], by_data=True, do="json")
    assert ((frame := await raw.next()).kind, frame.stream) == (Kind.REFUSED, 2)


@pytest.mark.contract("C-X1")
@pytest.mark.parametrize("part", PARTS)
async def test_an_open_with_another_fence_is_refused(session: Session, engine: Fence, part: str) -> None:
    key = new_id()
    with pytest.raises(Refused) as refused:
        await session.open(others(engine)[part], do="hang", key=key)
    assert refused.value.code == ("attempt_unknown" if part == "attempt" else "fenced")
    assert await session.report(engine, key) == {}


@pytest.mark.contract("C-X1")
@pytest.mark.parametrize("part", PARTS)
async def test_a_read_with_another_fence_ends_the_stream(
    session: Session, raw: Raw, engine: Fence, part: str
) -> None:
    key = new_id()
    raw.open(1, engine, do="hang", key=key)
    assert (await raw.next()).kind == Kind.OPENED
    raw.send(wire.encode(Kind.READ, 1, others(engine)[part].pack()))
    with pytest.raises(Refused, match="fenced"):
        wire.decode_data(await raw.next())
    await until(lambda: closed(session, engine, key), "the engine's connection is closed")


@pytest.mark.contract("C-X1")
@pytest.mark.parametrize("part", PARTS)
async def test_a_cancel_with_another_fence_cancels_nothing(raw: Raw, engine: Fence, part: str) -> None:
    raw.open(1, engine, do="events", count=2, pause=0.1)
    assert (await raw.next()).kind == Kind.OPENED
    raw.send(wire.encode(Kind.CANCEL, 1, others(engine)[part].pack()))
    assert await raw.answer(1, engine) == b"data: 0\n\ndata: 1\n\n"


@pytest.mark.contract("C-X1")
async def test_a_cancel_with_its_own_fence_ends_the_request(
    session: Session, raw: Raw, engine: Fence
) -> None:
    key = new_id()
    raw.open(1, engine, do="hang", key=key)
    assert (await raw.next()).kind == Kind.OPENED
    await until(lambda: session.report(engine, key), "the engine has the request")
    raw.send(wire.encode(Kind.CANCEL, 1, engine.pack()))
    await until(lambda: closed(session, engine, key), "the engine's connection is closed")


async def closed(session: Session, fence: Fence, key: str) -> bool:
    return "closed" in await session.report(fence, key)


# Reads.


async def pieces(stream: EndpointStream) -> list[int]:
    """The length of each read, to the end."""
    found = []
    while True:
        piece = await stream.read()
        found.append(len(piece.data))
        if piece.end:
            return found


@pytest.mark.contract("C-X2")
@pytest.mark.parametrize("count", [READ_BYTES_MAX, READ_BYTES_MAX + 1, 10 * READ_BYTES_MAX])
async def test_a_read_returns_64_kib_at_most(session: Session, engine: Fence, count: int) -> None:
    stream = await session.open(engine, do="length", bytes=count)
    await asyncio.sleep(0.1)  # so that more than one read's worth is there
    found = await pieces(stream)
    assert sum(found) == count
    assert max(found) <= READ_BYTES_MAX
    if count > READ_BYTES_MAX:
        assert len(found) > 1


@pytest.mark.contract("C-X2")
async def test_a_frame_of_64_kib_is_the_largest_of_the_protocol() -> None:
    at_most = wire.encode(Kind.DATA, 1, bytes(4 + wire.CONTENT_TYPE_BYTES_MAX + READ_BYTES_MAX))
    assert len(list(wire.Decoder().feed(at_most))) == 1
    with pytest.raises(wire.WireError):
        list(
            wire.Decoder().feed(
                wire.encode(Kind.DATA, 1, bytes(4 + wire.CONTENT_TYPE_BYTES_MAX + READ_BYTES_MAX + 1))
            )
        )


@pytest.mark.contract("C-X3")
async def test_an_engine_is_not_read_past_four_chunks(session: Session, engine: Fence) -> None:
    """Nobody reads: the engine comes to a halt. What it had sent is in the queue and in the kernel's buffers."""
    key = new_id()
    stream = await session.open(engine, do="pour", key=key, bytes=64 << 20)
    # The client's first read goes along with the open; the answer to it waits here.
    stopped = await until(lambda: at_a_halt(session, engine, key), "the engine stops sending")
    assert stopped <= (QUEUE_CHUNKS + 1) * READ_BYTES_MAX + KERNEL_BYTES_MAX
    for _ in range(2 * QUEUE_CHUNKS + 2):  # reading sets it going again
        await stream.read()
    await until(lambda: sent_more(session, engine, key, stopped), "the engine goes on")
    stream.close()


@pytest.mark.contract("C-X3")
async def test_four_chunks_are_queued() -> None:
    """The exchange alone, its engine played by the test: it reads three chunks and a fourth, and then no more until
    one is taken."""
    ours, engines = socket.socketpair()
    engines.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * READ_BYTES_MAX)
    exchange = Exchange(lambda ended: None)
    connection = asyncio.get_running_loop().create_connection(lambda: exchange, sock=ours)
    transport, _ = await connection
    with closing(engines):
        engines.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (8 * READ_BYTES_MAX))
        for chunks in range(1, QUEUE_CHUNKS + 1):
            assert transport.is_reading()
            await asyncio.sleep(QUIET_SECONDS / 10)
            engines.sendall(bytes(READ_BYTES_MAX))
            await asyncio.sleep(QUIET_SECONDS / 10)
            assert transport.is_reading() == (chunks < QUEUE_CHUNKS)
        taken: list[Any] = []
        exchange.read(taken.append)
        assert len(taken[0].data) == READ_BYTES_MAX
        assert transport.is_reading()
        exchange.cancel()


async def at_a_halt(session: Session, fence: Fence, key: str) -> int:
    """How much the engine has sent, once that does not grow."""
    before = (await session.report(fence, key)).get("sent", 0)
    await asyncio.sleep(QUIET_SECONDS)
    after = (await session.report(fence, key)).get("sent", 0)
    return int(after) if after == before else 0


async def sent_more(session: Session, fence: Fence, key: str, than: int) -> bool:
    return int((await session.report(fence, key))["sent"]) > than


# Bounds of an open.


def body_of(length: int) -> bytes:
    """A body that the scripted engine answers, of exactly this length."""
    frame = len(json.dumps({"do": "json", "text": ""}))
    return json.dumps({"do": "json", "text": "x" * (length - frame)}).encode()


@pytest.mark.contract("C-X4")
async def test_a_body_as_long_as_the_contract_says_and_one_byte_longer(
    session: Session, engine: Fence
) -> None:
    with pytest.raises(Refused, match="too_large"):
        await session.link.open_stream(engine, ROUTE, body_of(BODY_BYTES_MAX + 1), 10)
    stream = await session.link.open_stream(engine, ROUTE, body_of(BODY_BYTES_MAX), 10)
    assert (await whole(stream)).status == 200


@pytest.mark.contract("C-X4")
async def test_as_many_requests_as_the_contract_says_and_one_more(session: Session) -> None:
    fence = await session.serving(session.replica(concurrency=2))
    streams = [await session.open(fence, do="hang", key=new_id()) for _ in range(2)]
    with pytest.raises(Refused, match="busy"):
        await session.open(fence, do="json")
    streams[0].close()
    assert (await session.ask(fence, do="json")).status == 200
    await session.stop(fence, 0)
    await session.until(fence, "released")


@pytest.mark.contract("C-X4")
async def test_a_path_of_512_bytes_and_one_more(session: Session) -> None:
    """One past the limit is no frame: the connection is closed."""
    longest = "/" + "x" * 511
    endpoint = Endpoint("unix", SOCKET, (("POST", longest), ("POST", ROUTE)), BODY_BYTES_MAX, 2)
    plan = replace(session.replica(), endpoint=endpoint)
    fence = await session.serving(plan)
    stream = await session.link.open_stream(fence, longest, body_of(64), 10)
    assert (await whole(stream)).status == 200
    await session.stop(fence, 0)
    await session.until(fence, "released")
    with pytest.raises(Refused, match="peer_lost"):
        await session.link.open_stream(fence, longest + "x", body_of(64), 10)
    await session.link.lost
    session.link = type(session.link)()
    await session.link.open(session.executor.socket, "endpoint")


@pytest.mark.contract("C-X5")
async def test_only_admitted_inputs_can_be_named_for_an_upload(session: Session) -> None:
    plan = session.replica()
    assert plan.endpoint is not None
    (admitted,) = plan.inputs
    for named in ((new_id(),), (admitted.id, "model-1"), ("/etc/passwd",), ("../" + admitted.id,)):
        with pytest.raises(Refused, match="Only admitted inputs"):
            await session.admit(replace(plan, endpoint=replace(plan.endpoint, upload_input_ids=named)))
    allowed = replace(plan, endpoint=replace(plan.endpoint, upload_input_ids=(admitted.id,)))
    fence = await session.admit(allowed)
    await session.stop(fence, 0)
    await session.until(fence, "released")


@pytest.mark.contract("C-X7")
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/slots",
        "/api/create",
        "/v1/models",
        f"{ROUTE}/../../slots",
        f"{ROUTE}?x=1",
        f"{ROUTE} HTTP/1.1\r\nAuthorization: x\r\n\r\n",
        "http://169.254.169.254/",
        "//169.254.169.254/",
        "file:///etc/passwd",
        "/etc/passwd",
        "/api/v1/models",
        "",
    ],
)
async def test_no_other_path_is_reached(session: Session, engine: Fence, path: str) -> None:
    key = new_id()
    body = json.dumps({"do": "hang", "key": key}).encode()
    with pytest.raises(Refused, match="not_found"):
        await session.link.open_stream(engine, path, body, 10)
    assert await session.report(engine, key) == {}


@pytest.mark.contract("C-X7")
async def test_an_open_has_no_room_for_headers_addresses_and_files(session: Session, engine: Fence) -> None:
    """It is a fence, a deadline, a path and a body, and the engine is told what the executor writes."""
    assert set(wire.Open.__dataclass_fields__) == {"fence", "deadline_ms", "path", "body"}
    secret = "Authorization: Bearer ficc_secret"
    answer = await session.ask(engine, do="head", text=f"\r\n{secret}\r\n")
    lines = json.loads(answer.body)["head"].split("\r\n")
    assert lines[0] == f"POST {ROUTE} HTTP/1.1"
    assert {line.split(":")[0] for line in lines[1:]} == {
        "Host",
        "Content-Type",
        "Accept",
        "Accept-Encoding",
        "Content-Length",
        "Connection",
    }
    assert "secret" not in "".join(lines)


@pytest.mark.contract("C-X7")
@pytest.mark.parametrize("target", ["/etc/passwd", "/run/ficc/../../etc/passwd", "/run/docker.sock", "8000"])
async def test_no_contract_leads_out_of_the_sandbox(session: Session, target: str) -> None:
    plan = session.replica()
    assert plan.endpoint is not None
    with pytest.raises(Refused, match="below /run/ficc"):
        await session.admit(replace(plan, endpoint=replace(plan.endpoint, path_or_port=target)))

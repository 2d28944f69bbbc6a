"""The endpoint of an attempt: a scripted engine behind it, and readers of every kind before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ficc.client.executor import EndpointLink, EndpointStream
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.executor.endpoint import QUIET_BYTES_MAX
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import QUEUE_CHUNKS, READ_BYTES_MAX, Kind
from support.executor import (
    LIMITS,
    PATIENCE_SECONDS,
    ROUTE,
    ExecutorProcess,
    Session,
    connected_to,
    new_id,
    serving_engine,
    whole,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

CANCEL_SECONDS_MAX = 0.25
KERNEL_BYTES_MAX = 1 << 20
"""More than the kernel keeps of a unix socket that nobody reads."""
TOLERANCE_SECONDS = 0.5
"""What a busy machine may add."""


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as executor:
        yield executor


@pytest.fixture(scope="module")
def engine(executor: ExecutorProcess) -> Fence:
    """One for most tests here."""
    return serving_engine(executor, limits=replace(LIMITS, processes=256))


@pytest.fixture
async def session(executor: ExecutorProcess, engine: Fence) -> AsyncIterator[Session]:
    async with connected_to(executor, engine) as session:
        yield session


async def broken(session: Session, fence: Fence, **request: Any) -> tuple[bytes, Refused]:
    """What came before an answer broke, and why it did."""
    stream = await session.open(fence, **request)
    await asyncio.sleep(request.get("late", 0))
    came = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                piece = await stream.read()
            except Refused as refused:
                return came, refused
            came += piece.data
            assert not piece.end, "the answer was said to be complete"


async def first_event(stream: EndpointStream) -> None:
    """Read until the scripted first event came: the head may come before it."""
    came = b""
    while came != b"data: 1\n\n":
        came += (await stream.read()).data


async def closed_at(session: Session, fence: Fence, key: str) -> float:
    """When the engine saw its connection closed."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "closed" not in (memory := await session.report(fence, key)):
            await asyncio.sleep(0.01)
    return float(memory["closed"])


async def begun(session: Session, fence: Fence, key: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await session.report(fence, key):
            await asyncio.sleep(0.01)


def resident(executor: ExecutorProcess) -> int:
    return int(psutil.Process(executor.pid).memory_info().rss)


# Answers.


async def test_json(session: Session, engine: Fence) -> None:
    answer = await session.ask(engine, do="json", text="ä", numbers=[1, 2])
    assert answer.status == 200
    assert answer.content_type == "application/json"
    assert json.loads(answer.body)["echo"] == {"do": "json", "text": "ä", "numbers": [1, 2]}
    assert len(answer.pieces) == 1


async def test_the_headers_toward_the_engine_are_ours(session: Session, engine: Fence) -> None:
    body = json.dumps({"do": "head"})
    answer = await session.ask(engine, do="head")
    assert json.loads(answer.body)["head"].split("\r\n") == [
        f"POST {ROUTE} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Accept: */*",
        "Accept-Encoding: identity",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]


async def test_events_arrive_as_they_are_made(session: Session, engine: Fence) -> None:
    stream = await session.open(engine, do="events", count=5, pause=0.2)
    began, times, text = time.monotonic(), [], b""
    while True:
        piece = await stream.read()
        text += piece.data
        if piece.data:
            times.append(time.monotonic() - began)
        if piece.end:
            break
    assert text == b"".join(b"data: %d\n\n" % n for n in range(5))
    assert times[0] < 0.2 + TOLERANCE_SECONDS
    assert len(times) == 5
    assert times[-1] - times[0] > 0.5


async def test_one_byte_at_a_time(session: Session, engine: Fence) -> None:
    text = "".join(chr(32 + n % 90) for n in range(3000))
    answer = await session.ask(engine, do="trickle", text=text)
    assert answer.body.decode() == text
    assert answer.content_type == "text/event-stream"


@pytest.mark.parametrize("count", [0, 1, 65536, 65537, 5_000_000])
@pytest.mark.parametrize("do", ["length", "close_delimited"])
async def test_bodies_of_every_length(session: Session, engine: Fence, do: str, count: int) -> None:
    answer = await session.ask(engine, do=do, bytes=count)
    assert len(answer.body) == count
    assert answer.body == (bytes(range(256)) * (count // 256 + 1))[:count]
    assert max(answer.pieces) <= READ_BYTES_MAX


async def test_a_big_event(session: Session, engine: Fence, executor: ExecutorProcess) -> None:
    """G7."""
    before = resident(executor)
    answer = await session.ask(engine, do="big_event", bytes=3 << 20)
    assert len(answer.body) == (3 << 20) + 8
    assert answer.body.endswith(b"x\n\n")
    assert resident(executor) - before < 2 << 20


@pytest.mark.parametrize("status", [500, 503])
async def test_errors_of_the_engine_are_its_own(session: Session, engine: Fence, status: int) -> None:
    answer = await session.ask(engine, do="status", status=status)
    assert (answer.status, answer.body) == (status, b'{"error": "scripted"}')


@pytest.mark.parametrize(
    ("text", "status", "kind", "body"),
    [
        (
            "HTTP/1.1 103 Early Hints\r\nContent-Type: no\r\nContent-Length: 9\r\n\r\n"
            "HTTP/1.1 200 OK\r\n\r\nclose-delimited",
            200,
            "",
            b"close-delimited",
        ),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "", b"ok"),
        ("HTTP/1.0 200 OK\r\nContent-Type: a/b\r\n\r\nold", 200, "a/b", b"old"),
        ("HTTP/1.1 204 No Content\r\n\r\n", 204, "", b""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokand more", 200, "", b"ok"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nokand more", 200, "", b"ok"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad",
            200,
            "",
            b"ok",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;ext=1\r\nok\r\n0\r\nX: y\r\n\r\n",
            200,
            "",
            b"ok",
        ),
        ("HTTP/1.1 000 Strange\r\nContent-Length: 2\r\n\r\n{}", 0, "", b"{}"),
    ],
    ids=[
        "interim",
        "continue",
        "1.0",
        "204",
        "surplus",
        "surplus after close",
        "two answers",
        "chunked",
        "000",
    ],
)
async def test_answers_in_http(
    session: Session, engine: Fence, text: str, status: int, kind: str, body: bytes
) -> None:
    answer = await session.ask(engine, do="raw", text=text)
    assert (answer.status, answer.content_type, answer.body) == (status, kind, body)


@pytest.mark.parametrize(
    ("text", "came"),
    [
        ("not HTTP at all\r\n\r\n", b""),
        ("", b""),
        ("HTTP/1.1 200 OK\r\nContent-Le", b""),
        ("HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", b""),
        ("HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n{}", b""),
        ("HTTP/1.1 199 Strange\r\nContent-Length: 2\r\n\r\n{}", b""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", b"ab"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", b""),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"ab"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", b"ab"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n", b""),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab", b"ab"),
    ],
    ids=str,
)
async def test_answers_that_are_broken(session: Session, engine: Fence, text: str, came: bytes) -> None:
    got, refused = await broken(session, engine, do="raw", text=text)
    assert (got, refused.code) == (came, "engine_error")


@pytest.mark.parametrize("late", [0, 0.3])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_engine_that_closes_inside_a_body(
    session: Session, engine: Fence, framing: str, late: float
) -> None:
    """G1, G2: what came is handed out, to a late reader too, and the end is never called complete."""
    got, refused = await broken(session, engine, do="stop_inside", framing=framing, late=late)
    assert refused.code == "engine_error"
    assert got == {"length": b"half", "chunked": b"data: 1\n\ndata: ha"}[framing]


async def test_a_header_over_the_limit(session: Session, engine: Fence, executor: ExecutorProcess) -> None:
    before = resident(executor)
    got, refused = await broken(session, engine, do="long_head", bytes=64 << 20)
    assert (got, refused.code) == (b"", "engine_error")
    assert "over the limit" in refused.message
    assert resident(executor) - before < 2 << 20
    answer = await session.ask(engine, do="long_head", bytes=QUIET_BYTES_MAX // 2)
    assert answer.body == b"ok"


async def test_an_endless_trailer(session: Session, engine: Fence, executor: ExecutorProcess) -> None:
    before = resident(executor)
    got, refused = await broken(session, engine, do="endless_trailer", key=new_id())
    assert (got, refused.code) == (b"data: 1\n\n", "engine_error")
    assert resident(executor) - before < 2 << 20


# What is admitted.


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/",
        "/v1/chat/completions/",
        "/v1/chat/completions?x=1",
        "/v1/chat/completions HTTP/1.1\r\nX: y\r\n\r\n",
        "/../v1/chat/completions",
        "",
    ],
)
async def test_paths_outside_the_contract(session: Session, engine: Fence, path: str) -> None:
    key = new_id()
    body = json.dumps({"do": "hang", "key": key}).encode()
    with pytest.raises(Refused, match="not_found"):
        await session.link.open_stream(engine, path, body, 10)
    assert await session.report(engine, key) == {}


async def test_a_body_over_the_limit(session: Session, engine: Fence) -> None:
    body = json.dumps({"do": "json", "text": "x" * (1 << 20)}).encode()
    with pytest.raises(Refused, match="too_large"):
        await session.link.open_stream(engine, ROUTE, body, 10)
    fits = json.dumps({"do": "json", "text": ""}).encode()
    body = json.dumps({"do": "json", "text": "x" * ((1 << 20) - len(fits))}).encode()
    assert len(body) == 1 << 20
    assert (await whole(await session.link.open_stream(engine, ROUTE, body, 10))).status == 200


async def test_a_body_over_the_limit_of_the_wire(session: Session, engine: Fence) -> None:
    with pytest.raises(Refused, match="too_large"):
        await session.link.open_stream(engine, ROUTE, bytes(wire.BODY_BYTES_MAX + 1), 10)
    assert session.link.usable


@pytest.mark.parametrize("change", [{"generation": 2}, {"plan_digest": "0" * 64}], ids=str)
async def test_open_is_fenced(session: Session, engine: Fence, change: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="fenced"):
        await session.open(replace(engine, **change), do="json")


async def test_open_of_an_attempt_that_is_not_known(session: Session) -> None:
    with pytest.raises(Refused, match="attempt_unknown"):
        await session.open(Fence(new_id(), 1, "0" * 64), do="json")


async def test_read_and_cancel_are_fenced(session: Session, engine: Fence, executor: ExecutorProcess) -> None:
    """A cancel with another fence does nothing; a read with one breaks the stream and ends the exchange."""
    reader, writer = await asyncio.open_unix_connection(executor.socket)
    writer.write(wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "endpoint"}))
    key = new_id()
    body = json.dumps({"do": "hang_in_stream", "key": key}).encode()
    writer.write(wire.encode_open(1, wire.Open(engine, 60_000, ROUTE, body)))
    other = replace(engine, generation=2).pack()
    writer.write(wire.encode(Kind.CANCEL, 1, other))
    writer.write(wire.encode(Kind.READ, 1, engine.pack()))
    decoder = wire.Decoder()

    async def frames() -> AsyncIterator[wire.Frame]:
        while data := await reader.read(65536):
            for frame in decoder.feed(data):
                yield frame

    async with asyncio.timeout(PATIENCE_SECONDS):
        answers = frames()
        kinds = [(await anext(answers)).kind for _ in range(3)]
        assert kinds == [Kind.HELLO, Kind.OPENED, Kind.DATA]
        await begun(session, engine, key)
        writer.write(wire.encode(Kind.READ, 1, other))
        with pytest.raises(Refused, match="fenced"):
            wire.decode_data(await anext(answers))
        await closed_at(session, engine, key)
    writer.close()


@pytest.mark.parametrize("frames", ["read twice", "open twice", "call"])
async def test_a_peer_that_breaks_the_protocol(
    session: Session, engine: Fence, executor: ExecutorProcess, frames: str
) -> None:
    """Its exchanges end; nobody else's do."""
    reader, writer = await asyncio.open_unix_connection(executor.socket)
    writer.write(wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "endpoint"}))
    key = new_id()
    opening = wire.encode_open(
        1, wire.Open(engine, 60_000, ROUTE, json.dumps({"do": "hang", "key": key}).encode())
    )
    read = wire.encode(Kind.READ, 1, engine.pack())
    writer.write(opening + read)
    await begun(session, engine, key)
    call = wire.encode_json(Kind.CALL, 1, {"op": "snapshot"})
    writer.write({"read twice": read, "open twice": opening, "call": call}[frames])
    await closed_at(session, engine, key)
    if frames != "read twice":
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await reader.read(65536):
                pass
    writer.close()


async def test_concurrency(session: Session) -> None:
    """The contract's slots, whatever the caller counts."""
    fence = await session.serving(session.replica(concurrency=3))
    keys = [new_id() for _ in range(3)]
    streams = [await session.open(fence, do="hang", key=key) for key in keys]
    for _ in range(3):
        with pytest.raises(Refused, match="busy"):
            await session.open(fence, do="json")
    streams[0].close()
    assert (await session.ask(fence, do="json")).status == 200
    streams[1].close()
    streams[2].close()
    assert await asyncio.gather(*(closed_at(session, fence, key) for key in keys))
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_concurrent_opens_never_take_too_many_slots(session: Session) -> None:
    fence = await session.serving(session.replica(concurrency=3))
    opened = await asyncio.gather(
        *(session.open(fence, do="hang", key=str(n)) for n in range(20)), return_exceptions=True
    )
    refused = [one for one in opened if isinstance(one, Refused)]
    assert len(refused) == 17
    assert {one.code for one in refused} == {"busy"}
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_a_slot_is_free_once_the_engine_is_done(session: Session) -> None:
    """However slowly its answer is read."""
    fence = await session.serving(session.replica(concurrency=1))
    unread = await session.open(fence, do="length", bytes=100_000)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(Refused):
                assert (await session.ask(fence, do="json")).status == 200
                break
            await asyncio.sleep(0.01)
    assert len((await whole(unread)).body) == 100_000
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_an_engine_that_closes_every_connection(session: Session) -> None:
    """Each is refused or broken, none keeps a slot."""
    fence = await session.run(session.replica("shut", concurrency=2))
    await session.until(fence, "running")
    codes = set()
    for _ in range(100):
        try:
            await session.ask(fence, do="json")
        except Refused as refused:
            codes.add(refused.code)
    assert codes <= {"service_not_ready", "engine_error"}
    assert "busy" not in codes
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_an_engine_that_does_not_accept(session: Session) -> None:
    """G27's sibling: its backlog fills, later opens are refused soon, and those that wait end at their
    deadline."""
    fence = await session.run(session.replica("deaf"))
    await session.until(fence, "running")
    while "listening" not in await session.output(fence):
        await asyncio.sleep(0.01)
    waiting, refused = [], None
    while refused is None and len(waiting) < 20:
        try:
            waiting.append(await session.open(fence, 1.0, do="json"))
        except Refused as error:
            refused = error
    assert refused is not None
    assert refused.code == "service_not_ready"
    for stream in waiting:
        with pytest.raises(Refused, match="deadline_exceeded"):
            await whole(stream)
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_no_endpoint_before_the_engine_listens_and_after_it_ended(session: Session) -> None:
    plan = session.replica()
    fence = await session.admit(plan)
    with pytest.raises(Refused, match="service_not_ready"):
        await session.open(fence, do="json")
    await session.until(fence, "prepared")
    await session.act("start", fence)
    await session.until(fence, "running")
    await session.stop(fence, 0)
    await session.until(fence, "released")
    with pytest.raises(Refused, match="service_not_ready"):
        await session.open(fence, do="json")


# The end of an exchange.


@pytest.mark.parametrize("do", ["hang", "hang_in_stream"])
@pytest.mark.parametrize("how", ["close", "abort", "cancelled read", "lost connection"])
async def test_cancel_closes_the_engines_connection(
    session: Session, engine: Fence, executor: ExecutorProcess, do: str, how: str
) -> None:
    """G9: before the first byte and in the stream; soon."""
    link, key = EndpointLink(), new_id()
    await link.open(executor.socket, "endpoint")
    body = json.dumps({"do": do, "key": key}).encode()
    stream = await link.open_stream(engine, ROUTE, body, 60)
    if do == "hang_in_stream":
        await first_event(stream)
    reading = asyncio.create_task(stream.read())
    await begun(session, engine, key)
    cancelled_at = time.monotonic()
    if how == "close":
        stream.close()
    elif how == "abort":
        stream.abort(Refused("peer_lost", "for the test"))
    elif how == "cancelled read":
        reading.cancel()
    else:
        link.close()
    assert await closed_at(session, engine, key) - cancelled_at < CANCEL_SECONDS_MAX + TOLERANCE_SECONDS
    if how == "close":
        reading.cancel()
    with pytest.raises((Refused, asyncio.CancelledError)):
        await reading
    link.close()


async def opening_by_data(
    session: Session, link: EndpointLink, engine: Fence
) -> tuple[asyncio.Task[EndpointStream], str]:
    """A stream that is open at the engine and not yet here, since the engine says nothing; and its key."""
    key = new_id()
    body = json.dumps({"do": "hang", "key": key}).encode()
    opening = asyncio.create_task(link.open_stream(engine, ROUTE, body, 60, by_data=True))
    await begun(session, engine, key)
    return opening, key


async def test_a_stream_that_opens_by_its_first_data_is_cancelled_before(
    session: Session, engine: Fence
) -> None:
    """G9"""
    opening, key = await opening_by_data(session, session.link, engine)
    opening.cancel()
    await closed_at(session, engine, key)
    assert opening.cancelled()
    assert (await session.ask(engine, do="json")).status == 200


async def test_a_stream_that_opens_by_its_first_data_is_unknown_when_the_connection_breaks(
    session: Session, engine: Fence, executor: ExecutorProcess
) -> None:
    link = EndpointLink()
    await link.open(executor.socket, "endpoint")
    opening, key = await opening_by_data(session, link, engine)
    link.close()
    with pytest.raises(Refused, match="peer_lost"):
        await opening
    await closed_at(session, engine, key)


async def test_a_stream_that_opens_by_its_first_data_breaks_as_others_do(
    session: Session, engine: Fence
) -> None:
    body = json.dumps({"do": "hang", "key": new_id()}).encode()
    stream = await session.link.open_stream(engine, ROUTE, body, 0.4, by_data=True)
    with pytest.raises(Refused, match="deadline_exceeded"):
        await stream.read()


async def test_the_loss_of_a_connection_ends_all_its_streams(
    session: Session, engine: Fence, executor: ExecutorProcess
) -> None:
    link = EndpointLink()
    await link.open(executor.socket, "endpoint")
    keys = [new_id() for _ in range(20)]
    bodies = [json.dumps({"do": "hang", "key": key}).encode() for key in keys]
    streams = await asyncio.gather(*(link.open_stream(engine, ROUTE, body, 60) for body in bodies))
    for key in keys:
        await begun(session, engine, key)
    link.close()
    await asyncio.gather(*(closed_at(session, engine, key) for key in keys))
    for stream in streams:
        with pytest.raises(Refused, match="peer_lost"):
            await stream.read()


async def test_the_deadline(session: Session, engine: Fence) -> None:
    key = new_id()
    began = time.monotonic()
    stream = await session.open(engine, 0.4, do="hang", key=key)
    with pytest.raises(Refused, match="deadline_exceeded"):
        await stream.read()
    assert 0.3 < await closed_at(session, engine, key) - began < 0.4 + TOLERANCE_SECONDS + 1


async def test_a_stop_ends_open_exchanges(session: Session) -> None:
    fence = await session.serving(session.replica())
    stream = await session.open(fence, do="hang_in_stream", key="k")
    await first_event(stream)
    await session.stop(fence, 5)
    with pytest.raises(Refused, match="service_stopped"):
        await stream.read()
    await session.until(fence, "released")


async def test_an_engine_that_answers_and_exits(session: Session) -> None:
    """A complete answer stays complete, although the engine is gone before it is read."""
    for _ in range(3):
        fence = await session.serving(session.replica())
        stream = await session.open(fence, do="leave", bytes=200_000)
        status = await session.until(fence, "released")
        assert status["reason"]["code"] == "engine_exited"
        assert len((await whole(stream)).body) == 200_000


async def test_an_engine_that_dies_in_a_stream(session: Session) -> None:
    """G1 at the executor: said at once, and the attempt's reason has its last words."""
    fence = await session.serving(session.replica())
    streams = [await session.open(fence, do="hang_in_stream", key=str(n)) for n in range(3)]
    for stream in streams:
        await first_event(stream)
    with pytest.raises(Refused, match="engine_error"):
        await session.ask(fence, do="exit", status=9, words="CUDA error: out of luck")
    for stream in streams:
        with pytest.raises(Refused, match="engine_error"):
            await stream.read()
    status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("failed", "engine_exited")
    assert "CUDA error: out of luck" in status["reason"]["message"]


async def test_an_engine_that_eats_all_memory(session: Session) -> None:
    fence = await session.serving(session.replica())
    with pytest.raises(Refused, match="engine_error"):
        await session.ask(fence, do="eat")
    status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("failed", "out_of_memory")
    assert "hungry" in status["reason"]["message"]


# Backpressure and neighbours.


async def test_a_reader_that_never_reads_stops_the_engine(
    session: Session, engine: Fence, executor: ExecutorProcess
) -> None:
    """G10: 200 MB are offered, a queue and the kernel's buffers are taken."""
    await session.ask(engine, do="length", bytes=1 << 20)
    before, key = resident(executor), new_id()
    stream = await session.open(engine, do="pour", key=key, bytes=200 << 20)
    sent, deadline = -1, time.monotonic() + PATIENCE_SECONDS
    while (now := (await session.report(engine, key)).get("sent", 0)) != sent or not sent:
        sent = now
        assert time.monotonic() < deadline
        await asyncio.sleep(0.3)
    assert 0 < sent <= (QUEUE_CHUNKS + 1) * READ_BYTES_MAX + KERNEL_BYTES_MAX
    assert resident(executor) - before < 2 << 20
    stream.close()
    await closed_at(session, engine, key)


async def test_a_slow_reader_gets_everything(session: Session, engine: Fence) -> None:
    stream = await session.open(engine, do="length", bytes=3_000_000)
    body, end = b"", False
    while not end:
        piece = await stream.read()
        body, end = body + piece.data, piece.end
        await asyncio.sleep(0.002)
    assert body == (bytes(range(256)) * 12_000)[:3_000_000]


async def test_streams_interleave(session: Session, engine: Fence) -> None:
    async def read(name: str) -> None:
        stream = await session.open(engine, do="events", count=5, pause=0.1)
        while not (await stream.read()).end:
            order.append(name)

    order: list[str] = []
    await asyncio.gather(read("a"), read("b"))
    assert order != sorted(order)


async def test_busy_streams_do_not_delay_leases(session: Session, engine: Fence) -> None:
    """64 streams, some that nobody reads, beside renewals on another connection."""
    slow = [await session.open(engine, do="events", count=200, pause=0.02) for _ in range(32)]
    unread = [await session.open(engine, do="pour", key=new_id(), bytes=50 << 20) for _ in range(32)]
    readers = [asyncio.create_task(whole(stream)) for stream in slow]
    waits = []
    for sequence in range(2, 42):
        began = time.monotonic()
        result = await session.renew(engine, session.renewal(sequence, 3600))
        waits.append(time.monotonic() - began)
        assert "deadline_ns" in result, result
        await asyncio.sleep(0.02)
    waits.sort()
    assert waits[len(waits) // 2] < 0.1
    assert waits[-1] < 1.5
    for task in readers:
        task.cancel()
    for stream in (*slow, *unread):
        stream.close()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_many_exchanges_leave_nothing(
    session: Session, engine: Fence, executor: ExecutorProcess
) -> None:
    process = psutil.Process(executor.pid)

    async def rounds(count: int) -> None:
        for _ in range(count):
            await asyncio.gather(*(session.ask(engine, do="json") for _ in range(20)))
            streams = await asyncio.gather(*(session.open(engine, do="hang", key=str(n)) for n in range(10)))
            for stream in streams:
                stream.close()

    await rounds(10)
    descriptors, memory = process.num_fds(), resident(executor)
    await rounds(40)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while process.num_fds() > descriptors:
            await asyncio.sleep(0.05)
    assert resident(executor) - memory < 2 << 20


def test_where_the_engine_is(executor: ExecutorProcess, engine: Fence) -> None:
    """Its socket is nowhere on the machine: it is on the sandbox's own file system."""
    assert list(executor.directory.rglob("engine.sock")) == []
    assert not Path("/run/ficc/engine.sock").exists()

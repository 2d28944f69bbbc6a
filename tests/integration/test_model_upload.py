"""Admitted inputs handed to an engine over its own upload route: by the executor, from verified files, and by name of
nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ficc.client.executor import EndpointLink
from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Fence, Input, Plan
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import Kind
from support.executor import (
    PATIENCE_SECONDS,
    PYTHON,
    REPLICA_LIMITS,
    ROUTE,
    ExecutorProcess,
    Session,
    connected,
    whole,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

PORT = 11434
ENGINE = Path(__file__).parents[1] / "support" / "native_engine.py"
WEIGHTS = random.Random(5).randbytes(12 << 20)
SHARD = random.Random(6).randbytes(70_001)


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as executor:
        yield executor


@pytest.fixture
async def session(executor: ExecutorProcess) -> AsyncIterator[Session]:
    async with connected(executor) as session:
        yield session
        await session.end_all()


def inputs(session: Session) -> list[Input]:
    named = {
        "model-0": ("model.gguf", WEIGHTS),
        "model-1": ("shards/b.gguf", SHARD),
        "model-2": ("empty", b""),
    }
    return [
        Input(id_, session.executor.put_blob(data), len(data), name) for id_, (name, data) in named.items()
    ]


def plan(session: Session, mode: str = "serve", **changes: Any) -> Plan:
    """Of the stand-in; two of its inputs, and not its own script, may be uploaded."""
    script = session.executor.input("engine.py", ENGINE.read_bytes())
    endpoint = Endpoint(
        "tcp", PORT, (("POST", ROUTE), ("POST", "/seen")), 1 << 20, 2, ("model-0", "model-1", "model-2")
    )
    return session.plan(
        argv=(PYTHON, "-IB", "/inputs/engine.py", str(PORT), mode),
        inputs=(script, *inputs(session)),
        endpoint=replace(endpoint, **changes),
        limits=REPLICA_LIMITS,
    )


async def listening(session: Session, plan: Plan) -> Fence:
    fence = await session.run(plan)
    await session.until(fence, "running")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "listening" not in await session.output(fence):
            await asyncio.sleep(0.01)
    return fence


async def ask(session: Session, fence: Fence, path: str, **document: Any) -> tuple[int, Any]:
    stream = await session.link.open_stream(fence, path, json.dumps(document).encode(), 30)
    answer = await whole(stream)
    return answer.status, json.loads(answer.body)


async def seen(session: Session, fence: Fence) -> dict[str, Any]:
    return dict((await ask(session, fence, "/seen"))[1])


def requests(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in told["seen"]]


async def test_the_model_is_served_once_it_was_uploaded(session: Session) -> None:
    fence = await listening(session, plan(session))
    model, shard, empty = inputs(session)
    assert (await ask(session, fence, ROUTE, model="assistant"))[0] == 404
    news: list[dict[str, Any]] = []
    ids = [one.id for one in (model, shard, empty)]
    created = await session.link.upload(fence, "assistant", ids, 60, news.append)

    files = {one.name: f"sha256:{one.sha256}" for one in (model, shard, empty)}
    assert created == {"created": "assistant", "files": files}
    status, answer = await ask(session, fence, ROUTE, model="assistant")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")
    told = await seen(session, fence)
    assert told["models"] == {"assistant": files}
    assert told["blobs"] == {f"sha256:{one.sha256}": one.bytes for one in (model, shard, empty)}
    blobs = [f"/api/blobs/sha256:{one.sha256}" for one in (model, shard, empty)]
    wanted = [(method, path) for path in blobs for method in ("HEAD", "POST")]
    assert [one for one in requests(told) if one[1] != ROUTE] == [*wanted, ("POST", "/api/create")]
    for method, path, headers in told["seen"]:
        if path != ROUTE:
            assert set(headers) == {
                *("host", "content-type", "accept", "accept-encoding", "content-length", "connection")
            }, (method, path)
    # Progress names admitted inputs only, never goes back, and ends with every byte.
    for one in (model, shard, empty):
        sent = [entry["bytes_sent"] for entry in news if entry["input"] == one.id]
        assert sent == sorted(sent)
        assert sent[-1] == one.bytes
    assert len({entry["bytes_sent"] for entry in news if entry["input"] == model.id}) > 1


async def test_what_the_engine_has_is_not_sent_again(session: Session) -> None:
    fence = await listening(session, plan(session))
    await session.link.upload(fence, "assistant", ["model-0"], 60)
    await session.link.upload(fence, "another", ["model-0"], 60)
    blob = f"/api/blobs/sha256:{inputs(session)[0].sha256}"
    told = await seen(session, fence)
    wanted = [
        ("HEAD", blob),
        ("POST", blob),
        ("POST", "/api/create"),
        ("HEAD", blob),
        ("POST", "/api/create"),
    ]
    assert requests(told) == wanted
    assert set(told["models"]) == {"assistant", "another"}


@pytest.mark.parametrize(
    "ids",
    [
        *([], ["model-9"], ["model-0", "model-0"], ["model-0", "x"], ["/etc/passwd"], ["../model-0"]),
        ["engine.py"],
        [""],
    ],
    ids=str,
)
async def test_nothing_but_admitted_inputs_is_uploaded(session: Session, ids: list[str]) -> None:
    fence = await listening(session, plan(session, upload_input_ids=("model-0",)))
    script = next(one.id for one in plan(session).inputs if one.name == "engine.py")
    for wanted in (ids, [script], ["model-1"]):  # an input that the plan has, and admits for no upload
        with pytest.raises(Refused, match="not_found: Only inputs that the endpoint contract names"):
            await session.link.upload(fence, "assistant", wanted, 10)
    assert requests(await seen(session, fence)) == []


async def test_an_endpoint_without_uploads_takes_none(session: Session) -> None:
    fence = await listening(session, plan(session, upload_input_ids=()))
    with pytest.raises(Refused, match="not_found"):
        await session.link.upload(fence, "assistant", ["model-0"], 10)
    assert requests(await seen(session, fence)) == []


@pytest.mark.parametrize("path", ["/api/create", "/api/blobs/sha256:" + "0" * 64, "/api/pull", "/api/tags"])
async def test_the_engines_own_routes_stay_closed_to_requests(session: Session, path: str) -> None:
    fence = await listening(session, plan(session))
    with pytest.raises(Refused, match="not_found"):
        await session.link.open_stream(fence, path, b"{}", 10)
    assert requests(await seen(session, fence)) == []


@pytest.mark.parametrize(
    "name", ["", "A", "../x", "a/b", "a:b", 'a","from":"x', "a b", "x" * 64, "-a", "a\n"]
)
async def test_a_name_that_is_no_alias(session: Session, name: str) -> None:
    fence = await listening(session, plan(session))
    with pytest.raises(Refused, match="invalid_request"):
        await session.link.upload(fence, name, ["model-0"], 10)
    assert requests(await seen(session, fence)) == []


@pytest.mark.parametrize("change", [{"generation": 2}, {"plan_digest": "0" * 64}], ids=str)
async def test_an_upload_is_fenced(session: Session, change: dict[str, Any]) -> None:
    fence = await listening(session, plan(session))
    with pytest.raises(Refused, match="fenced"):
        await session.link.upload(replace(fence, **change), "assistant", ["model-0"], 10)
    assert requests(await seen(session, fence)) == []


@pytest.mark.parametrize(
    "document",
    [{"model": "a"}, {"model": "a", "inputs": [1]}, {"model": "a", "inputs": [], "path": "/etc/passwd"}, []],
    ids=str,
)
async def test_an_upload_has_no_room_for_anything_else(
    session: Session, executor: ExecutorProcess, document: Any
) -> None:
    """What names more than a model and inputs is no frame: the connection is closed."""
    fence = Fence("0" * 26, 1, "0" * 64)
    reader, writer = await asyncio.open_unix_connection(executor.socket)
    writer.write(wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "endpoint"}))
    payload = fence.pack() + (1000).to_bytes(4, "big") + json.dumps(document).encode()
    writer.write(wire.encode(Kind.UPLOAD, 1, payload))
    async with asyncio.timeout(PATIENCE_SECONDS):
        frames = list(wire.Decoder().feed(await reader.read()))
    assert [frame.kind for frame in frames] == [Kind.HELLO]
    writer.close()


@pytest.mark.parametrize("how", ["cancel", "deadline", "lost connection", "stop", "fenced read"])
async def test_an_upload_that_is_given_up_ends_at_once(
    session: Session, executor: ExecutorProcess, how: str
) -> None:
    """The engine reads slowly or not at all; it sees its connection closed, and the next upload may begin."""
    fence = await listening(session, plan(session, "stuck" if how == "deadline" else "slow"))
    link = EndpointLink()
    await link.open(executor.socket, "endpoint")
    begun = asyncio.Event()
    seconds = 1.0 if how == "deadline" else 60.0
    work = asyncio.create_task(
        link.upload(fence, "assistant", ["model-0"], seconds, lambda news: begun.set())
    )
    await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
    with pytest.raises(Refused, match="busy"):
        await session.link.upload(fence, "assistant", ["model-1"], 10)
    assert (await ask(session, fence, "/seen"))[0] == 200  # requests are answered beside it
    if how == "cancel":
        work.cancel()
        await asyncio.wait({work})
    elif how == "lost connection":
        link.close()
        with pytest.raises(Refused, match="peer_lost"):
            await work
    elif how == "fenced read":
        other = replace(fence, generation=2).pack()
        link.send(wire.encode(Kind.READ, 1, other))
        with pytest.raises(Refused, match="fenced"):
            await work
    elif how == "stop":
        await session.stop(fence, 0)
        with pytest.raises(Refused, match=r"service_stopped|engine_error"):
            await work
        await session.until(fence, "released")
        link.close()
        return
    else:
        with pytest.raises(Refused, match="deadline_exceeded"):
            await work
    if how != "deadline":
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(one[0] == "cut" for one in (await seen(session, fence))["seen"]):
                await asyncio.sleep(0.02)
        assert (await session.link.upload(fence, "assistant", ["model-1"], 60))["created"] == "assistant"
    assert (await seen(session, fence))["models"].keys() == (set() if how == "deadline" else {"assistant"})
    link.close()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("full", "answered 507 to /api/blobs/sha256:.*no space left on device"),
        ("lossy", "closed the connection"),
        ("odd", "over 65536 bytes"),
    ],
)
async def test_an_engine_that_does_not_take_it(session: Session, mode: str, words: str) -> None:
    """Said with its own words, and nothing is retried."""
    fence = await listening(session, plan(session, mode))
    with pytest.raises(Refused, match=f"engine_error: .*{words}"):
        await session.link.upload(fence, "assistant", ["model-0"], 30)
    told = await seen(session, fence)
    assert len([one for one in requests(told) if one[0] == "POST"]) == (2 if mode == "odd" else 1)
    assert told["models"] == {}


@pytest.mark.parametrize("spoil", ["changed", "gone", "link"])
async def test_a_file_that_is_no_longer_what_was_verified_is_not_sent(
    session: Session, executor: ExecutorProcess, spoil: str
) -> None:
    data = random.Random(spoil).randbytes(100_000)
    one = Input("model-0", executor.put_blob(data), len(data), "model.gguf")
    made = plan(session)
    script = next(entry for entry in made.inputs if entry.name == "engine.py")
    assert made.endpoint is not None
    endpoint = replace(made.endpoint, upload_input_ids=("model-0",))
    fence = await listening(session, replace(made, inputs=(script, one), endpoint=endpoint))
    path = executor.blob(one.sha256)
    if spoil == "changed":
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(b"x")
        path.chmod(0o444)
    else:
        path.unlink()
    if spoil == "link":
        os.symlink("/etc/passwd", path)
    with pytest.raises(Refused, match=r"model_not_ready|source_mismatch"):
        await session.link.upload(fence, "assistant", ["model-0"], 10)
    assert [method for method, _ in requests(await seen(session, fence))] == ["HEAD"]
    path.unlink(missing_ok=True)


async def test_memory_is_bounded_and_leases_are_renewed_beside_a_slow_upload(
    session: Session, executor: ExecutorProcess
) -> None:
    big = random.Random(7).randbytes(48 << 20)
    one = Input("model-0", executor.put_blob(big), len(big), "model.gguf")
    made = plan(session, "slow")
    script = next(entry for entry in made.inputs if entry.name == "engine.py")
    assert made.endpoint is not None
    endpoint = replace(made.endpoint, upload_input_ids=("model-0",))
    fence = await listening(session, replace(made, inputs=(script, one), endpoint=endpoint))
    process = psutil.Process(executor.pid)
    before = process.memory_info().rss
    work = asyncio.create_task(session.link.upload(fence, "assistant", ["model-0"], 120))
    for sequence in range(2, 22):
        assert "deadline_ns" in await session.renew(fence, session.renewal(sequence))
        await asyncio.sleep(0.05)
    assert not work.done()
    assert process.memory_info().rss - before < 12 << 20
    work.cancel()
    await asyncio.wait({work})

"""Large bodies are read in a process of our own, which may die, and outlives nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from ficc.domain.errors import Refused
from ficc.gateway import body_process
from ficc.gateway.body_reader import HERE_BYTES_MAX, BodyReader
from ficc.protocol import openai

LARGE = json.dumps({"model": "ü", "stream": True, "text": "é" * HERE_BYTES_MAX}, ensure_ascii=False).encode()
PATIENCE_SECONDS = 20.0


@pytest_asyncio.fixture
async def reader() -> AsyncIterator[BodyReader]:
    made = BodyReader(depth_max=64, values_max=1000)
    yield made
    await made.close()


def pid_of(reader: BodyReader) -> int:
    assert reader._process is not None
    return reader._process.pid


async def test_a_large_body_is_read_as_a_small_one_is(reader: BodyReader) -> None:
    request = await reader.read(LARGE)
    assert request == openai.read(LARGE, depth_max=64, values_max=1000)
    assert json.loads(request.addressed(LARGE, "assistant")) == {**json.loads(LARGE), "model": "assistant"}
    assert pid_of(reader) != os.getpid()


async def test_a_small_body_needs_no_process(reader: BodyReader) -> None:
    assert (await reader.read(b'{"model":"m"}')).model == "m"
    assert reader._process is None


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"a":"' + b"x" * HERE_BYTES_MAX, "invalid_json", "character 5"),
        (b'{"stream":1,"a":"' + b"x" * HERE_BYTES_MAX + b'"}', "invalid_body", "stream"),
        (b'{"a":[' + b"1," * HERE_BYTES_MAX + b"1]}", "invalid_json", "byte 2002"),
    ],
)
async def test_a_refusal_comes_back_as_one(reader: BodyReader, body: bytes, code: str, param: str) -> None:
    with pytest.raises(Refused) as caught:
        await reader.read(body)
    assert (caught.value.code, caught.value.param) == (code, param)
    first = pid_of(reader)
    await reader.read(LARGE)
    assert pid_of(reader) == first


async def test_bodies_that_come_at_once_get_their_own_answers(reader: BodyReader) -> None:
    bodies = [json.dumps({"model": f"m{n}", "text": "x" * HERE_BYTES_MAX}).encode() for n in range(8)]
    requests = await asyncio.gather(*map(reader.read, bodies))
    assert [request.model for request in requests] == [f"m{n}" for n in range(8)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_that_died_is_replaced(reader: BodyReader, number: signal.Signals) -> None:
    await reader.read(LARGE)
    first = pid_of(reader)
    os.kill(first, number)
    for _ in range(3):
        assert (await reader.read(LARGE)).model == "ü"
    assert pid_of(reader) != first


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_process_may_die_at_any_moment(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Whether or not its end, or that of its input, was noticed by then."""

    async def main() -> None:
        reader = BodyReader(depth_max=64, values_max=1000)
        for milliseconds in (None, 0, 0.5, 1, 1, 2, 2, 3, 5, 10, 20):
            await reader.read(LARGE)
            os.kill(pid_of(reader), signal.SIGKILL)
            if milliseconds is not None:
                await asyncio.sleep(milliseconds / 1000)
            assert (await reader.read(LARGE)).model == "ü"
        await reader.close()

    run(main())


async def test_a_process_that_dies_of_a_body_is_tried_once_more(
    reader: BodyReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    ask = reader._ask

    async def kill_and_ask(body: bytes) -> bytes:
        asked.append(body)
        answer = asyncio.create_task(ask(body))
        while reader._process is None:
            await asyncio.sleep(0)
        reader._process.kill()
        return await answer

    monkeypatch.setattr(reader, "_ask", kill_and_ask)
    with pytest.raises(Refused) as caught:
        await reader.read(LARGE)
    assert caught.value.code == "internal"
    assert len(asked) == 2
    monkeypatch.undo()
    assert (await reader.read(LARGE)).model == "ü"


async def test_a_caller_that_leaves_takes_no_answer_of_another(reader: BodyReader) -> None:
    leaving = asyncio.create_task(reader.read(LARGE.replace(b'"\xc3\xbc"', b'"left"')))
    while reader._process is None:
        await asyncio.sleep(0.001)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await reader.read(LARGE)).model == "ü"


async def test_closing_ends_the_process(reader: BodyReader) -> None:
    await reader.read(LARGE)
    pid = pid_of(reader)
    await reader.close()
    assert not Path(f"/proc/{pid}").exists()
    await reader.close()


def test_the_process_ends_with_whoever_started_it() -> None:
    """Even with one that was killed and could say nothing; and nothing else is left of it."""
    program = (
        "import asyncio, sys\n"
        "from ficc.gateway.body_reader import BodyReader\n"
        "async def main():\n"
        "    reader = BodyReader(depth_max=64, values_max=1000)\n"
        "    await reader.read(b'{\"a\":\"' + b'x' * (1 << 20) + b'\"}')\n"
        "    print(reader._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        assert children == [str(child)]
    finally:
        starter.kill()
        rest, _ = starter.communicate(timeout=PATIENCE_SECONDS)  # until nobody holds its output
    assert rest == b""
    # An orphan is its reaper's to bury; what counts is that it runs no more.
    for _ in range(200):
        if not _runs(child):
            return
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError(f"{child} outlives the process that started it")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    "said", [b"", b"\0", body_process.QUESTION.pack(10, 1, 1), body_process.QUESTION.pack(9, 1, 1) + b"{"]
)
def test_the_process_ends_where_its_questions_end(said: bytes) -> None:
    command = [sys.executable, "-P", "-m", body_process.__name__]
    done = subprocess.run(command, input=said, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

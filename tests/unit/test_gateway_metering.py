"""One record for each request of somebody who is known, whatever its end, and what it says; and the headers that name
what an answer comes from."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from ficc.domain.errors import Refused
from ficc.domain.service import State
from ficc.domain.usage import Counted, Outcome, Record
from ficc.gateway.answers import HELD_BYTES_MAX, StreamAborted
from ficc.gateway.app import client_gone
from ficc.gateway.invocation import Chunks, Invocation
from ficc.gateway.relay import Gateway, Limits
from support.gateway import (
    ACTOR,
    EVENTS,
    NOW,
    QUIET,
    Line,
    Records,
    ScriptedStream,
    gateway,
    head,
    more,
    whole,
)

CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
TIMINGS = b'data: {"choices":[],"timings":{"cache_n":2,"prompt_n":5,"predicted_n":3}}\n\n'
DONE = b"data: [DONE]\n\n"
LOST = Refused("peer_lost", "The connection to the replica broke.")
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'
PROVENANCE = {
    b"x-ficc-generation": b"1",
    b"x-ficc-model-revision": b"1" * 64,
    b"x-ficc-plan-digest": b"0" * 64,
}


class Metered:
    """A gateway, and the records that it made."""

    def __init__(self, *streams: ScriptedStream | Refused, limits: Limits | None = None) -> None:
        self.records = Records()
        self.made: Gateway
        self.made, self.routes = gateway(*streams, records=self.records, limits=limits)

    async def ask(self, path: str = CHAT, **body: Any) -> tuple[int, Chunks]:
        return await self.made.invoke("s", path, json.dumps(body).encode(), ACTOR, request_id="theirs")

    @property
    def record(self) -> Record:
        (record,) = self.records
        return record


async def recorded(*script: Line, **body: Any) -> tuple[Record, dict[bytes, bytes]]:
    metered = Metered(ScriptedStream(*script))
    _, chunks = await metered.ask(**body)
    with suppress(StreamAborted):
        await whole(chunks)
    return metered.record, dict(chunks.headers)


async def test_what_is_recorded_of_an_answer() -> None:
    record, headers = await recorded(head(data=ANSWER, end=True))
    assert headers.items() >= PROVENANCE.items()
    assert (record.id, record.request_id) == ("r1", "theirs")
    assert (record.project_id, record.service_id, record.alias) == ("p", "s", "assistant")
    assert (record.authority_kind, record.authority_id, record.subject_id) == ("token", "t", "somebody")
    assert (record.path, record.status, record.code) == (CHAT, 200, None)
    assert record.outcome is Outcome.COMPLETED
    assert (record.started_at, record.day, record.requests) == (NOW, NOW // 86_400, 1)
    assert (record.tokens, record.prompt_tokens, record.completion_tokens) == (Counted.COUNTED, 7, 3)
    assert (record.model_revision, record.plan_digest, record.generation) == ("1" * 64, "0" * 64, 1)
    assert record.attempt_id == "a"
    assert record.first_byte_ms is not None
    assert record.queue_ms == 0 <= record.first_byte_ms <= record.total_ms


ENDS: list[tuple[str, list[Line], dict[str, Any], tuple[Any, ...]]] = [
    ("no usage", [head(data=b"{}", end=True)], {}, ("completed", None, 200, "unknown", None, None)),
    (
        "a count of zero",
        [head(data=b'{"usage":{"prompt_tokens":0,"completion_tokens":0}}', end=True)],
        {},
        ("completed", None, 200, "counted", 0, 0),
    ),
    (
        "a large document",
        [head(data=b'{"usage":{"prompt_tokens":7},"a":"' + b"x" * HELD_BYTES_MAX), more(b'"}', end=True)],
        {},
        ("completed", None, 200, "counted", 7, 0),
    ),
    (
        "a stream that was asked for usage",
        [head(EVENTS, EVENT), more(USAGE + DONE, end=True)],
        {"stream": True},
        ("completed", None, 200, "counted", 7, 3),
    ),
    (
        "a stream that says it unasked",
        [head(EVENTS, EVENT), more(TIMINGS[:30]), more(TIMINGS[30:]), more(DONE, end=True)],
        {"stream": True},
        ("completed", None, 200, "counted", 7, 3),
    ),
    (
        "a stream that says nothing",
        [head(EVENTS, EVENT), more(DONE, end=True)],
        {"stream": True},
        ("completed", None, 200, "unknown", None, None),
    ),
    (
        "a stream that breaks",
        [head(EVENTS, EVENT), more(EVENT + EVENT), LOST],
        {"stream": True},
        ("failed", "peer_lost", 200, "partial", None, 3),
    ),
    (
        "a stream that breaks inside an event",
        [head(EVENTS, EVENT), more(EVENT[:9]), LOST],
        {"stream": True},
        ("failed", "peer_lost", 200, "partial", None, 2),
    ),
    (
        "a break behind the end",
        [head(EVENTS, EVENT + USAGE + DONE), LOST],
        {"stream": True},
        ("completed", None, 200, "counted", 7, 3),
    ),
    ("no answer", [LOST], {}, ("failed", "peer_lost", 502, "unknown", None, None)),
    ("no JSON", [head(data=b"{", end=True)], {}, ("failed", "engine_error", 502, "unknown", None, None)),
    (
        "a refusal of the engine",
        [head(status=400, data=b"{}", end=True)],
        {},
        ("refused", "invalid_body", 400, "none", 0, 0),
    ),
    (
        "a fault of the engine",
        [head(status=500, data=b"{}", end=True)],
        {},
        ("failed", "engine_error", 502, "unknown", None, None),
    ),
]


@pytest.mark.parametrize(
    ("script", "body", "expected"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
async def test_every_end_is_recorded_with_what_is_known_of_its_tokens(
    script: list[Line], body: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    record, headers = await recorded(*script, **body)
    assert headers.items() >= PROVENANCE.items(), "a replica was chosen"
    assert record[9:12] + record[17:20] == expected


async def test_g8_no_byte_is_changed_for_the_sake_of_the_record() -> None:
    metered = Metered(ScriptedStream(head(EVENTS, EVENT), more(TIMINGS + DONE, end=True)))
    _, chunks = await metered.ask(stream=True)
    assert await whole(chunks) == EVENT + TIMINGS + DONE
    assert json.loads(metered.routes.the_link.sent[0]) == {"model": "assistant", "stream": True}


# Those that no engine saw.


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (CHAT, {"stream": "yes"}, "invalid_body"),
        (CHAT, {"model": "other"}, "model_not_found"),
        ("/v1/audio/speech", {}, "not_found"),
    ],
)
async def test_a_refused_request_has_a_record_without_cost(
    path: str, body: dict[str, Any], code: str
) -> None:
    metered = Metered()
    _, chunks = await metered.ask(path, **body)
    assert not set(dict(chunks.headers)) & set(PROVENANCE)
    record = metered.record
    assert (record.outcome, record.code, record.tokens) == (Outcome.REFUSED, code, Counted.NONE)
    assert (record.prompt_tokens, record.completion_tokens, record.attempt_id) == (0, 0, None)


async def test_g18_a_full_queue_is_recorded() -> None:
    metered = Metered(ScriptedStream(QUIET), limits=Limits(queue_max=0))
    first = asyncio.create_task(metered.ask())
    await asyncio.sleep(0)
    status, _ = await metered.ask()
    assert (status, metered.record.code, metered.record.status) == (429, "queue_full", 429)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert [record.outcome for record in metered.records] == [Outcome.REFUSED, Outcome.CLIENT_GONE]


async def test_a_replica_that_opened_nothing_is_not_named() -> None:
    metered = Metered(Refused("executor_unavailable", "No connection."))
    status, chunks = await metered.ask()
    assert (status, metered.record.code) == (503, "service_not_ready")
    assert not set(dict(chunks.headers)) & set(PROVENANCE)
    assert (metered.record.tokens, metered.record.attempt_id) == (Counted.NONE, None)


async def test_an_opening_that_is_lost_may_have_cost_something() -> None:
    metered = Metered(LOST)
    _, chunks = await metered.ask()
    assert dict(chunks.headers).items() >= PROVENANCE.items()
    assert (metered.record.outcome, metered.record.tokens) == (Outcome.FAILED, Counted.UNKNOWN)
    assert metered.record.attempt_id == "a"


async def test_a_fault_of_ours_is_recorded_as_one() -> None:
    metered = Metered(ScriptedStream(head(data=b"{}", end=True)))
    metered.routes.the_link.answers.clear()  # the scripted link raises IndexError
    with pytest.raises(IndexError):
        await metered.ask()
    assert (metered.record.outcome, metered.record.code) == (Outcome.FAILED, "internal")
    assert (metered.record.status, metered.made.live) == (500, 0)


# Clients that leave.


async def begun(metered: Metered, **body: Any) -> tuple[Invocation, asyncio.Task[tuple[int, Chunks]]]:
    """A request that is on its way, as a transport has it."""
    found: list[Invocation] = []
    asking = metered.made.invoke("s", CHAT, json.dumps(body).encode(), ACTOR, on_begin=found.append)
    task = asyncio.create_task(asking)
    await asyncio.sleep(0.01)
    return found[0], task


async def test_g9_a_client_that_leaves_the_queue_costs_nothing() -> None:
    metered = Metered(ScriptedStream(QUIET))
    _, first = await begun(metered)
    waiting, second = await begun(metered)
    waiting.abort(client_gone())
    await second
    record = metered.record
    assert (record.outcome, record.tokens, record.status) == (Outcome.CLIENT_GONE, Counted.NONE, 499)
    assert record.queue_ms > 0
    first.cancel()


async def test_g9_a_client_that_leaves_before_the_first_byte() -> None:
    metered = Metered(ScriptedStream(QUIET))
    invocation, task = await begun(metered)
    invocation.abort(client_gone())
    await task
    record = metered.record
    assert (record.outcome, record.tokens, record.attempt_id) == (Outcome.CLIENT_GONE, Counted.UNKNOWN, "a")
    assert record.first_byte_ms is None


async def test_g9_a_client_that_leaves_a_stream_has_what_passed() -> None:
    metered = Metered(ScriptedStream(head(EVENTS, EVENT), more(EVENT), QUIET))
    _, chunks = await metered.ask(stream=True)
    await anext(chunks)
    await anext(chunks)
    await chunks.aclose()
    record = metered.record
    assert (record.outcome, record.status) == (Outcome.CLIENT_GONE, 200)
    assert (record.tokens, record.prompt_tokens, record.completion_tokens) == (Counted.PARTIAL, None, 2)


async def test_a_client_that_leaves_behind_the_end_has_had_it_all() -> None:
    metered = Metered(ScriptedStream(head(EVENTS, EVENT + USAGE + DONE), QUIET))
    invocation, task = await begun(metered, stream=True)
    _, chunks = await task
    assert await anext(chunks) == EVENT + USAGE + DONE
    invocation.abort(client_gone())
    await whole(chunks)
    assert (metered.record.outcome, metered.record.tokens) == (Outcome.COMPLETED, Counted.COUNTED)


async def test_a_service_that_is_stopped_ends_its_streams_as_failed() -> None:
    metered = Metered(ScriptedStream(head(EVENTS, EVENT)))
    _, chunks = await metered.ask(stream=True)
    await anext(chunks)
    metered.routes.route = replace(metered.routes.route, state=State.STOPPING)
    metered.made.recheck()
    await whole(chunks)
    assert (metered.record.outcome, metered.record.code) == (Outcome.FAILED, "service_stopped")

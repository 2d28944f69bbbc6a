"""One invocation from its request to its answer, with an engine that answers from a script: what becomes a status,
what is said in band, what breaks the connection, and what is given back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.domain.service import State
from ficc.gateway import answers
from ficc.gateway.answers import HELD_BYTES_MAX, StreamAborted
from ficc.gateway.body_reader import HERE_BYTES_MAX
from ficc.gateway.ports import Stream
from ficc.gateway.relay import Chunks, Gateway, Limits
from support.gateway import (
    ACTOR,
    EVENTS,
    QUIET,
    ROUTE,
    Known,
    Line,
    ScriptedLink,
    ScriptedStream,
    gateway,
    head,
    more,
    whole,
)

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
LOST = Refused("engine_error", "The engine closed the connection before its answer was complete.")
LATE = Refused("deadline_exceeded", "The deadline passed before the engine was done.")
PEER_LOST = Refused("peer_lost", "The connection to the replica broke.")
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PROVENANCE = [
    (b"x-ficc-generation", b"1"),
    (b"x-ficc-model-revision", b"1" * 64),
    (b"x-ficc-plan-digest", b"0" * 64),
]
NO_RETRY = (b"x-should-retry", b"false")
PATIENCE_SECONDS = 10.0


async def ask(
    made: Gateway, path: str = CHAT, actor: Actor = ACTOR, service_id: str = "s", **body: Any
) -> tuple[int, Chunks]:
    return await made.invoke(service_id, path, json.dumps(body).encode(), actor)


async def answered(
    *script: Line, path: str = CHAT, **body: Any
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an answer made of these pieces; everything is given back behind it."""
    stream = ScriptedStream(*script)
    made, _ = gateway(stream)
    status, chunks = await ask(made, path, **body)
    try:
        return status, chunks.headers, await whole(chunks)
    finally:
        assert stream.closed
        assert made.live == 0
        assert made.slots.total("s") == 0


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body.removeprefix(b"data: "))["error"]
    assert set(error) >= {"code", "message", "type", "param"}
    return error


# Documents.


async def test_a_document_goes_out_whole_with_its_length() -> None:
    status, headers, body = await answered(head(), more(b'{"a":'), more(b"1}"), more(end=True))
    assert (status, body) == (200, b'{"a":1}')
    assert headers == [
        (b"content-type", b"application/json"),
        *PROVENANCE,
        (b"content-length", b"7"),
    ]


@pytest.mark.parametrize("why", [LOST, LATE, PEER_LOST], ids=lambda why: why.code)
@pytest.mark.parametrize(
    "came", [[head()], [head(data=b'{"choi')], [head(), more(b'{"a":1'), more(b",")], []]
)
async def test_g28_a_document_that_breaks_off_is_a_status_that_nobody_retries(
    came: list[Line], why: Refused
) -> None:
    status, headers, body = await answered(*came, why)
    assert (status, error_of(body)["code"]) == (504 if why is LATE else 502, why.code)
    assert NO_RETRY in headers


@pytest.mark.parametrize("code", ["service_not_ready", "executor_unavailable", "busy", "internal"])
async def test_g28_no_refusal_behind_the_opening_invites_to_send_again(code: str) -> None:
    """Whatever the reason is called: the engine may have seen the request."""
    _, headers, _ = await answered(head(data=b"{"), Refused(code, "It went away."))
    assert NO_RETRY in headers


async def test_g28_what_no_engine_saw_may_be_sent_again() -> None:
    made, _ = gateway(Refused("service_not_ready", "The engine takes no connection."))
    status, chunks = await ask(made)
    assert status == 503
    assert NO_RETRY not in chunks.headers
    assert b"retry-after" in dict(chunks.headers)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"not json!",
        b'{"choices":[{"mess',
        b'{"a":1}}',
        b"[]",
        b"null",
        b'"text"',
        b'{"a":NaN}',
        b"\xff{}",
    ],
)
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", ""])
async def test_what_is_no_json_object_is_no_success(document: bytes, content_type: str) -> None:
    status, headers, body = await answered(head(content_type, document), more(end=True))
    assert (status, error_of(body)["code"]) == (502, "engine_error")
    assert NO_RETRY in headers


@pytest.mark.parametrize("status", [0, 101, 199, 201, 204, 206, 299, 301, 302, 304, 600, 999])
async def test_a_status_that_is_neither_success_nor_refusal_is_an_engines_error(status: int) -> None:
    got, headers, body = await answered(head(data=b"{}", status=status, end=True))
    assert (got, error_of(body)["code"]) == (502, "engine_error")
    assert NO_RETRY in headers


@pytest.mark.parametrize("content_type", ["text/html", "text/plain", "application/octet-stream", "x\x01"])
async def test_another_content_type_is_an_engines_error(content_type: str) -> None:
    status, _, body = await answered(head(content_type, b"<p>hello", end=True))
    assert (status, error_of(body)["code"]) == (502, "engine_error")


async def test_a_document_over_the_limit_goes_out_as_it_comes() -> None:
    piece = b'{"a":"' + b"x" * HELD_BYTES_MAX
    status, headers, body = await answered(head(data=piece), more(b'"'), more(b"}", end=True))
    assert (status, body) == (200, piece + b'"}')
    assert b"content-length" not in dict(headers)


async def test_a_document_that_breaks_behind_the_limit_breaks_the_connection() -> None:
    made, _ = gateway(ScriptedStream(head(data=b"x" * (HELD_BYTES_MAX + 1)), LOST))
    _, chunks = await ask(made)
    with pytest.raises(StreamAborted):
        await whole(chunks)
    assert made.live == 0


async def test_g4_a_refusal_of_a_stream_is_a_plain_status() -> None:
    refusal = b'{"error":{"message":"n is too large","param":"n","code":400}}'
    status, headers, body = await answered(head(data=refusal, status=400, end=True), stream=True)
    assert (status, dict(headers)[b"content-type"]) == (400, b"application/json")
    assert (error_of(body)["message"], error_of(body)["param"]) == ("n is too large", "n")


# Streams.


async def test_g14_a_stream_tells_proxies_to_gather_nothing() -> None:
    status, headers, body = await answered(head(EVENTS, EVENT), more(DONE, end=True), stream=True)
    assert (status, body) == (200, EVENT + DONE)
    assert dict(headers) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache, no-transform",
        b"x-accel-buffering": b"no",
        **dict(PROVENANCE),
    }


async def test_g14_the_head_of_a_stream_goes_out_before_its_first_event() -> None:
    made, _ = gateway(ScriptedStream(head(EVENTS)))
    _, chunks = await ask(made, stream=True)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await anext(chunks) == b""
    await chunks.aclose()


@pytest.mark.parametrize("came", [[], [more(EVENT)]], ids=["no event", "an event"])
async def test_g1_a_break_between_events_is_an_event(came: list[Line]) -> None:
    _, _, body = await answered(head(EVENTS), *came, LOST, stream=True)
    events = body.split(b"\n\n")
    assert error_of(events[-2])["code"] == "engine_error"
    assert DONE not in body + b"\n\n"


async def test_g1_an_end_without_done_is_an_error() -> None:
    _, _, body = await answered(head(EVENTS, EVENT), more(end=True), stream=True)
    assert error_of(body.removeprefix(EVENT))["code"] == "engine_error"


async def test_g2_a_break_inside_an_event_breaks_the_connection() -> None:
    made, _ = gateway(ScriptedStream(head(EVENTS, EVENT), more(b'data: {"cho'), LOST))
    _, chunks = await ask(made, stream=True)
    assert await anext(chunks) == EVENT
    assert await anext(chunks) == b'data: {"cho'
    with pytest.raises(StreamAborted):
        await anext(chunks)
    assert made.live == 0


FAULTS = [
    b'error: {"message":"boom","code":500,"type":"server_error"}\n\n',
    b'event: error\ndata: {"message":"boom"}\n\n',
    b'event:error\ndata:{"message":"boom","code":"x"}\n\n',
    b'data: {"error":{"message":"boom","code":500}}\n\n',
    b'data: {"object":"error","message":"boom","code":500}\n\n',
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("behind", [[DONE], [], [EVENT, DONE]], ids=["done", "end", "more"])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_g3_a_fault_in_a_stream_is_one_error_of_our_shape_and_the_end(
    fault: bytes, behind: list[bytes], size: int
) -> None:
    stream = EVENT + fault + b"".join(behind)
    pieces = [more(stream[at : at + size]) for at in range(0, len(stream), size)]
    _, _, body = await answered(head(EVENTS), *pieces, more(end=True), stream=True)
    assert body.startswith(EVENT)
    error = error_of(body.removeprefix(EVENT).lstrip(b"\n"))
    assert (error["code"], error["message"]) == ("engine_error", "boom")
    assert body.endswith(b"}}\n\n")
    assert b"[DONE]" not in body


async def test_g3_an_event_that_is_called_an_error_at_its_end_is_one() -> None:
    fault = b'data: {"message":"boom"}\nevent: error\n\n'
    _, _, body = await answered(head(EVENTS, EVENT + fault + DONE, end=True), stream=True)
    assert error_of(body.removeprefix(EVENT))["message"] == "boom"


async def test_g3_the_engines_own_words_survive_its_death_inside_them() -> None:
    fault = b'event: error\ndata: {"message":"boom"}\n'
    _, _, body = await answered(head(EVENTS, EVENT + fault), LOST, stream=True)
    assert error_of(body.removeprefix(EVENT))["message"] == "boom"


async def test_g3_a_fault_that_is_the_callers_has_the_callers_code() -> None:
    fault = (
        b'data: {"error":{"message":"the context is full","code":400,"type":"exceed_context_size_error"}}\n\n'
    )
    _, _, body = await answered(head(EVENTS, fault), more(DONE, end=True), stream=True)
    assert (error_of(body)["code"], error_of(body)["message"]) == ("invalid_body", "the context is full")


async def test_an_engine_that_stays_behind_done_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "DONE_SECONDS_MAX", 0.05)
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, _, body = await answered(head(EVENTS, EVENT), more(DONE), QUIET, stream=True)
    assert body == EVENT + DONE


async def test_a_break_behind_done_is_none() -> None:
    _, _, body = await answered(head(EVENTS, EVENT + DONE), LOST, stream=True)
    assert body == EVENT + DONE


# While the engine is quiet.

SOON = Limits(keep_alive_seconds=0.02)


async def test_g11_comments_keep_a_quiet_stream_alive() -> None:
    script = (head(EVENTS, EVENT), QUIET, QUIET, more(EVENT), more(DONE, end=True))
    made, _ = gateway(ScriptedStream(*script), limits=SOON)
    _, chunks = await ask(made, stream=True)
    comment = b": keep-alive\n\n"
    assert await whole(chunks) == EVENT + comment + comment + EVENT + DONE


async def test_g11_a_comment_never_stands_inside_an_event() -> None:
    script = (head(EVENTS, EVENT[:20]), QUIET, more(EVENT[20:] + DONE, end=True))
    made, _ = gateway(ScriptedStream(*script), limits=SOON)
    _, chunks = await ask(made, stream=True)
    assert await whole(chunks) == EVENT + DONE


async def test_g11_a_stream_begins_though_the_first_token_takes_minutes() -> None:
    script = (QUIET, QUIET, head(EVENTS, EVENT), more(DONE, end=True))
    made, _ = gateway(ScriptedStream(*script), limits=SOON)
    status, chunks = await ask(made, stream=True)
    assert status == 200
    assert dict(chunks.headers)[b"content-type"] == b"text/event-stream"
    assert await whole(chunks) == 2 * b": keep-alive\n\n" + EVENT + DONE
    assert made.live == 0


@pytest.mark.parametrize(
    ("late", "code"),
    [
        (head(data=b'{"error":{"message":"no"}}', status=400, end=True), "invalid_body"),
        (head(status=500, end=True), "engine_error"),
        (head(data=b"{}", end=True), "engine_error"),
        (head("text/html", b"<p>", end=True), "engine_error"),
        (LOST, "engine_error"),
        (LATE, "deadline_exceeded"),
    ],
)
async def test_g11_what_comes_instead_of_a_stream_that_has_begun_is_said_in_it(late: Line, code: str) -> None:
    made, _ = gateway(ScriptedStream(QUIET, late), limits=SOON)
    status, chunks = await ask(made, stream=True)
    body = await whole(chunks)
    assert status == 200
    assert error_of(body.removeprefix(b": keep-alive\n\n"))["code"] == code
    assert made.live == 0


@pytest.mark.parametrize(
    ("path", "stream"), [(CHAT, False), (EMBEDDINGS, True), ("/v1/completions", False), ("/v1/rerank", True)]
)
async def test_g11_a_document_is_waited_for_in_silence(path: str, stream: bool) -> None:
    script = ScriptedStream(QUIET)
    made, _ = gateway(script, limits=SOON)
    waiting = asyncio.create_task(ask(made, path, stream=stream))
    await asyncio.sleep(10 * SOON.keep_alive_seconds)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert script.closed
    assert made.live == 0


async def test_g11_a_completion_is_kept_alive_as_a_chat_is() -> None:
    script = (head(EVENTS, EVENT), QUIET, more(DONE, end=True))
    made, _ = gateway(ScriptedStream(*script), limits=SOON)
    _, chunks = await ask(made, "/v1/completions", stream=True)
    assert await whole(chunks) == EVENT + b": keep-alive\n\n" + DONE


@pytest.mark.parametrize(
    ("path", "capability"),
    [
        (CHAT, "chat"),
        ("/v1/completions", "completions"),
        (EMBEDDINGS, "embeddings"),
        ("/v1/rerank", "rerank"),
    ],
)
async def test_a_path_needs_its_capability(path: str, capability: str) -> None:
    for capabilities, expected in ((frozenset({capability}), 200), (ROUTE.capabilities - {capability}, 400)):
        made, routes = gateway(ScriptedStream(head(data=b"{}", end=True)))
        routes.route = replace(routes.route, capabilities=capabilities)
        status, chunks = await ask(made, path)
        body = await whole(chunks)
        assert status == expected
        if status == 400:
            assert error_of(body)["code"] == "capability_unavailable"
            assert routes.the_link.sent == []


async def test_g11_only_the_deadline_ends_a_quiet_stream() -> None:
    made, routes = gateway(ScriptedStream(), limits=SOON)
    routes.route = replace(routes.route, deadline_seconds=1)
    _, chunks = await ask(made, stream=True)
    body = await whole(chunks)
    assert body.count(b": keep-alive\n\n") > 3
    assert error_of(body.rpartition(b": keep-alive\n\n")[2])["code"] == "deadline_exceeded"


# Slots and drains.


async def test_a_place_in_the_queue_is_kept_when_the_service_begins_to_drain() -> None:
    first = ScriptedStream(head(EVENTS, EVENT))
    made, routes = gateway(first, ScriptedStream(head(data=b'{"second":2}', end=True)))
    _, holding = await ask(made, stream=True)
    waiting = asyncio.create_task(ask(made))
    while not made.slots.waiting("s"):
        await asyncio.sleep(0)
    routes.change(State.DRAINING)
    made.recheck()
    status, chunks = await ask(made)
    assert (status, error_of(await whole(chunks))["code"]) == (503, "service_draining")
    await holding.aclose()
    status, chunks = await waiting
    assert (status, await whole(chunks)) == (200, b'{"second":2}')


async def test_a_stop_ends_those_that_wait() -> None:
    made, routes = gateway(ScriptedStream(head(EVENTS, EVENT)))
    _, holding = await ask(made, stream=True)
    waiting = asyncio.create_task(ask(made))
    while not made.slots.waiting("s"):
        await asyncio.sleep(0)
    routes.change(State.STOPPING)
    made.recheck()
    status, chunks = await waiting
    assert (status, error_of(await whole(chunks))["code"]) == (503, "service_stopped")
    assert error_of((await whole(holding)).rpartition(EVENT)[2])["code"] == "service_stopped"
    assert made.live == 0


async def test_another_replica_is_tried_only_when_nothing_was_opened() -> None:
    made, routes = gateway(
        Refused("busy", "All slots are taken."), ScriptedStream(head(data=b"{}", end=True))
    )
    status, chunks = await ask(made)
    assert (status, await whole(chunks)) == (200, b"{}")
    made, routes = gateway(Refused("peer_lost", "It is not known."), ScriptedStream())
    status, chunks = await ask(made)
    assert (status, error_of(await whole(chunks))["code"]) == (502, "peer_lost")
    assert NO_RETRY in chunks.headers
    assert routes.the_link.sent == []


# Who may still ask.


async def test_a_credential_that_goes_while_a_large_body_is_read_begins_nothing() -> None:
    """Nothing of the request is rechecked before it goes ahead, so that has to be done then."""
    authority = Known()
    made, routes = gateway(ScriptedStream(head(data=b"{}", end=True)), authority=authority)
    asking = asyncio.create_task(ask(made, text="x" * 2 * HERE_BYTES_MAX))
    try:
        await asyncio.sleep(0)
        authority.gone = True
        made.recheck()
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, chunks = await asking
        assert (status, error_of(await whole(chunks))["code"]) == (401, "unauthenticated")
        assert routes.the_link.sent == []
    finally:
        await made.close()


class SilentLink(ScriptedLink):
    """Says neither that a stream is open nor that it is not."""

    async def open_stream(
        self, fence: Fence, path: str, body: bytes, deadline_seconds: float, *, by_data: bool = False
    ) -> Stream:
        self.sent.append(body)
        return await asyncio.Future()


async def test_g28_what_an_engine_may_have_seen_is_not_sent_again_whatever_ended_it() -> None:
    authority = Known()
    made, routes = gateway(authority=authority)
    routes.the_link = SilentLink([])
    asking = asyncio.create_task(ask(made))
    while not routes.the_link.sent:
        await asyncio.sleep(0)
    authority.gone = True
    made.recheck()
    status, chunks = await asyncio.wait_for(asking, PATIENCE_SECONDS)
    assert (status, error_of(await whole(chunks))["code"]) == (401, "unauthenticated")
    assert NO_RETRY in chunks.headers
    assert (made.live, made.slots.total("s")) == (0, 0)

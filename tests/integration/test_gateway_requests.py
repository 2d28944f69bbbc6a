"""Requests to the gateway of a running installation, on PostgreSQL: what is refused and how, what reaches the engine,
and where nothing of a secret is left. Rows G12, G13, G15, G16, G18 to G22, G24, G25, G29 and G30 of the list of
faults that other gateways' users reported."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from contract.scripted import Open, ScriptedInstallation
from ficc.protocol.content_coding import Coding
from raw_http import Answer, Client
from support import openai_shapes as shapes
from support import rows
from support.engine_answers import (
    DONE,
    EVENT,
    EVENTS,
    HEAD,
    PATIENCE_SECONDS,
    document,
    raw,
    request_bytes,
    until_idle,
)
from support.http import Http
from support.packing import PACK
from support.postgres import Postgres

pytestmark = pytest.mark.timeout(240)

ORIGIN = "https://app.example"
BODY_BYTES_MAX = 1 << 20
CONCURRENCY = 2
QUEUE_MAX = 1
DEADLINE_SECONDS = 30
CANARY = "canary" + "k7" * 20


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, database_settings: Callable[[str], dict[str, str]]
) -> Iterator[ScriptedInstallation]:
    settings = {
        **database_settings("postgresql"),
        "FICC_SERVER_ALLOWED_ORIGINS": json.dumps([ORIGIN]),
        "FICC_GATEWAY_BODY_BYTES_MAX": str(BODY_BYTES_MAX),
        "FICC_GATEWAY_QUEUE_MAX": str(QUEUE_MAX),
    }
    with ScriptedInstallation(tmp_path_factory.mktemp("requests"), settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def service(installation: ScriptedInstallation) -> dict[str, Any]:
    return installation.service("one", concurrency=CONCURRENCY, deadline_seconds=DEADLINE_SECONDS)


def exchange(installation: ScriptedInstallation, request: bytes) -> tuple[Answer, bytes]:
    """The first answer to these bytes, and what comes behind it until the connection ends."""
    with Client(installation.port) as sent:
        answer = sent.send(request).answer()
        sent.socket.shutdown(socket.SHUT_WR)
        return answer, sent.rest()


def post(installation: ScriptedInstallation, service_id: str, body: bytes, **headers: str) -> Any:
    sent = {"content-type": "application/json", **headers}
    return installation.http("POST", f"/inference/{service_id}/v1/chat/completions", body=body, headers=sent)


# Browsers.


@pytest.mark.parametrize("path", ["chat/completions", "embeddings", "models"])
def test_g12_a_preflight_needs_no_credentials(
    installation: ScriptedInstallation, service_id: str, path: str
) -> None:
    def preflight(origin: str) -> Answer:
        request = (
            f"OPTIONS /api/v1/inference/{service_id}/v1/{path} HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\n"
            "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"
        )
        return exchange(installation, request.encode())[0]

    ours, foreign = preflight(ORIGIN), preflight("https://evil.example")
    assert (ours.status, foreign.status) == (204, 204)
    assert ours["access-control-allow-origin"] == ORIGIN
    assert "authorization" in ours["access-control-allow-headers"]
    assert "POST" in ours["access-control-allow-methods"]
    assert not any(name.startswith("access-control-") for name, _ in foreign.headers)
    http = Http(installation.origin)
    refused = http("POST", f"/inference/{service_id}/v1/chat/completions", {}, headers={"origin": ORIGIN})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


# Compressed bodies.


both_codings = pytest.mark.parametrize("coding", PACK)


@both_codings
def test_g13_a_packed_body_reaches_the_engine_as_it_was(
    installation: ScriptedInstallation, service_id: str, coding: Coding
) -> None:
    body = json.dumps({"do": "echo", "model": "one", "text": "ä" * 1000}).encode()
    answer = post(installation, service_id, PACK[coding](body), **{"content-encoding": coding})
    assert answer.ok()["body"].encode() == body


@both_codings
def test_g13_a_small_body_that_unpacks_to_a_large_one_is_too_large(
    installation: ScriptedInstallation, service_id: str, coding: Coding
) -> None:
    bomb = PACK[coding](b'{"key": "bomb", "x": "' + b"x" * (200 << 20) + b'"}')
    assert len(bomb) < BODY_BYTES_MAX
    answer = post(installation, service_id, bomb, **{"content-encoding": coding})
    assert (answer.status, answer.code) == (413, "too_large")
    assert installation.seen(service_id, "bomb")["times"] == 0


def test_g13_a_body_that_is_packed_twice_is_not_unpacked(
    installation: ScriptedInstallation, service_id: str
) -> None:
    twice = gzip.compress(gzip.compress(b"{}"))
    answer = post(installation, service_id, twice, **{"content-encoding": "gzip, gzip"})
    assert (answer.status, answer.code) == (415, "unsupported_media_type")


@pytest.mark.parametrize("coding", ["br", "deflate", "compress"])
def test_g13_another_coding_is_refused_with_what_is_taken(
    installation: ScriptedInstallation, service_id: str, coding: str
) -> None:
    answer = post(installation, service_id, b"{}", **{"content-encoding": coding})
    assert (answer.status, answer.code) == (415, "unsupported_media_type")
    assert answer.headers["accept-encoding"] == "gzip, zstd"


# Framing.

AMBIGUOUS = {
    "a length and chunks": ["Content-Length: 5", "Transfer-Encoding: chunked"],
    "two lengths": ["Content-Length: 5", "Content-Length: 6"],
    "two lengths in one field": ["Content-Length: 5, 6"],
    "chunked with a tab": ["Transfer-Encoding: chunked\t"],
    "chunked twice": ["Transfer-Encoding: chunked, chunked"],
    "a space in front of the colon": ["Transfer-Encoding : chunked"],
    "a signed length": ["Content-Length: +5"],
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_g15_a_body_of_doubtful_length_ends_the_connection(
    installation: ScriptedInstallation, service_id: str, name: str
) -> None:
    smuggled = b"0\r\n\r\nGET /api/v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    request = request_bytes(installation, service_id, smuggled, *AMBIGUOUS[name])
    answer, behind = exchange(installation, request)
    assert answer.status == 400
    assert answer["connection"] == "close"
    assert behind == b""
    assert shapes.error(answer.body).code == "bad_http"


def test_g15_a_body_in_chunks_reaches_the_engine_with_a_length(
    installation: ScriptedInstallation, service_id: str
) -> None:
    body = b'{"do": "headers"}'
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in body) + b"0\r\nx-trailer: x\r\n\r\n"
    request = request_bytes(installation, service_id, chunks, "Transfer-Encoding: chunked")
    with Client(installation.port) as sent:
        answer = sent.send(request).answer()
    headers = json.loads(answer.body)["headers"]
    assert "transfer-encoding" not in headers
    assert int(headers["content-length"]) == len(body) + len('"model": "one", ')


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)], ids=["plain", "expect"])
def test_g16_a_body_over_the_limit_is_refused_before_it_is_read(
    installation: ScriptedInstallation, service_id: str, expect: tuple[str, ...]
) -> None:
    length = f"Content-Length: {BODY_BYTES_MAX + 1}"
    request = request_bytes(installation, service_id, b"", length, *expect)
    with Client(installation.port) as sent:
        answer = sent.send(request).answer()
    assert answer.status == 413
    assert shapes.error(answer.body).code == "too_large"


def test_g16_whoever_waits_to_be_asked_for_a_body_is_asked(
    installation: ScriptedInstallation, service_id: str
) -> None:
    body = b'{"do": "speak"}'
    request = request_bytes(
        installation, service_id, b"", f"Content-Length: {len(body)}", "Expect: 100-continue"
    )
    with Client(installation.port) as sent:
        assert sent.send(request).answer().status == 100
        assert sent.send(body).answer().status == 200


def test_g16_chunks_over_the_limit_are_refused_where_they_pass_it(
    installation: ScriptedInstallation, service_id: str
) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    request = request_bytes(installation, service_id, chunk * 17, "Transfer-Encoding: chunked")
    with Client(installation.port) as sent:
        answer = sent.send(request).answer()
    assert answer.status == 413
    assert shapes.error(answer.body).code == "too_large"


# The queue.


def test_g18_a_full_queue_says_when_to_come_back(installation: ScriptedInstallation, service_id: str) -> None:
    holding = [Open(installation, service_id, do="hang", stream=True) for _ in range(CONCURRENCY)]
    assert [one.answer().status for one in holding] == [200] * CONCURRENCY
    waiting = [Open(installation, service_id, key="waits") for _ in range(QUEUE_MAX)]
    found: list[Any] = []

    def refused() -> bool:
        """Whoever comes before those that wait would wait too, so it has little patience."""
        with Client(installation.port) as sent:
            sent.socket.settimeout(0.5)
            try:
                found.append(sent.send(request_bytes(installation, service_id, {"key": "late"})).answer())
            except TimeoutError:
                return False
        return True

    installation.until(refused, "a request is refused")
    (answer,) = found
    assert answer.status == 429
    assert shapes.error(answer.body).code == "queue_full"
    assert int(answer["retry-after"]) >= 1
    assert not answer.all("x-should-retry")  # no engine has seen it, so it may be sent again
    for one in holding:
        one.close()
    assert [one.answer().status for one in waiting] == [200] * QUEUE_MAX
    for one in waiting:
        one.close()
    until_idle(installation, service_id)
    assert installation.seen(service_id, "late")["times"] == 0


# Errors.

REFUSED: dict[str, tuple[str, str, Any, dict[str, str], int]] = {
    "no token": ("POST", "chat/completions", {}, {"authorization": ""}, 401),
    "an unknown token": ("POST", "chat/completions", {}, {"authorization": "Bearer ficc_no"}, 401),
    "another scheme": ("POST", "chat/completions", {}, {"authorization": "Basic eDp5"}, 401),
    "an unknown route": ("POST", "images/generations", {}, {}, 404),
    "an unknown model": ("GET", "models/nobody", None, {}, 404),
    "another model": ("POST", "chat/completions", {"model": "gpt-4o"}, {}, 404),
    "another method": ("GET", "chat/completions", None, {}, 405),
    "another media type": ("POST", "chat/completions", {}, {"content-type": "text/plain"}, 415),
    "no body": ("POST", "chat/completions", None, {}, 400),
    "a list": ("POST", "chat/completions", [], {}, 400),
    "no messages": ("POST", "chat/completions", {"messages": []}, {}, 400),
    "a capability that is not there": ("POST", "completions", {"prompt": "x"}, {}, 400),
    "a refusal of the engine": (
        "POST",
        "chat/completions",
        {"do": "raw", "pieces": ["HTTP/1.1 422 X\r\nContent-Length: 14\r\n\r\n", '{"detail": []}']},
        {},
        422,
    ),
    "a fault of the engine": ("POST", "chat/completions", {"do": "raw", "pieces": []}, {}, 502),
}


@pytest.mark.parametrize("name", REFUSED)
def test_g19_every_error_has_the_one_shape(
    installation: ScriptedInstallation, service_id: str, name: str
) -> None:
    method, route, body, headers, status = REFUSED[name]
    answer = installation.http(method, f"/inference/{service_id}/v1/{route}", body, headers=headers)
    assert answer.status == status, answer.body
    error = shapes.error(answer.body)
    assert error.code == answer.code


# What is no request.

NO_REQUEST = {
    "half a surrogate pair": (b'"messages": [{"role": "user", "content": "\\ud83d"}]', "messages[0].content"),
    "half a pair in a name": (b'"a": {"\\ud83d": 1}', "a"),
    "NaN": (b'"temperature": NaN', "byte"),
    "Infinity": (b'"a": [[-Infinity]]', "byte"),
    "a name twice": (b'"temperature": 1, "temperature": 2', "temperature"),
    "a name twice, deep": (b'"a": [{"b": {"seed": 1, "seed": 1}}]', "seed"),
    "a name twice, escaped": (b'"temperature": 1, "\\u0074emperature": 2', "temperature"),
    "nesting": (b'"a": ' + b"[" * 3000 + b"]" * 3000, "byte"),
    "nesting without an end": (b'"a": ' + b"[" * 3000, ""),
    "a long integer": (b'"seed": ' + b"7" * 400, "byte"),
    "a number without bounds": (b'"seed": 1e999', "1e999"),
    "no UTF-8": (b'"a": "\xff"', "byte"),
}


@pytest.mark.parametrize("stream", [b"false", b"true"], ids=["document", "stream"])
@pytest.mark.parametrize("name", NO_REQUEST)
def test_g20_what_is_no_json_is_refused_with_its_place_and_never_seen(
    installation: ScriptedInstallation, service_id: str, name: str, stream: bytes
) -> None:
    member, place = NO_REQUEST[name]
    answer = post(installation, service_id, b'{"key": "g20", "stream": %s, %s}' % (stream, member))
    assert (answer.status, answer.code) == (400, "invalid_json")
    assert place in (answer.param or "")
    assert shapes.error(answer.body).message
    assert installation.seen(service_id, "g20")["times"] == 0


@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], {}])
def test_g21_stream_is_a_boolean(installation: ScriptedInstallation, service_id: str, value: Any) -> None:
    answer = installation.chat(service_id, stream=value, key="g21")
    assert (answer.status, answer.code, answer.param) == (400, "invalid_body", "stream")
    assert installation.seen(service_id, "g21")["times"] == 0


def test_g21_stream_may_be_null(installation: ScriptedInstallation, service_id: str) -> None:
    answer = installation.chat(service_id, stream=None)
    assert answer.headers["content-type"] == "application/json"
    shapes.chat(answer.body)


# What reaches the engine.

UNKNOWN = {
    "members": '"chat_template_kwargs":{"enable_thinking":false},"x_y": null',
    "spelling": '"min_p" : 1.0e-1 , "seed":18446744073709551615,\n\t"a":-0.0, "text": "\\u00e4\\/\\ud83d\\ude00ä"',
    "content parts": (
        '"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image_url", '
        '"image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}]}]'
    ),
    "tools": (
        '"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object"}}}],'
        '"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": false'
    ),
    "a schema": (
        '"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true, '
        '"schema": {"type": "object", "properties": {"a": {"const": 1e2}}}}}'
    ),
    "choices": '"n": 2, "logprobs": true, "top_logprobs": 3, "logit_bias": {"50256": -100}',
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_g22_members_that_say_nothing_here_reach_the_engine_to_the_byte(
    installation: ScriptedInstallation, service_id: str, name: str
) -> None:
    body = '{"do": "echo", %s, "model": "%s"}'
    told = post(installation, service_id, (body % (UNKNOWN[name], "one")).encode()).ok()["body"]
    assert told == body % (UNKNOWN[name], "one")
    other = post(installation, service_id, (body % (UNKNOWN[name], "scripted")).encode()).ok()["body"]
    assert other == told  # the model's own name is replaced by the alias, and nothing else


def test_g24_what_an_engine_says_in_openais_shapes_keeps_its_shape(
    installation: ScriptedInstallation, service_id: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    likely = {"token": "a", "logprob": -0.5, "bytes": [97]}
    head = {"id": "chatcmpl-1", "created": 1, "model": "one"}
    choices = [
        {
            "index": 0,
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        },
        {
            "index": 1,
            "message": {"role": "assistant", "content": "a", "reasoning_content": "Hm"},
            "finish_reason": "stop",
            "logprobs": {"content": [{**likely, "top_logprobs": [likely]}]},
        },
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    told = {**head, "object": "chat.completion", "choices": choices, "usage": usage}
    answer = raw(installation, service_id, *document(told))
    assert json.loads(answer.body) == told
    shapes.chat(answer.body, choices=2)
    deltas: list[Any] = [
        {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None},
        {"index": 1, "delta": {"reasoning_content": "Hm"}, "finish_reason": None},
        {"index": 0, "delta": {"tool_calls": [{**call, "index": 0}]}, "finish_reason": None},
        {"index": 1, "delta": {}, "finish_reason": "stop"},
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
    ]
    chunks = [{**head, "object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
    chunks.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    text = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + DONE
    asked = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    streamed = raw(installation, service_id, EVENTS, text, **asked)
    assert streamed.body.decode() == text
    shapes.chat_stream(streamed.body, choices=2, usage=True)


# Embeddings.

INPUTS: dict[str, tuple[Any, int]] = {
    "a text": ("the cat sat", 1),
    "texts": (["the cat sat", "a dog ran"], 2),
    "tokens": ([1, 2, 3], 1),
    "lists of tokens": ([[1, 2], [3]], 2),
    "the most that OpenAI takes": (["x"] * 2048, 2048),
}


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
@pytest.mark.parametrize("name", INPUTS)
def test_g25_embeddings_of_every_form_of_input(
    installation: ScriptedInstallation, service_id: str, name: str, encoding: str | None
) -> None:
    given, count = INPUTS[name]
    body = {"model": "one", "input": given, **({} if encoding is None else {"encoding_format": encoding})}
    answer = installation.http("POST", f"/inference/{service_id}/v1/embeddings", body)
    assert answer.status == 200
    assert shapes.embeddings(answer.body, count=count) == [(0.5, 0.25)] * count
    written = answer.json["data"][0]["embedding"]
    expected = base64.b64encode(struct.pack("<2f", 0.5, 0.25)).decode()
    assert written == (expected if encoding == "base64" else [0.5, 0.25])


def test_g25_openais_client_reads_embeddings(client: openai.OpenAI, service_id: str) -> None:
    """Which it asks for in base64, unless told otherwise."""
    found = client.embeddings.create(model="one", input=["a", "b"])
    assert [one.embedding for one in found.data] == [[0.5, 0.25], [0.5, 0.25]]


# Secrets.


def canaries(installation: ScriptedInstallation, service_id: str) -> Iterator[bytes]:
    """What is answered where a secret is sent as credential, header, prompt and address on every way to a failure."""
    prompt = {"messages": [{"role": "user", "content": CANARY}], "stream": False}
    path = f"/inference/{service_id}/v1/chat/completions"
    for value in (f"Bearer {CANARY}", f"Basic {CANARY}", CANARY):
        yield installation.http("POST", path, prompt, headers={"authorization": value}).body
    for name in ("x-api-key", "api-key", "cookie", "openai-organization", "proxy-authorization"):
        wrong = {"messages": [], "user": CANARY}
        yield installation.http("POST", path, wrong, headers={name: CANARY}).body
    yield installation.http("POST", path, prompt, key=CANARY).body
    for body in (
        f'{{"messages": "{CANARY}"',
        f'{{"messages": "{CANARY}\\ud83d"}}',
        f'{{"messages": "{CANARY}", "a": 1, "a": 2}}',
        f'{{"messages": "{CANARY}", "stream": "x"}}',
        f'["{CANARY}"]',
    ):
        yield post(installation, service_id, body.encode()).body
    failures: list[list[str]] = [
        [],
        [HEAD + "Content-Length: 9\r\n\r\nnot json!"],
        ["HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n{}"],
        ["HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\n{}"],
    ]
    for pieces in failures:
        yield raw(installation, service_id, *pieces, **prompt).body
    yield raw(installation, service_id, EVENTS, EVENT, **{**prompt, "stream": True}).body
    yield raw(
        installation, service_id, EVENTS, 'error: {"message": "x"}\n\n', **{**prompt, "stream": True}
    ).body
    leaving = Open(installation, service_id, do="hang", **{**prompt, "stream": True})
    leaving.answer()
    leaving.close()
    dying = installation.service("dying", restart="never")["id"]
    yield raw(installation, dying, 0.2, end="die", **prompt).body
    installation.settled(dying, "failed")
    yield installation.chat(dying, **prompt).body
    installation.remove(dying)


def test_g29_a_secret_is_left_in_no_answer_log_or_row(
    installation: ScriptedInstallation, service_id: str
) -> None:
    answers = list(canaries(installation, service_id))
    until_idle(installation, service_id)
    assert answers
    assert not any(CANARY.encode() in answer for answer in answers)
    request_id = installation.chat(service_id).headers["x-request-id"]

    def recorded() -> bool:
        items = installation.http("GET", f"/inference/{service_id}/usage").ok()["items"]
        return any(one["request_id"] == request_id for one in items)

    installation.until(recorded, "the last request is recorded", seconds=PATIENCE_SECONDS)
    assert CANARY not in repr(rows.everything(installation.environment["FICC_DATABASE_URL"]))
    looked_at = [path for path in installation.directory.rglob("*") if path.is_file()]
    assert set(installation.logs.values()) <= set(looked_at)
    assert not [path for path in looked_at if CANARY.encode() in path.read_bytes()]


# Without a database. This comes last.


def test_g30_without_a_database_streams_go_on_and_nobody_is_taken_for_a_stranger(
    installation: ScriptedInstallation, service_id: str, postgres: Postgres
) -> None:
    pieces = [EVENTS, EVENT, 4.0, EVENT, DONE]
    running = Open(installation, service_id, do="raw", pieces=pieces, stream=True)
    answer = running.answer()
    assert answer.read(len(EVENT)) == EVENT.encode()
    postgres.stop()
    try:
        for pause in (2.5, 0.0):  # also past the time at which authority is read again
            refused = installation.http("GET", "/models")
            assert (refused.status, refused.code) == (503, "database_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            shapes.chat(installation.chat(service_id).body)
            time.sleep(pause)
        stranger = Http(installation.origin, "ficc_unknown")
        assert stranger("POST", f"/inference/{service_id}/v1/chat/completions", {}).status == 401
        assert answer.read().decode() == EVENT + DONE
    finally:
        postgres.start()
    running.close()
    installation.until(lambda: installation.http("GET", "/models").status == 200, "management is back")
    assert installation.chat(service_id).status == 200

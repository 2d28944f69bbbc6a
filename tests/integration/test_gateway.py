"""The gateway in a running installation, whose engine answers as a request tells it to: faults that other gateways'
users reported (rows G1 to G30 of that list), over HTTP and as OpenAI's client sees them."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.scripted import ScriptedInstallation
from support.engine_answers import (
    DONE,
    EVENT,
    EVENTS,
    HEAD,
    PATIENCE_SECONDS,
    every_record,
    fault_of,
    http_connection,
    raw,
    until_idle,
)
from support.http import Answer, Http, caller_with

pytestmark = pytest.mark.timeout(240)

DEADLINE_SECONDS = 4
KEEP_ALIVE_SECONDS = 0.4
ABORTS = 1000


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    settings = {"FICC_GATEWAY_KEEP_ALIVE_SECONDS": str(KEEP_ALIVE_SECONDS)}
    with ScriptedInstallation(tmp_path_factory.mktemp("gateway"), settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def service(installation: ScriptedInstallation) -> dict[str, Any]:
    return installation.service("one", concurrency=4, deadline_seconds=DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def client(installation: ScriptedInstallation, service: dict[str, Any]) -> openai.OpenAI:
    """As an application has it: it sends again what may be sent again."""
    return openai.OpenAI(
        base_url=installation.origin + service["endpoint"],
        api_key=installation.token,
        max_retries=2,
        timeout=20,
    )


# What breaks off, and what is no answer.

BROKEN = {
    "no head": [],
    "a head": [HEAD + "Content-Length: 100\r\n\r\n"],
    "inside the document": [HEAD + "Content-Length: 100\r\n\r\n", '{"a":'],
    "without length, empty": [HEAD + "\r\n"],
    "without length, cut": [HEAD + '\r\n{"choices":[{"mess'],
    "invalid JSON": [HEAD + "Content-Length: 9\r\n\r\nnot json!"],
    "HTML": ["HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\n<p>"],
    "204": ["HTTP/1.1 204 No Content\r\n\r\n"],
    "302": ["HTTP/1.1 302 Found\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n"],
    "304": ["HTTP/1.1 304 Not Modified\r\n\r\n"],
    "000": ["HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}"],
    "199": ["HTTP/1.1 199 X\r\nContent-Length: 2\r\n\r\n{}"],
    "101": ["HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n{}"],
}


@pytest.mark.parametrize("name", BROKEN)
def test_g28_a_client_never_repeats_what_an_engine_failed_to_answer(
    installation: ScriptedInstallation, service_id: str, client: openai.OpenAI, name: str
) -> None:
    answer = raw(installation, service_id, *BROKEN[name])
    assert (answer.status, answer.code) == (502, "engine_error")
    assert answer.headers["x-should-retry"] == "false"
    body = {"do": "raw", "pieces": BROKEN[name], "key": name}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "Hi"}], extra_body=body
        )
    assert caught.value.status_code == 502
    assert installation.seen(service_id, name)["times"] == 1


@pytest.mark.parametrize(
    "pieces", [[], [HEAD + "Content-Length: 9\r\n\r\n"], [HEAD + '\r\n{"a":']], ids=["", "head", "body"]
)
def test_g28_the_deadline_is_a_status_wherever_a_document_stands(
    installation: ScriptedInstallation, service_id: str, pieces: list[str]
) -> None:
    answer = raw(installation, service_id, *pieces, end="hang")
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"


def test_a_large_document_passes_whole(installation: ScriptedInstallation, service_id: str) -> None:
    document = json.dumps({"data": "x" * (1 << 19)})
    answer = raw(installation, service_id, HEAD + "\r\n", document)
    assert answer.json == json.loads(document)


# Faults inside a stream.


@pytest.mark.parametrize(
    "fault",
    [
        'error: {"code":500,"message":"boom","type":"server_error"}\n\n',
        'event: error\ndata: {"message":"boom"}\n\n',
        'data: {"error":{"message":"boom","code":500}}\n\n',
    ],
    ids=["field", "event", "data"],
)
def test_g3_a_fault_in_a_stream_reaches_openais_client_as_an_error(
    installation: ScriptedInstallation, service_id: str, client: openai.OpenAI, fault: str
) -> None:
    pieces = [EVENTS, EVENT, fault, DONE]
    answer = raw(installation, service_id, *pieces, stream=True)
    error = fault_of(answer.body, EVENT)
    assert (error["code"], error["type"], error["message"]) == ("engine_error", "server_error", "boom")
    stream = client.chat.completions.create(
        model="one",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"do": "raw", "pieces": pieces, "key": fault},
    )
    assert next(stream).choices[0].delta.content == "a"
    with pytest.raises(openai.APIError, match="boom"):
        next(stream)
    assert installation.seen(service_id, fault)["times"] == 1


def test_an_engine_that_stays_behind_done_is_let_go(
    installation: ScriptedInstallation, service_id: str
) -> None:
    began = time.monotonic()
    answer = raw(installation, service_id, EVENTS, EVENT, DONE, end="hang", stream=True, key="stays")
    assert answer.body.decode() == EVENT + DONE
    assert time.monotonic() - began < DEADLINE_SECONDS
    installation.until(lambda: installation.seen(service_id, "stays")["closed"], "the engine was left")


def test_g11_comments_keep_a_slow_stream_alive(installation: ScriptedInstallation, service_id: str) -> None:
    """Before the engine's head, and between its events."""
    pause = 4 * KEEP_ALIVE_SECONDS
    answer = raw(installation, service_id, pause, EVENTS, EVENT, pause, EVENT, DONE, stream=True)
    comment = ": keep-alive\n\n"
    before, between, behind = answer.body.decode().split(EVENT)
    assert answer.status == 200
    assert set(before.split("\n\n")) == set(between.split("\n\n")) == {": keep-alive", ""}
    assert before.startswith(comment)
    assert behind == DONE


def test_g4_a_request_that_the_engine_refuses_gets_a_plain_status(
    installation: ScriptedInstallation, service_id: str
) -> None:
    body = '{"error":{"message":"temperature is too high","param":"temperature","code":400}}'
    refusal = f"HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    answer = raw(installation, service_id, refusal, stream=True)
    assert (answer.status, answer.code, answer.param) == (400, "invalid_body", "temperature")
    assert answer.headers["content-type"] == "application/json"


# What passes untouched.


def test_g8_usage_that_was_asked_for_is_shown(
    installation: ScriptedInstallation, service_id: str, client: openai.OpenAI
) -> None:
    usage = 'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
    stream = client.chat.completions.create(
        model="one",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"do": "raw", "pieces": [EVENTS, EVENT, usage, DONE]},
    )
    last = list(stream)[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 4


def test_g24_tool_calls_reasoning_and_choices_pass_byte_for_byte(
    installation: ScriptedInstallation, service_id: str
) -> None:
    deltas = [
        {"index": 0, "delta": {"reasoning_content": "Hm…"}},
        {"index": 1, "delta": {"tool_calls": [{"index": 1, "id": "c", "function": {"arguments": '{"a'}}]}},
        {"index": 0, "delta": {}, "logprobs": {"content": [{"token": "a", "logprob": -0.1, "bytes": [97]}]}},
    ]
    events = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in deltas) + DONE
    assert raw(installation, service_id, EVENTS, events, stream=True).body.decode() == events
    document = json.dumps({"choices": deltas}, indent=1)
    answer = raw(installation, service_id, HEAD + f"Content-Length: {len(document)}\r\n\r\n", document)
    assert answer.body.decode() == document


def test_g17_no_header_of_a_client_reaches_the_engine(
    installation: ScriptedInstallation, service_id: str
) -> None:
    http = installation.http
    secret = {"x-api-key": "canary-1", "cookie": "canary=2", "x-other": "canary-3", "user-agent": "canary-4"}
    path = f"/inference/{service_id}/v1/chat/completions"
    told = http("POST", path, {"do": "headers"}, headers=secret).ok()["headers"]
    assert sorted(told) == [
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "host",
    ]
    assert "canary" not in json.dumps(told)
    assert http.token is not None
    assert http.token not in json.dumps(told)


def test_g14_nothing_gathers_a_stream(installation: ScriptedInstallation, service_id: str) -> None:
    """The first event arrives before the second is made, and the head tells proxies to do as much."""
    connection = http.client.HTTPConnection("127.0.0.1", installation.port, timeout=PATIENCE_SECONDS)
    body = json.dumps({"do": "hang", "stream": True})
    headers = {"authorization": f"Bearer {installation.token}", "content-type": "application/json"}
    connection.request("POST", f"/api/v1/inference/{service_id}/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert b"hello" in answer.read1()
    connection.close()
    answer.close()


# Who asks, and how.


def test_a_credential_is_sent_once(installation: ScriptedInstallation, service_id: str) -> None:
    for path in (f"/api/v1/inference/{service_id}/v1/models", "/api/v1/models"):
        with socket.create_connection(("127.0.0.1", installation.port), timeout=PATIENCE_SECONDS) as sock:
            token = f"Authorization: Bearer {installation.token}\r\n"
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{token}{token}\r\n".encode())
            head = sock.recv(65536)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"bad_http" in head


def test_nobody_without_the_scope_holds_a_body(installation: ScriptedInstallation, service_id: str) -> None:
    reader = caller_with(installation, "models:read")
    for path in (f"inference/{service_id}", "openai"):
        with socket.create_connection(("127.0.0.1", installation.port), timeout=PATIENCE_SECONDS) as sock:
            sock.sendall(
                f"POST /api/v1/{path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {reader.token}\r\nContent-Length: 8000000\r\n\r\n".encode()
            )
            assert sock.recv(65536).startswith(b"HTTP/1.1 403 ")


def test_an_encoded_slash_is_no_slash(installation: ScriptedInstallation, service_id: str) -> None:
    answer = installation.http("POST", f"/inference/{service_id}/v1/chat%2fcompletions", {})
    assert (answer.status, answer.code) == (404, "not_found")


# Large bodies.


@pytest.mark.parametrize("path", ["inference", "openai"])
def test_large_bodies_survive_the_death_of_the_process_that_reads_them(
    installation: ScriptedInstallation, service_id: str, path: str
) -> None:
    url = f"/inference/{service_id}/v1" if path == "inference" else "/openai/v1"
    body = {"model": "one", "text": "x" * 300_000}

    def ask() -> Answer:
        return installation.http("POST", f"{url}/chat/completions", body)

    ask().ok()
    (reader,) = children_of(installation.processes["controller"].pid)
    os.kill(reader, signal.SIGKILL)
    for _ in range(3):
        ask().ok()
    (other,) = children_of(installation.processes["controller"].pid)
    assert other != reader


def test_a_killed_controller_leaves_no_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ScriptedInstallation(tmp_path_factory.mktemp("killed")) as made:
        service = made.service("one")
        made.chat(service["id"], text="x" * 300_000).ok()
        (reader,) = children_of(made.processes["controller"].pid)
        made.kill("controller")
        made.until(lambda: not runs(reader), "the process that reads bodies has ended")


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Leaving.


def test_g26_a_thousand_aborts_leave_nothing_in_flight(
    installation: ScriptedInstallation, service_id: str
) -> None:
    chance = random.Random(1)
    path = f"/api/v1/inference/{service_id}/v1/chat/completions"
    asked = set()
    for number in range(ABORTS):
        do, stream = chance.choice(["speak", "hang", "pour"]), chance.random() < 0.7
        body = json.dumps({"do": do if stream or do != "pour" else "hang", "stream": stream}).encode()
        request = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {installation.token}\r\n"
            f"X-Request-Id: g26-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        cut = chance.randrange(1, len(request)) if number % 5 == 0 else len(request)
        if cut >= len(request) - len(body):
            asked.add(f"g26-{number}")  # its head was whole, so somebody asked
        with socket.create_connection(("127.0.0.1", installation.port), timeout=PATIENCE_SECONDS) as sock:
            sock.sendall(request[:cut])
            if chance.random() < 0.4:
                sock.settimeout(chance.random() * 0.01)
                with suppress(TimeoutError):
                    sock.recv(chance.randrange(1, 4096))
    until_idle(installation, service_id)
    assert installation.chat(service_id).status == 200
    found: list[str] = []

    def recorded() -> bool:
        found[:] = [one["request_id"] for one in every_record(installation, service_id)]
        return len([one for one in found if one.startswith("g26-")]) >= len(asked)

    installation.until(recorded, "every request is recorded", seconds=PATIENCE_SECONDS)
    assert sorted(one for one in found if one.startswith("g26-")) == sorted(asked)


def test_the_record_of_an_answer_names_what_its_headers_name(
    installation: ScriptedInstallation, service_id: str
) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    document = json.dumps({"choices": [], "usage": usage})
    answer = raw(installation, service_id, f"{HEAD}Content-Length: {len(document)}\r\n\r\n", 0.2, document)
    replica = installation.record(service_id)["replicas"][0]
    request_id = answer.headers["x-request-id"]

    def of_it() -> list[dict[str, Any]]:
        return [one for one in every_record(installation, service_id) if one["request_id"] == request_id]

    installation.until(of_it, "it is recorded", seconds=PATIENCE_SECONDS)
    (record,) = of_it()
    assert (record["prompt_tokens"], record["completion_tokens"], record["tokens"]) == (11, 5, "counted")
    assert (record["outcome"], record["status"], record["alias"]) == ("completed", 200, "one")
    assert record["total_ms"] >= record["first_byte_ms"] >= 200
    for name in ("generation", "model_revision", "plan_digest"):
        assert answer.headers["x-ficc-" + name.replace("_", "-")] == str(record[name]) == str(replica[name])
    assert record["attempt_id"] == replica["attempt_id"]


def test_a_token_with_limits_is_told_when_to_come_back(
    installation: ScriptedInstallation, service_id: str
) -> None:
    wanted = {
        "label": "limited",
        "scopes": ["inference:invoke"],
        "limits": {"requests_per_minute": 2, "tokens_per_minute": 1000},
    }
    made = installation.http("POST", "/tokens", wanted).ok(201)
    limited = Http(installation.origin, made["token"])
    path = f"/inference/{service_id}/v1/chat/completions"
    document = json.dumps({"usage": {"prompt_tokens": 400, "completion_tokens": 5}})
    body = {"do": "raw", "pieces": [f"{HEAD}Content-Length: {len(document)}\r\n\r\n", document]}
    refused = limited("POST", path, {"stream": "a refused request costs nothing"})
    assert refused.code == "invalid_body"
    answers = [limited("POST", path, body) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-remaining-tokens"] == "1000"
    assert 590 <= int(answers[1].headers["x-ratelimit-remaining-tokens"]) <= 700
    assert answers[2].code == "rate_limited"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    (shown,) = [t for t in installation.http("GET", "/tokens").ok()["items"] if t["id"] == made["id"]]
    assert shown["limits"] == wanted["limits"]

    def mine() -> list[str]:
        found = every_record(installation, service_id)
        return [one["code"] for one in found if one["credential_id"] == made["id"]]

    installation.until(lambda: len(mine()) >= 4, "all is recorded", seconds=PATIENCE_SECONDS)
    assert mine() == ["rate_limited", None, None, "invalid_body"]


def test_provenance_is_named_by_streams_and_by_errors_too(
    installation: ScriptedInstallation, service_id: str
) -> None:
    digest = installation.record(service_id)["replicas"][0]["plan_digest"]
    stream = raw(installation, service_id, EVENTS, EVENT, DONE, stream=True)
    error = raw(installation, service_id, HEAD + "Content-Length: 9\r\n\r\n", "not json!")
    assert (stream.status, error.status) == (200, 502)
    assert stream.headers["x-ficc-plan-digest"] == error.headers["x-ficc-plan-digest"] == digest


def test_a_place_in_the_queue_is_kept_when_the_service_drains(installation: ScriptedInstallation) -> None:
    service = installation.service("draining", concurrency=1, deadline_seconds=60)
    http: Http = installation.http
    path = f"/api/v1/inference/{service['id']}/v1/chat/completions"
    connections = []
    for pause in (2.0, 0.0):
        connection = http_connection(installation)
        pieces = [pause, HEAD + '\r\n{"served": true}']
        body = json.dumps({"do": "raw", "pieces": pieces})
        connection.request("POST", path, body, {"authorization": f"Bearer {http.token}"})
        connections.append(connection)
        time.sleep(0.3)
    installation.control(service["id"], "drain").ok(202)
    refused = installation.chat(service["id"])
    assert (refused.status, refused.code) == (503, "service_draining")
    for connection in connections:
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"served": True})
        connection.close()
    installation.settled(service["id"], "stopped")
    installation.remove(service["id"])

"""Streams through the gateway of a running installation: how they break, what their bytes look like, who leaves, and
who never reads. Rows G1, G2, G5 to G7, G9, G10 and G27 of the list of faults that other gateways' users reported."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from contract.scripted import Open, ScriptedInstallation
from raw_http import Client
from support.engine_answers import (
    CHUNKED,
    DONE,
    EVENT,
    EVENTS,
    HEAD,
    PATIENCE_SECONDS,
    every_record,
    fault_of,
    http_connection,
    raw,
    request_bytes,
    signal_engine,
    until_idle,
)

pytestmark = pytest.mark.timeout(240)

CONCURRENCY = 4
DEADLINE_SECONDS = 60
SHORT_DEADLINE_SECONDS = 8
GIANT_BYTES = 3 << 20
GREATER_BYTES = 48 << 20
GROWTH_BYTES_MAX = 8 << 20
"""By which a process may grow over a stream of any length: queues on its way, and what Python takes for a while."""
UNREAD_GROWTH_BYTES_MAX = 512 << 10
BUFFERS_BYTES_MAX = 16 << 20
"""What queues and the kernel's sockets hold of a stream that nobody reads."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path_factory.mktemp("streams")) as made:
        yield made


@pytest.fixture(scope="module")
def service(installation: ScriptedInstallation) -> dict[str, Any]:
    return installation.service("one", concurrency=CONCURRENCY, deadline_seconds=DEADLINE_SECONDS)


def chunk(text: str, declared: int | None = None) -> str:
    """A piece of a chunked body; one that is declared longer than it is has no end."""
    if declared is not None:
        return f"{declared:x}\r\n{text}"
    return f"{len(text.encode()):x}\r\n{text}\r\n"


def ask_for_bytes(installation: ScriptedInstallation, service_id: str, **body: Any) -> bytes:
    """Everything that the connection carries for a request, up to its end."""
    with Client(installation.port) as sent:
        return sent.send(request_bytes(installation, service_id, body)).rest()


# Engines that die.

BETWEEN_EVENTS = {
    "closed": [EVENTS, EVENT],
    "without the last chunk": [CHUNKED, chunk(EVENT)],
    "with a clean end": [CHUNKED, chunk(EVENT), "0\r\n\r\n"],
}


@pytest.mark.parametrize("name", BETWEEN_EVENTS)
def test_g1_an_end_between_two_events_is_told_as_an_error(
    installation: ScriptedInstallation, service_id: str, client: openai.OpenAI, name: str
) -> None:
    answer = raw(installation, service_id, *BETWEEN_EVENTS[name], stream=True)
    error = fault_of(answer.body, EVENT)
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    stream = client.chat.completions.create(
        model="one",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"do": "raw", "pieces": BETWEEN_EVENTS[name]},
    )
    assert next(stream).choices[0].finish_reason is None
    with pytest.raises(openai.APIError):
        next(stream)


INSIDE_AN_EVENT = {
    "inside its JSON": [EVENTS, EVENT, 'data: {"choices":[{"del'],
    "inside its name": [EVENTS, EVENT, "dat"],
    "behind its one end of line": [EVENTS, EVENT, EVENT.removesuffix("\n")],
    "inside a chunk": [CHUNKED, chunk(EVENT), chunk('data: {"choices"', 100)],
    "between two of its chunks": [CHUNKED, chunk(EVENT), chunk('data: {"choices"')],
}


@pytest.mark.parametrize("name", INSIDE_AN_EVENT)
def test_g2_an_end_inside_an_event_breaks_the_connection_and_adds_nothing(
    installation: ScriptedInstallation, service_id: str, name: str
) -> None:
    told = ask_for_bytes(installation, service_id, do="raw", pieces=INSIDE_AN_EVENT[name], stream=True)
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert EVENT.encode() in body
    assert not body.endswith(b"0\r\n\r\n")
    assert b"error" not in body
    assert b"[DONE]" not in body
    connection = http_connection(installation)
    connection.connect()
    request = request_bytes(
        installation, service_id, {"do": "raw", "pieces": INSIDE_AN_EVENT[name], "stream": True}
    )
    connection.sock.sendall(request)
    answer = http.client.HTTPResponse(connection.sock, method="POST")
    answer.begin()
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()


def test_g1_g2_the_death_of_the_engines_process_is_told_where_the_stream_stands(
    installation: ScriptedInstallation,
) -> None:
    service_id = installation.service("dying", replicas=2, restart="never")["id"]
    answer = raw(installation, service_id, EVENTS, EVENT, 0.2, end="die", stream=True)
    error = fault_of(answer.body, EVENT)
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    installation.settled(service_id, "degraded")
    pieces = [EVENTS, EVENT, 'data: {"choices"', 0.2]
    told = ask_for_bytes(installation, service_id, do="raw", pieces=pieces, end="die", stream=True)
    assert EVENT.encode() in told
    assert not told.endswith(b"0\r\n\r\n")
    assert b"error" not in told
    installation.settled(service_id, "failed")
    installation.remove(service_id)


# Bytes.

WRITTEN = {
    "comments": ": one\n\n" + EVENT + ":\n\n: " + "long " * 2000 + "\n\n" + EVENT + DONE,
    "no space": 'data:{"choices":[]}\n\ndata:[DONE]\n\n',
    "CRLF": 'data: {"choices":[]}\r\n\r\n: c\r\n\r\ndata: [DONE]\r\n\r\n',
    "CR": 'data: {"choices":[]}\r\rdata: [DONE]\r\r',
    "mixed": 'data: {"choices":[]}\r\n\ndata: {"choices":[]}\n\r\ndata: [DONE]\n\n',
    "several lines": 'data: {"choices":\ndata: []}\n\nid: 7\nretry: 10\ndata: {"choices":[]}\n\n' + DONE,
    "a comment inside": 'data: {"choices":\n: c\ndata: []}\n\n' + DONE,
    "a comment of [DONE]": ": data: [DONE]\n\n" + EVENT + DONE,
    "error in a text": 'data: {"choices":[],"x":"\\ndata: {\\"error\\": 1}"}\n\n' + DONE,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_g5_whatever_the_standard_allows_in_events_passes_as_it_is(
    installation: ScriptedInstallation, service_id: str, name: str
) -> None:
    answer = raw(installation, service_id, EVENTS, WRITTEN[name], stream=True)
    assert answer.status == 200
    assert answer.body.decode() == WRITTEN[name]


@pytest.mark.parametrize("name", ["comments", "CRLF", "several lines"])
def test_g5_openais_client_reads_events_and_no_comment(
    service_id: str, client: openai.OpenAI, name: str
) -> None:
    stream = client.chat.completions.create(
        model="one",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"do": "raw", "pieces": [EVENTS, WRITTEN[name]]},
    )
    expected = {"comments": ["a", "a"], "CRLF": [], "several lines": []}[name]
    assert [one.choices[0].delta.content for one in stream if one.choices] == expected


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_g6_characters_that_arrive_byte_by_byte_are_whole(
    installation: ScriptedInstallation, service_id: str, newline: str
) -> None:
    event = json.dumps({"choices": [{"delta": {"content": "😀é漢"}}]}, ensure_ascii=False)
    text = f"data: {event}{newline * 2}data: [DONE]{newline * 2}".encode()
    pieces: list[str | float] = [EVENTS]
    for byte in text:
        pieces += [chr(byte), 0.001]
    assert raw(installation, service_id, *pieces, stream=True).body == text


def test_g6_a_character_that_is_cut_in_two_is_one(
    installation: ScriptedInstallation, service_id: str, client: openai.OpenAI
) -> None:
    event = 'data: {"choices":[{"index":0,"delta":{"content":"😀"}}]}\n\n'.encode()
    cut = event.index("😀".encode()) + 2
    pieces = [EVENTS, event[:cut].decode("latin-1"), 0.2, event[cut:].decode("latin-1"), DONE]
    stream = client.chat.completions.create(
        model="one",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"do": "raw", "pieces": pieces},
    )
    assert [one.choices[0].delta.content for one in stream] == ["😀"]


# Size.


class Peaks:
    """By how much the controller's and the executor's memory grew at most."""

    def __init__(self, installation: ScriptedInstallation) -> None:
        self._pids = [installation.processes[name].pid for name in ("controller", "executor")]
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what there is (proc(5))
        self._before = [psutil.Process(pid).memory_info().rss for pid in self._pids]

    @property
    def growth(self) -> int:
        return max(peak(pid) - before for pid, before in zip(self._pids, self._before, strict=True))


def peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


@pytest.mark.root
def test_g7_an_event_of_any_size_passes_without_being_held(
    installation: ScriptedInstallation, service_id: str
) -> None:
    answer = installation.chat(service_id, do="giant", bytes=GIANT_BYTES, stream=True)
    events = answer.body.split(b"\n\n")
    assert (
        json.loads(events[0].removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "x" * GIANT_BYTES
    )
    assert events[1:] == [b"data: [DONE]", b""]
    peaks = Peaks(installation)
    greater = installation.chat(service_id, do="giant", bytes=GREATER_BYTES, stream=True)
    assert len(greater.body) == len(answer.body) - GIANT_BYTES + GREATER_BYTES
    assert greater.body.endswith(DONE.encode())
    assert peaks.growth < GROWTH_BYTES_MAX


@pytest.mark.root
def test_g10_a_stream_that_nobody_reads_is_held_nowhere(
    installation: ScriptedInstallation, service_id: str
) -> None:
    def unread(key: str) -> Open:
        """Until the engine cannot write any more."""
        opened = Open(installation, service_id, do="pour", stream=True, key=key)
        poured = [-1]

        def stands() -> bool:
            time.sleep(0.3)
            poured.append(installation.seen(service_id, key).get("poured", 0))
            return poured[-1] == poured[-2] > 0

        installation.until(stands, "the engine waits for its reader", seconds=PATIENCE_SECONDS)
        assert poured[-1] < BUFFERS_BYTES_MAX
        return opened

    warm = unread("warm")
    peaks = Peaks(installation)
    opened = unread("unread")
    print(f"grew by {peaks.growth} bytes")
    assert peaks.growth < UNREAD_GROWTH_BYTES_MAX
    assert installation.chat(service_id).status == 200
    for one in (warm, opened):
        one.close()
    installation.until(lambda: installation.seen(service_id, "unread")["closed"], "the engine was left")


# Leaving.


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["prefill", "decode"])
def test_g9_an_engine_is_left_as_soon_as_its_client_leaves(
    installation: ScriptedInstallation, service_id: str, stream: bool, begun: bool
) -> None:
    key = f"leaves {stream} {begun}"
    begin = [EVENTS, EVENT] if stream else ["HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"]
    neighbour = Open(
        installation, service_id, do="raw", pieces=[EVENTS, EVENT, 1.0, EVENT, DONE], stream=True
    )
    body = {"do": "raw", "pieces": begin if begun else [], "end": "hang", "stream": stream, "key": key}
    leaving = Open(installation, service_id, **body)
    if begun and stream:
        assert leaving.answer().read(len(EVENT)) == EVENT.encode()
    installation.until(lambda: installation.seen(service_id, key)["times"], "the engine has it")
    assert installation.seen(service_id, key)["closed"] == 0
    leaving.close()
    installation.until(lambda: installation.seen(service_id, key)["closed"], "the engine was left")
    assert neighbour.answer().read().decode() == EVENT + EVENT + DONE
    neighbour.close()
    until_idle(installation, service_id)


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
def test_g9_who_leaves_the_queue_never_reaches_the_engine(
    installation: ScriptedInstallation, service_id: str, stream: bool
) -> None:
    holding = [Open(installation, service_id, do="hang", stream=True) for _ in range(CONCURRENCY)]
    assert [one.answer().status for one in holding] == [200] * CONCURRENCY
    request_id, key = f"g9-queued-{stream}", f"queued {stream}"
    body = {"key": key, "stream": stream}
    with Client(installation.port) as leaving:
        leaving.send(request_bytes(installation, service_id, body, f"X-Request-Id: {request_id}"))
        time.sleep(0.3)
    found: list[dict[str, Any]] = []

    def recorded() -> bool:
        found[:] = [one for one in every_record(installation, service_id) if one["request_id"] == request_id]
        return bool(found)

    installation.until(recorded, "it is recorded", seconds=PATIENCE_SECONDS)
    assert found[0]["code"] == "client_gone"
    assert found[0]["attempt_id"] is None
    for one in holding:
        one.close()
    until_idle(installation, service_id)
    assert installation.seen(service_id, key)["times"] == 0


# A replica that stands still.


@pytest.mark.root
def test_g27_a_replica_that_was_stopped_delays_nobody_elses_requests(
    installation: ScriptedInstallation,
) -> None:
    service = installation.service("pair", replicas=2, deadline_seconds=SHORT_DEADLINE_SECONDS)
    service_id, stopped = service["id"], service["replicas"][0]["attempt_id"]

    def in_flight(count: int) -> bool:
        return sum(one["in_flight"] for one in installation.record(service_id)["replicas"]) == count

    signal_engine(stopped, signal.SIGSTOP)
    try:
        pieces = [1.5, HEAD + "\r\n{}"]  # long enough for both to be open at once, so each has a replica
        asked = [Open(installation, service_id, do="raw", pieces=pieces) for _ in range(2)]
        installation.until(lambda: in_flight(2), "both are open")
        installation.until(lambda: in_flight(1), "one is answered")
        for _ in range(20):
            assert installation.chat(service_id).status == 200
        answers = [one.answer() for one in asked]
        told = {answer.status: json.loads(answer.read()) for answer in answers}
        assert set(told) == {200, 504}
        assert told[504]["error"]["code"] == "deadline_exceeded"
        for one in asked:
            one.close()
    finally:
        signal_engine(stopped, signal.SIGCONT)
    until_idle(installation, service_id)
    installation.remove(service_id)

"""The edge seen from a socket: every limit at its value and one past, every refusal in one shape.

Rows of the list of reported faults: G15 (ambiguous framing), G16 (early 413), G19 (error shape),
A17 (a body that stops coming).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_app import PIECE, EdgeApp
from ficc.controller.edge import EdgeLimits
from ficc.controller.exchange import Exchange
from ficc.domain import ids
from ficc.protocol.http_request import CHUNK_OVERHEAD_BYTES_FREE
from raw_http import Answer, Client, Serving, Truncated, eventually, serving

GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
NOTICE_SECONDS_MAX = 2
"""Within which a client that left is noticed, on a busy machine."""


@pytest.fixture
def app() -> EdgeApp:
    return EdgeApp()


@pytest.fixture(scope="module")
def edge() -> Iterator[Serving]:
    """With default limits, for what needs no other."""
    with serving(EdgeApp()) as running:
        yield running


def get(path: bytes, *fields: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"GET %b HTTP/%b" % (path, version), b"Host: a", *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(path: bytes, body: bytes, *fields: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: a", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def refused(client: Client, method: str = "GET") -> Answer:
    """The error that the edge answers with; it is the last thing on the connection."""
    answer = client.answer(method)
    assert answer["connection"] == "close"
    assert len(answer["x-request-id"]) == ids.LENGTH
    assert client.closed()
    return answer


# ---- the head's limits


def head_of(size: int) -> bytes:
    return GET + b"X: " + b"y" * (size - len(GET) - 7) + b"\r\n\r\n"


def test_header_bytes(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(header_bytes_max=2000)) as edge:
        assert len(head_of(2000)) == 2000
        assert edge.ask(head_of(2000)).status == 200
        with edge.connect() as client:
            assert refused(client.send(head_of(2001))).code == "headers_too_large"


def test_header_bytes_of_a_head_without_end(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(header_bytes_max=2000)) as edge:
        unfinished = head_of(2010)
        with edge.connect() as client:
            client.send(unfinished[:1999]).socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.answer()
        with edge.connect() as client:
            assert refused(client.send(unfinished[:2000])).code == "headers_too_large"


def test_megabytes_of_headers_are_refused_and_the_answer_can_be_read(edge: Serving) -> None:
    with edge.connect() as client:
        client.send(b"GET / HTTP/1.1\r\n", *[b"X: %b\r\n" % (b"y" * 1000)] * 4000)
        assert refused(client).code == "headers_too_large"


def test_number_of_headers(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(headers_max=5)) as edge:
        assert edge.ask(get(b"/", *[b"X: y"] * 4)).status == 200
        with edge.connect() as client:
            assert refused(client.send(get(b"/", *[b"X: y"] * 5))).code == "headers_too_large"


def test_length_of_the_url(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(url_bytes_max=100)) as edge:
        assert edge.ask(get(b"/" + b"u" * 99)).status == 200
        for request in (get(b"/" + b"u" * 100), b"GET /" + b"u" * 200):
            with edge.connect() as client:
                assert refused(client.send(request)).code == "headers_too_large"


def test_a_silent_connection_is_closed_without_an_answer(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(header_seconds=0.2)) as edge, edge.connect() as client:
        assert client.closed()


def test_a_head_that_trickles_is_timed_as_a_whole(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(header_seconds=0.5, drain_seconds=0.1)) as edge:
        with edge.connect() as client:
            client.send(GET + b"\r", pause_seconds=0.1).send(b"\n")
            assert client.answer().status == 200
            client.send(b"GET / HTTP/1.1\r\n", pause_seconds=0.1)
            began = time.monotonic()
            with pytest.raises(OSError):  # the server has gone before all of this is sent
                client.send(*[b"x"] * 100, pause_seconds=0.05)
            assert time.monotonic() - began < 4
        with edge.connect() as client:
            assert refused(client.send(b"GET / HTTP/1.1\r\nHo")).code == "request_timeout"


def test_time_between_requests(app: EdgeApp) -> None:
    with (
        serving(app, EdgeLimits(keep_alive_seconds=0.3, header_seconds=10)) as edge,
        edge.connect() as client,
    ):
        for _ in range(3):
            assert client.send(get(b"/")).answer().status == 200
            time.sleep(0.1)
        assert client.closed()


# ---- the body's limits


def test_a_body_that_stops_coming(app: EdgeApp) -> None:
    """A17"""
    with serving(app, EdgeLimits(body_idle_seconds=0.3)) as edge, edge.connect() as client:
        client.send(post(b"/pieces", b"0123456789")[:-4])
        assert app.next_seen() == {"type": "http.request", "body": b"012345", "more_body": True}
        assert refused(client).code == "request_timeout"
        assert app.next_seen()["type"] == "http.disconnect"


def test_a_body_that_comes_in_time(app: EdgeApp) -> None:
    limits = EdgeLimits(body_idle_seconds=0.5, body_bytes_per_second_min=1)
    with serving(app, limits) as edge, edge.connect() as client:
        head, body = post(b"/", b"0123456789")[:-10], [bytes([c]) for c in b"0123456789"]
        client.send(head, *body, pause_seconds=0.1)
        assert client.answer().json["body"] == "0123456789"


def test_a_trickle_counts_as_a_pause(app: EdgeApp) -> None:
    limits = EdgeLimits(body_idle_seconds=0.4, body_bytes_per_second_min=1000, drain_seconds=0.1)
    with serving(app, limits) as edge, edge.connect() as client:
        began = time.monotonic()
        with pytest.raises(OSError):
            client.send(post(b"/", b"")[:-5] + b"999\r\n\r\n", *[b"x"] * 200, pause_seconds=0.05)
        assert time.monotonic() - began < 8


def test_chunk_extensions_do_not_keep_a_body_alive(app: EdgeApp) -> None:
    limits = EdgeLimits(body_idle_seconds=0.4, drain_seconds=0.1)
    with serving(app, limits) as edge, edge.connect() as client, pytest.raises(OSError):
        client.send(POST + CHUNKED + b"5;x=", *[b"x"] * 200, pause_seconds=0.05)


def test_a_live_body_may_pause(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(body_idle_seconds=0.1)) as edge, edge.connect() as client:
        client.send(post(b"/live", b"ab")[:-1])
        assert app.next_seen()["body"] == b"a"
        time.sleep(0.5)
        assert client.send(b"b").answer().status == 200
        assert app.next_seen()["body"] == b"b"


def test_a_body_that_stops_after_the_answer_began_cuts_it_off(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(body_idle_seconds=0.3)) as edge, edge.connect() as client:
        client.send(post(b"/duplex", b"ab")[:-1])
        with pytest.raises(Truncated):
            client.answer()


def test_an_application_that_does_not_wait_gives_the_body_time(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(body_idle_seconds=0.1)) as edge, edge.connect() as client:
        client.send(post(b"/gated", b"ab")[:-1])
        assert app.next_seen() == "gated"
        time.sleep(0.4)
        app.open_gate()
        assert client.answer().json == {"gated": True}


def test_an_application_may_take_its_time_once_the_body_is_there(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(body_idle_seconds=0.2)) as edge, edge.connect() as client:
        client.send(post(b"/late", b"ab")[:-1], b"b", pause_seconds=0.05)
        assert app.next_seen() == "read"
        time.sleep(0.5)
        app.open_gate()
        assert client.answer().status == 200


def test_a_body_that_nobody_reads_waits_outside(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            client.send(post(b"/gated", b"x" * 50_000_000))
        app.open_gate()
        assert client.answer().json == {"gated": True}


@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("where", ["extension", "trailer", "zeros"])
def test_overhead_of_chunks(app: EdgeApp, where: str, past: int) -> None:
    limit = 300
    allowed = limit + 2 * CHUNK_OVERHEAD_BYTES_FREE + past
    make: dict[str, Callable[[bytes], bytes]] = {
        "extension": lambda filler: b"5;%b\r\nhello\r\n0\r\n\r\n" % filler,
        "trailer": lambda filler: b"5\r\nhello\r\n0\r\nX:%b\r\n\r\n" % filler,
        "zeros": lambda filler: b"%b5\r\nhello\r\n0\r\n\r\n" % (b"0" * len(filler)),
    }
    body = make[where](b"x" * (allowed - len(make[where](b"")) + len(b"hello")))
    assert len(body) == allowed + len(b"hello")
    with serving(app, EdgeLimits(chunk_overhead_bytes_max=limit)) as edge, edge.connect() as client:
        client.send(POST + CHUNKED + body)
        if past:
            assert refused(client).code == "bad_http"
        else:
            echoed = client.answer().json
            assert echoed["body"] == "hello"
            assert [name for name, _ in echoed["headers"]] == ["host", "transfer-encoding"]


def test_signed_chunks_of_a_long_body_pass(edge: Serving) -> None:
    chunk = b"400;chunk-signature=" + b"f" * 64 + b"\r\n" + b"x" * 1024 + b"\r\n"
    answer = edge.ask(POST + CHUNKED, *[chunk] * 1500, b"0\r\n\r\n")
    assert len(answer.json["body"]) == 1500 * 1024


# ---- what is no HTTP, or two things at once

MALFORMED = {
    "bare LF in the request line": b"GET / HTTP/1.1\nHost: a\r\n\r\n",
    "bare LF everywhere": b"GET / HTTP/1.1\nHost: a\n\n",
    "bare LF behind a field": GET + b"X: 1\nY: 2\r\n\r\n",
    "bare LF at the end": GET + b"\n\r\n\r\n",
    "bare CR in a value": GET + b"X: 1\rY: 2\r\n\r\n",
    "bare LF in front": b"\n" + get(b"/"),
    "bare CR in front": b"\r" + get(b"/"),
    "folded line": GET + b"X: 1\r\n 2\r\n\r\n",
    "folded first field": b"GET / HTTP/1.1\r\n X: 1\r\nHost: a\r\n\r\n",
    "NUL in a value": GET + b"X: \0\r\n\r\n",
    "control character in a value": GET + b"X: \x01\r\n\r\n",
    "space before the colon": GET + b"X : 1\r\n\r\n",
    "field without a name": GET + b": 1\r\n\r\n",
    "field without a colon": GET + b"X\r\n\r\n",
    "name outside ASCII": GET + b"X\xff: 1\r\n\r\n",
    "two spaces behind the method": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "two spaces before the version": b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n",
    "space behind the version": b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    "tab behind the method": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "method in lower case": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "unknown method": b"FROBNICATE / HTTP/1.1\r\nHost: a\r\n\r\n",
    "method outside ASCII": b"G\xffT / HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/0.9 by name": b"GET / HTTP/0.9\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/2 with prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "RTSP": b"DESCRIBE / RTSP/1.0\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "absolute target": b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "target of a proxy": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT with a path": b"CONNECT /a HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk with GET": b"GET * HTTP/1.1\r\nHost: a\r\n\r\n",
    "target without a slash": b"GET a HTTP/1.1\r\nHost: a\r\n\r\n",
    "fragment": b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
    "target outside ASCII": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "query outside ASCII": b"GET /?\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: a\r\n\r\n",
    "two Hosts in HTTP/1.0": b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n",
    "empty Host": b"GET / HTTP/1.1\r\nHost: \r\n\r\n",
    "Host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "Host with user info": b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n",
    "Host with two names": b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "Host with a port that is none": b"GET / HTTP/1.1\r\nHost: a:b\r\n\r\n",
    "expectation": POST + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\n",
    "two expectations": POST + b"Expect: 100-continue\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed(edge: Serving, request_bytes: bytes) -> None:
    with edge.connect() as client:
        assert refused(client.send(request_bytes)).code == "bad_http"


LENGTHS = [b"+5", b"-5", b"5,5", b"0x5", b"", b"5 5", b"5\t", b"5 ", b"5.0", b"five", b"\xb2", b"9" * 30]
CODINGS = [
    b"chunked\t",
    b"chunked ",
    b"gzip, chunked",
    b"chunked, chunked",
    b"chunked, identity",
    b"identity",
    b"xchunked",
    b",chunked",
    b"chunked,",
    b"chunked;q=1",
    b'"chunked"',
    b"\x0bchunked",
    b"",
]
FRAMINGS = (
    [b"Content-Length: %b\r\n" % length for length in LENGTHS]
    + [b"Transfer-Encoding: %b\r\n" % coding for coding in CODINGS]
    + [
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n",
        b"content-length: 5\r\nCONTENT-LENGTH: 5\r\n",
    ]
)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_ambiguous_framing_closes_before_anything_behind_it_is_read(edge: Serving, framing: bytes) -> None:
    """G15"""
    smuggled = b"5\r\nhello\r\n0\r\n\r\n" + get(b"/smuggled")
    with edge.connect() as client:
        assert refused(client.send(POST + framing + b"\r\n" + smuggled)).code == "bad_http"


def test_transfer_encoding_in_http_1_0(edge: Serving) -> None:
    with edge.connect() as client:
        client.send(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert refused(client).code == "bad_http"


CHUNKS = [
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"5\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"+5\r\nhello\r\n0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"-1\r\n",
    b"\r\nhello\r\n0\r\n\r\n",
    b"fffffffffffffffff\r\n",
    b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nX: 1\n\r\n",
    b"5\r\nhello\r\n0\r\nX : 1\r\n\r\n",
    b"5\r\nhello\r\n0\r\nContent-Length: 3\r\n\r\n",
]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_malformed_chunks(app: EdgeApp, chunks: bytes) -> None:
    with serving(app) as edge, edge.connect() as client:
        answer = client.send(b"POST /pieces HTTP/1.1\r\nHost: a\r\n" + CHUNKED + chunks).answer()
        assert answer.code == "bad_http"
        assert client.closed()
        while app.next_seen()["type"] != "http.disconnect":
            pass


ACCEPTED = {
    "no body": (GET + b"\r\n", ""),
    "empty body": (POST + b"Content-Length: 0\r\n\r\n", ""),
    "POST without a length": (POST + b"\r\n", ""),
    "counted": (POST + b"Content-Length: 5\r\n\r\nhello", "hello"),
    "counted with zeros": (POST + b"Content-Length: 005\r\n\r\nhello", "hello"),
    "chunked": (POST + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", "hello"),
    "chunked in capitals": (POST + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "hello"),
    "many chunks": (POST + CHUNKED + b"1\r\nh\r\n04;a=b\r\nello\r\n0\r\nX: y\r\n\r\n", "hello"),
    "chunks that look like an end": (POST + CHUNKED + b"7\r\n0\r\n\r\n\r\n\r\n0\r\n\r\n", "0\r\n\r\n\r\n"),
    "GET with a body": (GET + b"Content-Length: 5\r\n\r\nhello", "hello"),
    "empty lines in front": (b"\r\n\r\n" + POST + b"Content-Length: 5\r\n\r\nhello", "hello"),
    "OPTIONS for the server": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", ""),
}


@pytest.mark.parametrize(("request_bytes", "body"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted_twice_on_one_connection(edge: Serving, request_bytes: bytes, body: str) -> None:
    with edge.connect() as client:
        for _ in range(2):
            answer = client.send(request_bytes).answer()
            assert answer.status == 200
            assert answer.json["body"] == body
            assert not answer.all("connection")


@pytest.mark.parametrize("body", [b"", b"hello"])
def test_a_client_that_wants_one_answer(edge: Serving, body: bytes) -> None:
    with edge.connect() as client:
        answer = client.send(post(b"/", body, b"Connection: x, Close")).answer()
        assert answer["connection"] == "close"
        assert client.closed()


HOSTS = [b"a", b"a:80", b"A-b.example.org:65535", b"127.0.0.1:1", b"[::1]", b"[::1]:8080", b"a_b", b" a \t"]


@pytest.mark.parametrize("host", HOSTS)
def test_hosts(edge: Serving, host: bytes) -> None:
    answer = edge.ask(b"GET / HTTP/1.1\r\nHost:%b\r\n\r\n" % host)
    assert answer.json["headers"] == [["host", host.decode().strip()]]


def test_what_the_application_is_told(edge: Serving) -> None:
    echoed = edge.ask(get(b"/a%20b/%C3%A9?q=%20&r", b"X-Two: 1 ", b"X-Two:2", b"X-Empty:")).json
    assert (echoed["method"], echoed["version"]) == ("GET", "1.1")
    assert (echoed["path"], echoed["query"]) == ("/a b/é", "q=%20&r")
    assert echoed["headers"] == [["host", "a"], ["x-two", "1"], ["x-two", "2"], ["x-empty", ""]]


def test_errors_for_head_have_no_body(edge: Serving) -> None:
    with edge.connect() as client:
        assert refused(client.send(b"HEAD http://a/ HTTP/1.1\r\nHost: a\r\n\r\n"), "HEAD").status == 400


# ---- request ids


def test_a_request_id_is_made(edge: Serving) -> None:
    answers = [edge.ask(get(b"/")) for _ in range(2)]
    made = [answer["x-request-id"] for answer in answers]
    assert all(ids.is_id(request_id) for request_id in made)
    assert made == [answer.json["request_id"] for answer in answers]
    assert len(set(made)) == 2


@pytest.mark.parametrize("own", [b"a", b"~" * 128, b'"{}<>'])
def test_a_usable_request_id_is_kept(edge: Serving, own: bytes) -> None:
    answer = edge.ask(get(b"/", b"X-Request-ID: " + own))
    assert answer["x-request-id"] == answer.json["request_id"] == own.decode()
    malformed = edge.ask(get(b"/", b"X-Request-ID: " + own, b"Host: b"))
    assert (malformed.code, malformed["x-request-id"]) == ("bad_http", own.decode())


@pytest.mark.parametrize("own", [b"~" * 129, b"a b", b"\xe9", b"", b"a\r\nX-Request-ID: a"])
def test_an_unusable_request_id_is_replaced(edge: Serving, own: bytes) -> None:
    assert ids.is_id(edge.ask(get(b"/", b"X-Request-ID: " + own))["x-request-id"])


def test_a_request_id_does_not_outlive_its_request(edge: Serving) -> None:
    with edge.connect() as client:
        client.send(get(b"/", b"X-Request-ID: mine"), b"nonsense")
        assert client.answer()["x-request-id"] == "mine"
        assert ids.is_id(refused(client)["x-request-id"])


def test_fields_of_the_connection_belong_to_the_edge(edge: Serving) -> None:
    answer = edge.ask(get(b"/own-fields", b"X-Request-ID: mine"))
    assert answer["x-request-id"] == "mine"
    assert answer["transfer-encoding"] == "chunked"
    assert not answer.all("connection")
    assert not answer.all("keep-alive")
    assert not answer.all("server")
    assert answer["date"]


# ---- versions, upgrades, expectations


def test_http_1_0_is_answered_until_the_connection_closes(edge: Serving) -> None:
    for path, body in ((b"/stream", PIECE + b"x" * 50_000 + b"end"), (b"/own-fields", b"{}")):
        answer = edge.ask(get(path, b"Connection: keep-alive", version=b"1.0"))
        assert answer.ended_by_close
        assert not answer.all("transfer-encoding")
        assert answer.body == body


def test_http_1_0_without_host_and_with_a_length(edge: Serving) -> None:
    with edge.connect() as client:
        head = b"POST / HTTP/1.0\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        client.send(head, b"hello", pause_seconds=0.1)
        answer = client.answer()
        assert (answer.json["version"], answer.json["body"]) == ("1.0", "hello")
        assert answer["connection"] == "close"
        assert client.closed()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_ignored_and_its_body_is_no_request(edge: Serving, protocol: bytes) -> None:
    """Java's HTTP client offers h2c with its first request, whatever the method."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + protocol, b"HTTP2-Settings: AAE")
    smuggled = get(b"/smuggled")
    with edge.connect() as client:
        client.send(post(b"/", smuggled, *offer), get(b"/", *offer), get(b"/last"))
        assert client.answer().json["body"] == smuggled.decode()
        assert [client.answer().json["path"] for _ in range(2)] == ["/", "/last"]


class Switched(asyncio.Protocol):
    """Stands where a WebSocket implementation would: shows what uvicorn hands over, then echoes."""

    def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.lower())


def test_a_websocket_is_handed_over(app: EdgeApp) -> None:
    offer = (b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket", b"X-Request-ID: mine")
    with serving(app, EdgeLimits(header_seconds=0.3, keep_alive_seconds=0.3), ws=Switched) as edge:
        with edge.connect() as client:
            client.send(get(b"/socket", *offer))
            assert client.line() == b"get /socket http/1.1"
            fields = iter(client.line, b"")
            assert {b"upgrade: websocket", b"x-request-id: mine"} <= set(fields)
            time.sleep(0.6)  # the edge's own limits no longer hold
            client.send(b"PING\r\n")
            assert client.line() == b"ping"
        with edge.connect() as client:
            assert refused(client.send(get(b"/socket", *offer[:2]) + b"early")).code == "bad_http"
        with edge.connect() as client:
            assert client.send(post(b"/", b"body", *offer)).answer().json["body"] == "body"


def test_100_continue_when_the_body_is_read(edge: Serving) -> None:
    request = post(b"/", b"hello", b"Expect: 100-Continue")
    with edge.connect() as client:
        assert client.send(request[:-5]).answer().status == 100
        assert client.send(b"hello").answer().json["body"] == "hello"
        assert client.send(request[:-5]).answer().status == 100
        assert client.send(b"hello").answer().json["body"] == "hello"


def test_100_continue_is_left_out_once_the_body_comes(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.send(post(b"/pieces", b"hello", b"Expect: 100-continue")[:-1])
        assert app.next_seen()["body"] == b"hell"
        time.sleep(0.1)
        assert client.send(b"o").answer().status == 200


def test_100_continue_is_left_out_once_the_answer_began(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.send(post(b"/duplex", b"hello", b"Expect: 100-continue")[:-5])
        while PIECE not in client._unread:
            assert client._more()
        client.send(b"hello")
        assert client.answer().body == PIECE * 2


def test_an_early_413_never_asks_for_the_body(app: EdgeApp) -> None:
    """G16"""
    with serving(app) as edge, edge.connect() as client:
        client.send(post(b"/refuse", b"x" * 9, b"Expect: 100-continue")[:-9])
        answer = client.answer()
        assert answer.code == "too_large"
        assert answer["connection"] == "close"
        assert client.closed()
        assert app.next_seen() == "http.disconnect"


# ---- early answers


def test_a_client_that_sends_all_first_can_read_an_early_answer(app: EdgeApp) -> None:
    """G16: closing at once would have the client's kernel drop the answer for a reset."""
    with serving(app) as edge, edge.connect() as client:
        client.send(post(b"/refuse", b"x" * 20_000_000))
        assert client.answer().code == "too_large"
        assert client.closed()


def test_bytes_drained_behind_an_early_answer(app: EdgeApp) -> None:
    with (
        serving(app, EdgeLimits(drain_bytes_max=100_000, drain_seconds=60)) as edge,
        edge.connect() as client,
    ):
        client.send(post(b"/refuse", b"x" * 1_000_000)[:200])
        assert app.next_seen() == "http.disconnect"
        client.send(b"x" * 99_999, b"x")
        time.sleep(0.3)
        assert edge.connections == 1
        client.send(b"x")
        eventually(lambda: edge.connections == 0)


def test_seconds_drained_behind_an_early_answer(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(drain_seconds=0.3)) as edge, edge.connect() as client:
        client.send(post(b"/refuse", b"x" * 1_000_000)[:200])
        assert client.answer()["connection"] == "close"
        assert client.closed()  # our half, so that the client knows
        assert edge.connections == 1
        eventually(lambda: edge.connections == 0)


def test_draining_ends_with_the_client(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(drain_seconds=60)) as edge, edge.connect() as client:
        client.send(b"nonsense\r\n\r\n")
        assert client.answer().code == "bad_http"
        client.socket.close()
        eventually(lambda: edge.connections == 0)


def test_an_unread_body_that_has_come_leaves_the_connection_open(edge: Serving) -> None:
    with edge.connect() as client:
        for _ in range(2):
            assert not client.send(post(b"/ignore-body", b"x" * 100)).answer().all("connection")


# ---- pipelining


def test_pipelined_requests_are_answered_in_order(edge: Serving) -> None:
    requests = [get(b"/%d" % n) if n % 3 else post(b"/%d" % n, b"x" * n) for n in range(100)]
    with edge.connect() as client:
        client.send(b"".join(requests))
        assert [client.answer().json["path"] for _ in requests] == [f"/{n}" for n in range(100)]


@pytest.mark.parametrize("past", [0, 1])
def test_bytes_of_pipelined_requests(app: EdgeApp, past: int) -> None:
    later = get(b"/later", b"X: " + b"y" * 400)
    with serving(app, EdgeLimits(pipelined_bytes_max=len(later) - past)) as edge, edge.connect() as client:
        client.send(get(b"/gated"))
        assert app.next_seen() == "gated"
        client.send(later)
        time.sleep(0.2)
        app.open_gate()
        answer = client.answer()
        assert answer.json == {"gated": True}
        if past:
            assert answer["connection"] == "close"
            assert client.closed()
        else:
            assert client.answer().json["path"] == "/later"


def test_the_last_answer_can_be_read_although_more_requests_come(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(pipelined_bytes_max=1000)) as edge, edge.connect() as client:
        client.send(get(b"/gated"))
        assert app.next_seen() == "gated"
        client.send(get(b"/later") * 1000)
        time.sleep(0.2)
        app.open_gate()
        client.send(*[get(b"/later") * 1000] * 10, pause_seconds=0.02)
        assert client.answer().json == {"gated": True}
        assert client.closed()


@pytest.mark.parametrize("path", [b"/wait", b"/flood"])
def test_a_flood_behind_a_request_is_cut(app: EdgeApp, path: bytes) -> None:
    limits = EdgeLimits(pipelined_bytes_max=1000, drain_bytes_max=1_000_000)
    with serving(app, limits) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
        client.send(get(path))
        if path == b"/wait":
            assert app.next_seen() == "waiting"
        else:
            eventually(lambda: app.flooded_bytes > 100_000)
        client.socket.settimeout(1)
        with pytest.raises(OSError):
            client.send(*[get(b"/x") * 1000] * 10_000)
        assert app.next_seen() in ("http.disconnect", "flood over")


def test_a_pipelined_head_is_timed_once_it_is_its_turn(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(header_seconds=0.3)) as edge, edge.connect() as client:
        client.send(get(b"/gated") + b"GET / HT")
        assert app.next_seen() == "gated"
        time.sleep(0.5)
        app.open_gate()
        assert client.answer().status == 200
        assert refused(client).code == "request_timeout"


# ---- clients that leave, and answers that are cut off


@pytest.mark.parametrize("leave", ["close", "reset", "shut down one side"])
def test_a_client_that_leaves_is_noticed_while_its_answer_is_made(app: EdgeApp, leave: str) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.send(post(b"/wait", b"body"))
        assert app.next_seen() == "waiting"
        left = time.monotonic()
        if leave == "close":
            client.socket.close()
        elif leave == "reset":
            client.reset()
        else:
            client.socket.shutdown(socket.SHUT_WR)
        assert app.next_seen() == "http.disconnect"
        assert time.monotonic() - left < NOTICE_SECONDS_MAX


def test_a_client_that_leaves_is_noticed_behind_pipelined_bytes(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.send(get(b"/wait") + get(b"/later") * 5000)
        assert app.next_seen() == "waiting"
        client.socket.close()
        assert app.next_seen() == "http.disconnect"


def test_a_client_that_leaves_inside_its_body(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.send(post(b"/pieces", b"body")[:-1])
        assert app.next_seen()["body"] == b"bod"
        client.socket.close()
        assert app.next_seen()["type"] == "http.disconnect"


def test_an_aborted_answer_has_no_last_chunk(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        client.send(get(b"/abort"))
        with pytest.raises(Truncated):
            client.answer()
        assert app.next_seen() == "http.disconnect"
    with serving(app) as edge, edge.connect() as client:
        wire = client.send(get(b"/abort")).rest()
        assert wire.endswith(b"\r\n\r\n%x\r\n%b\r\n" % (len(PIECE), PIECE))


def test_an_aborted_answer_to_http_1_0_is_a_reset(app: EdgeApp) -> None:
    """Where the close is the end of the answer, a close would say that it is whole."""
    with serving(app) as edge, edge.connect() as client:
        client.send(get(b"/abort?wait", version=b"1.0"))
        while PIECE not in client._unread:
            assert client._more()
        app.open_gate()
        with pytest.raises(ConnectionResetError):
            client.rest()


def test_abort_without_an_answer_and_behind_one(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as client:
        assert client.send(get(b"/abort-before")).rest() == b""
    with serving(app) as edge, edge.connect() as client:
        for _ in range(2):
            assert client.send(get(b"/abort-after")).answer().body == b"{}"


def test_chunks_of_all_sizes(edge: Serving) -> None:
    assert edge.ask(get(b"/stream")).body == PIECE + b"x" * 50_000 + b"end"


def test_answers_without_a_body(edge: Serving) -> None:
    with edge.connect() as client:
        assert client.send(get(b"/no-content")).answer().status == 204
        answer = client.send(b"HEAD /large HTTP/1.1\r\nHost: a\r\n\r\n").answer("HEAD")
        assert answer["content-length"] == "8000000"
        assert client.send(get(b"/say-close")).answer()["connection"] == "close"
        assert client.closed()


# ---- clients that do not read


def test_send_waits_for_a_client_that_does_not_read(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
        client.send(get(b"/flood"))
        eventually(lambda: app.flooded_bytes)
        taken = -1
        while taken != app.flooded_bytes:  # until it stands still
            taken = app.flooded_bytes
            time.sleep(0.3)
        assert taken < 500_000
        client.socket.recv(1 << 20)
        eventually(lambda: (client.socket.recv(1 << 20), app.flooded_bytes > taken)[1])
        client.reset()
        assert app.next_seen() == "flood over"


def test_half_a_close_ends_a_waiting_send(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
        client.send(get(b"/flood"))
        eventually(lambda: app.flooded_bytes > 100_000)
        client.socket.shutdown(socket.SHUT_WR)
        assert app.next_seen() == "flood over"


def test_seconds_that_a_client_may_not_read(app: EdgeApp) -> None:
    limits = EdgeLimits(write_stall_seconds=0.5)
    with serving(app, limits) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
        client.send(get(b"/flood"))
        assert app.next_seen() == "flood over"
        eventually(lambda: edge.connections == 0)


def test_a_slow_reader_is_no_stalled_one(app: EdgeApp) -> None:
    limits = EdgeLimits(write_stall_seconds=1.0, drain_seconds=0.2)
    with serving(app, limits) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
        client.send(get(b"/large", b"Connection: close"))
        assert app.next_seen() == "large sent"
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            assert client._more()
            time.sleep(0.02)
        assert client.answer().body == b"x" * 8_000_000


def test_a_pause_of_the_application_is_no_stalled_client(app: EdgeApp) -> None:
    with serving(app, EdgeLimits(write_stall_seconds=0.2)) as edge, edge.connect() as client:
        client.send(get(b"/burst"))
        while len(client._unread) < 4096 * 1000:
            assert client._more()
        time.sleep(0.8)
        app.open_gate()
        assert len(client.answer().body) == 4096 * 1000


def test_a_request_behind_an_answer_that_nobody_reads(app: EdgeApp) -> None:
    limits = EdgeLimits(write_stall_seconds=0.3)
    with serving(app, limits) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
        client.send(get(b"/large") + get(b"/flood"))
        assert app.next_seen() == "large sent"
        assert app.next_seen() == "flood over"


def test_an_answer_that_nobody_fetches_is_given_up(app: EdgeApp) -> None:
    limits = EdgeLimits(write_stall_seconds=0.3, keep_alive_seconds=0.3)
    for fields in ((), (b"Connection: close",)):
        with serving(app, limits) as edge, edge.connect(receive_buffer_bytes=16 * 1024) as client:
            client.send(get(b"/large", *fields))
            assert app.next_seen() == "large sent"
            eventually(lambda: edge.connections == 0)
            with pytest.raises((Truncated, ConnectionResetError)):
                client.answer()


# ---- applications that fail


@pytest.mark.parametrize("path", [b"/crash", b"/silent", b"/bad-header", b"/short", b"/long"])
def test_a_failing_application_is_answered_for(edge: Serving, path: bytes) -> None:
    """G19"""
    with edge.connect() as client:
        answer = client.send(get(path, b"X-Request-ID: mine")).answer()
        assert (answer.code, answer["x-request-id"], answer["connection"]) == ("internal", "mine", "close")
        assert b"canary" not in answer.body
        assert client.closed()


def test_an_application_that_fails_late_leaves_a_truncated_answer(edge: Serving) -> None:
    with edge.connect() as client, pytest.raises(Truncated):
        client.send(get(b"/crash-late")).answer()


def test_logs_name_the_request_and_keep_its_secrets(
    app: EdgeApp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    caplog.set_level(logging.INFO)
    secrets = (b"Authorization: Bearer canary", b"Cookie: canary", b"X-Request-ID: mine")
    with serving(app, access_log=True) as edge:
        assert edge.ask(get(b"/x?key=canary", *secrets)).status == 200
        assert edge.ask(get(b"/x?key=canary", *secrets, b"Host: canary")).code == "bad_http"
        assert edge.ask(get(b"/x?key=canary", b"canary", *secrets)).code == "bad_http"
        assert edge.ask(get(b"/silent?key=canary", *secrets)).code == "internal"
    assert '"GET /x HTTP/1.1" 200' in caplog.text
    assert "bad_http: The request must have exactly one Host header. (request mine)" in caplog.text
    assert "without an answer (request mine)" in caplog.text
    assert "canary" not in caplog.text


def test_as_many_connections_as_the_server_takes(app: EdgeApp) -> None:
    with serving(app, limit_concurrency=2) as edge, edge.connect() as one, edge.connect() as two:
        assert one.send(get(b"/")).answer().status == 200
        eventually(lambda: edge.connections == 2)
        with edge.connect() as three:
            answer = refused(three.send(get(b"/")))
            assert (answer.status, answer.code, answer["retry-after"]) == (503, "connections_full", "1")
        eventually(lambda: edge.connections == 2)
        assert two.send(get(b"/")).answer().status == 200


# ---- the end of the server


def test_the_server_stops_behind_the_answer_in_the_making(app: EdgeApp) -> None:
    with serving(app) as edge, edge.connect() as busy, edge.connect() as idle, edge.connect() as half:
        assert idle.send(get(b"/")).answer().status == 200
        half.send(b"GET / HT")
        busy.send(get(b"/gated") + get(b"/later"))
        assert app.next_seen() == "gated"
        edge.server.should_exit = True
        assert idle.closed()
        assert half.closed()
        app.open_gate()
        answer = busy.answer()
        assert (answer.json, answer["connection"]) == ({"gated": True}, "close")
        assert busy.closed()


def test_an_application_that_outlasts_the_servers_grace(app: EdgeApp) -> None:
    with serving(app, timeout_graceful_shutdown=1) as edge, edge.connect() as client:
        client.send(get(b"/gated"))
        assert app.next_seen() == "gated"
        edge.server.should_exit = True
        assert refused(client).code == "internal"


# ---- TLS, where closing takes two


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    files = {"ssl_keyfile": tmp_path / "key.pem", "ssl_certfile": tmp_path / "certificate.pem"}
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"], "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return files


def over_tls(client: Client) -> Client:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client.socket = context.wrap_socket(client.socket)
    return client


def test_tls(app: EdgeApp, certificate: dict[str, Path]) -> None:
    limits = EdgeLimits(drain_seconds=0.3, write_stall_seconds=0.3)
    with serving(app, limits, **certificate) as edge:
        with over_tls(edge.connect()) as client:
            client.send(post(b"/refuse", b"x" * 5_000_000))
            assert client.answer().code == "too_large"
            eventually(lambda: edge.connections == 0)  # although the client says no farewell
            assert app.next_seen() == "http.disconnect"
        with over_tls(edge.connect()) as client:
            client.send(get(b"/wait"))
            assert app.next_seen() == "waiting"
        assert app.next_seen() == "http.disconnect"
        with over_tls(edge.connect()) as client:
            client.send(get(b"/flood"))
            assert app.next_seen() == "flood over"
            eventually(lambda: edge.connections == 0)
        with over_tls(edge.connect()) as client, pytest.raises(Truncated):
            client.send(get(b"/abort")).answer()


def test_tls_on_a_port_without(edge: Serving) -> None:
    assert "http://" in edge.ask(MALFORMED["TLS"]).json["error"]["message"]
    with pytest.raises(ssl.SSLError):
        over_tls(edge.connect())


def test_an_answered_request_is_no_work_for_the_garbage_collector(app: EdgeApp) -> None:
    """Cycles of every request would cost a twentieth of the CPU of the whole gateway."""
    gc.collect()
    gc.disable()
    try:
        with serving(app) as edge, edge.connect() as client:
            for _ in range(20):
                assert client.send(get(b"/told")).answer().status == 200
            left = [one for one in gc.get_objects() if isinstance(one, Exchange)]
            assert len(left) == 1, "but the last, which the connection knows"
    finally:
        gc.enable()

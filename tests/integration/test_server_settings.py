"""What the settings of `server` do to a controller that was started with them."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.installation import Installation

PATIENCE_SECONDS = 20


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[Installation]:
    """A controller that takes two connections, and waits a moment for headers and bodies."""
    settings = {
        "FICC_SERVER_CONNECTIONS_MAX": "2",
        "FICC_SERVER_HEADER_SECONDS": "0.5",
        "FICC_SERVER_BODY_IDLE_SECONDS": "0.5",
    }
    made = Installation(tmp_path, settings=settings)
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


def test_one_connection_more_than_the_server_takes(hurried: Installation) -> None:
    kept = [http.client.HTTPConnection("127.0.0.1", hurried.port, PATIENCE_SECONDS) for _ in range(3)]
    try:
        for connection in kept[:2]:  # each is served, and stays open
            connection.request("GET", "/api/v1/health")
            assert json.loads(connection.getresponse().read())["status"] == "ok"
        kept[2].request("GET", "/api/v1/health")
        answer = kept[2].getresponse()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.read())["error"]["code"] == "connections_full"
    finally:
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    "unfinished",
    [
        b"GET /api/v1/health HTTP/1.1\r\nHost: loc",
        b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 9\r\n\r\n{",
    ],
    ids=["headers", "body"],
)
def test_what_stops_coming_is_ended(hurried: Installation, unfinished: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hurried.port), PATIENCE_SECONDS) as client:
        client.sendall(unfinished)
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer

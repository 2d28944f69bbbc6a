"""What tests of the gateway let the scripted engine answer, byte by byte, and what they look at afterwards."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract.scripted import ScriptedInstallation
from support.executor import leftovers
from support.http import Answer

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = "data: [DONE]\n\n"
PATIENCE_SECONDS = 20.0


def raw(installation: ScriptedInstallation, service_id: str, *pieces: str | float, **body: Any) -> Answer:
    """The answer to a request that the engine answers with these bytes."""
    return installation.chat(service_id, do="raw", pieces=pieces, **body)


def document(value: Any) -> list[str]:
    """The pieces of an engine's answer that is a document."""
    text = json.dumps(value)
    return [f"{HEAD}Content-Length: {len(text)}\r\n\r\n", text]


def fault_of(body: bytes, *events: str) -> dict[str, Any]:
    """The error at the end of a stream that has these events before it."""
    expected = "".join(events).encode()
    assert body.startswith(expected)
    last = body.removeprefix(expected)
    assert last.startswith(b"data: ")
    assert b"[DONE]" not in last
    error: dict[str, Any] = json.loads(last.removeprefix(b"data: "))["error"]
    return error


def until_idle(installation: ScriptedInstallation, service_id: str) -> None:
    installation.until(
        lambda: not any(one["in_flight"] for one in installation.record(service_id)["replicas"]),
        "nothing is in flight",
        seconds=PATIENCE_SECONDS,
    )


def every_record(installation: ScriptedInstallation, service_id: str) -> Iterator[dict[str, Any]]:
    """Of a service's requests, newest first."""
    query: dict[str, str] = {"limit": "200"}
    while True:
        page = installation.http("GET", f"/inference/{service_id}/usage", **query).ok()
        yield from page["items"]
        if page["next"] is None:
            return
        query["after"] = page["next"]


def http_connection(installation: ScriptedInstallation) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", installation.port, timeout=PATIENCE_SECONDS)


def request_bytes(
    installation: ScriptedInstallation, service_id: str, body: bytes | dict[str, Any], *headers: str
) -> bytes:
    """A chat request as it goes over the wire, with a length unless the headers say how long it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    framed = any(name in line.lower() for line in headers for name in ("content-length", "transfer-encoding"))
    lines = [
        f"POST /api/v1/inference/{service_id}/v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {installation.token}",
        *headers,
        *([] if framed else [f"Content-Length: {len(data)}"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def signal_engine(attempt_id: str, number: int) -> None:
    """To the payload of an attempt, not to the processes that hold its sandbox."""
    sent = 0
    for path in (Path(found).parent for found in leftovers(attempt_id) if found.startswith("/proc/")):
        program, *arguments = (path / "cmdline").read_bytes().split(b"\0")
        if b"bwrap" not in program and any(b"engine" in argument for argument in arguments):
            os.kill(int(path.name), number)
            sent += 1
    assert sent

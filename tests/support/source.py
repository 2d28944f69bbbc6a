"""A scripted HTTPS source on loopback, with an authority of its own.

Each path serves its content as a good server would, unless a behaviour was scripted for it: those are used up
one per request, in order. What was asked is kept in `requests`. One thread per connection; the normal path sends
large pieces of a memory map, so that it keeps up with a benchmark.

In a process of its own, with a file to serve or with as many random bytes as wanted:

    python -m support.source DIRECTORY (--file PATH | --bytes N [--count N]) [--port N]

prints one line of JSON ({"ca_file", "files": [{"url", "sha256", "bytes"}]}) and serves until it is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import mmap
import os
import re
import select
import signal
import socket
import ssl
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import trustme

HOSTS = ("localhost", "127.0.0.1", "::1", "source.test", "cdn.test", "elsewhere.test")
"""The names that the certificate is good for; those in `.test` need a resolver of the test's."""
SEND_BYTES = 1 << 20
HEAD_BYTES_MAX = 64 << 10
HANG_SECONDS_MAX = 120.0
_RANGE = re.compile(r"bytes=(\d+)-(\d*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What will be sent. Behaviours change it."""

    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview
    declared: int | None = None
    """The Content-Length to claim, where it is another than the body's."""
    stop_after: int | None = None
    """How much of the body is sent before `then` happens."""
    then: Literal["close", "reset", "hang"] = "close"
    chunked: bool = False
    piece_bytes: int = SEND_BYTES
    pause_seconds: float = 0.0
    """After each piece."""
    raw_head: bytes | None = None
    """Sent instead of a head that is made of the above."""


@dataclass(frozen=True, slots=True)
class Content:
    body: memoryview
    etag: str | None


Behaviour = Callable[[Request, Content, Answer], Answer]


# Behaviours.


def normal() -> Behaviour:
    return lambda request, content, answer: answer


def ignore_range(**headers: str) -> Behaviour:
    """A2: 200 and the whole file, whatever was asked for."""

    def whole(request: Request, content: Content, answer: Answer) -> Answer:
        kept = {k: v for k, v in answer.headers.items() if k != "content-range"}
        return Answer(200, kept | _fields(headers), content.body)

    return whole


def wrong_start(by: int) -> Behaviour:
    """A3: a part that starts `by` bytes beside what was asked for, and says so."""

    def shifted(request: Request, content: Content, answer: Answer) -> Answer:
        start, end = _asked(request, len(content.body))
        return _part(content, max(0, start + by), end, answer)

    return shifted


def wrong_total(total: int) -> Behaviour:
    """A3: the right part, of a file of another size."""

    def other(request: Request, content: Content, answer: Answer) -> Answer:
        start, end = _asked(request, len(content.body))
        return headers(content_range=f"bytes {start}-{end - 1}/{total}")(request, content, answer)

    return other


def close_early(after: int, how: Literal["close", "reset"] = "close") -> Behaviour:
    """A4: the connection ends after so many bytes of the body, cleanly or not."""
    return lambda request, content, answer: replace(answer, stop_after=after, then=how)


def gzipped() -> Behaviour:
    """A5."""

    def encoded(request: Request, content: Content, answer: Answer) -> Answer:
        return replace(
            answer, body=gzip.compress(answer.body), headers={**answer.headers, "content-encoding": "gzip"}
        )

    return encoded


def etag(value: str | None) -> Behaviour:
    """A6: the right bytes under another entity tag, If-Range ignored; None: without one."""

    def tagged(request: Request, content: Content, answer: Answer) -> Answer:
        start, end = _asked(request, len(content.body))
        return _part(replace(content, etag=value), start, end, answer)

    return tagged


def stall(after: int = 0) -> Behaviour:
    """A8: silence after so many bytes of the body, on an open connection."""
    return lambda request, content, answer: replace(answer, stop_after=after, then="hang")


def silent() -> Behaviour:
    """A8: not even a head."""
    return lambda request, content, answer: replace(answer, raw_head=b"", body=b"", stop_after=0, then="hang")


def status(code: int, body: bytes = b"", **more: str) -> Behaviour:
    return lambda request, content, answer: Answer(code, _fields(more), body)


def redirect(location: str, code: int = 302, **more: str) -> Behaviour:
    return status(code, b"moved", location=location, **more)


def unsatisfied(total: int | None) -> Behaviour:
    """416, with the size or without."""
    return status(416, **({} if total is None else {"content_range": f"bytes */{total}"}))


def one_more(chunked: bool = True) -> Behaviour:
    """A byte after the end of what the head promises."""

    def longer(request: Request, content: Content, answer: Answer) -> Answer:
        declared = None if chunked else len(answer.body)
        return replace(answer, body=bytes(answer.body) + b"x", chunked=chunked, declared=declared)

    return longer


def corrupt(at: int) -> Behaviour:
    """A11: one byte of the body is another."""

    def flipped(request: Request, content: Content, answer: Answer) -> Answer:
        body = bytearray(answer.body)
        body[at] ^= 0xFF
        return replace(answer, body=bytes(body))

    return flipped


def trickle(piece_bytes: int, pause_seconds: float) -> Behaviour:
    return lambda request, content, answer: replace(
        answer, piece_bytes=piece_bytes, pause_seconds=pause_seconds
    )


def chunked() -> Behaviour:
    """The right bytes, their length not told."""
    return lambda request, content, answer: replace(answer, chunked=True)


def headers(**more: str) -> Behaviour:
    return lambda request, content, answer: replace(answer, headers={**answer.headers, **_fields(more)})


def claim_length(declared: int) -> Behaviour:
    return lambda request, content, answer: replace(answer, declared=declared)


def raw(head: bytes) -> Behaviour:
    """These bytes, then the connection is closed."""
    return lambda request, content, answer: replace(answer, raw_head=head, body=b"", stop_after=0)


def slowly(head: bytes, piece_bytes: int, pause_seconds: float) -> Behaviour:
    """These bytes in place of an answer, a few at a time, and then silence."""
    return lambda request, content, answer: Answer(
        200,
        {},
        head,
        raw_head=b"",
        piece_bytes=piece_bytes,
        pause_seconds=pause_seconds,
        stop_after=len(head),
        then="hang",
    )


def both(*behaviours: Behaviour) -> Behaviour:
    """One after the other, on one request."""

    def combined(request: Request, content: Content, answer: Answer) -> Answer:
        for behaviour in behaviours:
            answer = behaviour(request, content, answer)
        return answer

    return combined


def _fields(given: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in given.items()}


# The good server.


def _asked(request: Request, size: int) -> tuple[int, int]:
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None:
        return 0, size
    return int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)


def _part(content: Content, start: int, end: int, answer: Answer) -> Answer:
    fields = {"accept-ranges": "bytes", "content-range": f"bytes {start}-{end - 1}/{len(content.body)}"}
    if content.etag is not None:
        fields["etag"] = content.etag
    return replace(answer, status=206, headers=fields, body=content.body[start:end])


def good_answer(request: Request, content: Content | None) -> Answer:
    """As RFC 9110 has it, for a GET of one range or of none."""
    if content is None:
        return Answer(404, {}, b"there is no such file")
    size = len(content.body)
    fields = {"accept-ranges": "bytes"} | ({} if content.etag is None else {"etag": content.etag})
    whole = Answer(200, fields, content.body)
    if "range" not in request.headers or request.headers.get("if-range", content.etag) != content.etag:
        return whole
    start, end = _asked(request, size)
    if start >= size:
        return Answer(416, {"content-range": f"bytes */{size}"}, b"")
    return _part(content, start, end, whole)


class Source:
    """Use as a context manager, or `start` and `stop`."""

    def __init__(
        self, directory: Path, *, port: int = 0, maximum_version: ssl.TLSVersion | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.ca_file = directory / "ca.pem"
        self.requests: list[Request] = []
        self._contents: dict[str, Content] = {}
        self._scripts: defaultdict[str, deque[Behaviour]] = defaultdict(deque)
        self._always: dict[str, Behaviour] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        for path in (directory, self.ca_file):
            path.chmod(path.stat().st_mode | 0o055)  # a controller has an account of its own
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if maximum_version is not None:
            with warnings.catch_warnings():  # old versions are wanted here
                warnings.simplefilter("ignore", DeprecationWarning)
                self._tls.minimum_version = ssl.TLSVersion.TLSv1
                self._tls.maximum_version = maximum_version
            self._tls.set_ciphers("ALL:@SECLEVEL=0")
        authority.issue_cert(*HOSTS).configure_cert(self._tls)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="source", daemon=True)

    def __enter__(self) -> Source:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Source:
        self._accepting.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)
        self.drop_connections()

    def drop_connections(self) -> None:
        """Cut every connection there is."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._connections)

    # What it serves.

    def url(self, path: str, host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes | memoryview, *, etag: str | None = '"v1"') -> str:
        """Serve these bytes under a path, which may have a query; its URL."""
        self._contents[path] = Content(memoryview(body), etag)
        return self.url(path)

    def serve_file(self, path: str, file: Path, *, etag: str | None = '"v1"') -> str:
        with file.open("rb") as opened:
            return self.serve(
                path, memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)), etag=etag
            )

    def script(self, path: str, *behaviours: Behaviour) -> None:
        """What becomes of the next requests for a path, one after the other."""
        with self._lock:
            self._scripts[path].extend(behaviours)

    def always(self, path: str, behaviour: Behaviour | None) -> None:
        """What becomes of every request for a path that nothing is scripted for; None: nothing again."""
        with self._lock:
            if behaviour is None:
                self._always.pop(path, None)
            else:
                self._always[path] = behaviour

    def reset(self) -> None:
        """Forget contents, scripts, requests and connections."""
        self.drop_connections()
        with self._lock:
            self._connections.clear()
            self._contents.clear()
            self._scripts.clear()
            self._always.clear()
            self.requests.clear()

    def asked(self, path: str) -> list[Request]:
        """The requests for a path, the first first."""
        with self._lock:
            return [request for request in self.requests if request.path == path]

    # How it serves.

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(HANG_SECONDS_MAX)
            with self._tls.wrap_socket(plain, server_side=True) as connection:
                with self._lock:
                    self._connections.add(connection)
                try:
                    while self._answer_one(connection):
                        pass
                finally:
                    with self._lock:
                        self._connections.discard(connection)

    def _answer_one(self, connection: ssl.SSLSocket) -> bool:
        """Whether another request may follow."""
        request = _read_request(connection)
        if request is None:
            return False
        with self._lock:
            self.requests.append(request)
            script = self._scripts[request.path]
            behaviour = script.popleft() if script else self._always.get(request.path)
        content = self._contents.get(request.path)
        answer = good_answer(request, content)
        if behaviour is not None:
            answer = behaviour(request, content or Content(memoryview(b""), None), answer)
        return _send(connection, request, answer)


def _read_request(connection: ssl.SSLSocket) -> Request | None:
    head = b""
    while b"\r\n\r\n" not in head:
        piece = connection.recv(8192)
        if not piece or len(head) > HEAD_BYTES_MAX:
            return None
        head += piece
    first, *lines = head.decode("latin-1").split("\r\n\r\n", 1)[0].split("\r\n")
    method, path, _ = first.split(" ")
    fields = (line.partition(":") for line in lines)
    return Request(method, path, {name.lower(): value.strip() for name, _, value in fields})


def _send(connection: ssl.SSLSocket, request: Request, answer: Answer) -> bool:
    body = memoryview(b"" if request.method == "HEAD" else answer.body)
    connection.sendall(_head(answer) if answer.raw_head is None else answer.raw_head)
    until = len(body) if answer.stop_after is None else min(len(body), answer.stop_after)
    for at in range(0, until, answer.piece_bytes):
        piece = body[at : min(until, at + answer.piece_bytes)]
        connection.sendall(b"%x\r\n%s\r\n" % (len(piece), bytes(piece)) if answer.chunked else piece)
        if answer.pause_seconds:
            time.sleep(answer.pause_seconds)
    if answer.stop_after is None:
        if answer.chunked and request.method != "HEAD":
            connection.sendall(b"0\r\n\r\n")
        return answer.declared is None
    if answer.then == "hang":
        _until_closed(connection)
    elif answer.then == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return False


def _head(answer: Answer) -> bytes:
    fields = dict(answer.headers)
    if answer.chunked:
        fields["transfer-encoding"] = "chunked"
    else:
        fields["content-length"] = str(len(answer.body) if answer.declared is None else answer.declared)
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _until_closed(connection: ssl.SSLSocket) -> None:
    """Send nothing until the other side goes, or the source is stopped."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poller.poll(HANG_SECONDS_MAX * 1000)


# In a process of its own.


def main() -> None:
    parser = argparse.ArgumentParser(prog="support.source")
    parser.add_argument("directory", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--file", type=Path)
    what.add_argument("--bytes", type=int)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    given = parser.parse_args()
    files: list[Path] = [given.file] if given.file else []
    if given.file is None:
        files = [given.directory / f"content{number}" for number in range(given.count)]
        for file in files:
            write_random(file, given.bytes)
    with Source(given.directory, port=given.port) as source:
        facts: list[dict[str, Any]] = []
        for file in files:
            url = source.serve_file("/" + file.name, file)
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            facts.append({"url": url, "sha256": digest, "bytes": file.stat().st_size})
        print(json.dumps({"ca_file": str(source.ca_file), "files": facts}), flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


def write_random(file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        for at in range(0, size, 16 << 20):
            opened.write(os.urandom(min(16 << 20, size - at)))


if __name__ == "__main__":
    main()

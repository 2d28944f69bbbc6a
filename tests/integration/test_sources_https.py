"""Sources over real TLS: what a scripted one does, what is made of it, and every wall (A20, A21)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path

import pytest

from ficc.controller.sources.addresses import Walls
from ficc.controller.sources.https import (
    ERROR_BYTES_MAX,
    HEAD_BYTES_MAX,
    REDIRECTS_MAX,
    Https,
    Resolver,
    Response,
)
from ficc.domain.errors import Refused
from ficc.domain.fetching import Answer, Body, Restart, Retry, Wanted, check_answer
from support import source as scripted
from support.source import Source

LOOPBACK = (ip_network("127.0.0.0/8"),)
STALL_SECONDS = 1.0
"""Where silence is what is tested."""
PATIENCE_SECONDS = 30.0
"""Everywhere else: more than a busy machine takes."""
NAMES = {"source.test": "127.0.0.1", "cdn.test": "127.0.0.1", "elsewhere.test": "127.0.0.1"}
SECRET = "signature-5b1c9d"
CONTENT = bytes(range(256)) * 12_000  # 3 MB


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with Source(tmp_path_factory.mktemp("source")) as source:
        yield source


@pytest.fixture
def source(authority: Source) -> Source:
    """The source, with nothing left of an earlier test's script."""
    authority.reset()
    authority.serve("/file", CONTENT)
    return authority


class Names:
    """A resolver that knows the test's names, and counts."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        """What it says, lookup by lookup; without any, what `NAMES` has."""
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if self.answers:
            return self.answers.pop(0)
        if host not in NAMES:
            raise OSError(-2, "Name or service not known")
        return [NAMES[host]]


@asynccontextmanager
async def client(
    source: Source, names: Resolver | None = None, *, stall_seconds: float = PATIENCE_SECONDS, **walls: object
) -> AsyncIterator[Https]:
    members: dict[str, object] = {"allowed_networks": LOOPBACK, "ca_file": source.ca_file, **walls}
    https = Https(Walls(stall_seconds=stall_seconds, **members), resolver=names or Names())  # type: ignore[arg-type]
    try:
        yield https
    finally:
        await https.close()


async def fetched(https: Https, url: str, **arguments: object) -> tuple[Response, bytes]:
    async with https.open(url, **{"headers": {}, **arguments}) as response:  # type: ignore[arg-type]
        return response, b"".join([piece async for piece in response.chunks()])


async def refusal(https: Https, url: str, **arguments: object) -> Refused:
    with pytest.raises(Refused) as refused:
        await fetched(https, url, **arguments)
    return refused.value


async def taken(https: Https, url: str, late_seconds: float = 0) -> tuple[bytes, Refused | None]:
    """What came of a body, and the refusal it ended with. The body is taken so much after its head."""
    came = bytearray()
    try:
        async with https.open(url, headers={}) as response:
            await asyncio.sleep(late_seconds)
            async for piece in response.chunks():
                came.extend(piece)
    except Refused as refused:
        return bytes(came), refused
    return bytes(came), None


# What comes.


async def test_a_file_comes_whole_over_a_connection_that_is_kept(source: Source) -> None:
    async with client(source, names := Names()) as https:
        for _ in range(3):
            response, body = await fetched(https, source.url("/file", "source.test"))
            assert (response.status, response.host, body == CONTENT) == (200, "source.test", True)
            assert response.headers["etag"] == '"v1"'
        assert names.asked == ["source.test"]  # once per connection


async def test_a18_what_is_done_for_a_source_does_not_hold_this_loop(source: Source) -> None:
    here = threading.Event()

    async def names(host: str, port: int) -> Sequence[str]:
        assert here.wait(PATIENCE_SECONDS), "this loop went on meanwhile"
        return ["127.0.0.1"]

    async with client(source, names) as https:
        asking = asyncio.create_task(fetched(https, source.url("/file", "source.test")))
        await asyncio.sleep(0.01)
        here.set()
        _, body = await asking
    assert body == CONTENT


async def test_a_range_is_asked_for_in_its_plain_form(source: Source) -> None:
    wanted = Wanted(1000, 5000, len(CONTENT), '"v1"')
    async with client(source) as https:
        response, body = await fetched(https, source.url("/file", "source.test"), headers=wanted.headers)
    assert check_answer(wanted, response.status, response.headers, now=0) == Body(
        1000, 5000, len(CONTENT), '"v1"'
    )
    assert body == CONTENT[1000:5000]
    asked = source.asked("/file")[0].headers
    assert (asked["range"], asked["accept-encoding"], asked["if-range"]) == (
        "bytes=1000-4999",
        "identity",
        '"v1"',
    )
    assert "cookie" not in asked
    assert "authorization" not in asked


async def test_head_brings_headers_alone(source: Source) -> None:
    async with client(source) as https:
        response, body = await fetched(https, source.url("/file", "source.test"), method="HEAD")
    assert (response.status, response.headers["content-length"], body) == (200, str(len(CONTENT)), b"")


SIZE = len(CONTENT)
OTHER_STATUS = Refused("source_unavailable", "")
MISMATCH = Refused("source_mismatch", "")


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        pytest.param(scripted.normal(), Body, id="the part"),
        pytest.param(scripted.chunked(), Body, id="the part, of a length not told"),
        pytest.param(scripted.ignore_range(), Restart, id="A2 the whole file"),
        pytest.param(scripted.wrong_start(-100), Retry, id="A3 an earlier start"),
        pytest.param(scripted.wrong_start(100), Retry, id="A3 a later start"),
        pytest.param(scripted.wrong_total(SIZE + 1), MISMATCH, id="A3 another total"),
        pytest.param(scripted.gzipped(), Retry, id="A5 gzip"),
        pytest.param(scripted.etag('"v2"'), Restart, id="A6 another strong ETag"),
        pytest.param(scripted.etag('W/"v2"'), Body, id="A6 a weak ETag"),
        pytest.param(scripted.etag(None), Body, id="A6 no ETag"),
        pytest.param(scripted.unsatisfied(SIZE), Retry, id="A1 416 of the declared size"),
        pytest.param(scripted.unsatisfied(500), MISMATCH, id="A1 416 of a shorter file"),
        pytest.param(scripted.status(404), OTHER_STATUS, id="404"),
        pytest.param(scripted.status(503, retry_after="7"), Retry, id="503"),
        pytest.param(scripted.claim_length(SIZE), Retry, id="a length that contradicts"),
    ],
)
async def test_what_a_source_answers_to_a_range_is_judged(
    source: Source, behaviour: scripted.Behaviour, expected: type | Refused
) -> None:
    wanted = Wanted(1000, SIZE, SIZE, '"v1"')
    source.script("/file", behaviour)
    answer: Answer | Refused
    async with (
        client(source) as https,
        https.open(source.url("/file", "source.test"), headers=wanted.headers) as response,
    ):
        try:
            answer = check_answer(wanted, response.status, response.headers, now=time.time())
        except Refused as refused:
            answer = refused
        body = b"".join([piece async for piece in response.chunks()]) if isinstance(answer, Body) else None
    if isinstance(expected, Refused):
        assert isinstance(answer, Refused)
        assert answer.code == expected.code
    else:
        assert isinstance(answer, expected)
    assert body is None or body == CONTENT[1000:]


async def test_a6_a_file_that_changed_comes_whole_to_if_range(source: Source) -> None:
    wanted = Wanted(1000, SIZE, SIZE, '"v0"')
    async with client(source) as https:
        response, body = await fetched(https, source.url("/file", "source.test"), headers=wanted.headers)
    answer = check_answer(wanted, response.status, response.headers, now=0)
    assert isinstance(answer, Restart)
    assert answer.reason.code == "source_changed"
    assert answer.body == Body(0, SIZE, SIZE, '"v1"')
    assert body == CONTENT


async def test_a5_an_encoded_body_is_handed_out_as_it_came(source: Source) -> None:
    """The decision is made on the header; nothing inflates what an attacker deflated."""
    source.script("/file", scripted.gzipped())
    async with client(source) as https:
        response, body = await fetched(https, source.url("/file", "source.test"))
    assert response.headers["content-encoding"] == "gzip"
    assert body[:2] == b"\x1f\x8b"
    assert len(body) < SIZE // 10


async def test_one_byte_too_many_is_seen_when_the_length_is_not_told(source: Source) -> None:
    source.script("/file", scripted.one_more())
    async with client(source) as https:
        _, body = await fetched(https, source.url("/file", "source.test"))
    assert body == CONTENT + b"x"


async def test_bytes_past_a_told_length_belong_to_no_answer(source: Source) -> None:
    """Where they come at once, they may cost the answer; they are never taken for a part of it."""
    source.script("/file", scripted.one_more(chunked=False))
    async with client(source) as https:
        came, refused = await taken(https, source.url("/file", "source.test"))
    if refused is None:
        assert came == CONTENT
    else:
        assert refused.code == "source_unavailable"
        assert came == CONTENT[: len(came)]


async def test_fields_that_came_twice_are_joined(source: Source) -> None:
    head = b"HTTP/1.1 200 OK\r\nLink: <a>\r\nLINK: <b>\r\nContent-Length: 0\r\n\r\n"
    source.script("/file", scripted.raw(head))
    async with client(source) as https:
        response, _ = await fetched(https, source.url("/file", "source.test"))
    assert response.headers["link"] == "<a>, <b>"


# What breaks.


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("after", [0, 1, 50_000])
async def test_a4_what_came_before_the_break_is_handed_out(source: Source, how: str, after: int) -> None:
    """Also to somebody who takes it late: a source that breaks every connection early would else bring nothing."""
    source.script("/file", scripted.close_early(after, how))  # type: ignore[arg-type]
    async with client(source) as https:
        came, refused = await taken(https, source.url("/file", "source.test"), late_seconds=0.3)
    assert refused is not None
    assert refused.code == "source_unavailable"
    assert came == CONTENT[: len(came)]
    if how == "close":  # a reset takes what the kernel still holds with it
        assert len(came) == after


@pytest.mark.parametrize("after", [0, 1000])
async def test_a8_a_silent_body_is_left(source: Source, after: int) -> None:
    source.script("/file", scripted.stall(after))
    async with client(source, stall_seconds=STALL_SECONDS) as https:
        began = time.monotonic()
        came, refused = await taken(https, source.url("/file", "source.test"))
    assert refused is not None
    assert refused.code == "stalled"
    assert came == CONTENT[:after]
    assert STALL_SECONDS * 0.9 <= time.monotonic() - began < STALL_SECONDS + 20


async def test_a8_a_source_without_even_a_head_is_left(source: Source) -> None:
    source.script("/file", scripted.silent())
    async with client(source, stall_seconds=STALL_SECONDS) as https:
        assert (await refusal(https, source.url("/file", "source.test"))).code == "stalled"


async def test_a8_a_head_that_trickles_is_left(source: Source) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(60))
    source.script("/file", scripted.slowly(head, 8, STALL_SECONDS / 5))
    async with client(source, stall_seconds=STALL_SECONDS) as https:
        assert (await refusal(https, source.url("/file", "source.test"))).code == "stalled"


async def test_a8_a_body_that_trickles_is_not_silent(source: Source) -> None:
    source.serve("/small", b"trickling")
    source.script("/small", scripted.trickle(1, STALL_SECONDS / 3))
    async with client(source, stall_seconds=STALL_SECONDS) as https:
        _, body = await fetched(https, source.url("/small", "source.test"))
    assert body == b"trickling"


async def test_a8_a_body_below_the_least_rate_is_left(source: Source) -> None:
    source.script("/file", scripted.trickle(1, STALL_SECONDS / 5))
    async with client(source, stall_seconds=STALL_SECONDS, bytes_per_second_min=1024) as https:
        came, refused = await taken(https, source.url("/file", "source.test"))
    assert refused is not None
    assert refused.code == "stalled"
    assert "acquisition.bytes_per_second_min" in refused.message
    assert 0 < len(came) < 100
    assert CONTENT.startswith(came)


async def test_a8_somebody_who_takes_long_is_not_taken_for_a_silent_source(source: Source) -> None:
    async with (
        client(source, stall_seconds=STALL_SECONDS, bytes_per_second_min=int(SIZE / STALL_SECONDS)) as https,
        https.open(source.url("/file", "source.test"), headers={}) as response,
    ):
        count = 0
        async for piece in response.chunks():
            if count == 0:
                await asyncio.sleep(STALL_SECONDS * 1.5)
            count += len(piece)
    assert count == SIZE


async def test_leaving_a_body_closes_its_connection(source: Source) -> None:
    source.script("/file", scripted.stall(1000))
    async with client(source, names := Names()) as https:
        async with https.open(source.url("/file", "source.test"), headers={}) as response:
            assert await anext(response.chunks())
            assert source.connections == 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while source.connections:
                await asyncio.sleep(0.02)
        _, body = await fetched(https, source.url("/file", "source.test"))
        assert body == CONTENT
    assert len(names.asked) == 2


async def test_a_kept_connection_that_the_source_closed_is_made_anew(source: Source) -> None:
    async with client(source) as https:
        for _ in range(3):
            _, body = await fetched(https, source.url("/file", "source.test"))
            assert body == CONTENT
            source.drop_connections()


GARBAGE = [
    b"garbage\r\n\r\n",
    b"\x00" * 5000,
    b"HTTP/1.1 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES_MAX,
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000,
    b"HTTP/1.1 200 OK\r\n" + (b"x: " + b"y" * 8000 + b"\r\n") * 20 + b"\r\n",
    b"HTTP/1.1 200 " + b"O" * HEAD_BYTES_MAX,
]


@pytest.mark.parametrize("head", GARBAGE, ids=range(len(GARBAGE)))
async def test_heads_are_bounded_and_http(source: Source, head: bytes) -> None:
    source.always("/file", scripted.raw(head))
    async with client(source) as https:
        assert (await refusal(https, source.url("/file", "source.test"))).code == "source_unavailable"


async def test_the_body_of_an_error_is_bounded(source: Source) -> None:
    source.script("/file", scripted.status(404, b"x" * (4 * ERROR_BYTES_MAX)))
    async with client(source) as https:
        response, body = await fetched(https, source.url("/file", "source.test"))
    assert (response.status, len(body)) == (404, ERROR_BYTES_MAX)


async def test_a_small_body_is_read_whole_or_refused(source: Source) -> None:
    async with client(source) as https:
        async with https.open(source.url("/file", "source.test"), headers={}) as response:
            assert await response.read(SIZE) == CONTENT
        async with https.open(source.url("/file", "source.test"), headers={}) as response:
            with pytest.raises(Refused, match="source_unavailable"):
                await response.read(SIZE - 1)


async def test_a_host_that_is_not_found_or_not_there_is_unavailable(source: Source) -> None:
    async with client(source) as https:
        assert (await refusal(https, "https://nowhere.test/a")).code == "source_unavailable"
        assert (await refusal(https, "https://source.test:1/a")).code == "source_unavailable"


# TLS.


async def test_a21_a_certificate_of_an_unknown_authority_is_refused(source: Source) -> None:
    async with client(source, ca_file=None) as https:
        refused = await refusal(https, source.url("/file", "source.test"))
    assert refused.code == "source_refused"
    assert "ca_file" in refused.message
    assert source.requests == []


async def test_a21_a_certificate_for_another_name_is_refused(source: Source) -> None:
    async with client(source, Names(["127.0.0.1"])) as https:
        refused = await refusal(https, source.url("/file", "other.test"))
    assert refused.code == "source_refused"
    assert source.requests == []


def spoken_by_anybody(source: Source) -> str | None:
    """What a client without our rules agrees on with the source."""
    context = ssl.create_default_context(cafile=source.ca_file)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
    with (
        socket.create_connection(("127.0.0.1", source.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="source.test") as connection,
    ):
        return connection.version()


async def test_tls_before_1_2_is_not_spoken(tmp_path: Path) -> None:
    with Source(tmp_path, maximum_version=ssl.TLSVersion.TLSv1_1) as old:
        old.serve("/file", CONTENT)
        assert spoken_by_anybody(old) == "TLSv1.1"
        async with client(old) as https:
            refused = await refusal(https, old.url("/file", "source.test"))
    assert refused.code == "source_unavailable"
    assert "TLS" in refused.message
    assert old.requests == []


def test_an_authority_file_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(ssl.SSLError):
        Https(Walls(ca_file=tmp_path / "empty.pem"))
    with pytest.raises(OSError):
        Https(Walls(ca_file=tmp_path / "missing.pem"))


# Addresses (A21).


@pytest.mark.parametrize(
    "url",
    [
        "http://source.test:{port}/file",
        "https://user:secret@source.test:{port}/file",
        "https://source.test:{port}/file#part",
        "https://10.0.0.1:{port}/file",
        "https://[::1]:{port}/file",
        "https://127.1:{port}/file",
    ],
)
async def test_a21_a_url_outside_the_walls_is_not_even_looked_up(source: Source, url: str) -> None:
    async with client(source, names := Names()) as https:
        refused = await refusal(https, url.format(port=source.port))
    assert refused.code == "source_refused"
    assert names.asked == []
    assert source.requests == []


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["::ffff:127.0.0.1"],
     ["2002:7f00:1::"], ["::1"]],
)  # fmt: skip
async def test_a21_a_name_with_an_address_that_is_not_public_is_refused(
    source: Source, addresses: list[str]
) -> None:
    async with client(source, Names(addresses), allowed_networks=()) as https:
        assert (await refusal(https, "https://source.test/file")).code == "source_refused"
    assert source.requests == []


async def test_a21_the_address_that_was_checked_is_the_one_dialled(source: Source) -> None:
    """The second lookup would lead elsewhere; there is none."""
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    async with client(source, names, allowed_networks=(ip_network("127.0.0.1/32"),)) as https:
        _, body = await fetched(https, source.url("/file", "source.test"))
        assert body == CONTENT
        assert len(names.asked) == 1
        assert len(source.requests) == 1
        source.drop_connections()
        await asyncio.sleep(0.1)
        # A new connection asks again, and the new answer meets the wall.
        assert (await refusal(https, source.url("/file", "source.test"))).code == "source_refused"
    assert len(source.requests) == 1


async def test_a21_another_port_is_for_allowed_networks_only(source: Source) -> None:
    async with client(source, Names(["127.0.0.1", "1.1.1.1"])) as https:
        refused = await refusal(https, source.url("/file", "source.test"))
    assert refused.code == "source_refused"
    assert "port" in refused.message
    assert source.requests == []


async def test_a21_an_address_in_an_allowed_network_may_be_named(source: Source) -> None:
    async with client(source, names := Names()) as https:
        response, body = await fetched(https, source.url("/file", "127.0.0.1"))
    assert (response.host, body == CONTENT, names.asked) == ("127.0.0.1", True, [])


async def test_a21_no_proxy_of_the_environment_is_used(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with client(source) as https:
        _, body = await fetched(https, source.url("/file", "source.test"))
    assert body == CONTENT


async def test_the_machines_resolver_is_the_one_by_default(source: Source) -> None:
    walls = Walls((), (*LOOPBACK, ip_network("::1/128")), source.ca_file, PATIENCE_SECONDS)
    https = Https(walls)
    try:
        _, body = await fetched(https, source.url("/file", "localhost"))
    finally:
        await https.close()
    assert body == CONTENT


# Redirects (A20, A21).


def headers_of(source: Source, path: str) -> Mapping[str, str]:
    (request,) = source.asked(path)
    return request.headers


async def test_a20_a_redirect_is_followed_with_the_range_and_without_the_credential(source: Source) -> None:
    signed = f"/signed?sig={SECRET}"
    source.serve(signed, CONTENT)
    source.script(
        "/file", scripted.redirect(source.url(signed, "cdn.test"), set_cookie="a=b", x_linked_size=str(SIZE))
    )
    wanted = Wanted(1000, SIZE, SIZE, '"v1"')
    async with client(source) as https:
        response, body = await fetched(
            https, source.url("/file", "source.test"), headers=wanted.headers, credential="Bearer token"
        )
    assert (response.status, response.host, body == CONTENT[1000:]) == (206, "cdn.test", True)
    assert headers_of(source, "/file")["authorization"] == "Bearer token"
    behind = headers_of(source, signed)
    assert "authorization" not in behind
    assert "cookie" not in behind
    assert (behind["range"], behind["if-range"]) == (wanted.headers["range"], '"v1"')
    assert behind["host"] == f"cdn.test:{source.port}"
    assert "referer" not in behind
    (passed,) = response.redirect_headers
    assert passed["x-linked-size"] == str(SIZE)
    assert not {"location", "set-cookie"} & (set(passed) | set(response.headers))


async def test_a20_the_credential_does_not_come_back_with_a_redirect_to_the_first_host(
    source: Source,
) -> None:
    source.serve("/back", CONTENT)
    source.script("/file", scripted.redirect(source.url("/away", "cdn.test")))
    source.script("/away", scripted.redirect(source.url("/back", "source.test")))
    async with client(source) as https:
        await fetched(https, source.url("/file", "source.test"), credential="Bearer token")
    assert "authorization" in headers_of(source, "/file")
    assert "authorization" not in headers_of(source, "/away")
    assert "authorization" not in headers_of(source, "/back")


async def test_a20_on_the_first_host_the_credential_stays(source: Source) -> None:
    source.serve("/moved", CONTENT)
    source.script("/file", scripted.redirect("/moved", 308))
    async with client(source) as https:
        _, body = await fetched(https, source.url("/file", "source.test"), credential="Bearer token")
    assert body == CONTENT
    assert headers_of(source, "/moved")["authorization"] == "Bearer token"


async def test_a20_another_port_is_another_host(source: Source, tmp_path: Path) -> None:
    with Source(tmp_path) as other:
        other.serve("/file", CONTENT)
        walls_file = tmp_path / "both.pem"
        walls_file.write_text(source.ca_file.read_text() + other.ca_file.read_text())
        source.script("/file", scripted.redirect(other.url("/file", "source.test")))
        async with client(source, ca_file=walls_file) as https:
            await fetched(https, source.url("/file", "source.test"), credential="Bearer token")
        assert "authorization" not in headers_of(other, "/file")


@pytest.mark.parametrize("name", ["Authorization", "cookie", "Host", "Proxy-Authorization"])
async def test_a20_a_credential_cannot_be_smuggled_into_headers_for_all(source: Source, name: str) -> None:
    async with client(source) as https:
        with pytest.raises(ValueError):
            await fetched(https, source.url("/file", "source.test"), headers={name: SECRET})
    assert source.requests == []


async def test_a20_cookies_are_not_kept(source: Source) -> None:
    source.script("/file", scripted.headers(set_cookie="a=b; Path=/"))
    async with client(source) as https:
        response, _ = await fetched(https, source.url("/file", "source.test"))
        await fetched(https, source.url("/file", "source.test"))
    assert "set-cookie" not in response.headers
    assert all("cookie" not in request.headers for request in source.requests)


BREAKS: dict[str, Callable[[Source, str], scripted.Behaviour]] = {
    "to http": lambda source, path: scripted.redirect(f"http://cdn.test{path}"),
    "to a closed port": lambda source, path: scripted.redirect(f"https://cdn.test:1{path}"),
    "to an unknown name": lambda source, path: scripted.redirect(f"https://nowhere.test{path}"),
    "to another certificate": lambda source, path: scripted.redirect(source.url(path, "other.test")),
    "to what closes": lambda source, path: scripted.redirect(source.url("/closing" + path, "cdn.test")),
    "to what is silent": lambda source, path: scripted.redirect(source.url("/silent" + path, "cdn.test")),
    "to garbage": lambda source, path: scripted.redirect(source.url("/garbage" + path, "cdn.test")),
    "to a break": lambda source, path: scripted.redirect(source.url("/early" + path, "cdn.test")),
    "round and round": lambda source, path: scripted.redirect(source.url(path, "cdn.test")),
}


@pytest.mark.parametrize("name", BREAKS)
async def test_a20_a_signed_target_is_shown_nowhere(
    source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither in the refusal, nor in what a traceback prints of it and of what led to it, nor in a log."""
    path = f"/{SECRET}?X-Signature={SECRET}"
    monkeypatch.setitem(NAMES, "other.test", "127.0.0.1")
    for prefix, behaviour in (
        ("/closing", scripted.raw(b"")),
        ("/silent", scripted.silent()),
        ("/garbage", scripted.raw(f"no HTTP {SECRET}\r\n\r\n".encode())),
        ("/early", scripted.both(scripted.ignore_range(), scripted.close_early(0))),
    ):
        source.serve(prefix + path, CONTENT)
        source.always(prefix + path, behaviour)
    source.always(path, scripted.redirect(source.url(path, "cdn.test")))
    source.script("/file", BREAKS[name](source, path))
    with caplog.at_level(logging.DEBUG):
        async with client(source, stall_seconds=0.5) as https:
            _, refused = await taken(https, source.url("/file", "source.test"))
    assert refused is not None
    assert refused.code in ("source_refused", "source_unavailable", "stalled")
    assert SECRET not in "".join(traceback.format_exception(refused))
    assert SECRET not in repr((refused, refused.__cause__, refused.__context__, refused.details))
    assert SECRET not in caplog.text


async def test_redirects_are_bounded(source: Source) -> None:
    for number in range(REDIRECTS_MAX + 1):
        source.always(f"/{number}", scripted.redirect(f"/{number + 1}"))
    source.serve(f"/{REDIRECTS_MAX}", CONTENT)
    async with client(source) as https:
        refused = await refusal(https, source.url("/0", "source.test"))
        assert refused.code == "source_refused"
        assert len(source.requests) == REDIRECTS_MAX + 1
        source.always(f"/{REDIRECTS_MAX}", None)
        response, body = await fetched(https, source.url("/0", "source.test"))
    assert (len(response.redirect_headers), body == CONTENT) == (REDIRECTS_MAX, True)


async def test_a_redirect_without_a_target_is_unavailable(source: Source) -> None:
    source.script("/file", scripted.status(302))
    async with client(source) as https:
        assert (await refusal(https, source.url("/file", "source.test"))).code == "source_unavailable"


@pytest.mark.parametrize("code", [300, 304, 305, 306])
async def test_other_statuses_of_the_300s_are_answers(source: Source, code: int) -> None:
    head = f"HTTP/1.1 {code} x\r\nLocation: https://cdn.test/\r\nContent-Length: 0\r\n\r\n".encode()
    source.script("/file", scripted.raw(head))
    async with client(source) as https:
        response, _ = await fetched(https, source.url("/file", "source.test"))
    assert response.status == code
    assert "location" not in response.headers


@pytest.mark.parametrize(
    "location",
    [
        "http://cdn.test/b", "https://user@cdn.test/b", "https://cdn.test/b#part", "https://10.0.0.1/b",
        "https://[::ffff:127.0.0.1]/b", "//169.254.169.254/latest/meta-data", "https://2130706433/b",
        "https://cdn.test\\@source.test/b", "file:///etc/passwd",
    ],
)  # fmt: skip
async def test_a21_a_redirect_meets_the_same_walls(source: Source, location: str) -> None:
    source.script("/file", scripted.redirect(location))
    async with client(source, names := Names()) as https:
        assert (await refusal(https, source.url("/file", "source.test"))).code == "source_refused"
    assert names.asked == ["source.test"]


async def test_a21_a_redirect_to_a_name_with_a_private_address_is_refused(source: Source) -> None:
    source.script("/file", scripted.redirect("https://cdn.test/b"))
    async with client(source, Names(["127.0.0.1"], ["192.168.0.1"])) as https:
        assert (await refusal(https, source.url("/file", "source.test"))).code == "source_refused"


async def test_a21_a_redirect_to_a_host_that_is_not_listed_is_refused(source: Source) -> None:
    source.serve("/b", CONTENT)
    source.always("/file", scripted.redirect(source.url("/b", "elsewhere.test")))
    async with client(source, allowed_hosts=("source.test", "cdn.test")) as https:
        refused = await refusal(https, source.url("/file", "source.test"))
        assert refused.code == "source_refused"
        assert source.asked("/b") == []
        source.always("/file", scripted.redirect(source.url("/b", "cdn.test")))
        _, body = await fetched(https, source.url("/file", "source.test"))
    assert body == CONTENT


# Side by side.


async def test_several_files_come_at_once(source: Source) -> None:
    contents = {f"/many/{n}": os.urandom(8 << 20) for n in range(4)}
    for path, content in contents.items():
        source.serve(path, content)
    async with client(source) as https:
        answers = await asyncio.gather(
            *(fetched(https, source.url(path, "source.test")) for path in contents)
        )
    for (_, body), content in zip(answers, contents.values(), strict=True):
        assert body == content

"""The routes over ASGI, without a server: who is asked before a byte of the body is, what a body may be, and which
answer that becomes."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.gateway.app import GatewayApp
from ficc.gateway.body_reader import HERE_BYTES_MAX
from ficc.gateway.intake import UNPACKING_MAX, Message
from ficc.gateway.invocation import Invocation
from ficc.gateway.relay import Gateway, Limits
from ficc.protocol import content_coding
from ficc.protocol.content_coding import STEP_BYTES_MAX, Coding
from support.gateway import ACTOR, EVENTS, QUIET, Known, OneRoute, Records, ScriptedStream, gateway, head
from support.packing import PACK

SERVICE = "/api/v1/inference/s/v1"
PROJECT = "/api/v1/openai/v1"
DOCUMENT = b'{"choices":[]}'
NOBODY = replace(ACTOR, scopes=frozenset({"models:read"}))
BODY_BYTES_MAX = 4 << 20
LIMITS = Limits(body_bytes_max=BODY_BYTES_MAX, body_bytes_total_max=2 * BODY_BYTES_MAX)


@dataclass
class Answer:
    asked: int = 0
    """How often the body was asked for."""
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    aborted: bool = False

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


def no_session(scope: Any) -> Actor:
    raise Refused("unauthenticated", "There is no session here.")


class App:
    """One gateway and its routes, and what a client sends to them."""

    def __init__(self, *streams: ScriptedStream, actor: Actor = ACTOR) -> None:
        self.gateway: Gateway
        self.routes: OneRoute
        self.records = Records()
        self.gateway, self.routes = gateway(*streams, limits=LIMITS, actor=actor, records=self.records)
        self.app = GatewayApp(
            gateway=self.gateway,
            routes=self.routes,
            authority=Known(actor),
            browser=no_session,
            allowed_origins=["https://ok.example"],
        )

    async def __call__(
        self,
        path: str,
        *body: bytes,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        token: bytes | None = b"good",
        raw_path: str | None = None,
        leaves: Literal["never", "in its body", "behind its body"] = "never",
    ) -> Answer:
        answer = Answer()
        pieces = list(body)

        async def receive() -> Message:
            answer.asked += 1
            if pieces:
                piece = pieces.pop(0)
                unfinished = bool(pieces) or leaves == "in its body"
                return {"type": "http.request", "body": piece, "more_body": unfinished}
            if leaves == "never":
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], dict(message["headers"])
            else:
                answer.body += message["body"]

        def abort() -> None:
            answer.aborted = True

        who = [] if token is None else [(b"authorization", b"Bearer " + token)]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": (raw_path or path).encode(),
            "headers": [*who, *headers],
            "extensions": {"ficc.abort": abort},
        }
        await self.app(scope, receive, send)
        return answer

    @property
    def held(self) -> int:
        """Bytes of bodies that are accounted for."""
        return self.app._intake._bodies._held


def document() -> ScriptedStream:
    return ScriptedStream(head(data=DOCUMENT, end=True))


# Who asks.


@pytest.mark.parametrize("path", [f"{SERVICE}/chat/completions", f"{PROJECT}/chat/completions"])
@pytest.mark.parametrize(
    ("actor", "token", "code"),
    [(NOBODY, b"good", "denied"), (ACTOR, b"bad", "unauthenticated"), (ACTOR, None, "unauthenticated")],
)
async def test_nobody_without_the_right_to_ask_is_asked_for_a_body(
    path: str, actor: Actor, token: bytes | None, code: str
) -> None:
    app = App(actor=actor)
    answer = await app(path, b"x" * 1000, headers=[(b"content-length", b"4000000")], token=token)
    assert (answer.code, answer.asked, app.held) == (code, 0, 0)


@pytest.mark.parametrize("model", ["assistant", "nothing"])
async def test_nobody_without_the_right_to_ask_learns_which_models_there_are(model: str) -> None:
    answer = await App(actor=NOBODY)(f"{PROJECT}/chat/completions", b'{"model":"%b"}' % model.encode())
    assert answer.code == "denied"


async def test_g12_options_need_no_credential() -> None:
    app = App()
    own = [(b"origin", b"https://ok.example"), (b"access-control-request-method", b"POST")]
    answer = await app(f"{SERVICE}/chat/completions", method="OPTIONS", headers=own, token=None)
    assert (answer.status, answer.asked) == (204, 0)
    assert answer.headers[b"access-control-allow-origin"] == b"https://ok.example"
    assert b"authorization" in answer.headers[b"access-control-allow-headers"]
    other = [(b"origin", b"https://evil.example")]
    answer = await app(f"{SERVICE}/chat/completions", method="OPTIONS", headers=other, token=None)
    assert answer.status == 204
    assert b"access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("written", ["chat%2fcompletions", "chat%2Fcompletions"])
async def test_an_encoded_slash_is_no_slash(written: str) -> None:
    app = App(document())
    answer = await app(f"{SERVICE}/chat/completions", b"{}", raw_path=f"{SERVICE}/{written}")
    assert (answer.status, answer.code) == (404, "not_found")
    assert app.routes.the_link.sent == []


# Bodies.


@pytest.mark.parametrize("path", [f"{SERVICE}/chat/completions", f"{PROJECT}/chat/completions"])
@pytest.mark.parametrize("size", [10, HERE_BYTES_MAX + 1, BODY_BYTES_MAX - 100])
async def test_a_body_is_read_once_and_reaches_the_engine(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(document())
    reads = []
    read = app.gateway._reader.read

    async def counted(body: bytes) -> Any:
        reads.append(len(body))
        return await read(body)

    monkeypatch.setattr(app.gateway._reader, "read", counted)
    body = json.dumps({"model": "assistant", "text": "x" * size}).encode()
    answer = await app(path, body[:100], body[100:])
    assert (answer.status, answer.body) == (200, DOCUMENT)
    assert app.routes.the_link.sent == [body]
    assert reads == [len(body)]
    assert app.held == 0
    await app.gateway.close()


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}'])
async def test_the_model_that_picks_a_service_has_to_be_named(body: bytes) -> None:
    answer = await App()(f"{PROJECT}/chat/completions", body)
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "model")


async def test_a_large_body_is_read_beside_the_loop() -> None:
    """On both URLs: other requests are answered meanwhile."""
    values = b",".join([b"1.5"] * 200_000)
    body = b'{"model":"assistant","x":[%b],"y":"%b"}' % (values, b"\\u0041" * 500_000)
    app = App(document(), document())
    await app.gateway.read(body)  # the process has started
    loop = asyncio.get_running_loop()
    for path in (SERVICE, PROJECT):
        waiting = asyncio.create_task(app(f"{path}/chat/completions", body))
        ticks, began = 0, loop.time()
        while not waiting.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert (await waiting).status == 200
        assert ticks >= 10, loop.time() - began
    await app.gateway.close()


@pytest.mark.parametrize("size", [0, 100, 2 * STEP_BYTES_MAX + 5])
@pytest.mark.parametrize(
    ("fields", "coding"),
    [([b"gzip"], "gzip"), ([b"identity", b"x-gzip"], "gzip"), ([b"zstd", b"identity"], "zstd")],
)
async def test_g13_a_packed_body_reaches_the_engine_unpacked(
    size: int, fields: list[bytes], coding: Coding
) -> None:
    app = App(document())
    body = json.dumps({"model": "assistant", "text": "x" * size}).encode()
    headers = [(b"content-encoding", field) for field in fields]
    answer = await app(f"{SERVICE}/chat/completions", PACK[coding](body), headers=headers)
    assert (answer.status, app.routes.the_link.sent, app.held) == (200, [body], 0)
    await app.gateway.close()


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize(
    ("make", "status", "code"),
    [
        (lambda pack: pack(bytes(200 << 20)), 413, "too_large"),
        (lambda pack: pack(bytes(BODY_BYTES_MAX + 1)), 413, "too_large"),
        (lambda _: b"{}", 400, "invalid_body"),
        (lambda _: b"", 400, "invalid_body"),
        (lambda pack: pack(b"{}")[:-1], 400, "invalid_body"),
        (lambda pack: pack(b"no json"), 400, "invalid_json"),
    ],
    ids=["bomb", "one byte too many", "plain", "nothing", "cut", "no JSON"],
)
async def test_g13_a_packed_body_is_held_to_the_limits(
    coding: Coding, make: Callable[[Callable[[bytes], bytes]], bytes], status: int, code: str
) -> None:
    app, headers = App(), [(b"content-encoding", coding.encode())]
    answer = await app(f"{SERVICE}/chat/completions", make(PACK[coding]), headers=headers)
    assert (answer.status, answer.code, app.held) == (status, code, 0)


async def test_g13_few_bodies_are_unpacked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a window that no limit counts."""
    at_once, most = 0, 0

    class Counted(content_coding.Unpacking):
        def step(self) -> bytes:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            time.sleep(0.01)
            with lock:
                at_once -= 1
            return super().step()

    lock = threading.Lock()
    monkeypatch.setattr(content_coding, "Unpacking", Counted)
    app = App()
    packed, headers = PACK["zstd"](b"no json"), [(b"content-encoding", b"zstd")]
    answers = await asyncio.gather(
        *(app(f"{SERVICE}/chat/completions", packed, headers=headers) for _ in range(12))
    )
    assert {answer.code for answer in answers} == {"invalid_json"}
    assert (most, app.held) == (UNPACKING_MAX, 0)


@pytest.mark.parametrize("fields", [[b"br"], [b"gzip", b"gzip"], [b"gzip, identity", b"deflate"]])
async def test_g13_other_codings_are_refused_before_the_body_is_read(fields: list[bytes]) -> None:
    headers = [(b"content-encoding", field) for field in fields]
    answer = await App()(f"{SERVICE}/chat/completions", b"{}", headers=headers)
    assert (answer.status, answer.code, answer.asked) == (415, "unsupported_media_type", 0)
    assert answer.headers[b"accept-encoding"] == b"gzip, zstd"


async def test_g16_a_body_over_the_limit_is_refused_by_its_length() -> None:
    length = [(b"content-length", b"%d" % (BODY_BYTES_MAX + 1))]
    answer = await App()(f"{SERVICE}/chat/completions", b"{", headers=length)
    assert (answer.status, answer.code, answer.asked) == (413, "too_large", 0)


async def test_a_body_that_turns_out_too_long_is_given_back() -> None:
    app = App()
    answer = await app(f"{SERVICE}/chat/completions", *[b"x" * (1 << 20)] * 6)
    assert (answer.code, app.held) == ("too_large", 0)
    assert answer.asked == 5


async def test_a_client_that_leaves_in_its_body_leaves_nothing() -> None:
    app = App()
    length = [(b"content-length", b"1000")]
    answer = await app(f"{SERVICE}/chat/completions", b"{", headers=length, leaves="in its body")
    assert (answer.status, app.held) == (0, 0)


async def test_bodies_are_accounted_for_together() -> None:
    app = App(ScriptedStream(), ScriptedStream())
    waiting = asyncio.create_task(app(f"{SERVICE}/chat/completions", b'{"a":"' + b"x" * 3_999_000 + b'"}'))
    while app.routes.the_link.sent == []:
        await asyncio.sleep(0.01)
    length = [(b"content-length", b"%d" % BODY_BYTES_MAX), (b"content-type", b"application/json")]
    full = [asyncio.create_task(app(f"{SERVICE}/chat/completions", headers=length)) for _ in range(2)]
    done, _ = await asyncio.wait(full, return_when=asyncio.FIRST_COMPLETED)
    (answer,) = [task.result() for task in done]
    assert (answer.status, answer.code) == (429, "bodies_full")
    for task in (waiting, *full):
        task.cancel()
    await asyncio.gather(waiting, *full, return_exceptions=True)
    assert app.held == 0
    await app.gateway.close()


# Answers.


async def test_a_document_is_one_message_with_its_length() -> None:
    answer = await App(document())(f"{SERVICE}/chat/completions", b"{}")
    assert answer.headers[b"content-length"] == b"%d" % len(DOCUMENT)
    assert answer.body == DOCUMENT


async def test_g2_a_break_that_cannot_be_told_breaks_the_connection() -> None:
    lost = Refused("engine_error", "The engine closed the connection.")
    app = App(ScriptedStream(head(EVENTS, b'data: {"cho'), lost))
    answer = await app(f"{SERVICE}/chat/completions", b'{"stream":true}')
    assert answer.aborted
    assert answer.status == 200


async def test_g28_the_header_is_seen_by_clients() -> None:
    lost = Refused("engine_error", "The engine closed the connection.")
    answer = await App(ScriptedStream(head(), lost))(f"{SERVICE}/chat/completions", b"{}")
    assert (answer.status, answer.headers[b"x-should-retry"]) == (502, b"false")


async def test_g9_a_client_that_leaves_ends_its_request() -> None:
    stream = ScriptedStream(head(EVENTS, b"data: 1\n\n"), QUIET)
    app = App(stream)
    async with asyncio.timeout(10):
        await app(f"{SERVICE}/chat/completions", b'{"stream":true}', leaves="behind its body")
    assert stream.closed
    assert (app.gateway.live, app.held) == (0, 0)


# One record for each request of somebody who is known.

RECORDED: list[tuple[str, dict[str, Any], str, str | None]] = [
    (f"{SERVICE}/chat/completions", {}, "completed", None),
    (f"{PROJECT}/chat/completions", {"body": b'{"model":"assistant"}'}, "completed", None),
    (f"{PROJECT}/chat/completions", {"body": b'{"model":"other"}'}, "refused", "model_not_found"),
    (f"{PROJECT}/chat/completions", {"body": b"{}"}, "refused", "invalid_body"),
    (f"{SERVICE}/chat/completions", {"body": b"{"}, "refused", "invalid_json"),
    ("/api/v1/inference/other/v1/chat/completions", {}, "refused", "not_found"),
    (
        f"{SERVICE}/chat/completions",
        {"headers": [(b"content-type", b"text/plain")]},
        "refused",
        "unsupported_media_type",
    ),
    (f"{SERVICE}/chat/completions", {"headers": [(b"content-length", b"99999999")]}, "refused", "too_large"),
    (f"{SERVICE}/chat/completions", {"leaves": "in its body"}, "client_gone", "client_gone"),
]


@pytest.mark.parametrize(("path", "options", "outcome", "code"), RECORDED)
async def test_every_request_is_recorded_once_wherever_it_ends(
    path: str, options: dict[str, Any], outcome: str, code: str | None
) -> None:
    app = App(document())
    await app(path, options.pop("body", b"{}"), **options)
    (record,) = app.records
    assert (record.outcome, record.code) == (outcome, code)
    known = code not in ("model_not_found", "not_found") and (
        code != "invalid_body" or path.startswith(SERVICE)
    )
    assert (record.service_id, record.alias) == (("s", "assistant") if known else (None, None))
    assert app.gateway.live == 0


async def test_a_caller_without_the_scope_is_recorded() -> None:
    app = App(actor=NOBODY)
    assert (await app(f"{SERVICE}/chat/completions", b"{}")).status == 403
    assert [record.code for record in app.records] == ["denied"]


@pytest.mark.parametrize(
    ("path", "method"), [("models", "GET"), ("chat/completions", "OPTIONS"), ("nothing", "POST")]
)
async def test_what_asks_no_engine_is_not_recorded(path: str, method: str) -> None:
    app = App()
    await app(f"{SERVICE}/{path}", method=method)
    await app(f"{SERVICE}/chat/completions", b"{}", token=b"bad")
    assert app.records == []


async def test_g26_nothing_is_kept_of_those_who_left() -> None:
    """An exception that is raised again and again keeps every frame that it ever passed, and all they hold."""
    count, mine = 20, replace(ACTOR)
    app = App(*(ScriptedStream(head(EVENTS), QUIET) for _ in range(count)), actor=mine)
    for _ in range(count):
        await app(f"{SERVICE}/chat/completions", b'{"stream":true}', leaves="behind its body")
    gc.collect()
    assert len(app.records) == count
    assert not [one for one in gc.get_objects() if isinstance(one, Invocation) and one.actor is mine]

"""The seam for code inside the controller: one path for an invocation, whoever brings it.

    status, chunks = await controller.inference.gateway.invoke(service_id, path, body, actor)

The controller here runs in the test's own process, beside a running executor.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from contract.scripted import ScriptedInstallation
from ficc.controller.bootstrap import Controller
from ficc.controller.operations.context import Page
from ficc.controller.store import access as access_rows
from ficc.domain.access import SCOPES, Actor
from ficc.domain.service import ENDED
from ficc.gateway.relay import Chunks
from ficc.inference import registry
from ficc.settings import Content, load
from support import rows

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/chat/completions"
PATIENCE_SECONDS = 30.0
QUIET_SECONDS = 0.5
HELD_BYTES_MAX = 2 << 20
"""More than queue, relay and kernel keep of an answer that nobody takes."""
CONCURRENCY = 2


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    """An executor that runs a ready service; the controller that made it has ended, its engine goes on."""
    with ScriptedInstallation(tmp_path_factory.mktemp("seam")) as made:
        made.service("seam", concurrency=CONCURRENCY)
        made.kill("controller", signal.SIGTERM)
        yield made


class Seam:
    """A controller in this process, and what tests ask of it."""

    def __init__(self, controller: Controller, service_id: str, owner: Actor) -> None:
        self.controller = controller
        self.gateway = controller.inference.gateway
        self.service_id = service_id
        self.owner = owner

    async def invoke(self, actor: Actor | None = None, **body: Any) -> tuple[int, Chunks]:
        return await self.gateway.invoke(
            self.service_id, PATH, json.dumps(body).encode(), actor or self.owner
        )

    async def whole(self, actor: Actor | None = None, **body: Any) -> tuple[int, bytes]:
        status, chunks = await self.invoke(actor, **body)
        try:
            return status, b"".join([chunk async for chunk in chunks])
        finally:
            await chunks.aclose()

    async def seen(self, key: str) -> dict[str, int]:
        """Of a request: how often the engine had it, how many of those are over, how much it poured."""
        _, body = await self.whole(do="report")
        found: dict[str, int] = json.loads(body)["seen"].get(key, {"times": 0, "closed": 0})
        return found

    async def until_seen(self, key: str, what: str, count: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await self.seen(key))[what] != count:
                await asyncio.sleep(0.01)

    async def control(self, action: str) -> None:
        services = self.controller.inference.services
        revision = (await services.get(self.owner, self.service_id)).service.record.revision
        await services.control(self.owner, self.service_id, action, revision, None)

    async def started_anew(self) -> None:
        """Stopped, and started as its next generation."""
        services = self.controller.inference.services
        async with asyncio.timeout(PATIENCE_SECONDS):
            if (await services.get(self.owner, self.service_id)).service.record.state not in ENDED:
                await self.control("stop")
            while not all(one.released for one in (await services.get(self.owner, self.service_id)).attempts):
                await asyncio.sleep(0.02)
            while (await services.get(self.owner, self.service_id)).service.record.state not in ENDED:
                await asyncio.sleep(0.02)
        await self.control("start")
        await self.answering()

    async def answering(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await self.whole())[0] != 200:
                await asyncio.sleep(0.05)

    async def token(self, *scopes: str) -> tuple[str, Actor]:
        """The id of a new token of the owner's, and its actor."""
        made = await self.controller.access.create_token(
            self.owner, label="of a test", scopes=scopes, lifetime_seconds=None
        )
        return made["id"], self.controller.authority.authenticate(made["token"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seam(installation: ScriptedInstallation) -> AsyncIterator[Seam]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(installation.adapter))
        registry.adapter.cache_clear()
        settings = load(installation.directory, content=Content(reserve_bytes=0))
        controller = Controller(settings)
        await controller.start()
        try:
            owner = controller.authority.authenticate(installation.token)
            (view,) = (await controller.inference.services.page(owner, Page()))[0]
            made = Seam(controller, view.service.id, owner)
            await made.answering()
            yield made
        finally:
            await controller.stop()
            registry.adapter.cache_clear()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_is_left(seam: Seam) -> AsyncIterator[None]:
    """Whatever a test did, its invocations have ended and hold no slot."""
    yield
    async with asyncio.timeout(PATIENCE_SECONDS):
        while seam.gateway.live or seam.gateway.slots.total(seam.service_id):
            await asyncio.sleep(0.01)


def error_of(chunk: bytes) -> str:
    """The code of an error, whether it is the one chunk of a refusal or an event of a stream."""
    return str(json.loads(chunk.removeprefix(b"data: "))["error"]["code"])


async def next_of(chunks: Chunks) -> bytes:
    """The next chunk that has bytes: one without says that the answer has begun."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (chunk := await anext(chunks)):
            pass
        return chunk


async def has_ended(chunks: Chunks) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)


# The call.


@pytest.mark.contract("C-F1")
async def test_an_invocation_is_a_status_and_chunks(seam: Seam) -> None:
    written: list[bytes] = []
    status, chunks = await seam.controller.inference.gateway.invoke(
        seam.service_id, PATH, b'{"messages": [{}]}', seam.owner
    )
    try:
        async for chunk in chunks:
            written.append(chunk)
    finally:
        await chunks.aclose()
    assert status == 200
    assert json.loads(b"".join(written))["model"] == "seam"
    assert (b"content-type", b"application/json") in chunks.headers
    assert chunks.request_id


@pytest.mark.contract("C-F1")
async def test_a_stream_comes_as_it_is_made(seam: Seam) -> None:
    status, body = await seam.whole(stream=True)
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    status, chunks = await seam.invoke(stream=True, do="hang", key="first event")
    assert b"hello" in await next_of(chunks)  # though the stream does not end
    await chunks.aclose()


@pytest.mark.contract("C-F1")
@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"service_id": "01arz3ndektsv4rrffq69g5fav"}, 404, "not_found"),
        ({"path": "/v1/models"}, 404, "not_found"),
        ({"path": "/slots"}, 404, "not_found"),
        ({"body": b"no JSON"}, 400, "invalid_json"),
        ({"body": b'{"stream": "yes"}'}, 400, "invalid_body"),
        ({"body": b'{"model": "other"}'}, 404, "model_not_found"),
    ],
)
async def test_a_refusal_is_a_status_and_one_chunk(
    seam: Seam, changes: dict[str, Any], status: int, code: str
) -> None:
    call = {"service_id": seam.service_id, "path": PATH, "body": b"{}", **changes}
    found, chunks = await seam.gateway.invoke(call["service_id"], call["path"], call["body"], seam.owner)
    assert (found, error_of(await next_of(chunks))) == (status, code)
    await has_ended(chunks)
    await chunks.aclose()


# Authority.


@pytest.mark.contract("C-F2")
async def test_a_credential_that_is_gone_begins_nothing(seam: Seam) -> None:
    token_id, actor = await seam.token("inference:invoke")
    await seam.controller.access.revoke_token(seam.owner, token_id)
    status, body = await seam.whole(actor, key="gone")
    assert (status, error_of(body)) == (401, "unauthenticated")
    assert (await seam.seen("gone"))["times"] == 0


@pytest.mark.contract("C-F2")
async def test_a_stream_ends_when_its_credential_is_revoked(seam: Seam) -> None:
    token_id, actor = await seam.token("inference:invoke")
    _, chunks = await seam.invoke(actor, stream=True, do="hang", key="revoked")
    assert b"hello" in await next_of(chunks)
    await seam.controller.access.revoke_token(seam.owner, token_id)
    assert error_of(await next_of(chunks)) == "unauthenticated"
    await has_ended(chunks)
    await chunks.aclose()
    await seam.until_seen("revoked", "closed")


@pytest.mark.contract("C-F2")
async def test_an_answer_that_has_not_begun_ends_too(seam: Seam) -> None:
    token_id, actor = await seam.token("inference:invoke")
    waiting = asyncio.create_task(seam.whole(actor, do="hang", key="not begun"))
    await seam.until_seen("not begun", "times")
    await seam.controller.access.revoke_token(seam.owner, token_id)
    status, body = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert (status, error_of(body)) == (401, "unauthenticated")
    await seam.until_seen("not begun", "closed")


@pytest.mark.contract("C-F2")
async def test_a_stream_ends_when_its_subject_loses_the_scope(seam: Seam) -> None:
    database = seam.controller.context.database
    project_id = seam.owner.project_id
    subject = await database.write(lambda tx: rows.member(tx, project_id, "somebody"))
    secret = await database.write(lambda tx: rows.token(tx, project_id, subject))
    await seam.controller.authority.refresh()
    actor = seam.controller.authority.authenticate(secret)
    _, chunks = await seam.invoke(actor, stream=True, do="hang", key="demoted")
    assert b"hello" in await next_of(chunks)
    left = [scope for scope in SCOPES if scope != "inference:invoke"]
    await database.write(lambda tx: access_rows.set_membership(tx, project_id, subject, left))
    assert error_of(await next_of(chunks)) == "denied"
    await has_ended(chunks)
    await chunks.aclose()
    await seam.until_seen("demoted", "closed")


# Generations.


@pytest.mark.contract("C-F3")
async def test_a_stream_of_one_generation_ends_before_the_next(seam: Seam) -> None:
    _, chunks = await seam.invoke(stream=True, do="hang", key="outlived")
    assert b"hello" in await next_of(chunks)
    await seam.control("stop")
    assert error_of(await next_of(chunks)) == "service_stopped"
    await has_ended(chunks)
    await seam.started_anew()
    await has_ended(chunks)
    await chunks.aclose()
    assert (await seam.seen("outlived"))["times"] == 0  # by the next generation's engine


@pytest.mark.contract("C-F3")
async def test_a_request_that_waits_is_not_taken_over_by_the_next_generation(seam: Seam) -> None:
    held = [await seam.invoke(stream=True, do="hang") for _ in range(CONCURRENCY)]
    waiting = asyncio.create_task(seam.whole(key="waited"))
    while not seam.gateway.slots.waiting(seam.service_id):
        await asyncio.sleep(0.01)
    await seam.control("stop")
    status, body = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert (status, error_of(body)) == (503, "service_stopped")
    for _, chunks in held:
        await chunks.aclose()
    await seam.started_anew()
    assert (await seam.seen("waited"))["times"] == 0


# Cancelling and not reading.


@pytest.mark.contract("C-F4")
async def test_closing_the_chunks_ends_the_request_at_the_engine(seam: Seam) -> None:
    _, chunks = await seam.invoke(stream=True, do="hang", key="closed")
    await next_of(chunks)
    assert sum(seam.gateway.slots.in_flight(seam.service_id).values()) == 1
    await chunks.aclose()
    assert seam.gateway.live == 0
    assert seam.gateway.slots.in_flight(seam.service_id) == {}
    await seam.until_seen("closed", "closed")
    await chunks.aclose()  # again is nothing


@pytest.mark.contract("C-F4")
async def test_closing_chunks_that_nobody_looked_at_ends_the_request_too(seam: Seam) -> None:
    _, chunks = await seam.invoke(stream=True, do="hang", key="unseen")
    await chunks.aclose()
    assert seam.gateway.live == 0
    await seam.until_seen("unseen", "closed")


@pytest.mark.contract("C-F4")
@pytest.mark.parametrize("stream", [False, True], ids=["before the first byte", "in the stream"])
async def test_cancelling_the_transport_ends_the_request_at_the_engine(seam: Seam, stream: bool) -> None:
    key = f"cancelled {stream}"
    transport = asyncio.create_task(seam.whole(stream=stream, do="hang", key=key))
    await seam.until_seen(key, "times")
    transport.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transport
    await seam.until_seen(key, "closed")
    assert (await seam.seen(key))["times"] == 1


@pytest.mark.contract("C-F4")
async def test_a_transport_that_takes_nothing_stops_the_engine(seam: Seam) -> None:
    _, chunks = await seam.invoke(stream=True, do="pour", key="untaken")
    before, poured = -1, (await seam.seen("untaken")).get("poured", 0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while poured != before or not poured:
            await asyncio.sleep(QUIET_SECONDS)
            before, poured = poured, (await seam.seen("untaken")).get("poured", 0)
    assert poured < HELD_BYTES_MAX
    taken = 0
    while taken <= poured + HELD_BYTES_MAX:
        taken += len(await next_of(chunks))
    assert (await seam.seen("untaken"))["poured"] > poured
    await chunks.aclose()
    await seam.until_seen("untaken", "closed")


# Who is taken for whom.


@pytest.mark.contract("C-F5")
async def test_nobody_is_taken_for_what_they_say_they_are(seam: Seam) -> None:
    """An actor counts for its credential, which is looked up, and not for what stands beside that."""
    forged = Actor("token", "01arz3ndektsv4rrffq69g5fav", "anybody", seam.owner.project_id, frozenset(SCOPES))
    _, reader = await seam.token("inference:read")
    for actor, status, code in (
        (forged, 401, "unauthenticated"),
        (replace(reader, scopes=frozenset(SCOPES)), 403, "denied"),
    ):
        found, body = await seam.whole(actor, key=code)
        assert (found, error_of(body)) == (status, code)
        assert (await seam.seen(code))["times"] == 0


@pytest.mark.contract("C-F5")
async def test_bytes_of_a_peer_are_no_credential(seam: Seam, installation: ScriptedInstallation) -> None:
    nobody = Actor("token", "01arz3ndektsv4rrffq69g5fav", "anybody", seam.owner.project_id, frozenset(SCOPES))
    secret = installation.token
    body = {"authorization": f"Bearer {secret}", "api_key": secret, "user": secret, "key": "peer"}
    status, answer = await seam.whole(nobody, **body)
    assert (status, error_of(answer)) == (401, "unauthenticated")
    assert (await seam.seen("peer"))["times"] == 0


@pytest.mark.contract("C-F5", "C-S6")
async def test_a_service_token_is_an_actor_for_its_service_only(seam: Seam) -> None:
    made = await seam.controller.access.create_service_token(
        seam.owner, "01arz3ndektsv4rrffq69g5fav", "another", 3600
    )
    actor = seam.controller.authority.authenticate(made["token"])
    status, body = await seam.whole(actor, key="another service's")
    assert (status, error_of(body)) == (403, "denied")
    assert (await seam.seen("another service's"))["times"] == 0

"""Limits of credentials and projects, and who is served first of those that wait."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.limits import Allowance
from ficc.domain.usage import Outcome
from ficc.gateway import limiter
from ficc.gateway.app import client_gone
from ficc.gateway.invocation import Chunks, Invocation
from ficc.gateway.limiter import Limiter
from ficc.gateway.relay import Gateway, Limits
from support.gateway import ACTOR, QUIET, Records, ScriptedStream, gateway, head, whole

CHAT = "/v1/chat/completions"
PATIENCE_SECONDS = 10.0
OTHER = replace(ACTOR, authority_id="other")


def limited(**limits: int) -> Actor:
    return replace(ACTOR, allowance=Allowance(**limits))


def document(tokens: int = 10) -> ScriptedStream:
    usage = json.dumps({"usage": {"prompt_tokens": tokens, "completion_tokens": 0}}).encode()
    return ScriptedStream(head(data=usage, end=True))


async def ask(made: Gateway, actor: Actor = ACTOR, body: bytes = b"{}") -> tuple[int, Chunks]:
    return await made.invoke("s", CHAT, body, actor)


async def done(made: Gateway, actor: Actor = ACTOR, body: bytes = b"{}") -> tuple[int, dict[bytes, bytes]]:
    status, chunks = await ask(made, actor, body)
    await whole(chunks)
    return status, dict(chunks.headers)


# Through the gateway.


async def test_a_request_over_the_limit_is_refused_with_a_time_to_come_back() -> None:
    records = Records()
    made, routes = gateway(document(), document(), records=records)
    actor = limited(requests_per_minute=2)
    assert [(await done(made, actor))[0] for _ in range(2)] == [200, 200]
    status, headers = await done(made, actor)
    assert status == 429
    assert headers[b"retry-after"] == b"30"
    assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert float(headers[b"x-ratelimit-reset-requests"].removesuffix(b"s")) == pytest.approx(60, abs=1)
    assert b"x-ratelimit-limit-tokens" not in headers
    assert (records[-1].outcome, records[-1].code) == (Outcome.REFUSED, "rate_limited")
    assert len(routes.the_link.sent) == 2


async def test_every_answer_says_what_is_left() -> None:
    made, _ = gateway(document(), document(), project=Allowance(tokens_per_minute=1000))
    actor = limited(requests_per_minute=10, tokens_per_minute=100)
    _, first = await done(made, actor)
    assert (first[b"x-ratelimit-remaining-requests"], first[b"x-ratelimit-remaining-tokens"]) == (
        b"9",
        b"100",
    )
    _, second = await done(made, actor)
    assert (second[b"x-ratelimit-remaining-requests"], second[b"x-ratelimit-remaining-tokens"]) == (
        b"8",
        b"90",
    )


async def test_without_limits_nothing_is_said_of_them() -> None:
    made, _ = gateway(document())
    assert not [name for name in (await done(made))[1] if name.startswith(b"x-ratelimit")]


async def test_a_refused_request_costs_no_quota() -> None:
    made, _ = gateway(Refused("executor_unavailable", "No connection."), document())
    actor = limited(requests_per_minute=1)
    assert (await done(made, actor, b"{"))[0] == 400
    assert (await done(made, actor, b'{"model":"other"}'))[0] == 404
    assert (await done(made, actor))[0] == 503
    assert (await done(made, actor))[0] == 200
    assert (await done(made, actor))[0] == 429


async def test_tokens_count_once_they_are_known() -> None:
    made, _ = gateway(document(150), document())
    actor = limited(tokens_per_minute=100)
    assert (await done(made, actor))[0] == 200
    status, headers = await done(made, actor)
    assert (status, headers[b"retry-after"]) == (429, b"31")


async def test_requests_at_once() -> None:
    made, _ = gateway(ScriptedStream(QUIET), document())
    actor = limited(concurrency=1)
    first = asyncio.create_task(ask(made, actor))
    await asyncio.sleep(0.01)
    assert (await done(made, actor))[0] == 429
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await done(made, actor))[0] == 200


async def test_a_project_is_limited_over_all_its_credentials() -> None:
    made, _ = gateway(document(), document(), project=Allowance(requests_per_minute=2))
    assert (await done(made, ACTOR))[0] == 200
    assert (await done(made, OTHER))[0] == 200
    status, headers = await done(made, replace(ACTOR, authority_id="third"))
    assert (status, headers[b"x-ratelimit-remaining-requests"]) == (429, b"0")


def test_what_one_account_refuses_costs_the_other_nothing() -> None:
    made = Limiter(Allowance(requests_per_minute=5))
    actor = limited(requests_per_minute=1)
    made.enter(actor, 0.0)
    for _ in range(10):
        with pytest.raises(Refused):
            made.enter(actor, 0.0)
    for _ in range(4):
        made.enter(OTHER, 0.0)
    with pytest.raises(Refused) as caught:
        made.enter(OTHER, 0.0)
    assert caught.value.message.startswith("This project may send 5 requests a minute")


def test_accounts_of_whom_nothing_is_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter, "ACCOUNTS_BEFORE_PURGE", 10)
    made = Limiter(Allowance())
    for number in range(1000):
        actor = replace(limited(requests_per_minute=60), authority_id=str(number))
        made.enter(actor, float(number)).leave(0, float(number), refused=False)
    assert len(made._accounts) <= 2 * 10


# Turns.


class Queue:
    """One slot, which somebody holds, and those that wait for it."""

    def __init__(self, queue_max: int) -> None:
        self.records = Records()
        self.made, _ = gateway(
            ScriptedStream(QUIET),
            *(document() for _ in range(20)),
            limits=Limits(queue_max=queue_max),
            records=self.records,
        )
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.holding: list[Invocation] = []

    async def hold(self) -> None:
        holder = self.made.invoke("s", CHAT, b"{}", ACTOR, on_begin=self.holding.append)
        self.tasks.append(asyncio.create_task(holder))
        await asyncio.sleep(0.01)

    async def join(self, callers: str) -> None:
        for caller in callers:
            self.tasks.append(asyncio.create_task(self._wait(caller)))
            await asyncio.sleep(0)

    async def _wait(self, caller: str) -> None:
        actor = replace(ACTOR, authority_id=caller)
        status, chunks = await self.made.invoke("s", CHAT, b"{}", actor, on_begin=self.holding.append)
        self.order.append(caller if status == 200 else f"{caller}{status}")
        await whole(chunks)

    async def serve(self) -> str:
        self.holding[0].abort(client_gone())
        await asyncio.gather(*self.tasks)
        return " ".join(self.order)


@pytest.mark.parametrize(
    ("came", "order"),
    [
        ("aaab", "a b a a"),
        ("aabbc", "a b c a b"),
        ("abc", "a b c"),
    ],
)
async def test_callers_take_turns(came: str, order: str) -> None:
    queue = Queue(10)
    await queue.hold()
    await queue.join(came)
    assert await queue.serve() == order
    assert queue.made.slots.total("s") == 0


async def test_g18_a_full_queue_has_room_for_a_caller_who_is_not_in_it() -> None:
    queue = Queue(3)
    await queue.hold()
    await queue.join("aaab")
    assert queue.made.slots.waiting("s") == 3
    assert await queue.serve() == "a429 a b a"


async def test_g18_who_has_as_many_as_the_others_is_refused() -> None:
    queue = Queue(3)
    await queue.hold()
    await queue.join("abcda")
    assert await queue.serve() == "d429 a429 a b c"


async def test_one_that_comes_before_the_woken_head_is_not_forgotten() -> None:
    """A slot comes free, its head is woken, and before it runs somebody joins who is served before it."""
    queue = Queue(10)
    await queue.hold()
    await queue.join("aa")
    queue.holding[1].abort(client_gone())
    await asyncio.sleep(0.01)
    queue.holding[0].abort(client_gone())
    while queue.made.slots.in_flight("s"):
        await asyncio.sleep(0)
    await queue.join("b")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*queue.tasks)
    assert sorted(queue.order) == ["a", "a499", "b"]

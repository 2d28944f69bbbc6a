"""Ten thousand steps in a random order that a seed repeats: services are started, drained and stopped, requests come,
are answered, refused or left, replicas break or say nothing. Time is the loop's own and passes at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ficc.domain import service
from ficc.domain.errors import Refused
from ficc.domain.limits import Allowance
from ficc.domain.plan import Fence
from ficc.domain.service import State
from ficc.domain.usage import Outcome
from ficc.gateway.answers import StreamAborted
from ficc.gateway.limiter import Limiter
from ficc.gateway.ports import Replica, Stream
from ficc.gateway.relay import Gateway, Limits
from support.gateway import (
    ACTOR,
    EVENTS,
    QUIET,
    ROUTE,
    Known,
    Line,
    OneRoute,
    Records,
    ScriptedLink,
    ScriptedStream,
    head,
    more,
)

STEPS = 10_000
REPLICAS, CONCURRENCY = 3, 2
DEADLINE_SECONDS = 30
QUEUE_SECONDS = 5.0
SLACK_SECONDS = 0.2
"""A replica that says it is busy is asked again after a pause."""
DONE = b"data: [DONE]\n\n"
EVENT = b'data: {"choices":[]}\n\n'
SCRIPTS: list[tuple[Line, ...]] = [
    (head(data=b"{}", end=True),),
    (head(), more(b"{}", end=True)),
    (head(EVENTS, EVENT), more(EVENT), more(DONE, end=True)),
    (head(EVENTS, EVENT), QUIET),
    (head(EVENTS, EVENT), Refused("peer_lost", ".")),
    (head(status=500, data=b"{}", end=True),),
    (Refused("engine_error", "."),),
    (QUIET,),
]
OPENINGS: list[Refused | None] = [
    *[None] * 12,
    Refused("busy", "."),
    Refused("service_not_ready", "."),
    Refused("executor_unavailable", "."),
    Refused("peer_lost", "."),
]


class HurryingLoop(asyncio.SelectorEventLoop):
    """Whenever nothing is left to do, it is the time of what comes next."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class CountedStream(ScriptedStream):
    def __init__(self, world: World, attempt_id: str, script: tuple[Line, ...]) -> None:
        super().__init__(*script)
        self._world, self._attempt_id = world, attempt_id
        world.open[attempt_id] += 1

    def abort(self, why: Refused) -> None:
        self._over()
        super().abort(why)

    def close(self) -> None:
        self._over()
        super().close()

    def _over(self) -> None:
        if not self.closed:
            self._world.open[self._attempt_id] -= 1


class World:
    """One service, its replicas, and whoever asks it something."""

    def __init__(self, seed: int) -> None:
        self.luck = random.Random(seed)
        self.record = service.Record()
        self.attempts = itertools.count(1)
        self.open: Counter[str] = Counter()
        self.asked: set[asyncio.Task[None]] = set()
        self.ends: Counter[Any] = Counter()
        self.begun = 0
        self.records = Records()
        self.routes = OneRoute(
            replace(ROUTE, state=State.STOPPED, deadline_seconds=DEADLINE_SECONDS, replicas=()),
            ScriptedLink([]),
        )
        self.routes.the_link.open_stream = self.open_stream  # type: ignore[method-assign]
        numbers = itertools.count(1)
        self.gateway = Gateway(
            routes=self.routes,
            authority=Known(),
            limits=Limits(queue_max=4, queue_seconds=QUEUE_SECONDS),
            meter=self.records,
            limiter=Limiter(Allowance()),
            new_id=lambda: f"r{next(numbers)}",
            now=lambda: 0.0,
        )

    # The replicas.

    async def open_stream(
        self, fence: Fence, path: str, body: bytes, deadline_seconds: float, *, by_data: bool = False
    ) -> Stream:
        assert 0 < deadline_seconds < DEADLINE_SECONDS + SLACK_SECONDS
        if self.luck.random() < 0.02:
            await asyncio.get_running_loop().create_future()  # an executor that is stopped
        await asyncio.sleep(self.luck.random())
        refused = self.luck.choice(OPENINGS)
        if refused is not None:
            raise Refused(refused.code, refused.message)
        if self.open[fence.attempt_id] >= CONCURRENCY:
            raise AssertionError("the count of the gateway is below what is open")
        return CountedStream(self, fence.attempt_id, self.luck.choice(SCRIPTS))

    # The operator's and the reconciler's side.

    def happen(self) -> None:
        """Whatever the table admits."""
        event = self.luck.choice(
            [service.Start(), service.AllReady(), service.SomeReady(), service.NoneReady(), service.Drain(),
             service.Stop(), service.Idle(), service.AllEnded()]
        )  # fmt: skip
        rare = isinstance(event, (service.Drain, service.Stop, service.NoneReady))
        if (self.record.state, type(event)) not in service.TRANSITIONS or (rare and self.luck.random() > 0.1):
            return
        self.record = service.advance(self.record, event)
        replicas = self.routes.route.replicas
        if isinstance(event, service.Start):
            replicas = tuple(self.replica() for _ in range(REPLICAS))
        self.routes.route = replace(
            self.routes.route,
            state=self.record.state,
            generation=self.record.generation,
            replicas=replicas,
        )
        self.gateway.recheck()

    def replica(self) -> Replica:
        number = next(self.attempts)
        return Replica(f"a{number}", "n", Fence(f"a{number}", number, "0" * 64), CONCURRENCY, "1" * 64)

    # Callers.

    def ask(self) -> None:
        task = asyncio.get_running_loop().create_task(self.request())
        self.asked.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[None]) -> None:
        self.asked.discard(task)
        if not task.cancelled():
            task.result()

    async def request(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.begun += 1
        body = json.dumps({"stream": True}).encode()
        try:
            status, chunks = await self.gateway.invoke("s", "/v1/chat/completions", body, ACTOR)
            try:
                async for _ in chunks:
                    if self.luck.random() < 0.05:
                        break  # it left in the middle
            except StreamAborted:
                status = -1
            finally:
                await chunks.aclose()
            self.ends[status] += 1
        finally:
            assert loop.time() - began <= DEADLINE_SECONDS + SLACK_SECONDS

    def leave(self) -> None:
        if self.asked and self.luck.random() < 0.2:
            self.luck.choice(sorted(self.asked, key=lambda task: task.get_name())).cancel()
            self.ends["left"] += 1


@pytest.mark.parametrize("seed", [1, 2])
def test_l9_whatever_happens_nothing_waits_past_its_deadline_and_no_slot_is_lost(seed: int) -> None:
    async def course() -> World:
        world = World(seed)
        for step in range(STEPS):
            world.luck.choice([world.happen, world.ask, world.ask, world.leave])()
            await asyncio.sleep(world.luck.random() * 0.5)
            if step % 100 == 0:
                held = world.gateway.slots.in_flight("s")
                assert all(count <= CONCURRENCY for count in held.values())
        await asyncio.sleep(DEADLINE_SECONDS + QUEUE_SECONDS)
        assert not world.asked
        return world

    loop = HurryingLoop()
    try:
        world = loop.run_until_complete(course())
    finally:
        loop.close()
    assert world.gateway.live == 0
    assert world.gateway.slots.total("s") == 0
    assert not +world.open, "streams that nobody closed"
    assert len(world.records) == len({record.id for record in world.records}) == world.begun
    assert {record.outcome for record in world.records} == set(Outcome)
    # The course went everywhere: answers, both kinds of fullness, deadlines, stops, breaks.
    assert {200, 429, 502, 503, 504, "left"} <= set(world.ends), world.ends

"""Usage records in the database: written in groups, once each, held while it is away, summed, and removed in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from ficc.controller.operations import metering
from ficc.controller.operations.context import Context
from ficc.controller.operations.metering import Metering, Retention
from ficc.controller.store import usage
from ficc.controller.store.database import Database, Transaction
from ficc.controller.store.usage import Span
from ficc.domain.errors import Refused
from ficc.domain.usage import SECONDS_PER_DAY, Counted, Outcome, Record
from ficc.identifiers import new_id
from ficc.settings import Metering as MeteringSettings
from ficc.settings import Settings

NOW = 20_000.5 * SECONDS_PER_DAY
PROJECT, OTHER, SERVICE, TOKEN, SUBJECT = (new_id() for _ in range(5))
PATIENCE_SECONDS = 10.0


def record(at: float = NOW, **changes: Any) -> Record:
    return Record(
        id=usage.first_id(at)[:10] + new_id()[10:],
        request_id="r",
        project_id=PROJECT,
        service_id=SERVICE,
        alias="assistant",
        authority_kind="token",
        authority_id=TOKEN,
        subject_id=SUBJECT,
        path="/v1/chat/completions",
        outcome=Outcome.COMPLETED,
        code=None,
        status=200,
        day=int(at // SECONDS_PER_DAY),
        started_at=at,
        queue_ms=0.0,
        first_byte_ms=1.5,
        total_ms=2.5,
        tokens=Counted.COUNTED,
        prompt_tokens=7,
        completion_tokens=3,
        model_revision="1" * 64,
        plan_digest="2" * 64,
        generation=1,
        attempt_id=new_id(),
    )._replace(**changes)


def refused(**changes: Any) -> Record:
    return record(
        outcome=Outcome.REFUSED,
        code="queue_full",
        status=429,
        tokens=Counted.NONE,
        prompt_tokens=0,
        completion_tokens=0,
        attempt_id=None,
    )._replace(**changes)


def settings(**changes: Any) -> Settings:
    return Settings(metering=MeteringSettings(**changes))


async def stored(db: Database, span: Span | None = None) -> list[Any]:
    return list(await db.read(lambda c: usage.page(c, span or Span(PROJECT), None, 10_000)))


@pytest.fixture
async def meter(db: Database) -> AsyncIterator[Metering]:
    made = Metering(Context(settings(), db))
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def until_stored(db: Database, count: int) -> list[Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found := await stored(db)) < count:
            await asyncio.sleep(0.02)
    return found


async def test_records_are_written_as_they_are_in_one_transaction(
    db: Database, meter: Metering, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    real = usage.add

    def add(tx: Any, records: list[Record]) -> None:
        groups.append(len(records))
        real(tx, records)

    monkeypatch.setattr(usage, "add", add)
    made = [record(NOW + number, request_id=f"r{number}") for number in range(50)]
    for one in made:
        meter.add(one)
    found = await until_stored(db, 50)
    assert [Record(*row) for row in reversed(found)] == made
    assert groups == [50]


async def test_what_is_written_again_is_there_once(db: Database) -> None:
    one = record()
    await db.write(lambda tx: usage.add(tx, [one, record()]))
    await db.write(lambda tx: usage.add(tx, [record(), one]))
    assert len(await stored(db)) == 3


@pytest.mark.parametrize("count", [1, 255, 256, 1000])
async def test_a_group_is_written_in_few_statements(db: Database, count: int) -> None:
    """For each, the thread lets go of the interpreter; a busy event loop gives it back late."""
    made = [record(NOW + number, request_id=f"r{number}") for number in range(count)]
    statements = []

    def write(tx: Transaction) -> None:
        event.listen(tx.connection, "before_cursor_execute", lambda *given: statements.append(given[2]))
        usage.add(tx, [*made, made[0]])

    await db.write(write)
    found = [Record(*row) for row in reversed(await stored(db))]
    assert found == made
    assert len(statements) <= 12
    assert len(set(statements)) <= 9


async def test_unknown_is_not_zero(db: Database) -> None:
    unknown = record(tokens=Counted.UNKNOWN, prompt_tokens=None, completion_tokens=None)
    zero = record(prompt_tokens=0, completion_tokens=0)
    await db.write(lambda tx: usage.add(tx, [unknown, zero]))
    found = {(row.tokens, row.prompt_tokens, row.completion_tokens) for row in await stored(db)}
    assert found == {("unknown", None, None), ("counted", 0, 0)}


async def test_a_flood_of_refusals_costs_few_rows_and_no_request_is_forgotten(
    db: Database, meter: Metering
) -> None:
    flood = 50 * metering.REFUSALS_MAX
    for _ in range(flood):
        meter.add(refused())
    meter.add(refused(code="rate_limited"))
    meter.add(record())
    await until_stored(db, metering.REFUSALS_MAX + 3)
    found = await stored(db)
    assert len(found) == metering.REFUSALS_MAX + 3
    (total,) = await db.read(lambda c: usage.sums(c, Span(PROJECT), "token", 10))
    assert (total.requests, total.refused, total.completed) == (flood + 2, flood + 1, 1)


async def test_the_end_of_the_controller_writes_what_is_held(db: Database) -> None:
    made = Metering(Context(settings(), db))
    for _ in range(metering.REFUSALS_MAX + 2):
        made.add(refused())
    await made.close()
    assert len(await stored(db)) == metering.REFUSALS_MAX + 1
    assert made.lost == 0


async def test_records_wait_for_a_database_that_is_away_up_to_a_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "RETRY_SECONDS", 0.05)
    place = tmp_path / "away"
    db = Database(f"sqlite:///{place / 'ficc.sqlite'}")
    made = Metering(Context(settings(held_records_max=10), db))
    running = asyncio.create_task(made.run())
    try:
        for number in range(14):
            made.add(record(request_id=f"r{number}"))
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while "were lost" not in caplog.text:
                    await asyncio.sleep(0.02)
        place.mkdir()
        db.migrate()
        found = await until_stored(db, 10)
        assert {row.request_id for row in found} == {f"r{number}" for number in range(10)}
        assert made.lost == 4
        made.add(record())
        await until_stored(db, 11)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        db.close()
    assert caplog.text.count("are held until the database answers") == 1


async def test_a_record_that_cannot_be_written_keeps_no_other_from_it(db: Database) -> None:
    made = Metering(Context(settings(), db))
    made.add(record(status=object()))
    await made.flush()
    made.add(record())
    await made.flush()
    assert (len(await stored(db)), made.lost) == (1, 1)


# Spans and sums.


async def test_a_span_begins_at_its_first_moment_and_ends_before_its_last(db: Database) -> None:
    times = [NOW - 1, NOW, NOW + 0.5, NOW + 1]
    await db.write(lambda tx: usage.add(tx, [record(at) for at in times]))
    await db.write(lambda tx: usage.add(tx, [record(project_id=OTHER), record(service_id=OTHER)]))
    found = await stored(db, Span(PROJECT, SERVICE, NOW, NOW + 1))
    assert [row.started_at for row in found] == [NOW + 0.5, NOW]
    found = await db.read(lambda c: usage.page(c, Span(PROJECT, SERVICE), found[0].id, 1))
    assert [row.started_at for row in found] == [NOW, NOW - 1]


async def test_sums_by_day_token_and_service(db: Database) -> None:
    another = new_id()
    made = [
        record(NOW),
        record(NOW, authority_id=another, completion_tokens=100),
        record(NOW, tokens=Counted.PARTIAL, prompt_tokens=None, completion_tokens=5, outcome=Outcome.FAILED),
        record(NOW - SECONDS_PER_DAY, outcome=Outcome.CLIENT_GONE),
        refused(service_id=None, alias=None, requests=4),
    ]
    await db.write(lambda tx: usage.add(tx, made))

    async def sums(by: usage.Grouping) -> list[tuple[Any, ...]]:
        found = await db.read(lambda c: usage.sums(c, Span(PROJECT), by, 10))
        key = {"day": "day", "token": "authority_id", "service": "service_id"}[by]
        return [
            (
                row._mapping[key],
                *(int(n) for n in (row.requests, row.completed, row.refused, row.failed, row.client_gone)),
                *(int(n) for n in (row.prompt_tokens, row.completion_tokens, row.uncounted)),
            )
            for row in found
        ]

    day = int(NOW // SECONDS_PER_DAY)
    assert await sums("day") == [(day, 7, 2, 4, 1, 0, 14, 108, 1), (day - 1, 1, 0, 0, 0, 1, 7, 3, 0)]
    assert await sums("token") == [(another, 1, 1, 0, 0, 0, 7, 100, 0), (TOKEN, 7, 1, 4, 1, 1, 14, 11, 1)]
    assert await sums("service") == [(SERVICE, 4, 2, 0, 1, 1, 21, 111, 1), (None, 4, 0, 4, 0, 0, 0, 0, 0)]


# Retention.


@pytest.mark.parametrize(("days", "left"), [(30, 3), (0, 10)])
async def test_what_is_older_than_it_is_kept_goes(
    db: Database, monkeypatch: pytest.MonkeyPatch, days: int, left: int
) -> None:
    monkeypatch.setattr(metering, "PURGE_RECORDS_MAX", 3)
    old = [record(NOW - 31 * SECONDS_PER_DAY - number) for number in range(7)]
    await db.write(lambda tx: usage.add(tx, [*old, *(record(NOW - number) for number in range(3))]))
    retention = Retention(replace(Context(settings(retention_days=days), db), now=lambda: NOW))
    assert await retention.sweep() == 10 - left
    assert len(await stored(db)) == left


async def test_a_flush_that_is_refused_forgets_nothing(tmp_path: Path) -> None:
    db = Database(f"sqlite:///{tmp_path / 'away' / 'ficc.sqlite'}")
    made = Metering(Context(settings(), db))
    made.add(record())
    with pytest.raises(Refused):
        await made.flush()
    (tmp_path / "away").mkdir()
    db.migrate()
    await made.flush()
    assert len(await stored(db)) == 1
    db.close()

"""Memory peaks as rows: the highest of each combination of settings, within one project."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ficc.controller.store import models, peaks, services
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Database, Transaction
from ficc.controller.store.peaks import Settings
from ficc.inference.schema import Specification
from support import rows
from support.specifications import document

NOW = 1_000_000.0


@pytest.fixture
async def attempt(db: Database) -> tuple[str, str, Attempt, Settings]:
    """A project, a model of it, an attempt of a service with it, and what its memory depends on."""

    def work(tx: Transaction) -> tuple[str, str, Attempt, Settings]:
        project_id = rows.project(tx, "one")
        model = rows.model(tx, project_id, b"weights")
        spec = Specification.model_validate(document(model_id=model.id, context=1024, concurrency=3))
        row = rows.service_row(tx, project_id, model.id, "a")
        after = replace(
            row, spec=spec.as_json(), record=replace(row.record, revision=row.record.revision + 1)
        )
        assert services.put(tx, row, after)
        one = rows.attempt(tx, after, 0)
        one = replace(one, plan={**one.plan, "model_revision": model.revision})
        return project_id, model.id, one, Settings.of(model.revision, spec)

    return await db.write(work)


async def test_the_highest_counts(db: Database, attempt: tuple[str, str, Attempt, Settings]) -> None:
    project_id, _, one, settings = attempt

    async def known(of: Settings, project: str = project_id) -> int | None:
        return await db.read(lambda c: peaks.highest(c, project, of))

    assert await known(settings) is None
    for peak in (100, 300, 200):
        await db.write(lambda tx, p=peak: peaks.note(tx, one, p, NOW))
    assert await known(settings) == 300
    assert (settings.context, settings.concurrency) == (1024, 3)
    for other in (
        replace(settings, context=2048),
        replace(settings, concurrency=4),
        replace(settings, image_digest="sha256:" + 64 * "9"),
        replace(settings, model_revision=64 * "9"),
    ):
        assert await known(other) is None
    assert await known(settings, await db.write(lambda tx: rows.project(tx, "other"))) is None


async def test_measurements_at_once(db: Database, attempt: tuple[str, str, Attempt, Settings]) -> None:
    project_id, _, one, settings = attempt
    await asyncio.gather(*(db.write(lambda tx, n=n: peaks.note(tx, one, n, NOW)) for n in range(1, 9)))
    assert await db.read(lambda c: peaks.highest(c, project_id, settings)) == 8


async def test_what_is_of_no_service_or_of_another_generation_is_left(
    db: Database, attempt: tuple[str, str, Attempt, Settings]
) -> None:
    project_id, _, one, settings = attempt
    for other in (replace(one, service_id=None), replace(one, generation=one.generation + 1)):
        await db.write(lambda tx, o=other: peaks.note(tx, o, 100, NOW))
    assert await db.read(lambda c: peaks.highest(c, project_id, settings)) is None


async def test_they_go_with_their_model(db: Database, attempt: tuple[str, str, Attempt, Settings]) -> None:
    project_id, model_id, one, settings = attempt
    await db.write(lambda tx: peaks.note(tx, one, 100, NOW))
    service_id = one.service_id
    assert service_id is not None
    await db.write(lambda tx: services.remove(tx, service_id))
    await db.write(lambda tx: models.delete_model(tx, project_id, model_id))
    assert await db.read(lambda c: peaks.highest(c, project_id, settings)) is None

"""The history of a replica as rows: what decides on another attempt, what logs are asked for by, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import func, select

from ficc.controller.operations.restarts import policy_of, retries
from ficc.controller.store import attempts, histories, schema, services
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Database, Transaction
from ficc.controller.store.histories import ATTEMPTS_KEPT, GENERATIONS_KEPT
from ficc.controller.store.services import Service
from ficc.domain import attempt
from ficc.domain.attempt import Outcome, State
from ficc.domain.errors import Reason
from ficc.domain.restart import Again, Past, Policy
from ficc.identifiers import new_id
from ficc.settings import Lifecycle
from support import rows

WHY = Reason("engine_exited", "The engine exited with status 1.")


@pytest.fixture
async def service(db: Database) -> Service:
    def work(tx: Transaction) -> Service:
        project_id = rows.project(tx, "one")
        model = rows.model(tx, project_id, b"weights")
        return rows.service_row(tx, project_id, model.id, "a")

    return await db.write(work)


def end(
    tx: Transaction,
    one: Attempt,
    at: float,
    outcome: Outcome = Outcome.FAILED,
    ready_at: float | None = None,
    released: bool = True,
) -> Attempt:
    """The attempt ends at this time, and a minute later it is released."""
    finished = attempts.changed_to(one, attempt.Record(State.FINISHED, True, outcome, WHY), at)
    finished = replace(finished, ready_at=ready_at)
    assert attempts.put(tx, one, finished)
    if not released:
        return finished
    after = attempts.changed_to(finished, replace(finished.record, state=State.RELEASED), at + 60)
    assert attempts.put(tx, finished, after)
    return after


def following(tx: Transaction, one: Attempt) -> Attempt:
    attempt_id = new_id()
    attempts.add(tx, attempt_id=attempt_id, workload_id=one.workload_id, now=0.0)
    found = attempts.get(tx.connection, attempt_id)
    assert found is not None
    return found


async def test_how_attempts_ended_is_told_newest_first_and_counts_from_their_end(
    db: Database, service: Service
) -> None:
    def work(tx: Transaction) -> str:
        one = rows.attempt(tx, service)
        end(tx, one, 1000.0, ready_at=900.0)
        end(tx, following(tx, one), 2000.0, Outcome.CANCELLED)
        following(tx, one)  # it has no end
        return one.workload_id

    workload_id = await db.write(work)
    assert await db.read(lambda c: histories.pasts(c, {workload_id})) == {
        workload_id: [Past(Outcome.CANCELLED, "engine_exited"), Past(Outcome.FAILED, "engine_exited", 100.0)]
    }
    assert await db.read(lambda c: histories.pasts(c, set())) == {}


async def test_a_replica_is_tried_again_so_long_after_its_end(db: Database, service: Service) -> None:
    """However long its release took."""
    one = await db.write(lambda tx: end(tx, rows.attempt(tx, service), 1000.0))
    lifecycle = Lifecycle(restart_delay_seconds=7)
    planned = await db.read(lambda c: retries(c, lifecycle, [(service, [one])]))
    assert planned[one.id].again == Again(7, 1, lifecycle.restart_failures_max)
    assert planned[one.id].at == 1007.0
    stopped = replace(service, record=replace(service.record, desired="stopped"))
    assert await db.read(lambda c: retries(c, lifecycle, [(stopped, [one])])) == {}


@pytest.mark.parametrize(
    ("restart", "policy"),
    [
        (None, Policy()),
        ("on_failure", Policy()),
        ("never", Policy(on_failure=False)),
        ({"on_failure": {}}, Policy()),
        ({"on_failure": {"factor": 3, "failures_max": None}}, Policy(factor=3)),
    ],
)
async def test_what_a_specification_leaves_out_is_the_settings(
    service: Service, restart: object, policy: Policy
) -> None:
    row = replace(service, spec={**service.spec, "restart": restart})
    assert policy_of(row, Lifecycle()) == policy


async def test_rows_of_attempts_are_kept_up_to_a_number_and_never_lost_while_held(
    db: Database, service: Service
) -> None:
    """Neither one that is not released, nor the newest, whatever became of it."""

    def work(tx: Transaction) -> tuple[str, list[int]]:
        one = rows.attempt(tx, service)
        held = following(tx, one)
        end(tx, one, 1.0)
        end(tx, held, 1.0, Outcome.UNKNOWN, released=False)
        for _ in range(ATTEMPTS_KEPT + 5):
            end(tx, following(tx, one), 2.0)
            histories.prune_attempts(tx, one.workload_id)
        numbers = select(schema.attempts.c.number).order_by(schema.attempts.c.number)
        return one.workload_id, list(tx.execute(numbers).scalars())

    workload_id, numbers = await db.write(work)
    newest = ATTEMPTS_KEPT + 7
    assert numbers == [2, *range(newest - ATTEMPTS_KEPT + 1, newest + 1)]
    assert len((await db.read(lambda c: histories.pasts(c, {workload_id})))[workload_id]) == ATTEMPTS_KEPT + 1


async def test_generations_are_kept_up_to_a_number_and_never_lost_while_held(
    db: Database, service: Service
) -> None:
    def work(tx: Transaction) -> None:
        row = service
        for generation in range(1, GENERATIONS_KEPT + 4):
            after = replace(row, record=replace(row.record, generation=generation, revision=generation + 1))
            assert services.put(tx, row, after)
            row = after
            end(tx, rows.attempt(tx, row), 1.0, released=generation != 2)
            histories.prune_generations(tx, row.id)

    await db.write(work)
    generations = await db.read(
        lambda c: list(c.execute(select(schema.workloads.c.generation).order_by("generation")).scalars())
    )
    newest = GENERATIONS_KEPT + 3
    assert generations == [2, *range(newest - GENERATIONS_KEPT + 1, newest + 1)]
    count = await db.read(lambda c: c.execute(select(func.count()).select_from(schema.attempts)).scalar())
    assert count == len(generations)
    kept = await db.read(lambda c: histories.of_replica(c, service.id, 0, 3))
    assert [one.fence.generation for one in kept] == [newest, newest - 1, newest - 2]
    assert await db.read(lambda c: histories.of_replica(c, service.id, 1, 3)) == []

"""Services and attempts as rows: of two writers one wins (L8), and reservations are counted by node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ficc.controller.store import attempts, nodes, services
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Database, Transaction
from ficc.controller.store.services import Service
from ficc.domain import attempt, service
from ficc.domain.attempt import State
from ficc.domain.lease import SECOND, Belief
from ficc.identifiers import new_id
from support import rows

NOW = 1_000_000.0
BOOT = "this boot"


@pytest.fixture
async def model(db: Database) -> tuple[str, str]:
    """A project and a model of it."""

    def work(tx: Transaction) -> tuple[str, str]:
        project_id = rows.project(tx, "one")
        return project_id, rows.model(tx, project_id, b"weights").id

    return await db.write(work)


async def add_service(db: Database, model: tuple[str, str], alias: str = "a", generation: int = 1) -> Service:
    project_id, model_id = model
    return await db.write(lambda tx: rows.service_row(tx, project_id, model_id, alias, generation=generation))


async def add_attempt(db: Database, of: Service, replica: int = 0) -> Attempt:
    return await db.write(lambda tx: rows.attempt(tx, of, replica))


def in_state(one: Attempt, state: State, **others: object) -> Attempt:
    return replace(one, record=attempt.Record(state), **others)  # type: ignore[arg-type]


async def put(db: Database, before: Attempt, after: Attempt) -> bool:
    return await db.write(lambda tx: attempts.put(tx, before, after))


# L8: two writers.


async def test_of_writers_that_read_the_same_service_one_wins(db: Database, model: tuple[str, str]) -> None:
    row = await add_service(db, model)

    def stopped(generation: int) -> Service:
        record = replace(row.record, state=service.State.STOPPED, revision=2, generation=generation)
        return replace(row, record=record)

    won = await asyncio.gather(
        *(db.write(lambda tx, n=n: services.put(tx, row, stopped(n))) for n in range(8))
    )
    assert won.count(True) == 1
    found = await db.read(lambda c: services.get(c, row.project_id, row.id))
    assert found is not None
    assert found.record.generation == won.index(True)


async def test_of_writers_that_read_the_same_attempt_one_wins(db: Database, model: tuple[str, str]) -> None:
    one = await add_attempt(db, await add_service(db, model))
    won = await asyncio.gather(*(put(db, one, in_state(one, State.ADMITTED)) for _ in range(8)))
    assert won.count(True) == 1


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"record": attempt.Record(State.STOPPING)},
        {"lease_sequence": 8},
        {"ready_at": NOW + 1},
    ],
)
async def test_what_was_decided_on_an_attempt_that_changed_meanwhile_is_not_written(
    db: Database, model: tuple[str, str], meanwhile: dict[str, object]
) -> None:
    planned = await add_attempt(db, await add_service(db, model))
    before = in_state(planned, State.RUNNING, lease_sequence=7, boot_id=BOOT)
    assert await put(db, planned, before)
    changed = replace(before, **meanwhile)  # type: ignore[arg-type]
    assert await put(db, before, changed)
    assert not await put(db, before, replace(before, deadline_at=NOW))
    assert await db.read(lambda c: attempts.get(c, before.id)) == changed


# Leases.


async def test_renewing_raises_the_leases_of_live_attempts_of_this_boot_on_this_node(
    db: Database, model: tuple[str, str]
) -> None:
    row = await add_service(db, model)
    expected = {}
    for replica, state in enumerate(State):
        planned = await add_attempt(db, row, replica)
        leased = in_state(planned, state, lease_sequence=5, boot_id=BOOT)
        assert await put(db, planned, leased)
        if state in attempt.LIVE:
            expected[leased.fence] = 6
    unleased = await add_attempt(db, row, 40)
    assert await put(db, unleased, in_state(unleased, State.RUNNING, boot_id=BOOT))
    earlier = await add_attempt(db, row, 41)
    assert await put(db, earlier, in_state(earlier, State.RUNNING, lease_sequence=5, boot_id="earlier"))

    renew, belief = attempts.renew_leases, Belief(BOOT, 80 * SECOND, 60)
    assert await db.write(lambda tx: renew(tx, new_id(), BOOT, belief)) == []
    assert dict(await db.write(lambda tx: renew(tx, rows.NODE_ID, BOOT, belief))) == expected
    some = await db.read(lambda c: attempts.get(c, next(iter(expected)).attempt_id))
    assert some is not None
    assert (some.lease_sequence, some.belief) == (6, belief)


@pytest.mark.parametrize(
    ("renewed", "left"),
    [
        (Belief(BOOT, 90 * SECOND, 5), Belief(BOOT, 90 * SECOND, 60)),
        (Belief(BOOT, 70 * SECOND, 5), Belief(BOOT, 80 * SECOND, 60)),  # what was granted for longer stands
        (Belief("another", 10 * SECOND, 90), Belief("another", 10 * SECOND, 90)),  # not to be compared
    ],
)
async def test_l14_what_a_renewal_leaves_of_an_earlier_belief(
    db: Database, model: tuple[str, str], renewed: Belief, left: Belief
) -> None:
    planned = await add_attempt(db, await add_service(db, model))
    earlier = Belief(BOOT, 80 * SECOND, 60)
    leased = in_state(planned, State.RUNNING, lease_sequence=1, boot_id=BOOT, belief=earlier)
    assert await put(db, planned, leased)
    await db.write(lambda tx: attempts.renew_leases(tx, rows.NODE_ID, BOOT, renewed))
    found = await db.read(lambda c: attempts.get(c, planned.id))
    assert found is not None
    assert found.belief == left


async def test_renewals_at_the_same_moment_have_sequences_of_their_own(
    db: Database, model: tuple[str, str]
) -> None:
    planned = await add_attempt(db, await add_service(db, model))
    leased = in_state(planned, State.RUNNING, lease_sequence=1, boot_id=BOOT)
    assert await put(db, planned, leased)
    belief = Belief(BOOT, 80 * SECOND, 60)
    renewed = await asyncio.gather(
        *(db.write(lambda tx: attempts.renew_leases(tx, rows.NODE_ID, BOOT, belief)) for _ in range(6))
    )
    assert sorted(sequence for ((_, sequence),) in renewed) == [2, 3, 4, 5, 6, 7]
    assert not await put(db, leased, in_state(leased, State.STOPPING))  # it was read before a renewal


# What a service has.


async def test_the_current_attempts_are_the_newest_of_each_replica_of_this_generation(
    db: Database, model: tuple[str, str]
) -> None:
    row = await add_service(db, model)
    await add_attempt(db, row, 0)
    record = replace(row.record, generation=2, revision=2)
    after = replace(row, record=record)
    assert await db.write(lambda tx: services.put(tx, row, after))
    second = await add_attempt(db, after, 1)
    first = await add_attempt(db, after, 0)
    again_id = new_id()
    await db.write(lambda tx: attempts.add(tx, attempt_id=again_id, workload_id=second.workload_id, now=NOW))
    found = (await db.read(lambda c: attempts.current(c, [after])))[row.id]
    assert [(one.id, one.replica, one.number) for one in found] == [(first.id, 0, 1), (again_id, 1, 2)]


async def test_what_is_not_released_counts_against_its_node_whoever_it_belongs_to(
    db: Database, model: tuple[str, str]
) -> None:
    project_id = await db.write(lambda tx: rows.project(tx, "other"))
    theirs = await db.write(lambda tx: rows.model(tx, project_id, b"theirs").id)
    mine = await add_service(db, model)
    other = await add_service(db, (project_id, theirs))
    held = [await add_attempt(db, mine, 0), await add_attempt(db, mine, 1), await add_attempt(db, other)]
    assert await put(db, held[0], in_state(held[0], State.FINISHED))  # not yet proved to be gone
    assert await put(db, held[1], in_state(held[1], State.RELEASED))

    elsewhere = new_id()
    sums = await db.read(lambda c: nodes.reserved(c, [rows.NODE_ID, elsewhere]))
    one = rows.NODE_LIMITS
    assert sums[rows.NODE_ID].as_json() == {
        name: value * 2 if isinstance(value, int) else value for name, value in one.items()
    }
    assert sums[elsewhere].memory_bytes == 0
    assert [a.id for a in await db.read(lambda c: attempts.held_on(c, rows.NODE_ID))] == [
        a.id for a in sorted((held[0], held[2]), key=lambda a: a.workload_id)
    ]
    unreleased = await db.read(lambda c: attempts.unreleased(c, [mine.id, other.id]))
    assert {key: [a.id for a in found] for key, found in unreleased.items()} == {
        mine.id: [held[0].id],
        other.id: [held[2].id],
    }


async def test_a_reconciler_is_shown_what_is_not_at_rest(db: Database, model: tuple[str, str]) -> None:
    project_id, model_id = model
    at_rest, holding = {}, {}
    for state in service.State:
        at_rest[state] = await db.write(
            lambda tx, s=state: rows.service_row(tx, project_id, model_id, f"rest-{s}", s)
        )
        holding[state] = await db.write(
            lambda tx, s=state: rows.service_row(tx, project_id, model_id, f"hold-{s}", s)
        )
        await add_attempt(db, holding[state])
    shown = {row.id for row in await db.read(services.unsettled)}
    assert shown == {row.id for row in holding.values()} | {
        row.id for state, row in at_rest.items() if state not in service.ENDED
    }


async def test_removing_a_service_takes_all_of_it_and_nothing_else(
    db: Database, model: tuple[str, str]
) -> None:
    gone, kept = await add_service(db, model, "gone"), await add_service(db, model, "kept")
    lost, held = await add_attempt(db, gone), await add_attempt(db, kept)
    await db.write(lambda tx: services.remove(tx, gone.id))
    assert await db.read(lambda c: attempts.get(c, lost.id)) is None
    assert await db.read(lambda c: attempts.get(c, held.id)) == held
    assert await db.read(lambda c: services.by_alias(c, gone.project_id, "gone")) is None
    assert await db.read(lambda c: services.by_alias(c, gone.project_id, "kept")) == kept


async def test_pages_of_services_are_newest_first(db: Database, model: tuple[str, str]) -> None:
    made = [(await add_service(db, model, f"s{n}")).id for n in range(5)]
    first = await db.read(lambda c: services.page(c, model[0], None, 2))
    assert [row.id for row in first] == made[:1:-1]
    rest = await db.read(lambda c: services.page(c, model[0], first[1].id, 10))
    assert [row.id for row in rest] == made[2::-1]
    assert await db.read(lambda c: services.page(c, new_id(), None, 10)) == []

"""Jobs as rows and as operations of several controllers on one database: of submissions under one key one makes the
job, of two writers one wins, nodes are never promised twice (L8), and a release is audited or not done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import func, select

from ficc.content.store import ContentStore
from ficc.controller.operations.beliefs import Beliefs
from ficc.controller.operations.context import Context, Page
from ficc.controller.operations.estimates import Estimates
from ficc.controller.operations.losses import Losses
from ficc.controller.operations.planning import Planning
from ficc.controller.operations.ports import NodeLink
from ficc.controller.operations.submission import Submission
from ficc.controller.operations.workloads import Workloads
from ficc.controller.store import attempts, audit, nodes, schema, services, workloads
from ficc.controller.store.database import Database, Transaction
from ficc.domain import attempt, lease, workload
from ficc.domain.access import Actor
from ficc.domain.attempt import Outcome, State
from ficc.domain.errors import Reason, Refused
from ficc.domain.plan import Limits, Runtime
from ficc.identifiers import new_id
from ficc.settings import Settings
from support import rows
from support.contents import owner_of

RUNTIME = Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64)
ROOM = Limits(1000, 256 << 20, 0, 64, 16 << 20, 1024)
LIMITS = Limits(400, 64 << 20, 0, 16, 1 << 20, 64)
SNAPSHOT = {
    "boot_id": "one",
    "capacity": ROOM.as_json(),
    "free": ROOM.as_json(),
    "runtimes": [RUNTIME.as_json()],
}
LOST = Reason("lease_over", "The node has not answered.")


class Connected:
    """One node, connected, that says nothing of any attempt."""

    node_id = rows.NODE_ID
    snapshot = SNAPSHOT

    def link(self, node_id: str) -> NodeLink | None:
        return cast(NodeLink, self) if node_id == self.node_id else None

    def links(self) -> Sequence[NodeLink]:
        return [cast(NodeLink, self)]

    def reported(self, attempt_id: str) -> attempt.Record | None:
        return None


def operations(db: Database, folder: Path) -> Workloads:
    """A controller's, as far as jobs go."""
    context = Context(Settings(state_directory=folder), db)
    store = ContentStore(folder / "content", reserve_bytes=0)
    planning = Planning(context, Connected(), Estimates(store))
    return Workloads(context, Connected(), planning, Losses(context, store), Beliefs(context))


@pytest.fixture
async def owner(db: Database) -> Actor:
    def work(tx: Transaction) -> str:
        nodes.put_snapshot(tx, rows.NODE_ID, name="here", mode="managed", snapshot=SNAPSHOT, now=time.time())
        return rows.project(tx, "one")

    return owner_of(await db.write(work))


@pytest.fixture
def here(db: Database, tmp_path: Path) -> Workloads:
    return operations(db, tmp_path)


@pytest.fixture
async def there(db: Database, tmp_path: Path) -> AsyncIterator[Workloads]:
    """Another controller's connections to the same database."""
    found = Database(db.url)
    yield operations(found, tmp_path)
    found.close()


def submission(key: str | None = None, **changes: Any) -> Submission:
    asked = Submission(
        node_id=rows.NODE_ID,
        runtime=RUNTIME,
        argv=("/bin/true",),
        environment={},
        limits=LIMITS,
        inputs=(),
        outputs=(),
        sensitive=False,
        deadline_seconds=60,
        idempotency_key=key,
    )
    return replace(asked, **changes)


async def refusal(work: Any) -> str:
    with pytest.raises(Refused) as caught:
        await work
    return caught.value.code


async def count(db: Database, table: Any) -> int:
    return await db.read(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())


# Submissions.


async def test_of_submissions_under_one_key_at_the_same_moment_one_makes_the_job(
    db: Database, owner: Actor, here: Workloads, there: Workloads
) -> None:
    answers = await asyncio.gather(
        *(controller.submit(owner, submission("key")) for controller in (here, there) * 6)
    )
    assert sum(made for _, made in answers) == 1
    assert len({view.workload.id for view, _ in answers}) == 1
    assert await count(db, schema.workloads) == await count(db, schema.attempts) == 1


async def test_of_two_jobs_under_one_key_at_the_same_moment_one_is_refused(
    db: Database, owner: Actor, here: Workloads, there: Workloads
) -> None:
    answers = await asyncio.gather(
        here.submit(owner, submission("key")),
        there.submit(owner, submission("key", argv=("/bin/false",))),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert [one.code for one in refused] == ["idempotency_conflict"]
    assert await count(db, schema.workloads) == 1


async def test_a_key_answers_also_when_the_job_could_not_be_made_any_more(
    db: Database, owner: Actor, here: Workloads
) -> None:
    view, made = await here.submit(owner, submission("key", limits=replace(LIMITS, cpu_millis=900)))
    assert made
    assert (
        await refusal(here.submit(owner, submission(limits=replace(LIMITS, cpu_millis=900))))
        == "does_not_fit"
    )
    again, made = await here.submit(owner, submission("key", limits=replace(LIMITS, cpu_millis=900)))
    assert (again.workload.id, made) == (view.workload.id, False)


async def test_l8_a_node_is_not_promised_twice(
    db: Database, owner: Actor, here: Workloads, there: Workloads
) -> None:
    """Two of these fit."""
    answers = await asyncio.gather(
        *(controller.submit(owner, submission()) for controller in (here, there) * 4), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert {getattr(one, "code", one) for one in refused} == {"does_not_fit"}
    assert len(refused) == 6
    reserved = (await db.read(lambda c: nodes.reserved(c, [rows.NODE_ID])))[rows.NODE_ID]
    assert reserved.cpu_millis == 800


# Rows.


async def job(db: Database, owner: Actor, **changes: Any) -> workloads.Workload:
    return await db.write(lambda tx: rows.job(tx, owner.project_id, **changes))


async def test_of_writers_that_read_the_same_job_one_wins(db: Database, owner: Actor) -> None:
    row = await job(db, owner)
    assert row.record is not None
    record = workload.advance(row.record, workload.Cancel())
    after = replace(row, record=record, revision=record.revision)
    won = await asyncio.gather(*(db.write(lambda tx: workloads.put_job(tx, row, after)) for _ in range(6)))
    assert won.count(True) == 1
    assert await db.read(lambda c: workloads.get(c, owner.project_id, row.id)) == after
    assert await db.read(lambda c: workloads.get(c, new_id(), row.id)) is None


async def test_the_newest_attempts_are_shown_newest_first(db: Database, owner: Actor) -> None:
    many, few = await job(db, owner), await job(db, owner)
    for _ in range(workloads.ATTEMPTS_SHOWN + 2):
        await db.write(lambda tx: attempts.add(tx, attempt_id=new_id(), workload_id=many.id, now=1.0))
    seen = await db.read(lambda c: workloads.seen(c, [many.id, few.id]))
    assert [one.number for one in seen[many.id]] == list(range(13, 3, -1))
    assert [one.number for one in seen[few.id]] == [1]


async def test_what_is_not_at_rest_is_a_job_that_goes_on_or_holds_something(
    db: Database, owner: Actor
) -> None:
    service = await db.write(
        lambda tx: rows.service_row(tx, owner.project_id, rows.model(tx, owner.project_id, b"x").id, "a")
    )
    await db.write(lambda tx: rows.attempt(tx, service))  # a replica is its service's
    expected = set()
    for state in workload.State:
        for released in (False, True):
            ended = state is workload.State.ENDED
            record = workload.Record(state, 1, Outcome.FAILED if ended else None)
            row = await job(db, owner, record=record, revision=1)
            (one,) = (await db.read(lambda c, r=row: attempts.of_workloads(c, [r.id])))[row.id]
            if released:
                gone = attempt.Record(State.RELEASED, True, Outcome.FAILED, LOST)
                assert await db.write(lambda tx, o=one, g=gone: attempts.put(tx, o, replace(o, record=g)))
            if not (ended and released):
                expected.add(row.id)
    assert {row.id for row in await db.read(workloads.unsettled)} == expected


async def test_a_replicas_workload_has_another_revision_when_its_state_changes(
    db: Database, owner: Actor
) -> None:
    service = await db.write(
        lambda tx: rows.service_row(tx, owner.project_id, rows.model(tx, owner.project_id, b"x").id, "a")
    )
    one = await db.write(lambda tx: rows.attempt(tx, service))

    async def revision() -> int:
        found = await db.read(lambda c: workloads.get(c, owner.project_id, one.workload_id))
        assert found is not None
        assert (found.record, found.service_id) == (None, service.id)
        return found.revision

    revisions = [await revision()]
    for state in (State.ADMITTED, State.RUNNING, State.STOPPING, State.FINISHED, State.RELEASED):
        outcome = Outcome.FAILED if state in (State.FINISHED, State.RELEASED) else None
        after = replace(one, record=attempt.Record(state, True, outcome))
        assert await db.write(lambda tx, b=one, a=after: attempts.put(tx, b, a))
        one = after
        revisions.append(await revision())
    assert revisions == [1, 1, 2, 3, 4, 4]  # admitted is still queued, released is still ended


async def test_whoever_changes_an_attempt_tells_of_its_workload(db: Database, owner: Actor) -> None:
    told: list[tuple[str, str]] = []
    db.on_commit(told.extend)
    row = await job(db, owner)
    assert ("workload", row.id) in told
    assert not [one for one in told if one[0] == "service"]
    (one,) = (await db.read(lambda c: attempts.of_workloads(c, [row.id])))[row.id]
    told.clear()
    await db.write(lambda tx: attempts.put(tx, one, replace(one, record=attempt.Record(State.ADMITTED))))
    assert told == [("workload", row.id)]


# Releases.


async def lost(db: Database, row: workloads.Workload) -> attempts.Attempt:
    """Its attempt, whose lease was over long ago, as a controller of this boot believed."""
    (one,) = (await db.read(lambda c: attempts.of_workloads(c, [row.id])))[row.id]
    record = attempt.Record(State.FINISHED, True, Outcome.UNKNOWN, LOST)
    boot_id, _ = Context(Settings(), db).lease_clock()
    after = replace(one, record=record, lease_sequence=3, belief=lease.Belief(boot_id, 1, 60))
    assert await db.write(lambda tx: attempts.put(tx, one, after))
    return after


async def test_of_releases_at_the_same_moment_one_is_done_and_audited(
    db: Database, owner: Actor, here: Workloads, there: Workloads
) -> None:
    row = await job(db, owner)
    one = await lost(db, row)
    answers = await asyncio.gather(
        *(controller.release(owner, row.id, 0, "a-request") for controller in (here, there) * 3),
        return_exceptions=True,
    )
    refused = {getattr(answer, "code", answer) for answer in answers if isinstance(answer, BaseException)}
    assert refused <= {"revision_conflict", "action_not_allowed"}
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 1
    (entry,) = await db.read(lambda c: audit.page(c, owner.project_id, None, 10))
    assert (entry.action, entry.object_id, entry.request_id) == ("workload.release", row.id, "a-request")
    assert entry.details["attempts"] == {one.id: "unknown"}
    assert await db.read(lambda c: audit.page(c, new_id(), None, 10)) == []
    found = await db.read(lambda c: attempts.get(c, one.id))
    assert found is not None
    assert found.released
    assert (await here.get(owner, row.id)).attempts[0].released


async def test_a_lease_of_another_boot_is_waited_for_from_when_it_was_seen(
    db: Database, owner: Actor, here: Workloads
) -> None:
    """L14: what another machine's clock said is nothing here."""
    row = await job(db, owner)
    one = await lost(db, row)
    other = replace(one, belief=lease.Belief("another boot", 1, 60), lease_sequence=4)
    assert await db.write(lambda tx: attempts.put(tx, one, other))
    with pytest.raises(Refused) as caught:
        await here.release(owner, row.id, 0, "a-request")
    assert caught.value.code == "lease_not_over"
    patience = lease.patience_ns(60) // lease.SECOND
    assert caught.value.retry_after_seconds is not None
    assert patience - 30 <= caught.value.retry_after_seconds <= patience + 1
    assert await count(db, schema.audit) == 0


async def test_an_attempt_that_was_never_sent_is_not_released(
    db: Database, owner: Actor, here: Workloads
) -> None:
    row = await job(db, owner)
    assert await refusal(here.release(owner, row.id, 0, "a-request")) == "action_not_allowed"


async def test_removing_a_service_takes_its_workloads_and_leaves_jobs(db: Database, owner: Actor) -> None:
    service = await db.write(
        lambda tx: rows.service_row(tx, owner.project_id, rows.model(tx, owner.project_id, b"x").id, "a")
    )
    one = await db.write(lambda tx: rows.attempt(tx, service))
    row = await job(db, owner)
    await db.write(lambda tx: services.remove(tx, service.id))
    left = await db.read(lambda c: workloads.page(c, owner.project_id, None, 10))
    assert [found.id for found in left] == [row.id]
    assert one.workload_id != row.id


async def test_a_page_has_no_plans_and_says_where_the_next_begins(
    db: Database, owner: Actor, here: Workloads
) -> None:
    made = [(await job(db, owner)).id for _ in range(5)]
    views, cursor = await here.page(owner, Page(limit=2))
    assert [view.workload.id for view in views] == made[:2:-1]
    assert cursor == made[3]
    assert all(view.plan is None for view in views)
    rest, cursor = await here.page(owner, Page(after=cursor, limit=10))
    assert ([view.workload.id for view in rest], cursor) == (made[2::-1], None)

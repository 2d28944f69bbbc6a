"""Evictions beside everything else that may happen at the same moment, on both databases: whoever comes second
sees the other, and no row ever points at nothing (A23)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import func, select

from ficc.content.store import ContentStore, Key
from ficc.controller.operations import eviction as eviction_operations
from ficc.controller.operations import orphans
from ficc.controller.operations.contents import Contents
from ficc.controller.operations.context import Page, new_id
from ficc.controller.operations.orphans import Orphans
from ficc.controller.reconcilers.sweeper import Sweeper
from ficc.controller.store import attempts, eviction, models, schema
from ficc.controller.store.database import Database, Transaction
from ficc.domain import attempt
from ficc.domain.errors import Refused
from ficc.domain.upload import State
from support import rows
from support.contents import DATA, Controllers, bring, owner_of, write
from support.rows import sha256

A_WHILE_SECONDS = 0.3
"""Long enough for another transaction to come to where it has to wait."""
SEED = 20_260_301


class Gate:
    """Holds whoever comes to it until it is opened."""

    def __init__(self) -> None:
        self._came, self._opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self._came.set()
        assert self._opened.wait(30)

    async def somebody_waits(self) -> None:
        assert await asyncio.to_thread(self._came.wait, 30)

    def open(self) -> None:
        self._opened.set()


def held_after(gate: Gate, real: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which comes back through a gate."""

    def held(*arguments: Any, **named: Any) -> Any:
        found = real(*arguments, **named)
        gate.pass_through()
        return found

    return held


@pytest.fixture
async def another(db: Database) -> AsyncIterator[Database]:
    """Another controller's connections to the same database."""
    found = Database(db.url)
    yield found
    found.close()


@pytest.fixture
async def beside(another: Database, sharing: Controllers) -> AsyncIterator[Controllers]:
    """Another controller on the same database and the same content directory."""
    found = Controllers(another, sharing.store.root.parent)
    yield found
    await found.close()


@pytest.fixture
async def ready(sharing: Controllers, key: Key, model: str) -> str:
    """The model, with its bytes."""
    assert (await bring(sharing.contents(), key, DATA)).state is State.VERIFIED
    return model


async def evict(sharing: Controllers, key: Key, model_id: str) -> dict[str, Any]:
    return await sharing.eviction(sharing.contents()).delete(owner_of(key.project_id), model_id, evict=True)


async def refusal(work: Any) -> str:
    with pytest.raises(Refused) as refused:
        await work
    return refused.value.code


# Starts. `start` is what a submission does of this, in its order and in one transaction.


def start(tx: Transaction, key: Key, model_id: str, then: Callable[[], None] = lambda: None) -> str:
    if models.get(tx.connection, key.project_id, model_id) is None:
        return "not_found"
    if not eviction.use(tx, key.project_id, [key.sha256], time.time()):
        return "model_not_ready"
    then()
    rows.attempt(tx, rows.service_row(tx, key.project_id, model_id, "starting"))
    return "started"


async def test_a23_a_start_that_comes_first_keeps_its_model(
    sharing: Controllers, another: Database, key: Key, ready: str
) -> None:
    gate = Gate()
    starting = asyncio.create_task(another.write(lambda tx: start(tx, key, ready, gate.pass_through)))
    await gate.somebody_waits()
    evicting = asyncio.create_task(refusal(evict(sharing, key, ready)))
    await asyncio.sleep(A_WHILE_SECONDS)
    assert not evicting.done()
    gate.open()
    assert await starting == "started"
    assert await evicting == "model_referenced"
    assert sharing.store.blob(key.sha256).read_bytes() == DATA
    assert (await sharing.record(key)).state is State.VERIFIED


async def test_a23_a_start_that_comes_second_is_refused(
    sharing: Controllers, another: Database, key: Key, ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(eviction, "drop", held_after(gate, eviction.drop))
    evicting = asyncio.create_task(evict(sharing, key, ready))
    await gate.somebody_waits()
    starting = asyncio.create_task(another.write(lambda tx: start(tx, key, ready)))
    await asyncio.sleep(A_WHILE_SECONDS)
    assert not starting.done()
    gate.open()
    assert (await evicting)["bytes_freed"] == len(DATA)
    assert await starting in ("not_found", "model_not_ready")
    assert not sharing.store.blob(key.sha256).exists()
    assert await another.read(_count_of_attempts) == 0


async def test_a23_a_start_beside_the_removal_of_the_metadata_alone(
    sharing: Controllers, another: Database, key: Key, ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes stay, so only the model itself can stop the start."""
    gate = Gate()
    monkeypatch.setattr(models, "delete_model", held_after(gate, models.delete_model))
    deleting = sharing.eviction(sharing.contents()).delete(owner_of(key.project_id), ready, evict=False)
    removing = asyncio.create_task(deleting)
    await gate.somebody_waits()
    starting = asyncio.create_task(another.write(lambda tx: start(tx, key, ready)))
    await asyncio.sleep(A_WHILE_SECONDS)
    gate.open()
    assert (await removing)["removed"]
    assert await starting == "not_found"
    assert await another.read(_count_of_attempts) == 0


def _count_of_attempts(connection: Any) -> int:
    return int(connection.scalar(select(func.count()).select_from(schema.attempts)))


# Attempts without a service hold what their plans name.


def read_by(tx: Transaction, project_id: str, *digests: str) -> attempts.Attempt:
    workload_id, attempt_id = new_id(), new_id()
    inputs = [{"id": str(n), "sha256": d, "bytes": 1, "name": str(n)} for n, d in enumerate(digests)]
    attempts.add_workload(
        tx,
        id=workload_id,
        project_id=project_id,
        service_id=None,
        generation=1,
        replica=0,
        node_id=rows.NODE_ID,
        plan={"limits": dict(rows.NODE_LIMITS), "inputs": inputs},
        plan_digest="0" * 64,
        readiness=None,
        created_at=time.time(),
    )
    attempts.add(tx, attempt_id=attempt_id, workload_id=workload_id, now=time.time())
    found = attempts.get(tx.connection, attempt_id)
    assert found is not None
    return found


async def release(sharing: Controllers, one: attempts.Attempt, now: float) -> None:
    released = attempts.changed_to(one, attempt.Record(attempt.State.RELEASED), now)
    assert await sharing.db.write(lambda tx: attempts.put(tx, one, released))


async def test_an_attempt_holds_what_it_reads_until_it_is_released(
    sharing: Controllers, key: Key, ready: str
) -> None:
    operations, actor = sharing.eviction(sharing.contents()), owner_of(key.project_id)
    one = await sharing.db.write(lambda tx: read_by(tx, key.project_id, key.sha256, "1" * 64))
    view = (await operations.preview(actor, ready)).as_json()
    assert (view["allowed"], view["attempts"], view["reason"]["code"]) == (
        False,
        [one.id],
        "model_referenced",
    )
    with pytest.raises(Refused) as refused:
        await operations.delete(actor, ready, evict=True)
    assert (refused.value.code, refused.value.details) == ("model_referenced", {"attempts": [one.id]})

    assert (await operations.delete(actor, ready, evict=False))["bytes_retained_shared"] == len(DATA)
    for dry_run in (True, False):  # nor is it pruned
        assert (await operations.prune(actor, dry_run=dry_run)).count == 0
    assert sharing.store.has_blob(key.sha256, len(DATA))

    await release(sharing, one, 1_000_000.0)
    items, _ = await operations.page(actor, Page())
    assert items[0]["last_used_at"] == "1970-01-12T13:46:40.000Z"
    assert (await operations.prune(actor, dry_run=False)).bytes_freed == len(DATA)
    assert not sharing.store.blob(key.sha256).exists()


async def test_more_than_one_transactions_worth_is_pruned(
    sharing: Controllers, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_operations, "PRUNED_MAX", 3)
    monkeypatch.setattr(orphans, "MOVES_MAX", 2)
    data = [b"%d" % n for n in range(8)]
    model_id = await sharing.model(project, *data)
    contents, actor = sharing.contents(), owner_of(project)
    for one in data:
        await bring(contents, Key(project, sha256(one)), one)
    operations = sharing.eviction(contents)
    held = await sharing.db.write(lambda tx: read_by(tx, project, sha256(data[0])))
    await operations.delete(actor, model_id, evict=False)
    assert (await operations.prune(actor, dry_run=True)).count == 7
    pruned = await operations.prune(actor, dry_run=False)
    assert (pruned.count, pruned.bytes_freed) == (7, 7)
    assert sharing.store.blob_digests(time.time() + 60) == [sha256(data[0])]
    await release(sharing, held, time.time())
    assert (await operations.prune(actor, dry_run=False)).count == 1
    assert sharing.store.blob_digests(time.time() + 60) == []


async def test_an_attempt_that_is_planned_before_an_eviction_looks_is_seen_by_it(
    sharing: Controllers, another: Database, key: Key, ready: str
) -> None:
    """Nothing but the content's own row makes the eviction wait."""
    gate = Gate()

    def plan(tx: Transaction) -> str:
        assert eviction.use(tx, key.project_id, [key.sha256], time.time())
        gate.pass_through()
        return read_by(tx, key.project_id, key.sha256).id

    planning = asyncio.create_task(another.write(plan))
    await gate.somebody_waits()
    evicting = asyncio.create_task(refusal(evict(sharing, key, ready)))
    await asyncio.sleep(A_WHILE_SECONDS)
    assert not evicting.done()
    gate.open()
    assert await planning
    assert await evicting == "model_referenced"
    assert sharing.store.blob(key.sha256).read_bytes() == DATA


async def test_an_attempt_of_another_project_holds_nothing_here(
    sharing: Controllers, key: Key, ready: str
) -> None:
    elsewhere = await sharing.project("elsewhere")
    await sharing.db.write(lambda tx: read_by(tx, elsewhere, key.sha256))
    assert (await evict(sharing, key, ready))["bytes_freed"] == len(DATA)


async def test_content_was_used_when_an_attempt_at_it_was_planned(
    sharing: Controllers, key: Key, ready: str
) -> None:
    operations, actor = sharing.eviction(sharing.contents()), owner_of(key.project_id)
    assert (await operations.page(actor, Page()))[0][0]["last_used_at"] is None
    used = await sharing.db.write(lambda tx: eviction.use(tx, key.project_id, [key.sha256], 1_000_000.0))
    assert used
    assert (await operations.page(actor, Page()))[0][0]["last_used_at"] == "1970-01-12T13:46:40.000Z"


async def test_nothing_is_used_that_the_project_has_not_proved_to_have(
    sharing: Controllers, key: Key, model: str
) -> None:
    await sharing.publish_elsewhere()
    await write(sharing.contents(), key, DATA)  # every byte, not verified
    for digests in ([key.sha256], ["1" * 64]):
        assert not await sharing.db.write(lambda tx, d=digests: eviction.use(tx, key.project_id, d, 1.0))


# Publishing: another project verifies the bytes that this one evicts.


async def verified_elsewhere(sharing: Controllers, key: Key) -> Key:
    """Another project's content of the same digest, with every byte and not verified yet."""
    project_id = await sharing.project("verifying")
    await sharing.model(project_id, DATA)
    theirs = Key(project_id, key.sha256)
    await write(sharing.contents(), theirs, DATA)
    return theirs


async def test_a_file_that_another_project_is_about_to_record_stays(
    sharing: Controllers, key: Key, ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, gate = await verified_elsewhere(sharing, key), Gate()
    monkeypatch.setattr(sharing.store, "publish", held_after(gate, sharing.store.publish))
    verifying = sharing.contents().verify(theirs)
    await gate.somebody_waits()  # it found the blob there, and gave up its partial
    assert (await evict(sharing, key, ready))["removed"]
    await sharing.contents().orphans.sweep(0.0)
    gate.open()
    assert (await verifying).state is State.VERIFIED
    assert sharing.store.blob(key.sha256).read_bytes() == DATA
    assert await sharing.db.read(models.blob_digests) == {key.sha256}


async def test_a_file_that_was_recorded_anew_before_it_was_removed_stays(
    sharing: Controllers, key: Key, ready: str
) -> None:
    contents = sharing.contents()
    theirs, discard = await verified_elsewhere(sharing, key), contents.discard

    async def late(keys: list[Key], blobs: set[str]) -> None:
        assert blobs == {key.sha256}
        assert (await sharing.contents().verify(theirs)).state is State.VERIFIED
        await discard(keys, blobs)

    contents.discard = late  # type: ignore[method-assign, assignment]
    await sharing.eviction(contents).delete(owner_of(key.project_id), ready, evict=True)
    assert sharing.store.blob(key.sha256).read_bytes() == DATA
    assert await sharing.db.read(models.blob_digests) == {key.sha256}


async def test_who_verifies_while_a_file_is_moved_to_the_bin_publishes_its_own(
    sharing: Controllers, beside: Controllers, key: Key, ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, gate = await verified_elsewhere(sharing, key), Gate()
    move = sharing.store.bin_blob

    def held(sha256: str) -> bool:
        gate.pass_through()
        return move(sha256)

    monkeypatch.setattr(sharing.store, "bin_blob", held)
    evicting = asyncio.create_task(evict(sharing, key, ready))
    await gate.somebody_waits()
    verifying = beside.contents().verify(theirs)
    await asyncio.sleep(A_WHILE_SECONDS)
    assert sharing.store.length(theirs) == len(DATA)  # it has not come to publishing
    gate.open()
    assert (await evicting)["bytes_freed"] == len(DATA)
    assert (await verifying).state is State.VERIFIED
    assert sharing.store.blob(key.sha256).read_bytes() == DATA


async def test_everything_at_once_ends_with_rows_and_files_that_agree(
    sharing: Controllers, beside: Controllers
) -> None:
    """Two controllers, two projects, one digest and one of each project's own: registered, brought, evicted and
    pruned in any order."""
    projects = [await sharing.project("left"), await sharing.project("right")]
    own = {project: project.encode() for project in projects}
    chance = random.Random(SEED)

    async def turn(controllers: Controllers, project: str, steps: list[str]) -> None:
        contents = controllers.contents()
        operations, actor = controllers.eviction(contents), owner_of(project)
        for step in steps:
            with suppress(Refused):  # somebody else was quicker
                if step == "bring":
                    await supply(controllers, contents, project, DATA, own[project])
                elif step == "prune":
                    await operations.prune(actor, dry_run=False)
                elif step == "sweep":
                    await contents.orphans.sweep(0.0)
                elif found := await controllers.db.read(lambda c: models.page(c, project, None, 1)):
                    await operations.delete(actor, found[0].id, evict=step == "evict")

    words = ["bring", "bring", "evict", "delete", "prune", "sweep"]
    await asyncio.gather(
        *(
            turn(controllers, project, [chance.choice(words) for _ in range(15)])
            for project in projects
            for controllers in (sharing, beside, sharing)
        )
    )
    await check(sharing)
    for project in projects:
        await turn(sharing, project, ["evict", "prune"])
    await check(sharing)
    assert await sharing.db.read(models.all_contents) == []
    assert not [path for path in sharing.store.root.rglob("*") if path.is_file()]


async def supply(controllers: Controllers, contents: Contents, project: str, *data: bytes) -> None:
    """Register the files and bring what is missing of each."""
    operations, actor = controllers.models(contents), owner_of(project)
    view, _ = await operations.register(actor, rows.manifest_of(*data))
    for file, whole in zip(view.files, data, strict=True):
        at = file.record.offset
        await operations.upload(actor, view.model.id, file.index, at, whole[at:])


async def check(sharing: Controllers) -> None:
    """Every verified row has its file, every blob its row, and nothing is left over."""
    found = await sharing.db.read(models.all_contents)
    verified = {record.sha256 for _, record in found if record.state is State.VERIFIED}
    assert await sharing.db.read(models.blob_digests) == verified
    for digest in verified:
        assert sha256(sharing.store.blob(digest).read_bytes()) == digest
    await sharing.contents().orphans.sweep(0.0)
    assert set(sharing.store.blob_digests(time.time() + 60)) == verified
    assert list(sharing.store.bin.iterdir()) == []


# The sweeper.


def orphan(store: ContentStore, data: bytes) -> Key:
    key = Key("0" * 26, sha256(data))
    store.write(key, 0, data)
    store.publish(key, len(data))
    return key


async def test_the_sweeper_comes_again_and_again_and_waits_for_the_age_of_orphans(
    sharing: Controllers, key: Key, ready: str
) -> None:
    sweeper = Sweeper(sharing.contents().orphans, 0.02)
    running = asyncio.create_task(sweeper.run())
    young = orphan(sharing.store, b"young")
    await asyncio.sleep(A_WHILE_SECONDS)
    assert sharing.store.blob(young.sha256).exists()
    sharing.clock.ahead = orphans.ORPHAN_SECONDS + 60
    for data in (b"young", b"another"):
        one = orphan(sharing.store, data)
        async with asyncio.timeout(30):
            while sharing.store.blob(one.sha256).exists():
                await asyncio.sleep(0.01)
    running.cancel()
    assert sharing.store.blob(key.sha256).read_bytes() == DATA


async def test_the_sweeper_outlives_a_database_that_does_not_answer(
    sharing: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, times = sharing.contents().orphans, 0
    sweep = Orphans.sweep

    async def unavailable(self: Orphans, age_seconds: float = 0.0) -> None:
        nonlocal times
        times += 1
        if times < 3:
            raise Refused("database_unavailable", "The database does not answer.")
        await sweep(self, age_seconds)

    monkeypatch.setattr(Orphans, "sweep", unavailable)
    one = orphan(sharing.store, b"orphan")
    running = asyncio.create_task(Sweeper(found, 0.01).run())
    async with asyncio.timeout(30):
        while sharing.store.blob(one.sha256).exists():
            await asyncio.sleep(0.01)
    running.cancel()


async def test_what_a_project_was_given_makes_what_it_had_begun_superfluous(
    sharing: Controllers, key: Key, model: str
) -> None:
    await sharing.publish_elsewhere()
    await write(sharing.contents(), key, DATA[:100])
    await sharing.db.write(lambda tx: models.share_blobs(tx, key.project_id, [key.sha256]))
    await sharing.contents().orphans.sweep(0.0)
    assert not sharing.store.partial(key).exists()
    assert sharing.store.has_blob(key.sha256, len(DATA))

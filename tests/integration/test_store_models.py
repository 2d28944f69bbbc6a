"""Models and contents as rows: what is shared, who may write, and what a lost race costs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

from sqlalchemy import func, select

from ficc.controller.operations.contents import settle_models
from ficc.controller.operations.context import new_id
from ficc.controller.store import models, schema
from ficc.controller.store.database import Database, Transaction
from ficc.domain import acquisition, service, upload
from ficc.domain.manifest import File, Manifest
from ficc.domain.upload import State
from support import rows
from support.rows import sha256

A, B, C = b"first file", b"second file", b"third file"
NOW = 1_000_000.0


async def two_projects(db: Database) -> tuple[str, str]:
    return (
        await db.write(lambda tx: rows.project(tx, "one")),
        await db.write(lambda tx: rows.project(tx, "other")),
    )


def put(tx: Transaction, project_id: str, data: bytes, state: State, offset: int | None = None) -> None:
    record = upload.Record(sha256(data), len(data), len(data) if offset is None else offset, state)
    assert models.set_content(tx, project_id, record, token=None)


async def claim(db: Database, project_id: str, token: str, now: float = NOW, kind: str = "upload") -> bool:
    return await db.write(
        lambda tx: models.claim(
            tx, project_id, sha256(A), token=token, kind=kind, now=now, expires_at=now + 60
        )
    )


# What belongs to whom.


async def test_a_content_is_shared_by_the_models_of_a_project_and_by_nobody_else(db: Database) -> None:
    one, other = await two_projects(db)
    first = await db.write(lambda tx: rows.model(tx, one, A, B))
    await db.write(lambda tx: put(tx, one, A, State.VERIFIED))
    second = await db.write(lambda tx: rows.model(tx, one, C, A, name="second"))
    elsewhere = await db.write(lambda tx: rows.model(tx, other, A))

    found = await db.read(lambda c: models.files(c, [first.id, second.id, elsewhere.id]))
    assert [record.state for record in found[first.id]] == [State.VERIFIED, State.MISSING]
    assert [record.sha256 for record in found[second.id]] == [sha256(C), sha256(A)]
    assert [record.state for record in found[second.id]] == [State.MISSING, State.VERIFIED]
    assert [record.state for record in found[elsewhere.id]] == [State.MISSING]
    assert await db.read(lambda c: models.get(c, other, first.id)) is None
    assert await db.read(lambda c: models.file(c, other, first.id, 0)) is None


async def test_a_file_is_found_by_its_index(db: Database) -> None:
    one, _ = await two_projects(db)
    model = await db.write(lambda tx: rows.model(tx, one, A, B))
    look = partial(models.file, project_id=one, model_id=model.id)
    assert await db.read(lambda c: look(c, index=1)) == (
        acquisition.State.REGISTERED,
        upload.Record(sha256(B), len(B)),
    )
    assert await db.read(lambda c: look(c, index=2)) == (acquisition.State.REGISTERED, None)


async def test_a_file_that_stands_twice_in_a_model_is_one_content(db: Database) -> None:
    one, _ = await two_projects(db)
    model = await db.write(lambda tx: rows.model(tx, one, A, A))
    await db.write(lambda tx: put(tx, one, A, State.PARTIAL, 3))
    found = await db.read(lambda c: models.files(c, [model.id]))
    assert [record.offset for record in found[model.id]] == [3, 3]


async def test_the_files_of_many_models_come_each_in_its_order(db: Database) -> None:
    one, _ = await two_projects(db)

    def fill(tx: Transaction) -> list[str]:
        made = []
        for number in range(5):
            files = tuple(File(f"{n}.gguf", 1, sha256(b"%d %d" % (number, n))) for n in range(100))
            manifest = Manifest(f"model {number}", "gguf", files)
            row = models.Model(new_id(), one, manifest.revision, manifest, acquisition.Record(), NOW)
            models.add(tx, row)
            made.append(row.id)
        return made

    ids = await db.write(fill)
    found = await db.read(lambda c: models.files(c, ids))
    for number, model_id in enumerate(ids):
        expected = [sha256(b"%d %d" % (number, n)) for n in range(100)]
        assert [record.sha256 for record in found[model_id]] == expected


async def test_sharing_gives_what_is_held_with_this_size_and_written_by_nobody(db: Database) -> None:
    one, other = await two_projects(db)
    lying = Manifest("lying", "gguf", (File("b.gguf", len(B) + 1, sha256(B)),))

    def fill(tx: Transaction) -> None:
        rows.model(tx, one, A, B, C)
        models.add_blob(tx, sha256(A), len(A), NOW)
        models.add_blob(tx, sha256(B), len(B), NOW)
        rows.model(tx, other, A, C)
        models.add(tx, models.Model(new_id(), other, lying.revision, lying, acquisition.Record(), NOW))
        models.share_blobs(tx, other, [sha256(A), sha256(B), sha256(C)])

    await db.write(fill)
    found = await db.read(lambda c: models.contents(c, other, [sha256(A), sha256(B), sha256(C)]))
    assert found[sha256(A)].record == upload.Record(sha256(A), len(A), len(A), State.VERIFIED)
    assert found[sha256(B)].record.state is State.MISSING
    assert found[sha256(C)].record.state is State.MISSING
    mine = await db.read(lambda c: models.content(c, one, sha256(A)))
    assert mine is not None
    assert mine.record.state is State.MISSING

    assert await claim(db, one, "held")
    await db.write(lambda tx: models.share_blobs(tx, one, [sha256(A)]))
    mine = await db.read(lambda c: models.content(c, one, sha256(A)))
    assert mine is not None
    assert mine.record.state is State.MISSING


async def test_deleting_a_model_leaves_contents_to_who_looks_after_them(db: Database) -> None:
    one, _ = await two_projects(db)
    model = await db.write(lambda tx: rows.model(tx, one, A))
    await db.write(lambda tx: models.delete_model(tx, one, model.id))
    assert await db.read(lambda c: models.get(c, one, model.id)) is None
    assert await db.read(lambda c: models.content(c, one, sha256(A))) is not None


async def test_pages_go_through_everything_once_newest_first_while_more_is_added(db: Database) -> None:
    one, other = await two_projects(db)
    made = [await db.write(lambda tx, n=n: rows.model(tx, one, A, name=f"m{n}").id) for n in range(7)]
    await db.write(lambda tx: rows.model(tx, other, A))
    seen, after = [], None
    while True:
        found = await db.read(lambda c, after=after: models.page(c, one, after, 3))
        seen += [model.id for model in found[:3]]
        count = len(seen)
        await db.write(lambda tx, n=count: rows.model(tx, one, A, name=f"later {n}"))
        if len(found) <= 3:
            break
        after = seen[-1]
    assert seen == sorted(made, reverse=True)


# One writer.


async def test_one_of_many_claims_wins(db: Database) -> None:
    one, _ = await two_projects(db)
    await db.write(lambda tx: rows.model(tx, one, A))
    won = await asyncio.gather(*(claim(db, one, f"writer {n}") for n in range(8)))
    assert sorted(won) == [False] * 7 + [True]


async def test_a_claim_is_free_once_given_back_or_run_out(db: Database) -> None:
    one, _ = await two_projects(db)
    await db.write(lambda tx: rows.model(tx, one, A))
    assert await claim(db, one, "first")
    assert not await claim(db, one, "second", NOW + 59)
    await db.write(lambda tx: models.release_claim(tx, "second"))  # not its to give back
    assert not await claim(db, one, "second", NOW + 59)
    await db.write(lambda tx: models.release_claim(tx, "first"))
    assert await claim(db, one, "second", NOW + 59)
    assert await db.write(lambda tx: models.extend_claim(tx, "second", NOW + 500))
    assert not await claim(db, one, "third", NOW + 400)
    assert await claim(db, one, "third", NOW + 500)
    assert not await db.write(lambda tx: models.extend_claim(tx, "second", NOW + 900))
    found = await db.read(lambda c: models.content(c, one, sha256(A)))
    assert found is not None
    assert found.claimed(NOW + 501)
    assert not found.claimed(NOW + 560)
    await db.write(models.drop_claims)
    assert await claim(db, one, "fourth", NOW + 501)


async def test_claims_of_a_kind_are_counted_while_they_hold(db: Database) -> None:
    one, other = await two_projects(db)
    for project_id in (one, other):
        await db.write(lambda tx, p=project_id: rows.model(tx, p, A))
    assert await claim(db, one, "x", kind="octets")
    assert await claim(db, other, "y", kind="upload")
    assert await db.read(lambda c: models.active_claims(c, "octets", NOW + 59)) == 1
    assert await db.read(lambda c: models.active_claims(c, "octets", NOW + 60)) == 0


async def test_only_who_holds_the_claim_writes(db: Database) -> None:
    one, other = await two_projects(db)
    for project_id in (one, other):
        await db.write(lambda tx, p=project_id: rows.model(tx, p, A))
    record = upload.Record(sha256(A), len(A), 4, State.PARTIAL)
    write = partial(models.set_content, project_id=one, record=record)

    assert not await db.write(lambda tx: write(tx, token="nobody's"))
    assert await claim(db, one, "mine")
    assert not await db.write(lambda tx: write(tx, token="another"))
    assert not await db.write(lambda tx: write(tx, token=None))
    assert await db.write(lambda tx: write(tx, token="mine"))
    assert await claim(db, one, "heir", NOW + 60)  # it ran out
    lost = replace(record, offset=9)
    assert not await db.write(lambda tx: models.set_content(tx, one, lost, token="mine"))
    found = await db.read(lambda c: models.content(c, one, sha256(A)))
    untouched = await db.read(lambda c: models.content(c, other, sha256(A)))
    assert found is not None
    assert untouched is not None
    assert (found.record.offset, untouched.record.offset) == (4, 0)


# What models amount to.


async def test_a_model_is_written_only_in_the_state_it_was_read_in(db: Database) -> None:
    one, _ = await two_projects(db)
    model = await db.write(lambda tx: rows.model(tx, one, A))
    ready = acquisition.Record(acquisition.State.READY)
    assert await db.write(lambda tx: models.set_record(tx, model.id, model.record, ready))
    assert not await db.write(lambda tx: models.set_record(tx, model.id, model.record, ready))


async def test_a_model_whose_files_are_finished_at_the_same_moment_is_ready(db: Database) -> None:
    one, _ = await two_projects(db)

    def finish(tx: Transaction, data: bytes) -> None:
        models.take_turns(tx, one)
        put(tx, one, data, State.VERIFIED)
        time.sleep(0.02)  # whoever does not take turns is inside by now
        settle_models(tx, one, [sha256(data)])

    for round_number in range(3):
        contents = [b"%d of round %d" % (n, round_number) for n in range(4)]
        model = await db.write(
            lambda tx, c=contents, n=round_number: rows.model(tx, one, *c, name=f"round {n}")
        )
        await asyncio.gather(*(db.write(partial(finish, data=data)) for data in contents))
        found = await db.read(lambda c, m=model: models.get(c, one, m.id))
        assert found is not None
        assert found.record.state is acquisition.State.READY


async def test_a_change_of_one_file_settles_every_model_of_the_project_that_has_it(db: Database) -> None:
    one, other = await two_projects(db)
    alone = await db.write(lambda tx: rows.model(tx, one, A, name="alone"))
    both = await db.write(lambda tx: rows.model(tx, one, A, B, name="both"))
    elsewhere = await db.write(lambda tx: rows.model(tx, other, A, name="elsewhere"))

    def finish(tx: Transaction) -> None:
        put(tx, one, A, State.VERIFIED)
        settle_models(tx, one, [sha256(A)])

    await db.write(finish)
    found = {m.id: m.record.state for m in await db.read(lambda c: models.page(c, one, None, 9))}
    assert found == {alone.id: acquisition.State.READY, both.id: acquisition.State.REGISTERED}
    theirs = await db.read(lambda c: models.get(c, other, elsewhere.id))
    assert theirs is not None
    assert theirs.record.state is acquisition.State.REGISTERED


async def test_two_projects_publish_the_same_bytes_at_the_same_moment(db: Database) -> None:
    def work(tx: Transaction) -> None:
        models.add_blob(tx, sha256(A), len(A), NOW)
        time.sleep(0.02)

    await asyncio.gather(*(db.write(work) for _ in range(4)))
    assert await db.read(lambda c: c.scalar(select(func.count()).select_from(schema.blobs))) == 1


async def test_references_name_the_services_of_each_model(db: Database) -> None:
    one, _ = await two_projects(db)
    model = await db.write(lambda tx: rows.model(tx, one, A))
    free = await db.write(lambda tx: rows.model(tx, one, B, name="free"))
    row = await db.write(lambda tx: rows.service_row(tx, one, model.id, "a", service.State.STOPPED))
    found = await db.read(lambda c: models.references(c, [model.id, free.id]))
    assert found == {model.id: [row.id], free.id: []}

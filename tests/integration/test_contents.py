"""Contents on both databases: several controllers on one store, and one writer at a time (A9)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ficc.content.store import Key
from ficc.controller.operations import contents as contents_module
from ficc.controller.operations.contents import Contents
from ficc.controller.store import models
from ficc.domain import acquisition, upload
from ficc.domain.errors import Refused
from ficc.domain.upload import Record, State
from support import rows
from support.contents import DATA, Controllers, bring, owner_of, write
from support.rows import sha256

PATIENCE_SECONDS = 30.0

# Several sharing.


async def test_a_controller_that_starts_does_not_touch_what_another_one_is_writing(
    sharing: Controllers, key: Key, model: str
) -> None:
    contents, starting = sharing.contents(), sharing.contents()
    await write(contents, key, DATA[:100])
    async with contents.writing(key, "octets") as claim:
        await contents.write(claim, 100, DATA[100:])
        await starting.recover(alone=False)
        with pytest.raises(Refused) as refused:
            await write(starting, key, DATA[100:])
        assert refused.value.code == "model_busy"
        assert refused.value.beside == {"offset": 100}
        await contents.commit(claim, len(DATA) - 100)
    assert (await contents.verify(key)).state is State.VERIFIED


@pytest.mark.parametrize("state", [State.PARTIAL, State.VERIFYING])
async def test_what_a_killed_controller_held_is_free_after_a_minute_and_put_right_then(
    sharing: Controllers, key: Key, model: str, state: State
) -> None:
    offset = len(DATA) if state is State.VERIFYING else 100
    sharing.store.write(key, 0, DATA if state is State.VERIFYING else DATA[:100] + b"torn")
    await sharing.put(key, state, offset)
    now = sharing.clock()
    claim = {"token": "dead", "kind": "octets", "now": now, "expires_at": now + 60}
    assert await sharing.db.write(
        lambda tx: models.claim(tx, key.project_id, key.sha256, **claim)  # type: ignore[arg-type]
    )
    contents = sharing.contents()
    await contents.recover(alone=False)
    with pytest.raises(Refused, match="Another writer"):
        async with contents.writing(key, "upload"):
            pass
    sharing.clock.ahead = 61
    async with contents.writing(key, "upload") as mine:
        assert mine.record == Record(key.sha256, len(DATA), offset, State.PARTIAL)
        assert sharing.store.length(key) == offset
        await contents.write(mine, offset, DATA[offset:])
        await contents.commit(mine, len(DATA) - offset)
    assert (await contents.verify(key)).state is State.VERIFIED


async def test_who_lost_its_claim_records_nothing(sharing: Controllers, key: Key, model: str) -> None:
    slow, quick = sharing.contents(), sharing.contents()
    async with slow.writing(key, "octets") as claim:
        await slow.write(claim, 0, DATA[:10])
        sharing.clock.ahead = 61  # it was asleep
        await write(quick, key, DATA[:50])
        with pytest.raises(Refused) as refused:
            await slow.commit(claim, 10)
        assert refused.value.code == "model_busy"
    assert (await sharing.record(key)).offset == 50
    assert (await bring(quick, key, DATA[50:])).state is State.VERIFIED


async def test_controllers_may_take_turns_at_bringing_a_file(
    sharing: Controllers, key: Key, model: str
) -> None:
    one, other = sharing.contents(), sharing.contents()
    for contents, piece in ((one, DATA[:10]), (other, DATA[10:30]), (one, DATA[30:])):
        await write(contents, key, piece)
    assert (await one.verify(key)).state is State.VERIFIED


async def test_a_claim_lasts_as_long_as_its_holder(
    sharing: Controllers, key: Key, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_module, "CLAIM_SECONDS", 0.9)
    contents, other = sharing.contents(), sharing.contents()
    async with contents.writing(key, "octets") as claim:
        await asyncio.sleep(1.5)
        with pytest.raises(Refused, match="Another writer"):
            await write(other, key, b"x")
        await contents.write(claim, 0, DATA)
        await contents.commit(claim, len(DATA))
    assert (await other.verify(key)).state is State.VERIFIED


async def test_a18_a_slow_disk_keeps_nobody_waiting_who_needs_a_thread_for_a_moment(
    sharing: Controllers, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More writes at once than there are threads for everything else (Python's ThreadPoolExecutor)."""
    disk, count = threading.Event(), min(32, (os.cpu_count() or 1) + 4) + 1
    contents = sharing.contents()

    def sync(key: Key) -> None:
        assert disk.wait(PATIENCE_SECONDS), "something else went on meanwhile"

    monkeypatch.setattr(contents.store, "sync", sync)
    data = [b"%d" % number for number in range(count)]
    await sharing.model(project, *data)
    writing = [asyncio.create_task(write(contents, Key(project, sha256(one)), one)) for one in data]
    try:
        most = min(count, contents_module.DISK_THREADS)
        while sum(contents.store.length(Key(project, sha256(one))) > 0 for one in data) < most:
            await asyncio.sleep(0.01)
        assert not await asyncio.to_thread(disk.is_set), "the disk still has them all"
    finally:
        disk.set()
        await asyncio.gather(*writing)


async def test_two_streams_are_active_in_the_whole_installation(sharing: Controllers, project: str) -> None:
    keys = [Key(project, sha256(b"%d" % n)) for n in range(6)]
    await sharing.model(project, *(b"%d" % n for n in range(6)))
    over = asyncio.Event()
    codes: list[str] = []

    async def hold(contents: Contents, key: Key) -> None:
        try:
            async with contents.writing(key, "octets", upload.OCTET_STREAMS_MAX):
                codes.append("active")
                await over.wait()
        except Refused as refused:
            codes.append(refused.code)

    tasks = [asyncio.create_task(hold(sharing.contents(), key)) for key in keys]
    while len(codes) < len(keys):
        await asyncio.sleep(0.01)
    over.set()
    await asyncio.gather(*tasks)
    assert sorted(codes) == ["active"] * 2 + ["upload_busy"] * 4
    async with sharing.contents().writing(keys[0], "octets", upload.OCTET_STREAMS_MAX):
        pass


# One controller.


async def test_writers_of_one_controller_wait_for_each_other_but_not_for_ever(
    sharing: Controllers, key: Key, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = sharing.contents()
    go, held = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with contents.writing(key, "octets") as claim:
            held.set()
            await go.wait()
            await contents.write(claim, 0, DATA[:10])
            await contents.commit(claim, 10)

    task = asyncio.create_task(first())
    await held.wait()
    monkeypatch.setattr(contents_module, "TURN_SECONDS", 0.05)
    with pytest.raises(Refused) as refused:
        await write(contents, key, b"x")
    assert (refused.value.code, refused.value.beside) == ("model_busy", {"offset": 0})
    monkeypatch.undo()
    second = asyncio.create_task(write(contents, key, DATA[10:]))
    await asyncio.sleep(0.05)
    assert not second.done()
    go.set()
    await asyncio.gather(task, second)
    assert (await contents.verify(key)).state is State.VERIFIED


async def test_more_files_than_hashes_are_carried_along_grow_at_once(
    sharing: Controllers, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_module, "HASHERS_MAX", 2)
    right, wrong = [b"%d" % n * 50 for n in range(4)], [b"%d" % n * 50 for n in range(4, 6)]
    await sharing.model(project, *right, *wrong)
    contents = sharing.contents()
    keys = {data: Key(project, sha256(data)) for data in right + wrong}
    for part in (slice(0, 20), slice(20, 40), slice(40, None)):
        for data, key in keys.items():
            sent = data if data in right else data[:-1] + b"?"
            await write(contents, key, sent[part])
    states = [(await contents.verify(key)).state for key in keys.values()]
    assert states == [State.VERIFIED] * 4 + [State.FAILED] * 2
    assert not contents.meters


async def test_a_full_disk_loses_nothing_and_the_upload_goes_on_once_there_is_space(
    sharing: Controllers, key: Key, model: str
) -> None:
    operations, actor = sharing.models(sharing.contents()), owner_of(key.project_id)
    await operations.upload(actor, model, 0, 0, DATA[:1000])
    sharing.store.reserve_bytes = 1 << 60

    async def stream(data: bytes) -> AsyncIterator[bytes]:
        yield data

    for call in (
        lambda: operations.upload(actor, model, 0, 1000, DATA[1000:]),
        lambda: operations.upload_stream(actor, model, 0, 1000, None, stream(DATA[1000:])),
    ):
        with pytest.raises(Refused) as refused:
            await call()
        assert refused.value.code == "disk_full"
        assert refused.value.details["bytes_wanted"]
        assert (await sharing.record(key)).offset == sharing.store.length(key) == 1000
    sharing.store.reserve_bytes = 0
    assert (await operations.upload(actor, model, 0, 1000, DATA[1000:])).state is State.VERIFIED


@pytest.mark.parametrize("stream", [False, True])
async def test_a_commit_whose_answer_was_lost_costs_no_bytes(
    sharing: Controllers, key: Key, model: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, actor = sharing.models(sharing.contents()), owner_of(key.project_id)
    commit = sharing.db.write

    async def answer_lost(work: Any) -> Any:
        result = await commit(work)
        if (await sharing.record(key)).offset:
            monkeypatch.undo()
            raise Refused("database_unavailable", "the connection broke behind the commit")
        return result

    async def body() -> AsyncIterator[bytes]:
        yield DATA[:1000]

    monkeypatch.setattr(sharing.db, "write", answer_lost)
    upload_stream = operations.upload_stream(actor, model, 0, 0, 1000, body())
    upload_json = operations.upload(actor, model, 0, 0, DATA[:1000])
    with pytest.raises(Refused) as refused:
        await (upload_stream if stream else upload_json)
    (upload_json if stream else upload_stream).close()
    assert refused.value.code == "database_unavailable"
    assert (await sharing.record(key)).offset == sharing.store.length(key) == 1000
    assert (await operations.upload(actor, model, 0, 1000, DATA[1000:])).state is State.VERIFIED


async def test_deleting_a_model_removes_what_was_begun_of_it(
    sharing: Controllers, key: Key, model: str
) -> None:
    contents = sharing.contents()
    operations, actor = sharing.eviction(contents), owner_of(key.project_id)
    await write(contents, key, DATA[:10])
    await operations.delete(actor, model, evict=False)
    assert not sharing.store.partial(key).exists()
    assert not contents.meters


async def test_deleting_a_model_leaves_what_was_begun_anew_meanwhile(
    sharing: Controllers, key: Key, model: str
) -> None:
    contents = sharing.contents()
    operations, actor = sharing.eviction(contents), owner_of(key.project_id)
    await write(contents, key, DATA[:10])
    discard = contents.discard

    async def late(keys: list[Key], blobs: set[str]) -> None:
        await sharing.model(key.project_id, DATA)
        async with contents.writing(key, "upload") as claim:
            await contents.write(claim, 0, DATA[:20])
            await contents.commit(claim, 20)
        await discard(keys, blobs)

    contents.discard = late  # type: ignore[method-assign, assignment]
    await operations.delete(actor, model, evict=False)
    assert sharing.store.length(key) == 20


async def test_deleting_waits_for_no_writer(sharing: Controllers, key: Key, model: str) -> None:
    contents = sharing.contents()
    operations, actor = sharing.eviction(contents), owner_of(key.project_id)
    async with contents.writing(key, "upload"):
        with pytest.raises(Refused) as refused:
            await operations.delete(actor, model, evict=False)
        assert refused.value.code == "model_busy"
    await operations.delete(actor, model, evict=False)
    with pytest.raises(Refused) as gone:
        await write(contents, key, DATA)
    assert gone.value.code == "not_found"
    assert not sharing.store.partial(key).exists()


async def test_many_registrations_of_one_manifest_at_once_are_one_model(
    sharing: Controllers, project: str
) -> None:
    operations, actor = sharing.models(sharing.contents()), owner_of(project)
    document = rows.manifest_of(DATA, b"other")
    found = await asyncio.gather(*(operations.register(actor, document) for _ in range(8)))
    assert len({view.model.id for view, _ in found}) == 1
    assert [made for _, made in found].count(True) == 1


async def test_registrations_and_deletions_in_any_order_end_whole(sharing: Controllers, project: str) -> None:
    contents, actor = sharing.contents(), owner_of(project)
    operations, eviction = sharing.models(contents), sharing.eviction(contents)
    document = rows.manifest_of(DATA, b"other")

    async def register_and_delete() -> None:
        for _ in range(4):
            view, _ = await operations.register(actor, document)
            with contextlib.suppress(Refused):  # another one was quicker
                await eviction.delete(actor, view.model.id, evict=False)

    await asyncio.gather(*(register_and_delete() for _ in range(4)))
    view, _ = await operations.register(actor, document)
    assert [file.record.state for file in view.files] == [State.MISSING] * 2


async def test_files_of_one_model_that_are_brought_at_once_make_it_ready(
    sharing: Controllers, project: str
) -> None:
    for round_number in range(4):
        data = [b"%d of round %d" % (n, round_number) for n in range(4)]
        model_id = await sharing.model(project, *data, name=f"round {round_number}")
        contents = sharing.contents()
        await asyncio.gather(*(bring(contents, Key(project, sha256(one)), one) for one in data))
        assert (await sharing.state(project, model_id)).state is acquisition.State.READY

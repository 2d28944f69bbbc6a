"""Contents on both databases: disk and rows are brought together after every crash, and what nothing refers to is
swept (A7)."""

from __future__ import annotations

import asyncio
import os

import pytest

from ficc.content.store import Key
from ficc.controller.operations import orphans
from ficc.controller.store import models
from ficc.domain import acquisition
from ficc.domain.upload import Record, State
from support.contents import DATA, WRONG, Controllers, bring, owner_of, write
from support.rows import sha256


class Killed(BaseException):
    """The process ends here."""


# Crash points. What is left on disk and in the rows, then the start of the next controller.


async def test_killed_between_publishing_and_its_row_the_file_is_verified(
    sharing: Controllers, key: Key, model: str
) -> None:
    sharing.store.write(key, 0, DATA)
    sharing.store.publish(key, len(DATA))
    await sharing.put(key, State.VERIFYING, len(DATA))
    await sharing.contents().recover(alone=True)
    assert await sharing.record(key) == Record(key.sha256, len(DATA), len(DATA), State.VERIFIED)
    assert (await sharing.state(key.project_id, model)).state is acquisition.State.READY
    assert sharing.store.has_blob(key.sha256, len(DATA))
    assert await sharing.db.read(models.blob_digests) == {key.sha256}


async def test_killed_while_hashing_the_file_is_hashed_again_once_somebody_finishes_it(
    sharing: Controllers, key: Key, model: str
) -> None:
    sharing.store.write(key, 0, DATA)
    await sharing.put(key, State.VERIFYING, len(DATA))
    contents = sharing.contents()
    await contents.recover(alone=True)
    assert await sharing.record(key) == Record(key.sha256, len(DATA), len(DATA), State.PARTIAL)
    assert (await sharing.state(key.project_id, model)).state is acquisition.State.REGISTERED
    assert (await contents.verify(key)).state is State.VERIFIED


async def test_bytes_behind_the_recorded_offset_are_cut_off(
    sharing: Controllers, key: Key, model: str
) -> None:
    sharing.store.write(key, 0, DATA[:500] + b"never acknowledged")
    await sharing.put(key, State.PARTIAL, 500)
    contents = sharing.contents()
    await contents.recover(alone=True)
    assert sharing.store.length(key) == 500
    assert (await bring(contents, key, DATA[500:])).state is State.VERIFIED


async def test_a_file_that_lost_bytes_goes_back_to_what_it_has_and_says_so(
    sharing: Controllers, key: Key, model: str
) -> None:
    sharing.store.write(key, 0, DATA[:300])
    await sharing.put(key, State.PARTIAL, 500)
    contents = sharing.contents()
    await contents.recover(alone=True)
    record = await sharing.record(key)
    assert (record.offset, record.state) == (300, State.PARTIAL)
    assert record.error is not None
    assert record.error.code == "partial_shortened"
    assert (await bring(contents, key, DATA[300:])).state is State.VERIFIED


async def test_bytes_of_a_file_that_nothing_was_acknowledged_of_are_removed(
    sharing: Controllers, key: Key, model: str
) -> None:
    sharing.store.write(key, 0, b"never acknowledged")
    await sharing.contents().recover(alone=True)
    assert not sharing.store.partial(key).exists()
    assert (await sharing.record(key)).state is State.MISSING


@pytest.mark.parametrize("step", ["before the row", "behind the removal"])
async def test_killed_around_a_mismatch_wrong_bytes_are_not_taken_for_anothers_right_ones(
    sharing: Controllers, key: Key, model: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sharing.publish_elsewhere()
    contents, remove = sharing.contents(), sharing.store.truncate
    await write(contents, key, WRONG)

    def killed_behind(key: Key, length: int) -> None:
        remove(key, length)
        raise Killed

    async def dead(*arguments: object) -> None:
        """Who is killed puts nothing right."""

    if step == "before the row":
        await sharing.put(key, State.VERIFYING, len(DATA))
    else:
        monkeypatch.setattr(contents, "_mend", dead)
        monkeypatch.setattr(sharing.store, "truncate", killed_behind)
        with pytest.raises(Killed):
            await contents.verify(key)
        monkeypatch.undo()

    after = sharing.contents()
    await after.recover(alone=True)
    record = await sharing.record(key)
    assert record.state is not State.VERIFIED
    if record.offset == len(DATA):
        record = await after.verify(key)
    assert record.state is State.FAILED
    assert not sharing.store.partial(key).exists()
    assert sharing.store.blob(key.sha256).read_bytes() == DATA


async def test_a_whole_file_that_vanished_before_its_hash_is_not_taken_from_another_project(
    sharing: Controllers, key: Key, model: str
) -> None:
    await sharing.publish_elsewhere()
    await sharing.put(key, State.PARTIAL, len(DATA))  # nothing of it is on disk
    await sharing.contents().recover(alone=True)
    record = await sharing.record(key)
    assert (record.state, record.offset) == (State.PARTIAL, 0)


async def test_a_partial_that_vanishes_under_a_running_controller_is_noticed_by_the_finishing_upload(
    sharing: Controllers, key: Key, model: str
) -> None:
    contents = sharing.contents()
    await write(contents, key, DATA)
    sharing.store.partial(key).unlink()
    record = await contents.verify(key)
    assert (record.state, record.offset) == (State.PARTIAL, 0)
    assert record.error is not None
    assert (await bring(contents, key, DATA)).state is State.VERIFIED


async def test_a_publish_that_fails_leaves_the_file_to_be_finished_again(
    sharing: Controllers, key: Key, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = sharing.contents()
    await write(contents, key, DATA)

    def broken(*arguments: object) -> None:
        raise OSError("the disk is broken")

    monkeypatch.setattr(sharing.store, "publish", broken)
    with pytest.raises(OSError, match="broken"):
        await contents.verify(key)
    assert (await sharing.record(key)).state is State.PARTIAL
    monkeypatch.undo()
    assert (await contents.verify(key)).state is State.VERIFIED


async def test_a_controller_that_ends_while_it_hashes_leaves_the_file_to_be_finished(
    sharing: Controllers, project: str
) -> None:
    size = 1 << 30
    key = Key(project, "0" * 64)
    manifest = {
        "name": "sparse",
        "format": "gguf",
        "files": [{"name": "s.gguf", "bytes": size, "sha256": "0" * 64}],
    }
    contents = sharing.contents()
    await sharing.models(contents).register(owner_of(project), manifest)
    sparse = sharing.store.incoming / "sparse"
    sparse.touch()
    os.truncate(sparse, size)
    async with contents.writing(key, "upload") as claim:
        await contents.adopt(claim, "sparse")
    verifying = contents.verify(key)
    while key not in contents.meters or not contents.meters[key].verified_bytes:
        await asyncio.sleep(0.005)
    await contents.close()
    assert verifying.cancelled()
    assert await sharing.record(key) == Record("0" * 64, size, size, State.PARTIAL)
    assert sharing.store.length(key) == size


# The sweeper.


async def test_alone_the_sweeper_removes_every_file_without_a_row_and_no_other(
    sharing: Controllers, key: Key, model: str
) -> None:
    contents, store = sharing.contents(), sharing.store
    begun = Key(key.project_id, sha256(b"begun"))
    await sharing.model(key.project_id, b"begun", name="begun")
    await write(contents, begun, b"beg")
    await bring(contents, key, DATA)
    orphan, stranger = Key(key.project_id, "1" * 64), Key("0" * 26, "2" * 64)
    for one in (orphan, stranger):
        store.write(one, 0, b"orphan")
    store.write(Key("0" * 26, sha256(b"blob")), 0, b"blob")
    store.publish(Key("0" * 26, sha256(b"blob")), 4)
    (store.partials / "notes.txt").write_bytes(b"not ours")
    (store.incoming / "recent").write_bytes(b"x")

    await sharing.contents().recover(alone=True)
    files = {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}
    assert files == {
        f"blobs/{key.sha256[:2]}/{key.sha256}",
        f"partials/{begun.project_id}/{begun.sha256}",
        "partials/notes.txt",
        "incoming/recent",
    }
    sharing.clock.ahead = orphans.INCOMING_SECONDS + 60
    await sharing.contents().recover(alone=True)
    assert not (store.incoming / "recent").exists()
    assert store.blob(key.sha256).exists()


async def test_beside_others_the_sweeper_removes_only_what_nobody_can_be_about_to_record(
    sharing: Controllers, key: Key, model: str
) -> None:
    sharing.store.write(key, 0, DATA)
    sharing.store.publish(key, len(DATA))  # another controller's: its row comes in a moment
    await sharing.contents().recover(alone=False)
    assert sharing.store.has_blob(key.sha256, len(DATA))
    sharing.clock.ahead = orphans.ORPHAN_SECONDS + 60
    await sharing.contents().recover(alone=False)
    assert not sharing.store.blob(key.sha256).exists()

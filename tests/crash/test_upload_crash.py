"""SIGKILL of the controller while bytes arrive, are hashed, published or removed: what was acknowledged is there
after the restart, no lock is left, and the upload goes on from where it is (A7)."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.doomed import Doomed
from support.http import Http
from support.rows import random_bytes, sha256

ROUNDS = 12
SEED = 20_260_101
FILE_BYTES = 24 << 20
PIECE_BYTES_MAX = 3 << 20
SPARSE_BYTES = 384 << 20

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doomed]:
    made = Doomed(tmp_path_factory.mktemp("doomed"))
    yield made
    made.installation.stop()


# At random moments.


@dataclass
class Upload:
    """A file on its way in pieces of random sizes, by both routes."""

    data: bytes
    model_id: str
    chance: random.Random
    acknowledged: int = 0
    done: bool = False
    faults: list[str] = field(default_factory=list)

    def run(self, api: Http) -> None:
        """Until the file is there, or the controller is not."""
        try:
            while not self.done:
                self._piece(api)
        except (OSError, http.client.HTTPException):
            pass
        except AssertionError as error:
            self.faults.append(str(error))

    def _piece(self, api: Http) -> None:
        at = self.acknowledged
        data = self.data[at : at + self.chance.randint(1, PIECE_BYTES_MAX)]
        if self.chance.random() < 0.3:
            text = base64.b64encode(data[: 1 << 20]).decode()
            answer = api("POST", f"/models/{self.model_id}/files/0", {"offset": at, "data": text})
        else:
            answer = api.octets(self.model_id, 0, at, data)
        document = answer.ok()
        self.acknowledged = document["offset"]
        self.done = document["state"] == "verified"


def test_what_was_acknowledged_survives_being_killed_at_any_moment(doomed: Doomed) -> None:
    chance = random.Random(SEED)
    uploads: list[Upload] = []
    for number in range(ROUNDS):
        if not uploads or uploads[-1].done:
            data = chance.randbytes(FILE_BYTES)
            uploads.append(Upload(data, doomed.register(data), chance))
        current, api = uploads[-1], doomed.api
        running = threading.Thread(target=current.run, args=(api,))
        running.start()
        time.sleep(chance.uniform(0.0, 0.25))
        doomed.kill()
        running.join()
        assert not current.faults, f"round {number}: {current.faults}"
        doomed.installation.start("controller")
        _check(doomed, current, number)
    for upload in uploads:
        upload.run(doomed.api)
        assert not upload.faults
        assert doomed.file(upload.model_id)["state"] == "verified"
        assert doomed.blob(sha256(upload.data)).read_bytes() == upload.data
    assert not list(doomed.content.glob("partials/*/*"))


def _check(doomed: Doomed, upload: Upload, number: int) -> None:
    """Rows, disk and what the client was told agree."""
    file, digest = doomed.file(upload.model_id), sha256(upload.data)
    offset = file["offset"]
    assert isinstance(offset, int)
    assert upload.acknowledged <= offset <= len(upload.data), f"round {number}"
    if file["state"] == "verified":
        upload.done = True
        assert doomed.blob(digest).read_bytes() == upload.data
        assert doomed.partial(digest) is None
    else:
        partial = doomed.partial(digest)
        assert (b"" if partial is None else partial.read_bytes()) == upload.data[:offset], f"round {number}"
    upload.acknowledged = offset


# At chosen points.


@pytest.mark.parametrize("point", ["before write", "before sync", "after sync"])
def test_killed_around_a_write_the_offset_is_the_last_acknowledged_one(doomed: Doomed, point: str) -> None:
    data = random_bytes(5000)
    model_id = doomed.register(data)
    doomed.api.octets(model_id, 0, 0, data[:1000]).ok()
    doomed.killed_at(point, lambda: doomed.api.octets(model_id, 0, 1000, data[1000:3000]))
    assert doomed.file(model_id)["offset"] == 1000
    partial = doomed.partial(sha256(data))
    assert partial is not None
    assert partial.read_bytes() == data[:1000]
    assert doomed.api.octets(model_id, 0, 1000, data[1000:]).ok()["state"] == "verified"


@pytest.mark.parametrize("point", ["before publish", "after publish"])
def test_killed_around_publishing_the_file_is_verified_or_waits_to_be(doomed: Doomed, point: str) -> None:
    data = random_bytes(5000)
    model_id = doomed.register(data)
    doomed.killed_at(point, lambda: doomed.api.octets(model_id, 0, 0, data))
    file = doomed.file(model_id)
    assert file["offset"] == 5000
    if point == "after publish":
        assert file["state"] == "verified"
    else:
        assert file["state"] == "partial"
        assert doomed.api.octets(model_id, 0, 5000, b"").ok()["state"] == "verified"
    assert doomed.blob(sha256(data)).read_bytes() == data
    assert doomed.partial(sha256(data)) is None
    assert doomed.api("GET", f"/models/{model_id}").ok()["state"] == "ready"


def test_killed_before_wrong_bytes_are_removed_the_file_has_failed_all_the_same(doomed: Doomed) -> None:
    data = random_bytes(5000)
    model_id = doomed.register(data)
    doomed.killed_at("before truncate", lambda: doomed.api.octets(model_id, 0, 0, random_bytes(5000)))
    file = doomed.file(model_id)
    assert (file["state"], file["offset"]) == ("failed", 0)
    assert doomed.partial(sha256(data)) is None
    assert doomed.api.octets(model_id, 0, 0, data).ok()["state"] == "verified"


def test_killed_before_a_deleted_models_bytes_are_removed_they_are_swept(doomed: Doomed) -> None:
    data = random_bytes(5000)
    model_id = doomed.register(data)
    doomed.api.octets(model_id, 0, 0, data[:1000]).ok()
    doomed.killed_at("before bin_partial", lambda: doomed.api("DELETE", f"/models/{model_id}"))
    assert doomed.api("GET", f"/models/{model_id}").code == "not_found"
    assert doomed.partial(sha256(data)) is None


def test_killed_once_a_local_file_was_taken_nothing_counts_that_was_not_recorded(doomed: Doomed) -> None:
    data = random_bytes(5000)
    model_id = doomed.register(data)
    doomed.put("incoming/file", lambda path: write(path, data))
    adopt = {"name": "file"}
    doomed.killed_at("after adopt", lambda: doomed.api("POST", f"/models/{model_id}/files/0/adopt", adopt))
    assert doomed.file(model_id)["offset"] == 0
    assert doomed.partial(sha256(data)) is None
    assert doomed.api.octets(model_id, 0, 0, data).ok()["state"] == "verified"


def test_killed_while_it_hashes_the_file_is_finished_by_an_empty_upload(doomed: Doomed) -> None:
    digest = hashlib.sha256()
    for _ in range(SPARSE_BYTES >> 20):
        digest.update(bytes(1 << 20))
    model_id = doomed.register(b"?", size=SPARSE_BYTES, digest=digest.hexdigest())

    def sparse(path: Path) -> None:
        path.touch()
        os.truncate(path, SPARSE_BYTES)

    doomed.put("incoming/sparse", sparse)
    api = doomed.api
    adopting = threading.Thread(target=_adopt, args=(api, model_id))
    adopting.start()
    doomed.installation.until(lambda: doomed.file(model_id)["state"] == "verifying", "it is being hashed")
    doomed.kill()
    adopting.join()
    doomed.installation.start("controller")
    file = doomed.file(model_id)
    assert (file["state"], file["offset"], file["verified_bytes"]) == ("partial", SPARSE_BYTES, 0)
    for offset in (0, SPARSE_BYTES - 1):
        assert doomed.api.octets(model_id, 0, offset, b"").code == "empty_upload"
    text = {"offset": SPARSE_BYTES, "data": ""}
    assert doomed.api("POST", f"/models/{model_id}/files/0", text).ok()["state"] == "verified"
    assert doomed.api("GET", f"/models/{model_id}").ok()["state"] == "ready"


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _adopt(api: Http, model_id: str) -> None:
    with suppress(OSError, http.client.HTTPException):
        api("POST", f"/models/{model_id}/files/0/adopt", {"name": "sparse"})


def test_files_that_nothing_refers_to_are_swept_at_the_start_and_no_others(doomed: Doomed) -> None:
    data, begun = random_bytes(3000), random_bytes(3000)
    model_id, begun_id = doomed.register(data), doomed.register(begun)
    doomed.api.octets(model_id, 0, 0, data).ok()
    doomed.api.octets(begun_id, 0, 0, begun[:100]).ok()
    project = doomed.api("GET", "/session").ok()["project"]["id"]
    orphan = sha256(b"orphan")
    doomed.kill()
    names = (f"partials/{project}/{orphan}", f"partials/{'0' * 26}/{orphan}", f"blobs/{orphan[:2]}/{orphan}")
    orphans = [doomed.put(name, lambda path: path.touch()) for name in names]
    doomed.installation.start("controller")
    assert not [path for path in orphans if path.exists()]
    assert doomed.blob(sha256(data)).read_bytes() == data
    assert doomed.file(begun_id)["offset"] == 100
    assert doomed.api.octets(begun_id, 0, 100, begun[100:]).ok()["state"] == "verified"

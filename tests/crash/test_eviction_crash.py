"""SIGKILL of the controller while it evicts and prunes: a model is there with every byte or it is not there, and
what the crash left on disk is gone after the start."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from support.doomed import Doomed
from support.http import Http
from support.rows import manifest_of, random_bytes, sha256

ROUNDS = 14
SEED = 20_260_302
FILES = 6
FILE_BYTES = 200_000

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doomed]:
    made = Doomed(tmp_path_factory.mktemp("doomed"))
    yield made
    made.installation.stop()


def ready(doomed: Doomed, *contents: bytes) -> str:
    document = manifest_of(*contents, name=random_bytes(6).hex())
    model_id = str(doomed.api("POST", "/models", document).ok(201)["id"])
    for index, data in enumerate(contents):
        doomed.api.octets(model_id, index, 0, data).ok()
    return model_id


def on_disk(doomed: Doomed) -> set[str]:
    return {path.name for path in doomed.content.rglob("*") if path.is_file()}


def evict(api: Http, model_id: str) -> None:
    api("DELETE", f"/models/{model_id}", evict="true").ok()


@pytest.mark.parametrize("point", ["before bin_blob", "after bin_blob", "before empty_bin"])
def test_killed_behind_the_database_nothing_is_left_of_the_model(doomed: Doomed, point: str) -> None:
    before = on_disk(doomed)
    whole, begun, kept = random_bytes(5000), random_bytes(300), random_bytes(70)
    model_id, other = ready(doomed, whole, kept), doomed.register(kept)
    begun_id = doomed.register(begun)
    doomed.api.octets(begun_id, 0, 0, begun[:100]).ok()
    doomed.killed_at(point, lambda: evict(doomed.api, model_id))
    assert doomed.api("GET", f"/models/{model_id}").code == "not_found"
    assert on_disk(doomed) == before | {sha256(kept), sha256(begun)}
    assert doomed.api("GET", f"/models/{other}").ok()["state"] == "ready"
    assert doomed.file(begun_id)["offset"] == 100

    evict(doomed.api, begun_id)
    evict(doomed.api, other)
    again = ready(doomed, whole)  # from the first byte, as if it had never been here
    assert doomed.api("GET", f"/models/{again}").ok()["state"] == "ready"
    evict(doomed.api, again)
    assert on_disk(doomed) == before


@pytest.mark.parametrize("point", ["before bin_partial", "after bin_partial"])
def test_killed_while_it_removes_what_was_begun(doomed: Doomed, point: str) -> None:
    before, begun = on_disk(doomed), random_bytes(300)
    model_id = doomed.register(begun)
    doomed.api.octets(model_id, 0, 0, begun[:100]).ok()
    doomed.killed_at(point, lambda: evict(doomed.api, model_id))
    assert doomed.api("GET", f"/models/{model_id}").code == "not_found"
    assert on_disk(doomed) == before


def test_killed_while_it_prunes(doomed: Doomed) -> None:
    before, data = on_disk(doomed), random_bytes(4000)
    doomed.api("DELETE", f"/models/{ready(doomed, data)}").ok()
    doomed.killed_at("before bin_blob", lambda: doomed.api("POST", "/content/prune", {"dry_run": False}))
    assert on_disk(doomed) == before
    assert doomed.api("POST", "/content/prune", {"dry_run": False}).ok()["count"] == 0


def test_killed_at_any_moment_a_model_is_whole_or_gone(doomed: Doomed) -> None:
    chance, before = random.Random(SEED), on_disk(doomed)
    for number in range(ROUNDS):
        data = [chance.randbytes(FILE_BYTES) for _ in range(FILES)]
        model_id = ready(doomed, *data)
        api = doomed.api
        evicting = threading.Thread(target=_until_it_is_killed, args=(lambda: evict(api, model_id),))  # noqa: B023
        evicting.start()
        time.sleep(chance.uniform(0.0, 0.06))
        doomed.kill()
        evicting.join()
        doomed.installation.start("controller")
        answer = doomed.api("GET", f"/models/{model_id}")
        if answer.status == 200:
            assert answer.json["state"] == "ready", f"round {number}"
            assert [doomed.blob(sha256(one)).read_bytes() for one in data] == data, f"round {number}"
            evict(doomed.api, model_id)
        assert on_disk(doomed) == before, f"round {number}"


def _until_it_is_killed(request: Callable[[], None]) -> None:
    with suppress(OSError, http.client.HTTPException):
        request()

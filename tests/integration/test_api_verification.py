"""Finishing over HTTP, on a real controller: an empty upload, wrong bytes, and what goes on while a file is hashed
(A11, A18, A25)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from support.http import Answer, Http, http_of, projects_of
from support.installation import Installation
from support.openapi import example, operations
from support.rows import manifest_of, random_bytes, sha256
from support.uploads import blobs, file_of, model_of, partials, piece, registered

SPARSE_BYTES = 512 << 20


# Finishing.


def test_an_empty_upload_anywhere_but_at_the_end_is_refused(api: Http) -> None:
    data = random_bytes(7)
    model_id = registered(api, data)
    for durable_offset in (0, 3):
        for offset in (0, 2, 3, 6, 7, 8):
            for answer in (
                piece(api, model_id, offset, b""),
                api.octets(model_id, 0, offset, b""),
                api.octets(model_id, 0, offset, iter(())),
            ):
                assert answer.status in (409, 422)
                assert answer.code in ("empty_upload", "offset_mismatch")
                assert answer.json["offset"] == durable_offset
        if durable_offset == 0:
            piece(api, model_id, 0, data[:3]).ok()
    assert piece(api, model_id, 3, b"").code == "empty_upload"


def test_an_empty_upload_at_the_end_of_a_verified_file_says_so_again(api: Http) -> None:
    data = random_bytes(7)
    model_id = registered(api, data)
    first = piece(api, model_id, 0, data).ok()
    assert first["state"] == "verified"
    assert piece(api, model_id, 7, b"").ok() == first
    assert api.octets(model_id, 0, 7, b"").ok() == first
    assert api.octets(model_id, 0, 7, iter(())).ok() == first


def test_a_file_of_no_bytes_is_verified_by_an_empty_upload(made: Installation) -> None:
    callers = projects_of(made, "json", "octets", "chunked")  # each has this file once
    ways: dict[str, Callable[[Http, str], Answer]] = {
        "json": lambda api, model_id: piece(api, model_id, 0, b""),
        "octets": lambda api, model_id: api.octets(model_id, 0, 0, b""),
        "chunked": lambda api, model_id: api.octets(model_id, 0, 0, iter(())),
    }
    for kind, send in ways.items():
        api = callers[kind]
        model_id = registered(api, b"", b"weights")
        piece(api, model_id, 0, b"weights", index=1).ok()
        assert model_of(api, model_id)["state"] == "registered"
        assert send(api, model_id).ok() == {"index": 0, "offset": 0, "bytes": 0, "state": "verified"}
        assert model_of(api, model_id)["state"] == "ready"
        assert piece(api, model_id, 0, b"x").code == "invalid_request"


def test_a_file_of_no_bytes_with_the_digest_of_something_is_a_mismatch(api: Http) -> None:
    document = manifest_of(b"", name=random_bytes(4).hex())
    document["files"][0]["sha256"] = sha256(random_bytes(5))
    model_id = api("POST", "/models", document).ok(201)["id"]
    assert piece(api, model_id, 0, b"").code == "source_mismatch"
    assert model_of(api, model_id)["state"] == "failed"


def test_bytes_past_the_declared_size_are_refused_whole(api: Http) -> None:
    data = random_bytes(7)
    model_id = registered(api, data)
    piece(api, model_id, 0, data[:3]).ok()
    for answer in (
        piece(api, model_id, 3, data[3:] + b"!"),
        api.octets(model_id, 0, 3, data[3:] + b"!"),
        api.octets(model_id, 0, 3, iter([data[3:], b"!"])),
    ):
        assert (answer.code, answer.json["offset"]) == ("invalid_request", 3)
    assert piece(api, model_id, 3, data[3:]).ok()["state"] == "verified"


def test_wrong_bytes_fail_the_file_and_a_later_upload_starts_it_again(either: Installation) -> None:
    api = http_of(either)
    data, other = random_bytes(5000), random_bytes(5000)
    model_id = registered(api, data)
    for send in (
        lambda: piece(api, model_id, 0, other),
        lambda: api.octets(model_id, 0, 0, other),
    ):
        answer = send()
        assert (answer.status, answer.code, answer.json["offset"]) == (422, "source_mismatch", 0)
        message = answer.json["error"]["message"]
        assert sha256(data) in message
        assert sha256(other) in message
        model = model_of(api, model_id)
        assert model["state"] == "failed"
        assert model["error"]["code"] == "source_mismatch"
        file = model["files"][0]
        assert (file["state"], file["offset"], file["verified_bytes"]) == ("failed", 0, 0)
        assert file["error"]["message"] == message
        assert sha256(data) not in partials(either)
        assert sha256(other) not in blobs(either)
    assert piece(api, model_id, 0, data[:100]).ok()["state"] == "partial"
    model = model_of(api, model_id)
    assert (model["state"], model["error"], model["files"][0]["error"]) == ("registered", None, None)
    assert piece(api, model_id, 100, data[100:]).ok()["state"] == "verified"
    assert model_of(api, model_id)["state"] == "ready"


def test_a_model_that_is_not_verified_is_not_placed(api: Http) -> None:
    model_id = registered(api, random_bytes(7))
    assert piece(api, model_id, 0, b"another").code == "source_mismatch"
    preview = next(one for one in operations() if one.path.endswith("/inference/preview"))
    assert preview.body is not None
    spec = {**example(preview.body), "model_id": model_id}
    for path in ("/inference/preview", "/inference"):
        assert api("POST", path, spec).code == "model_not_ready"


# Hashing.


def sparse(made: Installation, api: Http, digest: str) -> tuple[str, Callable[[], Answer]]:
    """A model whose one file is large and costs nothing to make, and the call that has it hashed."""
    document = manifest_of(b"?", name=f"sparse {digest[:4]}")
    document["files"][0].update(bytes=SPARSE_BYTES, sha256=digest)
    model_id = api("POST", "/models", document).ok(201)["id"]
    file = made.directory / "content" / "incoming" / digest
    file.touch()
    os.truncate(file, SPARSE_BYTES)
    owner = file.parent.stat()
    os.chown(file, owner.st_uid, owner.st_gid)
    return model_id, lambda: api("POST", f"/models/{model_id}/files/0/adopt", {"name": digest})


def test_nothing_waits_for_a_file_that_is_being_hashed(made: Installation, api: Http) -> None:
    model_id, adopt = sparse(made, api, "0" * 64)
    before = [lag for lag, _ in watched(api, model_id, lambda: time.sleep(1.0))]
    seen = watched(api, model_id, adopt)
    hashing = [(lag, model["files"][0]) for lag, model in seen if model["state"] == "verifying"]
    assert len(hashing) >= 5, "it was over before it could be looked at"
    for _, file in hashing:
        assert (file["state"], file["offset"]) == ("verifying", SPARSE_BYTES)
    counted = [file["verified_bytes"] for _, file in hashing]
    assert counted == sorted(counted)
    assert 0 < counted[-1] <= SPARSE_BYTES
    # Milliseconds on a machine of one's own. This one may be busy with other things, which the time before
    # shows; a hash on the event loop would take as long as the whole file does.
    assert p99([lag for lag, _ in hashing]) < 0.25 + 4 * p99(before)
    assert model_of(api, model_id)["state"] == "failed"  # not the digest of so many zeros


def watched(api: Http, model_id: str, work: Callable[[], object]) -> list[tuple[float, Any]]:
    """What /health took, and the model as it was then, over and over while the work is done."""
    seen: list[tuple[float, Any]] = []
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        began = time.monotonic()
        api("GET", "/health").ok()
        seen.append((time.monotonic() - began, model_of(api, model_id)))
    thread.join()
    return seen


def p99(lags: list[float]) -> float:
    return sorted(lags)[len(lags) * 99 // 100]


def test_a_file_that_is_being_hashed_takes_no_bytes(made: Installation, api: Http) -> None:
    model_id, adopt = sparse(made, api, "1" * 64)
    adopting = threading.Thread(target=adopt)
    adopting.start()
    made.until(lambda: file_of(api, model_id)["state"] == "verifying", "the file is being hashed")
    assert api("DELETE", f"/models/{model_id}").code == "model_busy"
    answer = piece(api, model_id, SPARSE_BYTES, b"")
    assert answer.status in (409, 422)  # it waited for the verdict, or was told to
    adopting.join()
    assert file_of(api, model_id)["state"] == "failed"
    assert api("DELETE", f"/models/{model_id}").ok()

"""Acquisition through a running controller from a scripted source: every fault of the cases, by its row."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ficc.content.store import ContentStore, Key
from support import source as sources
from support.registry import ATTEMPTS_MAX, RANGE_BYTES, STALL_SECONDS, Registry
from support.source import Behaviour, Source

SIZE = (3 << 20) + 12345
RANGES = range(0, SIZE, RANGE_BYTES)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Iterator[Registry]:
    made = Registry(tmp_path_factory.mktemp("ficc"), source)
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


@pytest.fixture
def own(tmp_path: Path, source: Source) -> Iterator[Callable[..., Registry]]:
    """Controllers of one test, with settings of their own."""
    made: list[Registry] = []

    def start(**settings: str) -> Registry:
        one = Registry(tmp_path / f"ficc{len(made)}", source, **settings)
        made.append(one)
        one.start("controller")
        return one

    yield start
    for one in made:
        one.stop()


def body_of(size: int = SIZE) -> bytes:
    return os.urandom(size)


def asked(registry: Registry, model: dict[str, Any], index: int = 0) -> list[str]:
    """The ranges that were asked for."""
    return [request.headers["range"] for request in registry.source.asked(registry.path(model, index))]


# The straight way.


def test_bounded_ranges_one_after_the_other_bring_the_very_bytes(registry: Registry) -> None:
    body = body_of()
    model = registry.register(body)
    answer = registry.acquire(model)
    assert answer.status == 202
    assert answer.json["state"] in ("acquiring", "verifying", "ready")
    ready = registry.becomes(model, "ready", "failed")
    assert ready["error"] is None
    assert ready["bytes_durable"] == SIZE
    assert registry.blob(body).read_bytes() == body
    assert asked(registry, model) == [f"bytes={at}-{min(SIZE, at + RANGE_BYTES) - 1}" for at in RANGES]
    first = registry.source.asked(registry.path(model))[0]
    assert first.headers["accept-encoding"] == "identity"
    assert not {"authorization", "cookie"} & set(first.headers)
    assert registry.acquire(model).json["state"] == "ready", "asked again, a ready model stays as it is"


def test_several_files_are_fetched_at_once(registry: Registry) -> None:
    model = registry.register(*(body_of(2 << 20) for _ in range(5)))
    for index in range(5):
        registry.source.always(registry.path(model, index), sources.trickle(64 << 10, 0.01))
    registry.acquire(model)
    most = 0

    def look() -> bool:
        nonlocal most
        now = registry.model(model)
        most = max(most, sum(file["state"] == "partial" for file in now["files"]))
        return bool(now["state"] == "ready")

    registry.until(look, "the model is ready")
    assert 2 <= most <= 4, "acquisition.files_max is 4"


def test_files_of_no_bytes_need_no_source(registry: Registry) -> None:
    model = registry.register(b"", urls=[None])
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"


def test_a_file_without_a_source_is_named(registry: Registry) -> None:
    model = registry.register(body_of(10), urls=[None])
    answer = registry.acquire(model)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "files[0].url")
    assert registry.model(model)["state"] == "registered"


def test_what_was_uploaded_is_not_fetched_again(registry: Registry) -> None:
    body = body_of(4096)
    model = registry.register(body)
    assert registry.http.octets(model["id"], 0, 0, body[:1000]).status == 200
    registry.acquire(model)
    registry.becomes(model, "ready")
    assert asked(registry, model) == ["bytes=1000-4095"]


# Faults of a source that a download survives.

SURVIVED: list[tuple[str, list[Behaviour], str]] = [
    ("a2_the_whole_file_where_the_rest_was_asked_for", [sources.normal(), sources.ignore_range()], "0-"),
    ("a3_another_start", [sources.normal(), sources.wrong_start(-100)], ""),
    ("a4_a_clean_end_before_the_length", [sources.close_early(300_000)], ""),
    ("a4_a_broken_connection", [sources.close_early(300_000, "reset")], ""),
    ("a5_an_encoded_answer", [sources.gzipped()], ""),
    ("a6_another_entity_tag", [sources.normal(), sources.etag('"v2"')], ""),
    ("a8_silence_in_the_body", [sources.stall(100_000)], ""),
    ("a8_not_even_a_head", [sources.silent()], ""),
    ("a_503_with_a_time", [sources.status(503, retry_after="1")], ""),
    ("a_429", [sources.status(429)], ""),
    ("no_length_told", [sources.chunked()], ""),
]


@pytest.mark.parametrize("faults", [pytest.param(f, id=name) for name, f, _ in SURVIVED])
def test_a_download_survives(registry: Registry, faults: list[Behaviour]) -> None:
    body = body_of()
    model = registry.register(body)
    registry.source.script(registry.path(model), *faults)
    registry.acquire(model)
    ready = registry.becomes(model, "ready", "failed")
    assert ready["error"] is None
    assert registry.blob(body).read_bytes() == body


def test_a1_a_partial_of_full_length_is_verified_without_a_request(own: Callable[..., Registry]) -> None:
    """Every byte is there and the source would answer 416, or is not there any more."""
    registry = own()
    body = body_of(4096)
    model = registry.register(body)
    registry.kill("controller")
    digest = hashlib.sha256(body).hexdigest()
    _make_partial(registry, model, digest, body)
    registry.start("controller")
    assert registry.offset(model) == len(body)
    registry.source.always(registry.path(model), sources.unsatisfied(None))
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"
    assert asked(registry, model) == []


def _make_partial(registry: Registry, model: dict[str, Any], digest: str, body: bytes) -> None:
    """As a crash between the last byte and its verification leaves it."""
    database = registry.directory / "controller" / "ficc.sqlite"
    with sqlite3.connect(database) as connection:
        (project_id,) = connection.execute("SELECT project_id FROM models").fetchone()
        connection.execute(
            "UPDATE contents SET state = 'partial', offset = ? WHERE sha256 = ?", (len(body), digest)
        )
    store = ContentStore(registry.directory / "content", 0)
    key = Key(project_id, digest)
    store.write(key, 0, body)
    owner = (registry.directory / "content").stat()
    for path in (store.partial(key), *store.partial(key).parents):
        if path == registry.directory / "content":
            break
        os.chown(path, owner.st_uid, owner.st_gid)


def test_a2_a_restart_says_so_and_appends_nothing(registry: Registry) -> None:
    body = body_of()
    model = registry.register(body)
    path = registry.path(model)
    registry.source.script(path, sources.normal(), sources.ignore_range())
    registry.source.always(path, sources.trickle(32 << 10, 0.005))
    registry.source.script(path)
    seen: list[str] = []

    def look() -> bool:
        now = registry.model(model)
        error = now["files"][0]["error"]
        if error is not None:
            seen.append(error["code"])
        return bool(now["state"] == "ready")

    registry.acquire(model)
    registry.until(look, "the model is ready")
    assert registry.blob(body).read_bytes() == body
    assert set(seen) <= {"range_unsupported"}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param(sources.wrong_total(SIZE + 1), "source_mismatch", id="a3_another_total"),
        pytest.param(sources.unsatisfied(100), "source_mismatch", id="a1_416_of_a_shorter_file"),
        pytest.param(sources.one_more(), "source_mismatch", id="a_byte_more_than_declared"),
        pytest.param(sources.status(404), "source_unavailable", id="404"),
        pytest.param(sources.status(403), "source_unavailable", id="403"),
        pytest.param(sources.stall(), "stalled", id="a8_silence_each_time"),
        pytest.param(sources.gzipped(), "source_unavailable", id="a5_encoded_each_time"),
        pytest.param(sources.redirect("http://localhost/x"), "source_refused", id="a21_redirect_to_http"),
        pytest.param(sources.redirect("https://169.254.169.254/x"), "source_refused", id="a21_link_local"),
    ],
)
def test_a_download_ends_failed_with_its_code(registry: Registry, fault: Behaviour, code: str) -> None:
    model = registry.register(body_of())
    registry.source.always(registry.path(model), fault)
    registry.acquire(model)
    failed = registry.becomes(model, "failed", "ready")
    assert failed["state"] == "failed"
    assert failed["error"]["code"] == code
    assert failed["error"]["message"].startswith("0.safetensors: ")
    assert len(asked(registry, model)) <= max(ATTEMPTS_MAX, len(RANGES))

    registry.source.always(registry.path(model), None)
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready", "acquiring again goes on"


def test_a8_progress_begins_the_count_of_attempts_anew(registry: Registry) -> None:
    """More breaks than attempts, each after some bytes."""
    body = body_of()
    model = registry.register(body)
    faults = [sources.close_early(200_000) for _ in range(2 * ATTEMPTS_MAX)]
    registry.source.script(registry.path(model), *faults)
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"
    assert registry.blob(body).read_bytes() == body


def test_a8_a_source_that_sends_a_byte_now_and_then_has_stalled(registry: Registry) -> None:
    """Though each attempt makes some of them durable."""
    body = body_of(100_000)
    model = registry.register(body)
    registry.source.always(registry.path(model), sources.trickle(1, STALL_SECONDS / 10))
    registry.acquire(model)
    failed = registry.becomes(model, "failed", "ready")
    assert (failed["state"], failed["error"]["code"]) == ("failed", "stalled")
    assert "acquisition.bytes_per_second_min" in failed["error"]["message"]
    assert 0 < failed["bytes_durable"] < 1000
    ranges = asked(registry, model)
    assert len(ranges) == ATTEMPTS_MAX
    assert ranges[-1] != ranges[0], "each goes on from the durable offset"

    registry.source.always(registry.path(model), None)
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"
    assert registry.blob(body).read_bytes() == body


def test_a11_wrong_bytes_are_fetched_once_more(registry: Registry) -> None:
    body = body_of(100_000)
    model = registry.register(body)
    registry.source.script(registry.path(model), sources.corrupt(5000))
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"
    assert asked(registry, model) == ["bytes=0-99999"] * 2


def test_a11_wrong_bytes_twice_fail_and_a25_are_never_usable(registry: Registry) -> None:
    body = body_of(100_000)
    model = registry.register(body)
    registry.source.always(registry.path(model), sources.corrupt(5000))
    registry.acquire(model)
    failed = registry.becomes(model, "failed", "ready")
    wrong = bytearray(body)
    wrong[5000] ^= 0xFF
    assert failed["error"]["code"] == "source_mismatch"
    for digest in (hashlib.sha256(body).hexdigest(), hashlib.sha256(wrong).hexdigest()):
        assert digest in failed["error"]["message"]
    assert (failed["files"][0]["state"], failed["files"][0]["offset"]) == ("failed", 0)
    assert len(asked(registry, model)) == 2, "one automatic refetch, then it stays failed"
    assert not registry.blob(body).exists()

    registry.source.always(registry.path(model), None)
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"


# Pause.


def test_a15_pause_keeps_the_durable_offset_and_only_acquire_goes_on(registry: Registry) -> None:
    body = body_of()
    model = registry.register(body)
    registry.source.always(registry.path(model), sources.trickle(64 << 10, 0.05))
    registry.acquire(model)
    registry.until(lambda: registry.offset(model) > 0, "some bytes are durable")
    answer = registry.pause(model)
    assert answer.status == 202
    assert answer.json["state"] in ("pausing", "paused")
    registry.becomes(model, "paused")
    offset, count = registry.offset(model), len(asked(registry, model))
    assert 0 < offset < SIZE
    assert registry.pause(model).json["state"] == "paused"
    time.sleep(STALL_SECONDS + 1)  # no timer brings it back
    assert (registry.model(model)["state"], registry.offset(model)) == ("paused", offset)
    assert len(asked(registry, model)) == count
    registry.source.always(registry.path(model), None)
    registry.acquire(model)
    registry.becomes(model, "ready")
    assert asked(registry, model)[count].startswith(f"bytes={offset}-")
    assert registry.blob(body).read_bytes() == body


def test_a15_pause_ends_the_wait_for_another_try(registry: Registry) -> None:
    model = registry.register(body_of())
    registry.source.always(registry.path(model), sources.status(503, retry_after="200"))
    registry.acquire(model)

    def waits() -> Any:
        return registry.model(model)["files"][0]["error"]

    note = registry.until(waits, "it says what it waits for")
    assert note["code"] == "source_unavailable"
    assert "asked again in" in note["message"]
    registry.pause(model)
    registry.becomes(model, "paused")
    assert registry.model(model)["files"][0]["error"] is None
    assert len(asked(registry, model)) == 1


def test_only_a_download_can_be_paused(registry: Registry) -> None:
    model = registry.register(body_of(100))
    answer = registry.pause(model)
    assert (answer.status, answer.code) == (409, "action_not_allowed")


def test_a19_the_offset_counts_durable_bytes_and_never_falls(registry: Registry) -> None:
    body = body_of()
    model = registry.register(body)
    registry.source.always(registry.path(model), sources.trickle(32 << 10, 0.005))
    registry.acquire(model)
    offsets: list[int] = []

    def look() -> bool:
        now = registry.model(model)
        offsets.append(now["files"][0]["offset"])
        return bool(now["state"] == "ready")

    registry.until(look, "the model is ready")
    assert offsets == sorted(offsets)
    assert offsets[-1] == SIZE


# Room.


def test_a10_what_cannot_fit_is_refused_at_once_with_the_numbers(own: Callable[..., Registry]) -> None:
    registry = own(FICC_CONTENT_RESERVE_BYTES=str(1 << 50))
    model = registry.register(body_of(1000))
    answer = registry.acquire(model)
    assert (answer.status, answer.code) == (507, "disk_full")
    error = answer.json["error"]
    assert (error["bytes_needed"], error["bytes_admitted"]) == (1000, 0)
    assert error["bytes_free"] < 1000
    assert registry.model(model)["state"] == "registered"
    assert asked(registry, model) == []


def test_a10_admitted_downloads_count(own: Callable[..., Registry]) -> None:
    registry = own()
    free = os.statvfs(registry.directory)
    most = free.f_bavail * free.f_frsize
    url = registry.source.serve("/huge", b"x")
    registry.source.always("/huge", sources.status(503, retry_after="200"))

    def huge(share: float) -> dict[str, Any]:
        digest = os.urandom(32).hex()
        entry = {"name": "a", "bytes": int(most * share), "sha256": digest, "url": url}
        manifest = {"name": digest[:8], "format": "safetensors", "files": [entry]}
        found: dict[str, Any] = registry.http("POST", "/models", manifest).ok(201)
        return found

    first, second = huge(0.6), huge(0.6)
    assert registry.acquire(first).status == 202
    answer = registry.acquire(second)
    assert (answer.status, answer.code) == (507, "disk_full")
    assert answer.json["error"]["bytes_admitted"] == first["bytes_total"]
    registry.pause(first)
    registry.becomes(first, "paused")
    assert registry.acquire(second).status == 202


def test_the_projects_quota(own: Callable[..., Registry]) -> None:
    registry = own(FICC_ACQUISITION_PROJECT_QUOTA_BYTES="1500")
    first, second = registry.register(body_of(1000)), registry.register(body_of(501))
    registry.acquire(first)
    registry.becomes(first, "ready")
    answer = registry.acquire(second)
    assert (answer.status, answer.code) == (507, "quota_exceeded")
    error = answer.json["error"]
    assert (error["bytes_held"], error["bytes_added"], error["quota_bytes"]) == (1000, 501, 1500)
    third = registry.register(body_of(500))
    assert registry.acquire(third).status == 202


# Walls.


@pytest.mark.parametrize(
    "url", ["https://192.168.1.1/x", "https://10.0.0.1:8443/x", "https://[::ffff:10.0.0.1]/x"]
)
def test_a21_a_source_behind_the_walls_is_never_asked(registry: Registry, url: str) -> None:
    model = registry.register(body_of(10), urls=[url])
    answer = registry.acquire(model)
    if answer.status == 202:
        failed = registry.becomes(model, "failed")
        assert failed["error"]["code"] in ("source_refused", "source_unavailable")
    else:
        assert (answer.status, answer.code) == (422, "source_refused")


def test_a20_nothing_signed_is_stored_or_logged(registry: Registry) -> None:
    secret = "X-Signature-" + os.urandom(8).hex()
    body = body_of(2 << 20)
    model = registry.register(body)
    target = registry.source.serve(f"/signed?{secret}", body)
    registry.source.always(registry.path(model), sources.redirect(target))
    registry.source.script(f"/signed?{secret}", sources.close_early(100_000), sources.status(503))
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["state"] == "ready"
    for path in registry.directory.rglob("*"):
        if path.is_file() and path.stat().st_size < 64 << 20:
            assert secret.encode() not in path.read_bytes(), path


# Restarts.


def test_a7_killed_in_a_download_it_goes_on_from_its_durable_offset(own: Callable[..., Registry]) -> None:
    registry = own()
    body = body_of()
    model = registry.register(body)
    registry.source.always(registry.path(model), sources.trickle(64 << 10, 0.02))
    registry.acquire(model)
    registry.until(lambda: registry.offset(model) > RANGE_BYTES, "some ranges are durable")
    registry.kill("controller")
    count = len(asked(registry, model))
    registry.start("controller")
    registry.becomes(model, "ready")
    resumed = registry.source.asked(registry.path(model))[count]
    assert not resumed.headers["range"].startswith("bytes=0-")
    assert resumed.headers["if-range"] == '"v1"', "and of the same file"
    assert registry.blob(body).read_bytes() == body


def test_an_orderly_restart_goes_on(own: Callable[..., Registry]) -> None:
    registry = own()
    body = body_of()
    model = registry.register(body)
    registry.source.always(registry.path(model), sources.trickle(64 << 10, 0.02))
    registry.acquire(model)
    registry.until(lambda: registry.offset(model) > 0, "some bytes are durable")
    registry.kill("controller", signal.SIGTERM)
    registry.start("controller")
    registry.becomes(model, "ready")
    assert registry.blob(body).read_bytes() == body


def test_removing_a_model_that_is_fetched_is_refused_until_it_is_paused(registry: Registry) -> None:
    model = registry.register(body_of())
    registry.source.always(registry.path(model), sources.trickle(64 << 10, 0.05))
    registry.acquire(model)
    registry.until(lambda: registry.offset(model) > 0, "some bytes are durable")
    answer = registry.http("DELETE", f"/models/{model['id']}")
    assert (answer.status, answer.code) == (409, "model_busy")
    registry.pause(model)
    registry.becomes(model, "paused")
    assert registry.http("DELETE", f"/models/{model['id']}").status == 200


def test_the_bandwidth_is_bounded(own: Callable[..., Registry]) -> None:
    """Twice as many bytes as a second brings take at least most of a second."""
    registry = own(FICC_ACQUISITION_BYTES_PER_SECOND_MAX=str(1 << 20))
    model = registry.register(body_of(1 << 20), body_of(1 << 20))
    began = time.monotonic()
    registry.acquire(model)
    registry.becomes(model, "ready")
    assert time.monotonic() - began > 0.9


@pytest.mark.root
def test_a9_a_disk_that_fills_up_loses_nothing(own: Callable[..., Registry]) -> None:
    """It had room when it was admitted; then somebody else took it."""
    registry = own()
    registry.kill("controller")
    content = registry.directory / "content"
    owner = content.stat()
    options = f"size=12m,mode=700,uid={owner.st_uid},gid={owner.st_gid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(content)], check=True)
    try:
        registry.start("controller")
        body = body_of(6 << 20)
        model = registry.register(body)
        registry.source.always(registry.path(model), sources.trickle(64 << 10, 0.03))
        registry.acquire(model)
        registry.until(lambda: registry.offset(model) > 0, "some bytes are durable")
        filler = content / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(64 << 10)):
                pass
        failed = registry.becomes(model, "failed", "ready")
        assert failed["error"]["code"] == "disk_full"
        offset = failed["files"][0]["offset"]
        assert 0 < offset < len(body)
        filler.unlink()
        registry.source.always(registry.path(model), None)
        count = len(asked(registry, model))
        registry.acquire(model)
        assert registry.becomes(model, "ready", "failed")["state"] == "ready"
        assert asked(registry, model)[count].startswith(f"bytes={offset}-")
        assert registry.blob(body).read_bytes() == body
    finally:
        registry.stop()
        subprocess.run(["umount", str(content)], check=True)

"""What the contract says of downloads and of the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ficc.controller.operations.hub import STEP_BYTES
from ficc.domain.access import SCOPES
from support import source as sources
from support.gguf_files import encode, tiny_llama
from support.http import caller_with
from support.hub import StandInHub
from support.registry import RANGE_BYTES, Registry
from support.source import Source

BYTES = 3 * RANGE_BYTES


@pytest.fixture(scope="module")
def hub(source: Source) -> StandInHub:
    made = StandInHub(source)
    made.add("owner/name", {"tiny.gguf": encode(*tiny_llama(layers=8, width=256))})
    return made


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, source: Source, hub: StandInHub) -> Iterator[Registry]:
    made = Registry(tmp_path_factory.mktemp("ficc"), source, FICC_HUB_ENDPOINT=hub.endpoint)
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


@pytest.mark.contract("C-M4")
def test_acquire_fetches_in_bounded_requests_and_resumes_where_it_was(registry: Registry) -> None:
    body = os.urandom(BYTES)
    model = registry.register(body)
    path = registry.path(model)
    registry.source.script(path, sources.normal(), sources.status(404))
    assert registry.acquire(model).status == 202
    failed = registry.becomes(model, "failed")
    assert failed["files"][0]["offset"] == RANGE_BYTES
    assert registry.acquire(model).status == 202
    registry.becomes(model, "ready")
    ranges = [request.headers["range"] for request in registry.source.asked(path)]
    ends = [f"bytes={at}-{at + RANGE_BYTES - 1}" for at in range(0, BYTES, RANGE_BYTES)]
    assert ranges == [ends[0], ends[1], *ends[1:]]
    assert registry.blob(body).read_bytes() == body


@pytest.mark.contract("C-M4")
def test_acquire_takes_https_and_nothing_else(registry: Registry) -> None:
    file = {"name": "a", "bytes": 1, "sha256": "0" * 64, "url": "http://localhost/a"}
    answer = registry.http("POST", "/models", {"name": "plain", "format": "safetensors", "files": [file]})
    assert (answer.status, answer.param) == (422, "files[0].url")


@pytest.mark.contract("C-M5")
def test_pause_keeps_the_durable_offset(registry: Registry) -> None:
    model = registry.register(os.urandom(BYTES))
    registry.source.always(registry.path(model), sources.trickle(32 << 10, 0.05))
    registry.acquire(model)
    registry.until(lambda: registry.offset(model) > 0, "some bytes are durable")
    before = registry.offset(model)
    assert registry.pause(model).status == 202
    paused = registry.becomes(model, "paused")
    offset = paused["files"][0]["offset"]
    assert before <= offset < BYTES
    assert registry.offset(model) == offset
    registry.source.always(registry.path(model), None)


@pytest.mark.contract("C-M17")
def test_a_partial_that_is_whole_is_verified_without_a_request(registry: Registry) -> None:
    """Wrong bytes of the right length: the hash is taken, and only then are bytes asked for."""
    body = os.urandom(1000)
    model = registry.register(body)
    wrong = b"x" * len(body)
    answer = registry.http.octets(model["id"], 0, 0, wrong)
    assert (answer.status, answer.code) == (422, "source_mismatch")
    assert registry.source.asked(registry.path(model)) == []
    registry.acquire(model)
    registry.becomes(model, "ready")
    assert len(registry.source.asked(registry.path(model))) == 1


@pytest.mark.contract("C-M11")
def test_a_preview_reads_headers_and_no_weights(registry: Registry) -> None:
    wanted = {"repository": "owner/name", "revision": "main", "filename": "tiny.gguf", "licence": "mit"}
    answer = registry.http("POST", "/models/hub-preview", wanted).ok()
    (one,) = answer["manifests"]
    size = one["manifest"]["files"][0]["bytes"]
    assert answer["bytes_read"] <= one["gguf"]["header_bytes"] + STEP_BYTES < size
    assert one["manifest"]["licence"] == "mit"
    assert registry.http("POST", "/models", one["manifest"]).status == 201


@pytest.mark.contract("C-H5")
@pytest.mark.parametrize("action", ["acquire", "pause", "hub-preview"])
def test_downloads_take_models_manage_and_no_other_scope(registry: Registry, action: str) -> None:
    model = registry.register(os.urandom(10))
    body = {"repository": "owner/name", "revision": "main"} if action == "hub-preview" else None
    path = "/models/hub-preview" if action == "hub-preview" else f"/models/{model['id']}/{action}"
    others = caller_with(registry, *(set(SCOPES) - {"models:manage"}))
    answer = others("POST", path, body)
    assert (answer.status, answer.code, answer.param) == (403, "denied", "models:manage")
    answer = caller_with(registry, "models:manage")("POST", path, body)
    assert answer.status == {"acquire": 202, "pause": 409, "hub-preview": 200}[action]

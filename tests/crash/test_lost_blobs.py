"""A blob that somebody removed or damaged behind our back: no engine starts from it, the model says so, and its bytes
can be brought again. Nothing that was promised to be exactly these weights is ever launched with others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path_factory.mktemp("lost")) as made:
        yield made


@pytest.fixture
def model(installation: ScriptedInstallation) -> dict[str, Any]:
    """Ready, whatever the test before did to it."""
    return installation.model()


def blob(installation: ScriptedInstallation, model: dict[str, Any]) -> Path:
    sha256 = model["files"][0]["sha256"]
    return installation.directory / "content" / "blobs" / sha256[:2] / sha256


def damage(path: Path) -> None:
    """Other bytes of the same number and mode, under the same time of change as far as one can set it."""
    data, times = bytearray(path.read_bytes()), path.stat()
    data[-2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)

    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def state(installation: ScriptedInstallation, model: dict[str, Any]) -> tuple[str, str | None, str, int]:
    found = installation.http("GET", f"/models/{model['id']}").ok()
    error, file = found["error"], found["files"][0]
    return found["state"], error and error["code"], file["state"], file["offset"]


LOST = ("registered", "content_lost", "missing", 0)


def stopped(installation: ScriptedInstallation, alias: str) -> str:
    service_id = installation.service(alias)["id"]
    installation.stopped(service_id)
    return str(service_id)


def test_a_start_finds_its_blob_gone_and_an_upload_brings_it_back(
    installation: ScriptedInstallation, model: dict[str, Any]
) -> None:
    service_id = stopped(installation, "gone")
    spec = installation.spec("another")
    blob(installation, model).unlink()
    refused = installation.control(service_id, "start")
    assert (refused.status, refused.code) == (409, "model_not_ready")
    assert "gone from the content store" in refused.json["error"]["message"]
    assert state(installation, model) == LOST
    assert installation.http("POST", "/inference/preview", spec).code == "model_not_ready"
    assert installation.http("GET", "/content").ok()["items"] == []

    data = (installation.directory / "engine.gguf").read_bytes()
    assert installation.http.octets(model["id"], 0, 0, data).ok()["state"] == "verified"
    assert state(installation, model) == ("ready", None, "verified", len(data))
    installation.control(service_id, "start").ok(202)
    assert installation.settled(service_id, "ready", "failed")["state"] == "ready"
    installation.remove(service_id)


def test_a_blob_that_is_gone_when_the_controller_starts(
    installation: ScriptedInstallation, model: dict[str, Any]
) -> None:
    installation.kill("controller")
    blob(installation, model).unlink()
    installation.start("controller")
    assert state(installation, model) == LOST


def test_other_bytes_of_the_same_size_are_never_launched(
    installation: ScriptedInstallation, model: dict[str, Any]
) -> None:
    service_id = stopped(installation, "damaged")
    path = blob(installation, model)
    damage(path)
    installation.control(service_id, "start").ok(202)
    failed = installation.settled(service_id, "ready", "failed")
    assert (failed["state"], failed["reason"]["code"]) == ("failed", "source_mismatch")
    assert failed["reason"]["message"].count(model["files"][0]["sha256"]) == 1
    installation.until(lambda: state(installation, model) == LOST, "the model says that it lost its file")
    assert not path.exists()
    assert installation.model()["state"] == "ready"
    installation.control(service_id, "start").ok(202)
    assert installation.settled(service_id, "ready", "failed")["state"] == "ready"
    installation.remove(service_id)


def test_every_project_that_had_it_has_lost_it(
    installation: ScriptedInstallation, model: dict[str, Any]
) -> None:
    """And a second file of the model stays verified."""
    other = b"another file"
    files = [
        {key: model["manifest"]["files"][0][key] for key in ("name", "bytes", "sha256")},
        {"name": "other.gguf", "bytes": len(other), "sha256": hashlib.sha256(other).hexdigest()},
    ]
    manifest = {"name": "pair", "format": "safetensors", "files": files}
    pair = installation.http("POST", "/models", manifest).ok(201)
    assert installation.http.octets(pair["id"], 1, 0, other).ok()["state"] == "verified"
    blob(installation, model).unlink()
    installation.kill("controller")
    installation.start("controller")
    found = installation.http("GET", f"/models/{pair['id']}").ok()
    assert [file["state"] for file in found["files"]] == ["missing", "verified"], json.dumps(found)
    assert found["state"] == "registered"
    assert state(installation, model) == LOST

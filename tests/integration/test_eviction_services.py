"""Services that start while their model is evicted, over HTTP with a real executor on both databases: the start
wins and the model stays, or the eviction wins and the start is refused (A23)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from contract.scripted import HERE, ScriptedInstallation
from support.http import Answer
from support.rows import random_bytes
from support.uploads import blobs

pytestmark = pytest.mark.timeout(300)

DELAYS_SECONDS = (0.0, 0.002, -0.002, 0.005, -0.005, 0.01)
"""By how much the eviction comes after the start."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def installation(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    database_settings: Callable[[str], dict[str, str]],
) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(
        tmp_path_factory.mktemp("ficc"), settings=database_settings(request.param)
    ) as made:
        yield made


def model(installation: ScriptedInstallation) -> dict[str, Any]:
    """A verified model whose bytes are no other's."""
    name = random_bytes(4).hex()
    file = installation.directory / f"{name}.gguf"
    file.write_bytes((HERE / "engine.py").read_bytes() + f"\n# {name}\n".encode())
    return installation.add_model(file, name, ["chat"])


def begin(installation: ScriptedInstallation, found: dict[str, Any]) -> Answer:
    spec = installation.spec(f"a{random_bytes(4).hex()}", model_id=found["id"])
    return installation.http("POST", "/inference", spec)


def evict(installation: ScriptedInstallation, found: dict[str, Any]) -> Answer:
    return installation.http("DELETE", f"/models/{found['id']}", evict="true")


def is_stored(installation: ScriptedInstallation, found: dict[str, Any]) -> bool:
    return found["files"][0]["sha256"] in blobs(installation)


def content(installation: ScriptedInstallation, found: dict[str, Any]) -> dict[str, Any]:
    items = installation.http("GET", "/content").ok()["items"]
    return next(item for item in items if item["sha256"] == found["files"][0]["sha256"])


def test_a_service_holds_its_model_in_whatever_state_it_is(installation: ScriptedInstallation) -> None:
    found = model(installation)
    service_id = begin(installation, found).ok(202)["id"]
    used_at = content(installation, found)["last_used_at"]
    assert used_at is not None

    def held() -> None:
        answer = evict(installation, found)
        assert (answer.status, answer.code) == (409, "model_referenced")
        assert answer.json["error"]["services"] == [service_id]
        view = installation.http("GET", f"/models/{found['id']}/eviction").ok()
        assert (view["allowed"], view["services"]) == (False, [service_id])
        assert view["bytes_freed"] == found["bytes_total"]
        assert is_stored(installation, found)

    held()  # it starts
    installation.settled(service_id, "ready")
    held()
    installation.stopped(service_id)
    held()
    assert content(installation, found)["last_used_at"] > used_at
    installation.remove(service_id)
    assert evict(installation, found).ok()["bytes_freed"] == found["bytes_total"]
    assert not is_stored(installation, found)


def test_an_evicted_model_is_not_started(installation: ScriptedInstallation) -> None:
    found = model(installation)
    evict(installation, found).ok()
    assert begin(installation, found).code == "not_found"


def test_a_replacement_holds_the_model_it_turns_to_and_lets_go_of_the_other(
    installation: ScriptedInstallation,
) -> None:
    first, second = model(installation), model(installation)
    service_id = begin(installation, first).ok(202)["id"]
    record = installation.stopped(service_id)
    spec = installation.spec(record["alias"], model_id=second["id"])
    change = {"revision": record["revision"], "spec": spec}
    installation.http("PUT", f"/inference/{service_id}", change).ok(202)
    assert evict(installation, second).code == "model_referenced"
    assert evict(installation, first).ok()["bytes_freed"] == first["bytes_total"]
    installation.settled(service_id, "ready")
    installation.remove(service_id)
    evict(installation, second).ok()


@pytest.mark.parametrize("delay_seconds", DELAYS_SECONDS)
def test_a23_a_start_and_an_eviction_at_once(
    installation: ScriptedInstallation, delay_seconds: float
) -> None:
    found = model(installation)

    def late(work: Callable[[ScriptedInstallation, dict[str, Any]], Answer], seconds: float) -> Answer:
        time.sleep(max(0.0, seconds))
        return work(installation, found)

    with ThreadPoolExecutor(2) as threads:
        starting = threads.submit(late, begin, -delay_seconds)
        evicting = threads.submit(late, evict, delay_seconds)
        started, evicted = starting.result(), evicting.result()
    if started.status == 202:
        assert evicted.code == "model_referenced"
        installation.settled(started.json["id"], "ready")  # on bytes that are there
        installation.remove(started.json["id"])
        evict(installation, found).ok()
    else:
        assert started.code in ("not_found", "model_not_ready")
        assert evicted.ok()["bytes_freed"] == found["bytes_total"]
        assert installation.http("GET", "/inference").ok()["items"] == []
    assert not is_stored(installation, found)
